"""Commands that look: they change nothing, look at what is in force, and say what they may not see."""

from __future__ import annotations

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.world import Told, World

TRACE = "01990000-0000-7000-8000-000000000001"
TGA = [sys.executable, "-m", "app.main"]
# Tenths of what a client or a person would notice, in CPU time: the machine may be busy.
AT_ONCE_S = 20


def tga(home: Path, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    environment = {**inherited, "TGA_HOME": str(home), "TGA_URL": "http://127.0.0.1:1", **more}
    return subprocess.run([*TGA, *arguments], env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(
    "command",
    [
        "doctor",
        "db status",
        "verify --all",
        f"verify {TRACE}",
        f"receipt {TRACE}",
        "keys list",
        "tenants list",
        "policy check",
        "recover --all --dry-run",
        f"erase {TRACE} -r why --yes",
    ],
)
def test_looking_into_a_home_in_which_nothing_is_makes_nothing_there(home: Path, command: str) -> None:
    told = tga(home / "new", *command.split())
    assert not (home / "new").exists()
    assert "Traceback" not in told.stderr
    if command == "doctor":
        assert "database: none yet" in told.stdout
        assert f"It is made in {home / 'new'} at the first start." in told.stdout
    elif command != "policy check":
        assert (told.returncode, f"there is no database in {home / 'new'} yet" in told.stderr) == (3, True)


def test_the_doctor_finds_a_database_wrong_that_is_gone_from_the_home_of_a_gateway(home: Path) -> None:
    (home / "admin.key").write_text("tga_0000000000000000_0000000000000000000000000000000000000000000\n")
    assert "wrong  database: none yet" in tga(home, "doctor").stdout
    assert not (home / "postgres").exists()


def test_policy_check_without_a_file_checks_the_policy_that_the_gateway_would_load(still_world: World) -> None:
    world = still_world
    told = world.tga("policy", "check")
    assert (told.returncode, "no-thirteen" in told.stdout) == (0, True)
    assert f"Checking {world.policy}" in told.stderr
    sound = world.policy.read_text()
    try:
        world.policy.write_text(sound + "permit(")
        told = world.tga("policy", "check")
        assert (told.returncode, "not valid" in told.stdout) == (1, True)
        world.policy.unlink()
        assert world.tga("policy", "check").returncode == 2
    finally:
        world.policy.write_text(sound)


def test_approvals_and_traces_say_that_a_role_may_not_see_what_others_asked_for(world: World) -> None:
    waiting = world.pending("seen-by-few")
    agent, auditor = world.new_key("blind", "agent"), world.new_key("eye", "auditor")
    told = world.tga("approvals", TGA_API_KEY=agent)
    assert (told.returncode, told.stdout) == (0, "Nothing of your own waits.\n")
    assert "may not see what waits of others: that takes supervisor, operator, auditor or admin" in told.stderr
    told = world.tga("approvals", "--json", TGA_API_KEY=agent)
    assert (json.loads(told.stdout), "may not see" in told.stderr) == ([], True)
    assert "may not see traces of others" in world.tga("traces", TGA_API_KEY=agent).stderr
    told = world.tga("approvals", TGA_API_KEY=auditor)
    assert (waiting in told.stdout, told.stderr) == (True, "")


@functools.cache
def whole_answer(world: World, command: str) -> Told:
    return world.tga_process(*command.split())


@pytest.mark.parametrize(
    "command", ["doctor", "--help", "verify --all", "keys list", "traces", "policy explain bank charge -a amount=13"]
)
@pytest.mark.parametrize("reader", ["true", "head -n 1"])
def test_a_reader_that_leaves_is_no_error_and_changes_no_exit_code(world: World, command: str, reader: str) -> None:
    whole = whole_answer(world, command)
    script = f"{shlex.join(TGA)} {command} 2>&1 >&3 | cat >&4"
    read, write = os.pipe()
    shell = subprocess.Popen(
        ["bash", "-c", f"set -o pipefail; {{ {script}; }} 3>&1 4>&2 | {reader}; echo ${{PIPESTATUS[0]}} >&{write}"],
        env=world.environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        pass_fds=(write,),
        text=True,
    )
    os.close(write)
    _, said = shell.communicate(timeout=60)
    with os.fdopen(read) as told:
        assert int(told.read()) == whole.returncode
    assert said == whole.stderr


def test_watching_ends_when_nobody_reads_any_more(world: World) -> None:
    trace = world.pending("watched-by-nobody")
    watcher = subprocess.Popen(
        [*TGA, "trace", trace, "--watch"], env=world.environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert watcher.stdout is not None
    watcher.stdout.close()
    assert watcher.wait(timeout=AT_ONCE_S) == 0
    assert watcher.stderr is not None
    assert watcher.stderr.read() == b""
    watcher.stderr.close()


@pytest.mark.parametrize("method", ["initialize", "server/discover"])
def test_an_mcp_client_is_told_at_once_that_no_gateway_answers(home: Path, method: str) -> None:
    greeting = {"jsonrpc": "2.0", "id": 1, "method": method, "params": {}}
    bridge = subprocess.Popen(
        [*TGA, "mcp"],
        env={**os.environ, "TGA_HOME": str(home), "TGA_URL": "http://127.0.0.1:1", "TGA_API_KEY": "k"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert bridge.stdin is not None
    assert bridge.stdout is not None
    bridge.stdin.write(json.dumps(greeting) + "\n")
    bridge.stdin.flush()
    answer = json.loads(bridge.stdout.readline())
    bridge.stdin.close()
    assert (answer["id"], answer["error"]["data"]["code"]) == (1, "GATEWAY_UNREACHABLE")
    assert "no gateway answers at http://127.0.0.1:1" in answer["error"]["message"]
    assert "Start one with `tga serve`" in answer["error"]["message"]
    said = bridge.stderr.read() if bridge.stderr else ""
    assert bridge.wait(timeout=AT_ONCE_S) == 0
    assert "tried again" not in said
    bridge.stdout.close()
    if bridge.stderr:
        bridge.stderr.close()
