"""Operations of a Lua program record their lines, a divergence names both; the entry is main, however it is called."""

from __future__ import annotations

import pytest

from app.lua.limits import Limits
from app.lua.lint import lint_source
from app.lua.pool import Pool
from app.lua.programs import LuaSourceInvalid
from tests.lua.running import main_of, performed, procedure_of, run_lua
from tga_sdk.journal import Diverged, Journal, Operation
from tga_sdk.testing import ScriptedPeople

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = """
    checkpoint()
    step("one", function()
        return 1
    end)
    tactus.now()
    parallel{
        function() step("left", function() return 1 end) end,
        function() return step("tail", function() return 1 end) end,
        function() return 2 end,
    }
    tactus.emit({at = 1})
    return {}
"""


async def test_every_checkpoint_has_the_line_that_performed_it(pool: Pool) -> None:
    outcome = await run_lua(pool, main_of(BODY))
    found = [
        (one["kind"], one["name"], one["source"])
        for one in outcome.journal
        if one["artifact_type"] == "run_checkpoint" and one["name"] != "end"
    ]
    assert found == [
        ("checkpoint", "checkpoint", "program.lua:3"),
        ("step", "one", "program.lua:4"),
        ("now", "now", "program.lua:7"),
        ("step", "left", "program.lua:9"),
        ("step", "tail", "program.lua:10"),
        ("gather", "gather", "program.lua:8"),
        ("emit", "emit", "program.lua:13"),
    ]


WAITS = """
    tool.bank.charge{amount = 1}
    local ok = Human.approve({message = "Go on?"})
    sleep("1s")
    signal("paid")
    parallel{
        function()
            local left = Human.input({message = "left?"})
            return left
        end,
        function() sleep("2s") end,
    }
    step("once", function() return 1 end, {at_most_once = true})
    return {ok = ok}
"""


async def test_every_intent_has_the_line_that_performs_it(pool: Pool) -> None:
    people = ScriptedPeople({"approve": True, "input": "yes"}).signal("paid", 5)
    outcome = await run_lua(pool, main_of(WAITS), tools={"bank.charge": lambda amount: {}}, people=people)
    assert outcome.output is not None, outcome.error
    found = [
        (one["path"], one["kind"], one["source"]) for one in outcome.journal if one["artifact_type"] == "run_intent"
    ]
    assert sorted(found) == [
        ("1", "tool", "program.lua:3"),
        ("2", "ask", "program.lua:4"),
        ("3", "sleep", "program.lua:5"),
        ("4", "signal", "program.lua:6"),
        ("5:1.1", "ask", "program.lua:9"),
        ("5:2.1", "sleep", "program.lua:12"),
        ("6", "step", "program.lua:14"),
    ]


TAILS = {
    "main": ("local ok = 1\nreturn Human.approve({message = 'Go on?'})", 1),
    "a tool": ("local ok = 1\nreturn tool.bank.charge{amount = 1}", 1),
    "a sleep": ("local ok = 1\nreturn sleep('1s')", 1),
    "a step": ("local got = step('one', function()\n    local x = 1\n    return sleep('1s')\nend)", 2),
    "a branch": ("parallel{\n    function()\n        return sleep('1s')\n    end,\n}", 3),
    "a function": ("local function wait()\n    return sleep('1s')\nend\nlocal got = wait()\nreturn got", 5),
    "twice": ("local function wait()\n    return sleep('1s')\nend\nreturn wait()", 1),
}


@pytest.mark.parametrize("name", TAILS)
async def test_an_operation_in_tail_position_has_the_line_that_lua_still_knows(pool: Pool, name: str) -> None:
    """That of the call which is still under way; without one, where the function of the body begins."""
    body, line = TAILS[name]
    people = ScriptedPeople({"approve": True})
    outcome = await run_lua(pool, main_of(body), tools={"bank.charge": lambda amount: {}}, people=people)
    (found,) = (
        one["source"]
        for one in outcome.journal
        if one["artifact_type"] == "run_intent" and one["kind"] in ("ask", "tool", "sleep")
    )
    assert found == f"program.lua:{line}"


async def test_a_sub_procedure_and_the_top_of_a_script_in_tail_position_name_where_they_begin(pool: Pool) -> None:
    helper = 'helper = procedure "helper" {\n    run = function()\n        return sleep("1s")\n    end}\n'
    for source, line in (
        (helper + main_of("local x = helper({})\nreturn {}"), 2),
        ("local x = 1\nreturn sleep('1s')", 1),
    ):
        outcome = await run_lua(pool, source)
        found = [one["source"] for one in outcome.journal if one.get("kind") == "sleep"]
        assert found[0] == f"program.lua:{line}"


@pytest.mark.parametrize("has_ended", [False, True])
async def test_a_divergence_from_what_has_begun_or_was_answered_names_its_line(has_ended: bool) -> None:
    journal = Journal()
    intent = {"artifact_type": "run_intent", "sequence_number": 3, "path": "1", "kind": "ask", "name": "approve"}
    journal.add({**intent, "input_digest": "0" * 64, "try_number": 1, "request": {}, "source": "order.lua:7"})
    if has_ended:
        answer = {"artifact_type": "run_answer", "sequence_number": 4, "path": "1", "outcome": "OK"}
        journal.add({**answer, "value": None, "error": None})
    with pytest.raises(Diverged) as found:
        journal.match("1", Operation("step", "pay", "0" * 64), source="order.lua:9")
    assert (found.value.recorded, found.value.source) == ("ask approve (order.lua:7)", "order.lua:9")


