"""Spans of the SDK: a real worker process is killed in mid-run, and another goes on. Both, the gateway and the tool
server's book are of one trace; what was replayed made no span; nothing of what was said is in one."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from pydantic_ai import Agent

from app.domain.runs.trace_context import traceparent_of
from tests.crash.world import PATIENCE_S
from tests.runs.world import GatewayProcess, RunsWorld, new_id, until
from tests.sdk.serving import Served
from tests.sdk.workers import memory_working
from tests.telemetry.receiver import Collector, Span, collecting
from tests.telemetry.test_traces_and_lines import parents
from tga_sdk import AsyncClient, CallFailed, Client, Context, SettingInvalid, durable, procedure, telemetry
from tga_sdk.testing import MemoryGateway
from tga_sdk.testing.models import ScriptedModel, call
from tga_sdk.wire import Wire

TOLD = "not-to-be-seen-in-a-span"  # as traced_program.py has it
PROGRAM = str(Path(__file__).parent / "traced_program.py")
INTERNAL, SERVER, CLIENT, PRODUCER = 1, 2, 3, 4


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as opened:
        yield opened


@pytest.fixture(scope="module")
def gateway(world: RunsWorld, collector: Collector) -> GatewayProcess:
    config = world.config(lease_ms=2_000)
    config.write_text(config.read_text() + f'\n[telemetry]\ntraces = true\notlp_endpoint = "{collector.url}"\n')
    return asyncio.run(world.gateway(config=config))


@pytest.fixture
def own_spans() -> Iterator[InMemorySpanExporter]:
    """Spans of this process: of the client."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    telemetry.enable(tracer_provider=provider)
    try:
        yield exporter
    finally:
        telemetry.disable()
        provider.shutdown()


def place_of(span: ReadableSpan) -> tuple[str, str]:
    """The ids of its trace and of itself, as a collector has them."""
    context = span.get_span_context()
    assert context is not None
    return f"{context.trace_id:032x}", f"{context.span_id:016x}"


