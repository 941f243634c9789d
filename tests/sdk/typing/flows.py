"""Flows as users declare them: the type of the data goes through."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

from tga_sdk import Context, DeleteOnSuccess, Event, Flow, Retry, Schedule, Step, SyncContext, call_tool


class Order(BaseModel):
    amount: int
    charge_id: str | None = None


async def plan(ctx: Context[Any], order: Order) -> Order:
    return order.model_copy(update={"amount": order.amount + 1})


def ship(ctx: SyncContext[Any], order: Order) -> None:
    order.charge_id = ctx.key


def amount_of(order: Order) -> dict[str, Any]:
    return {"amount": order.amount}


def note(order: Order, answer: Any) -> Order:
    return order.model_copy(update={"charge_id": answer["charge_id"]})


flow: Flow[Order] = Flow(
    "order",
    [
        Step("plan", plan),
        Step("charge", call_tool("bank", "charge", amount_of, into=note), retry=0),
        Step("again", call_tool("bank", "charge", lambda order: {"amount": order.amount}, into="charge_id")),
        Step("ship", ship, retry=Retry(3, first=0.5)),
    ],
    data=Order,
    retry=2,
    trigger=[Event("order.placed"), Schedule(cron="0 3 * * *", timezone="Europe/Berlin", input=Order(amount=1))],
    retention=DeleteOnSuccess(),
)
