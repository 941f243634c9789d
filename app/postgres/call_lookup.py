"""Looks at recorded calls by their keys. Looks that are asked for while others are under way share a statement.

A lone look goes at once, as a statement of its own: no timer, no task. With many callers a look costs a fraction of a
round trip; a second statement goes beside the first only when it is full, because it would make both groups smaller.
Nothing rests on the grouping: a group that fails is looked up one by one, so that a row that cannot be read fails only
those that ask for it.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections import deque
from typing import Final, NamedTuple

from app.core.limits import CALL_LOOKUPS_FROM_ASKED, CALL_LOOKUPS_GROUPED_MAX
from app.postgres.sessions import Record, Sessions


class _Asked(NamedTuple):
    server_id: str
    tool_name: str
    idempotency_key: str
    answer: asyncio.Future[Record | None]


class CallLookup:
    """`one` looks for server $1, tool $2 and key $3; `grouped` for arrays of them, and `place` says which, from 1."""

    def __init__(self, sessions: Sessions, *, one: str, grouped: str) -> None:
        # Set here for good.
        self._sessions: Final = sessions
        self._one: Final = one
        self._grouped: Final = grouped
        # Of this process's event loop: looks that wait, statements under way, and the tasks that ask for groups.
        self._waiting: deque[_Asked] = deque()
        self._under_way = 0
        self._tasks: set[asyncio.Task[None]] = set()

    async def find(self, server_id: str, tool_name: str, idempotency_key: str) -> Record | None:
        """The row of this key; None when no trace has it."""
        if self._under_way == 0:
            self._under_way = 1
            try:
                return await self._find_one(server_id, tool_name, idempotency_key)
            finally:
                self._under_way -= 1
                self._go_on()
        answer: asyncio.Future[Record | None] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Asked(server_id, tool_name, idempotency_key, answer))
        self._go_on()
        return await answer

    def _go_on(self) -> None:
        """Start a statement for those that wait, if there is one to spare."""
        while self._under_way < bisect_right(CALL_LOOKUPS_FROM_ASKED, len(self._waiting)):
            group: list[_Asked] = []
            while self._waiting and len(group) < CALL_LOOKUPS_GROUPED_MAX:
                asked = self._waiting.popleft()
                if not asked.answer.done():  # its caller may have given up
                    group.append(asked)
            if group:
                self._under_way += 1
                task = asyncio.get_running_loop().create_task(self._find_group(group))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _find_one(self, server_id: str, tool_name: str, idempotency_key: str) -> Record | None:
        rows = await self._sessions.fetch(self._one, server_id, tool_name, idempotency_key)
        return rows[0] if rows else None

    async def _find_group(self, group: list[_Asked]) -> None:
        try:
            try:
                found = await self._rows(group) if len(group) > 1 else None
            except Exception:  # what it is, each is told by a look of its own
                found = None
            for place, asked in enumerate(group, 1):
                if asked.answer.done():
                    continue
                if found is not None:
                    asked.answer.set_result(found.get(place))
                    continue
                try:
                    row = await self._find_one(asked.server_id, asked.tool_name, asked.idempotency_key)
                except Exception as error:
                    if not asked.answer.done():
                        asked.answer.set_exception(error)
                else:
                    if not asked.answer.done():
                        asked.answer.set_result(row)
        except BaseException as error:
            for asked in group:
                if not asked.answer.done():
                    asked.answer.set_exception(error)
            raise
        finally:
            self._under_way -= 1
            self._go_on()

    async def _rows(self, group: list[_Asked]) -> dict[int, Record]:
        servers, tools = [asked.server_id for asked in group], [asked.tool_name for asked in group]
        keys = [asked.idempotency_key for asked in group]
        rows = await self._sessions.fetch(self._grouped, servers, tools, keys)
        return {row["place"]: row for row in rows}
