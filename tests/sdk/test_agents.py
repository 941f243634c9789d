"""Durable agents on a real gateway: what is recorded of them, and what a replay does not do again."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import pytest
from pydantic import BaseModel
from pydantic_ai import Agent, ModelRetry, RunContext, Tool
from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolReturn, UserPromptPart
from pydantic_ai.usage import RequestUsage

from tests.patience import HANG_S as PATIENCE_S
from tests.runs.world import GatewayProcess, RunsWorld, new_id
from tga_sdk import AsyncClient, Context, Retry, SyncContext, Worker, durable, procedure
from tga_sdk.agents import AgentSpecification, agent_specification, cost, provide_model
from tga_sdk.agents.turns import RESPONSE
from tga_sdk.errors import ProcedureInvalid, StepError, ValueInvalid
from tga_sdk.testing.models import ScriptedModel, call


@dataclass
class Seen:
    """A run as it stands. `awaits`: the paths of its open questions."""

    status: str
    output: Any
    error: dict[str, Any]
    attempt: int
    awaits: list[str]
    divergence: str


class World:
    """A gateway, the bank, and workers in this process that come and go. Each test has a run `r` of its own."""

    def __init__(self, runs: RunsWorld, url: str) -> None:
        self.runs = runs
        self.url = url
        self.r = new_id("agent")
        self.client = AsyncClient(url, runs.keys["agent"])
        self.person = AsyncClient(url, runs.keys["supervisor"])

    async def worker(self, *procedures: Any) -> tuple[Worker, asyncio.Task[None]]:
        """A worker that has registered its procedures and asks for runs."""
        ready = asyncio.Event()
        worker = Worker(self.url, self.runs.keys["worker"], procedures, on_ready=ready.set)
        working = asyncio.create_task(worker.run(signals=False))
        await asyncio.wait_for(ready.wait(), PATIENCE_S)
        return worker, working

    async def run(self, program: Any, given: Any = None) -> Seen:
        """The run, when it has ended or waits for somebody."""
        working = await self.worker(program)
        try:
            await self.start(program, given)
            return await self.settled()
        finally:
            await self.kill(working)

    async def start(self, program: Any, given: Any) -> None:
        self.r = new_id("agent")
        await self.client.start(program.name, given, run_id=self.r)

    async def settled(self) -> Seen:
        return await self._seen("waiting_for_human", "completed", "failed", "diverged")

    async def ended(self) -> Seen:
        return await self._seen("completed", "failed", "diverged")

    async def _seen(self, *statuses: str) -> Seen:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await self.look()).status not in statuses:
                await asyncio.sleep(0.02)
        return found

    async def look(self) -> Seen:
        run = await self.client.status(self.r)
        output = await self.client.result(self.r) if run.status == "completed" else None
        awaits = [one["path"] for one in run.awaits]
        return Seen(run.status, output, run.error or {}, run.attempt, awaits, str(run.divergence))

    async def kill(self, working: tuple[Worker, asyncio.Task[None]]) -> None:
        """As a worker dies: nothing is put any more, and nothing is given back."""
        worker, task = working
        worker.stop()
        worker.stop()
        await asyncio.wait_for(task, PATIENCE_S)

    async def records(self, artifact_type: str = "run_checkpoint") -> list[dict[str, Any]]:
        return [one for one in await self.runs.journal(self.r) if one["artifact_type"] == artifact_type]

    async def shape(self) -> list[str]:
        return [f"{one['path']} {one['kind']} {one['name']} {one['outcome']}" for one in await self.records()]

    @property
    def charged(self) -> list[int]:
        """What the bank's own book has of this run."""
        lines = [json.loads(line) for line in self.runs.bank.book.read_text().splitlines()]
        mine = [one for one in lines if str(one.get("idempotency_key")).startswith(f"run:{self.r}/")]
        return sorted(one["arguments"]["amount"] for one in mine if one["event"] == "execution")


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> Iterator[GatewayProcess]:
    yield asyncio.run(world.gateway())
    world.kill_processes()


