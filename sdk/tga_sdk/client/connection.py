"""What both clients know of their gateway: addresses, key, how to send safely, and what breaks on the way.

The key goes to the addresses that are named and nowhere else: redirects are not followed, proxies of the environment
are not used, and the key of this machine's gateway is not sent to another machine. It is in no error and no repr.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Final

import httpx2

from tga_sdk.client.calls import seconds
from tga_sdk.client.exchange import ANSWER_BYTES_MAX, Lost, Reply, Tries
from tga_sdk.errors import AnswerInvalid
from tga_sdk.settings import api_key, gateway_urls
from tga_sdk.telemetry import enable_by_environment

CONNECT: Final = 5.0
WATCHED_MAX: Final = 32  # streams for who waits for runs; beyond, runs are looked at from time to time
LOST: Final = (httpx2.HTTPError, httpx2.StreamError, OSError)
_NEVER_SENT: Final = (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.PoolTimeout, httpx2.UnsupportedProtocol)


class Connection:
    """Where a client's requests go."""

    def __init__(self, url: str | Sequence[str] | None, given_key: str | None, give_up_after: float | None) -> None:
        self._urls = gateway_urls(url)
        self._named = " or ".join(self._urls)
        self._silence = seconds(give_up_after)
        self._api_key = api_key(given_key, self._urls)
        self._at = 0
        enable_by_environment()
        self._watching = 0  # streams of events that are open for who waits for a run

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._named})"

    @property
    def urls(self) -> tuple[str, ...]:
        """The gateways that are asked."""
        return tuple(self._urls)

    def _options(self) -> dict[str, Any]:
        """Of the HTTP client. What is compressed would grow beyond every bound while it is read."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "tga-sdk"}
        if self._api_key is not None:
            headers["Authorization"] = f"Bearer {self._api_key}"
        limits = httpx2.Limits(max_connections=1_000, max_keepalive_connections=100)
        return {"headers": headers, "limits": limits, "follow_redirects": False, "trust_env": False}

    def _tries(self, more: float = 0.0) -> Tries:
        return Tries(time.monotonic() + self._silence + more, self._named)

    def _url(self, path: str) -> str:
        return self._urls[self._at % len(self._urls)] + path

    def _moved_on(self, lost: Lost) -> Lost:
        """The next request goes to the next gateway."""
        self._at += 1
        return lost

    def _heard(self, status: int, headers: Mapping[str, str], content: bytes | bytearray) -> Reply:
        if status >= 502:
            self._at += 1
        return Reply(status, {name.lower(): value for name, value in headers.items()}, bytes(content))


def within(patience: float) -> httpx2.Timeout:
    """Of one request: as long as its answer may take, and less for what goes before."""
    bounded = max(0.001, min(patience, 3_600.0))
    return httpx2.Timeout(bounded, connect=min(bounded, CONNECT))


def lost(error: Exception) -> Lost:
    """What broke, in a word; nothing of what was sent is in it."""
    words = type(error).__name__
    return Lost(f"{words}: {error}"[:200] if str(error) else words, was_sent=not isinstance(error, _NEVER_SENT))


def over_limit(status: int, content: bytearray, bytes_max: int | None = None) -> None:
    """AnswerInvalid when more comes than any answer has."""
    if len(content) > (bytes_max or ANSWER_BYTES_MAX):
        raise AnswerInvalid.found(status, "an answer without end")


def chunks(answer: httpx2.Response) -> Iterator[bytes]:
    """The body as it comes; whole, where a transport within this process has made the answer."""
    if answer.is_stream_consumed:
        yield answer.content
    else:
        yield from answer.iter_raw()


async def async_chunks(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    """As `chunks`."""
    if answer.is_stream_consumed:
        yield answer.content
    else:
        async for chunk in answer.aiter_raw():
            yield chunk
