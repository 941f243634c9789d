"""Repeats that were answered from the record. They write nothing to the ledger, so this gateway counts them, and puts
the counts into the store now and then: a crash loses those of the last second."""

from __future__ import annotations

from collections import Counter
from typing import Final

from app.core.limits import REPLAYED_TOOLS_MAX

Replayed = tuple[str, str, str]  # tenant, qualified server, tool

_OTHERS: Final = "others"


class ReplayCounts:
    """Counted on the way of a call, taken by the background work; one event loop, no lock."""

    __slots__ = ("_counts",)

    def __init__(self) -> None:
        self._counts: Counter[Replayed] = Counter()

    def add(self, tenant: str, server_id: str, tool_name: str) -> None:
        key = (tenant, server_id, tool_name)
        if key not in self._counts and len(self._counts) >= REPLAYED_TOOLS_MAX:
            key = (tenant, _OTHERS, _OTHERS)
        self._counts[key] += 1

    def take(self) -> Counter[Replayed]:
        """What was counted since it was last taken. Give it back with `restore` if it could not be stored."""
        taken, self._counts = self._counts, Counter()
        return taken

    def restore(self, counts: Counter[Replayed]) -> None:
        self._counts.update(counts)
