"""Looks through a JSON object of any size in bounded memory, for a few members near its top.

Bytes come in pieces of any size. The text is checked as strictly as the standard library's `json` checks it (which
reads NaN and Infinity too), so that what is found stands where it seems to stand: not within a string, not deeper down,
not in a text that is no JSON. A wanted member that occurs twice is ambiguous: readers differ on which one counts.
"""

from __future__ import annotations

import codecs
import hashlib
import json
import re
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final, NamedTuple, TypeAlias

from app.core.limits import JSON_SCAN_DEPTH_MAX, JSON_SCAN_NUMBER_CHARS_MAX, TEXT_CHARS_MAX

Path: TypeAlias = tuple[str, ...]


class Kind(Enum):
    """What stands at a wanted member, where it is no scalar."""

    OBJECT = "object"
    ARRAY = "array"


class ScanState(Enum):
    READING = "reading"  # so far it may become an object
    COMPLETE = "complete"  # a whole object, and nothing after it
    MALFORMED = "malformed"  # no JSON object, whatever follows
    BEYOND = "beyond"  # deeper, or with longer numbers, than is followed


class _Expect(Enum):
    TOP = 0
    VALUE = 1
    VALUE_OR_END = 2  # after "["
    KEY = 3
    KEY_OR_END = 4  # after "{"
    COLON = 5
    COMMA_OR_END = 6
    NOTHING = 7
    STRING = 8  # within one


class _Frame(NamedTuple):
    """An open container: its end, and its path if members of it are wanted."""

    end: str
    path: Path | None


