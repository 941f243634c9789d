"""Questions to people, as a procedure asks them: their types, their time, and who is told before it is over."""

from __future__ import annotations

from typing import Any

import pytest

from tests.runs.world import Caller, RunsWorld, new_id, until
from tests.sdk.workers import sdk_working
from tga_sdk import Context, Escalation, Review, TimedOut, procedure


@procedure(name="sdk-asking")
async def asking(ctx: Context[Any], input: Any) -> list[Any]:
    """One question of each form."""
    told: list[Any] = [
        await ctx.approve("yes?", escalate=[Escalation(0.01), Escalation(0.02, ["on-call"])]),
        await ctx.input("how many?", type=int),
        await ctx.select("which?", ["red", "blue"]),
    ]
    review = await ctx.review("well?", {"draft": 1}, default=Review(decision="reject"), timeout=0.01)
    told.append(review.decision)
    try:
        await ctx.approve("nobody?", timeout=0.01)
    except TimedOut as error:
        told.append(error.code)
    return told


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return {"approve": ["maybe", True], "input": ["three", 3], "select": ["green", "blue"]}


async def test_each_form_is_answered_by_its_type_and_a_wrong_one_leaves_it_open(
    world: RunsWorld, answers: dict[str, list[Any]]
) -> None:
    config = world.config(lease_ms=60_000)
    config.write_text(config.read_text() + '\n[webhooks.on-call]\nurl = "http://127.0.0.1:9/"\n')
    gateway = await world.gateway(config=config)
    run_id = new_id("sdk")
    async with sdk_working(world, gateway.url, procedures=[asking]), Caller(world, gateway.url) as caller:
        await caller.start("sdk-asking", None, run_id)
        for form, (wrong, right) in answers.items():

            async def is_asked(form: str = form) -> bool:
                return any(one["name"] == form for one in (await caller.look(run_id))["awaits"])

            await until(is_asked)
            path = (await caller.look(run_id))["awaits"][0]["path"]
            if form == "approve":

                async def is_escalated() -> bool:
                    types = [one["artifact_type"] for one in await world.journal(run_id)]
                    return types.count("run_escalation") == 2

                await until(is_escalated)
            said = {"path": path, "answer": wrong}
            status, refused = await caller.person.once("POST", f"/v1/runs/{run_id}/signals", said)
            assert (status, refused["code"]) == (422, "RUN_ANSWER_INVALID"), refused
            assert await caller.answer(run_id, path, right)

        async def has_ended() -> bool:
            return bool((await caller.look(run_id))["state"] == "COMPLETED")

        await until(has_ended)
        assert (await caller.look(run_id))["output"]["value"] == [True, 3, "blue", "reject", "TIMED_OUT"]
    await gateway.kill()
