"""Which protocol a request speaks, and whether its headers agree with its body.

2026-07-28 says it in every request; 2025-11-25 and older say it in a header after the handshake, which leaves nothing
behind here: no request needs another one before it.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from app.config.wording import shown
from app.core.errors import SchemaViolation
from app.mcp_server.wire import (
    HEADER_MISMATCH,
    INVALID_PARAMS,
    MISSING_CAPABILITY,
    UNSUPPORTED_VERSION,
    Message,
    RpcError,
)

MODERN: Final = "2026-07-28"
LATEST_HANDSHAKE: Final = "2025-11-25"
HANDSHAKES: Final = ("2024-11-05", "2025-03-26", "2025-06-18", LATEST_HANDSHAKE)
TASKS: Final = "io.modelcontextprotocol/tasks"

_PREFIX: Final = "io.modelcontextprotocol/"
VERSION_KEY: Final = f"{_PREFIX}protocolVersion"
CAPABILITIES_KEY: Final = f"{_PREFIX}clientCapabilities"
SERVER_INFO_KEY: Final = f"{_PREFIX}serverInfo"
SUBSCRIPTION_KEY: Final = f"{_PREFIX}subscriptionId"
RELATED_TASK_KEY: Final = f"{_PREFIX}related-task"

# What a header repeats of the body, so that a proxy that routes by headers routes what is executed.
_NAMED: Final = {
    "tools/call": "name",
    "prompts/get": "name",
    "resources/read": "uri",
    "tasks/get": "taskId",
    "tasks/update": "taskId",
    "tasks/cancel": "taskId",
}
_ENCODED: Final = re.compile(r"=\?base64\?(?P<payload>.*)\?=")
_ROUTING: Final = frozenset({"mcp-protocol-version", "mcp-method", "mcp-name"})


@dataclass(frozen=True, slots=True)
class Client:
    """What is known of who asks, for this one request."""

    version: str
    capabilities: Mapping[str, Any]

    @property
    def is_modern(self) -> bool:
        return self.version == MODERN

    @property
    def takes_tasks(self) -> bool:
        extensions = self.capabilities.get("extensions")
        return self.is_modern and isinstance(extensions, dict) and TASKS in extensions

    def require_tasks(self) -> None:
        if not self.takes_tasks:
            raise RpcError(
                MISSING_CAPABILITY,
                "the client has not declared the tasks extension on this request",
                data={"requiredCapabilities": {"extensions": {TASKS: {}}}},
            )


def headers_of(raw: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """By name. Sent twice, a header by which requests are routed is a mismatch: readers would disagree."""
    found: dict[str, str] = {}
    for name_bytes, value in raw:
        name = name_bytes.decode("latin-1").lower()
        if name in found and name in _ROUTING:
            raise RpcError(HEADER_MISMATCH, f"the header {name} is repeated")
        found[name] = value.decode("latin-1")
    return found


def speaks_modern(headers: Mapping[str, str]) -> bool:
    """By its header alone: a version of the handshake, or none, is the older protocol; all else must be the newer."""
    version = headers.get("mcp-protocol-version")
    return version is not None and version not in HANDSHAKES


def client_of(message: Message, headers: Mapping[str, str]) -> Client:
    """Who asks, or RpcError: the first rung that fails speaks."""
    if not speaks_modern(headers):
        # The first version said nothing in headers; what it was allowed to ask for is the same here.
        return Client(headers.get("mcp-protocol-version", HANDSHAKES[1]), {})
    meta = message.params.get("_meta")
    if not isinstance(meta, dict):
        raise _invalid("params._meta must be an object with the protocol's own fields")
    missing = [key for key in (VERSION_KEY, CAPABILITIES_KEY) if key not in meta]
    if missing:
        raise _invalid(f"params._meta lacks {', '.join(missing)}")
    version, capabilities = meta[VERSION_KEY], meta[CAPABILITIES_KEY]
    if headers.get("mcp-protocol-version") != version:
        raise RpcError(HEADER_MISMATCH, "the header MCP-Protocol-Version is not the version in params._meta")
    _verify_routing(message, headers)
    if version != MODERN:
        raise unsupported(version)
    if not isinstance(capabilities, dict):
        raise _invalid(f"params._meta[{CAPABILITIES_KEY!r}] must be an object")
    return Client(MODERN, capabilities)


def unsupported(version: Any) -> RpcError:
    found = version if isinstance(version, str) and len(version) <= 64 else shown(version)
    return RpcError(
        UNSUPPORTED_VERSION, "unsupported protocol version", data={"supported": [MODERN], "requested": found}
    )


def _verify_routing(message: Message, headers: Mapping[str, str]) -> None:
    if headers.get("mcp-method") != message.method:
        raise RpcError(HEADER_MISMATCH, "the header Mcp-Method is not the method in the body")
    field = _NAMED.get(message.method)
    if field is None:
        return
    named = message.params.get(field)
    if named is not None and _decoded(headers.get("mcp-name")) != named:
        raise RpcError(HEADER_MISMATCH, f"the header Mcp-Name is not params.{field}")


def _decoded(value: str | None) -> str | None:
    """A header's value; what is no clean base64 is nothing, and so equals nothing."""
    encoded = _ENCODED.fullmatch(value) if value is not None else None
    if encoded is None:
        return value
    try:
        decoded = base64.b64decode(encoded["payload"], validate=True)
        if base64.b64encode(decoded).decode("ascii") != encoded["payload"]:
            return None
        return decoded.decode("utf-8")
    except (binascii.Error, UnicodeDecodeError):
        return None


def verify_param_headers(input_schema: dict[str, Any], arguments: dict[str, Any], headers: Mapping[str, str]) -> None:
    """Arguments that the tool wants in headers too stand there, and are the same."""
    from mcp.shared.inbound import validate_mcp_param_headers  # a second to import, and rarely needed

    refused = validate_mcp_param_headers(input_schema, arguments, headers)
    if refused is not None:
        raise RpcError(refused.code, refused.message)


def _invalid(what: str) -> RpcError:
    return RpcError(INVALID_PARAMS, what, data={"code": SchemaViolation.code})
