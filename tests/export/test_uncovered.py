"""Only what the signed head covers vouches for anything: keys and erasures without a leaf count for nothing."""

from __future__ import annotations

from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.domain.log.bundle import ENTRIES
from tests.export.changing import Line, lines_of, write_lines
from tests.export.forging import erasure_of, forged_line, key_of, stripped
from tests.export.test_command import said, tga
from tests.export.world import Finding, World, copied, judge, judge_alone, run_alone
from tests.traces import trace_id


async def _with_a_forged_approval(world: World, folder: Path) -> tuple[Ed25519PrivateKey, str]:
    """A superuser appends an approval that a throw-away key has signed in alice's name; the log covers it."""
    throw_away = Ed25519PrivateKey.generate()
    mallory = World(world.database, world.sessions, world.store, world.keys, person=throw_away)
    await world.announce()
    await world.fill(1, 4)
    await world.append(mallory.signed_trace(30))
    await world.fill(10, 2)
    await world.sequence()
    await world.export(folder)
    return throw_away, f"trace:{trace_id(30)}"


async def test_an_uncovered_key_vouches_for_no_covered_decision_wherever_it_stands(
    world: World, tmp_path: Path
) -> None:
    whole = tmp_path / "whole"
    throw_away, stream = await _with_a_forged_approval(world, whole)
    expected = ("SIGNATURE_INVALID", stream, 2)
    assert judge(whole, world.verifier_key).findings == judge_alone(whole, world.verifier_key).findings == [expected]
    honest = lines_of(whole, ENTRIES)
    for principal_id in ("alice", None):
        for place in range(2, len(honest) + 1):
            folder = copied(whole, tmp_path / f"{principal_id}-{place}")
            forged = forged_line(honest[:place], key_of(throw_away, principal_id=principal_id))
            write_lines(folder, ENTRIES, [*honest[:place], forged, *honest[place:]])
            ours, theirs = judge(folder, world.verifier_key), judge_alone(folder, world.verifier_key)
            assert ours.findings, place
            assert ours.findings == theirs.findings, place
            if place == len(honest):
                assert ours.findings == [expected]


async def test_an_uncovered_erasure_excuses_no_missing_payload(world: World, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    await world.announce()
    await world.fill(1, 4)
    await world.sequence()
    await world.export(whole)
    honest = lines_of(whole, ENTRIES)
    traces = sorted({line["stream"] for line in honest if line["stream"].startswith("trace:")})
    for count in (1, len(traces)):
        folder = copied(whole, tmp_path / f"stripped-{count}")
        lines: list[Line] = honest
        for stream in traces[:count]:
            lines = [*stripped(lines, stream), forged_line(lines, erasure_of(honest, stream))]
        write_lines(folder, ENTRIES, lines)
        ours, theirs = judge(folder, world.verifier_key), judge_alone(folder, world.verifier_key)
        assert ours.codes == ["STATE_RECOVERY_FAILED"] * count
        assert [stream for _, stream, _ in ours.findings] == traces[:count]
        assert ours.findings == theirs.findings


async def test_uncovered_entries_are_judged_and_told_apart(world: World, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    await world.announce()
    await world.fill(1, 4)
    await world.sequence()
    await world.system.append("default", lambda _: [key_of(Ed25519PrivateKey.generate(), principal_id="bob")])
    await world.export(whole)
    key = world.verifier_key
    for verdict in (judge(whole, key), judge_alone(whole, key)):
        assert verdict.is_sound
        assert verdict.entries_after_head == 1
    ended = tga(world, "verify", "--file", whole, "--key", key.to_text())
    assert ended.returncode == 0
    sound, after = (ended.stdout.index(words) for words in ("Sound", "After the signed head: 1 entry"))
    assert sound < after

    lines = lines_of(whole, ENTRIES)
    broken = {**lines[-1], "sequence_number": 9}
    trace = next(line for line in lines if line["stream"].startswith("trace:"))
    for name, added, found in (
        ("a_gap", broken, ("STATE_SEQUENCE_GAP", "system:default", 9)),
        ("a_trace", {**trace, "leaf_index": None}, ("STATE_SEQUENCE_GAP", trace["stream"], 1)),
        ("no_artifact", {**forged_line(lines, key_of(world.person)), "artifact": None}, _mismatch(lines)),
    ):
        folder = copied(whole, tmp_path / name)
        write_lines(folder, ENTRIES, [*lines, added])
        for verdict in (judge(folder, key), judge_alone(folder, key)):
            assert (verdict.findings, verdict.after_head, verdict.is_sound) == ([], [found], False), name
        ended = tga(world, "verify", "--file", folder, "--key", key.to_text(), "--json")
        assert (ended.returncode, said(ended)["findings"]) == (1, [])
        assert [finding["code"] for finding in said(ended)["after_head"]["findings"]] == [found[0]]
        assert "✓" not in tga(world, "verify", "--file", folder, "--key", key.to_text()).stdout
        code, alone = run_alone(folder, key.to_text())
        assert (code, alone["sound"], alone["findings"]) == (1, False, [])
        assert [finding["code"] for finding in alone["after_head"]["findings"]] == [found[0]]


def _mismatch(lines: list[Line]) -> Finding:
    return "STATE_CHECKSUM_MISMATCH", "system:default", lines[-1]["sequence_number"] + 1


async def test_an_erasure_of_what_the_head_does_not_cover_yet_is_no_finding(world: World, tmp_path: Path) -> None:
    """It names the trace's last entry, which the tree may not have yet."""
    await world.announce()
    records = world.signed_trace(3)
    await world.append(records[:3])
    await world.fill(1, 2)
    await world.sequence()
    await world.append(records[3:])
    await world.fill(6, 1)
    await world.erase(6)
    await world.export(tmp_path / "young")
    for verdict in (judge(tmp_path / "young", world.verifier_key), judge_alone(tmp_path / "young", world.verifier_key)):
        assert verdict.is_sound
    await world.erase(3)
    await world.export(tmp_path / "missing")
    for verdict in (
        judge(tmp_path / "missing", world.verifier_key),
        judge_alone(tmp_path / "missing", world.verifier_key),
    ):
        assert verdict.findings == [("STATE_RECOVERY_FAILED", f"trace:{trace_id(3)}", 3)]
        assert (verdict.entries_after_head, verdict.after_head) == (2, [])


async def test_a_key_vouches_only_for_what_comes_after_its_announcement(world: World, tmp_path: Path) -> None:
    """In the order of the tree, which no one can change once it is signed."""
    await world.append(world.signed_trace(3))
    await world.announce()
    await world.append(world.signed_trace(6))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    for verdict in (
        judge(tmp_path / "bundle", world.verifier_key),
        judge_alone(tmp_path / "bundle", world.verifier_key),
    ):
        assert verdict.findings == [("SIGNATURE_INVALID", f"trace:{trace_id(3)}", 2)]


async def test_decisions_of_retired_keys_are_counted(world: World, tmp_path: Path) -> None:
    """A gateway takes one only if the retirement commits between its look at the key and its own commit."""
    await world.announce()
    await world.append(world.signed_trace(3))
    retired = key_of(world.person).model_copy(update={"change": "retired"})
    await world.system.append("default", lambda _: [retired])
    await world.append(world.signed_trace(6))
    await world.sequence()
    await world.export(tmp_path / "bundle")
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound
    assert verdict.report is not None
    assert (verdict.report.streams.signatures, verdict.report.streams.signatures_by_retired_keys) == (2, 1)
    assert any("retired before" in sentence for sentence in verdict.report.unknown)
