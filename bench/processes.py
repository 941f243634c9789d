"""Whether calls a second grow with `--processes`: `python -m bench.processes [--quick] [--share 0.15]`.

A machine with few cores cannot show it by itself: gateway processes, PostgreSQL, tool server and clients compete for
them. So each gateway process gets only a share of a core (0.15 of one by default) and all else what it wants: while the
machine has processor time to spare, this is how more cores would look, each as slow as that share. A governor stops
(SIGSTOP) a process that has used its share and lets it go on (SIGCONT) when it has earned more, every 2 ms. What is
shown is growth and the cost of a call in each part, not a rate: the rate of such a slow core is of no interest.

The whole of it is real: `tga serve --processes N`, PostgreSQL, a tool server, calls over kept connections. The idle
share of the machine stands beside each line: where it is near zero, nothing was to spare, and the line says nothing.
Without the governor (a share of 1, the last lines) the same processes compete for the cores that are there.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from app.postgres.embedded.server import EmbeddedPostgres
from bench.measure import arguments_of, own_folder, run_on_fast_loop
from bench.peer_processes import cpu_s_with_children, measure_http
from bench.served import CONFIG, CallLoad, answering
from tests.processes.world import Home, Serving

SHARE: Final = 0.15
PROCESSES: Final = (1, 2, 4)
AT_ONCE_A_PROCESS: Final = 16
GOVERN_EVERY_S: Final = 0.002
BURST_S: Final = 0.004


@dataclass(frozen=True, slots=True)
class Line:
    share: float
    processes: int
    per_second: float
    gateway_us: float
    postgres_us: float
    p50_ms: float
    p99_ms: float
    idle: float  # of the machine, from 0 to 1


def govern(share: float, pids: Sequence[int]) -> None:
    """Until it is told to end: none of these processes uses more than its share of a core."""
    is_over = False

    def end(*_: object) -> None:
        nonlocal is_over
        is_over = True

    signal.signal(signal.SIGTERM, end)
    clocks = {pid: (~pid << 3) | 2 for pid in pids}  # clock_getcpuclockid(3), as the kernel numbers them
    used, stopped = {pid: time.clock_gettime(clock) for pid, clock in clocks.items()}, set[int]()
    earned = dict.fromkeys(pids, BURST_S)
    before = time.perf_counter()
    try:
        while not is_over:
            time.sleep(GOVERN_EVERY_S)
            now = time.perf_counter()
            for pid, clock in clocks.items():
                spent = time.clock_gettime(clock)
                earned[pid] = min(BURST_S, earned[pid] + (now - before) * share - (spent - used[pid]))
                used[pid] = spent
                if earned[pid] <= 0 and pid not in stopped:
                    os.kill(pid, signal.SIGSTOP)
                    stopped.add(pid)
                elif earned[pid] > 0 and pid in stopped:
                    os.kill(pid, signal.SIGCONT)
                    stopped.discard(pid)
            before = now
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def governed(share: float, pids: set[int]) -> Iterator[None]:
    if share >= 1:
        yield
        return
    command = [sys.executable, "-m", "bench.processes", "--role", "governor", "--share", str(share), *map(str, pids)]
    with subprocess.Popen(command) as governor:
        try:
            yield
        finally:
            governor.terminate()
            governor.wait(60)
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)


def idle_s() -> float:
    """Seconds that the machine's processors had nothing to do, all of them together."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    return (int(fields[4]) + int(fields[5])) / os.sysconf("SC_CLK_TCK")


def measure(home: Home, processes: int, share: float, seconds: float) -> Line:
    serving = Serving(home, processes)
    try:
        if processes == 1:  # there is no supervisor
            serving.await_line("Listening on")
            home.url = serving.text().split("Listening on ")[1].split()[0]
            pids = {serving.process.pid}
        else:
            pids = serving.until_all_serve().processes()
        if len(pids) != processes:
            raise RuntimeError(f"{len(pids)} gateway processes instead of {processes}")
        postmaster = EmbeddedPostgres(home.home).postmaster_pid()
        if postmaster is None:
            raise RuntimeError("PostgreSQL does not run")
        at_once = AT_ONCE_A_PROCESS * processes
        load = CallLoad(str(home.admin_key()), "call", at_once)

        def spent() -> tuple[float, float]:
            return sum(cpu_s_with_children(pid) for pid in pids), cpu_s_with_children(postmaster)

        with governed(share, pids):
            before, idle, began = spent(), idle_s(), time.perf_counter()
            found = run_on_fast_loop(measure_http(load, serving.port, at_once, seconds))
            gateway, postgres = (after - one for after, one in zip(spent(), before, strict=True))
            spare = (idle_s() - idle) / (time.perf_counter() - began) / (os.cpu_count() or 1)
    finally:
        serving.close()
    steps = found["steps"] + 8 * at_once  # the warm-up's too
    latencies = statistics.quantiles(found["latencies_s"], n=100)
    return Line(
        share,
        processes,
        found["steps"] / found["seconds"],
        gateway / steps * 1e6,
        postgres / steps * 1e6,
        latencies[49] * 1e3,
        latencies[98] * 1e3,
        spare,
    )


def table_of(lines: Sequence[Line]) -> Table:
    table = Table(title="Calls over HTTP; each gateway process has a share of a core")
    headings = ("share", "processes", "calls/s", "to one", "gateway us", "PostgreSQL us", "p50 ms", "p99 ms", "idle")
    for heading in headings:
        table.add_column(heading, justify="right")
    for line in lines:
        alone = next(one for one in lines if one.share == line.share and one.processes == 1)
        table.add_row(
            f"{line.share:g}",
            str(line.processes),
            f"{line.per_second:,.0f}",
            f"{line.per_second / alone.per_second:.2f}",
            f"{line.gateway_us:,.0f}",
            f"{line.postgres_us:,.0f}",
            f"{line.p50_ms:.1f}",
            f"{line.p99_ms:.1f}",
            f"{line.idle:.0%}",
        )
    return table


def main() -> None:
    parser = arguments_of("processes", __doc__)
    parser.add_argument("--share", type=float, default=SHARE, help="of a core, for each process (default %(default)g)")
    parser.add_argument("--processes", type=int, nargs="+", help="how many (default 1 2 4)")
    parser.add_argument("--seconds", type=float, help="for each line (default 10)")
    parser.add_argument("--role", choices=("governor",), help=argparse.SUPPRESS)
    parser.add_argument("pids", type=int, nargs="*", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "governor":
        govern(given.share, given.pids)
        return
    seconds = given.seconds or (1.0 if given.quick else 10.0)
    counts = given.processes or ((1, 2) if given.quick else PROCESSES)
    shares: list[Any] = [given.share] if given.quick or given.share >= 1 else [given.share, 1.0]
    lines = []
    with own_folder() as folder:
        home = Home(folder)
        with answering("tool", home.home) as (tool, _):
            home.config.write_text(CONFIG.format(tool=tool))
            for share in shares:
                lines += [measure(home, processes, share, seconds) for processes in counts]
    console = Console(width=None if Console().is_terminal else 120)
    console.print(f"{os.cpu_count()} CPUs; {seconds:g} s a line, {AT_ONCE_A_PROCESS} calls at once a process")
    console.print(table_of(lines))


if __name__ == "__main__":
    main()
