"""Ours beside pgbench and the peers, in one run: `python -m bench.comparison [--quick] [--peers FOLDER]`.

Calls, repeats of finished calls and runs of one step, at 1, 8, 32 and 128 at once. All take turns in every round, on
the same machine and the same PostgreSQL (synchronous commit on), each in a database of its own. While one is measured
the processes of all others are stopped: some poll and compact also while nobody asks them. Ours is the whole
gateway as `tga serve` runs it, called over HTTP, with a tool server of its own behind HTTP; the tools of peers are
functions in their own process, which is their advantage. For a peer a call and a run of one step are the same thing.
A run of ours is measured twice: over HTTP, with a plain worker that is no part of the gateway, and in process, as the
peers on PostgreSQL are: caller, engine and worker in one.

Peers are optional: `--install` looks for them and puts them into the folder that `--peers` names. Those that are not
there are left out, and the report says why. It says also where a peer is better than ours.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from app.postgres.database import EMBEDDED_DATABASE
from app.postgres.sessions import GATEWAY_ROLE
from bench import http_runs
from bench.baseline import Baseline
from bench.comparison_report import (
    COUNTED_AT_ONCE,
    IN_PROCESS,
    OURS,
    PGBENCH,
    RUN,
    RUN_IN_PROCESS,
    RUN_OF_ONE_WORKER,
    WHATS,
    Counted,
    Measured,
    tables,
    where_peers_are_better,
    write,
)
from bench.cost import measuring_session
from bench.http_runs import make_keys, measure_runs
from bench.measure import (
    AT_ONCE,
    WARMUP_STEPS,
    Server,
    Timing,
    arguments_of,
    measure_sync,
    run_bench,
    run_on_fast_loop,
)
from bench.peer_processes import (
    ARGUMENTS,
    PEERS,
    PeerMissing,
    Running,
    default_folder,
    install,
    measure_http,
    started,
)
from bench.runs import run_whole
from bench.served import CONFIG, CallLoad, answering
from bench.tool_call import run_calls, step_of_real_call

# What is asked of ours over HTTP: the name of its line, and which table it is in.
LINES: Final = {
    "call": (OURS, "call"),
    "repeat": (OURS, "repeat"),
    http_runs.RUN: (RUN, "run"),
    http_runs.RUN_BY_SLOTS: (RUN_OF_ONE_WORKER, "run"),
}
AFTER_STOP_S: Final = 1.0  # for what a process does first when it goes on: timers that are over, heartbeats
DOCS: Final = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True, slots=True)
class Scale:
    rounds: int
    seconds: float
    at_once: tuple[int, ...]

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=3, seconds=3.0, at_once=AT_ONCE)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=1, seconds=0.2, at_once=(1, 8))


def _measured(name: str, what: str, at_once: int, found: dict[str, Any], cpu_s: float) -> Measured | None:
    if not found["steps"]:
        return None
    timing = Timing(found["steps"], found["seconds"], cpu_s, 0.0, found["latencies_s"])
    p50, p99 = timing.percentile_ms(50), timing.percentile_ms(99)
    return Measured(name, what, at_once, timing.per_second, p50, p99, timing.client_us)


@contextlib.contextmanager
def _our_gateway(home: Path, store: str) -> Iterator[Running]:
    """`store`: the URL of its database, for the keys of caller and worker."""
    with answering("tool", home) as (tool, tool_pid):
        (home / "tga.toml").write_text(CONFIG.format(tool=tool))
        with answering("gateway", home) as (url, pid):
            key = (home / "admin.key").read_text("ascii").strip()
            port = int(url.rpartition(":")[2].rstrip("/"))

            keys: dict[str, str] = {}

            def measure(what: str, at_once: int, seconds: float) -> Any:
                if what in (http_runs.RUN, http_runs.RUN_BY_SLOTS):
                    if not keys:
                        keys.update(run_on_fast_loop(make_keys(store)))
                    return run_on_fast_loop(measure_runs(port, keys, ARGUMENTS, at_once, seconds, shape=what))
                load = CallLoad(key, what, at_once)
                return run_on_fast_loop(measure_http(load, port, at_once, seconds))

            yield Running(PEERS[0], [pid, tool_pid], measure)


@dataclass
class Comparison:
    """All who take part, and what was found."""

    server: Server
    scale: Scale
    baseline: Baseline
    running: dict[str, Running]
    say: Callable[[str], None]

    def __post_init__(self) -> None:
        self.rounds: list[Measured] = []
        self.counted: list[Counted] = []
        self.left_out: dict[str, str] = {}

    async def measure(self) -> None:
        for number in range(self.scale.rounds):
            await self._settle()
            for at_once in self.scale.at_once:
                self.say(f"round {number + 1} of {self.scale.rounds}, {at_once} at once")
                await self._ours_in_process(number, at_once)
                for name, running in list(self.running.items()):
                    for what in LINES if name == OURS else ("call", "repeat"):
                        await self._ask(name, running, what, at_once)
        for name, running in list(self.running.items()):
            await self._count(name, running)

    def _keep(self, name: str, what: str, at_once: int, timing: Timing) -> None:
        found = {"steps": timing.steps, "seconds": timing.seconds, "latencies_s": timing.latencies_s}
        measured = _measured(name, what, at_once, found, timing.client_cpu_s + timing.server_cpu_s)
        self.rounds += [] if measured is None else [measured]

    async def _ours_in_process(self, number: int, at_once: int) -> None:
        clients = min(at_once, 32)
        if clients == at_once:
            self._keep(PGBENCH, "call", at_once, await self.baseline.run(clients, max(1.0, self.scale.seconds)))
        timing, _ = await run_calls(self.server, f"compared-{number}", at_once, self.scale.seconds)
        self._keep(IN_PROCESS, "call", at_once, timing)
        self._keep(RUN_IN_PROCESS, "run", at_once, await run_whole(self.server, at_once, self.scale.seconds))

    async def _ask(self, name: str, running: Running, what: str, at_once: int) -> None:
        try:
            with going(running):
                before = running.cpu_s() + self.server.cpu_s()
                found = await asyncio.to_thread(running.measure, what, at_once, self.scale.seconds)
                used = running.cpu_s() + self.server.cpu_s() - before
        except (PeerMissing, OSError, RuntimeError, ValueError) as error:
            if name == OURS:
                raise
            self.left_out[name] = f"it failed at {what}, {at_once} at once: {error}"
            self.say(f"{name} is left out from here on: {self.left_out[name]}")
            del self.running[name]
            return
        if found is not None:
            warmed = found["steps"] / (found["steps"] + WARMUP_STEPS * at_once)  # the rest of the CPU is the warm-up's
            line, table = LINES[what] if name == OURS else (name, what)
            measured = _measured(line, table, at_once, found, used * warmed)
            self.rounds += [] if measured is None else [measured]

    async def _settle(self) -> None:
        """What was written so far is written to disk now, once a round. After it PostgreSQL logs each page whole once,
        which it does every five minutes, not every three seconds: so not before each stretch."""
        async with measuring_session(self.server.admin_url) as session:
            await session.execute("CHECKPOINT")

    async def _count(self, name: str, running: Running) -> None:
        await self._settle()
        database = EMBEDDED_DATABASE if name == OURS else f"peer_{name.lower()}"
        try:
            with going(running):
                # After a checkpoint PostgreSQL logs each page whole once: not what a call leaves, and seldom otherwise.
                await asyncio.to_thread(running.measure, "call", COUNTED_AT_ONCE, self.scale.seconds)
                before, files_before = await self._facts(database), running.stored_bytes()
                found = await asyncio.to_thread(running.measure, "call", COUNTED_AT_ONCE, max(1.0, self.scale.seconds))
                after, files = await self._facts(database), running.stored_bytes()
        except (PeerMissing, OSError, RuntimeError, ValueError):
            return
        steps = found["steps"] + WARMUP_STEPS * COUNTED_AT_ONCE  # the warm-up's too
        commits, stored, wal = ((b - a) / steps for a, b in zip(before, after, strict=True))
        if running.files is None:
            self.counted.append(Counted(name, commits, stored, wal))
        else:
            self.counted.append(Counted(name, None, (files - files_before) / steps, None))

    async def _facts(self, database: str) -> tuple[float, float, float]:
        """Transactions that wrote, the size of this database, and WAL. The first and the last are the whole server's,
        in which the others are idle. PostgreSQL's own counters of commits are of no use here: sessions add to them
        late (up to ten seconds), and looks for work are in them, which write nothing."""
        async with measuring_session(self.server.observer_url) as session:
            row = await session.fetchrow(
                "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::float AS commits,"
                " pg_database_size($1)::float AS stored,"
                " pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')::float AS wal",
                database,
            )
            assert row is not None
            return row["commits"], row["stored"], row["wal"]

    def medians(self) -> list[Measured]:
        """Of each line, the round with the median rate."""
        lines: dict[tuple[str, str, int], list[Measured]] = {}
        for measured in self.rounds:
            lines.setdefault((measured.what, measured.name, measured.at_once), []).append(measured)
        ordered = sorted(lines.items(), key=lambda item: (WHATS.index(item[0][0]), item[0][2]))
        return [sorted(found, key=lambda one: one.per_second)[len(found) // 2] for _, found in ordered]


@contextlib.contextmanager
def going(running: Running) -> Iterator[None]:
    """It takes part inside; outside it is stopped."""
    running.go_on()
    time.sleep(AFTER_STOP_S)
    try:
        yield
    finally:
        running.stop()


@contextlib.asynccontextmanager
async def _peers(server: Server, folder: Path, left_out: dict[str, str]) -> AsyncIterator[dict[str, Running]]:
    home = server.embedded.data_dir.parents[1]
    with contextlib.ExitStack() as stack:
        running = {OURS: stack.enter_context(_our_gateway(home, server.embedded.url(GATEWAY_ROLE, EMBEDDED_DATABASE)))}
        for peer in PEERS:
            database = f"peer_{peer.name.lower()}"
            async with measuring_session(server.observer_url) as session:
                await session.execute(f"CREATE DATABASE {database}")
            url = server.embedded.url("postgres", database)
            try:
                running[peer.name] = await asyncio.to_thread(
                    stack.enter_context, started(peer, folder, url, home / database)
                )
            except PeerMissing as error:
                left_out[peer.name] = str(error)
        for one in running.values():
            one.stop()
        try:
            yield dict(running)
        finally:
            for one in running.values():  # a process that is stopped hears no signal to end
                one.go_on()


async def bench(server: Server, machine: str, console: Console, scale: Scale, folder: Path, out: Path | None) -> None:
    baseline = Baseline(server, await step_of_real_call(server))
    await baseline.prepare()
    left_out: dict[str, str] = {}
    began = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    async with _peers(server, folder, left_out) as running:
        for name, why in left_out.items():
            console.print(f"LEFT OUT: {name}: {why}", markup=False)
        here = [peer for peer in PEERS if peer.name in running]
        console.print(f"{machine}; {scale.rounds} rounds of {scale.seconds:g} s; synchronous commit on", markup=False)
        for peer in here:
            console.print(f"{peer.name}: {peer.settings}", markup=False)
        sync_ms = measure_sync(server.embedded.data_dir)
        comparison = Comparison(server, scale, baseline, running, lambda line: console.print(line, markup=False))
        await comparison.measure()
    medians, counted = comparison.medians(), comparison.counted
    for table in tables(medians, counted):
        console.print(table)
    better = where_peers_are_better(medians, counted)
    console.print("Where a peer is better:" if better else "No peer that ran here is better in any figure.")
    for line in better:
        console.print(f"  {line}", markup=False)
    if out is not None:
        report = {
            "began_at": began,
            "machine": machine,
            "disk_sync_ms": round(sync_ms, 3),
            "rounds": scale.rounds,
            "seconds": scale.seconds,
            "settings": {peer.name: peer.settings for peer in here},
            "left_out": {**left_out, **comparison.left_out},
            "medians": [asdict(one) for one in medians],
            "all_rounds": [asdict(one) for one in comparison.rounds],
            "counted": [asdict(one) for one in counted],
            "where_a_peer_is_better": better,
        }
        console.print(write(out, report), markup=False)


def main() -> None:
    parser = arguments_of("comparison", __doc__)
    parser.add_argument(
        "--peers", type=Path, default=default_folder(), help="where the peers are (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, help="in which all take turns (default 3)")
    parser.add_argument("--install", action="store_true", help="look for the peers, put them there, and end")
    parser.add_argument("--out", type=Path, help="where report and chart go (default: docs; with --quick: nowhere)")
    given = parser.parse_args()
    if given.install:
        install(given.peers, lambda line: print(line, flush=True))
        return
    scale = Scale.quick() if given.quick else Scale.full()
    scale = replace(scale, rounds=given.rounds or scale.rounds)
    out = given.out or (None if given.quick else DOCS)
    run_bench(lambda server, machine, console: bench(server, machine, console, scale, given.peers, out))


if __name__ == "__main__":
    main()
