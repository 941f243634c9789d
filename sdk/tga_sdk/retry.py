"""How often something is tried again, and after which pause."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

from tga_sdk.errors import ProcedureInvalid


@dataclass(frozen=True, slots=True)
class Retry:
    """Try again up to `retries` times after the first failure; 0 is never.

    The pause before the first retry is `first` seconds, then twice as long each time, at most `longest`; a random part
    of it is left out, so that many runs that failed together do not come back together.
    """

    retries: int
    first: float = 1.0
    longest: float = 60.0

    def __post_init__(self) -> None:
        retries: object = self.retries
        if not isinstance(retries, int) or not 0 <= retries <= 1_000:
            raise ProcedureInvalid(f"retries: expected a whole number from 0 to 1000, found {self.retries!r}")
        for name in ("first", "longest"):
            if not isinstance(getattr(self, name), int | float):
                raise ProcedureInvalid(f"{name}: expected a number of seconds, found {getattr(self, name)!r}")
            if not math.isfinite(getattr(self, name)):
                raise ProcedureInvalid(f"{name}: expected a number of seconds, found {getattr(self, name)!r}")
        if not 0 <= self.first <= self.longest:
            raise ProcedureInvalid(f"expected 0 <= first <= longest, found first={self.first}, longest={self.longest}")

    @classmethod
    def of(cls, said: Retry | int | None) -> Retry:
        """A number stands for that many retries; None for none."""
        return said if isinstance(said, Retry) else cls(said or 0)

    def pause(self, tried: int) -> float:
        """Seconds to wait after try number `tried` has failed."""
        whole = min(self.first * 2.0 ** min(tried - 1, 30), self.longest)
        return whole * random.uniform(0.5, 1.0)  # noqa: S311

    def document(self) -> dict[str, Any]:
        """As the gateway is told."""
        return {
            "retries": self.retries,
            "first_ms": max(1, round(self.first * 1000)),
            "max_ms": max(1, round(self.longest * 1000)),
        }
