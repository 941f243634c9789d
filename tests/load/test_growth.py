"""What `bench.soak` calls growth; and runs leave nothing behind in the memory of the gateway that ran them, counted in
bytes. tests/runtime/test_memory.py does the same for calls and repeats."""

from __future__ import annotations

import gc
import tracemalloc

import pytest

from app.domain.runs.engine import table as table_module
from app.postgres.database import Database
from bench.runs import VALUE
from bench.soak import Growth
from tests.runs.engines import Engine, open_engine, step

WARMUP_RUNS, RUNS = 40, 40
BYTES_A_RUN_MAX = 2_000  # a run that is kept has 15,000


@pytest.mark.parametrize(("name", "a_sample", "is_found"), [
    ("descriptors", 0.0, False),
    ("descriptors", 0.25, True),
    ("tasks", 0.25, True),
    ("sessions", 0.25, True),
    ("memory MB", 0.0, False),
    ("memory MB", 0.4, True),
])  # fmt: skip
def test_what_rises_to_the_end_is_found_and_what_fills_up_at_first_is_not(
    name: str, a_sample: float, is_found: bool
) -> None:
    growth = Growth()
    for number in range(60):
        filled = 40 + min(number, 15) * 2  # a cache, up to its bound
        growth.add(name, number * 10.0, filled + a_sample * number + number % 3)
    assert bool(growth.findings()) == is_found, growth.findings()


async def _run(engine: Engine, name: str, count: int) -> int:
    """What the memory holds afterwards."""
    for number in range(count):
        await engine.start(f"{name}-{number}")
        (run,) = await engine.lease(1)
        end = {"type": "complete", "output": {"tier": "inline", "value": 1}, "positions": 1}
        await engine.put(run, run.sequence_number, step("1", VALUE), then=end)
    gc.collect()
    held, _ = tracemalloc.get_traced_memory()
    return held


async def test_runs_leave_nothing_in_memory(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    # The table of runs fills up first; then the oldest goes for each that comes.
    monkeypatch.setattr(table_module, "RUNS_CACHED_MAX", WARMUP_RUNS // 2)
    async with open_engine(database.gateway_url) as engine:
        tracemalloc.start()
        try:
            before = await _run(engine, "warming", WARMUP_RUNS)
            after = await _run(engine, "counted", RUNS)
        finally:
            tracemalloc.stop()
    assert (after - before) / RUNS < BYTES_A_RUN_MAX
