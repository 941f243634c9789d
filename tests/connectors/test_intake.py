"""What tool servers send takes a bounded share of the loop, shared fairly; ordinary answers wait for nobody."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

from app.connectors.intake import Intake, Stream
from app.core.limits import INTAKE_BURST_MS, INTAKE_REFILL_SHARE, INTAKE_SHARE, INTAKE_TURN_MS
from tests.patience import HANG_S


class Work:
    """A thread whose work is told, not measured."""

    def __init__(self) -> None:
        self.cpu_s = 0.0
        self.now_s = 0.0

    def cpu(self) -> float:
        return self.cpu_s

    def clock(self) -> float:
        return self.now_s

    def step(self, stream: Stream, ms: float) -> None:
        with stream:
            self.cpu_s += ms / 1000


async def test_an_ordinary_answer_waits_for_nobody() -> None:
    work = Work()
    intake = Intake(cpu=work.cpu, clock=work.clock)
    greedy = intake.stream()
    work.step(greedy, 1_000)
    waiting = asyncio.create_task(greedy.turn())
    await asyncio.sleep(0)
    ordinary = intake.stream()
    work.step(ordinary, INTAKE_TURN_MS / 2)
    turn = ordinary.turn()
    try:
        turn.send(None)
    except StopIteration:
        pass  # it did not wait at all
    else:
        raise AssertionError("it waited")
    waiting.cancel()


async def test_greedy_streams_share_the_turns_fairly_and_rest_between_them() -> None:
    loop = asyncio.get_running_loop()
    work = Work()
    intake = Intake(cpu=work.cpu)
    given = dict.fromkeys(range(4), 0)
    began = loop.time()

    async def read(name: int) -> None:
        stream = intake.stream()
        work.step(stream, INTAKE_BURST_MS)  # what it has of its own
        while sum(given.values()) < 40:
            await stream.turn()
            given[name] += 1
            work.step(stream, INTAKE_TURN_MS * 1.1)

    await asyncio.gather(*(read(name) for name in given))
    took_ms = (loop.time() - began) * 1000
    # What comes back as time passes is counted too: a slow machine lets each have more of that.
    refilled = len(given) * took_ms * INTAKE_REFILL_SHARE / INTAKE_TURN_MS
    assert took_ms >= (40 - refilled - len(given)) * INTAKE_TURN_MS / INTAKE_SHARE
    assert max(given.values()) - min(given.values()) <= 2 + refilled


async def test_a_step_that_took_too_long_is_paid_back() -> None:
    loop = asyncio.get_running_loop()
    work = Work()
    stream = Intake(cpu=work.cpu, clock=work.clock).stream()
    work.step(stream, INTAKE_BURST_MS + 10 * INTAKE_TURN_MS)
    began = loop.time()
    turning = asyncio.create_task(stream.turn())
    for _ in range(12):
        await asyncio.sleep(0)
    assert not turning.done()  # the clock stands still: no turn comes
    turning.cancel()
    assert loop.time() - began < 60


async def test_time_that_passes_gives_some_of_it_back_but_never_more_than_a_burst() -> None:
    work = Work()
    stream = Intake(cpu=work.cpu, clock=work.clock).stream()
    work.step(stream, INTAKE_BURST_MS * 1.01)
    assert stream.must_rest()
    work.now_s += INTAKE_TURN_MS / 1000 / INTAKE_REFILL_SHARE
    assert not stream.must_rest()
    work.step(stream, INTAKE_TURN_MS * 1.1)
    assert stream.must_rest()
    work.now_s += 10_000
    assert not stream.must_rest()
    work.step(stream, INTAKE_BURST_MS * 1.01)
    assert stream.must_rest()


async def test_other_work_is_done_between_the_steps_of_a_long_look() -> None:
    work = Work()
    intake = Intake(cpu=work.cpu)
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            beats += 1
            await asyncio.sleep(0)

    def steps() -> Iterator[int | None]:
        for number in range(30):
            work.cpu_s += INTAKE_TURN_MS / 1000
            yield number if number % 10 == 9 else None

    beating = asyncio.create_task(beat())
    found = [number async for number in intake.stream().paced(steps())]
    beating.cancel()
    assert found == [9, 19, 29]
    assert beats >= 10


async def test_a_stream_that_is_given_up_leaves_the_turns_to_the_others() -> None:
    work = Work()
    intake = Intake(cpu=work.cpu)
    first, second = intake.stream(), intake.stream()
    for stream in (first, second):
        work.step(stream, INTAKE_BURST_MS + INTAKE_TURN_MS / 2)
    given_up = asyncio.create_task(first.turn())
    await asyncio.sleep(0)
    given_up.cancel()
    async with asyncio.timeout(HANG_S):
        await second.turn()
