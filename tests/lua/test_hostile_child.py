"""A child that lies: whatever it sends, the gateway meets ChildLost, guilty for the state it asked, and goes on."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.lua import frames
from app.lua.answers import AnswerRefused, Failed, Returned, Yielded, read_answer
from app.lua.frames import Frame, FrameReader, FrameRefused, write_frame
from app.lua.limits import Limits
from app.lua.pool import ChildLost, Chunk, Pool
from tests import sampling
from tests.lua.hostile import ATTACKS
from tests.lua.states import LANGUAGE, value_of

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.lua.hostile import main; main()"
COMMAND = (sys.executable, "-I", "-c", PROGRAM)
EXAMPLES = sampling.share(300, 50)


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=1, language=LANGUAGE, command=COMMAND) as pool:
        yield pool


@pytest.mark.parametrize("first", range(0, len(ATTACKS), 9))
async def test_a_child_that_lies_is_ended_and_only_the_guilty_state_is_guilty(pool: Pool, first: int) -> None:
    for name in list(ATTACKS)[first : first + 9]:
        innocent = await pool.state([Chunk("main", "return call('wait')")], seed=b"", is_strict=False)
        assert await innocent.resume(0, None) == Yielded("wait")
        guilty = await pool.state([Chunk("main", f"-- attack: {name}")], seed=b"", is_strict=False)
        if name == "two answers to one request":
            # The first is the answer; the second, which nothing asked for, ends the child.
            assert await guilty.resume(0, None) == Returned(1)
        else:
            with pytest.raises(ChildLost) as lost:
                await guilty.resume(0, None)
            assert lost.value.is_guilty, name
        with pytest.raises(ChildLost) as lost:
            await innocent.resume(0, "reply")
        assert not lost.value.is_guilty, name
        assert await value_of(pool, "return 1 + call(1)") == 2, name


async def test_a_child_that_says_nothing_is_ended_by_the_watchdog() -> None:
    """The wall clock is what this waits for: the child sleeps, so no limit of CPU ever ends it."""
    limits = Limits(slice_wall_s=1.0)
    async with Pool(limits, children=1, language=LANGUAGE, command=COMMAND) as pool:
        state = await pool.state([Chunk("main", "-- attack: silence")], seed=b"", is_strict=False)
        with pytest.raises(ChildLost) as lost:
            await state.resume(0, None)
        assert (lost.value.reason, lost.value.is_guilty) == ("TIME", True)


async def test_a_child_that_disarms_its_timer_is_ended_by_its_cpu() -> None:
    limits = Limits(slice_cpu_s=0.1, hook_instructions=2**31 - 1)
    disarmed = "import main, child; child.signal.setitimer = lambda *_: None"
    command = (*COMMAND[:3], PROGRAM.replace("import main", disarmed))
    async with Pool(limits, children=1, language=LANGUAGE, command=command) as pool:
        state = await pool.state([Chunk("main", "while true do end")], seed=b"", is_strict=False)
        with pytest.raises(ChildLost) as lost:
            await state.resume(0, None)
        assert (lost.value.reason, lost.value.is_guilty) == ("CPU", True)


async def test_a_closed_pool_says_so_to_those_who_wait(pool: Pool) -> None:
    state = await pool.state([Chunk("main", "while true do end")], seed=b"", is_strict=False)
    slices = asyncio.create_task(state.resume(0, None))
    await asyncio.sleep(0)
    await pool.close()
    with pytest.raises(ChildLost) as lost:
        await slices
    assert not lost.value.is_guilty
    with pytest.raises(ChildLost):
        await pool.state([], seed=b"", is_strict=False)


def _written(value: object) -> bytes:
    return json.dumps(value).encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FAILURES = st.fixed_dictionaries(
    {}, optional=dict.fromkeys(("message", "chunk", "line", "traceback", "value", "limit"), JSON)
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.binary(max_size=60), max_size=6), st.integers(0, 100))
def test_any_bytes_are_frames_or_refused(pieces: list[bytes], frame_bytes_max: int) -> None:
    reader = FrameReader(frame_bytes_max=frame_bytes_max)
    try:
        for piece in pieces:
            for frame in reader.feed(piece):
                assert len(frame.payload) + len(frame.notes) <= frame_bytes_max
    except FrameRefused:
        pass


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.lists(
        st.builds(
            Frame,
            st.binary(min_size=1, max_size=1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**32 - 1),
            st.integers(0, 2**64 - 1),
            st.binary(max_size=20),
            st.binary(max_size=40),
        ),
        max_size=4,
    ),
    st.data(),
)
def test_frames_survive_any_cut(sent: list[Frame], data: st.DataObject) -> None:
    stream = b"".join(write_frame(frame) for frame in sent)
    reader = FrameReader(frame_bytes_max=60)
    read: list[Frame] = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        read += reader.feed(stream[:size])
        stream = stream[size:]
    assert read == sent


@settings(max_examples=EXAMPLES, deadline=None)
@given(
    st.sampled_from([frames.YIELDED, frames.RETURNED, frames.FAILED, frames.READY, b"?"]),
    st.binary(max_size=30) | (JSON | FAILURES).map(_written),
    st.binary(max_size=10) | JSON.map(_written),
)
def test_any_answer_is_a_value_or_refused(kind: bytes, payload: bytes, notes: bytes) -> None:
    try:
        answer = read_answer(Frame(kind, 1, 0, 0, notes, payload), bytes_max=10_000)
    except AnswerRefused:
        return
    assert isinstance(answer, Yielded | Returned | Failed)
    if isinstance(answer, Failed):
        assert isinstance(answer.error.message, str)
        assert answer.error.line is None or type(answer.error.line) is int
