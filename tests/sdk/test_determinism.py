"""What a program sees live it sees in a replay, and the guard tells of the lines where that cannot be: on a real
gateway, with the SDK's worker in this process."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import sys
import threading
import uuid
from collections.abc import AsyncIterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import BaseModel, Field

from tests.patience import HANG_S
from tests.runs.world import new_id
from tests.sdk.gateways import Gateways
from tga_sdk import AsyncClient, Context, StepError, SyncContext, TimedOut, Worker, errors, guard, procedure

_numbers = count()


@contextlib.asynccontextmanager
async def serving(gateways: Gateways, *procedures: Any, strict: bool = False) -> AsyncIterator[None]:
    """A worker until the block ends; then it is gone at once, as in a crash: its runs stay leased."""
    ready = asyncio.Event()
    worker = Worker(
        gateways.direct_url,
        gateways.world.keys["worker"],
        procedures,
        strict_determinism=strict,
        on_ready=ready.set,
    )
    task = asyncio.create_task(worker.run(signals=False))
    try:
        await asyncio.wait({task, asyncio.create_task(ready.wait())}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        guard.uninstall()


@contextlib.asynccontextmanager
async def asking(gateways: Gateways) -> AsyncIterator[AsyncClient]:
    client = AsyncClient(gateways.url, gateways.world.keys["admin"])
    try:
        yield client
    finally:
        await client.close()


class Attempts:
    """What each attempt of a program saw. The first one ends in a crash at `hold`, where nothing is recorded yet."""

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.reached = asyncio.Event()

    def begin(self) -> None:
        self.seen.append([])

    def see(self, *values: Any) -> None:
        self.seen[-1].extend(values)

    async def hold(self) -> None:
        self.reached.set()
        if len(self.seen) == 1:
            await asyncio.Event().wait()


async def twice(gateways: Gateways, attempts: Attempts, program: Any, given: Any = None) -> Any:
    """The result of a run whose worker dies at `hold`, and which another one ends."""
    async with asking(gateways) as client:
        async with serving(gateways, program):
            run = await client.start(program.name, given, new_id())
            await asyncio.wait_for(attempts.reached.wait(), HANG_S)
        async with serving(gateways, program):
            return await client.result(run.run_id, timeout=HANG_S)


# The guard, in a worker.

PROGRAMS = """
import asyncio, time, random
from datetime import UTC, datetime
from tga_sdk import procedure

async def branch(ctx):
    await ctx.sleep(0.001)
    return random.random()

@procedure(name="{name}-asking")
async def asks(ctx, input):
    await ctx.step("first", time.time)
    moment = time.time()
    await ctx.step("second", lambda: time.time() + random.random() + datetime.now(UTC).timestamp())
    await ctx.gather(lambda: branch(ctx), lambda: ctx.sleep(0.001))
    return moment > 0

@procedure(name="{name}-plain")
def plain(ctx, input):
    ctx.step("first", time.time)
    moment = datetime.now(UTC)
    return moment.year

@procedure(name="{name}-only-ctx")
async def only_ctx(ctx, input):
    now = await ctx.now()
    drawn = [ctx.random(), str(ctx.uuid())]
    async def body():
        time.time()
        await ctx.step("inner", random.random)
        return await asyncio.to_thread(time.time)
    await ctx.step("outer", body)
    await ctx.gather(lambda: ctx.step("a", time.time), lambda: ctx.step("b", random.random))
    await ctx.call(called, {{}})
    await ctx.sleep(0.001)
    ctx.log(f"{{now}} {{drawn}} {{ctx.attempt}} {{ctx.key}}")
    await ctx.emit({{"at": now.isoformat()}})
    await ctx.checkpoint()
    return now.year

@procedure(name="{name}-called")
def called(ctx, input):
    return ctx.step("time", time.time)
