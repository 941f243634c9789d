"""/metrics of a real gateway: what happened is counted, what stands is shown, and who may not see it does not."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.core.instruments import Instruments
from app.core.limits import METRICS_COUNTED_MAX
from app.postgres.api_keys import PostgresAccess
from app.postgres.sessions import Sessions
from app.postgres.standing import RUN_STATES, STANDING
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working

Samples = dict[str, float]
LEASE_MS = 60_000
# What an operator asks of a gateway, and the metric that answers, with the labels that it is told apart by.
ASKED = {
    "calls by server, tool, state and decision": ("tga_calls_total", ("server", "tool", "state", "decision")),
    "latency by phase": ("tga_call_phase_seconds", ("server", "phase")),
    "requests in flight": ("tga_requests_in_flight", ()),
    "calls in flight": ("tga_calls_executing", ("server",)),
    "queue depth": ("tga_commit_queue_plans", ()),
    "batch size": ("tga_commit_batch_plans", ()),
    "commits": ("tga_commits_total", ("result",)),
    "retries": ("tga_call_retries_total", ("server",)),
    "replays": ("tga_calls_repeated_total", ("server",)),
    "unknown outcomes": ("tga_calls_unknown_total", ("server",)),
    "calls that were held": ("tga_calls_held_total", ("server",)),
    "calls that are held": ("tga_held_calls", ()),
    "waiting approvals": ("tga_approvals_waiting", ("kind",)),
    "their age": ("tga_approvals_oldest_seconds", ("kind",)),
    "recovery": ("tga_recoveries_total", ("result",)),
    "fences, and checkpoints that were fenced": ("tga_fences_total", ("kind",)),
    "runs by state": ("tga_runs", ("state",)),
    "checkpoints put by tier": ("tga_checkpoints_total", ("tier",)),
    "bytes of checkpoints by tier": ("tga_checkpoint_bytes_total", ("tier",)),
    "leases": ("tga_leases_total", ("change",)),
    "sequencer delay": ("tga_log_delay_seconds", ()),
    "signer faults": ("tga_log_faults_total", ("code",)),
    "pool use": ("tga_pool_sessions", ("state",)),
}


@pytest.mark.parametrize("asked", ASKED)
def test_what_an_operator_asks_has_its_metric(asked: str) -> None:
    name, labels = ASKED[asked]
    (metric,) = [one for one in Instruments().all() if one.name == name]
    assert metric.labels == labels


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    return asyncio.run(world.gateway(config=world.config(lease_ms=LEASE_MS)))


async def scrape(world: RunsWorld, gateway: GatewayProcess, *, key: str | None = None) -> Samples:
    headers = {"Authorization": f"Bearer {key or world.keys['admin']}"}
    async with aiohttp.ClientSession() as session, session.get(gateway.url + "/metrics", headers=headers) as answer:
        text = await answer.text()
        assert answer.status == 200, text
        assert answer.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = list(text_string_to_metric_families(text))
    known = {metric.name.removesuffix("_total") for metric in Instruments().all()}
    assert {family.name for family in families} == known, "every metric is there, and no other"
    unread = {metric.name for metric in Instruments().all() if metric.kind == "gauge" and not metric.labels}
    assert not {family.name for family in families if not family.samples} & unread, "a gauge that nothing reads off"
    return {
        sample.name + "".join(f" {label}={value}" for label, value in sample.labels.items()): sample.value
        for family in families
        for sample in family.samples
    }


async def call(gateway: GatewayProcess, key: str, **asked: Any) -> tuple[int, dict[str, Any]]:
    headers = {"Authorization": f"Bearer {key}"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + "/v1/tool-calls", json=asked, headers=headers) as answer,
    ):
        return answer.status, await answer.json()


async def test_calls_are_counted_by_what_became_of_them(world: RunsWorld, gateway: GatewayProcess) -> None:
    agent = world.keys["agent"]
    asked = {"server_id": "bank", "tool_name": "charge", "arguments": {"amount": 3}, "idempotency_key": new_id("key")}
    before = await scrape(world, gateway)
    assert (await call(gateway, agent, **asked))[0] == 200
    assert (await call(gateway, agent, **asked))[0] == 200
    assert (await call(gateway, agent, server_id="bank", tool_name='no"such', arguments={}))[0] >= 400
    status, _ = await call(gateway, agent, server_id="bank", tool_name="fail", arguments={})
    assert status == 200
    after = await scrape(world, gateway)

    def grew(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    executed = "tga_calls_total server=bank tool={} state={} decision=policy_approve"
    assert grew(executed.format("charge", "COMPLETED")) == 1
    assert grew(executed.format("fail", "FAILED")) == 1
    assert grew("tga_calls_repeated_total server=bank") == 1
    refused = [name for name in after if name.startswith("tga_calls_refused_total") and grew(name)]
    assert len(refused) == 1
    assert not any("such" in name for name in after), "a name that is no tool's is nowhere"
    for phase in ("decide", "intent", "wait", "dispatch", "effect", "total"):
        assert grew(f"tga_call_phase_seconds_count server=bank phase={phase}") == 2
    parts = sum(grew(f"tga_call_phase_seconds_sum server=bank phase={phase}") for phase in ("decide", "dispatch"))
    assert 0 < parts <= grew("tga_call_phase_seconds_sum server=bank phase=total")
    assert grew("tga_commits_total result=stored") >= 4
    assert grew("tga_commit_batch_plans_count") >= 1
    assert after["tga_server_up server=bank"] == 1
    assert after["tga_store_up"] == 1
    assert after["tga_pool_sessions state=max"] >= after["tga_pool_sessions state=used"] >= 0
    assert after["process_resident_memory_bytes"] > 1 << 20


async def test_metrics(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Runs, their attempts and checkpoints are counted by what their workers did. The name is the design's."""
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        assert (await caller.see_through(run_id))["state"] == "COMPLETED"
    seen = await scrape(world, gateway)
    assert seen["tga_run_changes_total state=COMPLETED"] == 2, "the run, and its child"
    assert seen["tga_leases_total change=leased"] >= 1
    assert seen["tga_checkpoints_total tier=inline"] >= 3
    assert seen["tga_checkpoint_bytes_total tier=inline"] > 100


