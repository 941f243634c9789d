"""System streams on PostgreSQL: read on from where we stand, verify, append; several gateways at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.core.digest import Digest
from app.core.errors import ChecksumMismatch, ConcurrentExecution, OutcomeUnknown, SequenceGap
from app.core.limits import LIST_ENTRIES_MAX
from app.domain.clock import Clock
from app.domain.ledger.plans import Ledger
from app.domain.system.decision_signer import Signs, SystemDecisionSigner
from app.domain.system.documents import SystemDocument
from app.domain.system.log import SystemState, fold_system, plan_system
from app.domain.system.pins import Pins
from app.domain.tools import Tool
from app.postgres.sessions import Sessions
from app.postgres.vault import PostgresVault, Seals

_TAIL = """
SELECT e.sequence_number, e.entry, e.entry_digest, a.artifact
  FROM tga.entries e LEFT JOIN tga.artifacts a USING (stream, sequence_number)
 WHERE e.stream = $1 AND e.sequence_number > $2 ORDER BY e.sequence_number LIMIT $3
"""
_TRIES_MAX = 50


class PostgresSystemLog:
    """The SystemLog port. A state per tenant in memory; `executor_id` says under whose name entries are made."""

    def __init__(self, sessions: Sessions, ledger: Ledger, clock: Clock, executor_id: Callable[[], str]) -> None:
        self._sessions = sessions
        self._ledger = ledger
        self._clock = clock
        self._executor_id = executor_id
        self._states: dict[str, SystemState] = {}

    def state_of(self, tenant: str) -> SystemState:
        return self._states.get(tenant) or SystemState(tenant)

    async def refresh(self, tenant: str) -> SystemState:
        """Read and verify what was appended since; nothing that does not verify is taken over."""
        state = self.state_of(tenant)
        while rows := await self._sessions.fetch(_TAIL, state.stream, state.head.sequence_number, LIST_ENTRIES_MAX):
            for row in rows:
                state = fold_system(
                    state, row["entry"], row["artifact"], entry_digest=Digest(row["entry_digest"].hex())
                )
        # Two refreshes may run at once: the one that came further stays.
        if state.head.sequence_number >= self.state_of(tenant).head.sequence_number:
            self._states[tenant] = state
        return self.state_of(tenant)

    async def refresh_all(self) -> None:
        for tenant in list(self._states):
            await self.refresh(tenant)

    async def append(self, tenant: str, decide: Callable[[SystemState], list[SystemDocument]]) -> SystemState:
        for _ in range(_TRIES_MAX):
            state = await self.refresh(tenant)
            documents = decide(state)
            if not documents:
                return state
            plan = plan_system(state, documents, executor_id=self._executor_id(), recorded_at=self._clock.now())
            try:
                await self._ledger.commit(plan)
            except (SequenceGap, ChecksumMismatch, OutcomeUnknown):
                # Another gateway was faster, or ours may stand already: look again, decide again.
                continue
            return await self.refresh(tenant)
        raise ConcurrentExecution(
            "others append to the system stream all the time", stream=self.state_of(tenant).stream
        )


class SignsAndSeals(Signs, Seals, Protocol):
    """What a keyring does: sign, seal, unseal."""


@dataclass(frozen=True, slots=True)
class SystemParts:
    """What stands on the system streams, and what relies on it."""

    log: PostgresSystemLog
    pins: Pins
    decision_signer: SystemDecisionSigner
    vault: PostgresVault


def system_parts(
    sessions: Sessions,
    ledger: Ledger,
    clock: Clock,
    keys: SignsAndSeals,
    *,
    executor_id: Callable[[], str],
    definition_of: Callable[[Tool], dict[str, Any]],
) -> SystemParts:
    log = PostgresSystemLog(sessions, ledger, clock, executor_id)
    return SystemParts(
        log=log,
        pins=Pins(log, clock, definition_of),
        decision_signer=SystemDecisionSigner(log, keys, clock),
        vault=PostgresVault(sessions, keys),
    )
