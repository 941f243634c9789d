"""The gateway in memory: schedules, what the policy refuses, and the list of tools."""

from __future__ import annotations

import asyncio
import random
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core.errors import SchemaViolation
from app.domain.runs.schedules import Timetable, next_after, verify_spec
from app.domain.system.documents import CronSpec
from tga_sdk import AsyncClient, Context, Flow, GatewayError, Schedule, Step, ToolError, Worker, procedure
from tga_sdk.testing import Clock, MemoryGateway, Tool, crash_everywhere_async, denied
from tga_sdk.testing.cron import Cron, CronInvalid

HANG_S = 300
ZONES = ["Europe/Berlin", "America/New_York", "UTC", "Africa/Cairo"]
# Around these the clocks are changed in one of the zones.
CHANGES = ["2026-03-29T00:00", "2026-10-25T00:00", "2026-03-08T06:30", "2026-11-01T05:30"]


def field(rng: random.Random, low: int, high: int, star: float) -> str:
    first = rng.randrange(low, high)
    last = rng.randrange(first + 1, high + 1)  # of 3-3/2 the real gateway's library makes 3/2
    said = [str(first), f"{first}-{last}", f"{first}-{last}/{rng.randrange(1, 5)}", f"*/{rng.randrange(1, high)}"]
    return (
        "*" if rng.random() < star else rng.choice([*said, ",".join(str(rng.randrange(low, high + 1)) for _ in "123")])
    )


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32))
def test_cron_is_read_as_the_gateway_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    bounds = ((0, 59, 0.3), (0, rng.choice([3, 23]), 0.3), (1, 31, 0.6), (1, 12, 0.7), (0, 7, 0.6))
    expression, zone = " ".join(field(rng, *one) for one in bounds), rng.choice(ZONES)
    after = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=rng.randrange(365 * 24 * 60))
    if rng.random() < 0.5:
        change = datetime.fromisoformat(rng.choice(CHANGES)).replace(tzinfo=UTC)
        after = change + timedelta(minutes=rng.randrange(-60, 120))
    spec = CronSpec(type="cron", expression=expression, time_zone=zone)
    try:
        verify_spec(spec)
    except SchemaViolation:
        assert Cron.of(expression).after(datetime(2026, 1, 1, tzinfo=UTC), ZoneInfo("UTC")) is None
        return
    real = next_after(Timetable(spec, "2020-01-01T00:00:00.000Z"), f"{after:%Y-%m-%dT%H:%M:%S}.000Z")
    found = Cron.of(expression).after(after, ZoneInfo(zone))
    assert (None if found is None else f"{found:%Y-%m-%dT%H:%M:%S}.000Z") == real, (expression, zone, after)


@pytest.mark.parametrize(
    "expression", ["", "* * * *", "60 * * * *", "5-1 * * * *", "*/0 * * * *", "x * * * *", "* * * * 8"]
)
def test_what_is_no_cron_expression_is_refused(expression: str) -> None:
    with pytest.raises(CronInvalid):
        Cron.of(expression)


async def test_a_flow_runs_when_the_clock_is_moved_to_its_time() -> None:
    async def count(ctx: Context[Any], data: dict[str, Any]) -> dict[str, Any]:
        return {"seen": data["start"] + 1}

    flow = Flow(
        "nightly-count",
        steps=[Step("count", count)],
        trigger=Schedule(cron="30 2 * * *", timezone="Europe/Berlin", input={"start": 1}, missed="all"),
    )
    gateway, ready = MemoryGateway(clock=Clock(datetime(2026, 6, 1, 12, tzinfo=UTC))), asyncio.Event()
    worker = Worker(gateway.url, gateway.key, [flow], transport=gateway.transport, on_ready=ready.set)
    working = asyncio.create_task(worker.run(signals=False))
    async with asyncio.timeout(HANG_S), AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        await ready.wait()
        assert not await client.list()
        gateway.clock.move(days=3)
        await gateway.until(lambda: sum(run.state == "COMPLETED" for run in gateway.engine.runs.values()) == 3)
        found = await client.list()
        assert sorted(run.run_id for run in found) == [
            f"nightly-count:2026-06-0{day}T00:30:00.000Z" for day in (2, 3, 4)
        ]
        assert (await client.result(found[0].run_id))["seen"] == 2
        worker.stop()
        await working
    gateway.close()


async def test_time_that_moves_by_itself_fires_no_schedule() -> None:
    """Else it would never end: crash_everywhere goes on until nothing is due."""

    async def nothing(ctx: Context[Any], data: Any) -> Any:
        return data

    flow = Flow("by-itself", steps=[Step("nothing", nothing)], trigger=Schedule(every=1, input={}))
    tried = await crash_everywhere_async(flow, {})
    assert tried.calm.state == "COMPLETED"


async def test_a_worker_that_cannot_register_is_told_at_once() -> None:
    async def nothing(ctx: Context[Any], data: dict[str, Any]) -> Any:
        return data

    flow = Flow("unfit", steps=[Step("nothing", nothing)], trigger=Schedule(cron="61 * * * *", input={}))
    with pytest.raises(GatewayError, match="the cron expression"):
        await crash_everywhere_async(flow, {})


@procedure(name="refused")
async def refused(ctx: Context[Any], input: dict[str, Any]) -> list[Any]:
    said: list[Any] = []
    for tool, arguments in (("wire", {"amount": 1}), ("charge", {"amount": 5}), ("charge", {"amount": 500})):
        try:
            said.append(await ctx.tool("bank", tool, arguments, retry=2))
        except ToolError as error:
            said.append([error.type, error.message, error.retryable])
    try:
        await ctx.tool("bank", "checked", {"amount": "five"})
    except ToolError as error:
        said.append(error.type)
    return said


def bank() -> dict[str, Any]:
    def charge(amount: int) -> int:
        """Charge so much."""
        return amount

    schema = {"type": "object", "properties": {"amount": {"type": "integer"}}}
    too_much = lambda call: "too much" if call.arguments["amount"] > 100 else None  # noqa: E731
    return {
        "bank.wire": denied("no wires before Monday"),
        "bank.charge": Tool(charge, denied=too_much),
        "bank.checked": Tool(charge, input_schema=schema),
        "shop.list": Tool(list, read_only=True),
    }


async def test_what_the_policy_refuses_is_an_error_that_nobody_tries_again() -> None:
    tried = await crash_everywhere_async(refused, {}, tools=bank())
    assert tried.calm.output["value"] == [
        ["CALL_DENIED", "no wires before Monday", False],
        5,
        ["CALL_DENIED", "too much", False],
        "ARGUMENTS_INVALID",
    ]
    assert [effect.arguments for effect in tried.calm.effects] == [{"amount": 5}]


async def test_a_direct_call_that_the_policy_refuses_says_so() -> None:
    gateway = MemoryGateway(tools=bank())
    async with AsyncClient(gateway.url, gateway.key, transport=gateway.transport) as client:
        with pytest.raises(GatewayError) as caught:
            await client.call("bank", "charge", {"amount": 500}, key="k-1")
        assert (caught.value.code, caught.value.status) == ("CALL_DENIED", 403)
        assert "by the policy: too much" in str(caught.value)
        assert (await client.call("bank", "charge", {"amount": 7}, key="k-1")).output == 7
        listed = await client.tools("bank")
        assert [tool.tool_name for tool in listed] == ["charge", "checked", "wire"]
        assert listed[0].description == "Charge so much."
        assert listed[0].input_schema["properties"]["amount"]["type"] == "integer"
        assert [tool.tool_class for tool in await client.tools("shop")] == ["read"]
    gateway.close()
