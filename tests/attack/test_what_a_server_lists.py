"""Whatever one MCP server lists: the gateway starts, its other tools are there, all others' are, and it is told of."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, Final

from app.core.limits import ENCLOSED_DEPTH_MAX, MCP_DEFINITION_BYTES_MAX
from tests.attack.client import Client
from tests.cli.world import World
from tests.core.test_enclosing import nested, offered, short_keys

LISTER: Final = Path(__file__).parent / "lister.py"
# A line each, as the server writes it: not all of them is JSON that anybody else would write.
HOSTILE: Final[dict[str, str]] = {
    "depth_60": json.dumps(offered({"const": nested(60)})),
    "depth_64": json.dumps(offered({"const": nested(62)})),
    "depth_500": '{"name": "depth_500", "inputSchema": {"const": ' + "[" * 500 + "]" * 500 + "}}",
    "keys_9990": json.dumps(offered({"const": short_keys(9_984)})),
    "keys_9998": json.dumps(offered({"const": short_keys(9_994)})),
    "keys_20000": json.dumps(offered({"const": short_keys(20_000)})),
    "bytes": json.dumps(offered({"const": "x" * MCP_DEFINITION_BYTES_MAX})),
    "surrogate": '{"name": "surrogate", "inputSchema": {}, "description": "\\ud800"}',
    "nul": '{"name": "nul", "inputSchema": {}, "title": "\\u0000"}',
    "nan": '{"name": "nan", "inputSchema": {"maximum": NaN}}',
    "digits": '{"name": "digits", "inputSchema": {"maximum": ' + "7" * 3_000 + "}}",
    "float": '{"name": "float", "inputSchema": {"maximum": 1e20}}',
    "schemaless": '{"name": "schemaless"}',
    "reference": '{"name": "reference", "inputSchema": {"$ref": "https://example.org/x"}}',
    "circle": '{"name": "circle", "inputSchema": {"$ref": "#"}}',
    "id": '{"name": "id", "inputSchema": {"properties": {"a": {"$id": "https://[/"}}}}',
    "id_at_the_top": '{"name": "id_at_the_top", "inputSchema": {"$id": "https://[/"}}',
    "annotations": '{"name": "annotations", "inputSchema": {}, "annotations": 7}',
    "spaced name": '{"name": "spaced name", "inputSchema": {}}',
}
STRANGE: Final = ("7", "null", "[]", '{"name": {"a": 1}}', '{"inputSchema": {}}', "{}")
GOOD: Final[dict[str, dict[str, Any]]] = {
    "good": {"name": "good", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}},
    "deepest": {"name": "deepest", "inputSchema": {"const": nested(ENCLOSED_DEPTH_MAX - 2)}},
    "most_keys": {"name": "most_keys", "inputSchema": {"type": "object", "default": short_keys(8_990)}},
}


def lines() -> list[str]:
    named = [line.replace('"a' + "a" * 127, f'"{name}') for name, line in HOSTILE.items()]
    good = [json.dumps(tool) for tool in GOOD.values()]
    return [*named, good[0], *STRANGE, *good[1:], good[0]]


def server(name: str, listed: Path) -> str:
    command = json.dumps([sys.executable, str(LISTER), str(listed)])
    table = f'\n[servers.{name}]\ntransport = "mcp-stdio"\ncommand = {command}\ntrust_annotations = true\n'
    return table + 'protocol_version = "2025-11-25"\n'


def test_the_gateway_starts_and_only_what_does_not_hold_is_missing(still_world: World, tmp_path: Path) -> None:
    world = still_world
    hostile, honest = tmp_path / "hostile", tmp_path / "honest"
    hostile.write_text("\n".join(lines()))
    honest.write_text(json.dumps(GOOD["good"]))
    world.config.write_text(world.config.read_text() + server("hostile", hostile) + server("honest", honest))
    for _ in range(2):  # the second time, everything that was pinned is read again
        world.start()
        try:
            with closing(Client(world.url, world.admin_key() or "")) as client:
                verify_tools(client)
            told = world.tga("servers").stdout
            assert "hostile: tool 'depth_60' is left out: its description cannot be recorded: nested too deeply" in told
            logged = world.told.read_text()
            assert "server hostile: tool 'keys_9990' is left out" in logged
            assert "Traceback" not in logged
        finally:
            world.stop()


def verify_tools(client: Client) -> None:
    servers = {item["server_id"]: item for item in client.ask("GET", "/v1/servers").body["items"]}
    assert sorted(servers["hostile"]["tools"]) == sorted(GOOD)
    assert servers["honest"]["tools"] == ["good"]
    assert {"charge", "refund"} <= set(servers["bank"]["tools"])
    problems = servers["hostile"]["connection"]["problems"]
    for name in HOSTILE:
        assert any(f"tool '{name}' is left out" in problem for problem in problems), name
    assert any("3 of what it lists are no tools" in problem for problem in problems)
    assert any("'good' is listed twice" in problem for problem in problems)
    tools = client.ask("GET", "/v1/tools").body["items"]
    assert {tool["pin"]["status"] for tool in tools} == {"pinned"}
    for where in ("hostile", "honest"):
        assert client.call(where, "good", {"a": 1}).body["state"] == "COMPLETED"
    assert client.call("hostile", "deepest", nested(ENCLOSED_DEPTH_MAX - 2)).body["state"] == "COMPLETED"
    assert client.call("bank", "charge", {"amount": 1}).body["state"] == "COMPLETED"
    listed = client.ask("POST", "/mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
    assert "most_keys" in json.dumps(listed.body)
