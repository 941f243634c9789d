"""A real headless Chromium, and the console of a real gateway in it.

One browser and one gateway a file. Playwright's loop runs in the test's thread, so commands of `World` go through
`aside`. Every page that a test opens is watched: an error in a script, a refused resource or a violated
policy fails it.
"""

from __future__ import annotations

import json
import os
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import resources
from typing import Any, TypeVar

import pytest
from playwright.sync_api import Browser, BrowserContext, ConsoleMessage, Error, Page, sync_playwright

from tests.cli.world import World
from tests.conftest import make_home
from tests.patience import HANG_S

T = TypeVar("T")
WIDE, NARROW, SMALLEST = (1440, 900), (390, 844), (320, 640)
_SWITCHES = ["--disable-gpu", "--disable-dev-shm-usage", *(["--no-sandbox"] if os.geteuid() == 0 else [])]


def chromium() -> str:
    """Where Chromium is. Without one the tests of the console are skipped, and say so."""
    found = os.environ.get("TGA_TEST_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        pytest.skip("NO CHROMIUM: the console is not tested. Install it (apt-get install chromium) and run this again")
    return found


@contextmanager
def open_browser() -> Iterator[Browser]:
    path = chromium()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=_SWITCHES, timeout=HANG_S * 1000)
        try:
            yield browser
        finally:
            browser.close()


def aside(work: Callable[..., T], *arguments: Any, **options: Any) -> T:
    """In a thread of its own: Playwright's loop is running in this one."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work, *arguments, **options).result()


@dataclass
class Desk:
    """A gateway and a browser. `troubles`: what browsers complained of, on any page of this desk."""

    world: World
    browser: Browser
    keys: dict[str, str] = field(repr=False)
    troubles: list[str] = field(default_factory=list)

    def context(self, size: tuple[int, int] = WIDE, *, theme: Any = "light", script: bool = True) -> BrowserContext:
        width, height = size
        made = self.browser.new_context(
            viewport={"width": width, "height": height}, color_scheme=theme, java_script_enabled=script
        )
        made.set_default_timeout(HANG_S * 1000)
        return made

    @contextmanager
    def as_(
        self, who: str, size: tuple[int, int] = WIDE, *, theme: Any = "light", script: bool = True
    ) -> Iterator[Page]:
        """A page of somebody who is signed in: the name of a key."""
        context = self.context(size, theme=theme, script=script)
        try:
            page = self.watched(context.new_page())
            self.sign_in(page, self.keys[who])
            yield page
        finally:
            context.close()

    def watched(self, page: Page) -> Page:
        def on_console(said: ConsoleMessage) -> None:
            if said.type == "error":
                self.troubles.append(f"{page.url}: {said.text}")

        def on_error(error: Error) -> None:
            self.troubles.append(f"{page.url}: {error}")

        page.on("pageerror", on_error)
        page.on("console", on_console)
        return page

    def sign_in(self, page: Page, key: str, at: str = "/console/") -> None:
        page.goto(self.world.url + at)
        page.fill("#key", key)
        page.get_by_role("button", name="Sign in", exact=True).click()
        page.wait_for_url(lambda url: "/sign-in" not in url)

    def go(self, page: Page, path: str) -> None:
        page.goto(f"{self.world.url}/console{path}")

    def ask(self, who: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        """Of the API, with a key."""
        raw = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.keys[who]}"}
        request = urllib.request.Request(self.world.url + path, data=raw, headers=headers)  # noqa: S310
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    def call(self, tool: str, arguments: dict[str, Any], key: str | None, who: str = "agent", **more: Any) -> str:
        """A tool call; the id of its trace, whatever became of it."""
        body = {"server_id": "bank", "tool_name": tool, "arguments": arguments, **more}
        _, answer = self.ask(who, "/v1/tool-calls", body if key is None else {**body, "idempotency_key": key})
        assert "trace_id" in answer, answer
        return str(answer["trace_id"])

    def state(self, trace_id: str) -> str:
        return str(self.ask("admin", f"/v1/traces/{trace_id}")[1]["state"])

    def verify_quiet(self) -> None:
        assert self.troubles == []


@contextmanager
def open_desk(prepare: Callable[[World], None] | None = None, **environment: str) -> Iterator[Desk]:
    chromium()  # before anything is started in vain
    home = make_home()
    world = World(home)
    try:
        if prepare is not None:
            prepare(world)
        world.start(**environment)
        keys = {"admin": str(world.admin_key())}
        for role in ("agent", "supervisor", "operator", "auditor"):
            keys[role] = world.new_key({"supervisor": "ada", "operator": "grace"}.get(role, f"{role}-1"), role)
        with open_browser() as browser:
            yield Desk(world, browser, keys)
    finally:
        world.close()
        shutil.rmtree(home)


AXE = resources.files("axe_playwright_python").joinpath("axe.min.js")
_TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]


def serious_findings(page: Page) -> list[str]:
    """What axe finds serious or critical on a page as it is now, in an isolated world that its policy does not bind."""
    session = page.context.new_cdp_session(page)
    frame = session.send("Page.getFrameTree")["frameTree"]["frame"]["id"]
    world = session.send("Page.createIsolatedWorld", {"frameId": frame, "worldName": "axe"})["executionContextId"]
    run = f"axe.run(document, {{resultTypes: ['violations'], runOnly: {json.dumps(_TAGS)}}})"
    session.send("Runtime.evaluate", {"expression": AXE.read_text("utf-8"), "contextId": world})
    told = session.send(
        "Runtime.evaluate",
        {"expression": f"{run}.then(JSON.stringify)", "contextId": world, "awaitPromise": True, "returnByValue": True},
    )
    found = json.loads(told["result"]["value"])["violations"]
    session.detach()
    return [
        f"{one['impact']} {one['id']}: {one['nodes'][0]['html'][:160]} {one['nodes'][0]['failureSummary'][:200]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


def overflow(page: Page) -> int:
    """By how many pixels the page is wider than the screen."""
    return int(page.evaluate("Math.max(0, document.documentElement.scrollWidth - innerWidth)"))
