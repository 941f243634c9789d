"""One walk through the whole ledger while the gateway serves, with what it has seen so far.

It is the walk of `tga verify --all`, without what only the machine has: the signer's memory, kept heads, sealing keys.
It takes one database session, and while calls are being answered it pauses after each stream for several times as long
as it worked.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast

from app.core.errors import TgaError
from app.core.limits import VERIFICATION_FINDINGS_MAX, VERIFICATION_PAUSE_TIMES
from app.domain.identity import DEFAULT_TENANT
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.log.epochs import keys_for
from app.domain.log.forensics import Diagnosis, examine_tree
from app.domain.runs.verification import stream_checks
from app.postgres.reader import open_reader
from app.postgres.tree import PostgresTree
from app.postgres.tree_reader import open_tree_reader

if TYPE_CHECKING:
    from app.domain.ledger.stored import LedgerReader, StoredStream
    from app.edge.read_scheduler import ReadScheduler
    from app.edge.services import Services
    from app.postgres.log_verifications import LogVerificationStore

State = Literal["running", "sound", "wrong", "stopped", "failed"]
CONCLUSIVE: Final = frozenset({"sound", "wrong"})
_COUNT_EVERY_S: Final = 0.25
_OF_ANOTHER_TENANT: Final = "something is wrong with the record of another tenant, in the same log"


@dataclass(slots=True)
class LogVerification:
    """One verification, as far as it has come. `tenant`: whose members started it and may read it. `attempt`: how many
    gateways have worked on it. `result` of the tree comes last."""

    verification_id: str
    tenant: str
    started_by: str
    started_at: str
    attempt: int = 1
    streams_total: int = 0
    streams: int = 0
    entries: int = 0
    state: State = "running"
    phase: Literal["streams", "tree", "over"] = "streams"
    findings: list[dict[str, Any]] = field(default_factory=list)
    findings_total: int = 0
    tree: dict[str, Any] | None = None
    error: str | None = None
    ended_at: str | None = None

    @classmethod
    def again(cls, told: dict[str, Any], tenant: str, attempt: int) -> LogVerification:
        """One that another gateway began: from the first entry on, under its name."""
        started = (told["verification_id"], tenant, told["started_by"], told["started_at"])
        return cls(*started, attempt=attempt)

    async def told(self, store: LogVerificationStore) -> dict[str, Any]:
        """The document for members of its tenant. What it finds in another tenant's streams is counted for them, and
        neither named nor quoted; the tenant `default` runs the installation, and sees all of it."""
        said = {name: getattr(self, name) for name in _TOLD}
        if self.tenant == DEFAULT_TENANT:
            return {**said, "findings": list(self.findings)}
        named = sorted({str(one["stream"]) for one in self.findings if one["stream"] is not None})
        tenants = await store.tenants_of(named) if named else {}
        own = {name for name in named if tenants.get(name) == self.tenant or name == f"system:{self.tenant}"}
        said["tree"] = None if self.tree is None else {**self.tree, "evidence": []}
        return {**said, "findings": [one if one["stream"] in own else _withheld(one) for one in self.findings]}

    def note(self, error: TgaError) -> None:
        self.findings_total += 1
        if len(self.findings) < VERIFICATION_FINDINGS_MAX:
            self.findings.append(
                {
                    "stream": error.stream,
                    "sequence_number": error.sequence_number,
                    "code": error.code,
                    "what": error.what,
                    "expected": None if error.expected is None else str(error.expected),
                    "found": None if error.found is None else str(error.found),
                }
            )


_TOLD: Final = (
    *("verification_id", "started_by", "started_at", "ended_at", "state", "phase", "streams_total", "streams"),
    *("entries", "findings_total", "tree", "error"),
)


def _withheld(finding: dict[str, Any]) -> dict[str, Any]:
    return {**dict.fromkeys(finding), "code": finding["code"], "what": _OF_ANOTHER_TENANT}


async def walk_log(services: Services, run: LogVerification) -> None:
    """From the first entry to the newest head; `run` says how far it is, and what was found."""
    report, broken = Report(), dict[str, int]()
    async with open_reader(services.sessions) as reader:
        run.streams_total = reader.count_streams()
        counting = asyncio.create_task(_count(run, report))
        try:
            paced = cast("LedgerReader", _Paced(reader, services.read_scheduler))
            async for error in verify_ledger(paced, stream_checks(), report):
                run.note(error)
                if error.stream is not None:
                    number = error.sequence_number or 1
                    broken[error.stream] = min(broken.get(error.stream, number), number)
        finally:
            counting.cancel()
    run.streams, run.entries, run.phase = report.streams, report.entries, "tree"
    own, latest = services.log.verifier_key, await PostgresTree(services.sessions).latest_head()
    keys = [own, *(keys_for(latest.head.origin, [own]) if latest is not None else [])]
    async with open_tree_reader(services.sessions) as tree:
        found: Diagnosis = await examine_tree(tree, [], keys=keys, broken=broken, on_finding=run.note)
    run.tree = {
        "kind": found.kind,
        "what": found.what,
        "tree_size": found.tree_size,
        "heads_fit": found.heads_fit,
        "trusted_size": found.trusted_size,
        "trusted_until": found.trusted_until,
        "broken_size": found.broken_size,
        "entries_without_leaf": found.entries_without_leaf,
        "evidence": list(found.evidence),
    }
    run.state = "sound" if run.findings_total == 0 and found.is_sound else "wrong"


async def _count(run: LogVerification, report: Report) -> None:
    while True:
        await asyncio.sleep(_COUNT_EVERY_S)
        run.streams, run.entries = report.streams, report.entries


class _Paced:
    """A reader that leaves the processor to calls between two streams."""

    def __init__(self, reader: LedgerReader, calls: ReadScheduler) -> None:
        self._reader = reader
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)

    async def streams(self) -> AsyncIterator[StoredStream]:
        began = time.monotonic()
        async for stored in self._reader.streams():
            yield stored
            worked_s = time.monotonic() - began
            await asyncio.sleep(VERIFICATION_PAUSE_TIMES * worked_s if self._calls.has_calls else 0)
            began = time.monotonic()
