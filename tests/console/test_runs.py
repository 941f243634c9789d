"""Runs: who needs someone, one run's journal, its state then and now, and what a person may do to it."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from playwright.sync_api import Page

from tests.cli.hand_worker import HandWorker, may_start, tool
from tests.cli.world import wait_for
from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, aside, open_desk, overflow, serious_findings
from tests.patience import HANG_S

PROGRAM = """
from pydantic import BaseModel
from tga_sdk import Context, procedure


class Books(BaseModel):
    stage: str = "begun"
    sent: int = 0
    names: list[str] = []


@procedure(name="dunning", version="3", state=Books)
async def dunning(ctx: Context[Books], input: dict) -> dict:
    names = await ctx.step("load_overdue", lambda: ["acme", "globex", "initech"])
    ctx.state.names = names
    ctx.state.stage = "reminding"

    async def remind(name: str) -> str:
        paid = await ctx.tool("bank", "charge", {"amount": len(name)})
        return f"{name} {paid['charge_id']}"

    def one(name: str):
        return lambda: remind(name)

    sent = await ctx.gather(*(one(name) for name in names))
    ctx.state.sent = len(sent)
    await ctx.step("reconcile", lambda: {"lines": 3})
    ctx.state.stage = "deciding"
    question = "Send the final reminder to 3 customers? <script>alert(1)</script>"
    go = await ctx.approve(question, context={"customers": names})
    how = await ctx.select("By which way?", ["mail", "letter"]) if go else "none"
    note = await ctx.input("What shall it say?", type=str) if go else ""
    return {"go": go, "how": how, "note": note}


@procedure(name="failing", version="1")
async def failing(ctx: Context[None], input: dict) -> None:
    await ctx.step("first", lambda: 1)

    def wrong() -> None:
        raise ValueError("the books do not fit")

    await ctx.step("second", wrong)
