"""Sign-in: a key becomes a session that no script reads; forms from elsewhere are refused; a key ends its sessions."""

from __future__ import annotations

import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator

import pytest

from tests.console.browsing import NARROW, SMALLEST, WIDE, Desk, aside, open_desk, overflow, serious_findings


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    with open_desk() as opened:
        yield opened


def _posted(desk: Desk, path: str, fields: dict[str, str], **headers: str) -> tuple[int, str]:
    """A form from anywhere, with any headers; redirects are not followed."""

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    request = urllib.request.Request(  # noqa: S310
        f"{desk.world.url}/console{path}", data=urllib.parse.urlencode(fields).encode(), headers=headers
    )
    try:
        with urllib.request.build_opener(Stay).open(request, timeout=60) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_a_key_becomes_a_session_that_no_script_reads_and_the_key_is_nowhere(desk: Desk) -> None:
    with desk.as_("supervisor") as page:
        (cookie,) = [one for one in page.context.cookies() if one["name"] == "console_session"]
        assert cookie["httpOnly"]
        assert cookie["sameSite"] == "Strict"
        assert cookie["path"] == "/console"
        assert page.evaluate("document.cookie") == ""
        key = desk.keys["supervisor"]
        secret = key.split("_", 2)[2]
        kept = page.evaluate("JSON.stringify([{...localStorage}, {...sessionStorage}, location.href])")
        assert secret not in kept + page.content() + cookie["value"]
        assert page.get_by_text("ada", exact=True).is_visible()
    assert secret not in desk.world.told.read_text()
    desk.verify_quiet()


def test_a_refused_key_is_not_told_why_and_not_shown_again(desk: Desk) -> None:
    context = desk.context()
    page = context.new_page()
    wrong = "tga_0123456789abcdef_" + "x" * 43
    page.goto(f"{desk.world.url}/console")
    page.fill("#key", wrong)
    page.get_by_role("button", name="Sign in", exact=True).click()
    page.get_by_role("alert").wait_for()
    assert "That key was not accepted" in page.inner_text("[role=alert]")
    assert wrong not in page.content()
    assert page.input_value("#key") == ""
    context.close()


def test_whoever_is_not_signed_in_is_led_to_the_door_and_back(desk: Desk) -> None:
    context = desk.context(script=False)
    page = desk.watched(context.new_page())
    desk.sign_in(page, desk.keys["auditor"], "/console/?from=mail")
    assert page.url == f"{desk.world.url}/console/?from=mail"
    context.close()
    desk.verify_quiet()


@pytest.mark.parametrize("elsewhere", ["https://evil.example/", "//evil.example/", "/console/\\evil", "/v1/traces", ""])
def test_nobody_is_sent_elsewhere_after_signing_in(desk: Desk, elsewhere: str) -> None:
    fields = {"key": desk.keys["auditor"], "next": elsewhere}
    request = urllib.request.Request(  # noqa: S310
        f"{desk.world.url}/console/sign-in", data=urllib.parse.urlencode(fields).encode()
    )

    class Stay(urllib.request.HTTPRedirectHandler):
        def redirect_request(self, *_: object) -> None:
            return None

    with pytest.raises(urllib.error.HTTPError) as told:
        urllib.request.build_opener(Stay).open(request, timeout=60)
    assert told.value.headers["location"] == "/console/"
    told.value.close()


def test_a_form_from_elsewhere_or_without_the_sessions_token_is_refused(desk: Desk) -> None:
    with desk.as_("supervisor") as page:
        (cookie,) = [one for one in page.context.cookies() if one["name"] == "console_session"]
        token = page.locator("input[name=csrf]").first.input_value()
        held = f"console_session={cookie['value']}"
        host = {"Cookie": held, "Origin": desk.world.url}
        assert _posted(desk, "/sign-out", {"csrf": token}, Cookie=held, Origin="https://evil.example")[0] == 403
        assert _posted(desk, "/sign-out", {"csrf": token}, **host, **{"Sec-Fetch-Site": "cross-site"})[0] == 403
        assert _posted(desk, "/sign-out", {"csrf": token}, Cookie=held, Origin="null")[0] == 403
        assert _posted(desk, "/sign-out", {}, **host)[0] == 403
        assert _posted(desk, "/sign-out", {"csrf": token[::-1]}, **host)[0] == 403
        desk.go(page, "/")
        assert "/sign-in" not in page.url, "one of them ended the session"
        assert _posted(desk, "/sign-out", {"csrf": token}, **host)[0] == 303
        desk.go(page, "/")
        assert "/sign-in" in page.url, "a session that was ended elsewhere is still taken"