async def test_a_run_is_one_trace_across_attempts_workers_gateway_and_tool_server(
    world: RunsWorld,
    gateway: GatewayProcess,
    collector: Collector,
    own_spans: InMemorySpanExporter,
    tmp_path: Path,
) -> None:
    run_id, workers = new_id("traced"), []

    def serve() -> Served:
        environment = {"COLLECTOR_URL": collector.url, "TGA_TRACES": "true"}
        workers.append(Served(tmp_path, gateway.url, world.keys["worker"], PROGRAM, **environment))
        return workers[-1]

    try:
        async with (
            AsyncClient(gateway.url, world.keys["agent"]) as client,
            AsyncClient(gateway.url, world.keys["supervisor"]) as person,
        ):
            first = serve()
            await first.until_told("traced")
            await client.start("traced", TOLD, run_id=run_id)
            await until(lambda: first.process.poll() is not None)
            assert first.process.returncode == -signal.SIGKILL, first.logged
            serve()

            async def asked() -> list[Any]:
                return [one for one in await person.approvals() if one.run_id == run_id]

            async def is_asked() -> bool:
                return bool(await asked())

            await until(is_asked)
            (question,) = await asked()
            await person.answer(question)
            assert await client.result(run_id, timeout=PATIENCE_S) == [f"{TOLD}.", True]
    finally:
        for worker in workers:
            worker.stop()

    def root() -> list[Span]:
        return [one for one in collector.of(**{"tga.run_id": run_id}) if one.name == "invoke_workflow traced"]

    await asyncio.to_thread(collector.until, root)
    (whole,) = root()
    spans = {one.span_id: one for one in collector.spans if one.trace_id == whole.trace_id}
    of_worker = [one for one in spans.values() if one.resource["service.name"] == "the-worker"]
    attempts = [one for one in spans.values() if one.name == "attempt traced"]
    pids = {one.resource["worker.pid"] for one in of_worker}
    assert pids == {worker.process.pid for worker in workers}, "both workers are in the trace"
    # What both workers did hangs below the gateway's span of their attempt, also of the lost one.
    first_pid = workers[0].process.pid
    lost_with_the_worker = {one.parent_id for one in of_worker if one.resource["worker.pid"] == first_pid}
    for one in of_worker:
        assert one.parent_id in spans or one.parent_id in lost_with_the_worker, one
    roots = {one.name: one.parent_id for one in of_worker if one.name.startswith(("step outer", "gather"))}
    assert set(roots.values()) <= {one.span_id for one in attempts}
    assert [one.parent_id for one in attempts] == [whole.span_id] * len(attempts)

    names = Counter(one.name for one in of_worker)
    # The lost look_up, and the agent around it, were under way: their spans went with the worker. What was recorded
    # before (two charges, the first turns) was replayed by the second worker, and made none there.
    by_pid = Counter((one.name, one.resource["worker.pid"] == first_pid) for one in of_worker)
    assert by_pid["execute_tool charge", True] == 2
    assert by_pid["execute_tool charge", False] == 0, "a replayed call made a span"
    assert by_pid["chat scripted", True] == 2
    assert by_pid["chat scripted", False] == 1, "a replayed turn made a span"
    assert by_pid["execute_tool look_up", False] == 1
    assert by_pid["invoke_agent researcher", False] == 1
    for name in (
        "step outer",
        "step failing",
        "sleep sleep",
        "step beside",
        "child traced-child",
        "step researcher.tools",
    ):
        assert names[name] >= 1, (name, names)
    assert any(one.attributes.get("tga.left") == "SUSPENDED" for one in of_worker if one.name == "ask approve")
    (failing,) = [one for one in of_worker if one.name == "step failing"]
    assert (failing.is_error, failing.attributes["error.type"]) == (True, "LookupError")
    chats = [one for one in of_worker if one.name == "chat scripted"]
    assert chats[0].kind == CLIENT
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "function",
        "gen_ai.request.model": "scripted",
        "gen_ai.response.model": "scripted",
        "gen_ai.usage.input_tokens": 10,
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.conversation.id": run_id,
    }
    assert all(expected.items() <= one.attributes.items() for one in chats), chats
    known = {value for name, value in vars(gen_ai_attributes).items() if name.startswith("GEN_AI")}
    assert {name for one in of_worker for name in one.attributes if name.startswith("gen_ai.")} <= known

    # The worker's call, the gateway's spans of it, and what the tool server was told, one below the other.
    calls = [one for one in spans.values() if one.name == "tools/call charge" and one.kind == SERVER]
    assert {spans[one.parent_id].name for one in calls} == {"execute_tool charge"}
    assert len({one.attributes["gen_ai.tool.call.id"] for one in calls}) == 2
    assert not any(link for one in attempts for link in one.links), "calls in the run's trace need no link"
    for one in calls:
        assert not one.links
        told = parents(world, one.attributes["gen_ai.tool.call.id"])
        assert {parent.split("-")[1] for parent in told} == {whole.trace_id}

    # The caller's trace and the run's are linked, from both sides.
    (start,) = [one for one in own_spans.get_finished_spans() if one.name == "start traced"]
    assert [(f"{one.context.trace_id:032x}", f"{one.context.span_id:016x}") for one in start.links] == [
        (whole.trace_id, whole.span_id)
    ]
    (begun,) = [one for one in spans.values() if one.name == "start traced"]
    assert begun.links == [place_of(start)]
    (of_child,) = [one for one in collector.spans if one.name == "invoke_workflow traced-child"]
    assert (whole.trace_id, whole.span_id) in of_child.links
    seen = "".join(raw.decode("latin-1") for raw in collector.bodies)
    for secret in (TOLD, *world.keys.values()):
        assert secret not in seen


