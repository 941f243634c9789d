"""What a call costs over HTTP: `python -m bench.http [--quick]`.

Three things at 1, 8 and 32 at once, next to each other in every round: a FastAPI route that does nothing, under the
same settings of uvicorn; an allowed call with a fresh key through a gateway as `tga serve` runs it; and the same call
in process, without the wire (bench.gateway). The tool is instant: the HTTP connector of the gateway's process answers
by itself, so that neither a tool server nor the wire to it is measured. The client is another process with keep-alive.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from bench.measure import (
    BASELINE_CLIENTS,
    Cell,
    Rounds,
    Server,
    Timing,
    arguments_of,
    measure_sync,
    run_bench,
    run_on_fast_loop,
    throughput_table,
)
from bench.phases import PHASES
from bench.tool_call import run_calls

HTTP, IN_PROCESS = "over HTTP", "in process"
MEANING: Final = {
    "parse": "HTTP, strict JSON, the body's fields",
    "arguments": "against the tool's input schema",
    "admission": "who is calling, and whether it may now",
    "policy": "Cedar, both questions",
    "canonical": "RFC 8785 bytes and digests",
    "database": "both commits, until they are answered",
    "dispatch": "a place in the server's line; the tool is instant",
    "runtime": "the loop, building documents",
    "edge": "the route itself",
    "response": "the answer, onto the wire",
    "besides": "event loop, own work of the gateway, sequencing",
}


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    rounds: int
    seconds: float
    phase_seconds: float
    at_once: tuple[int, ...]

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=3, seconds=3.0, phase_seconds=5.0, at_once=BASELINE_CLIENTS)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.1, phase_seconds=0.2, at_once=(1, 32))


class Processes:
    """Starts the parts of the benchmark; `home` is that of the running PostgreSQL."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self._client_runs = 0

    @contextlib.contextmanager
    def answering(self, role: str, *more: str) -> Iterator[tuple[str, int]]:
        """The address and process of something that answers requests; ended in order."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
        environment = {**inherited, "TGA_HOME": str(self.home), "TGA_PORT": "0"}
        command = [sys.executable, "-m", "bench.http", "--role", role, *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
            try:
                assert process.stdout is not None
                url = next((line.strip() for line in process.stdout if line.startswith("http://")), "")
                if not url:
                    raise RuntimeError(f"the process {role} did not start")
                yield url, process.pid
            finally:
                process.terminate()
                process.communicate(timeout=60)

    def client(self, url: str, pid: int, at_once: int, seconds: float) -> Timing:
        self._client_runs += 1
        key = (self.home / "admin.key").read_text("ascii").strip()
        command = [sys.executable, "-m", "bench.http", "--role", "client", "--url", url, "--key", key]
        command += ["--name", f"run-{self._client_runs}", "--at-once", str(at_once), "--seconds", str(seconds)]
        command += ["--pid", str(pid), "--home", str(self.home)]
        ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        return Timing(**json.loads(ran.stdout))


async def measure_throughput(server: Server, processes: Processes, scale: Scale) -> tuple[Rounds, list[float]]:
    rounds, sync_ms = Rounds(), []
    with processes.answering("gateway") as gateway, processes.answering("empty") as empty:
        for number in range(scale.rounds):
            sync_ms.append(measure_sync(server.embedded.data_dir))
            for at_once in scale.at_once:
                timing = await asyncio.to_thread(processes.client, *empty, at_once, scale.seconds)
                rounds.add("baseline", at_once, timing)
                timing = await asyncio.to_thread(processes.client, *gateway, at_once, scale.seconds)
                rounds.add(HTTP, at_once, timing)
                timing, batch_size = await run_calls(server, f"round-{number}", at_once, scale.seconds)
                rounds.add(IN_PROCESS, at_once, timing, batch_size=batch_size)
    return rounds, sync_ms


def measure_phases(processes: Processes, scale: Scale) -> dict[str, Any]:
    """One call after the other through a gateway that notes who is at work."""
    report = processes.home / "phases.json"
    with processes.answering("gateway", "--report", str(report)) as (url, pid):
        processes.client(url, pid, 1, 0.5)
        os.kill(pid, signal.SIGUSR1)
        time.sleep(0.1)
        processes.client(url, pid, 1, scale.phase_seconds)
    return dict(json.loads(report.read_text()))


def phase_table(report: dict[str, Any], empty_us: float, in_process_us: float) -> Table:
    calls, cpu_s = report["calls"], report["cpu_s"]
    taken = {phase: cpu_s.get(phase, 0.0) for phase in PHASES}
    taken["besides"] = report["whole_s"] - sum(taken.values())
    table = Table(title=f"CPU of the gateway's process per call, by phase; {calls:,} calls, one at a time")
    for heading in ("", "µs", "of the whole", "to an empty route", "to the call in process", ""):
        table.add_column(heading, justify="right" if heading else "left")
    for phase, seconds in taken.items():
        us = seconds / calls * 1e6
        share = f"{seconds / report['whole_s']:.0%}"
        table.add_row(phase, f"{us:.0f}", share, f"{us / empty_us:.2f}", f"{us / in_process_us:.2f}", MEANING[phase])
    table.add_section()
    whole_us = report["whole_s"] / calls * 1e6
    table.add_row("all", f"{whole_us:.0f}", "", f"{whole_us / empty_us:.2f}", f"{whole_us / in_process_us:.2f}", "")
    return table


def ratios_to_in_process(cells: list[Cell]) -> list[str]:
    by_name = {(cell.name, cell.at_once): cell for cell in cells}
    lines = []
    for at_once in sorted(at_once for name, at_once in by_name if name == HTTP):
        wire, inside = by_name[HTTP, at_once], by_name[IN_PROCESS, at_once]
        ratios = sorted(a.per_second / b.per_second for a, b in zip(wire.rounds, inside.rounds, strict=True))
        cpu = wire.median.client_us / inside.median.client_us
        lines.append(
            f"{at_once:>2} at once: over HTTP {ratios[len(ratios) // 2]:.2f} of the calls in process "
            f"({ratios[0]:.2f} to {ratios[-1]:.2f}), with {cpu:.2f} times their CPU"
        )
    return lines


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    from bench.http_roles import CONFIG

    home = server.embedded.data_dir.parents[1]
    (home / "tga.toml").write_text(CONFIG)
    processes = Processes(home)
    console.print(f"{machine}; {scale.rounds} rounds of {scale.seconds:g} s, medians; the tool answers at once")
    rounds, sync_ms = await measure_throughput(server, processes, scale)
    cells = rounds.cells()
    title = "Calls over HTTP and in process. Baseline: a FastAPI route that does nothing. Client CPU: of who answers"
    console.print(throughput_table(title, cells))
    for line in ratios_to_in_process(cells):
        console.print(line)
    console.print(f"The disk alone, a write and fdatasync in each round: {', '.join(f'{ms:.2f}' for ms in sync_ms)} ms")
    alone = {cell.name: cell.median.client_us for cell in cells if cell.at_once == 1}
    report = await asyncio.to_thread(measure_phases, processes, scale)
    console.print(phase_table(report, alone["baseline"], alone[IN_PROCESS]))


def main() -> None:
    parser = arguments_of("http", __doc__)
    # The processes that the benchmark starts.
    parser.add_argument("--role", choices=("gateway", "empty", "client"), help=argparse.SUPPRESS)
    for name, kind in (("url", str), ("key", str), ("name", str), ("at-once", int), ("seconds", float), ("pid", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    for name in ("home", "report"):
        parser.add_argument(f"--{name}", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role is None:
        scale = Scale.quick() if given.quick else Scale.full()
        run_bench(lambda server, machine, console: bench(server, machine, console, scale))
        return
    from bench.http_roles import run_client, run_empty_route, run_gateway

    if given.role == "gateway":
        report = run_on_fast_loop(run_gateway(is_watched=given.report is not None))
        if report is not None:
            given.report.write_text(report)
    elif given.role == "empty":
        run_on_fast_loop(run_empty_route())
    else:
        run_on_fast_loop(
            run_client(given.url, given.key, given.name, given.at_once, given.seconds, given.pid, given.home)
        )


if __name__ == "__main__":
    main()
