"""What a webhook is told, shaped for Slack or Microsoft Teams.

Names in it are chosen by strangers: callers, tool servers, programs. They stand only where these services read no
markup: in Slack's `plain_text` objects, in the `TextRun`s of an Adaptive Card. Everything that they do read as markup
is fixed text of ours. What could mention people or hide is taken out besides.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any, Final
from urllib.parse import quote

from app.config.telling import WebhookFormat

_VALUE_CHARS_MAX: Final = 256
_QUESTIONS_MAX: Final = 4
_QUESTION_CHARS_MAX: Final = 48  # so that as many as are named fit, with how many more there are
_NO_LINK: Final = "No link: public_url is not set in the gateway's tga.toml. Look for it in the gateway's console."
_FACTS_MAX: Final = 10  # Slack takes ten fields in a section
_MENTION: Final = re.compile(r"@(?=\S)")
_TITLES: Final = {
    "approval_requested": "A call waits for a person's decision",
    "run_asks": "A run asks a person",
    "call_held": "A call is held: nobody knows what became of it",
    "tool_quarantined": "A tool has changed, and is not called",
    "log_forked": "The log does not continue what was signed",
    "run_parked": "A run is parked: its attempts end without getting anywhere",
    "run_diverged": "A run has diverged: its program is not the one that wrote its journal",
}
_SHOWN: Final = (
    ("server_id", "Server"),
    ("tool_name", "Tool"),
    ("run_id", "Run"),
    ("procedure", "Procedure"),
    ("version", "Version"),
    ("questions", "Questions"),
    ("principal_id", "Asked by"),
    ("tenant", "Tenant"),
    ("requested_at", "Since"),
    ("held_since", "Since"),
    ("since", "Since"),
    ("expires_at", "Until"),
    ("detail", "Detail"),
    ("trace_id", "Trace"),
)


def shaped(form: WebhookFormat, event: str, told: Mapping[str, Any], public_url: str | None) -> dict[str, Any]:
    """The body, without `json`, which is told as it is. Without a `public_url` it says why it has no link."""
    title = _TITLES["run_asks" if told.get("kind") == "run" else event]
    told = {**told, "expires_at": told.get("expires_at") or _first_end(told)}
    facts = [(shown, plain(_text(told[name]))) for name, shown in _SHOWN if told.get(name)][:_FACTS_MAX]
    link = None if public_url is None else public_url.rstrip("/") + _path(event, told)
    return _slack(title, facts, link) if form == "slack" else _teams(title, facts, link)


def plain(value: str) -> str:
    """One line of visible characters that mentions no one; what is too long is cut, and ends with an ellipsis."""
    seen = "".join(" " if unicodedata.category(c) in _UNSEEN else c for c in value[:_VALUE_CHARS_MAX])
    end = "…" if len(value) > _VALUE_CHARS_MAX else ""
    return (_MENTION.sub("@\u200b", seen).strip() or "-") + end


_UNSEEN: Final = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})


def _text(value: Any) -> str:
    if isinstance(value, list):  # questions of a run
        names = [str(one.get("name", "")) if isinstance(one, dict) else str(one) for one in value]
        more = f" and {len(names) - _QUESTIONS_MAX} more" if len(names) > _QUESTIONS_MAX else ""
        return ", ".join(_shortened(name) for name in names[:_QUESTIONS_MAX]) + more
    return str(value)


def _shortened(name: str) -> str:
    return name if len(name) <= _QUESTION_CHARS_MAX else f"{name[:_QUESTION_CHARS_MAX]}…"


def _first_end(told: Mapping[str, Any]) -> str | None:
    """When the first of a run's questions is over."""
    ends = [one["expires_at"] for one in told.get("questions", ()) if isinstance(one, dict) and one.get("expires_at")]
    return min(ends, default=None)


def _path(event: str, told: Mapping[str, Any]) -> str:
    """Where the console shows it."""
    if "run_id" in told:
        return f"/console/runs/{quote(str(told['run_id']), safe='')}"
    if "trace_id" in told:
        page = "approvals" if event == "approval_requested" else "calls"
        return f"/console/{page}/{quote(str(told['trace_id']), safe='')}"
    return "/console/servers" if event == "tool_quarantined" else "/console/ledger"


def _slack(title: str, facts: Sequence[tuple[str, str]], link: str | None) -> dict[str, Any]:
    blocks: list[dict[str, Any]] = [
        {"type": "header", "text": _slack_text(title)},
        {"type": "section", "fields": [_slack_text(f"{name}: {value}") for name, value in facts]},
    ]
    if link is not None:
        button = {"type": "button", "text": _slack_text("Open in the console"), "url": link}
        blocks.append({"type": "actions", "elements": [button]})
    else:
        blocks.append({"type": "context", "elements": [_slack_text(_NO_LINK)]})
    return {"text": title, "blocks": [block for block in blocks if block.get("fields", True)]}


def _slack_text(text: str) -> dict[str, Any]:
    """Plain text is not read as mrkdwn; the three characters that begin an escape are escaped all the same."""
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return {"type": "plain_text", "text": escaped, "emoji": False}


def _teams(title: str, facts: Sequence[tuple[str, str]], link: str | None) -> dict[str, Any]:
    body: list[dict[str, Any]] = [
        {"type": "TextBlock", "text": title, "weight": "Bolder", "size": "Medium", "wrap": True}
    ]
    for name, value in facts:
        runs = [{"type": "TextRun", "text": f"{name}: ", "weight": "Bolder"}, {"type": "TextRun", "text": value}]
        body.append({"type": "RichTextBlock", "inlines": runs})
    if link is None:
        body.append({"type": "TextBlock", "text": _NO_LINK, "isSubtle": True, "wrap": True})
    card: dict[str, Any] = {
        "$schema": "http://adaptivecards.io/schemas/adaptive-card.json",
        "type": "AdaptiveCard",
        "version": "1.4",
        "body": body,
    }
    if link is not None:
        card["actions"] = [{"type": "Action.OpenUrl", "title": "Open in the console", "url": link}]
    content = {"contentType": "application/vnd.microsoft.card.adaptive", "content": card}
    return {"type": "message", "attachments": [content]}
