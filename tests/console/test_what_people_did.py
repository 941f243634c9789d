"""What people did about calls, runs and tools is listed, each act with its actor, its reason and its place in the log;
what the policy, the gateway and agents did to their own is not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.cli.hand_worker import HandWorker, ask, fail, failed, may_start, suspend
from tests.cli.world import World, wait_for
from tests.console.browsing import NARROW, WIDE, Desk, aside, open_desk, overflow, serious_findings
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

expect.set_options(timeout=HANG_S * 1000)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    def made(world: World) -> None:
        may_start(world)

    with open_desk(made) as opened:
        opened.keys["worker"] = aside(opened.world.new_key, "worker-1", "worker")
        yield opened


def _ok(answered: tuple[int, Any]) -> Any:
    status, told = answered
    assert status in (200, 201, 202, 204), told
    return told


def _acts(desk: Desk, who: str = "auditor") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    cursor = ""
    while True:
        page = _ok(desk.ask(who, f"/v1/acts?limit=3{cursor}"))
        items += page["items"]
        if page["next"] is None:
            return items
        cursor = f"&cursor={page['next']}"


def until_held(desk: Desk, trace_id: str) -> None:
    wait_for(lambda: desk.ask("admin", f"/v1/traces/{trace_id}")[1]["waiting"] == "operator")


def _do_all(desk: Desk) -> None:
    """One act of each sort that a test can bring about, and beside each what is no act of a person."""
    desk.call("charge", {"amount": 3}, "by-policy")
    for key, decision in (("act-yes", "APPROVE"), ("act-no", "DENY")):
        trace_id = desk.call("refund", {"amount": 5}, key)
        digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
        said = {"decision": decision, "action_request_digest": digest, "rationale": f"because of {key}"}
        _ok(desk.ask("supervisor", f"/v1/traces/{trace_id}/decision", said))
    own = desk.call("refund", {"amount": 5}, "act-own")
    _ok(desk.ask("agent", f"/v1/traces/{own}/withdraw", {}))
    for key, action in (("act-happened", "succeeded"), ("act-did-not", "failed")):
        held = desk.call("slow_charge", {"amount": 8, "ms": 60_000}, key, wait_ms=0)
        until_held(desk, held)
        digest = desk.ask("admin", f"/v1/traces/{held}")[1]["tool_call_digest"]
        said = {"action": action, "tool_call_digest": digest, "rationale": f"the book says {action}"}
        _ok(desk.ask("operator", f"/v1/traces/{held}/resolve", said))
    worker = HandWorker(desk.world, desk.keys["worker"], procedure="acting")
    worker.register()
    for run_id, puts, then in (
        ("asks", [ask("1", "Shall it?", {"type": "boolean"})], suspend("1")),
        ("stays", [ask("1", "Shall it stay?", {"type": "boolean"})], suspend("1")),
        ("own", [ask("1", "Shall it be its own?", {"type": "boolean"})], suspend("1")),
        ("fails", [failed("1", "no")], fail("no")),
    ):
        _ok(desk.ask("agent", "/v1/runs", {"procedure": "acting", "input": {}, "run_id": run_id}))
        worker.lease()
        worker.put(*puts, then=then)
    _ok(desk.ask("operator", "/v1/runs/stays/signals", {"name": "hurry", "signal_id": "s-1", "value": 1}))
    _ok(desk.ask("supervisor", "/v1/runs/asks/signals", {"path": "1", "answer": True}))
    _ok(desk.ask("operator", "/v1/runs/stays/cancel", {"rationale": "nobody needs it"}))
    _ok(desk.ask("agent", "/v1/runs/own/cancel", {"rationale": "an agent's own"}))
    _ok(desk.ask("operator", "/v1/runs/fails/retry", {"rationale": "the file is there now"}))
    _ok(desk.ask("operator", "/v1/runs/stays/fork", {"at": 1, "run_id": "stays-again"}))
    gone = desk.call("charge", {"amount": 77}, "who-left")
    erased = aside(desk.world.tga, "erase", gone, "-r", "the customer asked", "--yes")
    assert erased.returncode == 0, erased.stderr


def test_every_act_of_a_person_is_listed_once_with_its_reason_and_leads_to_its_entry(desk: Desk) -> None:
    _do_all(desk)
    expected = {
        ("approved", "ada", "because of act-yes"),
        ("denied", "ada", "because of act-no"),
        ("resolved_as_succeeded", "grace", "the book says succeeded"),
        ("resolved_as_failed", "grace", "the book says failed"),
        ("answered", "ada", None),
        ("signalled", "grace", None),
        ("cancelled", "grace", "nobody needs it"),
        ("resumed", "grace", "the file is there now"),
        ("forked", "grace", None),
        ("erased", "cli", "the customer asked"),
    }
    wait_for(lambda: len(_acts(desk)) >= len(expected))
    acts = _acts(desk)
    assert sorted(map(repr, ((one["act"], one["by"], one["reason"]) for one in acts))) == sorted(map(repr, expected))
    leaves = [one["leaf_index"] for one in acts]
    assert leaves == sorted(leaves, reverse=True), "not the newest first"
    for one in acts:
        if one["kind"] == "trace":
            entries = _ok(desk.ask("auditor", f"/v1/traces/{one['id']}/entries"))["items"]
            assert entries[one["sequence_number"] - 1]["entry"]["recorded_at"] == one["at"]
    with desk.as_("auditor", script=False) as page:
        desk.go(page, "/")
        page.locator("#live-people").get_by_role("link", name="All").click()
        rows = page.locator("#acts tbody tr")
        expect(rows).to_have_count(len(expected))
        for words in (
            "ada approved bank/refund",
            "grace recorded that bank/slow_charge did not happen",
            "ada answered the run asks (the question at 1)",
            "grace sent a signal to the run stays (the signal hurry)",
            "grace forked stays as stays-again",
            "grace had the run fails go on",
            "the file is there now",
        ):
            expect(page.locator("#acts")).to_contain_text(words)
        assert "an agent's own" not in page.locator("#acts").inner_text()
        rows.filter(has_text="cancelled the run").get_by_role("link").click()
        expect(page.locator(".subject")).to_contain_text("CANCELLED")
        assert "at=" in page.url
    desk.verify_quiet()


def test_who_sees_only_its_own_sees_no_acts_and_is_told_which_role_does(desk: Desk) -> None:
    assert desk.ask("agent", "/v1/acts")[0] == 403
    with desk.as_("agent") as page:
        desk.go(page, "/")
        assert page.locator("#live-people").count() == 0
        answered = page.goto(f"{desk.world.url}/console/acts")
        assert answered is not None
        assert answered.status == 403
        expect(page.locator("main")).to_contain_text(re.compile("auditor", re.IGNORECASE))
    desk.troubles.clear()


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_page_is_fit_for_everyone(desk: Desk, theme: str) -> None:
    with desk.as_("auditor", theme=theme) as page:
        for size in (WIDE, NARROW, (320, 800)):
            page.set_viewport_size({"width": size[0], "height": size[1]})
            desk.go(page, "/acts")
            assert serious_findings(page) == [], size
            assert overflow(page) == 0, size
    desk.verify_quiet()


def test_a_page_of_hostile_reasons_is_text_and_stays_small(desk: Desk) -> None:
    before = len(_acts(desk))
    for number in range(51):
        trace_id = desk.call("refund", {"amount": 5}, f"hostile-{number}")
        digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
        why = f"{number} <script>window.ran=1</script>" + '"<&\u202e' * 400
        said = {"decision": "DENY", "action_request_digest": digest, "rationale": why}
        _ok(desk.ask("supervisor", f"/v1/traces/{trace_id}/decision", said))
    wait_for(lambda: len(_acts(desk)) == before + 51)
    with desk.as_("auditor") as page:
        desk.go(page, "/acts")
        expect(page.locator("#acts tbody tr")).to_have_count(50)
        html = page.content()
        assert len(html.encode()) < 200_000
        assert "\u202e" not in html
        assert page.evaluate("window.ran ?? null") is None
        first = page.locator("#acts tbody tr").first
        expect(first).to_contain_text("50 <script>window.ran=1</script>")
        expect(first).to_contain_text("characters")  # how much of the reason is shown
        page.get_by_role("link", name="Older").click()
        expect(page.locator("#acts")).to_contain_text("0 <script>")
        page.get_by_role("link", name="Newest", exact=True).click()
        expect(page.locator("#acts tbody tr")).to_have_count(50)
    desk.verify_quiet()
