"""A stream that one executor continues: commit what is planned, settle an unknown commit, prove ownership, give back.

Nothing here knows one kind from another: a kind brings its entries and plans, and says how it is read where a stream
stands. Whether the owner's life is a session's lock (executors) or a lease (workers) is the `StreamOwner`'s affair.

1. `append` collects planned entries; the head moves with them, the store does not.
2. `commit` stores them in one transaction. If the answer is lost, `_settle` takes the stream's lock and reads.
3. `verify_owned` and `is_still_ours` stand before everything that touches the outside world (I6).
4. `give_back` ends the ownership.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, NoReturn, Protocol

from app.core.chain import Head, StreamKind
from app.core.digest import GENESIS, Digest
from app.core.errors import (
    ConcurrentExecution,
    LockAcquireFailed,
    OutcomeUnknown,
    SequenceGap,
    StoreBusy,
    StoreUnavailable,
)
from app.core.limits import BACKOFF_FIRST_MS, BACKOFF_MAX_MS, OWNERSHIP_BELIEVED_MS
from app.domain.clock import Clock
from app.domain.ledger.plans import Ledger, Plan, PlannedEntry

NO_ANSWER: Final = (OutcomeUnknown, StoreUnavailable, LockAcquireFailed)


class Position(NamedTuple):
    """Where a stream stands in the store: all that is compared to learn whether another executor continued it."""

    entry_digest: Digest = GENESIS
    dispatch_attempt: int = 1  # the last one recorded; the first has no row of its own
    waiting: str | None = None


UNBORN: Final = Position()


class StreamOwner(Protocol):
    """As whom this process owns streams, and how the store tells whether that owner lives."""

    def executor_id(self) -> str:
        """The current id; raises StoreUnavailable while there is none (its session, or its lease, is lost)."""
        ...

    async def is_alive(self, executor_id: str) -> bool:
        """Ask the store whether this id still counts; then no other executor can have taken what it owns.

        False also when the store does not answer: the id is given up, and the next `executor_id` is another one.
        """
        ...

    async def acquire(self, stream: str) -> str:
        """Become the stream's owner under the current id, which is returned; a commit that was under way is over then.

        ConcurrentExecution when a living owner has it; LockAcquireFailed when its lock was not obtained in time.
        """
        ...

    async def release(self, stream: str, executor_id: str) -> None:
        """Give the stream back; not an error if another owns it by now."""
        ...

    async def list_recoverable(self, kind: str, *, after: str | None, limit: int) -> list[str]:
        """Streams of this kind that are not finished, wait for no person and have no living owner but this one; oldest
        first."""
        ...


class NoOwner:
    """The StreamOwner of streams without an owner. Every gateway appends to them; the head that a plan was made on
    decides whose plan comes first (I1, I5). Acquiring one takes no lock, so a commit that is thought lost may still
    happen later: committing the same plan again is refused then, and settled."""

    __slots__ = ("executor_id",)

    def __init__(self, executor_id: Callable[[], str]) -> None:
        self.executor_id = executor_id  # in whose name entries are made

    async def is_alive(self, executor_id: str) -> bool:
        return self.executor_id() == executor_id

    async def acquire(self, stream: str) -> str:
        return self.executor_id()

    async def release(self, stream: str, executor_id: str) -> None:
        return None

    async def list_recoverable(self, kind: str, *, after: str | None, limit: int) -> list[str]:
        return []  # a stream without owner has nothing under way


@dataclass(frozen=True, slots=True)
class StreamPorts:
    """What all owned streams of one kind ask of the world.

    `load_position` reads, and verifies, where a stream stands; UNBORN for one that has no entry. `waits_for_store`:
    a commit runs in a task of its own and waits until the store answers; otherwise it raises what the store raises.
    """

    kind: StreamKind
    ledger: Ledger
    owner: StreamOwner
    clock: Clock
    load_position: Callable[[str], Awaitable[Position]]
    waits_for_store: bool = True


class OwnedStream:
    """One stream of one executor. Only the task that executes the stream calls its methods, so no lock guards it;
    callers that wait in other tasks read `is_unsettled` and nothing else."""

    __slots__ = (
        "_ports",
        "_proven_at_ms",
        "dispatch_attempt",
        "durable_head",
        "executor_id",
        "head",
        "identity",
        "is_unsettled",
        "pending",
        "stream",
    )

    def __init__(
        self, ports: StreamPorts, identity: str, *, executor_id: str, head: Head, dispatch_attempt: int = 1
    ) -> None:
        # Set here for good.
        self._ports = ports
        self.identity = identity
        self.stream = ports.kind.stream(identity)
        # What is planned: `append` adds to both, `commit` empties `pending`.
        self.pending: list[PlannedEntry] = []
        self.head = head  # after `pending`
        # What is durable: set by `commit`; at first as the stream was loaded.
        self.durable_head = head
        self.dispatch_attempt = dispatch_attempt  # the last one that is recorded
        # Whose it is: as it was acquired; set again by `_taken_again`, when the id is dead or a commit is settled.
        self.executor_id = executor_id
        self._proven_at_ms = -math.inf  # when the store was asked for what last proved that the stream is ours
        # From a commit that may have happened, or could not be made yet, until it is settled: set by `commit` alone.
        self.is_unsettled = False

    @property
    def may_be_stored(self) -> bool:
        """Whether the store may know this stream as ours: then it wants to be given back."""
        return self.durable_head.sequence_number > 0 or self.is_unsettled

    def append(self, planned: PlannedEntry, head: Head) -> None:
        """Collect an entry that was planned on `self.head` for the next commit; `head` is the one after it."""
        self.pending.append(planned)
        self.head = head

    async def commit(self, plan: Plan, through: Callable[[Plan], Awaitable[None]] | None = None) -> None:
        """Make this plan, which holds `pending`, durable in one transaction; an unknown commit is settled first.

        `through`: what stores it, in place of the ledger itself, together with what belongs to it on other streams.

        What the ledger refuses is raised. While the store does not answer, the birth of a stream is refused and all
        else waits: something that has happened must get onto the record. ConcurrentExecution: another executor has
        continued the stream, or a stream with this id exists.
        """
        ports, is_birth = self._ports, self.durable_head.sequence_number == 0
        store = through or ports.ledger.commit
        delay_ms = BACKOFF_FIRST_MS
        while True:
            self._proven_at_ms = ports.clock.monotonic_ms()
            try:
                await store(plan)
                break
            except (OutcomeUnknown, SequenceGap) as error:
                if isinstance(error, SequenceGap) and is_birth and not self.is_unsettled:
                    # Another caller's stream has this id. Leave it alone; do not even look whose it is.
                    raise ConcurrentExecution(f"a {ports.kind.name} with this id exists") from None
                # A gap means that the head has moved: by our commit that was thought lost, or by another executor.
                self.is_unsettled = True
                if await self._settle(plan):
                    if plan.owner_after is None:
                        await self.give_back()  # settling acquired the stream again
                    break
                plan = _under(plan, self.executor_id)
            except (StoreBusy, StoreUnavailable, LockAcquireFailed):
                # Nothing was stored. A birth is refused; a call that was made must get its effect recorded.
                if is_birth or not ports.waits_for_store:
                    raise
                self.is_unsettled = True
                await ports.clock.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, BACKOFF_MAX_MS)
        self.is_unsettled = False
        self.pending = []
        self.durable_head = self.head
        if plan.dispatch_attempt is not None:
            self.dispatch_attempt = plan.dispatch_attempt

    async def _settle(self, plan: Plan) -> bool:
        """Whether the unknown commit happened. The stream's lock is taken first: then it is no longer happening.

        ConcurrentExecution when another executor has continued the stream in the meantime.
        """
        found, attempt = await self._taken_again(), plan.dispatch_attempt
        if plan.entries and found.entry_digest == self.head.entry_digest:
            return True
        if found.entry_digest != self.durable_head.entry_digest or (
            attempt is not None and found.dispatch_attempt > attempt
        ):
            await self._yield_to_another()
        # A plan that only changes the owner is idempotent: commit it again.
        return found.dispatch_attempt == attempt

    async def verify_owned(self) -> None:
        """Return when the current executor id owns the stream: nothing is dispatched under an id that is dead.

        While the id was dead another executor may have continued the stream, to its end even: ConcurrentExecution.
        """
        while not self._is_current():
            found = await self._taken_again()
            if found != (self.durable_head.entry_digest, self.dispatch_attempt, None):
                await self._yield_to_another()

    async def is_still_ours(self) -> bool:
        """Whether this executor still owns the stream, asked when the next thing is the first byte to the world.

        Costs no question while the commit before it was asked for a moment ago. After a slow commit, a long wait for a
        connection, or when this process was stopped meanwhile, another executor may have taken over: ask the store. An
        answer that comes late is as old as its question, so ask again, but believe the next one twice as long: a store
        that is always slow must not keep the call from being sent. What remains possible: docs/operations.md.
        """
        asks = 0
        while self._is_current():
            now_ms = self._ports.clock.monotonic_ms()
            if now_ms - self._proven_at_ms <= OWNERSHIP_BELIEVED_MS << max(0, asks - 1):
                return True
            if not await self._ports.owner.is_alive(self.executor_id):
                return False
            self._proven_at_ms, asks = now_ms, asks + 1
        return False

    async def give_back(self) -> None:
        """End the ownership. If the store does not answer the stream stays ours until this process ends."""
        await give_back(self._ports.owner, self.stream, self.executor_id)

    def _is_current(self) -> bool:
        try:
            return self._ports.owner.executor_id() == self.executor_id
        except StoreUnavailable:
            return False

    async def _taken_again(self) -> Position:
        """Own the stream, under a new id if the old one is dead, and read where it stands; waits for the store."""
        ports, delay_ms = self._ports, BACKOFF_FIRST_MS
        while True:
            try:
                self._proven_at_ms = ports.clock.monotonic_ms()
                self.executor_id = await ports.owner.acquire(self.stream)
                return await ports.load_position(self.stream)
            except NO_ANSWER:
                if not ports.waits_for_store:
                    raise
                await ports.clock.sleep(delay_ms / 1000)
                delay_ms = min(delay_ms * 2, BACKOFF_MAX_MS)

    async def _yield_to_another(self) -> NoReturn:
        await self.give_back()
        kind = self._ports.kind.name
        raise ConcurrentExecution(f"another executor has continued the {kind}", stream=self.stream)


async def give_back(owner: StreamOwner, stream: str, executor_id: str) -> None:
    """End an ownership. If the store does not answer it lasts until this process ends."""
    with contextlib.suppress(*NO_ANSWER):
        await owner.release(stream, executor_id)


def _under(plan: Plan, executor_id: str) -> Plan:
    """The same plan under a new executor id: the old one's session was lost."""
    owner_after = executor_id if plan.owner_after is not None else None
    return plan._replace(executor_id=executor_id, owner_after=owner_after)
