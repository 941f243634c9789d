"""A nightly flow: named steps that carry typed data, started by a schedule.

    TGA_HOME=.tga .venv/bin/python examples/nightly.py

The worker registers the schedule; this also starts one run by hand, and shows its steps. Leave a worker running for the
nights: `tga worker examples/nightly.py`.
"""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel

from tga_sdk import Context, Flow, Retry, Schedule, Step, call_tool, serving


class Night(BaseModel):
    fee: int = 1
    balance: int | None = None
    report: str | None = None


def note_balance(night: Night, answer: Any) -> Night:
    return night.model_copy(update={"balance": answer["balance"]})


async def write_report(ctx: Context[Any], night: Night) -> Night:
    day = (await ctx.now()).date()
    return night.model_copy(update={"report": f"{day}: {night.balance} after a fee of {night.fee}"})


nightly = Flow(
    "nightly",
    data=Night,
    retry=Retry(2, first=5.0),
    trigger=Schedule(cron="30 2 * * *", timezone="Europe/Berlin", missed="one", input=Night()),
    steps=[
        Step("fee", call_tool("bank", "charge", lambda night: {"amount": night.fee}), retry=0),
        Step("balance", call_tool("bank", "balance", {}, into=note_balance)),
        Step("report", write_report),
    ],
)


async def main() -> None:
    async with serving(nightly) as client:
        run = await client.start(nightly, Night(fee=2))
        print((await client.result(run.run_id, Night)).report)
        for step in (await client.status(run.run_id)).steps:
            print(f"{step['name']}: {step['status']}, tries {step['tries']}")


if __name__ == "__main__":
    asyncio.run(main())
