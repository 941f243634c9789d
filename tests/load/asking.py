"""One client of a gateway that may die at any moment: it asks, checks every answer, and writes down what it saw."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256
from typing import IO, Any, Final

import aiohttp

PROBLEM: Final = "application/problem+json"
_EFFECT: Final = b'"tool_effect":'
# Answers that say: not now. Whoever gets one comes back.
_LATER_CODES: Final = frozenset({"CALL_IN_FLIGHT", "STATE_CONCURRENT_EXECUTION"})
_LATER_STATUSES: Final = frozenset({429, 503})
_ANSWER_WITHIN_S: Final = 60
_BEATS: Final = aiohttp.ClientTimeout(total=None, sock_read=40)  # a stream that is quiet beats every 15 s


@dataclass(slots=True)
class Seen:
    """One request and what became of it. `bad`: what should not have been. Times are the machine's monotonic."""

    client: str
    what: str
    began_s: float
    ended_s: float
    status: int | None = None
    code: str | None = None
    lost: str | None = None
    trace_id: str | None = None
    state: str | None = None
    tool: str | None = None
    key: str | None = None
    effect_sha256: str | None = None
    bad: str | None = None


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    headers: Mapping[str, str]  # names in lower case
    body: bytes
    document: Any
    seen: Seen

    @property
    def is_later(self) -> bool:
        return self.status in _LATER_STATUSES or self.seen.code in _LATER_CODES

    @property
    def trace_id(self) -> str:
        return str(self.document["trace_id"])


