"""What a run depends on is away for longer than a lease lasts, and comes back: the database killed, stopped, cut off or
without room; the worker cut off; gateways whose clocks are wrong. Real processes.

No operator does anything: every run ends with the result that it has without an outage, each effect is once in the
bank's own book, nothing is stranded, and the ledger verifies.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from app.postgres.embedded.server import EmbeddedPostgres
from tests.runs.test_run_crashes import verify_result
from tests.runs.worker import Worker, inline, time_in
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

LEASE_MS = 1_000
AWAY_S = 2.5
"""Longer than a lease: a worker that would be taken for dead because of it has been by then."""

Outage = Callable[[RunsWorld], Awaitable[None]]


async def outlast(world: RunsWorld, outage: Outage, *, gateways: int = 1) -> None:
    """Runs in the middle of everything, an outage, and the end of all of them."""
    config = world.config(lease_ms=LEASE_MS)
    opened = [await world.gateway(config=config) for _ in range(gateways)]
    urls = [gateway.url for gateway in opened]
    run_ids = [new_id() for _ in range(3)]
    async with working(world, *urls), Caller(world, *urls) as caller:
        await caller.start("everything", {"user": 7}, run_ids[0])
        await until(lambda: len(world.executions(run_ids[0])) > 0)
        for run_id in run_ids[1:]:
            await caller.start("everything", {"user": 7}, run_id)
        seeing = [asyncio.create_task(caller.see_through(run_id)) for run_id in run_ids]
        try:
            await outage(world)
            for seen in await asyncio.gather(*seeing):
                verify_result(seen)
        except BaseException:
            print([gateway.log()[-3000:] for gateway in opened], [await world.journal(one) for one in run_ids])
            raise
        finally:
            for task in seeing:
                task.cancel()
    for run_id in run_ids:
        assert sorted(world.executions(run_id).values()) == [1, 1]
    await world.verify_all_is_well()
    for gateway in opened:
        await gateway.kill()


def processes_of(postgres: EmbeddedPostgres) -> list[int]:
    """The postmaster, and every process that it has started."""
    first = postgres.postmaster_pid()
    assert first is not None
    children = Path(f"/proc/{first}/task/{first}/children").read_text().split()
    return [first, *map(int, children)]


async def killed(world: RunsWorld) -> None:
    for pid in processes_of(world.postgres):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    await until(lambda: world.postgres.postmaster_pid() is None)
    await asyncio.sleep(AWAY_S)
    await asyncio.to_thread(world.postgres.start)


async def stopped(world: RunsWorld) -> None:
    """As a machine that is suspended: connections stay open, and nothing answers."""
    pids = processes_of(world.postgres)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        if number is signal.SIGSTOP:
            await asyncio.sleep(AWAY_S)


async def cut_off(world: RunsWorld) -> None:
    """Sessions are ended, and no new one begins."""
    root = await asyncpg.connect(world.postgres.url())
    try:
        for is_open in (False, True):
            await root.execute(f"ALTER DATABASE {world.database.name} WITH ALLOW_CONNECTIONS {is_open}")
            if not is_open:
                ended = "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE datname = $1"
                await root.fetch(ended, world.database.name)
                await asyncio.sleep(AWAY_S)
    finally:
        await root.close()


@pytest.mark.one_in(4)
@pytest.mark.parametrize("outage", [killed, stopped, cut_off], ids=lambda one: one.__name__)
async def test_a_database_that_is_away_for_longer_than_a_lease(world: RunsWorld, outage: Outage) -> None:
    await outlast(world, outage)


# --- no room ---


@pytest.fixture
def small_world(tmp_path: Path) -> Iterator[tuple[RunsWorld, Path]]:
    """A world whose database has a small file system to itself; the bank's book is elsewhere."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system")
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=160m,mode=755", "tmpfs", str(place)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode != 0:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == os.geteuid() and not folder.stat().st_mode & 0o001:
            folder.chmod(folder.stat().st_mode | 0o011)
    world = RunsWorld()
    world.postgres = EmbeddedPostgres(place / "home")
    try:
        world.start()
        yield world, place
    finally:
        world.stop()
        subprocess.run(["umount", "--lazy", str(place)], check=True)


