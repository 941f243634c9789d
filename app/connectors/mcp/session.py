"""What is agreed with an MCP server, and requests in the terms of that agreement.

Two protocols: 2026-07-28, where every request says for itself what it follows (`server/discover` asks what the server
can), and the versions until 2025-11-25, which begin with a handshake (`initialize`).
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from app import __version__
from app.connectors.answers import plain
from app.connectors.mcp.http import HttpLink
from app.connectors.mcp.wire import (
    CAPABILITIES_META,
    CLIENT_META,
    HANDSHAKE_VERSION,
    HANDSHAKE_VERSIONS,
    MODERN_VERSION,
    SERVER_META,
    VERSION_META,
    Heard,
    Link,
    Outgoing,
    Oversize,
    ProgressWatcher,
    Refusal,
    Reply,
    Silence,
)
from app.core.limits import MCP_ANSWER_MS, MCP_LISTING_BYTES_MAX, MCP_PAGES_MAX, MCP_TOOLS_MAX
from app.domain.tga.ports import MaySend

CLIENT: Final = {"name": "tga-gateway", "version": __version__}
_NO_CAPABILITIES: Final[dict[str, Any]] = {}
_UNPROVEN: Final = frozenset({401, 403, 407})


class NoAgreement(Exception):
    """Why a server cannot be used now, in words that hold no secret. `reason`: the same without the server's own words.
    `is_late`: it has not answered in time, and may only be slow."""

    def __init__(self, said: str, *, reason: str | None = None, is_late: bool = False) -> None:
        super().__init__(said)
        self.reason = reason or said
        self.is_late = is_late


class Unlistable(NoAgreement):
    """What the server lists cannot be read; it may still be called."""


class ProbeUnanswered(NoAgreement):
    """A question of the newest protocol was not answered: the server may bear only the older one."""


@dataclass(slots=True)
class Listing:
    """What a server lists, as it lists it, and what was left out."""

    tools: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


class Session:
    """An agreement with a server, over one link."""

    def __init__(self, link: Link, version: str, capabilities: Mapping[str, Any], server_info: Any) -> None:
        self.link = link
        self.version = version
        self.is_modern = version == MODERN_VERSION
        tools = capabilities.get("tools")
        self.announces_changes = isinstance(tools, dict) and tools.get("listChanged") is True
        info = server_info if isinstance(server_info, dict) else {}
        self.server_name = plain(f"{info.get('name', '')} {info.get('version', '')}".strip(), 128)
        # Numbers that occur nowhere by chance, so that an answer too large to be read can still be told by its id.
        self._ids = itertools.count(2**48 + secrets.randbelow(2**48))

    @property
    def has_http_session(self) -> bool:
        return isinstance(self.link, HttpLink) and self.link.session_id is not None

    def outgoing(
        self, method: str, params: dict[str, Any], headers: dict[str, str] | None = None, **how: Any
    ) -> Outgoing:
        request_id = next(self._ids)
        if how.get("on_progress") is not None:
            params = params | {"_meta": params.get("_meta", {}) | {"progressToken": request_id}}
        if self.is_modern:
            params, headers = _modern(self.version, method, params), _modern_headers(method, params) | (headers or {})
        return Outgoing(request_id, method, params, headers or {}, **how)

    def call(
        self,
        tool_name: str,
        arguments: dict[str, Any],
        meta: dict[str, Any],
        *,
        param_headers: Callable[[dict[str, Any]], dict[str, str]],
        on_progress: ProgressWatcher | None,
        may_send: MaySend | None,
    ) -> Outgoing:
        """The request that calls the tool; nothing is sent."""
        params = {"name": tool_name, "arguments": arguments, "_meta": meta}
        headers = param_headers(arguments) if self.is_modern else {}
        return self.outgoing("tools/call", params, headers, on_progress=on_progress, may_send=may_send)

    async def list_tools(self) -> Listing:
        """All pages, within bounds. Raises NoAgreement when the server does not answer with tools."""
        listing, size_bytes = Listing(), 0
        cursor: str | None = None
        for _ in range(MCP_PAGES_MAX):
            params = {} if cursor is None else {"cursor": cursor}
            result, page_bytes = await self._page(params)
            tools = result.get("tools")
            if not isinstance(tools, list):
                raise Unlistable("tools/list was answered without tools")
            size_bytes += page_bytes
            if size_bytes > MCP_LISTING_BYTES_MAX:
                listing.problems.append(f"its list has more than {MCP_LISTING_BYTES_MAX} bytes; the rest is left out")
                return listing
            listing.tools += [tool for tool in tools if isinstance(tool, dict)]
            if strange := sum(not isinstance(tool, dict) for tool in tools):
                listing.problems.append(f"{strange} of what it lists are no tools, and left out")
            cursor = result.get("nextCursor")
            if len(listing.tools) > MCP_TOOLS_MAX:
                del listing.tools[MCP_TOOLS_MAX:]
                listing.problems.append(f"it lists more than {MCP_TOOLS_MAX} tools; the rest is left out")
                return listing
            if not isinstance(cursor, str):
                return listing
        listing.problems.append(f"its list has more than {MCP_PAGES_MAX} pages; the rest is left out")
        return listing

    async def listen(self) -> Heard | int | None:
        """Stay as long as the server tells of changes. None at once where it does so unasked, or never."""
        if self.is_modern:
            if not self.announces_changes:
                return None
            wanted = {"notifications": {"toolsListChanged": True}}
            return await self.link.request(self.outgoing("subscriptions/listen", wanted), timeout_s=None)
        if isinstance(self.link, HttpLink) and self.link.session_id is not None:
            return await self.link.listen()
        return None

    async def _page(self, params: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """A page of the list, and how many bytes it has."""
        heard = await self.link.request(self.outgoing("tools/list", params), timeout_s=MCP_ANSWER_MS / 1000)
        if isinstance(heard, Oversize):
            raise Unlistable(f"tools/list was answered with {heard.large.size_bytes} bytes, which is too much")
        result = _result_of("tools/list", heard)
        return result, len(heard.message.result_bytes or b"") if isinstance(heard, Reply) else 0


async def open_session(link: Link, *, pinned_version: str | None, timeout_ms: int) -> Session:
    """Agree with the server on a version, the newest first unless one is pinned. Raises NoAgreement.

    A server that is still starting answers late, and in order. So the second question is asked only when the first was
    answered: a client that asks both at once may get the answer to the wrong one.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_ms / 1000
    if pinned_version is None or pinned_version == MODERN_VERSION:
        session = await _discover(link, must=pinned_version is not None, timeout_s=timeout_ms / 1000)
        if session is not None:
            return session
    return await _initialize(link, timeout_s=max(0.0, deadline_s - asyncio.get_running_loop().time()))


