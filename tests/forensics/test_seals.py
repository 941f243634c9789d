"""What is sealed beside a trace stands outside the ledger; that it was changed or removed is found all the same."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import ArgumentsInvalid, RecoveryFailed, SecretMissing, TgaError
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import TraceId
from app.domain.tga.runtime import CheckedCall
from app.domain.tga.secrets import find_redactions
from app.keys.keyring import Keyring, Unsealer
from app.postgres.database import Database
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.vault import PostgresVault
from tests.cli.test_commands import tga
from tests.conftest import Admin
from tests.runtime.scripted import KEYS, PRINCIPAL, TIMED_OUT, WRITE, Scripted, call, new_key, open_scripted
from tests.runtime.supervised import runtime_of

SECRET = replace(WRITE, secret_arguments=("/card", "/nested/0/pin"))
ARGUMENTS: dict[str, Any] = {"amount": 1, "card": "4111", "nested": [{"pin": "7391"}]}
MARKER: dict[str, Any] = {"$redacted": {"commitment": "ab" * 32}}


async def find(sessions: Sessions, unseals: Unsealer | None = KEYS) -> list[TgaError]:
    async with open_reader(sessions) as reader:
        return [error async for error in verify_ledger(reader, stream_checks(unseals=unseals), Report())]


@asynccontextmanager
async def two_calls(url: str, *, finished: bool = True) -> AsyncIterator[tuple[Scripted, list[str]]]:
    async with open_scripted(url, tool=SECRET) as scripted:
        scripted.supervisor.answer = "allow" if finished else "ask"
        made = [
            await scripted.runtime.call(CheckedCall("crm", "create", ARGUMENTS, new_key(), PRINCIPAL)) for _ in range(2)
        ]
        assert {answer.state for answer in made} == {"COMPLETED" if finished else "PENDING"}
        yield scripted, [f"trace:{answer.trace_id}" for answer in made]


# On the first of two traces: what is done to the table, and what is found of it there.
DAMAGES: dict[str, tuple[str, type[TgaError], str]] = {
    "deleted": ("DELETE FROM tga.sealed WHERE stream = $1", SecretMissing, "the sealed salt is missing"),
    "ciphertext changed": (
        "UPDATE tga.sealed SET sealed_salt = set_byte(sealed_salt, 30, 255 - get_byte(sealed_salt, 30))"
        " WHERE stream = $1",
        SecretMissing,
        "the sealed salt cannot be used: the sealed value was changed",
    ),
    "key id changed": (
        "UPDATE tga.sealed SET sealed_salt = set_byte(sealed_salt, 2, 255 - get_byte(sealed_salt, 2))"
        " WHERE stream = $1",
        SecretMissing,
        "the sealed salt cannot be used: the key that sealed the value is not in the folder",
    ),
    "cut": (
        "UPDATE tga.sealed SET sealed_salt = substr(sealed_salt, 1, 20) WHERE stream = $1",
        SecretMissing,
        "the sealed salt cannot be used: not a sealed value",
    ),
    "another trace's": (
        "UPDATE tga.sealed SET sealed_salt = (SELECT sealed_salt FROM tga.sealed WHERE stream <> $1) WHERE stream = $1",
        SecretMissing,
        "the sealed salt cannot be used: the sealed value was changed, or was sealed for another place",
    ),
}


@pytest.mark.parametrize("finished", [True, False], ids=["finished", "waiting"])
@pytest.mark.parametrize("damage", DAMAGES)
async def test_a_salt_that_was_changed_or_deleted_is_found(
    damage: str, *, finished: bool, database: Database, admin: Admin
) -> None:
    statement, code, what = DAMAGES[damage]
    async with two_calls(database.gateway_url, finished=finished) as (scripted, (first, _)):
        assert await find(scripted.sessions) == []
        await admin.execute(statement, first)
        (found,) = await find(scripted.sessions)
        assert (type(found), found.stream) == (code, first)
        assert found.what.startswith(what)
        assert "4111" not in str(found)


async def test_values_that_are_missing_changed_or_left_are_found(database: Database, admin: Admin) -> None:
    async with two_calls(database.gateway_url, finished=False) as (scripted, (first, second)):
        left = await admin.fetchval("SELECT sealed_values FROM tga.sealed WHERE stream = $1", first)
        await admin.execute("UPDATE tga.sealed SET sealed_values = NULL WHERE stream = $1", first)
        await admin.execute("UPDATE tga.sealed SET sealed_values = sealed_salt WHERE stream = $1", second)
        missing, changed = await find(scripted.sessions)
        assert (missing.stream, missing.what) == (first, "the sealed values of an unfinished call are missing")
        assert (changed.stream, changed.what.partition(":")[0]) == (second, "the sealed values cannot be used")
    async with two_calls(database.gateway_url) as (scripted, (third, _)):
        await admin.execute("UPDATE tga.sealed SET sealed_values = $2 WHERE stream = $1", third, left)
        found = [error for error in await find(scripted.sessions) if error.stream == third]
        assert [type(error) for error in found] == [RecoveryFailed, SecretMissing]
        assert found[0].what == "sealed values stand that were to be forgotten with the end of the call"


async def test_other_values_of_the_same_trace_are_found(database: Database, admin: Admin) -> None:
    """Sealed by one who has the key: the record still commits to the true ones."""
    async with two_calls(database.gateway_url, finished=False) as (scripted, (first, _)):
        vault, trace_id = PostgresVault(scripted.sessions, KEYS), TraceId(first.removeprefix("trace:"))
        salt, values = await vault.load_secrets(trace_id)
        forged = vault.seal(trace_id, salt, {**values, "/card": "4222"})
        await admin.execute("UPDATE tga.sealed SET sealed_values = $2 WHERE stream = $1", first, forged.values)
        (found,) = await find(scripted.sessions)
        assert "is not the one that the record commits to" in found.what
        other = vault.seal(trace_id, replace(salt, pointers=("/card",)), values)
        await admin.execute("UPDATE tga.sealed SET sealed_salt = $2 WHERE stream = $1", first, other.salt)
        (found,) = await find(scripted.sessions)
        assert found.what == "the sealed salt cannot be used: the sealed salt is of other arguments"


async def test_secrets_of_a_trace_that_has_none_are_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await admin.execute("INSERT INTO tga.sealed VALUES ($1, 'salt', NULL)", f"trace:{answer.trace_id}")
        (found,) = await find(scripted.sessions)
        assert found.what == "secrets are sealed for a trace that has none"


@pytest.mark.parametrize("answer", ["allow", "ask", "deny"])
async def test_whatever_becomes_of_a_call_nothing_false_is_said(answer: Any, database: Database) -> None:
    tool = replace(SECRET, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, TIMED_OUT, tool=tool) as scripted:
        scripted.supervisor.answer = answer
        for arguments in (ARGUMENTS, {"amount": 1, "card": "1"}, {"amount": 1}):
            await scripted.runtime.call(CheckedCall("crm", "create", arguments, new_key(), PRINCIPAL))
        for unseals in (KEYS, None):
            assert await find(scripted.sessions, unseals) == []


async def test_without_the_sealing_key_a_missing_salt_is_found_and_the_rest_is_said_not_to_be_known(
    database: Database, admin: Admin, tmp_path: Path
) -> None:
    keys = Keyring.open(tmp_path / "keys", {})
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        runtime = runtime_of(scripted, vault=PostgresVault(scripted.sessions, keys))
        streams = []
        for _ in range(2):
            made = await runtime.call(CheckedCall("crm", "create", ARGUMENTS, new_key(), PRINCIPAL))
            streams.append(f"trace:{made.trace_id}")
    given = {"TGA_HOME": str(tmp_path), "TGA_KEYS": str(tmp_path / "keys")}
    assert tga("verify", "--all", url=database.admin_url, **given).returncode == 0
    await admin.execute("UPDATE tga.sealed SET sealed_salt = sealed_salt || 'x' WHERE stream = $1", streams[0])
    told = tga("verify", "--all", url=database.admin_url, **given)
    assert (told.returncode, f"{streams[0]}  " in told.stdout, "SECRET_MISSING" in told.stdout) == (1, True, True)
    without = {**given, "TGA_KEYS": str(tmp_path / "none")}
    told = tga("verify", "--all", url=database.admin_url, **without)
    assert (told.returncode, "2 sealed salts could not be opened" in told.stdout) == (0, True)
    assert not (tmp_path / "none").exists(), "and no key is made"
    await admin.execute("DELETE FROM tga.sealed WHERE stream = $1", streams[1])
    assert tga("verify", streams[1], url=database.admin_url, **without).returncode == 1


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        ({"amount": 1, "name": MARKER}, "/name"),
        ({"amount": 1, "name": [{"a/b~": MARKER}]}, "/name/0/a~1b~0"),
    ],
)
async def test_a_caller_cannot_make_a_record_that_looks_redacted(
    arguments: dict[str, Any], place: str, database: Database, admin: Admin
) -> None:
    assert find_redactions(arguments) == [place]
    assert find_redactions(MARKER) == [""]
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(ArgumentsInvalid) as refused:
            await scripted.runtime.call(CheckedCall("crm", "create", arguments, new_key(), PRINCIPAL))
        assert refused.value.found == place
        assert await admin.fetchval("SELECT count(*) FROM tga.entries WHERE stream LIKE 'trace:%'") == 0


async def test_what_only_resembles_a_commitment_is_an_argument_like_any_other(database: Database) -> None:
    resembling = [
        '{"$redacted":{"commitment":"' + "ab" * 32 + '"}}',
        {"$redacted": {"commitment": "short"}},
        {"$redacted": {"commitment": "ab" * 32, "x": 1}},
        {"$redacted": "ab" * 32},
    ]
    async with open_scripted(database.gateway_url) as scripted:
        arguments = {"amount": 1, "name": resembling}
        made = await scripted.runtime.call(CheckedCall("crm", "create", arguments, new_key(), PRINCIPAL))
        assert made.state == "COMPLETED"
        assert await find(scripted.sessions) == []
    async with open_scripted(database.gateway_url, tool=replace(WRITE, secret_arguments=("/card",))) as scripted:
        sealed_marker = {"amount": 1, "card": MARKER}  # as a secret it is a value like any other
        made = await scripted.runtime.call(CheckedCall("crm", "create", sealed_marker, new_key(), PRINCIPAL))
        assert scripted.connector.sent_arguments == [sealed_marker]
        assert await find(scripted.sessions) == []
