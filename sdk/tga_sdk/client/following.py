"""Server-sent events of a trace or a run, resumed where they broke off. It does no I/O itself: both clients feed it."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from tga_sdk.client.documents import Entry
from tga_sdk.client.exchange import ANSWER_BYTES_MAX, Lost, Reply, model
from tga_sdk.errors import AnswerInvalid, GatewayError, GatewayUnreachable
from tga_sdk.wire import FIRST_PAUSE, LONGEST_PAUSE, parsed, refusal, seconds_of

QUIET: Final = 45.0  # the gateway beats every 15 s: what is silent for three beats is gone


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event."""

    name: str
    data: str


class Lines:
    """Bytes in, whole events out (HTML standard, 9.2.6). What a broken connection leaves half is no event."""

    def __init__(self) -> None:
        self._pending = bytearray()
        self._name = ""
        self._data: list[str] = []
        self._chars = 0

    def feed(self, chunk: bytes) -> Iterator[Event]:
        self._pending += chunk
        *whole, rest = self._pending.split(b"\n")
        self._pending = bytearray(rest)
        for raw in whole:
            line = raw.removesuffix(b"\r").decode("utf-8", "replace")
            if not line:
                if self._data:
                    yield Event(self._name or "message", "\n".join(self._data))
                self._name, self._data, self._chars = "", [], 0
                continue
            field, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if field == "event":
                self._name = value
            elif field == "data":
                self._data.append(value)
                self._chars += len(value) + 1
        if len(self._pending) + self._chars > ANSWER_BYTES_MAX:
            raise AnswerInvalid.found(200, "an event without end")


class Following:
    """One stream of entries, over as many connections as it takes. Each entry comes once, in order, none is left out.

    It ends after the last entry of what has ended. `give_up_after`: seconds without any sign of a gateway after which
    GatewayUnreachable is raised; the next `Following` goes on after `after`.
    """

    def __init__(self, path: str, named: str, after: int, give_up_after: float) -> None:
        self.path = path
        self.after = after
        self.is_over = False
        self._named = named
        self._give_up_after = give_up_after
        self._heard_at = time.monotonic()
        self._lines = Lines()
        self._pause = FIRST_PAUSE
        self._at_least = 0.0

    def headers(self) -> dict[str, str]:
        """Of the next connection, which goes on after the last entry that came."""
        self._lines = Lines()
        self._at_least = 0.0
        return {"Accept": "text/event-stream", **({"Last-Event-ID": str(self.after)} if self.after else {})}

    def is_stream(self, status: int, headers: Mapping[str, str]) -> bool:
        """Whether events follow. Otherwise there is nothing to come, or `refused` wants the answer."""
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if status == 204:
            self.is_over = True
        return status == 200 and kind == "text/event-stream"

    def refused(self, reply: Reply) -> None:
        """Raises what is final; else the next connection is tried."""
        if 200 <= reply.status < 300:
            raise AnswerInvalid.found(reply.status, "the answer is no stream of events")
        error = refusal(reply.status, reply.content)
        if not error.retryable and ("code" in error.problem or reply.status < 500):
            raise error
        self._at_least = seconds_of(reply.headers.get("retry-after", ""))
        self._give_up(error)

    def lost(self, lost: Lost) -> None:
        """The connection broke, or there was none."""
        said = f"no answer from {self._named} ({lost.reason}); is the gateway running? Following goes on after "
        self._give_up(GatewayUnreachable(f"{said}entry {self.after}"))

    def _give_up(self, error: GatewayError | GatewayUnreachable) -> None:
        if time.monotonic() - self._heard_at > self._give_up_after:
            raise error

    def pause(self) -> float:
        """How long to wait before the next connection."""
        seconds = max(self._at_least, self._pause * random.uniform(0.5, 1.0))  # noqa: S311
        self._pause = min(self._pause * 2, LONGEST_PAUSE)
        return seconds

    def feed(self, chunk: bytes) -> Iterator[Entry]:
        """The entries in these bytes."""
        self._heard_at, self._pause = time.monotonic(), FIRST_PAUSE
        for event in self._lines.feed(chunk):
            if event.name == "entry":
                entry = model(Entry, _data(event))
                if entry.sequence_number <= self.after:
                    continue
                if entry.sequence_number != self.after + 1:
                    raise AnswerInvalid.found(
                        200, f"after entry {self.after} came {entry.sequence_number}: one is missing"
                    )
                self.after = entry.sequence_number
                yield entry
            elif event.name == "end":
                self.is_over = True
                return
            elif event.name == "problem":
                problem = _data(event)
                status = problem.get("status")
                error = GatewayError.of(status if isinstance(status, int) else 500, problem)
                if not error.retryable:
                    raise error
                return


def _data(event: Event) -> dict[str, Any]:
    found = parsed(200, event.data.encode("utf-8", "replace"))
    if not isinstance(found, dict):
        raise AnswerInvalid.found(200, "an event without a JSON object")
    return found
