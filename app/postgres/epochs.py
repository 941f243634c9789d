"""The log's next epoch: what was signed and is lost, told on the system stream, then signed under a new origin."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Final

from app.core.errors import ConcurrentExecution, LogForked
from app.core.limits import EPOCH_WAIT_MS, LOG_ROUND_MS, LOG_STALL_MS
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.log.epochs import epoch_of, next_origin
from app.domain.log.heads import HeadSigner, SignedHead
from app.domain.system.documents import SYSTEM, FormerLog, LogEpoch, SystemDocument
from app.domain.system.log import SystemLog, SystemState
from app.postgres.sequencer import LeaderTerm, TreeSession
from app.postgres.tree import PostgresTree

_LEAF: Final = "SELECT leaf_index FROM tga.leaves WHERE stream = $1 AND sequence_number = $2"
_HEADS: Final = "SELECT note FROM tga.tree_heads WHERE size <= $1 ORDER BY size DESC LIMIT 1000"


@dataclass(frozen=True, slots=True)
class LogBreak:
    """`former`: the last head that was signed. `kept_size`: so many of its leaves the database still has, as a head of
    the same log that stands there vouches."""

    former: SignedHead
    kept_size: int

    @property
    def leaves_lost(self) -> int:
        return self.former.head.size - self.kept_size

    @property
    def origin(self) -> str:
        return next_origin(self.former.head.origin)


class EpochBeginning:
    """While this session holds the sequencer's lock. What is begun and not finished is finished by doing it again."""

    def __init__(self, session: TreeSession, signer: HeadSigner, system: SystemLog, clock: Clock) -> None:
        self._session = session
        self._tree = PostgresTree(session)
        self._signer = signer
        self._system = system
        self._clock = clock
        self._term = LeaderTerm(session, signer, stall_ms=LOG_STALL_MS)

    async def lock(self) -> None:
        """A gateway whose log is forked holds the lock only while it looks; one that sequences keeps it."""
        deadline = time.monotonic() + EPOCH_WAIT_MS / 3000
        while not await self._session.try_lock():
            if time.monotonic() > deadline:
                raise ConcurrentExecution(
                    "a gateway sequences the log at this moment",
                    remedy="Its log is not forked. If `tga doctor` says otherwise, stop the gateway and try again.",
                )
            await asyncio.sleep(LOG_ROUND_MS / 1000)

    async def find_break(self) -> LogBreak | None:
        """None: the tree continues all that was signed, and there is nothing to begin anew."""
        try:
            await self._term.settle()
        except LogForked:
            pass
        else:
            return None
        former = await asyncio.to_thread(self._signer.load_remembered)
        if former is None:
            raise LogForked(
                "the signer remembers no head, and the tree contradicts one that the database holds itself",
                remedy='That is no old backup. See "Tampering was found" in docs/operations.md.',
            )
        return LogBreak(former, await self._kept_size(former))

    async def _kept_size(self, former: SignedHead) -> int:
        size = await self._tree.size()
        for row in await self._session.fetch(_HEADS, former.head.size):
            stored = SignedHead.from_note(row["note"])
            if stored.head.origin != former.head.origin or not self._signer.has_signed(stored):
                continue
            if stored.head.size > size or await self._tree.root(stored.head.size) != stored.head.root:
                raise LogForked(
                    "the database contradicts a head that it holds itself",
                    expected=f"root {stored.head.root.hex()} over the first {stored.head.size} leaves",
                    remedy='That is no old backup. See "Tampering was found" in docs/operations.md.',
                )
            return stored.head.size
        return 0

    async def begin(self, found: LogBreak, *, rationale: str, by: str) -> SignedHead:
        """Say it on the system stream, unless that stands there from a try before; then sign."""
        former = found.former.head

        def decide(state: SystemState) -> list[SystemDocument]:
            if any(epoch.origin == found.origin for epoch in state.epochs):
                return []
            return [
                LogEpoch.made(
                    system_id=DEFAULT_TENANT,
                    recorded_at=self._clock.now(),
                    recorded_by=by,
                    epoch=epoch_of(found.origin),
                    origin=found.origin,
                    former=FormerLog.made(
                        origin=former.origin, size=former.size, root=former.root.hex(), note=found.former.note
                    ),
                    kept_size=found.kept_size,
                    leaves_lost=found.leaves_lost,
                    rationale=rationale,
                )
            ]

        state = await self._system.append(DEFAULT_TENANT, decide)
        stream, last = SYSTEM.stream(DEFAULT_TENANT), state.head.sequence_number

        async def is_said(size: int) -> bool:
            rows = await self._session.fetch(_LEAF, stream, last)
            return bool(rows) and int(rows[0]["leaf_index"]) < size

        return await self._term.begin_epoch(found.former, is_said)
