"""docs/sdk-client.md as it is printed: every line of Python against a real gateway, and what it says is printed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tga_sdk
from tests.runs.conftest import started_world, world
from tests.sdk.conftest import gateways
from tests.sdk.gateways import Gateways

__all__ = ["gateways", "started_world", "world"]

PAGE = Path(__file__).parents[2] / "docs" / "sdk-client.md"
TEXT = PAGE.read_text("utf-8")


def test_the_page_runs_as_it_is_printed(
    gateways: Gateways,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TGA_URL", gateways.url)
    monkeypatch.setenv("TGA_API_KEY", gateways.world.keys["admin"])
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    expected = re.findall(r"^# → (.*)$", TEXT, re.MULTILINE)
    assert len(blocks) >= 6
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)  # noqa: S102
    client = names["client"]
    assert isinstance(client, tga_sdk.Client)
    client.close()
    assert capsys.readouterr().out.splitlines() == expected


def test_every_error_and_method_that_the_page_names_is_there() -> None:
    table = TEXT.split("## When it does not work")[1].split("## Calls that")[0]
    errors = [name for name in re.findall(r"`([A-Z][A-Za-z]+)`", table) if name != "TGA_URL"]
    assert len(errors) > 12
    assert all(issubclass(getattr(tga_sdk, name), tga_sdk.TgaError) for name in errors)
    methods = re.findall(r"`([a-z]+)`", TEXT.split("## Runs")[1].split("are for")[0])
    assert len(methods) == 15
    assert all(hasattr(kind, name) for kind in (tga_sdk.Client, tga_sdk.AsyncClient) for name in methods)
