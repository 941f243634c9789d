"""Whoever attacks the console or is clumsy with it: forged forms, fixed sessions, frames, other tenants' ids, roles
that lack a right, double clicks, sessions that end in mid-form; hostile text in everything that somebody can write."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from playwright.sync_api import expect

from app.console.site import FORMS, PAGES
from tests.cli.world import World, wait_for
from tests.console.browsing import Desk, aside, open_desk
from tests.console.visiting import Visitor, visitor
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

expect.set_options(timeout=HANG_S * 1000)

HOSTILE = (
    "<script>window.ran=1</script><img src=x onerror=window.ran=1> {{7*7}} '\"><b>x \u202etxt.exe\u202c \u200b \u0007"
)
HIDDEN = re.compile("[\u202e\u202c\u200b\u0007]")


def _hostile_tool(world: World) -> None:
    text = world.config.read_text()
    described = HOSTILE.replace("\\", "\\\\").replace('"', '\\"').replace("\u0007", "\\u0007")
    world.config.write_text(
        text.replace("[servers.bank.tools.balance]\n", f'[servers.bank.tools.balance]\ndescription = "{described}"\n')
    )


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk(_hostile_tool) as opened:
        assert aside(opened.world.tga, "tenants", "create", "acme").returncode == 0
        for role in ("admin", "operator"):
            opened.keys[f"acme-{role}"] = aside(opened.world.new_key, f"eve-{role}", role, tenant="acme")
        yield opened


def filled(path: str, trace_id: str) -> str:
    return re.sub(r"\{(\w+)\}", lambda found: trace_id if found[1] == "trace_id" else "none", path)


def test_no_form_is_taken_without_its_sessions_token_or_from_another_site(desk: Desk) -> None:
    trace_id = desk.call("refund", {"amount": 5}, "forged")
    digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    mine, other = visitor(desk, "admin"), visitor(desk, "admin")
    token, fields = mine.csrf(), {"decision": "APPROVE", "action_request_digest": digest, "action": "failed"}
    foreign = other.csrf()
    assert token != foreign
    for path in FORMS:
        to = filled(path, trace_id)
        assert mine.ask(to, fields)[0] == 403, to
        for wrong in ("", foreign, token[:-1], "é"):
            assert mine.ask(to, {**fields, "csrf": wrong})[0] == 403, (to, wrong)
        for headers in (
            {"Origin": "https://evil.example"},
            {"Origin": "null"},
            {"Sec_Fetch_Site": "cross-site"},
            {"Sec_Fetch_Site": "same-site"},
        ):
            assert mine.ask(to, {**fields, "csrf": token}, **headers)[0] == 403, (to, headers)
        assert mine.ask(to)[0] in (404, 405) or path in PAGES, f"{to} must not be had by a link"
        status, headers, _ = Visitor(desk.world.url).ask(to, {**fields, "csrf": token})
        assert (status, headers["location"].startswith("/console/sign-in")) == (303, True), to
    assert desk.state(trace_id) == "PENDING"


def test_every_page_refuses_frames_foreign_code_and_caches(desk: Desk) -> None:
    trace_id = desk.call("charge", {"amount": 5}, "framed")
    mine = visitor(desk, "admin")
    for path in [*(filled(path, trace_id) for path in PAGES), "/sign-in", "/nothing"]:
        for who in (mine, Visitor(desk.world.url)):
            _, headers, _ = who.ask(path)
            policy = headers["content-security-policy"]
            assert "default-src 'none'" in policy, path
            assert "frame-ancestors 'none'" in policy, path
            assert "unsafe" not in policy, path
            assert headers["x-content-type-options"] == "nosniff", path
            assert "strict-transport-security" not in headers or who is mine
            if "location" not in headers:
                assert headers["cache-control"] == "no-store", path


def test_a_session_that_somebody_planted_is_never_signed_in(desk: Desk) -> None:
    planted = Visitor(desk.world.url, cookie="A" * 120)
    assert planted.ask("/calls")[0] == 303
    planted.sign_in(desk.keys["auditor"])
    assert planted.cookie != "A" * 120
    assert Visitor(desk.world.url, cookie="A" * 120).ask("/calls")[0] == 303
    victim = visitor(desk, "auditor")
    for place in (0, len(victim.cookie) // 2, len(victim.cookie) - 2):
        changed = "B" if victim.cookie[place] != "B" else "C"
        forged = victim.cookie[:place] + changed + victim.cookie[place + 1 :]
        assert Visitor(desk.world.url, cookie=forged).ask("/calls")[0] == 303, place
    token = victim.csrf()
    assert victim.ask("/sign-out", {"csrf": token})[0] == 303
    assert victim.ask("/calls")[0] == 303, "a copy of the cookie must not outlive the signing out"


def test_nothing_of_another_tenant_is_shown_or_moved_by_its_id(desk: Desk) -> None:
    waits = desk.call("refund", {"amount": 5}, "of-default", intent="nobody else's")
    done = desk.call("charge", {"amount": 6}, "of-default-too")
    digest = desk.ask("admin", f"/v1/traces/{waits}")[1]["action_request_digest"]
    eve = visitor(desk, "acme-admin")
    token = eve.csrf()
    for trace_id in (waits, done):
        for path in PAGES:
            if "{trace_id}" in path:
                status, _, page = eve.ask(f"{filled(path, trace_id)}?of=action_request")
                assert status == 404, path
                assert "nobody else's" not in page
        for path in FORMS:
            if "{trace_id}" in path:
                fields = {
                    "csrf": token,
                    "decision": "DENY",
                    "action_request_digest": digest,
                    "tool_call_digest": digest,
                }
                more = {"action": "failed", "rationale": "mine now"}
                assert eve.ask(filled(path, trace_id), {**fields, **more})[0] == 404, path
        assert trace_id not in eve.ask("/calls")[2]
        assert trace_id not in eve.ask(f"/find?q={trace_id}")[2].replace(f'value="{trace_id}"', "").partition("main")[0]
        assert eve.ask(f"/api/v1/traces/{trace_id}")[0] == 404
    assert eve.ask("/find?q=of-default")[0] == 200
    assert desk.state(waits) == "PENDING"


def test_a_role_without_the_right_posts_in_vain(desk: Desk) -> None:
    waits = desk.call("refund", {"amount": 5}, "rights", who="admin")
    digest = desk.ask("admin", f"/v1/traces/{waits}")[1]["action_request_digest"]
    fields = {"decision": "APPROVE", "action_request_digest": digest, "tool_call_digest": digest, "action": "failed"}
    more = {"rationale": "because", "server_id": "bank", "tool_name": "charge", "definition_digest": digest}
    refused = {
        "auditor": ("/approvals/{}", "/calls/{}/resolve", "/calls/{}/recover", "/calls/{}/withdraw", "/servers/accept"),
        "supervisor": ("/calls/{}/resolve", "/calls/{}/recover", "/servers/accept", "/ledger/verify"),
        "operator": ("/approvals/{}", "/calls/{}/withdraw"),
    }
    for who, paths in refused.items():
        someone = visitor(desk, who)
        token = someone.csrf()
        for path in paths:
            assert someone.ask(path.format(waits), {**fields, **more, "csrf": token})[0] == 403, (who, path)
    assert desk.state(waits) == "PENDING"


def test_a_double_click_and_two_tabs_decide_once(desk: Desk) -> None:
    trace_id = desk.call("refund", {"amount": 5}, "double")
    digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    tabs = [visitor(desk, "supervisor"), visitor(desk, "admin")]
    tokens = [tab.csrf() for tab in tabs]

    def decide(number: int) -> int:
        fields = {"decision": "APPROVE" if number < 2 else "DENY", "action_request_digest": digest}
        return tabs[number // 2].ask(f"/approvals/{trace_id}", {**fields, "csrf": tokens[number // 2]})[0]

    with ThreadPoolExecutor(4) as pool:
        statuses = list(pool.map(decide, (0, 1, 2, 3)))
    assert set(statuses) <= {303, 409}, statuses
    wait_for(lambda: desk.state(trace_id) in ("COMPLETED", "DENIED"))
    entries = desk.ask("admin", f"/v1/traces/{trace_id}/entries")[1]["items"]
    assert [one["entry"]["artifact_type"] for one in entries].count("supervisor_decision") == 1
    assert desk.world.executions("double") == (1 if desk.state(trace_id) == "COMPLETED" else 0)


def test_a_session_that_ends_in_mid_form_sends_nothing_and_says_so(desk: Desk) -> None:
    trace_id = desk.call("refund", {"amount": 5}, "ended")
    digest = desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    desk.keys["leaving"] = aside(desk.world.new_key, "linus", "supervisor")
    desk.keys["leaving-2"] = aside(desk.world.new_key, "lena", "supervisor")
    with desk.as_("leaving") as page:
        desk.go(page, f"/approvals/{trace_id}")
        page.fill("#why", "in mid-sentence")
        listed = desk.ask("admin", "/v1/keys")[1]["items"]
        key_id = next(one["key_id"] for one in listed if one["principal_id"] == "linus")
        assert aside(desk.world.tga, "keys", "revoke", key_id).returncode == 0
        wait_for(lambda: desk.ask("leaving", "/v1/me")[0] == 401)
        desk.call("charge", {"amount": 1}, "something-happens")  # a live page asks for itself again, and learns of it
        expect(page.locator("#lost")).to_contain_text("Your session has ended")
        expect(page.locator("[data-live-pill]")).to_have_text("Signed out")
        expect(page.locator("#why")).to_have_value("in mid-sentence")
        page.locator("[data-approve]").click()
        page.wait_for_url("**/sign-in**")
        assert "Nothing was sent" in page.inner_text("main")
    with desk.as_("leaving-2") as page:  # who writes nothing is taken to the door
        desk.go(page, f"/approvals/{trace_id}")
        expect(page.locator("[data-live-pill]")).to_have_text("Live")
        listed = desk.ask("admin", "/v1/keys")[1]["items"]
        key_id = next(one["key_id"] for one in listed if one["principal_id"] == "lena")
        assert aside(desk.world.tga, "keys", "revoke", key_id).returncode == 0
        desk.call("charge", {"amount": 1}, "something-else-happens")
        page.wait_for_url("**/sign-in**")
    assert desk.state(trace_id) == "PENDING"
    assert digest == desk.ask("admin", f"/v1/traces/{trace_id}")[1]["action_request_digest"]
    desk.troubles.clear()


def test_hostile_text_is_text_wherever_it_can_be_written(desk: Desk) -> None:
    """By an agent, a tool, an operator, a supervisor, the configuration, and in the address."""
    held = desk.call("slow_charge", {"amount": 7, "ms": 60_000}, "hostile-held", wait_ms=0, intent=HOSTILE)
    denied = desk.call("refund", {"amount": 5, HOSTILE: HOSTILE, "deep": {HOSTILE: [HOSTILE] * 40}}, "hostile-denied")
    withdrawn = desk.call("refund", {"amount": 5}, "hostile-withdrawn", intent=HOSTILE)
    digest = desk.ask("admin", f"/v1/traces/{denied}")[1]["action_request_digest"]
    body: dict[str, Any] = {"decision": "DENY", "action_request_digest": digest, "rationale": HOSTILE + "w" * 1_500}
    assert desk.ask("supervisor", f"/v1/traces/{denied}/decision", body)[0] == 200
    assert desk.ask("agent", f"/v1/traces/{withdrawn}/withdraw", {"rationale": HOSTILE})[0] == 200
    wait_for(lambda: desk.ask("admin", f"/v1/traces/{held}")[1]["waiting"] == "operator")
    sent = desk.ask("admin", f"/v1/traces/{held}")[1]["tool_call_digest"]
    output = {"said": HOSTILE, HOSTILE: "B" * 60_000, "list": [HOSTILE] * 200}
    body = {"action": "succeeded", "tool_call_digest": sent, "rationale": HOSTILE, "output": output}
    assert desk.ask("operator", f"/v1/traces/{held}/resolve", body)[0] == 200
    wait_for(lambda: len(desk.ask("admin", "/v1/acts")[1]["items"]) >= 2)  # folded about a second behind
    in_address = urllib.parse.quote(HOSTILE.replace("\u0007", ""))
    with desk.as_("admin") as page:
        for path in (
            *("/", "/acts", "/approvals", "/calls", "/runs", "/servers?server=bank", "/ledger", "/policy"),
            *(f"/calls/{one}" for one in (held, denied, withdrawn)),
            *(f"/approvals/{one}" for one in (denied, withdrawn)),
            *(f"/calls?principal_id={in_address}", f"/find?q={in_address}", f"/runs?prefix={in_address}"),
            *(f"/policy?tool=bank/charge&arguments={in_address}", f"/servers?server={in_address}"),
        ):
            desk.go(page, path)
            html = page.content()
            assert len(html.encode()) < 200_000, path
            assert page.evaluate("window.ran ?? null") is None, path
            assert page.locator("main script, main img, main b b").count() == 0, path
            typed = re.compile(r'value="[^"]*"|<textarea.*?</textarea>', re.DOTALL)  # what was typed stays as it was
            assert not HIDDEN.search(typed.sub("", html)), path
        desk.go(page, f"/calls/{held}")
        assert "<script>window.ran=1</script>" in page.inner_text("[aria-label=Effect]")
        assert "U+202E" in page.inner_text("[aria-label=Effect]")
        desk.go(page, "/servers?server=bank")
        assert "<script>window.ran=1</script>" in page.inner_text("main")
    desk.troubles = [one for one in desk.troubles if "400" not in one and "422" not in one]
    desk.verify_quiet()
