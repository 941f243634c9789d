"""`tga call` and what comes after it, as a person at a terminal meets it: a real tool server, a real database."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.postgres.database import Database
from tests.cli.test_commands import tga
from tests.conftest import Admin

CONFIG = """
[servers.bank]
transport = "http"
base_url = "{url}"
timeout_ms = 2000
max_attempts = 2

[servers.bank.tools.charge]
class = "write"
input_schema = {{ type = "object", required = ["amount"], properties = {{ amount = {{ type = "integer" }} }} }}

[servers.bank.tools.refund]
class = "write"
tags = ["approval"]

[servers.bank.tools.balance]
class = "read"

[servers.bank.tools.fail]
class = "read"

[servers.bank.tools.slow_charge]
class = "write"
on_unknown_outcome = "hold"

[servers.nowhere]
transport = "http"
base_url = "http://127.0.0.1:9"
max_attempts = 2

[servers.nowhere.tools.charge]
class = "write"
"""


@dataclass(frozen=True)
class Bank:
    config: Path
    book: Path

    def executions(self, key: str) -> int:
        lines = [json.loads(line) for line in self.book.read_text().splitlines()]
        return sum(line["event"] == "execution" and line["idempotency_key"] == key for line in lines)

    def requests(self, key: str) -> int:
        lines = [json.loads(line) for line in self.book.read_text().splitlines()] if self.book.exists() else []
        return sum(line["event"] == "request" and line["idempotency_key"] == key for line in lines)


@pytest.fixture
def bank(tmp_path: Path) -> Iterator[Bank]:
    book = tmp_path / "book.jsonl"
    server = subprocess.Popen(
        [sys.executable, "-m", "app.demo.tool_server", "--port", "0", "--book", str(book)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert server.stdout is not None
    config = tmp_path / "tga.toml"
    config.write_text(CONFIG.format(url=server.stdout.readline().strip()))
    yield Bank(config, book)
    server.terminate()
    server.wait(timeout=10)
    server.stdout.close()


def call(bank: Bank, database: Database, *arguments: str) -> subprocess.CompletedProcess[str]:
    return tga(*arguments, url=database.admin_url, TGA_CONFIG=str(bank.config))


def trace_of(told: subprocess.CompletedProcess[str]) -> str:
    return told.stderr.split("trace ")[1].split()[0]


def test_a_call_and_its_repeat_print_the_same_bytes_and_are_executed_once(bank: Bank, database: Database) -> None:
    first = call(bank, database, "call", "bank", "charge", "-a", "amount=42", "-k", "order-1")
    again = call(bank, database, "call", "bank", "charge", "-a", "amount=42", "-k", "order-1")
    assert (first.returncode, again.returncode) == (0, 0)
    assert first.stdout == again.stdout
    assert json.loads(first.stdout)["amount"] == 42
    assert "answered from the record" in again.stderr
    assert bank.executions("order-1") == 1
    other = call(bank, database, "call", "bank", "charge", "-a", "amount=43", "-k", "order-1")
    assert (other.returncode, other.stdout) == (1, "")
    assert "IDEMPOTENCY_KEY_REUSED" in other.stderr
    assert "42" not in other.stderr


def test_arguments_come_as_pairs_or_as_json(bank: Bank, database: Database) -> None:
    told = call(bank, database, "call", "bank", "charge", "--json", '{"amount": 7}', "-k", "k")
    assert json.loads(told.stdout)["amount"] == 7
    assert call(bank, database, "call", "bank", "charge", "-a", "amount=7", "--json", "{}").returncode == 2
    for wrong, code in ((["-a", "amount"], "INPUT_MALFORMED"), (["-a", "amount=x"], "ARGUMENTS_INVALID")):
        told = call(bank, database, "call", "bank", "charge", *wrong)
        assert (told.returncode, code in told.stderr) == (2, True)


def test_what_is_not_there_is_said_and_stores_nothing(bank: Bank, database: Database) -> None:
    told = call(bank, database, "call", "bank", "chrage", "-k", "k")
    assert told.returncode == 2
    assert "TOOL_NOT_FOUND" in told.stderr
    assert "charge" in told.stderr
    assert json.loads(call(bank, database, "traces", "--json").stdout) == []


def test_failed_pending_and_unreachable_calls_tell_so(bank: Bank, database: Database) -> None:
    failed = call(bank, database, "call", "bank", "fail")
    assert (failed.returncode, "HTTP_4" in failed.stderr) == (1, True)
    pending = call(bank, database, "call", "bank", "refund", "-a", "amount=5", "-k", "r1")
    assert (pending.returncode, "waits for a person" in pending.stderr) == (0, True)
    unreachable = call(bank, database, "call", "nowhere", "charge", "-k", "n1")
    assert (unreachable.returncode, "NOT_SENT" in unreachable.stderr) == (1, True)
    states = {t["tool_name"]: t["state"] for t in json.loads(call(bank, database, "traces", "--json").stdout)}
    assert states == {"fail": "FAILED", "refund": "PENDING", "charge": "FAILED"}
    listed = call(bank, database, "traces", "--state", "pending").stdout
    assert trace_of(pending) in listed
    assert trace_of(failed) not in listed


def test_a_trace_is_told_as_a_timeline(bank: Bank, database: Database) -> None:
    trace_id = trace_of(call(bank, database, "call", "bank", "charge", "-a", "amount=42", "-k", "order-1"))
    told = call(bank, database, "trace", trace_id).stdout
    for part in ("COMPLETED", "order-1", 'cli asks for {"amount": 42}', "APPROVE by policy", "attempt 1", "answered"):
        assert part in told
    document = json.loads(call(bank, database, "trace", trace_id, "--json").stdout)
    assert [e["entry"]["sequence_number"] for e in document["entries"]] == [1, 2, 3, 4]
    other = trace_id[:-1] + ("0" if trace_id[-1] != "0" else "1")
    assert call(bank, database, "trace", other).returncode == 1
    assert call(bank, database, "trace", "no-trace").returncode == 2


def start_and_kill_in_the_middle(bank: Bank, database: Database, key: str) -> None:
    environment = {**os.environ, "TGA_DATABASE_URL": database.admin_url, "TGA_CONFIG": str(bank.config)}
    arguments = ["call", "bank", "slow_charge", "-a", "amount=7", "-a", "ms=800", "-k", key]
    gateway = subprocess.Popen(
        [sys.executable, "-m", "app.main", *arguments], env=environment, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 30
    while not bank.requests(key):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    gateway.send_signal(signal.SIGKILL)
    gateway.wait()


def test_a_killed_call_is_held_and_resolved_as_its_tool_says(bank: Bank, database: Database) -> None:
    start_and_kill_in_the_middle(bank, database, "held-1")
    dry = call(bank, database, "recover", "--all", "--dry-run")
    assert (dry.returncode, "1 to recover; nothing was changed." in dry.stdout) == (0, True)
    told = call(bank, database, "recover", "--all")
    assert (told.returncode, "waits for operator" in told.stdout) == (0, True)
    (trace,) = json.loads(call(bank, database, "traces", "--json").stdout)
    assert (trace["state"], trace["waiting"]) == ("EXECUTING", "operator")
    time.sleep(1)
    resolved = call(
        bank, database, "resolve", trace["trace_id"], "succeeded", "-r", "the book has it", "--output", "{}"
    )
    assert (resolved.returncode, resolved.stdout) == (0, "{}\n")
    assert (bank.requests("held-1"), bank.executions("held-1")) == (1, 1)
    again = call(bank, database, "resolve", trace["trace_id"], "failed", "-r", "no")
    assert (again.returncode, "TRACE_NOT_HELD" in again.stderr) == (1, True)
    assert "known by resolution" in call(bank, database, "trace", trace["trace_id"]).stdout
    assert call(bank, database, "verify", "--all").returncode == 0
    assert call(bank, database, "resolve", trace["trace_id"], "maybe", "-r", "x").returncode == 2


async def test_recover_reports_a_poisoned_trace_and_finishes_the_others(
    bank: Bank, database: Database, admin: Admin
) -> None:
    for key in ("p-1", "p-2"):
        start_and_kill_in_the_middle(bank, database, key)
    poisoned = await admin.fetchval("SELECT stream FROM tga.heads WHERE stream LIKE 'trace:%' ORDER BY stream LIMIT 1")
    await admin.execute("ALTER TABLE tga.entries DISABLE TRIGGER append_only")
    await admin.execute(
        "UPDATE tga.entries SET entry = set_byte(entry, 9, 0) WHERE stream = $1 AND sequence_number = 2", poisoned
    )
    await admin.execute("ALTER TABLE tga.entries ENABLE ALWAYS TRIGGER append_only")
    told = call(bank, database, "recover", "--all", "--json")
    lines = [json.loads(line) for line in told.stdout.splitlines()]
    assert told.returncode == 1
    assert [line["error"] and line["error"]["code"] for line in lines] == ["STATE_CHECKSUM_MISMATCH", None]
    assert "entry 2" in lines[0]["error"]["message"]
    assert bank.requests("p-1") == 1


def test_a_config_that_cannot_be_used_is_exit_2(tmp_path: Path, database: Database) -> None:
    config = tmp_path / "tga.toml"
    config.write_text('[servers.pay]\ntransport = "carrier pigeon"\n')
    told = tga("traces", url=database.admin_url, TGA_CONFIG=str(config))
    assert told.returncode == 2
    assert "SETTING_INVALID" in told.stderr
    assert "Traceback" not in told.stderr
