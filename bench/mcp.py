"""What the gateway adds to an MCP call: `python -m bench.mcp [--quick]`.

The same official client calls the same server (over stdio, and it answers at once) directly and through a gateway with
its own PostgreSQL: over HTTP, and over `tga mcp`. One call after the other; in each round every way comes once, so that
what the machine does meanwhile meets all of them. A server that takes 20 ms to answer stands beside: most take longer.
Equal calls without a key stand apart: each waits until it is known that the answer to the one before arrived.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

from mcp import Client, StdioServerParameters
from rich.console import Console
from rich.table import Table

from bench.measure import arguments_of
from tests.cli.world import World
from tests.mcp.served import FIXTURE, LEGACY, MODERN, client_of, mcp_world

Call = Callable[[], Awaitable[Any]]
WARMUP_CALLS: Final = 20
WARMUP_CALLS_QUICK: Final = 2
_numbers = itertools.count()
KINDS: Final[dict[str, tuple[str, dict[str, Any]]]] = {
    "read": ("greet", {"name": "Ada"}),
    "write": ("slow_compute", {"seconds": 0}),
    "write, equal": ("slow_compute", {"seconds": 0, "label": "same"}),
    "write, 20 ms": ("slow_compute", {"seconds": 0.02}),
}


async def measure(calls: dict[str, Call], rounds: int, warmup: int) -> dict[str, list[float]]:
    """Milliseconds of each call, by way."""
    took: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds + warmup):
        for name, call in calls.items():
            began = time.perf_counter()
            await call()
            if number >= warmup:
                took[name].append((time.perf_counter() - began) * 1000)
    return took


def percentile(values: list[float], share: float) -> float:
    return statistics.quantiles(values, n=1000)[round(share * 1000) - 1]


@asynccontextmanager
async def ways(world: World) -> AsyncIterator[dict[str, Client]]:
    """Clients by how they reach the server; the first does so directly."""
    direct = StdioServerParameters(command=sys.executable, args=[str(FIXTURE), str(world.home / "direct.book")])
    command = ["-m", "app.main", "mcp", "--server", "fixture"]
    bridge = StdioServerParameters(command=sys.executable, args=command, env=world.environment())
    async with AsyncExitStack() as stack:
        yield {
            "direct": await stack.enter_async_context(Client(direct, mode="legacy")),
            f"/mcp {MODERN}": await stack.enter_async_context(client_of(world, MODERN, path="/mcp/fixture")),
            f"/mcp {LEGACY}": await stack.enter_async_context(client_of(world, LEGACY, path="/mcp/fixture")),
            "tga mcp": await stack.enter_async_context(Client(bridge, mode=MODERN)),
        }


def _made_unequal(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
    """Of equal calls the next waits until it is known that the answer to the one before arrived."""
    if tool == "greet" or "label" in arguments:
        return arguments
    return {**arguments, "label": str(next(_numbers))}


async def run(world: World, rounds: int, warmup: int, console: Console) -> None:
    table = Table(title=f"an MCP call, {rounds} of each, one after the other")
    for column in ("tool", "way", "p50 ms", "p99 ms", "p50 ratio", "p99 ratio", "added p50 ms"):
        table.add_column(column, justify="left" if column in ("tool", "way") else "right")
    async with ways(world) as clients:
        for kind, (tool, arguments) in KINDS.items():

            def call_of(client: Client, tool: str = tool, arguments: dict[str, Any] = arguments) -> Call:
                return lambda: client.call_tool(tool, _made_unequal(tool, arguments))

            took = await measure({name: call_of(client) for name, client in clients.items()}, rounds, warmup)
            base_50, base_99 = percentile(took["direct"], 0.5), percentile(took["direct"], 0.99)
            for name, values in took.items():
                p50, p99 = percentile(values, 0.5), percentile(values, 0.99)
                ratios = (f"{p50 / base_50:.1f}", f"{p99 / base_99:.1f}", f"{p50 - base_50:.1f}")
                table.add_row(kind, name, f"{p50:.2f}", f"{p99:.2f}", *ratios)
            table.add_section()
    console.print(table)


def main() -> None:
    given = arguments_of("mcp", __doc__).parse_args()
    with mcp_world() as world:
        world.start()
        rounds, warmup = (5, WARMUP_CALLS_QUICK) if given.quick else (400, WARMUP_CALLS)
        asyncio.run(run(world, rounds, warmup, Console()))


if __name__ == "__main__":
    main()
