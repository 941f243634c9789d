"""The configuration file `tga.toml`, and the registry of servers and tools that it makes.

Every mistake is found when the file is read, and named by file, table and field. What this version does not have yet
is refused, never ignored: an unread `secret_arguments` would put a card number on the log in clear.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import referencing
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from pydantic import BaseModel, ConfigDict, Field
from pydantic import ValidationError as ModelError
from referencing.exceptions import Unresolvable
from referencing.jsonschema import DRAFT202012
from yarl import URL

from app.connectors.http import HttpConnector, HttpPool
from app.core.canonical import canonical_bytes
from app.core.digest import Digest, digest_of
from app.core.errors import ArgumentsInvalid, InputMalformed, InputTooLarge, SettingInvalid, ToolNotFound
from app.core.limits import (
    CALL_ATTEMPTS_MAX,
    CALL_TIMEOUT_MS_MAX,
    CONFIG_BYTES_MAX,
    INPUT_SCHEMA_BYTES_MAX,
    SHOWN_CHARS_MAX,
    TOOL_TAGS_MAX,
)
from app.domain.tga.models import Name, Text, ToolClass
from app.domain.tga.ports import Connector, OnUnknownOutcome, Tool

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_NAMES_SHOWN_MAX = 10
_POINTER_CHARS_MAX = 256

# What SURFACES names and this version cannot do.
_NOT_YET_TABLES = ("policy", "webhooks")
_NOT_YET_TRANSPORTS = ("mcp-stdio", "mcp-http")
_NOT_YET_TOOL_FIELDS = ("approval_timeout_ms", "secret_arguments")


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")


class ToolConfig(_Table):
    """`[servers.X.tools.Y]`"""

    tool_class: ToolClass = Field(alias="class")
    on_unknown_outcome: OnUnknownOutcome = "redispatch"
    reconcile_tool: Name | None = None
    tags: Annotated[list[Name], Field(max_length=TOOL_TAGS_MAX)] = []
    input_schema: dict[str, Any] = {"type": "object"}
    description: Text | None = None


class ServerConfig(_Table):
    """`[servers.X]`"""

    transport: Literal["http"]
    base_url: str
    timeout_ms: Annotated[int, Field(ge=1, le=CALL_TIMEOUT_MS_MAX)] = 30_000
    max_attempts: Annotated[int, Field(ge=1, le=CALL_ATTEMPTS_MAX)] = 5
    tenant: Name = "default"
    tools: dict[Name, ToolConfig] = {}


class Config(_Table):
    """All of `tga.toml`, checked."""

    servers: dict[Name, ServerConfig] = {}


def load_config(path: Path) -> Config:
    """The configuration in `path`, or SettingInvalid naming the file, the field, what was expected and found."""
    try:
        with path.open("rb") as file:
            raw = file.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise SettingInvalid(f"{path} cannot be read", found=error.strerror) from None
    if len(raw) > CONFIG_BYTES_MAX:
        raise SettingInvalid(f"{path} is too large", expected=f"at most {CONFIG_BYTES_MAX} bytes")
    try:
        tables = tomllib.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # bad UTF-8 and bad TOML are both ValueErrors
        raise SettingInvalid(f"{path} is not TOML", found=error) from None
    _refuse_what_is_not_built(path, tables)
    try:
        config = Config.model_validate(tables)
    except ModelError as error:
        raise _model_error(path, error) from None
    for server_id, server in config.servers.items():
        _verify_server(path, server_id, server)
    return config


class Registry:
    """Tools and connectors of one configuration (the ports Tools and Connectors)."""

    def __init__(self, tools: Iterable[Tool], connectors: Mapping[str, Connector], *, pool: HttpPool) -> None:
        self._tools = {(tool.server_id, tool.tool_name): tool for tool in tools}
        self._validators = {key: _validator(tool.input_schema) for key, tool in self._tools.items()}
        self._connectors = dict(connectors)
        self._pool = pool

    @classmethod
    def from_config(cls, config: Config) -> Self:
        pool = HttpPool()
        tools = [
            _tool(server_id, server, name, tool)
            for server_id, server in config.servers.items()
            for name, tool in server.tools.items()
        ]
        connectors = {
            server_id: HttpConnector(server.base_url, pool=pool) for server_id, server in config.servers.items()
        }
        return cls(tools, connectors, pool=pool)

    def tools(self) -> list[Tool]:
        return list(self._tools.values())

    def resolve(self, server_id: str, tool_name: str) -> Tool:
        """The tool, or ToolNotFound naming what there is instead."""
        tool = self._tools.get((server_id, tool_name))
        if tool is not None:
            return tool
        if server_id not in self._connectors:
            raise ToolNotFound(
                f"no server {_shown(server_id)}", expected=_one_of("server", server_id, self._connectors)
            )
        names = [name for server, name in self._tools if server == server_id]
        raise ToolNotFound(
            f"server {server_id} has no tool {_shown(tool_name)}", expected=_one_of("tool", tool_name, names)
        )

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None:
        """Raise ArgumentsInvalid at the first path that does not fit the tool's schema."""
        validator = self._validators.get((tool.server_id, tool.tool_name))
        if validator is None or validator.schema is not tool.input_schema:
            validator = _validator(tool.input_schema)
        what = f"arguments of {tool.server_id}/{tool.tool_name}"
        try:
            error = next(validator.iter_errors(arguments), None)
        except RecursionError:
            raise ArgumentsInvalid(f"{what} nest deeper than the schema can follow") from None
        if error is not None:
            pointer = _pointer(error.absolute_path)
            expected, found = _mismatch(error)
            raise ArgumentsInvalid(f"{what} at {pointer or 'the top'}", expected=expected, found=found)

    def of(self, server_id: str) -> Connector:
        connector = self._connectors.get(server_id)
        if connector is None:
            raise ToolNotFound(
                f"no server {_shown(server_id)}", expected=_one_of("server", server_id, self._connectors)
            )
        return connector

    async def close(self) -> None:
        await self._pool.close()


