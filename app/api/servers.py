"""The tenant's tool servers and tools, with pins and health."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import PinComparisonDocument, ServerPage, ToolPage
from app.api.traces import json_answer
from app.config import qualify
from app.connectors.registry import ServerInfo
from app.core import errors
from app.core.limits import SERVER_LATENCY_WINDOW_S
from app.domain.system.definition_diff import diff_definitions
from app.domain.tools import Tool
from app.edge.parameters import documented_parameters, name_in, own_name, parameters
from app.edge.permissions import may, require
from app.edge.problems import documented
from app.edge.services import Services
from app.edge.statistics import load_latency_of_servers, no_latency


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["tools"])

    @routes.get(
        "/v1/servers",
        operation_id="list_servers",
        summary="List the tenant's tool servers, with their health",
        response_model=None,
        responses={200: {"model": ServerPage}, **documented()},
    )
    async def list_of_servers(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            parameters(request)
            sees_addresses = may(principal, "read_tenant")
            tools = services.registry.tools(principal.tenant)
            lately = await load_latency_of_servers(services, principal.tenant, window_s=SERVER_LATENCY_WINDOW_S)
            items = [
                {
                    "server_id": server.name,
                    "transport": server.transport,
                    "base_url": server.base_url if sees_addresses else None,
                    "timeout_ms": server.timeout_ms,
                    "max_attempts": server.max_attempts,
                    "unreachable_for_ms": server.unreachable_for_ms,
                    "max_concurrency": server.max_concurrency,
                    "max_in_flight": server.max_in_flight,
                    "tools": [tool.tool_name for tool in tools if tool.server_id == server.server_id],
                    "status": status_of(server, sees_all=sees_addresses),
                    "health": asdict(server.health),
                    "lately": lately.get(server.server_id, no_latency(SERVER_LATENCY_WINDOW_S)),
                    "connection": _connection(server, sees_all=sees_addresses),
                }
                for server in services.registry.servers(principal.tenant)
            ]
            return json_answer({"items": items, "next": None})

    @routes.get(
        "/v1/tools",
        operation_id="list_tools",
        summary="List the tenant's tools, with what is pinned",
        response_model=None,
        responses={200: {"model": ToolPage}, **documented()},
        openapi_extra=documented_parameters("server_id"),
    )
    async def list_of_tools(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            server_id = name_in(parameters(request, "server_id"), "server_id")
            wanted = None if server_id is None else qualify(principal.tenant, server_id)
            tools = [tool for tool in services.registry.tools(principal.tenant) if wanted in (None, tool.server_id)]
            sees_all = may(principal, "read_tenant")
            return json_answer({"items": [_tool(services, tool, sees_all=sees_all) for tool in tools], "next": None})

    @routes.get(
        "/v1/tools/{server_id}/{tool_name:path}/pin",
        summary="Compare a tool's pinned definition with the present one",
        response_model=None,
        responses={
            200: {"model": PinComparisonDocument},
            **documented(errors.ToolNotFound, errors.ChecksumMismatch, errors.SequenceGap),
        },
        openapi_extra=documented_parameters(in_path=("server_id", "tool_name")),
    )
    async def compare_pin(request: Request) -> Response:
        server_id, tool_name = request.path_params["server_id"], request.path_params["tool_name"]
        async with services.admitted(request) as principal:
            require(principal, "read_tenant")
            parameters(request)
            tool = services.registry.resolve_for(principal.tenant, server_id, tool_name)
            compared = await services.pins.compare(tool)
            diff = await asyncio.to_thread(diff_definitions, compared.pinned, compared.found)
            return json_answer(
                {
                    "server_id": server_id,
                    "tool_name": tool_name,
                    **asdict(compared.state),
                    "pinned": compared.pinned,
                    "found": compared.found,
                    "diff": list(diff.lines),
                    "hidden": [asdict(hidden) for hidden in diff.hidden],
                }
            )

    return routes


def status_of(server: ServerInfo, *, sees_all: bool) -> dict[str, Any]:
    """What a server said of its failure is for those who see the whole tenant; others get the gateway's own words."""
    status, failure = server.status, server.status.failure
    last_error = None if failure is None else failure.error if sees_all else failure.reason
    remedy = failure.remedy if failure is not None and sees_all and status.state == "down" else None
    return {"state": status.state, "since": status.since, "last_error": last_error, "remedy": remedy}


def _connection(server: ServerInfo, *, sees_all: bool) -> dict[str, Any] | None:
    """What a child wrote to its stderr is the server's own: for those who see the whole tenant."""
    if server.connection is None:
        return None
    said = asdict(server.connection)
    return said if sees_all else said | {"stderr": "", "last_error": None}


def _tool(services: Services, tool: Tool, *, sees_all: bool) -> dict[str, Any]:
    """What a server says of a quarantined tool is for those who judge it: an agent's model may read what it gets."""
    pin = services.pins.state_of(tool)
    is_told = sees_all or pin.status == "pinned"
    return {
        "server_id": own_name(tool.tenant, tool.server_id),
        "tool_name": tool.tool_name,
        "tool_class": tool.tool_class,
        "description": tool.description if is_told else None,
        "tags": sorted(tool.tags),
        "input_schema": tool.input_schema if is_told else {},
        "secret_arguments": list(tool.secret_arguments),
        "on_unknown_outcome": tool.on_unknown_outcome,
        "on_unknown_outcome_chosen": tool.is_outcome_chosen,
        "reconcile_tool": tool.reconcile_tool,
        "timeout_ms": tool.timeout_ms,
        "max_attempts": tool.max_attempts,
        "approval_timeout_ms": tool.approval_timeout_ms,
        "definition_digest": tool.definition_digest,
        "pin": asdict(pin),
    }
