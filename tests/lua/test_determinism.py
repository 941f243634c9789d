"""Two processes run a program alike: order, names, draws, times. What cannot be alike is told, or stops it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from app.lua.pool import Failed, LuaWarning, Pool, Returned
from tests.lua.states import LANGUAGE, failure_of, run, value_of

SEVEN = {
    "math.random": "math.random(1000)",
    "math.randomseed": "math.randomseed(7)",
    "os.time": "os.time()",
    "os.date": "os.date()",
    "os.clock": "os.clock()",
    "os.getenv": "os.getenv('HOME')",
    "os.tmpname": "os.tmpname()",
}

EVERYTHING = """
  local out = {}
  local function say(...)
    local words = table.pack(...)
    for index = 1, words.n do words[index] = tostring(words[index]) end
    out[#out + 1] = table.concat(words, " ")
  end
  local t = {}
  for index = 1, 200 do t["key " .. index * 7919 % 1009] = index end
  for index = -5, 5 do t[index * 1.5] = index end
  t[true], t[false], t[out] = 1, 2, 3
  for key, value in pairs(t) do say(key, value) end
  local key, value = next(t)
  while key ~= nil do say("next", key, value) key, value = next(t, key) end
  say({}, say, coroutine.create(say), out, {}, out)
  say(string.format("%s %s", {}, say))
  for index = 1, 20 do say(math.random(), math.random(6), math.random(-10, 10), math.random(0)) end
  math.randomseed(42)
  say(math.random(1 << 40), os.time(), os.date(), os.clock(), os.getenv("HOME"), os.tmpname())
  local mixed = {}
  for index = 1, 300 do mixed[index] = {index * 7919 % 11, index} end
  table.sort(mixed, function(a, b) return a[1] < b[1] end)
  for index = 1, 300 do say(mixed[index][1], mixed[index][2]) end
  say(pcall(table.sort, {3, "x", 1, {}}))
  say(pcall(function() return {} < {} end))
  say(pcall(function() return nil .. "x" end))
  say(pcall(error, {}))
  say(collectgarbage("count"), collectgarbage())
  local numbers = {}
  for index = 1, 500 do numbers[index] = index % 2 == 0 and index or index + 0.0 end
  table.sort(numbers, function(a, b) return a > b end)
  say(table.concat(numbers, " "))
  return table.concat(out, "\\n")
"""


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=1, language=LANGUAGE) as pool:
        yield pool


async def test_two_processes_do_the_same(pool: Pool) -> None:
    first = await value_of(pool, EVERYTHING)
    async with Pool(children=1, language=LANGUAGE) as another:
        await value_of(another, "local t = {} for i = 1, 999 do t[i] = tostring({}) end")
        assert await value_of(another, EVERYTHING) == first
        assert await value_of(another, EVERYTHING, seed=b"another") != first
        assert await value_of(another, EVERYTHING, epoch_ms=5_000) != first


async def test_keys_come_as_numbers_then_strings_then_booleans(pool: Pool) -> None:
    source = """
      local keys = {}
      for key in pairs({b = 1, [2] = 1, [1] = 1, [-1.5] = 1, a = 1, [false] = 1, [true] = 1, ["10"] = 1}) do
        keys[#keys + 1] = tostring(key)
      end
      return keys
    """
    assert await value_of(pool, source) == ["-1.5", "1", "2", "10", "a", "b", "false", "true"]


async def test_a_field_may_be_cleared_or_changed_during_a_traversal(pool: Pool) -> None:
    source = """
      local seen = {}
      local t = {a = 1, b = 2, c = 3, d = 4}
      for key, value in pairs(t) do
        seen[#seen + 1] = key .. value
        t[key] = nil
        if t.c then t.c = 9 end
        t.d = nil
      end
      local u = {a = 1, b = 2, c = 3}
      for key in next, u do u[key] = nil seen[#seen + 1] = key end
      return {seen, next(t) == nil, next(u) == nil}
    """
    assert await value_of(pool, source) == [["a1", "b2", "c9", "a", "b", "c"], True, True]


async def test_keys_without_an_order_are_refused_where_there_are_several(pool: Pool) -> None:
    assert await value_of(pool, "local n = 0 for k in pairs({[{}] = 1, x = 2}) do n = n + 1 end return n") == 2
    failure = await failure_of(pool, "\nfor k in pairs({[{}] = 1, [{}] = 2}) do end")
    assert "keys that have an order" in failure.message
    assert failure.line == 2


@pytest.mark.parametrize("name", SEVEN)
async def test_the_seven_functions_warn_with_line_and_fix_outside_a_checkpoint(pool: Pool, name: str) -> None:
    source = f"\nfor index = 1, 3 do\n  local x = {SEVEN[name]}\nend"
    outcome = await run(pool, source)
    assert isinstance(outcome, Returned)
    (warning,) = outcome.warnings
    assert (warning.chunk, warning.line) == ("main", 3)
    assert name in warning.what
    assert "checkpoint(function()" in warning.what
    inside = await run(pool, f"in_checkpoint(true)\n{source}")
    assert inside == Returned(None)


@pytest.mark.parametrize("name", SEVEN)
async def test_the_seven_functions_stop_a_strict_procedure(pool: Pool, name: str) -> None:
    failure = await failure_of(pool, f"\n\nlocal x = {SEVEN[name]}", is_strict=True)
    assert failure.message.startswith(f"main:3: {name} stands outside a checkpoint, and strict_determinism is on.")
    assert (failure.chunk, failure.line) == ("main", 3)
    assert await run(pool, f"in_checkpoint(true)\nlocal x = {SEVEN[name]}", is_strict=True) == Returned(None)


async def test_what_is_given_a_time_needs_no_checkpoint(pool: Pool) -> None:
    source = "return {os.date('%Y', 0), os.time({year = 1970, month = 1, day = 2, hour = 0}), os.date('*t', 0).hour}"
    assert await run(pool, source, is_strict=True) == Returned(["1970", 86_400, 0])


async def test_inside_a_checkpoint_they_are_what_they_say(pool: Pool) -> None:
    source = "in_checkpoint(true) return {os.time(), math.random(1 << 52), os.clock() > 0, os.date('%Y')}"
    before = int(time.time())
    first, second = await value_of(pool, source), await value_of(pool, source)
    assert before <= first[0] <= second[0] <= int(time.time()) + 1
    assert first[1] != second[1]
    assert first[2] is True
    assert first[3] == time.strftime("%Y", time.gmtime(first[0]))


async def test_outside_they_are_the_runs_own(pool: Pool) -> None:
    source = "return {os.time(), os.clock(), math.random(1000)}"
    assert (await value_of(pool, source))[:2] == [1_700_000_000, 0]
    draws = "local t = {} for i = 1, 50 do t[i] = math.random(1000000) end return t"
    assert await value_of(pool, draws) == await value_of(pool, draws)
    assert await value_of(pool, draws) != await value_of(pool, draws, seed=b"another")


async def test_draws_are_spread_over_their_range(pool: Pool) -> None:
    source = """
      local seen, least, most = {}, 2, -1
      for index = 1, 5000 do
        local x = math.random() least, most = math.min(least, x), math.max(most, x)
        local n = math.random(3, 7)
        seen[n - 2] = (seen[n - 2] or 0) + 1
      end
      return {seen, least >= 0 and least < 0.01, most < 1 and most > 0.99}
    """
    seen, is_low, is_high = await value_of(pool, source)
    assert is_low
    assert is_high
    assert len(seen) == 5
    assert all(800 < count < 1200 for count in seen)


async def test_warnings_are_bounded_and_told_once(pool: Pool) -> None:
    source = "for i = 1, 300 do load(('\\n'):rep(i) .. 'math.random()')() end"
    outcome = await run(pool, source)
    assert isinstance(outcome, Returned | Failed)
    assert len(outcome.warnings) == pool.limits.warnings
    assert isinstance(outcome.warnings[0], LuaWarning)
