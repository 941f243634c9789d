"""The demonstrations of a crash and of tampering."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


def test_tampering_is_found_and_nothing_before_it_beside_a_gateway_that_has_signed_heads(home: Path) -> None:
    """As in the README: in the home of a gateway, whose `log.head` is of another log than the one that is shown."""
    served = subprocess.Popen(
        [sys.executable, "-m", "app.main", "serve"],
        cwd=ROOT,
        env=environment(home, TGA_PORT="0"),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_for(lambda: (home / "keys" / "log.head").exists())
        memory = (home / "keys" / "log.head").read_bytes()
        told = run("tamper", home)
        assert told.returncode == 0, told.stdout + told.stderr
        before, _, after = told.stdout.partition("4. Tamper")
        assert "every digest, link, transition, claim and head is right" in before
        assert "LOG_" not in before
        assert "STATE_CHECKSUM_MISMATCH" in after
        assert "the runtime refuses to go on: STATE_CHECKSUM_MISMATCH" in after
        assert (home / "keys" / "log.head").read_bytes() == memory
    finally:
        served.terminate()
        served.communicate(timeout=60)
