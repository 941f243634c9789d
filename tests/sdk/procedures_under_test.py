"""Procedures that crash_everywhere is tried on: sound ones of every sort, and ones with a mistake planted in them."""

from __future__ import annotations

import random
import time
from typing import Any

from pydantic import BaseModel

from tga_sdk import Context, Interrupted, Retry, StepError, TimedOut, ToolError, procedure
from tga_sdk.testing import ScriptedPeople, ToolFailed

QUICK = Retry(2, first=0.001)


class Order(BaseModel):
    amount: int
    items: list[str] = []


class Progress(BaseModel):
    log: list[str] = []
    total: int = 0


def charge(amount: int) -> dict[str, int]:
    return {"amount": amount}


def refuse(amount: int) -> None:
    raise ToolFailed("no money")


async def slow(amount: int) -> int:
    return amount


TOOLS: dict[str, Any] = {"bank.charge": charge, "bank.refuse": refuse, "bank.slow": slow}


@procedure(name="steps", state=Progress)
async def steps(ctx: Context[Progress], order: Order) -> Progress:
    """Nesting, retries and state."""
    tries: list[int] = []

    async def outer() -> Any:
        ctx.state.log.append("outer")
        inner = await ctx.step("inner", lambda: order.amount + 1)
        tries.append(inner)
        if ctx.state.total == 0 and len(tries) < 2:
            await ctx.step("flaky", failing, retry=0)
        return inner

    async def failing() -> Any:
        raise ValueError("not now")

    ctx.state.total = 0
    found: Any = await ctx.step("outer", outer, retry=QUICK)
    ctx.state.total += found
    for item in order.items:
        ctx.state.log.append(await ctx.step("item", str.upper, item))
    await ctx.checkpoint()
    ctx.log("done")
    ctx.state.log.append("end")
    return Progress(log=list(ctx.state.log), total=ctx.state.total)


@procedure(name="tools")
async def tools(ctx: Context[Any], order: Order) -> list[Any]:
    """Tools that succeed, fail for certain, are tried again, and do not exist."""
    paid = await ctx.tool("bank", "charge", {"amount": order.amount})
    again = await ctx.tool("bank", "charge", {"amount": order.amount})
    slowly = await ctx.tool("bank", "slow", {"amount": 3})
    try:
        await ctx.tool("bank", "refuse", {"amount": 1}, retry=QUICK)
    except ToolError as error:
        why = error.type
    try:
        await ctx.tool("bank", "nothing", {})
    except ToolError as error:
        return [paid, again, slowly, why, error.type]
    return []


@procedure(name="waits")
async def waits(ctx: Context[Any]) -> list[Any]:
    """Questions, sleeps, signals, expiries; answers that come late, or wrong first."""
    approved = await ctx.approve("Ship?", name="ship")
    colour = await ctx.select("Which?", ["red", "blue"], name="colour")
    number = await ctx.input("How many?", type=int, name="many")
    try:
        await ctx.approve("Anybody?", timeout=60, name="nobody")
    except TimedOut as error:
        late = error.type
    default = await ctx.approve("Anybody else?", timeout=60, default=False, name="nobody")
    await ctx.sleep(3600)
    paid = await ctx.signal("paid", type=int)
    return [approved, colour, number, late, default, paid]


def people() -> ScriptedPeople:
    scripted = ScriptedPeople({"ship": True}).answer("colour", "blue", after=7200, wrong=["green", 7])
    return scripted.answer("many", 3).signal("paid", 5, after=10)


@procedure(name="branches", state=Progress)
async def branches(ctx: Context[Progress]) -> list[Any]:
    """Branches with tools, questions, sleeps and state; the slow ones are first."""

    async def asks() -> bool:
        answer = await ctx.approve("Ship?", name="ship")
        await ctx.step("note", note, "asked")
        return answer

    async def pays() -> Any:
        paid = await ctx.tool("bank", "charge", {"amount": 1})
        await ctx.step("note", note, "paid")
        return paid

    async def sleeps() -> str:
        await ctx.sleep(60)
        return await ctx.step("note", note, "slept")

    def note(word: str) -> str:
        ctx.state.log.append(word)
        return word

    found = await ctx.gather(asks, pays, sleeps)
    return [*found, list(ctx.state.log)]


