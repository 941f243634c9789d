"""What the running gateway tells of its policy: every warning once, and again only for another policy."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.connectors.http_client import HttpPool
from app.connectors.registry import Registry
from app.domain.tools import Tool
from app.gateway.background import BackgroundWork
from app.gateway.policy_file import PolicyFile
from tests.policy.asking import PERMIT_ALL, tool_of

SLIP = '@id("slip") forbid(principal, action, resource == Tool::"bank/chagre");\n'
ON_CARDS = (
    '@id("card") forbid(principal, action == Action::"call", resource) when { context.arguments.card == "4111" };\n'
)


class _Unrecorded:
    async def append(self, *_: Any) -> None:
        """What is put on the record is for other tests."""


def _registry(*tools: Tool) -> Registry:
    return Registry({}, tools, {}, pool=HttpPool(connections_per_server=1))


async def test_the_gateway_warns_once_of_each_rule_as_tools_come_and_go(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "tga")
    path = tmp_path / "policy.cedar"
    path.write_text(PERMIT_ALL + SLIP + ON_CARDS)
    gateway: Any = SimpleNamespace(
        services=SimpleNamespace(stopping=asyncio.Event()),
        policy=PolicyFile.open(path),
        registry=_registry(tool_of()),
        system=_Unrecorded(),
        clock=SimpleNamespace(now=lambda: "2026-01-01T00:00:00.000Z"),
    )
    own_work = BackgroundWork(gateway)

    async def told() -> list[str]:
        caplog.clear()
        await own_work.follow_policy()
        return [record.getMessage().split()[3] for record in caplog.records]

    assert await told() == ["slip"]
    assert await told() == []
    gateway.registry = _registry(tool_of(), tool_of(tool_name="pay", secret_arguments=("/card",)))
    assert await told() == ["card"]
    gateway.registry = _registry(tool_of())
    assert await told() == []
    path.write_text(PERMIT_ALL + SLIP + "// changed\n")
    assert [await told(), await told()] == [[], ["slip"]]