"""


@pytest.fixture
def programs(tmp_path: Path) -> Any:
    """A file of procedures as a worker imports it."""
    name = f"watched-{next(_numbers)}"
    file = tmp_path / f"{name}.py"
    file.write_text(PROGRAMS.format(name=name))
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[name]


def all_of(programs: Any) -> list[Any]:
    return [programs.asks, programs.plain, programs.only_ctx, programs.called]


async def logs_of(client: AsyncClient, run_id: str) -> list[str]:
    return [line["text"] async for entry in client.watch(run_id) for line in (entry.artifact or {}).get("logs", ())]


async def test_a_worker_warns_of_the_line_in_its_log_and_in_the_runs(
    gateways: Gateways, programs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tga_sdk")
    async with asking(gateways) as client, serving(gateways, *all_of(programs)):
        run = await client.start(programs.asks.name, {}, new_id())
        assert await client.result(run.run_id, timeout=HANG_S) is True
        plain = await client.start(programs.plain.name, {}, new_id())
        assert await client.result(plain.run_id, timeout=HANG_S) > 2000
        in_run = [line.partition(" outside")[0] for line in await logs_of(client, run.run_id)]
        in_plain = [line.partition(" outside")[0] for line in await logs_of(client, plain.run_id)]
    assert in_run == [f"{programs.__file__}:13: time.time()", f"{programs.__file__}:8: random.random()"]
    assert in_plain == [f"{programs.__file__}:21: datetime.now()"]
    told = [record.getMessage() for record in caplog.records if "outside a recorded operation" in record.getMessage()]
    assert [message.partition(" outside")[0] for message in told] == [
        f"run {run.run_id} at 2: {programs.__file__}:13: time.time()",
        f"run {run.run_id} at 3:1.2: {programs.__file__}:8: random.random()",
        f"run {plain.run_id} at 2: {programs.__file__}:21: datetime.now()",
    ]


async def test_a_strict_worker_fails_the_run_at_the_line(gateways: Gateways, programs: Any) -> None:
    async with asking(gateways) as client, serving(gateways, *all_of(programs), strict=True):
        for program, line in ((programs.asks, "13: time.time()"), (programs.plain, "21: datetime.now()")):
            run = await client.start(program.name, {}, new_id())
            with pytest.raises(errors.TgaError) as failed:
                await client.result(run.run_id, timeout=HANG_S)
            assert f"{programs.__file__}:{line} outside a recorded operation" in str(failed.value)
            shown = await client.status(run.run_id)
            assert shown.status == "failed"


async def test_a_strict_start_fails_its_run_at_the_line_whatever_the_worker_is_set_to(
    gateways: Gateways, programs: Any
) -> None:
    async with asking(gateways) as client, serving(gateways, *all_of(programs)):
        run = await client.start(programs.asks.name, {}, new_id(), strict_determinism=True)
        with pytest.raises(errors.TgaError) as failed:
            await client.result(run.run_id, timeout=HANG_S)
        assert f"{programs.__file__}:13: time.time() outside a recorded operation" in str(failed.value)
        other = await client.start(programs.asks.name, {}, new_id())
        assert await client.result(other.run_id, timeout=HANG_S) is True


async def test_a_program_that_only_uses_ctx_is_never_told_anything(
    gateways: Gateways, programs: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async with asking(gateways) as client, serving(gateways, *all_of(programs), strict=True):
        run = await client.start(programs.only_ctx.name, {}, new_id())
        assert await client.result(run.run_id, timeout=HANG_S) > 2000
    assert [r for r in caplog.records if "outside a recorded operation" in r.getMessage()] == []


# Live and replayed.


async def test_what_a_body_changes_in_its_arguments_is_not_seen_by_the_program(gateways: Gateways) -> None:
    attempts = Attempts()

    class Basket(BaseModel):
        items: list[int] = []

    def sold(items: list[int], basket: Basket) -> int:
        items.append(9)
        basket.items.append(9)
        return len(items)

    @procedure(name=f"arguments-{next(_numbers)}")
    async def program(ctx: Context[Any], input: Any) -> Any:
        attempts.begin()
        items, basket = [1], Basket(items=[2])
        attempts.see(await ctx.step("sold", sold, items, basket), list(items), list(basket.items))
        await ctx.step("hold", attempts.hold)
        return items

    assert await twice(gateways, attempts, program) == [1]
    assert attempts.seen[0] == attempts.seen[1] == [2, [1], [2]]


async def test_a_try_does_not_see_what_the_try_before_did_to_its_arguments(gateways: Gateways) -> None:
    async with asking(gateways) as client:

        def drained(items: list[int]) -> int:
            items.pop()
            if len(items) > 1:
                raise ValueError("the first try")
            return len(items)

        @procedure(name=f"tries-{next(_numbers)}")
        async def program(ctx: Context[Any], input: Any) -> Any:
            try:
                return await ctx.step("drained", drained, [1, 2, 3], retry=1)
            except StepError as error:
                return error.message

        async with serving(gateways, program):
            run = await client.start(program.name, None, new_id())
            assert await client.result(run.run_id, timeout=HANG_S) == "the first try"


async def test_an_error_looks_the_same_live_and_in_a_replay(gateways: Gateways) -> None:
    attempts = Attempts()

    async def boom() -> None:
        raise KeyError("x")

    @procedure(name=f"errors-{next(_numbers)}")
    async def program(ctx: Context[Any], input: Any) -> Any:
        attempts.begin()
        for number in range(2):
            try:
                await (ctx.gather(boom) if number else ctx.step("boom", boom))
            except Exception as error:
                attempts.see(type(error), str(error), error.__cause__, error.__context__, error.args)
        await ctx.step("hold", attempts.hold)

    await twice(gateways, attempts, program)
    assert attempts.seen[0] == attempts.seen[1]
    assert len(attempts.seen[0]) == 10


async def test_draws_of_a_fork_are_those_of_its_source_up_to_where_it_was_forked(gateways: Gateways) -> None:
    seen: list[list[Any]] = []

    @procedure(name=f"draws-{next(_numbers)}")
    async def program(ctx: Context[Any], input: Any) -> Any:
        drawn = [ctx.random(), str(ctx.uuid())]
        await ctx.step("first", lambda given: given, drawn)

        async def outer() -> None:
            drawn.append(ctx.random())
            await ctx.step("inner", lambda given: given, drawn)

        await ctx.step("outer", outer)
        later = [ctx.random(), str(ctx.uuid())]
        await ctx.step("later", lambda given: given, later)
        seen.append([drawn[:2], later])
        return later

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        first = await client.result(run.run_id, timeout=HANG_S)
        entries = [entry async for entry in client.watch(run.run_id)]
        at = next(e.sequence_number for e in entries if e.artifact and e.artifact.get("name") == "outer")
        fork = await client.fork(run.run_id, at=at)
        second = await client.result(fork.run_id, timeout=HANG_S)
        again = await client.fork(fork.run_id)
        third = await client.result(again.run_id, timeout=HANG_S)
    assert seen[0][0] == seen[1][0] == seen[2][0]
    assert first != second, "what a fork draws for itself is its own"
    assert second == third, "and a fork of the whole of it has drawn the same"


class Stamped(BaseModel):
    name: str = "x"
    made_by: str = Field(default_factory=lambda: str(uuid.uuid4()))


async def test_a_default_that_is_made_anew_in_each_attempt_is_told(
    gateways: Gateways, caplog: pytest.LogCaptureFixture
) -> None:
    @procedure(name=f"defaults-{next(_numbers)}")
    async def program(ctx: Context[Any], input: Stamped) -> str:
        return input.made_by

    async with asking(gateways) as client:
        async with serving(gateways, program):
            run = await client.start(program.name, {"made_by": "caller"}, new_id())
            assert await client.result(run.run_id, timeout=HANG_S) == "caller"
            assert "made anew" not in caplog.text
            run = await client.start(program.name, {}, new_id())
            await client.result(run.run_id, timeout=HANG_S)
            assert f"run {run.run_id}" in caplog.text
            assert "a default of input, made anew each time," in caplog.text
        async with serving(gateways, program, strict=True):
            run = await client.start(program.name, {}, new_id())
            with pytest.raises(errors.TgaError, match="a default of input"):
                await client.result(run.run_id, timeout=HANG_S)


async def test_a_state_begins_the_same_in_every_attempt(gateways: Gateways) -> None:
    """Also when the first operation is one that carries no state."""
    attempts = Attempts()

    @procedure(name=f"states-{next(_numbers)}")
    async def program(ctx: Context[Stamped]) -> str:
        attempts.begin()
        attempts.see(ctx.state.made_by)
        await ctx.sleep(0.001)
        attempts.see(ctx.state.made_by)
        await ctx.step("hold", attempts.hold)
        return ctx.state.made_by

    result = await twice(gateways, attempts, program)
    assert attempts.seen == [[result, result], [result, result]]


async def test_a_run_that_failed_at_its_very_end_goes_on_to_it_when_it_is_retried(gateways: Gateways) -> None:
    """Its last log lines were recorded together with the failure; a replay performs that checkpoint again."""
    mended = asyncio.Event()

    @procedure(name=f"ends-{next(_numbers)}")
    async def program(ctx: Context[Any]) -> Any:
        await ctx.step("first", int)
        if not mended.is_set():
            ctx.log("only before it was mended")
        return "fine" if mended.is_set() else object()

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        with pytest.raises(errors.TgaError, match="RUN_VALUE_NOT_SERIALIZABLE"):
            await client.result(run.run_id, timeout=HANG_S)
        mended.set()
        await client.retry(run.run_id, rationale="mended")
        assert await client.result(run.run_id, timeout=HANG_S) == "fine"


async def test_a_body_that_took_too_long_performs_nothing_more(gateways: Gateways) -> None:
    """A thread cannot be ended; but what it asks of ctx after its time is up is refused to it."""
    given_up, refused, ended = threading.Event(), list[BaseException](), threading.Event()

    def slow(ctx: SyncContext[Any]) -> None:
        given_up.wait(HANG_S)
        try:
            ctx.step("stray", int)
        except BaseException as error:
            refused.append(error)
            raise
        finally:
            ended.set()

    @procedure(name=f"slow-{next(_numbers)}")
    def program(ctx: SyncContext[Any]) -> Any:
        try:
            ctx.step("slow", lambda: slow(ctx), timeout=0.05)
        except TimedOut:
            given_up.set()
            ended.wait(HANG_S)
        return ctx.step("after", lambda: "after")

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        assert await client.result(run.run_id, timeout=HANG_S) == "after"
        names = [record.get("name") for record in await client.checkpoints(run.run_id)]
    assert [type(error) for error in refused] == [errors.Stop]
    assert "stray" not in names


async def test_an_event_that_cannot_be_shown_leaves_the_program_as_it_was(gateways: Gateways) -> None:
    @procedure(name=f"events-{next(_numbers)}")
    async def program(ctx: Context[Any]) -> Any:
        try:
            await ctx.emit(object())
        except errors.ValueNotSerializable:
            return await ctx.step("after", lambda: "after")

    async with asking(gateways) as client, serving(gateways, program):
        run = await client.start(program.name, None, new_id())
        assert await client.result(run.run_id, timeout=HANG_S) == "after"
