"""What hostile programs try: nothing outside is reached, the child ends within its limit, and no other run is harmed.

Every attempt is made in a child that holds an innocent state with an operation under way; after it the innocent one
goes on, or is told that it was innocent, and the pool serves as before. `make test` takes a sample, by a printed seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.lua.limits import Limits
from app.lua.pool import ChildLost, Chunk, LuaState, Pool, Returned, Yielded
from tests import sampling
from tests.lua.attempts import ATTEMPTS, CPU, MEMORY, NOTHING, REFUSED, Attempt
from tests.lua.states import LANGUAGE, run, value_of

# Small, so that every bomb goes off soon. The CPU's is of CPU time: a busy machine does not change who meets it.
LIMITS = Limits(
    state_bytes=16_777_216,
    slice_cpu_s=0.15,
    attempt_cpu_s=3.0,
    frame_bytes=262_144,
    output_bytes=1_048_576,
    operations=200,
    threads=50,
)
INNOCENT = "local before = input.name local reply = call('wait') return {before, reply, #('x'):rep(1000)}"


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with Pool(LIMITS, children=1, language=LANGUAGE) as pool:
        yield pool


def _is_taken(attempt: Attempt) -> bool:
    is_costly = CPU in attempt.ends or MEMORY in attempt.ends
    return sampling.is_taken(f"lua {attempt.name}", 6 if is_costly else 2)


async def _end_of(pool: Pool, attempt: Attempt) -> str:
    try:
        outcome = await run(pool, attempt.source)
    except ChildLost as lost:
        return lost.reason if lost.is_guilty else f"innocent of {lost.reason}"
    if isinstance(outcome, Returned):
        return NOTHING if outcome.value in (None, False) else f"it got {outcome.value!r}"
    return outcome.error.limit or REFUSED


async def _goes_on(innocent: LuaState, name: str) -> bool:
    try:
        return await innocent.resume(0, "reply") == Returned([name, "reply", 1000])
    except ChildLost as lost:
        return not lost.is_guilty
    finally:
        innocent.close()


def test_there_are_eighty_attempts_and_more() -> None:
    assert len({attempt.name for attempt in ATTEMPTS}) == len(ATTEMPTS) >= 80


@pytest.mark.parametrize("first", range(0, len(ATTEMPTS), 16))
async def test_nothing_is_reached_and_nobody_else_is_harmed(pool: Pool, first: int) -> None:
    for attempt in filter(_is_taken, ATTEMPTS[first : first + 16]):
        innocent = await pool.state([Chunk("main", INNOCENT)], seed=b"i", is_strict=False)
        assert await innocent.resume(0, {"name": attempt.name}) == Yielded("wait")
        end = await _end_of(pool, attempt)
        assert end in attempt.ends, f"{attempt.name}: expected {attempt.ends}, found {end}"
        assert await _goes_on(innocent, attempt.name), attempt.name
        assert await value_of(pool, "return 1 + call(1)") == 2, attempt.name


@pytest.mark.parametrize(
    "source", ["local t = {} while true do t[#t + 1] = {} end", "local s = 'x' while true do s = s .. s end"]
)
async def test_memory_ends_a_program_that_has_the_time(source: str) -> None:
    async with Pool(Limits(state_bytes=8_388_608, slice_cpu_s=60), children=1, language=LANGUAGE) as pool:
        for text in (source, f"while true do pcall(function() {source} end) end"):
            assert await _end_of(pool, Attempt("memory", (MEMORY,), text)) == MEMORY


async def test_the_kernel_ends_what_the_soft_limit_cannot_see() -> None:
    """No hook is ever reached here: the child's own timer ends it, and only the guilty state is guilty."""
    limits = Limits(slice_cpu_s=0.1, hook_instructions=2**31 - 1)
    async with Pool(limits, children=1, language=LANGUAGE) as pool:
        innocent = await pool.state([Chunk("main", INNOCENT)], seed=b"i", is_strict=False)
        await innocent.resume(0, {"name": "innocent"})
        with pytest.raises(ChildLost) as lost:
            await run(pool, "while true do end")
        assert (lost.value.reason, lost.value.is_guilty) == ("CPU", True)
        assert "more than 1.2 s of CPU" in str(lost.value)  # the kernel's word, which comes before the watchdog's
        with pytest.raises(ChildLost) as lost:
            await innocent.resume(0, "reply")
        assert not lost.value.is_guilty
        assert await value_of(pool, "return 1") == 1


async def test_a_slice_that_waits_behind_a_guilty_one_is_innocent() -> None:
    limits = Limits(slice_cpu_s=0.1, hook_instructions=2**31 - 1)
    async with Pool(limits, children=1, language=LANGUAGE) as pool:
        innocent = await pool.state([Chunk("main", INNOCENT)], seed=b"i", is_strict=False)
        guilty = await pool.state([Chunk("main", "while true do end")], seed=b"g", is_strict=False)
        slices = (state.resume(0, {"name": "x"}) for state in (guilty, innocent))
        ends = await asyncio.gather(*slices, return_exceptions=True)
        assert [end.is_guilty for end in ends if isinstance(end, ChildLost)] == [True, False]
