"""`http_client`: programs in Lua read the web through the gateway, as a tool of class read like any other.

Which hosts are read the operator says (`[lua.http]`), and none by default: `allowed_hosts.py` has what is looked at. A
redirect is followed to the same scheme, host and port, and nowhere else: the program sees any other as it came.

Every status is an answer; the program judges it. A read changes nothing, so one whose outcome is unknown is sent again.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Iterator, Mapping
from typing import Any, Final

from yarl import URL

from app.config import DEFAULT_TENANT, Config, ServerConfig, ToolConfig, qualify
from app.config.loading import HTTP_CLIENT
from app.config.tables import LuaHttpConfig
from app.connectors.allowed_hosts import AddressRefused, AllowedHosts
from app.connectors.answers import plain
from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import Answer, HttpFailure, NotConnected, SendingWithheld
from app.core.canonical import canonical_enclosed
from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import DOCUMENT_BYTES_MAX, LUA_HTTP_REDIRECTS_MAX, URL_CHARS_MAX
from app.domain.tga.documents import JsonOutput, ToolCall
from app.domain.tga.ports import Answered, Dispatched, MaySend, NotSent, Unknown, Withheld

METHODS: Final = {"get": "GET", "head": "HEAD"}
_REDIRECTS: Final = frozenset({301, 302, 303, 307, 308})
_HEADERS_TOLD: Final = ("content-type", "content-length", "etag", "last-modified", "location", "retry-after", "date")
_HEADERS_SENT: Final = frozenset({"accept", "accept-language", "if-none-match", "if-modified-since"})
_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "required": ["url"],
    "properties": {
        "url": {"type": "string", "minLength": 1, "maxLength": URL_CHARS_MAX},
        "headers": {
            "type": "object",
            "maxProperties": len(_HEADERS_SENT),
            "additionalProperties": {"type": "string", "maxLength": 1024},
        },
    },
    "additionalProperties": False,
}


def web_servers(config: Config) -> Iterator[tuple[str, ServerConfig]]:
    """The server `http_client` of each tenant that has it, by its qualified id."""
    http = config.lua.http
    if not config.lua.enabled or not http.allowed_hosts:
        return
    tools = {
        name: ToolConfig.model_validate(
            {
                "class": "read",
                "input_schema": _SCHEMA,
                "description": f"{method} a URL of {', '.join(http.allowed_hosts)}. Answers status, headers, body.",
            }
        )
        for name, method in METHODS.items()
    }
    for tenant in dict.fromkeys(http.tenants or [DEFAULT_TENANT]):
        server = ServerConfig(transport="http", timeout_ms=http.timeout_ms, max_attempts=3, tenant=tenant, tools=tools)
        yield qualify(tenant, HTTP_CLIENT), server


class WebConnector:
    """Reads what the operator allows. One request a dispatch, and one for each redirect that is followed."""

    def __init__(self, http: LuaHttpConfig) -> None:
        self._http = http
        self._hosts = AllowedHosts(http.allowed_hosts, http.private_hosts, table="[lua.http]")
        self._pool = HttpPool(keeps_alive=False, verify_address=self._hosts.verify_address)

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        given = call.arguments if arguments is None else arguments
        reading = _Reading()
        try:
            url = self._hosts.verified(given["url"])
            headers = _sent(given.get("headers") or {})
        except ValueError as error:
            return _refused("HTTP_NOT_ALLOWED", str(error))
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                return await self._read(METHODS[call.tool_name], url, headers, reading, may_send)
        except SendingWithheld:
            return Withheld()
        except AddressRefused as error:
            return _refused("HTTP_NOT_ALLOWED", str(error))
        except TimeoutError:
            return (
                Unknown("timed_out", f"no answer within {timeout_ms} ms") if reading.may_be_sent else NotSent("no time")
            )
        except NotConnected as error:
            return NotSent(plain(str(error)))
        except (HttpFailure, ValueError, OSError) as error:
            return Unknown("disconnected", plain(str(error)))

    async def why_unreachable(self) -> str | None:
        return None  # there is no one server: each URL has its own

    async def close(self) -> None:
        await self._pool.close()

    async def _read(
        self, method: str, url: URL, headers: Mapping[str, str], reading: _Reading, may_send: MaySend | None
    ) -> Dispatched:
        for _ in range(LUA_HTTP_REDIRECTS_MAX + 1):
            target = url.raw_path_qs or "/"
            origin = Origin.of(url)
            request = self._pool.request(method, origin, target, headers=headers, sending=reading, may_send=may_send)
            async with request as answer:
                onward = self._onward(url, origin, answer)
                if onward is None:
                    body = b"" if method == "HEAD" else await _body(answer, self._http.max_bytes)
                    return _answered(answer, body, url, self._http.max_bytes)
            url, may_send = onward, None
        return _refused("HTTP_REDIRECTED", f"expected at most {LUA_HTTP_REDIRECTS_MAX} redirects, found more")

    def _onward(self, url: URL, origin: Origin, answer: Answer) -> URL | None:
        location = answer.headers.get("location")
        if answer.status not in _REDIRECTS or location is None:
            return None
        try:
            onward = self._hosts.verified(str(url.join(URL(location))))
        except ValueError:
            return None
        return onward if Origin.of(onward) == origin else None


class _Reading:
    """Whether something was sent (the Sending of a request)."""

    may_be_sent = False


async def _body(answer: Answer, bytes_max: int) -> bytes | None:
    """All of it; None when it is larger."""
    pieces, size = [], 0
    while piece := await answer.read_some():
        size += len(piece)
        if size > bytes_max:
            return None
        pieces.append(piece)
    return b"".join(pieces)


def _answered(answer: Answer, body: bytes | None, url: URL, bytes_max: int) -> Answered:
    if body is None:
        return _refused("HTTP_TOO_LARGE", f"expected an answer of at most {bytes_max} bytes, found more")
    told: dict[str, Any] = {
        "status": answer.status,
        "url": str(url),
        "headers": {name: plain(answer.headers[name], 1024) for name in _HEADERS_TOLD if name in answer.headers},
    }
    try:
        told["body"] = body.decode()
        canonical_enclosed(told, bytes_max=DOCUMENT_BYTES_MAX)
    except (UnicodeDecodeError, InputMalformed, InputTooLarge):
        told |= {"body": base64.b64encode(body).decode(), "is_base64": True}
        try:
            canonical_enclosed(told, bytes_max=DOCUMENT_BYTES_MAX)
        except InputTooLarge:
            return _refused(
                "HTTP_TOO_LARGE", f"expected an answer that a tool effect can hold, found {len(body)} bytes"
            )
    return Answered("SUCCESS", JsonOutput(encoding="json", value=told))


def _refused(code: str, message: str) -> Answered:
    return Answered("FAILURE", None, code, plain(message))


def _sent(headers: Mapping[str, str]) -> dict[str, str]:
    for name in headers:
        if name.lower() not in _HEADERS_SENT:
            raise ValueError(f"expected headers {', '.join(sorted(_HEADERS_SENT))}, found {plain(name, 64)}")
    return dict(headers)
