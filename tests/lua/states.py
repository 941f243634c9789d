"""A program run in a state of a pool, operations answered by a function: what the tests of the sandbox share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.lua.pool import Chunk, Failed, LuaFailure, Pool, Returned, Yielded

LANGUAGE = (Path(__file__).parent / "language.lua").read_text()


def echo(request: Any) -> Any:
    return request


async def run(
    pool: Pool,
    source: str,
    value: Any = None,
    *,
    answer: Callable[[Any], Any] = echo,
    seed: bytes = b"seed",
    is_strict: bool = False,
    epoch_ms: int = 1_700_000_000_000,
) -> Returned | Failed:
    """The end of a program's main thread."""
    state = await pool.state([Chunk("main", source)], seed=seed, is_strict=is_strict, epoch_ms=epoch_ms)
    try:
        outcome = await state.resume(0, value)
        while isinstance(outcome, Yielded):
            outcome = await state.resume(0, answer(outcome.request))
        return outcome
    finally:
        state.close()


async def value_of(pool: Pool, source: str, value: Any = None, **options: Any) -> Any:
    outcome = await run(pool, source, value, **options)
    if isinstance(outcome, Failed):
        raise AssertionError(outcome.error)
    return outcome.value


async def failure_of(pool: Pool, source: str, value: Any = None, **options: Any) -> LuaFailure:
    outcome = await run(pool, source, value, **options)
    if isinstance(outcome, Returned):
        raise AssertionError(outcome)
    return outcome.error