@pytest.fixture
async def agents(world: RunsWorld, gateway: GatewayProcess) -> AsyncIterator[World]:
    found = World(world, gateway.url)
    yield found
    await found.client.close()
    await found.person.close()


async def test_every_turn_and_every_tool_call_is_a_checkpoint(agents: World) -> None:
    noted: list[str] = []

    def note(text: str) -> str:
        noted.append(text)
        return f"noted {text}"

    model = ScriptedModel(call("note", text="a"), call("bank.charge", amount=5), "done")

    @procedure
    async def research(ctx: Context[None], question: str) -> dict[str, Any]:
        agent = ctx.agent("researcher", model=model, tools=[note, "bank.charge"], system_prompt="Be brief.")
        return {"output": await agent.run(question), "turns": agent.usage.requests, "tokens": agent.usage.output_tokens}

    ended = await agents.run(research, "what?")
    assert ended.output == {"output": "done", "turns": 3, "tokens": 15}, ended.error
    assert await agents.shape() == [
        "1 step researcher.tools OK",
        "2 turn researcher OK",
        "3 step note OK",
        "4 turn researcher OK",
        "6 turn researcher OK",
    ]
    assert [one["path"] for one in await agents.records("run_answer")] == ["5"]
    assert (noted, agents.charged, len(model.requests)) == (["a"], [5], 3)
    [first] = [one["value"]["value"] for one in (await agents.records()) if one["path"] == "2"]
    assert first["response"]["usage"]["input_tokens"] == 10
    assert first["requests"] == 1


async def test_calls_of_one_turn_are_branches_in_the_models_order_whatever_is_faster(agents: World) -> None:
    order: list[str] = []

    async def note(text: str) -> str:
        async with asyncio.timeout(PATIENCE_S):
            while text == "slow" and len(order) < 2:
                await asyncio.sleep(0.01)
        order.append(text)
        return text.upper()

    model = ScriptedModel(
        [
            call("note", text="slow"),
            call("bank.charge", amount=1),
            call("note", text="fast"),
            call("note", text="fast"),
        ],
        "done",
    )

    @procedure
    async def research(ctx: Context[None], question: str) -> list[str]:
        agent = ctx.agent("researcher", model=model, tools=[note, "bank.charge"])
        await agent.run(question)
        [request] = [one for one in agent.messages if any(part.part_kind == "tool-return" for part in one.parts)]
        return [str(getattr(part, "content", "")) for part in request.parts]

    ended = await agents.run(research, "what?")
    assert [ended.output[0], *ended.output[2:]] == ["SLOW", "FAST", "FAST"], ended.error
    assert "charge_id" in ended.output[1]
    assert order == ["fast", "fast", "slow"], "they run at the same time, and identical calls each run"
    paths = {one["path"]: one["kind"] for one in (await agents.records())}
    assert [paths[path] for path in ("3", "3:1.1", "3:3.1", "3:4.1")] == ["gather", "step", "step", "step"]


async def test_a_tool_that_is_sequential_runs_alone_in_its_place(agents: World) -> None:
    running: list[str] = []
    seen: list[list[str]] = []

    async def note(text: str) -> str:
        running.append(text)
        await asyncio.sleep(0.02)
        seen.append(list(running))
        running.remove(text)
        return text

    model = ScriptedModel(
        [call("note", text="a"), call("note", text="b"), call("alone", text="c"), call("note", text="d")], "done"
    )

    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        alone = Tool(note, name="alone", sequential=True)
        return str(await ctx.agent("researcher", model=model, tools=[note, alone]).run(question))

    ended = await agents.run(research, "what?")
    assert ended.output == "done", ended.error
    assert seen == [["a", "b"], ["b"], ["c"], ["d"]]
    assert [one["kind"] for one in (await agents.records()) if one["path"] in ("2", "3", "4")] == [
        "gather",
        "step",
        "step",
    ]


