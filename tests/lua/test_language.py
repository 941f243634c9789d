"""The language of Lua procedures: what each of its words does, and how it refuses what is wrong."""

from __future__ import annotations

from typing import Any

import pytest

from app.lua.pool import Pool
from app.lua.programs import LuaSourceInvalid, Source, declared
from tests.lua.running import checkpoints, main_of, procedure_of, run_lua
from tga_sdk.testing import ScriptedPeople, ToolFailed
from tga_sdk.testing.crashes import Outcome

pytestmark = pytest.mark.asyncio(loop_scope="module")


def value(outcome: Outcome) -> Any:
    assert outcome.state == "COMPLETED", outcome
    return outcome.output["value"]


def error(outcome: Outcome) -> tuple[str, str]:
    assert outcome.state == "FAILED", outcome
    assert outcome.error is not None
    return outcome.error["type"], outcome.error["message"]


# ------------------------------------------------------------------------------------------------------- declarations


async def test_a_file_declares_its_main_procedure(pool: Pool) -> None:
    text = """
    helper = procedure "helper" { run = function() return {} end }
    main = procedure "main" {
        description = "Sums", version = "1.2.0", author = "a@example.com", tags = {"math", "demo"},
        timeout = "2h", retry = {retries = 3, first = "2s"},
        input = {
            items = {type = "array", required = true, items = {type = "number"}},
            unit = {type = "string", enum = {"kg", "g"}, default = "kg", description = "of each"},
        },
        output = {sum = field.number{required = true}},
        state = {seen = {type = "array", default = {}}, who = {type = "table"}},
        run = function() return {sum = 0} end
    }
    """
    found = await declared(pool, Source("sums/weights.tactus.lua", text, {}))
    assert (found.name, found.version, found.description) == ("weights", "1.2.0", "Sums")
    assert (found.tags, found.author, found.is_script) == (("math", "demo"), "a@example.com", False)
    assert found.input_schema == {
        "type": "object",
        "properties": {
            "items": {"type": "array", "items": {"type": "number"}},
            "unit": {"type": "string", "enum": ["kg", "g"], "default": "kg", "description": "of each"},
        },
        "required": ["items"],
        "additionalProperties": False,
    }
    assert found.output_schema == {"type": "object", "properties": {"sum": {"type": "number"}}, "required": ["sum"]}
    assert found.state_schema is not None
    assert found.state_schema["properties"] == {
        "seen": {"type": "array", "default": []},
        "who": {"type": ["object", "array"]},
    }
    assert [one["name"] for one in found.procedures] == ["helper"]
    made = await procedure_of(pool, text, name="weights.lua")
    assert made.policy.timeout_ms == 7_200_000
    assert (made.policy.retry.retries, made.policy.retry.first) == (3, 2.0)
    assert made.registration()["input_schema"] == found.input_schema


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("local x = \nreturn }", 2, "unexpected symbol"),
        ("x.y.z = 1", 1, "attempt to index a nil value"),
        (
            'procedure "a" {run = function() end}\nprocedure "b" {run = function() end}',
            None,
            "2 procedures and no main",
        ),
        ('main = procedure "main" {}', None, "no procedure, and no script"),
        ("", None, "no procedure, and no script"),
        ('main = procedure "main" { input = {\n a = {type = "strin"}}, run = function() end}', 1, "strin"),
        ('main = procedure "main" { run = function() end }\ntool.bank.charge{amount = 1}', 2, "tool.bank.charge"),
        ('main = procedure "main" { version = "1 2", run = function() end }', None, "'1 2'"),
    ],
)
async def test_a_source_that_is_refused_says_where_and_what(
    pool: Pool, text: str, line: int | None, found: str
) -> None:
    with pytest.raises(LuaSourceInvalid) as refused:
        await declared(pool, Source("wrong.lua", text, {}))
    assert refused.value.code == "PROCEDURE_SOURCE_INVALID"
    assert refused.value.line == line
    assert found in refused.value.message
    assert refused.value.remedy


async def test_the_digest_is_that_of_text_and_files(pool: Pool) -> None:
    digests = {
        Source("a.lua", text, files).digest
        for text, files in [("x", {}), ("y", {}), ("x", {"a": b""}), ("x", {"a": b"b"}), ("x", {"ab": b""})]
    }
    assert len(digests) == 5


