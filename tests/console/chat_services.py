"""Slack and Teams as far as a webhook meets them: each takes what the vendor documents, and refuses everything else.

Slack: an incoming webhook takes `text` and at most 50 blocks; of a header 150 characters, of a section 3,000 or ten
fields of 2,000, of a button 75 and a URL of 3,000; `&`, `<` and `>` of a text are escaped, or they are markup. Teams: a
workflow takes a message with an Adaptive Card, of 28 KB in all.

A channel is also a page on a site of its own (`localhost`, where the gateway is `127.0.0.1`): people follow its links.
"""

from __future__ import annotations

import html
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal

from tests.cli.world import wait_for

MARKUP = re.compile(r"[<>]|&(?!amp;|lt;|gt;)")
TEAMS_BYTES_MAX = 28 * 1024
Fault = Literal["lost", "500", "silent"]


class Refused(Exception):
    """As the service says it."""


@dataclass(frozen=True)
class Message:
    """What a person reads: everything that is not in it is not seen."""

    webhook_id: str
    title: str
    facts: dict[str, str]
    link: str | None
    body: bytes


def _need(condition: object, words: str) -> None:
    if not condition:
        raise Refused(words)


def _slack_text(value: Any, most: int, *, plain: bool = False) -> str:
    _need(isinstance(value, dict) and value.get("type") in ("plain_text", "mrkdwn"), "invalid_blocks: no text object")
    _need(value["type"] == "plain_text" or not plain, "invalid_blocks: must be plain_text")
    text = value.get("text")
    _need(isinstance(text, str) and 1 <= len(text) <= most, f"invalid_blocks: 1 to {most} characters")
    _need(not MARKUP.search(text), f"markup of a stranger: {text[:80]!r}")
    return html.unescape(str(text))


def read_slack(raw: bytes) -> tuple[str, dict[str, str], str | None]:
    body = json.loads(raw)
    _need(set(body) <= {"text", "blocks"}, "no_text: unknown members")
    _need(isinstance(body.get("text"), str) and 0 < len(body["text"]) <= 40_000, "no_text")
    _need(not MARKUP.search(body["text"]), "markup in text")
    _need(len(body["blocks"]) <= 50, "invalid_blocks: more than 50")
    title, facts, link = "", dict[str, str](), None
    for block in body["blocks"]:
        kind = block["type"]
        if kind == "header":
            title = _slack_text(block["text"], 150, plain=True)
        elif kind == "section":
            fields = block.get("fields")
            _need(isinstance(fields, list) and 1 <= len(fields) <= 10, "invalid_blocks: 1 to 10 fields")
            for one in fields:
                name, _, value = _slack_text(one, 2_000).partition(": ")
                facts[name] = value
        elif kind == "context":
            facts["context"] = " ".join(_slack_text(one, 3_000) for one in block["elements"][:10])
        elif kind == "actions":
            _need(1 <= len(block["elements"]) <= 25, "invalid_blocks: 1 to 25 elements")
            for button in block["elements"]:
                _need(button["type"] == "button", "invalid_blocks: no button")
                _slack_text(button["text"], 75, plain=True)
                link = button["url"]
                _need(re.match(r"https?://\S+$", link) and len(link) <= 3_000, "invalid_blocks: url")
        else:
            raise Refused(f"invalid_blocks: {kind}")
    return title, facts, link


def read_teams(raw: bytes) -> tuple[str, dict[str, str], str | None]:
    _need(len(raw) <= TEAMS_BYTES_MAX, "413 Request Entity Too Large")
    body = json.loads(raw)
    _need(body.get("type") == "message" and len(body["attachments"]) == 1, "no message with an attachment")
    (attachment,) = body["attachments"]
    _need(attachment["contentType"] == "application/vnd.microsoft.card.adaptive", "contentType")
    card = attachment["content"]
    _need(card["type"] == "AdaptiveCard" and card["version"] in ("1.2", "1.3", "1.4", "1.5"), "no card, or its version")
    _need("msteams" not in card, "mentions are entities of msteams")
    title, facts = "", dict[str, str]()
    for element in card["body"]:
        if element["type"] == "TextBlock":  # read as Markdown
            _need(not re.search(r"[\[\]<>*`]|https?:", element["text"]), f"markup: {element['text'][:80]!r}")
            title, facts["context"] = title or element["text"], element["text"]
        else:
            _need(element["type"] == "RichTextBlock", f"unknown element {element['type']}")
            name, value = [run["text"] for run in element["inlines"] if run["type"] == "TextRun"]
            facts[name.removesuffix(": ")] = value
    links = [action["url"] for action in card.get("actions", []) if action["type"] == "Action.OpenUrl"]
    _need(len(links) <= 1, "one action")
    return title, facts, links[0] if links else None


READERS: dict[str, Callable[[bytes], tuple[str, dict[str, str], str | None]]] = {
    "slack": read_slack,
    "teams": read_teams,
}


@dataclass
class Channel:
    """One incoming webhook, and what stands in its channel. `faults`: what becomes of the next deliveries."""

    form: str
    port: int = 0
    faults: list[Fault] = field(default_factory=list)
    posts: list[str] = field(default_factory=list)  # the webhook-id of each that came, taken or not
    messages: dict[str, Message] = field(default_factory=dict)  # by webhook-id: a repeat is the same one
    refusals: list[str] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    @property
    def hook(self) -> str:
        return f"http://127.0.0.1:{self.port}/services/T000/B000/a-secret"

    @property
    def page(self) -> str:
        return f"http://localhost:{self.port}/"

    def take(self, webhook_id: str, raw: bytes) -> str | None:
        """What to answer; None: nothing, and the connection ends."""
        self.posts.append(webhook_id)
        fault = self.faults.pop(0) if self.faults else None
        if fault == "500":
            return "500 Internal Server Error"
        if fault == "silent":
            self.over.wait()
            return None
        try:
            title, facts, link = READERS[self.form](raw)
        except (Refused, KeyError, TypeError, ValueError) as refused:
            self.refusals.append(f"{type(refused).__name__} {refused}")
            return "400 Bad Request"
        self.messages[webhook_id] = Message(webhook_id, title, facts, link, raw)
        return None if fault == "lost" else "200 OK"

    def about(self, path: str, *, times: int = 1) -> Message:
        """The message that leads to this page of the console, once it is there."""

        def found() -> list[Message]:
            return [one for one in self.messages.values() if one.link is not None and one.link.endswith(path)]

        wait_for(lambda: len(found()) >= times)
        assert len(found()) == times, [one.webhook_id for one in found()]
        return found()[-1]

    def shown(self) -> str:
        rows = [
            f'<li>{html.escape(one.title)} <a href="{html.escape(one.link or "")}">Open in the console</a></li>'
            for one in self.messages.values()
        ]
        return f"<!doctype html><title>{self.form}</title><link rel=icon href='data:,'><ul>{''.join(rows)}</ul>"


@contextmanager
def open_channel(form: str) -> Iterator[Channel]:
    channel = Channel(form)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            answer = channel.take(self.headers["webhook-id"], raw)
            if answer is None:
                self.close_connection = True
                return
            self._answer(answer, b"ok")

        def do_GET(self) -> None:
            self._answer("200 OK" if self.path == "/" else "404 Not Found", channel.shown().encode())

        def _answer(self, status: str, body: bytes) -> None:
            number, _, words = status.partition(" ")
            self.send_response(int(number), words)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    channel.port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield channel
    finally:
        channel.over.set()
        server.shutdown()
        server.server_close()
        thread.join()
