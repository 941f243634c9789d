"""What is counted of calls that the real runtime executes: each outcome under its own name, and times that add up."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.core.instruments import Instruments
from app.domain.tga.ports import Dispatched
from app.domain.tools import Tool
from app.edge.observing import CallObserver
from app.postgres.database import Database
from tests.runtime.scripted import REFUSED, SUCCESS, TIMED_OUT, WRITE, call, new_key, open_scripted

HOLD = replace(WRITE, on_unknown_outcome="hold")


@pytest.mark.parametrize(
    ("answers", "tool", "state", "retries", "held", "unknown"),
    [
        ([SUCCESS], WRITE, "COMPLETED", 0, 0, 0),
        ([TIMED_OUT, SUCCESS], WRITE, "COMPLETED", 1, 0, 0),
        ([TIMED_OUT, REFUSED, SUCCESS], WRITE, "COMPLETED", 1, 0, 0),  # what was not sent is no send
        ([TIMED_OUT] * 3, WRITE, "FAILED", 2, 0, 1),
        ([TIMED_OUT], HOLD, "EXECUTING", 0, 1, 0),
    ],
)
async def test_each_outcome_is_counted_as_what_it_is(
    database: Database, answers: list[Dispatched], tool: Tool, state: str, retries: int, held: int, unknown: int
) -> None:
    instruments = Instruments()
    observer = CallObserver(instruments)
    async with open_scripted(database.gateway_url, *answers, tool=tool, observer=observer) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == state
    assert instruments.calls.values == {("crm", "create", state, "policy_approve"): 1}
    counted = [one.values.get(("crm",), 0) for one in (instruments.retries, instruments.held)]
    assert counted == [retries, held]
    assert instruments.unknown_outcomes.values.get(("crm",), 0) == unknown


async def test_the_phases_of_a_call_add_up_to_the_whole(database: Database) -> None:
    instruments = Instruments()
    async with open_scripted(database.gateway_url, SUCCESS, observer=CallObserver(instruments)) as scripted:
        for _ in range(3):
            await scripted.runtime.call(call(key=new_key()))
    rows = {phase: row for (_, phase), row in instruments.phase_seconds.values.items()}
    assert set(rows) == {"decide", "intent", "wait", "dispatch", "effect", "total"}
    assert {phase: sum(row[:-1]) for phase, row in rows.items()} == dict.fromkeys(rows, 3)
    whole = rows.pop("total")[-1]
    assert whole > 0
    assert sum(row[-1] for row in rows.values()) == pytest.approx(whole)
