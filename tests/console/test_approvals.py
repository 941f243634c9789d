"""Approvals: exactly this request, decided once, by someone who may; live, by keyboard, and without a script."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, aside, open_desk, overflow, serious_findings
from tests.patience import HANG_S

expect.set_options(timeout=HANG_S * 1000)
HOSTILE = {
    "amount": 7,
    "note": "<script>window.ran=1</script><img src=x onerror=window.ran=1> {{7*7}} \u202etxt.exe\u202c \u200b \u0007",
    "<b>name</b>\u200b": "x",
    "long": "A" * 60_000,
    "deep": json.loads("[" * 28 + "]" * 28),
}


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as opened:
        yield opened


def _request(desk: Desk, key: str, **arguments: object) -> str:
    return desk.call("refund", {"amount": 5, **arguments}, key, intent="the customer asked for it")


def _decide(desk: Desk, who: str, trace_id: str, decision: str, rationale: str | None = None) -> int:
    digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    body = {"decision": decision, "action_request_digest": digest}
    return desk.ask(who, f"/v1/traces/{trace_id}/decision", body | ({"rationale": rationale} if rationale else {}))[0]


def _marked(page: Page) -> None:
    """A page that is loaded anew has no mark."""
    page.evaluate("window.mark = 1")


def test_approving_by_keyboard_alone_runs_it_once_and_it_is_seen_without_reload(desk: Desk) -> None:
    trace_id = _request(desk, "by-keyboard")
    with desk.as_("supervisor") as page:
        page.keyboard.press("g")
        page.keyboard.press("a")
        page.wait_for_url("**/approvals")
        page.keyboard.press("j")
        assert page.evaluate("document.activeElement.getAttribute('href')") == f"/console/approvals/{trace_id}"
        page.keyboard.press("Enter")
        page.wait_for_url(f"**/approvals/{trace_id}")
        page.keyboard.press("a")
        assert page.evaluate("document.activeElement.value") == "APPROVE", "a moves the focus"
        assert desk.state(trace_id) == "PENDING", "a key alone decides nothing"
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Shift+Tab")
        page.keyboard.type("carrier confirms the loss")
        page.keyboard.press("Tab")
        page.keyboard.press("Tab")
        page.keyboard.press("Enter")
        expect(page.locator("#live-decision")).to_contain_text("You approved it")
        expect(page.locator("#live-decision .st-COMPLETED")).to_be_visible()
    trace = desk.ask("admin", f"/v1/traces/{trace_id}")[1]
    decision = trace["artifacts"]["supervisor_decision"]
    assert (trace["state"], decision["decided_by"]["id"], decision["rationale"]) == (
        "COMPLETED",
        "ada",
        "carrier confirms the loss",
    )
    assert desk.world.executions("by-keyboard") == 1
    desk.verify_quiet()


def test_a_request_that_is_decided_elsewhere_turns_to_overtaken_by_itself(desk: Desk) -> None:
    trace_id = _request(desk, "overtaken")
    with desk.as_("supervisor") as page:
        desk.go(page, f"/approvals/{trace_id}")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        _marked(page)
        page.fill("#why", "half a sen")
        assert _decide(desk, "admin", trace_id, "DENY", "Ask for the tracking first.") == 200
        began = time.monotonic()
        expect(page.locator("#live-decision")).to_contain_text("Overtaken: admin denied it")
        print(f"overtaken was seen after {time.monotonic() - began:.2f} s")
        expect(page.locator("#live-decision")).to_contain_text("Ask for the tracking first.")
        assert page.locator("[data-approve], [data-deny]").count() == 0
        assert page.evaluate("window.mark") == 1
    desk.verify_quiet()


@pytest.mark.parametrize("script", [True, False], ids=["paused", "no-script"])
def test_a_second_decision_gets_its_code_and_who_was_first(desk: Desk, script: bool) -> None:
    """A page that does not know that it was overtaken offers what it did before: the gateway lets it decide nothing."""
    key = f"second-{script}"
    trace_id = _request(desk, key)
    with desk.as_("supervisor", script=script) as page:
        desk.go(page, f"/approvals/{trace_id}")
        if script:
            page.locator("[data-live-pill]").click()
            expect(page.locator("[data-live-pill]")).to_have_text("Paused")
        page.fill("#why", "my own words")
        assert _decide(desk, "admin", trace_id, "DENY") == 200
        page.locator("[data-approve]").click()
        expect(page.get_by_role("alert")).to_contain_text("admin was first: denied")
        expect(page.get_by_role("alert")).to_contain_text("ALREADY_DECIDED")
        expect(page.get_by_role("alert")).to_contain_text("Yours was not recorded")
        assert page.locator("[data-approve], [data-deny], form[action*='/approvals/']").count() == 0
    assert desk.world.executions(key) == 0
    decision = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["artifacts"]["supervisor_decision"]
    assert (decision["decision"], decision["decided_by"]["id"]) == ("DENY", "admin")
    desk.troubles.clear()  # the browser tells of the 409


def test_without_a_script_a_request_is_read_and_denied(desk: Desk) -> None:
    trace_id = _request(desk, "no-script")
    with desk.as_("supervisor", NARROW, script=False) as page:
        page.get_by_role("link", name="Approvals", exact=False).first.click()
        page.locator(f"a.req[href$='{trace_id}']").click()
        expect(page.locator("#ask-h")).to_contain_text("agent-1 asks to call bank/refund")
        expect(page.locator(".quote")).to_have_text("the customer asked for it")
        page.fill("#why", "no\nreceipt")
        page.locator("[data-deny]").click()
        expect(page.locator("#live-decision")).to_contain_text("You denied it")
    with desk.as_("supervisor") as page:  # on another day: whoever decided it was not overtaken
        desk.go(page, f"/approvals/{trace_id}")
        expect(page.locator("#live-decision")).to_contain_text("You denied it")
        assert "Overtaken" not in page.locator("#live-decision").inner_text()
    decision = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["artifacts"]["supervisor_decision"]
    assert (decision["decision"], decision["rationale"]) == ("DENY", "no\nreceipt")
    desk.verify_quiet()


def test_approve_and_deny_have_equal_weight_and_nothing_is_chosen(desk: Desk) -> None:
    trace_id = _request(desk, "weights")
    for size in (WIDE, NARROW):
        with desk.as_("supervisor", size) as page:
            desk.go(page, f"/approvals/{trace_id}")
            looks = [
                page.locator(one).evaluate(
                    "(b) => { const r = b.getBoundingClientRect(), s = getComputedStyle(b);"
                    " return [r.width, r.height, s.backgroundColor, s.color, s.borderColor, s.fontWeight] }"
                )
                for one in ("[data-approve]", "[data-deny]")
            ]
            assert looks[0] == looks[1]
            assert page.evaluate("document.activeElement === document.body"), "something has the focus already"
            bottom = page.locator(".decide").bounding_box()
            assert bottom is not None
            assert bottom["y"] + bottom["height"] <= size[1] + 1, "the bar is not in view"


def test_without_the_role_there_is_no_button_but_its_place_and_the_form_is_refused(desk: Desk) -> None:
    trace_id = _request(desk, "role")
    digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    for who in ("auditor", "operator", "agent"):
        with desk.as_(who) as page:
            desk.go(page, f"/approvals/{trace_id}")
            assert page.locator("[data-approve], [data-deny], .decide").count() == 0
            expect(page.locator("[data-lacks]")).to_contain_text("Deciding needs the role supervisor")
            token = page.locator("input[name=csrf]").first.input_value()
            status = page.evaluate(
                "([to, body]) => fetch(to, {method: 'POST', body: new URLSearchParams(body)}).then((r) => r.status)",
                [
                    f"/console/approvals/{trace_id}",
                    {"csrf": token, "decision": "APPROVE", "action_request_digest": digest},
                ],
            )
            assert status == 403
    assert desk.state(trace_id) == "PENDING"
    desk.troubles.clear()  # the browser complains of the 403


def test_another_digest_than_the_recorded_one_decides_nothing(desk: Desk) -> None:
    trace_id = _request(desk, "digest")
    with desk.as_("supervisor") as page:
        desk.go(page, f"/approvals/{trace_id}")
        page.fill("#why", "a form that is being filled in is not replaced")
        page.evaluate("document.querySelector('[name=action_request_digest]').value = '0'.repeat(64)")
        page.locator("[data-approve]").click()
        expect(page.get_by_role("alert")).to_contain_text("REQUEST_MISMATCH")
    assert desk.state(trace_id) == "PENDING"
    desk.troubles.clear()


def test_hostile_content_is_text_that_is_numbered_and_cut(desk: Desk) -> None:
    trace_id = desk.call("refund", HOSTILE, "hostile", intent="<i>{{7*7}}</i> \u202e" + "w" * 1_500)
    with desk.as_("supervisor") as page:
        for path in ("/approvals", f"/approvals/{trace_id}", f"/calls/{trace_id}"):
            desk.go(page, path)
            html = page.content()
            assert len(html.encode()) < 200_000, path
            assert page.evaluate("window.ran ?? null") is None
            assert page.locator("main script, main img, main b b").count() == 0
            assert not re.search("[\u202e\u202c\u200b\u0007]", html)
        desk.go(page, f"/approvals/{trace_id}")
        words = page.inner_text("#request")
        assert "<script>window.ran=1</script>" in words
        assert "{{7*7}}" in words
        for number in ("U+202E", "U+200B"):
            assert number in words
        assert "60,000 characters in all" in words
        assert "nested deeper than 24 levels" in words
        with page.expect_response("**/value*") as answer:
            page.get_by_role("link", name="All of it, as text").first.click()
        assert "A" * 60_000 in answer.value.text()
        assert "sandbox" in answer.value.headers["content-security-policy"]
        assert answer.value.headers["content-type"].startswith("text/plain")
    desk.verify_quiet()
    _decide(desk, "admin", trace_id, "DENY")


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_fit_for_everyone(desk: Desk, theme: str) -> None:
    trace_id = _request(desk, f"axe-{theme}")
    with desk.as_("supervisor", theme=theme) as page:
        for path in ("/", "/approvals", f"/approvals/{trace_id}", "/nothing"):
            for width, height in (WIDE, NARROW):
                page.set_viewport_size({"width": width, "height": height})
                desk.go(page, path)
                assert serious_findings(page) == [], (path, width)
            page.set_viewport_size({"width": SMALLEST[0], "height": SMALLEST[1]})
            assert overflow(page) == 0, path
    desk.troubles = [one for one in desk.troubles if "404" not in one]
    desk.verify_quiet()


def test_a_killed_gateway_is_told_and_the_page_catches_up_without_a_gap(desk: Desk) -> None:
    world, port = desk.world, desk.world.url.rsplit(":", 1)[1]
    with desk.as_("supervisor") as page:
        desk.go(page, "/approvals")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        _marked(page)
        aside(world.stop, 9)
        began = time.monotonic()
        expect(page.locator("[data-live-pill]")).to_have_text("Reconnecting")
        print(f"the pill said it after {time.monotonic() - began:.2f} s")
        expect(page.locator("#lost")).to_contain_text("Not live since")
        aside(world.start, TGA_PORT=port)
        trace_id = _request(desk, "while-away")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        expect(page.locator(f"a.req[href$='{trace_id}']")).to_be_visible()
        assert page.evaluate("window.mark") == 1
    desk.troubles.clear()  # the browser complains that nobody answered


def test_a_request_for_a_changed_tool_offers_no_approve(desk: Desk) -> None:
    """The last one here: the tool stays changed."""
    trace_id = _request(desk, "changed")
    world, port = desk.world, desk.world.url.rsplit(":", 1)[1]
    aside(world.stop)
    text = world.config.read_text()
    world.config.write_text(
        text.replace("[servers.bank.tools.refund]\n", '[servers.bank.tools.refund]\ndescription = "Now another."\n')
    )
    aside(world.start, TGA_PORT=port)
    with desk.as_("supervisor") as page:
        desk.go(page, f"/approvals/{trace_id}")
        expect(page.locator("#live-decision")).to_contain_text("The tool has changed since this was asked")
        assert page.locator("[data-approve]").count() == 0
        page.locator("[data-deny]").click()
        expect(page.locator("#live-decision")).to_contain_text("You denied it")
    assert desk.state(trace_id) == "DENIED"
    desk.verify_quiet()
