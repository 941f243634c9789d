"""The runs that this gateway works with: one change of a run at a time, each decided on what the store has.

A change is a function that looks at a run and adds to it. The store refuses what was decided on an old head, so a copy
in memory costs no safety: a change that is refused, or that would refuse its caller, is decided again on what the store
has now. Two gateways, or ten, can change one run; one of them is first, the others decide anew.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from typing import Final, TypeVar

from app.core.canonical import measure_bytes
from app.core.chain import Head
from app.core.errors import (
    ChecksumMismatch,
    ConcurrentExecution,
    InvalidTransition,
    OutcomeUnknown,
    SequenceGap,
    StoreBusy,
    TgaError,
)
from app.core.limits import RUN_TRIES_MAX, RUNS_CACHED_BYTES_MAX, RUNS_CACHED_MAX
from app.domain.ledger.plans import Plan
from app.domain.runs.engine.ports import LoadedRun, RunPorts
from app.domain.runs.engine.work import Work

T = TypeVar("T")


async def first_of(*events: asyncio.Event) -> None:
    """Return when one of them is set."""
    if any(event.is_set() for event in events):
        return
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


Decide = Callable[[Work], Awaitable[T]]

# What the store says when the run is not where the change was decided on: by another owner, further, elsewhere.
_MOVED: Final = (SequenceGap, ConcurrentExecution, ChecksumMismatch, InvalidTransition)


class RunTable:
    """Copies of runs, the newest used kept; and one task at a time that changes a run."""

    def __init__(self, ports: RunPorts, changed: Callable[[Work], None]) -> None:
        # Set here for good.
        self._ports = ports
        self._changed = changed  # told of every change that was stored here
        # Runs as they stood after their last change here, the longest unused first: `_put_by` and `_take_out` write it
        # for the task that holds the run's lock.
        self._kept: OrderedDict[str, LoadedRun] = OrderedDict()
        self._kept_bytes = 0  # of their states
        self._locks: dict[str, tuple[asyncio.Lock, int]] = {}  # with how many wait for it or have it

    async def change(self, run_id: str, decide: Decide[T], *, is_birth: bool = False) -> T:
        """Decide on the run as it stands, and store what was added; what `decide` returned.

        `decide` may be called again, on a newer state; it changes nothing but its Work. Errors are raised only of a
        decision on what the store has. OutcomeUnknown: it may have been stored, and deciding again will tell.
        """
        return await self._change(run_id, decide, first=None, is_birth=is_birth)  # type: ignore[return-value]

    async def change_after(self, run_id: str, first: Plan, decide: Decide[T]) -> T | None:
        """As `change`, in one transaction with `first`, a plan of another stream which is stored in any case.

        Raises what the store says of `first`, and nothing else: then neither is stored. None: `first` is stored, and
        the run could not be changed; who waits for it looks again.
        """
        return await self._change(run_id, decide, first=first, is_birth=False)

    async def peek(self, run_id: str) -> LoadedRun:
        """The run as it was when this gateway last looked. For what is compared again when something is stored."""
        async with self._locked(run_id):
            kept = self._kept.get(run_id)
            if kept is None:
                kept = await self._ports.runs.load(run_id)
                self._put_by(run_id, kept)
            return kept

    def forget(self, run_id: str) -> None:
        """Read the run again before anything is decided on it."""
        self._take_out(run_id)

    async def _change(self, run_id: str, decide: Decide[T], *, first: Plan | None, is_birth: bool) -> T | None:
        unsure: list[tuple[Head, T]] = []  # what may have been stored, and what to answer if it was
        async with self._locked(run_id):
            for tried in range(RUN_TRIES_MAX):
                loaded = None if unsure else self._take_out(run_id)
                is_fresh = loaded is None
                try:
                    if loaded is None and not is_birth:
                        loaded = await self._ports.runs.load(run_id)
                        for head, stored in unsure:
                            if await self._has(loaded, head):
                                return stored
                    work = Work(loaded, run_id, executor_id=self._ports.executor_id(), clock=self._ports.clock)
                    result = await decide(work)
                    if not work.has_entries and not work.must_fence:
                        if not is_fresh:
                            continue  # decided on a copy: only the store can say that nothing is to be done
                        self._keep(work)
                        if first is not None:
                            await self._ports.ledger.commit(first)
                        return result
                except TgaError:
                    if not is_fresh:
                        continue
                    if first is None:
                        raise
                    await self._ports.ledger.commit(first)
                    return None
                error, is_first_stored = await self._commit(work, first)
                if is_first_stored:
                    first = None
                if error is None:
                    self._keep(work)
                    self._changed(work)
                    return result
                if is_birth or not isinstance(error, (*_MOVED, OutcomeUnknown)):
                    raise error
                if isinstance(error, OutcomeUnknown) and work.needed_by:
                    raise error  # whether the other stream has moved is for its owner to find out
                if isinstance(error, OutcomeUnknown) and work.has_entries:
                    unsure.append((work.run.head, result))
                await self._ports.clock.sleep(self._ports.clock.jitter() * min(tried, 20) / 1000)
            raise StoreBusy("the run is changed too often by others", found=f"{RUN_TRIES_MAX} tries")

    async def _has(self, loaded: LoadedRun, head: Head) -> bool:
        """Whether this entry is one of the run's."""
        standing = loaded.run.head
        if standing.sequence_number <= head.sequence_number:
            return standing == head
        records = await self._ports.runs.load_records(loaded.run_id, after=head.sequence_number - 1, limit=1)
        return bool(records) and records[0].entry.entry_digest == head.entry_digest

    async def _commit(self, work: Work, first: Plan | None) -> tuple[TgaError | None, bool]:
        """Why the run was not changed, and whether `first` is stored; raises what the store says of `first`."""
        ledger = self._ports.ledger
        plans = [work.plan()] if first is None else [first, work.plan()]
        own = len(plans) - 1
        plans += work.needed_by
        if len(plans) == 1:
            try:
                await ledger.commit(plans[0])
                return None, False
            except TgaError as refused:
                return refused, False
        needs: list[int | None] = [own] * len(plans)
        needs[own] = None if first is None else 0
        needs[0] = None
        if work.needs_first:
            needs[own] = own + 1
        errors = await ledger.commit_all(plans, needs)
        if first is not None and errors[0] is not None:
            raise errors[0]
        if errors[own] is None:
            for error in errors[own + 1 :]:
                if error is not None:
                    self._keep(work)
                    self._changed(work)
                    raise error
        return errors[own], first is not None

    def _keep(self, work: Work) -> None:
        if work.loaded is None:
            return
        self._put_by(work.run_id, work.loaded)

    def _put_by(self, run_id: str, loaded: LoadedRun) -> None:
        """Keep it, and of all no more than there is room for, in number and in bytes of state."""
        if loaded.state_bytes is None:
            loaded.state_bytes = measure_bytes(loaded.run.state) if loaded.run.state else 0
        self._take_out(run_id)
        self._kept[run_id] = loaded
        self._kept_bytes += loaded.state_bytes
        while len(self._kept) > RUNS_CACHED_MAX or self._kept_bytes > RUNS_CACHED_BYTES_MAX:
            self._take_out(next(iter(self._kept)))

    def _take_out(self, run_id: str) -> LoadedRun | None:
        loaded = self._kept.pop(run_id, None)
        if loaded is not None:
            self._kept_bytes -= loaded.state_bytes or 0
        return loaded

    def _locked(self, run_id: str) -> _Locked:
        return _Locked(self._locks, run_id)


