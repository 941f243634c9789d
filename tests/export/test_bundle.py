"""A bundle that was exported verifies, with ours and with the file that shares no line with ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.domain.log.bundle import Filter
from tests.export.world import World, judge, judge_alone, run_alone, small_ledger
from tests.traces import trace_id


async def test_a_complete_bundle_is_sound_for_both_verifiers(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    manifest = await world.export(tmp_path / "bundle")
    verdict = judge(tmp_path / "bundle", world.verifier_key, streams_max=3)
    assert verdict.findings == []
    assert verdict.report is not None
    assert verdict.report.leaves == manifest.tree_size
    assert verdict.report.heads == verdict.report.heads_signed == 2
    assert verdict.report.streams.payloads_erased == 4
    assert verdict.report.streams.signatures > 0
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == []
    code, said = run_alone(tmp_path / "bundle", world.verifier_key.to_text())
    assert (code, said["sound"]) == (0, True)


@pytest.mark.parametrize(
    "wanted",
    [
        Filter(tenant="default"),
        Filter(trace_id=trace_id(6)),
        Filter(since="2026-01-01T00:00:00.000Z", until="2027-01-01T00:00:00.000Z"),
    ],
    ids=["tenant", "trace", "time"],
)
async def test_a_partial_bundle_proves_every_entry(world: World, tmp_path: Path, wanted: Filter) -> None:
    await small_ledger(world)
    await world.export(tmp_path / "bundle", wanted)
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.findings == []
    assert verdict.report is not None
    assert any("partial bundle" in sentence for sentence in verdict.report.unknown)
    assert judge_alone(tmp_path / "bundle", world.verifier_key).findings == []
