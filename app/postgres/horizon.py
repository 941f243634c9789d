"""Who holds the log back: the oldest transaction that still runs, when entries wait behind it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final

from app.postgres.tree import Fetches

# Numbers in these views are the low 32 bits. What belongs to other roles is shown as far as ours may see it.
_BLOCKER: Final = """
SELECT a.pid, a.application_name, a.usename, a.datname, a.state, a.xact_start, p.gid, p.prepared, p.owner,
       p.database AS prepared_in
  FROM (SELECT ($1::text::xid8)::xid AS oldest) AS h
  LEFT JOIN pg_stat_activity a ON a.backend_xid = h.oldest
  LEFT JOIN pg_prepared_xacts p ON p.transaction = h.oldest
 WHERE EXISTS (SELECT FROM tga.links e
                WHERE e.xid >= $1::text::xid8 AND e.xid < pg_snapshot_xmax(pg_current_snapshot()) AND e.place = 1
                  AND NOT EXISTS (SELECT FROM tga.leaf_spans l
                                   WHERE l.stream_no = e.stream_no AND l.sequence_number = e.sequence_number))
 LIMIT 1
"""


@dataclass(frozen=True, slots=True)
class Stall:
    """Entries wait because this transaction has not ended. `pid` is None for a prepared one, which `gid` names.

    `since` is when it began, None where that is hidden from our role.
    """

    xid: str
    pid: int | None
    gid: str | None
    application: str | None
    user: str | None
    database: str | None
    state: str | None
    since: datetime | None

    def __str__(self) -> str:
        who = f"prepared transaction {self.gid!r}" if self.gid else f"backend {self.pid or 'unknown'}"
        since = f", since {self.since:%Y-%m-%d %H:%M:%S} UTC" if self.since else ""
        return (
            f"transaction {self.xid} of {who} (application {self.application or 'unnamed'!r}, user {self.user}, "
            f"database {self.database}, {self.state or 'state unknown'}{since}) has not ended"
        )


async def load_stall(source: Fetches, horizon: str) -> Stall | None:
    """Who holds the log back at this transaction number; None when no entry waits for it."""
    rows = await source.fetch(_BLOCKER, horizon)
    if not rows:
        return None
    row = rows[0]
    is_prepared = row["gid"] is not None
    return Stall(
        xid=horizon,
        pid=row["pid"],
        gid=row["gid"],
        application=row["application_name"],
        user=row["owner"] if is_prepared else row["usename"],
        database=row["prepared_in"] if is_prepared else row["datname"],
        state="prepared" if is_prepared else row["state"],
        since=row["prepared"] if is_prepared else row["xact_start"],
    )
