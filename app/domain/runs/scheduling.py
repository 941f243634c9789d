"""Schedules: recorded on their tenant's system stream, kept due in the store, and fired by whichever gateway is first.

What a schedule is stands on the record. The store's row says when it is due next. A change is noted in the store before
it is recorded, so that one whose gateway died before the row followed is found and finished by another (`finish`); all
rows can be made from the record again (`rebuild`). A gateway takes due rows, starts their
runs and writes the next time. If it dies meanwhile, another takes them after a while and starts the same runs: a run's
id is made of the schedule's name and the time it is for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from app.core.canonical import canonical_enclosed
from app.core.errors import (
    ConcurrentExecution,
    LockAcquireFailed,
    OutcomeUnknown,
    RecoveryFailed,
    ScheduleLimitReached,
    ScheduleNotFound,
    StoreBusy,
    StoreUnavailable,
    TgaError,
)
from app.core.limits import RUN_INLINE_BYTES_MAX, SCHEDULES_AT_ONCE_MAX, SCHEDULES_PER_TENANT_MAX
from app.domain.clock import Clock
from app.domain.runs.documents import Trigger
from app.domain.runs.schedules import Timetable, decide_firing, next_after, run_of_schedule, verify_spec
from app.domain.runs.starting import StartAsked, StartRun
from app.domain.system.documents import Schedule, ScheduleRemoval, SystemDocument
from app.domain.system.log import SystemLog, SystemState
from app.domain.system.programs import digest_said

logger = logging.getLogger("tga")

# Nothing is known of the start, or it may succeed soon: the schedule stays due, and is taken again.
_COMES_AGAIN: Final = (StoreBusy, StoreUnavailable, OutcomeUnknown, LockAcquireFailed, ConcurrentExecution)


class StoredSchedule(NamedTuple):
    """A schedule's row. `last_*`: what became of the last time that it was due."""

    tenant: str
    name: str
    sequence_number: int
    procedure: str
    version: str | None
    spec: dict[str, Any]
    missed: str
    principal_id: str
    next_at: str | None
    last_at: str | None
    last_run_id: str | None
    last_error: str | None


class TakenSchedule(NamedTuple):
    """A row that is due, taken by this gateway for a while. `now`: by the store's clock."""

    tenant: str
    name: str
    sequence_number: int
    next_at: str
    now: str


@dataclass(frozen=True, slots=True)
class Fired:
    """What became of a due schedule: the runs that were started, or the error of the last that was not."""

    taken: TakenSchedule
    next_at: str | None
    times: Sequence[str] = ()
    run_ids: Sequence[str] = ()
    error: TgaError | None = None


class Change(NamedTuple):
    """A change of a schedule that was begun. `begun`: by which the store knows it."""

    tenant: str
    name: str
    begun: Any


class ScheduleStore(Protocol):
    """When schedules are due. Rows follow the record: a call that is older than the row changes nothing."""

    async def begin(self, tenant: str, name: str) -> Change: ...

    async def end(self, change: Change) -> None:
        """Unless another change of it was begun since."""
        ...

    async def unfinished(self, limit: int) -> Sequence[Change]:
        """Changes that were begun longer ago than any takes: SCHEDULE_HOLD_MS."""
        ...

    async def put(self, schedule: Schedule, sequence_number: int, next_at: str | None) -> None: ...

    async def drop(self, tenant: str, name: str, sequence_number: int) -> None:
        """Unless it is newer than this entry."""
        ...

    async def known(self, tenant: str) -> dict[str, int]:
        """The sequence number of the entry that each row is made from, by name."""
        ...

    async def load(self, tenant: str, name: str) -> StoredSchedule | None: ...

    async def page(
        self, tenant: str, *, principal_id: str | None, after: str | None, limit: int
    ) -> Sequence[StoredSchedule]: ...

    async def take_due(self, limit: int) -> Sequence[TakenSchedule]:
        """Rows that are due and that no other gateway has taken; others take them after SCHEDULE_HOLD_MS."""
        ...

    async def settle(self, fired: Fired) -> None:
        """Write the next time, if the row is still as it was taken."""
        ...


