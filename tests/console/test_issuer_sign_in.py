"""Signing in at an identity provider, in a real browser: away, back, and in; and out again, at both.

The provider is a process of its own and is reached as localhost, the gateway as 127.0.0.1: to a browser two sites.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
import subprocess
import sys
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.cli.world import World
from tests.console.browsing import Desk, open_desk, overflow, serious_findings
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

SECRET = "the-client's-secret"  # noqa: S105


def _free_port() -> int:
    """Below those that the system gives to whoever asks for any: nobody gets it before the gateway does."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as one, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            return port


class ProviderProcess:
    def __init__(self, public_url: str) -> None:
        back = f"{public_url}/console/sign-in/callback"
        command = [sys.executable, "-m", "tests.access.provider", "--client", "console", "--secret", SECRET]
        command += ["--redirect", back, "--host", "localhost", "--asks"]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.url = str(json.loads(self._process.stdout.readline())["url"])

    def behave(self, **fields: Any) -> None:
        request = urllib.request.Request(f"{self.url}/control", data=json.dumps(fields).encode())  # noqa: S310
        with urllib.request.urlopen(request, timeout=HANG_S):  # noqa: S310
            pass

    def asked(self) -> list[Any]:
        with urllib.request.urlopen(f"{self.url}/asked", timeout=HANG_S) as answer:  # noqa: S310
            return list(json.load(answer))

    def close(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=HANG_S)
        if self._process.stdout is not None:
            self._process.stdout.close()


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[Desk, ProviderProcess]]:
    port = _free_port()
    public = f"http://127.0.0.1:{port}"
    provider = ProviderProcess(public)

    def prepare(world: World) -> None:
        table = f'[auth.oidc]\nissuer = "{provider.url}"\nclient_id = "console"\nname = "Example ID"\n'
        table += 'client_secret = { env = "OIDC_SECRET" }\n'
        world.config.write_text(f'public_url = "{public}"\n{world.config.read_text()}\n{table}')

    try:
        with open_desk(prepare, TGA_PORT=str(port), OIDC_SECRET=SECRET) as desk:
            yield desk, provider
    finally:
        provider.close()


@pytest.fixture
def desk(house: tuple[Desk, ProviderProcess]) -> Desk:
    house[1].behave()
    return house[0]


@pytest.fixture
def provider(house: tuple[Desk, ProviderProcess]) -> ProviderProcess:
    return house[1]


def _go_in(desk: Desk, page: Page, at: str = "/") -> None:
    desk.go(page, at)
    page.get_by_role("link", name="Sign in with Example ID").click()
    page.locator("#agree").click()


@pytest.mark.parametrize("script", [True, False])
def test_the_way_in_by_the_provider_ends_on_the_page_that_was_wanted(desk: Desk, script: bool) -> None:
    context = desk.context(script=script)
    page = desk.watched(context.new_page())
    _go_in(desk, page, "/calls?state=COMPLETED")
    page.wait_for_url("**/console/calls?state=COMPLETED")
    assert page.get_by_text("ada", exact=True).first.is_visible()
    (cookie,) = context.cookies()
    assert (cookie["name"], cookie["httpOnly"], cookie["sameSite"], cookie["path"]) == (
        "console_session",
        True,
        "Strict",
        "/console",
    ), "the cookie of the way itself is still there, or the session's is another"
    desk.go(page, "/policy")
    assert "/sign-in" not in page.url
    context.close()
    desk.verify_quiet()


@pytest.mark.parametrize("script", [True, False])
def test_a_link_from_elsewhere_arrives_with_the_session_and_without_one_at_the_door(
    desk: Desk, provider: ProviderProcess, script: bool
) -> None:
    link = f"{provider.url}/link?{urllib.parse.urlencode({'to': f'{desk.world.url}/console/calls?state=FAILED'})}"
    context = desk.context(script=script)
    page = desk.watched(context.new_page())
    page.goto(link)
    page.get_by_role("link", name="Open").click()
    page.wait_for_url(lambda url: "/console/sign-in?next=" in url)
    _go_in(desk, page)
    page.wait_for_url("**/console/")
    page.goto(link)
    page.get_by_role("link", name="Open").click()
    page.wait_for_url("**/console/calls?state=FAILED")
    page.get_by_role("heading", name="Tool calls").wait_for()
    context.close()
    desk.verify_quiet()


def test_roles_are_those_of_the_claims(desk: Desk, provider: ProviderProcess) -> None:
    provider.behave(claims={"sub": "eve", "roles": ["auditor"]})
    context = desk.context()
    page = context.new_page()
    _go_in(desk, page)
    page.wait_for_url("**/console/")
    assert page.evaluate("fetch('/console/api/v1/me').then(r => r.json())")["roles"] == ["auditor"]
    context.close()


