"""A fork and the erasure of what it goes on from, at the same moment on many sessions: one of the two is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import pytest

from app.core.errors import LockAcquireFailed, RunErased, StreamInUse, TgaError
from app.domain.ledger.plans import Ledger, Plan
from app.postgres.database import Database
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.runs.engines import AGENT, Engine, open_engine, step
from tests.runs.test_verification import findings

DONE = {"type": "complete", "output": {"tier": "inline", "value": "done"}}
RACES = 24


@pytest.fixture
async def engines(database: Database) -> AsyncIterator[list[Engine]]:
    """Gateways of one database, each with sessions of its own."""
    async with AsyncExitStack() as stack:
        url = database.gateway_url
        yield [await stack.enter_async_context(open_engine(url, lease_ms=600_000)) for _ in range(4)]


async def completed(engine: Engine, run_id: str) -> None:
    await engine.start(run_id)
    (run,) = await engine.lease()
    assert run.run_id == run_id
    await engine.put(run, run.sequence_number, step("1"), then={**DONE, "positions": 1})


async def fork(engine: Engine, source: str, run_id: str, at: int = 3) -> str:
    while True:
        try:
            await engine.engine.starting.fork(source, at=at, principal=AGENT, run_id=run_id)
        except RunErased:
            return "refused"
        except LockAcquireFailed:  # the erasure takes its time: its caller asks again
            continue
        return "forked"


async def erase(engine: Engine, run_id: str) -> str:
    while True:
        try:
            await engine.erase(run_id)
        except StreamInUse:
            return "kept"
        except LockAcquireFailed:
            continue
        return "erased"


async def test_of_a_fork_and_an_erasure_at_once_one_is_refused(
    engines: list[Engine], admin: Admin, sessions: Sessions
) -> None:
    """Sources, and sources of sources: what an open run rests on is there, or the run is not."""
    first, *others = engines
    for number in range(RACES):
        await completed(first, f"source-{number}")
        assert await fork(first, f"source-{number}", f"middle-{number}") == "forked"
        await first.engine.answering.cancel(f"middle-{number}", "ada", by_type="person", rationale="enough")

    async def race(number: int) -> tuple[str, ...]:
        source, middle = f"source-{number}", f"middle-{number}"
        forked_from = source if number % 2 else middle  # of the middle one the erased run is the source's source
        at = 3 if number % 2 else 1
        told = await asyncio.gather(
            erase(first, source),
            *(fork(other, forked_from, f"fork-{number}-{place}", at) for place, other in enumerate(others)),
        )
        return tuple(told)

    outcomes: dict[str, int] = {"erased": 0, "kept": 0}
    for number, (erased, *forks) in enumerate(await asyncio.gather(*(race(number) for number in range(RACES)))):
        assert (erased == "erased") == (set(forks) == {"refused"}), (number, erased, forks)
        outcomes[erased] += 1
    print(outcomes)
    for row in await admin.fetch("SELECT stream FROM tga.heads WHERE stream LIKE 'run:fork-%'"):
        loaded = await first.engine.ports.runs.load(row["stream"].removeprefix("run:"))
        assert loaded.run.head.state == "SCHEDULED"
    assert await findings(sessions) == []


async def test_a_fork_that_comes_while_its_source_is_being_erased_waits_and_is_refused(
    engines: list[Engine], admin: Admin
) -> None:
    """The same without chance: the erasure is held inside its transaction while the fork comes."""
    first, second, *_ = engines
    await completed(first, "source")
    async with admin.transaction():
        await admin.execute("LOCK TABLE tga.erasures IN SHARE ROW EXCLUSIVE MODE")  # it may read, and not insert
        erasing = asyncio.create_task(erase(first, "source"))
        await until_waiting(admin, 1)
        forking = asyncio.create_task(fork(second, "source", "late"))
        await until_waiting(admin, 2)
    assert (await erasing, await forking) == ("erased", "refused")
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE stream = 'run:late'") == 0


class ErasingBefore:
    """A ledger of a gateway that is slow: `erasing` comes between what it has read for a fork and what it stores."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.erasing: Callable[[], Awaitable[None]] | None = None

    async def commit(self, plan: Plan) -> None:
        await self._erase()
        await self._ledger.commit(plan)

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        await self._erase()
        return await self._ledger.commit_all(plans, needs)

    async def _erase(self) -> None:
        erasing, self.erasing = self.erasing, None
        if erasing is not None:
            await erasing()


FENCE_AWAY = """
CREATE OR REPLACE FUNCTION tga.erased_source(source text) RETURNS text LANGUAGE plpgsql VOLATILE
SET search_path = pg_catalog, tga, pg_temp SET enable_seqscan = off AS 'BEGIN RETURN NULL; END'
"""


@pytest.mark.parametrize("generations", [1, 2, 3], ids=["source", "source_of_the_source", "its_source"])
@pytest.mark.parametrize("is_fenced", [True, False], ids=["erased_source", "without_erased_source"])
async def test_erased_source_refuses_a_fork_whose_source_was_erased_after_it_was_read(
    database: Database, admin: Admin, generations: int, is_fenced: bool
) -> None:
    """No chance is left, and nothing else stands in the way: with the fence away the fork is stored, and rests on
    nothing. What is compared is the fence alone."""
    slow: list[ErasingBefore] = []

    def wrap(ledger: Ledger) -> Ledger:
        slow.append(ErasingBefore(ledger))
        return slow[0]

    url = database.gateway_url
    async with open_engine(url, lease_ms=600_000) as first, open_engine(url, wrap=wrap, lease_ms=600_000) as second:
        await completed(first, "run-1")
        for n in range(2, generations + 1):  # each goes on from the one before, and has ended
            assert await fork(first, f"run-{n - 1}", f"run-{n}", at=3 if n == 2 else 1) == "forked"
            await first.engine.answering.cancel(f"run-{n}", "ada", by_type="person", rationale="enough")
        if not is_fenced:
            await admin.execute(FENCE_AWAY)
        slow[0].erasing = partial(first.erase, "run-1")
        told = await fork(second, f"run-{generations}", "late", at=3 if generations == 1 else 1)
    assert slow[0].erasing is None
    assert await admin.fetchval("SELECT count(*) FROM tga.erasures WHERE stream = 'run:run-1'") == 1
    stored = await admin.fetchval("SELECT count(*) FROM tga.heads WHERE stream = 'run:late'")
    assert (told, stored) == (("refused", 0) if is_fenced else ("forked", 1))


async def until_waiting(admin: Admin, count: int) -> None:
    """As many sessions wait for a lock of whatever kind."""
    async with asyncio.timeout(60):
        while await admin.fetchval("SELECT count(DISTINCT pid) FROM pg_locks WHERE NOT granted") < count:
            await asyncio.sleep(0.01)