async def test_all_forms_of_procedure(pool: Pool) -> None:
    body = "function() return {n = input.n + 1} end"
    fields = "input = {n = {type = 'number'}}"
    for text in (
        f'main = procedure "main" {{ {fields}, run = {body} }}',
        f'main = procedure("main", {{ {fields} }}, {body})',
        f"Procedure {{ {fields}, run = {body} }}",
        f'only = procedure "only" {{ {fields}, run = {body} }}\nreturn only({{n = input.n}})',
        "input { n = field.number{} }\nreturn {n = input.n + 1}",
    ):
        assert value(await run_lua(pool, text, {"n": 2})) == {"n": 3}, text


# -------------------------------------------------------------------------------------------------- input and output


async def test_inputs_have_defaults_and_are_read_only(pool: Pool) -> None:
    given = '{a = {type = "number", default = 5}, b = {type = "table"}}'
    text = main_of("return {a = input.a, b = input.b.c[2]}", given=given)
    assert value(await run_lua(pool, text, {"b": {"c": [1, 2]}})) == {"a": 5, "b": 2}
    for wrong in ("input.a = 1", "input.b.c = 1", "table.insert(input.b.c, 1)"):
        kind, message = error(await run_lua(pool, main_of(wrong, given=given), {"b": {"c": []}}))
        assert kind == "RUN_VALUE_INVALID"
        assert "read-only" in message


async def test_an_output_that_is_wrong_is_refused_with_its_field(pool: Pool) -> None:
    text = main_of('return {total = "many"}', output="{total = {type = 'number', required = true}}")
    assert error(await run_lua(pool, text)) == ("RUN_VALUE_INVALID", 'output.total: expected number, found "many"')
    text = main_of("return {}", output="{total = {type = 'number', required = true}}")
    assert error(await run_lua(pool, text)) == ("RUN_VALUE_INVALID", "output.total: is required, found nothing")


# -------------------------------------------------------------------------------------------------------------- state


@pytest.mark.parametrize(
    ("mutation", "message"),
    [
        ("state.count = 'x'", 'state.count: expected number, found "x"'),
        ("state.status = 'lost'", 'state.status: expected one of open, closed, found "lost"'),
        ("state.id = nil", "state.id: is required, found nothing"),
        ("state.nane = 1", "state.nane: no such field of the state; declared are"),
        ("state.items = {a = 1}", "state.items: expected array, found table"),
        ("state.items[3] = 'x'", "state.items[3]: a list has no holes"),
        ("state.rows[1].amount = 'x'", 'state.rows[1].amount: expected number, found "x"'),
        ("state.rows[2] = {amount = {}}", "state.rows[2].amount: expected number, found table"),
        ("state.any = function() end", "state.any: expected text, a number, true, false or a table of these"),
        ("local x = {} x.x = x state.any = x", "state.any"),
        ("state.any = 0/0", "state.any: expected a finite number"),
        ("state.any = {[1] = 1, a = 2}", "state.any: a table has either the keys 1 to n or text keys"),
    ],
)
async def test_a_mutation_that_does_not_fit_names_the_field(pool: Pool, mutation: str, message: str) -> None:
    fields = """{
        count = {type = "number", default = 0},
        status = {type = "string", default = "open", enum = {"open", "closed"}},
        id = {type = "string", required = true},
        items = {type = "array", default = {}},
        rows = {type = "array", items = {type = "table", properties = {amount = {type = "number"}}}},
        any = {},
    }"""
    body = f"state.id = 'a'\nstate.rows = {{{{amount = 1}}}}\n{mutation}"
    kind, said = error(await run_lua(pool, main_of(body, state=fields)))
    assert kind == "RUN_VALUE_INVALID"
    assert message in said
    assert said.startswith("program.lua:11: ")


async def test_state_begins_with_its_defaults_and_keeps_what_is_assigned(pool: Pool) -> None:
    fields = '{status = {type = "string", default = "open"}, items = {type = "array", default = {}}, x = {}}'
    body = """
        local row = {name = "a"}
        state.items[1] = row
        row.name = "changed later, elsewhere"
        state.items[1].tags = {}
        table.insert(state.items[1].tags, "t")
        table.insert(state.items, {name = "c"})
        table.insert(state.items, 2, {name = "b"})
        local last = table.remove(state.items)
        table.sort(state.items, function(a, b) return a.name > b.name end)
        state.x = {z = 1, a = {2, 3}}
        local names, keys = {}, {}
        for i, one in ipairs(state.items) do names[i] = one.name end
        for key in pairs(state.x) do keys[#keys + 1] = key end
        state.x.z = nil
        return {names = names, keys = keys, last = last.name, unpacked = {table.unpack(state.x.a)},
                whole = state, count = #state.items, same = state.items == state.items}
    """
    outcome = await run_lua(pool, main_of(body, state=fields))
    document = {
        "status": "open",
        "items": [{"name": "b"}, {"name": "a", "tags": ["t"]}],
        "x": {"a": [2, 3]},
    }
    assert value(outcome) == {
        "names": ["b", "a"],
        "keys": ["a", "z"],
        "last": "c",
        "unpacked": [2, 3],
        "whole": document,
        "count": 2,
        "same": True,
    }
    assert outcome.document == document