def test_signing_out_ends_both_sessions_and_the_cookie_opens_nothing_more(
    desk: Desk, provider: ProviderProcess
) -> None:
    context = desk.context(script=False)
    page = desk.watched(context.new_page())
    _go_in(desk, page)
    page.wait_for_url("**/console/")
    held = context.cookies()
    page.get_by_role("button", name="Sign out").click()
    page.wait_for_url("**/console/sign-in")
    what, asked = provider.asked()[-1]
    assert (what, asked["logout_hint"], asked["client_id"]) == ("end", "ada", "console")
    context.add_cookies(held)  # type: ignore[arg-type]
    desk.go(page, "/calls")
    assert "/sign-in" in page.url
    context.close()
    desk.verify_quiet()


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        ({"trouble": "denies"}, "SIGN_IN_REFUSED", "access_denied"),
        ({"claims": {"nonce": "another"}}, "SIGN_IN_REFUSED", "nonce"),
        ({"claims": {"exp": 1_000_000_000}}, "SIGN_IN_REFUSED", "expired"),
        ({"claims": {"roles": []}}, "SIGN_IN_REFUSED", "no role"),
        ({"trouble": "broken"}, "ISSUER_UNAVAILABLE", "cannot be read"),
    ],
)
def test_a_sign_in_that_fails_says_why_and_leaves_nobody_in(
    desk: Desk, provider: ProviderProcess, behaviour: dict[str, Any], code: str, words: str
) -> None:
    provider.behave(**behaviour)
    context = desk.context()
    page = context.new_page()
    _go_in(desk, page, "/calls")
    told = page.get_by_role("alert")
    told.wait_for()
    assert code in told.inner_text()
    assert words in told.inner_text()
    assert context.cookies() == []
    assert serious_findings(page) == []
    assert overflow(page) == 0
    provider.behave()
    page.get_by_role("link", name="Sign in with Example ID").click()  # and the page that was wanted is not forgotten
    page.locator("#agree").click()
    page.wait_for_url("**/console/calls")
    context.close()


def test_an_answer_is_taken_once_and_only_in_the_browser_that_asked(desk: Desk) -> None:
    context, stranger = desk.context(), desk.context()
    page, elsewhere = context.new_page(), stranger.new_page()
    desk.go(page, "/")
    page.get_by_role("link", name="Sign in with Example ID").click()
    held = context.cookies(f"{desk.world.url}/console/sign-in")
    assert [(one["sameSite"], one["httpOnly"]) for one in held] == [("Lax", True)]
    back = str(page.locator("#agree").get_attribute("href"))
    elsewhere.goto(back)
    assert "SIGN_IN_EXPIRED" in elsewhere.get_by_role("alert").inner_text()
    page.goto(back)
    page.wait_for_url("**/console/")
    context.clear_cookies()
    context.add_cookies(held)  # type: ignore[arg-type]
    page.goto(back)
    assert "SIGN_IN_EXPIRED" in page.get_by_role("alert").inner_text()
    assert "taken before" in page.get_by_role("alert").inner_text()
    context.close()
    stranger.close()


def test_two_pages_of_one_browser_sign_in_beside_each_other(desk: Desk) -> None:
    context = desk.context()
    first, second = context.new_page(), context.new_page()
    for page, at in ((first, "/calls"), (second, "/runs")):
        desk.go(page, at)
        page.get_by_role("link", name="Sign in with Example ID").click()
    for page, at in ((first, "/calls"), (second, "/runs")):
        page.locator("#agree").click()
        page.wait_for_url(f"**/console{at}")
    context.close()


def _answer(url: str, **headers: str) -> tuple[int, str]:
    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    request = urllib.request.Request(url, headers=headers)  # noqa: S310
    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.build_opener(Stay).open(request, timeout=HANG_S)
    told.value.close()
    return told.value.code, str(told.value.headers["location"])


@pytest.mark.parametrize("elsewhere", ["https://evil.example/", "//evil.example", "/console/\\evil", "/v1/traces"])
def test_nobody_is_sent_elsewhere(desk: Desk, provider: ProviderProcess, elsewhere: str) -> None:
    begin = f"{desk.world.url}/console/sign-in/issuer"
    status, at = _answer(f"{begin}?next={urllib.parse.quote(elsewhere)}", Host="evil.example")
    assert (status, at) == (303, f"{begin}?here=1&next=/console/"), "a host of the request's own choosing counts"
    context = desk.context()
    page = context.new_page()
    page.goto(f"{begin}?next={urllib.parse.quote(elsewhere)}")
    assert page.url.startswith(f"{provider.url}/authorize")
    page.locator("#agree").click()
    page.wait_for_url(f"{desk.world.url}/console/")
    context.close()


def test_nothing_of_it_is_in_the_log(desk: Desk, provider: ProviderProcess) -> None:
    told = desk.world.told.read_text()
    assert SECRET not in told
    for what, fields in provider.asked():
        if what == "token":
            assert fields["code"] not in told
            assert fields["code_verifier"] not in told
    assert "eyJ" not in told
