"""docs/http-api.md names every route of runs, and what it says of roles is what the gateway's table says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from app.edge.permissions import MAY, Action
from tests.api.test_openapi import ROUTES  # compared with the gateway's own there

TEXT = (Path(__file__).parents[2] / "docs" / "http-api.md").read_text()
OF_RUNS = re.compile(r"/v1/(runs|worker|procedures|schedules|triggers|blobs)\b")
COLUMNS = ("agent", "worker", "supervisor", "operator", "auditor")
ROWS: dict[str, tuple[Action, ...]] = {
    "start runs, send events": ("start_run", "trigger"),
    "signal, cancel, retry, fork runs": ("signal_run", "cancel_run", "retry_run", "fork_run"),
    "resume what is parked or diverged, erase a run's payloads": ("resume_run", "erase_run"),
    "make and remove schedules": ("write_schedule",),
    "register procedures; lease, heartbeat, put": ("register_procedure", "work"),
    "submit programs in Lua, where the policy permits it": ("submit_procedure",),
    "read the text of a submitted program": ("read_source",),
    "store blobs": ("write_blob",),
}


def without_names(text: str) -> str:
    return re.sub(r"\{\w+\}", "{}", text)


@pytest.mark.parametrize("route", sorted(route for route in ROUTES if OF_RUNS.search(route)))
def test_a_route_is_told(route: str) -> None:
    assert re.search(rf"{re.escape(without_names(route.split()[1]))}`", without_names(TEXT)), route


@pytest.mark.parametrize("row", ROWS)
def test_a_role_may_what_the_page_says(row: str) -> None:
    (cells,) = re.findall(rf"^\| {re.escape(row)} \|(.*)\|$", TEXT, re.MULTILINE)
    told = {role for role, cell in zip(COLUMNS, cells.split("|"), strict=True) if cell.strip()}
    for action in ROWS[row]:
        assert told == MAY[action], action
