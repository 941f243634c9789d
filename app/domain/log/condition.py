"""How a gateway keeps the log, for /readyz, metrics and operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class LogCondition:
    """`stalled`: a transaction that does not end holds entries back.
    `failing`: this gateway can sign or follow no head.
    `unlogged`: entries stand in the ledger that the sequencer never saw, and no head will ever cover them.

    None of them keeps calls from being recorded. `reason` is written for strangers: it names no path and no session.
    """

    state: Literal["ok", "stalled", "failing", "unlogged"] = "ok"
    reason: str | None = None
