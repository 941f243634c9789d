"""The world around a gateway under test: PostgreSQL, the bank's own process and book, and gateways to be killed.

The bank's book is the judge of what was executed; nothing of ours is asked about that.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import asyncpg

from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.migrate import migrate
from app.postgres.reader import open_reader
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.bank import bank_tables
from tests.conftest import TEMPLATE, Admin, copy_template
from tests.crash.gateway import Options, command_line, fork_gateway

PATIENCE_S = 60.0
_numbers = itertools.count(1)
Answer = dict[str, Any]


class GatewayDied(Exception):
    """The gateway's process ended before it answered."""


class Gateway:
    """One gateway process. Commands may be under way at the same time; each is answered by its number."""

    def __init__(self, zygote: socket.socket, options: Options) -> None:
        self._answers: dict[int, Answer] = {}
        self._unread = b""
        self._numbers = itertools.count(1)
        stdin, self._to = os.pipe()
        self._from, stdout = os.pipe()
        self.pid = fork_gateway(zygote, options, stdin=stdin, stdout=stdout)
        os.close(stdin)
        os.close(stdout)

    def wait_ready(self) -> Self:
        self.receive(0)
        return self

    def send(self, do: str, **fields: Any) -> int:
        number = next(self._numbers)
        with contextlib.suppress(BrokenPipeError):  # reading will tell
            os.write(self._to, json.dumps({"do": do, "id": number, **fields}).encode() + b"\n")
        return number

    def receive(self, number: int, *, patience_s: float = PATIENCE_S) -> Answer:
        deadline = time.monotonic() + patience_s
        while number not in self._answers:
            ready, _, _ = select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"gateway {self.pid} did not answer {number} in {patience_s} s")
            chunk = os.read(self._from, 1 << 16)
            if not chunk:
                raise GatewayDied
            *lines, self._unread = (self._unread + chunk).split(b"\n")
            for answer in map(json.loads, lines):
                self._answers[answer["id"]] = answer
        return self._answers.pop(number)

    def ask(self, do: str, **fields: Any) -> Answer:
        return self.receive(self.send(do, **fields))

    def call(self, tool: str, key: str | None, **arguments: Any) -> Answer:
        return self.ask("call", tool=tool, key=key, arguments=arguments)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def is_stopped(self) -> bool:
        """By SIGSTOP; the state is the first word after the program's name."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    def await_stopped(self) -> None:
        await_truth(self.is_stopped)

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGKILL)
        self.wait_end()

    def exit(self) -> None:
        """End in order, as a gateway that is stopped."""
        self.send("exit")
        self.wait_end()

    def wait_end(self) -> None:
        if self._from < 0:
            return
        with contextlib.suppress(GatewayDied):
            self.receive(-1)
        os.close(self._from)
        os.close(self._to)
        self._from = self._to = -1


class Bank:
    """The tool server of the demonstration, in a process of its own, with its durable book."""

    def __init__(self, book: Path, *flags: str) -> None:
        self.book = book
        self._flags = flags
        self._process: subprocess.Popen[str] | None = None
        self.port = 0

    def start(self) -> Self:
        command = [sys.executable, "-m", "app.demo.tool_server", "--port", str(self.port), "--book", str(self.book)]
        self._process = subprocess.Popen([*command, *self._flags], stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline().rpartition(":")[2])
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None

    def lines(self, event: str, key: str) -> list[dict[str, Any]]:
        written = [json.loads(line) for line in self.book.read_bytes().splitlines(keepends=True) if line[-1:] == b"\n"]
        return [line for line in written if line["event"] == event and line["idempotency_key"] == key]

    def executions(self, key: str) -> list[dict[str, Any]]:
        return self.lines("execution", key)

    def requests(self, key: str, *, tool: str | None = None) -> list[dict[str, Any]]:
        return [line for line in self.lines("request", key) if tool in (None, line["tool"])]

    def await_request(self, key: str, *, count: int = 1) -> None:
        await_truth(lambda: len(self.requests(key)) >= count)


@dataclass(frozen=True)
class Database:
    name: str
    admin_url: str
    gateway_url: str

    def fetch(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
        async def fetch() -> list[asyncpg.Record]:
            session = await asyncpg.connect(self.admin_url)
            try:
                return await session.fetch(statement, *arguments)
            finally:
                await session.close()

        return asyncio.run(fetch())

    def effects(self) -> dict[str, bytes]:
        """The recorded effect of every trace that has one."""
        rows = self.fetch(
            "SELECT stream, artifact FROM tga.artifacts WHERE sequence_number = 4 AND stream LIKE 'trace:%'"
        )
        return {row["stream"].removeprefix("trace:"): row["artifact"] for row in rows}

    def end_owner_session(self, executor_id: str) -> None:
        """As a network that breaks: the session that holds the executor's lock is gone, its process is not."""
        key = "tga.executor_lock_key($1::text::uuid)"
        ended = self.fetch(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND objsubid = 1"
            f" AND (classid::bigint << 32 | objid::bigint) = {key} AND granted AND mode = 'ExclusiveLock'",
            executor_id,
        )
        assert len(ended) == 1

    def end_all_sessions(self) -> int:
        return len(
            self.fetch(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        )

    def verify(self) -> list[str]:
        """Every finding of the verifier."""

        async def verify() -> list[str]:
            async with (
                await Sessions.open(self.gateway_url, sessions_max=1) as sessions,
                open_reader(sessions) as reader,
            ):
                return [str(error) async for error in verify_ledger(reader, stream_checks(), Report())]

        return asyncio.run(verify())

    def unrested(self) -> list[str]:
        """Traces that are neither finished nor waiting for a person, or that someone still owns."""
        rows = self.fetch("SELECT stream, state, waiting, owner, is_open FROM tga.heads WHERE stream LIKE 'trace:%'")
        return [
            f"{row['stream']} {row['state']} owned by {row['owner']}"
            for row in rows
            if (row["is_open"] and row["waiting"] is None) or (row["waiting"] is not None and row["owner"] is not None)
        ]


class World:
    """One PostgreSQL, one bank that honours keys, one that does not, and a zygote; many databases and gateways."""

    def __init__(self) -> None:
        self.place = Path(tempfile.mkdtemp(prefix="tga-test-"))
        self.place.chmod(0o711)
        self.postgres = EmbeddedPostgres(self.place / "home")
        self.bank = Bank(self.place / "bank.jsonl")
        self.careless_bank = Bank(self.place / "careless.jsonl", "--ignore-keys")
        ours, theirs = socket.socketpair()
        self._zygote = ours
        self._zygote_process = subprocess.Popen(command_line(), stdin=theirs.fileno(), pass_fds=[theirs.fileno()])
        theirs.close()
        self._gateways: list[Gateway] = []

    def start(self) -> Self:
        self.postgres.start()
        asyncio.run(self._make_template())
        self.bank.start()
        return self

    def stop(self) -> None:
        self.kill_gateways()
        self._zygote.close()
        self._zygote_process.wait()
        self.bank.kill()
        self.careless_bank.kill()
        self.postgres.stop()
        shutil.rmtree(self.place)

    async def _as_root(self, work: Callable[[Admin], Awaitable[object]]) -> None:
        session = await asyncpg.connect(self.postgres.url())
        try:
            await work(session)
        finally:
            await session.close()

    async def _make_template(self) -> None:
        await self._as_root(lambda root: root.execute(f"CREATE DATABASE {TEMPLATE}"))
        await migrate(self.postgres.url(database=TEMPLATE))

    def make_database(self) -> Database:
        name = f"tga_crash_{next(_numbers)}"
        asyncio.run(self._as_root(lambda root: copy_template(root, name)))
        return Database(name, self.postgres.url(database=name), self.postgres.url(GATEWAY_ROLE, name))

    def drop_database(self, database: Database) -> None:
        self.kill_gateways()
        asyncio.run(self._as_root(lambda root: root.execute(f"DROP DATABASE {database.name} WITH (FORCE)")))

    def kill_gateways(self) -> None:
        for gateway in self._gateways:
            gateway.kill()
        self._gateways.clear()

    def write_config(self, *, timeout_ms: int = 5_000, max_attempts: int = 5) -> Path:
        """`bank` honours keys. The others are the bank that does not, under each way to deal with that."""
        path = self.place / f"tga-{next(_numbers)}.toml"
        servers = [("bank", self.bank, "redispatch"), ("holding", self.careless_bank, "hold")]
        servers += [("asking", self.careless_bank, "reconcile"), ("repeating", self.careless_bank, "redispatch")]
        text = ""
        for server, bank, on_unknown_outcome in servers:
            slow = f'on_unknown_outcome = "{on_unknown_outcome}"'
            if on_unknown_outcome == "reconcile":
                slow += '\nreconcile_tool = "charge_status"'
            tools = {"charge": "", "slow_charge": slow, "flaky": "", "refund": "", "charge_status": ""}
            settings = {"timeout_ms": timeout_ms, "max_attempts": max_attempts}
            text += bank_tables(bank.url, settings, tools, server=server)
        path.write_text(text)
        return path

    def begin_gateway(
        self, database: Database, *, config: Path | None = None, bank: Bank | None = None, **how: Any
    ) -> Gateway:
        """A gateway that may die while it starts, or before. `how`: as in Options."""
        options = Options(
            gateway_url=database.gateway_url,
            admin_url=database.admin_url,
            config=str(config or self.write_config()),
            book=str((bank or self.bank).book),
            **how,
        )
        self._gateways.append(Gateway(self._zygote, options))
        return self._gateways[-1]

    def gateway(
        self, database: Database, *, config: Path | None = None, bank: Bank | None = None, **how: Any
    ) -> Gateway:
        return self.begin_gateway(database, config=config, bank=bank, **how).wait_ready()

    def verify_all_is_well(self, database: Database, acknowledged: dict[str, bytes]) -> None:
        """After every gateway has ended: nothing is stuck, chains stand, effects stand, no key was executed twice.

        `acknowledged` is what callers were told, by trace.
        """
        assert database.unrested() == []
        assert database.fetch("SELECT tga.recoverable('trace', NULL, NULL, 100)") == []
        assert database.verify() == []
        effects = database.effects()
        assert acknowledged.items() <= effects.items(), "what a caller was told stands, byte for byte"
        for claim in database.fetch("SELECT * FROM tga.claims"):
            key, effect = claim["idempotency_key"], effects.get(claim["stream"].removeprefix("trace:"))
            executions, requests = self.bank.executions(key), self.bank.requests(key)
            assert len(executions) <= 1, f"{key} was executed {len(executions)} times"
            assert len({request["tool_call_id"] for request in requests}) <= 1, "a call was sent under two ids"
            recorded: dict[str, Any] = {"outcome": None} if effect is None else json.loads(effect)
            if recorded["outcome"] == "SUCCESS":
                assert len(executions) == 1, f"{key} is recorded as executed and was not"
                assert json.loads(executions[0]["answer"]) == recorded["output"]["value"]
                assert executions[0]["tool_call_id"] == recorded["tool_call_id"]
            else:
                assert executions == [], f"{key} was executed, and that is not on record"


def await_truth(condition: Callable[[], bool], *, patience_s: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.01)


def new_key() -> str:
    return f"key-{os.getpid()}-{next(_numbers)}"


def worlds() -> Iterator[World]:
    world = World()
    try:
        yield world.start()
    finally:
        world.stop()