@pytest.mark.parametrize("killed_at", [1, 2, 3, 4])
async def test_a_worker_that_dies_in_a_turn_pays_for_that_turn_alone_again(agents: World, killed_at: int) -> None:
    asked: Counter[int] = Counter()
    dying = asyncio.Event()

    def counted(number: int, turn: Any) -> Callable[[list[ModelMessage]], Any]:
        def said(messages: list[ModelMessage]) -> Any:
            asked[number] += 1
            if number == killed_at and asked[number] == 1:
                dying.set()
            return turn

        return said

    class Slow(ScriptedModel):
        async def request(self, *args: Any, **options: Any) -> ModelResponse:
            answer = await super().request(*args, **options)
            await asyncio.sleep(30 if dying.is_set() else 0)
            return answer

    turns = [
        call("bank.charge", amount=1),
        [call("bank.charge", amount=2), call("bank.charge", amount=2)],
        "half",
        "end",
    ]
    model = Slow(*(counted(number, turn) for number, turn in enumerate(turns, 1)))

    @procedure
    async def research(ctx: Context[None], question: str) -> list[str]:
        agent = ctx.agent("researcher", model=model, tools=["bank.charge"])
        return [await agent.run(question), await agent.run("and then?")]

    working = await agents.worker(research)
    await agents.start(research, "what?")
    await dying.wait()
    await agents.kill(working)
    dying.clear()
    working = await agents.worker(research)
    ended = await agents.settled()
    await agents.kill(working)
    assert ended.output == ["half", "end"], ended.error
    assert ended.attempt >= 2
    assert asked == Counter({number: 2 if number == killed_at else 1 for number in (1, 2, 3, 4)})
    assert agents.charged == [1, 2, 2]


async def test_a_finished_conversation_is_replayed_without_a_request(agents: World) -> None:
    model = ScriptedModel(call("note", text="a"), "half", "whole")
    waits = asyncio.Event()
    noted: list[str] = []

    def note(text: str) -> str:
        noted.append(text)
        return text

    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        agent = ctx.agent("researcher", model=model, tools=[note])
        await agent.run(question)
        waits.set()
        more = await ctx.input("more?")
        return str(await agent.run(more))

    working = await agents.worker(research)
    await agents.start(research, "what?")
    ended = await agents.settled()
    assert (ended.status, len(model.requests)) == ("waiting_for_human", 2)
    await agents.kill(working)
    working = await agents.worker(research)
    await agents.person.answer(agents.r, ended.awaits[0], "go on")
    ended = await agents.ended()
    await agents.kill(working)
    assert (ended.output, len(model.requests), noted) == ("whole", 3, ["a"])
    assert len(model.requests[-1]) == 5, "the third request has the whole conversation"


async def test_429_and_5xx_are_asked_again_within_the_turn_and_4xx_is_not(agents: World) -> None:
    model = ScriptedModel("done")
    model.fail(429, 503, TimeoutError())

    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        agent = durable(Agent(model, name="researcher"), retry=Retry(3, first=0.001, longest=0.002))
        return (await agent.run(question)).output  # type: ignore[no-any-return]

    ended = await agents.run(research, "what?")
    assert ended.output == "done", ended.error
    assert (await agents.shape(), len(model.requests)) == (["1 turn researcher OK"], 4)
    [turn] = await agents.records()
    assert turn["value"]["value"]["requests"] == 4
    assert ["429" in line["text"] for line in turn["logs"]] == [True, False, False]

    model.fail(400)
    ended = await agents.run(research, "what?")
    assert ended.error["type"] == "ModelHTTPError"
    assert await agents.shape() == ["1 turn researcher ERROR"]
    assert len(model.requests) == 5
    model.fail(500, 500, 500, 500)
    ended = await agents.run(research, "what?")
    assert (ended.status, len(model.requests)) == ("failed", 9)


