"""Reading `tga.toml`: from bytes to a checked Config, or one SettingInvalid that says where and what."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from app.config.fields import split_pointer
from app.config.input_schema import verify_input_schema, verify_reachable, verify_writable
from app.config.tables import (
    ADDRESS_FIELDS,
    TRANSPORTS_OF_FIELD,
    Config,
    ServerConfig,
    ToolConfig,
    qualify,
)
from app.config.wording import kind_of, listed, one_of, shown
from app.core.errors import SettingInvalid
from app.core.limits import CONFIG_BYTES_MAX, NAME_CHARS_MAX

HTTP_CLIENT = "http_client"  # the server whose tools read the web for programs in Lua
# A password or a token may be in them.
_TOML_KINDS = {
    "list_type": "a list, in brackets",
    "dict_type": "a table",
    "model_type": "a table",
    "model_attributes_type": "a table",
    "string_type": "a text, in quotes",
    "int_type": "a whole number",
    "bool_type": "true or false",
}
_NEVER_SHOWN = frozenset({"base_url", "url", "jwks_url", "credentials", "client_secret", "env", "command"})


def load_config(path: Path) -> Config:
    """The configuration in `path`, or SettingInvalid naming the file, the field, what was expected and found.

    Credentials are not read here, and the policy and key files are only looked for.
    """
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
    try:
        config = Config.model_validate(tables, context={"path": path.absolute()})
    except ValidationError as error:
        raise _model_error(path, error) from None
    _verify_files(path, config)
    if config.auth.oidc is not None and config.public_url is None:
        raise SettingInvalid(
            f"{path}: public_url", expected="where people reach the gateway: the issuer sends them back there"
        )
    if config.lua.http.allowed_hosts and HTTP_CLIENT in config.servers:
        raise SettingInvalid(
            f"{path}: servers.{HTTP_CLIENT}", expected="another name: [lua.http] makes a server of this one"
        )
    for server_id, server in config.servers.items():
        _verify_server(f"{path}: servers.{server_id}", server_id, server)
    return config


def _verify_files(path: Path, config: Config) -> None:
    named = {
        "policy.file": config.policy and config.policy.file,
        "auth.jwt.jwks_file": config.auth.jwt and config.auth.jwt.jwks_file,
    }
    for field, file in named.items():
        if file and not (os.path.isfile(file) and os.access(file, os.R_OK)):
            raise SettingInvalid(f"{path}: {field}", expected="a file that can be read", found=file)


def _verify_server(at: str, server_id: str, server: ServerConfig) -> None:
    qualified = qualify(server.tenant, server_id)
    if len(qualified) > NAME_CHARS_MAX:
        expected = f"a name that makes at most {NAME_CHARS_MAX} characters with its tenant's (tenant/server)"
        raise SettingInvalid(at, expected=expected, found=f"{len(qualified)} characters")
    _verify_transport(at, server)
    for name, tool in server.tools.items():
        _verify_reconcile(f"{at}.tools.{name}", server, tool)
        if server.is_mcp:
            _verify_override(f"{at}.tools.{name}", tool)
            continue
        if tool.tool_class is None:
            raise SettingInvalid(f"{at}.tools.{name}.class", expected="the field", found="nothing")
        verify_input_schema(f"{at}.tools.{name}.input_schema", tool.input_schema)
        verify_writable(f"{at}.tools.{name}.description", tool.description)
        for pointer in tool.secret_arguments:
            verify_reachable(f"{at}.tools.{name}.secret_arguments", tool.input_schema, split_pointer(pointer))


def _verify_transport(at: str, server: ServerConfig) -> None:
    address = ADDRESS_FIELDS[server.transport]
    if getattr(server, address) is None:
        raise SettingInvalid(f"{at}.{address}", expected="the field", found="nothing")
    for field, transports in TRANSPORTS_OF_FIELD.items():
        if field in server.model_fields_set and server.transport not in transports:
            expected = f"it only where transport is {' or '.join(transports)}"
            raise SettingInvalid(f"{at}.{field}", expected=expected, found=server.transport)


def _verify_override(at: str, tool: ToolConfig) -> None:
    for field in ("input_schema", "description"):
        if field in tool.model_fields_set:
            raise SettingInvalid(
                f"{at}.{field}", expected="nothing: an MCP server describes its tools", found="a value"
            )


def _verify_reconcile(at: str, server: ServerConfig, tool: ToolConfig) -> None:
    if tool.on_unknown_outcome != "reconcile":
        if tool.reconcile_tool is not None:
            raise SettingInvalid(
                f"{at}.reconcile_tool", expected='on_unknown_outcome = "reconcile" beside it', found=tool.reconcile_tool
            )
        return
    readers = [name for name, other in server.tools.items() if other.tool_class == "read"]
    if tool.reconcile_tool not in readers:
        expected = f"a read-class tool of the same server ({listed(readers) or 'it has none'})"
        raise SettingInvalid(f"{at}.reconcile_tool", expected=expected, found=tool.reconcile_tool or "nothing")


def _model_error(path: Path, error: ValidationError) -> SettingInvalid:
    first = error.errors(include_url=False)[0]
    steps = [step for step in first["loc"] if step != "[key]"]
    where = f"{path}: {'.'.join(ascii(str(step)[:NAME_CHARS_MAX])[1:-1] for step in steps)}"
    if first["type"] == "extra_forbidden":
        expected = one_of("a field that exists", str(steps[-1]), _fields_beside(steps))
        return SettingInvalid(where, expected=expected, found="an unknown one")
    if first["type"] == "missing":
        return SettingInvalid(where, expected="the field", found="nothing")
    is_shown = _NEVER_SHOWN.isdisjoint(steps)
    found = shown(first["input"]) if is_shown else kind_of(first["input"])
    return SettingInvalid(where, expected=_expected(first["type"], first["msg"], steps), found=found)


def _expected(kind: str, message: str, steps: list[str | int]) -> str:
    """In words of the file's own language: its writer knows TOML, not our classes."""
    if ("credentials" in steps or "client_secret" in steps) and kind in (
        "model_type",
        "model_attributes_type",
        "dict_type",
    ):
        return 'where to find it, not the credential itself: { env = "NAME" } or { file = "PATH" }'
    if steps[-1] == "command" and kind == "list_type":
        return 'a list of the program and its arguments, each a text: ["npx", "-y", "some-server"]'
    return _TOML_KINDS.get(kind) or message.removeprefix("Input should be ")


def _fields_beside(steps: list[str | int]) -> list[str]:
    """The fields of the table that the last step is in."""
    table: type[BaseModel] = Config
    rest = iter(steps[:-1])
    for step in rest:
        annotation = next(field.annotation for name, field in table.model_fields.items() if name == step)
        if get_origin(annotation) is dict:
            next(rest, None)  # a name of the file's own choosing
        inner = _table_in(annotation)
        if inner is None:
            return []
        table = inner
    return [field.alias or name for name, field in table.model_fields.items()]


def _table_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((table for inner in get_args(annotation) if (table := _table_in(inner)) is not None), None)
