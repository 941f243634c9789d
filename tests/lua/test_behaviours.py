"""What Lua procedures promise: a replay executes nothing, divergence is refused, runs are isolated, people are asked
once; and whatever crashes where, the result is the same and each effect happens once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.lua.driver import lua_procedure
from app.lua.options import LuaOptions
from app.lua.pool import Pool
from app.lua.programs import Source, declared
from tests.conftest import IS_SOAK
from tests.lua.running import checkpoints, main_of, performed, procedure_of, run_lua
from tga_sdk import AsyncClient, Context, Retry, Worker, procedure
from tga_sdk.agents import provide_model
from tga_sdk.testing import MemoryGateway, ScriptedPeople, crash_everywhere_async, run_twice_async
from tga_sdk.testing.crashes import Boundary, Outcome
from tga_sdk.testing.models import ScriptedModel, call

pytestmark = pytest.mark.asyncio(loop_scope="module")

EVERYTHING = """
helper = procedure "helper" {
    input = {by = {type = "number", required = true}},
    state = {total = {type = "number", default = 10}},
    run = function()
        state.total = state.total + input.by
        step("inside", function() state.total = state.total * 2 end)
        return {total = state.total}
    end
}
main = procedure "main" {
    input = {user = {type = "number", required = true}},
    state = {items = {type = "array", default = {}}, phase = {type = "string"}, drawn = {}, who = {type = "table"}},
    run = function()
        Worker = agent "worker" {
            model = "scripted-lua",
            system_prompt = function() return "You are " .. math.random(100000) end,
            tools = {lookup = function(args)
                table.insert(state.items, args.q)
                return tool.bank.charge{amount = 3}.amount
            end},
        }
        state.phase = "begun"
        local paid = tool.bank.charge{amount = input.user}
        local items = state.items
        for i = 1, 3 do
            step("row", function() items[#items + 1] = {n = i, made = step("inner", function() return i * 2 end)} end)
        end
        state.drawn = checkpoint(function() return {at = os.time() > 0, one = math.random(100) <= 100} end)
        checkpoint()
        local failed = pcall(step, "fails", {retry = {retries = 1, first = 0}}, function()
            items[#items + 1] = "never"
            error("no")
        end)
        local found = parallel{
            function() state.who = {name = "ada"} return helper({by = 1}).total end,
            function() return tool.bank.charge{amount = 2}.amount end,
            function() return Human.approve({message = "ok?"}) end,
        }
        Worker({message = "go"})
        state.phase = Worker.output
        sleep(60)
        Log.info("done")
        items[#items + 1] = "last"
        return {paid = paid, found = found, count = #items, failed = failed, out = Worker.output, who = state.who.name,
                turns = #Worker.messages}
    end
}
"""
RESULT = {
    "paid": {"amount": 7},
    "found": [22, 2, True],
    "count": 5,
    "failed": False,
    "out": "done it",
    "who": "ada",
    "turns": 4,
}


def bank() -> dict[str, Any]:
    return {"bank.charge": lambda amount: {"amount": amount}}


def people() -> ScriptedPeople:
    return ScriptedPeople({"approve": True})


@pytest.fixture(autouse=True)
def model() -> None:
    provide_model("scripted-lua", lambda: ScriptedModel(call("lookup", q="tea"), "done it"))


def some(share: float) -> Callable[[Boundary], bool]:
    """Which boundaries to leave out: all but a share of them, by a seed that is printed; none in soak."""
    seed = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={seed}")
    chance = random.Random(seed)
    return lambda _: not IS_SOAK and chance.random() > share


async def test_a_crash_at_any_boundary_changes_nothing(pool: Pool) -> None:
    """Of some 150 boundaries, sampled; all in soak."""
    program = await procedure_of(pool, EVERYTHING)
    found = await crash_everywhere_async(program, {"user": 7}, tools=bank, people=people, ignore=some(0.06))
    assert found.calm.output["value"] == RESULT
    assert found.calm.document["items"] == [
        {"n": 1, "made": 2},
        {"n": 2, "made": 4},
        {"n": 3, "made": 6},
        "tea",
        "last",
    ]
    assert found.boundaries
    assert sorted(effect.arguments["amount"] for effect in found.calm.effects) == [2, 3, 7]


async def test_a_replay_executes_nothing(pool: Pool) -> None:
    program = await procedure_of(pool, EVERYTHING)
    outcome = await run_twice_async(program, {"user": 7}, tools=bank, people=people)
    assert outcome.output["value"] == RESULT


async def test_a_changed_source_does_not_go_on_with_an_old_journal(pool: Pool) -> None:
    """The digest is another one, so no worker of it is given the run; were it given, the first difference ends it."""
    body = "local a = step('one', function() return 1 end)\nHuman.approve({message = 'ok?'})\nreturn a"
    first = await procedure_of(pool, main_of(body))
    other = await procedure_of(pool, main_of(body.replace("'one'", "'two'")))
    assert first.digest != other.digest
    forced = lua_of(other, digest=first.digest)
    async with served(first) as (gateway, client):
        await client.start("program", run_id="r")
        await until(lambda: gateway.waits_for("r") == ["ask"])
    async with served(forced, gateway=gateway) as (_, client):
        await client.answer("r", "2", answer=True)
        run = await client.wait("r")
        assert run.state == "DIVERGED"
        assert [one["name"] for one in gateway.journal("r") if one.get("kind") == "step"] == ["one"]


def lua_of(program: Any, **changes: Any) -> Any:
    return type(program)(**{**program.__dict__, **changes})


async def test_two_runs_share_nothing(pool: Pool) -> None:
    """Not their globals, their state, nor their draws; though they stand in the same process."""
    body = """
        counter = (counter or 0) + input.n
        math.secret = input.n
        string.secret = (string.secret or 0) + 1
        state.mine = input.n
        local draw = math.random(1000000000)
        local said = signal("go")
        return {counter = counter, mine = state.mine, strings = string.secret, draw = draw == math.random(1000000000)}
    """
    program = await procedure_of(pool, main_of(body, given="{n = {type = 'number'}}"))
    async with served(program) as (gateway, client):
        for n in range(6):
            await client.start("program", {"n": n}, run_id=f"r{n}")
        await until(lambda: all(gateway.waits_for(f"r{n}") == ["signal"] for n in range(6)))
        for n in range(6):
            await client.signal(f"r{n}", "go", None)
        for n in range(6):
            run = await client.wait(f"r{n}")
            assert value_of(run) == {"counter": n, "mine": n, "strings": 1, "draw": False}


async def test_a_person_is_asked_once_and_the_question_stands_before_the_run_is_left(pool: Pool) -> None:
    body = "local said = Human.approve({message = 'Deploy?'})\nreturn {said = said}"
    program = await procedure_of(pool, main_of(body))
    gateway = MemoryGateway(tools={})
    for _ in range(3):  # three workers, one after the other: each finds the question asked
        async with served(program, gateway=gateway) as (_, client):
            await client.start("program", run_id="r")
            await until(lambda: gateway.waits_for("r") == ["ask"])
    async with served(program, gateway=gateway) as (_, client):
        await client.answer("r", "1", answer=True)
        assert value_of(await client.wait("r")) == {"said": True}
    asked = [one for one in gateway.journal("r") if one["artifact_type"] == "run_intent"]
    assert len(asked) == 1


async def test_script_mode_equals_wrapper_mode(pool: Pool) -> None:
    body = """
        state.original = input.value
        local charged = tool.bank.charge{amount = input.value}
        state.result = step("double", function() return charged.amount * 2 end)
        return {doubled = state.result}
    """
    fields = "value = field.number{required = true}"
    out = "doubled = field.number{required = true}"
    script = await run_lua(pool, f"input {{ {fields} }}\noutput {{ {out} }}\n{body}", {"value": 4}, tools=bank)
    wrapped = await run_lua(
        pool, main_of(body, given=f"{{ {fields} }}", output=f"{{ {out} }}"), {"value": 4}, tools=bank
    )
    assert script.output == wrapped.output == {"tier": "inline", "value": {"doubled": 8}}
    assert (script.document, journal(script)) == (wrapped.document, journal(wrapped))


async def test_the_seven_functions_outside_a_checkpoint_warn_or_stop(pool: Pool) -> None:
    calls = ["math.random()", "math.randomseed(1)", "os.time()", "os.date()", "os.clock()", "os.getenv('HOME')"]
    calls.append("os.tmpname()")
    body = "\n".join(f"local _{place} = {one}" for place, one in enumerate(calls)) + "\nreturn {}"
    outcome = await run_lua(pool, main_of(body))
    lines = [line["text"] for one in outcome.journal for line in one.get("logs") or ()]
    assert [line.split(": ")[1] for line in lines] == [f"program.lua:{number}" for number in range(2, 9)], lines
    assert all("DETERMINISM WARNING" in line and "checkpoint(function()" in line for line in lines)
    for place, one in enumerate(calls):
        strict = await procedure_of(pool, main_of(one), options=LuaOptions(strict_determinism=True))
        failed = await performed(strict)
        assert failed.state == "FAILED", one
        assert failed.error is not None
        assert failed.error["type"] == "RUN_NOT_DETERMINISTIC", (place, failed.error)
        assert "program.lua:2" in failed.error["message"]
    inside = (
        f"return checkpoint(function() {' '.join(f'local _{n} = {one}' for n, one in enumerate(calls))} return 1 end)"
    )
    strict = await procedure_of(pool, main_of(inside), options=LuaOptions(strict_determinism=True))
    assert (await performed(strict)).output["value"] == 1
    own = 'main = procedure "main" { strict_determinism = true, run = function() return os.time() end }'
    assert (await run_lua(pool, own)).state == "FAILED"


async def test_draws_outside_a_checkpoint_are_the_same_in_every_attempt(pool: Pool) -> None:
    body = """
        local drawn, now = {math.random(1000000), math.random(1000000)}, os.time()
        step("first", function() return drawn[1] end)
        Human.approve({message = "" .. drawn[2] .. now})
        return drawn
    """
    program = await procedure_of(pool, main_of(body))
    await crash_everywhere_async(program, None, people=people, ignore=some(0.3))


async def test_children_that_are_killed_cost_nothing_but_time() -> None:
    """Lua processes killed at any moment: the runs in them are attempted again, and each effect happens once."""
    book: list[int] = []

    async def charge(amount: int) -> dict[str, int]:
        book.append(amount)
        return {"amount": amount}

    async with Pool(children=2) as pool:
        source = Source("program.lua", EVERYTHING, {})
        program = lua_procedure(source, await declared(pool, source), pool, options=LuaOptions())
        gateway = MemoryGateway(tools={"bank.charge": charge}, skip_waiting=True)
        people().attend(gateway)
        async with served(program, gateway=gateway) as (_, client):
            for n in range(4):
                await client.start("program", {"user": 7}, run_id=f"r{n}")
            killed = 0
            waiting = asyncio.gather(*(client.wait(f"r{n}") for n in range(4)))
            while not waiting.done() and killed < 3:
                before = len(book)
                await until(lambda before=before: len(book) >= before + 2 or waiting.done())
                pids = [
                    child.pid or 0 for child in pool._children if child is not None and child.pid and not child.is_gone
                ]
                if pids and not waiting.done():
                    os.kill(pids[killed % len(pids)], signal.SIGKILL)
                    killed += 1
            runs = await waiting
        assert killed > 0
        assert [value_of(run) for run in runs] == [RESULT] * 4
        assert sorted(book) == sorted([2, 3, 7] * 4)
        changes = [one["change"] for one in gateway.journal("r0") if one["artifact_type"] == "run_attempt"]
        assert changes[0] == "LEASED"


def value_of(run: Any) -> Any:
    return run.output["value"]


@asynccontextmanager
async def served(
    program: Any, *, gateway: MemoryGateway | None = None
) -> AsyncIterator[tuple[MemoryGateway, AsyncClient]]:
    gateway = gateway or MemoryGateway(tools={})
    ready = asyncio.Event()
    worker = Worker(gateway.url, gateway.key, [program], transport=gateway.transport, on_ready=ready.set)
    task = asyncio.create_task(worker.run(signals=False))
    await ready.wait()
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        try:
            yield gateway, client
        finally:
            worker.stop()
            worker.stop()
            await task
            gateway.lose_workers()


async def until(is_so: Any) -> None:
    async with asyncio.timeout(60):
        while not is_so():
            await asyncio.sleep(0.002)


# -------------------------------------------------------------------------------------------------------------- parity

LUA = """
double = procedure "double" { input = {n = {type = "number"}}, run = function()
    return step("times", function() return input.n * 2 end)
end }
main = procedure "main" { run = function()
    state.phase = "begun"
    local paid = tool.bank.charge{amount = input.user}
    local inner = step("outer", function()
        state.items = {1}
        table.insert(state.items, 2)
        return step("inner", function() return paid.amount + 1 end)
    end)
    local twice = double({n = inner})
    local both = parallel{
        function() state.left = 1 return step("left", function() return "l" end) end,
        function() state.right = 2 return tool.bank.charge{amount = 2} end,
    }
    checkpoint()
    local ok, problem = pcall(step, "fails", {retry = {retries = 1, first = 0}}, function()
        state.items = {}
        error({type = "Refused", message = "no"})
    end)
    state.phase = problem.type
    local answer = Human.approve({message = "Go on?", context = {n = twice}, timeout = 60, default = false})
    local text = Human.input({prompt = "Why?", name = "why"})
    Worker = agent "worker" {model = "scripted-lua", system_prompt = "Work."}
    Worker({message = text})
    sleep(5)
    local heard = signal("go")
    tactus.emit({at = 1})
    state.items[#state.items + 1] = 3
    return {inner = inner, twice = twice, both = both, answer = answer, out = Worker.output, heard = heard}
end }
"""


class Refused(Exception):
    pass


@procedure(name="double")
async def double(ctx: Context[Any], input: dict[str, Any]) -> Any:  # noqa: A002
    async def times() -> Any:
        return input["n"] * 2

    return await ctx.step("times", times)


@procedure(name="program")
async def in_python(ctx: Context[Any], input: dict[str, Any]) -> Any:  # noqa: A002
    ctx.state["phase"] = "begun"
    paid = await ctx.tool("bank", "charge", {"amount": input["user"]})

    async def add() -> Any:
        return paid["amount"] + 1

    async def outer() -> Any:
        ctx.state["items"] = [1]
        ctx.state["items"].append(2)
        return await ctx.step("inner", add)

    inner = await ctx.step("outer", outer)
    twice = await ctx.call(double, {"n": inner})

    async def letter() -> Any:
        return "l"

    async def left() -> Any:
        ctx.state["left"] = 1
        return await ctx.step("left", letter)

    async def right() -> Any:
        ctx.state["right"] = 2
        return await ctx.tool("bank", "charge", {"amount": 2})

    both = await ctx.gather(left, right)
    await ctx.checkpoint()

    async def fails() -> Any:
        ctx.state["items"] = []
        raise Refused("no")

    try:
        await ctx.step("fails", fails, retry=Retry(1, first=0))
    except Exception as error:
        ctx.state["phase"] = error.type  # type: ignore[attr-defined]
    answer = await ctx.approve("Go on?", context={"n": twice}, timeout=60, default=False)
    text = await ctx.input("Why?", name="why")
    worker = ctx.agent("worker", model="scripted-lua", system_prompt="Work.")
    await worker.run(text)
    await ctx.sleep(5)
    heard = await ctx.signal("go")
    await ctx.emit({"at": 1})
    ctx.state["items"].append(3)
    return {"inner": inner, "twice": twice, "both": both, "answer": answer, "out": worker.output, "heard": heard}


async def test_the_same_program_in_both_languages_leaves_the_same_journal(pool: Pool) -> None:
    def friends() -> ScriptedPeople:
        return ScriptedPeople({"approve": True, "why": "because"}).signal("go", 9, after=3600)

    provide_model("scripted-lua", lambda: ScriptedModel("done it"))
    lua = await performed(await procedure_of(pool, LUA), {"user": 5}, tools=bank, people=friends())
    python = await performed(in_python, {"user": 5}, tools=bank, people=friends())
    assert lua.state == python.state == "COMPLETED", (lua, python)
    assert lua.output == python.output
    assert lua.document == python.document
    # Branches run at the same time: which of them records first is not part of the program.
    ours, theirs = (sorted(journal(one), key=lambda record: str(record["path"])) for one in (lua, python))
    for one, other in zip(ours, theirs, strict=True):
        assert one == other
    assert {"tool", "step", "call", "gather", "checkpoint", "ask", "turn", "sleep", "signal", "emit"} <= {
        one["kind"] for one in ours if "kind" in one
    }


CHANGING = {"at", "recorded_at", "started_at", "duration_ms", "source", "input_digest", "wakes_at", "timestamp"}
CHANGING |= {"sequence_number", "lease", "salt", "program_digest", "version", "expires_at", "run_id", "logs", "worker"}
CHANGING |= {"artifact_digest", "trace_id", "intent_digest", "answered_at", "tool_effect_digest", "answered_by"}


def journal(outcome: Outcome) -> list[dict[str, Any]]:
    """Without what differs between any two runs."""

    def same(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: same(one) for key, one in value.items() if key not in CHANGING}
        return [same(one) for one in value] if isinstance(value, list) else value

    return [same(one) for one in outcome.journal if "path" in one]


async def test_a_model_that_runs_code_is_refused(pool: Pool) -> None:
    for spec, said in [
        ("type = 'sklearn', path = 'a.pkl', sha256 = string.rep('0', 64)", "loading it runs code"),
        ("type = 'onnx', path = '../../etc/passwd'", "stands in no folder"),
        ("type = 'http', endpoint = 'http://169.254.169.254/latest'", "the host 169.254.169.254 is not allowed"),
        ("type = 'http', endpoint = 'http://a/', headers_env = {X = 'SECRET'}", "headers_env"),
        ("type = 'sagemaker', endpoint_name = 'a'", "uses the gateway's own access"),
        ("type = 'sentence_transformers', model_name = 'a'", "uses the gateway's own access"),
    ]:
        outcome = await run_lua(pool, main_of(f"return (model 'm' {{ {spec} }}).predict('x')"))
        assert outcome.error is not None, spec
        assert (outcome.error["type"], said in outcome.error["message"]) == ("LUA_NOT_ALLOWED", True), outcome.error
    outcome = await run_lua(pool, main_of("(agent 'a' {model = 'nobody', provider = 'none'})()"))
    assert outcome.error is not None
    assert "the model none:nobody is not one that this gateway offers" in outcome.error["message"]
    assert checkpoints(outcome) == []


async def test_what_a_body_said_to_an_agent_is_forgotten_with_it(pool: Pool) -> None:
    """Live as in a replay, in which the body does not run: later turns are the same in both."""
    body = """
        local W = agent "worker" {model = "scripted-lua", tools = {tactus.done}}
        step("inside", function() W({message = "in"}) state.inside = W.output end)
        local before, count = W.output, #W.messages
        local called = tactus.done.called()
        W({message = "out"})
        return {before = before, count = count, called = called, inside = state.inside, after = #W.messages,
                done = tactus.done.called()}
    """
    provide_model("scripted-lua", lambda: ScriptedModel(call("done"), "said"))
    program = await procedure_of(pool, main_of(body))
    found = await crash_everywhere_async(program, None, ignore=some(0.3))
    assert found.calm.output["value"] == {"count": 0, "called": False, "inside": "said", "after": 4, "done": True}
