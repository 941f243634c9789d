"""The gateway over HTTP, for the commands that people use. It keeps the gateway's errors as they are.

The key goes to the gateway that is named and nowhere else: redirects are not followed, proxies of the environment are
not used, and the administrator's key of this machine is not sent to another one. It is in no error and no output.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import quote, urlencode, urlsplit

from yarl import URL

from app.cli.event_stream import Event, events_in
from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import Answer, HttpFailure
from app.core.errors import (
    BY_CODE,
    GatewayUnreachable,
    InternalError,
    ProcedureSourceInvalid,
    RateLimited,
    SettingInvalid,
    TgaError,
)
from app.core.limits import (
    CALL_WAIT_MS,
    CREDENTIAL_CHARS_MAX,
    EVENTS_HEARTBEAT_MS,
    LIST_ITEMS_MAX,
    RESPONSE_BYTES_READ_MAX,
)
from app.domain.tga.transitions import TRACE
from app.keys.admin_key import read_key_file
from app.settings import Settings

_CONNECT_S: Final = 5.0
_MARGIN_S: Final = 15.0  # for the gateway's own work, beyond what it was asked to wait
_RATE_TRIES_MAX: Final = 10
_PROBLEM: Final = "application/problem+json"
_JSON: Final = "application/json"


@dataclass(frozen=True, slots=True)
class Reply:
    """What the gateway answered. `problem` is its error; who gets one here has asked to see it."""

    status: int
    document: dict[str, Any]
    problem: TgaError | None = None


class Items(list[dict[str, Any]]):
    """What was listed. `is_own_only`: the caller's roles show it only what it asked for itself."""

    is_own_only = False


