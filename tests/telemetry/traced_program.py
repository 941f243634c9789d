"""A program with an agent, served by worker processes that export spans: the SDK, exporter and provider are its own."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor

from tga_sdk import Context, StepError, procedure
from tga_sdk.testing.models import ScriptedModel, call

TOLD = "not-to-be-seen-in-a-span"

provider = TracerProvider(resource=Resource.create({"service.name": "the-worker", "worker.pid": os.getpid()}))
exporter = OTLPSpanExporter(f"{os.environ['COLLECTOR_URL']}/v1/traces")
provider.add_span_processor(SimpleSpanProcessor(exporter))  # what has ended before the kill has arrived
trace.set_tracer_provider(provider)


def look_up(word: str) -> str:
    """Look a word up."""
    if not (marker := Path(os.environ["FLOW_NOTES"]) / "killed").exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return f"{word}: {TOLD}"


@procedure(name="traced-child")
async def child(ctx: Context[None], given: int) -> int:
    return await ctx.step("double", lambda: given * 2)


@procedure(name="traced")
async def traced(ctx: Context[None], question: str) -> Any:
    turns = (call("bank.charge", amount=5), call("look_up", word=TOLD), f"{TOLD}.")
    agent = ctx.agent("researcher", model=ScriptedModel(*turns), tools=[look_up, "bank.charge"], system_prompt=TOLD)

    async def outer() -> int:
        paid = await ctx.tool("bank", "charge", {"amount": 7, "memo": TOLD})
        return int(paid["amount"])

    def failing() -> None:
        raise LookupError(TOLD)

    await ctx.step("outer", outer)
    answer = await agent.run(question)
    with contextlib.suppress(StepError):
        await ctx.step("failing", failing)
    await ctx.gather(lambda: ctx.sleep(0.01), lambda: ctx.step("beside", lambda: 1))
    await ctx.call(child, 2, child=True)
    return [answer, await ctx.approve(TOLD)]
