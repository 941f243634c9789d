"""A question of a run is told to webhooks like a call that waits: from the outbox, until it is answered."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from app.domain.runs.engine.announcing import load_announcement
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.connectors.servers import raw_server
from tests.runs.routes import Runs, ask, open_runs
from tests.runtime.scripted import KEYS
from tests.webhooks.sending import OK, Delivery, rows_of, webhooks


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path, ask_webhooks=["ops", "chat"]) as opened:
        yield opened


async def test_a_question_is_announced_with_where_to_answer_it(runs: Runs, sessions: Sessions, admin: Admin) -> None:
    """The run asks and works on: it waits for nobody yet, and its question is announced all the same."""
    await runs.start("r-1")
    (run,) = await runs.lease()
    await runs.put(run, ask("1:1.1", message="4111-SECRET?"), ask("1:2.1", "chat-only", webhooks=["chat"]))
    assert [row["webhook"] for row in await rows_of(admin)] == ["ops", "chat"]
    outbox = PostgresOutbox(sessions)
    assert await outbox.drop_decided(at_most=10) == 0
    load_run = partial(load_announcement, runs.engine.engine.ports)
    async with raw_server(OK) as ops, raw_server(OK) as chat:
        deliverer = webhooks({"ops": ops.url, "chat": chat.url}, outbox, KEYS, load_run=load_run)
        assert await deliverer.deliver_due() == 2
        await deliverer.close()
    assert await rows_of(admin) == []
    (told,) = [Delivery.of(raw) for raw in ops.requests]
    told.verify(KEYS.public_key_bytes)
    assert b"SECRET" not in told.body
    document = told.document
    assert (document["event"], document["kind"], document["run_id"]) == ("approval_requested", "run", "r-1")
    (question,) = document["questions"]
    assert (question["path"], question["name"], question["form"]) == ("1:1.1", "pay?", "approve")
    (to_chat,) = [Delivery.of(raw).document for raw in chat.requests]
    assert [one["name"] for one in to_chat["questions"]] == ["pay?", "chat-only"]
    answer = {"path": question["path"], "answer": True, "intent_digest": question["intent_digest"]}
    await runs.ok(await runs.front.post(document["callback"], answer, "supervisor"))


async def test_what_was_answered_is_not_announced(runs: Runs, sessions: Sessions, admin: Admin) -> None:
    await runs.asking("r-1")
    outbox = PostgresOutbox(sessions)
    assert await outbox.drop_decided(at_most=10) == 0
    await runs.ok(await runs.front.post("/v1/runs/r-1/signals", {"path": "1", "answer": True}, "supervisor"))
    load_run = partial(load_announcement, runs.engine.engine.ports)
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"ops": receiver.url}, outbox, KEYS, load_run=load_run)
        assert await deliverer.deliver_due() == 1
        await deliverer.close()
    assert receiver.requests == []
    assert await outbox.drop_decided(at_most=10) == 1, "that of the webhook that is not configured"
    assert await rows_of(admin) == []
