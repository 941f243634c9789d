"""Leases: which worker gets which run, and how it is known to live.

Waiting workers stand here, in memory; the gateway has one query for ready runs in flight, whatever their number. It is
asked when a run becomes ready here, when another gateway announces one, when the next one's pause is over (the query
before has told when that is), and every few seconds besides. A worker that asks for runs where the query has just found
none is no reason to ask again at once: a busy one asks many times a second.
A run is held for a moment before its lease is recorded. A lease that cannot be recorded gives it back at once; what a
gateway held that died is ready again when the hold is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from app.core.errors import LockAcquireFailed, OutcomeUnknown, StoreBusy, StoreUnavailable, TgaError
from app.core.limits import (
    RUN_PAGE_RECORDS_MAX,
    RUN_READY_AGAIN_MS,
    RUN_READY_POLL_MS,
    RUN_SALT_KEPT_MS,
    RUN_SALTS_KEPT_MAX,
    RUN_WORKERS_KNOWN_MAX,
    STORE_ANSWER_MS,
)
from app.domain.identity import Principal
from app.domain.runs.documents import WorkerName
from app.domain.runs.engine.artifacts import is_of_worker
from app.domain.runs.engine.journal import first_seq
from app.domain.runs.engine.losing import lose
from app.domain.runs.engine.messages import Beat, BeatAnswer, BeatRequest, LeasedRun, LeaseRequest
from app.domain.runs.engine.ports import HeadOfRun, LoadedRun, RunPorts, RunSalt
from app.domain.runs.engine.table import RunTable
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import elapsed_ms, owner_of
from app.domain.runs.schedule import AT_WORK

logger = logging.getLogger("tga")

# A lease that was refused so may be recorded a moment later.
_PASSING: Final = (LockAcquireFailed, OutcomeUnknown, StoreBusy, StoreUnavailable)
_AGAIN_S: Final = 0.1


class Gone:
    """Whether the worker that asks for runs has given up; the edge notices it. `on_set` is called then."""

    __slots__ = ("_is_set", "on_set")

    def __init__(self) -> None:
        self._is_set = False
        self.on_set: Callable[[], None] | None = None

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        if self.on_set is not None:
            self.on_set()


@dataclass(slots=True, eq=False)
class _Waiter:
    """A worker that asks for runs. `given`: those that are held for it. `started`: those that are leased to it
    already, with their starts."""

    tenant: str
    programs: frozenset[tuple[str, str]]
    slots: int
    worker: str
    name: WorkerName
    gone: Gone  # it does not wait for an answer any more
    is_impatient: bool  # it wants to know at once, also that there is nothing
    note_life: Callable[[], Awaitable[None]]
    given: list[str] = field(default_factory=list)
    started: list[Reservation] = field(default_factory=list)
    reserved: int = 0  # starts that are on their way to it
    at_work: int = 0  # runs that are being leased to it
    is_here: bool = True  # for what a look finds
    takes_starts: bool = True
    woken: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def free(self) -> int:
        """For how many runs that a look finds it has slots."""
        return self._slots_left if self.is_here else 0

    @property
    def free_for_starts(self) -> int:
        return self._slots_left if self.takes_starts else 0

    @property
    def _slots_left(self) -> int:
        if self.gone.is_set():
            return 0
        return max(0, self.slots - len(self.given) - len(self.started) - self.reserved - self.at_work)


@dataclass(slots=True)
class Reservation:
    """A place for a run that is about to start. `run_id` and `salt` are set when it has."""

    lease: str
    worker: str
    name: WorkerName
    waiter: _Waiter
    run_id: str | None = None
    salt: RunSalt | None = None

    async def note_life(self) -> None:
        with contextlib.suppress(TgaError):  # the store is away: the start says so
            await self.waiter.note_life()


class Leasing:
    def __init__(self, ports: RunPorts, table: RunTable) -> None:
        # Set here for good.
        self._ports = ports
        self._clock = ports.clock
        self._table = table
        # In the order in which they came: `lease` adds and removes, `_distribute` gives.
        self._waiting: list[_Waiter] = []
        # When a worker was last noted to live, and what it said then; the longest unseen first.
        self._seen: dict[str, tuple[float, object]] = {}
        # By tenant and program, when a worker that offers it was last noted; forgotten when one offers others.
        self._offered: dict[tuple[str, str, str], float] = {}
        # Of runs that were started here and wait for their worker: until when, and the salt, which needs not be read.
        self._born: OrderedDict[str, tuple[float, RunSalt]] = OrderedDict()
        self._kicked = asyncio.Event()
        self._kicks = 0  # how often a run may have become ready
        # Of each tenant: programs of which the last look has left none that is ready, and when it was. `kick` forgets.
        self._none_left: dict[str, tuple[float, frozenset[tuple[str, str]]]] = {}
        self._looks_again: asyncio.TimerHandle | None = None
        self._drops_salts: asyncio.TimerHandle | None = None
        self._serving: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None

    @property
    def waiting(self) -> int:
        """How many workers wait for runs here."""
        return len(self._waiting)

    def kick(self) -> None:
        """A run may have become ready."""
        self._kicks += 1
        self._none_left.clear()
        if self._waiting:
            self._kicked.set()

    async def close(self) -> None:
        for timer in filter(None, (self._looks_again, self._drops_salts)):
            timer.cancel()
        for task in filter(None, (self._serving, self._stopping)):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def lease(self, request: LeaseRequest, principal: Principal, *, gone: Gone | None = None) -> list[LeasedRun]:
        """Runs for this worker, as many as it has slots; [] when none is ready within `wait_ms`, or when it is `gone`
        before: a run that is given to who hears no answer waits until that is noticed."""
        ends_ms = self._clock.monotonic_ms() + request.wait_ms
        programs = self._programs(principal.tenant, request)
        await self._note_life(request, principal, programs)
        waiter = _Waiter(
            principal.tenant,
            frozenset(programs),
            request.slots,
            request.worker,
            WorkerName(principal_id=principal.principal_id, name=request.name),
            gone or Gone(),
            is_impatient=not request.wait_ms,
            note_life=partial(self._note_life, request, principal, programs),
        )
        self._waiting.append(waiter)
        loop = asyncio.get_running_loop()
        if self._serving is None or self._serving.done():
            self._serving = loop.create_task(self._serve(), name="leases")
            self._stopping = self._stopping or loop.create_task(self._wake_when_stopping(), name="leases end")
        self._look_for(waiter, ends_ms)
        waiter.gone.on_set = waiter.woken.set
        try:
            while True:
                if not (self._ports.stopping.is_set() or waiter.gone.is_set()):
                    left_ms = STORE_ANSWER_MS if waiter.is_impatient else ends_ms - self._clock.monotonic_ms()
                    timer = loop.call_later(max(0.0, left_ms) / 1000, waiter.woken.set)
                    try:
                        await waiter.woken.wait()
                    finally:
                        timer.cancel()
                waiter.woken.clear()
                waiter.is_here = False  # while its runs are leased no others are held: it may be gone afterwards
                given, waiter.given = waiter.given, []
                if waiter.gone.is_set():
                    await self._free(given)
                    return []
                leased: list[LeasedRun] = []
                if given:
                    # A start that comes meanwhile is still its: that and its lease are one commit.
                    waiter.at_work = len(given)
                    await waiter.note_life()
                    leased = await self._leased(given, request, principal)
                    waiter.at_work = 0
                waiter.takes_starts = False  # else it would wait for ever for starts that are on their way to it
                while waiter.reserved:
                    await waiter.woken.wait()
                    waiter.woken.clear()
                leased += [await self._told_of(started) for started in waiter.started]
                waiter.started = []
                if leased or self._clock.monotonic_ms() >= ends_ms or self._ports.stopping.is_set():
                    return leased
                waiter.is_here = waiter.takes_starts = True
        finally:
            waiter.gone.on_set = None
            waiter.is_here = waiter.takes_starts = False
            self._waiting.remove(waiter)  # a run that is held for it by now is free again in a few seconds

    async def _wake_when_stopping(self) -> None:
        await self._ports.stopping.wait()
        for waiter in self._waiting:
            waiter.woken.set()

    def _look_for(self, waiter: _Waiter, ends_ms: float) -> None:
        """Look for runs for this worker: now, or a moment after the last look, which found none for it."""
        looked_ms, none_left = self._none_left.get(waiter.tenant, (-math.inf, frozenset()))
        again_ms, now_ms = looked_ms + RUN_READY_AGAIN_MS, self._clock.monotonic_ms()
        if again_ms <= now_ms or ends_ms <= again_ms or not waiter.programs <= none_left:
            self._kicked.set()
        elif self._looks_again is None:
            self._looks_again = asyncio.get_running_loop().call_later((again_ms - now_ms) / 1000, self._look_again)

    def _look_again(self) -> None:
        self._looks_again = None
        self._kicked.set()

    async def _note_life(
        self, request: LeaseRequest, principal: Principal, programs: Sequence[tuple[str, str]]
    ) -> None:
        """Who asks for runs lives; so does who has waited for one, and gets it: else the run of a worker that waited
        longer than `lease_ms` would be lost before it has begun. Written again only when that is news: a busy worker
        asks many times a second."""
        now_ms = self._clock.monotonic_ms()
        said = (principal.tenant, principal.principal_id, request.name, tuple(programs))
        known_ms, known = self._seen.get(request.worker, (-math.inf, None))
        if known == said and now_ms - known_ms < self._ports.lease_ms / 6:
            return
        await self._ports.runs.beat(request.worker, principal, request.name, programs)
        self._seen.pop(request.worker, None)
        self._seen[request.worker] = (now_ms, said)
        if len(self._seen) > RUN_WORKERS_KNOWN_MAX:
            del self._seen[next(iter(self._seen))]
        if (known is not None and known != said) or len(self._offered) > RUN_WORKERS_KNOWN_MAX:
            self._offered.clear()
        for procedure, program in programs:
            self._offered[principal.tenant, procedure, program] = now_ms

    def has_seen_worker(self, tenant: str, procedure: str, program: str) -> bool:
        """Whether a worker that offers this program is known here to live; the store knows it then, too. False: the
        store may know of one."""
        noted_ms = self._offered.get((tenant, procedure, program), -math.inf)
        return self._clock.monotonic_ms() - noted_ms < self._ports.lease_ms

    def keep_salt(self, run_id: str, salt: RunSalt) -> None:
        """Of a run that was started here and that no worker has got with its start: as a rule one asks for it at
        once. A salt is kept for as long as that takes, and no longer: an erasure counts on it to be gone."""
        now_ms = self._clock.monotonic_ms()
        self._born[run_id] = (now_ms + RUN_SALT_KEPT_MS, salt)
        if len(self._born) > RUN_SALTS_KEPT_MAX:
            self._born.popitem(last=False)
        if self._drops_salts is None:
            self._drop_salts()

    def _drop_salts(self) -> None:
        """Those whose time is over; again when the next one's is."""
        now_ms, self._drops_salts = self._clock.monotonic_ms(), None
        while self._born and (until_ms := next(iter(self._born.values()))[0]) <= now_ms:
            self._born.popitem(last=False)
        if self._born:
            self._drops_salts = asyncio.get_running_loop().call_later((until_ms - now_ms) / 1000, self._drop_salts)

    async def _salt_of(self, run_id: str) -> RunSalt:
        _, kept = self._born.pop(run_id, (0, None))
        return kept or await self._ports.salts.load(run_id)

    def reserve(self, tenant: str, procedure: str, program: str) -> Reservation | None:
        """A worker that waits here for just this program, if there is one: it gets the run with its start. `settle`
        must follow, whatever becomes of the start: the worker's answer waits for it."""
        wanted, found = (procedure, program), None
        for waiter in self._waiting:
            # What most of them fail by, with many at work, is looked at first.
            if (
                waiter.reserved < waiter.slots
                and waiter.tenant == tenant
                and waiter.free_for_starts
                and wanted in waiter.programs
            ):
                if waiter.is_here:
                    found = waiter
                    break
                found = found or waiter  # it waits for its leases: rather one that waits for nothing else
        if found is None:
            return None
        found.reserved += 1
        return Reservation(self._ports.new_lease(), found.worker, found.name, found)

    def settle(self, place: Reservation) -> None:
        """The start that this place was for is stored, then it says which run it is, or it is not."""
        waiter = place.waiter
        waiter.reserved -= 1
        if place.run_id is not None:
            waiter.started.append(place)
        waiter.woken.set()

    async def _told_of(self, started: Reservation) -> LeasedRun:
        return await self.told(await self._table.peek(started.run_id or ""), started.lease, started.salt)

    def _programs(self, tenant: str, request: LeaseRequest) -> list[tuple[str, str]]:
        """What the worker can run, as (procedure, program)."""
        programs = []
        for offered in request.procedures:
            programs.append((offered.name, f"{offered.version}@{offered.program_digest}"))
            for other in self._ports.procedures.programs(tenant, offered.name, offered.accepts):
                programs.append((offered.name, f"{other.version}@{other.program_digest}"))
        return list(dict.fromkeys(programs))

    async def _serve(self) -> None:
        """The one query in flight. Whatever goes wrong with one look, there is another."""
        next_ms: float | None = None  # until the next run is ready, as far as the last look could tell
        while True:
            pause_ms = RUN_READY_POLL_MS * (0.5 + self._clock.jitter() / 2)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(pause_ms, pause_ms if next_ms is None else next_ms + 1) / 1000):
                    await self._kicked.wait()
            self._kicked.clear()
            next_ms = None
            by_tenant: dict[str, list[_Waiter]] = defaultdict(list)
            for waiter in self._waiting:
                by_tenant[waiter.tenant].append(waiter)
            for tenant, waiters in by_tenant.items():
                try:
                    found_ms = await self._distribute(tenant, waiters)
                except TgaError:
                    continue  # the store is away: the next look finds it
                except Exception:
                    logger.exception("a defect in the distribution of runs; it goes on")
                    continue
                if found_ms is not None:
                    next_ms = found_ms if next_ms is None else min(next_ms, found_ms)

    async def _distribute(self, tenant: str, waiters: Sequence[_Waiter]) -> int | None:
        """Hold what is ready for these; in how many milliseconds something else is, if that is known."""
        programs = {program for waiter in waiters for program in waiter.programs}
        slots = sum(waiter.free for waiter in waiters)
        asked_ms, kicks = self._clock.monotonic_ms(), self._kicks
        held, next_ms = await self._ports.runs.hold_ready(tenant, sorted(programs), slots) if slots else ((), None)
        if len(held) < slots and kicks == self._kicks:  # none that came while it was asked
            self._none_left[tenant] = asked_ms, frozenset(programs)
        left_over = []
        for run_id, procedure, program in held:
            for waiter in waiters:
                if waiter.free > 0 and (procedure, program) in waiter.programs:
                    waiter.given.append(run_id)
                    break
            else:
                left_over.append(run_id)  # the worker that it was for has got another meanwhile, or is gone
        await self._free(left_over)
        for waiter in waiters:  # a worker that gets nothing waits on, or leaves when its time is over
            if waiter.given or waiter.is_impatient:
                waiter.woken.set()
        return next_ms

    async def _free(self, run_ids: Sequence[str]) -> None:
        """No worker is there for these after all: other gateways may lease them."""
        if run_ids:
            await self._ports.runs.unhold_ready(run_ids)
            self.kick()

    async def _leased(self, run_ids: Sequence[str], request: LeaseRequest, principal: Principal) -> list[LeasedRun]:
        """Record the leases, together where they can be. A run that could not be leased because the store was busy is
        ready again after a moment; one that cannot be read is looked at again when the hold is over."""
        answers = await asyncio.gather(
            *(self._lease_one(run_id, request, principal) for run_id in run_ids), return_exceptions=True
        )
        not_leased = []
        for run_id, answer in zip(run_ids, answers, strict=True):
            if isinstance(answer, TgaError):
                logger.info("run %s was not leased, and is offered again: %s", run_id, answer)
                if isinstance(answer, _PASSING):
                    not_leased.append(run_id)
            elif isinstance(answer, BaseException):
                raise answer
        if not_leased:
            await self._clock.sleep(_AGAIN_S * (0.5 + self._clock.jitter() / 2))
            with contextlib.suppress(TgaError):  # the store is away: they are ready when the hold is over
                await self._free(not_leased)
        return [answer for answer in answers if isinstance(answer, LeasedRun)]

    async def _lease_one(self, run_id: str, request: LeaseRequest, principal: Principal) -> LeasedRun | None:
        lease = self._ports.new_lease()
        owner = owner_of(lease, self._ports.incarnation())
        name = WorkerName(principal_id=principal.principal_id, name=request.name)

        async def decide(work: Work) -> LoadedRun | None:
            loaded = work.require()
            if loaded.run.head.state == "RUNNING" and loaded.owner == owner:
                return loaded  # recorded; the answer was lost
            if loaded.run.head.state != "SCHEDULED":
                return None
            work.lease(owner, request.worker, name, at=self._clock.now())
            return loaded

        loaded = await self._table.change(run_id, decide)
        return None if loaded is None else await self.told(loaded, lease)

    async def told(self, loaded: LoadedRun, lease: str, salt: RunSalt | None = None) -> LeasedRun:
        """What its worker is told of the run."""
        run, start = loaded.run, loaded.start
        salt = salt or await self._salt_of(run.run_id)
        return LeasedRun(
            run_id=run.run_id,
            attempt=run.attempt,
            lease=lease,
            procedure=start.procedure,
            version=run.version,
            program_digest=run.program_digest,
            input=start.input,
            salt=salt.digests.hex(),
            draw_salt=salt.draws.hex(),
            sequence_number=run.head.sequence_number,
            first_seq=await first_seq(self._ports, start),
            policy=start.policy,
            tenant=loaded.tenant,
            started_at=start.started_at,
            strict_determinism=start.is_strict,
            lease_ms=self._ports.lease_ms,
        )

    async def beat(self, request: BeatRequest, principal: Principal) -> list[BeatAnswer]:
        """The worker lives, and has these runs. What it should have and does not name was lost on the way to it."""
        known = await self._ports.runs.beat(request.worker, principal, request.name, ())
        listed = {beat.run_id for beat in request.runs}
        for run_id in known:
            if run_id not in listed:
                with contextlib.suppress(TgaError):
                    await self._give_up(run_id, request.worker)
        heads = await self._ports.runs.find_heads(sorted(listed), tenant=principal.tenant)
        return [await self._beat(beat, heads.get(beat.run_id)) for beat in request.runs]

    async def _beat(self, beat: Beat, head: HeadOfRun | None) -> BeatAnswer:
        if head is None:
            return BeatAnswer(beat.run_id, "STOP", "ENDED", 0)
        is_owner = head.owner == owner_of(beat.lease, self._ports.incarnation())
        if head.state != "RUNNING" or not is_owner or beat.after_seq > head.sequence_number:
            self._table.forget(beat.run_id)
            reason = "LEASE_LOST" if head.state in AT_WORK else "CANCELLED" if head.state == "CANCELLED" else "ENDED"
            return BeatAnswer(beat.run_id, "STOP", reason, head.sequence_number)
        news = []
        if head.sequence_number > beat.after_seq > 0:
            records = await self._ports.runs.load_records(beat.run_id, after=beat.after_seq, limit=RUN_PAGE_RECORDS_MAX)
            news = [record for record in records if not is_of_worker(record.artifact, head.attempt)]
        return BeatAnswer(beat.run_id, "CONTINUE", None, head.sequence_number, news)

    async def _give_up(self, run_id: str, worker: str) -> None:
        """A worker does not know of a run that was leased to it two beats ago: the answer of that lease was lost."""
        beats_ms = 2 * self._ports.lease_ms // 3

        async def decide(work: Work) -> None:
            loaded, now = work.require(), self._clock.now()
            is_its = loaded.run.head.state == "RUNNING" and loaded.worker == worker
            if is_its and elapsed_ms(loaded.run.updated_at, now) >= beats_ms:
                lose(work, "its worker does not know of the lease", now=now, clock=self._clock)

        await self._table.change(run_id, decide)
