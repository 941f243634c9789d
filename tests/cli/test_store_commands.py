"""Commands that work on the store itself: with a gateway running, and at 3 a.m. without one."""

from __future__ import annotations

import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.note import TlogProof, TreeHead, VerifierKey, open_note
from app.domain.log.heads import fits
from tests.cli.world import World, trace_of, wait_for
from tests.patience import HANG_S


def findings(world: World) -> dict[str, dict[str, object]]:
    return {finding["what"]: finding for finding in json.loads(world.tga("doctor", "--json").stdout)}


def test_the_doctor_finds_everything_right_when_it_is(world: World) -> None:
    told = world.tga("doctor")
    assert told.returncode == 0, told.stdout
    assert told.stdout.endswith(
        "What was looked at is as it must be.\nThe ledger was not verified: `tga verify --all` does that.\n"
    )
    assert "wrong" not in told.stdout
    found = findings(world)
    assert {"configuration", "policy", "keys", "database", "schema", "guards", "clock", "waiting", "blobs"} <= set(
        found
    )
    assert found[f"gateway at {world.url}"]["ok"] is True
    assert all(finding["ok"] for finding in found.values())


@pytest.fixture
def restored(world: World) -> Iterator[World]:
    policy, config = world.policy.read_text(), world.config.read_text()
    yield world
    world.policy.write_text(policy)
    world.config.write_text(config)
    (world.home / "keys").chmod(0o700)


@pytest.mark.parametrize("part", ["configuration", "policy", "keys", "gateway"])
def test_the_doctor_names_what_is_wrong_and_what_to_do(restored: World, part: str) -> None:
    world, more = restored, {}
    match part:
        case "configuration":
            world.config.write_text('[servers.pay]\ntransport = "carrier pigeon"\n')
        case "policy":
            world.policy.write_text("permit(")
        case "keys":
            (world.home / "keys").chmod(0o755)
        case "gateway":
            more = {"TGA_URL": "http://127.0.0.1:1"}
    told = world.tga("doctor", **more)
    assert told.returncode == 1
    (line, remedy) = told.stdout.split("wrong  ")[1].splitlines()[:2]
    assert line.startswith(part)
    assert remedy.startswith("       ")
    # A gateway that wants to sign meanwhile finds the same keys open to others, and doctor shows that too.
    wrong = told.stdout.count("wrong  ")
    assert f"{wrong} of " in told.stdout
    assert wrong == 1 or part == "keys", told.stdout


def test_the_doctor_tells_of_a_database_that_is_away_and_looks_at_all_the_rest(world: World) -> None:
    told = world.tga("doctor", TGA_DATABASE_URL="postgresql://nobody@127.0.0.1:1/none")
    assert told.returncode == 1
    assert "wrong  database: STORE_UNAVAILABLE" in told.stdout
    assert f"ok     gateway at {world.url}" in told.stdout


def test_the_doctor_warns_of_a_rule_that_can_never_match_and_so_does_the_gateway(restored: World) -> None:
    world = restored
    slips = """
    @id("mistyped") forbid(principal, action, resource == Tool::"bank/chagre");
    @id("stolen") forbid(principal, action, resource == Tool::"bank/pay_card")
    when { context.arguments.card == "4111" };
    """
    world.policy.write_text(world.policy.read_text() + slips)
    told = world.tga("doctor")
    assert told.returncode == 0, told.stdout
    assert 'mistyped names Tool::"bank/chagre", which no tool is' in told.stdout.split("warn   policy rule: ")[1]
    assert "stolen reads context.arguments.card" in told.stdout.split("warn   policy rule: ")[2]
    assert findings(world)["policy rule"]["warning"] is True
    wait_for(lambda: "stolen reads context.arguments.card" in world.told.read_text())
    assert world.told.read_text().count('mistyped names Tool::"bank/chagre"') == 1


def test_the_doctor_warns_when_the_signer_has_lost_its_memory(world: World, tmp_path: Path) -> None:
    wait_for(lambda: (world.home / "keys" / "log.head").exists())
    wait_for(lambda: "newest published head" in str(findings(world)["log's memory"]["found"]))
    assert findings(world)["log's memory"]["warning"] is False
    lost = tmp_path / "keys"
    shutil.copytree(world.home / "keys", lost)
    (lost / "log.head").unlink()
    told = world.tga("doctor", TGA_KEYS=str(lost))
    assert told.returncode == 0, told.stdout
    assert f"warn   log's memory: log.head is missing in {lost}, but the newest published head has " in told.stdout
    assert not (lost / "log.head").exists()


def test_the_doctor_makes_no_keys(tmp_path: Path, world: World) -> None:
    told = world.tga("doctor", TGA_KEYS=str(tmp_path / "lost"))
    assert (told.returncode, "wrong  keys: none yet" in told.stdout) == (1, True)
    assert not (tmp_path / "lost").exists()


