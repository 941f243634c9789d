"""Values and state through a real worker and a real gateway: what is recorded, what a replay gets, what others see."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from tests.patience import HANG_S
from tests.runs.world import new_id
from tests.sdk.gateways import Gateways
from tests.sdk.workers import sdk_working
from tga_sdk import Artifact, AsyncClient, Context, Secret, procedure
from tga_sdk.errors import ValueInvalid

BODIES: Counter[str] = Counter()
"""How often a body ran, by run: a program would not know."""
SEEN: dict[str, list[Any]] = {}
"""What the program got, by run, once in each attempt."""


def seen(run_id: str, value: Any) -> Any:
    SEEN.setdefault(run_id, []).append(value)
    return value


class Cell(BaseModel):
    tier: Literal["auto", "inline", "artifact", "event", "transient"] = "auto"
    resume: Literal["snapshot", "recompute"] = "snapshot"


class Made(BaseModel):
    """What a body returns: another one each time it runs."""

    body: int
    text: str = "ä"


@procedure(name="one_cell")
async def one_cell(ctx: Context[None], input: Cell) -> Made | None:
    async def make() -> Made:
        BODIES[ctx.run_id] += 1
        return Made(body=BODIES[ctx.run_id])

    made = await ctx.step("make", make, tier=input.tier, resume=input.resume)
    seen(ctx.run_id, made)
    await ctx.signal("go")
    return made


@procedure(name="defaults")
async def defaults(ctx: Context[None], input: dict[str, Any]) -> Any:
    def make() -> dict[str, Any]:
        BODIES[ctx.run_id] += 1
        return {"size": input["size"], "text": "x" * input["size"]}

    made = await ctx.step("make", make)
    seen(ctx.run_id, made)
    await ctx.signal("go")
    return len(made["text"])


@procedure(name="kinds")
async def kinds(ctx: Context[None], input: str) -> Any:
    def make() -> Any:
        BODIES[ctx.run_id] += 1
        return {
            "bytes": b"\x00\xff",
            "report": Artifact("# Report", "text/markdown"),
            "secret": Secret({"pin": "correct horse"}),
            "connection": contextlib.ExitStack(),
        }[input]

    made = await ctx.step("make", make)
    seen(ctx.run_id, made)
    await ctx.signal("go")

    def use(given: Any) -> str:
        return repr(given)

    return await ctx.step("use", use, made)


@procedure(name="shows")
async def shows(ctx: Context[None], input: None) -> Any:
    await ctx.emit({"progress": 50})
    got = await ctx.step("tell", lambda: {"token": "hi"}, tier="event")
    seen(ctx.run_id, got)
    await ctx.signal("go")
    return got


class Line(BaseModel):
    name: str
    amount: int = 0


class Order(BaseModel):
    lines: list[Line] = []
    by_name: dict[str, Line] = {}
    stage: Literal["new", "paid"] = "new"
    total: Annotated[int, Field(ge=0)] = 0


@procedure(name="orders", state=Order)
async def orders(ctx: Context[Order], input: list[str]) -> int:
    lines = ctx.state.lines  # the same list in every attempt, whoever changed it

    async def add(name: str) -> None:
        BODIES[ctx.run_id] += 1
        ctx.state.lines.append(Line(name=name))
        ctx.state.by_name[name] = ctx.state.lines[-1]

    for name in input:
        await ctx.step("add", add, name)
        seen(ctx.run_id, [line.name for line in lines])

    async def fail() -> None:
        BODIES[ctx.run_id] += 1
        ctx.state.lines.clear()
        raise LookupError("no")

    ctx.state.lines[0].amount = 7
    with contextlib.suppress(Exception):
        await ctx.step("fail", fail)
    await ctx.checkpoint()
    await ctx.signal("go")
    ctx.state.stage = "paid"
    ctx.state.total = sum(line.amount for line in lines)
    return ctx.state.total


@procedure(name="wrong_state", state=Order)
async def wrong_state(ctx: Context[Order], input: str) -> str:
    def change() -> None:
        if input == "type":
            ctx.state.lines.append({"name": "a", "amount": "many"})  # type: ignore[arg-type]
        elif input == "enum":
            ctx.state.stage = "lost"  # type: ignore[assignment]
        elif input == "bound":
            ctx.state.total -= 1
        else:
            ctx.state.nothing = 1  # type: ignore[attr-defined]

    try:
        change()
    except ValueInvalid as error:
        return error.where
    return "not refused"


@procedure(name="wrong_output")
async def wrong_output(ctx: Context[None], input: Line) -> list[Line]:
    return [input, {"name": 5}]  # type: ignore[list-item]


@procedure(name="sub")
async def sub(ctx: Context[None], input: int) -> list[int]:
    async def make() -> int:
        BODIES[ctx.run_id] += 1
        return BODIES[ctx.run_id]

    made: list[int] = [await ctx.step("make", make), await ctx.step("make", make), input]
    seen(f"{ctx.run_id} inside", made)
    return made


@procedure(name="around")
async def around(ctx: Context[None], input: int) -> list[int]:
    found: list[int] = await ctx.call(sub, input)
    seen(ctx.run_id, found)
    await ctx.signal("go")
    return found


class Counted(BaseModel):
    number: int = 0


@procedure(name="saves")
async def saves(ctx: Context[Counted], input: None) -> int:
    ctx.state.number = 1
    ctx.log("so far")
    await ctx.checkpoint()
    seen(ctx.run_id, ctx.state.number)
    ctx.state.number = 2
    await ctx.signal("go")
    return ctx.state.number


PROCEDURES = [one_cell, defaults, kinds, shows, orders, wrong_state, wrong_output, sub, around, saves]


@pytest.fixture
async def client(gateways: Gateways) -> AsyncIterator[AsyncClient]:
    """A client, while a worker works."""
    async with (
        sdk_working(gateways.world, gateways.direct_url, procedures=PROCEDURES),
        AsyncClient(gateways.direct_url, gateways.world.keys["agent"]) as made,
    ):
        yield made


async def until_waiting(client: AsyncClient, run_id: str) -> None:
    """The worker has left the run: what comes next is a replay."""
    async with asyncio.timeout(HANG_S):
        while (run := await client.status(run_id)).status != "waiting":
            assert not run.has_ended, run
            await asyncio.sleep(0.02)


async def through_a_replay(client: AsyncClient, program: Any, given: Any) -> tuple[str, Any]:
    run_id = new_id()
    await client.start(program, given, run_id)
    await until_waiting(client, run_id)
    await client.signal(run_id, "go")
    run = await client.wait(run_id, timeout=HANG_S)
    assert run.status == "completed", run
    return run_id, run


async def value_at(client: AsyncClient, run_id: str, path: str) -> Any:
    records = await client.checkpoint(run_id, path)
    return next(one["value"] for one in records if one["artifact_type"] == "run_checkpoint")


CELLS = [
    (tier, resume)
    for tier in ("inline", "artifact", "event", "transient")
    for resume in ("snapshot", "recompute")
    if (tier, resume) != ("transient", "snapshot")
]


@pytest.mark.parametrize(("tier", "resume"), CELLS, ids=[f"{tier}-{resume}" for tier, resume in CELLS])
async def test_cell(client: AsyncClient, tier: str, resume: str) -> None:
    run_id, _ = await through_a_replay(client, one_cell, {"tier": tier, "resume": resume})
    result = await client.result(run_id, Made | None)
    bodies = 1 if resume == "snapshot" else 2
    assert BODIES[run_id] == bodies
    recorded = await value_at(client, run_id, "1")
    assert recorded["tier"] == tier
    if tier == "event":
        assert SEEN[run_id] == [None, None]
        assert result is None
        assert recorded["value"] == {"body": 1, "text": "ä"}
        return
    assert SEEN[run_id] == [Made(body=1), Made(body=bodies)]
    assert result == Made(body=bodies)
    if tier == "inline":
        assert recorded["value"] == {"body": 1, "text": "ä"}
    if tier == "artifact":
        assert recorded["ref"]["serializer"] == "pydantic"
    if tier == "transient":
        assert recorded == {"tier": "transient"}


async def test_transient_snapshot_is_refused(client: AsyncClient) -> None:
    run_id = new_id()
    await client.start(one_cell, {"tier": "transient", "resume": "snapshot"}, run_id)
    run = await client.wait(run_id, timeout=HANG_S)
    assert run.status == "failed"
    assert run.error is not None
    assert "resume='recompute'" in run.error["message"]
    assert BODIES[run_id] == 0


async def test_defaults(client: AsyncClient) -> None:
    run_id, _ = await through_a_replay(client, defaults, {"size": 100})
    assert BODIES[run_id] == 1
    assert (await value_at(client, run_id, "1"))["tier"] == "inline"
    assert SEEN[run_id][0] == SEEN[run_id][1] == {"size": 100, "text": "x" * 100}


async def test_auto_goes_to_artifact(client: AsyncClient) -> None:
    run_id, _ = await through_a_replay(client, defaults, {"size": 40_000})
    assert BODIES[run_id] == 1
    recorded = await value_at(client, run_id, "1")
    assert recorded["tier"] == "artifact"
    assert recorded["ref"]["size_bytes"] == len(
        json.dumps({"size": 40_000, "text": "x" * 40_000}, separators=(",", ":"))
    )
    assert SEEN[run_id][0] == SEEN[run_id][1] == {"size": 40_000, "text": "x" * 40_000}
    assert await client.result(run_id, int) == 40_000


@pytest.mark.parametrize(
    ("kind", "got", "serializer"), [("bytes", b"\x00\xff", "bytes"), ("report", "# Report", "text")]
)
async def test_bytes_and_artifacts(client: AsyncClient, kind: str, got: Any, serializer: str) -> None:
    run_id, _ = await through_a_replay(client, kinds, kind)
    assert BODIES[run_id] == 1
    assert SEEN[run_id] == [got, got]
    recorded = await value_at(client, run_id, "1")
    assert (recorded["tier"], recorded["ref"]["serializer"]) == ("artifact", serializer)
    assert await client.result(run_id) == repr(got)


async def test_a_secret_is_for_workers_alone(client: AsyncClient, gateways: Gateways) -> None:
    run_id, run = await through_a_replay(client, kinds, "secret")
    assert BODIES[run_id] == 1
    assert [one.value for one in SEEN[run_id]] == [{"pin": "correct horse"}, {"pin": "correct horse"}]
    assert await client.result(run_id) == "Secret(...)"
    shown = json.dumps([await client.checkpoints(run_id), (await client.state(run_id)).state, repr(run)], default=str)
    assert "correct horse" not in shown
    assert "correct horse" not in json.dumps(await gateways.world.journal(run_id), default=str)


async def test_event_is_never_a_value(client: AsyncClient) -> None:
    run_id, _ = await through_a_replay(client, shows, None)
    assert SEEN[run_id] == [None, None]
    assert await client.result(run_id) is None
    shown = [
        one["value"] for one in await client.checkpoints(run_id) if (one.get("value") or {}).get("tier") == "event"
    ]
    assert shown == [{"tier": "event", "value": {"progress": 50}}, {"tier": "event", "value": {"token": "hi"}}]


async def test_unserialisable_says_what_to_do(client: AsyncClient) -> None:
    run_id = new_id()
    await client.start(kinds, "connection", run_id)
    run = await client.wait(run_id, timeout=HANG_S)
    assert run.status == "failed"
    assert run.error is not None
    for said in ("contextlib.ExitStack", "type=", "tier='transient', resume='recompute'"):
        assert said in run.error["message"]


@pytest.mark.parametrize(
    ("how", "where"),
    [
        ("type", "state.lines[0].amount"),
        ("enum", "state.stage"),
        ("bound", "state.total"),
        ("unknown", "state.nothing"),
    ],
)
async def test_wrong_field_is_named(client: AsyncClient, how: str, where: str) -> None:
    run_id = new_id()
    await client.start(wrong_state, how, run_id)
    assert await client.result(run_id, timeout=HANG_S) == where
    assert (await client.state(run_id)).state in ({}, Order().model_dump(mode="json"))


async def test_wrong_field_is_named_in_an_output(client: AsyncClient) -> None:
    run_id = new_id()
    await client.start(wrong_output, Line(name="a"), run_id)
    run = await client.wait(run_id, timeout=HANG_S)
    assert run.status == "failed"
    assert run.error is not None
    assert "output[1].name" in run.error["message"]


async def test_state_is_durable_with_its_checkpoint(client: AsyncClient) -> None:
    run_id = new_id()
    await client.start(orders, ["a", "b"], run_id)
    await until_waiting(client, run_id)
    line_a, line_b = {"amount": 0, "name": "a"}, {"amount": 0, "name": "b"}
    before = {"lines": [{**line_a, "amount": 7}, line_b], "by_name": {"a": line_a, "b": line_b}, "stage": "new"}
    assert (await client.state(run_id)).state == {**before, "total": 0}
    first = next(one for one in await client.checkpoints(run_id) if one.get("path") == "1")
    at_first = {"lines": [line_a], "by_name": {"a": line_a}, "stage": "new", "total": 0}
    assert (await client.state(run_id, at=first["sequence_number"])).state == at_first
    second = next(one for one in await client.checkpoints(run_id) if one.get("path") == "2")
    assert second["state_change"] == [
        {"op": "set", "at": "/lines/-", "to": line_b},
        {"op": "set", "at": "/by_name/b", "to": line_b},
    ]
    await client.signal(run_id, "go")
    assert await client.result(run_id, int, timeout=HANG_S) == 7
    assert (await client.state(run_id)).state == {**before, "stage": "paid", "total": 7}
    assert BODIES[run_id] == 3
    attempts = len(SEEN[run_id]) // 2  # two; more on a machine so slow that the worker lost its lease
    assert attempts >= 2
    assert SEEN[run_id] == [["a"], ["a", "b"]] * attempts


async def test_sub_procedure_is_one_result(client: AsyncClient) -> None:
    """Once it has ended a replay takes what it returned, and runs nothing of it; its operations stand inside it."""
    run_id, run = await through_a_replay(client, around, 7)
    assert run.output["value"] == [1, 2, 7]
    assert BODIES[run_id] == 2
    assert len(SEEN[f"{run_id} inside"]) == 1, "a sub-procedure that had ended was run again"
    assert SEEN[run_id] == [[1, 2, 7]] * len(SEEN[run_id])
    ended = [one["path"] for one in await client.checkpoints(run_id) if one["artifact_type"] == "run_checkpoint"]
    assert ended == ["1.1", "1.2", "1"]


async def test_checkpoint_goes_on(client: AsyncClient) -> None:
    """It records the state and the log so far; the run is not suspended by it."""
    run_id = new_id()
    await client.start(saves, None, run_id)
    await until_waiting(client, run_id)
    records = await client.checkpoints(run_id)
    (saved,) = [one for one in records if one.get("kind") == "checkpoint"]
    assert (saved["path"], [line["text"] for line in saved["logs"]]) == ("1", ["so far"])
    assert (await client.state(run_id, at=saved["sequence_number"])).state == {"number": 1}
    kinds = [one["artifact_type"] for one in records]
    assert "run_suspension" not in kinds[: kinds.index("run_checkpoint") + 1]
    assert kinds.count("run_suspension") == 1, "what suspended the run was its wait for a signal"
    await client.signal(run_id, "go")
    assert await client.result(run_id, int, timeout=HANG_S) == 2
    assert set(SEEN[run_id]) == {1}
