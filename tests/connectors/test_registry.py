"""The registry that a configuration makes: whose tools there are, what fits them, and the way to their servers."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config, qualify
from app.connectors.registry import Registry
from app.connectors.server_slots import Health, ServerSlots
from app.core.digest import digest_of
from app.core.errors import ArgumentsInvalid, ToolNotFound
from app.domain.tga.ports import Connectors, Tools
from tests.config.test_config import CHARGE, SERVER, STATUS, with_schema


def load(tmp_path: Path, text: str) -> Registry:
    path = tmp_path / "tga.toml"
    path.write_text(text)
    return Registry.from_config(load_config(path))


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
        approval_timeout_ms = 5000
        secret_arguments = ["/card", "/pin"]
        input_schema = { type = "object", required = ["amount"] }
        """
        + STATUS,
    )
    tool = registry.resolve("t1/pay", "charge")
    assert (tool.server_id, tool.tool_name, tool.tool_class) == ("t1/pay", "charge", "write")
    assert (tool.on_unknown_outcome, tool.reconcile_tool) == ("reconcile", "status")
    assert tool.tags == {"approval", "money"}
    assert (tool.timeout_ms, tool.max_attempts) == (1500, 7)
    assert (tool.tenant, tool.description) == ("t1", "Charges.")
    assert (tool.approval_timeout_ms, tool.secret_arguments) == (5000, ("/card", "/pin"))
    assert tool.input_schema == {"type": "object", "required": ["amount"]}


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    tool = load(tmp_path, CHARGE).resolve("pay", "charge")
    assert (tool.on_unknown_outcome, tool.reconcile_tool) == ("redispatch", None)
    assert (tool.timeout_ms, tool.max_attempts, tool.tags) == (30_000, 5, frozenset())
    assert (tool.tenant, tool.approval_timeout_ms, tool.secret_arguments) == ("default", 86_400_000, ())
    assert tool.input_schema == {"type": "object"}


def test_an_empty_file_makes_an_empty_registry(tmp_path: Path) -> None:
    registry = load(tmp_path, "")
    assert (registry.tools(), registry.servers()) == ([], [])
    with pytest.raises(ToolNotFound, match="there is none"):
        registry.resolve("pay", "charge")


def test_the_packaged_demonstration_is_sound() -> None:
    registry = Registry.from_config(load_config(Path(str(files("app.demo") / "tga.toml"))))
    names = {tool.tool_name for tool in registry.tools()}
    reads = {"balance", "charge_status", "fail"}
    assert names == reads | {"charge", "refund", "refund_soon", "pay_card", "slow_charge", "flaky"}
    assert {tool.server_id for tool in registry.tools()} == {"bank"}
    assert registry.resolve("bank", "refund").tags == {"approval"}
    assert registry.resolve("bank", "refund_soon").tags == {"approval"}
    assert registry.resolve("bank", "refund_soon").approval_timeout_ms == 3000
    assert registry.resolve("bank", "pay_card").secret_arguments == ("/card",)


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
        ({"amount": 1, "a/b~c": ["x", "y"]}, "/a~1b~0c/1", "one of x", "'y'"),
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
    async with connectors.place("pay"):
        assert registry.of("pay").health().dispatching == 1
    assert isinstance(registry.of("pay"), ServerSlots)
    assert registry.of("pay") is registry.of("pay")
    assert registry.of("pay") is not registry.of("crm")
    with pytest.raises(ToolNotFound):
        registry.of("zzz")
    await registry.close()


def test_the_definition_is_what_its_digest_is_of(tmp_path: Path) -> None:
    registry = load(tmp_path, CHARGE + 'description = "x"\n' + STATUS)
    tool = registry.resolve("pay", "charge")
    assert registry.definition(tool) == {
        "server_id": "pay",
        "tool_name": "charge",
        "tool_class": "write",
        "input_schema": {"type": "object"},
        "description": "x",
    }
    for tool in registry.tools():
        assert digest_of(registry.definition(tool)) == tool.definition_digest


# Tenants.

TENANTS = (
    CHARGE
    + (SERVER + 'tenant = "acme"\n' + CHARGE.removeprefix(SERVER)).replace("pay", "crm")
    + (SERVER + 'tenant = "other"\n' + CHARGE.removeprefix(SERVER)).replace("pay", "hidden")
)


def test_a_tenant_has_its_own_tools_and_nobody_elses(tmp_path: Path) -> None:
    registry = load(tmp_path, TENANTS)
    assert registry.resolve_for("acme", "crm", "charge") is registry.resolve("acme/crm", "charge")
    assert registry.resolve_for("default", "pay", "charge") is registry.resolve("pay", "charge")
    assert [tool.server_id for tool in registry.tools("acme")] == ["acme/crm"]
    assert [tool.server_id for tool in registry.tools("default")] == ["pay"]
    assert [tool.server_id for tool in registry.tools()] == ["pay", "acme/crm", "other/hidden"]
    assert registry.tools("nobody") == []
    assert [(server.server_id, server.name, server.tenant) for server in registry.servers("acme")] == [
        ("acme/crm", "crm", "acme")
    ]
    assert len(registry.servers()) == 3
    assert registry.servers("nobody") == []


