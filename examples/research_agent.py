"""A research agent that reads, pays for an article, and writes a report. Its model is scripted: it costs nothing.

    TGA_HOME=.tga .venv/bin/python examples/research_agent.py

Every turn of the model and every tool call is a checkpoint. Kill it anywhere and start it again with the same number:
recorded turns are not asked for again, and the article is paid for once. For a real model replace `SCRIPT` by a name
like "anthropic:claude-sonnet-4-5", and install what pydantic-ai needs for that provider.
"""

from __future__ import annotations

import asyncio
import sys

from pydantic import BaseModel

from tga_sdk import Context, procedure, serving
from tga_sdk.testing.models import ScriptedModel, call

LIBRARY = {
    "tea": "Tea is made from the leaves of Camellia sinensis.",
    "coffee": "Coffee is made from roasted seeds.",
    "history-of-tea": "Tea was first drunk in China. (The full article costs 5.)",
}


class Report(BaseModel):
    title: str
    findings: list[str]


class Outcome(BaseModel):
    report: Report
    turns: int
    tokens: int


def read(page: str) -> str:
    """Read a page of the library."""
    return LIBRARY.get(page, "There is no such page.")


SCRIPT = ScriptedModel(
    ["I look at two pages.", call("read", page="tea"), call("read", page="coffee")],
    call("read", page="history-of-tea"),
    call("bank.charge", amount=5),
    Report(title="Tea and coffee", findings=["Tea is made from leaves.", "It was first drunk in China."]),
)


@procedure(name="research")
async def research(ctx: Context[None], question: str) -> Outcome:
    agent = ctx.agent(
        "researcher",
        model=SCRIPT,
        system_prompt="You research questions in the library. You may pay for an article.",
        tools=[read, "bank.charge"],  # a Python function is a step; `server.tool` goes through the gateway
        output_type=Report,
        max_turns=10,
    )
    report = await agent.run(question)
    return Outcome(report=report, turns=agent.usage.requests, tokens=agent.usage.total_tokens)


async def main(number: str = "1") -> None:
    async with serving(research) as client:
        run = await client.start(research, "What are tea and coffee?", run_id=f"research-{number}")
        print(await client.result(run.run_id, Outcome))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