async def test_a_request_that_takes_too_long_is_sent_again(agents: World) -> None:
    class Slow(ScriptedModel):
        async def request(self, *args: Any, **options: Any) -> ModelResponse:
            answer = await super().request(*args, **options)
            if len(self.requests) == 1:
                await asyncio.Event().wait()
            return answer

    model = Slow("done")

    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        agent = ctx.agent("researcher", model=model, timeout=3, retries=1)
        return str(await agent.run(question))

    ended = await agents.run(research, "what?")
    assert (ended.output, len(model.requests)) == ("done", 2), ended.error
    assert "no answer within 3 s" in (await agents.records())[0]["logs"][0]["text"]


class Report(BaseModel):
    title: str
    pages: int


async def test_structured_output_deps_and_computed_prompts(agents: World) -> None:
    agent: Agent[int, Report] = Agent(
        ScriptedModel(call("pages"), Report(title="Tea", pages=7)), deps_type=int, output_type=Report, name="writer"
    )

    @agent.tool
    def pages(ctx: RunContext[int]) -> int:
        return ctx.deps

    @agent.instructions
    def tell(ctx: RunContext[int]) -> str:
        return f"{ctx.deps} pages; today's number is {random.random()}"

    kept: list[Report] = []

    @procedure
    async def write(ctx: Context[None], question: str) -> int:
        kept.append((await durable(agent).run(question, deps=7)).output)
        return kept[-1].pages + int(await ctx.input("how many more?", type=int))

    working = await agents.worker(write)
    await agents.start(write, "tea")
    waiting = await agents.settled()
    await agents.kill(working)
    working = await agents.worker(write)
    await agents.person.answer(agents.r, waiting.awaits[0], 3)
    ended = await agents.ended()
    await agents.kill(working)
    assert ended.output == 10, (ended.status, ended.error, ended.divergence)
    assert kept == [Report(title="Tea", pages=7)] * 2, "an instruction that differs does not make it another turn"


async def test_a_prompt_that_is_a_function_is_recorded_once(agents: World) -> None:
    drawn: list[float] = []

    def prompt() -> str:
        drawn.append(random.random())
        return f"You are agent {drawn[-1]}."

    model = ScriptedModel("one", "two")

    @procedure
    async def talk(ctx: Context[None], question: str) -> str:
        agent = ctx.agent("talker", model=model, system_prompt=prompt)
        await agent.run(question)
        return str(await agent.run("again"))

    ended = await agents.run(talk, "hello")
    assert ended.output == "two", ended.error
    assert (await agents.shape())[:2] == ["1 step talker.prompt OK", "2 turn talker OK"]
    assert model.requests[0][0].instructions == f"You are agent {drawn[0]}."  # type: ignore[union-attr]


async def test_what_a_tool_asks_of_the_model_is_told_to_it_in_every_attempt(agents: World) -> None:
    tried: list[int] = []

    def guess(number: int) -> ToolReturn[Any]:
        tried.append(number)
        if number < 3:
            raise ModelRetry("larger")
        return ToolReturn("right", content="well done", metadata={"n": number})

    model = ScriptedModel(call("guess", number=1), call("guess", number=3), call("bank.fail"), call("nothing"), "done")

    @procedure
    async def play(ctx: Context[None], question: str) -> list[Any]:
        agent = ctx.agent("player", model=model, tools=[guess, "bank.fail"])
        await agent.run(question)
        await ctx.checkpoint()
        told = [part for one in agent.messages if isinstance(one, ModelRequest) for part in one.parts[:1]]
        return [
            part.part_kind if isinstance(part, UserPromptPart) else str(getattr(part, "content", "")) for part in told
        ]

    ended = await agents.run(play, "guess")
    assert ended.status == "completed", ended.error
    assert tried == [1, 3]
    [asked, larger, right, closed, unknown] = ended.output
    assert (asked, right) == ("user-prompt", "right")
    assert "larger" in larger
    assert "the server answered 422" in closed
    assert "nothing" in unknown
    assert "well done" in str(model.requests[2][-1].parts)


