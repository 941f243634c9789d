"""A registry with MCP servers in it, started; and what was sent to them."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.config import load_config
from app.connectors.mcp.server import Connection
from app.connectors.registry import Registry
from app.domain.tga.documents import JsonOutput
from app.domain.tga.ports import Answered, Dispatched
from tests.connectors.servers import effect_of, tool_call

SCRIPTED = Path(__file__).parent / "stdio_server.py"
TAP = Path(__file__).parent / "tap.py"


@dataclass
class Standing:
    registry: Registry
    folder: Path

    @property
    def book(self) -> Path:
        return self.folder / "book.jsonl"

    def noted(self, method: str = "tools/call") -> list[dict[str, Any]]:
        if not self.book.exists():
            return []
        lines = [json.loads(line) for line in self.book.read_text().splitlines() if line.endswith("}")]
        return [line for line in lines if line["method"] == method]

    def connection(self, name: str = "it") -> Connection:
        known = next(server.connection for server in self.registry.servers() if server.server_id == name)
        assert known is not None
        return known

    async def call(self, *steps: Any, timeout_ms: int = 5000, **how: Any) -> Dispatched:
        """One dispatch to the scripted server; whatever comes of it, an effect of it can be stored."""
        return await self.dispatch("it", "does", {"steps": list(steps)}, timeout_ms=timeout_ms, **how)

    async def dispatch(
        self, server: str, tool: str, arguments: dict[str, Any], *, timeout_ms: int = 10_000, **how: Any
    ) -> Dispatched:
        call = tool_call(server_id=server, tool_name=tool, arguments=arguments, **how)
        async with self.registry.place(server) as connector:
            result = await connector.dispatch(call, timeout_ms=timeout_ms)
        effect_of(result)
        return result


@asynccontextmanager
async def standing(folder: Path, config: str, *, environment: dict[str, str] | None = None) -> AsyncIterator[Standing]:
    path = folder / "tga.toml"
    path.write_text(config)
    given = {"PATH": os.environ["PATH"], "HOME": str(folder), **(environment or {})}
    registry = Registry.from_config(load_config(path), environment=given)
    try:
        await registry.start()
        yield Standing(registry, folder)
    finally:
        await registry.close()


def scripted(folder: Path, era: str = "legacy", more: str = "") -> str:
    command = json.dumps([sys.executable, str(SCRIPTED), str(folder / "book.jsonl"), era])
    return f'[servers.it]\ntransport = "mcp-stdio"\ncommand = {command}\n{more}\n'


def value_of(result: Dispatched) -> Any:
    assert isinstance(result, Answered), result
    assert isinstance(result.output, JsonOutput), result
    return result.output.value


def structured(result: Dispatched) -> Any:
    return value_of(result)["structuredContent"]


def descendants(pid: int) -> list[int]:
    """Of a process, by /proc; one that ends while it is looked at has none."""
    found: list[int] = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
