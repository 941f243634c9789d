"""Tool calls: filters that stand in the address, one call with all that is known of it, and the end of a hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
from playwright.sync_api import expect

from tests.cli.world import wait_for
from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, open_desk, overflow, serious_findings
from tests.patience import HANG_S

expect.set_options(timeout=HANG_S * 1000)
HELD = ("held-1", "held-2", "held-3", "held-4")


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as opened:
        for key in HELD:
            opened.call("slow_charge", {"amount": 7, "ms": 60_000}, key, wait_ms=0)
        for number in range(55):
            opened.call("charge", {"amount": number + 20}, f"c-{number}")
        opened.call("fail", {}, None)
        opened.call("refund", {"amount": 3}, "waits")
        yield opened


@pytest.fixture(scope="module")
def held(desk: Desk) -> dict[str, str]:
    """The ids of calls whose answers were lost, by their keys."""

    def found() -> dict[str, str]:
        items = desk.ask("admin", "/v1/traces?tool_name=slow_charge")[1]["items"]
        loaded = [
            desk.ask("admin", f"/v1/traces/{one['trace_id']}")[1] for one in items if one["waiting"] == "operator"
        ]
        return {one["idempotency_key"]: one["trace_id"] for one in loaded}

    wait_for(lambda: len(found()) == len(HELD))
    return found()


def test_filters_are_chips_and_stand_in_the_address_without_a_script(desk: Desk) -> None:
    with desk.as_("auditor", script=False) as page:
        desk.go(page, "/calls")
        page.select_option("[name=state]", "COMPLETED")
        page.select_option("[name=tool]", "bank/charge")
        page.fill("[name=principal_id]", "agent-1")
        page.get_by_role("button", name="Filter").click()
        page.wait_for_url("**state=COMPLETED**")
        given = parse_qs(urlsplit(page.url).query)
        assert (given["state"], given["tool"], given["principal_id"]) == (["COMPLETED"], ["bank/charge"], ["agent-1"])
        expect(page.locator("tbody tr")).to_have_count(50)
        assert set(page.locator("tbody .state").all_inner_texts()) == {"COMPLETED"}
        first = page.locator("tbody tr").first.get_attribute("data-id")
        page.get_by_role("link", name="Older", exact=True).click()
        expect(page.locator("tbody tr")).to_have_count(5)
        assert page.locator(f"[data-id='{first}']").count() == 0
        expect(page.locator(".applied")).to_contain_text("asked by agent-1")
        page.get_by_role("link", name="Newest", exact=True).click()
        expect(page.locator("tbody tr").first).to_have_attribute("data-id", str(first))
        page.locator(".applied a.x", has_text="COMPLETED").click()
        expect(page.locator(".applied a.x", has_text="COMPLETED")).to_have_count(0)
        assert "state" not in parse_qs(urlsplit(page.url).query)
        page.locator(".applied a.x", has_text="bank/charge").click()
        expect(page.locator("tbody .st-FAILED").first).to_be_visible()
    desk.verify_quiet()


def test_nothing_fits_says_so_and_offers_a_way_out(desk: Desk) -> None:
    with desk.as_("auditor") as page:
        desk.go(page, "/calls?principal_id=nobody-at-all")
        expect(page.locator(".empty")).to_contain_text("No call fits these filters")
        page.locator(".empty").get_by_role("link", name="Clear all").click()
        expect(page.locator("tbody tr")).to_have_count(50)
    desk.verify_quiet()


def test_newer_calls_announce_themselves_and_come_when_asked_for(desk: Desk) -> None:
    with desk.as_("auditor") as page:
        desk.go(page, "/calls?tool=bank/charge")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        before = page.locator("tbody tr").first.get_attribute("data-id")
        other = desk.call("fail", {}, None)
        new = desk.call("charge", {"amount": 99}, "newer")
        expect(page.locator("[data-fresh]")).to_contain_text("1 newer call")
        assert page.locator("tbody tr").first.get_attribute("data-id") == before, "rows moved under the hand"
        page.locator("[data-fresh]").click()
        expect(page.locator(f"[data-id='{new}']")).to_be_visible()
        assert page.locator(f"[data-id='{other}']").count() == 0, "what arrives must fit the filters too"
    desk.verify_quiet()


def test_a_call_shows_its_path_its_entries_and_what_was_and_was_not_verified(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4200}, "shown")
    entries = desk.ask("admin", f"/v1/traces/{trace_id}/entries")[1]["items"]
    told = f"/v1/traces/{trace_id}/verification"
    wait_for(lambda: desk.ask("admin", told)[1]["leaf_index"] is not None)
    leaves = desk.ask("admin", told)[1]["leaves"]
    assert leaves[-1] == desk.ask("admin", told)[1]["leaf_index"]
    with desk.as_("auditor", script=False) as page:
        desk.go(page, f"/calls/{trace_id}")
        expect(page.locator(".subject")).to_contain_text("COMPLETED")
        machine = page.locator(".machine-h")
        assert machine.get_attribute("aria-label") == (
            "State machine: PENDING then AUTHORIZED then EXECUTING then COMPLETED. It is COMPLETED."
        )
        words = page.inner_text(".tl")
        assert page.locator(".tl > li").count() == 4
        for one in entries:
            assert page.locator(f".tl .dg[title='{one['entry_digest']}']").count() == 1
        assert re.findall(r"leaf ([0-9,]+)", words) == [f"{leaf:,}" for leaf in leaves], words
        assert "approved by every-tool" in words
        assert page.locator("#verified .checks li").count() >= 5
        assert "4200" in page.inner_text("[aria-label=Arguments]")
        assert "not sent" not in words
        assert page.get_by_text("run again", exact=False).count() == 0
        with page.expect_download() as download:
            page.get_by_role("link", name="Receipt").click()
        assert download.value.path().read_text().startswith("c2sp.org/tlog-proof@v1\n")
        page.get_by_text("As curl").click()
        assert f"/v1/traces/{trace_id}" in page.inner_text("#as-curl")
    desk.verify_quiet()


def test_the_whole_digest_is_there_for_who_selects_it(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4201}, "selected")
    with desk.as_("auditor") as page:
        desk.go(page, f"/calls/{trace_id}")
        digest = page.locator(".tl .dg").first
        assert digest.evaluate("(d) => d.textContent.replace('…', '')") == digest.get_attribute("title")


def test_the_longest_key_stays_inside_of_a_narrow_page(desk: Desk) -> None:
    key = "order-" + "x" * 200
    trace_id = desk.call("charge", {"amount": 4}, key)
    for width in (390, 320):
        with desk.as_("auditor", (width, 800)) as page:
            for path in (f"/calls/{trace_id}", "/calls"):
                desk.go(page, path)
                assert overflow(page) == 0, (width, path)
    desk.verify_quiet()


def test_on_paper_a_dark_page_is_light_and_digests_are_whole(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4}, "printed")
    digest = desk.ask("admin", f"/v1/traces/{trace_id}/entries")[1]["items"][0]["entry_digest"]
    with desk.as_("auditor", theme="dark") as page:
        desk.go(page, f"/calls/{trace_id}")
        shown = page.locator(".tl .dg").first
        on_screen = shown.bounding_box()
        page.emulate_media(media="print")
        ink = page.evaluate("() => getComputedStyle(document.body).color")
        assert ink == "rgb(25, 27, 29)", "the ink of the light scheme"
        assert not page.locator(".side").is_visible()
        on_paper = shown.bounding_box()
        assert on_screen is not None
        assert on_paper is not None
        assert on_paper["width"] * on_paper["height"] > 3 * on_screen["width"] * on_screen["height"]
        assert shown.inner_text().replace("\n", "") == digest
    desk.verify_quiet()


def test_find_opens_a_call_by_its_id_its_key_and_a_digest(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4202}, "found-by-key")
    with desk.as_("auditor", script=False) as page:
        for sought in (trace_id, "found-by-key"):
            desk.go(page, "/")
            page.fill("#find", sought)
            page.keyboard.press("Enter")
            page.wait_for_url(f"**/calls/{trace_id}")
        desk.go(page, "/find?q=nothing-like-it")
        expect(page.locator(".empty")).to_contain_text("Nothing is called that")
    desk.verify_quiet()


def test_a_call_that_is_not_mine_is_not_there(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 4203}, "of-the-admin", who="admin")
    with desk.as_("agent") as page:
        answer = page.goto(f"{desk.world.url}/console/calls/{trace_id}")
        assert answer is not None
        assert answer.status == 404
        expect(page.get_by_role("alert")).to_contain_text("TRACE_NOT_FOUND")
    desk.troubles.clear()


def test_no_choice_is_made_for_the_operator_and_without_a_reason_nothing_is_recorded(
    desk: Desk, held: dict[str, str]
) -> None:
    trace_id = held["held-1"]
    with desk.as_("operator") as page:
        desk.go(page, f"/calls/{trace_id}")
        expect(page.locator(".subject")).to_contain_text("EXECUTING, held")
        expect(page.locator("#live-next")).to_contain_text("Nobody knows whether this call happened")
        assert page.locator("[name=action]:checked").count() == 0
        expect(page.locator(".choice", has_text="Send it once more")).to_contain_text("will do it twice")
        page.locator("#resolve-btn").click()  # the browser refuses: no choice
        page.check("[value=failed]")
        page.locator("#resolve-btn").click()  # and no reason
        assert desk.state(trace_id) == "EXECUTING"
        token = page.locator("#live-held [name=csrf]").input_value()
        digest = page.locator("[name=tool_call_digest]").input_value()
        for fields in (
            {"action": "failed", "rationale": "  "},
            {"action": "", "rationale": "why"},
            {"rationale": "why"},
        ):
            told = page.evaluate(
                "([to, body]) => fetch(to, {method: 'POST', body: new URLSearchParams(body)}).then((r) => r.status)",
                [f"/console/calls/{trace_id}/resolve", {"csrf": token, "tool_call_digest": digest, **fields}],
            )
            assert told == 422, fields
        assert desk.state(trace_id) == "EXECUTING"
        page.fill("#why", "the bank has no such charge")
        page.locator("#resolve-btn").click()
        expect(page.locator(".subject")).to_contain_text("FAILED")
        expect(page.locator(".tl")).to_contain_text("grace: “the bank has no such charge”")
    resolution = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["artifacts"]["tool_effect"]["resolution"]
    assert (resolution["action"], resolution["resolved_by"]) == ("failed", "grace")
    desk.troubles.clear()


def test_a_hold_is_ended_without_a_script_and_what_was_typed_is_kept(desk: Desk, held: dict[str, str]) -> None:
    trace_id = held["held-2"]
    with desk.as_("operator", NARROW, script=False) as page:
        desk.go(page, f"/calls/{trace_id}")
        page.check("[value=succeeded]")
        page.fill("#out", "{not json")
        page.fill("#why", "line 331 of the book")
        page.locator("#resolve-btn").click()
        expect(page.get_by_role("alert")).to_contain_text("not JSON")
        assert (page.input_value("#why"), page.input_value("#out")) == ("line 331 of the book", "{not json")
        assert page.is_checked("[value=succeeded]")
        page.fill("#out", '{"charge_id": "ch_9"}')
        page.locator("#resolve-btn").click()
        expect(page.locator(".subject")).to_contain_text("COMPLETED")
        expect(page.locator("[aria-label=Effect]")).to_contain_text("ch_9")
    desk.troubles.clear()


def test_ending_a_hold_is_an_operators(desk: Desk, held: dict[str, str]) -> None:
    trace_id = held["held-3"]
    for who in ("auditor", "supervisor"):
        with desk.as_(who) as page:
            desk.go(page, f"/calls/{trace_id}")
            assert page.locator("[name=action], #resolve-btn").count() == 0
            expect(page.locator("[data-lacks]")).to_contain_text("Ending a hold needs the role operator")
            digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["tool_call_digest"]
            token = page.locator("input[name=csrf]").first.input_value()
            fields = {"csrf": token, "tool_call_digest": digest, "action": "failed", "rationale": "mine"}
            told = page.evaluate(
                "([to, body]) => fetch(to, {method: 'POST', body: new URLSearchParams(body)}).then((r) => r.status)",
                [f"/console/calls/{trace_id}/resolve", fields],
            )
            assert told == 403
    assert desk.state(trace_id) == "EXECUTING"
    desk.troubles.clear()


def test_a_held_call_that_is_ended_elsewhere_is_shown_so_by_itself(desk: Desk, held: dict[str, str]) -> None:
    trace_id = held["held-4"]
    with desk.as_("operator") as page:
        desk.go(page, f"/calls/{trace_id}")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["tool_call_digest"]
        body = {"action": "failed", "tool_call_digest": digest, "rationale": "not in the book"}
        assert desk.ask("admin", f"/v1/traces/{trace_id}/resolve", body)[0] == 200
        expect(page.locator(".subject")).to_contain_text("FAILED")
        expect(page.locator("#resolve-btn")).to_have_count(0)
    desk.verify_quiet()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_fit_for_everyone(desk: Desk, held: dict[str, str], theme: str) -> None:
    done = desk.call("charge", {"amount": 4204}, f"axe-{theme}")
    with desk.as_("operator", theme=theme) as page:
        for path in ("/", "/calls?state=COMPLETED", f"/calls/{done}", f"/calls/{held['held-3']}", "/find"):
            for width, height in (WIDE, NARROW):
                page.set_viewport_size({"width": width, "height": height})
                desk.go(page, path)
                assert serious_findings(page) == [], (path, width)
            page.set_viewport_size({"width": SMALLEST[0], "height": SMALLEST[1]})
            assert overflow(page) == 0, path
    desk.verify_quiet()
