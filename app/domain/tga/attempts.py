"""Attempts of a dispatch, and the effect that they end in. Pure: what was sent, and what is known about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from app.core.limits import ATTEMPTS_LISTED_MAX, BACKOFF_FIRST_MS, BACKOFF_MAX_MS, TEXT_CHARS_MAX
from app.domain.tga.documents import Attempt, EffectError, JsonOutput, Resolution, ToolCall, ToolEffect
from app.domain.tga.ports import Answered, NotSent, Output, Unknown


@dataclass(slots=True)
class Refusals:
    """Tries in a row of which certainly nothing was sent: the server takes no connections. They are waited out, with
    growing pauses, for as long as the tool's server may be unreachable, and are no attempts: nothing came of them."""

    tries: int = 0
    lasted_ms: float = 0.0  # the tries and the pauses between them
    is_hopeless: bool = False

    def note(self, refused: NotSent, *, took_ms: float) -> None:
        self.tries += 1
        self.lasted_ms += took_ms
        self.is_hopeless = refused.is_hopeless

    def next_pause_ms(self, *, within_ms: int, jitter: float) -> float:
        """How long to wait before the next try; the last one is made when the time is over."""
        delay_ms = min(BACKOFF_FIRST_MS << min(self.tries - 1, 16), BACKOFF_MAX_MS) * (0.5 + jitter / 2)
        pause_ms = max(0.0, min(delay_ms, within_ms - self.lasted_ms))
        self.lasted_ms += pause_ms
        return pause_ms

    def are_over(self, *, within_ms: int) -> bool:
        """Whether the server was unreachable for so long that the call is given up."""
        return self.tries > 0 and (self.is_hopeless or self.lasted_ms >= within_ms)


@dataclass(slots=True)
class Attempts:
    """Every send of a call, across crashes. `begin` and `end` are called by the executor, around each send.

    `may_have_been_sent` is false only while it is certain that no attempt reached the server; `may_still_run`: the
    server has not said that it ended what was sent to it. `is_fenced`: the attempt that is being made has its committed
    row already, and so far nothing of it was sent. `refusals`: its tries that were refused."""

    listed: list[Attempt] = field(default_factory=list)
    may_have_been_sent: bool = False
    may_still_run: bool = False
    is_cancelled: bool = False
    sent_by_this_process: int = 0
    retry_after_ms: int | None = None
    last_detail: str = "nothing was sent"
    resolution: Resolution | None = None
    is_fenced: bool = False
    refusals: Refusals = field(default_factory=Refusals)
    is_given_up: bool = False  # the server was unreachable for too long
    _begun_at: str = ""

    @classmethod
    def interrupted(
        cls, first_started_at: str, later_started_at: Sequence[str], resolution: Resolution | None
    ) -> Attempts:
        """The attempts that a crash left behind: they began, and how they ended is not known."""
        listed = [
            Attempt(attempt=number, started_at=started_at, ended_at=None, result="interrupted")
            for number, started_at in enumerate((first_started_at, *later_started_at), 1)
        ]
        detail = "the executor died while the call was under way"
        return cls(listed, may_have_been_sent=True, may_still_run=True, last_detail=detail, resolution=resolution)

    @property
    def count(self) -> int:
        return len(self.listed)

    def begin(self, now: str) -> None:
        """Note when the send began. If the process dies before `end`, recovery lists the attempt (`interrupted`)."""
        if self.refusals.tries == 0:
            self._begun_at = now

    def refuse(self, refused: NotSent, *, took_ms: float) -> None:
        """Certainly nothing was sent: the attempt goes on, and does not count."""
        self.refusals.note(refused, took_ms=took_ms)
        self.last_detail = refused.detail

    def give_up(self, now: str) -> None:
        """The server was unreachable for too long: the attempt ends, and is listed as refused."""
        self._list(now, "refused")
        self.is_given_up = True

    def end(self, now: str, dispatched: Answered | Unknown) -> None:
        self.sent_by_this_process += 1
        self.is_given_up = False
        self.retry_after_ms = None
        match dispatched:
            case Answered():
                result: Any = "answered"
                self.may_have_been_sent = True
            case Unknown():
                result = dispatched.result
                self.may_have_been_sent = True
                self.may_still_run |= dispatched.result != "retryable_answer" or dispatched.is_at_work
                self.is_cancelled |= dispatched.is_cancelled
                self.retry_after_ms = dispatched.retry_after_ms
                self.last_detail = dispatched.detail
        self._list(now, result)

    def _list(self, now: str, result: str) -> None:
        self.listed.append(
            Attempt.of_known(
                {"attempt": self.count + 1, "started_at": self._begun_at, "ended_at": now, "result": result}
            )
        )
        self.is_fenced, self.refusals = False, Refusals()

    def note_not_executed(self) -> None:
        """A reconciling read said that the key was not executed: as if nothing had been sent."""
        self.may_have_been_sent = False


_NOTHING_EXECUTED: Final = (
    ". Nothing of the call was sent, so certainly nothing was executed. This key keeps this answer; to have the call "
    "made after all, use a new key: that is safe."
)


def effect_of_answer(call: ToolCall, answered: Answered, attempts: Attempts, now: str) -> ToolEffect:
    error = None
    if answered.outcome == "FAILURE":
        error = EffectError(
            code=answered.error_code or "FAILURE", message=(answered.error_message or "")[:TEXT_CHARS_MAX]
        )
    return _effect(call, attempts, now, outcome=answered.outcome, basis="answer", output=answered.output, error=error)


def effect_of_reconciliation(call: ToolCall, output: Any, attempts: Attempts, now: str) -> ToolEffect:
    kept = None if output is None else JsonOutput(encoding="json", value=output)
    return _effect(call, attempts, now, outcome="SUCCESS", basis="reconciliation", output=kept, error=None)


def effect_of_exhaustion(call: ToolCall, attempts: Attempts, now: str) -> ToolEffect:
    """After the last attempt: a failure that says whether the call may have been executed."""
    message = attempts.last_detail
    if attempts.may_have_been_sent:
        basis, error_code = "unknown", "OUTCOME_UNKNOWN"
    else:
        basis, error_code = "not_sent", "NOT_SENT"
        message = f"{message[: TEXT_CHARS_MAX - len(_NOTHING_EXECUTED)]}{_NOTHING_EXECUTED}"
    error = EffectError(code=error_code, message=message[:TEXT_CHARS_MAX])
    return _effect(call, attempts, now, outcome="FAILURE", basis=basis, output=None, error=error)


def effect_of_resolution(
    call: ToolCall, resolution: Resolution, output: Output | None, attempts: Attempts, now: str
) -> ToolEffect:
    succeeded = resolution.action == "succeeded"
    error = None if succeeded else EffectError(code="RESOLVED_AS_FAILED", message=resolution.rationale)
    attempts.resolution = resolution
    outcome = "SUCCESS" if succeeded else "FAILURE"
    return _effect(call, attempts, now, outcome=outcome, basis="resolution", output=output, error=error)


def _effect(
    call: ToolCall,
    attempts: Attempts,
    now: str,
    *,
    outcome: str,
    basis: str,
    output: Output | None,
    error: EffectError | None,
) -> ToolEffect:
    return ToolEffect.of_known(
        {
            "trace_id": call.trace_id,
            "tool_call_id": call.tool_call_id,
            "tool_call_digest": call.digest(),
            "outcome": outcome,
            "basis": basis,
            "output": output,
            "error": error,
            "attempts": attempts.listed[-ATTEMPTS_LISTED_MAX:],
            "resolution": attempts.resolution,
            "recorded_at": now,
        }
    )
