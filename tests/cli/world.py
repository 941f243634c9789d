"""A home with a real tool server, a real embedded database and a real gateway; and the command `tga` in it."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import asyncpg
from typer.testing import CliRunner

from app.cli.command import application
from app.cli.context import Context
from app.main import open_gateway
from app.postgres.embedded.server import EmbeddedPostgres
from app.settings import Settings
from tests.bank import AMOUNT_SCHEMA, bank_tables
from tests.conftest import make_home
from tests.patience import HANG_S

TOOLS = {
    "charge": f'description = "Charge an amount."\n{AMOUNT_SCHEMA}',
    **dict.fromkeys(("refund", "pay_card", "balance", "fail"), ""),
    "slow_charge": 'on_unknown_outcome = "hold"',
}
CONFIG = """
[policy]
file = "policy.cedar"
"""
# For worlds that need it: a server that is down makes doctor and `tga servers` exit 1.
NOWHERE = """
[servers.nowhere]
transport = "http"
base_url = "http://127.0.0.1:9"
unreachable_for_ms = 200

[servers.nowhere.tools.charge]
class = "write"
"""
POLICY = """
@id("every-tool") permit(principal, action == Action::"call", resource);
@id("unattended") permit(principal, action == Action::"call_unattended", resource)
unless { resource.tags.contains("approval") };
@id("no-thirteen") forbid(principal, action == Action::"call", resource == Tool::"bank/charge")
when { context.arguments.amount == 13 };
"""


@dataclass(frozen=True)
class Told:
    returncode: int
    stdout: str
    stderr: str


@contextmanager
def open_world() -> Iterator[World]:
    """A world in a home of its own; its gateway is for the test to start."""
    home = make_home()
    world = World(home)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(home)


class World:
    """One home. The database is held here, so that it outlives every gateway; nothing of it is left in the end."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.book = home / "book.jsonl"
        self.config = home / "tga.toml"
        self.policy = home / "policy.cedar"
        self.gateway: subprocess.Popen[str] | None = None
        self.url = "http://127.0.0.1:1"
        self.told = home / "serve.out"
        self._postgres = EmbeddedPostgres(home)
        self._postgres.start()
        self._bank = subprocess.Popen(
            [sys.executable, "-m", "app.demo.tool_server", "--port", "0", "--book", str(self.book)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._bank.stdout is not None
        bank = bank_tables(self._bank.stdout.readline().strip(), {"timeout_ms": 5000, "max_attempts": 2}, TOOLS)
        self.config.write_text(bank + CONFIG)
        self.policy.write_text(POLICY)

    @property
    def admin_url(self) -> str:
        """As a superuser: what an attacker with the database in their hands has."""
        return self._postgres.url("postgres", "tga")

    def start(self, **environment: str) -> None:
        with self.told.open("w") as told:
            self.gateway = subprocess.Popen(
                [sys.executable, "-m", "app.main", "serve"],
                env=self.environment(**{"TGA_PORT": "0", **environment}),
                stdout=told,
                stderr=subprocess.STDOUT,
                text=True,
            )
        wait_for(lambda: "administrator's key" in self.told.read_text() or self.gateway_is_gone())
        assert not self.gateway_is_gone(), self.told.read_text()
        self.url = self.told.read_text().split("Listening on ")[1].split()[0]

    @contextmanager
    def bank_stands_still(self) -> Iterator[None]:
        """The tool server takes requests and does nothing with them until this is left."""
        self._bank.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._bank.send_signal(signal.SIGCONT)

    def gateway_is_gone(self) -> bool:
        return self.gateway is None or self.gateway.poll() is not None

    def stop(self, number: signal.Signals = signal.SIGTERM) -> int | None:
        gateway, self.gateway = self.gateway, None
        if gateway is None:
            return None
        gateway.send_signal(number)
        return gateway.wait(timeout=60)

    def close(self) -> None:
        try:
            self.stop()
        finally:
            self._bank.terminate()
            self._bank.wait(timeout=HANG_S)
            if self._bank.stdout is not None:
                self._bank.stdout.close()
            self._postgres.stop()

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
        return {**inherited, "TGA_HOME": str(self.home), "TGA_URL": self.url, **more}

    def tga(self, *arguments: str, stdin: str | None = None, **more: str) -> Told:
        """Run a command, in this process: one of its own takes a second. It never shows a key that it used."""
        settings = Settings.from_environment(self.environment(**more))
        context = Context(settings, open_gateway)
        done = CliRunner().invoke(application, list(arguments), input=stdin, obj=context)
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return self._checked(Told(done.exit_code, done.stdout, done.stderr), **more)

    def tga_process(self, *arguments: str, **more: str) -> Told:
        """Run a command in a process of its own, as it is installed."""
        command = [sys.executable, "-m", "app.main", *arguments]
        done = subprocess.run(
            command, env=self.environment(**more), capture_output=True, text=True, timeout=120, check=False
        )
        return self._checked(Told(done.returncode, done.stdout, done.stderr), **more)

    def _checked(self, told: Told, **more: str) -> Told:
        used = more.get("TGA_API_KEY") or self.admin_key()
        for secret in filter(None, (used, *(used or "").split("_", 2)[2:])):
            assert secret not in told.stdout + told.stderr
        assert "Traceback" not in told.stderr, told.stderr
        return told

    def json(self, *arguments: str, **more: str) -> Any:
        done = self.tga(*arguments, "--json", **more)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def sql(self, statement: str) -> list[dict[str, Any]]:
        """As a superuser."""

        async def done() -> list[dict[str, Any]]:
            connection = await asyncpg.connect(self.admin_url)
            try:
                if not statement.startswith("SELECT"):
                    await connection.execute(statement)
                    return []
                return [dict(row) for row in await connection.fetch(statement)]
            finally:
                await connection.close()

        return asyncio.run(done())

    def admin_key(self) -> str | None:
        file = self.home / "admin.key"
        return file.read_text().strip() if file.exists() else None

    def new_key(self, principal: str, *roles: str, tenant: str = "default") -> str:
        options = [option for role in roles for option in ("--role", role)]
        return self.tga("keys", "create", principal, *options, "--tenant", tenant).stdout.strip()

    def pending(self, key: str, amount: int = 5) -> str:
        """The id of a request that waits for a person."""
        asked = self.tga("call", "bank", "refund", "-a", f"amount={amount}", "-k", key)
        assert "PENDING" in asked.stderr, asked.stderr
        return trace_of(asked)

    def executions(self, key: str) -> int:
        return self._lines("execution", key)

    def requests(self, key: str) -> int:
        return self._lines("request", key)

    def _lines(self, event: str, key: str) -> int:
        if not self.book.exists():
            return 0
        lines = [json.loads(line) for line in self.book.read_text().splitlines() if line.endswith("}")]
        return sum(line["event"] == event and line["idempotency_key"] == key for line in lines)


def trace_of(told: Told) -> str:
    return told.stderr.split("trace ")[1].split()[0]


def wait_for(condition: Callable[[], bool], *, seconds: float = HANG_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.05)
