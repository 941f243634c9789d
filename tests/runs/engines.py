"""An engine of runs in this process, on real PostgreSQL, with real procedures, salts and policy; without the edge."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from app.clock import SystemClock
from app.config.answer_schema import BoundedSchemas
from app.connectors.blobs import open_object_store
from app.core.errors import ToolNotFound
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.plans import Ledger
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.messages import LeasedRun, LeaseRequest, PutAnswer, PutRequest
from app.domain.runs.engine.ports import RunPorts, refuse_callback
from app.domain.runs.engine.starting import Started, StartRequest
from app.domain.runs.procedures import Procedures, ProcedureSaid
from app.domain.runs.values import InlineValue
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall
from app.gateway.policy_file import PolicyFile
from app.gateway.runs import EndedTracesOf, JournalValues, RunErasure, SealedSecrets
from app.postgres.blobs import PostgresBlobRows
from app.postgres.ledger import PostgresLedger
from app.postgres.run_salts import PostgresRunSalts
from app.postgres.runs import PostgresRuns
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from tests.runtime.scripted import KEYS, open_system

PROGRAM = "a" * 64
AGENT = Principal(principal_id="agent-1", tenant="default", roles=["agent"])
WORKER = Principal(principal_id="worker-1", tenant="default", roles=["worker"])
NOW = "2026-01-01T00:00:00.000Z"


class NoTools:
    async def call(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        raise ToolNotFound("there are no tools here")


@dataclass
class Engine:
    """`engine`, and short ways to the requests that tests make."""

    engine: RunEngine
    procedures: Procedures
    erasure: RunErasure

    async def erase(self, run_id: str) -> None:
        await self.erasure.erase(run_id, tenant="default", erased_by="olga", rationale="asked for")

    async def start(self, run_id: str, given: Any = None, **more: Any) -> Started:
        asked = StartRequest(AGENT, "onboard", InlineValue(tier="inline", value=given), run_id=run_id, **more)
        return await self.engine.starting.start(asked)

    async def lease(self, slots: int = 1, worker: str = "worker-one", wait_ms: int = 0) -> list[LeasedRun]:
        offered = [{"name": "onboard", "version": "1", "program_digest": PROGRAM}]
        request = {"worker": worker, "name": "here", "procedures": offered, "slots": slots, "wait_ms": wait_ms}
        return await self.engine.leasing.lease(LeaseRequest.made_of(request), WORKER)

    async def put(self, run: LeasedRun, after_seq: int, *puts: dict[str, Any], then: Any = None) -> PutAnswer:
        request = {"lease": run.lease, "attempt": run.attempt, "after_seq": after_seq, "puts": list(puts), "then": then}
        return await self.engine.put(run.run_id, PutRequest.made_of(request), WORKER)


def step(path: str, value: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "path": path,
        "kind": "step",
        "name": "plan",
        "input_digest": PROGRAM,
        "outcome": "OK",
        "value": {"tier": "inline", "value": value},
        "started_at": NOW,
        "duration_ms": 1,
        **more,
    }


@asynccontextmanager
async def open_engine(
    url: str,
    *,
    wrap: Callable[[Ledger], Ledger] = lambda ledger: ledger,
    lease_ms: int = 30_000,
    folder: Path = Path("/nowhere"),
    ask_webhooks: Sequence[str] = (),
    verify_callback: Callable[[str], None] = refuse_callback,
    clock: Clock | None = None,
) -> AsyncIterator[Engine]:
    """`folder`: where blobs are kept, for those who need any."""
    clock = clock or SystemClock()
    async with await Sessions.open(url) as sessions, await PostgresTraces.open(sessions, url) as traces:
        blobs = Blobs(PostgresBlobRows(sessions), open_object_store(None, folder=folder), SystemClock())
        salts, values = PostgresRunSalts(sessions, KEYS), JournalValues(blobs)
        writer = Writer(PostgresLedger(sessions))
        system = await open_system(sessions, writer, traces)
        procedures = Procedures(system.log, clock)
        engine = RunEngine(
            RunPorts(
                ledger=wrap(writer),
                runs=PostgresRuns(sessions),
                salts=salts,
                procedures=procedures,
                supervisor=PolicyFile.open(None),
                tools=NoTools(),
                values=values,
                secrets=SealedSecrets(blobs, values, salts, KEYS),
                signer=system.decision_signer,
                schemas=BoundedSchemas(),
                clock=clock,
                executor_id=traces.executor_id,
                new_lease=partial(secrets.token_urlsafe, 24),
                incarnation=traces.incarnation,
                lease_ms=lease_ms,
                ask_webhooks=ask_webhooks,
                verify_callback=verify_callback,
            ),
            EndedTracesOf(traces),
        )
        said = ProcedureSaid(name="onboard", version="1", program_digest=PROGRAM)
        await procedures.register(said, WORKER)
        try:
            yield Engine(engine, procedures, RunErasure(sessions, system.log, clock, traces.executor_id))
        finally:
            await engine.close()
            await writer.close()
