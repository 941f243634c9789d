"""How fast the log follows, against how fast entries are appended: `python -m bench.sequencer [--quick]`.

Each round appends with nobody sequencing, then lets a sequencer catch up with all of that, then appends as before
while it works. It runs in the process that appends, as it does in a gateway.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
import tempfile
import time
from bisect import bisect_right
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from app.core.limits import WRITER_SESSIONS_MAX
from app.domain.ledger.plans import Plan
from app.keys.log_signer import LogSigner
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import Sequencer, TreeSession
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.postgres.writer import Writer
from bench.cost import measuring_session
from bench.measure import WARMUP_STEPS, Server, Timing, arguments_of, closed_loop, run_bench
from bench.streams import TraceTemplate

AT_ONCE: Final = 32


@dataclass(frozen=True, slots=True)
class Round:
    alone: Timing
    caught_up: float  # entries a second
    followed: Timing
    delays_ms: list[float]


class Load:
    """Appends, and when each of them was acknowledged."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._template = TraceTemplate()
        self._used = 0
        self.committed: dict[tuple[str, int], float] = {}

    async def run(self, seconds: float) -> Timing:
        queues = self._take(int(12_000 * seconds) + 4 * WARMUP_STEPS * AT_ONCE)
        async with await Sessions.open(self._server.gateway_url, sessions_max=WRITER_SESSIONS_MAX) as sessions:
            writer = Writer(PostgresLedger(sessions))

            async def commit(numbered: tuple[int, Plan]) -> None:
                place, plan = numbered
                await writer.commit(plan)
                self.committed[plan.stream, place] = time.time()

            timing = await closed_loop(self._server, commit, queues, seconds)
            await writer.close()
            return timing

    def _take(self, appends: int) -> list[Iterator[tuple[int, Plan]]]:
        each = -(-appends // (4 * AT_ONCE))
        queues = []
        for _ in range(AT_ONCE):
            numbers = range(self._used + 1, self._used + 1 + each)
            self._used += each
            queues.append(iter([one for n in numbers for one in enumerate(self._template.plans(n), 1)]))
        return queues


@asynccontextmanager
async def sequencing(server: Server, signer: LogSigner) -> AsyncIterator[None]:
    task = asyncio.create_task(Sequencer(lambda: TreeSession.open(server.gateway_url), signer).run())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def until_covered(sessions: Sessions) -> int:
    """Until a head covers everything; its size."""
    tree = PostgresTree(sessions)
    (row,) = await sessions.fetch("SELECT count(*) AS entries FROM tga.entries")
    while True:
        latest = await tree.latest_head()
        if latest is not None and latest.head.size >= row["entries"]:
            return latest.head.size
        await asyncio.sleep(0.005)


async def run_round(server: Server, load: Load, signer: LogSigner, sessions: Sessions, seconds: float) -> Round:
    alone = await load.run(seconds)
    before = await PostgresTree(sessions).size()
    started = time.perf_counter()
    async with sequencing(server, signer):
        caught_up = (await until_covered(sessions) - before) / (time.perf_counter() - started)
        load.committed.clear()
        followed = await load.run(seconds)
        await until_covered(sessions)
    return Round(alone, caught_up, followed, await delays_of(server, load))


async def delays_of(server: Server, load: Load) -> list[float]:
    """From the acknowledgement of each append to the insertion of the first head that covers it, in ms."""
    async with measuring_session(server.admin_url) as session:
        heads = await session.fetch(
            "SELECT size, extract(epoch FROM created_at)::float8 AS at FROM tga.tree_heads ORDER BY size"
        )
        leaves = await session.fetch("SELECT stream, sequence_number, leaf_index FROM tga.leaves")
    sizes = [head["size"] for head in heads]
    index_of = {(leaf["stream"], leaf["sequence_number"]): leaf["leaf_index"] for leaf in leaves}
    return [
        max(0.0, heads[bisect_right(sizes, index_of[entry])]["at"] - committed) * 1e3
        for entry, committed in load.committed.items()
    ]


async def bench(server: Server, machine: str, console: Console, *, rounds: int, seconds: float) -> None:
    load, made = Load(server), list[Round]()
    with tempfile.TemporaryDirectory(prefix="tga-bench-keys-") as folder:
        signer = LogSigner.open(Path(folder) / "keys", environment={})
        async with await Sessions.open(server.gateway_url, sessions_max=2) as sessions:
            for _ in range(rounds):
                made.append(await run_round(server, load, signer, sessions, seconds))
            entries = await PostgresTree(sessions).size()
            heads = (await sessions.fetch("SELECT count(*) AS heads FROM tga.tree_heads"))[0]["heads"]
    console.print(table_of(made, f"{machine}; {entries:,} entries, {heads:,} heads; medians of {rounds} rounds"))


def table_of(rounds: list[Round], caption: str) -> Table:
    def median(values: list[float]) -> float:
        return statistics.median(values)

    def percentile(one: Round, percent: int) -> float:
        return statistics.quantiles(one.delays_ms, n=100)[percent - 1]

    alone = median([one.alone.per_second for one in rounds])
    followed = [one.followed.per_second / one.alone.per_second for one in rounds]
    caught_up = [one.caught_up / one.alone.per_second for one in rounds]
    table = Table(title=f"The log, behind {AT_ONCE} appends at once", caption=caption)
    for name in ("", "value", "to the appends alone"):
        table.add_column(name, justify="left" if not name else "right")
    table.add_row("appends a second, nobody sequencing", f"{alone:,.0f}", "1.00")
    table.add_row(
        "appends a second, while sequencing",
        f"{median([one.followed.per_second for one in rounds]):,.0f}",
        f"{median(followed):.2f}",
    )
    table.add_row(
        "entries a second when catching up",
        f"{median([one.caught_up for one in rounds]):,.0f}",
        f"{median(caught_up):.2f}",
    )
    for percent in (50, 99):
        delay = median([percentile(one, percent) for one in rounds])
        appends = median([one.followed.per_second for one in rounds]) * delay / 1e3
        table.add_row(f"commit to signed head, p{percent} (ms)", f"{delay:.0f}", f"{appends:,.0f} appends long")
    return table


def main() -> None:
    given = arguments_of("sequencer", __doc__).parse_args()
    rounds, seconds = (1, 1.0) if given.quick else (3, 4.0)
    run_bench(lambda server, machine, console: bench(server, machine, console, rounds=rounds, seconds=seconds))


if __name__ == "__main__":
    main()
