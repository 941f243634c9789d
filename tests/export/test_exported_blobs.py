"""Blobs in bundles and in the store: each is what the entry says that refers to it, or it is named; for both verifiers,
however large it is, and whether or not it is sealed."""

from __future__ import annotations

import hashlib
import json
import random
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.stored_blobs import StoredBlobs
from app.connectors.blobs import FolderStore
from app.core.digest import Digest
from app.core.errors import BlobStoreUnavailable
from app.domain.log.bundle import MANIFEST, Filter
from app.domain.log.bundled_blobs import blob_file
from app.domain.runs.blobs import Blobs, blob_path
from app.domain.runs.erasing import ERASABLE_RUNS
from app.domain.system.documents import ProcedureRegistration
from app.postgres.blobs import PostgresBlobRows
from app.postgres.erasing import erase_stream
from app.postgres.ledger import PostgresLedger
from tests.export.test_command import said, tga
from tests.export.world import World, copied, judge, judge_alone, run_alone
from tests.runs import samples
from tests.traces import EXECUTOR, time_at

PLAIN, SEALED, ASKED, PROGRAM = (f"{name} {'x' * 100}".encode() for name in ("a", "sealed", "asked", "lua"))


def value(raw: bytes, tier: str = "artifact") -> dict[str, Any]:
    ref = {"sha256": sha256(raw), "size_bytes": len(raw), "media_type": "text/plain", "serializer": "bytes"}
    return {"tier": tier, "ref": ref} | ({"commitment": "c" * 64} if tier == "secret" else {})


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


async def pieces_of(raw: bytes) -> AsyncIterator[bytes]:
    yield raw


async def nothing() -> None:
    pass


async def put(objects: FolderStore, raw: bytes, tenant: str = "default") -> None:
    await objects.write(blob_path(tenant, Digest(sha256(raw))), pieces_of(raw), before_visible=nothing)


def run_with_blobs(run_id: str = "r", *, plain: bytes = PLAIN) -> samples.SampleRun:
    """Entry 3 refers to `plain`, 4 to it again, 5 to sealed bytes; 6 asks about a blob."""
    run = samples.SampleRun(run_id)
    run.add("attempt", 1)
    run.add("checkpoint", "1", value=value(plain))
    run.add("checkpoint", "2", value=value(plain))
    run.add("checkpoint", "3", value=value(SEALED, "secret"))
    run.add("intent", "4", "ask", "pay", request=ask_about(value(ASKED)))
    return run


def ask_about(context: dict[str, Any]) -> dict[str, Any]:
    asked = samples.SampleRun("x")
    asked.add("attempt", 1)
    usual = asked.made("intent", "1", "ask", "pay").to_json()["request"]
    assert isinstance(usual, dict)
    return {**usual, "context": context}


@pytest.fixture
def objects(world: World) -> FolderStore:
    (world.keys.parent / "home").mkdir()
    return FolderStore(world.keys.parent / "home" / "blobs")  # where `tga` looks for them, too


async def ledger_with_blobs(world: World, objects: FolderStore) -> None:
    await world.announce()
    registration = ProcedureRegistration.made(
        system_id="default",
        recorded_at=time_at(0),
        recorded_by="admin",
        name="onboard",
        version="1",
        program_digest="a" * 64,
        language="lua",
        description=None,
        input_schema=None,
        output_schema=None,
        state_schema=None,
        policy={
            "timeout_ms": None,
            "checkpoint_timeout_ms": None,
            "retry": {"retries": 0, "first_ms": 1, "max_ms": 1},
            "park_after": 5,
            "retention": "keep",
        },
        triggers=[],
        tags=[],
        program_source={"sha256": sha256(PROGRAM), "size_bytes": len(PROGRAM), "files": []},
    )
    stored = Blobs(PostgresBlobRows(world.sessions), objects, world.clock)
    await stored.put("default", Digest(sha256(PROGRAM)), pieces_of(PROGRAM))  # the ledger insists that it is there
    await world.system.append("default", lambda _: [registration])
    await samples.store(PostgresLedger(world.sessions), run_with_blobs())
    await world.sequence()
    for raw in (PLAIN, SEALED, ASKED):
        await put(objects, raw)