@pytest.mark.one_in(4)
async def test_a_database_without_room(small_world: tuple[RunsWorld, Path]) -> None:
    """PostgreSQL may end over it: its operator makes room and starts it again, and nothing else."""
    world, place = small_world

    async def full(_: RunsWorld) -> None:
        filler = place / "filler"
        with filler.open("wb", buffering=0) as opened, contextlib.suppress(OSError):
            while True:
                opened.write(bytes(1 << 16))
        await until(lambda: cannot_write(world))
        await asyncio.sleep(AWAY_S)
        filler.unlink()
        await asyncio.to_thread(world.postgres.start)

    await outlast(world, full)


async def cannot_write(world: RunsWorld) -> bool:
    """Its log has no room for another segment: it ends. Those that it has in store are used up one by one."""
    try:
        root = await asyncpg.connect(world.postgres.url(), timeout=5)
        try:
            await root.execute("SELECT pg_logical_emit_message(true, 'fill', 'x'); SELECT pg_switch_wal()", timeout=5)
        finally:
            root.terminate()
    except (OSError, asyncpg.PostgresError, asyncpg.InterfaceError):
        return True
    return False


# --- the worker cut off ---


class Cable:
    """Between a worker and its gateway: while it is cut, connections hang, and what was sent does not arrive."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._port = int(gateway.url.rpartition(":")[2])
        self._is_whole = asyncio.Event()
        self._is_whole.set()
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        self._is_whole.clear()

    def mend(self) -> None:
        self._is_whole.set()

    @contextlib.asynccontextmanager
    async def laid(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connected, "127.0.0.1", 0)
        try:
            yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._carried(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carried(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while chunk := await source.read(1 << 16):
                await self._is_whole.wait()
                sink.write(chunk)
                await sink.drain()
        sink.close()


@pytest.mark.one_in(4)
async def test_a_worker_that_is_cut_off_for_longer_than_its_lease(world: RunsWorld) -> None:
    """It holds a run, others go on with it; and it comes back, is told to stop, and works on."""
    gateway = await world.gateway(config=world.config(lease_ms=LEASE_MS))
    run_id, cable = new_id(), Cable(gateway)
    async with cable.laid() as url, Caller(world, gateway.url) as caller, working(world, url) as away:
        cut = asyncio.create_task(_cut_when_it_holds(away, cable))
        await caller.start("everything", {"user": 7}, run_id)
        await cut
        async with working(world, gateway.url):
            verify_result(await caller.see_through(run_id))
        cable.mend()
        second = new_id()
        await caller.start("everything", {"user": 7}, second)
        verify_result(await caller.see_through(second))
    for one in (run_id, second):
        assert sorted(world.executions(one).values()) == [1, 1]
    await world.verify_all_is_well()
    await gateway.kill()


async def _cut_when_it_holds(worker: Worker, cable: Cable) -> None:
    await until(lambda: bool(worker.holding))
    cable.cut()


# --- clocks ---


@pytest.mark.one_in(4)
@pytest.mark.parametrize("hours", [(-1.0,), (-1.0, 0.0), (1.0, -1.0)], ids=str)
async def test_gateways_whose_clocks_differ(world: RunsWorld, hours: tuple[float, ...]) -> None:
    """What is due is due by the database's clock: one that is behind leaves nothing undone, one that is ahead delays
    nothing."""
    config = world.config(lease_ms=LEASE_MS)
    gateways = [await world.gateway(config=config, clock_ahead_ms=int(one * 3_600_000)) for one in hours]
    urls = [gateway.url for gateway in gateways]
    run_ids, sleeping, asking = [new_id() for _ in range(3)], new_id("sleeping"), new_id("asking")
    async with working(world, *urls, wait_ms=50), Caller(world, *urls) as caller:
        await caller.start("sleeps", 100, sleeping)
        await caller.start("asks", {"expires_at": time_in(300), "default": inline(False)}, asking)
        for run_id in run_ids:
            await caller.start("everything", {"user": 7}, run_id)
            verify_result(await caller.see_through(run_id))
        assert (await ended(caller, sleeping))["output"]["value"] == "after"
        assert (await ended(caller, asking))["output"]["value"] == ["before", False, "after"]
    for run_id in run_ids:
        assert sorted(world.executions(run_id).values()) == [1, 1]
    await world.verify_all_is_well()
    for gateway in gateways:
        await gateway.kill()


async def ended(caller: Caller, run_id: str) -> dict[str, Any]:
    """The run when it has ended by itself."""
    seen: dict[str, Any] = {}

    async def has_ended() -> bool:
        seen.update(await caller.look(run_id))
        return bool(seen["state"] == "COMPLETED")

    await until(has_ended)
    return seen
