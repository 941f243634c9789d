"""A repeat of a finished call: one look at the store, nothing written, everything checked, each time."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import CallDenied, KeyReused, StoreUnavailable, TgaError, TraceErased
from app.core.limits import (
    CALL_LOOKUPS_GROUPED_MAX,
    REPEAT_KEYS_EXPECTED_MAX,
    REPEATS_VERIFIED_BYTES_MAX,
    REPEATS_VERIFIED_MAX,
    WINNER_BYTES_MAX,
)
from app.domain.identity import Principal
from app.domain.tga.documents import TraceId
from app.domain.tga.erasing import ERASABLE_TRACES
from app.domain.tga.ports import RecordedCall, StoredTrace
from app.domain.tga.repeats import Repeats
from app.domain.tga.replay import fold
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.erasing import erase_stream
from app.postgres.sessions import Sessions
from app.postgres.traces import _CALL, _CALLS
from tests.attacker import attacking
from tests.conftest import Admin
from tests.runtime.scripted import WRITE, Scripted, Tools, call, new_key, open_scripted
from tests.runtime.tampering import rewrite
from tests.traces import completed_trace

REPEATS = 9
OTHER = Principal(principal_id="agent-2", tenant="default")


async def test_a_repeat_is_one_round_trip(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        original = getattr(Sessions, name)

        def note(self: Sessions, *arguments: Any) -> Any:
            asked.append(name)
            return original(self, *arguments)

        return note

    for name in ("fetch", "commit", "reading"):
        monkeypatch.setattr(Sessions, name, noting(name))
    call_again = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(call_again)
        assert asked.count("commit") >= 2
        asked.clear()
        for _ in range(REPEATS):
            assert (await scripted.runtime.call(call_again)).replayed
        assert asked == ["fetch"] * REPEATS


@pytest.mark.parametrize("size", [10, 2 * WINNER_BYTES_MAX], ids=["small", "large"])
async def test_the_first_repeat_elsewhere_comes_with_the_append_that_loses(
    database: Database, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """The very bytes of a look at the store; what is too large for a batch of them is looked for."""
    asked: list[str] = []
    winners: list[object] = []
    commit, fetch, answer_repeat = Sessions.commit, Sessions.fetch, TgaRuntime._answer_repeat

    async def noting_commit(self: Sessions, *arguments: Any) -> Any:
        asked.append("commit")
        return await commit(self, *arguments)

    async def noting_fetch(self: Sessions, *arguments: Any) -> Any:
        asked.append("fetch")
        return await fetch(self, *arguments)

    async def noting_winner(
        self: TgaRuntime, of: CheckedCall, written: bytes, patience: Any, winner: Any = None
    ) -> Any:
        winners.append(winner)
        return await answer_repeat(self, of, written, patience, winner)

    monkeypatch.setattr(Sessions, "commit", noting_commit)
    monkeypatch.setattr(Sessions, "fetch", noting_fetch)
    monkeypatch.setattr(TgaRuntime, "_answer_repeat", noting_winner)
    call_again = replace(call(key=new_key()), arguments={"amount": 1, "text": "x" * size})
    async with open_scripted(database.gateway_url) as scripted, open_scripted(database.gateway_url) as other:
        answer = await scripted.runtime.call(call_again)
        await other.runtime.call(call(key=new_key()))  # it has read the tool's pin
        asked.clear()
        assert (await other.runtime.call(call_again)).effect == answer.effect
        assert asked == (["commit"] if size <= WINNER_BYTES_MAX else ["commit", "fetch"])
        found = await other.traces.find_call(
            call_again.server_id, call_again.tool_name, str(call_again.idempotency_key)
        )
    (winner,) = winners
    assert found is not None
    if size > WINNER_BYTES_MAX:
        assert winner is None
    else:
        assert isinstance(winner, RecordedCall)
        assert replace(winner, read=found.read) == found
        assert winner.read() == found.read()
    assert call_again.idempotency_key not in other.connector.sends_of_key


@pytest.mark.parametrize("fails", [False, True], ids=["grouped", "grouping_fails"])
async def test_repeats_at_once_share_statements_and_each_gets_its_own_answer(
    database: Database, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """Those that wait share the next statement; if that fails, each is looked up by itself."""
    sizes: list[int] = []
    fetch = Sessions.fetch

    async def noting(self: Sessions, statement: str, *arguments: Any) -> Any:
        if statement in (_CALL, _CALLS):
            sizes.append(len(arguments[0]) if statement == _CALLS else 1)
            if fails and statement == _CALLS:
                raise StoreUnavailable("only groups fail")
        return await fetch(self, statement, *arguments)

    calls = [call(key=new_key()) for _ in range(40)]
    nothing = replace(calls[0], idempotency_key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        answers = [await scripted.runtime.call(one) for one in calls]
        scripted.runtime._repeats.expect(nothing.server_id, nothing.tool_name, nothing.idempotency_key)
        monkeypatch.setattr(Sessions, "fetch", noting)
        await scripted.runtime.call(calls[0])
        assert sizes == [1]
        sizes.clear()
        *repeats, fresh = await asyncio.gather(*(scripted.runtime.call(one) for one in (*calls, nothing)))
    assert [repeat.trace_id for repeat in repeats] == [answer.trace_id for answer in answers]
    assert [repeat.effect for repeat in repeats] == [answer.effect for answer in answers]
    assert all(repeat.replayed for repeat in repeats)
    assert not fresh.replayed
    grouped = [size for size in sizes if size > 1]
    assert sum(grouped) == 40  # the first goes by itself
    assert max(grouped) == CALL_LOOKUPS_GROUPED_MAX
    assert sizes.count(1) == (41 if fails else 1)
    assert all(sent == 1 for sent in scripted.connector.sends_of_key.values())


async def _written(admin: Admin) -> tuple[int, int]:
    """The next transaction id, which only transactions that write take, and how many rows there are."""
    tables = await admin.fetch(
        "SELECT oid::regclass::text AS name FROM pg_class WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r'"
    )
    rows = [await admin.fetchval(f"SELECT count(*) FROM {table['name']}") for table in tables]
    return int(await admin.fetchval("SELECT pg_snapshot_xmax(pg_current_snapshot())::text")), sum(rows)


async def test_a_repeat_writes_nothing(database: Database, admin: Admin) -> None:
    found = []
    async with open_scripted(database.gateway_url) as scripted:
        for _ in range(3):
            asked = call(key=new_key())
            empty = await _written(admin)
            await scripted.runtime.call(asked)
            before = await _written(admin)
            assert before[0] > empty[0]
            assert before[1] > empty[1]
            for _ in range(REPEATS):
                assert (await scripted.runtime.call(asked)).replayed
            found.append([after - first for after, first in zip(await _written(admin), before, strict=True)])
            if found[-1] == [0, 0]:
                return
    pytest.fail(f"transactions that wrote, and rows, of {REPEATS} repeats: {found}")


async def _changed_output(admin: Admin, trace_id: TraceId) -> None:
    async with attacking(admin):
        await admin.execute(
            "UPDATE tga.payloads SET artifacts[1] = convert_to(replace(convert_from(artifacts[1], 'UTF8'),"
            " '\"done\":true', '\"done\":null'), 'UTF8')"
            " WHERE stream_no = (SELECT stream_no FROM tga.heads WHERE stream = $1) AND sequence_number = 4",
            TRACE.stream(trace_id),
        )


def _update(statement: str) -> Callable[[Admin, TraceId], Awaitable[None]]:
    async def change(admin: Admin, trace_id: TraceId) -> None:
        async with attacking(admin):
            changed = await admin.execute(statement, TRACE.stream(trace_id))
            assert changed.split()[-1] != "0", "nothing was changed"

    return change


_NUMBER = "(SELECT stream_no FROM tga.heads WHERE stream = $1)"
TAMPERINGS = {
    "the output": _changed_output,
    "a field of an entry": _update(
        f"UPDATE tga.links SET recorded_at = '2020-01-01T00:00:00.000Z' WHERE stream_no = {_NUMBER}"
        " AND sequence_number = 2"
    ),
    "an entry's digest": _update(
        f"UPDATE tga.links SET entry_digest = sha256('x') WHERE stream_no = {_NUMBER} AND sequence_number = 3"
    ),
    "an entry is gone": _update(f"DELETE FROM tga.links WHERE stream_no = {_NUMBER} AND sequence_number = 4"),
    "all payloads are gone": _update(f"DELETE FROM tga.payloads WHERE stream_no = {_NUMBER}"),
    "the head": _update("UPDATE tga.heads SET entry_digest = sha256('x') WHERE stream = $1"),
    "the claim": _update("UPDATE tga.heads SET payload_digest = sha256('x') WHERE stream = $1"),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_what_was_changed_since_the_last_repeat_is_found_by_the_next(
    name: str, database: Database, admin: Admin
) -> None:
    """As a gateway finds it that has never read the trace: with the same error."""
    asked = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted, open_scripted(database.gateway_url) as other:
        answer = await scripted.runtime.call(asked)
        assert (await scripted.runtime.call(asked)).effect == answer.effect
        await TAMPERINGS[name](admin, answer.trace_id)
        errors = []
        for runtime in (scripted.runtime, other.runtime):
            with pytest.raises(TgaError) as refused:
                await runtime.call(asked)
            errors.append((refused.value.code, refused.value.what, refused.value.expected, refused.value.found))
    assert errors[0] == errors[1]
    assert scripted.connector.sends_of_key == {asked.idempotency_key: 1}
    assert not other.connector.sent


async def test_a_history_that_was_rewritten_without_a_flaw_is_told_as_it_stands_now(
    database: Database, admin: Admin
) -> None:
    """Only the log's tree can tell that it is another. What was remembered is not told in its place."""
    asked = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(asked)
        await scripted.runtime.call(asked)

        def change(place: int, artifact: dict[str, Any]) -> dict[str, Any]:
            return {**artifact, "output": {"encoding": "json", "value": "other"}} if place == 4 else artifact

        await rewrite(admin, TRACE.stream(answer.trace_id), change)
        told = (await scripted.runtime.call(asked)).effect
    assert told is not None
    assert getattr(told.output, "value", None) == "other"


