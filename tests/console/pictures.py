"""Pictures of the console, from a real gateway in a real browser: `make pictures` writes those of README.

    python -m tests.console.pictures [FOLDER] [--all]

A gateway is started on a database of its own, agents call tools, a program asks a question, and Chromium takes the
pictures in both colour schemes. `--all`: every page, wide and narrow, for whoever looks at them side by side.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from playwright.sync_api import Page

from tests.cli.hand_worker import may_start
from tests.cli.world import World, wait_for
from tests.console.browsing import NARROW, WIDE, Desk, aside, open_desk
from tests.console.picture_scenes import (
    CHANGED,
    EMPTY,
    OF_CALLS,
    OF_RUNS,
    SIGNED_OUT,
    TAMPERED,
    Scenes,
    change_byte,
    change_tool,
    play_calls,
    play_runs,
)
from tests.console.test_runs import PROGRAM, start, until, worker

SHOWN: Final = Path(__file__).parents[2] / "docs" / "pictures"
THEMES: Final = ("light", "dark")
SIZE: Final = (1280, 800)
# By the name of the picture: who looks, and where. README shows these.
SCENES: Final[Scenes] = {
    "overview": ("supervisor", "/"),
    "approval": ("supervisor", "/approvals/{waits}"),
    "run": ("supervisor", "/runs/dunning-11"),
}
EVERY_PAGE: Final[Scenes] = {
    **SCENES,
    "approvals": ("supervisor", "/approvals"),
    "calls": ("auditor", "/calls"),
    "call": ("auditor", "/calls/{done}"),
    "call-pending": ("agent", "/calls/{waits}"),
    "held": ("operator", "/calls/{held}"),
    "runs": ("operator", "/runs"),
    "run-failed": ("operator", "/runs/failing-1"),
    "ledger": ("auditor", "/ledger"),
    "acts": ("auditor", "/acts"),
    "servers": ("operator", "/servers"),
    "policy": ("auditor", "/policy?tool=bank/charge&arguments=%7B%22amount%22%3A+13%7D"),
    "find": ("auditor", "/find?q=nothing-like-it"),
    "problem": ("auditor", "/nothing"),
}


def _may_start_and_submit(world: World) -> None:
    may_start(world)
    with world.policy.open("a") as policy:
        policy.write('@id("submit") permit(principal, action == Action::"submit", resource);\n')


@contextmanager
def scenery() -> Iterator[tuple[Desk, dict[str, str]]]:
    """A gateway with something on its record, and the ids that pages are asked for by."""
    with open_desk(_may_start_and_submit) as desk:
        desk.keys["worker"] = aside(desk.world.new_key, "worker-1", "worker")
        with worker(desk, PROGRAM.replace(" <script>alert(1)</script>", "")):
            yield desk, _played(desk)


def _played(desk: Desk) -> dict[str, str]:
    held = desk.call("slow_charge", {"amount": 7, "ms": 60_000}, "order-1038", wait_ms=0)
    for number in range(12):
        done = desk.call("charge", {"amount": 4_200 + 50 * number}, f"order-{1040 + number}")
    desk.call("charge", {"amount": 13}, "order-1052")
    desk.call("fail", {}, None)
    for number, decision in ((1, "APPROVE"), (2, "DENY")):
        asked = desk.call(
            "refund", {"amount": 900 * number}, f"refund-{number}", intent="parcel lost, carrier confirms"
        )
        digest = desk.ask("admin", f"/v1/traces/{asked}")[1]["action_request_digest"]
        desk.ask("supervisor", f"/v1/traces/{asked}/decision", {"decision": decision, "action_request_digest": digest})
    waits = desk.call(
        "refund",
        {"amount": 18_900},
        "refund-SO-1047",
        intent="Order SO-1047 arrived broken; the customer sent photographs.",
    )
    for name in ("dunning-11", "failing-1"):
        start(desk, name.partition("-")[0], name)
    until(desk, "dunning-11", "waiting_for_human")
    until(desk, "failing-1", "failed")
    _, begun = desk.ask("auditor", "/v1/log/verifications", {})
    path = f"/v1/log/verifications/{begun['verification_id']}"
    wait_for(lambda: desk.ask("auditor", path)[1]["state"] == "sound")
    wait_for(lambda: desk.ask("admin", f"/v1/traces/{held}")[1]["waiting"] == "operator")
    return {"waits": waits, "done": done, "held": held}


def draw(
    desk: Desk,
    ids: dict[str, str],
    folder: Path,
    scenes: Scenes,
    *,
    size: tuple[int, int],
    tag: str,
) -> list[Path]:
    """A picture of each scene in each colour scheme; what a browser complained of is an error."""
    folder.mkdir(parents=True, exist_ok=True)
    made = []
    for theme in THEMES:
        for name, (who, path) in scenes.items():
            with _page_of(desk, who, size, theme) as page:
                desk.go(page, path.format(**ids))
                _settle(page)
                made.append(folder / f"{name}{tag}-{theme}.png")
                page.screenshot(path=made[-1], animations="disabled", full_page=bool(tag))
    return made


def draw_all(folder: Path) -> list[Path]:
    """Every page, empty and full, wide and narrow, in both colour schemes."""
    made: list[Path] = []

    def draw_both(desk: Desk, ids: dict[str, str], scenes: Scenes) -> None:
        for size, tag in ((WIDE, "-wide"), (NARROW, "-narrow")):
            made.extend(draw(desk, ids, folder, scenes, size=size, tag=tag))

    with open_desk(may_start) as desk:
        draw_both(desk, {}, SIGNED_OUT | EMPTY)
    with scenery() as (desk, ids):
        draw_both(desk, ids, EVERY_PAGE)
        ids |= play_calls(desk)
        draw_both(desk, ids, OF_CALLS)
        play_runs(desk)
        draw_both(desk, ids, OF_RUNS)
        change_tool(desk)
        draw_both(desk, ids, CHANGED)
        change_byte(desk, ids["done"])
        draw_both(desk, ids, TAMPERED)
    return made


@contextmanager
def _page_of(desk: Desk, who: str | None, size: tuple[int, int], theme: str) -> Iterator[Page]:
    if who is not None:
        with desk.as_(who, size, theme=theme) as page:
            yield page
        return
    context = desk.context(size, theme=theme)
    try:
        yield desk.watched(context.new_page())
    finally:
        context.close()


def _settle(page: Page) -> None:
    page.wait_for_load_state("load")
    pill: Any = page.locator("[data-live-pill]")
    if pill.count():
        pill.first.get_by_text("Live").wait_for()


def main(arguments: list[str]) -> None:
    is_all = "--all" in arguments
    folders = [one for one in arguments if not one.startswith("--")]
    if is_all:
        made = draw_all(Path(folders[0]))
    else:
        with scenery() as (desk, ids):
            made = draw(desk, ids, Path(folders[0]) if folders else SHOWN, SCENES, size=SIZE, tag="")
    for path in made:
        sys.stdout.write(f"{path} {path.stat().st_size // 1024} KiB\n")


if __name__ == "__main__":
    main(sys.argv[1:])
