"""A saga: three bookings, and what was booked is undone when a later one fails.

    TGA_HOME=.tga .venv/bin/python examples/saga.py

What has been done is in the run's state, recorded with each booking; so the compensation knows it after any crash, and
undoes each of them once, the last one first.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from tga_sdk import Context, OperationError, procedure, serving


class Trip(BaseModel):
    flight: int
    hotel: int
    car_is_available: bool = False


class Booked(BaseModel):
    items: list[str] = []
    undone: list[str] = []


@procedure(name="trip")
async def trip(ctx: Context[Booked], input: Trip) -> str:
    async def book(item: str, amount: int) -> None:
        await ctx.tool("bank", "charge", {"amount": amount})
        ctx.state.items.append(item)

    async def undo(item: str, amount: int) -> None:
        await ctx.tool("bank", "refund", {"amount": amount})  # the demonstration's policy asks a person about refunds
        ctx.state.undone.append(item)

    amounts = {"flight": input.flight, "hotel": input.hotel}
    try:
        for item, amount in amounts.items():
            await ctx.step(f"book-{item}", book, item, amount)
        if not input.car_is_available:
            await ctx.tool("bank", "fail", {"status": 409})
    except OperationError as error:
        for item in reversed(list(ctx.state.items)):
            await ctx.step(f"undo-{item}", undo, item, amounts[item])
        return f"cancelled ({error.type}): {', '.join(ctx.state.undone)} undone"
    return f"booked: {', '.join(ctx.state.items)}"


async def main() -> None:
    async with serving(trip) as client:
        run = await client.start(trip, Trip(flight=300, hotel=200))
        while not (await client.status(run.run_id)).has_ended:
            for waiting in await client.approvals():
                if waiting.tool_name == "refund" and waiting.arguments is not None:
                    print(f"approving the refund of {waiting.arguments['amount']}")
                    await client.approve(waiting)
            await asyncio.sleep(0.1)
        print(await client.result(run.run_id, str))


if __name__ == "__main__":
    asyncio.run(main())