class Exchange:
    """The gateway's answer to one request while it comes in."""

    def __init__(self, answer: Answer, quiet_s: float) -> None:
        self.status = answer.status
        self.headers = answer.headers  # named in lower case
        self.content_type = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
        self._answer = answer
        self._quiet_s = quiet_s

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises HttpFailure, and TimeoutError when nothing comes for too long."""
        while True:
            async with asyncio.timeout(self._quiet_s):
                chunk = await self._answer.read_some()
            if not chunk:
                return
            yield chunk


class GatewayClient:
    """Asks one gateway as one principal. Every wait and every answer is bounded."""

    def __init__(self, url: str, key: str | None, pool: HttpPool, *, no_key: str, key_source: str | None) -> None:
        self._url = url
        self._origin = Origin.of(URL(url))
        self._base_path = URL(url).raw_path.rstrip("/")
        self._pool = pool
        self._key_source = None if key is None else key_source
        self._no_key = no_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Self]:
        """SettingInvalid when TGA_URL is no address or TGA_API_KEY no key; nothing is sent yet."""
        _verify_url(settings.url)
        key = _key(settings)
        pool = HttpPool()
        try:
            source = "TGA_API_KEY" if settings.api_key is not None else str(settings.admin_key_file)
            yield cls(settings.url, key, pool, no_key=_where_keys_come_from(settings), key_source=source)
        finally:
            await pool.close()

    @property
    def url(self) -> str:
        return self._url

    async def get(self, path: str, **parameters: str | int | None) -> dict[str, Any]:
        """One document; who asks too quickly is made to wait."""
        given = {name: str(value) for name, value in parameters.items() if value is not None}
        for _ in range(_RATE_TRIES_MAX):
            reply = await self._ask("GET", path, parameters=given)
            if not isinstance(reply.problem, RateLimited):
                break
            await asyncio.sleep(reply.problem.retry_after_s)
        return _sound(reply).document

    async def list_items(self, path: str, *, limit: int, **filters: str | None) -> Items:
        """Page after page, until there are so many or no more."""
        items = Items()
        cursor: str | None = None
        while len(items) < limit:
            asked = min(limit - len(items), LIST_ITEMS_MAX)
            page = await self.get(path, limit=asked, cursor=cursor, **filters)
            items += page["items"]
            items.is_own_only = page.get("scope") == "own"
            cursor = page["next"]
            if cursor is None:
                break
        return items

    async def post(
        self, path: str, body: Mapping[str, Any], *, wait_ms: int = CALL_WAIT_MS, shown: tuple[str, ...] = ()
    ) -> Reply:
        """Sent once. A problem is raised, unless its code is one of `shown`."""
        reply = await self._ask("POST", path, body=json.dumps(body).encode(), wait_ms=wait_ms)
        if reply.problem is not None and reply.problem.code in shown:
            return reply
        return _sound(reply)

    async def put(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Sent once; the routes that take one are harmless to repeat."""
        return _sound(await self._ask("PUT", path, body=json.dumps(body).encode(), wait_ms=CALL_WAIT_MS)).document

    async def delete(self, path: str) -> dict[str, Any]:
        """Sent once. What is gone already is the gateway's error, as any other."""
        return _sound(await self._ask("DELETE", path, wait_ms=CALL_WAIT_MS)).document

    async def put_blob(self, sha256: str, data: bytes) -> None:
        """Store bytes under their digest; the same again is harmless."""
        _sound(await self._ask("PUT", f"/v1/blobs/{sha256}", body=data, wait_ms=CALL_WAIT_MS))

    @asynccontextmanager
    async def exchange(
        self, path: str, body: bytes, headers: Mapping[str, str], *, quiet_s: float
    ) -> AsyncIterator[Exchange]:
        """One POST, sent once; what is read of its answer, and how much, is up to who asked. It may last, but not be
        quiet for longer than `quiet_s`: GatewayUnreachable then, as when the connection is lost."""
        sent = {"Content-Type": _JSON, **headers, **self._headers}
        async with self._exchanged("POST", path, sent, body, quiet_s=quiet_s) as exchange:
            yield exchange

    async def events(self, path: str, *, last_id: str | None) -> AsyncGenerator[Event, None]:
        """Server-sent events of one connection, after `last_id`; ends when the gateway ends them.

        A connection that is lost, or quiet for longer than the gateway's beat allows, is GatewayUnreachable.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {}), **self._headers}
        quiet_s = 3 * EVENTS_HEARTBEAT_MS / 1000
        async with self._exchanged("GET", path, headers, quiet_s=quiet_s) as exchange:
            if exchange.status == 204:
                return
            if exchange.status != 200 or exchange.content_type != "text/event-stream":
                _sound(await self._reply(exchange))
                raise self._no_gateway(f"status {exchange.status}, {exchange.content_type}")
            async for event in events_in(exchange.chunks(), bytes_max=RESPONSE_BYTES_READ_MAX):
                yield event

    @asynccontextmanager
    async def _exchanged(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes | None = None, *, quiet_s: float
    ) -> AsyncIterator[Exchange]:
        """One request, sent once. What breaks the connection, inside too, is GatewayUnreachable."""
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(_CONNECT_S + quiet_s):
                    request = self._pool.request(
                        method, self._origin, self._base_path + path, headers=headers, body=body
                    )
                    answer = await stack.enter_async_context(request)
                yield Exchange(answer, quiet_s)
        except (HttpFailure, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def _ask(
        self,
        method: str,
        path: str,
        *,
        parameters: Mapping[str, str] | None = None,
        body: bytes | None = None,
        wait_ms: int = 0,
    ) -> Reply:
        headers = {**self._headers, **({"Content-Type": _JSON} if body is not None else {})}
        path = f"{path}?{urlencode(parameters)}" if parameters else path
        whole_s = _CONNECT_S + _MARGIN_S + wait_ms / 1000
        try:
            async with (
                asyncio.timeout(whole_s),
                self._exchanged(method, path, headers, body, quiet_s=whole_s) as exchange,
            ):
                return await self._reply(exchange)
        except TimeoutError as error:
            raise self._unreachable(error) from None

    async def _reply(self, exchange: Exchange) -> Reply:
        raw = bytearray()
        async for chunk in exchange.chunks():
            raw += chunk
            if len(raw) > RESPONSE_BYTES_READ_MAX:
                raise self._no_gateway("an answer without end")
        is_problem = exchange.content_type == _PROBLEM
        if not is_problem and (exchange.content_type != _JSON or not 200 <= exchange.status < 300):
            raise self._no_gateway(f"status {exchange.status}, {exchange.content_type}")
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise self._no_gateway("an answer that is no JSON object")
        return Reply(exchange.status, document, self._problem(exchange, document) if is_problem else None)

    def _problem(self, exchange: Exchange, document: dict[str, Any]) -> TgaError:
        error = error_of(document)
        if isinstance(error, RateLimited):
            after = exchange.headers.get("retry-after", "1")
            error.retry_after_s = min(int(after), 60) if after.isascii() and after.isdigit() else 1
        if exchange.status == 401:
            error.next_step = self._no_key
            if self._key_source is not None:
                error.found = f"the key from {self._key_source}, at {_shown_url(self._url)}"
                error.next_step = (
                    "Is it a key of that gateway (TGA_URL), and still valid? On its machine `tga keys list` tells, and "
                    "`tga keys create` makes another."
                )
        if "incident" in document:
            error.found = f"incident {document['incident']}"
        return error

    def _unreachable(self, error: BaseException) -> TgaError:
        if isinstance(error, HttpFailure):
            detail = str(error)  # holds nothing of what was sent
        else:
            detail = "no answer in time" if isinstance(error, TimeoutError) else type(error).__name__
        return GatewayUnreachable(f"no gateway answers at {_shown_url(self._url)}", found=detail)

    def _no_gateway(self, found: str) -> TgaError:
        return GatewayUnreachable(
            f"what answers at {_shown_url(self._url)} is no gateway of this kind",
            found=found,
            remedy="Check TGA_URL: it names the gateway alone, as http://127.0.0.1:8420.",
        )


def error_of(document: dict[str, Any]) -> TgaError:
    """A problem document as if it had been raised here: the same class, and so the same words and exit code."""
    kind = BY_CODE.get(str(document.get("code")))
    if kind is None:
        return InternalError("the gateway answers with a code unknown here", found=str(document.get("code"))[:64])
    trace_id = document.get("trace_id")
    error = kind.__new__(kind)  # some take more than others to be made; what all have is enough to be told
    TgaError.__init__(
        error,
        str(document.get("detail")),
        expected=document.get("expected"),
        found=document.get("found"),
        remedy=document.get("remedy"),
        stream=None if trace_id is None else TRACE.stream(str(trace_id)),
        sequence_number=document.get("sequence_number"),
    )
    if isinstance(error, ProcedureSourceInvalid):
        line = document.get("line")
        error.line = line if isinstance(line, int) else None
    return error


def path_to(*parts: str) -> str:
    """A path whose parts are names that may hold anything."""
    return "".join(f"/{quote(part, safe=':')}" for part in parts)


def _sound(reply: Reply) -> Reply:
    if reply.problem is not None:
        raise reply.problem
    return reply


def _verify_url(url: str) -> None:
    try:
        parts = urlsplit(url)
        _ = parts.port
        is_usable = parts.scheme in ("http", "https") and bool(parts.hostname)
        is_plain = not (parts.username or parts.password or parts.query or parts.fragment)
    except ValueError:
        is_usable = is_plain = False
    if not is_usable or not is_plain:
        raise SettingInvalid("TGA_URL is no address of a gateway", expected="http://host:port, and nothing secret")


def _shown_url(url: str) -> str:
    return url.rpartition("@")[2]


def _key(settings: Settings) -> str | None:
    if settings.api_key is not None:
        if not settings.api_key.isascii() or not settings.api_key.isprintable():
            raise SettingInvalid("TGA_API_KEY is no key", expected="one line of ASCII characters")
        if len(settings.api_key) > CREDENTIAL_CHARS_MAX:
            raise SettingInvalid("TGA_API_KEY is no key", expected=f"at most {CREDENTIAL_CHARS_MAX} characters")
        return settings.api_key
    if not _is_this_machine(settings):
        return None
    found = read_key_file(settings.admin_key_file)
    return found if found and found.isascii() and found.isprintable() else None


def _is_this_machine(settings: Settings) -> bool:
    host = urlsplit(settings.url).hostname or ""
    if host in ("localhost", settings.host):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _where_keys_come_from(settings: Settings) -> str:
    if _is_this_machine(settings):
        return f"Put a key into TGA_API_KEY; there is none in {settings.admin_key_file} either."
    return "Put a key of that gateway into TGA_API_KEY; the key of this machine is not sent to another one."
