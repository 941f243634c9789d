"""subscriptions/listen (2026-07-28): told when the list of tools changes, and when tasks do.

Looked at now and then, because tools and tasks may be changed by another gateway. Nothing is remembered of a stream:
who loses it opens another, and looks for itself what happened meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from app.core.limits import MCP_PING_EVERY_MS, MCP_TASK_IDS_MAX, MCP_WATCH_EVERY_MS
from app.domain.tga.transitions import TRACE
from app.edge.services import Services
from app.mcp_server.calling import Asked
from app.mcp_server.envelope import SUBSCRIPTION_KEY
from app.mcp_server.tasks import Tasks
from app.mcp_server.wire import INVALID_PARAMS, RpcError, event_bytes, notification_bytes, result_bytes

_PING = b": ping\n\n"


class Listening:
    """One stream. `agreed` is what the client will be told of: what it asked for, as far as there is any."""

    def __init__(self, services: Services, tasks: Tasks, asked: Asked) -> None:
        wanted = asked.message.params.get("notifications")
        if not isinstance(wanted, dict):
            raise RpcError(INVALID_PARAMS, "params.notifications must be an object")
        task_ids = wanted.get("taskIds")
        if task_ids is not None:
            asked.client.require_tasks()
            if not isinstance(task_ids, list) or len(task_ids) > MCP_TASK_IDS_MAX:
                raise RpcError(INVALID_PARAMS, f"params.notifications.taskIds: at most {MCP_TASK_IDS_MAX} ids")
        self._services = services
        self._tasks = tasks
        self._asked = asked
        self._wants_tools = wanted.get("toolsListChanged") is True
        self._wanted_ids = [task_id for task_id in task_ids or [] if isinstance(task_id, str)]
        self._ids: list[str] = []

    async def events(self) -> AsyncIterator[bytes]:
        """Until the gateway stops."""
        self._ids = [task_id for task_id in self._wanted_ids if await self._state_of(task_id) is not None]
        agreed: dict[str, Any] = {"toolsListChanged": True} if self._wants_tools else {}
        if self._wanted_ids:
            agreed["taskIds"] = self._ids
        yield self._event("notifications/subscriptions/acknowledged", {"notifications": agreed})
        tools, sequences = await self._tools(), await self._sequences()
        quiet_ms = 0
        while not self._services.stopping.is_set():
            await asyncio.sleep(MCP_WATCH_EVERY_MS / 1000)
            quiet_ms += MCP_WATCH_EVERY_MS
            if self._wants_tools and (now := await self._tools()) != tools:
                tools, quiet_ms = now, 0
                yield self._event("notifications/tools/list_changed", {})
            if self._ids:
                found = await self._sequences()
                for task_id in [one for one in self._ids if found.get(one) != sequences.get(one)]:
                    state = await self._state_of(task_id)
                    if state is not None:
                        quiet_ms = 0
                        yield self._event("notifications/tasks", state)
                sequences = found
            if quiet_ms >= MCP_PING_EVERY_MS:
                quiet_ms = 0
                yield _PING
        request_id = self._asked.message.id
        if request_id is not None:
            ended = {"resultType": "complete", "_meta": {SUBSCRIPTION_KEY: request_id}}
            yield event_bytes(result_bytes(request_id, ended))

    async def _state_of(self, task_id: str) -> dict[str, Any] | None:
        return await self._tasks.detailed(self._asked.principal, self._asked.client, task_id)

    async def _sequences(self) -> dict[str, int]:
        streams = [TRACE.stream(task_id) for task_id in self._ids]
        found = await self._services.queries.sequence_numbers(streams) if streams else {}
        return {TRACE.identity_of(stream): sequence for stream, sequence in found.items()}

    async def _tools(self) -> frozenset[tuple[str, str]]:
        return await self._asked.catalogue.identities() if self._wants_tools else frozenset()

    def _event(self, method: str, params: dict[str, Any]) -> bytes:
        meta = {SUBSCRIPTION_KEY: self._asked.message.id}
        return event_bytes(notification_bytes(method, {**params, "_meta": meta}))