def _tool(server_id: str, server: ServerConfig, name: str, config: ToolConfig) -> Tool:
    return Tool(
        server_id=server_id,
        tool_name=name,
        tool_class=config.tool_class,
        definition_digest=_definition_digest(server_id, name, config),
        on_unknown_outcome=config.on_unknown_outcome,
        reconcile_tool=config.reconcile_tool,
        tags=frozenset(config.tags),
        timeout_ms=server.timeout_ms,
        max_attempts=server.max_attempts,
        input_schema=config.input_schema,
    )


def _definition_digest(server_id: str, name: str, config: ToolConfig) -> Digest:
    # What the tool is, not how it is called: a new timeout or address does not make another tool of it.
    return digest_of(
        {
            "server_id": server_id,
            "tool_name": name,
            "tool_class": config.tool_class,
            "input_schema": config.input_schema,
            "description": config.description,
        }
    )


def _refuse_what_is_not_built(path: Path, tables: dict[str, Any]) -> None:
    def refuse(field: str, found: object = None) -> None:
        raise SettingInvalid(
            f"{path}: {field} is not in this version yet", found=found, remedy="Remove it, or wait for the version."
        )

    for table in _NOT_YET_TABLES:
        if table in tables:
            refuse(f"[{table}]")
    for server_id, server in _subtables(tables, "servers"):
        if server.get("transport") in _NOT_YET_TRANSPORTS:
            refuse(f"servers.{server_id}.transport", server["transport"])
        for name, tool in _subtables(server, "tools"):
            for field in _NOT_YET_TOOL_FIELDS:
                if field in tool:
                    refuse(f"servers.{server_id}.tools.{name}.{field}")


def _subtables(table: dict[str, Any], field: str) -> Iterator[tuple[str, dict[str, Any]]]:
    members = table.get(field)
    for name, member in members.items() if isinstance(members, dict) else ():
        if isinstance(member, dict):
            yield name, member


def _verify_server(path: Path, server_id: str, server: ServerConfig) -> None:
    where = f"{path}: servers.{server_id}"
    _verify_base_url(f"{where}.base_url", server.base_url)
    for name, tool in server.tools.items():
        at = f"{where}.tools.{name}"
        if name in (".", ".."):
            raise SettingInvalid(at, expected="a name that can be a segment of a URL", found=name)
        _verify_reconcile(at, server, tool)
        _verify_input_schema(f"{at}.input_schema", tool.input_schema)


def _verify_base_url(at: str, base_url: str) -> None:
    expected = "http://host[:port][/path] or https://, without user, query or fragment"
    try:
        url = URL(base_url)
        is_fit = url.scheme in ("http", "https") and bool(url.host) and url.port is not None
    except ValueError:
        is_fit = False
    # Compared as written: an empty query or fragment, a space or a backslash is as wrong as a full one.
    if not is_fit or any(sign in base_url for sign in "@?#\\ ") or not base_url.isprintable():
        # Not echoed: a password may be in it.
        raise SettingInvalid(at, expected=expected, found="something else")


def _verify_reconcile(at: str, server: ServerConfig, tool: ToolConfig) -> None:
    if tool.on_unknown_outcome != "reconcile":
        if tool.reconcile_tool is not None:
            raise SettingInvalid(
                f"{at}.reconcile_tool", expected='on_unknown_outcome = "reconcile" beside it', found=tool.reconcile_tool
            )
        return
    readers = [name for name, other in server.tools.items() if other.tool_class == "read"]
    if tool.reconcile_tool not in readers:
        expected = f"a read-class tool of the same server ({_listed(readers) or 'it has none'})"
        raise SettingInvalid(f"{at}.reconcile_tool", expected=expected, found=tool.reconcile_tool or "nothing")


