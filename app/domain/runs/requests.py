"""What an operation asks of others, by its kind: a tool server, a person, time, another program, another run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Field, SerializerFunctionWrapHandler, StringConstraints, model_serializer, model_validator

from app.core.limits import RUN_ESCALATIONS_MAX, URL_CHARS_MAX
from app.domain.ledger.documents import IdempotencyKey, Name, Part, Text, Time, Uuid7, require_no_stated_null
from app.domain.runs.values import RunId, Value


class _Request(Part):
    @property
    def due_at(self) -> str | None:
        """When it ends by itself, if it does."""
        return None

    @property
    def escalates_at(self) -> tuple[str, ...]:
        """When others are told of it, as long as it is open."""
        return ()


class StepRequest(_Request):
    """A step that is performed at most once: after a crash no worker performs it again."""


class _LeavesOut(_Request):
    """A request with a field that came later: left out where there is nothing to say, never null (ADR 13)."""

    _later: ClassVar[str]

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, self._later)
        return self

    @model_serializer(mode="wrap")
    def _stated(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        stated: dict[str, Any] = serialize(self)
        if stated[self._later] is None:
            del stated[self._later]
        return stated

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        if getattr(self, self._later) is None:
            members = {name: value for name, value in members.items() if name != self._later}
        return members


class ToolRequest(_LeavesOut):
    """`retries`: how often it is tried again, under a new key, after the tool said for certain that it failed.
    `waits_until`: when the run does not wait for it any more; left out where it waits for as long as it takes."""

    _later = "waits_until"
    trace_id: Uuid7
    idempotency_key: IdempotencyKey
    retries: Annotated[int, Field(ge=0, le=1_000)]
    waits_until: Time | None = None

    @property
    def due_at(self) -> str | None:
        return self.waits_until


class Escalation(Part):
    """No person has answered by then: these webhooks are told, all if none is named, and the question stays open."""

    at: Time
    webhooks: Annotated[list[Name], Field(max_length=16)]


Escalations = Annotated[list[Escalation], Field(max_length=RUN_ESCALATIONS_MAX)]


# The webhook by which the outbox knows that a question names a URL of its own. No webhook of the configuration is
# called so: their names have no spaces.
CALLBACK: Final = "callback URL"
CallbackUrl = Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$", max_length=URL_CHARS_MAX)]


class AskRequest(_LeavesOut):
    """A question to a person. `default` is the answer when nobody gives one in time; `escalations`: who is told before
    that, one after the other; `callback`: a URL that is told of this question when it is asked, left out if none is."""

    _later = "callback"
    form: Literal["approve", "input", "select", "review"]
    message: Text
    context: Value | None
    answer_schema: dict[str, Any]
    expires_at: Time | None
    default: Value | None
    webhooks: Annotated[list[Name], Field(max_length=16)]
    escalations: Escalations
    callback: CallbackUrl | None = None

    @property
    def due_at(self) -> str | None:
        return self.expires_at

    @property
    def escalates_at(self) -> tuple[str, ...]:
        return tuple(level.at for level in self.escalations)

    def told_to(self, configured: Sequence[str], *, level: int = 0) -> list[str]:
        """Which of the configured webhooks are told of it when it is asked, or when it reaches this level: those that
        it names, or all when it names none."""
        named = self.escalations[level - 1].webhooks if level else self.webhooks
        return [name for name in configured if not named or name in named]


class SleepRequest(_Request):
    wakes_at: Time

    @property
    def due_at(self) -> str:
        return self.wakes_at


class SignalRequest(_Request):
    """The operation's name is the signal's."""

    expires_at: Time | None

    @property
    def due_at(self) -> str | None:
        return self.expires_at


class ChildRequest(_Request):
    """`child_run_id` null: the start was refused, and the answer beside the intent says why."""

    child_run_id: RunId | None
    procedure: Name
    version: Name


Request = ToolRequest | AskRequest | SleepRequest | SignalRequest | ChildRequest | StepRequest
REQUEST_OF_KIND: Final[dict[str, type[_Request]]] = {
    "step": StepRequest,
    "tool": ToolRequest,
    "ask": AskRequest,
    "sleep": SleepRequest,
    "signal": SignalRequest,
    "child": ChildRequest,
}
