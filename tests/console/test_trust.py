"""Ledger, servers and tools, policy and keys: what is verified, what changed, and why something is decided."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, Route

from tests.cli.world import wait_for
from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, open_desk, overflow, serious_findings
from tests.patience import HANG_S


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as opened:
        opened.call("charge", {"amount": 5}, "first")
        yield opened


def test_the_whole_log_is_verified_from_the_page_and_says_what_was_not_compared(desk: Desk) -> None:
    with desk.as_("auditor", script=False) as page:
        desk.go(page, "/ledger")
        assert "Nothing is green by default" in page.inner_text("#verification")
        page.get_by_role("button", name="Verify everything now").click()
        end = time.monotonic() + HANG_S
        while "Sound" not in page.inner_text("#verification"):
            assert time.monotonic() < end, page.inner_text("#verification")
            page.reload()
        shown = page.inner_text("#verification")
        assert "signed heads" in shown
        assert "heads that were kept elsewhere" in shown
        assert page.get_by_role("link", name="Keep this head").get_attribute("download") == "head.txt"
    desk.verify_quiet()


def test_who_may_not_verify_has_no_button_and_its_form_is_refused(desk: Desk) -> None:
    with desk.as_("supervisor") as page:
        desk.go(page, "/ledger")
        assert page.locator("form[action$='/ledger/verify']").count() == 0
        assert "needs the role auditor or operator" in page.inner_text("#main")
        token = page.locator("[name=csrf]").first.get_attribute("value")
        answer = page.request.post(
            f"{desk.world.url}/console/ledger/verify", form={"csrf": str(token)}, headers={"origin": desk.world.url}
        )
        assert answer.status == 403


def test_servers_with_their_tools_and_what_happens_if_an_answer_is_lost(desk: Desk) -> None:
    with desk.as_("operator", script=False) as page:
        desk.go(page, "/servers")
        page.locator("#servers").get_by_text("bank", exact=True).click()
        tools = page.get_by_role("table", name="Tools of bank").inner_text()
        assert "charge" in tools
        assert "pinned" in tools
        assert "held for an operator" in tools
    desk.verify_quiet()


def test_a_server_shows_its_last_hour_by_minute_and_says_the_same_in_words(desk: Desk) -> None:
    desk.call("charge", {"amount": 31}, "drawn")
    desk.call("fail", {}, None)
    wait_for(lambda: desk.ask("admin", "/v1/servers")[1]["items"][0]["lately"]["failed"] > 0)
    with desk.as_("operator", script=False) as page:
        desk.go(page, "/servers")
        picture = page.get_by_role("img", name="The last hour by minute: 95 % of calls were answered within")
        assert picture.count() == 1
        assert "failed in 1 minute" in str(picture.get_attribute("aria-label"))
        assert picture.locator("path.st").count() >= 1
        assert picture.locator("rect.f-bad").count() == 1
        assert picture.locator("[style]").count() == 0
    desk.verify_quiet()


def test_rules_in_their_order_and_why_a_call_would_be_decided_so(desk: Desk) -> None:
    with desk.as_("auditor", script=False) as page:
        desk.go(page, "/policy")
        rules = page.locator(".rule").all_inner_texts()
        assert "every-tool" in rules[0]
        page.get_by_label("Tool").select_option("bank/charge")
        page.get_by_label("Arguments").fill('{"amount": 13}')
        page.get_by_role("button", name="Explain").click()
        assert "It is denied" in page.inner_text("#verdict")
        assert "no-thirteen" in page.locator(".rule.is-deciding").all_inner_texts()[0]
        page.get_by_label("Arguments").fill("{")
        page.get_by_role("button", name="Explain").click()
        assert "not JSON" in page.inner_text("#main")
        assert page.get_by_label("Arguments").input_value() == "{"
    with desk.as_("agent") as page:
        desk.go(page, "/policy")
        assert "Seeing the keys needs the role" in page.inner_text("#main")
        assert "Reading the rules needs the role" in page.inner_text("#main")
        assert "You can read all of it" not in page.inner_text("#main")
    with desk.as_("auditor") as page:
        desk.go(page, "/policy")
        keys = page.get_by_role("table", name="Keys").inner_text()
        assert "ada" in keys
        assert desk.keys["supervisor"].split("_", 2)[2] not in page.content()
    desk.verify_quiet()


def verified_here(page: Page, *, until: str) -> str:
    page.get_by_role("button", name="Verify in this browser").click()
    page.wait_for_selector(f"#verify-browser[data-result={until}]")
    return page.inner_text("#verify-browser")


def test_a_call_is_recomputed_in_the_browser_from_what_it_fetches(desk: Desk) -> None:
    trace_id = desk.call("balance", {"amount": 5, "note": 'é ☃ \\ " {[,]} 1.5', "10": 1, "9": 2}, "here")
    with desk.as_("auditor") as page:
        desk.go(page, f"/calls/{trace_id}")
        shown = verified_here(page, until="sound")
        assert "4 entries hash to their digests" in shown
        assert "4 artifacts are what the entries commit to" in shown
        assert "is signed with the log's key" in shown
    desk.verify_quiet()


@pytest.mark.parametrize(
    ("what", "path", "old", "new", "words"),
    [
        (
            "an entry",
            "entries",
            '"to_state":"EXECUTING"',
            '"to_state":"COMPLETED"',
            "entry 3 does not hash to its digest",
        ),
        ("an artifact", "entries", '"amount":5', '"amount":6', "the artifact of entry 1 is not the one"),
        ("the proof", "receipt", "index 1", "index 0", "does not lead to the root that was signed"),
        ("the head", "receipt", "tga.", "tgb.", "the head's signature does not fit"),
    ],
)
def test_one_byte_changed_on_the_way_fails_at_its_place(
    desk: Desk, what: str, path: str, old: str, new: str, words: str
) -> None:
    trace_id = desk.call("charge", {"amount": 5}, f"changed {what}")
    with desk.as_("auditor") as page:

        def change(route: Route) -> None:
            answer = route.fetch()
            text = answer.text()
            if what == "the proof":
                found = next(line for line in text.split("\n") if line.startswith("index "))
                text = text.replace(found, f"index {int(found[6:]) - 1}", 1)
            else:
                assert old in text
                text = text.replace(old, new, 1)
            route.fulfill(response=answer, body=text)

        page.route(f"**/v1/traces/{trace_id}/{path}*", change)
        desk.go(page, f"/calls/{trace_id}")
        assert words in verified_here(page, until="wrong")
    desk.verify_quiet()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_readable_narrow_and_wide(desk: Desk, theme: str) -> None:
    for size in (WIDE, NARROW, SMALLEST):
        with desk.as_("admin", size, theme=theme) as page:
            for path in ("/ledger", "/servers", "/policy"):
                desk.go(page, path)
                assert overflow(page) == 0, (path, size)
                if size != SMALLEST:
                    assert serious_findings(page) == [], (path, size)
    desk.verify_quiet()
