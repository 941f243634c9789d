"""A Lua source as its author declared it: name, version, metadata, schemas, sub-procedures, and what it uses.

The top of the file runs once in a throw-away state in which no operation is possible. A file without a procedure of its
own is a script: its declarations end where it begins to work.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, NoReturn

from app.core.limits import RUN_TAGS_MAX, TEXT_CHARS_MAX
from app.lua.pool import Chunk, Failed, LuaFailure, Pool, Returned, Yielded
from tga_sdk.errors import TgaError
from tga_sdk.procedures import NAME, PROCEDURE_NAME, Policy
from tga_sdk.retry import Retry

LANGUAGE_VERSION: Final = b"tga-lua-1"
_YEAR_MS: Final = 31_536_000_000
_LINE: Final = re.compile("[0-9]{1,9}")
_TAG: Final = re.compile("[!-~]{1,128}")
_JSON_TYPES: Final[Mapping[str, Any]] = {
    "string": "string",
    "number": "number",
    "integer": "integer",
    "boolean": "boolean",
    "array": "array",
    "object": "object",
    "table": ["object", "array"],
}


class Source(NamedTuple):
    """A program as it was submitted: its text, the name that messages call it by, and the files that it may read."""

    name: str
    text: str
    files: Mapping[str, bytes]

    @property
    def digest(self) -> str:
        """SHA-256 of the text and all files: another digest is another program."""
        whole = hashlib.sha256(LANGUAGE_VERSION)
        for part in (self.text.encode(), *(one for name in sorted(self.files) for one in (name, self.files[name]))):
            data = part.encode() if isinstance(part, str) else part
            whole.update(len(data).to_bytes(8, "big") + data)
        return whole.hexdigest()


class LuaSourceInvalid(TgaError):
    """A source that is refused: where, what was expected, what was found, what to do."""

    code = "PROCEDURE_SOURCE_INVALID"

    def __init__(
        self, found: str, *, chunk: str, line: int | None, expected: str = "a Lua procedure", remedy: str = ""
    ) -> None:
        self.chunk = chunk
        self.line = line
        self.expected = expected
        self.found = found
        self.remedy = remedy or "Correct the source, and submit it again."
        where = chunk if line is None else f"{chunk}:{line}"
        super().__init__(f"{where}: expected {expected}; found: {found}. {self.remedy}")


@dataclass(frozen=True)
class Declaration:
    """What a source declares. `is_script`: the file itself is the program. `metadata` is as written."""

    name: str
    version: str
    is_script: bool
    input_fields: Mapping[str, Any] | None
    output_fields: Mapping[str, Any] | None
    state_fields: Mapping[str, Any] | None
    metadata: Mapping[str, Any]
    procedures: Sequence[Mapping[str, Any]] = ()
    uses: Mapping[str, Any] = field(default_factory=dict)

    @property
    def input_schema(self) -> dict[str, Any] | None:
        found = schema_of(self.input_fields)
        if found is not None and "required" not in found:
            found["type"] = ["object", "null"]  # a run of it may be started without an input
        return found

    @property
    def output_schema(self) -> dict[str, Any] | None:
        return schema_of(self.output_fields, is_open=True)

    @property
    def state_schema(self) -> dict[str, Any] | None:
        return schema_of(self.state_fields, needs_required=False)

    @property
    def description(self) -> str | None:
        said = self.metadata.get("description")
        return said if isinstance(said, str) else None

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(str(one) for one in self.metadata.get("tags") or ())

    @property
    def author(self) -> str | None:
        said = self.metadata.get("author")
        return said if isinstance(said, str) else None


async def declared(pool: Pool, source: Source) -> Declaration:
    """What the source declares. LuaSourceInvalid when it does not compile, fails at its top, or has no program."""
    state = await pool.state([Chunk(source.name, source.text)], seed=bytes(32), is_strict=False)
    try:
        answer = await state.resume(0, {"mode": "declare", "chunk": source.name})
        while isinstance(answer, Yielded):
            answer = await state.resume(0, file_reply(source, answer.request))
    finally:
        state.close()
    if isinstance(answer, Failed):
        raise _refused(source, answer.error)
    if not isinstance(answer, Returned):
        raise TypeError(f"expected the declarations of {source.name}, found {type(answer).__name__}")
    return _read(source, answer.value)


def file_reply(source: Source, request: Mapping[str, Any]) -> dict[str, Any]:
    """What a program is told of a file that was submitted with it. The files are part of the digest: they never differ
    between two attempts, so nothing is recorded."""
    what, name = request.get("what"), request.get("name", "")
    if request.get("op") != "file":
        return _error("LUA_NOT_RUNNING", "the top of a file declares; operations belong into run = function() ... end")
    if what == "list":
        return {"value": sorted(source.files)}
    data = source.files.get(name)
    if what == "exists":
        return {"value": data is not None}
    if data is None:
        has = ", ".join(sorted(source.files)) or "none"
        return _error(
            "FILE_NOT_FOUND", f"File.{what}: no file {name!r} was submitted with this procedure; it has: {has}"
        )
    if what == "size":
        return {"value": len(data)}
    try:
        return {"value": data.decode()}
    except UnicodeDecodeError:
        return _error("FILE_NOT_TEXT", f"File.read: {name!r} is not text in UTF-8 ({len(data)} bytes)")


def schema_of(
    fields: Mapping[str, Any] | None, *, is_open: bool = False, needs_required: bool = True
) -> dict[str, Any] | None:
    """The JSON schema of fields. `is_open`: members that none of them names are let through."""
    if fields is None:
        return None
    made: dict[str, Any] = {"type": "object", "properties": {name: _schema(one) for name, one in fields.items()}}
    required = sorted(name for name, one in fields.items() if one.get("required") and one.get("default") is None)
    if required and needs_required:
        made["required"] = required
    if not is_open:
        made["additionalProperties"] = False
    return made


def _schema(said: Mapping[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {}
    if said["type"] in _JSON_TYPES:
        made["type"] = _JSON_TYPES[said["type"]]
    for name in ("description", "enum", "default"):
        if said.get(name) is not None:
            made[name] = said[name]
    if said.get("items") is not None:
        made["items"] = _schema(said["items"])
    if said.get("properties") is not None:
        made |= schema_of(said["properties"], is_open=True) or {}
    return made


def _read(source: Source, said: Mapping[str, Any]) -> Declaration:
    metadata: dict[str, Any] = dict(said.get("metadata") or {})
    if not said["has_body"]:
        raise LuaSourceInvalid(
            f"{len(said['procedures'])} procedures and no main"
            if said["procedures"]
            else "no procedure, and no script",
            chunk=source.name,
            line=None,
            expected='main = procedure "main" {run = function() ... end}, or a script that returns its output',
            remedy="Name the entry point main.",
        )
    own_name = said.get("name")
    name = source_name(source.name) if own_name in (None, "main") else str(own_name)
    version = str(metadata.get("version") or "1")
    for what, text, pattern in (("name", name, PROCEDURE_NAME), ("version", version, NAME)):
        if not pattern.fullmatch(text):
            raise LuaSourceInvalid(
                f"{text!r}", chunk=source.name, line=None, expected=f"a {what} like {pattern.pattern}"
            )
    _verify_metadata(source, metadata)
    return Declaration(
        name=name,
        version=version,
        is_script=bool(said["is_script"]),
        input_fields=said.get("input"),
        output_fields=said.get("output"),
        state_fields=said.get("state"),
        metadata=metadata,
        procedures=tuple(said["procedures"]),
        uses=said["uses"],
    )


def _verify_metadata(source: Source, metadata: Mapping[str, Any]) -> None:
    """Raise unless it can be registered."""

    def refuse(key: str, expected: str) -> NoReturn:
        found = f"{key} = {json.dumps(metadata.get(key), ensure_ascii=False)[:200]}"
        raise LuaSourceInvalid(found, chunk=source.name, line=None, expected=expected)

    for key in ("tags", "accepts"):
        if not isinstance(metadata.get(key) or (), Iterable):
            refuse(key, "a list of texts")
    tags = [str(one) for one in metadata.get("tags") or ()]
    if len(tags) > RUN_TAGS_MAX or not all(_TAG.fullmatch(one) for one in tags):
        refuse("tags", f"at most {RUN_TAGS_MAX} tags of printable ASCII without spaces")
    described = metadata.get("description")
    if isinstance(described, str) and len(described) > TEXT_CHARS_MAX:
        refuse("description", f"at most {TEXT_CHARS_MAX} characters")
    try:
        policy = policy_of(metadata)
    except (TgaError, ValueError, TypeError, OverflowError) as error:
        raise LuaSourceInvalid(
            str(error), chunk=source.name, line=None, expected="times and retries that are numbers in their bounds"
        ) from None
    for key, times in (("timeout", policy.timeout_ms), ("checkpoint_timeout", policy.checkpoint_timeout_ms)):
        if times is not None and not 1 <= times <= _YEAR_MS:
            refuse(key, "a time from a millisecond to a year")


def policy_of(metadata: Mapping[str, Any]) -> Policy:
    """How runs of the program are timed and tried again."""
    return Policy(
        timeout_ms=_milliseconds(metadata.get("timeout")),
        checkpoint_timeout_ms=_milliseconds(metadata.get("checkpoint_timeout")),
        retry=retry_of(metadata.get("retry")) or Retry(0),
    )


def retry_of(said: Mapping[str, Any] | None) -> Retry | None:
    if not said:
        return None
    return Retry(int(said.get("retries") or 0), first=said.get("first", 1.0), longest=said.get("longest", 60.0))


def _milliseconds(seconds: Any) -> int | None:
    return None if seconds is None else round(float(seconds) * 1000)


def source_name(file: str) -> str:
    """The name of a procedure by that of its file: `customer_support.tactus.lua` is customer_support."""
    name = file.rsplit("/", 1)[-1]
    for ending in (".lua", ".tactus", ".tac"):
        name = name.removesuffix(ending)
    return name


def _refused(source: Source, failure: LuaFailure) -> LuaSourceInvalid:
    message = failure.message
    chunk, line = failure.chunk or source.name, failure.line
    place, colon, rest = message.partition(": ")
    file, _, number = place.rpartition(":")
    if colon and _LINE.fullmatch(number):  # as Lua words it: file:line: what is wrong
        chunk, line, message = file, int(number), rest
    return LuaSourceInvalid(message, chunk=chunk, line=line)


def _error(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"type": kind, "message": message, "retryable": False}}
