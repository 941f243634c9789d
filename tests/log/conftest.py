"""A log's keys, a sequencer to run, and processes that run one."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from app.core.errors import TgaError
from app.domain.ledger.plans import Plan
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import Sequencer, TreeSession
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from tests.invariants.plans import plan_of
from tests.patience import HANG_S
from tests.traces import completed_trace

ROOT = Path(__file__).parents[2]
_numbers = itertools.count(1)
Processes: TypeAlias = "Callable[..., SequencerProcess]"


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    return tmp_path / "keys"


@pytest.fixture
def signer(keys: Path) -> LogSigner:
    return LogSigner.open(keys, environment={})


def plans(count: int) -> list[Plan]:
    """Traces of four entries each that nobody has appended yet."""
    return [plan_of(completed_trace(next(_numbers))) for _ in range(count)]


async def append(ledger: PostgresLedger, count: int) -> None:
    made = plans(count)
    for start in range(0, count, 64):
        batch = made[start : start + 64]
        assert await ledger.commit_batch(batch) == [None] * len(batch)


async def run_again(sequencer: Sequencer) -> None:
    """As the gateway runs it: whatever fails is tried again."""
    while True:
        with contextlib.suppress(TgaError):
            await sequencer.run()
        await asyncio.sleep(0.02)


@asynccontextmanager
async def sequencing(database: Database, signer: LogSigner, **settings: Any) -> AsyncIterator[Sequencer]:
    """A sequencer at work in this process."""
    sequencer = Sequencer(lambda: TreeSession.open(database.gateway_url), signer, **settings)
    task = asyncio.create_task(run_again(sequencer))
    try:
        yield sequencer
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def caught_up(sessions: Sessions, *, within_s: float = HANG_S) -> int:
    """Wait until the newest head covers every entry; its size."""
    tree = PostgresTree(sessions)
    async with asyncio.timeout(within_s):
        while True:
            (row,) = await sessions.fetch("SELECT count(*) AS entries FROM tga.entries")
            latest = await tree.latest_head()
            if row["entries"] == (0 if latest is None else latest.head.size):
                return int(row["entries"])
            await asyncio.sleep(0.02)


async def until(condition: Callable[[], object], *, within_s: float = HANG_S) -> None:
    async with asyncio.timeout(within_s):
        while not condition():
            await asyncio.sleep(0.02)


class SequencerProcess:
    """A sequencer in a process of its own, to be killed, or to kill itself at a boundary."""

    def __init__(self, url: str, keys: Path, boundary: str = "") -> None:
        command = [sys.executable, "-m", "tests.log.process", url, str(keys), *([boundary] if boundary else [])]
        self._process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE)

    async def wait_ready(self) -> None:
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        assert line == b"ready\n"

    async def wait_dead(self, *, within_s: float = HANG_S) -> None:
        """It was killed; it did not end by an error of its own."""
        code = await asyncio.to_thread(self._process.wait, within_s)
        assert code == -signal.SIGKILL

    def kill(self) -> None:
        if self._process.poll() is None:
            os.kill(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture
def processes(database: Database, keys: Path) -> Iterator[Processes]:
    started: list[SequencerProcess] = []

    def start(boundary: str = "", *, with_keys: Path = keys) -> SequencerProcess:
        started.append(SequencerProcess(database.gateway_url, with_keys, boundary))
        return started[-1]

    yield start
    for process in started:
        process.kill()