async def test_an_append_to_a_long_list_is_one_change(pool: Pool) -> None:
    body = """
        local many = {}
        for i = 1, 20000 do many[i] = i end
        state.items = many
        checkpoint()
        table.insert(state.items, "last")
        state.items[#state.items + 1] = "very last"
        checkpoint()
        return #state.items
    """
    outcome = await run_lua(pool, main_of(body))
    assert value(outcome) == 20_002
    last = [one for one in outcome.journal if one.get("path") == "2"][-1]
    assert last["state_change"] == [
        {"op": "set", "at": "/items/-", "to": "last"},
        {"op": "set", "at": "/items/-", "to": "very last"},
    ]


async def test_a_part_that_was_replaced_is_not_changed(pool: Pool) -> None:
    body = "state.a = {b = 1}\nlocal a = state.a\nstate.a = {b = 2}\na.b = 3"
    assert "was removed or replaced" in error(await run_lua(pool, main_of(body)))[1]


async def test_a_failed_body_leaves_no_trace_in_the_state(pool: Pool) -> None:
    body = """
        state.items = {1}
        local ok, problem = pcall(step, "fails", function()
            state.items[2] = 2
            tool.bank.charge{amount = 1}
            state.other = true
            error("no")
        end)
        local n = #state.items
        local tries = step("twice", {retry = {retries = 1, first = 0}}, function()
            state.items[#state.items + 1] = "try"
            state.tried = (state.tried or 0) + 1
            local made = tool.bank.charge{amount = 2}
            if #state.items > 2 or made.n < 3 then error("again") end
            return #state.items
        end)
        return {n = n, other = state.other, kind = problem.type, tries = tries, tried = state.tried}
    """
    calls: list[int] = []

    def charge(amount: int) -> dict[str, int]:
        calls.append(amount)
        return {"n": len(calls)}

    outcome = await run_lua(pool, main_of(body), tools={"bank.charge": charge})
    assert outcome.state == "FAILED", "the recorded call of the first try is returned to the second"
    calls.clear()
    outcome = await run_lua(pool, main_of(body.replace("made.n < 3", "false")), tools={"bank.charge": charge})
    assert value(outcome) == {"n": 1, "kind": "LUA_ERROR", "tries": 2, "tried": 1}
    assert outcome.document == {"items": [1, "try"], "tried": 1}


# --------------------------------------------------------------------------------------------------------- operations


async def test_names_of_operations_inside_steps(pool: Pool) -> None:
    body = """
        step("research", function()
            checkpoint()
            checkpoint(function() return 1 end)
            checkpoint(function() return 2 end)
            Human.approve({message = "ok?"})
            Human.approve({message = "named?", name = "mine"})
        end)
        Step.checkpoint(function() return 3 end)
        checkpoint()
        Human.input({prompt = "what?"})
        return {}
    """
    people = ScriptedPeople({"research.approve_1": True, "mine": True, "input": "x"})
    outcome = await run_lua(pool, main_of(body), people=people)
    value(outcome)
    assert [(kind, name) for _, kind, name, _ in checkpoints(outcome)] == [
        ("checkpoint", "research.checkpoint_1"),
        ("step", "research.checkpoint_2"),
        ("step", "research.checkpoint_3"),
        ("step", "research"),
        ("step", "auto_checkpoint_1"),
        ("checkpoint", "checkpoint"),
    ]


async def test_an_operation_that_failed_can_be_caught(pool: Pool) -> None:
    def charge() -> None:
        raise ToolFailed("too little")

    body = """
        local ok, problem = pcall(tool.bank.charge, {})
        local also, text = pcall(function() return "said: " .. problem end)
        return {ok = ok, type = problem.type, said = problem.message, path = problem.path, text = text}
    """
    found = value(await run_lua(pool, main_of(body), tools={"bank.charge": charge}))
    assert found["ok"] is False
    assert found["path"] == "1"
    assert "too little" in found["said"]
    assert found["text"] == f"said: {found['said']}"
    outcome = await run_lua(pool, main_of("tool.bank.charge{}"), tools={"bank.charge": charge})
    assert error(outcome) == (found["type"], found["said"])