def _verify_input_schema(at: str, schema: dict[str, Any]) -> None:
    try:
        canonical_bytes(schema, bytes_max=INPUT_SCHEMA_BYTES_MAX)
    except (InputMalformed, InputTooLarge) as error:
        raise SettingInvalid(f"{at}: {error.what}", expected=error.expected, found=error.found) from None
    if schema.get("$schema", _DIALECT) != _DIALECT:
        raise SettingInvalid(f"{at}.$schema", expected=_DIALECT, found=_shown(schema["$schema"]))
    try:
        Draft202012Validator.check_schema(schema)
    except SchemaError as error:
        expected, found = _mismatch(error)
        pointer = _pointer(error.absolute_path) or "the top"
        raise SettingInvalid(f"{at} at {pointer} is not JSON Schema 2020-12", expected=expected, found=found) from None
    resolver = referencing.Registry[Any]().resolver_with_root(
        referencing.Resource.from_contents(schema, default_specification=DRAFT202012)
    )
    for pointer, keyword, reference in _references(schema):
        if keyword == "$id":
            raise SettingInvalid(f"{at} at {pointer}", expected="$id at the top only", found=_shown(reference))
        if not reference.startswith("#"):  # never fetched: a schema must mean the same tomorrow
            raise SettingInvalid(f"{at} at {pointer}", expected="a local reference, #...", found=_shown(reference))
        try:
            resolver.lookup(reference)
        except (Unresolvable, ValueError):
            raise SettingInvalid(
                f"{at} at {pointer}", expected="a reference to a part of this schema", found=_shown(reference)
            ) from None
    try:
        _validator(schema).is_valid({})
    except RecursionError:
        raise SettingInvalid(f"{at}: its references go round in a circle", expected="an end to them") from None


def _references(schema: Any, pointer: str = "") -> Iterator[tuple[str, str, str]]:
    """Every reference, and every $id that would change what the references within it mean."""
    for key, member in schema.items() if isinstance(schema, dict) else enumerate(schema):
        at = f"{pointer}/{_escaped(key)}"
        if isinstance(member, dict | list):
            yield from _references(member, at)
        elif isinstance(member, str) and (key in ("$ref", "$dynamicRef") or (key == "$id" and pointer)):
            yield at, key, member


def _validator(schema: dict[str, Any]) -> Draft202012Validator:
    # An empty registry: jsonschema's own would fetch what it does not know.
    return Draft202012Validator(schema, registry=referencing.Registry())


def _model_error(path: Path, error: ModelError) -> SettingInvalid:
    first = error.errors(include_url=False)[0]
    where = ".".join(str(step) for step in first["loc"] if step != "[key]")
    if first["type"] == "extra_forbidden":
        return SettingInvalid(f"{path}: {where}", expected="a field that exists", found="an unknown one")
    if first["type"] == "missing":
        return SettingInvalid(f"{path}: {where}", expected="the field", found="nothing")
    return SettingInvalid(f"{path}: {where}", expected=first["msg"], found=_shown(first["input"]))


def _mismatch(error: ValidationError | SchemaError) -> tuple[str, str]:
    """What the schema wants there, and what is there; long values are not echoed."""
    wanted: Any = error.validator_value
    value = error.instance
    if error.validator == "required" and isinstance(value, dict):
        return f"the field {_shown(next(name for name in wanted if name not in value))}", "nothing"
    if error.validator == "additionalProperties" and wanted is False and isinstance(value, dict):
        schema = error.schema if isinstance(error.schema, dict) else {}
        known, patterns = schema.get("properties", {}), schema.get("patternProperties", {})
        extra = [name for name in value if name not in known and not any(re.search(p, name) for p in patterns)]
        return f"only the fields of the schema ({_listed(known) or 'none'})", _listed(extra) or "more"
    return f"{error.validator}: {_shown(wanted)}", _shown(value)


def _pointer(path: Iterable[str | int]) -> str:
    written = "".join(f"/{_escaped(step)}" for step in path)
    return written if len(written) <= _POINTER_CHARS_MAX else written[:_POINTER_CHARS_MAX] + "…"


def _escaped(step: str | int) -> str:
    return ascii(str(step))[1:-1].replace("~", "~0").replace("/", "~1")


def _shown(value: object) -> str:
    written = ascii(value)
    if len(written) <= SHOWN_CHARS_MAX:
        return written
    return f"a {type(value).__name__} of {len(written)} characters"


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    more = len(ordered) - _NAMES_SHOWN_MAX
    return ", ".join(map(_bare, ordered[:_NAMES_SHOWN_MAX])) + (f" and {more} more" if more > 0 else "")


def _bare(name: str) -> str:
    return ascii(name)[1:-1] if len(name) <= SHOWN_CHARS_MAX else _shown(name)


def _one_of(kind: str, name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(name[:SHOWN_CHARS_MAX], list(names), n=3)
    if close:
        return f"a configured {kind}, such as {', '.join(close)}"
    return f"a configured {kind} ({_listed(names) or 'there is none'})"
