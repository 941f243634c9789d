"""What waits for a person, for every way in: first the calls, oldest first, then the questions that runs have asked."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from app.domain.identity import Principal
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import own_name
from app.edge.permissions import scope_of
from app.edge.runs import own_run_id
from app.edge.services import Services
from app.postgres.listing import list_approvals
from app.postgres.run_lists import list_questions

_OF_QUESTIONS: Final = "q"  # what a position among questions begins with


async def load_approvals(
    services: Services, principal: Principal, *, cursor: str | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """A page, and the cursor of the next. Questions follow when there is no call left."""
    scope, after = scope_of(principal), list_position("approvals", cursor)
    items: list[dict[str, Any]] = []
    if after is None or not after.startswith(_OF_QUESTIONS):
        calls = await list_approvals(services.sessions, scope, after=after, limit=limit)
        items = [
            {"kind": "call", **asdict(one), "server_id": own_name(principal.tenant, one.server_id)}
            for one in calls.items
        ]
        if calls.next is not None:
            return items, list_cursor("approvals", calls.next)
        after = f"{_OF_QUESTIONS}0"
    if len(items) == limit:
        return items, list_cursor("approvals", after)
    place = after.removeprefix(_OF_QUESTIONS)
    questions = await list_questions(services.sessions, scope, after=place, limit=limit - len(items))
    items += [
        {"kind": "run", **asdict(one), "run_id": own_run_id(principal.tenant, one.run_id)} for one in questions.items
    ]
    goes_on = None if questions.next is None else f"{_OF_QUESTIONS}{questions.next}"
    return items, list_cursor("approvals", goes_on)
