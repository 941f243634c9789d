"""Runtimes whose calls wait for people: skewed clocks, webhooks, other keyrings, supervisors who sign themselves."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.clock import SystemClock
from app.core.ed25519 import key_id_of
from app.core.errors import TgaError
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.checks import Report
from app.domain.ledger.documents import Signature
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import DecidedBy, SupervisorDecision, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Ports, Vault
from app.domain.tga.runtime import TgaRuntime
from app.domain.tga.supervision import Ruling
from app.keys.keyring import Keyring
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.invariants.plans import contents
from tests.runtime.scripted import Scripted, call, new_key

ADA = Principal(principal_id="ada", tenant="default", roles=["supervisor"])
BOB = Principal(principal_id="bob", tenant="default", roles=["supervisor"])
OTHER_KEYS = Keyring.open(
    Path("there is no such folder"), {"TGA_SIGNING_KEY": "X" * 42 + "U=", "TGA_SEALING_KEY": "Y" * 42 + "U="}
)


class Skewed(SystemClock):
    """A gateway's clock that is wrong by so much; the database's is right."""

    def __init__(self, skew_ms: int) -> None:
        super().__init__()
        self._skew_ms = skew_ms

    def now(self) -> str:
        return super().after(self._skew_ms)

    def after(self, milliseconds: int) -> str:
        return super().after(milliseconds + self._skew_ms)

    async def sleep(self, seconds: float) -> None:
        del seconds


def runtime_of(
    scripted: Scripted, *, clock: Clock | None = None, webhooks: Sequence[str] = (), vault: Vault | None = None
) -> TgaRuntime:
    """Another runtime on the same store, tools and supervisor: a new life of the gateway, or another one."""
    return TgaRuntime(
        Ports(
            ledger=scripted.ledger,
            traces=scripted.traces,
            tools=scripted.tools,
            connectors=scripted.connector,
            supervisor=scripted.supervisor,
            pins=scripted.system.pins,
            vault=vault or scripted.system.vault,
            decision_signer=scripted.system.decision_signer,
            clock=clock or scripted.clock,
            approval_webhooks=webhooks,
        )
    )


async def ask(scripted: Scripted, *, runtime: TgaRuntime | None = None, **changes: Any) -> TraceId:
    """A call that waits for a person."""
    scripted.supervisor.answer = "ask"
    answer = await (runtime or scripted.runtime).call(call(key=changes.pop("key", None) or new_key(), **changes))
    assert (answer.state, answer.waiting) == ("PENDING", "supervisor")
    return answer.trace_id


async def digest_asked(scripted: Scripted, trace_id: TraceId) -> str:
    return (await scripted.traces.load_trace(trace_id)).state.action_request_digest


async def decide(
    scripted: Scripted,
    trace_id: TraceId,
    decision: Literal["APPROVE", "DENY"] = "APPROVE",
    *,
    approver: Principal = ADA,
    runtime: TgaRuntime | None = None,
    **changes: Any,
) -> Answer:
    digest = changes.pop("action_request_digest", None) or await digest_asked(scripted, trace_id)
    return await (runtime or scripted.runtime).decide(trace_id, Ruling(decision, approver, digest, **changes))


@dataclass
class Signer:
    """A supervisor with a key of their own."""

    principal: Principal = ADA
    key: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    @property
    def public_key(self) -> bytes:
        return self.key.public_key().public_bytes_raw()

    @property
    def key_id(self) -> str:
        return key_id_of(self.public_key)

    async def ruling(self, scripted: Scripted, trace_id: TraceId, /, **signed_as: Any) -> Ruling:
        """What this person decides and signs; `signed_as` changes what is signed, not what is said."""
        digest, decided_at = await digest_asked(scripted, trace_id), scripted.clock.now()
        said: dict[str, Any] = {
            "trace_id": trace_id,
            "action_request_digest": digest,
            "decision": "APPROVE",
            "decided_by": DecidedBy(type="person", id=self.principal.principal_id),
            "decided_at": decided_at,
            "policy_digest": None,
            "policy_ids": [],
            "rationale": "fine",
            "signature": None,
        }
        signed = SupervisorDecision(**{**said, **signed_as}).signed_bytes()
        value = base64.b64encode(self.key.sign(signed)).decode("ascii")
        signature = Signature(algorithm="Ed25519", key_id=self.key_id, value=value)
        return Ruling("APPROVE", self.principal, digest, "fine", signature, decided_at)


async def find(sessions: Sessions, report: Report | None = None) -> list[TgaError]:
    """Everything that verification finds."""
    async with open_reader(sessions) as reader:
        return [error async for error in verify_ledger(reader, stream_checks(), report or Report())]


async def holding(admin: Admin, text: str) -> dict[str, list[str]]:
    """The rows of every table that hold this text, plain or as bytes."""
    as_hex = text.encode().hex()
    found = {
        table: [row for row in rows if text in row or as_hex in row] for table, rows in (await contents(admin)).items()
    }
    return {table: rows for table, rows in found.items() if rows}
