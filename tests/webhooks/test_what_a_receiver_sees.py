"""What a receiver of webhooks has: a documented format, a check that works as printed, the keys, and every event."""

from __future__ import annotations

import base64
import json
import re
import time
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.exceptions import InvalidSignature

from app.connectors.webhook_notices import Notice, WebhookNotices
from app.core.digest import digest_of
from app.core.errors import LogForked, ToolQuarantined
from app.domain.runs.engine.announcing import AnnouncedQuestion, RunAnnouncement
from app.domain.tga.announcements import Announcement
from app.gateway.standing import WhatStands
from app.keys.keyring import Keyring
from app.postgres.database import Database
from app.postgres.outbox import PostgresOutbox
from tests.conftest import Admin
from tests.connectors.servers import raw_server
from tests.runtime.scripted import TIMED_OUT, WRITE, call, new_key, open_scripted
from tests.traces import action_request
from tests.webhooks.sending import OK, Delivery, HandClock, answering, fill, webhooks

DOCUMENT = Path(__file__).parents[2] / "docs" / "webhooks.md"
Checked = Callable[[dict[str, str], bytes, dict[str, Any]], dict[str, Any]]


@pytest.fixture
def checked() -> Checked:
    """The example of docs/webhooks.md, as printed."""
    (printed,) = re.findall("```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(compile(printed, "docs/webhooks.md", "exec"), names)  # noqa: S102
    found: Checked = names["checked"]
    return found


class Now(HandClock):
    """The receiver's clock is a real one."""

    def now(self) -> str:
        return time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime())

    def monotonic_ms(self) -> float:
        return time.monotonic() * 1000


def keys_of(keyring: Keyring, *, is_retired: bool = False) -> dict[str, Any]:
    public = base64.b64encode(keyring.public_key_bytes).decode()
    item = {"key_id": keyring.key_id, "algorithm": "Ed25519", "public_key": public, "is_retired": is_retired}
    return {"items": [item], "next": None}


async def test_the_printed_check_accepts_what_is_sent_and_nothing_else(
    outbox: PostgresOutbox, admin: Admin, keyring: Keyring, checked: Checked
) -> None:
    await fill(admin, 1)
    async with raw_server(OK) as receiver:
        deliverer = webhooks({"approvals": receiver.url}, outbox, keyring, clock=Now())
        assert await deliverer.deliver_due() == 1
        await deliverer.close()
    sent = Delivery.of(receiver.requests[0])
    told = checked(sent.headers, sent.body, keys_of(keyring))
    assert told["event"] == "approval_requested"
    with pytest.raises(InvalidSignature):
        checked(sent.headers, sent.body.replace(b"approval", b"refusal "), keys_of(keyring))
    with pytest.raises(InvalidSignature):
        checked({**sent.headers, "webhook-id": "another"}, sent.body, keys_of(keyring))
    with pytest.raises(ValueError, match="too old"):
        checked({**sent.headers, "webhook-timestamp": "1700000000"}, sent.body, keys_of(keyring))
    with pytest.raises(KeyError):
        checked(sent.headers, sent.body, keys_of(keyring, is_retired=True))


async def notices_of(database: Database, log: Any) -> list[Notice]:
    """A call that is held, and a tool that is not what it was."""
    held = replace(WRITE, on_unknown_outcome="hold", max_attempts=1)
    async with open_scripted(database.gateway_url, TIMED_OUT, tool=held, real_time=True) as scripted:
        assert (await scripted.runtime.call(call(key=new_key()))).waiting == "operator"
        changed = replace(held, definition_digest=digest_of({"tool": "changed"}))
        scripted.tools.tools["crm", "create"] = changed
        with pytest.raises(ToolQuarantined):
            await scripted.runtime.call(call(key=new_key()))
        registry: Any = SimpleNamespace(tools=lambda: [changed])
        stands = WhatStands(scripted.sessions, registry, scripted.system.pins, log, ["default"])
        found = await stands.look()
        assert await stands.look() == found, "what stands has the same ids at every look"
        return found


