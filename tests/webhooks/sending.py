"""What tests of webhooks share: rows, a request that waits, a clock that is wound by hand, a reader of deliveries."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from app.connectors.webhooks import Webhooks
from app.domain.tga.announcements import Announcement, Outbox
from app.domain.tga.documents import TraceId
from app.keys.keyring import Keyring
from tests.conftest import Admin
from tests.connectors.servers import Answer, response
from tests.traces import action_request, trace_id

OK = response("200 OK", b"thanks")


def answering(*answers: bytes) -> Answer:
    """Each request gets the next answer; the last one is for all that follow. Empty: nothing, and the end."""

    async def answer(writer: asyncio.StreamWriter, count: int) -> None:
        writer.write(answers[min(count, len(answers)) - 1])
        await writer.drain()
        writer.close()

    return answer


@dataclass
class HandClock:
    """Time stands at 2026; sleeping gives the turn away and is noted."""

    jitters: float = 0.0
    slept_s: list[float] = field(default_factory=list)

    def now(self) -> str:
        return "2026-01-02T03:04:05.678Z"

    def after(self, milliseconds: int) -> str:
        raise NotImplementedError

    def new_id(self) -> str:
        raise NotImplementedError

    def jitter(self) -> float:
        return self.jitters

    def monotonic_ms(self) -> float:
        raise NotImplementedError

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0.01)


async def load_announcement(trace: TraceId) -> Announcement | None:
    for n in range(1, 500):
        if trace_id(n) == trace:
            return Announcement.of(action_request(n, arguments={"card": "4111-SECRET"}, expires_at=None))
    return None


def webhooks(urls: dict[str, str], outbox: Outbox, keyring: Keyring, **how: Any) -> Webhooks:
    given: dict[str, Any] = {"load": load_announcement, "sign": keyring.sign, "clock": HandClock(), **how}
    return Webhooks(urls, outbox, **given)


async def fill(admin: Admin, count: int, *, webhook: str = "approvals", first: int = 1) -> None:
    """Rows as the append function makes them: the head waits, the row stands in the outbox."""
    for n in range(first, first + count):
        stream = f"trace:{trace_id(n)}"
        await admin.execute(
            "INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, waiting, is_open)"
            " VALUES ($1, 1, sha256('x'), 'PENDING', 'supervisor', true) ON CONFLICT DO NOTHING",
            stream,
        )
        await admin.execute(
            "INSERT INTO tga.outbox (webhook, stream, waiting) VALUES ($1, $2, 'supervisor')", webhook, stream
        )


async def decide(admin: Admin, n: int) -> None:
    await admin.execute("UPDATE tga.heads SET waiting = NULL WHERE stream = $1", f"trace:{trace_id(n)}")


async def rows_of(admin: Admin) -> list[dict[str, Any]]:
    query = (
        "SELECT webhook, stream, attempts, last_error,"
        " round(extract(epoch FROM next_attempt_at - clock_timestamp()) * 1000)::int AS due_in_ms"
        " FROM tga.outbox ORDER BY id"
    )
    return [dict(row) for row in await admin.fetch(query)]


async def make_due(admin: Admin) -> None:
    """As if all waiting were over."""
    await admin.execute("UPDATE tga.outbox SET next_attempt_at = clock_timestamp() - interval '1 second'")


@dataclass(frozen=True)
class Delivery:
    """A request as a receiver sees it: nothing of the gateway's code reads it."""

    head: str
    headers: dict[str, str]
    body: bytes

    @classmethod
    def of(cls, raw: bytes) -> Delivery:
        head, body = raw.split(b"\r\n\r\n", 1)
        first, *lines = head.decode("latin-1").split("\r\n")
        pairs = (line.split(": ", 1) for line in lines)
        return cls(first, {name.lower(): value for name, value in pairs}, body)

    @property
    def id(self) -> str:
        return self.headers["webhook-id"]

    @property
    def document(self) -> dict[str, Any]:
        return dict(json.loads(self.body))

    def verify(self, public_key: bytes) -> None:
        """As the Standard Webhooks specification says; raises InvalidSignature."""
        version, _, value = self.headers["webhook-signature"].partition(",")
        assert version == "v1a"
        signed = (
            self.headers["webhook-id"].encode() + b"." + self.headers["webhook-timestamp"].encode() + b"." + self.body
        )
        Ed25519PublicKey.from_public_bytes(public_key).verify(base64.b64decode(value, validate=True), signed)
