"""What people do and see beside deciding: withdraw, continue, what others did, how often and how fast, kept heads."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from tests.cli.world import World, wait_for
from tests.console.browsing import NARROW, WIDE, Desk, open_desk, overflow, serious_findings
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

expect.set_options(timeout=HANG_S * 1000)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    def patient(world: World) -> None:
        text = world.config.read_text()
        assert "timeout_ms = 5000" in text
        world.config.write_text(text.replace("timeout_ms = 5000", "timeout_ms = 600000"))

    with open_desk(patient) as opened:
        yield opened


def _posted(page: Page, to: str, **fields: str) -> int:
    token = page.locator("input[name=csrf]").first.input_value()
    return int(
        page.evaluate(
            "([to, body]) => fetch(to, {method: 'POST', body: new URLSearchParams(body)}).then((r) => r.status)",
            [to, {"csrf": token, **fields}],
        )
    )


def test_its_caller_withdraws_a_request_after_being_asked_and_nobody_else_can(desk: Desk) -> None:
    trace_id = desk.call("refund", {"amount": 5}, "withdrawn")
    with desk.as_("supervisor") as page:
        desk.go(page, f"/calls/{trace_id}")
        assert page.locator("#withdraw, form[action$='/withdraw']").count() == 0
        assert _posted(page, f"/console/calls/{trace_id}/withdraw") == 403
    assert desk.state(trace_id) == "PENDING"
    with desk.as_("agent", NARROW, script=False) as page:
        desk.go(page, f"/calls/{trace_id}")
        assert not page.get_by_role("button", name="Withdraw this request").is_visible(), "one click must not do it"
        page.get_by_text("Withdraw it").click()
        page.get_by_label("Why").fill("asked for the wrong order")
        page.get_by_role("button", name="Withdraw this request").click()
        expect(page.locator(".subject")).to_contain_text("DENIED")
        expect(page.locator(".tl")).to_contain_text("withdrew it")
    decision = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["artifacts"]["supervisor_decision"]
    assert (decision["decided_by"]["type"], decision["rationale"]) == ("withdrawal", "asked for the wrong order")
    assert desk.world.executions("withdrawn") == 0
    desk.troubles.clear()


def test_a_call_in_motion_is_continued_by_an_operator_and_is_done_once(desk: Desk) -> None:
    with desk.world.bank_stands_still():
        trace_id = desk.call("slow_charge", {"amount": 7, "ms": 1}, "in-motion", wait_ms=0)
        wait_for(lambda: desk.state(trace_id) == "EXECUTING")
        with desk.as_("operator") as page:
            desk.go(page, f"/calls/{trace_id}")
            page.get_by_text("It stands still").click()
            page.get_by_role("button", name="Continue it").click()
            expect(page.locator(".subject")).to_contain_text("EXECUTING")
        with desk.as_("supervisor") as page:
            desk.go(page, f"/calls/{trace_id}")
            assert page.locator("form[action$='/recover']").count() == 0
            assert _posted(page, f"/console/calls/{trace_id}/recover") == 403
    wait_for(lambda: desk.state(trace_id) == "COMPLETED")
    assert desk.world.executions("in-motion") == 1
    desk.troubles.clear()


def test_what_people_did_stands_on_the_overview(desk: Desk) -> None:
    for key, decision in (("people-yes", "APPROVE"), ("people-no", "DENY")):
        trace_id = desk.call("refund", {"amount": 5}, key)
        digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
        body = {"decision": decision, "action_request_digest": digest}
        assert desk.ask("supervisor", f"/v1/traces/{trace_id}/decision", body)[0] == 200
    with desk.as_("auditor", script=False) as page:
        end = time.monotonic() + HANG_S
        while True:  # facts of calls are folded about a second behind
            desk.go(page, "/")
            words = page.locator("#live-people").inner_text()
            if "ada approved bank/refund" in words and "ada denied bank/refund" in words:
                break
            assert time.monotonic() < end, words
            page.wait_for_timeout(100)
        page.locator("#live-people .acts-feed a").first.click()
        expect(page.locator(".subject")).to_contain_text("refund")
    desk.verify_quiet()


def test_how_often_and_how_fast_stands_over_the_list_and_follows_its_filters(desk: Desk) -> None:
    for number in range(3):
        desk.call("charge", {"amount": number + 20}, f"metric-{number}")
    wait_for(lambda: desk.ask("auditor", "/v1/stats?server_id=bank&tool_name=charge")[1]["total"]["completed"] >= 3)
    with desk.as_("auditor", script=False) as page:
        desk.go(page, "/calls?tool=bank/charge")
        metrics = page.locator("#metrics")
        expect(metrics).to_contain_text("Calls, last hour, bank/charge")
        expect(metrics.locator("a", has_text="completed")).to_contain_text("3")
        expect(metrics).to_contain_text("95 % below")
        metrics.locator("a", has_text="completed").click()
        assert "state=COMPLETED" in page.url
        assert "tool=bank%2Fcharge" in page.url
        expect(page.locator("tbody tr")).to_have_count(3)
        assert re.search(r"\d+(\.\d+)? (ms|s)", page.locator("tbody tr").first.inner_text()), "how long it took"
    with desk.as_("agent") as page:  # who sees only its own gets no figures of all
        desk.go(page, "/calls")
        assert page.locator("#metrics").count() == 0
    desk.verify_quiet()


def test_a_kept_head_fits_or_says_where_the_log_splits(desk: Desk) -> None:
    desk.call("charge", {"amount": 31}, "kept-1")
    with desk.as_("auditor") as page:
        kept = page.request.get(f"{desk.world.url}/console/api/v1/log/checkpoint").text()
        size = int(kept.split("\n")[1])
        desk.call("charge", {"amount": 32}, "kept-2")

        def grown() -> bool:
            return int(page.request.get(f"{desk.world.url}/console/api/v1/log/checkpoint").text().split("\n")[1]) > size

        end = time.monotonic() + HANG_S
        while not grown():
            assert time.monotonic() < end
            page.wait_for_timeout(50)
        file = desk.world.home / "head.txt"
        file.write_text(kept)
        desk.go(page, "/ledger")
        page.set_input_files("#kept-file", str(file))
        page.wait_for_function("() => document.getElementById('kept-text').value.length > 20")
        page.get_by_role("button", name="Compare", exact=True).click()
        expect(page.locator("#kept")).to_contain_text(f"Consistent up to entry {size:,}")
        expect(page.locator("#kept")).to_contain_text("recomputed here")
        newest = page.request.get(f"{desk.world.url}/console/api/v1/log/checkpoint").text()
    forged = kept.replace(kept.split("\n")[2], "A" * 43 + "=")
    with desk.as_("supervisor", NARROW, script=False) as page:
        for text, words in (
            (forged, "a signature under a known key does not fit"),
            ("no head at all", "This is no head that the log's key signed"),
            (f"{kept}\n{newest}", f"Consistent up to entry {int(newest.split(chr(10))[1]):,}"),
            ("<script>window.ran=1</script>\u202e", "Nothing could be compared"),
        ):
            desk.go(page, "/ledger")
            page.fill("#kept-text", text)
            page.get_by_role("button", name="Compare", exact=True).click()
            expect(page.locator("#kept")).to_contain_text(words)
            assert overflow(page) == 0
    desk.verify_quiet()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_pages_are_fit_for_everyone(desk: Desk, theme: str) -> None:
    trace_id = desk.call("refund", {"amount": 6}, f"fit-{theme}")
    with desk.as_("agent", theme=theme) as page:
        for size in (WIDE, NARROW):
            page.set_viewport_size({"width": size[0], "height": size[1]})
            desk.go(page, f"/calls/{trace_id}")
            page.get_by_text("Withdraw it").click()
            assert serious_findings(page) == [], size
    desk.verify_quiet()
