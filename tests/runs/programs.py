"""Programs that the tests' workers run. Each is deterministic but for what it asks of others."""

from __future__ import annotations

from typing import Any

from tests.runs.worker import Context, Interrupted, Program


async def everything(ctx: Context, given: Any) -> Any:
    """Something of each kind, so that every boundary of a run is crossed at least once."""

    async def begin(inside: Context) -> str:
        inside.change("/log", [])
        return "begun"

    async def outer(inside: Context) -> Any:
        async def first(deep: Context) -> str:
            deep.change("/log/-", "first")
            return "first"

        made = await inside.step("first", first)
        paid = await inside.tool("bank", "charge", {"amount": 1})
        inside.change("/log/-", "outer")
        return [made, sorted(paid)]

    async def branch_a(branch: Context) -> Any:
        paid = await branch.tool("bank", "charge", {"amount": 2})
        await branch.step("note-a", noting("a"))
        return sorted(paid)

    async def branch_b(branch: Context) -> Any:
        answer = await branch.ask("pay?")
        await branch.step("note-b", noting("b"))
        return answer

    async def branch_c(branch: Context) -> Any:
        await branch.sleep(10)
        await branch.step("note-c", noting("c"))
        return "slept"

    results = [await ctx.step("begin", begin), await ctx.step("outer", outer)]
    results.append(await ctx.gather(branch_a, branch_b, branch_c))
    try:
        results.append(await ctx.step("once", returning("once"), at_most_once=True))
    except Interrupted:
        results.append("once")  # as it may have been: what is told is told once, or it is not known
    results.append(await ctx.step("again", returning("again"), resume="recompute"))
    results.append(await ctx.signal("go"))
    results.append(await ctx.child("paying", {"amount": 3}))
    return {"results": results, "log": ctx.state["log"], "given": given}


async def paying(ctx: Context, given: Any) -> Any:
    """A child: one tool call and one step."""
    paid = await ctx.tool("bank", "charge", {"amount": given["amount"]})
    return await ctx.step("told", returning(sorted(paid)))


async def steps(ctx: Context, given: Any) -> Any:
    """So many steps, one after the other."""
    results = []
    for number in range(given["count"]):
        results.append(await ctx.step("step", returning(number)))
    return results


async def calls(ctx: Context, given: Any) -> Any:
    """The same tool with the same arguments, so many times."""
    return [sorted(await ctx.tool("bank", "charge", {"amount": 7})) for _ in range(given["count"])]


async def asks(ctx: Context, given: Any) -> Any:
    before = await ctx.step("before", returning("before"))
    return [before, await ctx.ask("pay?", **(given or {})), await ctx.step("after", returning("after"))]


async def sleeps(ctx: Context, given: Any) -> Any:
    await ctx.sleep(given or 1)
    return await ctx.step("after", returning("after"))


async def fenced(ctx: Context, given: Any) -> Any:
    """One of each that a worker whose lease is over must not do."""
    first = await ctx.step("first", returning("first"))
    try:
        once = await ctx.step("once", returning("once"), at_most_once=True)
    except Interrupted:
        once = "interrupted"
    return [first, once, sorted(await ctx.tool("bank", "charge", {"amount": 9}))]


async def cell(ctx: Context, given: Any) -> Any:
    """One step of this tier and resume, then a wait, so that a replay meets it."""
    value = await ctx.step("valued", returning("value"), tier=given["tier"], resume=given["resume"])
    return [value, await ctx.ask("go-on")]


async def kept(ctx: Context, given: Any) -> Any:
    """An artifact, a wait, and what became of the artifact."""
    before = await ctx.step("kept", returning("value"), tier="artifact")
    return [before, await ctx.ask("go-on"), await ctx.step("same", returning("value"), tier="artifact")]


async def breaks(ctx: Context, given: Any) -> Any:
    """Its second step fails when it is tried for the first time, and the run with it."""

    async def break_once(inside: Context) -> str:
        if inside.attempt.journal.try_of(inside.scope.address) == 1:
            raise ValueError("no such order")
        inside.change("/mended", True)
        return "mended"

    async def begin(inside: Context) -> str:
        inside.change("/begun", True)
        return "begun"

    return [
        await ctx.step("begin", begin),
        await ctx.step("break", break_once),
        await ctx.step("end", returning("end")),
    ]


def returning(value: Any) -> Any:
    async def body(_: Context) -> Any:
        return value

    return body


def noting(value: str) -> Any:
    async def body(inside: Context) -> str:
        inside.change("/log/-", value)
        return value

    return body


PROGRAMS: dict[str, Program] = {
    "everything": everything,
    "paying": paying,
    "steps": steps,
    "calls": calls,
    "asks": asks,
    "sleeps": sleeps,
    "fenced": fenced,
    "cell": cell,
    "kept": kept,
    "breaks": breaks,
}
