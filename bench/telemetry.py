"""What telemetry costs a call: `python -m bench.telemetry [--quick]`.

The same calls in process, with everything off, with metrics, with a line for each call as well, and with spans over
OTLP besides (to a receiver in a process of its own). The four take turns, slice by slice, in one run; what is compared
is processor time per call, of all threads. The aim is that metrics and lines add at most three per cent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rich.console import Console
from rich.table import Table

from app.clock import SystemClock
from app.core.errors import TgaError
from app.core.instruments import Instruments
from app.edge.call_lines import Lines, LineWriter
from app.edge.observing import CallObserver
from app.edge.spans import spans_over_otlp
from app.postgres.writer import Writer
from bench.gateway import Answering, completed, fresh_calls, open_gateway
from bench.measure import Server, arguments_of, closed_loop, run_bench

AT_ONCE: Final = 32
AIM: Final = 0.03
NAMES: Final = ("off", "metrics", "metrics and lines", "and spans over OTLP")
_RECEIVER: Final = """
import http.server
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200); self.send_header("content-length", "0"); self.end_headers()
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
print(server.server_port, flush=True)
server.serve_forever()
"""


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int
    seconds: float

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=25, seconds=0.6)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=2, seconds=0.1)


class Uncounted(Writer):
    """Without its counters, which a gateway always has."""

    def _count(self, results: list[TgaError | None], took_s: float) -> None:
        return None


@contextlib.contextmanager
def receiver() -> Iterator[str]:
    process = subprocess.Popen([sys.executable, "-c", _RECEIVER], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def observing(name: str, endpoint: str) -> Iterator[tuple[CallObserver | None, Instruments | None]]:
    """What a gateway of this kind tells, and to whom."""
    if name == "off":
        yield None, None
        return
    instruments, clock = Instruments(), SystemClock()
    observer = CallObserver(instruments)
    with contextlib.ExitStack() as stack:
        if name != "metrics":
            nowhere = os.open(os.devnull, os.O_WRONLY)
            stack.callback(os.close, nowhere)
            writer = LineWriter(instruments, lambda raw: os.write(nowhere, raw))
            stack.callback(writer.close)
            observer.lines = Lines(writer, clock, "text")
        if name == NAMES[-1]:
            observer.spans, queue = spans_over_otlp(endpoint, clock, instruments)
            stack.callback(queue.close)
        yield observer, instruments


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    console.print(f"{machine}; {AT_ONCE} at once, {scale.rounds} rounds of {scale.seconds:g} s each")
    spent: dict[str, list[float]] = {name: [] for name in NAMES}
    with receiver() as endpoint:
        for number in range(scale.rounds):
            # In another order each time: whoever comes first in a round is favoured by nothing.
            for place in range(len(NAMES)):
                name = NAMES[(place + number) % len(NAMES)]
                queues = [fresh_calls(f"{name}-{number}-{worker}") for worker in range(AT_ONCE)]
                with observing(name, endpoint) as (observer, instruments):
                    async with open_gateway(
                        server.gateway_url,
                        Answering(),
                        observer=observer,
                        instruments=instruments,
                        writer_type=Uncounted if observer is None else Writer,
                    ) as gateway:
                        do = functools.partial(completed, gateway.runtime)
                        timing = await closed_loop(server, do, queues, scale.seconds)
                spent[name].append(timing.client_us)
    _show(console, spent)


def _show(console: Console, spent: dict[str, list[float]]) -> None:
    table = Table(title="Processor time of the gateway per call")
    for heading in ("", "µs, median", "more than off, µs", "of rounds, middle half", "per cent"):
        table.add_column(heading, justify="right" if heading else "left")
    off, verdict = spent["off"], ""
    for name, found in spent.items():
        more = sorted(one - base for one, base in zip(found, off, strict=True))
        middle, quarter = statistics.median(more), len(more) // 4
        share = middle / statistics.median(off)
        spread = f"{more[quarter]:+.1f} to {more[-1 - quarter]:+.1f}"
        table.add_row(name, f"{statistics.median(found):.1f}", f"{middle:+.1f}", spread, f"{share:+.1%}")
        if name == "metrics and lines":
            said = "met" if share <= AIM else "NOT met"
            verdict = f"Aim for metrics and lines: at most {AIM:.0%}; found {share:.1%}: {said}"
    console.print(table)
    console.print(verdict)


def main() -> None:
    options = arguments_of("telemetry", __doc__).parse_args()
    scale = Scale.quick() if options.quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
