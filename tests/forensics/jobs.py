"""A ledger that is verified by one walk and in pieces: both must find the same."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Sequence
from typing import Any

import pytest

from app.cli import ledger_jobs
from app.cli.ledger_jobs import open_ledger_jobs
from app.cli.verify_worker import accept_pieces
from app.cli.verify_workers import Start
from app.core.errors import TgaError
from app.domain.ledger.checks import EntryPlace, KindChecks, ReferredBlob, Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.tga.verification import TraceKind
from app.keys.keyring import Unsealer
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from tests.export.world import World

PIECE_STREAMS = 5


class PiecesHere(contextlib.ExitStack):
    """What processes of `tga verify --all --jobs` do, in a thread of this one."""

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self._jobs = jobs
        self._said: dict[int, list[Any]] = {}

    def hear(self, index: int) -> Any:
        if index not in self._said:
            self._said[index] = asyncio.run(self._collect(json.loads(json.dumps(self._jobs[index]))))
        return self._said[index].pop(0)

    async def _collect(self, job: dict[str, Any]) -> list[Any]:
        return [json.loads(json.dumps(said)) async for said in accept_pieces(job)]


async def found_in_pieces(
    world: World, sessions: Sessions, jobs: int, *, start: Start = PiecesHere, url: str | None = None
) -> tuple[list[TgaError], Report, list[Any]]:
    report, blobs = Report(), list[Any]()
    kinds = stream_checks(unseals=Unsealer.find(world.keys))

    def note(place: EntryPlace, blob: ReferredBlob) -> None:
        blobs.append((place, blob))

    async with open_reader(sessions) as reader:
        if jobs == 1:
            return [error async for error in verify_ledger(reader, kinds, report, on_blob=note)], report, blobs
        store = url or world.database.gateway_url
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(ledger_jobs, "LEDGER_PIECE_STREAMS_MIN", PIECE_STREAMS)
            async with open_ledger_jobs(reader, store, world.keys, jobs, start=start) as opened:
                assert opened is not None
                found = [error async for error in opened.verify(reader, kinds, report, note, lambda: None)]
    return found, report, blobs


async def found_by_any_number(world: World, sessions: Sessions, url: str | None = None) -> list[TgaError]:
    """What one walk finds that judges row by row; with traces that are accepted whole, and with three jobs, the same is
    found, in the same order, and counted. `url`: of the database of these sessions, where it is not the world's."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(TraceKind, "accepts_whole", KindChecks.accepts_whole)
        found, report, blobs = await found_in_pieces(world, sessions, 1)
    for jobs in (1, 3):
        again = await found_in_pieces(world, sessions, jobs, url=url)
        assert [_said(error) for error in again[0]] == [_said(error) for error in found]
        assert again[1:] == (report, blobs)
    return found


def _said(error: TgaError) -> tuple[Any, ...]:
    return error.code, error.what, error.expected, error.found, error.stream, error.sequence_number
