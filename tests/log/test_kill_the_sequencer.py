"""Kill the sequencer at every boundary, start another: leaves without gaps, no entry twice, none missing, and no head
that contradicts one that was seen.

Not sampled: the list is all boundaries that a round has.
"""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from app.core.errors import ConcurrentExecution
from app.core.merkle import EMPTY_ROOT
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from tests.conftest import IS_SOAK, Admin, Server
from tests.log.auditor import published_notes, verify_log
from tests.log.conftest import Processes, append, caught_up, sequencing
from tests.log.process import BOUNDARIES

SOME_BOUNDARIES = random.sample(BOUNDARIES, 5)

# What stands after a death at this boundary: leaves added, nodes added, memory ahead, head published.
LEFT_BEHIND = {
    "leader_term.before": (0, 0, 0, 0),
    "leader_term.rolled_back": (0, 0, 0, 0),
    "leader_term.done": (0, 0, 0, 0),
    "integrate.before": (0, 0, 0, 0),
    "integrate.rolled_back": (0, 0, 0, 0),
    "integrate.done": (1, 0, 0, 0),
    "nodes.before": (1, 0, 0, 0),
    "nodes.rolled_back": (1, 0, 0, 0),
    "nodes.done": (1, 1, 0, 0),
    "memory.before": (1, 1, 0, 0),
    "memory.unfinished": (1, 1, 0, 0),
    "memory.done": (1, 1, 1, 0),
    "head.before": (1, 1, 1, 0),
    "head.rolled_back": (1, 1, 1, 0),
    "head.done": (1, 1, 1, 1),
}


async def standing(admin: Admin, signer: LogSigner) -> tuple[int, int, int, int]:
    row = await admin.fetchrow(
        "SELECT (SELECT count(*) FROM tga.leaves), (SELECT count(*) FROM tga.tree_nodes), "
        "(SELECT coalesce(max(size), 0) FROM tga.tree_heads)"
    )
    assert row is not None
    remembered = signer.load_remembered()
    return row[0], row[1], 0 if remembered is None else remembered.head.size, row[2]


@pytest.mark.parametrize("is_first", [True, False], ids=["the first head", "a later head"])
@pytest.mark.parametrize("boundary", BOUNDARIES)
async def test_a_death_at_any_boundary_is_finished_by_the_next(
    boundary: str,
    is_first: bool,
    server: Server,
    database: Database,
    ledger: PostgresLedger,
    sessions: Sessions,
    signer: LogSigner,
    admin: Admin,
    processes: Processes,
) -> None:
    if is_first and server.name == "system":
        pytest.skip("the other server is enough for this: it is the signer's memory that differs")
    if server.name == "system" and boundary not in SOME_BOUNDARIES and not IS_SOAK:
        pytest.skip("every boundary on one server, some on the other: another choice in every run")
    if not is_first:
        await append(ledger, 10)
        async with sequencing(database, signer):
            await caught_up(sessions)
    seen = await published_notes(admin)
    before = await standing(admin, signer)
    await append(ledger, 70)
    await processes(boundary).wait_dead()
    after = await standing(admin, signer)
    moved = tuple(int(now > then) for now, then in zip(after, before, strict=True))
    assert moved == LEFT_BEHIND[boundary], "it died where it was told to"
    seen += (await published_notes(admin))[len(seen) :]
    remembered = signer.load_remembered()
    await append(ledger, 5)  # the next one finds more than was there
    async with sequencing(database, signer):
        await caught_up(sessions)
    heads = await verify_log(admin, sessions, [signer.verifier_key], seen=seen)
    if remembered is not None:
        assert remembered.head in heads, "what was signed is published, though its signer died"


async def test_no_boundary_is_left_out() -> None:
    assert list(LEFT_BEHIND) == BOUNDARIES


async def test_killed_again_and_again_under_load(
    database: Database,
    ledger: PostgresLedger,
    sessions: Sessions,
    signer: LogSigner,
    admin: Admin,
    processes: Processes,
) -> None:
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    stop = asyncio.Event()

    async def write() -> None:
        while not stop.is_set():
            await append(ledger, 16)
            await asyncio.sleep(0.02)

    async def watch() -> list[str]:
        """A client who keeps every head that it is shown."""
        seen: dict[str, None] = {}
        tree = PostgresTree(sessions)
        while not stop.is_set():
            latest = await tree.latest_head()
            if latest is not None:
                seen[latest.note] = None
            await asyncio.sleep(0.01)
        return list(seen)

    writing, watching = asyncio.create_task(write()), asyncio.create_task(watch())
    for _ in range(6):
        process = processes()
        await process.wait_ready()
        await asyncio.sleep(chance.random() * 0.5)
        process.kill()
    stop.set()
    await writing
    seen = await watching
    async with sequencing(database, signer):
        await caught_up(sessions)
    await verify_log(admin, sessions, [signer.verifier_key], seen=seen)


async def test_two_processes_with_one_folder_cannot_sign_past_each_other(keys: Path) -> None:
    one, other = (LogSigner.open(keys, environment={}) for _ in range(2))
    assert one.verifier_key == other.verifier_key
    one.sign(0, EMPTY_ROOT, [], after=None)
    with pytest.raises(ConcurrentExecution):
        other.sign(0, EMPTY_ROOT, [], after=None)
