"""JSON-RPC 2.0 as MCP speaks it: messages out, messages in, and what became of a request. No I/O.

A result is kept as the very bytes that the server wrote, so that it can be recorded unchanged.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from json.decoder import WHITESPACE, scanstring  # type: ignore[attr-defined]
from typing import Any, Final, Literal, Protocol

from app.connectors.mcp.large import Large
from app.core.canonical import canonical_bytes
from app.core.limits import MCP_ANSWER_BYTES_MAX, MCP_MESSAGE_BYTES_MAX, MCP_REPLIES_PER_SECOND_MAX, OUTPUT_VALUES_MAX
from app.domain.tga.ports import MaySend

# Written out here: importing mcp_types costs every `tga` command a quarter of a second. A test compares them.
MODERN_VERSION: Final = "2026-07-28"
HANDSHAKE_VERSION: Final = "2025-11-25"
HANDSHAKE_VERSIONS: Final = ("2024-11-05", "2025-03-26", "2025-06-18", HANDSHAKE_VERSION)
VERSION_META: Final = "io.modelcontextprotocol/protocolVersion"
CLIENT_META: Final = "io.modelcontextprotocol/clientInfo"
CAPABILITIES_META: Final = "io.modelcontextprotocol/clientCapabilities"
SERVER_META: Final = "io.modelcontextprotocol/serverInfo"
CONNECTION_CLOSED: Final = -32000
REQUEST_TIMEOUT: Final = -32001
METHOD_NOT_FOUND: Final = -32601

ProgressWatcher = Callable[[dict[str, Any]], None]
# What a server of this protocol tells of its own accord, and what is done about it.
TOOLS_CHANGED: Final = "notifications/tools/list_changed"
PROGRESS: Final = "notifications/progress"
CANCELLED: Final = "notifications/cancelled"
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A request: what is sent, once. `headers` go with it over HTTP."""

    request_id: int
    method: str
    params: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)
    on_progress: ProgressWatcher | None = None
    may_send: MaySend | None = None  # asked right before the first byte; where it says no, WITHHELD is heard

    def written(self) -> bytes:
        """Raises InputMalformed or InputTooLarge for what cannot be written."""
        return canonical_bytes({"jsonrpc": "2.0", "id": self.request_id, "method": self.method, "params": self.params})


def written_notification(method: str, params: dict[str, Any] | None = None) -> bytes:
    return canonical_bytes({"jsonrpc": "2.0", "method": method} | ({} if params is None else {"params": params}))


@dataclass(frozen=True, slots=True)
class Message:
    """What a server wrote: its members, and the bytes of its result."""

    members: dict[str, Any]
    result_bytes: bytes | None = None

    @property
    def is_answer(self) -> bool:
        return "method" not in self.members and ("result" in self.members or "error" in self.members)

    @property
    def result(self) -> Any:
        return self.members.get("result")

    @property
    def error(self) -> dict[str, Any] | None:
        """The error object, an empty one if it is none; None when the answer is a result."""
        if "error" not in self.members or self.members["error"] is None:
            return None
        error = self.members["error"]
        return error if isinstance(error, dict) else {}


class NotAMessage(Exception):
    """It is not a JSON-RPC message."""


def read_message(raw: bytes) -> Message:
    """Read leniently, so that an answer is recognised even if what is in it could not be stored."""
    try:
        text = raw.decode("utf-8").strip()
        members, result_text = _members(text)
    except (ValueError, RecursionError, IndexError, TypeError) as error:
        raise NotAMessage(type(error).__name__) from None
    return Message(members, None if result_text is None else result_text.encode("utf-8"))


def _members(text: str) -> tuple[dict[str, Any], str | None]:
    """The members of the object, each decoded once, and the text of its `result`."""
    if not text.startswith("{"):
        raise ValueError
    members: dict[str, Any] = {}
    result_text = None
    at = _skip(text, 1)
    while text[at] != "}":
        name, at = scanstring(text, at + 1) if text[at] == '"' else _fail()
        at = _skip(text, at)
        start = _skip(text, at + 1) if text[at] == ":" else _fail()
        members[name], at = _DECODER.raw_decode(text, start)
        if name == "result":
            result_text = text[start:at]
        at = _skip(text, at)
        if text[at] == ",":
            at = _skip(text, at + 1)
        elif text[at] != "}":
            raise ValueError
    if at != len(text) - 1:
        raise ValueError
    return members, result_text


def _skip(text: str, at: int) -> int:
    return int(WHITESPACE.match(text, at).end())


def _fail() -> Any:
    raise ValueError