async def _discover(link: Link, *, must: bool, timeout_s: float) -> Session | None:
    """None: the server does not speak that protocol, and another may be tried."""
    # Before the agreement, requests are made as if it were there: it is what they ask for.
    draft = Session(link, MODERN_VERSION, {}, None)
    heard = await link.request(draft.outgoing("server/discover", {}), timeout_s=timeout_s)
    if isinstance(heard, Silence):
        raise ProbeUnanswered(heard.detail, is_late=heard.kind == "timed_out")
    if isinstance(heard, Refusal) and (heard.status in _UNPROVEN or heard.status >= 500):
        raise NoAgreement(heard.detail, reason=f"the server answered {heard.status}")
    result = heard.message.result if isinstance(heard, Reply) and heard.message.error is None else None
    versions = result.get("supportedVersions") if isinstance(result, dict) else None
    if isinstance(result, dict) and isinstance(versions, list) and MODERN_VERSION in versions:
        if isinstance(link, HttpLink):
            link.is_cancelled_by_closing = True
        meta = result.get("_meta")
        info = meta.get(SERVER_META) if isinstance(meta, dict) else None
        return Session(link, MODERN_VERSION, _dict(result.get("capabilities")), info)
    if must:
        raise NoAgreement(f"the server does not speak {MODERN_VERSION}")
    return None


async def _initialize(link: Link, *, timeout_s: float) -> Session:
    draft = Session(link, HANDSHAKE_VERSION, {}, None)
    params = {"protocolVersion": HANDSHAKE_VERSION, "capabilities": _NO_CAPABILITIES, "clientInfo": CLIENT}
    heard = await link.request(draft.outgoing("initialize", params), timeout_s=timeout_s)
    result = _result_of("initialize", heard)
    version = result.get("protocolVersion")
    if version not in HANDSHAKE_VERSIONS:
        raise NoAgreement(
            plain(f"the server speaks {version}, which the gateway does not"),
            reason="the server speaks a version that the gateway does not",
        )
    if isinstance(link, HttpLink):
        link.headers = {"MCP-Protocol-Version": version}
    await link.notify("notifications/initialized")
    return Session(link, version, _dict(result.get("capabilities")), result.get("serverInfo"))


def _result_of(method: str, heard: Heard) -> dict[str, Any]:
    match heard:
        case Reply(message) if message.error is None and isinstance(message.result, dict):
            return message.result
        case Reply(message) if message.error is not None:
            raise NoAgreement(
                plain(f"{method}: error {message.error.get('code')}: {message.error.get('message')}"),
                reason=f"{method} was answered with an error",
            )
        case Silence("timed_out", detail):
            raise NoAgreement(plain(f"{method}: {detail}"), is_late=True)
        case Silence(_, detail):
            raise NoAgreement(plain(detail))  # whatever was asked, the server is not there
        case Refusal(status):
            raise NoAgreement(plain(f"{method}: {heard.detail}"), reason=f"{method} was answered with status {status}")
    raise NoAgreement(f"{method}: the answer cannot be read")


def _modern(version: str, method: str, params: dict[str, Any]) -> dict[str, Any]:
    meta = {
        **params.get("_meta", {}),
        VERSION_META: version,
        CLIENT_META: CLIENT,
        CAPABILITIES_META: _NO_CAPABILITIES,
    }
    return params | {"_meta": meta}


def _modern_headers(method: str, params: dict[str, Any]) -> dict[str, str]:
    headers = {"MCP-Protocol-Version": MODERN_VERSION, "Mcp-Method": method}
    if method == "tools/call":
        headers["Mcp-Name"] = params["name"]  # a Name: visible ASCII
    return headers


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