async def test_a_bundle_has_the_blobs_that_its_entries_refer_to_and_both_verifiers_read_them(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    await ledger_with_blobs(world, objects)
    await put(objects, b"to which no entry refers")
    await world.export(tmp_path / "with", blobs=(blobs := StoredBlobs(objects)))
    files = {path.name: path.read_bytes() for path in (tmp_path / "with" / "blobs").rglob("*") if path.is_file()}
    assert files == {sha256(raw): raw for raw in (PLAIN, SEALED, ASKED, PROGRAM)}  # what is sealed stays so
    assert (blobs.copied.blobs, blobs.copied.lacking) == (4, 0)
    verdict = judge(tmp_path / "with", world.verifier_key)
    assert verdict.is_sound, verdict.findings
    assert verdict.report is not None
    found = verdict.report.blobs
    assert (found.checked, found.sealed, found.unchecked) == (4, 1, 0)
    assert found.checked_bytes == sum(map(len, (PLAIN, SEALED, ASKED, PROGRAM)))
    assert any("1 sealed values" in sentence for sentence in verdict.report.unknown)
    status, alone = run_alone(tmp_path / "with", world.verifier_key.to_text())
    assert (status, alone["checked"]["blobs"], "blobs not checked" in alone["checked"]) == (0, 4, False)


async def test_a_bundle_without_blobs_says_that_they_were_not_checked(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    await ledger_with_blobs(world, objects)
    await world.export(tmp_path / "without")
    assert not (tmp_path / "without" / "blobs").exists()
    verdict = judge(tmp_path / "without", world.verifier_key)
    assert verdict.is_sound, verdict.findings
    assert verdict.report is not None
    assert (verdict.report.blobs.checked, verdict.report.blobs.unchecked) == (0, 4)
    assert any("Whether 4 blobs" in sentence for sentence in verdict.report.unknown)
    status, alone = run_alone(tmp_path / "without", world.verifier_key.to_text())
    assert (status, alone["checked"]["blobs not checked"]) == (0, 4)
    insisting = tga(world, "verify", "--file", tmp_path / "without", "--key", world.verifier_key.to_text(), "--blobs")
    assert (insisting.returncode, "exported without blobs" in insisting.stdout) == (1, True)


def _flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[random.randrange(len(raw))] ^= 1  # any byte will do
    path.write_bytes(raw)


TAMPERED: dict[str, tuple[Any, str]] = {
    "a flipped bit": (_flip, "BLOB_DAMAGED"),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), "BLOB_DAMAGED"),
    "longer": (lambda path: path.write_bytes(path.read_bytes() + b"x"), "BLOB_DAMAGED"),
    "empty": (lambda path: path.write_bytes(b""), "BLOB_DAMAGED"),
    "another blob": (lambda path: path.write_bytes(PROGRAM), "BLOB_DAMAGED"),
    "a folder": (lambda path: (path.unlink(), path.mkdir()), "BLOB_DAMAGED"),
    "gone": (lambda path: path.unlink(), "BLOB_NOT_FOUND"),
}


