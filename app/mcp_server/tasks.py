"""Calls as tasks: a task is a trace, its id the trace's. So it is durable before its handle is told, survives every
restart, and any gateway on the database answers for it.

Two protocols: the extension io.modelcontextprotocol/tasks of 2026-07-28, and the experimental tasks of 2025-11-25.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from typing import Any, Final

from app.core.errors import (
    AlreadyDecided,
    ApprovalExpired,
    CallInFlight,
    ConcurrentExecution,
    InputMalformed,
    ShuttingDown,
    ToolNotFound,
    TraceNotFound,
)
from app.core.limits import CALL_WAIT_MS, FOLLOW_POLL_MAX_MS, FOLLOW_POLL_MS, MCP_POLL_INTERVAL_MS
from app.domain.identity import Principal
from app.domain.ledger.queries import Visibility
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import answer_of, request_of
from app.domain.tga.ports import StoredTrace
from app.domain.tga.transitions import TRACE
from app.domain.tools import Tool
from app.edge.cursors import list_cursor, list_position
from app.edge.handover import HandedOver
from app.edge.permissions import require
from app.edge.services import Services
from app.mcp_server.envelope import RELATED_TASK_KEY, Client
from app.mcp_server.results import finished, result_of
from app.mcp_server.wire import INVALID_PARAMS, RpcError
from app.postgres.listing import list_traces, load_head

_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
_PAGE: Final = 20
_MESSAGES: Final = {
    "supervisor": "waits for a person to decide",
    "operator": "its outcome is unknown; waits for an operator to look",
}


async def created_task(services: Services, trace_id: TraceId, client: Client) -> dict[str, Any]:
    """The handle of a call that is on the record."""
    stored = await services.traces.load_trace(trace_id)
    task = _task(stored, client)
    if client.is_modern:
        # A seed: its result, if it has come meanwhile, is asked for like that of any other.
        return {**{name: task[name] for name in task if name not in ("result", "error")}, "resultType": "task"}
    return {"task": task}


class Tasks:
    """Each principal sees its own calls as tasks, and no others."""

    def __init__(self, services: Services) -> None:
        self._services = services

    async def get(self, principal: Principal, client: Client, task_id: Any) -> dict[str, Any]:
        stored = await self._own(principal, task_id)
        task = _task(stored, client)
        if not client.is_modern:
            return task
        return {**task, **self._payload(stored, client), "resultType": "complete"}

    async def update(self, principal: Principal, task_id: Any) -> dict[str, Any]:
        """Acknowledged and ignored: no task here asks its client for anything."""
        await self._own(principal, task_id)
        return {"resultType": "complete"}

    async def cancel(self, principal: Principal, client: Client, task_id: Any) -> dict[str, Any]:
        """A request that waits is withdrawn. A call that was sent goes on, and its server is told, where it can be."""
        require(principal, "withdraw")
        stored = await self._own(principal, task_id)
        trace_id = TraceId(stored.state.trace_id)
        if not client.is_modern and stored.state.state in TRACE.terminal_states:
            raise RpcError(INVALID_PARAMS, "the task is over; it cannot be cancelled")
        is_told = False
        if stored.waiting == "supervisor":
            # If a person was faster, what became of it is what the task says.
            with contextlib.suppress(AlreadyDecided, ApprovalExpired, ConcurrentExecution):
                await self._services.runtime.withdraw(
                    trace_id, principal, rationale="cancelled by its caller over MCP", wait_ms=CALL_WAIT_MS
                )
        elif stored.state.state not in TRACE.terminal_states:
            is_told = self._services.registry.cancel(trace_id)
        now = _task(await self._services.traces.load_trace(trace_id), client)
        if now["status"] == "working":
            told = "its server was told" if is_told else "its server cannot be told"
            now["statusMessage"] = f"the call was sent and goes on; {told} that nobody wants it any more"
        if not client.is_modern:
            return now
        return {"resultType": "complete", "_meta": {"tga/task": now}}

    async def result(self, principal: Principal, client: Client, task_id: Any, *, wait_ms: int) -> dict[str, Any]:
        """2025-11-25: wait for the result. CallInFlight when that takes too long."""
        stored = await self._own(principal, task_id)
        trace_id = TraceId(stored.state.trace_id)
        try:
            await self._services.handover.wait(self._over(trace_id, wait_ms))
        except HandedOver:
            raise ShuttingDown("the gateway is stopping") from None
        stored = await self._services.traces.load_trace(trace_id)
        if stored.state.state not in TRACE.terminal_states:
            raise CallInFlight(
                "the task is not over", remedy="Ask for its result again.", stream=TRACE.stream(trace_id)
            )
        result = self._result(stored, client)
        meta = result.get("_meta")
        return {**result, "_meta": {**(meta or {}), RELATED_TASK_KEY: {"taskId": trace_id}}}

    async def list_page(self, principal: Principal, client: Client, cursor: Any) -> dict[str, Any]:
        """2025-11-25: the principal's own calls, newest first."""
        if cursor is not None and not isinstance(cursor, str):
            raise InputMalformed("the cursor is not one of this list", remedy="Begin again without a cursor.")
        page = await list_traces(
            self._services.sessions, _own_scope(principal), before=list_position("traces", cursor), limit=_PAGE
        )
        tasks = [_task(await self._services.traces.load_trace(TraceId(item.trace_id)), client) for item in page.items]
        made: dict[str, Any] = {"tasks": tasks}
        if page.next is not None:
            made["nextCursor"] = list_cursor("traces", page.next)
        return made

    async def detailed(self, principal: Principal, client: Client, task_id: str) -> dict[str, Any] | None:
        """As `get`, without what belongs to an answer; None for what is no task of the principal."""
        try:
            stored = await self._own(principal, task_id)
        except RpcError:
            return None
        return {**_task(stored, client), **self._payload(stored, client)}

    async def _own(self, principal: Principal, task_id: Any) -> StoredTrace:
        require(principal, "read")
        is_id = isinstance(task_id, str) and _ID.fullmatch(task_id) is not None
        if is_id and await self._services.queries.is_visible(TRACE.stream(task_id), _own_scope(principal)):
            try:
                return await self._services.traces.load_trace(TraceId(task_id))
            except TraceNotFound:
                pass
        raise RpcError(INVALID_PARAMS, "no such task", data={"code": TraceNotFound.code})

    async def _over(self, trace_id: TraceId, wait_ms: int) -> None:
        loop, pause_ms = asyncio.get_running_loop(), FOLLOW_POLL_MS
        deadline = loop.time() + wait_ms / 1000
        while loop.time() < deadline:
            head = await load_head(self._services.sessions, trace_id)
            if head is not None and head.state in TRACE.terminal_states:
                return
            await asyncio.sleep(pause_ms / 1000)
            pause_ms = min(pause_ms * 2, FOLLOW_POLL_MAX_MS)

    def _payload(self, stored: StoredTrace, client: Client) -> dict[str, Any]:
        if _status(stored, client) in ("working", "cancelled"):
            return {}
        try:
            return {"result": self._result(stored, client)}
        except RpcError as error:
            failed: dict[str, Any] = {"code": error.code, "message": error.message}
            return {"status": "failed", "statusMessage": error.message, "error": {**failed, "data": error.data}}

    def _result(self, stored: StoredTrace, client: Client) -> dict[str, Any]:
        request = request_of(stored)
        if _status(stored, client) == "cancelled":
            raise RpcError(-32000, "the task was cancelled", data={"trace_id": request.trace_id}, status=200)
        tool: Tool | None = None
        with contextlib.suppress(ToolNotFound):  # its recorded answer is enough
            tool = self._services.registry.resolve(request.server_id, request.tool_name)
        result = result_of(answer_of(stored, replayed=False), tool, client, request.idempotency_key)
        return finished(result, client, trace_id=request.trace_id, key=request.idempotency_key)


