"""A ledger that several processes verify: each walks pieces of it in a session of its own, all in one snapshot.

This process walks the streams that vouch for others, and every piece that another does not accept: so findings, their
order and the verdict are those of one walk. What is left of streams without a head comes last, and is judged here too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.cli.verify_workers import CannotStart, Heard, Start, Workers, say_alone, usable_cores
from app.core.errors import TgaError
from app.core.limits import LEDGER_PIECE_STREAMS_MIN, LEDGER_PIECES_A_JOB, LEDGER_SHARED_FROM_STREAMS
from app.domain.ledger.checks import EntryPlace, Kinds, NoteBlob, ReferredBlob, Report
from app.domain.ledger.verification import Walk, verify_keys_once, verify_streams
from app.postgres.reader import PostgresLedgerReader


def jobs_for(streams: int, jobs: int | None) -> int:
    """As many as were asked for; if none were named, all cores for a ledger that is large enough to be worth it."""
    if jobs is not None:
        return jobs
    return usable_cores() if streams >= LEDGER_SHARED_FROM_STREAMS else 1


class LedgerJobs:
    """Pieces of the numbers of streams, dealt out to workers in turn: each answers for its own in their order."""

    def __init__(self, workers: Heard, pieces: list[tuple[int | None, int]], count: int, end: int) -> None:
        self._workers = workers
        self._pieces = pieces
        self._count = count
        self._end = end

    async def verify(
        self,
        reader: PostgresLedgerReader,
        kinds: Kinds,
        report: Report,
        on_blob: NoteBlob,
        on_vouched: Callable[[], None],
    ) -> AsyncGenerator[TgaError, None]:
        """As `verify_ledger`. `on_vouched` is called when the streams that vouch for others were walked."""
        walk = Walk(kinds, report)
        walk.on_blob = on_blob
        async for error in verify_streams(reader.vouching(), walk, reader):
            yield error
        on_vouched()
        for number, (first, end) in enumerate(self._pieces):
            said: dict[str, Any] = await asyncio.to_thread(self._workers.hear, number % self._count)
            if said["accepted"]:
                report.add_counts(said["counts"])
                for place, blob in said["blobs"]:
                    on_blob(EntryPlace(*place), ReferredBlob(*blob))
                continue
            async for error in verify_streams(reader.numbered(first, end), walk, reader):
                yield error
        async for error in verify_streams(reader.numbered(self._end), walk, reader):
            yield error
        async for error in verify_keys_once(reader, report):
            yield error


@asynccontextmanager
async def open_ledger_jobs(
    reader: PostgresLedgerReader, url: str, keys: Path, jobs: int, *, start: Start = Workers
) -> AsyncIterator[LedgerJobs | None]:
    """None where no process can be started, which is said. `start` starts the jobs."""
    end = await reader.numbers_end()
    length = max(LEDGER_PIECE_STREAMS_MIN, -(-end // (jobs * LEDGER_PIECES_A_JOB)))
    # The first piece has no beginning: a number below zero is wrong, and not passed over.
    pieces = [(first or None, min(first + length, end)) for first in range(0, end, length)]
    common = {"kind": "pieces", "url": url, "keys": str(keys), "snapshot": await reader.export_snapshot()}
    try:
        dealt = [pieces[index::jobs] for index in range(min(jobs, len(pieces)))]
        workers = start([{**common, "pieces": dealt_to} for dealt_to in dealt])
    except CannotStart as error:
        say_alone(error)
        yield None
        return
    with workers:
        yield LedgerJobs(workers, pieces, len(dealt), end)
