"""Ledger, servers and tools, policy and keys: what is verified, what changed, and why something is decided."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

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
        assert "hold" in tools
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
    with desk.as_("auditor") as page:
        desk.go(page, "/policy")
        keys = page.get_by_role("table", name="Keys").inner_text()
        assert "ada" in keys
        assert desk.keys["supervisor"].split("_", 2)[2] not in page.content()
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
