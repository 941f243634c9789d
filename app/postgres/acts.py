"""What people did, the newest first: one indexed query a page, of what was folded (migration 0035)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import asyncpg

from app.core.limits import LIST_ITEMS_DEFAULT
from app.domain.ledger.queries import Page
from app.postgres.sessions import Sessions

_AFTER_ALL: Final = 2**62
_PAGE: Final = """
SELECT a.leaf_index, a.sequence_number, a.act, a.actor, a.about, a.reason, h.stream, h.subject, h.name, l.recorded_at
  FROM (SELECT a.* FROM tga.acts a WHERE a.tenant = $1 AND a.leaf_index < $2
         ORDER BY a.leaf_index DESC LIMIT $3) AS a
 CROSS JOIN LATERAL (SELECT h.stream, h.subject, h.name FROM tga.heads h
                      WHERE h.stream_no = a.stream_no OFFSET 0) AS h
 CROSS JOIN LATERAL (SELECT l.recorded_at FROM tga.links l
                      WHERE l.stream_no = a.stream_no AND l.sequence_number = a.sequence_number OFFSET 0) AS l
 ORDER BY a.leaf_index DESC
"""


@dataclass(frozen=True, slots=True)
class ListedAct:
    """`stream`, `subject` and `name`: of the stream on whose record it stands. `about`: what of it."""

    leaf_index: int
    sequence_number: int
    act: str
    actor: str
    about: str | None
    reason: str | None
    stream: str
    subject: str | None
    name: str | None
    recorded_at: str


async def list_acts(
    sessions: Sessions, tenant: str, *, before: str | None = None, limit: int = LIST_ITEMS_DEFAULT
) -> Page[ListedAct]:
    """By their place in the log; `before` is the `next` of the page before."""
    rows = await sessions.fetch_page(_PAGE, tenant, _AFTER_ALL if before is None else int(before), limit + 1)
    items = [_listed(row) for row in rows[:limit]]
    return Page(items, str(items[-1].leaf_index) if len(rows) > limit else None)


def _listed(row: asyncpg.Record) -> ListedAct:
    return ListedAct(**dict(row))
