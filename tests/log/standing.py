"""What an edge knows of a log that nobody runs."""

from __future__ import annotations

from dataclasses import dataclass

from app.core.errors import TgaError
from app.core.note import VerifierKey

KEY = VerifierKey("tga.test/log", bytes(range(32)))


@dataclass
class QuietLog:
    verifier_key: VerifierKey = KEY
    fault: TgaError | None = None
    is_stalled: bool = False
