"""The whole ledger verified while the gateway serves: one at a time in a gateway, with progress, and to be stopped.

It is the walk of `tga verify --all`, without what only the machine has: the signer's memory, kept heads, sealing keys.
It takes one database session, and while calls are being answered it pauses after each stream for several times as long
as it worked. The last results are kept in the process that has made them; a restart forgets them. Where several
processes serve the port, each asks the others for theirs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Literal, cast

import orjson

from app.core.errors import ConcurrentExecution, TgaError
from app.core.limits import LOG_VERIFICATIONS_KEPT, VERIFICATION_FINDINGS_MAX, VERIFICATION_PAUSE_TIMES
from app.domain.identity import Principal
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

logger = logging.getLogger("tga")

State = Literal["running", "sound", "wrong", "stopped", "failed"]
_TELL_EVERY_S: Final = 0.25
_SHOWN: Final = "verifications"


@dataclass(slots=True)
class LogVerification:
    """One verification, as far as it has come. `result` of the tree comes last."""

    verification_id: str
    started_by: str
    started_at: str
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
    changed: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def told(self, *, with_findings: bool = True) -> dict[str, Any]:
        said = {name: getattr(self, name) for name in _TOLD}
        return {**said, "findings": list(self.findings)} if with_findings else said

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

    def tell(self) -> None:
        changed, self.changed = self.changed, asyncio.Event()
        changed.set()


_TOLD: Final = (
    *("verification_id", "started_by", "started_at", "ended_at", "state", "phase", "streams_total", "streams"),
    *("entries", "findings_total", "tree", "error"),
)


def running() -> ConcurrentExecution:
    return ConcurrentExecution("a verification of the log is running", remedy="Follow it, or stop it, and start again.")


class LogVerifications:
    """Those of this gateway: the one that runs, and the last ones that ended."""

    def __init__(self) -> None:
        self._kept: deque[LogVerification] = deque(maxlen=LOG_VERIFICATIONS_KEPT)
        self._task: asyncio.Task[None] | None = None

    @property
    def newest_first(self) -> list[LogVerification]:
        return list(reversed(self._kept))

    def find(self, verification_id: str) -> LogVerification | None:
        return next((one for one in self._kept if one.verification_id == verification_id), None)

    def start(self, services: Services, by: Principal) -> LogVerification:
        """ConcurrentExecution while another one runs here."""
        if self._task is not None and not self._task.done():
            raise running()
        run = LogVerification(services.clock.new_id(), by.principal_id, services.clock.now())
        self._kept.append(run)
        self._task = asyncio.create_task(_verify(services, run))
        return run

    async def stop(self, run: LogVerification) -> None:
        """Stops it if it runs; what was found so far stays."""
        if run.state == "running" and self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task


class SharedVerifications:
    """Those of every process that serves the port: who asks need not know which of them has one."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._own = services.log_verifications
        self._processes = services.processes
        self._processes.shows[_SHOWN] = self._show
        self._processes.hears[_SHOWN] = self._stop_own

    async def start(self, by: Principal) -> dict[str, Any]:
        """ConcurrentExecution while another one runs."""
        if any(told["state"] == "running" for told in await self._of_others()):
            raise running()
        return self._own.start(self._services, by).told()

    async def newest_first(self) -> list[dict[str, Any]]:
        told = [run.told() for run in self._own.newest_first] + await self._of_others()
        return sorted(told, key=lambda one: str(one["started_at"]), reverse=True)[:LOG_VERIFICATIONS_KEPT]

    async def find(self, verification_id: str) -> dict[str, Any] | None:
        if (run := self._own.find(verification_id)) is not None:
            return run.told()
        told = await self._of_others()
        return next((one for one in told if one["verification_id"] == verification_id), None)

    async def stop(self, verification_id: str) -> None:
        """It is over, here or in the process that has it, when this returns."""
        if self._own.find(verification_id) is not None:
            await self._stop_own(verification_id)
            return
        self._processes.tell_others(_SHOWN, verification_id)
        async for _ in self.followed(verification_id):
            pass

    async def followed(self, verification_id: str) -> AsyncIterator[dict[str, Any]]:
        """Where it stands, again and again as it goes on, the end last. If its process ends, so does this."""
        if (run := self._own.find(verification_id)) is not None:
            async for told in followed(run):
                yield told
            return
        while (found := await self.find(verification_id)) is not None:
            yield found
            if found["state"] != "running":
                return
            await asyncio.sleep(_TELL_EVERY_S)

    async def _of_others(self) -> list[dict[str, Any]]:
        if self._processes.ask_others is None:
            return []
        shown = await self._processes.ask_others(_SHOWN)
        return [told for raw in shown.values() if raw for told in orjson.loads(raw)]

    async def _show(self) -> bytes:
        return orjson.dumps([run.told() for run in self._own.newest_first])

    async def _stop_own(self, verification_id: str) -> None:
        if (run := self._own.find(verification_id)) is not None:
            await self._own.stop(run)


async def followed(run: LogVerification) -> AsyncIterator[dict[str, Any]]:
    """Where it stands, again and again as it goes on, the end last."""
    while True:
        changed = run.changed
        yield run.told()
        if run.state != "running":
            return
        await changed.wait()


async def _verify(services: Services, run: LogVerification) -> None:
    ending = asyncio.create_task(services.stopping.wait())
    working = asyncio.create_task(_walk(services, run))
    try:
        await asyncio.wait({ending, working}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            run.state = "stopped"
        else:
            working.result()
    except asyncio.CancelledError:
        run.state = "stopped"
        raise
    except TgaError as error:
        run.state, run.error = "failed", f"{error.code}: {error.what}"
    except Exception:
        logger.exception("a defect in the verification of the log")
        run.state, run.error = "failed", "INTERNAL: a defect; the gateway's log says more"
    finally:
        for task in (ending, working):
            task.cancel()
        await asyncio.gather(ending, working, return_exceptions=True)
        run.phase, run.ended_at = "over", services.clock.now()
        run.tell()


async def _walk(services: Services, run: LogVerification) -> None:
    report, broken = Report(), dict[str, int]()
    async with open_reader(services.sessions) as reader:
        run.streams_total = reader.count_streams()
        pacing = asyncio.create_task(_tell_now_and_then(run, report))
        try:
            paced = cast("LedgerReader", _Paced(reader, services.read_scheduler))
            async for error in verify_ledger(paced, stream_checks(), report):
                run.note(error)
                if error.stream is not None:
                    number = error.sequence_number or 1
                    broken[error.stream] = min(broken.get(error.stream, number), number)
        finally:
            pacing.cancel()
    run.streams, run.entries, run.phase = report.streams, report.entries, "tree"
    run.tell()
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


async def _tell_now_and_then(run: LogVerification, report: Report) -> None:
    while True:
        await asyncio.sleep(_TELL_EVERY_S)
        run.streams, run.entries = report.streams, report.entries
        run.tell()


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
