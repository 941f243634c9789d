"""How many runs one run may lead to: levels of children, and how many of them are open at the same time.

Both bounds are about programs that start themselves. Each of their runs stays within its own limits; all of them
together would not.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from typing import Final, NamedTuple

from app.core.errors import RunErased, RunNotFound, RunTooDeep, RunTooManyChildren
from app.core.limits import RUN_CHILD_LEVELS_MAX, RUN_OPEN_BELOW_MAX, RUNS_CACHED_MAX
from app.domain.runs.engine.ports import LoadedRun, RunPorts
from app.domain.runs.engine.table import RunTable
from app.domain.runs.ids import elapsed_ms
from app.domain.runs.transitions import RUN

_SHARE: Final = 4  # of the room that is left, a gateway fills one part before it counts again: others fill it, too
_FULL_BELIEVED_MS: Final = 1_000


class _Room(NamedTuple):
    """`left`: how many children are started before the store is asked again. `full_at`: when it had none."""

    left: int
    full_at: str | None = None


class Descent:
    """Guarantees that the runs below one run end at a depth, and that about so many of them are open at most: gateways
    that start children at the same moment may exceed the second bound by what each had left."""

    def __init__(self, ports: RunPorts, table: RunTable) -> None:
        # Set here for good.
        self._ports = ports
        self._table = table
        # By the topmost open run, the longest unused first: `_take_place` writes it.
        self._rooms: OrderedDict[str, _Room] = OrderedDict()

    async def verify_child(self, parent: LoadedRun) -> None:
        """RunTooDeep, RunTooManyChildren: a child of this run is not started."""
        top, levels, above = parent.run_id, 1, parent.start.parent
        is_below_open = True
        with contextlib.suppress(RunNotFound, RunErased):  # of a run that was erased nothing more is known
            while above is not None:
                levels += 1
                if levels > RUN_CHILD_LEVELS_MAX:
                    raise RunTooDeep(
                        "a child below so many runs is not started", expected=f"at most {RUN_CHILD_LEVELS_MAX} levels"
                    )
                loaded = await self._table.peek(above.run_id)
                # A run that has ended keeps only children that were started to outlive it: each is a top of its own.
                is_below_open = is_below_open and loaded.run.head.state not in RUN.terminal_states
                if is_below_open:
                    top = above.run_id
                above = loaded.start.parent
        await self._take_place(top)

    async def _take_place(self, top: str) -> None:
        room, now = self._rooms.pop(top, _Room(0)), self._ports.clock.now()
        is_full = room.full_at is not None and 0 <= elapsed_ms(room.full_at, now) < _FULL_BELIEVED_MS
        if room.left < 1 and not is_full:
            free = RUN_OPEN_BELOW_MAX - await self._ports.runs.count_open_below(top, at_most=RUN_OPEN_BELOW_MAX)
            room = _Room(max(1, free // _SHARE)) if free > 0 else _Room(0, now)
        self._rooms[top] = room._replace(left=max(0, room.left - 1))
        while len(self._rooms) > RUNS_CACHED_MAX:
            self._rooms.popitem(last=False)
        if room.left < 1:
            raise RunTooManyChildren(
                f"so many runs below {top} are open that no more is started",
                expected=f"fewer than {RUN_OPEN_BELOW_MAX}",
            )
