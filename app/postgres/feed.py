"""Every entry of every stream in the order of the ledger, for its followers."""

from __future__ import annotations

from typing import Final

from app.core.errors import StoreUnfit
from app.core.limits import FEED_ROWS_LOOKED_AT_MAX, PAGE_BYTES_MAX
from app.domain.ledger.queries import FeedItem, FeedPage, FeedPosition, ShownEntry, Visibility
from app.postgres.sessions import Sessions

# Only what is final: a transaction below the snapshot's xmin is over, so nothing can still appear before or between
# what is shown. Scalar subqueries, because a join might be planned as a scan of all heads. The row that was looked at
# last comes along whether it may be seen or not: the next page starts after it.
_PAGE: Final = f"""
WITH looked_at AS MATERIALIZED (
    SELECT f.xid, f.stream_no, l.sequence_number, l.entry_digest,
           coalesce((SELECT h.tenant = $3 AND ($4::text IS NULL OR h.principal_id = $4)
                       FROM tga.heads h WHERE h.stream_no = f.stream_no), false) AS is_seen
      FROM tga.links f
     CROSS JOIN LATERAL (SELECT l.sequence_number, l.entry_digest FROM tga.links l
                          WHERE l.stream_no = f.stream_no AND l.sequence_number >= f.sequence_number
                            AND l.sequence_number < f.sequence_number + f.places) AS l
     WHERE f.place = 1 AND f.xid >= $1::text::xid8 AND f.xid < pg_snapshot_xmin(pg_current_snapshot())
     ORDER BY f.xid, f.stream_no, l.sequence_number OFFSET $2 LIMIT {FEED_ROWS_LOOKED_AT_MAX}
), with_artifacts AS (
    SELECT l.*, row_number() OVER (PARTITION BY l.xid ORDER BY l.stream_no, l.sequence_number)
                + CASE WHEN l.xid = $1::text::xid8 THEN $2 ELSE 0 END AS taken, r.stream, r.entry, r.artifact
      FROM looked_at l
      LEFT JOIN LATERAL (SELECT r.stream, r.entry, r.artifact FROM tga.records r
                          WHERE l.is_seen AND r.stream_no = l.stream_no
                            AND r.sequence_number = l.sequence_number OFFSET 0) AS r ON true
), measured AS (
    SELECT w.*, coalesce(octet_length(w.entry) + coalesce(octet_length(w.artifact), 0), 0) AS size FROM with_artifacts w
), counted AS (
    SELECT m.*, count(*) FILTER (WHERE m.is_seen) OVER follows AS number,
           sum(m.size) FILTER (WHERE m.is_seen) OVER follows - m.size AS bytes_before,
           lead(1) OVER follows IS NULL AS is_last
      FROM measured m WINDOW follows AS (ORDER BY m.xid, m.stream_no, m.sequence_number)
), chosen AS (
    SELECT c.*, c.is_seen AND c.number <= $5 AND (c.bytes_before < $6 OR c.number = 1) AS is_item FROM counted c
)
SELECT f.is_foreign, c.xid::text AS xid, c.taken, c.number, c.is_item, c.stream, c.sequence_number,
       CASE WHEN c.is_item THEN c.entry END AS entry, c.entry_digest,
       CASE WHEN c.is_item THEN c.artifact END AS artifact
  FROM (SELECT EXISTS (SELECT FROM tga.links e
                        WHERE e.place = 1 AND e.xid >= pg_snapshot_xmax(pg_current_snapshot()))) AS f(is_foreign)
  LEFT JOIN chosen c ON c.is_item OR c.is_last
 ORDER BY c.xid, c.stream_no, c.sequence_number
"""  # noqa: S608 - only our own numbers
_LATEST: Final = """
SELECT e.xid::text AS xid FROM tga.links e
 WHERE e.place = 1 AND e.xid < pg_snapshot_xmin(pg_current_snapshot()) ORDER BY e.xid DESC LIMIT 1
"""


class PostgresFeed:
    """The Feed port."""

    __slots__ = ("_sessions",)

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def page(
        self, scope: Visibility, *, after: FeedPosition, limit: int, bytes_max: int = PAGE_BYTES_MAX
    ) -> FeedPage:
        """What follows `after` in the order (transaction, stream's number, sequence number), as far as the scope sees.

        Without gap or repeat, whatever is written meanwhile: an entry is shown when every transaction up to its own is
        over, so one that stays open anywhere in the PostgreSQL cluster holds the feed back. Scopes of one principal see
        its streams alone; a tenant's see its system stream too. Positions hold for the life of one cluster: where
        a dump was restored, transaction numbers start anew, and it says StoreUnfit rather than leave something out.
        """
        rows = await self._sessions.fetch(
            _PAGE,
            str(after.xid),
            after.taken,
            scope.tenant,
            scope.principal_id,
            limit,
            bytes_max,
        )
        if rows[0]["is_foreign"]:
            raise StoreUnfit(
                "entries were restored from another PostgreSQL cluster, whose transaction numbers are ahead",
                remedy="Read traces one by one (`/v1/traces/{trace_id}/entries`), or restore a physical backup.",
            )
        if rows[0]["xid"] is None:
            return FeedPage([], after)
        items = [
            FeedItem(
                ShownEntry(
                    row["stream"], row["sequence_number"], row["entry_digest"].hex(), row["entry"], row["artifact"]
                ),
                FeedPosition(int(row["xid"]), row["taken"]),
            )
            for row in rows
            if row["is_item"]
        ]
        last = rows[-1]
        if items and last["number"] > len(items):  # cut: what was left out comes next
            return FeedPage(items, items[-1].position)
        return FeedPage(items, FeedPosition(int(last["xid"]), last["taken"]))

    async def latest(self) -> int:
        rows = await self._sessions.fetch(_LATEST)
        return int(rows[0]["xid"]) if rows else 0
