"""The demonstrations of a crash and of tampering."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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
