"""A real gateway that tells a collector and its log of calls and runs: whole, linked, on one line each, no secrets."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from app.domain.tga.transitions import TRACE
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until, working
from tests.telemetry.receiver import Collector, Span, collecting

CARD = "4111111111111111"
TRACE_ID = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
CLIENT, SERVER = 3, 2


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(world: RunsWorld, collector: Collector) -> GatewayProcess:
    config = world.config(lease_ms=60_000)
    pay_card = '[servers.bank.tools.pay_card]\nclass = "write"\nsecret_arguments = ["/card"]\n\n'
    told = f'\n[telemetry]\nlog_format = "json"\ntraces = true\notlp_endpoint = "{collector.url}"\n'
    config.write_text(config.read_text().replace("[policy]", pay_card + "[policy]") + told)
    return asyncio.run(world.gateway(config=config))


async def call(gateway: GatewayProcess, key: str, headers: dict[str, str] | None = None, **asked: Any) -> Any:
    sent = {"Authorization": f"Bearer {key}", **(headers or {})}
    async with (
        aiohttp.ClientSession() as session,
        session.post(gateway.url + "/v1/tool-calls", json={"server_id": "bank", **asked}, headers=sent) as answer,
    ):
        return await answer.json()


def lines(gateway: GatewayProcess, **wanted: str) -> list[dict[str, Any]]:
    """The lines of calls in the gateway's log; every line that begins an object is one."""
    found = [json.loads(line) for line in gateway.log().splitlines() if line.startswith("{")]
    return [line for line in found if all(line.get(name) == value for name, value in wanted.items())]


def parents(world: RunsWorld, tool_call_id: str) -> list[str]:
    """What the tool server was told of the trace, by its own book."""
    book = [json.loads(line) for line in world.bank.book.read_text().splitlines()]
    asked = [line for line in book if line["event"] == "request" and line["tool_call_id"] == tool_call_id]
    assert asked, "the bank was not asked"
    return [line["traceparent"] for line in asked]


def phases(collector: Collector, root: Span) -> list[Span]:
    return sorted((one for one in collector.spans if one.parent_id == root.span_id), key=lambda one: one.start_ns)


async def test_a_call_is_one_trace_with_a_span_for_each_phase(
    world: RunsWorld, gateway: GatewayProcess, collector: Collector
) -> None:
    headers = {"traceparent": f"00-{TRACE_ID}-{PARENT}-01"}
    asked: dict[str, Any] = {"tool_name": "charge", "arguments": {"amount": 3}, "idempotency_key": new_id("key")}
    answer = await call(gateway, world.keys["agent"], headers, **asked)
    trace_id = answer["trace_id"]
    await asyncio.to_thread(collector.until, lambda: collector.of(**{"tga.trace_id": trace_id}))
    (root,) = collector.of(**{"tga.trace_id": trace_id})
    assert (root.trace_id, root.parent_id, root.kind) == (TRACE_ID, PARENT, SERVER)
    assert root.name == "tools/call charge"
    assert root.resource["service.name"] == "tga-gateway"
    expected = {
        "mcp.method.name": "tools/call",
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "charge",
        "gen_ai.tool.call.id": answer["tool_call_id"],
        "tga.server": "bank",
        "tga.state": "COMPLETED",
        "tga.decision": "policy_approve",
    }
    assert expected.items() <= root.attributes.items()
    assert not root.is_error
    inner = phases(collector, root)
    assert [one.name for one in inner] == ["decide", "append intent", "wait", "tools/call charge", "append effect"]
    assert all(one.trace_id == TRACE_ID for one in inner)
    assert inner[0].start_ns == root.start_ns
    assert inner[-1].end_ns == root.end_ns
    assert all(before.end_ns == after.start_ns for before, after in pairwise(inner))
    # What the tool server was told is its parent: the span of the send.
    dispatch = inner[3]
    assert dispatch.kind == CLIENT
    assert dispatch.span_id == answer["tool_call_id"].replace("-", "")[-16:]
    assert parents(world, answer["tool_call_id"]) == [f"00-{TRACE_ID}-{dispatch.span_id}-01"]

    def is_told() -> bool:
        return bool(lines(gateway, trace_id=trace_id))

    await until(is_told)
    (line,) = lines(gateway, trace_id=trace_id)
    assert (line["event"], line["otel_trace_id"], line["state"]) == ("call", TRACE_ID, "COMPLETED")
    assert line["duration_ms"] > 0

    again = await call(gateway, world.keys["agent"], {"traceparent": f"00-{TRACE_ID}-{'1' * 16}-01"}, **asked)
    assert again["trace_id"] == trace_id
    await asyncio.to_thread(collector.until, lambda: collector.of(**{"tga.replayed": True}))
    (repeat,) = collector.of(**{"tga.replayed": True})
    assert (repeat.trace_id, repeat.parent_id) == (TRACE_ID, "1" * 16)
    await until(lambda: bool(lines(gateway, trace_id=trace_id, event="repeat")))


