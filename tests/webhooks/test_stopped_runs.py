"""Webhooks are told of runs that are parked or have diverged: once for as long as they stand so, signed; and Slack's
are told in its own shape."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

from app.connectors.webhook_notices import WebhookNotices
from app.domain.runs.engine.losing import lose
from app.domain.runs.engine.work import Work
from app.gateway.standing import WhatStands
from app.keys.keyring import Keyring
from app.postgres.database import Database
from app.postgres.outbox import PostgresOutbox
from app.postgres.sessions import Sessions
from tests.connectors.servers import raw_server
from tests.runs.engines import NOW, Engine, open_engine
from tests.runs.test_engine import policy
from tests.webhooks.sending import OK, Delivery, webhooks
from tests.webhooks.test_what_a_receiver_sees import Now

SOUND: Any = SimpleNamespace(fault=None, verifier_key=SimpleNamespace(name="example.org/log"))
NO_TOOLS: Any = SimpleNamespace(tools=list)
# Both sides as long as each may be: the message of the run's error has less room than both together.
LONG = 4_091
DIVERGENCE = {"path": "1", "recorded": "step " + "r" * LONG, "performed": "step " + "p" * LONG, "source": "a.py:3"}


async def stop_two_runs(engine: Engine) -> None:
    await engine.start("p", policy=policy(park_after=1))
    await engine.lease()

    async def decide(work: Work) -> None:
        lose(work, "its worker was not heard of", now=NOW, clock=engine.engine.ports.clock)

    await engine.engine.table.change("p", decide)
    await engine.start("d")
    (run,) = await engine.lease()
    await engine.put(run, 2, then={"type": "diverge", "divergence": DIVERGENCE})


async def test_parked_and_diverged_runs_are_told_once_each(
    database: Database, sessions: Sessions, outbox: PostgresOutbox, keyring: Keyring
) -> None:
    async with (
        open_engine(database.gateway_url, lease_ms=60_000) as engine,
        raw_server(OK) as ops,
        raw_server(OK) as slack,
    ):
        stands = WhatStands(sessions, NO_TOOLS, SimpleNamespace(), SOUND, ["default"])  # type: ignore[arg-type]
        assert await stands.look() == []
        await stop_two_runs(engine)
        found = await stands.look()
        assert sorted((one.event, one.told["run_id"]) for one in found) == [("run_diverged", "d"), ("run_parked", "p")]
        assert await stands.look() == found, "what stands has the same ids at every look"
        formats = {"slack": "slack"}
        urls = {"ops": ops.url, "slack": slack.url}
        deliverer = webhooks(urls, outbox, keyring, clock=Now(), formats=formats, public_url="https://tga.example.org")
        wanted = {"ops": ["run_parked", "run_diverged"], "slack": ["run_diverged"]}
        notices = WebhookNotices(deliverer, wanted, stands.look, Now())
        assert await notices.tell() == 3
        assert await notices.tell() == 0, "once is enough when it was taken"
        assert deliverer._instruments.deliveries.values == {("ops", "taken"): 2, ("slack", "taken"): 1}
        await deliverer.close()
        counted = engine.engine.ports.instruments.run_changes.values
        assert (counted["PARKED",], counted["DIVERGED",]) == (1, 1)
    told = [json.loads(Delivery.of(raw).body) for raw in ops.requests]
    assert sorted((one["event"], one["run_id"], one["procedure"]) for one in told) == [
        ("run_diverged", "d", "onboard"),
        ("run_parked", "p", "onboard"),
    ]
    (message,) = [Delivery.of(raw) for raw in slack.requests]
    message.verify(keyring.public_key_bytes)
    body = json.loads(message.body)
    assert body["text"].startswith("A run has diverged")
    assert body["blocks"][-1]["elements"][0]["url"] == "https://tga.example.org/console/runs/d"
