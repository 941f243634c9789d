"""What a step gives has the type of what its body returns; of an artifact, the type of the value in it."""

from __future__ import annotations

from typing import assert_type

from pydantic import BaseModel

from tga_sdk import Artifact, Context, Secret, SyncContext


class Order(BaseModel):
    lines: list[str] = []


async def load(order_id: int) -> Order:
    return Order(lines=[str(order_id)])


def count(order: Order) -> int:
    return len(order.lines)


async def write() -> Artifact[bytes]:
    return Artifact(b"a", "text/csv")


def draw() -> Artifact[str]:
    return Artifact("<svg/>", "image/svg+xml")


def unlock() -> Secret[str]:
    return Secret("pin")


async def run(ctx: Context[Order]) -> None:
    order = await ctx.step("load", load, 7, retry=2, tier="artifact")
    assert_type(order, Order)
    assert_type(await ctx.step("count", count, order, timeout=1.5), int)
    assert_type(await ctx.step("write", write), bytes)
    assert_type(await ctx.step("draw", draw), str)
    assert_type(await ctx.step("unlock", unlock), Secret[str])
    assert_type(await ctx.step("add", lambda: 1 + 1), int)
    ctx.state.lines.append("a")


def run_in_thread(ctx: SyncContext[Order]) -> None:
    assert_type(ctx.step("count", count, Order(), at_most_once=True), int)
    assert_type(ctx.step("draw", draw), str)