async def test_what_its_caller_does_not_sample_is_not_sampled(
    world: RunsWorld, gateway: GatewayProcess, collector: Collector
) -> None:
    unsampled = {"traceparent": f"00-{'2' * 32}-{PARENT}-00"}
    answer = await call(gateway, world.keys["agent"], unsampled, tool_name="balance", arguments={})
    own = answer["tool_call_id"].replace("-", "")[-16:]
    assert parents(world, answer["tool_call_id"]) == [f"00-{'2' * 32}-{own}-00"], "the tool server would sample it"
    failed = await call(gateway, world.keys["agent"], tool_name="fail", arguments={})
    trace_id = failed["trace_id"]
    await asyncio.to_thread(collector.until, lambda: collector.of(**{"tga.trace_id": trace_id}))
    assert not [one for one in collector.spans if one.trace_id == "2" * 32]
    (root,) = collector.of(**{"tga.trace_id": trace_id})
    assert root.trace_id == trace_id.replace("-", ""), "without a caller's trace it is the call's own"
    assert root.is_error
    assert root.attributes["error.type"]


async def test_a_run_is_a_trace_that_is_linked_with_its_calls(
    world: RunsWorld, gateway: GatewayProcess, collector: Collector
) -> None:
    run_id = new_id()
    async with working(world, gateway.url), Caller(world, gateway.url) as caller:
        await caller.start("everything", {"user": 7}, run_id)
        await caller.see_through(run_id)

    def roots() -> list[Span]:
        return [one for one in collector.of(**{"tga.run_id": run_id}) if one.name == "invoke_workflow everything"]

    await asyncio.to_thread(collector.until, roots)
    (root,) = roots()
    assert root.attributes["gen_ai.operation.name"] == "invoke_workflow"
    assert root.attributes["gen_ai.workflow.name"] == "everything"
    assert root.attributes["tga.state"] == "COMPLETED"
    attempts = [one for one in collector.spans if one.parent_id == root.span_id]
    assert attempts
    assert {one.name for one in attempts} == {"attempt everything"}
    assert all(one.start_ns >= root.start_ns - 1_000_000 for one in attempts)
    calls = [one for one in collector.of(**{"tga.run_id": run_id}) if one.name.startswith("tools/call")]
    assert len(calls) == 2
    assert all(one.links == [(root.trace_id, root.span_id)] for one in calls)
    linked = {link for one in attempts for link in one.links}
    assert {(one.trace_id, one.span_id) for one in calls} == linked


async def test_neither_lines_nor_spans_hold_secrets_and_each_line_is_one(
    world: RunsWorld, gateway: GatewayProcess, collector: Collector
) -> None:
    key = new_id("key") + "-not-to-be-seen"
    asked: dict[str, Any] = {"tool_name": "pay_card", "arguments": {"amount": 3, "card": CARD}, "idempotency_key": key}
    answer = await call(gateway, world.keys["agent"], **asked)
    assert answer["state"] in TRACE.terminal_states
    hostile = 'x" state=COMPLETED'
    await call(gateway, world.keys["agent"], tool_name=hostile.replace(" ", "\u2028"), arguments={"card": CARD})
    await call(gateway, world.keys["agent"], tool_name='x"forged=1', arguments={"card": CARD})
    trace_id = answer["trace_id"]
    await asyncio.to_thread(collector.until, lambda: collector.of(**{"tga.trace_id": trace_id}))
    await until(lambda: bool(lines(gateway, trace_id=trace_id)) and bool(lines(gateway, tool='x"forged=1')))
    seen = gateway.log() + "".join(raw.decode("latin-1") for raw in collector.bodies)
    for secret in (CARD, key, world.keys["agent"], world.keys["admin"], "not-to-be-seen"):
        assert secret not in seen
    for line in gateway.log().splitlines():
        if "tga.calls" in line:
            assert json.loads(line)["logger"] == "tga.calls"


async def test_a_collector_that_is_away_holds_nobody(world: RunsWorld, collector: Collector) -> None:
    """Spans are lost and counted; calls are answered; the gateway ends when it is told to."""
    with collecting() as gone:
        url = gone.url
    config = world.config(lease_ms=60_000)
    told = f'\n[telemetry]\nmetrics = "anyone"\ntraces = true\notlp_endpoint = "{url}"\n'
    config.write_text(config.read_text() + told)
    gateway = await world.gateway(config=config)
    for _ in range(3):
        answer = await call(gateway, world.keys["agent"], tool_name="balance", arguments={})
        assert answer["state"] == "COMPLETED"

    async def is_counted() -> bool:
        async with aiohttp.ClientSession() as session, session.get(gateway.url + "/metrics") as shown:
            text = await shown.text()
        lost = [line for line in text.splitlines() if line.startswith('tga_spans_total{result="failed"}')]
        return bool(lost) and float(lost[0].split()[-1]) >= 18

    await until(is_counted)
    assert "Traceback" not in gateway.log()
    log = gateway.log()
    assert log.count("INFO tga.calls: call trace_id=") == 3, log
    gateway.signal(signal.SIGTERM)
    await until(lambda: not gateway.is_alive())