async def test_an_erasure_since_the_last_repeat_counts(database: Database) -> None:
    asked = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(asked)
        await scripted.runtime.call(asked)
        await erase_stream(
            scripted.sessions,
            scripted.system.log,
            scripted.clock,
            scripted.traces.executor_id(),
            TRACE.stream(answer.trace_id),
            ERASABLE_TRACES,
            tenant="default",
            erased_by="ada",
            rationale="asked for",
        )
        with pytest.raises(TraceErased):
            await scripted.runtime.call(asked)


async def _another_principal(scripted: Scripted) -> dict[str, Any]:
    return {"principal": OTHER}


async def _other_arguments(scripted: Scripted) -> dict[str, Any]:
    return {"arguments": {"amount": 2}}


async def _forbidden_by_now(scripted: Scripted) -> dict[str, Any]:
    scripted.supervisor.answer = "deny"
    return {}


@pytest.mark.parametrize(
    ("change", "refusal"),
    [(_another_principal, KeyReused), (_other_arguments, KeyReused), (_forbidden_by_now, CallDenied)],
    ids=["another principal", "other arguments", "the policy of today"],
)
async def test_who_asks_what_under_which_policy_is_checked_at_every_repeat(
    change: Callable[[Scripted], Awaitable[dict[str, Any]]], refusal: type[TgaError], database: Database
) -> None:
    asked = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(asked)
        assert (await scripted.runtime.call(asked)).replayed
        changes = await change(scripted)
        for _ in range(2):
            with pytest.raises(refusal):
                await scripted.runtime.call(replace(asked, **changes))
    assert len(scripted.connector.sent) == 1