class Schedules:
    def __init__(self, system: SystemLog, store: ScheduleStore, clock: Clock) -> None:
        self._system = system
        self._store = store
        self._clock = clock

    async def set(self, schedule: Schedule, *, verify_owner: Callable[[str], None] | None = None) -> StoredSchedule:
        """Record the schedule unless just this is recorded already, and make it due. Raises SchemaViolation,
        InputTooLarge, ScheduleLimitReached, and what `verify_owner` raises of who made the one that stands."""
        verify_spec(schedule.spec)
        canonical_enclosed(schedule.input, bytes_max=RUN_INLINE_BYTES_MAX)
        tenant, name = schedule.system_id, schedule.name

        def decide(state: SystemState) -> list[SystemDocument]:
            known = state.schedules.get(name)
            if known is not None and verify_owner is not None:
                verify_owner(known.principal_id)
            if known is not None and known.said_digest == digest_said(schedule):
                return []
            if known is None and len(state.schedules) >= SCHEDULES_PER_TENANT_MAX:
                raise ScheduleLimitReached(
                    "the tenant has as many schedules as it can have", expected=f"at most {SCHEDULES_PER_TENANT_MAX}"
                )
            return [schedule]

        await self._change(tenant, name, decide)
        return await self.load(tenant, name)

    async def remove(
        self, tenant: str, name: str, *, removed_by: str, verify_owner: Callable[[str], None] | None = None
    ) -> bool:
        """Whether there was one. Raises what `verify_owner` raises of who made it."""
        is_there = False

        def decide(state: SystemState) -> list[SystemDocument]:
            nonlocal is_there
            known = state.schedules.get(name)
            is_there = known is not None
            if known is None:
                return []
            if verify_owner is not None:
                verify_owner(known.principal_id)
            now = self._clock.now()
            return [ScheduleRemoval(system_id=tenant, recorded_at=now, recorded_by=removed_by, name=name)]

        await self._change(tenant, name, decide)
        return is_there

    async def load(self, tenant: str, name: str) -> StoredSchedule:
        found = await self._store.load(tenant, name)
        if found is None:
            raise ScheduleNotFound(f"there is no schedule {name}")
        return found

    async def load_recorded(self, stored: StoredSchedule) -> Schedule:
        """What the schedule is, with its input, as it stands on the record."""
        return await self._recorded(stored.tenant, stored.sequence_number)

    async def page(
        self, tenant: str, *, principal_id: str | None = None, after: str | None = None, limit: int
    ) -> Sequence[StoredSchedule]:
        """By name; those that this principal made, or all."""
        return await self._store.page(tenant, principal_id=principal_id, after=after, limit=limit)

    async def finish(self) -> None:
        """Make the rows of changes that were begun and not ended what the record says: their gateways have died."""
        for change in await self._store.unfinished(SCHEDULES_AT_ONCE_MAX):
            await self._follow(change.tenant, change.name, await self._system.refresh(change.tenant))
            await self._store.end(change)

    async def rebuild(self, tenants: Iterable[str]) -> None:
        """Make all rows what the record says."""
        for tenant in tenants:
            state = await self._system.refresh(tenant)
            known = await self._store.known(tenant)
            stands = {name: schedule.sequence_number for name, schedule in state.schedules.items()}
            for name in sorted(known.keys() | stands.keys()):
                if known.get(name) != stands.get(name):
                    await self._follow(tenant, name, state)

    async def fire_due(self, start: StartRun) -> list[Fired]:
        """Start the runs of every schedule that is due, and write when it is due next. One that cannot be fired stops
        none of the others."""
        fired: list[Fired] = []
        for taken in await self._store.take_due(SCHEDULES_AT_ONCE_MAX):
            try:
                one = await self._fire(taken, start)
                await self._store.settle(one)
            except _COMES_AGAIN as error:
                logger.warning("the schedule %s of %s waits: %s", taken.name, taken.tenant, error)
                continue
            if one.error is not None:
                logger.warning("the schedule %s of %s starts nothing: %s", taken.name, taken.tenant, one.error)
            fired.append(one)
        return fired

    async def _fire(self, taken: TakenSchedule, start: StartRun) -> Fired:
        try:
            schedule = await self._recorded(taken.tenant, taken.sequence_number)
        except _COMES_AGAIN:
            raise
        except TgaError as error:
            return Fired(taken, None, error=error)  # what is recorded is not sound: it is due never again
        firing = decide_firing(schedule, next_at=taken.next_at, now=taken.now)
        run_ids: list[str] = []
        failed: TgaError | None = None
        for time in firing.times:
            trigger = Trigger(type="schedule", id=taken.name)
            run_id = run_of_schedule(taken.name, time)
            asked = StartAsked(
                schedule.principal, schedule.procedure, schedule.version, run_id, schedule.input, trigger
            )
            try:
                run_ids.append((await start(asked)).run_id)
            except _COMES_AGAIN:
                raise
            except TgaError as error:
                failed = error
        return Fired(taken, firing.next_at, firing.times, run_ids, failed)

    async def _change(self, tenant: str, name: str, decide: Callable[[SystemState], list[SystemDocument]]) -> None:
        change = await self._store.begin(tenant, name)
        try:
            state = await self._system.append(tenant, decide)
        except _COMES_AGAIN:
            raise  # it may be on the record: the change stays begun
        except TgaError:
            await self._store.end(change)
            raise
        await self._follow(tenant, name, state)
        await self._store.end(change)

    async def _follow(self, tenant: str, name: str, state: SystemState) -> None:
        """Make the row what this state says."""
        known = state.schedules.get(name)
        if known is None:
            await self._store.drop(tenant, name, state.head.sequence_number)
            return
        schedule = await self._recorded(tenant, known.sequence_number)
        next_at = next_after(Timetable.of(schedule), self._clock.now())
        await self._store.put(schedule, known.sequence_number, next_at)

    async def _recorded(self, tenant: str, sequence_number: int) -> Schedule:
        document = await self._system.load(tenant, sequence_number)
        if not isinstance(document, Schedule):
            raise RecoveryFailed(
                "the system stream has something else where a schedule was made", sequence_number=sequence_number
            )
        return document
