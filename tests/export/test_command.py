"""`tga export`, `tga verify` and `tga receipt` as people and scripts run them; an export that is killed goes on."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from app.cli.export import write_bundle
from app.core.errors import SettingInvalid
from app.domain.log.bundle import ENTRIES, MANIFEST, Filter
from app.postgres.export import open_export, wait_until_erasures_are_covered
from tests.export.world import World, copied, judge, judge_alone, small_ledger
from tests.traces import trace_id


def tga(world: World, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "TGA_DATABASE_URL": world.database.admin_url,
        "TGA_HOME": str(world.keys.parent / "home"),
        "TGA_KEYS": str(world.keys),
    }
    command = [sys.executable, "-m", "app.main", *map(str, arguments)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def said(ended: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(ended.stdout)
    return document


async def test_export_verify_and_receipt_from_the_command_line(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    bundle, key = tmp_path / "bundle", world.verifier_key.to_text()
    assert tga(world, "export", bundle).returncode == 0
    ended = tga(world, "verify", "--file", bundle, "--key", key, "--json")
    assert (ended.returncode, said(ended)["sound"]) == (0, True)
    assert said(ended)["checked"]["payloads_erased"] == 4
    assert said(ended)["unknown"]
    words = tga(world, "verify", "--file", bundle, "--key", key).stdout
    assert "Sound" in words
    assert "cannot tell" in words

    receipt = tga(world, "receipt", trace_id(6))
    assert receipt.returncode == 0, receipt.stderr
    (tmp_path / "receipt").write_text(receipt.stdout)
    ended = tga(world, "verify", "--all", "--head", tmp_path / "receipt", "--json")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    tree = said(ended)["tree"]
    assert (tree["kind"], tree["heads_fit"]) == ("sound", 4)  # two stored, the signer's memory, the receipt

    broken = copied(bundle, tmp_path / "broken")
    (broken / ENTRIES).write_text((broken / ENTRIES).read_text().replace("ticket", "picket", 1))
    ended = tga(world, "verify", "--file", broken, "--key", key, "--json")
    assert (ended.returncode, said(ended)["sound"]) == (1, False)
    assert tga(world, "verify", "--file", bundle).returncode == 2
    assert tga(world, "verify", "--file", bundle, "--key", "nonsense").returncode == 2
    assert tga(world, "export", bundle).returncode == 2  # it is there already


async def test_a_killed_export_says_that_it_is_unfinished_and_can_be_finished(world: World, tmp_path: Path) -> None:
    await world.announce()
    await world.fill(1, 60)
    await world.sequence()
    bundle = tmp_path / "bundle"
    await world.export(tmp_path / "whole")
    process = _started(world, "export", str(bundle))
    _wait_for(bundle / ENTRIES)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if (bundle / MANIFEST).exists():
        pytest.skip("the export was quicker than the kill")
    whole = (tmp_path / "whole" / ENTRIES).read_bytes()
    (bundle / ENTRIES).write_bytes(whole[: len(whole) * 2 // 3])  # somewhere within a line
    assert judge(bundle, world.verifier_key).codes == ["BUNDLE_INVALID"]
    assert judge_alone(bundle, world.verifier_key).codes == ["BUNDLE_INVALID"]
    assert tga(world, "export", bundle).returncode == 2

    await world.erase(3)  # younger than the bundle's tree, and part of it was written before
    await world.fill(100, 3)
    await world.sequence()
    ended = tga(world, "export", bundle, "--resume", "--json")
    assert ended.returncode == 0, ended.stderr
    verdict = judge(bundle, world.verifier_key)
    assert verdict.is_sound
    assert judge_alone(bundle, world.verifier_key).is_sound
    assert verdict.entries_after_head == 1
    assert not (bundle / "unfinished.json").exists()


async def test_a_resumed_export_has_every_line_once(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    await world.export(tmp_path / "whole")
    whole = (tmp_path / "whole" / ENTRIES).read_bytes()
    written = [whole[:cut] for cut in (0, 1, 500, len(whole) - 1, len(whole))]
    for number, left in enumerate([*written, whole + b'{"leaf_index":', whole + b"garbage\n"]):
        folder = tmp_path / f"left-{number}"
        folder.mkdir()
        (folder / ENTRIES).write_bytes(left)
        await world.export(folder)
        assert (folder / ENTRIES).read_bytes() == whole


async def test_an_export_waits_until_what_was_erased_is_covered(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    await wait_until_erasures_are_covered(world.sessions)
    await world.erase(6)
    waiting = asyncio.create_task(wait_until_erasures_are_covered(world.sessions, wait_ms=60_000))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 0.5)
    await world.sequence()
    await waiting
    await world.export(tmp_path / "bundle")
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound
    assert verdict.report is not None
    assert (verdict.entries_after_head, verdict.report.streams.payloads_erased) == (0, 8)
    assert judge_alone(tmp_path / "bundle", world.verifier_key).is_sound


async def test_an_export_that_no_head_covers_in_time_says_so_and_so_do_the_verifiers(
    world: World, tmp_path: Path
) -> None:
    await small_ledger(world)
    await world.erase(6)
    ended = tga(world, "export", tmp_path / "bundle", "--json")
    assert (ended.returncode, said(ended)["traces_erased_after_head"]) == (1, 1), ended.stderr
    verdict, alone = (read(tmp_path / "bundle", world.verifier_key) for read in (judge, judge_alone))
    assert verdict.findings == alone.findings == [("STATE_RECOVERY_FAILED", f"trace:{trace_id(6)}", 4)]
    assert (verdict.entries_after_head, verdict.after_head) == (alone.entries_after_head, alone.after_head) == (1, [])
    ended = tga(world, "verify", "--file", tmp_path / "bundle", "--key", world.verifier_key.to_text(), "--json")
    assert (ended.returncode, said(ended)["sound"]) == (1, False)
    assert said(ended)["after_head"] == {"entries": 1, "findings": []}


async def test_a_resumed_export_tells_of_what_was_erased_since_it_began(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    await world.export(tmp_path / "whole")
    whole = (tmp_path / "whole" / ENTRIES).read_bytes().splitlines(keepends=True)
    folder = tmp_path / "resumed"
    folder.mkdir()
    stream = f"trace:{trace_id(21)}"
    cut = next(place for place, line in enumerate(whole) if json.loads(line)["stream"] == stream) + 2
    (folder / ENTRIES).write_bytes(b"".join(whole[:cut]))
    await world.erase(21)
    async with open_export(world.sessions, Filter()) as export:
        await write_bundle(folder, export, Filter())
        assert export.unexplained == {stream}
    for verdict in (judge(folder, world.verifier_key), judge_alone(folder, world.verifier_key)):
        assert verdict.findings == [("STATE_RECOVERY_FAILED", stream, 4)]


async def test_filters_choose_whole_traces(world: World, tmp_path: Path) -> None:
    await small_ledger(world)
    await world.fill(52, 2, principal={"principal_id": "agent-9", "tenant": "acme"}, server_id="acme/crm")
    await world.sequence()
    for name, wanted, count in (
        ("acme", Filter(tenant="acme"), 2),
        ("one", Filter(trace_id=trace_id(6)), 1),
        ("none", Filter(since="2030-01-01T00:00:00.000Z"), 0),
        ("past", Filter(until="2030-01-01T00:00:00.000Z"), 20),
    ):
        await world.export(tmp_path / name, wanted)
        verdict = judge(tmp_path / name, world.verifier_key)
        assert verdict.findings == judge_alone(tmp_path / name, world.verifier_key).findings == []
        assert verdict.report is not None
        assert verdict.report.streams.of_kind["trace"] == count, name


def test_an_export_does_not_write_over_anything(tmp_path: Path) -> None:
    from app.cli.export import _begin

    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(SettingInvalid):
        _begin(tmp_path, Filter(), with_blobs=False, resume=False)
    with pytest.raises(SettingInvalid):
        _begin(tmp_path, Filter(), with_blobs=False, resume=True)


def _started(world: World, *arguments: str) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "TGA_DATABASE_URL": world.database.admin_url, "TGA_HOME": str(world.keys.parent)}
    return subprocess.Popen([sys.executable, "-m", "app.main", *arguments], env=environment)


def _wait_for(path: Path) -> None:
    deadline = time.monotonic() + 20
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.001)
