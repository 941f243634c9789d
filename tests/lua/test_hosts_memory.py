"""What a submitted program can have the gateway's own process keep for it: nothing that grows without a bound. The
limits of its Lua state do not see that."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from app.lua.execution import Execution
from app.lua.limits import Limits
from app.lua.pool import Pool
from tests.lua.running import main_of, run_lua
from tga_sdk.state import State

pytestmark = pytest.mark.asyncio(loop_scope="module")
LIMITS = Limits(threads=50, open_branches=200, branch_values=10_000)


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def pool() -> AsyncIterator[Pool]:
    async with Pool(LIMITS, children=1) as opened:
        yield opened


@pytest.fixture
def branches(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many copies of the state were made for branches."""
    made, branch = [0], State.branch

    def counted(state: State) -> State:
        made[0] += 1
        return branch(state)

    monkeypatch.setattr(State, "branch", counted)
    return made


async def ended(pool: Pool, body: str) -> Any:
    outcome = await run_lua(pool, main_of(body))
    return outcome.error["type"] if outcome.error else outcome.output["value"]


NESTED = """
local function wide(levels)
    if levels == 0 then return 1 end
    local fns = {}
    for i = 1, 49 do fns[i] = function() return wide(levels - 1) end end
    return parallel(fns)
end
return wide(4)
"""


async def test_branches_of_branches_are_bounded_before_they_are_made(pool: Pool, branches: list[int]) -> None:
    assert await ended(pool, NESTED) == "LUA_LIMIT_THREADS"
    assert branches[0] <= LIMITS.open_branches


async def test_copies_of_a_large_state_are_bounded_before_they_are_made(pool: Pool, branches: list[int]) -> None:
    large = "state.x = {} for i = 1, 400 do state.x[i] = {i} end step('s', function() return 1 end)"
    wide = "local fns = {} for i = 1, %d do fns[i] = function() return i end end return #parallel(fns)"
    assert await ended(pool, f"{large} {wide % 40}") == "LUA_LIMIT_MEMORY"
    assert branches[0] == 0
    assert await ended(pool, f"{large} {wide % 2}") == 2
    assert await ended(pool, f"state.x = ('x'):rep(20000) {wide % 40}") == 40  # a text is not copied


async def test_copies_that_stand_are_counted_together_and_ended_ones_are_not(pool: Pool, branches: list[int]) -> None:
    large = "state.x = {} for i = 1, 100 do state.x[i] = {i} end step('s', function() return 1 end)"
    two = "parallel{function() return %s end, function() return 1 end}"
    in_turn = f"{large} for i = 1, 20 do {two % 1} end return 'done'"
    assert await ended(pool, in_turn) == "done"
    deep = two % (two % (two % (two % (two % (two % 1)))))
    assert await ended(pool, f"{large} {deep} return 'each in the other'") == "LUA_LIMIT_MEMORY"


async def test_errors_that_were_caught_are_kept_for_a_while_only(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that is raised again long after it was caught still has its type and message."""
    kept: list[int] = []
    told = Execution._told

    def counted(execution: Execution, error: Exception) -> dict[str, Any]:
        said = told(execution, error)
        kept.append(len(execution._raised))
        return said

    monkeypatch.setattr(Execution, "_told", counted)
    body = """
    local _, first = pcall(step, 'fails', function() error({type = 'First', message = 'the first'}) end)
    for i = 1, 300 do pcall(tactus.call, 'a b', {}) end
    error(first)
    """
    outcome = await run_lua(pool, main_of(body))
    error = outcome.error or {}
    assert (error["type"], "the first" in error["message"]) == ("First", True)
    assert (len(kept), max(kept)) == (301, 256)