async def test_a_blob_that_was_changed_or_removed_is_found_at_an_entry_that_refers_to_it(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    await ledger_with_blobs(world, objects)
    await world.export(tmp_path / "whole", blobs=StoredBlobs(objects))
    for number, (name, (change, code)) in enumerate(TAMPERED.items()):
        for raw, entry in ((PLAIN, 3), (SEALED, 5), (ASKED, 6)):
            bundle = copied(tmp_path / "whole", tmp_path / f"{number}-{entry}")
            change(bundle / blob_file(sha256(raw)))
            expected = [(code, "run:r", entry)]
            assert judge(bundle, world.verifier_key).findings == expected, name
            assert judge_alone(bundle, world.verifier_key).findings == expected, name
    hidden = copied(tmp_path / "whole", tmp_path / "hidden")  # as if it had been exported without
    (hidden / blob_file(sha256(PLAIN))).unlink()
    manifest = json.loads((hidden / MANIFEST).read_bytes())
    del manifest["blobs"]
    (hidden / MANIFEST).write_text(json.dumps(manifest))
    verdict = judge(hidden, world.verifier_key)
    assert verdict.report is not None
    assert (verdict.findings, verdict.report.blobs.unchecked) == ([], 4)
    manifest["blobs"] = 1
    (hidden / MANIFEST).write_text(json.dumps(manifest))
    assert (
        judge(hidden, world.verifier_key).codes == judge_alone(hidden, world.verifier_key).codes == ["BUNDLE_INVALID"]
    )


async def test_what_the_store_lacks_is_told_by_the_export_and_found_in_the_bundle_and_in_the_store(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    await ledger_with_blobs(world, objects)
    folder = world.keys.parent / "home" / "blobs"
    whole = tga(world, "verify", "run:r", "--blobs", "--json")
    assert (whole.returncode, said(whole)["blobs"]["checked"]) == (0, 4), whole.stdout + whole.stderr
    (folder / blob_path("default", Digest(sha256(PLAIN)))).unlink()
    _flip(folder / blob_path("default", Digest(sha256(ASKED))))
    lacking = [("BLOB_NOT_FOUND", "run:r", 3), ("BLOB_DAMAGED", "run:r", 6)]
    unread = tga(world, "verify", "--all")
    assert (unread.returncode, "references to blobs were not followed" in unread.stdout) == (0, True), unread.stdout
    for which in (["--all"], ["run:r"]):
        stored = tga(world, "verify", *which, "--blobs", "--json")
        findings = [(one["code"], one["stream"], one["sequence_number"]) for one in said(stored)["findings"]]
        assert (stored.returncode, sorted(findings)) == (1, sorted(lacking)), stored.stderr
        assert {name: said(stored)["blobs"][name] for name in ("missing", "damaged")} == {"missing": 1, "damaged": 1}
    bundle = tmp_path / "bundle"
    exported = tga(world, "export", bundle, "--blobs", "--run", "r")
    assert (exported.returncode, "2 blobs could not be copied" in exported.stdout) == (1, True), exported.stdout
    missing = [("BLOB_NOT_FOUND", "run:r", 3), ("BLOB_NOT_FOUND", "run:r", 6)]  # no damaged bytes go along
    assert sorted(judge(bundle, world.verifier_key).findings) == missing
    assert sorted(judge_alone(bundle, world.verifier_key).findings) == missing


async def test_blobs_of_an_erased_run_are_neither_asked_for_nor_exported_unless_another_run_refers_to_them(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    ended = run_with_blobs("gone")
    ended.add("answer", "4", ended.last_digest, "timer")
    ended.add("end", positions=4)
    other = samples.SampleRun("kept")
    other.add("attempt", 1)
    other.add("checkpoint", "1", value=value(PLAIN))
    await world.announce()
    for run in (ended, other):
        await samples.store(PostgresLedger(world.sessions), run)
    await put(objects, PLAIN)  # what the erased run alone had referred to is collected
    await erase_stream(
        world.sessions,
        world.system,
        world.clock,
        EXECUTOR,
        "run:gone",
        ERASABLE_RUNS,
        tenant="default",
        erased_by="admin",
        rationale="asked to",
    )
    await world.sequence()
    await world.export(tmp_path / "bundle", blobs=StoredBlobs(objects))
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound, verdict.findings
    assert verdict.report is not None
    assert verdict.report.blobs.checked == 1
    assert any("payloads were erased" in said and "blobs they alone" in said for said in verdict.report.unknown)
    assert judge_alone(tmp_path / "bundle", world.verifier_key).is_sound


async def test_of_a_tenant_s_bundle_the_blobs_are_its_own(world: World, objects: FolderStore, tmp_path: Path) -> None:
    await world.announce()
    ours = samples.SampleRun("acme/r", principal={"principal_id": "agent-1", "tenant": "acme", "roles": ["agent"]})
    ours.add("attempt", 1)
    ours.add("checkpoint", "1", value=value(PLAIN))
    for run in (ours, run_with_blobs()):
        await samples.store(PostgresLedger(world.sessions), run)
    await world.sequence()
    await put(objects, PLAIN, tenant="acme")
    await world.export(tmp_path / "bundle", Filter(tenant="acme"), blobs=(blobs := StoredBlobs(objects)))
    assert (blobs.copied.blobs, blobs.copied.lacking) == (1, 0)
    assert judge(tmp_path / "bundle", world.verifier_key).is_sound


class _Failing:
    """A store that fails at its n-th read."""

    def __init__(self, objects: FolderStore, reads: int) -> None:
        self._store, self.reads, self.paths = objects, reads, list[str]()

    async def read(self, path: str, *, start: int, length: int) -> bytes:
        self.paths.append(path)
        if len(self.paths) > self.reads:
            raise BlobStoreUnavailable("away")
        return await self._store.read(path, start=start, length=length)

    async def write(self, *_: Any, **__: Any) -> None:
        raise AssertionError

    async def delete(self, path: str) -> None:
        raise AssertionError

    async def sweep(self, *, older_than_ms: int) -> None:
        raise AssertionError


async def test_an_export_that_the_store_interrupted_goes_on_and_reads_no_blob_again(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    await ledger_with_blobs(world, objects)
    failing = _Failing(objects, reads=3)  # a blob is two reads
    with pytest.raises(BlobStoreUnavailable):
        await world.export(tmp_path / "bundle", blobs=StoredBlobs(failing))
    assert not (tmp_path / "bundle" / MANIFEST).exists()
    again = _Failing(objects, reads=1_000)
    await world.export(tmp_path / "bundle", blobs=StoredBlobs(again))
    assert failing.paths[0] not in again.paths
    assert judge(tmp_path / "bundle", world.verifier_key).is_sound


async def test_a_large_blob_is_exported_and_verified_in_flat_memory(
    world: World, objects: FolderStore, tmp_path: Path
) -> None:
    large = random.Random(1).randbytes(1 << 20) * 48
    await world.announce()
    await samples.store(PostgresLedger(world.sessions), run_with_blobs(plain=large))
    await world.sequence()
    for raw in (large, SEALED, ASKED):
        await put(objects, raw)
    del large, raw
    tracemalloc.start()
    try:
        await world.export(tmp_path / "bundle", blobs=StoredBlobs(objects))
        assert judge(tmp_path / "bundle", world.verifier_key).is_sound
        assert judge_alone(tmp_path / "bundle", world.verifier_key).is_sound
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 24 << 20, peak
