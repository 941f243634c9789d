"""What the README tells people to run first: `make run`, and the demonstrations of a crash and of tampering."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.world import wait_for

ROOT = Path(__file__).parents[2]


def environment(home: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    return {**inherited, "TGA_HOME": str(home), **more}


def run(tool: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, f"tools/{tool}.py"],
        cwd=ROOT,
        env=environment(home, PYTHONPATH=str(ROOT), **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_a_killed_gateway_and_a_call_that_is_executed_once(home: Path) -> None:
    told = run("crash", home)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "killed with -9" in told.stdout
    assert "1 execution of this key" in told.stdout


def test_tampering_that_is_found(home: Path) -> None:
    told = run("tamper", home)
    assert told.returncode == 0, told.stdout + told.stderr
    assert "STATE_CHECKSUM_MISMATCH" in told.stdout


def test_a_port_that_is_taken_is_named_before_anything_is_started(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = run("run", home, TGA_PORT=str(port))
    assert (told.returncode, f"port {port} of 127.0.0.1 is taken" in told.stdout) == (3, True)
    assert "TGA_PORT=" in told.stdout
    assert list(home.iterdir()) == []


def test_make_run_makes_a_call_over_http_and_says_what_to_try(home: Path, tmp_path: Path) -> None:
    try:
        socket.create_server(("127.0.0.1", 8421)).close()
    except OSError:
        pytest.skip("port 8421, which the demonstration's tool server needs, is taken")
    told = tmp_path / "told"
    with told.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "tools/run.py"],
            cwd=ROOT,
            env=environment(home, TGA_PORT="0", PYTHONPATH=str(ROOT)),
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: "Ctrl-C stops everything" in told.read_text() or process.poll() is not None)
        assert process.poll() is None, told.read_text()
        assert "EXECUTING → COMPLETED" in told.read_text()
        (curl,) = [line for line in told.read_text().splitlines() if "order-8" in line]
        for replayed in ('"replayed":false', '"replayed":true') if shutil.which("curl") else ():
            answered = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=30, check=True)
            assert replayed in answered.stdout
        assert (home / "admin.key").read_text().strip() not in told.read_text()
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=60) == 0
