"""Calls and repeats leave nothing behind in the memory of the gateway that made them. `bench.load` looks at its RSS."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Iterator

import pytest

from app.domain.tga import repeats as repeats_module
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.postgres.database import Database
from bench.gateway import Answering, completed, fresh_calls, open_gateway

WARMUP_CALLS, CALLS = 60, 160
BYTES_A_CALL_MAX = 300  # a key, a digest or an answer that is kept is more


async def _call_and_repeat(runtime: TgaRuntime, calls: Iterator[CheckedCall], count: int) -> int:
    """What the memory holds afterwards."""
    for _ in range(count):
        call = next(calls)
        await completed(runtime, call)
        for _ in range(2):
            assert (await runtime.call(call)).replayed
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    return held


async def test_calls_and_repeats_leave_nothing_in_memory(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is remembered of repeats fills up first; then the oldest goes for each that comes.
    monkeypatch.setattr(repeats_module, "REPEAT_KEYS_EXPECTED_MAX", WARMUP_CALLS // 2)
    monkeypatch.setattr(repeats_module, "REPEATS_VERIFIED_MAX", WARMUP_CALLS // 2)
    calls = fresh_calls("memory")
    async with open_gateway(database.gateway_url, Answering()) as gateway:
        tracemalloc.start()
        try:
            before = await _call_and_repeat(gateway.runtime, calls, WARMUP_CALLS)
            after = await _call_and_repeat(gateway.runtime, calls, CALLS)
        finally:
            tracemalloc.stop()
    assert (after - before) / CALLS < BYTES_A_CALL_MAX