def _own_scope(principal: Principal) -> Visibility:
    return Visibility(principal.tenant, principal.principal_id)


def _status(stored: StoredTrace, client: Client) -> str:
    """The newer protocol calls a call `completed` that ended with an error of its tool; the older one `failed`."""
    state = stored.state.state
    if state == "DENIED":
        decision = answer_of(stored).decision
        if decision is not None and decision.decided_by.type == "withdrawal":
            return "cancelled"
    if state not in TRACE.terminal_states:
        return "working"
    return "completed" if client.is_modern or state == "COMPLETED" else "failed"


def _task(stored: StoredTrace, client: Client) -> dict[str, Any]:
    state, request = stored.state, request_of(stored)
    task: dict[str, Any] = {
        "taskId": state.trace_id,
        "status": _status(stored, client),
        "createdAt": request.requested_at,
        "lastUpdatedAt": state.updated_at,
    }
    if client.is_modern:
        task |= {"ttlMs": None, "pollIntervalMs": MCP_POLL_INTERVAL_MS}
    else:
        task |= {"ttl": None, "pollInterval": MCP_POLL_INTERVAL_MS}
    message = _MESSAGES.get(stored.waiting or "")
    if message is None and state.state not in TRACE.terminal_states:
        message = "the call is being executed"
    if message is not None:
        task["statusMessage"] = message
    return task
