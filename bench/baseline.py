"""The naive limit to compare with: one plpgsql call per commit, by pgbench or, where there is none, by asyncpg."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import shutil
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import asyncpg

from app.postgres.embedded.server import find_binaries
from bench.cost import measuring_session
from bench.measure import DATABASE, Server, Timing

WARMUP_S: Final = 1  # sessions are opened and statements planned; ours has its warm-up, too
_VARIABLE: Final = re.compile(r":(\w+)")


@dataclass(frozen=True, slots=True)
class Step:
    """What is timed: statements, each a transaction of its own, with `:name` for the values.

    `:stream` is another one for every `steps_per_stream` steps, as long as a trace's; `:place` counts from 1
    within it.
    """

    schema: str
    statements: tuple[str, ...]
    values: Mapping[str, bytes | str]
    steps_per_stream: int = 1


@dataclass
class Baseline:
    """Runs the step in a closed loop, as it stands and unbatched."""

    server: Server
    step: Step
    pgbench: Path | None = field(default_factory=lambda: find_pgbench())
    runs: int = 0
    steps: int = 0

    @property
    def name(self) -> str:
        return "pgbench" if self.pgbench else "asyncpg (no pgbench here)"

    async def prepare(self) -> None:
        async with measuring_session(self.server.admin_url) as admin:
            await admin.execute(self.step.schema)

    async def run(self, clients: int, seconds: float) -> Timing:
        self.runs += 1
        if self.pgbench is None:
            return await self._run_asyncpg(clients, seconds)
        return await asyncio.to_thread(self._run_pgbench, self.pgbench, clients, seconds)

    def _script(self) -> str:
        stream = (
            f"('trace:{self.runs:04}' || lpad(:client_id::text, 4, '0') || "
            f"lpad((:n / {self.step.steps_per_stream})::text, 28, '0'))"
        )
        lines = [r"\set n :n + 1", rf"\set place :n % {self.step.steps_per_stream} + 1"]
        for statement in self.step.statements:  # \gset ends one as a semicolon does
            lines.append(statement.replace(":stream", stream) + ("" if statement.endswith("gset") else ";"))
        return "\n".join(lines) + "\n"

    def _run_pgbench(self, pgbench: Path, clients: int, seconds: float) -> Timing:
        values = {name: f"\\x{v.hex()}" if isinstance(v, bytes) else v for name, v in self.step.values.items()}
        with tempfile.TemporaryDirectory(prefix="tga-bench-") as place:
            script = Path(place, "step.sql")
            script.write_text(self._script(), "utf-8")
            command: list[str | Path] = [pgbench, "-n", "-M", "prepared", "-f", script, "-c", str(clients)]
            # pgbench knows whole seconds only; for less than one each client makes a few steps, without warm-up.
            warmup_s = WARMUP_S if seconds >= 1 else 0
            steps = ["-T", str(warmup_s + round(seconds))] if warmup_s else ["-t", str(max(1, round(200 * seconds)))]
            command += ["-j", str(min(clients, os.cpu_count() or 1)), *steps]
            command += ["--log", f"--log-prefix={Path(place, 'latency')}"]
            command += [part for name, value in {"n": "-1", **values}.items() for part in ("-D", f"{name}={value}")]
            command += ["-h", self.server.embedded.socket_dir, "-p", "5432", "-U", "postgres", DATABASE]
            server_before, client_before = self.server.cpu_s(), _children_cpu_s()
            environment = {"LC_ALL": "C", "PATH": os.environ.get("PATH", "")}
            ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
            if ran.returncode != 0:
                raise RuntimeError(f"pgbench failed: {ran.stderr}")
            server_cpu_s, client_cpu_s = self.server.cpu_s() - server_before, _children_cpu_s() - client_before
            lines = [line for log in Path(place).glob("latency*") for line in log.read_text("ascii").splitlines()]
        self.steps += len(lines)
        return _timing_of(lines, warmup_s=warmup_s, client_cpu_s=client_cpu_s, server_cpu_s=server_cpu_s)

    async def _run_asyncpg(self, clients: int, seconds: float) -> Timing:
        latencies: list[float] = []
        prepared = [_numbered(statement) for statement in self.step.statements]

        async def work(session: asyncpg.Connection[asyncpg.Record], client: int, until: float) -> None:
            for n in range(2**31):
                started = time.perf_counter()
                if started >= until:
                    return
                stream = f"trace:{self.runs:04}{client:04}{n // self.step.steps_per_stream:028}"
                values: dict[str, Any] = {**self.step.values, "stream": stream}
                values["place"] = n % self.step.steps_per_stream + 1
                for statement, names in prepared:
                    await session.fetchval(statement, *(values[name] for name in names))
                latencies.append(time.perf_counter() - started)

        async with contextlib.AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(measuring_session(self.server.admin_url)) for _ in range(clients)
            ]
            server_before, client_before, started = self.server.cpu_s(), time.process_time(), time.perf_counter()
            await asyncio.gather(*(work(session, i, started + seconds) for i, session in enumerate(sessions)))
            elapsed, client_cpu_s = time.perf_counter() - started, time.process_time() - client_before
            self.steps += len(latencies)
            return Timing(len(latencies), elapsed, client_cpu_s, self.server.cpu_s() - server_before, latencies)

    async def verify_stored(self, counts: Mapping[str, int]) -> None:
        """It stored what it was timed for."""
        async with measuring_session(self.server.admin_url) as session:
            found = {name: await session.fetchval(f"SELECT count(*) FROM baseline.{name}") for name in counts}
        if found != counts:
            raise RuntimeError(f"the baseline should have stored {counts} and stored {found}")


def _timing_of(lines: list[str], *, warmup_s: float, client_cpu_s: float, server_cpu_s: float) -> Timing:
    """Of the steps that ended after the warm-up; the CPU is of the whole run, and counted in proportion."""
    ended = sorted(
        (int(epoch) + int(us) / 1e6, int(taken) / 1e6) for _, _, taken, _, epoch, us in map(str.split, lines)
    )
    begun = ended[0][0] - ended[0][1] + warmup_s
    latencies = [taken for at, taken in ended if at > begun]
    part = len(latencies) / len(ended)
    return Timing(len(latencies), ended[-1][0] - begun, client_cpu_s * part, server_cpu_s * part, latencies)


def _numbered(statement: str) -> tuple[str, list[str]]:
    """The statement with $1, $2, and the names that they stand for."""
    names: list[str] = []

    def number(match: re.Match[str]) -> str:
        names.append(match[1])
        return f"${len(names)}"

    return _VARIABLE.sub(number, statement), names


def find_pgbench() -> Path | None:
    beside = find_binaries() / "pgbench"
    others = sorted(Path("/usr/lib/postgresql").glob("*/bin/pgbench"), reverse=True)
    on_path = shutil.which("pgbench")
    for candidate in (beside, *([Path(on_path)] if on_path else []), *others):
        if candidate.is_file():
            return candidate
    return None


def _children_cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
