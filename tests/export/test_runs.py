"""Bundles with runs: both verifiers fold them, and find each defect at its entry, as in a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.postgres.ledger import PostgresLedger
from tests.export.world import World, judge, judge_alone, run_alone, run_ledger
from tests.runs import samples
from tests.runs.test_verification import DEFECTS, unchecked
from tests.traces import completed_trace

# Left to `tga verify --file`, as tools/verify.py says.
_LEFT_TO_THE_COMMAND = {"state_that_is_not_there"}


async def test_runs_of_every_sort_are_sound_for_both_verifiers(world: World, tmp_path: Path) -> None:
    await run_ledger(world)
    await world.export(tmp_path / "bundle")
    for streams_max in (1, 100):  # remembered on disk, and in memory
        verdict = judge(tmp_path / "bundle", world.verifier_key, streams_max=streams_max)
        assert verdict.is_sound, verdict.findings
        assert verdict.report is not None
        report = verdict.report.streams
        assert (report.of_kind["run"], report.runs_unfolded, report.references_unknown) == (9, 0, 0)
    alone = judge_alone(tmp_path / "bundle", world.verifier_key)
    assert alone.is_sound, alone.findings
    status, said = run_alone(tmp_path / "bundle", world.verifier_key.to_text())
    assert (status, said["checked"]["runs"], said["checked"].get("runs that could not be folded", 0)) == (0, 9, 0)


@pytest.mark.parametrize("name", sorted(DEFECTS))
async def test_what_the_fold_does_not_admit_is_found_by_both_at_its_entry(
    name: str, world: World, tmp_path: Path
) -> None:
    make, wrong, code = DEFECTS[name]
    run, ledger = make(), PostgresLedger(world.sessions)
    await world.announce()
    await samples.store(ledger, run)
    await samples.commit(ledger, run.run, unchecked(run, wrong(run)))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    expected = [(code, "run:r", len(run.records) + 1)]
    assert judge(tmp_path / "bundle", world.verifier_key).findings == expected
    alone = judge_alone(tmp_path / "bundle", world.verifier_key).findings
    assert alone == ([] if name in _LEFT_TO_THE_COMMAND else expected)


async def test_what_a_run_says_of_missing_or_other_streams_is_found_by_both(world: World, tmp_path: Path) -> None:
    ledger = PostgresLedger(world.sessions)
    await world.announce()
    for record in completed_trace(samples.TRACE, arguments={"title": "another"}):
        await world.store.append_log_entry(record)
    parent, _ = samples.parent_and_child()
    runs = [samples.with_tool(completed_trace(samples.TRACE)), parent, samples.fork_of(samples.small(), 3)]
    for run in runs:
        await samples.store(ledger, run)
    await world.sequence()
    await world.export(tmp_path / "bundle")
    expected = {
        ("STATE_CHECKSUM_MISMATCH", "run:with-tool", 4),
        ("STATE_RECOVERY_FAILED", "run:parent", 3),
        ("STATE_RECOVERY_FAILED", "run:parent", 5),
        ("STATE_RECOVERY_FAILED", "run:fork", 1),
    }
    for found in (judge, judge_alone):
        findings = found(tmp_path / "bundle", world.verifier_key).findings
        assert set(findings) == expected
        assert len(findings) == len(expected)
