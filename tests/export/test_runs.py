"""Bundles with runs: both verifiers fold them, and find each defect at its entry, as in a database."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.core.errors import RunNotFound
from app.domain.log.bundle import Filter, Manifest
from app.domain.runs.documents import RunAnswer
from app.postgres.ledger import PostgresLedger
from tests.export.changing import lines_of, write_lines
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


@pytest.mark.parametrize("by", ["alice", "bob"])
async def test_what_a_person_answered_is_theirs_for_both_verifiers(by: str, world: World, tmp_path: Path) -> None:
    """The key is alice's: what stands under another name is nobody's word."""
    await world.announce()
    run = samples.SampleRun("r")
    run.add("attempt", 1)
    asked = run.add("intent", "1", "ask", "pay")
    run.add("suspension", "1")
    answer = run.made("answer", "1", asked, "person", wakes="YES", answered_by={"type": "person", "id": by})
    assert isinstance(answer, RunAnswer)
    run.append(world.signed(answer))
    await samples.store(PostgresLedger(world.sessions), run)
    await world.sequence()
    await world.export(tmp_path / "bundle", Filter(run_id="r"))
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    alone = judge_alone(tmp_path / "bundle", world.verifier_key)
    expected = [] if by == "alice" else [("SIGNATURE_INVALID", "run:r", 5)]
    assert verdict.findings == alone.findings == expected
    assert verdict.report is not None
    assert verdict.report.streams.signatures == (by == "alice")


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


def streams_in(bundle: Path) -> set[str]:
    return {str(line["stream"]) for line in lines_of(bundle, "entries.jsonl")} - {"system:default"}


@pytest.mark.parametrize(
    ("run_id", "brings"),
    [
        ("small", set()),
        ("with-tool", {f"trace:{samples.sample_trace_id()}"}),
        ("parent", {"run:child"}),
        ("child", set()),
        ("fork-of-fork", {"run:fork", "run:small"}),
    ],
)
async def test_the_bundle_of_a_run_brings_what_its_verification_rests_on_and_no_more(
    run_id: str, brings: set[str], world: World, tmp_path: Path
) -> None:
    await run_ledger(world)
    await world.export(tmp_path / "bundle", Filter(run_id=run_id))
    assert streams_in(tmp_path / "bundle") == {f"run:{run_id}"} | brings
    manifest = Manifest.from_bytes((tmp_path / "bundle" / "manifest.json").read_bytes())
    assert (manifest.filter, manifest.complete) == (Filter(tenant="default", run_id=run_id), False)
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound, verdict.findings
    assert verdict.report is not None
    assert (verdict.report.streams.references_unknown, verdict.report.streams.runs_unfolded) == (0, 0)
    assert not any("runs" in sentence or "forks" in sentence for sentence in verdict.report.unknown)
    assert judge_alone(tmp_path / "bundle", world.verifier_key).is_sound


async def test_a_bundle_without_runs_says_nothing_of_them_and_no_foreign_run_is_exported(
    world: World, tmp_path: Path
) -> None:
    await run_ledger(world)
    await world.export(tmp_path / "bundle", Filter(tenant="default"))
    assert b"run_id" not in (tmp_path / "bundle" / "manifest.json").read_bytes()
    for wanted in (Filter(run_id="nothing"), Filter(run_id="small", tenant="acme")):
        with pytest.raises(RunNotFound):
            await world.export(tmp_path / "none", wanted)


async def test_what_a_part_does_not_hold_is_said_to_be_unknown_and_not_wrong(world: World, tmp_path: Path) -> None:
    """As if somebody had left streams out of the bundle of a run: it proves less, and says so."""
    await run_ledger(world)
    for run_id, missing, words in (("parent", "run:child", "their streams"), ("fork", "run:small", "forks go on from")):
        bundle = tmp_path / run_id
        await world.export(bundle, Filter(run_id=run_id))
        kept = [line for line in lines_of(bundle, "entries.jsonl") if line["stream"] != missing]
        write_lines(bundle, "entries.jsonl", kept)
        verdict = judge(bundle, world.verifier_key)
        assert verdict.is_sound, verdict.findings
        assert verdict.report is not None
        assert any(words in sentence for sentence in verdict.report.unknown)
        assert judge_alone(bundle, world.verifier_key).is_sound
        _, said = run_alone(bundle, world.verifier_key.to_text())
        counted = said["checked"]
        unknown = counted.get("answers that a partial bundle cannot show", 0)
        unfolded = counted.get("runs that could not be folded", 0)
        assert (unknown, unfolded) == ((2, 0) if run_id == "parent" else (0, 1))
