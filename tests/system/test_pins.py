"""Pins: what a tool is stands on its tenant's system stream; another definition is refused until it is accepted."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from app.core.canonical import parse_object
from app.core.digest import digest_of
from app.core.errors import RequestMismatch, ToolQuarantined
from app.core.limits import QUARANTINED_PER_PIN_MAX
from app.domain.identity import Principal
from app.domain.system import pins as pins_module
from app.domain.system.pins import Pins
from app.domain.tools import Tool
from app.postgres.database import Database
from tests.conftest import Admin
from tests.invariants.plans import contents, verify_all
from tests.runtime.scripted import WRITE, Scripted, call, new_key, open_scripted
from tests.runtime.supervised import ask, decide

OPERATOR = Principal(principal_id="olga", tenant="default", roles=["operator"])


def definition(text: str) -> Tool:
    return replace(WRITE, definition_digest=digest_of({"tool": text}))


B, C = definition("create, but another"), definition("create, and yet another")


async def pins(admin: Admin, tenant: str = "default") -> list[tuple[Any, ...]]:
    """Every pin on the tenant's system stream: tool, change, digest, by whom."""
    rows = await admin.fetch(
        "SELECT artifact FROM tga.artifacts WHERE stream = $1 ORDER BY sequence_number", f"system:{tenant}"
    )
    said = [parse_object(row["artifact"]) for row in rows]
    return [
        (one["tool_name"], one["change"], one["definition_digest"], one["recorded_by"])
        for one in said
        if one["schema_id"] == "tga/v1/tool_pin"
    ]


async def accept(scripted: Scripted, tool: Tool) -> None:
    await scripted.system.pins.accept(tool, definition_digest=tool.definition_digest, accepted_by=OPERATOR)


