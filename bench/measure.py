"""What the benchmarks share: a server of their own, a closed loop, what it took, and the table that says so.

Machines are noisy, so the claim is always a ratio within one run. Each round runs the baseline and ours next to each
other, and each line of a table shows its median round.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table

from app.domain.ledger.plans import PlanGroup
from app.gateway.memory import spare_what_is_loaded
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import migrate
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from bench.cost import measuring_session
from tests.leftovers import watch

DATABASE: Final = "bench"
BASELINE_CLIENTS: Final = (1, 8, 32)
AT_ONCE: Final = (1, 8, 32, 128)
WARMUP_STEPS: Final = 8  # on each session: PostgreSQL settles on a generic plan after five

T = TypeVar("T")


class Server:
    """The server under test and what its processes have consumed."""

    def __init__(self, embedded: EmbeddedPostgres) -> None:
        self.embedded = embedded
        self.admin_url = embedded.url("postgres", DATABASE)
        self.gateway_url = embedded.url(GATEWAY_ROLE, DATABASE)
        self.observer_url = embedded.url("postgres", "postgres")

    async def make_database(self) -> str:
        """Migrated and empty; returns the server's version."""
        async with measuring_session(self.observer_url) as root:
            await root.execute(f"CREATE DATABASE {DATABASE}")
            version = str(await root.fetchval("SHOW server_version"))
        await migrate(self.admin_url)
        return version

    def cpu_s(self) -> float:
        """Of the postmaster, its children, and those that ended and were waited for."""
        postmaster = self.embedded.postmaster_pid()
        ticks = 0
        for name in os.listdir("/proc"):
            if not name.isdecimal():
                continue
            with contextlib.suppress(OSError):
                facts = Path("/proc", name, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
                if int(name) == postmaster:
                    ticks += sum(int(field) for field in facts[11:15])
                elif int(facts[1]) == postmaster:
                    ticks += int(facts[11]) + int(facts[12])
        return ticks / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured stretch of steps: appends, or calls."""

    steps: int
    seconds: float
    client_cpu_s: float
    server_cpu_s: float
    latencies_s: Sequence[float]

    @property
    def per_second(self) -> float:
        return self.steps / self.seconds

    @property
    def client_us(self) -> float:
        return self.client_cpu_s * 1e6 / self.steps

    @property
    def server_us(self) -> float:
        return self.server_cpu_s * 1e6 / self.steps

    def percentile_ms(self, percent: int) -> float:
        ordered = sorted(self.latencies_s)
        return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)] * 1e3


async def closed_loop(
    server: Server, do: Callable[[T], Awaitable[object]], queues: list[Iterator[T]], seconds: float
) -> Timing:
    """Every queue has one step in flight, until the time or the steps are used up; one step of each at the least."""
    latencies: list[float] = []

    async def work(steps: Iterator[T], until: float, kept: list[float]) -> None:
        for step in steps:
            started = time.perf_counter()
            await do(step)
            ended = time.perf_counter()
            kept.append(ended - started)
            if ended >= until:
                return

    await asyncio.gather(*(work(islice(queue, WARMUP_STEPS), float("inf"), []) for queue in queues))
    server_before, client_before, started = server.cpu_s(), time.process_time(), time.perf_counter()
    await asyncio.gather(*(work(queue, started + seconds, latencies) for queue in queues))
    elapsed = time.perf_counter() - started
    client_cpu_s = time.process_time() - client_before
    return Timing(len(latencies), elapsed, client_cpu_s, server.cpu_s() - server_before, latencies)


class CountingLedger(PostgresLedger):
    """Says afterwards how many plans stood in a batch."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(sessions)
        self.batches = 0
        self.plans = 0

    async def commit_groups(self, groups: Sequence[PlanGroup]) -> list[Any]:
        self.batches += 1
        self.plans += sum(len(group.plans) for group in groups)
        return list(await super().commit_groups(groups))


@dataclass(frozen=True, slots=True)
class Cell:
    """One line of the table: its rounds, and the rounds of the baseline that it stands beside."""

    name: str
    at_once: int
    rounds: list[Timing]
    baseline: list[Timing]
    note: str = ""

    @property
    def median(self) -> Timing:
        return sorted(self.rounds, key=lambda timing: timing.per_second)[len(self.rounds) // 2]

    @property
    def ratios(self) -> list[float]:
        return sorted(ours.per_second / base.per_second for ours, base in zip(self.rounds, self.baseline, strict=True))

    @property
    def ratio(self) -> float:
        return self.ratios[len(self.ratios) // 2]


class Rounds:
    """Timings by name and number at once, round after round."""

    def __init__(self) -> None:
        self._timings: dict[tuple[str, int], list[Timing]] = {}
        self._batch_sizes: dict[tuple[str, int], list[float]] = {}

    def add(self, name: str, at_once: int, timing: Timing, *, batch_size: float | None = None) -> None:
        self._timings.setdefault((name, at_once), []).append(timing)
        if batch_size is not None:
            self._batch_sizes.setdefault((name, at_once), []).append(batch_size)

    def steps(self, name: str) -> int:
        return sum(t.steps for (other, _), timings in self._timings.items() if other == name for t in timings)

    def cells(self) -> list[Cell]:
        """In the order in which the names appeared; beside the baseline at as many, or at the most there were."""
        names = list(dict.fromkeys(name for name, _ in self._timings))
        cells = []
        for name, at_once in sorted(self._timings, key=lambda key: (names.index(key[0]), key[1])):
            notes = []
            if sizes := self._batch_sizes.get((name, at_once)):
                notes.append(f"{statistics.median(sizes):.1f} a commit")
            if at_once > BASELINE_CLIENTS[-1]:
                notes.append(f"to baseline at {BASELINE_CLIENTS[-1]}")
            baseline = self._timings["baseline", min(at_once, BASELINE_CLIENTS[-1])]
            cells.append(Cell(name, at_once, self._timings[name, at_once], baseline, ", ".join(notes)))
        return cells


def throughput_table(title: str, cells: list[Cell]) -> Table:
    table = Table(title=title)
    headings = ("", "at once", "ratio", "of rounds", "per second", "client CPU µs", "server CPU µs", "p50 ms", "p99 ms")
    for heading in headings:
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("")
    previous = ""
    for cell in cells:
        if previous and cell.name != previous:
            table.add_section()
        previous = cell.name
        timing, ratios = cell.median, cell.ratios
        table.add_row(
            cell.name,
            str(cell.at_once),
            f"{cell.ratio:.2f}",
            f"{ratios[0]:.2f} to {ratios[-1]:.2f}" if len(ratios) > 1 else "",
            f"{timing.per_second:,.0f}",
            f"{timing.client_us:.0f}",
            f"{timing.server_us:.0f}",
            f"{timing.percentile_ms(50):.2f}",
            f"{timing.percentile_ms(99):.2f}",
            cell.note,
        )
    return table


def measure_sync(directory: Path, *, times: int = 50) -> float:
    """Median milliseconds until 8 kB are on the disk: what a lone commit waits for, whatever it does besides."""
    taken = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(times):
            file.write(bytes(8192))
            file.flush()
            started = time.perf_counter()
            os.fdatasync(file.fileno())
            taken.append(time.perf_counter() - started)
    return statistics.median(taken) * 1e3


def run_on_fast_loop(work: Coroutine[Any, Any, T]) -> T:
    try:
        from uvloop import new_event_loop
    except ImportError:
        return asyncio.run(work)
    with asyncio.Runner(loop_factory=new_event_loop) as runner:
        return runner.run(work)


def arguments_of(name: str, doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=doc)
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it works")
    return parser


@contextlib.contextmanager
def own_folder(prefix: str = "tga-bench-") -> Iterator[Path]:
    """A folder for whatever a benchmark starts. When this process ends, even by a signal, the PostgreSQL and the
    gateways that work there are ended too, and the folder is removed (tests/leftovers.py)."""
    with tempfile.TemporaryDirectory(prefix=prefix) as made:
        folder, before = Path(made), os.environ.get("TMPDIR")
        folder.chmod(0o711)  # root runs PostgreSQL as another account, which must get there
        with watch(folder) as watcher:
            os.environ["TMPDIR"] = made  # of all that are started from here on: by that they are known
            try:
                yield folder
            finally:
                os.environ.pop("TMPDIR")
                if before is not None:
                    os.environ["TMPDIR"] = before
                watcher.communicate()


def run_bench(bench: Callable[[Server, str, Console], Coroutine[Any, Any, None]]) -> None:
    """Run it on a new server with an empty ledger; it is told the facts of the machine in a line."""

    async def prepared(server: Server) -> None:
        version = await server.make_database()
        spare_what_is_loaded()  # as `tga serve` does
        loop = type(asyncio.get_running_loop()).__module__.partition(".")[0]
        python = f"{platform.python_implementation()} {platform.python_version()}"
        await bench(server, f"{python}, PostgreSQL {version}, {os.cpu_count()} CPUs, {loop}", console)

    console = Console(width=None if Console().is_terminal else 150)
    # Peers keep what they have opened for the most at once, round after round.
    with own_folder() as home, EmbeddedPostgres(home, connections_max=400) as embedded:
        run_on_fast_loop(prepared(Server(embedded)))
