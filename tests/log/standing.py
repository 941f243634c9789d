"""What an edge knows of a log that nobody runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.core.errors import TgaError
from app.core.note import VerifierKey
from app.domain.log.condition import LogCondition

KEY = VerifierKey("tga.test/log", bytes(range(32)))


@dataclass
class QuietLog:
    verifier_key: VerifierKey = KEY
    fault: TgaError | None = None
    condition: LogCondition = field(default_factory=LogCondition)
