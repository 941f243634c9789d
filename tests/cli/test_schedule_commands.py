"""Schedules from a terminal: made, looked at, changed and removed; nothing is changed or removed unasked."""

from __future__ import annotations

import json

import pytest

from tests.cli.hand_worker import HandWorker, may_start
from tests.cli.world import World

NIGHTLY = ("schedules", "create", "nightly", "onboard", "--input", '{"of":"yesterday"}', "--cron", "30 2 * * *")


@pytest.fixture(scope="module")
def run_world(still_world: World) -> World:
    may_start(still_world)
    still_world.start()
    HandWorker(still_world, still_world.new_key("worker-1", "worker")).register()
    assert "No schedules" in still_world.tga("schedules", "list").stdout
    made = still_world.tga(*NIGHTLY, "--zone", "Europe/Berlin")
    assert (made.returncode, "Schedule nightly is made: next at 2" in made.stdout) == (0, True), made.stderr
    return still_world


def test_a_schedule_is_made_listed_and_shown(run_world: World) -> None:
    again = run_world.tga(*NIGHTLY, "--zone", "Europe/Berlin")
    assert (again.returncode, "Schedule nightly is as it was" in again.stdout) == (0, True)
    listed = run_world.tga("schedules", "list")
    assert listed.returncode == 0
    assert "30 2 * * * Europe/Berlin" in listed.stdout
    (item,) = run_world.json("schedules", "list")
    assert (item["name"], item["procedure"], item["missed"]) == ("nightly", "onboard", "one")
    shown = run_world.tga("schedules", "show", "nightly")
    assert [line.split()[0] for line in shown.stdout.splitlines()] == [
        *("schedule", "starts", "with", "when", "missed", "as", "next", "last"),
    ]
    assert '{"of": "yesterday"}' in shown.stdout
    assert run_world.json("schedules", "show", "nightly")["input"] == {"of": "yesterday"}


def test_a_schedule_that_is_there_is_changed_only_if_that_is_wanted(run_world: World) -> None:
    once = ("schedules", "create", "often", "onboard", "--every", "15m")
    made = run_world.json(*once)
    assert made["spec"] == {"type": "interval", "every_ms": 900_000}
    other = ("schedules", "create", "often", "onboard", "--every", "36h", "--missed", "skip")
    refused = run_world.tga(*other)
    assert (refused.returncode, "CONFIRMATION_NEEDED" in refused.stderr) == (2, True)
    assert "every 15m" in refused.stderr
    assert run_world.json("schedules", "show", "often")["spec"]["every_ms"] == 900_000
    changed = run_world.tga(*other, "--yes")
    assert (changed.returncode, "Schedule often is changed" in changed.stdout) == (0, True)
    assert "every 36h" in run_world.tga("schedules", "show", "often").stdout


def test_a_schedule_is_removed_only_if_that_is_wanted_and_only_by_who_may(run_world: World) -> None:
    assert run_world.tga("schedules", "create", "gone", "onboard", "--every", "1d").returncode == 0
    refused = run_world.tga("schedules", "delete", "gone")
    assert (refused.returncode, "CONFIRMATION_NEEDED" in refused.stderr) == (2, True)
    assert "Remove schedule gone of onboard, every 1d?" in refused.stderr
    stranger = run_world.new_key("stranger", "agent")
    hidden = run_world.tga("schedules", "delete", "gone", "--yes", TGA_API_KEY=stranger)
    assert (hidden.returncode, "SCHEDULE_NOT_FOUND" in hidden.stderr) == (1, True)
    own = run_world.tga("schedules", "list", TGA_API_KEY=stranger)
    assert (own.returncode, "schedules of others" in own.stderr) == (0, True)
    assert run_world.tga("schedules", "show", "gone").returncode == 0
    removed = run_world.tga("schedules", "delete", "gone", "--yes", "--json")
    assert (removed.returncode, json.loads(removed.stdout)) == (0, {"name": "gone", "removed": True})
    again = run_world.tga("schedules", "delete", "gone", "--yes")
    assert (again.returncode, "SCHEDULE_NOT_FOUND" in again.stderr) == (1, True)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("onboard",), 2, "one of --cron and --every"),
        (("onboard", "--cron", "* * * * *", "--every", "1d"), 2, "one of --cron and --every"),
        (("onboard", "--every", "soon"), 2, "such as 30s"),
        (("onboard", "--every", "1d", "--zone", "UTC"), 2, "--zone goes with --cron"),
        (("onboard", "--every", "1d", "--missed", "some"), 2, "skip, one, all"),
        (("onboard", "--every", "1d", "--input", "{"), 2, "INPUT_MALFORMED"),
        (("onboard", "--cron", "every day"), 2, "SCHEMA_VIOLATION"),
        (("onboard", "--every", "0s"), 2, "SCHEMA_VIOLATION"),
        (("nothing", "--every", "1d"), 2, "PROCEDURE_NOT_FOUND"),
    ],
)
def test_what_says_no_time_or_no_procedure_makes_nothing(
    run_world: World, words: tuple[str, ...], code: int, told: str
) -> None:
    done = run_world.tga("schedules", "create", "wrong", *words)
    assert (done.returncode, told in done.stderr) == (code, True), done.stderr
    assert run_world.tga("schedules", "show", "wrong").returncode == 1