async def test_people_are_asked_as_python_programs_ask_them(pool: Pool) -> None:
    body = """
        return {
            approve = Human.approve({message = "Deploy?", context = {risk = 1}, timeout = "24h",
                default_on_timeout = false}),
            input = Human.input({prompt = "Context:", input_type = "text", required = true}),
            number = Human.input({prompt = "How many?", input_type = "number", name = "number"}),
            select = Human.select({message = "Which?", options = {"a", "b"}}),
            review = Human.review({message = "Look", artifact = {text = "x"}}),
            escalate = Human.escalate({message = "Help", timeout = "1h", default = "nobody"}),
        }
    """
    people = ScriptedPeople(
        {
            "approve": True,
            "input": "more",
            "number": 5,
            "select": "b",
            "review": {"decision": "revise", "feedback": "shorter"},
            "escalate": "done",
        }
    )
    outcome = await run_lua(pool, main_of(body), people=people)
    assert value(outcome) == {
        "approve": True,
        "input": "more",
        "number": 5,
        "select": "b",
        "review": {"decision": "revise", "feedback": "shorter"},
        "escalate": "done",
    }
    asks = [one["request"] for one in outcome.journal if one["artifact_type"] == "run_intent"]
    assert [one["form"] for one in asks] == ["approve", "input", "input", "select", "review", "input"]
    assert asks[0]["default"] == {"tier": "inline", "value": False}
    assert asks[0]["expires_at"] is not None
    assert asks[0]["context"]["value"] == {"risk": 1}
    assert asks[5]["escalations"]


async def test_nobody_answers_in_time(pool: Pool) -> None:
    body = """
        local said = Human.approve({message = "?", timeout = "2d", default_on_timeout = false})
        local ok, problem = pcall(Human.input, {prompt = "?", timeout = 5})
        return {said = said, ok = ok, type = problem.type}
    """
    assert value(await run_lua(pool, main_of(body), people=ScriptedPeople({}))) == {
        "said": False,
        "ok": False,
        "type": "TIMEOUT",
    }


async def test_branches_have_a_state_each_and_are_merged_in_order(pool: Pool) -> None:
    body = """
        local found = parallel{
            a = function() table.insert(state.log, "a") step("x", function() state.a = #state.log end) return 1 end,
            b = function() table.insert(state.log, "b") return #state.log end,
        }
        local list = Step.parallel("more", {function() return "one" end, function() return "two" end})
        return {found = found, list = list, log = state.log, a = state.a}
    """
    outcome = await run_lua(pool, main_of(body, state="{log = {type = 'array', default = {}}, a = {}}"))
    assert value(outcome) == {"found": {"a": 1, "b": 1}, "list": ["one", "two"], "log": ["a", "b"], "a": 1}
    assert [(path, kind, name) for path, kind, name, _ in checkpoints(outcome)] == [
        ("1:1.1", "step", "x"),
        ("1", "gather", "gather"),
        ("2", "gather", "more"),
    ]
    text = "state.a = {1}\nlocal a = state.a\nparallel{function() a[1] = 2 end}"
    assert "the state of another branch" in error(await run_lua(pool, main_of(text)))[1]


async def test_a_step_that_takes_too_long(pool: Pool) -> None:
    body = """
        local ok, problem = pcall(step, "slow", {timeout = 0.001}, function()
            state.begun = true
            for i = 1, 10000000 do end
            state.ended = true
        end)
        return {ok = ok, type = problem.type, begun = state.begun, ended = state.ended}
    """
    assert value(await run_lua(pool, main_of(body))) == {"ok": False, "type": "TimeoutError"}


async def test_sub_procedures_are_one_checkpoint_with_a_state_of_their_own(pool: Pool) -> None:
    text = """
    counted = procedure "counted" {
        input = {by = {type = "number", required = true}},
        output = {total = {type = "number", required = true}},
        state = {total = {type = "number", default = 10}},
        run = function()
            state.total = state.total + input.by
            step("inside", function() state.total = state.total * 2 end)
            return {total = state.total}
        end
    }
    main = procedure "main" { state = {total = {type = "number", default = 1}}, run = function()
        local first = counted({by = 1})
        state.total = state.total + counted({by = 2}).total
        local ok, problem = pcall(counted, {by = "x"})
        return {first = first.total, ok = ok, said = problem.message}
    end }
    """
    outcome = await run_lua(pool, text)
    found = value(outcome)
    assert (found["first"], found["ok"]) == (22, False)
    assert 'input.by: expected number, found "x"' in found["said"]
    assert outcome.document == {"total": 25}
    assert [(path, kind, name) for path, kind, name, _ in checkpoints(outcome)] == [
        ("1.1", "step", "inside"),
        ("1", "call", "counted"),
        ("2.1", "step", "inside"),
        ("2", "call", "counted"),
        ("3", "call", "counted"),
        ("4", "checkpoint", "end"),
    ]


