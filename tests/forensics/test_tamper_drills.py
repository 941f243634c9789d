"""What a superuser with the triggers off can do to the log, and what a client who kept one head finds out about it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.errors import LogForked
from app.core.note import TreeHead, VerifierKey, sign_note
from app.domain.log.forensics import Diagnosis, HeldHead, examine_tree
from app.domain.log.heads import SignedHead
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.postgres.tree_reader import open_tree_reader
from tests.attacker import disarm, renumber
from tests.conftest import Admin, Server
from tests.export.world import World
from tests.forensics.jobs import found_by_any_number
from tests.log.test_restored import Dump
from tests.traces import completed_trace, trace_id

LEDGER = ("entries", "artifacts", "execution_checkpoints", "claims", "claim_effects", "heads", "leaves", "tree_nodes",
          "tree_heads", "tree_cursor", "dispatch_attempts")  # fmt: skip
STREAM = f"trace:{trace_id(4)}"


async def diagnose(world: World, sessions: Sessions, *held: SignedHead, url: str | None = None) -> Diagnosis:
    """As `tga verify --all --head FILE` does it."""
    broken: dict[str, int] = {}
    for error in await found_by_any_number(world, sessions, url):
        first = error.sequence_number or 1
        broken[str(error.stream)] = min(first, broken.get(str(error.stream), first))
    async with open_tree_reader(sessions) as tree:
        kept = [HeldHead(one, "a client") for one in held]
        return await examine_tree(tree, kept, keys=[world.verifier_key], broken=broken)


@pytest.fixture
async def attacker(admin: Admin) -> Admin:
    await disarm(admin)
    return admin


@pytest.fixture
async def heads(world: World) -> tuple[SignedHead, SignedHead]:
    """The log at two times; a client has kept the newer head, or both."""
    await world.announce()
    await world.fill(1, 8)
    first = await world.sequence()
    await world.fill(10, 8)
    return first, await world.sequence()


async def test_a_log_that_nobody_touched_is_sound_up_to_the_clients_head(
    world: World, sessions: Sessions, heads: tuple[SignedHead, SignedHead]
) -> None:
    await world.fill(30, 2)
    found = await diagnose(world, sessions, *heads)
    assert (found.kind, found.evidence) == ("sound", [])
    assert found.trusted_size == heads[1].head.size
    assert found.heads_fit == 4  # two stored, two kept
    assert found.entries_without_leaf > 0


async def test_a_changed_entry_is_found_and_named(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    stream = f"trace:{trace_id(13)}"
    await attacker.execute(
        "UPDATE tga.entries SET entry = convert_to(replace(convert_from(entry, 'UTF8'), '-01T', '-02T'), 'UTF8')"
        " WHERE stream = $1 AND sequence_number = 1",
        stream,
    )
    found = await diagnose(world, sessions, heads[1])
    assert found.kind == "changed_entry"
    assert found.streams == [stream]
    assert (found.trusted_size, found.broken_size) == (heads[0].head.size, heads[1].head.size)
    assert found.trusted_until is not None


@pytest.mark.parametrize("sequence_number", [1, 3])
async def test_the_log_is_to_be_trusted_only_up_to_the_entry_whose_artifact_was_changed(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead], sequence_number: int
) -> None:
    """The tree is the one that was signed, but what its entries commit to is not what stands there any more."""
    await attacker.execute(
        "UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = $1 AND sequence_number = $2",
        STREAM,
        sequence_number,
    )
    leaf = await attacker.fetchval(
        "SELECT leaf_index FROM tga.leaves WHERE stream = $1 AND sequence_number = $2", STREAM, sequence_number
    )
    before = await attacker.fetchval(
        "SELECT convert_from(e.entry, 'UTF8')::json ->> 'recorded_at' FROM tga.leaves l JOIN tga.entries e"
        " USING (stream, sequence_number) WHERE l.leaf_index = $1",
        leaf - 1,
    )
    found = await diagnose(world, sessions, heads[1])
    assert (found.kind, found.streams) == ("changed_entry", [STREAM])
    assert (found.trusted_size, found.trusted_until) == (leaf, before)
    assert any(f"entry {sequence_number} of {STREAM}" in sentence for sentence in found.evidence)


async def test_a_deleted_entry_is_found_and_named(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    await attacker.execute("DELETE FROM tga.entries WHERE stream = $1 AND sequence_number = 1", STREAM)
    found = await diagnose(world, sessions, heads[1])
    assert (found.kind, found.streams) == ("deleted_entry", [STREAM])
    assert (found.trusted_size, found.broken_size) == (0, heads[0].head.size)


async def test_a_deleted_trace_is_found_and_named(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    await _remove(
        attacker, [STREAM], "entries", "artifacts", "execution_checkpoints", "claims", "claim_effects", "heads"
    )
    in_chains = await found_by_any_number(world, sessions)
    assert in_chains == []  # the chains do not miss it
    found = await diagnose(world, sessions, heads[1])
    assert (found.kind, found.streams) == ("deleted_trace", [STREAM])


async def test_a_deleted_trace_without_its_leaves_is_a_gap(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    await _remove(attacker, [STREAM], *[table for table in LEDGER if not table.startswith("tree")])
    found = await diagnose(world, sessions, heads[1])
    assert found.kind == "deleted_entry"
    assert found.trusted_size == 0


@pytest.mark.parametrize("with_leaves", [False, True])
async def test_a_truncated_tail_is_found(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead], with_leaves: bool
) -> None:
    cut = heads[1].head.size - 3
    await attacker.execute(
        "DELETE FROM tga.entries e USING tga.leaves l"
        " WHERE (e.stream, e.sequence_number) = (l.stream, l.sequence_number) AND l.leaf_index >= $1",
        cut,
    )
    if with_leaves:
        await attacker.execute("DELETE FROM tga.leaves WHERE leaf_index >= $1", cut)
    found = await diagnose(world, sessions, heads[1])
    assert found.kind == "truncated_tail"
    assert (found.trusted_size, found.broken_size) == (heads[0].head.size, heads[1].head.size)


async def test_a_trace_that_was_recomputed_whole_is_found(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    n = 10
    stream = f"trace:{trace_id(n)}"
    count = await attacker.fetchval("SELECT count(*) FROM tga.entries WHERE stream = $1", stream)
    number = await attacker.fetchval("SELECT stream_no FROM tga.heads WHERE stream = $1", stream)
    tables = ("entries", "artifacts", "execution_checkpoints", "claims", "claim_effects", "heads")
    await _remove(attacker, [stream], *tables)
    await world.append(completed_trace(n, arguments={"title": "another", "priority": 1})[:count])
    await renumber(attacker, stream, number)
    in_chains = await found_by_any_number(world, sessions)
    assert in_chains == []  # chains, claims and heads are right
    found = await diagnose(world, sessions, heads[1])
    assert found.kind == "changed_entry"
    assert (found.trusted_size, found.broken_size) == (heads[0].head.size, heads[1].head.size)


async def test_everything_after_n_recomputed_is_a_fork_and_our_signer_refuses_it(
    world: World, sessions: Sessions, attacker: Admin, heads: tuple[SignedHead, SignedHead]
) -> None:
    size = heads[0].head.size
    await _rewind(attacker, size)
    await world.fill(40, 9)  # another history, longer than the true one
    await attacker.fetch("SELECT * FROM tga.integrate(10000)")
    await _forge_head(world, sessions, attacker)
    found = await diagnose(world, sessions, heads[1])
    assert found.kind == "forked_history"
    assert (found.trusted_size, found.broken_size) == (size, heads[1].head.size)
    # Nobody who kept nothing can tell where the true history went, but the forged head shows.
    assert (await diagnose(world, sessions)).kind == "forked_history"
    await attacker.execute("DELETE FROM tga.tree_heads WHERE size > $1", size)
    with pytest.raises(LogForked):
        await world.sequence()


async def test_an_old_backup_is_told_from_a_fork_and_our_signer_refuses_it(
    server: Server, world: World, sessions: Sessions, tmp_path: Path
) -> None:
    if server.embedded is None:
        pytest.skip("pg_dump of this server's version is not known")
    await world.announce()
    await world.fill(1, 6)
    first = await world.sequence()
    dump = Dump(server, world.database, tmp_path)
    await world.fill(10, 6)
    held = await world.sequence()
    restored = await dump.restore(server)
    async with await Sessions.open(restored.gateway_url, sessions_max=2) as old:
        found = await diagnose(world, old, held, url=restored.gateway_url)
        assert found.kind == "old_backup"
        assert (found.tree_size, found.trusted_size, found.broken_size) == (
            first.head.size,
            first.head.size,
            held.head.size,
        )
        again = await diagnose(world, old, url=restored.gateway_url)
        assert again.kind == "sound"  # which is why a head is to be kept elsewhere
        world.database = restored
        with pytest.raises(LogForked):
            await world.sequence()


async def test_a_changed_entry_is_found_by_hashes_of_its_own_tree(
    world: World, sessions: Sessions, attacker: Admin
) -> None:
    await world.fill(1, 90)
    held = await world.sequence()
    assert held.head.size > 256
    await attacker.execute("DELETE FROM tga.tree_heads")
    await attacker.execute(
        "UPDATE tga.entries e SET entry = e.entry || ' ' FROM tga.leaves l"
        " WHERE (e.stream, e.sequence_number) = (l.stream, l.sequence_number) AND l.leaf_index = 100"
    )
    found = await diagnose(world, sessions)
    assert found.kind == "changed_entry"
    assert any("leaves 0 to 255" in sentence for sentence in found.evidence)


async def _remove(attacker: Admin, streams: Sequence[str], *tables: str) -> None:
    for table in tables:
        await attacker.execute(f"DELETE FROM tga.{table} WHERE stream = ANY ($1)", streams)


async def _rewind(attacker: Admin, size: int) -> None:
    """Everything of every trace that has a leaf from `size` on, and all that the tree knows of it."""
    rows: list[Any] = await attacker.fetch("SELECT DISTINCT stream FROM tga.leaves WHERE leaf_index >= $1", size)
    await _remove(attacker, [row["stream"] for row in rows], *[t for t in LEDGER if not t.startswith("tree")])
    await attacker.execute("DELETE FROM tga.tree_heads WHERE size > $1", size)
    await attacker.execute("UPDATE tga.tree_cursor SET xid = '0', stream_no = 0, sequence_number = 0")


async def _forge_head(world: World, sessions: Sessions, attacker: Admin) -> None:
    tree = PostgresTree(sessions)
    size = await tree.size()
    head = TreeHead(world.signer.origin, size, await tree.root(size))
    forger = Ed25519PrivateKey.generate()
    note = sign_note(head.to_text(), VerifierKey(world.signer.origin, world.signer.public_key), forger.sign)
    await attacker.execute("INSERT INTO tga.tree_heads (size, root, note) VALUES ($1, $2, $3)", size, head.root, note)
