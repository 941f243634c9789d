"""The store of calls that came without a key: who gets which key."""

from __future__ import annotations

import hashlib
from types import SimpleNamespace
from typing import Any

import pytest

from app.clock import SystemClock
from app.core.limits import ENCLOSED_DEPTH_MAX
from app.mcp_server.calling import Calling
from app.postgres.database import Database
from app.postgres.mcp_key_reservations import PostgresIntents
from app.postgres.ownership import Executor
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.runtime.scripted import WRITE

ONE = hashlib.sha256(b"one").digest()
WHAT = {"server_id": "bank", "tool_name": "charge"}


def intents_of(sessions: Sessions, executor: Executor, window_ms: int = 900_000) -> PostgresIntents:
    return PostgresIntents(sessions, lambda: executor.executor_id, window_ms=window_ms)


async def begun(intents: PostgresIntents, key: str) -> tuple[str, str]:
    made = await intents.begin(ONE, proposed_key=key, **WHAT)
    return made.verdict, made.key


async def test_a_call_is_fresh_until_it_is_settled_and_then_another(sessions: Sessions, executor: Executor) -> None:
    intents = intents_of(sessions, executor)
    first = await intents.begin(ONE, proposed_key="k1", **WHAT)
    assert first.verdict == "fresh"
    assert await begun(intents, "k2") == ("busy", "k1")
    await intents.settle(ONE, first)
    assert await begun(intents, "k3") == ("fresh", "k3")


async def test_a_call_that_was_left_is_joined_by_the_next(sessions: Sessions, executor: Executor) -> None:
    intents = intents_of(sessions, executor)
    first = await intents.begin(ONE, proposed_key="k1", **WHAT)
    await intents.leave(ONE, first)
    assert await begun(intents, "k2") == ("again", "k1")
    assert await begun(intents, "k3") == ("busy", "k1")


async def test_a_dead_gateways_call_is_joined_and_a_living_ones_is_not(
    sessions: Sessions, executor: Executor, database: Database
) -> None:
    here = intents_of(sessions, executor)
    async with await Executor.open(database.gateway_url) as other:
        assert await begun(intents_of(sessions, other), "k1") == ("fresh", "k1")
        assert await begun(here, "k2") == ("busy", "k1")
    assert await begun(here, "k3") == ("again", "k1")


async def test_a_call_that_this_process_lost_sight_of_is_joined(sessions: Sessions, executor: Executor) -> None:
    """The store was away when it should have been left: nobody holds it, whatever the row says."""
    assert await begun(intents_of(sessions, executor), "k1") == ("fresh", "k1")
    assert await begun(intents_of(sessions, executor), "k2") == ("again", "k1")


async def test_who_proposes_the_same_key_never_waits(sessions: Sessions, executor: Executor) -> None:
    intents = intents_of(sessions, executor)
    assert await begun(intents, "k1") == ("fresh", "k1")
    assert await begun(intents, "k1") == ("again", "k1")


async def test_an_answer_is_owed_for_so_long_and_no_longer(sessions: Sessions, executor: Executor) -> None:
    intents = intents_of(sessions, executor, window_ms=0)
    first = await intents.begin(ONE, proposed_key="k1", **WHAT)
    await intents.leave(ONE, first)
    assert await begun(intents, "k2") == ("fresh", "k2")


@pytest.mark.parametrize(("is_open", "expected"), [(True, ("again", "k1")), (False, ("fresh", "k2"))])
async def test_an_answer_of_a_call_that_is_not_over_is_owed_until_it_is(
    sessions: Sessions, executor: Executor, admin: Admin, is_open: bool, expected: tuple[str, str]
) -> None:
    intents = intents_of(sessions, executor, window_ms=0)
    first = await intents.begin(ONE, proposed_key="k1", **WHAT)
    await intents.leave(ONE, first)
    zeros = bytes(32)
    await admin.execute("SET session_replication_role = replica")
    statement = (
        "INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, is_open, subject, name, idempotency_key,"
        " payload_digest) VALUES ($1, 1, $2, $3, $4, 'bank', 'charge', 'k1', $2)"
    )
    await admin.execute(statement, "trace:x", zeros, "PENDING" if is_open else "COMPLETED", is_open)
    assert await begun(intents, "k2") == expected


async def test_arguments_that_no_document_could_carry_are_refused_before_a_key_is_kept_for_them() -> None:
    deep: Any = 1
    for _ in range(ENCLOSED_DEPTH_MAX):
        deep = [deep]
    registry = SimpleNamespace(servers=list, verify_arguments=lambda tool, arguments: None)
    services: Any = SimpleNamespace(registry=registry, clock=SystemClock())
    calling = Calling(services, Unasked(), hold_ms=1, task_after_ms=1)
    asked: Any = SimpleNamespace(client=SimpleNamespace(takes_tasks=False, is_modern=False))
    meta: Any = SimpleNamespace(key=None, proposed_key=None)
    called = await calling._called(asked, WRITE, {"a": deep}, meta)
    assert isinstance(called.result, dict)
    assert called.result["isError"] is True
    assert "INPUT_TOO_LARGE" in str(called.result)


class Unasked(PostgresIntents):
    def __init__(self) -> None:
        pass

    async def begin(self, fingerprint: bytes, **_: Any) -> Any:
        raise AssertionError("a key was asked for")
