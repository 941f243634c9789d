"""`tga call`, `tga traces` and `tga trace` as a person at a terminal meets them, over HTTP to a real gateway."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.cli.world import NOWHERE, World, trace_of
from tests.patience import HANG_S


@pytest.fixture(scope="module")
def world(still_world: World) -> World:
    """With a server that is down beside the bank."""
    still_world.config.write_text(still_world.config.read_text() + NOWHERE)
    still_world.start()
    return still_world


def test_a_call_and_its_repeat_print_the_same_bytes_and_are_executed_once(world: World) -> None:
    first = world.tga_process("call", "bank", "charge", "-a", "amount=42", "-k", "order-1")
    again = world.tga("call", "bank", "charge", "-a", "amount=42", "-k", "order-1")
    assert (first.returncode, again.returncode) == (0, 0)
    assert first.stdout == again.stdout
    assert json.loads(first.stdout)["amount"] == 42
    assert "answered from the record" in again.stderr
    assert world.executions("order-1") == 1
    other = world.tga("call", "bank", "charge", "-a", "amount=43", "-k", "order-1")
    assert (other.returncode, other.stdout) == (1, "")
    assert "IDEMPOTENCY_KEY_REUSED" in other.stderr
    assert "42" not in other.stderr


def test_a_write_without_a_key_gets_one_that_repeats_it_and_a_read_gets_none(world: World) -> None:
    first = world.tga("call", "bank", "charge", "-a", "amount=1")
    key = first.stderr.split("idempotency key ")[1].split()[0]
    again = world.tga("call", "bank", "charge", "-a", "amount=1", "-k", key)
    assert (first.stdout, world.executions(key)) == (again.stdout, 1)
    read = world.tga("call", "bank", "balance")
    assert (read.returncode, "idempotency key" in read.stderr) == (0, False)


def test_arguments_come_as_pairs_or_as_json_or_from_stdin(world: World) -> None:
    told = world.tga("call", "bank", "charge", "--json", '{"amount": 7}', "-k", "json-1")
    piped = world.tga("call", "bank", "charge", "--json", "-", "-k", "json-1", stdin='{"amount": 7}')
    assert json.loads(told.stdout)["amount"] == 7
    assert piped.stdout == told.stdout
    assert world.tga("call", "bank", "charge", "-a", "amount=7", "--json", "{}").returncode == 2
    for wrong, code in ((["-a", "amount"], "INPUT_MALFORMED"), (["-a", "amount=x"], "ARGUMENTS_INVALID")):
        told = world.tga("call", "bank", "charge", *wrong)
        assert (told.returncode, code in told.stderr) == (2, True)


def test_what_is_not_there_is_said_and_stores_nothing(world: World) -> None:
    before = len(world.json("traces"))
    for server, tool in (("bank", "chrage"), ("bnak", "charge")):
        told = world.tga("call", server, tool, "-k", "k")
        assert (told.returncode, "TOOL_NOT_FOUND" in told.stderr) == (2, True)
    assert len(world.json("traces")) == before


def test_failed_denied_pending_and_unreachable_calls_tell_so(world: World) -> None:
    failed = world.tga("call", "bank", "fail")
    assert (failed.returncode, "HTTP_4" in failed.stderr) == (1, True)
    denied = world.tga("call", "bank", "charge", "-a", "amount=13", "-k", "d1")
    assert (denied.returncode, denied.stdout) == (1, "")
    assert "DENIED trace " in denied.stderr
    assert "no-thirteen" in denied.stderr
    pending = world.tga("call", "bank", "refund", "-a", "amount=5", "-k", "r1")
    assert (pending.returncode, pending.stdout, "waits for a person" in pending.stderr) == (0, "", True)
    unreachable = world.tga("call", "nowhere", "charge", "-k", "n1")
    assert (unreachable.returncode, "NOT_SENT" in unreachable.stderr) == (1, True)
    states = {trace["trace_id"]: trace["state"] for trace in world.json("traces")}
    assert [states[trace_of(told)] for told in (failed, denied, pending, unreachable)] == [
        "FAILED", "DENIED", "PENDING", "FAILED",
    ]  # fmt: skip


def test_a_call_that_takes_longer_than_wait_goes_on_and_can_be_watched(world: World) -> None:
    asked = world.tga("call", "bank", "slow_charge", "-a", "amount=7", "-a", "ms=2500", "-k", "slow-1", "--wait", "0")
    assert (asked.returncode, asked.stdout) == (0, "")
    assert "EXECUTING" in asked.stderr
    assert world.json("trace", trace_of(asked))["state"] == "EXECUTING"
    watched = world.tga("trace", trace_of(asked), "--watch")
    assert watched.returncode == 0
    assert watched.stdout.endswith("COMPLETED\n")
    assert [line.split()[1] for line in watched.stdout.splitlines() if line.startswith("20")] == ["1", "2", "3", "4"]
    assert world.executions("slow-1") == 1


def test_a_watcher_is_told_each_entry_as_it_comes(world: World) -> None:
    trace_id = world.pending("watched-1")
    watcher = subprocess.Popen(
        [sys.executable, "-m", "app.main", "trace", trace_id, "--watch", "--json"],
        env=world.environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert watcher.stdout is not None
    assert json.loads(watcher.stdout.readline())["sequence_number"] == 1
    assert world.tga("approve", trace_id, "--yes").returncode == 0
    rest = [json.loads(line) for line in watcher.communicate(timeout=HANG_S)[0].splitlines()]
    assert [item["sequence_number"] for item in rest] == [2, 3, 4]
    assert watcher.returncode == 0


def test_a_trace_is_told_as_a_timeline(world: World) -> None:
    called = world.tga("call", "bank", "charge", "-a", "amount=42", "-k", "order-2", "--intent", "order [bold]2")
    told = world.tga("trace", trace_of(called)).stdout
    for part in ("COMPLETED", "order-2", 'admin asks for {"amount": 42}', "order [bold]2", "APPROVE by the policy"):
        assert part in told
    assert "attempt 1" in told
    document = world.json("trace", trace_of(called))
    assert [entry["entry"]["sequence_number"] for entry in document["entries"]] == [1, 2, 3, 4]
    assert document["artifacts"]["action_request"]["intent"] == "order [bold]2"
    other = trace_of(called)[:-1] + ("0" if trace_of(called)[-1] != "0" else "1")
    for arguments, code in (((other,), 1), ((other, "--watch"), 1), (("no-trace",), 2)):
        assert world.tga("trace", *arguments).returncode == code


def test_traces_are_filtered_and_limited(world: World) -> None:
    for key in ("f-1", "f-2"):
        world.tga("call", "bank", "charge", "-a", "amount=1", "-k", key)
    world.tga("call", "nowhere", "charge", "-k", "f-3")
    assert len(world.json("traces", "--limit", "2")) == 2
    assert {trace["server_id"] for trace in world.json("traces", "--server", "nowhere")} == {"nowhere"}
    assert {trace["tool_name"] for trace in world.json("traces", "--tool", "charge")} == {"charge"}
    assert {trace["state"] for trace in world.json("traces", "--state", "completed")} == {"COMPLETED"}
    assert world.json("traces", "--principal", "nobody") == []
    assert world.tga("traces", "--principal", "nobody").stdout == "No trace fits.\n"
    assert world.tga("traces", "--state", "lost").returncode == 2
    table = world.tga("traces", "--limit", "1").stdout
    assert table.splitlines()[0].split() == ["trace", "state", "tool", "asked", "by", "requested", "at", "took", "sent"]
    assert "\x1b" not in table


def test_secret_arguments_are_not_shown_by_any_command(world: World) -> None:
    card = "4242424242424242"
    called = world.tga("call", "bank", "pay_card", "-a", "amount=3", "--key", "card-1", "-a", f'card="{card}"')
    assert called.returncode == 0, called.stderr
    for arguments in (("trace", trace_of(called)), ("trace", trace_of(called), "--json"), ("traces", "--json")):
        told = world.tga(*arguments)
        assert card not in told.stdout + told.stderr


@pytest.mark.parametrize("command", [("traces",), ("approvals",), ("servers",), ("call", "bank", "balance")])
def test_who_is_not_let_in_is_exit_1_and_told_so(world: World, command: tuple[str, ...]) -> None:
    told = world.tga(*command, TGA_API_KEY="tga_0123456789abcdef_" + "A" * 43)
    assert (told.returncode, told.stdout) == (1, "")
    assert "UNAUTHENTICATED" in told.stderr


def test_what_a_role_does_not_admit_is_exit_1_and_names_the_roles_that_do(world: World) -> None:
    auditor = world.new_key("eve", "auditor")
    told = world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "no", TGA_API_KEY=auditor)
    assert (told.returncode, "FORBIDDEN" in told.stderr, "agent" in told.stderr) == (1, True, True)
    assert world.executions("no") == 0
    assert world.tga("traces", TGA_API_KEY=auditor).returncode == 0


def test_a_gateway_that_is_not_there_is_exit_3_and_is_named(world: World) -> None:
    for url in ("http://127.0.0.1:1", world.config.read_text().split('base_url = "')[1].split('"')[0]):
        for command in (("traces",), ("call", "bank", "balance"), ("servers",)):
            told = world.tga(*command, TGA_URL=url)
            assert (told.returncode, told.stdout) == (3, "")
            assert "GATEWAY_UNREACHABLE" in told.stderr
            assert url in told.stderr
