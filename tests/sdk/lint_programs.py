"""Programs for the rules of `tga lint`: a comment `# TGA101` at the end of a line says what is to be found there."""

from __future__ import annotations

MARKED = """
from __future__ import annotations
import asyncio
import contextlib
import datetime as dt
import functools
import os
import random as chance
import secrets
import sqlite3
import subprocess
import threading
import time
import uuid
from asyncio import CancelledError, create_task, gather
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime, timezone
from os import environ, getenv
from pathlib import Path
from time import monotonic, sleep as nap, time as clock
from uuid import uuid4

import httpx
import numpy as np
from tga_sdk import Context, Flow, Retry, Step, SyncContext, procedure, task
from tga_sdk import procedure as durable_program

CACHE = {}
SEEN = set()
LIMIT = 3
GENERATOR = chance.Random(7)


def stamp():
    return clock()  # TGA101


def nested_helper():
    return [stamp() for _ in range(2)]


def unused():
    return time.time()


class Prices:
    def read(self, ctx):
        return self.now()

    def now(self):
        return datetime.now(timezone.utc)

    @procedure
    async def method(self, ctx):  # TGA603
        self.now_too()

    def now_too(self):
        return dt.datetime.utcnow()  # TGA101


@procedure(name="clocks")
async def clocks(ctx, input):
    nested_helper()
    a = time.time_ns() + monotonic()  # TGA101 TGA101
    b = [datetime.now() for _ in range(3)]  # TGA101
    c = {x: date.today() for x in "ab"}  # TGA101
    d = dt.datetime.now(dt.timezone.utc)  # TGA101
    e = time.strftime("%Y")  # TGA101
    f = time.strftime("%Y", time.gmtime(0)) + time.ctime(0)
    g = (lambda: time.time())
    h = sorted([1, 2], key=lambda x: time.time())  # TGA101
    i = await ctx.step("i", lambda: time.time())
    j = await ctx.step("j", stamp)
    from time import perf_counter
    k = perf_counter()  # TGA101
    def inner():
        return time.perf_counter()  # TGA101
    l = inner()
    def only_a_step():
        return time.time()
    m = await ctx.step("m", only_a_step)
    n = await ctx.step("n", functools.partial(stamp))
    return await ctx.now()


@procedure
async def shadows(ctx, time):
    datetime = await ctx.now()
    time.time()
    return datetime.now()


@durable_program(name="chances")
async def chances(ctx: Context[dict], input: dict) -> float:
    chance.shuffle(input["a"])  # TGA102
    uuid4(), uuid.uuid1()  # TGA102 TGA102
    secrets.token_hex()  # TGA102
    os.urandom(3)  # TGA102
    np.random.rand()  # TGA102
    chance.Random()  # TGA102
    np.random.default_rng()  # TGA102
    chance.Random(3).random() + np.random.default_rng(7).random() + GENERATOR.random()
    uuid.uuid5(uuid.NAMESPACE_DNS, "x")
    environ["HOME"], os.environ.get("x"), getenv("y")  # TGA103 TGA103 TGA103
    os.getpid()  # TGA103
    hash("a") + id(input)  # TGA105 TGA105
    return ctx.random()


@procedure
def outside(ctx: SyncContext, input):
    open("x")  # TGA104
    Path("x").write_text("y")  # TGA104
    file = Path("x")
    file.exists()  # TGA104
    subprocess.run(["ls"])  # TGA104
    httpx.get("http://x")  # TGA104
    os.path.join("a", "b")
    nap(3)  # TGA107
    ctx.step("read", Path("x").read_text)
    ctx.step("read", lambda: Path("x").read_text())
    return ctx.sleep(3)


@procedure
async def orders(ctx, input):
    names = {1, 2, 3}
    other = names | set(input)
    for name in other:  # TGA106
        await ctx.tool("a", "b", {"x": name})
    a = [x for x in names]  # TGA106
    b = list(frozenset(input))  # TGA106
    c = ",".join({"a", "b"})  # TGA106
    d = [*names]  # TGA106
    e = names.pop()  # TGA106
    f = {x: 1 for x in names.union(input)}  # TGA106
    for number, x in enumerate(names):  # TGA106
        pass
    g = sorted(names), len(names), {x for x in names}, sum(x for x in names), any(x > 1 for x in names), 3 in names
    for x in sorted(other):
        pass
    for key in {"a": 1}:
        pass
    mixed = set(input)
    mixed = [1]
    for x in mixed:
        pass
    await asyncio.sleep(1)  # TGA107
    await asyncio.sleep(0)


@procedure
async def with_parameter(ctx, input: set[str]):
    for x in input:  # TGA106
        await ctx.emit(x)


@procedure
async def names(ctx, input):
    moment = time.time()  # TGA101
    await ctx.step(f"a-{moment}", stamp)  # TGA108
    await ctx.step("a" + str(uuid4()), stamp)  # TGA108
    await ctx.call("x", {}, run_id=str(uuid.uuid4()))  # TGA108
    await ctx.step(f"try-{ctx.attempt}", stamp)  # TGA108
    await ctx.signal(name=f"s{hash(input)}")  # TGA108
    await ctx.step(f"a-{input['id']}-{ctx.uuid()}", stamp)
    now = await ctx.now()
    await ctx.call("x", {}, run_id=f"nightly-{now:%Y}")
    if ctx.attempt > 1:  # TGA109
        return 1
    await ctx.tool("a", "b", {"n": ctx.attempt})  # TGA109
    ctx.log(f"attempt {ctx.attempt}")


@procedure
async def inside(ctx, input):
    async def pay():
        at = time.time()  # TGA110
        await ctx.tool("bank", "pay", {"at": at})
        return time.time()
    await ctx.step("pay", pay)

    async def in_any_order():
        for name in set(input):  # TGA106
            await ctx.tool("a", "b", {"name": name})
        return list(set(input))
    await ctx.step("names", in_any_order)


async def send(ctx, who):
    return await ctx.tool("mail", "send", {"to": who})


@task
async def resized(x):
    return time.time()


@procedure
async def awaits(ctx, input):
    ctx.step("a", stamp)  # TGA201
    x = ctx.now()  # TGA201
    if ctx.approve("?"):  # TGA201
        pass
    y = f"{ctx.now()}"  # TGA201
    z = ctx.tool("a", "b", {})
    await z
    send(ctx, "a")  # TGA201
    resized(1)  # TGA201
    for one in ctx.gather():  # TGA201
        pass
    later = ctx.tool("a", "b", {})
    await ctx.gather(later, ctx.tool("a", "c", {}), send(ctx, "x"))
    ctx.log("x")
    ctx.random()
    await resized(1)
    return await send(ctx, "b")


@procedure
async def together(ctx, input):
    await gather(ctx.tool("a", "b", {}), ctx.now())  # TGA202
    create_task(send(ctx, "a"))  # TGA202
    async with asyncio.TaskGroup() as group:
        group.create_task(send(ctx, "b"))  # TGA202
    await asyncio.to_thread(functools.partial(send, ctx))  # TGA202
    threading.Thread(target=lambda: ctx.log("x"))
    with ThreadPoolExecutor() as pool:
        pool.submit(send, ctx, "a")  # TGA202
    await asyncio.wait_for(ctx.signal("x"), 3)  # TGA203
    async with asyncio.timeout(3):  # TGA203
        await send(ctx, "c")
    async with asyncio.timeout(3):
        pass
    await ctx.gather(*[lambda: send(ctx, one) for one in input])  # TGA204
    await ctx.gather(*(lambda one=one: send(ctx, one) for one in input))
    await ctx.gather(*(functools.partial(send, ctx, one) for one in input))
    branches = []
    for one in input:
        branches.append(lambda: ctx.tool("a", "b", one))  # TGA204
        await ctx.step("now", lambda: one)
    await ctx.gather(*branches)
    await ctx.gather(lambda: send(ctx, clock()))  # TGA101


@procedure
async def errors(ctx, input):
    try:
        await ctx.sleep(1)
    except:  # TGA301
        pass
    try:
        await send(ctx, "a")
    except (ValueError, BaseException) as error:  # TGA301
        ctx.log(str(error))
    try:
        await ctx.sleep(1)
    except CancelledError:  # TGA301
        pass
    try:
        await ctx.sleep(1)
    except BaseException:
        ctx.log("x")
        raise
    try:
        int(input)
    except BaseException:
        pass
    try:
        await ctx.sleep(1)
    except Exception:
        pass
    with contextlib.suppress(BaseException):  # TGA301
        await ctx.sleep(1)
    with contextlib.suppress(ValueError):
        await ctx.sleep(1)
    try:
        await ctx.sleep(1)
    finally:
        return 1  # TGA302


@procedure
async def states(ctx, input):
    global LIMIT
    LIMIT = 4  # TGA401
    CACHE[input] = 1  # TGA401
    SEEN.add(input)  # TGA401
    local = []
    local.append(1)
    ctx.state.done = True
    ctx.state.items.append(1)
    total = 0

    async def count():
        nonlocal total
        total += 1  # TGA402
        local.append(2)  # TGA402
        mine = []
        mine.append(1)
        ctx.state.done = False
        CACHE[input] = 2
        return total

    await ctx.step("count", count)
    await ctx.step("append", lambda: local.append(3))  # TGA402

    def change(given):
        given.append(1)  # TGA402
        return given

    await ctx.step("change", change, local)
    await ctx.step("change", change, [1, 2])


def lines():
    yield 1  # TGA403


def opened():
    return open("x")  # TGA403


def read():
    with open("x") as file:
        return file.read()


@procedure
async def values(ctx, input):
    lock = threading.Lock()
    await ctx.step("lock", read, lock)  # TGA403
    await ctx.step("generator", sum, (x for x in input))  # TGA403
    await ctx.step("lines", lines)
    await ctx.step("opened", opened)
    await ctx.step("read", read)
    books = sqlite3.connect("x")  # TGA104
    await ctx.step("count", lambda: books.execute("x").fetchone())  # TGA403
    client = httpx.AsyncClient()
    async def fetch():
        return (await client.get("http://x")).text  # TGA403
    await ctx.step("fetch", fetch)
    many = map(str, input)
    await ctx.step("many", lambda: list(many))  # TGA403
    await ctx.step("a", read, tier="transient")  # TGA404
    await ctx.step("b", read, tier="transient", resume="snapshot")  # TGA404
    await ctx.step("c", read, tier="transient", resume="recompute")


def score(rows):
    return sum(row * row for row in rows)


@procedure
async def checkpoints(ctx, input):
    total = 0
    for row in input:
        total += score(row)
    await ctx.checkpoint()  # TGA501
    ctx.state.total = total
    await ctx.checkpoint()
    best = np.linalg.norm(input)
    await ctx.checkpoint()  # TGA501
    found = score(input)
    if found:
        await ctx.checkpoint()
    found = await ctx.step("score", score, input)
    await ctx.checkpoint()
    while total > 1:
        total -= 1
    await ctx.checkpoint()  # TGA501
    for row in input:
        total += row
    await ctx.checkpoint()
    if input:
        found = [score(row) for row in input]
        await ctx.checkpoint()  # TGA501


@procedure(name="orders")
async def orders_again(ctx):  # TGA601
    return 1


@procedure(name="orders", version="2")
async def orders_two(ctx):
    return 1


@procedure
async def too_many(ctx, a, b):  # TGA603
    return 1


def plain(ctx):
    return 1


made = procedure(plain)
made_again = procedure(name="plain", version="2")(plain)


async def plan(ctx, data):
    data.at = datetime.now()
    return data


async def charge(ctx, data):
    data.at = datetime.now()  # TGA110
    await ctx.tool("bank", "pay", {"at": str(data.at)})
    return data


flow = Flow("flow", steps=[Step("plan", plan), Step("charge", charge, retry=0), Step("plan", plan)])  # TGA602
"""