"""


@contextmanager
def worker(desk: Desk, text: str = PROGRAM) -> Iterator[None]:
    program = desk.world.home / "programs.py"
    program.write_text(text)
    command = [sys.executable, "-m", "tga_sdk.worker_cli", str(program), "--url", desk.world.url]
    with (desk.world.home / "worker.log").open("w") as log:
        environment = {**desk.world.environment(), "TGA_API_KEY": desk.keys["worker"]}
        running = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    try:
        yield
    finally:
        running.terminate()
        running.wait(HANG_S)


def until(desk: Desk, run_id: str, *statuses: str) -> dict[str, Any]:
    end = time.monotonic() + HANG_S
    while True:
        run = desk.ask("admin", f"/v1/runs/{run_id}")[1]
        if run.get("status") in statuses:
            return run
        assert time.monotonic() < end, run
        time.sleep(0.05)


def start(desk: Desk, procedure: str, run_id: str) -> None:
    end = time.monotonic() + HANG_S
    while True:  # until the worker has registered it
        status, answer = desk.ask("agent", "/v1/runs", {"procedure": procedure, "input": {}, "run_id": run_id})
        if status == 200:
            return
        assert answer["code"] == "PROCEDURE_NOT_FOUND", answer
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk(may_start) as opened:
        opened.keys["worker"] = aside(opened.world.new_key, "worker-1", "worker")
        with worker(opened):
            start(opened, "dunning", "dunning-11")
            start(opened, "dunning", "dunning-12")
            start(opened, "failing", "failing-1")
            until(opened, "dunning-11", "waiting_for_human")
            until(opened, "dunning-12", "waiting_for_human")
            until(opened, "failing-1", "failed")
            yield opened


def test_who_needs_someone_stands_first_and_says_what(desk: Desk) -> None:
    with desk.as_("operator") as page:
        desk.go(page, "/runs")
        needing = page.locator("#needing").inner_text()
        assert "Send the final reminder to 3 customers? <script>" in needing
        assert "the books do not fit" in needing
        assert "operations: " in str(page.locator("#needing .cells").first.get_attribute("aria-label"))
        for run_id in ("dunning-11", "failing-1"):
            entries = desk.ask("admin", f"/v1/runs/{run_id}")[1]["sequence_number"]
            boxes = page.locator(f"#rows [data-id='{run_id}'] .cells")
            assert boxes.locator("rect").count() == min(24, entries)
            assert f"{entries} entries: " in str(boxes.get_attribute("aria-label"))
        page.get_by_label("Status").select_option("failed")
        page.get_by_role("button", name="Filter").click()
        assert page.locator("#rows").inner_text().count("failing-1") == 1
        assert "dunning-11" not in page.locator("#rows").inner_text()
        page.get_by_role("link", name="status failed").click()
        assert "dunning-11" in page.locator("#rows").inner_text()
    desk.verify_quiet()


def _began_two_days_ago(desk: Desk, run_id: str) -> None:
    async def change() -> None:
        admin = await asyncpg.connect(desk.world.admin_url)
        try:
            done = await admin.execute(
                "UPDATE tga.runs SET created_at = created_at - interval '2 days'"
                " WHERE stream_no = (SELECT stream_no FROM tga.heads WHERE stream = $1)",
                f"run:{run_id}",
            )
            assert done == "UPDATE 1"
        finally:
            await admin.close()

    asyncio.run(change())


def test_runs_are_found_by_when_they_started_without_a_script(desk: Desk) -> None:
    aside(_began_two_days_ago, desk, "failing-1")
    with desk.as_("operator", script=False) as page:
        desk.go(page, "/runs")
        for window, is_there in (("last 24 h", False), ("last 7 days", True)):
            page.locator("select[name=since]").select_option(window)
            page.get_by_role("button", name="Filter").click()
            assert parse_qs(urlsplit(page.url).query)["since"] == [window]
            rows = page.locator("#rows").inner_text()
            assert "dunning-11" in rows
            assert ("failing-1" in rows) == is_there, window
            assert page.locator("select[name=since]").input_value() == window
        page.get_by_role("link", name="started in the last 7 days").click()
        assert "since" not in page.url
    desk.verify_quiet()


def state_shown(page: Page) -> str:
    return page.locator("#state .json").first.inner_text()


def test_slider_arrows_and_address_show_the_state_of_the_record(desk: Desk) -> None:
    _, journal = desk.ask("admin", "/v1/runs/dunning-11/checkpoints?limit=200")
    step = next(one for one in journal["items"] if one.get("name") == "reconcile")
    with desk.as_("auditor") as page:
        for at in (step["sequence_number"], step["sequence_number"] - 1):
            state = desk.ask("admin", f"/v1/runs/dunning-11/state?at={at}")[1]["state"]
            desk.go(page, f"/runs/dunning-11?at={at}")
            assert f'"sent": {state["sent"]}' in state_shown(page)
            assert state["stage"] in state_shown(page)
        desk.go(page, f"/runs/dunning-11?at={step['sequence_number']}")
        before = page.locator("output").inner_text()
        page.locator("body").press("ArrowLeft")
        page.wait_for_function("words => document.querySelector('output').innerText !== words", arg=before)
        page.locator("body").press("ArrowRight")
        page.wait_for_function("words => document.querySelector('output').innerText === words", arg=before)
        slider = page.locator("#pos")
        slider.focus()
        slider.press("Home")
        page.wait_for_url("**at=1")
    desk.verify_quiet()


def test_a_question_is_answered_in_place_without_a_script_and_the_program_goes_on(desk: Desk) -> None:
    with desk.as_("supervisor", script=False) as page:
        desk.go(page, "/runs/dunning-11")
        assert "<script>alert(1)</script>" in page.inner_text(".ask-q")
        assert page.locator(".answer [name=answer]").count() == 2
        assert page.locator(".answer :checked").count() == 0
        page.get_by_role("button", name="Yes").click()
        until(desk, "dunning-11", "waiting_for_human")
        end = time.monotonic() + HANG_S
        while "By which way?" not in page.content() and time.monotonic() < end:
            page.reload()
        page.get_by_role("button", name="letter").click()
        end = time.monotonic() + HANG_S
        while "What shall it say?" not in page.content() and time.monotonic() < end:
            page.reload()
        page.get_by_label("Answer").fill("please pay")
        page.get_by_role("button", name="Answer").click()
        run = until(desk, "dunning-11", "completed")
        assert run["output"]["value"] == {"go": True, "how": "letter", "note": "please pay"}
    desk.verify_quiet()


def test_what_is_asked_next_comes_by_itself_and_what_is_being_typed_stays(desk: Desk) -> None:
    start(desk, "dunning", "dunning-13")
    until(desk, "dunning-13", "waiting_for_human")
    path = desk.ask("admin", "/v1/runs/dunning-13")[1]["awaits"][0]["path"]
    with desk.as_("supervisor") as page:
        desk.go(page, "/runs/dunning-13")
        desk.ask("supervisor", "/v1/runs/dunning-13/signals", {"path": path, "answer": True})
        page.get_by_role("button", name="letter").click()
        page.get_by_label("Answer").fill("half a sen")
        # Until a page that is loaded now would say another time of the question: a replaced form would be another one.
        page.wait_for_function(
            """async words => {
                const fresh = await (await fetch(location.href)).text();
                return !fresh.match(/class="label">[^]*?<time[^>]*>([^<]*)</)[1].includes(words);
            }""",
            arg=page.locator(".label time").inner_text(),
            polling=300,
        )
        before = page.locator("#journal header").inner_text()
        desk.ask("operator", "/v1/runs/dunning-13/signals", {"name": "reminder", "value": 1})
        page.wait_for_function("words => document.querySelector('#journal header').innerText !== words", arg=before)
        page.wait_for_function(
            "() => document.querySelector('#journal').innerText.includes('grace sent the signal reminder')"
        )
        assert page.get_by_label("Answer").input_value() == "half a sen"
    desk.verify_quiet()


def test_who_lacks_the_role_sees_no_button_and_gets_no_effect(desk: Desk) -> None:
    with desk.as_("auditor") as page:
        desk.go(page, "/runs/dunning-12")
        assert page.locator("[name=answer]").count() == 0
        assert "Answering needs the role supervisor" in page.inner_text("#questions")
        assert page.locator("form[action$='/fork'], form[action$='/cancel'], a[href='#fork']").count() == 0
        token = page.locator("[name=csrf]").first.get_attribute("value")
        answer = page.request.post(
            f"{desk.world.url}/console/runs/dunning-12/cancel",
            form={"csrf": str(token)},
            headers={"origin": desk.world.url},
        )
        assert answer.status == 403
    assert desk.ask("admin", "/v1/runs/dunning-12")[1]["status"] == "waiting_for_human"


def test_a_held_call_of_a_run_says_that_the_run_waits_and_what_to_find_out_stands_before_the_choice(desk: Desk) -> None:
    hand = HandWorker(desk.world, desk.keys["worker"], procedure="books")
    hand.register()
    start(desk, "books", "books-1")
    hand.lease()
    hand.put(then=tool("1", "slow_charge", amount=5, ms=60_000))
    wait_for(lambda: len(desk.ask("operator", "/v1/traces?waiting=operator")[1]["items"]) == 1)
    (call,) = desk.ask("operator", "/v1/traces?waiting=operator")[1]["items"]
    for size in (NARROW, WIDE):
        with desk.as_("operator", size) as page:
            desk.go(page, f"/calls/{call['trace_id']}")
            said = page.locator(".note-wait", has_text="Nobody knows whether this call happened")
            assert "The run books-1 waits for it." in said.inner_text()
            assert "Nothing else waits" not in said.inner_text()
            find_out, choose = page.locator(".find-out").bounding_box(), page.locator("form.card").bounding_box()
            assert find_out is not None
            assert choose is not None
            if size == NARROW:
                assert find_out["y"] < choose["y"]
            else:
                assert find_out["x"] > choose["x"]
            assert overflow(page) == 0
            said.get_by_role("link", name="books-1").click()
            page.wait_for_url("**/runs/books-1")
            desk.go(page, "/")
            assert f"key {call['idempotency_key']}" in page.locator("#live-needs").inner_text()
    desk.verify_quiet()


def test_a_fork_from_an_entry_leaves_the_source_as_it_was(desk: Desk) -> None:
    source = desk.ask("admin", "/v1/runs/failing-1/entries?limit=200")[1]
    with desk.as_("operator") as page:
        desk.go(page, "/runs/failing-1?at=3")
        page.get_by_label("Name of the new run").fill("failing-1-fork")
        page.get_by_role("button", name="Fork", exact=True).click()
        page.wait_for_url("**/runs/failing-1-fork")
    run = until(desk, "failing-1-fork", "failed")
    assert run["forked_from"]["run_id"] == "failing-1"
    assert run["forked_from"]["sequence_number"] == 3
    assert desk.ask("admin", "/v1/runs/failing-1/entries?limit=200")[1] == source
    desk.verify_quiet()


def test_a_refused_answer_keeps_what_was_typed_and_says_the_code(desk: Desk) -> None:
    with desk.as_("operator") as page:
        desk.go(page, "/runs/failing-1")
        page.get_by_label("Name of the new run").fill("dunning-12")  # taken
        page.get_by_role("button", name="Fork", exact=True).click()
        assert page.get_by_label("Name of the new run").input_value() == "dunning-12"
        assert "RUN_ID_TAKEN" in page.inner_text("#main")
    (told,) = desk.troubles  # the browser's word for an answer that is an error
    assert "409" in told
    desk.troubles.clear()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_both_pages_are_readable_narrow_and_wide(desk: Desk, theme: str) -> None:
    for size in (WIDE, NARROW, SMALLEST):
        with desk.as_("supervisor", size, theme=theme) as page:
            for path in ("/runs", "/runs/dunning-12", "/runs/failing-1"):
                desk.go(page, path)
                assert overflow(page) == 0, (path, size)
                if size != SMALLEST:
                    assert serious_findings(page) == [], (path, size)
    desk.verify_quiet()