def test_keys_are_made_listed_used_and_revoked(world: World) -> None:
    created = world.tga("keys", "create", "bob", "--role", "agent", "--role", "auditor", "--name", "bob's", "--json")
    document = json.loads(created.stdout)
    assert (document["principal_id"], document["roles"]) == ("bob", ["agent", "auditor"])
    key = document["key"]
    assert world.tga("traces", TGA_API_KEY=key).returncode == 0
    assert "bob's" in world.tga("keys", "list").stdout
    assert key not in world.tga("keys", "list", "--json").stdout
    assert world.tga("keys", "revoke", document["key_id"]).returncode == 0
    assert world.tga("traces", TGA_API_KEY=key).returncode == 1
    assert world.tga("keys", "revoke", "0" * 16).returncode == 1
    assert world.tga("keys", "create", "bob", "--role", "king").returncode == 2
    assert world.tga("keys", "create", "bob").returncode == 2


def test_who_checks_a_signature_finds_the_public_keys_without_a_credential(world: World, tmp_path: Path) -> None:
    with urllib.request.urlopen(f"{world.url}/v1/keys/signing", timeout=HANG_S) as answer:  # noqa: S310
        served = {key["key_id"]: key for key in json.load(answer)["items"]}
    listed = {key["key_id"]: key for key in world.json("keys", "list") if key["kind"] == "signing"}
    own = {key_id: key for key_id, key in listed.items() if key["signs_for"] is None}
    assert {key_id: key["public_key"] for key_id, key in own.items()} == {
        key_id: key["public_key"] for key_id, key in served.items()
    }
    shown = world.tga("keys", "show", "signing")
    (key_id,) = [key_id for key_id, key in own.items() if key["public_key"] == shown.stdout.strip()]
    assert key_id in shown.stderr
    told = world.tga("keys", "list").stdout
    assert all(key_id in told for key_id in own)
    nowhere = world.tga("keys", "show", "signing", TGA_KEYS=str(tmp_path / "none"))
    assert (nowhere.returncode, "tga serve" in nowhere.stderr) == (2, True)
    assert not (tmp_path / "none").exists()


def test_the_logs_public_key_is_printed_by_a_command(world: World) -> None:
    admin = world.admin_key()
    request = urllib.request.Request(f"{world.url}/v1/log/key", headers={"Authorization": f"Bearer {admin}"})  # noqa: S310
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
        assert world.tga("keys", "show", "log").stdout == answer.read().decode()
    assert world.tga("keys", "show", "sealing").returncode == 2


def test_tenants_are_apart(world: World) -> None:
    assert world.tga("tenants", "create", "acme").returncode == 0
    assert {tenant["tenant"] for tenant in world.json("tenants", "list")} >= {"acme", "default"}
    asked = world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "tenant-1")
    stranger = world.new_key("eve", "admin", tenant="acme")
    assert json.loads(world.tga("traces", "--json", TGA_API_KEY=stranger).stdout) == []
    told = world.tga("trace", trace_of(asked), TGA_API_KEY=stranger)
    assert (told.returncode, "TRACE_NOT_FOUND" in told.stderr) == (1, True)


def test_the_policy_is_checked_and_explained(world: World, tmp_path: Path) -> None:
    assert world.tga("policy", "check", str(world.policy)).returncode == 0
    broken = tmp_path / "broken.cedar"
    broken.write_text("permit(")
    assert world.tga("policy", "check", str(broken)).returncode == 1
    assert world.tga("policy", "check", str(tmp_path / "none")).returncode == 2
    assert world.tga("policy", "check").returncode == 0
    for arguments, verdict, code in (
        (("bank", "charge", "-a", "amount=1"), "allow", 0),
        (("bank", "charge", "-a", "amount=13"), "deny", 1),
        (("bank", "refund", "--arguments", '{"amount": 1}', "--principal", "bob", "--role", "agent"), "ask", 0),
    ):
        told = world.tga("policy", "explain", *arguments, "--json")
        assert (told.returncode, json.loads(told.stdout)["verdict"]) == (code, verdict)
    assert "forbidden by no-thirteen" in world.tga("policy", "explain", "bank", "charge", "-a", "amount=13").stdout
    for wrong in (("bank", "nothing"), ("bank", "charge", "-a", "amount=x"), ("bank", "charge", "--role", "king")):
        assert world.tga("policy", "explain", *wrong).returncode == 2


