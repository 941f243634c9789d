"""The tree's pass of `tga verify --all`: the stored tree against signed heads, in all epochs of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Self, TypeAlias

from app.core.errors import TgaError
from app.core.note import VerifierKey, open_note
from app.domain.ledger.checks import Epoch, Report
from app.domain.log.epochs import is_lost, keys_for, origins_of, verify_former
from app.domain.log.forensics import Diagnosis, HeldHead, examine_tree
from app.domain.log.heads import fits
from app.postgres.sessions import Sessions
from app.postgres.tree import PostgresTree
from app.postgres.tree_reader import open_tree_reader

Examined: TypeAlias = tuple[Diagnosis, Sequence[Epoch], list[TgaError]]


class TreeExamination:
    """The tree's pass. While other processes walk the streams it can begin, as if nothing were wrong with any of them:
    if something is, it is done again when that is known."""

    def __init__(
        self, sessions: Sessions, report: Report, keys: Sequence[VerifierKey], held: Sequence[HeldHead]
    ) -> None:
        self._sessions = sessions
        self._report = report
        self._keys = keys
        self._held = held
        self._begun: asyncio.Task[Examined] | None = None

    def begin(self) -> None:
        self._begun = asyncio.create_task(self._examine({}))

    async def examined(self, broken: Mapping[str, int]) -> Examined:
        if self._begun is not None and not broken:
            return await self._begun
        return await self._examine(broken)

    async def _examine(self, broken: Mapping[str, int]) -> Examined:
        unlogged: list[TgaError] = []
        epochs = await _signed_epochs(self._sessions, self._report.epochs, self._keys)
        keys, held = _with_epochs(self._keys, self._held, epochs, unlogged.append)
        async with open_tree_reader(self._sessions) as leaves:
            diagnosis = await examine_tree(leaves, held, keys=keys, broken=broken, on_finding=unlogged.append)
        return diagnosis, epochs, unlogged

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._begun is not None:
            self._begun.cancel()
            with suppress(asyncio.CancelledError, TgaError):
                await self._begun


async def _signed_epochs(sessions: Sessions, epochs: Sequence[Epoch], keys: Sequence[VerifierKey]) -> Sequence[Epoch]:
    """How often the log began anew. It counts only if a trusted key has signed a head of the last epoch: whoever has
    the database could write such an entry, to explain away what they removed."""
    latest = await PostgresTree(sessions).latest_head() if epochs else None
    if latest is None or latest.head.origin != epochs[-1].origin:
        return ()
    try:
        open_note(latest.note, [*keys, *keys_for(latest.head.origin, keys)], fits)
    except TgaError:  # examine_tree says so
        return ()
    return epochs


def _with_epochs(
    keys: Sequence[VerifierKey],
    held: Sequence[HeldHead],
    epochs: Sequence[Epoch],
    note: Callable[[TgaError], None],
) -> tuple[list[VerifierKey], list[HeldHead]]:
    """The keys, for heads of earlier epochs too; and the heads that the tree can be compared with. Those over leaves
    that were lost before an epoch began are compared with what its entry says of them."""
    for kept in held:
        if is_lost(kept.signed.head, epochs):
            for error in verify_former(kept.signed.head, epochs, root=None):
                note(error)
    origins = origins_of(epochs) + [epoch.origin for epoch in epochs]
    every = dict.fromkeys((*keys, *(found for origin in origins for found in keys_for(origin, keys))))
    return list(every), [kept for kept in held if not is_lost(kept.signed.head, epochs)]
