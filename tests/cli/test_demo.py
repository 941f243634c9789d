"""`tga demo`, which `make run` runs: a gateway, a bank beside it, one call, and what to try."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from importlib import resources
from pathlib import Path

from tests.cli.world import wait_for

ROOT = Path(__file__).parents[2]
TGA = Path(sys.executable).with_name("tga")


def environment(home: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    return {**inherited, "TGA_HOME": str(home), "TGA_PORT": "0", **more}


def refused(home: Path, **more: str) -> str:
    """What it says where it does not even start."""
    told = subprocess.run(
        [sys.executable, "-m", "app.main", "demo"],
        cwd=ROOT,
        env=environment(home, **more),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (told.returncode, told.stdout) == (2, "")
    return told.stderr


def write_config(home: Path, bank_port: int) -> None:
    packaged = resources.files("app.demo").joinpath("tga.toml").read_text("utf-8")
    assert packaged.count("127.0.0.1:8421") == 1
    (home / "tga.toml").write_text(packaged.replace("127.0.0.1:8421", f"127.0.0.1:{bank_port}"))


def test_a_port_that_is_taken_is_named_before_anything_is_started(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        told = refused(home, TGA_PORT=str(port))
    assert f"port {port} of 127.0.0.1 is taken" in told
    assert "TGA_PORT=" in told
    assert list(home.iterdir()) == []


def test_a_port_of_the_bank_that_is_taken_is_named_too(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        write_config(home, port)
        told = refused(home)
    assert f"port {port} of 127.0.0.1 is taken" in told
    assert "another `tga demo`" in told
    assert [file.name for file in home.iterdir()] == ["tga.toml"]


def run_until_it_says(home: Path, sentence: str) -> str:
    """Start it, wait until it says so, and stop it as Ctrl-C does. What it said in all."""
    told = home / "told"
    with told.open("w") as file:
        process = subprocess.Popen(
            [TGA, "demo"], cwd=ROOT, env=environment(home), stdout=file, stderr=subprocess.STDOUT
        )
    try:
        wait_for(lambda: sentence in told.read_text() or process.poll() is not None, seconds=120)
        assert process.poll() is None, told.read_text()
        for curl in [line for line in told.read_text().splitlines() if "order-8" in line and shutil.which("curl")]:
            for replayed in ('"replayed":false', '"replayed":true') if (home / "bank.jsonl").exists() else ():
                answered = subprocess.run(["sh", "-c", curl], capture_output=True, text=True, timeout=30, check=True)
                assert replayed in answered.stdout
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=120) == 0
    return told.read_text()


def test_it_makes_a_call_over_http_and_says_what_to_try(home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    write_config(home, port)
    told = run_until_it_says(home, "Ctrl-C stops everything")
    assert f"A tool server of its own is at http://127.0.0.1:{port}" in told
    assert "EXECUTING → COMPLETED" in told
    assert "tools/crash.py" in told  # which a clone has, and the wheel has not
    assert (home / "admin.key").read_text().strip() not in told


def test_where_the_configuration_has_no_bank_on_this_machine_none_is_started(home: Path) -> None:
    (home / "tga.toml").write_text('[servers.bank]\ntransport = "http"\nbase_url = "http://bank.example:80"\n')
    told = run_until_it_says(home, "Ctrl-C stops everything")
    assert "has no server `bank` on this machine" in told
    assert "The demonstration's call was not made" in told
    assert not (home / "bank.jsonl").exists()
