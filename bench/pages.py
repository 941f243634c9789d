"""What pages of the console, and the API behind them, cost beside few calls and beside many.

    python -m bench.pages [--quick] [--calls 1000000] [--runs 100000] [--checkpoints 20000]

CONSOLE.md, acceptance 13. Two real gateways, each on a database of its own: real calls and runs, and copies of them
until there are 1,000 calls, 1,000 runs and a run of 1,000 entries in one, and as many as asked for in the other. Each
address is asked of both.

What is compared is the same page. Filters are made so that both sides have a page of it: a hundred calls of an agent,
of a tool and of a tool's failures that seldom come, spread over all; a last page of 50; 500 calls in the last half
hour; trees whose last part, which a proof hashes again, is as long. The rows that each side shows are counted and
printed. Both are warm: every statement has settled on its plan, and what it reads is in memory. Buffers come from
auto_explain, of the last of several requests; those beside few of statements that read no table whole, as PostgreSQL
does with small ones. Processor time of gateway and PostgreSQL comes from the kernel: medians of requests that go to the
two in turns. The larger is measured twice: with tables that were never analysed, and after VACUUM ANALYZE.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import shutil
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.measure import arguments_of
from bench.page_sides import Side
from tests.conftest import make_home

FEW: Final = 1_000
WITHIN: Final = 2.0
SLACK_BUFFERS: Final = 24  # a level more of each index that a page reads
SLACK_MS: Final = 2.0
WARM: Final = 6  # PostgreSQL settles on a plan after five
ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one request. Statements that the gateway makes unasked are left out. `rows`: of tables, or items of a list."""

    buffers: int
    gateway_ms: float
    database_ms: float
    body_bytes: int
    rows: int
    worst: str = ""


def measure(sides: list[Side], *, only: str, warm: int, rounds: int) -> list[dict[str, Figures]]:
    """Of each side, the smaller one first, each address by name, where it has `only` in it."""
    touched = [side.buffers(only=only, warm=warm, by_index=place == 0) for place, side in enumerate(sides)]
    found: list[dict[str, Figures]] = [{} for _ in sides]
    with contextlib.ExitStack() as stack:
        visitors = []
        for side in sides:
            stack.callback(side.world.stop)
            visitors.append(side.open())
        paths = [side.paths(visitor) for side, visitor in zip(sides, visitors, strict=True)]
        for name in touched[0]:
            spent: list[list[tuple[float, float]]] = [[] for _ in sides]
            bodies = [b"" for _ in sides]
            for turn in range(-warm, rounds):
                for place, side in enumerate(sides):
                    before = side.spent()
                    bodies[place] = visitors[place].ask(paths[place][name])
                    after = side.spent()
                    if turn >= 0:
                        spent[place].append((after[0] - before[0], after[1] - before[1]))
            for place, body in enumerate(bodies):
                own, store = (statistics.median(one[part] for one in spent[place]) for part in (0, 1))
                buffers, worst = touched[place][name]
                found[place][name] = Figures(buffers, own, store, len(body), rows_of(body), worst)
    return found


def rows_of(body: bytes) -> int:
    """What a page or list shows."""
    if not body.startswith(b"{"):
        return len(re.findall(rb"<tr[ >]", body))
    items = json.loads(body)
    return len(items["items"]) if isinstance(items.get("items"), list) else 0


