"""Flows that the tests serve with real worker processes:

    FLOW_NOTES=folder TGA_URL=... TGA_API_KEY=... tga-worker tests/sdk/flow_programs.py

Each body notes that it runs. A step named in `waits_at` of its data waits until a file of the run's name is there.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from pydantic_ai import Agent

from tga_sdk import (
    Context,
    DeleteOnSuccess,
    Event,
    Flow,
    Retry,
    Schedule,
    Step,
    SyncContext,
    agent,
    call_tool,
    llm,
)
from tga_sdk.testing.models import ScriptedModel, call

FOLDER = Path(os.environ.get("FLOW_NOTES", "."))
SOON = Retry(2, first=0.01, longest=0.01)


class Order(BaseModel):
    amount: int
    waits_at: str | None = None
    fails_at: str | None = None
    charge: dict[str, Any] | None = None
    told: list[str] = []


class Wrong(Exception):
    pass


def note(step: str, run_id: str, key: str, attempt: int) -> None:
    with (FOLDER / "bodies").open("a") as notes:
        notes.write(json.dumps({"step": step, "run_id": run_id, "key": key, "attempt": attempt}) + "\n")


def may_go_on(run_id: str) -> bool:
    return (FOLDER / f"go-{run_id}").exists()


async def tell(ctx: Context[Any], order: Order, step: str) -> Order:
    note(step, ctx.run_id, ctx.key, ctx.attempt)
    while order.waits_at == step and not may_go_on(ctx.run_id):
        await asyncio.sleep(0.01)
    if order.fails_at == step and not may_go_on(ctx.run_id):
        raise Wrong(f"{step} was told to fail")
    return order.model_copy(update={"told": [*order.told, step]})


async def plan(ctx: Context[Any], order: Order) -> Order:
    return await tell(ctx, order, "plan")


async def charge(ctx: Context[Any], order: Order) -> Order:
    paid = await ctx.tool("bank", "charge", {"amount": order.amount})
    return (await tell(ctx, order, "charge")).model_copy(update={"charge": paid})


def ship(ctx: SyncContext[Any], order: Order) -> None:
    """A plain function, which changes what it was given."""
    note("ship", ctx.run_id, ctx.key, ctx.attempt)
    while order.waits_at == "ship" and not may_go_on(ctx.run_id):
        time.sleep(0.01)
    order.told.append("ship")


async def never(ctx: Context[Any], order: Order) -> Order:
    return await tell(ctx, order, "never")


async def refused(ctx: Context[Any], order: Order) -> Order:
    """The bank says no for certain, as often as the key is new."""
    note("refused", ctx.run_id, ctx.key, ctx.attempt)
    await ctx.tool("bank", "fail", {"status": 422})
    return order


async def sold_out(ctx: Context[Any], order: Order) -> Any:
    return {"amount": "many"}


order_flow = Flow("flow-order", [Step("plan", plan), Step("charge", charge), Step("ship", ship)], data=Order)
other_flow = Flow("flow-other", [Step("plan", plan), Step("charge", charge)], data=Order, trigger=Event("order.placed"))
listening = Flow(
    "flow-listening", [Step("plan", plan), Step("ship", ship)], data=Order, trigger=[Event("order.placed")]
)
retried = Flow("flow-retried", [Step("plan", plan), Step("never", never, retry=0)], data=Order, retry=SOON)
definite = Flow("flow-definite", [Step("refused", refused)], data=Order, retry=Retry(1, first=0.01))
forgotten = Flow("flow-forgotten", [Step("plan", plan), Step("ship", ship)], data=Order, retention=DeleteOnSuccess())
wrong = Flow("flow-wrong", [Step("sold-out", sold_out)], data=Order)
plain = Flow(
    "flow-plain",
    [
        Step("charge", call_tool("bank", "charge", lambda data: {"amount": data["amount"]}, into="charge")),
        Step(
            "balance", call_tool("bank", "balance", {}, into=lambda data, found: {**data, "rich": found["balance"] > 0})
        ),
        Step("count", lambda ctx, data: {**data, "counted": len(data)}),
        Step("again", call_tool("bank", "charge")),
    ],
)
changes = [
    Flow(f"flow-changed-{number}", [Step("plan", plan), Step("charge", charge), Step("ship", ship)], data=Order)
    for number in range(4)
]
changed_0, changed_1, changed_2, changed_3 = changes
asked = ScriptedModel(call("bank.charge", amount=4), "charged 4 for the plan")
comms = Agent(ScriptedModel("Dear customer"), name="comms")
thinking: Flow[Any] = Flow(
    "flow-thinking",
    [
        Step("plan", llm(asked, "Plan a charge of {amount}", into="plan", tools=["bank.charge"])),
        Step("write", agent(comms, lambda data: f"Write about {data['plan']}", into="letter")),
    ],
)
nightly = Flow(
    "flow-nightly", [Step("plan", plan)], data=Order, trigger=Schedule(every=1, input=Order(amount=3), missed="skip")
)