def bytes_read_whole(method: str) -> int:
    """How large an answer to such a request may be to be read whole."""
    # Of a call's answer no more could be stored.
    return MCP_ANSWER_BYTES_MAX if method == "tools/call" else MCP_MESSAGE_BYTES_MAX


def read_large(large: Large, method: str) -> Reply | Oversize:
    """The large answer to such a request. Raises NotAMessage."""
    raw = large.raw
    if raw is None or len(raw) > bytes_read_whole(method):
        return Oversize(large)
    if method == "tools/call" and raw.count(b",") + raw.count(b"[") + raw.count(b"{") > OUTPUT_VALUES_MAX:
        return Oversize(large)  # few bytes, and many values: as slow to read as if it were long
    return Reply(read_message(raw))


@dataclass(frozen=True, slots=True)
class Reply:
    """The server's answer to the request; `status` is that of HTTP."""

    message: Message
    status: int = 200
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Oversize:
    """The server's answer, too large to be read whole: what a look through it showed."""

    large: Large


@dataclass(frozen=True, slots=True)
class Refusal:
    """An HTTP answer that carries no JSON-RPC answer."""

    status: int
    detail: str
    retry_after_ms: int | None = None


@dataclass(frozen=True, slots=True)
class Silence:
    """No answer. `not_sent`, `unwritable`, `withheld`: certain that no byte of the request left; otherwise it may have
    been received. What is `unwritable` never can be sent."""

    kind: Literal["not_sent", "unwritable", "withheld", "timed_out", "disconnected"]
    detail: str


WITHHELD: Final = Silence("withheld", "the gateway did not send it")


Heard = Reply | Oversize | Refusal | Silence


class Link(Protocol):
    """A way to one MCP server. It writes each request once, whatever happens, and raises for nothing it does."""

    async def request(self, outgoing: Outgoing, *, timeout_s: float | None) -> Heard:
        """CancelledError passes through, and then nothing is known; the server is told that the caller does not
        wait."""
        ...

    async def notify(self, method: str, params: dict[str, Any] | None = None) -> None: ...

    async def abandon(self, request_id: int) -> bool:
        """Tell the server that its answer is not wanted any more. True: it may answer all the same. False: the only
        way to say so is to end the request."""
        ...

    @property
    def is_lost(self) -> bool: ...

    async def wait_lost(self) -> str:
        """Return why, as soon as nothing can be sent any more."""
        ...

    async def close(self) -> None: ...


class Inbox:
    """What a server says without being asked."""

    def __init__(self, on_tools_changed: Callable[[], None], *, clock: Callable[[], float] = time.monotonic) -> None:
        self._on_tools_changed = on_tools_changed
        self._clock = clock
        self._replies: deque[float] = deque(maxlen=MCP_REPLIES_PER_SECOND_MAX)
        self._watchers: dict[int, ProgressWatcher] = {}

    def watch(self, outgoing: Outgoing) -> None:
        if outgoing.on_progress is not None:
            self._watchers[outgoing.request_id] = outgoing.on_progress

    def unwatch(self, outgoing: Outgoing) -> None:
        self._watchers.pop(outgoing.request_id, None)

    def take(self, message: Message) -> bytes | None:
        """Note it; what it returns is to be sent back."""
        method, params = message.members.get("method"), message.members.get("params")
        if not isinstance(method, str):
            return None
        if "id" in message.members:
            return _answer(method, message.members["id"]) if self._may_reply() else None
        if method == TOOLS_CHANGED:
            self._on_tools_changed()
        elif method == PROGRESS and isinstance(params, dict):
            token = params.get("progressToken")
            watcher = self._watchers.get(token) if isinstance(token, int) else None
            if watcher is not None:
                watcher(params)
        return None

    def _may_reply(self) -> bool:
        # Over HTTP a reply is a request of its own: who asks without end is not answered without end.
        now = self._clock()
        if len(self._replies) == MCP_REPLIES_PER_SECOND_MAX and now - self._replies[0] < 1:
            return False
        self._replies.append(now)
        return True


def _answer(method: str, request_id: Any) -> bytes | None:
    # The gateway declares no capabilities: a server has nothing to ask of it but whether it lives.
    if isinstance(request_id, bool) or not isinstance(request_id, int | str):
        return None
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": request_id}
    if method == "ping":
        answer["result"] = {}
    else:
        answer["error"] = {"code": METHOD_NOT_FOUND, "message": "The gateway answers no requests of tool servers."}
    try:
        return canonical_bytes(answer)
    except Exception:  # an id that cannot be written back
        return None
