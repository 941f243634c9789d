"""One byte changed in the database: red at its entry, as `tga verify` says; the sidebar is red everywhere, and nothing
else is hidden."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator

import asyncpg
import pytest
from playwright.sync_api import expect

from tests.attacker import disarm, rearm
from tests.cli.world import wait_for
from tests.console.browsing import NARROW, WIDE, Desk, aside, open_desk, overflow, serious_findings
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

expect.set_options(timeout=HANG_S * 1000)
PAGES = ("/", "/acts", "/approvals", "/calls", "/runs", "/ledger", "/servers", "/policy")
ENTRY = 3


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as opened:
        yield opened


def _change_one_byte(desk: Desk, trace_id: str) -> None:
    async def change() -> None:
        admin = await asyncpg.connect(desk.world.admin_url)
        try:
            async with admin.transaction():
                await disarm(admin)
                done = await admin.execute(
                    "UPDATE tga.links SET recorded_at = replace(recorded_at, '20', '21') WHERE sequence_number = $2"
                    " AND stream_no = (SELECT stream_no FROM tga.heads WHERE stream = $1)",
                    f"trace:{trace_id}",
                    ENTRY,
                )
                assert done == "UPDATE 1"
                await rearm(admin)
        finally:
            await admin.close()

    asyncio.run(change())


def _covered(desk: Desk, trace_id: str) -> bool:
    told = desk.ask("auditor", f"/v1/traces/{trace_id}/verification")[1]
    return told["tree_size"] is not None


def test_a_changed_byte_is_red_at_its_entry_and_on_every_page_and_hides_nothing_else(desk: Desk) -> None:
    before = desk.call("charge", {"amount": 5}, "before")
    wait_for(lambda: _covered(desk, before))
    changed = desk.call("charge", {"amount": 6}, "changed")
    after = desk.call("charge", {"amount": 7}, "after")
    waits = desk.call("refund", {"amount": 8}, "waits")
    for one in (changed, after, waits):
        wait_for(lambda one=one: _covered(desk, one))  # type: ignore[misc]
    with desk.as_("supervisor") as page:
        assert page.locator(".pulse.is-bad").count() == 0
    aside(_change_one_byte, desk, changed)
    with desk.as_("auditor") as page:
        desk.go(page, "/ledger")
        page.get_by_role("button", name="Verify everything now").click()
        # No reload: the page asks for itself as long as something is under way.
        expect(page.locator("#verification")).to_contain_text("The record was changed")
        expect(page.locator("#live-pulse.is-bad")).to_contain_text("Tampering found")
        desk.go(page, "/ledger")
        broken = page.locator("#tampered .is-broken")
        expect(broken).to_have_count(1)
        expect(broken).to_have_attribute("data-entry", str(ENTRY))
        expect(broken).to_contain_text("STATE_CHECKSUM_MISMATCH")
        expect(page.locator("#tampered")).to_contain_text(f"trace:{changed}")
        diagnosis = json.loads(aside(desk.world.tga, "verify", "--all", "--json").stdout)["tree"]
        expect(page.locator("#trust")).to_contain_text(f"Trust it up to {diagnosis['trusted_size']:,}")
        assert diagnosis["broken_size"] is not None
        expect(page.locator("#trust")).to_contain_text(f"Not from {diagnosis['broken_size']:,} on")
        with page.expect_download() as download:
            page.get_by_role("link", name="Findings, JSON").click()
        assert changed in download.value.path().read_text()
    for who in ("supervisor", "agent", "operator"):
        with desk.as_(who, script=False) as page:
            for path in PAGES:
                desk.go(page, path)
                assert page.locator(".pulse.is-bad").inner_text().startswith("Tampering found"), (who, path)
                words = page.locator(".pulse.is-bad").inner_text()
                assert re.search(r": [1-9][\d,]* findings?\. Trust it up to [\d,]+\.", words), words
    with desk.as_("supervisor") as page:  # what was not changed is shown and decided as before
        for one in (before, after):
            desk.go(page, f"/calls/{one}")
            expect(page.locator(".subject")).to_contain_text("COMPLETED")
            # Its own entries are as they were; the tree that vouched for them is not. Nothing is called verified.
            expect(page.locator("#ver-h")).to_have_text("Not sound")
            expect(page.locator("#verified .seal")).to_have_class(re.compile(r"\bis-bad\b"))
            expect(page.locator("#verified .checks > .fail")).to_contain_text("Tree")
            expect(page.locator("#verified")).to_contain_text("PROOF_INVALID")
        desk.go(page, f"/approvals/{waits}")
        page.locator("[data-deny]").click()
        expect(page.locator("#live-decision")).to_contain_text("You denied it")
        desk.go(page, f"/calls/{changed}")  # and of what was changed, everything but what cannot be believed
        expect(page.locator("main")).to_contain_text("STATE_CHECKSUM_MISMATCH")
        assert page.locator("#verified").count() == page.locator("#verified:has(.fail):has(.is-bad)").count()
        assert page.locator("#ver-h", has_text=re.compile("^Verified")).count() == 0
    for theme in ("light", "dark"):
        for size in (WIDE, NARROW):
            with desk.as_("auditor", size, theme=theme) as page:
                desk.go(page, "/ledger")
                assert serious_findings(page) == [], (theme, size)
                assert overflow(page) == 0
    desk.troubles.clear()  # the browser tells of pages that are errors