async def test_a_tool_is_pinned_when_it_is_first_called_and_once(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        for _ in range(3):
            await scripted.runtime.call(call(key=new_key()))
        assert await pins(admin) == [("create", "pinned", WRITE.definition_digest, "gateway")]
    async with open_scripted(database.gateway_url) as later:
        await later.runtime.call(call(key=new_key()))
        assert len(await pins(admin)) == 1
        await verify_all(later.sessions)


async def test_a_changed_tool_is_refused_and_on_the_record_once(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(call(key=new_key()))
        scripted.tools.tools["crm", "create"] = B
        before = await contents(admin)
        for _ in range(3):
            with pytest.raises(ToolQuarantined):
                await scripted.runtime.call(call(key=new_key()))
        after = await contents(admin)
        assert [row for row in after["heads"] if "trace:" in row] == [row for row in before["heads"] if "trace:" in row]
        assert [pin[1:3] for pin in await pins(admin)] == [
            ("pinned", WRITE.definition_digest),
            ("quarantined", B.definition_digest),
        ]
        assert len(scripted.connector.sent) == 1
    async with open_scripted(database.gateway_url, tool=B) as later:
        with pytest.raises(ToolQuarantined):
            await later.runtime.call(call(key=new_key()))
        assert len(await pins(admin)) == 2
        assert later.connector.sent == []
        await verify_all(later.sessions)


async def test_gateways_with_other_definitions_do_not_fill_the_record(database: Database, admin: Admin) -> None:
    """Each refused call of one would say anew what the other has just said otherwise."""
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(open_scripted(database.gateway_url, tool=tool)) for tool in (WRITE, B, C)
        ]
        await gateways[0].runtime.call(call(key=new_key()))
        for gateway in (gateways[1], gateways[2]) * 4:
            with pytest.raises(ToolQuarantined):
                await gateway.runtime.call(call(key=new_key()))
        assert [pin[1] for pin in await pins(admin)] == ["pinned", "quarantined", "quarantined"]


async def test_a_finished_calls_repeat_is_answered_though_its_tool_has_changed(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        key = new_key()
        first = await scripted.runtime.call(call(key=key))
        scripted.tools.tools["crm", "create"] = B
        assert (await scripted.runtime.call(call(key=key))).trace_id == first.trace_id
        assert len(scripted.connector.sent) == 1


async def test_what_an_operator_accepted_works_and_nothing_else(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await scripted.runtime.call(call(key=new_key()))
        scripted.tools.tools["crm", "create"] = B
        with pytest.raises(RequestMismatch):
            await scripted.system.pins.accept(B, definition_digest=C.definition_digest, accepted_by=OPERATOR)
        await accept(scripted, B)
        await accept(scripted, B)  # once is enough
        assert (await scripted.runtime.call(call(key=new_key()))).state == "COMPLETED"
        assert [(pin[1], pin[3]) for pin in await pins(admin)] == [("pinned", "gateway"), ("accepted", "olga")]
        for other in (WRITE, C):
            scripted.tools.tools["crm", "create"] = other
            with pytest.raises(ToolQuarantined):
                await scripted.runtime.call(call(key=new_key()))
        await verify_all(scripted.sessions)


async def test_an_acceptance_through_another_gateway_is_seen_at_once(database: Database) -> None:
    async with (
        open_scripted(database.gateway_url, tool=WRITE) as one,
        open_scripted(database.gateway_url, tool=B) as other,
    ):
        await one.runtime.call(call(key=new_key()))
        with pytest.raises(ToolQuarantined):
            await other.runtime.call(call(key=new_key()))
        await accept(one, B)
        assert (await other.runtime.call(call(key=new_key()))).state == "COMPLETED"


async def test_an_approval_counts_only_for_what_is_pinned_now_through_whichever_gateway(database: Database) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        asked, again = await ask(one), await ask(one)
        await other.system.log.refresh("default")
        await accept(other, B)
        assert one.system.pins.state_of(WRITE).status == "pinned"  # as far as it knows
        with pytest.raises(ToolQuarantined):
            await decide(one, asked)
        assert one.connector.sent == []
        await accept(other, WRITE)
        assert (await decide(one, again)).state == "COMPLETED"


async def test_gateways_that_start_at_once_pin_each_tool_once(database: Database, admin: Admin) -> None:
    tools = [replace(WRITE, tool_name=f"tool_{number}") for number in range(40)]
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(open_scripted(database.gateway_url)) for _ in range(4)]
        await asyncio.gather(*(gateway.system.pins.see(tools) for gateway in gateways))
        assert sorted(pin[0] for pin in await pins(admin)) == sorted(tool.tool_name for tool in tools)
        for gateway in gateways:
            assert all(gateway.system.pins.state_of(tool).status == "pinned" for tool in tools)
        await verify_all(gateways[0].sessions)


async def test_each_tenant_has_its_own_pins(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        theirs = replace(B, tenant="acme")
        await scripted.system.pins.see([WRITE, theirs])
        assert [pin[1:3] for pin in await pins(admin)] == [("pinned", WRITE.definition_digest)]
        assert [pin[1:3] for pin in await pins(admin, "acme")] == [("pinned", B.definition_digest)]
        heads = await admin.fetch("SELECT stream, tenant, owner, is_open FROM tga.heads ORDER BY stream")
        assert [tuple(row) for row in heads] == [
            ("system:acme", "acme", None, True),
            ("system:default", "default", None, True),
        ]
        await verify_all(scripted.sessions)


# Whatever a server says.


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


async def test_a_tool_that_cannot_be_pinned_keeps_no_other_from_it(database: Database, admin: Admin) -> None:
    """A definition's own limit leaves room for its pin. Should it once not, that tool is refused, and none else."""
    tools = [replace(WRITE, tool_name=name) for name in ("first", "deep", "odd", "last")]
    said: dict[str, Any] = {"deep": deep(64), "odd": {"a": float("nan")}}
    async with open_scripted(database.gateway_url) as scripted:
        pinning = Pins(scripted.system.log, scripted.clock, lambda tool: said.get(tool.tool_name, {"a": 1}))
        assert await pinning.see(tools) == [
            "tool deep cannot be pinned: InputTooLarge",
            "tool odd cannot be pinned: InputMalformed",
        ]
        assert [pin[0] for pin in await pins(admin)] == ["first", "last"]
        with pytest.raises(ToolQuarantined, match="is not pinned"):
            await pinning.verify(tools[1])
        await verify_all(scripted.sessions)


async def test_a_server_that_says_something_else_each_time_does_not_fill_the_record(
    database: Database, admin: Admin
) -> None:
    changes = [definition(f"change {number}") for number in range(3 * QUARANTINED_PER_PIN_MAX)]
    async with open_scripted(database.gateway_url) as scripted:
        for tool in (WRITE, *changes):
            await scripted.system.pins.see([tool])
        assert [pin[1] for pin in await pins(admin)] == ["pinned", *["quarantined"] * QUARANTINED_PER_PIN_MAX]
        with pytest.raises(ToolQuarantined, match="has changed"):
            await scripted.system.pins.verify(changes[-1])
        await accept(scripted, changes[-1])
        await scripted.system.pins.verify(changes[-1])
        await scripted.system.pins.see([changes[0]])
        assert [pin[1] for pin in await pins(admin)][-2:] == ["accepted", "quarantined"]


async def test_a_server_that_shows_new_tools_each_time_does_not_fill_the_record(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pins_module, "PINS_PER_SERVER_MAX", 5)
    shown = [Discovered("mcp", f"tool_{number}", "write", WRITE.definition_digest) for number in range(8)]
    others = [replace(WRITE, tool_name=f"configured_{number}") for number in range(8)]
    async with open_scripted(database.gateway_url) as scripted:
        unpinned = await scripted.system.pins.see([*others, *shown])
        assert [words.split()[1] for words in unpinned] == ["tool_5", "tool_6", "tool_7"]
        assert len(await pins(admin)) == 8 + 5
        with pytest.raises(ToolQuarantined, match="is not pinned"):
            await scripted.system.pins.verify(shown[7])
        await accept(scripted, shown[7])
        await scripted.system.pins.verify(shown[7])


class Discovered(Tool):
    is_discovered = True