FORKED: Any = SimpleNamespace(
    fault=LogForked("the tree is smaller than one that was signed", expected=7, found=3),
    verifier_key=SimpleNamespace(name="example.org/log"),
)
SOUND: Any = SimpleNamespace(fault=None, verifier_key=SimpleNamespace(name="example.org/log"))


async def test_a_held_call_a_quarantined_tool_and_a_forked_log_are_told_too(
    database: Database, outbox: PostgresOutbox, keyring: Keyring, checked: Checked
) -> None:
    found = await notices_of(database, FORKED)
    async with raw_server(OK) as receiver, raw_server(OK) as choosy:
        deliverer = webhooks({"ops": receiver.url, "pins": choosy.url}, outbox, keyring, clock=Now())

        async def look() -> list[Notice]:
            return found

        wanted = {"ops": ["call_held", "tool_quarantined", "log_forked"], "pins": ["tool_quarantined"]}
        notices = WebhookNotices(deliverer, wanted, look, Now())
        assert await notices.tell() == 4
        assert await notices.tell() == 0, "once is enough when it was taken"
        found, stood = [], found
        await notices.tell()
        found = stood
        assert await notices.tell() == 4, "what stands again is told again"
        await deliverer.close()
    told = [
        checked(sent.headers, sent.body, keys_of(keyring))
        for sent in (Delivery.of(raw) for raw in receiver.requests[:3])
    ]
    assert sorted(event["event"] for event in told) == ["call_held", "log_forked", "tool_quarantined"]
    assert {event["tool_name"] for event in told if "tool_name" in event} == {"create"}
    assert [json.loads(Delivery.of(raw).body)["event"] for raw in choosy.requests] == ["tool_quarantined"] * 2
    ids = [Delivery.of(raw).id for raw in receiver.requests]
    assert sorted(ids[:3]) == sorted(ids[3:]), "a repeat has the id of the first"


async def test_what_no_receiver_takes_is_told_again_later_and_only_while_it_stands(
    database: Database, outbox: PostgresOutbox, keyring: Keyring
) -> None:
    (found,) = [notice for notice in await notices_of(database, SOUND) if notice.event == "tool_quarantined"]
    standing = [found]
    refusal = b"HTTP/1.1 500 Oh\r\nContent-Length: 0\r\n\r\n"
    async with raw_server(answering(refusal, OK)) as receiver:
        clock = Now()
        deliverer = webhooks({"ops": receiver.url}, outbox, keyring, clock=clock)

        async def look() -> list[Notice]:
            return standing

        notices = WebhookNotices(deliverer, {"ops": ["tool_quarantined"]}, look, clock)
        assert await notices.tell() == 0
        assert await notices.tell() == 0
        assert len(receiver.requests) == 1, "not before its pause is over"
        notices._known["ops", found.notice_id].due_ms = 0
        assert await notices.tell() == 1
        await deliverer.close()
    assert len({Delivery.of(raw).id for raw in receiver.requests}) == 1


async def test_every_member_that_is_sent_is_documented(database: Database, keyring: Keyring) -> None:
    text = DOCUMENT.read_text()
    told = {"approval_requested": asdict(Announcement.of(action_request(1)))}
    told |= {notice.event: dict(notice.told) for notice in await notices_of(database, FORKED)}
    for event, members in told.items():
        (row,) = [line for line in text.splitlines() if line.startswith(f"| `{event}`")]
        assert set(re.findall("`([a-z_]+)`", row.rpartition("|")[0].rpartition("|")[2])) == members.keys(), event
    (row,) = [line for line in text.splitlines() if line.startswith("| of a run: `approval_requested`")]
    of_runs = {one.name for shape in (RunAnnouncement, AnnouncedQuestion) for one in fields(shape)}
    assert set(re.findall("`([a-z_]+)`", row.rpartition("|")[0].rpartition("|")[2])) == of_runs
    assert {"approval_requested", "call_held", "tool_quarantined", "log_forked"} == told.keys()
