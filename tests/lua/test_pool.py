"""A state is fresh, its values cross as JSON, its threads run one after the other, and its failures name their line."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from app.lua.pool import Chunk, Failed, Pool, Returned, Yielded
from tests.lua.states import LANGUAGE, failure_of, value_of


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=1, language=LANGUAGE) as pool:
        yield pool


async def test_values_cross_and_come_back_the_same(pool: Pool) -> None:
    value = {"a": [1, 2.5, 'h\u00e9\n"\\\u0001', None, [], {}, True, -(2**53) + 1], "z": {"": "\U0001f600"}, "e": 1e-7}
    assert await value_of(pool, "return input", value) == value
    assert await value_of(pool, "return call(input)", value) == value


async def test_a_number_without_a_fraction_is_an_integer_on_both_sides(pool: Pool) -> None:
    result = await value_of(pool, "return {math.type(input), tostring(input), 4.0, 2^53 - 1}", 3.0)
    assert result == ["integer", "3", 4, 2**53 - 1]
    assert [type(each) for each in result[2:]] == [int, int]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("return 2^53", "-2^53+1 to 2^53-1"),
        ("return 0/0", "found nan"),
        ("return 1/0", "found inf"),
        ("return {1, nil, 3}", "without gaps"),
        ("return {1, a = 2}", "without other keys"),
        ("return {[true] = 1}", "strings, found a boolean"),
        (
            "return {f = print or type}",
            "the result.f cannot leave the program: expected a JSON value, found a function",
        ),
        ("return '\\255'", "UTF-8"),
        ("local t = {} t.t = t return t", "a table inside itself"),
    ],
)
async def test_what_is_no_json_is_refused_with_its_place(pool: Pool, source: str, message: str) -> None:
    assert message in (await failure_of(pool, source)).message


async def test_a_failure_names_chunk_line_and_what_was_thrown(pool: Pool) -> None:
    failure = await failure_of(pool, "local x = 1\nlocal function f()\n  error('no')\nend\nf()")
    assert (failure.message, failure.chunk, failure.line) == ("main:3: no", "main", 3)
    assert "main:5" in failure.traceback
    failure = await failure_of(pool, "\n\nerror({message = 'm', code = 7})")
    assert (failure.message, failure.line, failure.value) == ("m", 3, {"message": "m", "code": 7})


async def test_a_chunk_that_does_not_compile_is_told_by_name_and_line(pool: Pool) -> None:
    assert (await failure_of(pool, "x = = 1")).message.startswith("main:1: ")


async def test_threads_of_one_state_wait_each_for_its_own_operation(pool: Pool) -> None:
    source = """
        local ids = {}
        local function branch(name) return {name, call(name), call(name .. name)} end
        for index = 1, 3 do ids[index] = spawn(branch, "b" .. index) end
        local reply = call(ids)
        return {"main", reply}
    """
    state = await pool.state([Chunk("main", source)], seed=b"", is_strict=False)
    assert await state.resume(0, None) == Yielded([1, 2, 3])
    assert await state.resume(2, None) == Yielded("b2")
    assert await state.resume(1, None) == Yielded("b1")
    assert await state.resume(2, "two") == Yielded("b2b2")
    assert await state.resume(0, "done") == Returned(["main", "done"])
    assert await state.resume(2, "twice") == Returned(["b2", "two", "twice"])
    assert isinstance(await state.resume(2, "again"), Failed)
    assert await state.resume(1, "one") == Yielded("b1b1")


async def test_an_operation_inside_a_coroutine_of_the_program_passes_through(pool: Pool) -> None:
    source = """
        local co = coroutine.create(function(a)
          local inner = coroutine.wrap(function() coroutine.yield(call("inner")) return call("last") end)
          local b = coroutine.yield(call(a))
          return {b, inner(), inner()}
        end)
        local _, first = coroutine.resume(co, "a")
        local _, second = coroutine.resume(co, "b")
        return {first, second, coroutine.status(co)}
    """
    asked = []

    def answer(request: object) -> object:
        asked.append(request)
        return f"<{request}>"

    assert await value_of(pool, source, answer=answer) == ["<a>", ["b", "<inner>", "<last>"], "dead"]
    assert asked == ["a", "inner", "last"]


async def test_operations_work_inside_callbacks(pool: Pool) -> None:
    source = """
        local t = {3, 1, 2}
        table.sort(t, function(a, b) return call(a) < call(b) end)
        local s = ("a b"):gsub("%a", function(letter) return call(letter .. letter) end)
        local object = setmetatable({}, {
          __tostring = function() return call("named") end,
          __index = function(_, k) return k < 3 and call(k) or nil end,
        })
        local ok, caught = pcall(function() return call("in pcall") end)
        local _, handled = xpcall(function() error("x", 0) end, function(e) return call("handled " .. e) end)
        local items = {}
        for _, item in ipairs(object) do items[#items + 1] = item end
        return {t, s, tostring(object), string.format("%s", object), caught, handled, items}
    """
    expected = [[1, 2, 3], "aa bb", "named", "named", "in pcall", "handled x", [1, 2]]
    assert await value_of(pool, source) == expected
