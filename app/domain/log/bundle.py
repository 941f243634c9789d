"""The format of an exported bundle: a folder of JSON Lines, and a manifest that is written last.

    manifest.json    what the bundle is, its tree, and the sha256 of every other file; without it, it is unfinished
    entries.jsonl    the entries in the order of the tree, each with its artifact
    heads.jsonl      signed tree heads, the smallest first; the last one is the bundle's tree
    keys.json        the log's verifier keys, for convenience: trust comes from the key that the reader brings
    schemas/         the JSON Schemas of all documents
    blobs/           with `--blobs`: the bytes to which the entries refer, each under its digest

A complete bundle holds every leaf of its tree, so that a reader rebuilds the tree. A partial one (a tenant, a trace, a
run, a time) holds whole streams and the system streams they rest on, and every line proves that it is in the tree. The
bundle of a tenant, of a trace or of a run holds no other tenant's artifacts: of the default tenant's system stream it
holds the entries up to the last key of a gateway or epoch of the log, and of their artifacts these alone. The rest
stands as digests.

System entries that were appended after the last head stand at the end, without a leaf index. They tell what the log is
about to say; no signature covers them, so a verifier rests nothing on them.
"""

from __future__ import annotations

import builtins
import hashlib
import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import orjson

from app.core.canonical import JsonValue, parse_object, read_canonical
from app.core.errors import BundleInvalid, InputMalformed, InputTooLarge
from app.core.limits import (
    BUNDLE_FILES_MAX,
    BUNDLE_LINE_BYTES_MAX,
    BUNDLE_MANIFEST_BYTES_MAX,
    SAFE_INTEGER_MAX,
)
from app.core.merkle import HASH_BYTES, Hash

FORMAT: Final = "tga-bundle/1"
MANIFEST: Final = "manifest.json"
ENTRIES: Final = "entries.jsonl"
HEADS: Final = "heads.jsonl"
KEYS: Final = "keys.json"
SCHEMAS: Final = "schemas/"
PROOF_HASHES_MAX: Final = 128
STREAM_CHARS_MAX: Final = 255
_LINE_MEMBERS: Final = ("leaf_index", "stream", "sequence_number", "entry", "artifact")
_LINE_BEGIN: Final = b'{"leaf_index":%d,"stream":"%b","sequence_number":%d,"entry":"'
_LINE_BETWEEN: Final = b'","artifact":"'
_LINE_END: Final = b'"}\n'
_ENTRY_BYTES_MIN: Final = 400  # of those that are split at once: no `_LINE_BETWEEN` is looked for in them
_FILE = re.compile(r"entries\.jsonl|heads\.jsonl|keys\.json|schemas/[a-z_]{1,64}\.schema\.json")


class EntryLine(NamedTuple):
    """One stored row. No `leaf_index`: after the last head. No `artifact`: erased, or another tenant's. No `proof`: a
    complete bundle, or after the last head."""

    leaf_index: int | None
    stream: str
    sequence_number: int
    entry: bytes
    artifact: bytes | None
    proof: Sequence[Hash] | None = None

    def to_line(self) -> bytes:
        body: dict[str, Any] = {
            "leaf_index": self.leaf_index,
            "stream": self.stream,
            "sequence_number": self.sequence_number,
            "entry": _written(self.entry),
            "artifact": None if self.artifact is None else _written(self.artifact),
        }
        if self.proof is not None:
            body["proof"] = [_base64(found) for found in self.proof]
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> EntryLine:
        return cls._usual(line) or cls._from_any(line)

    @classmethod
    def _usual(cls, line: bytes) -> EntryLine | None:
        """A line of a complete bundle that is spelled as `to_line` writes it. None says nothing of it: members of these
        types that are written again as they stood leave nothing that the strict reader would refuse, but for NUL."""
        try:
            body = orjson.loads(line)
            leaf_index, stream, sequence_number, entry, artifact = map(body.get, _LINE_MEMBERS)
        except (orjson.JSONDecodeError, AttributeError):
            return None
        if (
            len(body) != len(_LINE_MEMBERS)
            or type(leaf_index) is not int
            or type(stream) is not str
            or type(sequence_number) is not int
            or type(entry) is not str
            or type(artifact) is not str
            or not 0 <= leaf_index <= SAFE_INTEGER_MAX
            or not 0 < sequence_number <= SAFE_INTEGER_MAX
            or not 0 < len(stream) <= STREAM_CHARS_MAX
            or len(line) > BUNDLE_LINE_BYTES_MAX
            or b"\\u0000" in line
            or orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE) != line
        ):
            return None
        return cls(leaf_index, stream, sequence_number, entry.encode("utf-8"), artifact.encode("utf-8"))

    @classmethod
    def _from_any(cls, line: bytes) -> EntryLine:
        body = _parsed(line, "an entry's line", BUNDLE_LINE_BYTES_MAX)
        _verify_fields(body, {"leaf_index", "stream", "sequence_number", "entry", "artifact"}, {"proof"})
        leaf_index, stream, sequence_number = body["leaf_index"], body["stream"], body["sequence_number"]
        if leaf_index is not None and not _is_count(leaf_index):
            raise _malformed("leaf_index", leaf_index)
        if not isinstance(stream, str) or not 0 < len(stream) <= STREAM_CHARS_MAX:
            raise _malformed("stream", stream)
        if not _is_count(sequence_number) or sequence_number == 0:
            raise _malformed("sequence_number", sequence_number)
        artifact = body["artifact"]
        return cls(
            leaf_index,  # type: ignore[arg-type]
            stream,
            sequence_number,  # type: ignore[arg-type]
            _read(body["entry"], "entry"),
            None if artifact is None else _read(artifact, "artifact"),
            _proof(body["proof"]) if "proof" in body else None,
        )


