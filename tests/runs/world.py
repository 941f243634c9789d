"""The world around runs under test: PostgreSQL, the bank with its own book, gateways and workers as processes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import random
import shutil
import signal
import socket
import subprocess
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import asyncpg

from app.keys.keyring import Keyring
from app.postgres.api_keys import PostgresAccess
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.migrate import migrate
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.bank import bank_tables
from tests.conftest import TEMPLATE, copy_template, make_home
from tests.crash.world import PATIENCE_S, Bank, Database
from tests.runs import processes
from tests.runs.processes import Fault, GatewayOptions, SdkWorkerOptions, WorkerOptions
from tests.runs.programs import PROGRAMS
from tests.runs.worker import Boundaries, Client, Refused, Worker

_numbers = itertools.count(1)
POLICY = """
@id("tools") permit(principal, action == Action::"call", resource);
@id("unattended") permit(principal, action == Action::"call_unattended", resource);
@id("start") permit(principal, action == Action::"start", resource);
"""


class Process:
    """A gateway or a worker. It notes what it passes in a file, a line each."""

    def __init__(self, pid: int, notes: Path) -> None:
        self.pid = pid
        self.notes = notes

    def said(self) -> list[dict[str, Any]]:
        if not self.notes.exists():
            return []
        return [json.loads(line) for line in self.notes.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]

    def has_said(self, key: str) -> bool:
        return any(key in line for line in self.said())

    @property
    def places(self) -> Counter[str]:
        return Counter(line["place"] for line in self.said() if "place" in line)

    def is_alive(self) -> bool:
        return self._state() not in ("", "Z", "X")

    def is_stopped(self) -> bool:
        return self._state() == "T"

    def _state(self) -> str:
        try:
            return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return ""

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, number)

    async def kill(self) -> None:
        self.signal(signal.SIGKILL)
        await until(lambda: not self.is_alive())

    def log(self) -> str:
        log = Path(f"{self.notes}.log")
        return log.read_text() if log.exists() else ""


class GatewayProcess(Process):
    url: str = ""

    async def listening(self) -> Self:
        await until(lambda: self.has_said("url") or not self.is_alive())
        urls = [line["url"] for line in self.said() if "url" in line]
        assert urls, self.log()
        self.url = urls[0]
        return self


class RunsWorld:
    """One PostgreSQL, one bank, one home; gateways and workers come and go."""

    def __init__(self) -> None:
        self.place = make_home()
        self.postgres = EmbeddedPostgres(self.place / "home")
        self.bank = Bank(self.place / "bank.jsonl")
        self.keys: dict[str, str] = {}
        self._processes: list[Process] = []

    def start(self) -> Self:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._zygote = ours
        command = processes.command_line()
        self._zygote_process = subprocess.Popen(command, stdin=theirs.fileno(), pass_fds=[theirs.fileno()])
        theirs.close()
        self.postgres.start()
        self.bank.start()
        asyncio.run(self._make_template())
        self.renew()
        return self

    def renew(self) -> None:
        """An empty database, with keys of its own."""
        for memory in self.place.rglob("log.head*"):  # of the log before; to go on with another one would be a fork
            memory.unlink()
        self.database = asyncio.run(self._make_database())

    def kill_processes(self) -> None:
        for process in self._processes:
            process.signal(signal.SIGKILL)
        self._processes.clear()

    def stop(self) -> None:
        self.kill_processes()
        self._zygote.close()
        self._zygote_process.wait()
        self.bank.kill()
        self.postgres.stop()
        shutil.rmtree(self.place)

    async def _make_template(self) -> None:
        root = await asyncpg.connect(self.postgres.url())
        try:
            await root.execute(f"CREATE DATABASE {TEMPLATE}")
        finally:
            await root.close()
        await migrate(self.postgres.url(database=TEMPLATE))
        Keyring.open(self.place / "keys")

    async def _make_database(self) -> Database:
        root = await asyncpg.connect(self.postgres.url())
        name = f"tga_runs_{next(_numbers)}"
        try:
            await copy_template(root, name)
        finally:
            await root.close()
        made = Database(name, self.postgres.url(database=name), self.postgres.url(GATEWAY_ROLE, name))
        async with (
            await Sessions.open(made.gateway_url, sessions_max=1) as sessions,
            await PostgresAccess.open(sessions, made.gateway_url) as access,
        ):
            await access.create_tenant("default")
            for who, role in (("agent-1", "agent"), ("worker-1", "worker"), ("ada", "supervisor"), ("root", "admin")):
                created = await access.create_key(name=who, principal_id=who, roles=[role], created_by="test")
                self.keys[role] = created.text
        return made

    def config(self, **runs: int) -> Path:
        path = self.place / f"tga-{next(_numbers)}.toml"
        (self.place / "policy.cedar").write_text(POLICY)
        settings = {"timeout_ms": 5_000, "max_attempts": 5, "max_concurrency": 64}
        tools = dict.fromkeys(("charge", "slow_charge", "flaky", "balance", "fail"), "")
        text = bank_tables(self.bank.url, settings, tools) + '[policy]\nfile = "policy.cedar"\n\n[runs]\n'
        text += "".join(f"{name} = {value}\n" for name, value in {"lease_ms": 1_000, **runs}.items())
        text += "\n[limits]\nrequests_per_second = 100000\nburst = 100000\n"
        path.write_text(text)
        return path

    def _notes(self) -> Path:
        return self.place / f"notes-{next(_numbers)}"

    async def gateway(
        self,
        *,
        fault: Fault | None = None,
        stop_at: str | None = None,
        config: Path | None = None,
        is_patient: bool = False,
        model_at: str | None = None,
        clock_ahead_ms: int = 0,
    ) -> GatewayProcess:
        notes = self._notes()
        environment = {
            "TGA_HOME": str(self.place),
            "TGA_DATABASE_URL": self.database.admin_url,
            "TGA_CONFIG": str(config or self.config()),
            "TGA_PORT": "0",
        }
        said = None if fault is None else asdict(fault)
        where = (environment, str(notes), self.database.admin_url)
        options = GatewayOptions(*where, said, stop_at, is_patient, model_at, clock_ahead_ms)
        process = GatewayProcess(processes.fork(self._zygote, options), notes)
        self._processes.append(process)
        return await process.listening()

    async def worker(
        self,
        *urls: str,
        die_at: tuple[str, int] | None = None,
        stop_at: tuple[str, int] | None = None,
        **more: Any,
    ) -> Process:
        notes = self._notes()
        worker_id = f"worker-{next(_numbers)}-{os.getpid()}"
        options = WorkerOptions(list(urls), self.keys["worker"], worker_id, str(notes), die_at, stop_at, more)
        process = Process(processes.fork(self._zygote, options), notes)
        self._processes.append(process)
        await until(lambda: process.has_said("ready") or not process.is_alive())
        return process

    async def sdk_worker(
        self,
        *urls: str,
        die_at: tuple[str, int] | None = None,
        stop_at: tuple[str, int] | None = None,
        **more: Any,
    ) -> Process:
        """A worker of the SDK as a process; it has registered its procedures."""
        notes = self._notes()
        options = SdkWorkerOptions(list(urls), self.keys["worker"], str(notes), die_at, stop_at, more)
        process = Process(processes.fork(self._zygote, options), notes)
        self._processes.append(process)
        await until(lambda: process.has_said("ready") or not process.is_alive())
        return process

    @contextlib.asynccontextmanager
    async def client(self, role: str, *urls: str, boundaries: Boundaries | None = None) -> Any:
        async with Client(urls, self.keys[role], boundaries) as opened:
            yield opened

    def executions(self, run_id: str) -> Counter[str]:
        """How often the bank has executed what this run asked for, by key."""
        lines = [
            json.loads(line) for line in self.bank.book.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"
        ]
        keys = [line["idempotency_key"] for line in lines if line["event"] == "execution"]
        return Counter(key for key in keys if key and key.startswith(f"run:{run_id}/"))

    def all_executions(self) -> Counter[str]:
        lines = [
            json.loads(line) for line in self.bank.book.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"
        ]
        return Counter(line["idempotency_key"] for line in lines if line["event"] == "execution")

    async def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        session = await asyncpg.connect(self.database.admin_url)
        try:
            return await session.fetch(statement, *arguments)
        finally:
            await session.close()

    async def journal(self, run_id: str) -> list[dict[str, Any]]:
        """The run's artifacts as they are stored, in their order."""
        rows = await self.fetch(
            "SELECT artifact, entry FROM tga.artifacts JOIN tga.entries USING (stream, sequence_number)"
            " WHERE stream = $1 ORDER BY sequence_number",
            f"run:{run_id}",
        )
        return [
            {**json.loads(row["artifact"]), "artifact_type": json.loads(row["entry"])["artifact_type"]} for row in rows
        ]

    async def verify_all_is_well(self) -> None:
        """`tga verify --all` finds nothing, no run is stranded, and the bank has executed nothing twice."""
        assert await asyncio.to_thread(self.database.verify) == []
        stranded = await self.fetch(
            "SELECT h.stream, h.state FROM tga.heads h WHERE h.stream LIKE 'run:%' AND h.is_open"
            " AND h.state IN ('SCHEDULED', 'RUNNING')"
        )
        assert stranded == []
        assert await asyncio.to_thread(self.database.unrested) == []
        twice = {key: count for key, count in self.all_executions().items() if count > 1}
        assert twice == {}


