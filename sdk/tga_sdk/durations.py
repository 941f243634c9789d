"""How long a program may wait. What the gateway could not record is refused here, before anything is recorded, so that
the program can handle it; a put that the gateway refuses ends the run."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Final

from tga_sdk.errors import ProcedureInvalid, ValueInvalid

YEAR_S: Final = 31_536_000  # 365 days: the longest a run can be told to wait for a tool
SAFE_INTEGER_MAX: Final = 2**53 - 1
LONGEST_S: Final = 1_000 * YEAR_S  # times are written with four digits of the year


def verify_seconds(said: Any, where: str, *, longest: int = LONGEST_S) -> float:
    """A number of seconds that can be waited: ProcedureInvalid where it is no number, ValueInvalid where no run can
    wait so long, or for less than no time."""
    if isinstance(said, bool) or not isinstance(said, int | float):
        raise ProcedureInvalid(f"{where}: expected a number of seconds, found {said!r}")
    if not 0 <= said <= longest:
        raise ValueInvalid(
            f"{where}: expected 0 to {longest} seconds ({longest // YEAR_S} years), found {_shown(said)}", where=where
        )
    return said


def verify_recordable(said: float, where: str) -> None:
    """ValueInvalid for a number of seconds whose milliseconds cannot stand in a journal at all."""
    if not -SAFE_INTEGER_MAX <= said * 1000 <= SAFE_INTEGER_MAX:
        verify_seconds(said, where)


def verify_order(afters: list[float], timeout: float | None, where: str) -> None:
    """ValueInvalid unless each comes later than the one before it, by a millisecond, and all before the time-out."""
    times = [round(after * 1000) for after in ([*afters] if timeout is None else [*afters, timeout])]
    if any(later <= earlier for earlier, later in pairwise(times)):
        found = ", ".join(f"{after:g}" for after in afters)
        raise ValueInvalid(
            f"{where}: expected each after the one before it, and before the timeout of "
            f"{'none' if timeout is None else f'{timeout:g}'} s, found {found} s",
            where=where,
        )


def _shown(said: float) -> str:
    """Short, also of an integer that is too large to be a float."""
    return str(said)[:40]