async def test_a_person_approves_a_tool_and_the_model_is_told_of_a_denial(agents: World) -> None:
    model = ScriptedModel(call("bank.charge", amount=5), [call("bank.charge", amount=6), call("shred", page=2)], "done")
    shredded: list[int] = []

    def shred(page: int) -> str:
        shredded.append(page)
        return "shredded"

    @procedure
    async def office(ctx: Context[None], question: str) -> str:
        agent = ctx.agent(
            "clerk",
            model=model,
            tools=["bank.charge", Tool(shred, requires_approval=True)],
            approve=["bank.charge"],
        )
        return str(await agent.run(question))

    working = await agents.worker(office)
    await agents.start(office, "what?")
    first = await agents.settled()
    assert first.awaits == ["3"]
    [asked] = await agents.person.approvals()
    assert (asked.request or {})["context"]["value"] == {"tool": "bank.charge", "arguments": {"amount": 5}}
    await agents.person.answer(agents.r, "3", False)
    async with asyncio.timeout(PATIENCE_S):
        while len((found := await agents.look()).awaits) < 2:
            assert found.status not in ("completed", "failed", "diverged"), found.error
            await asyncio.sleep(0.02)
    assert agents.charged == []
    assert "denied" in str(model.requests[1][-1])
    for question in found.awaits:
        await agents.person.answer(agents.r, question, True)
    ended = await agents.ended()
    await agents.kill(working)
    assert (ended.output, agents.charged, shredded) == ("done", [6], [2]), ended.error
    assert len(model.requests) == 3


async def test_tokens_are_events_and_no_values(agents: World) -> None:
    model = ScriptedModel("word " * 300, name="talkative")

    @procedure
    async def talk(ctx: Context[None], question: str) -> int:
        agent = ctx.agent("talker", model=model, stream=True)
        return len(await agent.run(question))

    ended = await agents.run(talk, "hello")
    assert ended.output >= 1500, ended.error
    events = [one for one in (await agents.records()) if one["kind"] == "emit"]
    assert len(events) > 2
    assert {one["value"]["tier"] for one in events} == {"event"}
    assert "".join(one["value"]["value"]["text"] for one in events).split() == ["word"] * 300
    assert [one["kind"] for one in (await agents.records())][-1] == "turn"


async def test_a_turn_that_was_half_told_is_told_anew_after_what_was_shown(agents: World) -> None:
    telling, hang = asyncio.Event(), [True]

    class Halting(ScriptedModel):
        async def _stream(self, messages: Any, info: Any) -> Any:
            number = 0
            async for part in super()._stream(messages, info):
                yield part
                number += 1
                if number == 250 and hang:
                    hang.clear()
                    telling.set()
                    await asyncio.sleep(60)

    model = Halting("word " * 300)

    @procedure
    async def talk(ctx: Context[None], question: str) -> int:
        return len((await ctx.agent("talker", model=model, stream=True).run(question)).split())

    working = await agents.worker(talk)
    await agents.start(talk, "hello")
    await telling.wait()
    while not (await agents.records()):
        await asyncio.sleep(0.01)
    shown = len(await agents.records())
    await agents.kill(working)
    model.turns = ("short",)
    working = await agents.worker(talk)
    ended = await agents.settled()
    await agents.kill(working)
    assert (ended.status, ended.output) == ("completed", 1), (ended.error, ended.divergence)
    told = [
        (one["value"]["value"]["attempt"], one["value"]["value"]["text"].split()[0])
        for one in (await agents.records())[:-1]
    ]
    assert told == [(1, "word")] * shown + [(2, "short")]


