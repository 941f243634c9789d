"""Random numbers and ids of a run: drawn from its salt and place, so that a replay draws the same without a record."""

from __future__ import annotations

import hashlib
import hmac
from uuid import UUID


class Draws:
    """The draws in one scope of a run: `scope` is its address ("" for the program itself).

    The n-th draw before the operation at `position` is HMAC-SHA256(salt, scope, position, n). So the same place of the
    program draws the same in every attempt, and an operation that comes later draws something else. Nobody without the
    run's salt can guess a draw; a worker of the run can, so it is no source of keys against workers.
    """

    __slots__ = ("_drawn", "_position", "_salt", "_scope")

    def __init__(self, salt: bytes, scope: str) -> None:
        self._salt = salt
        self._scope = scope
        self._position = -1
        self._drawn = 0

    def random(self, position: int) -> float:
        """A double from 0 up to and without 1, as random.random() draws them; `position`: of the operation to come."""
        return (int.from_bytes(self._draw(position)[:7]) >> 3) / 2**53

    def uuid(self, position: int) -> UUID:
        """An id of version 4."""
        return UUID(bytes=self._draw(position)[:16], version=4)

    def _salt_at(self, position: int) -> bytes:
        return self._salt

    def _draw(self, position: int) -> bytes:
        if position != self._position:
            self._position = position
            self._drawn = 0
        self._drawn += 1
        said = f"{self._scope}/{position}/{self._drawn}"
        return hmac.digest(self._salt_at(position), said.encode(), hashlib.sha256)


def fork_salt(salt: bytes, run_id: str) -> bytes:
    """What a fork draws from. It has its source's salt, so that it can make its draws again; its own differ."""
    return hmac.digest(salt, f"draws/{run_id}".encode(), hashlib.sha256)


class Drawers:
    """Of a fork: which run was the first to come to an address, so that what it drew there is drawn again.

    Fed with the records that the fork has from its source, in their order. What has ended is known by its place alone.
    """

    __slots__ = ("_reached", "_salt", "_salts")

    def __init__(self, salt: bytes) -> None:
        self._salt = salt
        self._reached: dict[str, dict[str, int]] = {}  # by run, the oldest first: the last position in each scope
        self._salts: dict[str, bytes] = {}

    def add_run(self, run_id: str) -> None:
        """A run whose records come now. What those before it have reached, it has replayed: they are asked first."""
        if run_id not in self._salts:
            self._salts[run_id] = fork_salt(self._salt, run_id) if self._salts else self._salt
            self._reached[run_id] = {}

    def add(self, run_id: str, path: str, *, has_ended: bool) -> None:
        reached = self._reached[run_id]
        if has_ended:
            for scope in [
                scope for scope in reached if scope.startswith(path) and scope[len(path) :][:1] in ("", ".", ":")
            ]:
                del reached[scope]
        while path:
            scope, _, position = path.rpartition(".")
            reached[scope] = max(reached.get(scope, 0), int(position))
            path = scope.rpartition(":")[0] if scope.rpartition(":")[2].isdigit() and ":" in scope else scope

    def salt_at(self, scope: str, position: int) -> bytes | None:
        """What to draw from before the operation at this place; None: no run has been there before this one."""
        for run_id, reached in self._reached.items():
            if _is_reached(reached, scope, position):
                return self._salts[run_id]
        return None


def _is_reached(reached: dict[str, int], scope: str, position: int) -> bool:
    if scope in reached:
        return position <= reached[scope]
    if not scope:
        return False
    branch, colon, number = scope.rpartition(":")
    around = branch if colon and number.isdigit() else scope
    outer, _, place = around.rpartition(".")
    return _is_reached(reached, outer, int(place))


class ForkDraws(Draws):
    """The draws in one scope of a fork."""

    __slots__ = ("_drawers",)

    def __init__(self, salt: bytes, scope: str, drawers: Drawers) -> None:
        super().__init__(salt, scope)
        self._drawers = drawers

    def _salt_at(self, position: int) -> bytes:
        return self._drawers.salt_at(self._scope, position) or self._salt
