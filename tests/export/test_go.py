"""Go's own note and tlog packages, which we did not write, verify our heads and proofs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.note import TlogProof
from app.domain.log.bundle import ENTRIES, Filter
from app.postgres.tree import PostgresTree
from tests.export.changing import change_line, lines_of
from tests.export.world import World, copied, small_ledger
from tests.traces import trace_id

BUILD = Path(__file__).parents[2] / "tools" / "go" / "build.py"
Verify = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="session")
def go_verify(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Verify:
    """The program of tools/go, built once; compiled packages are kept between runs of the tests."""
    program = tmp_path_factory.mktemp("go") / "verify"
    kept = request.config.cache.mkdir("go")
    built = subprocess.run([sys.executable, BUILD, program, kept], capture_output=True, text=True, check=False)
    if built.returncode == 3:
        pytest.skip(f"Go does not run here: {built.stdout.strip()}")
    assert built.returncode == 0, built.stderr

    def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, check=False)

    return run


@pytest.mark.parametrize("wanted", [Filter(), Filter(tenant="default")], ids=["complete", "partial"])
async def test_go_verifies_heads_and_proofs(world: World, tmp_path: Path, go_verify: Verify, wanted: Filter) -> None:
    await small_ledger(world)
    await world.fill(100, 80)  # beyond 256 leaves, where subtrees are stored
    await world.sequence()
    manifest = await world.export(tmp_path / "bundle", wanted)
    assert manifest.tree_size > 256
    ended = go_verify(world.verifier_key.to_text(), tmp_path / "bundle")
    assert ended.returncode == 0, ended.stderr
    assert f'"leaves":{manifest.tree_size}' in ended.stdout
    assert '"heads":3' in ended.stdout

    changed = copied(tmp_path / "bundle", tmp_path / "changed")
    change_line(changed, ENTRIES, 7, lambda line: line["entry"].replace("2026", "2025"), field="entry")
    ended = go_verify(world.verifier_key.to_text(), changed)
    assert ended.returncode == 1
    assert ended.stderr


async def test_go_verifies_a_receipt(world: World, tmp_path: Path, go_verify: Verify) -> None:
    await small_ledger(world)
    tree = PostgresTree(world.sessions)
    stream = f"trace:{trace_id(6)}"
    last = await tree.last_sequence_number(stream)
    assert last is not None
    place = await tree.place_of(stream, last)
    assert place is not None
    proof = await tree.inclusion_proof(place.index, place.signed.head.size)
    (tmp_path / "receipt").write_text(TlogProof(place.index, proof, place.signed.note).to_text())
    await world.export(tmp_path / "bundle")
    lines = lines_of(tmp_path / "bundle", ENTRIES)
    entry = next(line["entry"] for line in lines if (line["stream"], line["sequence_number"]) == (stream, last))
    (tmp_path / "entry").write_text(entry)
    key = world.verifier_key.to_text()
    ended = go_verify(key, tmp_path / "bundle", tmp_path / "receipt", tmp_path / "entry")
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "entry").write_text(entry + " ")
    assert go_verify(key, tmp_path / "bundle", tmp_path / "receipt", tmp_path / "entry").returncode == 1


async def test_go_refuses_a_head_under_another_key(world: World, tmp_path: Path, go_verify: Verify) -> None:
    await small_ledger(world)
    await world.export(tmp_path / "bundle")
    other = World(world.database, world.sessions, world.store, tmp_path / "other-keys")
    ended = go_verify(other.verifier_key.to_text(), tmp_path / "bundle")
    assert (ended.returncode, ended.stderr.strip()) == (1, "note has no verifiable signatures")
