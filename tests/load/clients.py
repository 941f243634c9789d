"""A process with its share of the clients: `python -m tests.load.clients PLAN.json`.

It says `agents done` when its agents have brought everything to its end, and ends when its input is closed.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from tests.load.agents import Agent
from tests.load.asking import Client, Notebook
from tests.load.watchers import Auditor, Supervisor


@dataclass(frozen=True, slots=True)
class Plan:
    """`clients`: name, role and key of each. Times are the machine's monotonic."""

    url: str
    seed: int
    stop_s: float
    until_s: float
    clients: list[tuple[str, str, str]]
    notebook: str
    feeds: str

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)))


async def work(plan: Plan, notebook: Notebook) -> dict[str, dict[str, int]]:
    """What the auditors have seen: the last number of each stream."""
    stop = asyncio.Event()
    others: list[str] = []
    opened: list[Client] = []
    agents, watchers, auditors = list[Agent](), list[Supervisor | Auditor](), dict[str, Auditor]()
    for name, role, key in plan.clients:
        rng = random.Random(f"{plan.seed} {name}")
        client = Client(name, key, plan.url, notebook, rng, plan.until_s)
        opened.append(client)
        if role == "agent":
            agents.append(Agent(client, plan.stop_s, others))
        elif role == "supervisor":
            watchers.append(Supervisor(client, stop))
        else:
            auditors[name] = Auditor(client, stop)
            watchers.append(auditors[name])
    watching = [asyncio.create_task(watcher.run()) for watcher in watchers]
    await asyncio.gather(*(agent.run() for agent in agents))
    sys.stdout.write("agents done\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    stop.set()
    await asyncio.wait_for(asyncio.gather(*watching), timeout=max(5.0, plan.until_s - time.monotonic()))
    await asyncio.gather(*(client.close() for client in opened))
    return {name: auditor.last_of for name, auditor in auditors.items()}


def main() -> None:
    fields = json.loads(Path(sys.argv[1]).read_text())
    plan = Plan(**{**fields, "clients": [(name, role, key) for name, role, key in fields["clients"]]})
    with Path(plan.notebook).open("w") as file:
        feeds = asyncio.run(work(plan, Notebook(file)))
    Path(plan.feeds).write_text(json.dumps(feeds))


if __name__ == "__main__":
    main()
