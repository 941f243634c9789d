"""Lists of traces, for every way in: what may be asked for, and a page of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from app.config import qualify
from app.domain.identity import Principal
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import key_in, milliseconds_in, name_in, own_name, states_in, waiting_in
from app.edge.permissions import scope_of
from app.edge.services import Services
from app.postgres.listing import ListedTrace, TraceFilters, list_traces

TRACE_FILTERS: Final = (
    *("state", "waiting", "server_id", "tool_name", "principal_id", "idempotency_key"),
    *("since", "until"),
)


def trace_filters(services: Services, principal: Principal, given: dict[str, str]) -> TraceFilters:
    """What the parameters of TRACE_FILTERS ask for; InputMalformed naming the one that is not well-formed."""
    server_id, tenant = name_in(given, "server_id"), principal.tenant
    key = key_in(given)
    tools = [] if key is None else [(tool.server_id, tool.tool_name) for tool in services.registry.tools(tenant)]
    return TraceFilters(
        states=states_in(given),
        waiting=waiting_in(given),
        server_id=None if server_id is None else qualify(tenant, server_id),
        tool_name=name_in(given, "tool_name"),
        principal_id=name_in(given, "principal_id"),
        idempotency_key=key,
        since_ms=milliseconds_in(given, "since"),
        until_ms=milliseconds_in(given, "until"),
        tools=tools,
    )


async def load_traces(
    services: Services, principal: Principal, filters: TraceFilters, *, cursor: str | None, limit: int
) -> tuple[list[ListedTrace], str | None]:
    """A page, newest first, within what the principal sees, and the cursor of the next; servers by their own names."""
    before = list_position("traces", cursor)
    page = await list_traces(services.sessions, scope_of(principal), filters, before=before, limit=limit)
    items = [replace(item, server_id=own_name(principal.tenant, item.server_id)) for item in page.items]
    return items, list_cursor("traces", page.next)
