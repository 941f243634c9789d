"""Arguments, outputs and rationales near their limits: executed to the end, or refused before anything is stored.

Between the two would be a call that a person approved and that can never be made, or an effect without a record.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Iterator
from contextlib import closing
from http.client import HTTPConnection
from typing import Any, Final
from urllib.parse import urlsplit

import asyncpg
import pytest

from app.core.limits import (
    DEPTH_MAX,
    DOCUMENT_BYTES_MAX,
    ENCLOSED_BYTES_MAX,
    ENCLOSED_DEPTH_MAX,
    ENCLOSED_KEYS_MAX,
    KEYS_MAX,
    TEXT_CHARS_MAX,
)
from tests.attack.client import Client, Said, new_id
from tests.attack.test_what_a_server_lists import LISTER
from tests.cli.world import World, wait_for
from tests.core.test_enclosing import nested

TOOLS: Final = ("echo", "asked", "secret")
CONFIG: Final = """
[servers.near]
transport = "mcp-stdio"
command = {command}
protocol_version = "2025-11-25"

[servers.near.tools.asked]
tags = ["approval"]
secret_arguments = ["/pin"]

[servers.near.tools.secret]
secret_arguments = ["/pin", "/{deep}"]
"""
DEEP: Final = "/".join("a" * (ENCLOSED_DEPTH_MAX - 1))
# What a caller writes in four bytes and the record in sixteen.
GROWING: Final = "9e15"


def of_depth(levels: int) -> str:
    return json.dumps({"a": nested(levels - 1, "leaf")}) if levels > 1 else "{}"


def of_keys(count: int) -> str:
    return json.dumps({str(number): 0 for number in range(count)})


def of_bytes(size: int) -> str:
    """Arguments that take so many bytes on the record, and fewer in the request."""
    numbers = (size - 200) // 17
    fill = size - len('{"a":[') - 17 * numbers - len('],"b":""}') + 1
    return f'{{"a":[{",".join([GROWING] * numbers)}],"b":"{"x" * fill}"}}'


NEAR: Final[dict[str, tuple[str, bool]]] = {
    **{
        f"{levels} levels": (of_depth(levels), levels <= ENCLOSED_DEPTH_MAX)
        for levels in (ENCLOSED_DEPTH_MAX - 1, ENCLOSED_DEPTH_MAX, ENCLOSED_DEPTH_MAX + 1, DEPTH_MAX - 2, DEPTH_MAX - 1)
    },
    **{
        f"{count} keys": (of_keys(count), count <= ENCLOSED_KEYS_MAX)
        for count in (ENCLOSED_KEYS_MAX, ENCLOSED_KEYS_MAX + 1, KEYS_MAX - 20, KEYS_MAX - 10, KEYS_MAX - 5)
    },
    **{
        f"{size} bytes": (of_bytes(size), size <= ENCLOSED_BYTES_MAX)
        for size in (ENCLOSED_BYTES_MAX, ENCLOSED_BYTES_MAX + 1, 523_000, 523_700, 524_288)
    },
}


@pytest.fixture(scope="module")
def near(still_world: World) -> Iterator[World]:
    world = still_world
    listed = world.home / "near.tools"
    listed.write_text("\n".join(json.dumps({"name": name, "inputSchema": {"type": "object"}}) for name in TOOLS))
    command = json.dumps([sys.executable, str(LISTER), str(listed)])
    world.config.write_text(world.config.read_text() + CONFIG.format(command=command, deep=DEEP))
    world.start()
    yield world
    world.stop()


def sent(world: World, path: str, raw: bytes) -> Said:
    with closing(HTTPConnection(urlsplit(world.url).netloc, timeout=60)) as connection:
        headers = {"Authorization": f"Bearer {world.admin_key()}", "Accept": "application/json, text/event-stream"}
        connection.request("POST", path, raw, headers)
        answer = connection.getresponse()
        return Said(answer.status, json.loads(answer.read()))


def called(world: World, server: str, tool: str, arguments: str, **fields: Any) -> Said:
    asked = json.dumps({"server_id": server, "tool_name": tool, "idempotency_key": new_id(), **fields})
    return sent(world, "/v1/tool-calls", f'{asked[:-1]}, "arguments": {arguments}}}'.encode())


def stored(world: World) -> dict[str, int]:
    """Rows of every table that a call can leave something in; what the gateway does by itself changes none of them.

    Not of `in_work`, from which finished calls are swept; a call that is in it has a head. Nor of what is folded from
    the log behind the sequencer, for lists and statistics.
    """
    own = ("leaf_spans", "tree", "log", "in_work", "call_facts", "call_counts", "digest_leaves", "acts")

    async def count() -> dict[str, int]:
        session = await asyncpg.connect(world.admin_url)
        try:
            tables = await session.fetch("SELECT tablename FROM pg_tables WHERE schemaname = 'tga'")
            names = [row["tablename"] for row in tables if not row["tablename"].startswith(own)]
            return {name: await session.fetchval(f"SELECT count(*) FROM tga.{name}") for name in names}
        finally:
            await session.close()

    return asyncio.run(count())


@pytest.mark.parametrize("what", NEAR)
@pytest.mark.parametrize(("server", "tool"), [("near", "echo"), ("bank", "balance"), ("near", "secret")])
def test_a_call_is_made_to_its_end_or_leaves_nothing(near: World, server: str, tool: str, what: str) -> None:
    arguments, is_within = NEAR[what]
    if tool == "secret":
        arguments = f'{{"pin": 1, {arguments[1:]}' if "keys" not in what else arguments
        is_within = is_within and "bytes" not in what
    before = stored(near)
    said = called(near, server, tool, arguments)
    if is_within:
        assert (said.status, said.body["state"]) == (200, "COMPLETED")
    else:
        assert (said.status, said.code) == (413, "INPUT_TOO_LARGE")
        assert stored(near) == before


@pytest.mark.parametrize("what", [what for what, (_, is_within) in NEAR.items() if is_within])
def test_what_a_person_approves_can_be_made(near: World, what: str) -> None:
    """The tool call is longer than the request that was asked about, and is first written now."""
    asked = called(near, "near", "asked", NEAR[what][0])
    assert (asked.status, asked.body["state"]) == (202, "PENDING")
    with closing(Client(near.url, near.admin_key() or "")) as client:
        trace = client.ask("GET", f"/v1/traces/{asked.body['trace_id']}").body
        decided = client.decide(asked.body["trace_id"], "APPROVE", trace["action_request_digest"])
        assert (decided.status, decided.body["state"]) == (200, "COMPLETED")


@pytest.mark.parametrize("what", NEAR)
def test_over_mcp_a_call_is_made_to_its_end_or_leaves_nothing(near: World, what: str) -> None:
    """There a key is chosen and remembered for the call before it is made."""
    arguments, is_within = NEAR[what]
    # Two levels and five keys of the message stand around them.
    before = stored(near)
    frame = '{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "echo", "arguments": '
    said = sent(near, "/mcp/near", f"{frame}{arguments}}}}}".encode())
    if is_within:
        assert said.body["result"].get("isError", False) is False
    else:
        assert "INPUT_TOO_LARGE" in json.dumps(said.body)
        assert stored(near) == before


def held(world: World) -> dict[str, Any]:
    """A call that waits for an operator's word."""
    with closing(Client(world.url, world.admin_key() or "")) as client:
        asked = client.call("bank", "slow_charge", {"amount": 1, "ms": 60_000}, wait_ms=1)
        path = f"/v1/traces/{asked.body['trace_id']}"
        wait_for(lambda: client.ask("GET", path).body["waiting"] == "operator")
        trace: dict[str, Any] = client.ask("GET", path).body
        return trace


