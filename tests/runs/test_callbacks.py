"""A question that names a URL has it told: signed, at least once, at a host that is allowed and nowhere else."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from app.config.tables import CallbacksConfig
from app.connectors.callbacks import Callbacks
from app.core.errors import RunCallbackRefused
from app.domain.runs.engine.announcing import load_callbacks
from app.domain.runs.requests import CALLBACK
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.connectors.servers import Raw, raw_server, response
from tests.runs.routes import Runs, ask, open_runs
from tests.runtime.scripted import KEYS
from tests.webhooks.sending import OK, Delivery, answering, make_due, rows_of, webhooks

LOCAL = ("127.0.0.1", "localhost")


def allowing(*servers: Raw, private: tuple[str, ...] = LOCAL) -> CallbacksConfig:
    return CallbacksConfig(
        allowed_hosts=[server.url.removeprefix("http://") for server in servers], private_hosts=list(private)
    )


@pytest.fixture
def opened(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> Any:
    @asynccontextmanager
    async def opened(config: CallbacksConfig, **more: Any) -> AsyncIterator[tuple[Runs, Any]]:
        """Runs whose questions may name these hosts, and who tells them."""

        async def load(run_id: str) -> Any:
            return await load_callbacks(runs.engine.engine.ports, run_id)

        callbacks = Callbacks(config, load, public_url="https://tga.example.org")
        async with open_runs(database, sessions, ledger, tmp_path, verify_callback=callbacks.verify) as runs:
            deliverer = webhooks({}, PostgresOutbox(sessions), KEYS, callbacks=callbacks, **more)
            yield runs, deliverer
            await deliverer.close()

    return opened


async def test_the_url_is_told_of_its_own_question_with_all_that_is_needed_to_answer(opened: Any, admin: Admin) -> None:
    async with raw_server(OK) as one, raw_server(OK) as two, opened(allowing(one, two)) as (runs, deliverer):
        await runs.start("r-1")
        (run,) = await runs.lease()
        first = ask("1:1.1", message="4111-SECRET?", callback=f"{one.url}/q/7?for=ops")
        await runs.put(run, first, ask("1:2.1", "other", callback=f"{two.url}/"), ask("1:3.1", "plain"))
        await runs.put(run, ask("1:4.1", "late", callback=f"{two.url}/late"), after=5)
        assert [row["webhook"] for row in await rows_of(admin)] == [CALLBACK, CALLBACK]
        assert await deliverer.deliver_due() == 2
        assert await rows_of(admin) == []
        (told,) = [Delivery.of(raw) for raw in one.requests]
        told.verify(KEYS.public_key_bytes)
        assert told.head == "POST /q/7?for=ops HTTP/1.1"
        assert b"SECRET" not in told.body
        document = told.document
        assert (document["event"], document["kind"], document["run_id"]) == ("approval_requested", "run", "r-1")
        (question,) = document["questions"]
        assert (question["path"], question["name"], question["form"]) == ("1:1.1", "pay?", "approve")
        assert document["answer_url"] == "https://tga.example.org/v1/runs/r-1/signals"
        others = [Delivery.of(raw) for raw in two.requests]
        # Two rows name the run, and each has both questions to tell: a repeat has the same id.
        assert {other.document["questions"][0]["name"] for other in others} == {"other", "late"}
        assert len({other.id for other in others}) == 2
        answer = {"path": question["path"], "answer": True, "intent_digest": question["intent_digest"]}
        await runs.ok(await runs.front.post(document["callback"], answer, "supervisor"))


async def test_it_is_told_again_until_a_2xx_or_until_it_is_answered(opened: Any, admin: Admin) -> None:
    refusing = answering(response("500 Oops", b""), response("302 Found", b"", "Location: http://127.0.0.1:1/"), OK)
    async with (
        raw_server(refusing) as url,
        raw_server(b"") as silent,
        opened(allowing(url, silent)) as (runs, deliverer),
    ):
        await runs.start("r-1")
        (run,) = await runs.lease()
        await runs.put(run, ask("1", callback=f"{url.url}/q"), then={"type": "suspend", "awaits": ["1"]})
        for attempt, why in ((1, "the receiver answered 500"), (2, "the receiver answered 302")):
            assert await deliverer.deliver_due() == 0
            (row,) = await rows_of(admin)
            assert (row["attempts"], row["last_error"]) == (attempt, why)
            await make_due(admin)
        assert await deliverer.deliver_due() == 1
        assert await rows_of(admin) == []
        assert len({Delivery.of(raw).id for raw in url.requests}) == 1
        assert len(url.requests) == 3
        # A receiver that takes nothing keeps the other question of its run from nothing, and is let go when it is over.
        await runs.start("r-2")
        (run,) = await runs.lease()
        await runs.put(
            run, ask("1:1.1", callback=f"{silent.url}/q"), ask("1:2.1", "heard", callback=f"{url.url}/heard")
        )
        assert await deliverer.deliver_due() == 0
        assert [Delivery.of(raw).document["questions"][0]["name"] for raw in url.requests[3:]] == ["heard"]
        for path in ("1:1.1", "1:2.1"):
            answer = {"path": path, "answer": True}
            await runs.ok(await runs.front.post("/v1/runs/r-2/signals", answer, "supervisor"))
        await make_due(admin)
        before = len(silent.requests)
        assert await deliverer.deliver_due() == 1
        assert len(silent.requests) == before


@pytest.mark.parametrize(
    "url",
    [
        "http://169.254.169.254/latest/meta-data",
        "http://other.example.com/",
        "http://hooks.example.com.evil.org/",
        "http://hooks.example.com:81/",
        "https://hooks.example.com@evil.org/",
        "https://me:pw@hooks.example.com/",
        "http://HOOKS.example.com:8080@evil.org/",
        "http://[::1]/",
        "http://2130706433/",
    ],
)
async def test_a_question_that_names_another_host_is_not_asked(url: str) -> None:
    async def load(run_id: str) -> Any:
        raise AssertionError(run_id)

    callbacks = Callbacks(CallbacksConfig(allowed_hosts=["hooks.example.com"]), load)
    callbacks.verify("https://hooks.example.com/a?b=c")
    callbacks.verify("http://Hooks.Example.com/")
    with pytest.raises(RunCallbackRefused, match=r"allowed host|without a user"):
        callbacks.verify(url)
    with pytest.raises(RunCallbackRefused, match="none is"):
        Callbacks(CallbacksConfig(), load).verify("https://hooks.example.com/")
    await callbacks.close()


async def test_a_refused_put_records_nothing_and_what_is_no_url_is_malformed(opened: Any, admin: Admin) -> None:
    async with raw_server(OK) as server, opened(allowing(server)) as (runs, _):
        await runs.start("r-1")
        (run,) = await runs.lease()
        put = partial(runs.front.post, "/v1/runs/r-1/checkpoints", who="worker")
        for callback, code in (
            ("http://elsewhere.example.com/", "RUN_CALLBACK_REFUSED"),
            ("file:///etc/passwd", "SCHEMA_VIOLATION"),
            ("gopher://127.0.0.1/", "SCHEMA_VIOLATION"),
            (f"{server.url}/\r\nHost: evil", "SCHEMA_VIOLATION"),
            (f"{server.url}/{'x' * 2048}", "SCHEMA_VIOLATION"),
        ):
            said = {"lease": run["lease"], "attempt": 1, "after_seq": 2, "puts": [ask("1", callback=callback)]}
            status, problem = await put(said)
            assert (status, problem["code"]) == (422, code), problem
        status, seen, _ = await runs.front.get("/v1/runs/r-1", "agent")
        assert (status, seen["sequence_number"]) == (200, 2)
        assert await rows_of(admin) == []


async def test_an_address_of_a_private_network_is_not_called(opened: Any, admin: Admin) -> None:
    """The host is allowed, and its name leads to this machine: nothing is sent."""
    async with raw_server(OK) as server, opened(allowing(server, private=())) as (runs, deliverer):
        await runs.start("r-1")
        (run,) = await runs.lease()
        await runs.put(run, ask("1", callback=f"{server.url}/q"), then={"type": "suspend", "awaits": ["1"]})
        assert await deliverer.deliver_due() == 0
        assert server.requests == []
        (row,) = await rows_of(admin)
        assert "found one of a private network" in row["last_error"]