def _table(title: str, few: dict[str, Figures], many: dict[str, Figures]) -> tuple[Table, list[str]]:
    table, exceeding = Table(title=title), []
    headings = (
        "",
        "rows",
        "many",
        "buffers",
        "many",
        "gateway ms",
        "many",
        "database ms",
        "many",
        "kB",
        "many",
        "times",
        "",
    )
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    for name, small in few.items():
        if (large := many.get(name)) is None:  # of an older run
            continue
        spent, spent_beside_many = small.gateway_ms + small.database_ms, large.gateway_ms + large.database_ms
        is_met = large.buffers <= WITHIN * small.buffers + SLACK_BUFFERS and (
            spent_beside_many <= WITHIN * spent + SLACK_MS
        )
        table.add_row(
            name,
            *(f"{small.rows}", f"{large.rows}", f"{small.buffers:,}", f"{large.buffers:,}"),
            *(f"{small.gateway_ms:.1f}", f"{large.gateway_ms:.1f}"),
            *(f"{small.database_ms:.1f}", f"{large.database_ms:.1f}"),
            *(f"{small.body_bytes / 1000:.0f}", f"{large.body_bytes / 1000:.0f}"),
            f"{_times(small, large):.2f}",
            "met" if is_met else "NOT met",
        )
        if not is_met:
            exceeding.append(f"{name}: {large.worst}")
    return table, exceeding


def bench(
    console: Console, kept: Path | None, *, calls: int, runs: int, long: int, only: str, turns: dict[str, int]
) -> None:
    """`kept`: a folder for the databases that is used again and never removed; without it nothing is left."""
    home = make_home() if kept is None else kept
    with contextlib.ExitStack() as stack:
        if kept is None:
            stack.callback(shutil.rmtree, home)
        sides = []
        for name, size in (("many", (calls, runs, long)), ("few", (FEW, FEW, FEW))):
            sides.append(Side(home / name, console, calls=size[0], runs=size[1], long=size[2]))
            stack.callback(sides[-1].world.close)
        many, few = sides
        was_made = many.is_made
        for side in sides:
            if not side.is_made:
                side.make()
        for side in sides:
            if not side.is_made:
                side.finish()
        asyncio.run(few.analyse())
        if not was_made:
            _compare(console, measure([few, many], only=only, **turns), "never analysed")
        asyncio.run(many.analyse())
        _compare(console, measure([few, many], only=only, **turns), "analysed")


def _compare(console: Console, found: list[dict[str, Figures]], title: str) -> None:
    few, many = found
    table, exceeding = _table(f"Beside few and beside many, {title}; at most {WITHIN:g} times as much", few, many)
    console.print(table)
    for one in exceeding:
        console.print(f"NOT met, {one}\n")
    console.print(
        f"{len(few) - len(exceeding)} of {len(few)} addresses met the aim, {title};"
        f" times alone, without slack: {sum(_times(few[name], many[name]) <= WITHIN for name in few)}"
    )


def _times(few: Figures, many: Figures) -> float:
    """How many times the processor time."""
    return (many.gateway_ms + many.database_ms) / (few.gateway_ms + few.database_ms)


def main() -> None:
    parser = arguments_of("pages", __doc__)
    parser.add_argument("--calls", type=int, help="of the larger database (default 1,000,000; with --quick 3,000)")
    parser.add_argument("--runs", type=int, help="of the larger database (default 100,000; with --quick 2,000)")
    parser.add_argument("--checkpoints", type=int, help="of the longer run (default 20,000; with --quick 3,000)")
    parser.add_argument("--home", type=Path, help="keep the databases there, and use them again")
    parser.add_argument("--warm", type=int, help=f"requests of each address before it is measured (default {WARM})")
    parser.add_argument("--rounds", type=int, help=f"requests of each address that are timed (default {ROUNDS})")
    parser.add_argument("--only", default="", help="only addresses whose names have this in it")
    given = parser.parse_args()
    calls, runs, long = (3_000, 2_000, 3_000) if given.quick else (1_000_000, 100_000, 20_000)
    bench(
        Console(width=None if Console().is_terminal else 170),
        given.home,
        calls=given.calls or calls,
        runs=given.runs or runs,
        long=given.checkpoints or long,
        only=given.only,
        turns={
            "warm": given.warm or (1 if given.quick else WARM),
            "rounds": given.rounds or (1 if given.quick else ROUNDS),
        },
    )


if __name__ == "__main__":
    main()