@pytest.mark.parametrize("kind", [Client, AsyncClient])
async def test_a_clients_call_and_the_gateways_spans_are_one_trace(
    kind: type[Client | AsyncClient],
    world: RunsWorld,
    gateway: GatewayProcess,
    collector: Collector,
    own_spans: InMemorySpanExporter,
) -> None:
    client = kind(gateway.url, world.keys["agent"])

    async def asked(*given: Any) -> Any:
        if isinstance(client, AsyncClient):
            return await client.call(*given)
        return await asyncio.to_thread(client.call, *given)

    result = await asked("bank", "charge", {"amount": 3})
    with pytest.raises(CallFailed):
        await asked("bank", "fail", {})
    (done, failed) = own_spans.get_finished_spans()
    assert (done.name, failed.name) == ("execute_tool charge", "execute_tool fail")
    assert (failed.attributes or {})["error.type"]
    await asyncio.to_thread(collector.until, lambda: collector.of(**{"tga.trace_id": result.trace_id}))
    (served,) = collector.of(**{"tga.trace_id": result.trace_id})
    assert (served.trace_id, served.parent_id) == place_of(done)
    closing = client.close()
    if closing is not None:
        await closing


@procedure(name="said")
async def said(ctx: Context[None]) -> str:
    turns = (call("note", text="an argument"), call("bank.charge", card="4111"), "an answer")
    found = await durable(Agent(ScriptedModel(*turns), name="sayer", tools=[note]), tools=["bank.charge"]).run(
        "a prompt"
    )
    return str(found.output)


def note(text: str) -> str:
    """Note a text."""
    return text


async def test_the_gateway_in_memory_says_the_context_that_the_real_one_says() -> None:
    memory = MemoryGateway()
    async with AsyncClient(memory.url, memory.key, transport=memory.transport) as client:
        wire = Wire(memory.url, memory.key, transport=memory.transport)
        await wire.ask("POST", "/v1/procedures", said.registration())
        await client.start("said", run_id="one-trace")
        asked = {"worker": "w-0123456789", "name": "w", "procedures": [said.offer()], "slots": 1, "wait_ms": 0}
        (leased,) = (await wire.ask("POST", "/v1/worker/lease", asked))["runs"]
    memory.close()
    assert leased["traceparent"] == traceparent_of("one-trace", attempt=1)


async def test_what_is_said_is_recorded_when_it_is_asked_for_and_arguments_of_the_gateways_tools_never() -> None:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    for content, is_there in ((False, False), (True, True)):
        telemetry.enable(content=content, tracer_provider=provider)
        try:
            memory = MemoryGateway(tools={"bank.charge": lambda card: {"card": card}})
            async with memory_working(memory, said) as client:
                await client.start(said, run_id="said")
                assert await client.result("said", timeout=PATIENCE_S) == "an answer"
            memory.close()
        finally:
            telemetry.disable()
        spans = exporter.get_finished_spans()
        exporter.clear()
        written = " ".join(str(dict(one.attributes or {})) for one in spans)
        for text in ("a prompt", "an argument", "an answer"):
            assert (text in written) is is_there, (text, content, written)
        assert "4111" not in written
        of_run = [one for one in spans if one.name != "start said"]
        assert len({place_of(one)[0] for one in of_run}) == 1
        assert {"chat scripted", "execute_tool note", "execute_tool charge"} <= {one.name for one in spans}
    provider.shutdown()


def test_without_it_nothing_of_opentelemetry_is_imported_and_without_the_extra_it_says_what_to_install() -> None:
    off = "import tga_sdk, sys; tga_sdk.Worker; tga_sdk.Client; tga_sdk.Context; "
    off += "assert not [one for one in sys.modules if one.startswith('opentelemetry')]"
    missing = "import sys; sys.modules['opentelemetry'] = None; from tga_sdk import telemetry; telemetry.enable()"
    assert subprocess.run([sys.executable, "-c", off], capture_output=True, check=False).returncode == 0
    told = subprocess.run([sys.executable, "-c", missing], capture_output=True, text=True, check=False).stderr
    assert "pip install 'tga-sdk[otel]'" in told


def test_a_setting_that_is_neither_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TGA_TRACES", "yes please")
    with pytest.raises(SettingInvalid, match="expected true or false"):
        Client("http://127.0.0.1:1", "key")
