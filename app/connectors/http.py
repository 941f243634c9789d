"""Tool servers over HTTP: `POST {base_url}/tools/{tool_name}`, the body is the arguments.

How an answer is read (ARCHITECTURE.md, section 4), for one dispatch, which is at most one request:

| what the server did                                   | what is known                                       |
|-------------------------------------------------------|-----------------------------------------------------|
| 2xx                                                   | SUCCESS, whatever the body, even if it breaks off   |
| 3xx, 4xx                                              | FAILURE, definite; redirects are not followed       |
| 408, 409, 425, 429, 5xx and beyond                    | Unknown, `retryable_answer`                         |
| no status in time                                     | Unknown, `timed_out`                                |
| closed or reset the connection, or does not speak HTTP | Unknown, `disconnected`                            |
| no connection, no name, no TLS, none free in time     | NotSent                                             |

Nothing secret is in what comes out: neither a credential nor the arguments that were put back.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from http import HTTPStatus
from typing import Any
from urllib.parse import quote

from yarl import URL

from app.connectors.answers import is_retryable, plain, retry_after_ms, storable_json, traceparent_of
from app.connectors.credentials import Credentials, CredentialUnavailable
from app.connectors.http_client import HttpPool, Origin
from app.connectors.http_connection import Answer, NotConnected, SendingWithheld
from app.core.canonical import canonical_bytes
from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import (
    DOCUMENT_BYTES_MAX,
    NAME_CHARS_MAX,
    RESPONSE_BYTES_READ_MAX,
)
from app.domain.ledger.waiting import TimeLimit
from app.domain.tga.documents import Base64Output, DigestOutput, JsonOutput, ToolCall
from app.domain.tga.ports import Answered, Dispatched, MaySend, NotSent, Output, Unknown, Withheld

_MEDIA_TYPE = re.compile(rf"[!-~]{{1,{NAME_CHARS_MAX}}}")


class HttpConnector:
    """Carries calls to one HTTP server. Sends at most once per dispatch; raises for nothing that the server does."""

    def __init__(self, base_url: str, *, pool: HttpPool | None = None, credentials: Credentials | None = None) -> None:
        url = URL(base_url, encoded=True)
        self._origin = Origin.of(url)
        self._tools_path = f"{url.raw_path.rstrip('/')}/tools/"
        self._pool = pool or HttpPool()
        self._credentials = credentials or Credentials({}, {})

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        """What is known of the call after at most `timeout_ms`; the whole answer must come within it.

        `arguments` are sent instead of the recorded ones, where those hold commitments in place of secrets. With the
        caller's `traceparent`, the request belongs to the caller's trace. CancelledError passes through, and then
        nothing is known.
        """
        if self._pool.is_closed:
            return NotSent("the connector is closed")
        try:
            headers = self._credentials.headers() | _headers(call, traceparent)
            body = call.written_arguments() if arguments is None else canonical_bytes(arguments)
        except CredentialUnavailable as error:
            return NotSent(plain(f"no credential: {error}"))
        except (InputMalformed, InputTooLarge) as error:  # its text may show a part of them
            return NotSent(f"the arguments cannot be written: {error.code}", is_hopeless=True)
        exchange = _Exchange()
        try:
            async with TimeLimit(timeout_ms / 1000, asyncio.get_running_loop()):
                await self._exchange(call.tool_name, headers, body, exchange, may_send)
        except SendingWithheld:
            return Withheld()
        except Exception as error:  # whatever a server made of it, the outcome must be told
            exchange.error = error
        return exchange.conclude(timeout_ms)

    async def why_unreachable(self) -> str | None:
        """Why no connection can be made now; None if one can. Nothing is sent on it."""
        try:
            await self._pool.verify_reachable(self._origin)
        except NotConnected as error:
            return plain(str(error))
        return None

    async def close(self) -> None:
        await self._pool.close()

    async def _exchange(
        self, tool_name: str, headers: dict[str, str], body: bytes, exchange: _Exchange, may_send: MaySend | None
    ) -> None:
        request = self._pool.request(
            "POST",
            self._origin,
            self._tools_path + quote(tool_name, safe=""),
            headers=headers,
            body=body,
            sending=exchange,
            may_send=may_send,
        )
        async with request as answer:
            exchange.answer = answer
            # An answer that decides nothing is not read: whatever is in it, the call is sent again.
            if not is_retryable(answer.status):
                await exchange.body.read(answer)


class _Exchange:
    """One request and what came back, as far as it came: what is known must survive a broken connection."""

    def __init__(self) -> None:
        self.may_be_sent = False
        self.answer: Answer | None = None
        self.body = _Body()
        self.error: Exception | None = None

    def conclude(self, timeout_ms: int) -> Dispatched:
        if self.answer is not None:
            # The status line decides; that the body broke off or came too late changes nothing of what was done.
            return self._read_answer(self.answer)
        is_late = isinstance(self.error, TimeoutError)
        if not self.may_be_sent:
            return NotSent(f"no connection within {timeout_ms} ms" if is_late else f"no request: {self._reason()}")
        if is_late:
            return Unknown("timed_out", f"no answer within {timeout_ms} ms")
        return Unknown("disconnected", f"no answer: {self._reason()}")

    def _reason(self) -> str:
        return plain(f"{type(self.error).__name__}: {self.error}")

    def _read_answer(self, answer: Answer) -> Dispatched:
        status = answer.status
        if 200 <= status < 300:
            return Answered("SUCCESS", self.body.output(answer))
        said = plain(f"the server answered {status} {answer.reason}".rstrip())
        if is_retryable(status):
            # A server that honours keys answers 409 while it still works on the first request with this one.
            at_work = status == HTTPStatus.CONFLICT
            return Unknown("retryable_answer", said, retry_after_ms=retry_after_ms(answer.headers), is_at_work=at_work)
        if status < 400:
            said += "; redirects are not followed: configure the address that is meant"
        return Answered("FAILURE", self.body.output(answer), error_code=f"HTTP_{status}", error_message=said)


class _Body:
    """A response body in bounded memory: kept while it may still be stored, only hashed from there on."""

    __slots__ = ("_hash", "_is_complete", "_kept", "_size_bytes")

    def __init__(self) -> None:
        self._kept: bytes | bytearray = b""  # nothing of a body that is too large
        self._hash: hashlib._Hash | None = None  # of one that is
        self._size_bytes = 0
        self._is_complete = False

    async def read(self, answer: Answer) -> None:
        while self._size_bytes < RESPONSE_BYTES_READ_MAX:
            chunk = await answer.read_some()
            if not chunk:
                self._is_complete = True
                return
            if self._size_bytes < DOCUMENT_BYTES_MAX:
                self._take(chunk)  # too little to be worth measuring
                continue
            with answer.stream:
                self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        taken = chunk[: RESPONSE_BYTES_READ_MAX - self._size_bytes]
        self._size_bytes += len(taken)
        if self._hash is not None:
            self._hash.update(taken)
        elif self._size_bytes <= DOCUMENT_BYTES_MAX:
            # Most come in one piece; others may come byte by byte, and are not copied for each.
            if not self._kept:
                self._kept = taken
                return
            if type(self._kept) is bytes:
                self._kept = bytearray(self._kept)
            self._kept += taken
        else:
            self._hash = hashlib.sha256(self._kept)
            self._hash.update(taken)
            self._kept = b""

    def output(self, answer: Answer) -> Output | None:
        if not self._is_complete or self._hash is not None:
            hashed = self._hash or hashlib.sha256(self._kept)
            return DigestOutput(
                encoding="digest", sha256=hashed.hexdigest(), size_bytes=self._size_bytes, truncated=True
            )
        if not self._kept:
            return None
        raw = bytes(self._kept)
        try:
            return JsonOutput.of_known({"encoding": "json", "value": storable_json(raw)})
        except (InputMalformed, InputTooLarge):
            data = base64.b64encode(raw).decode("ascii")
            return Base64Output(encoding="base64", media_type=_media_type(answer), data=data)


def _headers(call: ToolCall, traceparent: str | None) -> dict[str, str]:
    headers = {
        "TGA-Tool-Call-Id": call.tool_call_id,
        "TGA-Trace-Id": call.trace_id,
        "traceparent": traceparent_of(call, traceparent),
        "Content-Type": "application/json",
    }
    if call.key_at_server is not None:
        headers["Idempotency-Key"] = call.key_at_server
    return headers


def _media_type(answer: Answer) -> str:
    coding = answer.headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":  # the bytes are of the coding, not of the type that they decode to
        return "application/gzip" if coding in ("gzip", "x-gzip") else "application/octet-stream"
    written = answer.headers.get("content-type", "").partition(";")[0].strip().lower()
    return written if _MEDIA_TYPE.fullmatch(written) else "application/octet-stream"