def split_usual_lines(stream: bytes, lines: Sequence[tuple[int, bytes]]) -> tuple[list[bytes], list[bytes]] | None:
    """Entries, as the lines spell them, and artifacts, read: all rows of this stream from its first on, each with its
    leaf's index. None says nothing of the lines. An entry is still to be compared, byte for byte, with how it should be
    spelled: what stands there may be anything."""
    entries, artifacts = [], []
    for place, (leaf_index, raw) in enumerate(lines, 1):
        begin = _LINE_BEGIN % (leaf_index, stream, place)
        between = raw.find(_LINE_BETWEEN, len(begin) + _ENTRY_BYTES_MIN)
        if between < 0 or not raw.startswith(begin) or not raw.endswith(_LINE_END) or len(raw) > BUNDLE_LINE_BYTES_MAX:
            return None
        try:  # one text and nothing else: then it ends where the line does
            artifact = orjson.loads(b'"%b"' % raw[between + len(_LINE_BETWEEN) : -len(_LINE_END)])
        except orjson.JSONDecodeError:
            return None
        entries.append(raw[len(begin) : between])
        artifacts.append(artifact.encode("utf-8"))
    return entries, artifacts


@dataclass(frozen=True, slots=True)
class HeadLine:
    """A signed head; in a partial bundle, all but the first prove that they continue the one before."""

    size: int
    note: str
    proof: Sequence[Hash] | None = None

    def to_line(self) -> bytes:
        body: dict[str, Any] = {"size": self.size, "note": self.note}
        if self.proof is not None:
            body["proof"] = [_base64(found) for found in self.proof]
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE)

    @classmethod
    def from_line(cls, line: bytes) -> HeadLine:
        body = _parsed(line, "a head's line", BUNDLE_LINE_BYTES_MAX)
        _verify_fields(body, {"size", "note"}, {"proof"})
        size, note = body["size"], body["note"]
        if not _is_count(size) or size == 0:
            raise _malformed("size", size)
        if not isinstance(note, str):
            raise _malformed("note", note)
        return cls(size, note, _proof(body["proof"]) if "proof" in body else None)  # type: ignore[arg-type]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which streams: those that began from `since` on and before `until`, of this tenant, this trace, or this run with
    all that it names: traces of its tools, its children, the runs that it was forked from. None: all."""

    since: str | None = None
    until: str | None = None
    tenant: str | None = None
    trace_id: str | None = None
    run_id: str | None = None

    @property
    def is_everything(self) -> bool:
        return self == Filter()


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the manifest says of a file. A last line without its newline counts as one."""

    sha256: str
    bytes: int
    lines: int

    @classmethod
    def of(cls, raw: builtins.bytes) -> FileFacts:
        lines = raw.count(b"\n") + (raw != b"" and not raw.endswith(b"\n"))
        return cls(hashlib.sha256(raw).hexdigest(), len(raw), lines)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a bundle says of itself. Nothing vouches for it: whatever matters in it is compared with a signed head."""

    created_at: str
    origin: str
    tree_size: int
    tree_root: Hash
    filter: Filter = field(default_factory=Filter)
    files: Mapping[str, FileFacts] = field(default_factory=dict)
    blobs: bool = False  # whether the bytes to which the entries refer go along, in files of their own

    @property
    def complete(self) -> bool:
        return self.filter.is_everything

    def to_bytes(self) -> bytes:
        body = {
            "format": FORMAT,
            "created_at": self.created_at,
            "complete": self.complete,
            "filter": {
                "since": self.filter.since,
                "until": self.filter.until,
                "tenant": self.filter.tenant,
                "trace_id": self.filter.trace_id,
                **({} if self.filter.run_id is None else {"run_id": self.filter.run_id}),
            },
            "origin": self.origin,
            "tree": {"size": self.tree_size, "root": _base64(self.tree_root)},
            "files": {
                name: {"sha256": facts.sha256, "bytes": facts.bytes, "lines": facts.lines}
                for name, facts in sorted(self.files.items())
            },
            **({"blobs": True} if self.blobs else {}),
        }
        return orjson.dumps(body, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_INDENT_2)

    @classmethod
    def from_bytes(cls, raw: bytes) -> Manifest:
        body = _parsed(raw, MANIFEST, BUNDLE_MANIFEST_BYTES_MAX)
        if body.get("format") != FORMAT:
            raise BundleInvalid("no format that is known here", expected=FORMAT, found=str(body.get("format"))[:64])
        match body:
            case {
                "created_at": str(created_at),
                "complete": bool(complete),
                "filter": {
                    "since": str() | None as since,
                    "until": str() | None as until,
                    "tenant": str() | None as tenant,
                    "trace_id": str() | None as trace_id,
                    **others,
                },
                "origin": str(origin),
                "tree": {"size": size, "root": str(root)},
                "files": dict(files),
                **more,
            } if _is_count(size) and len(files) <= BUNDLE_FILES_MAX and _is_text_or_absent(others.get("run_id")):
                wanted = Filter(since, until, tenant, trace_id, others.get("run_id"))  # type: ignore[arg-type]
                if wanted.is_everything != complete:
                    raise BundleInvalid("a bundle is complete when nothing is filtered out, always and only")
                facts = {name: _facts(found) for name, found in files.items()}
                for name in facts:
                    if not _FILE.fullmatch(name):  # no way out of the folder
                        raise BundleInvalid("the manifest names a file that no bundle has", found=ascii(name)[:64])
                for name in (ENTRIES, HEADS, KEYS):
                    if name not in facts:
                        raise BundleInvalid("the manifest lacks a file", expected=name)
                if not isinstance(more.get("blobs", False), bool):
                    raise BundleInvalid("the manifest says something else about blobs", expected="true or false")
                has_blobs = more.get("blobs") is True
                return cls(created_at, origin, size, _hash(root), wanted, facts, has_blobs)  # type: ignore[arg-type]
        raise BundleInvalid("the manifest lacks fields, or they are of the wrong type")


def _facts(found: JsonValue) -> FileFacts:
    match found:
        case {"sha256": str(sha256), "bytes": size, "lines": lines, **rest} if (
            _is_count(size) and _is_count(lines) and not rest
        ):
            return FileFacts(sha256, size, lines)  # type: ignore[arg-type]
    raise BundleInvalid("the manifest says something else about a file", expected="sha256, bytes and lines")


def _parsed(raw: bytes, what: str, bytes_max: int) -> dict[str, JsonValue]:
    usual = read_canonical(raw.removesuffix(b"\n"), bytes_max=bytes_max - raw.endswith(b"\n"), sorts=False)
    if usual is not None:
        return usual
    try:
        return parse_object(raw, bytes_max=bytes_max)
    except (InputMalformed, InputTooLarge) as error:
        raise BundleInvalid(
            f"{what} cannot be read: {error.what}", expected=error.expected, found=error.found
        ) from None


def _verify_fields(body: dict[str, JsonValue], needed: set[str], allowed: set[str]) -> None:
    if not needed <= body.keys() or not body.keys() <= needed | allowed:
        raise BundleInvalid("a line has other fields than it should", expected=", ".join(sorted(needed)))


def _is_text_or_absent(value: object) -> bool:
    return value is None or isinstance(value, str)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value <= SAFE_INTEGER_MAX


def _malformed(name: str, found: object) -> BundleInvalid:
    return BundleInvalid(f"a line's {name} is not what it should be", found=repr(found)[:64])


def _written(raw: bytes) -> str | dict[str, str]:
    """Text as it is; bytes that are none (someone changed them) in a form that carries them."""
    try:
        text = raw.decode("utf-8")
    except UnicodeError:
        return {"base64": _base64(raw)}
    return {"base64": _base64(raw)} if "\x00" in text else text


def _read(value: JsonValue, name: str) -> bytes:
    match value:
        case str(text):
            return text.encode("utf-8")
        case {"base64": str(encoded)}:
            return _decoded(encoded, name)
    raise _malformed(name, value)


def _proof(value: JsonValue) -> list[Hash]:
    if not isinstance(value, list) or len(value) > PROOF_HASHES_MAX:
        raise _malformed("proof", value)
    return [_hash(found) for found in value]


def _hash(value: JsonValue) -> Hash:
    raw = _decoded(value, "hash") if isinstance(value, str) else b""
    if len(raw) != HASH_BYTES:
        raise _malformed("hash", value)
    return Hash(raw)


def _base64(raw: bytes) -> str:
    return b64encode(raw).decode("ascii")


def _decoded(text: str, name: str) -> bytes:
    try:
        raw = b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise _malformed(name, text) from None
    if _base64(raw) != text:
        raise _malformed(name, text)
    return raw
