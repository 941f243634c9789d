"""What more processes on one port give: `python -m bench.processes [--quick]`.

The whole gateway as `tga serve --processes N` runs it, with real PostgreSQL and a real (and quick) tool server, at 32
calls at once. Two tables:

- As the machine is: CPU of a call, of all gateway processes and the supervisor together, and of PostgreSQL. The first
  should be flat in N. The rate says little where client, tool server, PostgreSQL and gateway share two cores.
- With cores to spare: each gateway process may use a small share of a core and no more (it is stopped and continued
  hundreds of times a second), as if it ran on a core of its own that is so much slower, while PostgreSQL, the client
  and the tool server have what they need. The rate should grow as N does, until PostgreSQL or the client is full.
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
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from rich.console import Console
from rich.table import Table

from bench.http import Processes as HttpProcesses
from bench.http_roles import CONFIG, cpu_s_of
from bench.measure import WARMUP_STEPS, Server, Timing, arguments_of, run_bench

AT_ONCE: Final = 32
_STOP_S: Final = 120.0
_ANSWER: Final = (
    b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 19\r\n\r\n" + b'{"ticket_id":"T-1"}'
)


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure; `share`: of a core, for each process, where there are cores to spare."""

    processes: tuple[int, ...]
    rounds: int
    seconds: float
    share: float

    @classmethod
    def full(cls) -> Scale:
        return cls(processes=(1, 2, 4), rounds=3, seconds=6.0, share=0.1)

    @classmethod
    def quick(cls) -> Scale:
        return cls(processes=(1, 2), rounds=1, seconds=0.3, share=0.2)


@dataclass(frozen=True, slots=True)
class Measured:
    """One stretch with so many processes. CPU is of the gateway's processes and their supervisor."""

    timing: Timing
    gateway_cpu_s: float
    calls: int

    @property
    def gateway_us(self) -> float:
        return self.gateway_cpu_s * 1e6 / self.calls


class ToolConnection(asyncio.Protocol):
    """Answers every request with the same few bytes."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport, self._buffer = cast("asyncio.Transport", transport), b""

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while True:
            head, found, rest = self._buffer.partition(b"\r\n\r\n")
            if not found:
                return
            length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
            if len(rest) < length:
                return
            self._buffer = rest[length:]
            self._transport.write(_ANSWER)


async def run_tool() -> None:
    listening = await asyncio.get_running_loop().create_server(ToolConnection, "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await listening.serve_forever()


@contextlib.contextmanager
def tool_server() -> Iterator[str]:
    command = [sys.executable, "-m", "bench.processes", "--role", "tool"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.communicate(timeout=_STOP_S)


@contextlib.contextmanager
def gateway(home: Path, processes: int) -> Iterator[tuple[str, int, list[int]]]:
    """Its address, the process that was started, and all that serve (itself, where it is alone)."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    environment = {**inherited, "TGA_HOME": str(home), "TGA_PORT": "0"}
    command = [sys.executable, "-m", "app.main", "serve", "--processes", str(processes)]
    log = home / "serve.log"
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said, env=environment) as process:
        try:
            ready = f"{processes} processes take requests" if processes > 1 else "administrator's key"
            while ready not in log.read_text("utf-8"):
                if process.poll() is not None:
                    raise RuntimeError(f"the gateway did not start:\n{log.read_text('utf-8')}")
                time.sleep(0.05)
            url = log.read_text("utf-8").split("Listening on ")[1].split()[0]
            serving = children_of(process.pid) if processes > 1 else [process.pid]
            yield url, process.pid, serving
        finally:
            process.terminate()
            process.wait(timeout=_STOP_S)


def children_of(pid: int) -> list[int]:
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(entry.name))
    return found


