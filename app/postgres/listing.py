"""Pages of traces for people: one indexed query each."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.canonical import parse_object
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Sessions

_PAGE = """
SELECT h.stream, h.state, h.waiting, h.sequence_number, h.owner::text, h.updated_at::text, a.artifact
  FROM tga.heads h LEFT JOIN tga.artifacts a ON a.stream = h.stream AND a.sequence_number = 1
 WHERE h.stream > $1 AND h.stream < $2 AND h.sequence_number > 0 AND ($3::text IS NULL OR h.state = $3)
 ORDER BY h.stream DESC LIMIT $4
"""


@dataclass(frozen=True, slots=True)
class ListedTrace:
    trace_id: str
    state: str
    waiting: str | None
    server_id: str
    tool_name: str
    principal_id: str
    requested_at: str
    updated_at: str


async def list_traces(
    sessions: Sessions, *, state: str | None = None, before: str | None = None, limit: int = 50
) -> list[ListedTrace]:
    """Newest first; `before` is the trace id that the last page ended with."""
    upper = TRACE.stream(before) if before else f"{TRACE.name};"
    rows = await sessions.fetch(_PAGE, f"{TRACE.name}:", upper, state, limit)
    listed = []
    for row in rows:
        request = parse_object(row["artifact"], bytes_max=len(row["artifact"])) if row["artifact"] else {}
        principal = request.get("principal")
        listed.append(
            ListedTrace(
                trace_id=row["stream"].removeprefix(f"{TRACE.name}:"),
                state=row["state"],
                waiting=row["waiting"],
                server_id=str(request.get("server_id", "")),
                tool_name=str(request.get("tool_name", "")),
                principal_id=str(principal.get("principal_id", "")) if isinstance(principal, dict) else "",
                requested_at=str(request.get("requested_at", "")),
                updated_at=row["updated_at"],
            )
        )
    return listed
