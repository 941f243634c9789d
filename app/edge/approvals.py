"""What waits for a person, for every way in: calls and the questions that runs have asked, oldest first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any, NamedTuple

from app.domain.identity import Principal
from app.domain.ledger.queries import Page
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import own_name
from app.edge.permissions import scope_of
from app.edge.runs import own_run_id
from app.edge.services import Services
from app.postgres.listing import JUST_AFTER, ListedApproval, list_approvals
from app.postgres.run_lists import ListedQuestion, list_questions


class _Waiting(NamedTuple):
    """One of either list. `at_ms`: since when it waits. `position`: after which its own list goes on."""

    at_ms: int
    position: str
    item: dict[str, Any]


async def load_approvals(
    services: Services, principal: Principal, *, cursor: str | None, limit: int
) -> tuple[list[dict[str, Any]], str | None]:
    """A page, and the cursor of the next: the places in both lists. It may have fewer items than `limit`, also none,
    and go on all the same."""
    scope, tenant = scope_of(principal), principal.tenant
    of_calls, _, of_questions = (list_position("approvals", cursor) or "q").partition("q")
    calls = await list_approvals(services.sessions, scope, after=of_calls or None, limit=limit)
    questions = await list_questions(services.sessions, scope, after=of_questions or None, limit=limit)
    waiting_calls = [_call(tenant, one) for one in calls.items]
    waiting_questions = [_question(tenant, one) for one in questions.items]
    ends_ms = [_known_until(calls, waiting_calls), _known_until(questions, waiting_questions)]
    until_ms = min((end for end in ends_ms if end is not None), default=None)
    merged = sorted([*waiting_calls, *waiting_questions], key=lambda one: one.at_ms)  # stable: calls first
    shown = [one for one in merged if until_ms is None or one.at_ms <= until_ms][:limit]
    items = [one.item for one in shown]
    if len(shown) == len(merged) and calls.next is None and questions.next is None:
        return items, None
    after_calls = _place(calls, waiting_calls, len([one for one in shown if one.item["kind"] == "call"]), of_calls)
    after_questions = _place(
        questions, waiting_questions, len([one for one in shown if one.item["kind"] == "run"]), of_questions
    )
    return items, list_cursor("approvals", f"{after_calls}q{after_questions}")


def _call(tenant: str, one: ListedApproval) -> _Waiting:
    at_ms = int(one.trace_id[:8] + one.trace_id[9:13], 16)  # the time in its id, by which calls are listed
    item = {"kind": "call", **asdict(one), "server_id": own_name(tenant, one.server_id)}
    return _Waiting(at_ms, one.trace_id + JUST_AFTER, item)


def _question(tenant: str, one: ListedQuestion) -> _Waiting:
    at_ms = round(datetime.fromisoformat(one.asked_at).timestamp() * 1000)
    item = {"kind": "run", **asdict(one), "run_id": own_run_id(tenant, one.run_id)}
    del item["position"]
    return _Waiting(at_ms, one.position, item)


def _known_until(page: Page[Any], found: Sequence[_Waiting]) -> int | None:
    """Up to when all of this list is known; None: to its end. Of a page on which nothing fits, nothing is."""
    if page.next is None:
        return None
    return found[-1].at_ms if found else -1


def _place(page: Page[Any], found: Sequence[_Waiting], shown: int, before: str) -> str:
    """Where this list goes on, of which so many were shown."""
    if shown == len(found) and page.next is not None:
        return page.next
    return found[shown - 1].position if shown else before
