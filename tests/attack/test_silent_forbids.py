"""A `forbid` that can never match is not passed over in silence: the call is denied, or somebody is told."""

from __future__ import annotations

from contextlib import closing

import pytest

from tests.attack.client import Client, Said
from tests.cli.world import World

POLICY = """
@id("all") permit(principal, action, resource);
@id("stolen-card") forbid(principal, action, resource == Tool::"bank/pay_card")
when { context.arguments.card == "4111111111111111" };
@id("not-theirs") forbid(principal, action, resource == Tool::"other/theirs/charge");
@id("mistyped") forbid(principal, action, resource == Tool::"bank/chagre");
"""


@pytest.fixture(scope="module")
def world(still_world: World) -> World:
    still_world.policy.write_text(POLICY)
    still_world.start()
    return still_world


def _told(world: World) -> str:
    checked = world.tga("policy", "check", str(world.policy))
    return world.told.read_text() + checked.stderr + world.tga("doctor").stdout


def _called(world: World, tenant: str, server: str, tool: str, **arguments: object) -> Said:
    with closing(Client(world.url, world.new_key("agent-1", "agent", tenant=tenant))) as agent:
        return agent.call(server, tool, arguments)


def test_a_forbid_on_the_value_of_a_secret_argument_is_not_silent(world: World) -> None:
    said = _called(world, "default", "bank", "pay_card", amount=1, card="4111111111111111")
    assert said.status == 403 or "stolen-card" in _told(world)


def test_a_forbid_on_another_tenants_tool_as_explain_writes_it_is_not_silent(world: World) -> None:
    said = _called(world, "other", "theirs", "charge", amount=1)
    assert said.status == 403 or "not-theirs" in _told(world)


def test_a_forbid_on_a_tool_that_does_not_exist_is_not_silent(world: World) -> None:
    assert "mistyped" in _told(world)