@pytest.mark.parametrize("tenant", ["default", "acme", "nobody", "", "acme/crm", "other/x"])
@pytest.mark.parametrize("server_id", ["hidden", "other/hidden", "/hidden", "default/other/hidden", "./hidden"])
@pytest.mark.parametrize("tool_name", ["charge", "none"])
def test_what_another_tenant_has_is_answered_as_what_nobody_has(
    tmp_path: Path, tenant: str, server_id: str, tool_name: str
) -> None:
    def told(registry: Registry, server_id: str) -> str:
        with pytest.raises(ToolNotFound) as caught:
            registry.resolve_for(tenant, server_id, tool_name)
        return str(caught.value)

    without_other = TENANTS[: TENANTS.index("[servers.hidden]")]
    message = told(load(tmp_path, TENANTS), server_id)
    assert message == told(load(tmp_path, without_other), server_id)
    assert message.replace("hidden", "absent") == told(load(tmp_path, TENANTS), server_id.replace("hidden", "absent"))


def test_what_a_tenant_lacks_is_answered_with_its_own_names(tmp_path: Path) -> None:
    registry = load(tmp_path, TENANTS)
    with pytest.raises(ToolNotFound, match=r"no server 'zzz'; expected a configured server \(crm\)\."):
        registry.resolve_for("acme", "zzz", "charge")
    with pytest.raises(
        ToolNotFound, match=r"server crm has no tool 'chrage'; expected a configured tool, such as charge"
    ):
        registry.resolve_for("acme", "crm", "chrage")
    for server_id in ("acme/zzz", "acme/pay", "acme/hidden"):
        with pytest.raises(ToolNotFound) as caught:
            registry.resolve(server_id, "charge")
        assert caught.value.expected == "a configured server (crm)"


def test_two_pairs_of_tenant_and_server_never_share_an_id() -> None:
    tenants = ["default", "acme", "other"]
    servers = ["pay", "acme/pay", "default/pay", "other/pay", "/pay", "pay/", "acme/acme/pay"]
    assert len({qualify(tenant, server) for tenant in tenants for server in servers}) == len(tenants) * len(servers)
    assert (qualify("default", "pay"), qualify("acme", "pay")) == ("pay", "acme/pay")


def test_a_server_is_shown_with_its_limits_and_its_health(tmp_path: Path) -> None:
    registry = load(tmp_path, SERVER + "max_concurrency = 3\nmax_in_flight = 4\ntimeout_ms = 5\nmax_attempts = 6\n")
    (server,) = registry.servers()
    assert (server.transport, server.base_url) == ("http", "http://127.0.0.1:9001")
    assert (server.max_concurrency, server.max_in_flight, server.timeout_ms, server.max_attempts) == (3, 4, 5, 6)
    assert server.health == Health()


# Secret arguments.

SECRET = with_schema(
    '{ type = "object", required = ["amount"], additionalProperties = false, properties = { '
    'amount = { type = "integer" }, card = { type = "object", additionalProperties = false, '
    'properties = { number = { type = "string", maxLength = 4 }, list = { items = { type = "integer" } } } } }, '
    'not = { properties = { amount = { const = 13 } }, required = ["amount"] } }'
)
PAN = "4111222233334444"


@pytest.mark.parametrize(
    ("pointer", "arguments", "at"),
    [
        ("/card", {"amount": 1, "card": PAN}, "/card"),
        ("/card", {"amount": 1, "card": {"number": PAN}}, "/card"),
        ("/card", {"amount": 1, "card": {PAN: 1}}, "/card"),
        ("/card", {"amount": 1, "card": {"list": [1, PAN]}}, "/card"),
        ("/card/list/1", {"amount": 1, "card": {"list": [1, PAN]}}, "/card/list/1"),
        ("/card/number", {"amount": 1, "card": {"number": PAN}}, "/card/number"),
        ("/card/number", {"amount": 1, "card": [PAN]}, "/card"),
        ("/card", {"amount": 13, "card": {"number": PAN[:4]}}, "the top"),
        ("/card", {"card": PAN}, "the top"),
        ("/card", {"amount": 1, "card": {}, "note": PAN}, "the top"),
    ],
)
def test_a_secret_argument_that_does_not_fit_is_not_shown(
    tmp_path: Path, pointer: str, arguments: dict[str, Any], at: str
) -> None:
    registry = load(tmp_path, SECRET + f'secret_arguments = ["{pointer}"]\n')
    with pytest.raises(ArgumentsInvalid) as caught:
        registry.verify_arguments(registry.resolve("pay", "charge"), arguments)
    assert PAN[:4] not in str(caught.value)
    assert f"at {at};" in str(caught.value)
