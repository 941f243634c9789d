"""Gateways that execute Lua, as processes on one database, and who submits programs to them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx2

from app.postgres.api_keys import PostgresAccess
from app.postgres.sessions import Sessions
from tests.crash.world import PATIENCE_S
from tests.runs.world import RunsWorld

LUA_POLICY = """
@id("submit") permit(principal, action == Action::"submit", resource)
unless { resource.tags.contains("forbidden") };
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "PARKED", "DIVERGED")


def config(world: RunsWorld, lua: str = "", **runs: int) -> Path:
    """With a policy that lets programs be submitted, and these lines in [lua]."""
    path = world.config(**{"lease_ms": 60_000, **runs})
    policy = world.place / "policy.cedar"
    policy.write_text(policy.read_text() + LUA_POLICY)
    path.write_text(path.read_text() + f"\n[lua]\nchildren = 1\n{lua}\n")
    return path


class Person:
    """Asks a gateway with one key."""

    def __init__(self, url: str, key: str) -> None:
        self.url = url
        self._key = key

    async def ask(self, method: str, path: str, body: Any = None, **parameters: str) -> tuple[int, Any]:
        async with httpx2.AsyncClient(timeout=PATIENCE_S) as client:
            headers = {"Authorization": f"Bearer {self._key}"}
            answer = await client.request(
                method, f"{self.url}{path}", json=body, params=parameters or None, headers=headers
            )
            return answer.status_code, answer.json() if answer.content else None

    async def submit(self, name: str, source: str, **more: Any) -> tuple[int, Any]:
        said = {"name": name, "language": "lua", "source": source, **more}
        return await self.ask("POST", "/v1/procedures", said)

    async def submitted(self, name: str, source: str, **more: Any) -> dict[str, Any]:
        status, document = await self.submit(name, source, **more)
        assert status == 200, document
        return dict(document)

    async def start(self, name: str, given: Any = None, **more: Any) -> str:
        status, run = await self.ask("POST", "/v1/runs", {"procedure": name, "input": given, **more})
        assert status == 200, run
        return str(run["run_id"])

    async def rested(self, run_id: str, *statuses: str) -> dict[str, Any]:
        """The run, once it has ended or has one of these statuses."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status, run = await self.ask("GET", f"/v1/runs/{run_id}")
                assert status == 200, run
                if run["state"] in ENDED or run["status"] in statuses:
                    return dict(run)
                await asyncio.sleep(0.02)


async def key_of(world: RunsWorld, name: str, *roles: Any, tenant: str = "default") -> str:
    async with (
        await Sessions.open(world.database.gateway_url, sessions_max=1) as sessions,
        await PostgresAccess.open(sessions, world.database.gateway_url) as access,
    ):
        await access.create_tenant(tenant)
        made = await access.create_key(
            name=name, principal_id=name, roles=list(roles), created_by="test", tenant=tenant
        )
        return made.text
