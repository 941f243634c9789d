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

    def _draw(self, position: int) -> bytes:
        if position != self._position:
            self._position = position
            self._drawn = 0
        self._drawn += 1
        said = f"{self._scope}/{position}/{self._drawn}"
        return hmac.digest(self._salt, said.encode(), hashlib.sha256)