def test_signing_out_ends_the_session_not_only_the_cookie(desk: Desk) -> None:
    with desk.as_("supervisor") as page:
        cookies = page.context.cookies()
        page.get_by_role("button", name="Sign out").click()
        page.wait_for_url("**/sign-in")
        page.context.add_cookies(cookies)  # type: ignore[arg-type]
        desk.go(page, "/")
        assert "/sign-in" in page.url


def test_a_revoked_key_ends_its_sessions(desk: Desk) -> None:
    key = aside(desk.world.new_key, "mallory", "auditor")
    context = desk.context()
    page = context.new_page()
    desk.sign_in(page, key)
    assert aside(desk.world.tga, "keys", "revoke", key.split("_")[1]).returncode == 0
    desk.go(page, "/")
    assert "/sign-in" in page.url
    assert "Your session has ended" in page.inner_text("main")
    context.close()


def test_a_changed_cookie_is_no_session(desk: Desk) -> None:
    with desk.as_("auditor") as page:
        (cookie,) = [one for one in page.context.cookies() if one["name"] == "console_session"]
        value = cookie["value"]
        for changed in (value[:-2] + ("AA" if value[-2:] != "AA" else "BB"), value[:20], "x", "é"):
            headers = {"Cookie": f"console_session={changed}".encode().decode("latin-1")}
            assert _posted(desk, "/sign-out", {"csrf": "x"}, **headers)[0] == 303  # to the door


def test_every_answer_has_the_strict_policy(desk: Desk) -> None:
    expected = {
        "default-src 'none'",
        "script-src 'self'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
    }
    for path in ("", "/sign-in", "/static/console.js", "/static/console.css", "/nothing", "/live"):
        try:
            with urllib.request.urlopen(f"{desk.world.url}/console{path}", timeout=60) as answer:  # noqa: S310
                policy = answer.headers["content-security-policy"]
        except urllib.error.HTTPError as error:
            with error:
                policy = error.headers["content-security-policy"]
        assert expected <= {part.strip() for part in policy.split(";")}, path
        assert "unsafe" not in policy


def test_the_policy_stops_inline_scripts_and_untrusted_markup(desk: Desk) -> None:
    with desk.as_("auditor") as page:
        for attempt in (
            "document.body.innerHTML = '<b>x</b>'",
            "document.body.setAttribute('onclick', 'window.ran = 1')",
            "document.body.append(Object.assign(document.createElement('script'), { text: 'window.ran = 1' }))",
            "trustedTypes.createPolicy('another', {})",
        ):
            assert page.evaluate(f"() => {{ try {{ {attempt}; return null }} catch (e) {{ return e.name }} }}"), attempt
        assert page.evaluate("window.ran ?? null") is None
    desk.troubles.clear()


@pytest.mark.one_in(2)
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, NARROW])
def test_the_door_is_fit_for_everyone(desk: Desk, theme: str, size: tuple[int, int]) -> None:
    context = desk.context(size, theme=theme)
    page = desk.watched(context.new_page())
    page.goto(f"{desk.world.url}/console")
    assert serious_findings(page) == []
    page.set_viewport_size({"width": SMALLEST[0], "height": SMALLEST[1]})
    assert overflow(page) == 0
    context.close()
    desk.verify_quiet()


def test_light_and_dark_are_chosen_without_a_script_too(desk: Desk) -> None:
    with desk.as_("auditor", script=False) as page:
        page.get_by_role("button", name="Switch between light and dark").click()
        assert page.locator("html").get_attribute("data-theme") == "dark"
        page.get_by_role("button", name="Switch between light and dark").click()
        assert page.locator("html").get_attribute("data-theme") == "light"
