"""A run of the tests that a signal ends leaves no process and no file behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import pytest

from tests.conftest import system_binaries
from tests.patience import HANG_S

ROOT: Final = Path(__file__).parents[1]


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the watcher finds processes by /proc")
@pytest.mark.parametrize(("name", "ended_by"), [("embedded", signal.SIGTERM), ("system", signal.SIGKILL)])
def test_a_signal_that_ends_pytest_ends_its_postgres_and_its_processes(
    tmp_path: Path, name: str, ended_by: signal.Signals
) -> None:
    if name == "system" and system_binaries() is None:
        pytest.skip("no PostgreSQL under /usr/lib/postgresql: apt-get install postgresql to test on it too")
    told = tmp_path / "told"
    outer = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    run = subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", f"tests/standing_still.py::test_that_stands_still[{name}]"],
        cwd=ROOT,
        env={**outer, "TGA_TELL": str(told)},
        start_new_session=True,
    )
    try:
        _wait_until(lambda: told.exists() or run.poll() is not None)
        assert run.poll() is None, "the inner pytest ended by itself: its output says why"
        found = json.loads(told.read_text())
        assert _lives(found["postmaster"])
        os.killpg(run.pid, ended_by)
        assert run.wait(HANG_S) == -ended_by
        _wait_until(lambda: not Path(found["folder"]).exists())
        assert not _lives(found["postmaster"])
        assert not _lives(found["other"])
    finally:
        run.kill()
        run.wait()


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="the watcher finds processes by /proc")
@pytest.mark.parametrize("ended_by", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_that_ends_a_benchmark_ends_what_it_started(ended_by: signal.Signals) -> None:
    """Every benchmark that starts servers has them in such a folder."""
    bench = (
        "import subprocess, sys, time\n"
        "from bench.measure import own_folder\n"
        "with own_folder() as folder:\n"
        "    server = subprocess.Popen(['sleep', '3600'], start_new_session=True)\n"
        "    print(server.pid, folder, flush=True)\n"
        "    time.sleep(3600)\n"
    )
    run = subprocess.Popen([sys.executable, "-c", bench], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert run.stdout is not None
        server, _, folder = run.stdout.readline().strip().partition(" ")
        assert _lives(int(server))
        run.send_signal(ended_by)
        assert run.wait(HANG_S) == -ended_by
        _wait_until(lambda: not Path(folder).exists())
        assert not _lives(int(server))
    finally:
        run.kill()
        run.communicate()


def _lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _wait_until(holds: Callable[[], bool]) -> None:
    hung_at = time.monotonic() + HANG_S
    while not holds():
        assert time.monotonic() < hung_at, "what must happen has not happened"
        time.sleep(0.02)