async def test_bytes_of_a_turn_stay_bounded_over_fifty_turns(agents: World) -> None:
    def note(text: str) -> str:
        return text * 20

    model = ScriptedModel(*(call("note", text=f"{number:03d}") for number in range(50)), "done")

    @procedure
    async def research(ctx: Context[None], question: str) -> list[dict[str, Any]]:
        agent = ctx.agent("researcher", model=model, tools=[note], max_turns=60)
        await agent.run(question)
        return list(agent.history())

    await agents.run(research, "x" * 1000)
    sizes = [len(json.dumps(one)) for one in (await agents.records()) if one["kind"] == "turn"]
    assert len(sizes) == 51
    assert max(sizes[1:50]) <= min(sizes[1:50]) * 1.05, sizes
    end = (await agents.records("run_end"))[0]
    assert end["output"]["tier"] == "artifact", "a whole history that is returned is a blob"
    assert len(json.dumps(end)) < 2_000
    print("bytes of turn 2 and turn 50:", sizes[1], sizes[49])


async def test_limits_end_an_agent_that_does_not_come_to_an_end(agents: World) -> None:
    def again() -> str:
        return "again"

    model = ScriptedModel(*[call("again")] * 20)

    @procedure
    async def circle(ctx: Context[None], question: str) -> str:
        return str(await ctx.agent("circler", model=model, tools=[again], max_turns=5).run(question))

    ended = await agents.run(circle, "go")
    assert (ended.error["type"], len(model.requests)) == ("UsageLimitExceeded", 5)


async def test_what_an_agent_cost_is_recorded_and_summed(agents: World) -> None:
    class Priced(ScriptedModel):
        async def request(self, *args: Any, **options: Any) -> ModelResponse:
            answer = await super().request(*args, **options)
            answer.model_name, answer.provider_name = "gpt-4o", "openai"
            return answer

    model = Priced("one", "two", tokens_per_turn=(1_000_000, 100_000))

    @procedure
    async def talk(ctx: Context[None], question: str) -> list[str]:
        agent = ctx.agent("talker", model=model)
        await agent.run(question)
        await agent.run("more")
        return [str(agent.cost), str(agent.usage.input_tokens)]

    ended = await agents.run(talk, "hello")
    said = [one["value"]["value"]["cost"] for one in (await agents.records())]
    assert said[0] == said[1] == {"amount": "3.50", "currency": "USD"}
    assert (Decimal(ended.output[0]), ended.output[1]) == (Decimal(7), "2000000")
    assert cost([ModelResponse(parts=[TextPart("x")], model_name="unheard-of", usage=RequestUsage())]) is None


async def test_an_agent_is_specified_as_data(agents: World) -> None:
    model = ScriptedModel(
        call(
            "bank.balance",
        ),
        {"title": "Tea", "pages": 3},
    )
    provide_model("scripted:research", model)
    spec = {
        "name": "researcher",
        "model": "scripted:research",
        "system_prompt": "You research.",
        "tools": ["bank.*"],
        "output_schema": Report.model_json_schema(),
    }

    @procedure
    async def research(ctx: Context[None], given: dict[str, Any]) -> dict[str, Any]:
        found: dict[str, Any] = await ctx.agent(given).run("tea?")
        return found

    ended = await agents.run(research, json.loads(json.dumps(spec)))
    assert ended.output == {"title": "Tea", "pages": 3}, ended.error
    assert agent_specification(spec) == AgentSpecification.model_validate(spec)
    with pytest.raises(ValueInvalid, match=r"agent researcher: max_turns") as wrong:
        agent_specification({**spec, "max_turns": 0})
    assert wrong.value.where == "researcher.max_turns"
    with pytest.raises(ValueInvalid, match=r"tools\.0"):
        agent_specification({**spec, "tools": ["no dot"]})


async def test_a_tool_that_the_gateway_does_not_have_is_named(agents: World) -> None:
    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        return str(await ctx.agent("researcher", model=ScriptedModel("x"), tools=["bank.chrage"]).run(question))

    ended = await agents.run(research, "what?")
    assert ended.error["type"] == "PROCEDURE_INVALID"
    assert "no tool bank.chrage; of the named servers it has: bank.balance, bank.charge" in ended.error["message"]