@procedure(name="kid")
async def kid(ctx: Context[Any], order: Order) -> int:
    await ctx.tool("bank", "charge", {"amount": order.amount})
    return await ctx.step("double", lambda: 2 * order.amount)


@procedure(name="family")
async def family(ctx: Context[Any], order: Order) -> list[Any]:
    """A child, an inline sub-procedure, and two children at once."""

    async def one() -> Any:
        return await ctx.call(kid, Order(amount=1), child=True)

    async def other() -> Any:
        return await ctx.call(kid, Order(amount=2), child=True)

    first = await ctx.call(kid, order, child=True)
    second = await ctx.call(kid, order)
    return [first, second, *await ctx.gather(one, other)]


@procedure(name="once")
async def once(ctx: Context[Any]) -> str:
    """A step that runs at most once, and what is computed again."""
    try:
        told = await ctx.step("tell", lambda: "told", at_most_once=True)
    except Interrupted:
        told = "not known"
    again = await ctx.step("again", lambda: "computed", resume="recompute")
    await ctx.tool("bank", "charge", {"amount": 4})
    return f"{told} {again}"


@procedure(name="draws")
async def draws(ctx: Context[Any]) -> list[Any]:
    """Time and chance as a program may have them."""
    at = await ctx.now()
    chance, name = ctx.random(), ctx.uuid()
    await ctx.tool("bank", "charge", {"amount": int(chance * 1000)})
    await ctx.emit({"seen": True})
    is_new = await ctx.patched("second")
    return [at.year > 2000, 0 <= chance < 1, len(str(name)), is_new]


@procedure(name="fails")
async def fails(ctx: Context[Any]) -> None:
    """A run that fails, in the same way after any crash."""
    await ctx.tool("bank", "charge", {"amount": 1})
    try:
        await ctx.step("break", broken)
    except StepError:
        await ctx.tool("bank", "charge", {"amount": 2})
        raise


def broken() -> None:
    raise ValueError("broken")


@procedure(name="large")
async def large(ctx: Context[Any]) -> int:
    """Values that are too large for the journal."""
    text = await ctx.step("text", lambda: "x" * 50_000)
    raw = await ctx.step("raw", lambda: b"bytes")
    return len(text) + len(raw)


# With a mistake in each.


@procedure(name="clocked")
async def clocked(ctx: Context[Any]) -> None:
    await ctx.tool("bank", "charge", {"amount": time.time_ns() % 1_000_000_007})
    await ctx.step("after", lambda: 1)


@procedure(name="counted")
async def counted(ctx: Context[Any]) -> None:
    """The attempt is another one in a replay."""
    await ctx.tool("bank", "charge", {"amount": ctx.attempt})
    await ctx.step("after", lambda: 1)


@procedure(name="chanced")
async def chanced(ctx: Context[Any]) -> float:
    await ctx.step("before", lambda: 1)
    return random.random()


SENT: list[str] = []


@procedure(name="mailing")
async def mailing(ctx: Context[Any]) -> None:
    await ctx.step("mail", lambda: SENT.append("mail"))


@procedure(name="swallowing")
async def swallowing(ctx: Context[Any]) -> str:
    try:
        await ctx.tool("bank", "charge", {"amount": 1})
    except BaseException:
        return "whatever"
    return "paid"


@procedure(name="sets")
async def sets(ctx: Context[Any]) -> None:
    for name in {"red", "green", "blue", "black", "white"}:
        await ctx.step(name, lambda: 1)


# The same procedure before and after a deploy: golden/renamed.json was written by the first.


@procedure(name="renamed")
async def before_the_deploy(ctx: Context[Any], order: Order) -> int:
    planned = await ctx.step("plan", lambda: order.amount)
    await ctx.tool("bank", "charge", {"amount": planned})
    return planned


@procedure(name="renamed")
async def after_the_deploy(ctx: Context[Any], order: Order) -> int:
    planned = await ctx.step("plan", lambda: order.amount)
    await ctx.tool("bank", "slow", {"amount": planned})
    return planned
