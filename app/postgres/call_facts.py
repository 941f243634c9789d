"""The folds of the tree: facts of each trace, counts by time and tool, and digests (migration 0023); and what people
did (migration 0035)."""

from __future__ import annotations

from collections import Counter

import asyncpg

from app.core.limits import FOLD_ROWS_MAX
from app.postgres.sessions import Sessions, connect

_DROPPED_AT_ONCE = 5_000


async def fold_calls(sessions: Sessions, rows_max: int) -> int:
    """Fold the next plans of the tree; how many there were. Fewer than `rows_max`: the end, or another one folds."""
    (row,) = await sessions.commit("SELECT looked_at FROM tga.fold_calls($1)", rows_max)
    return int(row["looked_at"])


async def fold_acts(sessions: Sessions, rows_max: int) -> int:
    """Look through the next plans of the tree for what people did; otherwise as `fold_calls`."""
    (row,) = await sessions.commit("SELECT tga.fold_acts($1) AS looked_at", rows_max)
    return int(row["looked_at"])


async def fold_all(sessions: Sessions) -> None:
    for fold in (fold_calls, fold_acts):
        while await fold(sessions, FOLD_ROWS_MAX) == FOLD_ROWS_MAX:
            pass


async def drop_old_counts(sessions: Sessions) -> None:
    while True:
        (row,) = await sessions.commit("SELECT tga.drop_old_counts($1) AS gone", _DROPPED_AT_ONCE)
        if row["gone"] < _DROPPED_AT_ONCE:
            return


async def count_replays(sessions: Sessions, counts: Counter[tuple[str, str, str]]) -> None:
    tenants, servers, tools = zip(*counts, strict=True)
    await sessions.commit(
        "SELECT tga.count_replays($1, $2, $3, $4)", list(tenants), list(servers), list(tools), list(counts.values())
    )


async def rebuild_calls(sessions: Sessions, admin_url: str) -> int:
    """Forget what was folded and fold all of the tree again; how many traces there are. A gateway may run meanwhile:
    until it is done, statistics lack what is not folded yet."""
    connection: asyncpg.Connection[asyncpg.Record] = await connect(admin_url)
    try:
        await connection.execute("SELECT tga.forget_calls()")
    finally:
        await connection.close()
    await fold_all(sessions)
    (row,) = await sessions.fetch("SELECT count(*) AS traces FROM tga.call_facts")
    return int(row["traces"])
