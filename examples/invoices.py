"""A plain function becomes durable, and its callers do not change.

    TGA_HOME=.tga .venv/bin/python examples/invoices.py

`make_invoice` was a plain function with plain callers. With `@task` in front of it
- who calls it as before gets what it always got;
- inside a run it is one recorded step: executed once, and after a crash its recorded result is returned;
- a worker serves it as a program of its own.
"""

from __future__ import annotations

import asyncio

from pydantic import BaseModel

from tga_sdk import SyncContext, procedure, serving, task


class Invoice(BaseModel):
    number: int
    total: int


@task(name="make-invoice", retry=2)
def make_invoice(number: int, total: int) -> Invoice:
    """The function as it always was."""
    return Invoice(number=number, total=total)


def invoices_of_the_month(totals: list[int]) -> list[Invoice]:
    """A caller as it always was."""
    return [make_invoice(number, total) for number, total in enumerate(totals, 1)]


@procedure(name="month")
def month(ctx: SyncContext[None], input: list[int]) -> list[Invoice]:
    """The same caller inside a run: every invoice is made once."""
    return invoices_of_the_month(input)


async def main() -> None:
    print("plain:  ", invoices_of_the_month([120, 80]))
    async with serving(month, make_invoice) as client:
        run = await client.start(month, [120, 80])
        print("durable:", await client.result(run.run_id, list[Invoice]))
        alone = await client.start(make_invoice, {"number": 3, "total": 50})
        print("alone:  ", await client.result(alone.run_id, Invoice))


if __name__ == "__main__":
    asyncio.run(main())
