"""The keeper of the embedded server, where its end cannot be waited for and has to be looked for."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal

import asyncpg
import pytest

from app.core.errors import StoreUnavailable
from app.postgres.database import open_database
from app.postgres.embedded import keeper as keeping
from app.postgres.embedded.postmaster import recorded_pid
from tests.conftest import make_home


@pytest.mark.parametrize("has_pidfd", [True, False])
async def test_the_end_of_the_server_is_noticed_with_and_without_a_descriptor_for_it(
    has_pidfd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(pid: int) -> int:
        raise OSError("not here")

    if not has_pidfd:
        monkeypatch.setattr(os, "pidfd_open", refused)
    home = make_home()
    try:
        async with open_database(home, None) as database:
            assert database.fault is None
            pid = recorded_pid(home / "postgres" / "data" / "postmaster.pid")
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            while database.fault is None:
                await asyncio.sleep(0.01)
            assert isinstance(database.fault, StoreUnavailable)
            assert "the embedded PostgreSQL ended" in database.fault.what
            while database.fault is not None:
                await asyncio.sleep(0.01)
            session = await asyncpg.connect(database.admin_url)
            assert await session.fetchval("SELECT 1") == 1
            await session.close()
    finally:
        shutil.rmtree(home)


def test_pauses_double_up_to_a_bound() -> None:
    pauses = [keeping._pause_ms(ends) for ends in range(1, 40)]
    assert pauses[:5] == [0, 500, 1_000, 2_000, 4_000]
    assert max(pauses) == pauses[-1] == 30_000
