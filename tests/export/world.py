"""A ledger with everything in it that a bundle can hold, sequenced and signed; and ways to export and judge it."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shutil
import subprocess
import sys
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar
from zlib import crc32

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.cli.bundle_files import DiskMemory, FolderFiles, own_schemas
from app.cli.bundle_jobs import accept_in_jobs
from app.cli.export import ExportedBlobs, write_bundle
from app.cli.verify_worker import accept_share
from app.clock import SystemClock
from app.core.ed25519 import key_id_of
from app.core.note import TreeHead, VerifierKey
from app.domain.log.bundle import Filter, Manifest
from app.domain.log.bundle_report import BundleReport
from app.domain.log.bundle_verification import verify_bundle
from app.domain.log.heads import SignedHead, fits
from app.domain.runs.documents import RunAnswer
from app.domain.runs.verification import stream_checks
from app.domain.system.documents import SigningKey
from app.domain.system.log import SystemLog
from app.domain.system.log_keys import announce_log_key
from app.domain.tga.documents import ArtifactDocument, SupervisorDecision
from app.domain.tga.erasing import ERASABLE_TRACES
from app.domain.tga.replay import LogRecord
from app.domain.tga.transitions import TRACE
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.erasing import erase_stream
from app.postgres.export import open_export
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import LeaderTerm, TreeSession
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from app.postgres.system import PostgresSystemRows
from tests.runs.samples import samples
from tests.runs.samples import store as store_run
from tests.traces import (
    EXECUTOR,
    PATHS,
    action_request,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
    trace_id,
    uuid7,
)

TOOL = Path(__file__).parents[2] / "tools" / "verify.py"

Signed = TypeVar("Signed", SupervisorDecision, RunAnswer)


@dataclass
class World:
    """One database, its log's key and memory, and a person who signs decisions."""

    database: Database
    sessions: Sessions
    store: PostgresStateStore
    keys: Path
    person: Ed25519PrivateKey = field(default_factory=Ed25519PrivateKey.generate)

    def __post_init__(self) -> None:
        self.clock = SystemClock()
        self.system = SystemLog(
            PostgresSystemRows(self.sessions),
            PostgresLedger(self.sessions),
            self.clock,
            lambda: uuid7(7, role="executor"),
        )
        self.signer = LogSigner.open(self.keys, origin="example.org/ledger", environment={})

    @property
    def verifier_key(self) -> VerifierKey:
        return self.signer.verifier_key

    async def announce(self) -> None:
        await announce_log_key(self.system, self.clock, self.signer.public_key)
        public = self.person.public_key().public_bytes_raw()
        await self.system.append(
            "default",
            lambda _: [
                SigningKey.made(
                    system_id="default",
                    recorded_at=time_at(0),
                    recorded_by="admin",
                    change="announced",
                    key_id=key_id_of(public),
                    algorithm="Ed25519",
                    public_key=b64encode(public).decode(),
                    principal_id="alice",
                )
            ],
        )

    async def append(self, records: Sequence[LogRecord]) -> None:
        for record in records:
            await self.store.append_log_entry(record)

    async def fill(self, first: int, count: int, **overrides: Any) -> None:
        """Traces of every path through the table; every third completed one is decided by the person."""
        for n in range(first, first + count):
            if n % 3 == 0:
                await self.append(self.signed_trace(n, **overrides))
            else:
                await self.append(PATHS[sorted(PATHS)[n % len(PATHS)]](n, **overrides))

    def signed_trace(self, n: int, *, by: str = "alice", **overrides: Any) -> list[LogRecord]:
        request = action_request(n, **overrides)
        decision = self.signed(supervisor_decision(request, decided_by={"type": "person", "id": by}))
        call = tool_call(n, request, decision)
        artifacts: list[ArtifactDocument] = [request, decision, call, tool_effect(call)]
        return records_of(*artifacts)

    def signed(self, decision: Signed) -> Signed:
        signature = {
            "algorithm": "Ed25519",
            "key_id": key_id_of(self.person.public_key().public_bytes_raw()),
            "value": b64encode(self.person.sign(decision.signed_bytes())).decode(),
        }
        return type(decision).model_validate({**decision.to_json(), "signature": signature})

    async def sequence(self) -> SignedHead:
        """Every entry a leaf, and a signed head over them, as a gateway does it."""
        async with await TreeSession.open(self.database.gateway_url) as session:
            assert await session.try_lock()
            term = LeaderTerm(session, self.signer, stall_ms=60_000)
            await term.settle()
            while await term.make_round():
                pass
        signed = self.signer.load_remembered()
        assert signed is not None
        return signed

    async def erase(self, n: int, *, tenant: str = "default", rationale: str = "asked to") -> None:
        await erase_stream(
            self.sessions,
            self.system,
            self.clock,
            EXECUTOR,
            TRACE.stream(trace_id(n)),
            ERASABLE_TRACES,
            tenant=tenant,
            erased_by="admin",
            rationale=rationale,
        )

    async def export(
        self,
        folder: Path,
        wanted: Filter | None = None,
        *,
        size: int | None = None,
        blobs: ExportedBlobs | None = None,
    ) -> Manifest:
        folder.mkdir(exist_ok=True)
        async with open_export(self.sessions, wanted or Filter(), size=size) as export:
            return await write_bundle(folder, export, wanted or Filter(), blobs)


