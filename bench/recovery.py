"""How fast a gateway comes back after kill -9: `python -m bench.recovery [--quick] [--traces N]`.

One process starts calls that are never answered, until all of them are EXECUTING, and is killed. Another finds and
finishes every one of them. Nobody else tells it what there is to do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rich.console import Console
from rich.table import Table

from bench.cost import measuring_session, transactions_when_idle
from bench.gateway import Answering, Silent, fresh_calls, open_gateway
from bench.measure import Server, arguments_of, run_bench, run_on_fast_loop

TRACES: Final = 10_000
TRACES_QUICK: Final = 500
STARTED_AT_ONCE: Final = 128
VICTIM, RECOVERER = "victim", "recoverer"


@dataclass(frozen=True, slots=True)
class Report:
    """What the recovering process says of itself. Times are monotonic, the machine's own."""

    recovered: int
    started_s: float
    first_s: float
    last_s: float
    cpu_s: float
    rss_before_mb: float
    rss_peak_mb: float
    plans_per_commit: float


async def start_and_hang(url: str, traces: int) -> None:
    """Print a line when every call is at a server that never answers; then wait to be killed."""
    calls = fresh_calls("recovery")
    slots = asyncio.Semaphore(STARTED_AT_ONCE)
    running = set()
    async with open_gateway(url, Silent(slots.release)) as gateway:
        for _ in range(traces):
            await slots.acquire()
            running.add(asyncio.create_task(gateway.runtime.call(next(calls))))
        for _ in range(STARTED_AT_ONCE):
            await slots.acquire()
        sys.stdout.write("all are EXECUTING\n")
        sys.stdout.flush()
        await asyncio.wait(running)


async def recover(url: str, traces: int) -> None:
    """Print a Report when nothing is left to recover."""
    async with open_gateway(url, Answering()) as gateway:
        rss_before_mb, cpu_before = _rss_mb("VmRSS"), time.process_time()
        started_s = time.monotonic()
        first_s = last_s = started_s
        recovered = 0
        async for found in gateway.runtime.recover_all():
            if found.answer is None or found.answer.state != "COMPLETED":
                raise RuntimeError(f"not recovered: {found}")
            recovered += 1
            last_s = time.monotonic()
            first_s = last_s if recovered == 1 else first_s
        report = Report(
            recovered=recovered,
            started_s=started_s,
            first_s=first_s,
            last_s=last_s,
            cpu_s=time.process_time() - cpu_before,
            rss_before_mb=rss_before_mb,
            rss_peak_mb=_rss_mb("VmHWM"),
            plans_per_commit=gateway.ledger.plans / max(1, gateway.ledger.batches),
        )
    sys.stdout.write(json.dumps(asdict(report)) + "\n")


def _rss_mb(field: str) -> float:
    """From /proc, because getrusage's peak is inherited from the parent; getrusage where there is no /proc."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text("ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def _spawn(role: str, url: str, traces: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "bench.recovery", "--role", role, "--url", url, "--traces", str(traces)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill_in_the_middle(url: str, traces: int) -> tuple[float, float]:
    """How many seconds the victim needed to start all, and when it was killed."""
    started_s = time.monotonic()
    with _spawn(VICTIM, url, traces) as victim:
        try:
            said = victim.stdout.readline() if victim.stdout else ""
            took_s = time.monotonic() - started_s
        finally:
            victim.kill()  # SIGKILL
        if not said:
            raise RuntimeError("the process that was to be killed ended by itself")
    return took_s, time.monotonic()


def recover_in_new_process(url: str, traces: int) -> Report:
    with _spawn(RECOVERER, url, traces) as recoverer:
        said, _ = recoverer.communicate()
    if recoverer.returncode != 0:
        raise RuntimeError("the recovering process failed")
    return Report(**json.loads(said))


async def bench(server: Server, machine: str, console: Console, traces: int) -> None:
    console.print(f"{machine}; {traces:,} traces left EXECUTING by kill -9")
    async with measuring_session(server.observer_url) as observer:
        start_s, killed_s = await asyncio.to_thread(kill_in_the_middle, server.gateway_url, traces)
        before = await transactions_when_idle(server.gateway_url, observer)
        server_cpu_before = server.cpu_s()
        report = await asyncio.to_thread(recover_in_new_process, server.gateway_url, traces)
        server_cpu_s = server.cpu_s() - server_cpu_before
        transactions = await transactions_when_idle(server.gateway_url, observer) - before
    async with measuring_session(server.admin_url) as admin:
        # The system stream, which is OPEN for ever, is no trace.
        rows = await admin.fetch("SELECT state, count(*) AS count FROM tga.heads WHERE state <> 'OPEN' GROUP BY state")
        resent = await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts WHERE attempt = 2")
    states = {row["state"]: row["count"] for row in rows}
    if report.recovered != traces or states != {"COMPLETED": traces} or resent != traces:
        raise RuntimeError(f"recovered {report.recovered}, sent again {resent}, stored {states}, of {traces}")
    console.print(table_of(report, traces, start_s, killed_s, transactions, server_cpu_s))


def table_of(
    report: Report, traces: int, start_s: float, killed_s: float, transactions: int, server_cpu_s: float
) -> Table:
    seconds = report.last_s - report.started_s
    table = Table(title=f"Recovery of {traces:,} traces by a new process; all COMPLETED, each sent again once")
    table.add_column("")
    table.add_column("", justify="right")
    rows = {
        "to start them, with the process (s)": f"{start_s:.2f}",
        "from the kill to the first finished (s)": f"{report.first_s - killed_s:.2f}",
        "from the kill to the last finished (s)": f"{report.last_s - killed_s:.2f}",
        "of it in recover_all, first / last (s)": f"{report.first_s - report.started_s:.2f} / {seconds:.2f}",
        "traces per second": f"{traces / seconds:,.0f}",
        "transactions per trace, one a read": f"{transactions / traces:.2f}",
        "plans in a commit": f"{report.plans_per_commit:.1f}",
        "client / server CPU per trace (µs)": f"{report.cpu_s / traces * 1e6:.0f} / {server_cpu_s / traces * 1e6:.0f}",
        "memory before / peak (MB)": f"{report.rss_before_mb:.0f} / {report.rss_peak_mb:.0f}",
    }
    for name, value in rows.items():
        table.add_row(name, value)
    return table


def main() -> None:
    parser = arguments_of("recovery", __doc__)
    parser.add_argument("--traces", type=int, help=f"how many are left behind (default {TRACES:,})")
    # The two processes that the benchmark starts.
    parser.add_argument("--role", choices=(VICTIM, RECOVERER), help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    given = parser.parse_args()
    traces = given.traces or (TRACES_QUICK if given.quick else TRACES)
    if given.role == VICTIM:
        run_on_fast_loop(start_and_hang(given.url, traces))
    elif given.role == RECOVERER:
        run_on_fast_loop(recover(given.url, traces))
    else:
        run_bench(lambda server, machine, console: bench(server, machine, console, traces))


if __name__ == "__main__":
    main()
