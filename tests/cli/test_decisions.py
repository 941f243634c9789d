"""What people decide from a terminal: they see what they decide on, and decide on exactly that."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.world import World
from tests.patience import HANG_S


def test_an_approval_shows_the_request_and_then_makes_the_call(world: World) -> None:
    asked = world.tga("call", "bank", "refund", "-a", "amount=5", "-k", "a-1", "--intent", "a broken [vase]")
    trace_id = asked.stderr.split("trace ")[1].split()[0]
    assert trace_id in world.tga("approvals").stdout
    (item,) = [item for item in world.json("approvals") if item["trace_id"] == trace_id]
    assert (item["arguments"], item["intent"]) == ({"amount": 5}, "a broken [vase]")
    assert world.executions("a-1") == 0
    told = world.tga("approve", trace_id, "--yes", "-r", "seen the vase")
    assert told.returncode == 0
    assert json.loads(told.stdout)["amount"] == 5
    for part in ("admin", "bank refund (write)", '"amount": 5', "a broken [vase]", "a-1", "COMPLETED"):
        assert part in told.stderr
    assert world.executions("a-1") == 1
    assert trace_id not in world.tga("approvals").stdout
    assert "APPROVE by admin: seen the vase" in world.tga("trace", trace_id).stdout
    for command in ("approve", "deny", "withdraw"):
        again = world.tga(command, trace_id)
        assert (again.returncode, "ALREADY_DECIDED" in again.stderr) == (1, True)
    assert world.executions("a-1") == 1


def test_a_denial_is_told_to_the_caller_and_nothing_is_called(world: World) -> None:
    trace_id = world.pending("d-1")
    told = world.tga("deny", trace_id, "-r", "no such vase")
    assert (told.returncode, told.stdout) == (0, "")
    again = world.tga("call", "bank", "refund", "-a", "amount=5", "-k", "d-1")
    assert again.returncode == 1
    assert "Denied by admin: no such vase" in again.stderr
    assert world.executions("d-1") == 0


def test_a_caller_takes_its_request_back(world: World) -> None:
    trace_id = world.pending("w-1")
    told = world.tga("withdraw", trace_id, "-r", "found it")
    assert (told.returncode, "by its own caller: found it" in told.stderr) == (0, True)
    assert world.json("trace", trace_id)["state"] == "DENIED"


def test_who_is_no_supervisor_decides_nothing(world: World) -> None:
    trace_id = world.pending("n-1")
    operator = world.new_key("ops", "operator")
    for command in (("approve", trace_id, "--yes"), ("deny", trace_id)):
        told = world.tga(*command, TGA_API_KEY=operator)
        assert (told.returncode, "FORBIDDEN" in told.stderr) == (1, True)
    stranger = world.new_key("bob", "agent")
    told = world.tga("approve", trace_id, "--yes", TGA_API_KEY=stranger)
    assert (told.returncode, "TRACE_NOT_FOUND" in told.stderr) == (1, True)
    assert world.json("trace", trace_id)["state"] == "PENDING"


def test_what_a_terminal_would_obey_or_hide_is_shown_as_escapes(world: World) -> None:
    hostile = "pay \u202e005\u202c \x1b[2Kto \u009b31m eve\u200b"
    arguments = json.dumps({"amount": 5, "note": hostile})
    asked = world.tga("call", "bank", "refund", "--json", arguments, "-k", "h-1", "--intent", hostile)
    trace_id = asked.stderr.split("trace ")[1].split()[0]
    told = world.tga("deny", trace_id, "-r", hostile)
    shown = told.stderr + world.tga("trace", trace_id).stdout
    for character in hostile:
        assert character.isprintable() or character not in shown
    assert "\\u202e005" in shown
    assert world.json("trace", trace_id)["artifacts"]["action_request"]["arguments"]["note"] == hostile


def on_a_terminal(world: World, typed: bytes, *arguments: str) -> int:
    """The exit code of a command with a person at the keyboard."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "app.main", *arguments]
    process = subprocess.Popen(command, env=world.environment(), stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    try:
        seen = b""
        while b"(y/N)" not in seen:
            seen += os.read(ours, 65536)
        os.write(ours, typed)
        return process.wait(timeout=HANG_S)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_without_a_terminal_nothing_is_approved_unless_it_is_meant(world: World) -> None:
    trace_id = world.pending("no-terminal-1")
    for stdin in (None, "", "n\n", "y\n"):
        told = world.tga("approve", trace_id, stdin=stdin)
        assert (told.returncode, "CONFIRMATION_NEEDED" in told.stderr, "--yes" in told.stderr) == (2, True, True)
    assert (world.json("trace", trace_id)["state"], world.executions("no-terminal-1")) == ("PENDING", 0)


def test_on_a_terminal_an_approval_asks_first(world: World) -> None:
    trace_id = world.pending("t-1")
    for typed in (b"\n", b"n\n"):
        assert on_a_terminal(world, typed, "approve", trace_id) == 1
    assert (world.json("trace", trace_id)["state"], world.executions("t-1")) == ("PENDING", 0)
    assert on_a_terminal(world, b"y\n", "approve", trace_id) == 0
    assert (world.json("trace", trace_id)["state"], world.executions("t-1")) == ("COMPLETED", 1)


@pytest.fixture(scope="module")
def own_key(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the principal admin, registered."""
    path = tmp_path_factory.mktemp("keys") / "ada"
    made = world.tga("keys", "make", str(path))
    assert (made.returncode, path.stat().st_mode & 0o777) == (0, 0o600)
    told = world.tga("keys", "register", "admin", "--public-key", f"{path}.pub")
    assert told.returncode == 0, told.stderr
    assert made.stdout.strip() in told.stdout
    return path


def test_a_decision_signed_with_ones_own_key_stands_with_that_signature(world: World, own_key: Path) -> None:
    trace_id = world.pending("s-1")
    told = world.tga("approve", trace_id, "--yes", "-r", "signed", "--sign-with", str(own_key), "--as", "admin")
    assert told.returncode == 0, told.stderr
    decision = world.json("trace", trace_id)["artifacts"]["supervisor_decision"]
    shown = world.tga("trace", trace_id).stdout
    assert f"signed with {decision['signature']['key_id']}" in shown
    other = world.pending("s-2")
    world.tga("deny", other)
    gateways = world.json("trace", other)["artifacts"]["supervisor_decision"]["signature"]["key_id"]
    assert decision["signature"]["key_id"] != gateways
    assert world.tga("verify", trace_id).returncode == 0


def test_a_signature_that_does_not_count_decides_nothing(world: World, own_key: Path, tmp_path: Path) -> None:
    trace_id = world.pending("s-3")
    stranger = tmp_path / "stranger"
    world.tga("keys", "make", str(stranger))
    for key, principal in ((own_key, "somebody-else"), (stranger, "admin")):
        told = world.tga("approve", trace_id, "--yes", "--sign-with", str(key), "--as", principal)
        assert (told.returncode, "SIGNATURE_INVALID" in told.stderr) == (1, True)
    assert world.json("trace", trace_id)["state"] == "PENDING"
    assert world.tga("approve", trace_id, "--yes", "--sign-with", str(own_key)).returncode == 2
    assert world.tga("approve", trace_id, "--yes", "--as", "admin").returncode == 2


def test_a_key_that_others_could_read_or_that_is_none_is_refused_without_being_shown(
    world: World, own_key: Path, tmp_path: Path
) -> None:
    trace_id = world.pending("s-4")
    open_key, broken = tmp_path / "open", tmp_path / "broken"
    open_key.write_text(own_key.read_text())
    broken.write_text("c2VjcmV0LWJ1dC10b28tc2hvcnQ=")
    broken.chmod(0o600)
    for path in (open_key, broken, tmp_path / "none", tmp_path):
        told = world.tga("approve", trace_id, "--yes", "--sign-with", str(path), "--as", "admin")
        assert (told.returncode, "SETTING_INVALID" in told.stderr) == (2, True)
        assert own_key.read_text().strip() not in told.stderr
        assert broken.read_text() not in told.stderr
    assert world.tga("keys", "make", str(own_key)).returncode == 2


def test_a_retired_key_signs_no_more(world: World, tmp_path: Path) -> None:
    path = tmp_path / "old"
    key_id = world.tga("keys", "make", str(path)).stdout.strip()
    world.tga("keys", "register", "admin", "--public-key", f"{path}.pub")
    assert world.tga("keys", "retire", key_id).returncode == 0
    told = world.tga("approve", world.pending("s-5"), "--yes", "--sign-with", str(path), "--as", "admin")
    assert (told.returncode, "SIGNATURE_INVALID" in told.stderr) == (1, True)
    assert world.tga("keys", "retire", "ed25519:0000000000000000").returncode == 1


def test_a_key_is_registered_once_for_one_principal_of_a_tenant_that_exists(world: World, own_key: Path) -> None:
    public = f"{own_key}.pub"
    assert world.tga("keys", "register", "admin", "--public-key", public).returncode == 0
    assert world.tga("keys", "register", "mallory", "--public-key", public).returncode == 1
    assert world.tga("keys", "register", "admin", "--public-key", public, "--tenant", "tpyo").returncode == 1
    assert world.tga("keys", "register", "admin", "--public-key", "/none").returncode == 2