async def run_ledger(world: World) -> None:
    """A small ledger with runs of every sort among its traces."""
    await world.announce()
    await world.fill(1, 4)
    trace, runs = samples()
    await world.append(trace)
    for run in runs:
        await store_run(PostgresLedger(world.sessions), run)
    await world.sequence()


async def small_ledger(world: World) -> None:
    """Two heads, an erased trace that the tree covers, decisions of a person, all states."""
    await world.announce()
    await world.fill(1, 12)
    await world.sequence()
    await world.erase(3)
    await world.fill(20, 6)
    await world.sequence()


Finding = tuple[str, str | None, int | None]


@dataclass(frozen=True)
class Verdict:
    """What was found about the bundle and its covered entries; and apart from it, about what no head covers."""

    findings: list[Finding]
    entries_after_head: int
    after_head: list[Finding]
    report: BundleReport | None = None

    @property
    def is_sound(self) -> bool:
        return not self.findings and not self.after_head

    @property
    def codes(self) -> list[str]:
        return [code for code, _, _ in self.findings]


def judge(folder: Path, *keys: VerifierKey, streams_max: int = 100, held: Sequence[SignedHead] = ()) -> Verdict:
    """What `tga verify --file` finds."""
    report = BundleReport()
    kinds = stream_checks()
    with DiskMemory(kinds, streams_max=streams_max) as memory:
        found = [
            (error.code, error.stream, error.sequence_number)
            for error in verify_bundle(
                FolderFiles(folder),
                keys,
                verify=fits,
                memory=memory,
                report=report,
                schemas=own_schemas(),
                kinds=kinds,
                held=[one.head for one in held],
            )
        ]
    _judge_in_shares(folder, keys, [one.head for one in held], report)
    after = report.after_head
    assert report.is_sound == (not found and not after.findings)
    apart = [(error.code, error.stream, error.sequence_number) for error in after.findings]
    return Verdict(found, after.entries, apart, report)


class SharesHere(contextlib.ExitStack):
    """What processes of `tga verify --jobs` do, in this one."""

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._jobs = [json.loads(json.dumps(job)) for job in jobs]

    def hear(self, index: int) -> Any:
        return json.loads(json.dumps(accept_share(self._jobs[index])))


def _judge_in_shares(folder: Path, keys: Sequence[VerifierKey], held: Sequence[TreeHead], report: BundleReport) -> None:
    """What shares accept one walk has found sound, and counted the same. Nothing else is said by them."""
    for shares in (1, 2 + crc32(folder.name.encode()) % 3):
        accepted = accept_in_jobs(folder, keys, held, shares, start=SharesHere)
        assert accepted is None or (report.is_sound and accepted == report)


def load_tool() -> Any:
    """tools/verify.py as a module: it imports nothing of ours."""
    spec = importlib.util.spec_from_file_location("standalone_verify", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["standalone_verify"] = module
    spec.loader.exec_module(module)
    return module


_tool = load_tool()


def judge_alone(folder: Path, *keys: VerifierKey, held: Sequence[SignedHead] = ()) -> Verdict:
    """What tools/verify.py finds, in this process."""
    bundle = _tool.Bundle(folder, [_tool.read_key(key.to_text()) for key in keys], [one.note for one in held])
    bundle.verify()
    found, apart = (
        [(wrong.code, wrong.stream, wrong.sequence_number) for wrong in wrongs]
        for wrongs in (bundle.findings, bundle.after_head)
    )
    return Verdict(found, bundle.counts["entries after the head"], apart)


def run_alone(folder: Path, key: str) -> tuple[int, dict[str, Any]]:
    """tools/verify.py as an auditor runs it: another process, outside the clone, without our packages on its path."""
    ended = subprocess.run(
        [sys.executable, "-I", str(TOOL), str(folder), key, "--json"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )
    assert not ended.stderr, ended.stderr
    return ended.returncode, json.loads(ended.stdout)


def copied(folder: Path, to: Path) -> Path:
    shutil.copytree(folder, to)
    return to
