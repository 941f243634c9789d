"""What an auditor sees: findings in words, how far to trust the log, and one receipt judged alone."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import asyncpg
import pytest

from app.core.note import TlogProof
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.attacker import disarm
from tests.cli.world import World, trace_of
from tests.runs.samples import small, store


@pytest.fixture(scope="module")
def paid(world: World) -> str:
    return trace_of(world.tga("call", "bank", "charge", "-a", "amount=7", "-k", "audit-17"))


@pytest.fixture(scope="module")
def key(world: World) -> str:
    return world.tga("keys", "show", "log").stdout.strip()


@pytest.fixture
def receipt(world: World, paid: str, tmp_path: Path) -> Path:
    path = tmp_path / "receipt"
    path.write_text(world.tga("receipt", paid).stdout)
    return path


def test_one_receipt_is_verified_alone_with_the_logs_public_key(
    world: World, paid: str, receipt: Path, key: str
) -> None:
    nowhere = {"TGA_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/none"}
    told = world.tga("verify", "--receipt", str(receipt), "--key", key, **nowhere)
    assert told.returncode == 0, told
    assert paid in told.stdout
    assert "EXECUTING to COMPLETED, tool_effect" in told.stdout
    document = json.loads(world.tga("verify", "--receipt", str(receipt), "--key", key, "--json", **nowhere).stdout)
    assert (document["sound"], document["trace_id"], document["entry"]["to_state"]) == (True, paid, "COMPLETED")


def test_a_receipt_of_another_entry_tree_or_key_is_refused_with_the_reason(
    world: World, receipt: Path, key: str, tmp_path: Path
) -> None:
    text = receipt.read_text()
    proof = TlogProof.from_text(text)
    forged = proof.extra.replace(b'"COMPLETED"', b'"FAILED"')
    assert forged != proof.extra
    another = "tga.local/other+" + key.partition("+")[2]
    wrong = {
        "another entry": (
            TlogProof(proof.index, proof.hashes, proof.note, forged).to_text(),
            key,
            1,
            "not in the tree",
        ),
        "another place": (
            TlogProof(proof.index ^ 1, proof.hashes, proof.note, proof.extra).to_text(),
            key,
            1,
            "not in the tree",
        ),
        "another head": (
            text.replace(proof.note, proof.note.replace("\n", "\n1", 1)),
            key,
            1,
            "not signed by this key",
        ),
        "another key": (text, another, 2, "verifier key's id is not its own"),
        "no entry": (TlogProof(proof.index, proof.hashes, proof.note).to_text(), key, 2, "tga receipt ID"),
        "no receipt": ("hello", key, 2, "holds no receipt"),
    }
    for name, (written, with_key, code, says) in wrong.items():
        path = tmp_path / "wrong"
        path.write_text(written)
        told = world.tga("verify", "--receipt", str(path), "--key", with_key)
        assert told.returncode == code, (name, told)
        assert says in told.stdout + told.stderr, (name, told)
    assert world.tga("verify", "--receipt", str(receipt)).returncode == 2


def test_the_receipt_over_http_is_the_same_and_carries_its_entry(world: World, paid: str, receipt: Path) -> None:
    listed = world.json("trace", paid)
    entry = json.loads(TlogProof.from_text(receipt.read_text()).extra)
    assert (entry["trace_id"], entry["sequence_number"]) == (paid, listed["sequence_number"])


def test_a_run_is_verified_exported_and_has_its_receipt_by_the_same_commands(
    world: World, tmp_path: Path, key: str
) -> None:
    asyncio.run(_store_run(world.admin_url))
    told = world.tga("verify", "run:small")
    assert told.returncode == 0, told
    document = json.loads(world.tga("verify", "run:small", "--json").stdout)
    path = tmp_path / "receipt"
    path.write_text(world.tga("receipt", "run:small").stdout)
    judged = world.tga("verify", "--receipt", str(path), "--key", key)
    assert judged.returncode == 0, judged
    assert "RUNNING to COMPLETED, run_end" in judged.stdout
    last = json.loads(TlogProof.from_text(path.read_text()).extra)["sequence_number"]
    assert (document["streams"], document["entries"]) == (1, last), "not those of the tenant's system stream"
    assert f"1 stream, {last} entries: " in told.stdout
    document = json.loads(world.tga("verify", "--receipt", str(path), "--key", key, "--json").stdout)
    assert (document["sound"], document["run_id"]) == (True, "small")
    bundle = tmp_path / "bundle"
    assert world.tga("export", str(bundle), "--run", "small").returncode == 0
    judged = world.tga("verify", "--file", str(bundle), "--key", key)
    assert judged.returncode == 0
    assert ", 1 run, " in judged.stdout
    for arguments in (
        ("verify", "run:none"),
        ("receipt", "run:none"),
        ("export", str(tmp_path / "b"), "--run", "none"),
    ):
        missing = world.tga(*arguments)
        assert missing.returncode not in (0, 2), missing
        assert "RUN_NOT_FOUND" in missing.stderr
    assert world.tga("verify", "run:no run").returncode == 2
    both = world.tga("export", str(tmp_path / "c"), "--run", "small", "--trace", "01970000-0000-7000-8000-000000000010")
    assert both.returncode == 2


async def _store_run(url: str) -> None:
    async with await Sessions.open(url) as sessions:
        await store(PostgresLedger(sessions), small())


def test_a_finding_in_a_bundle_names_tool_caller_and_key_in_words_too(
    world: World, paid: str, tmp_path: Path, key: str
) -> None:
    bundle = tmp_path / "bundle"
    assert world.tga("export", str(bundle)).returncode == 0
    entries = bundle / "entries.jsonl"
    lines = entries.read_text("utf-8").splitlines(keepends=True)
    (at,) = [place for place, line in enumerate(lines) if f'"trace:{paid}","sequence_number":2,' in line]
    lines[at] = lines[at].replace("APPROVE", "APPROVF")
    entries.write_text("".join(lines), "utf-8")
    told = world.tga("verify", "--file", str(bundle), "--key", key)
    assert told.returncode == 1
    assert "charge of bank, called by admin with key audit-17" in told.stdout
    found = json.loads(world.tga("verify", "--file", str(bundle), "--key", key, "--json").stdout)["findings"]
    calls = [finding["call"] for finding in found if finding["stream"] == f"trace:{paid}"]
    assert {(call["tool_name"], call["idempotency_key"]) for call in calls} == {("charge", "audit-17")}


def test_a_finding_names_tool_caller_and_key_in_words_and_how_far_to_trust(world: World, paid: str) -> None:
    """The last one: it tampers."""
    asyncio.run(_tamper(world.admin_url, f"trace:{paid}"))
    told = world.tga("verify", "--all")
    assert told.returncode == 1
    assert "charge of bank, called by admin with key audit-17" in told.stdout
    size = int(told.stdout.split("Trust it up to tree size ")[1].split(",")[0].split(".")[0])
    leaves = int(told.stdout.split(" leaves")[0].split()[-1].replace(",", "")) if " leaves" in told.stdout else None
    assert leaves is None or size < leaves
    (finding,) = [
        finding
        for finding in json.loads(world.tga("verify", "--all", "--json").stdout)["findings"]
        if finding["sequence_number"] == 2
    ]
    assert finding["call"] == {
        "server_id": "bank",
        "tool_name": "charge",
        "principal_id": "admin",
        "idempotency_key": "audit-17",
    }
    alone = world.tga("verify", paid)
    assert "charge of bank, called by admin with key audit-17" in alone.stdout


async def _tamper(url: str, stream: str) -> None:
    session = await asyncpg.connect(url)
    try:
        await disarm(session)
        changed = "UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = $1 AND sequence_number = 2"
        assert await session.execute(changed, stream) == "UPDATE 1"
    finally:
        await session.close()