async def test_a_checkpoint_under_a_lease_that_is_over_is_counted_as_fenced(
    world: RunsWorld, gateway: GatewayProcess
) -> None:
    program = {"name": new_id("fenced"), "version": "1", "program_digest": "f" * 64}
    step: dict[str, Any] = {"type": "checkpoint", "path": "1", "kind": "step", "name": "late", "input_digest": "d" * 64}
    step |= {"started_at": "2026-01-01T00:00:00.000Z", "duration_ms": 1, "outcome": "OK"}
    step |= {"value": {"tier": "inline", "value": 1}}
    before = await scrape(world, gateway)
    async with world.client("worker", gateway.url) as worker, Caller(world, gateway.url) as caller:
        await worker.ask("POST", "/v1/procedures", program)
        run_id = (await caller.start(program["name"], {}, new_id()))["run_id"]
        asked = {
            "worker": "late-worker-1",
            "name": "late-worker-1",
            "procedures": [program],
            "slots": 1,
            "wait_ms": 20_000,
        }
        (held,) = (await worker.ask("POST", "/v1/worker/lease", asked))["runs"]
        put = {"lease": held["lease"], "attempt": held["attempt"], "after_seq": held["sequence_number"]}
        path = f"/v1/runs/{run_id}/checkpoints"
        given_back = {"type": "release", "reason": "shutting down"}
        assert (await worker.ask("POST", path, {**put, "puts": [], "then": given_back}))["directive"] == "DONE"
        assert (await worker.ask("POST", path, {**put, "puts": [step]}))["directive"] == "STOP"
        await caller.agent.ask("POST", f"/v1/runs/{run_id}/cancel", {})
    after = await scrape(world, gateway)

    def grew(name: str) -> float:
        return after.get(name, 0) - before.get(name, 0)

    assert grew("tga_fences_total kind=run") == 1
    assert grew("tga_checkpoints_total tier=inline") == 0, "what is fenced is not put"
    assert grew("tga_leases_total change=released") == 1


async def test_what_waits_is_read_from_the_store(world: RunsWorld, gateway: GatewayProcess) -> None:
    run_id = new_id()
    async with Caller(world, gateway.url) as caller:
        async with working(world, gateway.url) as worker:
            await caller.start("asks", None, run_id)
            await until(lambda: (run_id, "SUSPENDED") in worker.ended)

        async def is_shown() -> bool:  # what was read a few seconds ago is believed
            seen = await scrape(world, gateway)
            return (
                seen.get("tga_approvals_waiting kind=run") == 1
                and seen["tga_runs state=WAITING"] == 1
                and seen["tga_approvals_oldest_seconds kind=run"] > 0
                and seen["tga_workers"] >= 1
                and seen["tga_log_size"] > 0
            )

        await until(is_shown)
        await caller.answer(run_id, "2", True)
        async with working(world, gateway.url):
            await caller.see_through(run_id)


async def test_only_operators_and_auditors_of_the_installation_read_them(
    world: RunsWorld, gateway: GatewayProcess
) -> None:
    async with (
        await Sessions.open(world.database.gateway_url, sessions_max=1) as sessions,
        await PostgresAccess.open(sessions, world.database.gateway_url) as access,
    ):
        await access.create_tenant("acme")
        of_another = await access.create_key(
            name="eve", principal_id="eve", roles=["admin"], created_by="test", tenant="acme"
        )
        auditor = await access.create_key(name="max", principal_id="max", roles=["auditor"], created_by="test")
    await scrape(world, gateway, key=auditor.text)
    for key, status in ((None, 401), (world.keys["agent"], 403), (world.keys["worker"], 403), (of_another.text, 403)):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        async with aiohttp.ClientSession() as session, session.get(gateway.url + "/metrics", headers=headers) as answer:
            assert answer.status == status
            assert b"tga_calls" not in await answer.read()


def scanned(plan: Any) -> set[str]:
    """Tables that this plan reads as a whole."""
    if isinstance(plan, list):
        return set().union(*(scanned(part) for part in plan))
    found = {plan["Relation Name"]} if plan.get("Node Type") == "Seq Scan" else set()
    return found | scanned(plan.get("Plans", [])) | scanned([plan["Plan"]] if "Plan" in plan else [])


async def test_counting_what_stands_needs_no_table_as_a_whole(world: RunsWorld, gateway: GatewayProcess) -> None:
    """Every count has an index, and ends at a bound: a million traces make it no dearer."""
    async with (
        await Sessions.open(world.database.gateway_url, sessions_max=1) as sessions,
        sessions.reading() as session,
    ):
        await session.execute("SET LOCAL enable_seqscan = off")
        told = await session.fetchval(f"EXPLAIN (FORMAT JSON) {STANDING}", list(RUN_STATES), LEASE_MS)
        found = scanned(json.loads(told))
    assert STANDING.count(f"LIMIT {METRICS_COUNTED_MAX + 1}") == 6
    assert found.isdisjoint({"at_rest", "heads", "runs", "links", "run_requests", "tree_heads", "workers"}), found
