"""The configuration file: every mistake is named; what is not built is refused. The registry that it makes."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from app.connectors.http import HttpConnector
from app.connectors.registry import Registry, load_config
from app.core.errors import ArgumentsInvalid, SettingInvalid, ToolNotFound
from app.core.limits import CONFIG_BYTES_MAX, INPUT_SCHEMA_BYTES_MAX
from app.domain.tga.ports import Connectors, Tools

SERVER = '[servers.pay]\ntransport = "http"\nbase_url = "http://127.0.0.1:9001"\n'
CHARGE = SERVER + '[servers.pay.tools.charge]\nclass = "write"\n'
STATUS = '[servers.pay.tools.status]\nclass = "read"\n'


def load(tmp_path: Path, text: str) -> Registry:
    path = tmp_path / "tga.toml"
    path.write_text(text)
    return Registry.from_config(load_config(path))


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(SettingInvalid) as caught:
        load(tmp_path, text)
    assert str(tmp_path / "tga.toml") in str(caught.value)
    return str(caught.value)


def with_schema(schema: str) -> str:
    return CHARGE + f"input_schema = {schema}\n"


# Reading.


def test_every_field_arrives_at_its_tool(tmp_path: Path) -> None:
    registry = load(
        tmp_path,
        SERVER
        + """
        timeout_ms = 1500
        max_attempts = 7
        tenant = "t1"
        [servers.pay.tools.charge]
        class = "write"
        on_unknown_outcome = "reconcile"
        reconcile_tool = "status"
        tags = ["approval", "money"]
        description = "Charges."
        input_schema = { type = "object", required = ["amount"] }
        """
        + STATUS,
    )
    tool = registry.resolve("pay", "charge")
    assert (tool.server_id, tool.tool_name, tool.tool_class) == ("pay", "charge", "write")
    assert (tool.on_unknown_outcome, tool.reconcile_tool) == ("reconcile", "status")
    assert tool.tags == {"approval", "money"}
    assert (tool.timeout_ms, tool.max_attempts) == (1500, 7)
    assert tool.input_schema == {"type": "object", "required": ["amount"]}


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    tool = load(tmp_path, CHARGE).resolve("pay", "charge")
    assert (tool.on_unknown_outcome, tool.reconcile_tool) == ("redispatch", None)
    assert (tool.timeout_ms, tool.max_attempts, tool.tags) == (30_000, 5, frozenset())
    assert tool.input_schema == {"type": "object"}


def test_an_empty_file_configures_nothing(tmp_path: Path) -> None:
    registry = load(tmp_path, "")
    assert registry.tools() == []
    with pytest.raises(ToolNotFound, match="there is none"):
        registry.resolve("pay", "charge")


def test_the_packaged_demonstration_is_sound() -> None:
    registry = Registry.from_config(load_config(Path(str(files("app.demo") / "tga.toml"))))
    names = {tool.tool_name for tool in registry.tools()}
    assert names == {"charge", "refund", "balance", "charge_status", "slow_charge", "fail", "flaky"}
    assert {tool.server_id for tool in registry.tools()} == {"bank"}
    assert registry.resolve("bank", "refund").tags == {"approval"}


@pytest.mark.parametrize(
    ("text", "field", "expected"),
    [
        (SERVER + "colour = 1\n", "servers.pay.colour", "a field that exists"),
        ("[server.pay]\n", "server", "a field that exists"),
        ("servers = 3\n", "servers", "dictionary"),
        ('[servers.pay]\ntransport = "http"\n', "servers.pay.base_url", "the field"),
        ('[servers.pay]\nbase_url = "http://h"\n', "servers.pay.transport", "the field"),
        ('[servers.pay]\ntransport = "ftp"\nbase_url = "http://h"\n', "servers.pay.transport", "'http'"),
        (SERVER + "timeout_ms = 0\n", "servers.pay.timeout_ms", "greater than or equal to 1"),
        (SERVER + "timeout_ms = 600001\n", "servers.pay.timeout_ms", "less than or equal to 600000"),
        (SERVER + 'timeout_ms = "5"\n', "servers.pay.timeout_ms", "integer"),
        (SERVER + "timeout_ms = 5.0\n", "servers.pay.timeout_ms", "integer"),
        (SERVER + "timeout_ms = true\n", "servers.pay.timeout_ms", "integer"),
        (SERVER + "max_attempts = 0\n", "servers.pay.max_attempts", "greater than or equal to 1"),
        (SERVER + "max_attempts = 101\n", "servers.pay.max_attempts", "less than or equal to 100"),
        (SERVER + 'tenant = ""\n', "servers.pay.tenant", "at least 1 character"),
        (SERVER + "[servers.pay.tools.charge]\n", "servers.pay.tools.charge.class", "the field"),
        (
            SERVER + '[servers.pay.tools.charge]\nclass = "wirte"\n',
            "servers.pay.tools.charge.class",
            "'read' or 'write'",
        ),
        (SERVER + '[servers.pay.tools."a b"]\nclass = "read"\n', "servers.pay.tools.a b", "pattern"),
        (SERVER + '[servers.pay.tools.".."]\nclass = "read"\n', "servers.pay.tools...", "segment of a URL"),
        (SERVER.replace("servers.pay", 'servers.""'), "servers.", "at least 1 character"),
        (CHARGE + 'on_unknown_outcome = "retry"\n', "charge.on_unknown_outcome", "'redispatch', 'reconcile' or 'hold'"),
        (CHARGE + 'tags = "approval"\n', "charge.tags", "list"),
        (CHARGE + "input_schema = true\n", "charge.input_schema", "dictionary"),
    ],
)
def test_a_wrong_field_is_named_with_what_was_expected(tmp_path: Path, text: str, field: str, expected: str) -> None:
    message = refused(tmp_path, text)
    assert field in message
    assert expected in message


@pytest.mark.parametrize(
    "base_url",
    [
        "",
        "127.0.0.1:9001",
        "ftp://h",
        "http://",
        "http:///x",
        "http://h:99999",
        "http://user:hunter2@h",
        "http://h/?q=1",
        "http://h?",
        "http://h#f",
        "http://h/a b",
        "file:///x",
        "unix://x",
    ],
)
def test_a_base_url_that_cannot_be_one_is_refused_without_showing_it(tmp_path: Path, base_url: str) -> None:
    message = refused(tmp_path, f'[servers.pay]\ntransport = "http"\nbase_url = "{base_url}"\n')
    assert "servers.pay.base_url" in message
    assert "hunter2" not in message


@pytest.mark.parametrize("base_url", ["http://h", "https://h/", "http://[::1]:80/a/b", "http://example.org:8421/x/"])
def test_a_base_url_may_have_a_port_and_a_path(tmp_path: Path, base_url: str) -> None:
    loaded = load(tmp_path, f'[servers.pay]\ntransport = "http"\nbase_url = "{base_url}"\n')
    assert isinstance(loaded.of("pay"), HttpConnector)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ('[servers.f]\ntransport = "mcp-stdio"\ncommand = ["node"]\n', "servers.f.transport"),
        ('[servers.g]\ntransport = "mcp-http"\nurl = "http://h/mcp"\n', "servers.g.transport"),
        ('[policy]\nfile = "policy.cedar"\n', "[policy]"),
        ('[webhooks.approvals]\nurl = "http://h"\n', "[webhooks]"),
        (CHARGE + 'secret_arguments = ["/card"]\n', "servers.pay.tools.charge.secret_arguments"),
        (CHARGE + "secret_arguments = []\n", "servers.pay.tools.charge.secret_arguments"),
    ],
)
def test_what_is_not_built_yet_is_refused_not_ignored(tmp_path: Path, text: str, field: str) -> None:
    message = refused(tmp_path, text)
    assert f"{field} is not in this version yet" in message


@pytest.mark.parametrize(
    "text",
    [
        CHARGE + 'on_unknown_outcome = "reconcile"\n' + STATUS,
        CHARGE + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "other"\n' + STATUS,
        CHARGE + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "charge"\n' + STATUS,
        CHARGE + 'reconcile_tool = "status"\n' + STATUS,
        CHARGE
        + 'on_unknown_outcome = "reconcile"\nreconcile_tool = "status"\n'
        + (SERVER + STATUS).replace("servers.pay", "servers.other"),
    ],
    ids=["none-named", "unknown", "write-class", "without-reconcile", "of-another-server"],
)
def test_reconcile_needs_a_read_tool_of_the_same_server(tmp_path: Path, text: str) -> None:
    assert "servers.pay.tools.charge.reconcile_tool" in refused(tmp_path, text)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ('{ type = "objet" }', "at /type"),
        ('{ properties = { a = { pattern = "(" } } }', "at /properties/a/pattern"),
        ('{ "$ref" = "https://example.org/s" }', "a local reference"),
        ('{ properties = { a = { "$dynamicRef" = "other.json" } } }', "a local reference"),
        ('{ "$ref" = "#/$defs/none" }', "a part of this schema"),
        ('{ "$ref" = "#none" }', "a part of this schema"),
        ('{ properties = { a = { "$id" = "x" } } }', "$id at the top only"),
        ('{ "$schema" = "http://json-schema.org/draft-07/schema#" }', "2020-12"),
        ('{ "$ref" = "#" }', "in a circle"),
        ("{ minimum = nan }", "a number"),
        ("{ const = 2026-01-01 }", "date"),
        ("{ const = 9007199254740993 }", "an integer of that size"),
        (f'{{ description = "{"x" * INPUT_SCHEMA_BYTES_MAX}" }}', "at most"),
    ],
)
def test_a_schema_that_cannot_be_used_is_refused(tmp_path: Path, schema: str, expected: str) -> None:
    message = refused(tmp_path, with_schema(schema))
    assert "servers.pay.tools.charge.input_schema" in message
    assert expected in message
    assert len(message) < 1000


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingInvalid, match=r"none\.toml.*No such file"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(SettingInvalid, match="cannot be read"):
        load_config(tmp_path)


@pytest.mark.parametrize("raw", [b"[servers", b"\xff", b"a = 1\na = 2\n", b"a = " + b"[" * 5000])
def test_a_file_that_is_not_toml_is_named(tmp_path: Path, raw: bytes) -> None:
    path = tmp_path / "tga.toml"
    path.write_bytes(raw)
    with pytest.raises(SettingInvalid, match=r"tga\.toml is not TOML"):
        load_config(path)


def test_a_file_that_is_too_large_is_refused(tmp_path: Path) -> None:
    assert "too large" in refused(tmp_path, "#" * (CONFIG_BYTES_MAX + 1))


# The registry.


def test_a_tool_that_does_not_exist_is_answered_with_what_does(tmp_path: Path) -> None:
    registry = load(tmp_path, CHARGE + STATUS)
    with pytest.raises(ToolNotFound, match="such as charge"):
        registry.resolve("pay", "chrage")
    with pytest.raises(ToolNotFound, match=r"a configured tool \(charge, status\)"):
        registry.resolve("pay", "zzz")
    with pytest.raises(ToolNotFound, match=r"no server 'zzz'.*a configured server \(pay\)"):
        registry.resolve("zzz", "charge")
    with pytest.raises(ToolNotFound) as caught:
        registry.resolve("pay", "x" * 100_000)
    assert len(str(caught.value)) < 400


SCHEMA = (
    '{ type = "object", required = ["amount"], additionalProperties = false, '
    '"$defs" = { item = { enum = ["x"] } }, properties = { '
    'amount = { type = "integer", minimum = 0 }, note = { type = "string", maxLength = 3 }, '
    '"a/b~c" = { type = "array", items = { "$ref" = "#/$defs/item" } } } }'
)


@pytest.mark.parametrize(
    ("arguments", "pointer", "expected", "found"),
    [
        ({}, "the top", "the field 'amount'", "nothing"),
        ({"amount": "5"}, "/amount", "type: 'integer'", "'5'"),
        ({"amount": -1}, "/amount", "minimum: 0", "-1"),
        ({"amount": 1, "colour": 2}, "the top", "only the fields of the schema (a/b~c, amount, note)", "colour"),
        ({"amount": 1, "a/b~c": ["x", "y"]}, "/a~1b~0c/1", "enum: ['x']", "'y'"),
        ({"amount": 1, "note": "n" * 5000}, "/note", "maxLength: 3", "a str of 5002 characters"),
    ],
)
def test_arguments_that_do_not_fit_are_named_by_path(
    tmp_path: Path, arguments: dict[str, Any], pointer: str, expected: str, found: str
) -> None:
    registry = load(tmp_path, with_schema(SCHEMA))
    with pytest.raises(ArgumentsInvalid) as caught:
        registry.verify_arguments(registry.resolve("pay", "charge"), arguments)
    assert f"at {pointer};" in str(caught.value)
    assert (caught.value.expected, caught.value.found) == (expected, found)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("arguments", [{"amount": 0}, {"amount": 5, "note": "abc", "a/b~c": ["x", "x"]}])
def test_arguments_that_fit_pass(tmp_path: Path, arguments: dict[str, Any]) -> None:
    registry = load(tmp_path, with_schema(SCHEMA))
    registry.verify_arguments(registry.resolve("pay", "charge"), arguments)


def test_a_wrong_key_of_any_length_is_not_echoed_whole(tmp_path: Path) -> None:
    registry = load(tmp_path, with_schema(SCHEMA))
    tool = registry.resolve("pay", "charge")
    extra = {"amount": 1, **{f"{n}{'k' * 5000}": n for n in range(20)}}
    with pytest.raises(ArgumentsInvalid) as caught:
        registry.verify_arguments(tool, extra)
    assert len(str(caught.value)) < 800
    assert "and 10 more" in str(caught.value)


def test_the_definition_digest_depends_on_what_the_tool_is_and_on_nothing_else(tmp_path: Path) -> None:
    def digest(text: str) -> str:
        return load(tmp_path, text).resolve("pay", "charge").definition_digest

    one = digest(with_schema('{ type = "object", required = ["a"] }'))
    assert one == digest(with_schema('{ required = ["a"], type = "object" }'))
    assert one == digest(with_schema('{ type = "object", required = ["a"] }').replace("9001", "9002"))
    others = [
        digest(with_schema('{ type = "object", required = ["b"] }')),
        digest(with_schema('{ type = "object", required = ["a"] }') + 'description = "x"\n'),
        digest(with_schema('{ type = "object", required = ["a"] }').replace('"write"', '"read"')),
    ]
    assert len({one, *others}) == 4


async def test_each_server_has_its_connector_and_closing_closes_all(tmp_path: Path) -> None:
    registry = load(tmp_path, CHARGE + SERVER.replace("pay", "crm"))
    tools: Tools = registry
    connectors: Connectors = registry
    assert tools.resolve("pay", "charge").tool_class == "write"
    assert isinstance(connectors.of("pay"), HttpConnector)
    assert connectors.of("pay") is connectors.of("pay")
    assert connectors.of("pay") is not connectors.of("crm")
    with pytest.raises(ToolNotFound):
        connectors.of("zzz")
    await registry.close()
