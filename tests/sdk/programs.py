"""Procedures that the SDK's tests run. Each is deterministic but for what it asks of others."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tga_sdk import Artifact, Context, Interrupted, Retry, StepError, SyncContext, TimedOut, procedure, task


class Given(BaseModel):
    user: int


class Done(BaseModel):
    results: list[Any]
    log: list[str]
    user: int


class Kept(BaseModel):
    log: list[str] = []
    note: str | None = None


def ident(value: str) -> str:
    return value


@procedure(name="sdk-paying")
async def paying(ctx: Context[Any], input: dict[str, int]) -> list[str]:
    """A child: one tool call and one step."""
    paid = await ctx.tool("bank", "charge", {"amount": input["amount"]})
    return await ctx.step("told", lambda: sorted(paid), type=list[str])


@procedure(name="sdk-doubling")
async def doubling(ctx: Context[Any], input: int) -> int:
    return await ctx.step("double", lambda: input * 2, type=int)


@procedure(name="sdk-counting")
async def counting(ctx: Context[Kept], input: int) -> list[str]:
    """Called inline, with a state of its own."""
    ctx.state.log.append("counting")
    for number in range(input):
        ctx.state.log.append(await ctx.step("count", lambda number=number: f"{number}", type=str))
    return list(ctx.state.log)


@procedure(name="sdk-everything")
async def everything(ctx: Context[Kept], input: Given) -> Done:
    """Something of each kind, so that every boundary of a run is crossed at least once."""

    async def outer() -> list[Any]:
        ctx.state.log.append("outer")  # rides with the first operation inside
        made = await ctx.step("first", lambda: "first")
        paid = await ctx.tool("bank", "charge", {"amount": 1})
        ctx.state.log.append("after")
        return [made, sorted(paid)]

    async def branch_a() -> Any:
        paid = await ctx.tool("bank", "charge", {"amount": 2})
        ctx.state.log.append("a")
        await ctx.step("note-a", lambda: "a")
        return sorted(paid)

    async def branch_b() -> bool:
        answer = await ctx.approve("pay?", context={"amount": 2})
        ctx.state.log.append("b")
        return answer

    async def branch_c() -> str:
        await ctx.sleep(0.01)
        ctx.state.log.append("c")
        return await ctx.step("note-c", ident, "slept")

    def missing() -> str:
        raise KeyError("no such order")

    def once() -> str:
        return "once"

    tries = []

    def flaky() -> str:
        tries.append(1)
        if len(tries) < 2:
            raise ConnectionError("not yet")
        return "at last"

    ctx.state.log.append("begun")
    started = await ctx.now()
    results: list[Any] = [await ctx.step("begin", lambda: "begun"), await ctx.step("outer", outer)]
    await ctx.step("drawn", ident, f"{ctx.uuid()} {ctx.random()} {started}")  # another one would be a divergence
    results.append(await ctx.gather(branch_a, branch_b, branch_c))
    try:
        results.append(await ctx.step("once", once, at_most_once=True))
    except Interrupted:
        results.append("once")  # as it may have been: it is not known
    results.append(await ctx.step("again", lambda: "again", resume="recompute"))
    results.append(await ctx.step("flaky", flaky, retry=Retry(9, first=0.001)))
    try:
        await ctx.step("fails", missing)
    except StepError as error:
        results.append(error.type)
    results.append(await ctx.signal("go"))
    results.append(await ctx.call(doubling, 21))
    results.append(await ctx.call(counting, 2))
    results.append(await ctx.call(paying, {"amount": 3}, child=True))
    large: Any = await ctx.step("large", lambda: Artifact(b"x" * 40_000))
    results.append(len(large))
    await ctx.emit({"at": "the end"})
    await ctx.checkpoint()
    ctx.state.note = "ended"
    return Done(results=results, log=list(ctx.state.log), user=input.user)


RESULT = {
    "results": [
        "begun",
        ["first", ["amount", "charge_id"]],
        [["amount", "charge_id"], True, "slept"],
        "once",
        "again",
        "at last",
        "KeyError",
        "gone",
        42,
        ["counting", "0", "1"],
        ["amount", "charge_id"],
        40_000,
    ],
    "log": ["begun", "outer", "after", "a", "b", "c"],
    "user": 7,
}
STATE = {"log": RESULT["log"], "note": "ended"}


@task(name="sdk-tripled")
def tripled(number: int) -> int:
    return number * 3


@procedure(name="sdk-blocking")
def blocking(ctx: SyncContext[Kept], input: int) -> int:
    """A plain function: in a thread, with the same operations."""
    first = ctx.step("first", lambda: input, type=int)
    ctx.state.log.append(f"{first}")
    second = tripled(first)
    paid = ctx.tool("bank", "charge", {"amount": second})
    both = ctx.gather(lambda: ctx.step("left", lambda: 1), lambda: ctx.step("right", lambda: 2))
    return int(first + second + sum(both) + len(paid))


@procedure(name="sdk-steps")
async def steps(ctx: Context[Any], input: int) -> int:
    """So many steps, one after the other."""
    total = 0
    for number in range(input):
        total += await ctx.step("add", lambda number=number: number, type=int)
    return total


@procedure(name="sdk-stubborn")
async def stubborn(ctx: Context[Any], input: Any) -> str:
    """Catches whatever an Exception is, and would go on for ever."""
    for number in range(1_000_000):
        try:
            await ctx.step("turn", lambda number=number: number)
        except Exception:  # noqa: S112
            continue
    return "never"


@procedure(name="sdk-inner-gather")
async def inner_gather(ctx: Context[Any], input: Any) -> list[Any]:
    """One branch waits for a person; the other goes on after branches of its own."""

    async def waits() -> bool:
        return await ctx.approve("go on?")

    async def goes_on() -> str:
        await ctx.gather(lambda: ctx.step("left", lambda: 1), lambda: ctx.step("right", lambda: 2))
        return await ctx.step("after", lambda: "after")

    return await ctx.gather(waits, goes_on)


@procedure(name="sdk-half-waits")
async def half_waits(ctx: Context[Any], input: Any) -> list[Any]:
    """One branch waits for a person, the other takes one step after the other."""

    async def waits() -> bool:
        return await ctx.approve("enough?")

    async def works() -> int:
        for number in range(1_000_000):
            await ctx.step("turn", lambda number=number: number)
        return 0

    return await ctx.gather(waits, works)


@procedure(name="sdk-hurried")
async def hurried(ctx: Context[Any], input: Any) -> list[Any]:
    """A person decides on its call, and it does not wait for that."""
    try:
        got = await ctx.tool("bank", "refund", {"amount": 5}, timeout=0.05)
    except TimedOut as error:
        got = error.type
    after = await ctx.step("after", lambda: "after")
    return [got, after, await ctx.signal("go")]


PROCEDURES = [hurried, inner_gather, half_waits, paying, doubling, everything, blocking, tripled, steps, stubborn]
