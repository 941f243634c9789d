"""A procedure that is called inline and declares a state has its own: apart from its caller's, in the journal too."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import uuid
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.conftest import IS_SOAK
from tests.sdk.workers import memory_working
from tga_sdk import Context, StepError, SyncContext, ValueInvalid, procedure
from tga_sdk.testing import MemoryGateway, crash_everywhere_async

SHARE = 1.0 if IS_SOAK else 0.15  # of the boundaries


class Log(BaseModel):
    log: list[str] = []


class Needed(BaseModel):
    name: str
    count: int = 0


class Made(BaseModel):
    token: str = Field(default_factory=lambda: str(uuid.uuid4()))
    seen: list[str] = []


@procedure(name="inline-inner")
async def inner(ctx: Context[Log], input: str) -> list[str]:
    ctx.state.log.append(f"inner {input}")
    ctx.state.log.append(await ctx.step("inside", lambda: f"step {input}"))
    if input == "bad":
        raise LookupError(input)
    await ctx.checkpoint()
    return list(ctx.state.log)


@procedure(name="inline-needed")
def needed(ctx: SyncContext[Needed], input: int) -> int:
    ctx.state.name = "given"
    for number in range(input):
        ctx.state.count += ctx.step("one", lambda number=number: number, type=int)
    return ctx.state.count


@procedure(name="inline-made")
async def made(ctx: Context[Made], input: Any) -> bool:
    before = ctx.state.token
    ctx.state.seen.append(await ctx.step("look", lambda: "seen"))
    return ctx.state.token == before and len(before) == 36


@procedure(name="inline-middle")
async def middle(ctx: Context[Log], input: str) -> list[str]:
    """Calls another inside, in the order of the program and in branches of a gather."""
    ctx.state.log.append("middle")
    found = await ctx.call(inner, input)

    async def branch(name: str) -> list[str]:
        got: list[str] = await ctx.call(inner, name)
        ctx.state.log.append(f"branch {name}")
        return got

    both = await ctx.gather(lambda: branch("left"), lambda: branch("right"))
    ctx.state.log.append("after")
    await ctx.checkpoint()
    return [*ctx.state.log, *found, *itertools.chain(*both)]


turns: list[int] = []


def turn() -> None:
    turns.append(1)
    if len(turns) == 1:
        raise OSError("once more")


@procedure(name="inline-outer")
async def outer(ctx: Context[Log], input: Any) -> dict[str, Any]:
    ctx.state.log.append("outer")
    result: dict[str, Any] = {"middle": await ctx.call(middle, "a")}
    try:
        await ctx.call(inner, "bad")
    except StepError as error:
        ctx.state.log.append(error.type)
    result["needed"] = await ctx.call(needed, 4)
    result["made"] = await ctx.call(made)

    async def fails_once() -> list[str]:
        got: list[str] = await ctx.call(inner, "again")
        ctx.state.log.append("tried")
        await ctx.step("turn", turn)
        return got

    result["again"] = await ctx.step("retried", fails_once, retry=1)
    result["log"] = list(ctx.state.log)
    return result


INNER = {name: [f"inner {name}", f"step {name}"] for name in ("a", "left", "right", "again")}
RESULT = {
    "middle": ["middle", "branch left", "branch right", "after", *INNER["a"], *INNER["left"], *INNER["right"]],
    "needed": 0 + 1 + 2 + 3,
    "made": True,
    "again": INNER["again"],
    "log": ["outer", "LookupError", "tried"],
}


def chance() -> random.Random:
    seed = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={seed}")
    return random.Random(seed)


async def journal_of(program: Any, given: Any) -> tuple[MemoryGateway, list[dict[str, Any]], list[dict[str, Any]]]:
    """The journal of one run, and the state after each of its entries."""
    gateway = MemoryGateway()
    async with memory_working(gateway, program) as client:
        await client.start(program.name, given, run_id="r-1")
        await client.result("r-1", timeout=60)
        records = [dict(one) for one in await client.checkpoints("r-1")]
        states = [(await client.state("r-1", at=one["sequence_number"])).state for one in records]
    return gateway, records, states


async def test_each_has_its_own_whatever_crashes() -> None:
    rng = chance()
    tried = await crash_everywhere_async(outer, None, ignore=lambda _: rng.random() > SHARE, reset=turns.clear)
    assert tried.calm.output["value"] == RESULT
    assert tried.calm.document == {"log": RESULT["log"]}


async def test_time_travel_shows_both() -> None:
    turns.clear()
    _, records, states = await journal_of(outer, None)
    at = {one["path"]: state for one, state in zip(records, states, strict=True) if "path" in one}
    assert at["1.1.1"] == {
        "log": ["outer"],
        "@call:1": {"log": ["middle"]},
        "@call:1.1": {"log": ["inner a"]},
    }
    assert at["1.1"] == {"log": ["outer"], "@call:1": {"log": ["middle"]}}  # the inner one is over
    assert at["1.2"]["@call:1"] == {"log": ["middle", "branch left", "branch right"]}
    assert at["1"] == {"log": ["outer"]}
    assert at["2"] == {"log": ["outer"], "@call:2": {"log": ["inner bad"]}}  # it failed: for whoever tries it again
    assert at["3.1"] == {"log": ["outer", "LookupError"], "@call:3": {"name": "given", "count": 0}}
    assert states[-1] == {"log": RESULT["log"]}


async def test_a_run_that_failed_in_a_call_goes_on_with_the_state_of_the_call() -> None:
    broken = [True]

    @procedure(name="inline-part")
    async def part(ctx: Context[Log], input: Any) -> list[str]:
        ctx.state.log.append("first")
        await ctx.checkpoint()
        ctx.state.log.append("second")

        def body() -> str:
            if broken:
                raise OSError("broken")
            return "third"

        ctx.state.log.append(await ctx.step("breaks", body))
        return list(ctx.state.log)

    @procedure(name="inline-whole")
    async def whole(ctx: Context[Log], input: Any) -> list[str]:
        ctx.state.log.append("whole")
        return [*await ctx.call(part), *ctx.state.log]

    gateway = MemoryGateway()
    async with memory_working(gateway, whole) as client:
        await client.start("inline-whole", None, run_id="r-1")
        with pytest.raises(Exception, match="broken"):
            await client.result("r-1", timeout=60)
        assert gateway.state("r-1") == {"log": ["whole"], "@call:1": {"log": ["first"]}}
        broken.clear()
        await client.retry("r-1")
        assert await client.result("r-1", timeout=60) == ["first", "second", "third", "whole"]
    assert gateway.state("r-1") == {"log": ["whole"]}


async def test_a_fork_changes_the_state_of_a_call_that_runs() -> None:
    @procedure(name="inline-forked")
    async def part(ctx: Context[Log], input: Any) -> list[str]:
        ctx.state.log.append("part")
        await ctx.checkpoint()
        await ctx.signal("go")
        return list(ctx.state.log)

    @procedure(name="inline-forking")
    async def whole(ctx: Context[Log], input: Any) -> list[Any]:
        ctx.state.log.append("whole")
        return [await ctx.call(part), list(ctx.state.log)]

    gateway = MemoryGateway()
    async with memory_working(gateway, whole) as client:
        await client.start("inline-forking", None, run_id="r-1")
        await gateway.until(lambda: gateway.engine.runs["r-1"].state == "WAITING")
        at = next(one["sequence_number"] for one in gateway.journal("r-1") if one.get("path") == "1.1")
        changes = [
            {"op": "set", "at": "/@call:1/log/-", "to": "forked part"},
            {"op": "set", "at": "/log/-", "to": "forked whole"},
        ]
        await client.fork("r-1", at=at, state_change=changes, new_id="r-2")
        for run_id in ("r-1", "r-2"):
            await client.signal(run_id, "go")
        assert await client.result("r-1", timeout=60) == [["part"], ["whole"]]
        assert await client.result("r-2", timeout=60) == [["part", "forked part"], ["whole", "forked whole"]]


async def test_a_name_that_is_for_calls_is_refused() -> None:
    @procedure(name="inline-reserved")
    async def reserved(ctx: Context[Any], input: Any) -> str:
        ctx.state["@call:1"] = 1
        try:
            await ctx.checkpoint()
        except ValueInvalid as error:
            return str(error)
        return "taken"

    _, records, _ = await journal_of(reserved, None)
    assert "begins with @call:" in records[-1]["output"]["value"]


# Random trees of calls, against what plain Python makes of them.

Node = dict[str, Any]


def random_node(rng: random.Random, depth: int = 0) -> Node:
    kinds = ["change", "step", "checkpoint", "fail"] + ([] if depth > 2 else ["call", "call", "gather", "step_around"])
    parts: list[Any] = []
    for number in range(rng.randrange(1, 4)):
        kind = rng.choice(kinds)
        if kind == "call":
            parts.append([kind, random_node(rng, depth + 1)])
        elif kind == "gather":
            parts.append([kind, [random_node(rng, depth + 2) for _ in range(2)]])
        elif kind == "step_around":
            parts.append([kind, random_node(rng, depth + 2)])
        else:
            parts.append([kind, f"{depth}.{number}.{rng.randrange(100)}"])
    return {"parts": parts, "raises": depth > 0 and rng.random() < 0.2}


def expected_log(node: Node) -> list[Any]:
    log: list[Any] = []
    for kind, said in node["parts"]:
        if kind == "change":
            log.append(said)
        elif kind in ("call", "step_around"):
            log.append("failed" if said["raises"] else expected_log(said))
        elif kind == "gather":
            for one in said:
                log.append("failed" if one["raises"] else expected_log(one))
    return log


class Tree(BaseModel):
    log: list[Any] = []


@procedure(name="inline-tree")
async def tree(ctx: Context[Tree], input: Node) -> list[Any]:
    async def called(node: Node) -> None:
        try:
            log: Any = await ctx.call(tree, node)
        except StepError:
            log = "failed"
        ctx.state.log.append(log)

    for kind, said in input["parts"]:
        if kind == "change":
            ctx.state.log.append(said)
        elif kind == "checkpoint":
            await ctx.checkpoint()
        elif kind == "call":
            await called(said)
        elif kind == "step_around":
            await ctx.step("around", lambda said=said: called(said), type=None)
        elif kind == "gather":
            await ctx.gather(*[lambda one=one: called(one) for one in said])
        elif kind == "fail":
            with contextlib.suppress(StepError):
                await ctx.step("fails", _fail)
        else:
            await ctx.step("step", lambda: None)
    if input["raises"]:
        raise ValueError("as the tree says")
    return list(ctx.state.log)


def _fail() -> None:
    raise OSError("as it is meant")


async def test_random_trees_of_calls() -> None:
    rng = chance()
    for _ in range(12 if IS_SOAK else 2):
        node = random_node(rng)
        tried = await crash_everywhere_async(tree, node, ignore=lambda _: rng.random() > SHARE / 2)
        assert tried.calm.output["value"] == expected_log(node), node
        document = {name: value for name, value in tried.calm.document.items() if not name.startswith("@call:")}
        assert document == {"log": expected_log(node)}, node
