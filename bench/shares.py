"""Who spends what on a call: `python -m bench.shares [--quick] [--against FOLDER] [--at-once 1,32] [--profile FILE]`.

`tga serve` as users run it, its own PostgreSQL, a tool server in a process of its own, and a client in this one: the
processor time of each for a fresh call and for a repeat of a finished one, from /proc, and the write-ahead log that
they leave. Arguments have some 500 bytes, and the tool's schema ten rules. `--of` names others: runs of one step, with
a worker for each caller or with one for all (bench/http_runs.py). `--against` names the folder of another
checkout with its own .venv: its gateway takes turns with this one's, round by round, so that a busy machine is unfair
to both alike. What each gateway and its database spend while no caller asks is measured first and shown, and not taken
off: work that waits for idle time is not done under load. `--profile` writes what py-spy sees of the gateway during
calls (`--profile-of`) at the most at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import asyncpg
from rich.console import Console
from rich.table import Table

from app.postgres.database import EMBEDDED_DATABASE
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.sessions import GATEWAY_ROLE
from bench.http_roles import Connection, Load, cpu_s_of
from bench.http_runs import RUN, RUN_BY_SLOTS, make_keys, measure_runs
from bench.measure import WARMUP_STEPS, Server, arguments_of, measure_sync, own_folder, run_on_fast_loop
from bench.served import answering

FRESH, REPEAT = "fresh", "repeat"
KINDS: Final = (FRESH, REPEAT, RUN, RUN_BY_SLOTS)
REPEATED_KEYS: Final = 20  # of each connection, finished calls that are asked for again
CONFIG: Final = """
[servers.crm]
transport = "http"
base_url = "{url}"
max_concurrency = 256
max_in_flight = 1000
[servers.crm.tools.create_ticket]
class = "write"
[servers.crm.tools.create_ticket.input_schema]
type = "object"
required = ["title", "text", "priority"]
additionalProperties = false
[servers.crm.tools.create_ticket.input_schema.properties]
title = {{ type = "string", minLength = 1, maxLength = 200 }}
text = {{ type = "string", maxLength = 10000 }}
priority = {{ type = "integer", minimum = 1, maximum = 5 }}
labels = {{ type = "array", maxItems = 10, items = {{ type = "string", pattern = "^[a-z-]+$" }} }}
customer = {{ type = "object", required = ["id"], properties = {{ id = {{ type = "string" }} }} }}
[limits]
requests_per_second = 1000000
burst = 1000000
"""


@dataclass(frozen=True, slots=True)
class Scale:
    """How long to measure."""

    rounds: int
    seconds: float
    at_once: tuple[int, ...]

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=5, seconds=4.0, at_once=(1, 8, 32))

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.2, at_once=(1, 32))


class _Calls(Load):
    """Fresh calls, or again and again the first ones of each connection."""

    def __init__(self, key: str, name: str, at_once: int, *, is_repeat: bool) -> None:
        super().__init__(key, name, at_once)
        self._is_repeat = is_repeat
        words = random.Random(7)
        self._text = " ".join("".join(words.choices("abcdefghijklmnopqrstuvwxyz", k=6)) for _ in range(54))

    def request(self, connection: int, count: int) -> bytes:
        n = count % REPEATED_KEYS if self._is_repeat else count
        body = json.dumps(
            {
                "server_id": "crm",
                "tool_name": "create_ticket",
                "idempotency_key": f"{self._name}-{connection}-{n}",
                "arguments": {
                    "title": f"ticket {n}",
                    "priority": 2,
                    "text": self._text,
                    "labels": ["from-mail", "urgent"],
                    "customer": {"id": f"C-{connection}"},
                },
            }
        ).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)


@dataclass(frozen=True, slots=True)
class Spent:
    """Of one stretch: calls, and microseconds of each process for one of them."""

    calls: int
    seconds: float
    gateway_us: float
    database_us: float
    tool_us: float
    client_us: float
    wal_bytes: float
    p50_ms: float
    p99_ms: float


class Subject:
    """One checkout's gateway, with a database of its own."""

    def __init__(self, name: str, home: Path, url: str, pid: int, tool_pid: int) -> None:
        self.name = name
        self.pid = pid
        self._home = home
        self._host, _, port = url.removeprefix("http://").partition(":")
        self._port = int(port)
        self._tool_pid = tool_pid
        self._key = (home / "admin.key").read_text("ascii").strip()
        self._server = Server(EmbeddedPostgres(home))
        self._runs = 0
        self._keys: dict[str, str] = {}  # of caller and worker, for runs

    @property
    def data_dir(self) -> Path:
        return self._server.embedded.data_dir

    async def measure_idle(self, seconds: float) -> tuple[float, float]:
        """Milliseconds of processor time of gateway and database in a second without calls."""
        await self.measure(FRESH, 1, 0.2)
        await asyncio.sleep(1)  # what the calls left to do is done
        before, began = await self._counters(), time.perf_counter()
        await asyncio.sleep(seconds)
        took, after = time.perf_counter() - began, await self._counters()
        return 1e3 * (after[0] - before[0]) / took, 1e3 * (after[1] - before[1]) / took

    async def measure(self, kind: str, at_once: int, seconds: float) -> Spent:
        if kind in (RUN, RUN_BY_SLOTS):
            return await self._measure_runs(kind, at_once, seconds)
        self._runs += 1
        load = _Calls(self._key, f"{kind}-{self._runs}", at_once, is_repeat=kind == REPEAT)
        loop = asyncio.get_running_loop()
        connections: list[Connection] = []
        for number in range(at_once):
            _, connection = await loop.create_connection(
                lambda n=number: Connection(load, n),  # type: ignore[misc]
                self._host,
                self._port,
            )
            connections.append(connection)
        warmups = REPEATED_KEYS if kind == REPEAT else WARMUP_STEPS
        await load.run(connections, steps=warmups * at_once, seconds=120)
        if kind == REPEAT:  # each once more: its first repeat is verified strictly, the others as far as bytes differ
            await load.run(connections, steps=REPEATED_KEYS * at_once, seconds=120)
        before, began = await self._counters(), time.perf_counter()
        await load.run(connections, steps=2**62, seconds=seconds)
        took, after = time.perf_counter() - began, await self._counters()
        load.is_over = True
        for connection in connections:
            connection.close()
        return self._spent(load.latencies, took, before, after)

    async def _measure_runs(self, kind: str, at_once: int, seconds: float) -> Spent:
        if not self._keys:
            self._keys = await make_keys(self._server.embedded.url(GATEWAY_ROLE, EMBEDDED_DATABASE))
        counted: list[tuple[float, ...]] = []

        async def count() -> None:
            counted.append(await self._counters())

        given = {"title": "ticket", "priority": 2, "text": "It does not work. " * 25}
        found = await measure_runs(self._port, self._keys, given, at_once, seconds, shape=kind, on_border=count)
        return self._spent(found["latencies_s"], found["seconds"], *counted)

    def _spent(
        self, latencies_s: list[float], took: float, before: tuple[float, ...], after: tuple[float, ...]
    ) -> Spent:
        calls = len(latencies_s)
        ordered = sorted(latencies_s)
        gateway, database, tool, client, wal = (b - a for a, b in zip(before, after, strict=True))
        return Spent(
            calls,
            took,
            1e6 * gateway / calls,
            1e6 * database / calls,
            1e6 * tool / calls,
            1e6 * client / calls,
            wal / calls,
            ordered[calls // 2] * 1e3,
            ordered[min(calls - 1, calls * 99 // 100)] * 1e3,
        )

    async def _counters(self) -> tuple[float, ...]:
        session = await asyncpg.connect(self._server.embedded.url("postgres", "postgres"))
        wal = float(await session.fetchval("SELECT pg_current_wal_insert_lsn() - '0/0'::pg_lsn"))
        await session.close()
        return cpu_s_of(self.pid), self._server.cpu_s(), cpu_s_of(self._tool_pid), time.process_time(), wal


@contextlib.contextmanager
def started(command: list[str], **more: Any) -> Iterator[tuple[str, int]]:
    """The URL that the process says it listens on, and its id; ended in order."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, **more) as process:
        try:
            assert process.stdout is not None
            line = next((line for line in process.stdout if "Listening on " in line), None)
            if line is None:
                raise RuntimeError(f"{command} did not start")
            yield line.partition("Listening on ")[2].split()[0], process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)


@contextlib.contextmanager
def subject(name: str, folder: Path, python: str) -> Iterator[Subject]:
    """A gateway of the checkout in this folder, and its tool server."""
    with own_folder() as home, contextlib.ExitStack() as stack:
        inherited = {key: value for key, value in os.environ.items() if not key.startswith("TGA_")}
        tool_url, tool_pid = stack.enter_context(answering("tool", home))
        (home / "tga.toml").write_text(CONFIG.format(url=tool_url))
        environment = {**inherited, "TGA_HOME": str(home), "TGA_PORT": "0"}
        command = [python, "-m", "app.main", "serve"]
        url, pid = stack.enter_context(started(command, env=environment, cwd=folder))
        yield Subject(name, home, url, pid, tool_pid)


async def bench(
    subjects: list[Subject],
    scale: Scale,
    console: Console,
    profile: Path | None,
    profile_of: str,
    kinds: Sequence[str],
) -> None:
    console.print(f"The disk alone, a write and fdatasync: {measure_sync(subjects[0].data_dir):.2f} ms")
    found: dict[tuple[str, int, str], list[Spent]] = {}
    for one in subjects:
        gateway_ms, database_ms = await one.measure_idle(scale.seconds * 2)
        console.print(f"{one.name}, no calls: gateway {gateway_ms:.1f}, PostgreSQL {database_ms:.1f} ms a second")
    for _ in range(scale.rounds):
        for at_once in scale.at_once:
            for kind in kinds:
                for one in subjects:
                    spent = await one.measure(kind, at_once, scale.seconds)
                    found.setdefault((kind, at_once, one.name), []).append(spent)
    console.print(_table(found, scale))
    if profile is not None:
        command = ["record", "-p", f"{subjects[-1].pid}", "-f", "raw", "-r", "500", "-d", "20", "-o", f"{profile}"]
        spy = await asyncio.create_subprocess_exec("py-spy", *command, stdout=subprocess.DEVNULL)
        await subjects[-1].measure(profile_of, scale.at_once[-1], 21)
        await spy.wait()


def _table(found: dict[tuple[str, int, str], list[Spent]], scale: Scale) -> Table:
    table = Table(title=f"µs of processor time a call, medians of {scale.rounds} rounds in turns")
    for heading in (
        "",
        "at once",
        "of",
        "gateway",
        "PostgreSQL",
        "both",
        "tool",
        "client",
        "WAL B",
        "a second",
        "p50 ms",
    ):
        table.add_column(heading, justify="right" if heading else "left")
    table.add_column("p99 ms", justify="right")
    for (kind, at_once, name), spent in sorted(found.items(), key=lambda item: (item[0][0], item[0][1])):
        middle = {
            field: statistics.median(getattr(one, field) for one in spent)
            for field in ("gateway_us", "database_us", "tool_us", "client_us", "wal_bytes", "p50_ms", "p99_ms")
        }
        both = statistics.median(one.gateway_us + one.database_us for one in spent)
        rate = statistics.median(one.calls / one.seconds for one in spent)
        numbers = [middle["gateway_us"], middle["database_us"], both, middle["tool_us"], middle["client_us"]]
        cells = [f"{number:,.0f}" for number in (*numbers, middle["wal_bytes"], rate)]
        table.add_row(kind, str(at_once), name, *cells, f"{middle['p50_ms']:.1f}", f"{middle['p99_ms']:.1f}")
    return table


def main() -> None:
    parser = arguments_of("shares", __doc__)
    parser.add_argument("--against", type=Path, help="the folder of another checkout, measured in turns with this one")
    parser.add_argument("--at-once", help="how many calls at once, 1,8,32 by default")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--profile", type=Path, help="where py-spy, which must be on PATH, writes what it saw")
    parser.add_argument("--profile-of", choices=KINDS, default=FRESH)
    parser.add_argument("--of", action="append", choices=KINDS, help=f"what is measured: {FRESH} and {REPEAT}, else")
    given = parser.parse_args()
    scale = Scale.quick() if given.quick else Scale.full()
    at_once = tuple(map(int, given.at_once.split(","))) if given.at_once else scale.at_once
    scale = Scale(given.rounds or scale.rounds, scale.seconds, at_once)
    with contextlib.ExitStack() as stack:
        here = Path(__file__).resolve().parents[1]
        subjects = [stack.enter_context(subject("this", here, sys.executable))]
        if given.against is not None:
            other = given.against.resolve()
            subjects.insert(0, stack.enter_context(subject("that", other, str(other / ".venv/bin/python"))))
        console = Console(width=None if Console().is_terminal else 150)
        kinds = given.of or [FRESH, REPEAT]
        run_on_fast_loop(bench(subjects, scale, console, given.profile, given.profile_of, kinds))


if __name__ == "__main__":
    main()
