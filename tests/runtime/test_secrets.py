"""Secret arguments: sent as they are, recorded as commitments, sealed in between, and gone when the call is over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import ApprovalExpired, KeyReused, SecretMissing, TraceNotHeld
from app.domain.tga.documents import TraceId
from app.domain.tga.ports import Answered, Dispatched
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tga.transitions import TRACE
from app.keys.keyring import Keyring
from app.postgres.database import Database
from app.postgres.vault import PostgresVault
from tests.conftest import Admin
from tests.invariants.plans import contents, verify_all
from tests.runtime.scripted import KEYS, PRINCIPAL, SUCCESS, TIMED_OUT, WRITE, Scripted, new_key, open_scripted
from tests.runtime.supervised import ADA, OTHER_KEYS, Skewed, decide, find, holding, runtime_of

CARD, PIN = "4111-1111-1111-1111", "pin-7391-q"
SECRET = replace(WRITE, secret_arguments=("/card", "/nested/0/pin"))
ARGUMENTS: dict[str, Any] = {"amount": 1, "card": CARD, "nested": [{"pin": PIN, "kept": "kept"}]}


def secret_call(key: str, **changes: Any) -> CheckedCall:
    return CheckedCall("crm", "create", {**ARGUMENTS, **changes}, key, PRINCIPAL)


async def ask(scripted: Scripted, *, runtime: TgaRuntime | None = None, key: str | None = None) -> TraceId:
    scripted.supervisor.answer = "ask"
    answer = await (runtime or scripted.runtime).call(secret_call(key or new_key()))
    assert (answer.state, answer.waiting) == ("PENDING", "supervisor")
    return answer.trace_id


async def sealed(admin: Admin) -> list[tuple[bool, bool]]:
    """For each trace with secrets: whether its salt is there, and its values."""
    rows = await admin.fetch("SELECT sealed_salt, sealed_values FROM tga.sealed ORDER BY stream")
    return [(row["sealed_salt"] is not None, row["sealed_values"] is not None) for row in rows]


async def assert_no_secret_stored(admin: Admin) -> None:
    for secret in (CARD, PIN):
        assert await holding(admin, secret) == {}
    assert "payloads" in await holding(admin, "kept")  # what is looked for would be found


async def test_the_true_call_is_sent_and_no_table_holds_the_secret_at_any_time(
    database: Database, admin: Admin
) -> None:
    async def look(_: object) -> Dispatched:
        await assert_no_secret_stored(admin)
        assert await sealed(admin) == [(True, True)]
        return SUCCESS

    async with open_scripted(database.gateway_url, look, tool=SECRET) as scripted:
        answer = await scripted.runtime.call(secret_call(new_key()))
        assert answer.state == "COMPLETED"
        assert scripted.connector.sent_arguments == [ARGUMENTS]
        assert scripted.connector.sent[0].arguments["card"].keys() == {"$redacted"}
        assert scripted.connector.sent[0].arguments["nested"][0]["kept"] == "kept"
        await assert_no_secret_stored(admin)
        assert await sealed(admin) == [(True, False)]
        await verify_all(scripted.sessions)


async def test_after_an_approval_the_true_call_is_sent_by_another_gateway(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as first:
        asked = await ask(first)
        assert await sealed(admin) == [(True, True)]
        await assert_no_secret_stored(admin)
    async with open_scripted(database.gateway_url, tool=SECRET) as second:
        assert (await decide(second, asked)).state == "COMPLETED"
        assert second.connector.sent_arguments == [ARGUMENTS]
        await assert_no_secret_stored(admin)
        assert await sealed(admin) == [(True, False)]
        await verify_all(second.sessions)


async def test_after_a_crash_the_true_call_is_sent_again(database: Database, admin: Admin) -> None:
    class Died(BaseException):
        pass

    async def die(_: object) -> Dispatched:
        raise Died

    async with open_scripted(database.gateway_url, die, tool=SECRET) as first:
        with pytest.raises(Died):
            await first.runtime.call(secret_call(new_key()))
        assert await sealed(admin) == [(True, True)]
    async with open_scripted(database.gateway_url, tool=SECRET) as second:
        (recovered,) = [one async for one in second.runtime.recover_all()]
        assert recovered.answer is not None
        assert recovered.answer.state == "COMPLETED"
        assert second.connector.sent_arguments == [ARGUMENTS]
        await assert_no_secret_stored(admin)
        assert await sealed(admin) == [(True, False)]


@pytest.mark.parametrize("decided", [False, True], ids=["at once", "after an approval"])
async def test_every_attempt_sends_the_true_arguments(*, decided: bool, database: Database) -> None:
    async with open_scripted(database.gateway_url, TIMED_OUT, TIMED_OUT, SUCCESS, tool=SECRET) as scripted:
        if decided:
            await decide(scripted, await ask(scripted))
        else:
            await scripted.runtime.call(secret_call(new_key()))
        assert scripted.connector.sent_arguments == [ARGUMENTS] * 3


async def _completed(scripted: Scripted, asked: TraceId) -> None:
    await decide(scripted, asked)


async def _failed(scripted: Scripted, asked: TraceId) -> None:
    scripted.connector.answers = [Answered("FAILURE", None, "no", "no")]
    await decide(scripted, asked)


async def _unknown(scripted: Scripted, asked: TraceId) -> None:
    scripted.connector.answers = [TIMED_OUT]
    await decide(scripted, asked)


async def _denied(scripted: Scripted, asked: TraceId) -> None:
    await decide(scripted, asked, "DENY")


async def _withdrawn(scripted: Scripted, asked: TraceId) -> None:
    await scripted.runtime.withdraw(asked, PRINCIPAL)


@pytest.mark.parametrize("end", [_completed, _failed, _unknown, _denied, _withdrawn], ids=lambda one: one.__name__)
async def test_when_the_call_is_over_its_values_are_gone_and_the_salt_stays(
    end: Any, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        asked, waiting = await ask(scripted), await ask(scripted)
        await end(scripted, asked)
        rows = await admin.fetch("SELECT stream, sealed_salt, sealed_values FROM tga.sealed")
        found = {row["stream"]: (row["sealed_salt"] is not None, row["sealed_values"] is not None) for row in rows}
        assert found == {f"trace:{asked}": (True, False), f"trace:{waiting}": (True, True)}
        with pytest.raises(SecretMissing):
            await scripted.system.vault.load_secrets(asked)
        await verify_all(scripted.sessions)


@pytest.mark.parametrize("by", ["sweep", "late approval"])
async def test_when_the_time_is_over_the_values_are_gone(by: str, database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        asked = await ask(scripted, runtime=runtime_of(scripted, clock=Skewed(-2 * WRITE.approval_timeout_ms)))
        if by == "sweep":
            assert await scripted.runtime.expire_all() == 1
        else:
            with pytest.raises(ApprovalExpired):
                await decide(scripted, asked)
        assert await sealed(admin) == [(True, False)]
        assert scripted.connector.sent == []


async def test_a_call_that_is_held_keeps_its_values_until_an_operator_has_spoken(
    database: Database, admin: Admin
) -> None:
    tool = replace(SECRET, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, TIMED_OUT, SUCCESS, tool=tool) as scripted:
        held = await scripted.runtime.call(secret_call(new_key()))
        assert (held.waiting, await sealed(admin)) == ("operator", [(True, True)])
        digest = (await scripted.traces.load_trace(held.trace_id)).state.tool_call_digest
        assert digest is not None
        said: Any = {"tool_call_digest": digest, "resolved_by": "olga", "rationale": ""}
        await runtime_of(scripted).resolve(held.trace_id, action="redispatch", **said)
        assert scripted.connector.sent_arguments == [ARGUMENTS] * 2
        assert await sealed(admin) == [(True, False)]


async def test_a_call_that_is_denied_at_once_leaves_nothing_sealed(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        scripted.supervisor.answer = "deny"
        assert (await scripted.runtime.call(secret_call(new_key()))).state == "DENIED"
        assert await sealed(admin) == []
        await assert_no_secret_stored(admin)
        await verify_all(scripted.sessions)


async def test_a_call_without_the_secret_argument_has_nothing_sealed(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        await scripted.runtime.call(CheckedCall("crm", "create", {"amount": 1}, new_key(), PRINCIPAL))
        assert await sealed(admin) == []
        assert scripted.connector.sent_arguments == [{"amount": 1}]


# Repeats


@pytest.mark.parametrize("state", ["PENDING", "COMPLETED"])
async def test_a_repeat_with_the_same_secret_is_a_repeat_and_with_another_is_none(
    state: str, database: Database, admin: Admin
) -> None:
    key = new_key()
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        asked = await ask(scripted, key=key)
        if state == "COMPLETED":
            await decide(scripted, asked)
        before = await contents(admin)
        repeat = await scripted.runtime.call(secret_call(key))
        assert (repeat.trace_id, repeat.state, repeat.replayed) == (asked, state, True)
        changes: list[dict[str, Any]] = [
            {"card": "4222"},
            {"nested": [{"pin": "0", "kept": "kept"}]},
            {"amount": 2},
            {"card": {"$redacted": {"commitment": "0" * 64}}},
        ]
        for change in changes:
            with pytest.raises(KeyReused):
                await scripted.runtime.call(secret_call(key, **change))
        with pytest.raises(KeyReused):
            await scripted.runtime.call(CheckedCall("crm", "create", {"amount": 1}, key, PRINCIPAL))
        stored = await scripted.traces.load_trace(asked)
        request: Any = stored.records[0].artifact
        with pytest.raises(KeyReused):  # the record itself is no way to repeat a call without knowing its secret
            await scripted.runtime.call(CheckedCall("crm", "create", request.arguments, key, PRINCIPAL))
        assert await contents(admin) == before
        assert len(scripted.connector.sent) == (state == "COMPLETED")


async def test_a_repeat_is_recognised_by_the_places_that_were_secret_then(database: Database) -> None:
    key = new_key()
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        first = await scripted.runtime.call(secret_call(key))
        # What is secret was configured otherwise since; the definition's digest is pinned, so it stays here.
        scripted.tools.tools["crm", "create"] = replace(SECRET, secret_arguments=())
        assert (await scripted.runtime.call(secret_call(key))).trace_id == first.trace_id
        scripted.tools.tools["crm", "create"] = replace(SECRET, secret_arguments=("/amount",))
        assert (await scripted.runtime.call(secret_call(key))).trace_id == first.trace_id
        assert len(scripted.connector.sent) == 1


async def test_equal_secrets_of_two_calls_look_different(database: Database) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        for _ in range(2):
            await scripted.runtime.call(secret_call(new_key()))
        commitments = {str(sent.arguments["card"]) for sent in scripted.connector.sent}
        assert len(commitments) == 2


# The sealing key


async def test_without_the_sealing_key_nothing_is_sent_and_with_it_the_call_goes_on(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        asked = await ask(scripted)
        without = runtime_of(scripted, vault=PostgresVault(scripted.sessions, OTHER_KEYS))
        before = await admin.fetch("SELECT * FROM tga.entries")
        with pytest.raises(SecretMissing):
            await decide(scripted, asked, runtime=without)
        assert scripted.connector.sent == []
        assert await sealed(admin) == [(True, True)]
        assert await admin.fetch("SELECT * FROM tga.entries") == before
        assert (await decide(scripted, asked)).state == "COMPLETED"
        assert scripted.connector.sent_arguments == [ARGUMENTS]
        await verify_all(scripted.sessions)


async def test_recovering_without_the_sealing_key_uses_up_no_attempts(database: Database, admin: Admin) -> None:
    await left_executing(database.gateway_url)
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        without = runtime_of(scripted, vault=PostgresVault(scripted.sessions, OTHER_KEYS))
        for _ in range(SECRET.max_attempts + 2):
            found = [one async for one in without.recover_all()]
            assert [type(one.error) for one in found] == [SecretMissing]
        assert scripted.connector.sent == []
        assert await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts") == 0
        answers = [one.answer async for one in scripted.runtime.recover_all()]
        assert [answer is not None and answer.state for answer in answers] == ["COMPLETED"]
        assert scripted.connector.sent_arguments == [ARGUMENTS]
        await verify_all(scripted.sessions)


async def left_executing(url: str) -> TraceId:
    class Died(BaseException):
        pass

    async def die(_: object) -> Dispatched:
        raise Died

    async with open_scripted(url, die, tool=SECRET) as first:
        with pytest.raises(Died):
            await first.runtime.call(secret_call(new_key()))
        (stream,) = await first.traces.list_recoverable(TRACE.name, after=None, limit=10)
        return TraceId(TRACE.identity_of(stream))


@pytest.mark.parametrize("gone", ["key", "values", "tool"])
@pytest.mark.parametrize("action", ["succeeded", "failed"])
async def test_a_call_that_can_never_be_sent_again_is_ended_by_an_operator(
    action: Any, gone: str, database: Database, admin: Admin
) -> None:
    trace_id = await left_executing(database.gateway_url)
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        runtime = scripted.runtime
        state = (await scripted.traces.load_trace(trace_id)).state
        said: Any = {"tool_call_digest": state.tool_call_digest, "resolved_by": "olga", "rationale": "asked the bank"}
        with pytest.raises(TraceNotHeld):  # all is there: it is recovered, not resolved
            await runtime.resolve(trace_id, action=action, **said)
        if gone == "key":
            runtime = runtime_of(scripted, vault=PostgresVault(scripted.sessions, OTHER_KEYS))
        elif gone == "values":
            await admin.execute("DELETE FROM tga.sealed")
        else:
            scripted.tools.tools.clear()
        with pytest.raises(TraceNotHeld):
            await runtime.resolve(trace_id, action=action, **{**said, "tool_call_digest": "0" * 64})
        with pytest.raises(TraceNotHeld):  # what cannot be sent is not sent again by order
            await runtime.resolve(trace_id, action="redispatch", **said)
        answer = await runtime.resolve(trace_id, action=action, **said)
        assert answer.state == ("COMPLETED" if action == "succeeded" else "FAILED")
        assert answer.effect is not None
        assert answer.effect.basis == "resolution"
        assert scripted.connector.sent == []
        assert [one async for one in runtime.recover_all()] == []
        found = [error.what for error in await find(scripted.sessions)]
        assert found == (["the sealed salt is missing"] if gone == "values" else [])


async def test_a_repeat_without_the_sealing_key_executes_nothing(database: Database) -> None:
    key = new_key()
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        await scripted.runtime.call(secret_call(key))
        without = runtime_of(scripted, vault=PostgresVault(scripted.sessions, OTHER_KEYS))
        with pytest.raises(SecretMissing):
            await without.call(secret_call(key))
        assert len(scripted.connector.sent) == 1


@pytest.mark.parametrize("column", ["sealed_values", "sealed_salt"])
async def test_what_was_sealed_for_another_trace_or_changed_is_not_sent(
    column: str, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        first, second = await ask(scripted), await ask(scripted)
        await admin.execute(
            f"UPDATE tga.sealed SET {column} = (SELECT {column} FROM tga.sealed WHERE stream = $2) WHERE stream = $1",
            f"trace:{first}",
            f"trace:{second}",
        )
        await admin.execute(
            f"UPDATE tga.sealed SET {column} = set_byte({column}, 30, get_byte({column}, 30) # 1) WHERE stream = $1",
            f"trace:{second}",
        )
        for trace_id in (first, second):
            with pytest.raises(SecretMissing):
                await decide(scripted, trace_id)
        assert scripted.connector.sent == []


async def test_values_that_are_gone_before_the_call_is_over_stop_it(database: Database, admin: Admin) -> None:
    """A superuser who removes them must not make the gateway send commitments in their place."""
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        first, second = await ask(scripted), await ask(scripted)
        await admin.execute("UPDATE tga.sealed SET sealed_values = NULL WHERE stream = $1", f"trace:{first}")
        await admin.execute("DELETE FROM tga.sealed WHERE stream = $1", f"trace:{second}")
        for trace_id in (first, second):
            with pytest.raises(SecretMissing):
                await decide(scripted, trace_id)
        assert scripted.connector.sent == []


async def test_as_many_and_as_long_places_as_may_be_configured_can_be_sealed(database: Database, admin: Admin) -> None:
    names = [f"{number:02}" + "é" * 253 for number in range(16)]
    tool = replace(WRITE, secret_arguments=tuple(f"/{name}" for name in names))
    arguments = {"amount": 1, **dict.fromkeys(names, CARD)}
    async with open_scripted(database.gateway_url, tool=tool) as scripted:
        await scripted.runtime.call(CheckedCall("crm", "create", arguments, new_key(), PRINCIPAL))
        assert scripted.connector.sent_arguments == [arguments]
        assert await holding(admin, CARD) == {}


async def test_another_life_of_the_gateway_opens_what_was_sealed_under_the_same_keys_folder(
    database: Database, home: Path
) -> None:
    keys = Keyring.open(home / "keys", {})
    async with open_scripted(database.gateway_url, tool=SECRET) as scripted:
        asked = await ask(scripted, runtime=runtime_of(scripted, vault=PostgresVault(scripted.sessions, keys)))
        with pytest.raises(SecretMissing):
            await PostgresVault(scripted.sessions, KEYS).load_secrets(asked)
        later = runtime_of(scripted, vault=PostgresVault(scripted.sessions, Keyring.open(home / "keys", {})))
        assert (await decide(scripted, asked, runtime=later, approver=ADA)).state == "COMPLETED"
        assert scripted.connector.sent_arguments == [ARGUMENTS]