class _Locked:
    """The one task at a time that has the run. A class: the loop keeps a book of generators."""

    __slots__ = ("_lock", "_locks", "_run_id")

    def __init__(self, locks: dict[str, tuple[asyncio.Lock, int]], run_id: str) -> None:
        self._locks = locks
        self._run_id = run_id

    async def __aenter__(self) -> None:
        lock, users = self._locks.get(self._run_id, (None, 0))
        self._lock = lock = lock or asyncio.Lock()
        self._locks[self._run_id] = (lock, users + 1)
        try:
            await lock.acquire()
        except BaseException:
            self._leave()
            raise

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()
        self._leave()

    def _leave(self) -> None:
        lock, users = self._locks[self._run_id]
        if users == 1:
            del self._locks[self._run_id]
        else:
            self._locks[self._run_id] = (lock, users - 1)


class Watchers:
    """Tasks of this gateway that wait for a change of a run, whoever makes it."""

    def __init__(self) -> None:
        self._waiting: dict[str, set[asyncio.Event]] = {}

    @asynccontextmanager
    async def watching(self, run_id: str) -> AsyncIterator[asyncio.Event]:
        """An event that is set when the run has changed; the one who waits clears it before it looks."""
        event = asyncio.Event()
        self._waiting.setdefault(run_id, set()).add(event)
        try:
            yield event
        finally:
            others = self._waiting[run_id]
            others.discard(event)
            if not others:
                del self._waiting[run_id]

    def tell(self, run_ids: Iterable[str] | None = None) -> None:
        """These have changed; None: perhaps all."""
        for run_id in list(self._waiting) if run_ids is None else run_ids:
            for event in self._waiting.get(run_id, ()):
                event.set()
