"""Messages for Slack and Teams: names that strangers chose are shown as text, whatever they hold, and link nowhere."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.config.telling import WebhookFormat
from app.connectors.webhook_formats import plain, shaped
from app.console.site import PAGES
from app.core.canonical import canonical_bytes
from tests.console.chat_services import READERS

HOSTILE = [
    "<!here> look",
    "<!channel>",
    "@here @channel @everyone",
    "<@U123> <#C123> <!subteam^S1>",
    "<https://evil.example|Approve>",
    "[Approve](https://evil.example)",
    "*bold* _it_ ~no~ `code` ```block```",
    "<at>everyone</at>",
    "![x](https://evil.example/p.png)",
    ":fire:",
    "a\nb\r\n# heading",
    "a\u202eb\u200bc\x00",
    "&lt;!here&gt;",
    "x" * 5_000,
    "<&>" * 2_000_000,
    "",
]
TOLD = {
    "trace_id": "01890000-0000-7000-8000-000000000001",
    "server_id": "pay",
    "principal_id": "agent-1",
    "tenant": "default",
    "requested_at": "2026-01-02T03:04:05.678Z",
    "expires_at": None,
}
EVENTS: dict[str, dict[str, Any]] = {
    "approval_requested": {**TOLD, "tool_name": "charge"},
    "call_held": {**TOLD, "tool_name": "charge", "held_since": "2026-01-02T03:04:05.678Z"},
    "tool_quarantined": {"tenant": "default", "server_id": "pay", "tool_name": "charge"},
    "log_forked": {"origin": "tga.example.org/log", "detail": "the tree is smaller"},
    "run_parked": {"run_id": "acme/1", "procedure": "onboard", "version": "1", "since": "2026-01-02T03:04:05.678Z"},
    "run_diverged": {"run_id": "r 1", "procedure": "onboard", "version": "1", "since": "2026-01-02T03:04:05.678Z"},
}


def texts_of_markup(form: WebhookFormat, body: Any) -> list[str]:
    """What the service reads as markup: in Slack all but plain_text objects, in Teams every TextBlock and title."""
    if isinstance(body, list):
        return [text for one in body for text in texts_of_markup(form, one)]
    if not isinstance(body, dict):
        return []
    if form == "slack" and body.get("type") == "plain_text":
        return []
    if form == "teams" and body.get("type") == "TextRun":
        return []
    own = [value for name, value in body.items() if isinstance(value, str) and name in ("text", "title", "value")]
    return own + texts_of_markup(form, list(body.values()))


def texts(body: Any) -> list[str]:
    if isinstance(body, dict):
        own = [body["text"]] if isinstance(body.get("text"), str) else []
        return own + texts(list(body.values()))
    return [text for one in body for text in texts(one)] if isinstance(body, list) else []


@pytest.mark.parametrize("form", ["slack", "teams"])
@pytest.mark.parametrize("hostile", HOSTILE, ids=lambda text: repr(text[:20]))
def test_hostile_names_are_text_and_nothing_else(form: WebhookFormat, hostile: str) -> None:
    told = {**EVENTS["approval_requested"], "tool_name": hostile, "principal_id": hostile, "server_id": hostile}
    body = shaped(form, "approval_requested", told, "https://tga.example.org")
    harmless = shaped(form, "approval_requested", EVENTS["approval_requested"], "https://tga.example.org")
    assert texts_of_markup(form, body) == texts_of_markup(form, harmless), "markup is ours alone"
    for text in texts(body):
        assert len(text) <= 2_000
        assert len(text.splitlines()) <= 1
        assert "@here" not in text
        assert "@channel" not in text
        if form == "slack":
            assert "<" not in text
            assert ">" not in text
    READERS[form](canonical_bytes(body))  # or the service would refuse it
    written = json.dumps(body)
    assert "evil.example" not in "".join(part for part in written.split('"') if part.startswith("http")), (
        "no address of a stranger's stands where one is followed"
    )


@pytest.mark.parametrize("form", ["slack", "teams"])
@pytest.mark.parametrize("event", sorted(EVENTS))
def test_every_event_has_a_title_and_a_link_into_the_console(form: WebhookFormat, event: str) -> None:
    body = shaped(form, event, EVENTS[event], "https://tga.example.org/gw/")
    urls = [part for part in json.dumps(body).split('"') if part.startswith("https://tga.example.org/gw/console/")]
    assert len(urls) == 1
    assert " " not in urls[0]
    if "trace_id" in EVENTS[event]:
        page = "approvals" if event == "approval_requested" else "calls"
        assert urls[0].endswith(f"/console/{page}/{TOLD['trace_id']}")
        assert f"/{page}/{{trace_id}}" in PAGES, "the console has it"
    if event == "run_parked":
        assert urls[0].endswith("/console/runs/acme%2F1")
    without = shaped(form, event, EVENTS[event], None)
    assert "/console" not in json.dumps(without)
    assert "public_url is not set" in texts(without)[-1], "why there is no link is said"
    READERS[form](canonical_bytes(body))
    READERS[form](canonical_bytes(without))


def test_a_run_that_asks_names_its_questions() -> None:
    told = {"kind": "run", "run_id": "r1", "procedure": "onboard", "questions": [{"name": "<!here>"}, {"name": "b"}]}
    body = shaped("slack", "approval_requested", told, None)
    assert body["text"] == "A run asks a person"
    assert "Questions: &lt;!here&gt;, b" in texts(body)
    assert not any(text.startswith("Until") for text in texts(body))
    ends = ["2026-01-03T00:00:00.000Z", None, "2026-01-02T00:00:00.000Z"]
    told["questions"] = [{"name": f"{n}" * 100, "expires_at": ends[n % 3]} for n in range(9)]
    body = shaped("slack", "approval_requested", told, None)
    assert "Until: 2026-01-02T00:00:00.000Z" in texts(body), "the first that ends"
    (questions,) = [text for text in texts(body) if text.startswith("Questions")]
    assert questions.endswith(f"{'3' * 48}… and 5 more")


def test_the_shapes_are_those_that_the_services_take() -> None:
    slack = shaped("slack", "approval_requested", EVENTS["approval_requested"], "https://t.example")
    assert set(slack) == {"text", "blocks"}
    assert [block["type"] for block in slack["blocks"]] == ["header", "section", "actions"]
    assert len(slack["blocks"][0]["text"]["text"]) <= 150
    assert 1 <= len(slack["blocks"][1]["fields"]) <= 10
    teams = shaped("teams", "approval_requested", EVENTS["approval_requested"], "https://t.example")
    (attachment,) = teams["attachments"]
    assert teams["type"] == "message"
    assert attachment["contentType"] == "application/vnd.microsoft.card.adaptive"
    assert (attachment["content"]["type"], attachment["content"]["version"]) == ("AdaptiveCard", "1.4")
    assert attachment["content"]["actions"][0]["type"] == "Action.OpenUrl"


def test_nothing_stays_nothing() -> None:
    assert plain("") == plain("\u200b") == "-"


def test_what_is_cut_says_so() -> None:
    assert plain("x" * 256) == "x" * 256
    assert plain("x" * 257) == "x" * 256 + "…"
