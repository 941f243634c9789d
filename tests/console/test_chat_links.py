"""Slack and Teams, end to end: what waits for a person is told there, the link leads through the sign-in to exactly it,
and what is decided there is done once, however often the message came."""

from __future__ import annotations

import contextlib
import random
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.cli.hand_worker import HandWorker, ask, may_start, step, suspend
from tests.cli.world import World, wait_for
from tests.console.browsing import Desk, aside, open_desk
from tests.console.chat_services import Channel, open_channel
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

expect.set_options(timeout=HANG_S * 1000)
LEASE_MS = 3_000
SECRET = "4111-1111-1111-1111"  # noqa: S105
HOSTILE = "<!channel> <https://evil.example|Approve> @here *b* [x](https://evil.example)"
PROGRAM = """
main = procedure "main" {
    output = {said = {type = "boolean"}},
    run = function()
        local card = "4111-1111-1111-1111"
        return {said = Human.approve({message = "Refund " .. card .. "?", context = {card = card}})}
    end
}
"""


class House:
    """A gateway, a channel of Slack, one of Teams, and two receivers that are of no use."""

    def __init__(self, desk: Desk, slack: Channel, teams: Channel, silent: Channel) -> None:
        self.desk, self.slack, self.teams, self.silent = desk, slack, teams, silent
        self.both = (slack, teams)

    def follow(self, page: Page, channel: Channel, path: str) -> None:
        """The link of a message, from the page on which it stands."""
        page.goto(channel.page)
        page.locator(f"a[href$='{path}']").click()


