"""An order with a payment and an approval.

    TGA_HOME=.tga .venv/bin/python examples/order.py

Large orders wait for a person, for days if it takes days; nothing is held meanwhile. The charge happens once, however
often the worker dies: kill it anywhere and start this again, and it goes on where it was.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel

from tga_sdk import Context, procedure, serving


class Order(BaseModel):
    number: int
    amount: int


class Outcome(BaseModel):
    status: str
    charge_id: str | None = None
    label: str | None = None


def print_label(order: Order) -> str:
    """Something slow that should not be done twice."""
    return f"ORDER-{order.number:05d}"


@procedure(name="order")
async def order(ctx: Context[None], input: Order) -> Outcome:
    if input.amount > 100 and not await ctx.approve(f"Charge {input.amount} for order {input.number}?", context=input):
        return Outcome(status="declined")
    charge = await ctx.tool("bank", "charge", {"amount": input.amount})
    label = await ctx.step("label", print_label, input)
    return Outcome(status="shipped", charge_id=charge["charge_id"], label=label)


async def main(number: int = 7) -> None:
    async with serving(order) as client:
        run = await client.start(order, Order(number=number, amount=250), run_id=f"order-{number}")
        while (run := await client.status(run.run_id)).status == "running":
            await asyncio.sleep(0.1)
        for asked in run.awaits:
            try:
                said = await asyncio.to_thread(input, f"Order {number} waits for an approval. Give it? [y/n] ")
            except EOFError:  # there is no terminal
                print(f"\nAnswer it with: tga run answer {run.run_id} {asked['path']} true. Then start this again.")
                return
            await client.answer(run.run_id, asked["path"], said.lower().startswith("y"))
        print(await client.result(run.run_id, Outcome))


if __name__ == "__main__":
    asyncio.run(main(*map(int, sys.argv[1:])))
