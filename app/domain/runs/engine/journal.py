"""The journal of a run as its worker reads it: a fork's begins with its source's, under numbers that end at 0."""

from __future__ import annotations

from typing import NamedTuple

from app.core.limits import RUN_PAGE_BYTES_MAX
from app.domain.runs.documents import RunStart
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.replay import RunRecord


class JournalRecord(NamedTuple):
    """A record, and its number in this run's journal."""

    sequence_number: int
    record: RunRecord


async def first_seq(ports: RunPorts, start: RunStart) -> int:
    """After which number the journal begins: 0, and for a fork as many below as it has from its source."""
    number, origin = 0, start.forked_from
    while origin is not None:
        number -= origin.sequence_number
        origin = (await ports.runs.load(origin.run_id)).start.forked_from
    return number


async def load_journal(ports: RunPorts, run_id: str, start: RunStart, *, after: int, limit: int) -> list[JournalRecord]:
    """A page of the journal, in its order."""
    origin = start.forked_from
    if after >= 0 or origin is None:
        records = await ports.runs.load_records(run_id, after=max(after, 0), limit=limit)
        return [JournalRecord(record.entry.sequence_number, record) for record in records]
    source = (await ports.runs.load(origin.run_id)).start
    offset = origin.sequence_number
    page = await load_journal(ports, origin.run_id, source, after=after + offset, limit=min(limit, -after))
    page = [JournalRecord(number - offset, record) for number, record in page if number <= offset]
    if len(page) < limit and (not page or page[-1].sequence_number == 0) and sum(map(_size, page)) < RUN_PAGE_BYTES_MAX:
        page += await load_journal(ports, run_id, start, after=0, limit=limit - len(page))
    return page


def _size(record: JournalRecord) -> int:
    artifact = record.record.artifact
    return 0 if artifact is None else len(artifact.written()[0])