def _free_port() -> int:
    """Below those that the system gives out by itself: no other process gets it before the gateway does."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


@pytest.fixture(scope="module")
def house() -> Iterator[House]:
    port = _free_port()
    with open_channel("slack") as slack, open_channel("teams") as teams, open_channel("slack") as silent:
        silent.faults = ["silent"] * 1_000
        hooks = {"slack": (slack.hook, "slack"), "teams": (teams.hook, "teams")}
        hooks |= {"silent": (silent.hook, "slack"), "away": ("http://127.0.0.1:9/hook", "teams")}

        def prepare(world: World) -> None:
            may_start(world)
            world.policy.write_text(
                world.policy.read_text() + '\n@id("submit") permit(principal, action == Action::"submit", resource);\n'
            )
            tables = "".join(
                f'\n[webhooks.{name}]\nurl = "{url}"\nformat = "{form}"\n' for name, (url, form) in hooks.items()
            )
            world.config.write_text(
                f'public_url = "http://127.0.0.1:{port}"\n{world.config.read_text()}{tables}'
                f"\n[runs]\nlease_ms = {LEASE_MS}\n"
            )

        with open_desk(prepare, TGA_PORT=str(port)) as desk:
            desk.keys["worker"] = aside(desk.world.new_key, "worker-1", "worker")
            yield House(desk, slack, teams, silent)
            assert slack.refusals == teams.refusals == [], "the services took everything"


def _worker(desk: Desk, procedure: str, run_id: str, **policy: Any) -> HandWorker:
    """A worker that holds this run."""
    worker = HandWorker(desk.world, desk.keys["worker"], procedure=procedure)
    program = {"name": procedure, "version": "1", "program_digest": "a" * 64}
    worker.ask("/v1/procedures", program | ({"policy": policy} if policy else {}))
    status, told = desk.ask("agent", "/v1/runs", {"procedure": procedure, "input": {}, "run_id": run_id})
    assert status == 200, told
    worker.lease()
    return worker


def test_a_request_is_told_to_both_and_approved_through_the_link_once_though_answers_were_lost(house: House) -> None:
    desk = house.desk
    house.slack.faults = ["lost", "500"]
    house.teams.faults = ["500", "lost"]
    # The silent receiver holds its delivery until the end of this file, and nothing here waits for it.
    arguments = {"amount": 5, "card": SECRET, "note": HOSTILE + "\u202e" + "A" * 60_000}
    trace_id = desk.call("refund", arguments, "told", intent=f"{HOSTILE} {SECRET}")
    path = f"/console/approvals/{trace_id}"
    wait_for(lambda: all(len([one for one in c.posts if one.startswith(trace_id)]) == 3 for c in house.both))
    for channel in house.both:
        message = channel.about(path)
        assert message.title == "A call waits for a person's decision"
        assert message.link == f"{desk.world.url}{path}"
        assert (message.facts["Server"], message.facts["Tool"], message.facts["Asked by"]) == (
            *("bank", "refund", "agent-1"),
        )
        assert len(message.body) < 4_000
        for hidden in (SECRET, "evil", "AAAA", "\u202e", "<!channel>"):
            assert hidden not in message.body.decode(), hidden
    context = desk.context()
    page = desk.watched(context.new_page())
    house.follow(page, house.slack, path)
    page.wait_for_url("**/console/sign-in?next=**")
    page.fill("#key", desk.keys["supervisor"])
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url(f"**{path}")
    expect(page.locator("#ask-h")).to_contain_text("agent-1 asks to call bank/refund")
    page.locator("[data-approve]").click()
    expect(page.locator("#live-decision")).to_contain_text("You approved it")
    expect(page.locator("#live-decision .st-COMPLETED")).to_be_visible()
    # Whoever is signed in comes by a link of another site to the same page, without signing in again.
    house.follow(page, house.teams, path)
    page.wait_for_url(f"**{path}")
    expect(page.locator("#live-decision")).to_contain_text("approved it")
    context.close()
    with desk.as_("admin", script=False) as other:  # who comes late reads who was first, and can decide nothing
        house.follow(other, house.teams, path)
        other.wait_for_url(f"**{path}")
        expect(other.locator("#live-decision")).to_contain_text("ada approved it")
        assert other.locator("[data-approve], [data-deny]").count() == 0
    entries = desk.ask("admin", f"/v1/traces/{trace_id}/entries")[1]["items"]
    assert [one["entry"]["artifact_type"] for one in entries].count("supervisor_decision") == 1
    assert desk.world.executions("told") == 1
    assert any(one.startswith(trace_id) for one in house.silent.posts), "it was asked, and never answered"
    desk.verify_quiet()


def test_the_question_of_a_run_is_told_without_its_words_and_answered_through_the_link(house: House) -> None:
    desk = house.desk
    status, told = desk.ask("agent", "/v1/procedures", {"name": "refunds", "language": "lua", "source": PROGRAM})
    assert status in (200, 201), told
    status, told = desk.ask("agent", "/v1/runs", {"procedure": "refunds", "input": {}, "run_id": "refund-7"})
    assert status == 200, told
    for channel in house.both:
        message = channel.about("/console/runs/refund-7")
        assert message.title == "A run asks a person"
        assert (message.facts["Run"], message.facts["Procedure"]) == ("refund-7", "refunds")
        assert SECRET not in message.body.decode()
    context = desk.context()
    page = desk.watched(context.new_page())
    house.follow(page, house.teams, "/console/runs/refund-7")
    page.wait_for_url("**/console/sign-in?next=**")
    page.fill("#key", desk.keys["supervisor"])
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.wait_for_url("**/console/runs/refund-7")
    expect(page.locator(".ask-q")).to_contain_text("Refund 4111")
    page.get_by_role("button", name="Yes").click()
    wait_for(lambda: desk.ask("admin", "/v1/runs/refund-7")[1]["status"] == "completed")
    assert desk.ask("admin", "/v1/runs/refund-7")[1]["output"]["value"] == {"said": True}
    # The page follows by itself: nothing of a run that is over is still offered.
    expect(page.locator("#subject")).to_contain_text("COMPLETED")
    expect(page.locator("#cancel")).to_have_count(0)
    context.close()
    desk.verify_quiet()


def test_names_that_a_program_chose_are_text_and_are_cut(house: House) -> None:
    desk = house.desk
    worker = _worker(desk, "asks", "asks-1")
    names = ["<!channel>@here<https://evil.example|Approve>", "b" * 128, "c" * 128, "d", "e", "f"]
    asks = [ask(f"1:{n}.1", f"{SECRET}?", {"type": "boolean"}, name=name) for n, name in enumerate(names, 1)]
    worker.put(*asks, then=suspend(*(one["path"] for one in asks)))
    for channel in house.both:
        message = channel.about("/console/runs/asks-1")
        seen = message.facts["Questions"].replace("\u200b", "")
        assert seen.startswith(f"{names[0]}, b"), "as text, all of it escaped"
        assert "@here" not in message.facts["Questions"], "and nobody is called"
        assert seen.endswith("b…, " + "c" * 48 + "…, d and 2 more"), seen
        assert message.link == f"{desk.world.url}/console/runs/asks-1"
        assert SECRET not in message.body.decode()


def test_a_held_call_leads_to_the_page_where_it_is_resolved(house: House) -> None:
    desk = house.desk
    trace_id = desk.call("slow_charge", {"amount": 7, "ms": 60_000}, "told-held", wait_ms=0)
    path = f"/console/calls/{trace_id}"
    for channel in house.both:
        assert channel.about(path).title.startswith("A call is held")
    with desk.as_("operator") as page:
        house.follow(page, house.slack, path)
        page.wait_for_url(f"**{path}")
        page.locator("[name=action][value=failed]").check()
        page.get_by_label("How you know").fill("the bank has no such charge")
        page.locator("#resolve-btn").click()
        expect(page.locator(".subject")).to_contain_text("FAILED")
    assert desk.state(trace_id) == "FAILED"
    desk.verify_quiet()


def test_parked_and_diverged_runs_lead_to_the_page_where_they_go_on(house: House) -> None:
    desk = house.desk
    _worker(desk, "parks", "parks-1", park_after=1)  # and is never heard of again
    diverging = _worker(desk, "diverges", "diverges-1")
    divergence = {"path": "1", "recorded": "step plan", "performed": f"step {HOSTILE}", "source": "onboard.py:3"}
    diverging.put(step("1"), then={"type": "diverge", "divergence": divergence})
    for run_id, state, words in (
        ("parks-1", "PARKED", "A run is parked"),
        ("diverges-1", "DIVERGED", "A run has diverged"),
    ):
        for channel in house.both:
            message = channel.about(f"/console/runs/{run_id}")
            assert message.title.startswith(words)
            assert "evil" not in message.body.decode()
        with desk.as_("operator") as page:
            house.follow(page, house.slack, f"/console/runs/{run_id}")
            page.wait_for_url(f"**/console/runs/{run_id}")
            expect(page.locator("#subject")).to_contain_text(state)
            expect(page.get_by_role("button", name="Go on")).to_be_visible()
    with desk.as_("operator", script=False) as page:
        words = f"the journal has step plan, the program did step {HOSTILE}"
        desk.go(page, "/runs/diverges-1")
        expect(page.locator("#main")).to_contain_text(words)
        desk.go(page, "/runs")
        expect(page.locator("#needing")).to_contain_text(
            "at 1 the journal has step plan, the program now does step <!ch"
        )
        expect(page.locator("#needing")).to_contain_text("attempts in a row ended without a checkpoint")
    desk.verify_quiet()
