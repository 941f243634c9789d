"""The gateway over HTTP, for the commands that people use. It keeps the gateway's errors as they are.

The key goes to the gateway that is named and nowhere else: redirects are not followed, proxies of the environment are
not used, and the administrator's key of this machine is not sent to another one. It is in no error and no output.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

import aiohttp

from app import __version__
from app.cli.event_stream import Event, events_in
from app.core.errors import BY_CODE, GatewayUnreachable, InternalError, RateLimited, SettingInvalid, TgaError
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


class GatewayClient:
    """Asks one gateway as one principal. Every wait and every answer is bounded."""

    def __init__(self, url: str, key: str | None, session: aiohttp.ClientSession, *, no_key: str) -> None:
        self._url = url
        self._session = session
        self._has_key = key is not None
        self._no_key = no_key
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: Settings) -> AsyncIterator[Self]:
        """SettingInvalid when TGA_URL is no address or TGA_API_KEY no key; nothing is sent yet."""
        _verify_url(settings.url)
        key = _key(settings)
        async with aiohttp.ClientSession(
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": f"tga/{__version__}"},
            trust_env=False,
            read_bufsize=2**16,
        ) as session:
            yield cls(settings.url, key, session, no_key=_where_keys_come_from(settings))

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

    async def list_items(self, path: str, *, limit: int, **filters: str | None) -> list[dict[str, Any]]:
        """Page after page, until there are so many or no more."""
        items: list[dict[str, Any]] = []
        cursor: str | None = None
        while len(items) < limit:
            asked = min(limit - len(items), LIST_ITEMS_MAX)
            page = await self.get(path, limit=asked, cursor=cursor, **filters)
            items += page["items"]
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

    @asynccontextmanager
    async def exchange(
        self, path: str, body: bytes, headers: Mapping[str, str], *, quiet_s: float
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """One POST, sent once; what is read of its answer, and how much, is up to who asked. It may last, but not be
        quiet for longer than `quiet_s`: GatewayUnreachable then, as when the connection is lost."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=quiet_s)
        sent = {"Content-Type": _JSON, **headers, **self._headers}
        try:
            async with self._session.post(
                self._url + path, data=body, headers=sent, timeout=timeout, allow_redirects=False
            ) as response:
                yield response
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def events(self, path: str, *, last_id: str | None) -> AsyncIterator[Event]:
        """Server-sent events of one connection, after `last_id`; ends when the gateway ends them.

        A connection that is lost, or quiet for longer than the gateway's beat allows, is GatewayUnreachable.
        """
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {}), **self._headers}
        quiet_s = 3 * EVENTS_HEARTBEAT_MS / 1000
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=quiet_s)
        try:
            request = self._session.get(self._url + path, headers=headers, timeout=timeout, allow_redirects=False)
            async with request as response:
                if response.status == 204:
                    return
                if response.status != 200 or response.content_type != "text/event-stream":
                    _sound(await self._reply(response))
                    raise self._no_gateway(f"status {response.status}, {response.content_type}")
                async for event in events_in(response.content.iter_any(), bytes_max=RESPONSE_BYTES_READ_MAX):
                    yield event
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
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
        timeout = aiohttp.ClientTimeout(total=_CONNECT_S + _MARGIN_S + wait_ms / 1000, sock_connect=_CONNECT_S)
        try:
            async with self._session.request(
                method,
                self._url + path,
                params=parameters,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as response:
                return await self._reply(response)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            raise self._unreachable(error) from None

    async def _reply(self, response: aiohttp.ClientResponse) -> Reply:
        raw = bytearray()
        async for chunk in response.content.iter_any():
            raw += chunk
            if len(raw) > RESPONSE_BYTES_READ_MAX:
                raise self._no_gateway("an answer without end")
        is_problem = response.content_type == _PROBLEM
        if not is_problem and (response.content_type != _JSON or not 200 <= response.status < 300):
            raise self._no_gateway(f"status {response.status}, {response.content_type}")
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise self._no_gateway("an answer that is no JSON object")
        return Reply(response.status, document, self._problem(response, document) if is_problem else None)

    def _problem(self, response: aiohttp.ClientResponse, document: dict[str, Any]) -> TgaError:
        error = error_of(document)
        if isinstance(error, RateLimited):
            after = response.headers.get("Retry-After", "1")
            error.retry_after_s = min(int(after), 60) if after.isascii() and after.isdigit() else 1
        if response.status == 401:
            error.next_step = self._no_key if not self._has_key else "Check the key; `tga keys list` tells which exist."
        if "incident" in document:
            error.found = f"incident {document['incident']}"
        return error

    def _unreachable(self, error: BaseException) -> TgaError:
        if isinstance(error, aiohttp.InvalidURL):
            return SettingInvalid("TGA_URL is no address", expected="http://host:port", found=_shown_url(self._url))
        # Only the kind of error and the system's word for it: messages of aiohttp quote what was sent.
        cause = getattr(error, "os_error", error)
        number = getattr(cause, "errno", None)
        is_late = isinstance(error, TimeoutError)
        detail = "no answer in time" if is_late else os.strerror(number) if number else type(error).__name__
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
