"""What a child answers, as values. The child may be hostile: whatever is not of the agreed shape is AnswerRefused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from app.core.canonical import parse_json
from app.core.errors import TgaError
from app.lua import frames
from app.lua.frames import Frame

LIMITS_MET: Final = ("CPU", "MEMORY", "OUTPUT", "OPERATIONS", "THREADS")


class AnswerRefused(Exception):
    """A frame that no honest child sends."""


@dataclass(frozen=True, slots=True)
class LuaWarning:
    """What the program did that differs between attempts, told once a line."""

    chunk: str | None
    line: int | None
    what: str


@dataclass(frozen=True, slots=True)
class LuaFailure:
    """Why a thread of a program ended: an error that it raised, or (with `limit`) a bound that it met."""

    message: str
    chunk: str | None = None
    line: int | None = None
    traceback: str = ""
    value: Any = None  # the table that was thrown, where it was one
    limit: str | None = None  # one of LIMITS_MET

    @property
    def code(self) -> str | None:
        return None if self.limit is None else f"LUA_LIMIT_{self.limit}"


@dataclass(frozen=True, slots=True)
class Yielded:
    """The program waits for an operation."""

    request: Any
    warnings: tuple[LuaWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Returned:
    value: Any
    warnings: tuple[LuaWarning, ...] = ()


@dataclass(frozen=True, slots=True)
class Failed:
    error: LuaFailure
    warnings: tuple[LuaWarning, ...] = ()


def read_answer(frame: Frame, *, bytes_max: int) -> Yielded | Returned | Failed:
    """The answer to a resume; AnswerRefused, and nothing else, where it is not one."""
    try:
        warnings = _read_warnings(parse_json(frame.notes, bytes_max=bytes_max)) if frame.notes else ()
        value = parse_json(frame.payload, bytes_max=bytes_max)
    except TgaError as error:
        raise AnswerRefused(str(error)) from None
    if frame.kind == frames.YIELDED:
        return Yielded(value, warnings)
    if frame.kind == frames.RETURNED:
        return Returned(value, warnings)
    if frame.kind != frames.FAILED or not isinstance(value, dict):
        raise AnswerRefused(f"expected an answer to resume, found the kind {frame.kind!r}")
    return Failed(
        LuaFailure(
            message=_text(value.get("message")) or "",
            chunk=_text(value.get("chunk")),
            line=_number(value.get("line")),
            traceback=_text(value.get("traceback")) or "",
            value=value.get("value"),
            limit=_limit(value.get("limit")),
        ),
        warnings,
    )


def _read_warnings(notes: Any) -> tuple[LuaWarning, ...]:
    if not isinstance(notes, list) or not all(isinstance(each, dict) for each in notes):
        raise AnswerRefused("expected a list of warnings")
    return tuple(
        LuaWarning(_text(each.get("chunk")), _number(each.get("line")), _text(each.get("what")) or "") for each in notes
    )


def _text(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise AnswerRefused(f"expected a string, found {type(value).__name__}")
    return value


def _number(value: object) -> int | None:
    if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
        raise AnswerRefused(f"expected an integer, found {type(value).__name__}")
    return value


def _limit(value: object) -> str | None:
    if value is not None and value not in LIMITS_MET:
        raise AnswerRefused(f"expected one of {LIMITS_MET}, found {value!r}")
    return _text(value)