class Notebook:
    """Every observation, as a line of JSON."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, seen: Seen) -> None:
        self._file.write(json.dumps({name: value for name, value in asdict(seen).items() if value is not None}) + "\n")


class Unresolved(Exception):
    """The gateway did not come back in time to say what became of a request."""


class Client:
    """A principal with its own connections. `until_s`: when it gives up waiting for anything."""

    def __init__(self, name: str, key: str, url: str, notebook: Notebook, rng: random.Random, until_s: float) -> None:
        self.name = name
        self.rng = rng
        self._until_s = until_s
        self._url = url
        self._notebook = notebook
        self._headers = {"Authorization": f"Bearer {key}"}
        self._http = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=4, keepalive_timeout=30),
            timeout=aiohttp.ClientTimeout(total=_ANSWER_WITHIN_S),
            auto_decompress=False,
        )

    async def close(self) -> None:
        await self._http.close()

    def note(self, seen: Seen, bad: str | None = None) -> None:
        seen.bad = seen.bad or bad
        self._notebook.write(seen)

    def complain(self, what: str, bad: str, **fields: Any) -> None:
        now = time.monotonic()
        self.note(Seen(self.name, what, now, now, **fields), bad)

    async def ask(
        self,
        what: str,
        method: str,
        path: str,
        body: Any = None,
        *,
        expect: Collection[int | str],
        headers: Mapping[str, str] | None = None,
        text: bool = False,
        **fields: Any,
    ) -> Reply | None:
        """None when the connection was lost. An answer that is neither expected (status, or code) nor `later` is
        written down as bad; so is a refusal that is no problem with a code."""
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        seen = Seen(self.name, what, time.monotonic(), 0, **fields)
        try:
            async with self._http.request(
                method, self._url + path, data=raw, headers={**self._headers, **(headers or {})}
            ) as answer:
                sent, status, content_type = await answer.read(), answer.status, answer.content_type
                replied = {name.lower(): value for name, value in answer.headers.items()}
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            seen.ended_s, seen.lost = time.monotonic(), type(error).__name__
            self.note(seen)
            return None
        seen.ended_s, seen.status = time.monotonic(), status
        reply = Reply(status, replied, sent, None if text and status < 400 else _document(sent, seen), seen)
        if status >= 400:
            self._judge_problem(reply, content_type)
        else:
            _read_answer(reply)
        if not reply.is_later and status not in expect and seen.code not in expect:
            seen.bad = seen.bad or f"expected {sorted(map(str, expect))}, got {sent[:300]!r}"
        self.note(seen)
        return reply

    async def ask_until_told(self, *args: Any, **kwargs: Any) -> Reply:
        """Ask again, exactly the same, until there is an answer that is not `later`."""
        while True:
            reply = await self.ask(*args, **kwargs)
            if reply is not None and not reply.is_later:
                return reply
            await self.pause(0.2, 0.6)

    async def pause(self, at_least_s: float, at_most_s: float) -> None:
        if time.monotonic() > self._until_s:
            raise Unresolved
        await asyncio.sleep(self.rng.uniform(at_least_s, at_most_s))

    async def follow(self, trace_id: str) -> str:
        """The state in which the trace ended, by its events; they come once each and in order, whatever dies."""
        last = 0
        while True:
            seen = Seen(self.name, "follow", time.monotonic(), 0, trace_id=trace_id)
            headers = {**self._headers, **({"Last-Event-ID": str(last)} if last else {})}
            try:
                path = f"/v1/traces/{trace_id}/events"
                async with self._http.get(self._url + path, headers=headers, timeout=_BEATS) as answer:
                    seen.status = answer.status
                    if answer.status >= 400:
                        _judge_refusal(seen, answer.content_type, await answer.read())
                    async for event in _events(answer):
                        if event["event"] == "end":
                            seen.state = str(json.loads(event["data"])["state"])
                            break
                        number = int(event.get("id", -1))
                        if event["event"] != "entry" or number != last + 1:
                            seen.bad = f"after event {last} came {event}"
                        last = number
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                seen.lost = type(error).__name__
            seen.ended_s = time.monotonic()
            self.note(seen)
            if seen.status == 204:  # all was received but the end: the gateway died in between
                reply = await self.ask_until_told("trace", "GET", f"/v1/traces/{trace_id}", expect=[200])
                return str(reply.document["state"])
            if seen.state is not None:
                return seen.state
            await self.pause(0.2, 0.6)

    def _judge_problem(self, reply: Reply, content_type: str) -> None:
        _judge_refusal(reply.seen, content_type, reply.body)
        if reply.status == 429 and "retry-after" not in reply.headers:
            reply.seen.bad = "429 without Retry-After"


def _judge_refusal(seen: Seen, content_type: str, body: bytes) -> None:
    document = _document(body, seen)
    seen.code = document.get("code") if isinstance(document, dict) else None
    seen.trace_id = (document.get("trace_id") if isinstance(document, dict) else None) or seen.trace_id
    if content_type != PROBLEM or not seen.code or document.get("status") != seen.status:
        seen.bad = f"an error without a code: {content_type} {body[:200]!r}"
    elif seen.status == 500:
        seen.bad = f"500: {body[:300]!r}"


def _document(body: bytes, seen: Seen) -> Any:
    try:
        return json.loads(body) if body else None
    except ValueError:
        seen.bad = f"not JSON: {body[:200]!r}"
        return None


def _read_answer(reply: Reply) -> None:
    if isinstance(reply.document, dict):
        reply.seen.trace_id = reply.document.get("trace_id") or reply.seen.trace_id
        reply.seen.state = reply.document.get("state")
        if reply.document.get("tool_effect") is not None:
            # The very bytes, as they were sent: the effect is the last member.
            effect = reply.body[reply.body.index(_EFFECT) + len(_EFFECT) : -1]
            reply.seen.effect_sha256 = sha256(effect).hexdigest()


async def _events(answer: aiohttp.ClientResponse) -> Any:
    """Events with data, as dictionaries of their fields."""
    fields: dict[str, str] = {}
    while line := await answer.content.readline():
        text = line.decode().rstrip("\n")
        if text:
            name, _, value = text.partition(": ")
            fields[name] = value
        else:
            if "data" in fields:
                yield {"event": "message", **fields}
            fields = {}
