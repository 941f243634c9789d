"""What somebody is told who writes a first program and gets something wrong: which code, what was expected, what was
found, and what to do. Each program here has one mistake."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Callable
from typing import Any, cast

import pytest
from pydantic import BaseModel

from tests.sdk.workers import memory_working
from tga_sdk import Client, Context, ProcedureInvalid, Retry, RunFailed, TgaError, ValueInvalid, procedure
from tga_sdk.testing import MemoryGateway


class Kept(BaseModel):
    count: int = 0


class Connection:
    pass


async def fetched() -> int:
    return 1


@procedure(name="result-of-a-step")
async def result_of_a_step(ctx: Context[None]) -> None:
    await ctx.step("make", Connection)


@procedure(name="called-too-early")
async def called_too_early(ctx: Context[None]) -> None:
    await ctx.step("fetch", fetched())  # type: ignore[call-overload]


@procedure(name="no-function")
async def no_function(ctx: Context[None]) -> None:
    await ctx.step("fetch", 5)  # type: ignore[call-overload]


@procedure(name="await-missing")
async def await_missing(ctx: Context[None]) -> Any:
    return ctx.step("fetch", fetched)


@procedure(name="two-at-once")
async def two_at_once(ctx: Context[None]) -> None:
    await asyncio.gather(ctx.step("a", fetched), ctx.step("b", fetched))


@procedure(name="wrong-output")
async def wrong_output(ctx: Context[None]) -> int:
    return "many"  # type: ignore[return-value]


@procedure(name="no-such-field")
async def no_such_field(ctx: Context[Kept]) -> None:
    ctx.state.counter = 1  # type: ignore[attr-defined]
    await ctx.checkpoint()


@procedure(name="no-such-tool")
async def no_such_tool(ctx: Context[None]) -> None:
    await ctx.tool("bank", "chrage", {"amount": 1})


@procedure(name="sleeps-a-text")
async def sleeps_a_text(ctx: Context[None]) -> None:
    await ctx.sleep("5")  # type: ignore[arg-type]


@procedure(name="retries-a-text")
async def retries_a_text(ctx: Context[None]) -> None:
    await ctx.step("fetch", fetched, retry="3")  # type: ignore[call-overload]


MISTAKES: dict[Any, tuple[str, ...]] = {
    result_of_a_step: ("RUN_VALUE_NOT_SERIALIZABLE", "the result of step make", "Connection", "resume='recompute'"),
    called_too_early: ("PROCEDURE_INVALID", "step fetch: expected a function, found coroutine", "test_newcomers.py:"),
    no_function: ("PROCEDURE_INVALID", "expected a function, found int", "ctx.step('fetch', fn, argument)"),
    await_missing: ("RUN_VALUE_NOT_SERIALIZABLE", "coroutine", "was `await` forgotten"),
    two_at_once: ("OperationsAtOnce", "step b began while operation 1", "await ctx.gather(lambda:"),
    wrong_output: ("RUN_VALUE_INVALID", "output", "integer", "found str"),
    no_such_field: ("RUN_VALUE_INVALID", "state.counter", "it has count"),
    no_such_tool: ("TOOL_NOT_FOUND", "'chrage'", "(expected one of bank.charge)"),
    sleeps_a_text: ("PROCEDURE_INVALID", "expected a number of seconds, found '5'", "test_newcomers.py:"),
    retries_a_text: ("PROCEDURE_INVALID", "retries: expected a whole number from 0 to 1000, found '3'"),
}


@pytest.mark.filterwarnings("ignore:coroutine 'Context.step' was never awaited:RuntimeWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
async def test_each_mistake_is_named_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, logger="tga_sdk")
    memory = MemoryGateway(tools={"bank.charge": lambda amount: {"amount": amount}})
    told = {}
    async with memory_working(memory, *MISTAKES) as client:
        for mistake in MISTAKES:
            run = await client.start(mistake)
            with pytest.raises(RunFailed) as failed:
                await client.result(run.run_id, timeout=60)
            told[mistake.name] = str(failed.value)
    memory.close()
    gc.collect()  # of the coroutine that nobody awaits Python tells now, and in no other test
    for mistake, expected in MISTAKES.items():
        for part in expected:
            assert part in told[mistake.name], told[mistake.name]
    # The worker's log has the line of the program.
    lines = [record.getMessage() for record in caplog.records]
    assert any("failed at" in one and "test_newcomers.py:" in one and "step b began" in one for one in lines), lines


wrongly: Any = procedure  # as somebody without a type checker uses it
DECLARED_WRONG: list[tuple[Callable[[], Any], type[TgaError], str]] = [
    (lambda: wrongly(name="x y")(fetched), ProcedureInvalid, "name of a procedure: expected .*, found 'x y'"),
    (lambda: wrongly(name="x", version=2)(fetched), ProcedureInvalid, "version of a procedure: .*found 2"),
    (lambda: wrongly(name="x")(fetched), ProcedureInvalid, r"expected a function \(ctx, input\) or \(ctx\)"),
    (lambda: Retry(cast("Any", "3")), ProcedureInvalid, "expected a whole number .*found '3'"),
    (lambda: Retry(1, first=cast("Any", "1")), ProcedureInvalid, "first: expected a number of seconds, found '1'"),
    (lambda: called_with(cast("Any", [1])), ValueInvalid, "expected a dict .*found list"),
]


def called_with(args: dict[str, Any]) -> Any:
    return Client("http://127.0.0.1:1", "key").call("bank", "charge", args)


@pytest.mark.parametrize(("declare", "kind", "said"), DECLARED_WRONG)
def test_what_is_declared_wrong_is_refused_where_it_stands(
    declare: Callable[[], Any], kind: type[TgaError], said: str
) -> None:
    with pytest.raises(kind, match=said):
        declare()