async def test_a_divergence_names_the_line_of_both_sides() -> None:
    journal = Journal()
    record = {
        "artifact_type": "run_checkpoint",
        "sequence_number": 3,
        "path": "1",
        "kind": "step",
        "name": "plan",
        "input_digest": "0" * 64,
        "outcome": "OK",
        "value": None,
        "error": None,
        "resume": "snapshot",
        "inner": 0,
        "source": "order.lua:7",
    }
    journal.add(record)
    with pytest.raises(Diverged) as found:
        journal.match("1", Operation("step", "pay", "0" * 64), source="order.lua:9")
    assert (found.value.recorded, found.value.source) == ("step plan (order.lua:7)", "order.lua:9")
    assert "at 1 (order.lua:9) the journal has step plan (order.lua:7), the program performs step pay" in str(
        found.value
    )


async def test_the_entry_is_what_the_variable_main_holds(pool: Pool) -> None:
    helper = 'helper = procedure "helper" {run = function() return {x = 2} end}\n'
    source = helper + 'main = procedure "order" {run = function() return helper({}) end}'
    program = await procedure_of(pool, source)
    assert program.name == "order"
    assert (await performed(program)).output == {"tier": "inline", "value": {"x": 2}}
    assert [one.code for one in lint_source(source.encode()).findings] == []


@pytest.mark.parametrize(
    "source",
    [
        'order = procedure "order" {run = function() return {} end}',
        'local main = procedure "order" {run = function() return {} end}',
        'procedure("a", {}, function() end)\nprocedure("b", {}, function() end)',
    ],
)
async def test_lint_says_that_main_is_missing_where_a_submission_is_refused(pool: Pool, source: str) -> None:
    with pytest.raises(LuaSourceInvalid, match="Name the entry point main"):
        await procedure_of(pool, source)
    (found,) = lint_source(source.encode()).findings
    assert (found.code, found.line) == ("TGL403", len(source.splitlines()))


@pytest.mark.parametrize(
    "source",
    [
        'main = procedure "main" {run = function() return {} end}',
        "procedure {run = function() return {} end}",
        'one = procedure "one" {run = function() return {} end}\nreturn one({})',
        'one = procedure "one" {run = function() return {} end}\none({})',
        'one = procedure "one" {run = function() return {} end}\nlocal function work() return one({}) end\nwork()',
        "return {}",
    ],
)
async def test_lint_says_nothing_of_it_where_a_submission_is_taken(pool: Pool, source: str) -> None:
    await procedure_of(pool, source)
    assert "TGL403" not in [one.code for one in lint_source(source.encode()).findings]


async def test_a_limit_that_is_met_names_its_line() -> None:
    """Who reads the run's error finds the loop without a look at the program's every line."""
    async with Pool(Limits(slice_cpu_s=0.2, operations=3), children=1) as small:
        endless = await run_lua(small, main_of("checkpoint()\nwhile true do end"))
        busy = await run_lua(small, main_of("for i = 1, 9 do\n    checkpoint()\nend"))
    for outcome, code, line in ((endless, "LUA_LIMIT_CPU", 3), (busy, "LUA_LIMIT_OPERATIONS", 3)):
        assert outcome.error is not None
        assert outcome.error["type"] == code
        assert outcome.error["message"].startswith(f"program.lua:{line}: expected ")


@pytest.mark.parametrize(
    ("body", "line"),
    [
        ("local all = {}\nwhile true do\n    all[#all + 1] = {1}\nend", 4),  # full to the last byte
        ("local text = 'x'\nwhile true do\n    text = text .. text\nend", 4),
        ("state.all = {}\nwhile true do\n    state.all[#state.all + 1] = 'x'\nend", 4),
        ("step('fill', function()\n    local all = {}\n    while true do all[#all + 1] = {} end\nend)", 4),
        ("local all = {}\npcall(function() while true do all[#all + 1] = {} end end)", 3),
        (
            "local all = {}\nlocal fill = coroutine.wrap(function()\nwhile true do all[#all + 1] = {} end end)\nfill()",
            5,
        ),
    ],
)
async def test_memory_that_is_used_up_names_its_line(body: str, line: int) -> None:
    async with Pool(Limits(state_bytes=4_194_304), children=1) as small:
        outcome = await run_lua(small, main_of(body))
    assert outcome.error is not None
    assert outcome.error["type"] == "LUA_LIMIT_MEMORY"
    assert outcome.error["message"].startswith(f"program.lua:{line}: expected ")


async def test_a_step_that_waits_longer_than_its_timeout_is_ended(pool: Pool) -> None:
    body = """
        local ok, problem = pcall(step, "waits", function() sleep("1h") end, {timeout = 0.2})
        return {ok, tostring(problem)}
    """
    outcome = await run_lua(pool, main_of(body))
    assert outcome.output["value"] == [False, "it took longer than 0.2 s"]
