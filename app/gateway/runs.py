"""The engine of runs, wired to this gateway's store, tools, policy and blobs."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

from app.core.digest import Digest
from app.core.errors import RunErased, ShuttingDown, TgaError
from app.core.limits import RUN_SWEEP_MS
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine.announcing import CalledBack, RunAnnouncement, load_announcement, load_callbacks
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.ports import Salts
from app.domain.runs.erasing import ERASABLE_RUNS
from app.domain.runs.sealing import SealedSecret, Seals, open_secret, seal_secret
from app.domain.runs.transitions import RUN
from app.domain.runs.values import ArtifactValue, BlobReference, SecretValue
from app.domain.system.log import SystemLog
from app.domain.tga.documents import ActionRequest, TraceId
from app.domain.tga.execution import Answer, answer_of
from app.domain.tga.ports import Companion
from app.domain.tga.runtime import CheckedCall
from app.edge.calls import Calls
from app.edge.handover import HandedOver
from app.postgres.erasing import erase_stream
from app.postgres.listener import Listener
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces

RUNS_CHANNEL = "tga_runs"


class EngineLink:
    """The runtime of traces is made before the engine that rests on it: this is where it finds the engine later."""

    def __init__(self) -> None:
        self.engine: RunEngine | None = None

    def companion_of(self, request: ActionRequest) -> Companion | None:
        return None if self.engine is None else self.engine.calling.companion_of(request)

    async def announcement(self, run_id: str, webhook: str) -> RunAnnouncement | None:
        """What a webhook is to be told of a run that asks."""
        if self.engine is None:
            raise ShuttingDown("the gateway is not serving yet")
        return await load_announcement(self.engine.ports, run_id, webhook)

    async def callbacks(self, run_id: str) -> list[CalledBack]:
        """What the URLs are to be told that questions of a run name."""
        if self.engine is None:
            raise ShuttingDown("the gateway is not serving yet")
        return await load_callbacks(self.engine.ports, run_id)


class EndedTracesOf:
    """What is recorded of traces that a run waits for."""

    def __init__(self, traces: PostgresTraces) -> None:
        self._traces = traces

    async def load_answer(self, trace_id: str) -> Answer:
        return answer_of(await self._traces.load_trace(TraceId(trace_id)))


class CallsOfRuns:
    """Tool calls of runs go the way of all calls: `calls` is set when the edge is there."""

    def __init__(self) -> None:
        self.calls: Calls | None = None

    async def call(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        if self.calls is None:
            raise ShuttingDown("the gateway is not serving yet")
        try:
            return await self.calls.until_handed_over(call, wait_ms=wait_ms)
        except HandedOver:
            return await self.calls.handed_over(call)


class RunSweep:
    """Does what is due. Workers are judged only when this gateway could have heard them for as long as they may be
    silent."""

    def __init__(self, engine: RunEngine) -> None:
        self._engine = engine
        self._hears_since_ms: float | None = None  # since when heartbeats reach the store, as far as is known here

    async def once(self) -> None:
        """All that is due now and soon; returns when nothing is for a while."""
        ports, next_ms = self._engine.ports, 0
        try:
            while next_ms < RUN_SWEEP_MS:
                await self._engine.until_due(next_ms)
                now_ms = ports.clock.monotonic_ms()
                if self._hears_since_ms is None:
                    self._hears_since_ms = now_ms
                judges = now_ms - self._hears_since_ms >= ports.lease_ms
                found_ms = await self._engine.sweeping.sweep(judges_workers=judges)
                next_ms = RUN_SWEEP_MS if found_ms is None else found_ms
        except TgaError:
            self._hears_since_ms = None
            raise


class JournalValues:
    """Values that are too large for the journal, as blobs."""

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs

    async def store(self, tenant: str, raw: bytes, *, media_type: str, serializer: str) -> ArtifactValue:
        sha256 = hashlib.sha256(raw).hexdigest()

        async def pieces() -> AsyncIterator[bytes]:
            yield raw

        await self._blobs.put(tenant, Digest(sha256), pieces(), stated_bytes=len(raw))
        reference = {"sha256": sha256, "size_bytes": len(raw), "media_type": media_type, "serializer": serializer}
        return ArtifactValue(tier="artifact", ref=BlobReference.made_of(reference))


class SealedSecrets:
    """Secret values of runs: sealed under the gateways' key and the run's salt, and kept as blobs."""

    def __init__(self, blobs: Blobs, values: JournalValues, salts: Salts, seals: Seals) -> None:
        self._blobs = blobs
        self._values = values
        self._salts = salts
        self._seals = seals

    async def seal(self, tenant: str, run_id: str, path: str, value: Any) -> SecretValue:
        salt = (await self._salts.load(run_id)).digests
        sealed, commitment = seal_secret(self._seals, value, stream=RUN.stream(run_id), path=path, salt=salt)
        stored = await self._values.store(tenant, sealed, media_type="application/octet-stream", serializer="bytes")
        return SecretValue(tier="secret", ref=stored.ref, commitment=commitment)

    async def open(self, tenant: str, run_id: str, path: str, secret: SecretValue) -> Any:
        content = await self._blobs.open(tenant, Digest(secret.ref.sha256))
        sealed = b"".join([piece async for piece in content.pieces()])
        salt = (await self._salts.load(run_id)).digests
        kept = SealedSecret(sealed, secret.commitment)
        return open_secret(self._seals, kept, stream=RUN.stream(run_id), path=path, salt=salt)


class RunErasure:
    """Erases the payloads of runs that have ended."""

    def __init__(self, sessions: Sessions, system: SystemLog, clock: Clock, executor_id: Callable[[], str]) -> None:
        self._sessions = sessions
        self._system = system
        self._clock = clock
        self._executor_id = executor_id

    async def erase(self, run_id: str, *, tenant: str, erased_by: str, rationale: str) -> None:
        """Durable when it returns; RunNotFound, RunUnfinished, RunErased, or StreamInUse."""
        await erase_stream(
            self._sessions,
            self._system,
            self._clock,
            self._executor_id(),
            RUN.stream(run_id),
            ERASABLE_RUNS,
            tenant=tenant,
            erased_by=erased_by,
            rationale=rationale,
        )

    async def erase_as_agreed(self, run_id: str) -> None:
        """What a run's own policy says of its payloads once it has succeeded."""
        tenant = run_id.partition("/")[0] if "/" in run_id else DEFAULT_TENANT
        with contextlib.suppress(RunErased):
            await self.erase(run_id, tenant=tenant, erased_by="retention", rationale="its policy: delete_on_success")


@contextlib.asynccontextmanager
async def listening(engine: RunEngine, url: str) -> AsyncIterator[None]:
    """Hear what other gateways announce of runs."""
    listener = Listener(url, RUNS_CHANNEL, heard=engine.heard, changed=engine.missed)
    async with await listener.open():
        yield
