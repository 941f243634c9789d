"""An old backup is all there is: it is restored, the log refuses it, and goes on in a new epoch that everyone sees."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.clock import SystemClock
from app.core.errors import TgaError
from app.core.merkle import Hash
from app.core.note import TreeHead
from app.domain.log.epochs import base_of, epoch_of, next_origin, verify_epochs, verify_former
from app.domain.system.log import SystemLog
from app.keys.log_signer import LogSigner, load_memory
from app.postgres.epochs import EpochBeginning
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import Executor
from app.postgres.sequencer import TreeSession
from app.postgres.sessions import GATEWAY_ROLE, Sessions
from app.postgres.system import PostgresSystemRows
from tests.cli.test_beginning_anew import OwnWorld
from tests.cli.world import World, wait_for
from tests.conftest import make_home

ROOT = Path(__file__).parents[2]
WHY = "the disk was lost on Tuesday; [Monday's] backup is all there is"


class Lost:
    """A gateway that made calls before and after its backup, and whose database is that backup again."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.keys, self.backup, self.kept = world.home / "keys", folder / "monday.backup", folder / "kept.head"
        self.key = folder / "log.pub"
        world.start()
        self.call("monday-1")
        assert world.tga("db", "backup", str(self.backup)).returncode == 0
        self.early = (self.keys / "log.head").read_bytes()
        self.call("tuesday-1")
        self.call("tuesday-2")
        shutil.copy(self.keys / "log.head", self.kept)
        self.key.write_text(LogSigner.open(self.keys, environment={}).verifier_key.to_text())
        shutil.copytree(self.keys, folder / "standby")
        world.stop()
        told = world.tga("db", "restore", str(self.backup), "--yes")
        assert (told.returncode, "Restored and verified" in told.stdout) == (0, True), told.stderr
        assert "tell them before a gateway starts" in told.stdout

    def call(self, key: str) -> None:
        """Made, and under a signed head when this returns."""
        before = load_memory(self.keys)
        told = self.world.tga("call", "bank", "charge", "-a", "amount=1", "-k", key)
        assert told.returncode == 0, told.stderr
        wait_for(lambda: load_memory(self.keys) != before)
        wait_for(lambda: self.world.tga("receipt", told.stderr.split("trace ")[1].split()[0]).returncode == 0)

    def ready(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(
            subprocess.run(["curl", "-s", f"{self.world.url}/readyz"], capture_output=True, check=True).stdout
        )
        return found

    def alone(self, bundle: Path, *heads: Path) -> dict[str, Any]:
        """What the verifier says that shares no line with ours."""
        command = [
            sys.executable,
            str(ROOT / "tools" / "verify.py"),
            str(bundle),
            str(self.key),
            *map(str, heads),
            "--json",
        ]
        said: dict[str, Any] = json.loads(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
        return said


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[Lost]:
    home = make_home()
    world = OwnWorld(home)
    try:
        yield Lost(world, tmp_path)
    finally:
        world.close()
        shutil.rmtree(home)


@pytest.mark.one_in(2)
def test_after_an_old_backup_the_log_goes_on_in_a_new_epoch_and_every_auditor_sees_the_break(lost: Lost) -> None:
    world = lost.world
    world.start()
    wait_for(lambda: lost.ready().get("code") == "LOG_FORKED")
    assert "tga log new-epoch" in lost.ready()["remedy"]
    assert "warn   log's memory: log.head is of" in world.tga("doctor").stdout
    for arguments, code in (((), 2), (("-r", WHY), 2), (("-r", " ", "--yes"), 2)):
        assert world.tga("log", "new-epoch", *arguments).returncode == code
    assert lost.ready()["code"] == "LOG_FORKED"
    former = load_memory(lost.keys)
    assert former is not None

    told = world.tga("log", "new-epoch", "-r", WHY, "--yes")
    assert (told.returncode, "Epoch 2 has begun" in told.stdout) == (0, True), told.stderr
    origin = f"{former.head.origin}/epoch-2"
    assert origin in told.stdout
    wait_for(lambda: lost.ready() == {"status": "ok", "log": "ok"})  # the gateway goes on by itself
    lost.call("wednesday-1")
    told = world.tga("log", "new-epoch", "-r", WHY, "--yes")
    assert (told.returncode, "a gateway sequences the log" in told.stderr) == (1, True)

    # Stored: the entry says what the former head was; heads that were kept from before are explained by it.
    told = world.tga("verify", "--all", "--head", str(lost.kept), "--key", str(lost.key))
    assert (told.returncode, "The log began anew: epoch 2" in told.stdout) == (0, True), told.stdout
    assert f"Because (cli): {WHY}" in told.stdout
    # Exported, whole and for one tenant: both verifiers, by the key that the auditor has had all along.
    world.new_key("eve", "agent", tenant="acme") if world.tga("tenants", "create", "acme").returncode else None
    for options in ((), ("--tenant", "acme"), ("--tenant", "default")):
        bundle = lost.folder / f"bundle{'-'.join(options)}"
        assert world.tga("export", str(bundle), *options).returncode == 0
        told = world.tga("verify", "--file", str(bundle), "--key", str(lost.key), "--json")
        report = json.loads(told.stdout)
        assert (told.returncode, report["sound"]) == (0, True), told.stdout
        (epoch,) = report["epochs"]
        assert (epoch["origin"], epoch["rationale"], epoch["former"]["note"]) == (origin, WHY, former.note)
        assert (epoch["former"]["size"], epoch["kept_size"] + epoch["leaves_lost"]) == (former.head.size,) * 2
        said = lost.alone(bundle)
        assert (said["sound"], said["epochs"]) == (True, [epoch])
    bundle = lost.folder / "bundle"
    told = world.tga("verify", "--file", str(bundle), "--key", str(lost.key), "--head", str(lost.kept))
    assert told.returncode == 0, told.stdout
    assert "they were lost before epoch 2 of the log, as its entry says" in told.stdout
    assert lost.alone(bundle, lost.kept)["sound"] is True
    world.stop()

    # Another host, whose memory is of the former epoch, follows; one that kept a head beyond it is not put off.
    world.start(TGA_KEYS=str(lost.folder / "standby"))
    wait_for(lambda: lost.ready() == {"status": "ok", "log": "ok"})
    standby = load_memory(lost.folder / "standby")
    assert standby is not None
    assert standby.head.origin == origin
    world.stop()
    signer = LogSigner.open(lost.folder / "standby", environment={})
    beyond = TreeHead(former.head.origin, former.head.size + 1, former.head.root)
    note = _signed_as(signer, beyond)
    (lost.folder / "beyond.head").write_text(note)
    told = world.tga(
        "verify", "--file", str(bundle), "--key", str(lost.key), "--head", str(lost.folder / "beyond.head")
    )
    assert (told.returncode, "LOG_FORKED" in told.stdout) == (1, True)
    assert [one["code"] for one in lost.alone(bundle, lost.folder / "beyond.head")["findings"]] == ["LOG_FORKED"]
    told = world.tga("verify", "--all", "--head", str(lost.folder / "beyond.head"), "--key", str(lost.key))
    assert told.returncode == 1


def _signed_as(signer: LogSigner, head: TreeHead) -> str:
    from app.core.note import VerifierKey, sign_note

    return sign_note(head.to_text(), VerifierKey(head.origin, signer.public_key), signer._key.sign)


@pytest.mark.one_in(2)
def test_an_epoch_that_no_signed_head_covers_explains_nothing_and_is_finished_by_doing_it_again(lost: Lost) -> None:
    """A crash between saying it and signing; or somebody with the database, who would like to explain what is gone."""
    world = lost.world
    world._postgres.start()

    async def say_only() -> None:
        url = world._postgres.url(GATEWAY_ROLE, "tga")
        async with (
            await Sessions.open(url, sessions_max=2) as sessions,
            await Executor.open(url) as executor,
            await TreeSession.open(url) as session,
        ):
            clock, ledger = SystemClock(), PostgresLedger(sessions)
            system = SystemLog(PostgresSystemRows(sessions), ledger, clock, lambda: executor.executor_id)
            beginning = EpochBeginning(session, LogSigner.open(lost.keys, environment={}), system, clock)
            await beginning.lock()
            found = await beginning.find_break()
            assert found is not None

            async def crash(*_: object) -> None:
                raise RuntimeError("the machine stops")

            beginning._term.begin_epoch = crash  # type: ignore[method-assign,assignment]
            with pytest.raises(RuntimeError):
                await beginning.begin(found, rationale="said before", by="cli")

    asyncio.run(say_only())
    told = world.tga("verify", "--all", "--head", str(lost.kept), "--key", str(lost.key))
    assert (told.returncode, "old backup" in told.stdout, "began anew" in told.stdout) == (1, True, False), told.stdout
    told = world.tga("log", "new-epoch", "-r", "said again", "--yes")
    assert told.returncode == 0, told.stderr
    told = world.tga("verify", "--all", "--head", str(lost.kept), "--key", str(lost.key))
    assert (told.returncode, told.stdout.count("began anew")) == (0, 1)
    assert "said before" in told.stdout
    told = world.tga("log", "new-epoch", "-r", "once more", "--yes")
    assert (told.returncode, "The log is not forked" in told.stdout) == (1, True)
    world._postgres.stop()


@pytest.mark.one_in(2)
def test_db_restore_asks_and_refuses_a_cut_backup_a_used_database_and_an_old_log_head(lost: Lost) -> None:
    world, backup = lost.world, str(lost.backup)
    assert world.tga("log", "new-epoch", "-r", WHY, "--yes").returncode == 0
    told = world.tga("db", "restore", backup)
    assert (told.returncode, "CONFIRMATION_NEEDED" in told.stderr) == (2, True)
    cut = lost.folder / "cut.backup"
    cut.write_bytes(lost.backup.read_bytes()[:-5000])
    told = world.tga("db", "restore", str(cut), "--yes")
    assert (told.returncode, "BACKUP_FAILED: pg_restore ended" in told.stderr) == (1, True)
    assert world.tga("db", "backup", backup).returncode == 1
    newest = (lost.keys / "log.head").read_bytes()
    for old in (lost.early, lost.kept.read_bytes()):  # of the former log, before and after the backup
        (lost.keys / "log.head").write_bytes(old)
        told = world.tga("db", "restore", backup, "--yes")
        assert (told.returncode, "An old log.head was put back" in told.stderr) == (1, True), told.stdout
    (lost.keys / "log.head").write_bytes(newest)
    world.start()
    told = world.tga("db", "restore", backup, "--yes")
    assert (told.returncode, "sessions use the database" in told.stderr) == (1, True)
    world.stop()
    before = world.tga("verify", "--all").stdout
    assert "began anew" in before
    assert (lost.keys / "log.head").read_bytes() != lost.early


def test_names_of_epochs() -> None:
    assert next_origin("example.org/log") == "example.org/log/epoch-2"
    assert next_origin("example.org/log/epoch-9") == "example.org/log/epoch-10"
    assert (base_of("a/epoch-2"), epoch_of("a/epoch-2"), epoch_of("a/epoch-02"), base_of("/epoch-2")) == (
        "a",
        2,
        1,
        "/epoch-2",
    )


def test_a_head_of_a_later_epoch_without_its_entry_is_found() -> None:
    assert [error.code for error in verify_epochs("a/epoch-2", ())] == ["BUNDLE_INVALID"]
    assert list(verify_epochs("a", ())) == []
    kept = TreeHead("a", 3, Hash(bytes(32)))
    found: list[TgaError] = list(verify_former(kept, (), root=None))
    assert [error.code for error in found] == ["LOG_FORKED"]


@pytest.mark.one_in(2)
def test_the_document_of_backup_and_restore_works_as_printed(lost: Lost) -> None:
    """Every block of the section, embedded and on a server of one's own, by sh."""
    world = lost.world
    section = (ROOT / "docs" / "operations.md").read_text("utf-8").split("## Backup and restore")[1].split("\n## ")[0]
    backup, restore, named, epoch = re.findall(r"```sh\n(.*?)```", section, re.DOTALL)
    folder = lost.folder / "as-printed"
    folder.mkdir()
    shutil.copy(lost.backup, folder / "monday.backup")
    _run_as_printed(world, folder, restore)
    _run_as_printed(world, folder, epoch)
    (folder / "monday.backup").unlink()
    _run_as_printed(world, folder, backup)
    world._postgres.start()
    host = str(world._postgres.socket_dir).replace("/", "%2F")
    _run_as_printed(world, folder, named.replace("@db.example.org/", f"@{host}:5432/"))
    world._postgres.stop()


def _run_as_printed(world: World, folder: Path, block: str) -> None:
    tga = Path(sys.executable).with_name("tga")
    path = f"{tga.parent}:{world.environment()['PATH']}"
    done = subprocess.run(
        ["sh", "-e", "-c", block],
        cwd=folder,
        env=world.environment(PATH=path),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for shown in re.findall(r"^# → (.*)$", block, re.MULTILINE):
        assert shown in done.stdout
