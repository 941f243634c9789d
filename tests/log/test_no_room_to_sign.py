"""The keys folder's disk is full: no head can be remembered, so none is signed; readiness and the log tell, once."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front
from tests.log.conftest import append, caught_up, until
from tests.log.test_log_routes import ask, opened
from tests.patience import HANG_S

Breaks: TypeAlias = Callable[[Path], AbstractContextManager[None]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k,mode=700", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@contextlib.contextmanager
def full(keys: Path) -> Iterator[None]:
    """Every byte of the file system is taken by another file."""
    filler = keys.parent / "filler"
    with filler.open("wb", buffering=0) as opened_file, contextlib.suppress(OSError):
        while True:
            opened_file.write(bytes(512))
    yield
    filler.unlink()


@contextlib.contextmanager
def in_the_way(keys: Path) -> Iterator[None]:
    """A directory stands where the memory's next version would be written: the same for root and everyone else."""
    (keys / "log.head.unfinished").mkdir()
    yield
    (keys / "log.head.unfinished").rmdir()


class CountingSigner(LogSigner):
    """Counts how often a signature was tried."""

    tries = 0

    def sign(self, *arguments: Any, **named: Any) -> Any:
        self.tries += 1
        return super().sign(*arguments, **named)


async def readiness(front: Front) -> tuple[int, dict[str, Any]]:
    status, _, body = await ask(front, "/readyz", None)
    return status, json.loads(body)


async def ready_when(front: Front, state: str) -> tuple[int, dict[str, Any]]:
    async with asyncio.timeout(HANG_S):
        while True:
            found = await readiness(front)
            if found[1].get("log") == state:
                return found
            await asyncio.sleep(0.05)


async def exercise(
    breaks: Breaks,
    keys: Path,
    database: Database,
    sessions: Sessions,
    ledger: PostgresLedger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> str:
    """What readiness gave as the reason."""
    signer = CountingSigner.open(keys, environment={})
    caplog.set_level(logging.INFO, logger="tga")
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, sequencer):
        await append(ledger, 1)
        await caught_up(sessions)
        assert await readiness(front) == (200, {"status": "ok", "log": "ok"})
        remembered = signer.load_remembered()
        caplog.clear()
        with breaks(keys):
            tries = signer.tries
            await append(ledger, 1)
            status, found = await ready_when(front, "failing")
            assert status == 200, "calls are recorded all the same"
            await until(lambda: signer.tries >= tries + 4)
            said = [record.getMessage() for record in caplog.records if record.name == "tga"]
            assert len(said) == 1, said
            assert "signs nothing" in said[0]
            assert found["reason"] in said[0]
            assert str(keys) not in found["reason"], "readiness asks for no key, and names no path"
            assert signer.load_remembered() == remembered
        assert await caught_up(sessions) == 8
        await ready_when(front, "ok")
        said = [record.getMessage() for record in caplog.records if record.name == "tga"]
        assert said[1:] == ["the log goes on", "this gateway sequences the log"]
        assert sequencer.is_working
    return str(found["reason"])


async def test_a_full_disk_is_told_of_once_and_once_when_it_is_over(
    small_disk: Path,
    database: Database,
    sessions: Sessions,
    ledger: PostgresLedger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    reason = await exercise(full, small_disk / "keys", database, sessions, ledger, tmp_path, caplog)
    assert "No space left on device" in reason
    assert "Make room" in caplog.text


async def test_a_memory_that_cannot_be_written_is_told_of_once_and_once_when_it_is_over(
    keys: Path,
    database: Database,
    sessions: Sessions,
    ledger: PostgresLedger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    await exercise(in_the_way, keys, database, sessions, ledger, tmp_path, caplog)


async def test_one_who_stands_by_and_cannot_remember_tells_too(
    keys: Path,
    database: Database,
    sessions: Sessions,
    ledger: PostgresLedger,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another gateway signs; this one cannot keep up with it, and would refuse nothing after a takeover."""
    other = LogSigner.open(tmp_path / "other", environment={})
    signer = LogSigner.open(keys, origin=other.origin, environment={})
    async with opened(database, sessions, ledger, other, tmp_path) as (_, working):
        await until(lambda: working.is_working)
        async with opened(database, sessions, ledger, signer, tmp_path) as (front, standing):
            await append(ledger, 1)
            await until(lambda: signer.load_remembered() == other.load_remembered())
            with in_the_way(keys):
                await append(ledger, 1)
                await caught_up(sessions)
                await ready_when(front, "failing")
                assert not standing.is_working
                assert caplog.text.count("the log waits") == 1
            await ready_when(front, "ok")
            assert signer.load_remembered() == other.load_remembered()
