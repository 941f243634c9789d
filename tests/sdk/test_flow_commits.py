"""What a flow costs: that a step has begun is recorded with the end of the one before it."""

from __future__ import annotations

import asyncio
from typing import Any

from tests.sdk.workers import memory_working
from tga_sdk import Context, Flow, Step
from tga_sdk.testing import MemoryGateway, crash_everywhere_async

STEPS = 8


async def one(ctx: Context[Any], data: dict[str, int]) -> dict[str, int]:
    await asyncio.sleep(0.001)  # so that whatever is put meanwhile goes by itself
    return {"count": data.get("count", 0) + 1}


flow = Flow("counted", [Step(f"step-{number}", one) for number in range(STEPS)], data=dict)


async def test_each_step_is_one_put() -> None:
    gateway, puts = MemoryGateway(), []
    put = gateway.put

    async def counted(run_id: str, body: Any, principal: str) -> dict[str, Any]:
        puts.append([said.type for said in body.puts] + ([] if body.then is None else [body.then.type]))
        return await put(run_id, body, principal)

    gateway.put = counted  # type: ignore[method-assign]
    async with memory_working(gateway, flow) as client:
        await client.start("counted", {}, run_id="r-1")
        assert await client.result("r-1", timeout=60) == {"count": STEPS}
    assert puts == [["checkpoint", "step"]] * STEPS + [["checkpoint", "complete"]]


async def test_no_crash_changes_it() -> None:
    small = Flow("counted-small", [Step(name, one) for name in ("first", "second", "third")], data=dict)
    tried = await crash_everywhere_async(small, {})
    assert tried.calm.output["value"] == {"count": 3}
    begun = [(one["artifact_type"], one["path"]) for one in tried.calm.journal if "path" in one]
    pairs = [pair for number in (2, 3, 4) for pair in (("run_intent", f"{number}"), ("run_checkpoint", f"{number}"))]
    assert begun == [("run_checkpoint", "1"), *pairs]