GOOD = """
import asyncio
import logging
import time
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID, uuid4

from pydantic import BaseModel, Field

from tga_sdk import Context, Flow, Retry, Secret, Step, SyncContext, ToolError, procedure, task

log = logging.getLogger(__name__)
STARTED = time.time()


class Line(BaseModel):
    sku: str
    amount: int


class Order(BaseModel):
    id: str = Field(default_factory=lambda: str(uuid4()))
    lines: list[Line]
    people: set[str] = set()


class State(BaseModel):
    paid: bool = False
    shipped: list[str] = []


async def fetch_rates() -> dict[str, float]:
    async with asyncio.timeout(10):
        await asyncio.sleep(0.1)
    return {"eur": time.time()}


async def ship(ctx: Context[State], line: Line) -> str:
    tracking = await ctx.tool("depot", "ship", {"sku": line.sku, "key": ctx.key})
    ctx.state.shipped.append(tracking)
    return tracking


def total_of(order: Order) -> int:
    return sum(line.amount for line in order.lines)


@task(retry=2)
def render(order_id: str) -> str:
    with open(f"/tmp/{order_id}", "w") as file:
        file.write(str(datetime.now()))
    return order_id


@procedure(name="order", version="1.2.0", accepts=["1.1.0"], retry=Retry(2))
async def order(ctx: Context[State], input: Order) -> str:
    started = await ctx.now()
    total = total_of(input)
    rates = await ctx.step("rates", fetch_rates, retry=3)
    if total > 100 and not await ctx.approve(f"Pay {total}?", timeout=3600, default=False):
        return "declined"
    for attempt in range(3):
        try:
            await ctx.tool("bank", "pay", {"amount": total, "rate": rates["eur"]})
            ctx.state.paid = True
            break
        except ToolError as error:
            ctx.log(f"attempt {ctx.attempt}: {error}")
            await ctx.sleep(60 * (attempt + 1))
    else:
        raise RuntimeError("the bank refused three times")
    await ctx.gather(*(partial(ship, ctx, line) for line in input.lines))
    await ctx.gather(lambda: ship(ctx, input.lines[0]), lambda: ctx.sleep(1))
    for person in sorted(input.people):
        await ctx.tool("mail", "send", {"to": person})
    deadline = started + timedelta(days=3)
    await ctx.emit({"deadline": deadline.isoformat(), "lucky": ctx.random() > 0.5})
    if await ctx.patched("thanks"):
        await ctx.call(thank, {"order": input.id})
    await ctx.checkpoint()
    names = [line.sku for line in input.lines]
    await ctx.checkpoint()
    return render(",".join(names))


@procedure
def thank(ctx: SyncContext, input: dict) -> None:
    answer = ctx.input("What shall we write?", type=str)
    ctx.step("write", lambda: log.info("%s %s", answer, time.time()))
    ctx.tool("mail", "send", {"text": answer})


@procedure
async def saga(ctx, input):
    undo = []
    try:
        for name in ("flight", "hotel"):
            booked = await ctx.tool(name, "book", {})
            undo.append(partial(ctx.tool, name, "cancel", {"id": booked["id"]}))
        token = await ctx.step("token", lambda: Secret(str(uuid4())))
        return token
    except Exception:
        for compensation in reversed(undo):
            await compensation()
        raise
    finally:
        ctx.log("done")


async def plan(ctx, data):
    data["plan"] = await ctx.tool("planner", "plan", data)
    data["at"] = datetime.now().isoformat()
    return data


flow = Flow("nightly", steps=[Step("plan", plan), Step("send", lambda ctx, data: data)], retry=2)


def main() -> None:
    print(time.time(), uuid4(), open("x"))


if __name__ == "__main__":
    main()
"""
