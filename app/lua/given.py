"""What a Lua program gave an operation: judged where the gateway would refuse it, and so end the run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import Field

from tga_sdk.errors import ValueInvalid

_FOUND_CHARS_MAX: Final = 300
_NAME: Final = re.compile("[!-~]{1,128}")
_RECORDED: Final = frozenset(
    {"step", "call", "gather", "checkpoint", "ask", "sleep", "signal", "child", "emit", "tool"}
)
_NAMES: Final = frozenset({"name", "server", "tool", "version"})
_INPUT_TYPES: Final[Mapping[str, Any]] = {
    "text": str,
    "string": str,
    "number": float,
    "integer": int,
    "boolean": bool,
    "array": list[Any],
    "table": dict[str, Any],
    "object": dict[str, Any],
}


def unfit(request: Mapping[str, Any], error: Exception) -> ValueInvalid:
    """What the program is told of options that could not be read."""
    what = f"{request['op']} {request['form']}" if "form" in request else str(request["op"])
    found = " ".join(str(error).split())[:_FOUND_CHARS_MAX]
    return ValueInvalid(f"{what}: expected options that it takes, found some that cannot be read: {found}", where=what)


def verify_names(request: Mapping[str, Any]) -> None:
    """Raise what the program can catch, unless the operation's names can be recorded. Names of files are not."""
    if request["op"] not in _RECORDED:
        return
    for field in _NAMES & request.keys():
        if not (isinstance(request[field], str) and _NAME.fullmatch(request[field])):
            raise ValueInvalid(
                f"{request['op']}: expected a {field} of 1 to 128 characters, printable ASCII without spaces; found "
                f"{str(request[field])[:_FOUND_CHARS_MAX]!r}",
                where=field,
            )


def input_type(request: Mapping[str, Any]) -> Any:
    """Of an answer: text unless the program says otherwise."""
    kind = request.get("input_type") or "text"
    found = _INPUT_TYPES.get(kind)
    if found is None:
        raise ValueInvalid(
            f"Human.input.input_type: expected one of {', '.join(_INPUT_TYPES)}, found {kind}", where="input_type"
        )
    required = request.get("required")
    if found is str and required:
        return Annotated[str, Field(min_length=1)]
    return found | None if required is False else found