def test_an_operators_output_is_recorded_or_leaves_everything_as_it_was(near: World) -> None:
    trace = held(near)
    path = f"/v1/traces/{trace['trace_id']}/resolve"
    word = {"action": "succeeded", "tool_call_digest": trace["tool_call_digest"], "rationale": "\x01" * TEXT_CHARS_MAX}
    before = stored(near)
    for beyond in (
        of_depth(ENCLOSED_DEPTH_MAX + 1),
        of_depth(DEPTH_MAX - 1),
        of_keys(ENCLOSED_KEYS_MAX + 1),
        of_keys(KEYS_MAX - 5),
        of_bytes(DOCUMENT_BYTES_MAX + 1),
    ):
        refused = sent(near, path, f'{json.dumps(word)[:-1]}, "output": {beyond}}}'.encode())
        assert (refused.status, refused.code) == (413, "INPUT_TOO_LARGE")
        assert stored(near) == before
    longer = sent(near, path, json.dumps({**word, "rationale": "x" * (TEXT_CHARS_MAX + 1)}).encode())
    assert longer.status == 422
    assert stored(near) == before
    within = sent(near, path, f'{json.dumps(word)[:-1]}, "output": {of_depth(ENCLOSED_DEPTH_MAX)}}}'.encode())
    assert (within.status, within.body["state"]) == (200, "COMPLETED")


def test_a_rationale_is_recorded_or_leaves_everything_as_it_was(near: World) -> None:
    with closing(Client(near.url, near.admin_key() or "")) as client:
        asked = called(near, "near", "asked", "{}").body["trace_id"]
        digest = client.ask("GET", f"/v1/traces/{asked}").body["action_request_digest"]
        path, word = f"/v1/traces/{asked}/decision", {"decision": "DENY", "action_request_digest": digest}
        before = stored(near)
        assert client.ask("POST", path, {**word, "rationale": "x" * (TEXT_CHARS_MAX + 1)}).status == 422
        assert stored(near) == before
        denied = client.ask("POST", path, {**word, "rationale": "\x01" * TEXT_CHARS_MAX})
        assert denied.body["state"] == "DENIED"
        refused = near.tga("erase", asked, "--rationale", "x" * (TEXT_CHARS_MAX + 1), "--yes")
        assert refused.returncode != 0
        erased = near.tga("erase", asked, "--rationale", "\x01" * TEXT_CHARS_MAX, "--yes")
        assert erased.returncode == 0, erased.stderr
