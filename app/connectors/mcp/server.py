"""One MCP tool server: kept connected, its tools known, its calls sent once.

A server that cannot be reached holds up no other: it is tried again, more and more rarely, and calls to it are not
sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, Protocol

from app.config import ServerConfig
from app.connectors.answers import plain, traceparent_of
from app.connectors.mcp.answers import conclude, is_session_lost
from app.connectors.mcp.discovery import Discovery, McpTool, bounded_problems, discover
from app.connectors.mcp.http import HttpLink
from app.connectors.mcp.session import NoAgreement, ProbeUnanswered, Session, Unlistable, open_session
from app.connectors.mcp.wire import HANDSHAKE_VERSION, WITHHELD, Heard, Inbox, Link, ProgressWatcher, Reply, Silence
from app.connectors.server_status import Failure, ServerStatus, StatusWatch
from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import (
    MCP_BACKOFF_FIRST_MS,
    MCP_BACKOFF_MAX_MS,
    MCP_CANCEL_GRACE_MS,
    MCP_READY_WAIT_MS,
    MCP_REFRESH_EVERY_MS,
    MCP_REFRESH_PAUSE_MAX_MS,
    MCP_REFRESH_PAUSE_MS,
    MCP_STEADY_AFTER_MS,
)
from app.domain.tga.documents import JsonOutput, ToolCall
from app.domain.tga.ports import Answered, Dispatched, MaySend, NotSent, Unknown, Withheld

logger = logging.getLogger("tga")

# The tools are known to the registry when it returns; what it returns is why some of them cannot be called.
Publish = Callable[[Discovery], Awaitable[Sequence[str]]]
_CALM_TIMES: Final = 4


class Transport(Protocol):
    """How a server is reached: a child to be started, or an address."""

    def open(self, inbox: Inbox) -> AbstractAsyncContextManager[Link]:
        """Raises OSError when there is no way now."""
        ...

    def complaints(self) -> str:
        """The last of what a child wrote to its stderr."""
        ...


@dataclass(frozen=True, slots=True)
class Connection:
    """How it stands with an MCP server. `problems`: what is wrong with its tools. `stderr`: the last of what a child
    complained of; it may hold what only an operator should see."""

    state: Literal["connecting", "connected", "waiting", "stopped"]
    protocol_version: str | None = None
    server: str | None = None
    connects: int = 0
    last_error: str | None = None
    problems: tuple[str, ...] = ()
    stderr: str = ""


class Watchers:
    """Who wants to hear of the progress of which trace. In this process only, and nothing of it is recorded."""

    def __init__(self) -> None:
        self._by_trace: dict[str, ProgressWatcher] = {}

    @contextlib.contextmanager
    def watch(self, trace_id: str, watcher: ProgressWatcher) -> Any:
        self._by_trace[trace_id] = watcher
        try:
            yield
        finally:
            self._by_trace.pop(trace_id, None)

    def of(self, trace_id: str) -> ProgressWatcher | None:
        """What is given never raises: a watcher's mistake is not the server's."""
        watcher = self._by_trace.get(trace_id)
        if watcher is None:
            return None

        def told(params: dict[str, Any]) -> None:
            with contextlib.suppress(Exception):
                watcher(params)

        return told


class McpServer:
    """A connector to one MCP server (the port Connector). `start` and `close` are its life."""

    def __init__(
        self,
        server_id: str,
        config: ServerConfig,
        transport: Transport,
        *,
        publish: Publish,
        watchers: Watchers,
        now: Callable[[], str],
    ) -> None:
        self.server_id = server_id
        self._config = config
        self._transport = transport
        self._publish = publish
        self._watchers = watchers
        self._tools: dict[str, McpTool] = {}
        self._session: Session | None = None
        self._ready = asyncio.Event()
        self._tried = asyncio.Event()
        self._tools_changed = asyncio.Event()
        self._running: dict[str, asyncio.Event] = {}
        self._task: asyncio.Task[None] | None = None
        self._known = Connection("stopped")
        self._status = StatusWatch(server_id, now)
        self._needs_handshake = False

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self._stay_connected())

    async def tried(self) -> None:
        """Wait until the first attempt to connect is over."""
        await self._tried.wait()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._note(state="stopped")

    def connection(self) -> Connection:
        return replace(self._known, stderr=self._transport.complaints())

    def status(self) -> ServerStatus:
        return self._status.status

    def cancel(self, trace_id: str) -> bool:
        """The caller does not want the call any more: tell the server. False: it is not under way here."""
        stop = self._running.get(trace_id)
        if stop is not None:
            stop.set()
        return stop is not None

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        """What is known of the call after at most `timeout_ms`. It is written once, or not at all.

        A server that is just being started again is waited for, as part of that time. CancelledError passes through,
        and then nothing is known.
        """
        began = asyncio.get_running_loop().time()
        session = await self._connected(min(timeout_ms, MCP_READY_WAIT_MS) / 1000)
        if session is None:
            return NotSent(f"the server is not connected: {self._known.last_error or 'it is still starting'}")
        left_s = timeout_ms / 1000 - (asyncio.get_running_loop().time() - began)
        if left_s <= 0:
            return NotSent(f"the server was not connected within {timeout_ms} ms")
        heard, is_cancelled = await self._call(session, call, arguments, traceparent, left_s, may_send)
        if heard is WITHHELD:
            return Withheld()
        if session.has_http_session and is_session_lost(heard) and isinstance(session.link, HttpLink):
            session.link.lose("the server does not know the session")
        if is_cancelled and isinstance(heard, Silence) and heard.kind != "not_sent":
            return Unknown("disconnected", "the caller cancelled it; the server said nothing", is_cancelled=True)
        known = conclude(heard, has_session=session.has_http_session)
        return _reconciling(known) if call.reconcile_tool == call.tool_name else known

    async def _call(
        self,
        session: Session,
        call: ToolCall,
        arguments: dict[str, Any] | None,
        traceparent: str | None,
        timeout_s: float,
        may_send: MaySend | None,
    ) -> tuple[Heard, bool]:
        """The one request, and whether the caller took it back meanwhile."""
        tool = self._tools.get(call.tool_name)
        try:
            outgoing = session.call(
                call.tool_name,
                call.arguments if arguments is None else arguments,
                _meta(call, traceparent),
                param_headers=tool.param_headers if tool is not None else lambda _: {},
                on_progress=self._watchers.of(call.trace_id),
                may_send=may_send,
            )
            outgoing.written()
        except (InputMalformed, InputTooLarge) as error:  # its text may show a part of them
            return Silence("unwritable", f"the arguments cannot be written: {error.code}"), False
        stop = self._running[call.trace_id] = asyncio.Event()
        sending = asyncio.create_task(session.link.request(outgoing, timeout_s=timeout_s))
        stopping = asyncio.create_task(stop.wait())
        try:
            await asyncio.wait({sending, stopping}, return_when=asyncio.FIRST_COMPLETED)
            if sending.done():
                return sending.result(), False
            # Honest to the end: an answer that comes all the same is the outcome.
            if await session.link.abandon(outgoing.request_id):
                await asyncio.wait({sending}, timeout=MCP_CANCEL_GRACE_MS / 1000)
            if sending.done():
                return sending.result(), True
            return Silence("disconnected", "cancelled"), True
        finally:
            self._running.pop(call.trace_id, None)
            for task in (sending, stopping):
                task.cancel()
            await asyncio.gather(sending, stopping, return_exceptions=True)

    async def _connected(self, wait_s: float) -> Session | None:
        if self._session is not None and self._session.link.is_lost:
            self._session = None  # before the one that keeps it connected has come to notice
            self._ready.clear()
        if self._session is None and self._task is not None and not self._task.done():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._ready.wait()
        return self._session

    async def _stay_connected(self) -> None:
        failures = 0
        loop = asyncio.get_running_loop()
        while True:
            began = loop.time()
            self._note(state="connecting")
            self._status.note_starting()
            try:
                async with self._agreed() as session:
                    await self._serve(session)
            except NoAgreement as error:
                self._note_down(plain(str(error)), plain(error.reason), is_late=error.is_late)
            except OSError as error:
                self._note_down(plain(f"{type(error).__name__}: {error.strerror}"), plain(type(error).__name__))
            except Exception as error:  # whatever it is, it must not end the watching
                self._note_down(plain(type(error).__name__), plain(type(error).__name__))
            finally:
                self._session = None
                self._ready.clear()
                self._tried.set()
            self._note(state="waiting")
            failures = 0 if loop.time() - began > MCP_STEADY_AFTER_MS / 1000 else failures + 1
            wait_ms = min(MCP_BACKOFF_FIRST_MS * 2 ** min(failures, 10), MCP_BACKOFF_MAX_MS)
            await asyncio.sleep(wait_ms / 1000)

    @asynccontextmanager
    async def _agreed(self) -> AsyncIterator[Session]:
        """A session over a new link, with the tools known."""
        version = self._config.protocol_version or (HANDSHAKE_VERSION if self._needs_handshake else None)
        async with self._transport.open(Inbox(self._tools_changed.set)) as link:
            try:
                session = await open_session(link, pinned_version=version, timeout_ms=self._config.start_timeout_ms)
            except NoAgreement as error:
                # Some servers of the older protocol end at a question they do not know, or pass over it: the next one
                # gets the older question alone. If that leads nowhere either, the newer one has its turn again.
                self._needs_handshake = isinstance(error, ProbeUnanswered)
                raise
            self._note(protocol_version=session.version, server=session.server_name)
            await self._refresh(session)
            yield session

    async def _serve(self, session: Session) -> None:
        """Calls may be sent from here until the link is lost; changes of the tools are followed."""
        self._session = session
        self._note(state="connected", connects=self._known.connects + 1, last_error=None)
        self._status.note_up()
        self._ready.set()
        self._tried.set()
        tasks = {
            asyncio.create_task(session.link.wait_lost()),
            asyncio.create_task(self._follow_changes(session)),
            asyncio.create_task(self._listen(session)),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                why = task.result()
                raise NoAgreement(why or "the connection ended")
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_changes(self, session: Session) -> str:
        loop = asyncio.get_running_loop()
        pause_ms, refreshed_at = MCP_REFRESH_PAUSE_MS, loop.time()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._refresh_every_s(session)):
                    await self._tools_changed.wait()
            # A server whose tools change all the time is asked for them more and more rarely: listing them costs.
            is_calm = (loop.time() - refreshed_at) * 1000 > _CALM_TIMES * pause_ms
            pause_ms = MCP_REFRESH_PAUSE_MS if is_calm else min(2 * pause_ms, MCP_REFRESH_PAUSE_MAX_MS)
            await asyncio.sleep(pause_ms / 1000)  # several changes at once are one
            self._tools_changed.clear()
            try:
                await self._refresh(session)
            except Unlistable as error:
                # The tools that it had before are still there to be called.
                self._tell([f"the list of its tools cannot be read, and they stay as they were: {error}"])
            refreshed_at = loop.time()

    def _refresh_every_s(self, session: Session) -> float | None:
        # A child's end is noticed; of a server over HTTP, only asking shows that it is another one now.
        return MCP_REFRESH_EVERY_MS / 1000 if isinstance(session.link, HttpLink) else None

    async def _listen(self, session: Session) -> str:
        """Hear of changes where the server must be asked to tell of them; never the reason to give up a session."""
        pause_ms = MCP_BACKOFF_FIRST_MS
        while True:
            try:
                heard = await session.listen()
            except Exception:
                heard = 503  # no connection: the next attempt may find one
            if heard is None or heard == 405 or (isinstance(heard, Reply) and heard.message.error is not None):
                await asyncio.Event().wait()  # it does not tell; asking from time to time must do
            if heard in (400, 404):
                return "the server does not know the session"
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, MCP_BACKOFF_MAX_MS)
            self._tools_changed.set()  # the tools may have changed while this gateway did not listen

    async def _refresh(self, session: Session) -> None:
        listing = await session.list_tools()
        # In a thread: hundreds of schemas take a while, and calls to other servers go on.
        discovery = await asyncio.to_thread(discover, self.server_id, self._config, listing)
        self._tools = {tool.tool_name: tool for tool in discovery.tools}
        unpinned = await self._publish(discovery)
        self._tell([*discovery.problems, *unpinned])

    def _tell(self, problems: Sequence[str]) -> None:
        """What is wrong with its tools: kept for `tga servers`, and logged where it was not wrong before."""
        told = bounded_problems(problems)
        for problem in told:
            if problem not in self._known.problems:
                logger.warning("server %s: %s", self.server_id, problem)
        self._note(problems=told)

    def _note_down(self, error: str, reason: str, *, is_late: bool = False) -> None:
        self._note(last_error=error)
        self._status.note_down(Failure(reason, _remedy(self.server_id, self._config, is_late=is_late), error))

    def _note(self, **changes: Any) -> None:
        self._known = replace(self._known, **changes)


def _remedy(server_id: str, config: ServerConfig, *, is_late: bool) -> str:
    table = f"servers.{server_id.rpartition('/')[2]}"
    if is_late:
        return (
            f"If it needs longer to start, raise {table}.start_timeout_ms (now {config.start_timeout_ms}). If it is of "
            f"an older protocol and passes over what it does not know, set {table}.protocol_version to "
            f'"{HANDSHAKE_VERSION}".'
        )
    if config.command is not None:
        return f"What it wrote to stderr (`tga servers`) may say why; else run {table}.command by hand."
    return f"Start it, or correct {table}.url and its credentials in tga.toml."


def _meta(call: ToolCall, traceparent: str | None) -> dict[str, Any]:
    meta = {
        "tga/tool-call-id": call.tool_call_id,
        "tga/trace-id": call.trace_id,
        "traceparent": traceparent_of(call, traceparent),
    }
    if call.key_at_server is not None:
        meta["tga/idempotency-key"] = call.key_at_server
    return meta


def _reconciling(known: Dispatched) -> Dispatched:
    """The runtime asks a reconciling tool for `{executed, output?}`: of an MCP tool, that is its structured content."""
    if isinstance(known, Answered) and known.outcome == "SUCCESS" and isinstance(known.output, JsonOutput):
        structured = known.output.value.get("structuredContent")
        if isinstance(structured, dict):
            return Answered("SUCCESS", JsonOutput(encoding="json", value=structured))
    return known
