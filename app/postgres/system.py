"""System streams on PostgreSQL: what is read of them, and the parts of a gateway that rely on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from app.core.digest import Digest
from app.domain.clock import Clock
from app.domain.ledger.plans import Ledger
from app.domain.system.decision_signer import Signs, SystemDecisionSigner
from app.domain.system.documents import SYSTEM
from app.domain.system.log import SystemLog, SystemRow
from app.domain.system.pins import Pins
from app.domain.tools import Tool
from app.postgres.sessions import Sessions
from app.postgres.vault import PostgresVault, Seals

_TAIL = """
SELECT e.entry, e.entry_digest, e.artifact
  FROM tga.records e
 WHERE e.stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1) AND e.sequence_number > $2
 ORDER BY e.sequence_number LIMIT $3
"""
_HEADS = "SELECT stream, sequence_number FROM tga.heads WHERE stream >= 'system:' AND stream < 'system;'"


class PostgresSystemRows:
    """The SystemRows port."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def load_tail(self, stream: str, *, after: int, limit: int) -> list[SystemRow]:
        rows = await self._sessions.fetch(_TAIL, stream, after, limit)
        return [SystemRow(row["entry"], row["artifact"], Digest(row["entry_digest"].hex())) for row in rows]

    async def load_heads(self) -> dict[str, int]:
        """Of every tenant's stream the number of its last entry; nothing of it is verified."""
        rows = await self._sessions.fetch(_HEADS)
        return {SYSTEM.identity_of(row["stream"]): row["sequence_number"] for row in rows}


class SignsAndSeals(Signs, Seals, Protocol):
    """What a keyring does: sign, seal, unseal."""


@dataclass(frozen=True, slots=True)
class SystemParts:
    """What stands on the system streams, and what relies on it."""

    log: SystemLog
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
    log = SystemLog(PostgresSystemRows(sessions), ledger, clock, executor_id)
    return SystemParts(
        log=log,
        pins=Pins(log, clock, definition_of),
        decision_signer=SystemDecisionSigner(log, keys, clock),
        vault=PostgresVault(sessions, keys),
    )
