"""A limit that is met says which and what to do, ends every thread of its state, and cannot be caught or outwaited."""

from __future__ import annotations

import pytest

from app.lua.limits import Limits
from app.lua.pool import Chunk, Failed, Pool, Returned, Yielded
from tests.lua.states import LANGUAGE, failure_of, run, value_of


async def test_a_limit_ends_every_thread_of_its_state_and_no_other_state() -> None:
    async with Pool(Limits(slice_cpu_s=0.1), children=1, language=LANGUAGE) as pool:
        source = "spawn(function() return call('branch') end) local ok = pcall(call, 'main') while true do end"
        other = await pool.state([Chunk("main", "return call('other')")], seed=b"", is_strict=False)
        state = await pool.state([Chunk("main", source)], seed=b"", is_strict=False)
        assert await other.resume(0, None) == Yielded("other")
        assert await state.resume(0, None) == Yielded("main")
        assert await state.resume(1, None) == Yielded("branch")
        ended = await state.resume(0, "reply")
        assert isinstance(ended, Failed)
        assert ended.error.code == "LUA_LIMIT_CPU"
        assert "0.1 s of CPU between two operations" in ended.error.message
        assert ended.error.line == 1
        branch = await state.resume(1, "reply")
        assert isinstance(branch, Failed)
        assert branch.error.code == "LUA_LIMIT_CPU"
        assert await other.resume(0, "reply") == Returned("reply")


async def test_the_cpu_of_an_attempt_is_the_sum_of_its_slices() -> None:
    """Each slice stays below the limit of one: a count of loops that takes some of it, whatever the machine."""
    source = """
      in_checkpoint(true)
      while true do
        local from = os.clock()
        while os.clock() - from < 0.05 do end
        call(1)
      end
    """
    async with Pool(Limits(slice_cpu_s=30, attempt_cpu_s=0.3), children=1, language=LANGUAGE) as pool:
        slices = 0

        def answer(request: object) -> object:
            nonlocal slices
            slices += 1
            return request

        failure = await failure_of(pool, source, answer=answer)
        assert failure.code == "LUA_LIMIT_CPU"
        assert 1 <= slices <= 6


async def test_a_reply_larger_than_the_memory_left_is_a_limit_and_no_crash() -> None:
    async with Pool(Limits(state_bytes=4_194_304), children=1, language=LANGUAGE) as pool:
        state = await pool.state([Chunk("main", "return #call('large')")], seed=b"", is_strict=False)
        innocent = await pool.state([Chunk("main", "return call('wait')")], seed=b"", is_strict=False)
        await innocent.resume(0, None)
        for size in (3_500_000, 5_000_000):
            await state.resume(0, None)
            ended = await state.resume(0, "x" * size)
            assert isinstance(ended, Failed)
        assert await innocent.resume(0, "reply") == Returned("reply")
        large = await run(pool, "return #input", "x" * 10_000_000)
        assert isinstance(large, Failed)
        assert large.error.code == "LUA_LIMIT_MEMORY"


async def test_sources_beyond_the_memory_are_refused_and_no_crash() -> None:
    async with Pool(Limits(state_bytes=2_097_152), children=1, language=LANGUAGE) as pool:
        for size in (300_000, 700_000, 1_000_000):
            ended = await run(pool, "return #[[" + "x" * size + "]]")
            assert ended == Returned(size) or (isinstance(ended, Failed) and ended.error.code == "LUA_LIMIT_MEMORY")
        assert isinstance(ended, Failed)
        assert await value_of(pool, "return 1") == 1


async def test_many_states_share_a_child_and_nothing_else() -> None:
    async with Pool(children=1, language=LANGUAGE) as pool:
        source = "shared = (shared or 0) + 1 string.mark = (string.mark or 0) + 1 local x = call(input) "
        source += "return {shared, string.mark, x, getmetatable('').__index == string}"
        states = [await pool.state([Chunk("main", source)], seed=b"", is_strict=False) for _ in range(40)]
        for at, state in enumerate(states):
            assert await state.resume(0, at) == Yielded(at)
        for at, state in reversed(list(enumerate(states))):
            assert await state.resume(0, f"reply {at}") == Returned([1, 1, f"reply {at}", False])
            state.close()
            state.close()


async def test_a_pool_spreads_its_states_and_says_what_confines_them() -> None:
    async with Pool(children=2, language=LANGUAGE) as pool:
        states = [await pool.state([Chunk("main", "return 1")], seed=b"", is_strict=False) for _ in range(6)]
        assert [child.load()[1] for child in pool._children if child is not None] == [3, 3]
        report = await pool.report()
        assert report["children"] == 2
        assert "memory" in report["confinement"]
        for state in states:
            state.close()
        assert [child.load() for child in pool._children if child is not None] == [(0, 0), (0, 0)]


AFTER_THE_LIMIT = {
    "an operation": "call('after')",
    "an operation in a coroutine": "coroutine.wrap(function() call('after') end)()",
    "a branch": "spawn(function() return call('after') end)",
    "one that was caught": "pcall(call, 'after')",
}


@pytest.mark.parametrize("what", AFTER_THE_LIMIT)
async def test_what_is_left_of_a_program_performs_nothing_after_its_limit(what: str) -> None:
    """The coroutine that meets the limit gets no further instruction; the one around it closes its values first."""
    source = f"""
      pcall(function()
        local x <close> = setmetatable({{}}, {{__close = function() {AFTER_THE_LIMIT[what]} end}})
        coroutine.wrap(function() while true do end end)()
      end)
    """
    asked: list[object] = []

    def answer(request: object) -> object:
        asked.append(request)
        return request

    async with Pool(Limits(slice_cpu_s=0.1), children=1, language=LANGUAGE) as pool:
        failure = await failure_of(pool, source, answer=answer)
        assert (failure.code, asked) == ("LUA_LIMIT_CPU", [])
