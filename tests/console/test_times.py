"""Times in UTC, and in the browser's own zone where somebody chose so. Without a script they stay in UTC and say so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.console.browsing import NARROW, WIDE, Desk, open_desk, overflow, serious_findings
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

DISTANCE, NAME, ZONE = timedelta(hours=5, minutes=45), "UTC+05:45", "Asia/Kathmandu"
NEEDS_SCRIPT = "Local time needs JavaScript. All times here are in UTC."


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as made:
        yield made


@contextmanager
def _far_away(desk: Desk, who: str, size: tuple[int, int] = WIDE, *, script: bool = True) -> Iterator[Page]:
    """A page of somebody whose browser is in a zone that no test machine is in."""
    context = desk.browser.new_context(
        timezone_id=ZONE, java_script_enabled=script, viewport={"width": size[0], "height": size[1]}
    )
    context.set_default_timeout(HANG_S * 1000)
    try:
        page = desk.watched(context.new_page())
        desk.sign_in(page, desk.keys[who])
        yield page
    finally:
        context.close()


def _choice(page: Page, name: str) -> Locator:
    return page.get_by_role("group", name="Show times in").get_by_role("button", name=name)


def _verify_shown(page: Page, name: str) -> None:
    other = {"UTC": "Local", "Local": "UTC"}[name]
    expect(_choice(page, name)).to_have_attribute("aria-pressed", "true")
    expect(_choice(page, other)).to_have_attribute("aria-pressed", "false")


def _asked(desk: Desk, trace_id: str) -> tuple[str, datetime]:
    text = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["artifacts"]["action_request"]["requested_at"]
    return text, datetime.fromisoformat(text.replace("Z", "+00:00"))


def _full(at: datetime, zone: str) -> str:
    return f"{at.day} {at:%b %Y, %H:%M:%S} {zone}"


@pytest.mark.parametrize("size", [WIDE, NARROW], ids=["wide", "narrow"])
def test_times_are_utc_and_local_where_somebody_chose_so(desk: Desk, size: tuple[int, int]) -> None:
    trace_id = desk.call("charge", {"amount": 4205}, f"timed-{size[0]}")
    text, at = _asked(desk, trace_id)
    there = at + DISTANCE
    with _far_away(desk, "auditor", size) as page:
        desk.go(page, f"/calls/{trace_id}")
        shown = page.locator(f"time[data-at=full][datetime='{text}']").first
        _verify_shown(page, "UTC")
        expect(shown).to_have_text(_full(at, "UTC"))
        title = f"{at:%Y-%m-%d %H:%M:%S}.{text[20:23]} UTC"
        expect(shown).to_have_attribute("title", title)
        with page.expect_response("**/console/times") as kept:
            _choice(page, "Local").click()
        cookie = kept.value.all_headers()["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        for _ in ("switched in place", "sent anew"):
            _verify_shown(page, "Local")
            expect(shown).to_have_text(_full(there, NAME))
            expect(shown).to_have_attribute(
                "title", f"{there:%Y-%m-%d %H:%M:%S}.{text[20:23]} {NAME}, on the record {title}"
            )
            expect(page.locator("#verified .seal")).to_contain_text(NAME)
            expect(page.locator("[data-times-note]:visible")).to_have_text(f"{NAME} now")
            page.reload()
        assert serious_findings(page) == []
        assert overflow(page) == 0
        with page.expect_response("**/console/times"):
            _choice(page, "UTC").click()
        for _ in ("switched in place", "sent anew"):
            _verify_shown(page, "UTC")
            expect(shown).to_have_text(_full(at, "UTC"))
            expect(shown).to_have_attribute("title", title)
            page.reload()
    desk.verify_quiet()


def test_without_a_script_times_stay_in_utc_and_the_page_says_so(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4206}, "timed-without")
    text, at = _asked(desk, trace_id)
    with _far_away(desk, "auditor", script=False) as page:
        desk.go(page, f"/calls/{trace_id}")
        shown, note = (
            page.locator(f"time[data-at=full][datetime='{text}']").first,
            page.locator("[data-times-note]:visible"),
        )
        expect(note).to_have_count(0)
        for name, said in (("Local", 1), ("UTC", 0)):
            _choice(page, name).click()
            page.wait_for_url(f"**/calls/{trace_id}")
            expect(note).to_have_count(said)
            if said:
                expect(note).to_have_text(NEEDS_SCRIPT)
            _verify_shown(page, "UTC")
            expect(shown).to_have_text(_full(at, "UTC"))
    desk.verify_quiet()


def test_switching_keeps_what_is_being_typed_and_what_arrives_is_in_the_chosen_zone(desk: Desk) -> None:
    trace_id = desk.call("refund", {"amount": 1901}, "timed-refund")
    with _far_away(desk, "supervisor") as page:
        desk.go(page, f"/approvals/{trace_id}")
        words = page.locator("[name=rationale]:visible").first
        words.fill("photographs were seen")
        with page.expect_response("**/console/times"):
            _choice(page, "Local").click()
        _verify_shown(page, "Local")
        expect(words).to_have_value("photographs were seen")
        digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
        desk.go(page, f"/calls/{trace_id}")
        expect(page.locator("[data-live-pill]").first).to_have_text("Live")
        decided = {"decision": "DENY", "action_request_digest": digest}
        assert desk.ask("supervisor", f"/v1/traces/{trace_id}/decision", decided)[0] == 200
        expect(page.locator("#main .state").first).to_contain_text("DENIED")
        times = page.locator("#main time[data-at=clock]")
        assert times.count() > 1
        for one in times.all():
            at = datetime.fromisoformat(str(one.get_attribute("datetime")).replace("Z", "+00:00")) + DISTANCE
            expect(one).to_have_text(f"{at:%H:%M:%S}.{at.microsecond // 1000:03}")
    desk.verify_quiet()
