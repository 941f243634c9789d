"""Runs are erased when they have ended: the walk of `tga verify` reads them in pages, with all that they rest on."""

from __future__ import annotations

from typing import Final

from app.core.errors import RunErased, RunNotFound, RunUnfinished
from app.domain.ledger.erasing import ErasableKind
from app.domain.runs.replay import RUN_DOCUMENTS

ERASABLE_RUNS: Final = ErasableKind(
    RUN_DOCUMENTS,
    None,
    not_found=RunNotFound,
    erased=RunErased,
    unfinished=RunUnfinished,
)