async def until(condition: Callable[[], bool | Awaitable[bool]], *, patience_s: float = PATIENCE_S) -> None:
    """Wait for what must happen."""
    async with asyncio.timeout(patience_s):
        while True:
            found = condition()
            if isinstance(found, Awaitable):
                found = await found
            if found:
                return
            await asyncio.sleep(0.01)


def new_id(name: str = "run") -> str:
    return f"{name}-{os.getpid()}-{next(_numbers)}"


class Caller:
    """Who starts a run, answers what it asks, sends its signals, and waits for its end; whatever breaks meanwhile."""

    def __init__(self, world: RunsWorld, *urls: str) -> None:
        self._world = world
        self._urls = urls

    async def __aenter__(self) -> Self:
        self._stack = contextlib.AsyncExitStack()
        self.agent = await self._stack.enter_async_context(self._world.client("agent", *self._urls))
        self.person = await self._stack.enter_async_context(self._world.client("supervisor", *self._urls))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    async def start(self, procedure: str, given: Any, run_id: str, **more: Any) -> dict[str, Any]:
        said = {"procedure": procedure, "input": given, "run_id": run_id, **more}
        return await self.agent.ask("POST", "/v1/runs", said)  # type: ignore[no-any-return]

    async def look(self, run_id: str) -> dict[str, Any]:
        return await self.agent.ask("GET", f"/v1/runs/{run_id}")  # type: ignore[no-any-return]

    async def answer(self, run_id: str, path: str, answer: Any) -> bool:
        """Whether this was the answer that counts."""
        try:
            await self.person.ask("POST", f"/v1/runs/{run_id}/signals", {"path": path, "answer": answer})
        except Refused as refused:
            if refused.code != "RUN_ANSWER_UNASKED":
                raise
            return False
        return True

    async def signal(self, run_id: str, name: str, value: Any, signal_id: str) -> None:
        said = {"name": name, "value": value, "signal_id": signal_id}
        await self.agent.ask("POST", f"/v1/runs/{run_id}/signals", said)

    async def see_through(self, run_id: str, *, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """Answer every question with yes and send every signal that is waited for, until the run has ended."""
        async with asyncio.timeout(patience_s):
            while True:
                seen = await self.look(run_id)
                if seen["state"] in ("COMPLETED", "CANCELLED", "FAILED", "PARKED", "DIVERGED"):
                    return seen
                for awaited in seen["awaits"]:
                    if awaited["kind"] == "ask":
                        await self.answer(run_id, awaited["path"], True)
                    elif awaited["kind"] == "signal":
                        await self.signal(run_id, awaited["name"], "gone", f"{run_id}-{awaited['path']}")
                await asyncio.sleep(0.02)


@contextlib.asynccontextmanager
async def working(world: RunsWorld, *urls: str, **options: Any) -> Any:
    """A worker in this process, which leases and performs until the block ends."""
    async with world.client("worker", *urls) as client:
        worker = Worker(client, PROGRAMS, f"worker-{next(_numbers)}-{os.getpid()}", **options)
        await worker.register()
        current = asyncio.current_task()
        assert current is not None
        task = asyncio.create_task(worker.work())
        # A worker that breaks ends the test at once, and not when its patience is over.
        task.add_done_callback(lambda ended: ended.cancelled() or current.cancel())
        try:
            yield worker
        finally:
            if task.done():
                task.result()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def sampled(cases: list[Any], count: int, *, is_soak: bool) -> list[Any]:
    """Some of them, by a seed that is printed; all in soak."""
    if is_soak:
        return cases
    seed = int(os.environ.get("TGA_SEED") or random.randrange(1_000_000))
    print(f"TGA_SEED={seed}")
    return random.Random(seed).sample(cases, min(count, len(cases)))


def worlds() -> Iterator[RunsWorld]:
    world = RunsWorld()
    try:
        yield world.start()
    finally:
        world.stop()