def test_an_erased_trace_shows_no_payload_and_still_verifies(world: World) -> None:
    asked = world.tga("call", "bank", "charge", "-a", "amount=987654", "-k", "erase-1")
    trace_id = trace_of(asked)
    told = world.tga("erase", trace_id, "-r", "asked to be forgotten", "--yes")
    assert told.returncode == 0, told.stderr
    for arguments in (("trace", trace_id), ("trace", trace_id, "--json")):
        shown = world.tga(*arguments)
        assert (shown.returncode, "987654" in shown.stdout) == (0, False)
    assert "erased" in world.tga("trace", trace_id).stdout
    assert world.tga("verify", trace_id).returncode == 0
    assert world.tga("verify", "--all").returncode == 0
    again = world.tga("erase", trace_id, "-r", "again", "--yes")
    assert (again.returncode, "TRACE_ERASED" in again.stderr) == (1, True)
    waiting = world.tga("erase", world.pending("erase-2"), "-r", "too early", "--yes")
    assert (waiting.returncode, "TRACE_UNFINISHED" in waiting.stderr) == (1, True)
    assert world.tga("erase", trace_id).returncode == 2


def test_a_new_signing_key_is_announced_and_the_old_one_retired_once_nobody_signs_with_it(world: World) -> None:
    told = world.tga("keys", "rotate", "signing")
    assert (told.returncode, "Restart it" in told.stderr) == (0, True)
    old = told.stderr.split("tga keys retire ")[1].strip()
    world.tga("deny", world.pending("rotate-1"))
    world.stop()
    world.start()
    assert world.tga("keys", "retire", old).returncode == 0
    trace_id = world.pending("rotate-2")
    world.tga("deny", trace_id)
    new = world.json("trace", trace_id)["artifacts"]["supervisor_decision"]["signature"]["key_id"]
    assert new == told.stdout.split()[0]
    assert new != old
    again = world.tga("keys", "rotate", "signing", TGA_URL="http://127.0.0.1:1")
    assert (again.returncode, f"{new} is retired." in again.stdout) == (0, True)
    assert world.tga("verify", "--all").returncode == 0
    assert world.tga("keys", "rotate", "both").returncode == 2


def test_a_new_log_key_signs_heads_after_a_restart(world: World) -> None:
    told = world.tga("keys", "rotate", "log")
    new, old = told.stdout.strip(), told.stderr.split()[-1]
    assert (told.returncode, new != old) == (0, True)
    assert new.split("+")[0] == old.split("+")[0], "the log keeps its name"
    world.stop()
    world.start()
    receipt = world.tga("receipt", trace_of(world.tga("call", "bank", "charge", "-a", "amount=1", "-k", "log-key")))
    note = TlogProof.from_text(receipt.stdout).note
    assert TreeHead.from_text(open_note(note, [VerifierKey.from_text(new)], fits)).size > 0
    assert world.tga("verify", "--all").returncode == 0


def test_what_the_old_sealing_key_sealed_still_opens_after_a_rotation(world: World) -> None:
    card = ("call", "bank", "pay_card", "-a", 'card="4242424242424242"', "-a", "amount=2", "-k", "seal-1")
    first = world.tga(*card)
    assert world.tga("keys", "rotate", "sealing").returncode == 0
    world.stop()
    world.start()
    assert (world.tga(*card).stdout, world.executions("seal-1")) == (first.stdout, 1)
    assert world.tga("call", "bank", "pay_card", "-a", "card=x", "-a", "amount=2", "-k", "seal-1").returncode == 1
    assert findings(world)["keys"]["ok"] is True


def test_init_writes_a_start_and_replaces_nothing_unasked(world: World, tmp_path: Path) -> None:
    home = str(tmp_path / "new")
    assert world.tga("init", TGA_HOME=home).returncode == 0
    assert world.tga("policy", "check", f"{home}/policy.cedar").returncode == 0
    again = world.tga("init", TGA_HOME=home)
    assert (again.returncode, "--force" in again.stderr) == (2, True)
    assert world.tga("init", "--force", TGA_HOME=home).returncode == 0


def test_without_a_gateway_the_store_can_still_be_looked_after(world: World) -> None:
    """The last one of this module: the gateway is stopped for it."""
    trace_id = trace_of(world.tga("call", "bank", "charge", "-a", "amount=3", "-k", "night-1"))
    world.stop()
    for command in (
        ("recover", "--all"),
        ("recover", trace_id),
        ("verify", "--all"),
        ("db", "status"),
        ("db", "migrate"),
        ("keys", "list"),
        ("tenants", "list"),
        ("erase", trace_id, "-r", "at night", "--yes"),
        ("policy", "explain", "bank", "charge", "-a", "amount=1"),
    ):
        told = world.tga(*command)
        assert told.returncode == 0, (command, told)
    doctor = world.tga("doctor")
    assert (doctor.returncode, "wrong  gateway at" in doctor.stdout) == (1, True)
    assert world.tga("traces").returncode == 3