async def test_a_plain_function_has_agents_that_block(agents: World) -> None:
    def note(text: str) -> str:
        return text.upper()

    model = ScriptedModel(call("note", text="a"), "half", "whole")

    @procedure
    def research(ctx: SyncContext[None], question: str) -> list[Any]:
        agent = ctx.agent("researcher", model=model, tools=[note])
        return [agent.run(question), agent.run("and?"), agent.usage.requests, len(agent.messages), agent.output]

    ended = await agents.run(research, "what?")
    assert ended.output == ["half", "whole", 3, 6, "whole"], ended.error
    assert [one.split()[1] for one in await agents.shape()] == ["turn", "step", "turn", "turn"]


async def test_a_history_goes_to_another_run(agents: World) -> None:
    model = ScriptedModel("one", "two")

    @procedure
    async def talk(ctx: Context[None], history: list[dict[str, Any]]) -> list[dict[str, Any]]:
        agent = ctx.agent("talker", model=model, history=history)
        await agent.run("and?")
        return list(agent.history())

    first = await agents.run(talk, [])
    second = await agents.run(talk, first.output)
    assert [one["kind"] for one in second.output] == ["request", "response"] * 2, second.error
    assert len(model.requests[-1]) == 3


async def test_another_question_at_the_same_place_is_another_turn(agents: World) -> None:
    questions = ["what?", "why?"]
    hold = asyncio.Event()

    class Holding(ScriptedModel):
        async def request(self, *args: Any, **options: Any) -> ModelResponse:
            if len(self.requests) == 1:
                hold.set()
                await asyncio.sleep(60)
            return await super().request(*args, **options)

    model = Holding("one", "two")

    @procedure
    async def talk(ctx: Context[None], given: str) -> str:
        agent = ctx.agent("talker", model=model)
        await agent.run(questions[ctx.attempt - 1])
        return str(await agent.run("again"))

    working = await agents.worker(talk)
    await agents.start(talk, "")
    await hold.wait()
    await agents.kill(working)
    working = await agents.worker(talk)
    ended = await agents.settled()
    await agents.kill(working)
    assert ended.status == "diverged"
    assert "turn talker with another input" in str(ended.divergence)


async def test_outside_of_a_run_a_durable_agent_is_the_agent_itself() -> None:
    agent = durable(Agent(ScriptedModel(call("note", text="a"), "done"), name="plain"))

    @agent.wrapped.tool_plain  # type: ignore[attr-defined, untyped-decorator]
    def note(text: str) -> str:
        return text

    assert (await agent.run("hello")).output == "done"
    with pytest.raises(ProcedureInvalid, match="in a run only"):
        await durable(Agent(ScriptedModel("x"), name="plain"), tools=["bank.charge"]).run("hello")
    with pytest.raises(ProcedureInvalid, match="under its name"):
        durable(Agent(ScriptedModel("x")))


async def test_a_tool_that_fails_fails_the_run_as_any_step_does(agents: World) -> None:
    def broken() -> str:
        raise RuntimeError("no paper")

    @procedure
    async def research(ctx: Context[None], question: str) -> str:
        agent = ctx.agent("researcher", model=ScriptedModel(call("broken")), tools=[broken])
        try:
            return str(await agent.run(question))
        except StepError as error:
            return f"{error.type}: {error.message}"

    ended = await agents.run(research, "what?")
    assert ended.output == "RuntimeError: no paper", ended.error


def test_a_recorded_answer_is_read_back_as_it_was() -> None:
    said = ModelResponse(parts=[call("note", a=None, b=[{"c": None}])], model_name="m")
    assert (
        RESPONSE.validate_python(json.loads(json.dumps(RESPONSE.dump_python(said, mode="json", exclude_none=True))))
        == said
    )