async def test_secret_arguments_are_compared_at_every_repeat(database: Database) -> None:
    tool = replace(WRITE, secret_arguments=("/token",))
    asked = replace(call(key=new_key()), arguments={"amount": 1, "token": "s3cret-1"})
    async with open_scripted(database.gateway_url, tool=tool) as scripted:
        await scripted.runtime.call(asked)
        for _ in range(2):
            assert (await scripted.runtime.call(asked)).replayed
            with pytest.raises(KeyReused):
                await scripted.runtime.call(replace(asked, arguments={"amount": 1, "token": "s3cret-2"}))


async def test_a_repeat_is_answered_though_its_tool_is_gone(database: Database) -> None:
    asked = call(key=new_key())
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(asked)
        scripted.tools.tools = Tools().tools
        assert (await scripted.runtime.call(asked)).effect == answer.effect


def _recorded(trace_id: str, *, size_bytes: int, reads: list[str]) -> RecordedCall:
    records = completed_trace(1)
    state = fold(records)
    assert state is not None

    def read() -> StoredTrace:
        reads.append(trace_id)
        moved = state.model_copy(update={"trace_id": trace_id})
        return StoredTrace(moved, records, (), None, None, None, None)

    fingerprint = hashlib.sha256(trace_id.encode()).digest()
    return RecordedCall(TraceId(trace_id), state.payload_digest, None, fingerprint, size_bytes, read)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("size_bytes", "kept"), [(1, REPEATS_VERIFIED_MAX), (REPEATS_VERIFIED_BYTES_MAX // 8, 8)], ids=["many", "large"]
)
def test_what_is_remembered_is_bounded(size_bytes: int, kept: int) -> None:
    repeats, reads = Repeats(), list[str]()
    every = [_recorded(f"trace-{n}", size_bytes=size_bytes, reads=reads) for n in range(kept + 5)]
    for recorded in every:
        repeats.read(recorded)
    reads.clear()
    for recorded in reversed(every[5:]):
        repeats.read(recorded)
    assert reads == []
    repeats.read(every[0])
    assert reads == ["trace-0"]


def test_keys_are_remembered_up_to_a_bound() -> None:
    repeats = Repeats()
    for n in range(REPEAT_KEYS_EXPECTED_MAX + 1):
        repeats.expect("crm", "create", f"key-{n}")
    repeats.expect("crm", "create", None)
    assert not repeats.is_expected("crm", "create", "key-0")
    assert repeats.is_expected("crm", "create", "key-1")
    assert not repeats.is_expected("crm", "create", None)
