"""A superuser locks a table of a running gateway: callers are answered all the same, within `wait_ms` and a little.

The lock is held until they are. What they are told is true, and when the lock is gone nothing is lost or done twice.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from typing import Any

import asyncpg
import pytest

from tests.attack.client import Client, Said, new_id
from tests.bank import bank_tables
from tests.cli.world import World, wait_for
from tests.conftest import make_home
from tests.mcp.served import executions, raw_of

IS_SOAK = os.environ.get("TGA_SOAK") == "1"
WAIT_MS = 300
PATIENCE_S = 20.0
# Nothing was stored. Or it may have been, and then it is said where to look.
NOTHING = {"STORE_UNAVAILABLE", "STATE_LOCK_ACQUIRE_FAILED", "STORE_BUSY"}
UNKNOWN = "STORE_OUTCOME_UNKNOWN"


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    home = make_home()
    made = World(home)
    try:
        written = made.config.read_text()
        url = written.split('base_url = "')[1].partition('"')[0]
        held = bank_tables(url, {"max_attempts": 2}, {"flaky": 'on_unknown_outcome = "hold"'}, server="holding")
        made.config.write_text(f"{written}{held}\n[mcp]\nhold_ms = 1000\n")
        made.start()
        yield made
    finally:
        made.close()
        shutil.rmtree(home)


@contextmanager
def locked(world: World, table: str) -> Iterator[None]:
    with asyncio.Runner() as runner:
        session = runner.run(asyncpg.connect(world.admin_url))
        runner.run(session.execute(f"BEGIN; LOCK TABLE tga.{table} IN ACCESS EXCLUSIVE MODE"))
        try:
            yield
        finally:
            runner.run(session.close())


def post(world: World, key: str, path: str, body: dict[str, Any]) -> Said:
    with closing(Client(world.url, key)) as client:
        return client.ask("POST", path, body)


def call(world: World, credential: str, key: str, *, wait_ms: int = 30_000, **fields: Any) -> Said:
    asked = {"server_id": "bank", "tool_name": "charge", "arguments": {"amount": 7}, "idempotency_key": key}
    return post(world, credential, "/v1/tool-calls", {**asked, "wait_ms": wait_ms, **fields})


def call_over_mcp(world: World, credential: str, amount: int) -> Any:
    async def made() -> Any:
        async with raw_of(world, key=credential) as raw:
            return await raw.call("bank__charge", {"amount": amount})

    return asyncio.run(made())


def read(world: World, credential: str, trace_id: str) -> Said:
    with closing(Client(world.url, credential)) as client:
        return client.ask("GET", f"/v1/traces/{trace_id}")


def trace_of(world: World, credential: str, trace_id: str) -> Any:
    return read(world, credential, trace_id).body


def at_once(*asked: Callable[[], Any]) -> list[Any]:
    """All answers, in their order; each must come while the lock is held, so none is waited for for ever."""
    pool = ThreadPoolExecutor(len(asked))
    try:
        return [future.result(timeout=PATIENCE_S) for future in [pool.submit(one) for one in asked]]
    finally:
        pool.shutdown(wait=False)


def verify_truthful(answer: Said) -> None:
    if answer.status == 503:
        assert answer.code in NOTHING or (answer.code == UNKNOWN and answer.body["trace_id"]), answer
    else:
        assert answer.status in (200, 202), answer


def is_done(world: World, credential: str, key: str) -> bool:
    """Asked as a caller would who was told nothing: again, under the same key."""
    answer = call(world, credential, key)
    assert answer.status in (200, 409, 503), answer
    return answer.status == 200


def tables_of(world: World) -> list[str]:
    async def load() -> list[str]:
        session = await asyncpg.connect(world.admin_url)
        try:
            rows = await session.fetch(
                "SELECT relname FROM pg_class WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r' ORDER BY 1"
            )
            return [row["relname"] for row in rows]
        finally:
            await session.close()

    return asyncio.run(load())


def test_whichever_table_is_locked_a_call_is_answered_and_executed_once(world: World) -> None:
    seed = int(os.environ.get("TGA_SEED", time.time_ns()))
    print(f"TGA_SEED={seed}")
    admin = str(world.admin_key())
    tables = tables_of(world)
    for table in tables if IS_SOAK else random.Random(seed).sample(tables, 3):
        key = new_id()
        with locked(world, table):
            (answer,) = at_once(lambda key=key: call(world, admin, key, wait_ms=WAIT_MS))  # type: ignore[misc]
            verify_truthful(answer)
        wait_for(lambda key=key: is_done(world, admin, key))  # type: ignore[misc]
        assert world.executions(key) == 1, f"with {table} locked"


def test_a_hundred_calls_at_once_are_answered_and_each_is_executed_once(world: World) -> None:
    admin, keys = str(world.admin_key()), [new_id() for _ in range(100)]
    assert call(world, admin, new_id()).status == 200  # the tool is pinned
    with locked(world, "entries"):
        answers = at_once(*(lambda key=key: call(world, admin, key, wait_ms=WAIT_MS) for key in keys))
        assert {answer.status for answer in answers} == {503}
        for answer in answers:
            verify_truthful(answer)
    for key in keys:
        wait_for(lambda key=key: is_done(world, admin, key))  # type: ignore[misc]
    assert [world.executions(key) for key in keys] == [1] * 100


def test_decisions_resolutions_repeats_and_calls_over_mcp_are_answered_too(world: World) -> None:
    agent, boss = world.new_key("agent-1", "agent"), world.new_key("ada", "supervisor")
    operator = world.new_key("ops", "operator")
    done_key, waiting_key, amount = new_id(), new_id(), 31
    done = call(world, agent, done_key)
    asked = call(world, agent, waiting_key, tool_name="refund", wait_ms=WAIT_MS)
    failing = {"amount": 1, "fail_times": 9, "status": 503}
    held = call(world, agent, new_id(), server_id="holding", tool_name="flaky", arguments=failing, wait_ms=WAIT_MS)
    assert done.status == 200
    waiting_id, held_id = asked.body["trace_id"], held.body["trace_id"]
    wait_for(lambda: trace_of(world, agent, waiting_id)["waiting"] == "supervisor")
    wait_for(lambda: trace_of(world, agent, held_id)["waiting"] == "operator")
    digest = trace_of(world, agent, waiting_id)["action_request_digest"]
    decision = {"decision": "APPROVE", "action_request_digest": digest}
    digest = trace_of(world, agent, held_id)["tool_call_digest"]
    resolution = {"action": "failed", "tool_call_digest": digest, "rationale": "not in the book"}

    def decide(wait_ms: int) -> Said:
        return post(world, boss, f"/v1/traces/{waiting_id}/decision", {**decision, "wait_ms": wait_ms})

    def resolve(wait_ms: int) -> Said:
        return post(world, operator, f"/v1/traces/{held_id}/resolve", {**resolution, "wait_ms": wait_ms})

    with locked(world, "entries"):
        *over_http, over_mcp = at_once(
            lambda: decide(WAIT_MS),
            lambda: resolve(WAIT_MS),
            lambda: call(world, agent, done_key, wait_ms=WAIT_MS),
            lambda: post(world, agent, f"/v1/traces/{waiting_id}/withdraw", {}),
            lambda: read(world, agent, waiting_id),
            lambda: call_over_mcp(world, agent, amount),
        )
        for answer in over_http:
            assert answer.status in (409, 503), answer  # 409: deciding and withdrawing at once
            if answer.status == 503:
                verify_truthful(answer)
        assert over_mcp["isError"], over_mcp

    again = call(world, agent, done_key)
    assert (again.status, again.body["trace_id"]) == (200, done.body["trace_id"])
    wait_for(lambda: decide(30_000).code in (None, "ALREADY_DECIDED"))
    wait_for(lambda: resolve(30_000).code in (None, "TRACE_NOT_HELD"))
    wait_for(lambda: trace_of(world, agent, waiting_id)["state"] in ("COMPLETED", "DENIED"))
    assert trace_of(world, agent, held_id)["state"] == "FAILED"
    is_approved = trace_of(world, agent, waiting_id)["state"] == "COMPLETED"
    assert (world.executions(done_key), world.executions(waiting_key)) == (1, int(is_approved))
    # Over MCP it came without a key: made again, it is the same call, because its answer is owed.
    wait_for(lambda: not call_over_mcp(world, agent, amount)["isError"])
    assert len([line for line in executions(world) if line["arguments"]["amount"] == amount]) == 1
