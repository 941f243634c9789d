"""When and how time answers an operation of a run."""

from __future__ import annotations

from typing import Final

from app.core.errors import RunAnswerUnasked
from app.domain.runs.documents import RunAnswer
from app.domain.runs.frontier import Begun

# How time ends what it may answer.
_ENDED_BY_TIME: Final[dict[str, frozenset[str]]] = {
    "sleep": frozenset({"OK"}),
    "ask": frozenset({"TIMEOUT"}),
    "signal": frozenset({"TIMEOUT"}),
    "tool": frozenset({"TIMEOUT"}),
}
_BY_DEFAULT: Final = frozenset({"OK"})
_BY_OTHERS: Final = frozenset({"OK", "ERROR", "RETRY"})


def verify_by_time(begun: Begun, answer: RunAnswer) -> None:
    """Time answers when the operation's own is over and not before, and in its own way: who sleeps is woken, a question
    gets its default if it has one, all else times out. Nobody else says that time is over. That the answer is the
    very default that the intent names is compared where the intent is read (verification.py)."""
    is_by_time = answer.answered_by.type == "timer"
    if is_by_time and (begun.due_at or "9") > answer.answered_at:
        raise RunAnswerUnasked(
            f"a {begun.kind} is answered by time when its own is over",
            expected="no such answer" if begun.due_at is None else f"not before {begun.due_at}",
            found=answer.answered_at,
        )
    admitted = _BY_OTHERS
    if is_by_time:
        admitted = _BY_DEFAULT if begun.has_default else _ENDED_BY_TIME[begun.kind]
    if answer.outcome not in admitted:
        raise RunAnswerUnasked(
            f"a {begun.kind} does not end so {'by time' if is_by_time else 'before its time is over'}",
            expected=" or ".join(sorted(admitted)),
            found=answer.outcome,
        )
