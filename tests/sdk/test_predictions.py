"""Predictions of models in runs: one checkpoint each, tried again by policy, and never asked for in a replay."""

from __future__ import annotations

from typing import Any

from tests.sdk.test_agents import World, agents, gateway
from tests.sdk.test_models import ModelServer, server
from tga_sdk import Context, Retry, StepError, SyncContext, procedure

__all__ = ["agents", "gateway", "server"]


async def test_a_prediction_is_one_checkpoint_and_a_replay_asks_nothing(agents: World, server: ModelServer) -> None:
    server.refusals = 2

    @procedure
    async def upper(ctx: Context[None], text: str) -> str:
        model = ctx.model("upper", {"type": "http", "endpoint": server.url + "/503"}, retry=Retry(2, first=0.001))
        found: dict[str, Any] = await model.predict(text)
        return f"{found['text']}{await ctx.input('more?')}"

    working = await agents.worker(upper)
    await agents.start(upper, "a")
    waiting = await agents.settled()
    await agents.kill(working)
    working = await agents.worker(upper)
    await agents.person.answer(agents.r, waiting.awaits[0], "!")
    ended = await agents.ended()
    await agents.kill(working)
    assert ended.output == "A!", ended.error
    assert len(server.requests) == 3, "two were turned away, one was answered, and the replay sent none"
    assert (await agents.shape())[0] == "1 model upper OK"
    [record] = [one for one in await agents.records() if one["kind"] == "model"]
    assert ["503" in line["text"] for line in record["logs"]] == [True, True, False]


async def test_what_fails_is_recorded_with_its_code(agents: World, server: ModelServer) -> None:
    @procedure
    async def told(ctx: Context[None], path: str) -> list[str]:
        spec = {"type": "http", "endpoint": server.url + path, "timeout": 0.2}
        codes: list[str] = []
        gone = {**spec, "endpoint": server.url + "/404", "timeout": 30}
        for name, said, retries in (("slow", spec, 0), ("gone", gone, 2)):
            try:
                await ctx.model(name, said, retry=Retry(retries, first=0.001)).predict("x")
            except StepError as error:
                codes.append(error.type)
        try:
            await ctx.model("typed", {**gone, "endpoint": server.url}, type=int).predict("x")
        except StepError as error:
            codes.append(error.type)
        return codes

    ended = await agents.run(told, "/slow")
    server.release.set()
    assert ended.output[:2] == ["PREDICTION_TIMED_OUT", "PREDICTION_FAILED"], ended.error
    assert len(ended.output) == 3, "a prediction of another type than was declared is refused"
    assert [path for path, *_ in server.requests].count("/404") == 1, "a 404 is not tried again"


async def test_a_plain_function_has_models_that_block(agents: World, server: ModelServer) -> None:
    @procedure
    def upper(ctx: SyncContext[None], text: str) -> dict[str, Any]:
        found: dict[str, Any] = ctx.model("upper", {"type": "http", "endpoint": server.url}).predict(text)
        return found

    ended = await agents.run(upper, "a")
    assert ended.output == {"text": "A"}, ended.error