_SPACE: Final = re.compile(r"[ \t\n\r]*+")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9][0-9]*+)(?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?")
_SCALAR_CHARS: Final = re.compile(r"[-+.0-9A-Za-z]*+")
_WORDS: Final[Mapping[str, Any]] = {
    "true": True,
    "false": False,
    "null": None,
    "NaN": float("nan"),
    "Infinity": float("inf"),
    "-Infinity": float("-inf"),
}
# It cannot fail after a long match: what follows it is looked at afterwards. So no text costs quadratic time.
_IN_STRING: Final = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
_ESCAPE_CHARS_MAX: Final = 6
# Members that no caller asks for are passed over in runs, read by the standard library: up to the last comma that
# ends one.
_RUN_ENDS: Final = (",", "],", "},")
_RUN_TRIES_MAX: Final = 6  # in one text: what is not told by then is looked at sign by sign
_RUN_REST_CHARS_MAX: Final = 4_096


class _Stop(Exception):
    def __init__(self, state: ScanState) -> None:
        self.state = state


class JsonScanner:
    """`feed` the bytes, then `finish`.

    `found` has what stood at the wanted paths: a scalar (the beginning of a text), or a Kind. It counts only when
    `state` is COMPLETE and `is_ambiguous` is false. The bytes of the value at `hashed`, a member of the top, are
    hashed, and kept in `kept` if they are not more than may be kept.
    """

    def __init__(self, wanted: frozenset[Path], *, hashed: str, kept_bytes_max: int = 0) -> None:
        self.state = ScanState.READING
        self.is_ambiguous = False
        self.found: dict[Path, Any] = {}
        self.hashed_bytes = 0
        self.kept = bytearray()
        self._kept_bytes_max = kept_bytes_max
        self._wanted = wanted
        self._parents = frozenset(path[:depth] for path in wanted for depth in range(len(path)))
        self._hashed: Path = (hashed,)
        self._hash = hashlib.sha256()
        self._is_hashing = False
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._left = ""  # the beginning of a token that is not whole yet
        self._expect = _Expect.TOP
        self._open: list[_Frame] = []
        self._here: Path | None = None  # of the member at hand, where it may matter
        self._is_key = False
        self._captured: str | None = None  # of the string at hand, where it matters
        self._run_tries_left = 0
        self._is_after_run = False

    @property
    def hashed_sha256(self) -> str:
        return self._hash.hexdigest()

    def feed(self, piece: bytes | memoryview) -> None:
        if self.state is ScanState.READING:
            try:
                self._scan(self._decoder.decode(piece))
            except UnicodeDecodeError:
                self.state = ScanState.MALFORMED
            except _Stop as stop:
                self.state = stop.state

    def finish(self) -> ScanState:
        """All bytes have come."""
        if self.state is ScanState.READING:
            try:
                self._scan("", is_last=True)
            except _Stop as stop:
                self.state = stop.state
                return self.state
            is_cut = bool(self._left or self._decoder.getstate()[0])
            is_whole = self._expect is _Expect.NOTHING and not is_cut
            self.state = ScanState.COMPLETE if is_whole else ScanState.MALFORMED
        return self.state

    def _scan(self, more: str, *, is_last: bool = False) -> None:
        text = self._left + more
        at, hash_from = 0, 0
        self._run_tries_left = _RUN_TRIES_MAX
        while at < len(text):
            if self._is_after_run:
                self._is_after_run = False
                if len(text) - at < _RUN_REST_CHARS_MAX and not is_last:
                    break  # with what comes next, it may be a run again
            was_hashing = self._is_hashing
            to = self._step(text, at)
            if self._is_hashing and not was_hashing:
                hash_from = _first_sign(text, at)
            elif was_hashing and not self._is_hashing:
                self._hash_text(text[hash_from:to])
            if to == at:
                break  # the rest is the beginning of something
            at = to
        if self._is_hashing:
            self._hash_text(text[hash_from:at])
        self._left = text[at:]

    def _hash_text(self, text: str) -> None:
        raw = text.encode("utf-8")
        self._hash.update(raw)
        self.hashed_bytes += len(raw)
        if self.hashed_bytes <= self._kept_bytes_max:
            self.kept += raw
        else:
            self.kept.clear()

    def _step(self, text: str, at: int) -> int:
        """Take the next token; where it ends, or `at` when it is not whole in the text."""
        if self._expect is _Expect.STRING:
            return self._string_on(text, at)
        start = _first_sign(text, at)
        if start == len(text):
            return start
        sign = text[start]
        match self._expect:
            case _Expect.VALUE | _Expect.VALUE_OR_END:
                return self._value(text, start, sign)
            case _Expect.KEY | _Expect.KEY_OR_END:
                return self._member(text, start, sign)
            case _Expect.COLON if sign == ":":
                self._expect = _Expect.VALUE
            case _Expect.COMMA_OR_END if sign == ",":
                self._expect = _Expect.KEY if self._open[-1].end == "}" else _Expect.VALUE
                self._here = None
            case _Expect.COMMA_OR_END if sign == self._open[-1].end:
                self._close()
            case _Expect.TOP if sign == "{":
                self._open_frame("}", ())
            case _:
                raise _Stop(ScanState.MALFORMED)
        return start + 1

    def _member(self, text: str, at: int, sign: str) -> int:
        frame = self._open[-1]
        if frame.path is None and (to := self._run(text, at)) > at:
            self._expect = _Expect.KEY
            return to
        if sign == "}" and self._expect is _Expect.KEY_OR_END:
            self._close()
        elif sign == '"':
            self._begin_string(is_key=True, captures=frame.path is not None)
        else:
            raise _Stop(ScanState.MALFORMED)
        return at + 1

    def _value(self, text: str, at: int, sign: str) -> int:
        if self._open[-1].end == "]" and (to := self._run(text, at)) > at:
            self._expect = _Expect.VALUE
            return to
        if sign == "]" and self._expect is _Expect.VALUE_OR_END:
            self._close()
            return at + 1
        if sign not in '{["':
            return self._scalar(text, at)
        self._is_hashing = self._is_hashing or self._here == self._hashed
        if sign == '"':
            self._begin_string(is_key=False, captures=self._here is not None)
            return at + 1
        self._note(Kind.OBJECT if sign == "{" else Kind.ARRAY)
        is_parent = sign == "{" and self._here in self._parents
        self._open_frame("}" if sign == "{" else "]", self._here if is_parent else None)
        return at + 1

    def _run(self, text: str, at: int) -> int:
        """Past the comma after the last member that is whole in the text; `at` where that is not told quickly.

        Signs are read from left to right: what is a list of whole members up to a comma is one in any longer text.
        """
        end = self._open[-1].end
        for sign in _RUN_ENDS:
            comma = text.rfind(sign, at) + len(sign) - 1
            if comma <= at or self._run_tries_left == 0:
                continue
            self._run_tries_left -= 1
            try:
                json.loads(("{" if end == "}" else "[") + text[at:comma] + end)
            except (ValueError, RecursionError):
                continue
            self._is_after_run = True
            return comma + 1
        return at

    def _scalar(self, text: str, at: int) -> int:
        """A number or a word. It is whole only when something else follows it."""
        to = _end(_SCALAR_CHARS, text, at)
        if to - at > JSON_SCAN_NUMBER_CHARS_MAX:
            raise _Stop(ScanState.BEYOND)
        if to == len(text):
            return at
        written = text[at:to]
        if written in _WORDS:
            value = _WORDS[written]
        elif _NUMBER.fullmatch(written):
            value = None if self._here is None else json.loads(written)
        else:
            raise _Stop(ScanState.MALFORMED)
        self._note(value)
        if self._here == self._hashed:
            self._hash_text(written)
        self._end_value()
        return to

    def _begin_string(self, *, is_key: bool, captures: bool) -> None:
        self._expect = _Expect.STRING
        self._is_key = is_key
        self._captured = "" if captures else None

    def _string_on(self, text: str, at: int) -> int:
        to = _end(_IN_STRING, text, at)
        if self._captured is not None and len(self._captured) <= TEXT_CHARS_MAX:
            self._captured += text[at:to]
        if to == len(text):
            return to
        if text[to] == '"':
            self._end_string()
            return to + 1
        if text[to] == "\\" and len(text) - to < _ESCAPE_CHARS_MAX:
            return to  # perhaps an escape that is cut
        raise _Stop(ScanState.MALFORMED)

    def _end_string(self) -> None:
        captured = None if self._captured is None else _unescaped(self._captured)
        if self._is_key:
            self._expect = _Expect.COLON
            frame = self._open[-1]
            here = None if frame.path is None or captured is None else (*frame.path, captured)
            self._here = here if here in self._wanted or here in self._parents or here == self._hashed else None
            return
        self._note(captured)
        self._end_value()

    def _note(self, value: Any) -> None:
        if self._here is not None:
            self.is_ambiguous = self.is_ambiguous or self._here in self.found
            self.found[self._here] = value

    def _open_frame(self, end: str, path: Path | None) -> None:
        if len(self._open) == JSON_SCAN_DEPTH_MAX:
            raise _Stop(ScanState.BEYOND)
        self._open.append(_Frame(end, path))
        self._expect = _Expect.KEY_OR_END if end == "}" else _Expect.VALUE_OR_END
        self._here = None

    def _close(self) -> None:
        self._open.pop()
        self._end_value()

    def _end_value(self) -> None:
        self._here = None
        self._expect = _Expect.COMMA_OR_END if self._open else _Expect.NOTHING
        if len(self._open) <= 1:
            self._is_hashing = False


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return at if found is None else found.end()


def _first_sign(text: str, at: int) -> int:
    return _end(_SPACE, text, at)


def _unescaped(written: str) -> str:
    """The text of a string; of a long one the beginning, without an escape that is cut."""
    beginning = written[:TEXT_CHARS_MAX]
    for cut in range(_ESCAPE_CHARS_MAX):
        try:
            text: str = json.loads(f'"{beginning[: len(beginning) - cut]}"')
        except ValueError:
            continue
        return text
    return ""
