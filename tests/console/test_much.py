"""More than a page holds: a long journal, many branches, many requests that wait. Every entry and every request is
reached, pages stay small, and nothing is left out without a word. `TGA_SOAK=1`: 20,000 checkpoints, 1,000 branches."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import expect

from app.core.limits import APPROVALS_COUNTED_MAX
from tests.cli.hand_worker import HandWorker, complete, fail, may_start, step
from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, aside, open_desk, overflow, serious_findings
from tests.patience import HANG_S
from tests.sampling import IS_SOAK

pytestmark = pytest.mark.one_in(3, of="file")

expect.set_options(timeout=HANG_S * 1000)
STEPS = 20_000 if IS_SOAK else 450
BRANCHES = 1_000 if IS_SOAK else 120
PAGE = 200
LISTED = 100
BYTES_MAX = 200_000


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk(may_start) as opened:
        opened.keys["worker"] = aside(opened.world.new_key, "worker-1", "worker")
        worker = HandWorker(opened.world, opened.keys["worker"])
        worker.register()
        said = {"path": "2", "recorded": "tool crm.create", "performed": "step <b>score</b>", "source": "a.py:41"}
        deep = [step(".".join(["1"] * depth), depth, name="level", inner=int(depth < 12)) for depth in range(12, 0, -1)]
        _run(opened, worker, "long", [step(str(n), n, name="book") for n in range(1, STEPS + 1)], fail("no amount"))
        branches = [step(f"1:{n}.1", n, name="index") for n in range(1, BRANCHES + 1)]
        _run(
            opened,
            worker,
            "wide",
            [*branches, step("1", 1, kind="gather", name="gather", inner=BRANCHES)],
            complete(1, 1),
        )
        _run(opened, worker, "deep", deep, complete(1, 1))
        _run(opened, worker, "diverged", [step("1", 1)], {"type": "diverge", "divergence": said})
        yield opened


def _run(desk: Desk, worker: HandWorker, run_id: str, puts: list[dict[str, Any]], then: dict[str, Any]) -> None:
    status, told = desk.ask("agent", "/v1/runs", {"procedure": "onboard", "input": {}, "run_id": run_id})
    assert status == 200, told
    aside(worker.lease)
    for first in range(0, len(puts), 50):
        worker.put(*puts[first : first + 50], **({"then": then} if first + 50 >= len(puts) else {}))


def test_every_page_of_a_long_journal_is_small_and_the_arrows_cross_from_one_to_the_next(desk: Desk) -> None:
    last = desk.ask("admin", "/v1/runs/long")[1]["sequence_number"]
    with desk.as_("operator") as page:
        for at in (1, PAGE, PAGE + 1, last // 2, last * 3 // 4, last):
            answer = page.goto(f"{desk.world.url}/console/runs/long?at={at}")
            assert answer is not None
            assert answer.status == 200
            assert len(answer.body()) < BYTES_MAX, at
            first = (at - 1) // PAGE * PAGE + 1
            assert f"Entries {first:,} to {min(first + PAGE - 1, last):,} of {last:,}." in page.inner_text("#journal")
            assert (page.get_attribute("#pos", "min"), page.get_attribute("#pos", "max")) == ("1", str(last))
        desk.go(page, f"/runs/long?at={PAGE}")
        page.locator("body").press("ArrowRight")
        page.wait_for_url(f"**at={PAGE + 1}")
        assert f"entry {PAGE + 1} of" in page.inner_text("output")
        page.locator("body").press("ArrowLeft")
        page.wait_for_url(f"**at={PAGE}")
        page.locator("#pos").focus()
        page.locator("#pos").press("End")
        page.wait_for_url(f"**at={last}")
    desk.verify_quiet()


def test_a_long_journal_is_walked_and_forked_without_a_script(desk: Desk) -> None:
    last = desk.ask("admin", "/v1/runs/long")[1]["sequence_number"]
    at = last * 3 // 4
    with desk.as_("operator", script=False) as page:
        desk.go(page, "/runs/long?at=1")
        page.get_by_role("link", name="Later").click()
        assert f"Entries {PAGE + 1} to" in page.inner_text("#journal")
        desk.go(page, f"/runs/long?at={at}")
        assert page.locator("[aria-current=step]").count() == 1
        page.get_by_label("Name of the new run").fill("long-fork")
        page.get_by_role("button", name="Fork", exact=True).click()
        assert page.url.endswith("/runs/long-fork")
    assert desk.ask("admin", "/v1/runs/long-fork")[1]["forked_from"]["sequence_number"] == at
    desk.verify_quiet()


def test_many_branches_are_folded_and_opened_by_a_link(desk: Desk) -> None:
    with desk.as_("operator", script=False) as page:
        answer = page.goto(f"{desk.world.url}/console/runs/wide?at=3")
        assert answer is not None
        assert len(answer.body()) < BYTES_MAX
        assert page.locator(".wf-row").count() < 12
        page.locator(".wf-inside").first.click()
        drawn = page.locator(".wf-row").count()
        assert drawn >= min(BRANCHES, PAGE - 4)
        assert "are drawn" not in page.inner_text("#journal .pager")
        page.get_by_role("link", name="Fold what is inside 1").click()
        assert page.locator(".wf-row").count() < 12
    desk.verify_quiet()


def test_a_diverged_run_says_both_sides_in_the_list_and_on_its_page(desk: Desk) -> None:
    with desk.as_("operator") as page:
        desk.go(page, "/runs")
        needing = page.inner_text("#needing")
        assert "at 2 the journal has tool crm.create, the program now does step <b>score</b>" in needing
        desk.go(page, "/runs/diverged")
        assert "At 2 the journal has tool crm.create, the program did step <b>score</b> (a.py:41)" in page.inner_text(
            "#main"
        )
    desk.verify_quiet()


def test_requests_beyond_the_first_page_are_reached_and_say_why_a_person_decides(desk: Desk) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda n: desk.call("refund", {"amount": n}, f"refund-{n}"), range(1, LISTED + 3)))
    with desk.as_("supervisor", script=False) as page:
        desk.go(page, "/approvals")
        assert f"{APPROVALS_COUNTED_MAX}+ wait" in page.inner_text("#live-list")
        assert page.locator("a.req").count() == LISTED
        assert f"Approvals\n{APPROVALS_COUNTED_MAX}+" in page.inner_text("nav.nav")
        page.get_by_role("link", name="Later").click()
        assert page.locator("a.req").count() == 2
        last = str(page.locator("a.req").last.get_attribute("href"))
        page.locator("a.req").last.click()
        assert page.locator("a.req").count() == 2, "the list goes back to its first page"
        assert page.locator("a.req[aria-current]").count() == 1
        desk.go(page, last.removeprefix("/console").partition("?")[0])
        assert page.locator("a.req").count() == LISTED
        assert page.locator("a.req[aria-current]").count() == 0
        assert "May it be called? Yes." in page.inner_text("#request")
    desk.verify_quiet()


def test_single_keys_can_be_switched_off_and_on_again(desk: Desk) -> None:
    with desk.as_("operator") as page:
        desk.go(page, "/runs")
        page.get_by_role("button", name="Keyboard").click()
        page.get_by_label("Single keys work").uncheck()
        page.get_by_role("button", name="Close").click()
        page.reload()
        page.locator("body").press("?")
        page.locator("body").press("j")
        assert not page.locator("#keys").is_visible()
        assert page.evaluate("document.activeElement === document.body")
        page.get_by_role("button", name="Keyboard").click()
        page.get_by_label("Single keys work").check()
        page.get_by_role("button", name="Close").click()
        page.locator("body").press("?")
        expect(page.locator("#keys")).to_be_visible()
    desk.verify_quiet()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_they_are_readable_narrow_and_wide(desk: Desk, theme: str) -> None:
    for size in (WIDE, NARROW, SMALLEST):
        with desk.as_("operator", size, theme=theme) as page:
            for path in ("/runs/long?at=230", "/runs/wide", "/runs/wide?open=1", "/runs/deep", "/runs/diverged"):
                desk.go(page, path)
                assert overflow(page) == 0, (path, size)
                if size != SMALLEST:
                    assert serious_findings(page) == [], (path, size)
    desk.verify_quiet()
