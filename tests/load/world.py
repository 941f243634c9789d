"""A gateway process that is killed again and again, on a PostgreSQL and before a bank that stay."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from app.postgres.api_keys import PostgresAccess
from app.postgres.embedded.server import EmbeddedPostgres
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from tests.bank import AMOUNT_SCHEMA, bank_tables
from tests.crash.world import Bank, Database

BANK = {"timeout_ms": 5000, "max_attempts": 50, "max_concurrency": 32, "max_in_flight": 1000}
TOOLS = {
    "charge": AMOUNT_SCHEMA,
    **dict.fromkeys(("slow_charge", "flaky", "pay_card", "refund", "refund_soon", "balance"), ""),
}
CONFIG = """
[policy]
file = "policy.cedar"

[limits]
requests_per_second = 1000
burst = 2000
"""
POLICY = """
@id("every-tool") permit(principal, action == Action::"call", resource);
@id("every-approval") permit(principal, action == Action::"approve", resource);
@id("every-start") permit(principal, action == Action::"start", resource);
@id("unattended") permit(principal, action == Action::"call_unattended", resource)
unless { resource.tags.contains("approval") };
@id("no-thirteen") forbid(principal, action == Action::"call", resource == Tool::"bank/charge")
when { context.arguments.amount == 13 };
"""
_READY_WITHIN_S = 60.0
_PAGE_KB = os.sysconf("SC_PAGE_SIZE") / 1024


@dataclass
class Life:
    """One gateway process: when it could be reached, how it ended, and how much memory it had (s, MB)."""

    started_s: float
    ready_s: float = 0.0
    killed_s: float = float("inf")
    gone_s: float = float("inf")
    end: str = ""
    returncode: int | None = None
    rss: list[tuple[float, float]] = field(default_factory=list)


class World:
    """Everything but the clients. `told` holds what each gateway printed."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.lives: list[Life] = []
        self.told = home / "told"
        self.told.mkdir()
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.postgres = EmbeddedPostgres(home)
        self.bank = Bank(home / "book.jsonl")
        self._gateway: subprocess.Popen[bytes] | None = None

    @property
    def database(self) -> Database:
        return Database("tga", self.postgres.url("postgres", "tga"), self.postgres.url(GATEWAY_ROLE, "tga"))

    @property
    def environment(self) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
        return {**inherited, "TGA_HOME": str(self.home), "TGA_PORT": str(self.port)}

    def open(self) -> None:
        self.postgres.start()
        self.bank.start()
        (self.home / "tga.toml").write_text(bank_tables(self.bank.url, BANK, TOOLS) + CONFIG)
        (self.home / "policy.cedar").write_text(POLICY)
        self.start()

    def close(self) -> None:
        if self._gateway is not None:
            self._gateway.kill()
            self._gateway.wait()
        self.bank.kill()
        self.postgres.stop()

    def start(self) -> Life:
        """A gateway, reachable."""
        life = Life(time.monotonic())
        self.lives.append(life)
        told = self.told / f"{len(self.lives)}.txt"
        with told.open("wb") as file:
            self._gateway = subprocess.Popen(
                [sys.executable, "-m", "app.main", "serve"], env=self.environment, stdout=file, stderr=file
            )
        while b"Listening on" not in told.read_bytes():
            if self._gateway.poll() is not None or time.monotonic() > life.started_s + _READY_WITHIN_S:
                raise RuntimeError(f"the gateway does not start: {told.read_text()}")
            time.sleep(0.02)
        life.ready_s = time.monotonic()
        return life

    def live(self, seconds: float) -> None:
        """Let it live so long, and look at its memory."""
        life, until_s = self.lives[-1], time.monotonic() + seconds
        while (now := time.monotonic()) < until_s:
            life.rss.append((now - life.ready_s, self._rss_mb()))
            time.sleep(min(0.25, max(0.0, until_s - now)))

    def end(self, number: signal.Signals) -> None:
        assert self._gateway is not None
        life = self.lives[-1]
        if self._gateway.poll() is not None:
            raise RuntimeError(f"the gateway ended by itself with {self._gateway.returncode}")
        life.killed_s, life.end = time.monotonic(), number.name
        self._gateway.send_signal(number)
        life.returncode = self._gateway.wait(timeout=60)
        life.gone_s = time.monotonic()
        self._gateway = None

    def make_keys(self, principals: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
        """A key for each name with its role."""
        return asyncio.run(self.create_keys(principals))

    async def create_keys(self, principals: list[tuple[str, str]]) -> list[tuple[str, str, str]]:
        """As `make_keys`; a role may be several, with commas between them."""
        url = self.database.gateway_url
        async with await Sessions.open(url, sessions_max=1) as sessions:
            access = PostgresAccess(sessions, url)
            return [
                (
                    name,
                    role,
                    (await access.create_key(name=name, principal_id=name, roles=role.split(","), created_by="t")).text,
                )
                for name, role in principals
            ]

    def verify(self) -> str:
        """What `tga verify --all` has to say; empty when all is well."""
        command = [sys.executable, "-m", "app.main", "verify", "--all"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        return "" if done.returncode == 0 else done.stdout + done.stderr

    def incidents(self) -> list[str]:
        """What gateways said of defects of their own."""
        found = []
        for told in sorted(self.told.iterdir()):
            text = told.read_text()
            found += (
                [f"{told.name}: {text[-3000:]}"] if any(w in text for w in ("Traceback", "incident", "defect")) else []
            )
        return found

    def _rss_mb(self) -> float:
        assert self._gateway is not None
        with contextlib.suppress(OSError, IndexError):
            return int(Path(f"/proc/{self._gateway.pid}/statm").read_text().split()[1]) * _PAGE_KB / 1024
        return 0.0


def _free_port() -> int:
    """Below the range that connections are given: nobody takes it while the gateway is away."""
    chosen = random.SystemRandom()
    while True:
        port = chosen.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as tried:
            tried.bind(("127.0.0.1", port))
            return port