async def test_files_that_were_submitted_with_it(pool: Pool) -> None:
    body = """
        local ok, problem = pcall(File.read, "none.txt")
        local not_text, also = pcall(File.read, "binary")
        local written = pcall(File.write, "a", "b")
        return {config = File.read("config.json"), exists = File.exists("config.json"), none = File.exists("none.txt"),
                list = File.list(), type = problem.type, also = also.type, written = written}
    """
    outcome = await run_lua(pool, main_of(body), files={"config.json": b'{"a": 1}', "binary": b"\xff\xfe"})
    assert value(outcome) == {
        "config": '{"a": 1}',
        "exists": True,
        "none": False,
        "list": ["binary", "config.json"],
        "type": "FILE_NOT_FOUND",
        "also": "FILE_NOT_TEXT",
        "written": False,
    }
    assert checkpoints(outcome) == []


async def test_logs_stand_with_the_operation_that_follows(pool: Pool) -> None:
    body = "Log.info('one', {b = 2, a = {1}})\nLog.warn('two')\ncheckpoint()\nprint('three')\nreturn {}"
    outcome = await run_lua(pool, main_of(body))
    logs = {
        one["path"]: [(line["level"], line["text"]) for line in one["logs"]]
        for one in outcome.journal
        if one["artifact_type"] == "run_checkpoint"
    }
    assert logs == {"1": [("info", "one {a = {1}, b = 2}"), ("warning", "two")], "2": [("info", "three")]}


async def test_sleeping_signals_and_draws(pool: Pool) -> None:
    body = """
        sleep("1d")
        local said = signal("go", {timeout = "2d"})
        return {said = said, id = tactus.run_id(), same = tactus.uuid() ~= tactus.uuid(), random = tactus.random() < 1}
    """
    people = ScriptedPeople({}).signal("go", {"n": 1}, after=90_000)
    outcome = await run_lua(pool, main_of(body), people=people)
    assert value(outcome) == {"said": {"n": 1}, "id": "crash", "same": True, "random": True}


async def test_operations_inside_coroutines_of_the_program(pool: Pool) -> None:
    body = """
        local each = coroutine.wrap(function()
            for i = 1, 3 do coroutine.yield(step("s", function() return i end)) end
        end)
        return {each(), each(), each()}
    """
    assert value(await run_lua(pool, main_of(body))) == [1, 2, 3]


async def test_a_time_that_nobody_can_wait_for_is_an_error_that_the_program_catches(pool: Pool) -> None:
    """What the gateway refuses would end the run. Nothing is recorded of it, and the next operation has its address."""
    body = """
    local said = {}
    local function refused(fn)
        local ok, raised = pcall(fn)
        said[#said + 1] = ok and "none" or raised.type
    end
    for _, time in ipairs{-1, 0/0, 1/0, -1/0, 1e300, math.maxinteger, 40000000000, "999999999999h", "-5s"} do
        refused(function() sleep(time) end)
        refused(function() signal("go", {timeout = time}) end)
        refused(function() Human.approve{message = "May I?", timeout = time} end)
        refused(function() Human.approve{message = "May I?", escalate = {{after = time}}} end)
        refused(function() step("one", function() return 1 end, {timeout = time}) end)
        refused(function() step("one", function() return 1 end, {retry = {retries = 1, first = time}}) end)
        refused(function() return tool.bank.charge({amount = 1}, {timeout = time}) end)
    end
    refused(function() return tool.bank.charge({amount = 1}, {timeout = "800d"}) end)
    refused(function() Human.approve{message = "May I?", timeout = 10, escalate = {{after = 20}}} end)
    return {said = said, last = step("last", function() return "it goes on" end)}"""
    outcome = await run_lua(pool, main_of(body), tools={"bank.charge": lambda amount: {"amount": amount}})
    assert outcome.state == "COMPLETED", outcome.error
    value = outcome.output["value"]
    assert value["said"] == ["RUN_VALUE_INVALID"] * (9 * 7 + 2)
    assert checkpoints(outcome) == [("1", "step", "last", "it goes on")]
