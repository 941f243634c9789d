"""`tga verify --file --jobs N`: the same verdict, findings, order and exit code for every number of processes; and a
process that does not end as it should is no verdict. tests/export/world.py compares shares with one walk for every
bundle that any test here judges."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.cli import verify_workers
from app.cli.bundle_files import DiskMemory
from app.cli.bundle_jobs import accept_in_jobs
from app.cli.verify_bundle import verify_bundle_command
from app.core.errors import InputMalformed, VerificationUnfinished
from app.core.note import VerifierKey
from app.domain.ledger.checks import EntryPlace
from app.domain.log.bundle import ENTRIES, EntryLine
from app.domain.log.shares import Forked, share_of, sources_of
from tests.conformance.test_run_vectors import VECTORS as RUN_VECTORS
from tests.conformance.test_run_vectors import lines_of as lines_of_vector
from tests.conformance.test_vectors import DOCUMENT as TRACE_VECTORS
from tests.export.by_hand import write_by_hand
from tests.export.changing import lines_of, refit, write_lines
from tests.export.world import SharesHere, World, copied, judge, run_ledger, small_ledger
from tests.patience import HANG_S
from tests.processes.world import children_of
from tests.sampling import share
from tests.traces import completed_trace, trace_id

NAME = "example.org/jobs"


@pytest.fixture
def bundle(tmp_path: Path) -> tuple[Path, VerifierKey]:
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey(NAME, key.public_key().public_bytes_raw())
    write_by_hand(tmp_path / "bundle", key, verifier, traces=40, heads=3)
    return tmp_path / "bundle", verifier


def tga(folder: Path, key: VerifierKey, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "app.main", "verify", "--file", str(folder), "--key", key.to_text(), *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)


def test_several_processes_say_what_one_says(bundle: tuple[Path, VerifierKey], tmp_path: Path) -> None:
    whole, key = bundle
    broken = copied(whole, tmp_path / "broken")
    lines = lines_of(broken, ENTRIES)
    for place in (7, 90):
        lines[place]["artifact"] = lines[place]["artifact"].replace("2026", "2027")
    write_lines(broken, ENTRIES, lines)
    refit(broken, ENTRIES)
    for folder, code in ((whole, 0), (broken, 1)):
        one, three = (tga(folder, key, "--json", "--jobs", jobs) for jobs in ("1", "3"))
        assert (one.returncode, one.stdout) == (three.returncode, three.stdout)
        assert one.returncode == code, one.stderr
    assert len(json.loads(one.stdout)["findings"]) == 2


@pytest.mark.parametrize(("fill", "shares"), [(small_ledger, 2), (run_ledger, 5)])
async def test_shares_accept_what_an_export_writes(
    world: World, tmp_path: Path, fill: Callable[[World], Awaitable[None]], shares: int
) -> None:
    """Signed decisions, erasures, several tenants, all states; runs with children, forks and tools."""
    await fill(world)
    await world.export(tmp_path / "bundle")
    verdict = judge(tmp_path / "bundle", world.verifier_key)
    assert verdict.is_sound
    accepted = accept_in_jobs(tmp_path / "bundle", [world.verifier_key], [], shares, start=SharesHere)
    assert accepted == verdict.report


def test_vectors_are_judged_the_same_in_shares(tmp_path: Path) -> None:
    """`judge` compares. All of them in soak, a sample in every run."""
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey(NAME, key.public_key().public_bytes_raw())
    traces = [
        {**vector, "records": [{"stream": f"trace:{one['entry'].get('trace_id')}", **one} for one in vector["records"]]}
        for vector in TRACE_VECTORS["log_vectors"]
    ]
    every = [*RUN_VECTORS, *traces]
    step, sound = len(every) // share(len(every), 60), 0
    for vector in every[::step]:
        try:
            lines = lines_of_vector(vector)
        except (InputMalformed, KeyError):  # nothing that a line can hold
            continue
        write_by_hand(tmp_path / "bundle", key, verifier, lines=lines, heads=1)
        verdict = judge(tmp_path / "bundle", verifier)
        if verdict.is_sound:
            assert accept_in_jobs(tmp_path / "bundle", [verifier], [], 3, start=SharesHere) == verdict.report
            sound += 1
    assert sound > 0


def test_two_traces_in_different_shares_that_made_a_call_with_one_key_are_not_accepted(tmp_path: Path) -> None:
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey(NAME, key.public_key().public_bytes_raw())
    by_share = {share_of(f"trace:{trace_id(n)}".encode(), 2, {}): n for n in range(20)}
    for claimed, is_accepted in (("one", False), (None, True)):
        lines: list[EntryLine] = []
        for n in by_share.values():
            for place, (entry, artifact) in enumerate(completed_trace(n, idempotency_key=claimed or f"key-{n}"), 1):
                assert artifact is not None
                line = EntryLine(len(lines), entry.stream, place, entry.body_bytes(), artifact.to_bytes())
                lines.append(line)
        write_by_hand(tmp_path / "bundle", key, verifier, lines=lines, heads=1)
        accepted = accept_in_jobs(tmp_path / "bundle", [verifier], [], 2, start=SharesHere)
        assert (accepted is not None) == judge(tmp_path / "bundle", verifier).is_sound == is_accepted


def test_a_fork_falls_to_the_share_of_the_run_that_it_goes_back_to() -> None:
    forks = [Forked("run:c", EntryPlace("run:b", 3)), Forked("run:b", EntryPlace("run:a", 2))]
    forks += [Forked("run:x", EntryPlace("run:y", 1)), Forked("run:y", EntryPlace("run:x", 1))]
    sources = sources_of(forks)
    for shares in range(2, 9):
        assert len({share_of(name, shares, sources) for name in (b"run:a", b"run:b", b"run:c")}) == 1
        assert len({share_of(name, shares, sources) for name in (b"run:x", b"run:y")}) == 1


class Meddled(verify_workers.Workers):
    """Workers with which something is done as soon as they are started."""

    meddle: Callable[[subprocess.Popen[bytes]], None]

    def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
        super().__init__(jobs)
        type(self).meddle(self._processes[-1])


def test_a_killed_process_is_no_verdict(bundle: tuple[Path, VerifierKey]) -> None:
    class Killed(Meddled):
        meddle = staticmethod(lambda process: process.send_signal(signal.SIGKILL))

    with pytest.raises(VerificationUnfinished, match="ended early") as raised:
        accept_in_jobs(bundle[0], [bundle[1]], [], 2, start=Killed)
    assert "SIGKILL" in str(raised.value.found)


@pytest.mark.parametrize("job", [{"memory": "/dev/null/share"}, {"kind": "share", "forks": None}])
def test_a_process_that_fails_is_no_verdict(bundle: tuple[Path, VerifierKey], job: dict[str, Any]) -> None:
    """One says why, another crashes."""

    class Failing(verify_workers.Workers):
        def __init__(self, jobs: Sequence[dict[str, Any]]) -> None:
            super().__init__([*jobs[:-1], {**jobs[-1], **job}])

    with pytest.raises(VerificationUnfinished):
        accept_in_jobs(bundle[0], [bundle[1]], [], 2, start=Failing)


def test_where_no_process_can_be_started_one_verifies_and_says_so(
    bundle: tuple[Path, VerifierKey], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(verify_workers, "WORKER", ("/nowhere/python",))
    assert accept_in_jobs(bundle[0], [bundle[1]], [], 2) is None
    assert "one verifies all of it" in capfd.readouterr().err


def test_without_room_for_the_leaves_one_walk_says_what_it_says_otherwise(bundle: tuple[Path, VerifierKey]) -> None:
    """A traceback would end the command with 1, which says that the bundle is wrong."""
    folder, key = bundle
    limited = (
        "import os, resource, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024)); "
        "os.execv(sys.executable, [sys.executable, '-m', 'app.main', *sys.argv[1:]])"
    )
    command = [sys.executable, "-c", limited, "verify", "--file", str(folder), "--key", key.to_text(), "--jobs", "1"]
    found = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert (found.returncode, found.stdout) == (0, tga(folder, key, "--jobs", "1").stdout), found.stderr


async def test_without_room_for_what_is_remembered_there_is_no_verdict(
    bundle: tuple[Path, VerifierKey], monkeypatch: pytest.MonkeyPatch
) -> None:
    def store(*_: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(DiskMemory, "store", store)
    monkeypatch.setattr(DiskMemory, "remember_whole", store)
    with pytest.raises(VerificationUnfinished, match="disk is full"):
        await verify_bundle_command(bundle[0], bundle[1].to_text(), jobs=1)


def test_one_process_keeps_nothing_that_would_stay_when_it_is_killed(
    bundle: tuple[Path, VerifierKey], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary, kept = tmp_path / "temporary", list[list[str]]()
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    accepted = accept_in_jobs(bundle[0], [bundle[1]], [], 1, seen=lambda _: kept.append(os.listdir(temporary)))
    assert accepted is not None
    assert kept
    assert not any(kept), "while it reads the lines"


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGKILL])
def test_whatever_ends_the_command_no_process_stays(
    bundle: tuple[Path, VerifierKey], tmp_path: Path, ending: signal.Signals
) -> None:
    """The bundle is a pipe's end that never comes, for the workers too: they would read for ever."""
    folder, _key = bundle
    (folder / ENTRIES).unlink()
    os.mkfifo(folder / "pipe")
    held = os.open(folder / "pipe", os.O_RDWR)
    try:
        code = (
            "import sys; from pathlib import Path; from app.cli import bundle_files as f; "
            "f.FolderFiles._file = lambda self, name: Path(sys.argv[1]) / 'pipe'; "
            "from app.cli.bundle_jobs import _Shares, SharedMemory; from app.cli.verify_workers import Workers; "
            "jobs = [{'kind': 'share', 'folder': sys.argv[1], 'index': n, 'of': 2, 'forks': [], "
            "'memory': f'{sys.argv[1]}/m{n}', 'leaves': f'{sys.argv[1]}/manifest.json'} for n in (0, 1)]\n"
            "with Workers(jobs) as workers:\n    print('started', flush=True)\n    workers.hear(0)\n"
        )
        (folder / ENTRIES).symlink_to("pipe")
        process = subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        workers = children_of(process.pid)
        assert len(workers) == 2
        process.send_signal(ending)
        process.communicate(timeout=HANG_S)
        until = time.monotonic() + HANG_S
        while any(Path(f"/proc/{pid}").exists() for pid in workers):
            assert time.monotonic() < until, "a process stays"
            time.sleep(0.02)
    finally:
        os.close(held)
