"""Where the gateway refuses how a program ends, or what was to be recorded with its end, the run fails with what the
gateway said. It would be attempted again, and refused again, for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tga_sdk import Context, procedure
from tga_sdk.testing.crashes import Outcome, Setting


class Größe(Exception):
    """A class may be called as Python lets it be."""


@procedure(name="emits")
async def emits(ctx: Context[Any]) -> int:
    await ctx.emit(1, name="two words")  # recorded with what comes next, which is the end
    return 1


@procedure(name="emits-and-fails")
async def emits_and_fails(ctx: Context[Any]) -> int:
    await ctx.emit(1, name="two words")
    raise ValueError("mine")


@procedure(name="raises")
async def raises(ctx: Context[Any]) -> int:
    raise Größe("much")


async def performed(program: Any) -> Outcome:
    return await Setting(program, None, None, None, [], None, None, None).run(None)


@pytest.mark.parametrize("program", [emits, emits_and_fails])
async def test_a_run_fails_with_what_the_gateway_said_of_its_end(program: Any) -> None:
    outcome = await performed(program)
    assert outcome.state == "FAILED"
    assert outcome.error is not None
    assert outcome.error["type"] == "SCHEMA_VIOLATION"
    assert "/puts/0/checkpoint/name" in outcome.error["message"]
    assert [one["artifact_type"] for one in outcome.journal].count("run_end") == 1


async def test_an_error_of_any_name_is_recorded_under_one_that_can_be_printed() -> None:
    outcome = await performed(raises)
    assert (outcome.state, outcome.error) == ("FAILED", {"type": "Gr__e", "message": "much", "retryable": True})
