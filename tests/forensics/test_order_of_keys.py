"""A key counts from its announcement on. The database tells by the order of the tree, as verifiers of bundles do."""

from __future__ import annotations

from pathlib import Path

from app.core.errors import SignatureInvalid
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.postgres.reader import open_reader
from tests.export.forging import key_of
from tests.export.world import Finding, World, judge, judge_alone
from tests.traces import trace_id

STREAM = f"trace:{trace_id(3)}"
FORGED: list[Finding] = [(SignatureInvalid.code, STREAM, 2)]


async def found_in_database(world: World, stream: str | None = None) -> list[Finding]:
    async with open_reader(world.sessions, stream=stream) as reader:
        return [
            (error.code, error.stream, error.sequence_number)
            async for error in verify_ledger(reader, stream_checks(), Report())
        ]


async def found_by_all(world: World, folder: Path) -> list[Finding]:
    """What the database, the trace alone, and both verifiers of a bundle find, which must be the same."""
    await world.export(folder)
    found = await found_in_database(world)
    assert found == await found_in_database(world, STREAM)
    assert found == judge(folder, world.verifier_key).findings == judge_alone(folder, world.verifier_key).findings
    return found


async def announce_for(world: World, principal_id: str) -> None:
    """The person's key, for somebody."""
    document = key_of(world.person, principal_id=principal_id)
    await world.system.append("default", lambda _: [document])


async def test_a_key_that_was_announced_after_the_decision_it_signs_does_not_count(
    world: World, tmp_path: Path
) -> None:
    await world.append(world.signed_trace(3))
    await world.sequence()
    assert await found_by_all(world, tmp_path / "unknown") == FORGED
    await world.announce()
    assert await found_in_database(world) == FORGED  # the announcement is newer than the tree, the decision is not
    await world.sequence()
    assert await found_by_all(world, tmp_path / "late") == FORGED


async def test_a_key_that_was_announced_before_counts_whether_or_not_the_tree_has_it(
    world: World, tmp_path: Path
) -> None:
    await world.announce()
    await world.append(world.signed_trace(3))
    assert await found_in_database(world) == []  # nothing has a leaf yet
    await world.sequence()
    assert await found_by_all(world, tmp_path / "sequenced") == []
    await world.append(world.signed_trace(6))
    assert await found_in_database(world) == []  # the key has a leaf, the newer decision has none


async def test_a_key_counts_as_it_stood_when_the_decision_was_made(world: World, tmp_path: Path) -> None:
    """Announced for another principal afterwards: what alice signed before stays good, and nothing after it is hers."""
    await world.announce()
    await world.append(world.signed_trace(3))
    await world.sequence()
    await announce_for(world, "bob")
    await world.append(world.signed_trace(6))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    late: list[Finding] = [(SignatureInvalid.code, f"trace:{trace_id(6)}", 2)]
    assert await found_in_database(world) == late
    assert judge(tmp_path / "bundle", world.verifier_key).findings == late
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == late
