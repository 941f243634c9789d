"""Pages of signed tree heads, newest first: one query along the primary key."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from app.domain.ledger.queries import Page
from app.postgres.sessions import Sessions

_HEADS: Final = """
SELECT size, root, note, to_char(created_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"') AS signed
  FROM tga.tree_heads WHERE size < $1 ORDER BY size DESC LIMIT $2
"""
_SIZE_MAX: Final = 2**62


@dataclass(frozen=True, slots=True)
class ListedHead:
    """As it is stored. Whose signatures are on the note is for its reader to verify."""

    size: int
    root: str
    signed_at: str
    note: str


async def list_heads(sessions: Sessions, *, before: int | None, limit: int) -> Page[ListedHead]:
    rows = await sessions.fetch(_HEADS, before or _SIZE_MAX, limit + 1)
    items = [ListedHead(row["size"], row["root"].hex(), row["signed"], row["note"]) for row in rows[:limit]]
    return Page(items, str(items[-1].size) if len(rows) > limit else None)
