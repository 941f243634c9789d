"""An HTTP/1.1 client that sends each request once: a pool of connections to each server, and nothing kept but these.

No redirects, cookies, proxies, decompression or retries: a request whose first byte was given to a socket is never
sent again, and one that was not raises NotConnected. The caller keeps the time (`asyncio.timeout`).
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
import ssl
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from functools import lru_cache
from types import TracebackType
from typing import TYPE_CHECKING, Final, NamedTuple, Self

import aiohappyeyeballs
from yarl import URL

from app import __version__
from app.connectors.http_connection import Answer, Connection, NotConnected, Sending, SendingWithheld
from app.connectors.intake import Intake
from app.core.limits import CONNECT_STAGGER_MS, CONNECTIONS_PER_SERVER_MAX, IDLE_CONNECTION_MS

if TYPE_CHECKING:  # commands use this client, and a trace's documents take long to load
    from app.domain.tga.ports import MaySend

_FIELD_NAME: Final = re.compile(r"[!#$%&'*+\-.^_`|~0-9A-Za-z]+")
_TARGET: Final = re.compile(r"/[!-~]*")
_UNWRITABLE: Final = re.compile(r"[\x00\r\n]")
_HEADER_SETS_KEPT: Final = 64
_OURS: Final = {"User-Agent": f"tga/{__version__}", "Accept": "*/*", "Accept-Encoding": "identity"}


class Origin(NamedTuple):
    """A server as it is connected to."""

    is_tls: bool
    host: str
    port: int

    @classmethod
    def of(cls, url: URL) -> Self:
        if url.scheme not in ("http", "https") or url.raw_host is None or url.port is None:
            raise ValueError("not an address of an HTTP server")
        return cls(url.scheme == "https", url.raw_host, url.port)

    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == (443 if self.is_tls else 80) else f"{host}:{self.port}"


class HttpPool:
    """Connections to any number of servers, at most so many to each. Belongs to the loop in which it is first used."""

    def __init__(
        self,
        *,
        connections_per_server: int = CONNECTIONS_PER_SERVER_MAX,
        keeps_alive: bool = True,
        intake: Intake | None = None,
        verify_address: Callable[[str, str], None] | None = None,
    ) -> None:
        """`verify_address` is told the host and each address that its name has, before a connection is made; it raises
        NotConnected for one that must not be reached."""
        self.intake = intake or Intake()
        self._verify_address = verify_address
        self.is_closed = False
        self._connections_per_server = connections_per_server
        self._keeps_alive = keeps_alive
        self._servers: dict[Origin, _Server] = {}

    def request(
        self,
        method: str,
        origin: Origin,
        target: str,
        *,
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        sending: Sending | None = None,
        may_send: MaySend | None = None,
    ) -> AbstractAsyncContextManager[Answer]:
        """Send it once; the head of its answer is known inside. What is not read of the body is not fetched.

        Raises NotConnected when certainly nothing was sent, other HttpFailures afterwards, and ValueError for headers
        that cannot be written. `sending` tells the two apart when the caller's time runs out. `may_send` is asked when
        the connection is there, and nothing is waited for between its answer and the first byte; SendingWithheld if it
        says no.
        """
        written = _written(method, origin, target, headers or {}, body, keeps_alive=self._keeps_alive)
        return _Exchange(self, self._server(origin), written, sending, may_send)

    @property
    def may_keep(self) -> bool:
        """Whether a connection is kept for the next request."""
        return self._keeps_alive and not self.is_closed

    async def verify_reachable(self, origin: Origin) -> None:
        """Raise NotConnected unless a connection can be made now. It is closed again, and nothing is sent on it."""
        server = self._server(origin)
        server.give_back(await server.connect(), keeps_alive=False)

    def _server(self, origin: Origin) -> _Server:
        server = self._servers.get(origin)
        if server is None:
            server = self._servers[origin] = _Server(origin, self._connections_per_server, self._verify_address)
        return server

    async def close(self) -> None:
        """Drop all connections, those in use too."""
        self.is_closed = True
        for server in self._servers.values():
            server.close()
        await asyncio.sleep(0)  # the loop closes their sockets


class _Exchange:
    """One request and its answer, with the connection that it has until its `async with` ends. A class, because the
    loop keeps a book of every generator that a decorated function would make."""

    __slots__ = ("_connection", "_may_send", "_pool", "_sending", "_server", "_written")

    def __init__(
        self, pool: HttpPool, server: _Server, written: bytes, sending: Sending | None, may_send: MaySend | None
    ) -> None:
        # Set here for good.
        self._pool = pool
        self._server = server
        self._written = written
        self._sending = sending
        self._may_send = may_send
        # Set when there is one: then it is given back.
        self._connection: Connection | None = None

    async def __aenter__(self) -> Answer:
        pool, server, may_send = self._pool, self._server, self._may_send
        await server.places.acquire()
        try:
            if pool.is_closed:
                raise NotConnected("the client is closed")
            self._connection = connection = server.idle_connection() or await server.connect()
            if may_send is not None and not await may_send():
                raise SendingWithheld("it was not to be sent")
            if may_send is not None and not connection.is_fresh():
                raise NotConnected("the server spoke unasked, or left, before anything was sent")
            answer = connection.ask(self._written, self._sending, pool.intake)
            await answer.head()
        except BaseException:
            self._end()
            raise
        return answer

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def _end(self) -> None:
        try:
            if self._connection is not None:
                self._server.give_back(self._connection, keeps_alive=self._pool.may_keep)
        finally:
            self._server.places.release()


class _Server:
    """The connections to one server. `places` bounds those in use; idle ones were in use before, so all are bounded."""

    def __init__(
        self, origin: Origin, connections_max: int, verify_address: Callable[[str, str], None] | None = None
    ) -> None:
        self._verify_address = verify_address
        self.places = asyncio.Semaphore(connections_max)
        self._origin = origin
        self._tls = _tls_context() if origin.is_tls else None
        self._idle: list[Connection] = []
        self._all: set[Connection] = set()
        self._cleaning: asyncio.TimerHandle | None = None
        self._is_closed = False

    def idle_connection(self) -> Connection | None:
        """The one used last that is still fresh."""
        oldest_s = asyncio.get_running_loop().time() - IDLE_CONNECTION_MS / 1000
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s > oldest_s and connection.is_fresh():
                return connection
            self._forget(connection)
        return None

    async def connect(self) -> Connection:
        host, port = self._origin.host, self._origin.port
        loop = asyncio.get_running_loop()
        try:
            addresses = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
            if self._verify_address is not None:
                for _, _, _, _, address in addresses:
                    self._verify_address(host, str(address[0]))
            connected = await aiohappyeyeballs.start_connection(
                addresses, happy_eyeballs_delay=CONNECT_STAGGER_MS / 1000, interleave=1
            )
            _, connection = await loop.create_connection(
                Connection, sock=connected, ssl=self._tls, server_hostname=host if self._tls is not None else None
            )
        except ssl.SSLError as error:
            raise NotConnected(f"no TLS: {error.reason or type(error).__name__}") from None
        except (OSError, EOFError) as error:
            raise NotConnected(_why(error)) from None
        if self._is_closed:
            connection.drop()
            raise NotConnected("the client is closed")
        self._all.add(connection)
        return connection

    def give_back(self, connection: Connection, *, keeps_alive: bool) -> None:
        if not keeps_alive or not connection.is_reusable():
            self._forget(connection)
            return
        connection.rest()
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.append(connection)
        if self._cleaning is None:
            self._cleaning = loop.call_later(IDLE_CONNECTION_MS / 1000, self._drop_old)

    def close(self) -> None:
        self._is_closed = True
        if self._cleaning is not None:
            self._cleaning.cancel()
        for connection in list(self._all):
            self._forget(connection)
        self._idle.clear()

    def _drop_old(self) -> None:
        loop = asyncio.get_running_loop()
        oldest_s = loop.time() - IDLE_CONNECTION_MS / 1000
        while self._idle and self._idle[0].idle_since_s <= oldest_s:
            self._forget(self._idle.pop(0))
        wait_s = self._idle[0].idle_since_s - oldest_s if self._idle else None
        self._cleaning = None if wait_s is None else loop.call_later(wait_s + 0.001, self._drop_old)

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        connection.drop()


def _written(
    method: str,
    origin: Origin,
    target: str,
    headers: Mapping[str, str],
    body: bytes | None,
    *,
    keeps_alive: bool,
) -> bytes:
    if not _TARGET.fullmatch(target):
        raise ValueError("a target that cannot be written")
    lines = [f"{method} {target} HTTP/1.1", f"Host: {origin.host_header()}", *_ours_beside(tuple(headers))]
    if _UNWRITABLE.search("".join(headers.values())):
        raise _not_writable()
    lines += [f"{name}: {value}" for name, value in headers.items()]
    if body is not None:
        lines.append(f"Content-Length: {len(body)}")
    if not keeps_alive:
        lines.append("Connection: close")
    head = "\r\n".join(lines).encode("utf-8", "surrogateescape")
    return b"%b\r\n\r\n%b" % (head, body or b"")


@lru_cache(maxsize=_HEADER_SETS_KEPT)
def _ours_beside(names: tuple[str, ...]) -> tuple[str, ...]:
    """The headers that every request has, without those that this one brings itself; and all of its names are sound."""
    if not all(map(_FIELD_NAME.fullmatch, names)):
        raise _not_writable()
    given = {name.lower() for name in names}
    return tuple(f"{name}: {value}" for name, value in _OURS.items() if name.lower() not in given)


def _not_writable() -> ValueError:
    return ValueError("a header that cannot be written")


def _tls_context() -> ssl.SSLContext:
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context


def _why(error: BaseException) -> str:
    # The system's word for it: messages quote addresses.
    number = getattr(error, "errno", None)
    if isinstance(error, socket.gaierror):
        return "the name cannot be resolved"
    return os.strerror(number) if isinstance(number, int) and number > 0 else type(error).__name__