class Throttle:
    """Lets each of these processes use `share` of a core, by stopping it whenever it has used more."""

    def __init__(self, pids: list[int], share: float) -> None:
        self._pids = pids
        self._share = share
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        for pid in self._pids:
            os.kill(pid, signal.SIGCONT)

    def _run(self) -> None:
        began, used = time.monotonic(), {pid: _used_s(pid) for pid in self._pids}
        stopped: set[int] = set()
        while not self._over.wait(0.002):
            allowed = self._share * (time.monotonic() - began)
            for pid in self._pids:
                is_over = _used_s(pid) - used[pid] > allowed
                if is_over != (pid in stopped):
                    os.kill(pid, signal.SIGSTOP if is_over else signal.SIGCONT)
                    stopped ^= {pid}


def _used_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9


def measure(http: HttpProcesses, home: Path, processes: int, seconds: float, share: float | None) -> Measured:
    with gateway(home, processes) as (url, pid, serving):
        http.client(url, pid, AT_ONCE, 0.2)  # connections and plans are warm
        everyone = {pid, *serving}
        throttled = contextlib.nullcontext() if share is None else Throttle(serving, share)
        with throttled:
            before = sum(map(cpu_s_of, everyone))
            timing = http.client(url, pid, AT_ONCE, seconds)
            used_s = sum(map(cpu_s_of, everyone)) - before
    return Measured(timing, used_s, timing.steps + WARMUP_STEPS * AT_ONCE)


def table_of(title: str, measured: dict[int, list[Measured]]) -> Table:
    table = Table(title=title)
    for heading in ("processes", "calls a second", "ratio", "gateway CPU µs", "ratio", "PostgreSQL CPU µs", "p50 ms"):
        table.add_column(heading, justify="right")
    first = median(measured[min(measured)])
    for processes, rounds in measured.items():
        one = median(rounds)
        table.add_row(
            str(processes),
            f"{one.timing.per_second:,.0f}",
            f"{one.timing.per_second / first.timing.per_second:.2f}",
            f"{one.gateway_us:,.0f}",
            f"{one.gateway_us / first.gateway_us:.2f}",
            f"{one.timing.server_us:,.0f}",
            f"{one.timing.percentile_ms(50):.1f}",
        )
    return table


def median(rounds: list[Measured]) -> Measured:
    return sorted(rounds, key=lambda one: one.timing.per_second)[len(rounds) // 2]


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    home = server.embedded.data_dir.parents[1]
    http = HttpProcesses(home)
    console.print(f"{machine}; {AT_ONCE} at once, {scale.rounds} rounds of {scale.seconds:g} s, medians")
    as_is: dict[int, list[Measured]] = {processes: [] for processes in scale.processes}
    to_spare: dict[int, list[Measured]] = {processes: [] for processes in scale.processes}
    with tool_server() as tool:
        (home / "tga.toml").write_text(CONFIG.replace("http://127.0.0.1:9", tool))
        for _ in range(scale.rounds):
            for processes in scale.processes:
                for kept, share in ((as_is, None), (to_spare, scale.share)):
                    one = await asyncio.to_thread(measure, http, home, processes, scale.seconds, share)
                    kept[processes].append(one)
    console.print(table_of("As the machine is: everything on the same cores", as_is))
    console.print(table_of(f"With cores to spare: each process has {scale.share:.0%} of a core and no more", to_spare))
    console.print(json.dumps({"cpu_ratio": ratios(as_is), "rate_ratio_with_cores_to_spare": rates(to_spare)}))


def ratios(measured: dict[int, list[Measured]]) -> dict[int, float]:
    first = median(measured[min(measured)]).gateway_us
    return {processes: round(median(rounds).gateway_us / first, 2) for processes, rounds in measured.items()}


def rates(measured: dict[int, list[Measured]]) -> dict[int, float]:
    first = median(measured[min(measured)]).timing.per_second
    return {processes: round(median(rounds).timing.per_second / first, 2) for processes, rounds in measured.items()}


def main() -> None:
    parser = arguments_of("processes", __doc__)
    parser.add_argument("--role", choices=("tool",), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "tool":
        asyncio.run(run_tool())
        return
    scale = Scale.quick() if given.quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
