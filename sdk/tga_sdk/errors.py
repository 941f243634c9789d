"""Every exception of the SDK. Each says its code, what happened, and whether the same may be tried again.

What the gateway or the SDK refuses is a `TgaError`. What the journal of a run has recorded of an operation is an
`OperationError`: the program gets the same one now and in every replay. `Stop` ends a program from
outside; it is no `Exception`, so that `except Exception` in a program lets it pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class TgaError(Exception):
    """What the SDK raises. `code` is stable; `retryable` says whether the same, unchanged, may succeed later.

    Of a tool call: `key` is the idempotency key that it was made with, `trace_id` its trace where that is known, and
    `may_have_run` whether the tool may have been executed. The same call with the same key never executes it twice.
    `run_id`: the run that was being started or asked about.
    """

    code: str = "TGA_ERROR"
    retryable: bool = False
    key: str | None = None
    trace_id: str | None = None
    run_id: str | None = None
    may_have_run: bool = False

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class GatewayError(TgaError):
    """The gateway refused a request. `problem` is its answer (RFC 9457), `status` the HTTP status.

    `retryable` is what the gateway says of it; `remedy` what to do, in its words. `GatewayError.of` makes the class
    that belongs to the code, so that callers need not compare texts.
    """

    code = "GATEWAY_ERROR"
    _of_code: ClassVar[dict[str, type[GatewayError]]] = {}
    codes: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        for code in cls.codes:
            GatewayError._of_code[code] = cls

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        trace_id = self.problem.get("trace_id")
        self.trace_id = trace_id if isinstance(trace_id, str) else None
        said = self.problem.get("detail") or self.problem.get("title") or f"the gateway answered {status}"
        code = self.problem.get("code")
        super().__init__(
            str(said),
            code=code if isinstance(code, str) and code else f"HTTP_{status}",
            retryable=self.problem.get("retryable") is True,
        )

    @staticmethod
    def of(status: int, problem: Mapping[str, Any]) -> GatewayError:
        """The error of the class that stands for the problem's code, else for the status."""
        code = problem.get("code")
        kind = GatewayError._of_code.get(code) if isinstance(code, str) else None
        return (kind or GatewayError._of_code.get(f"HTTP_{status}") or GatewayError)(status, problem)

    @property
    def remedy(self) -> str | None:
        """What to do next, as the gateway says it."""
        said = self.problem.get("remedy")
        return said if isinstance(said, str) else None

    def __str__(self) -> str:
        parts = [f"{self.code}: {self.message}"]
        parts += [f"{name} {self.problem[name]}" for name in ("expected", "found") if self.problem.get(name)]
        return "; ".join(parts) + (f". {self.remedy}" if self.remedy else "")


class Unauthorized(GatewayError):
    """The API key is missing, unknown, expired or revoked. Nothing of this request was done."""

    codes = ("UNAUTHENTICATED", "HTTP_401")


class Forbidden(GatewayError):
    """The API key's roles do not admit this. Nothing of this request was done."""

    codes = ("FORBIDDEN",)


class Denied(GatewayError):
    """A policy, a person, an expiry or the caller itself said no; the tool was not executed, the run not started.

    `decision` says who and why, where the gateway tells. Asking again with the same key gives the same answer.
    """

    codes = ("CALL_DENIED", "RUN_START_DENIED")

    @property
    def decision(self) -> dict[str, Any]:
        """`{decision, decided_by, rationale, policy_ids}`, or nothing."""
        said = self.problem.get("decision")
        return said if isinstance(said, dict) else {}


class KeyReused(GatewayError):
    """The idempotency key belongs to a call with other arguments, or of another principal; or the id of a signal to one
    with another name or value. Nothing was executed for this one. Use a new key for a new call."""

    codes = ("IDEMPOTENCY_KEY_REUSED", "IDEMPOTENCY_KEY_RESERVED", "RUN_SIGNAL_ID_REUSED")


class ArgumentsInvalid(GatewayError):
    """The arguments of a call, or the input of a run, do not fit the schema. Nothing was stored; the key is free."""

    codes = ("ARGUMENTS_INVALID", "SCHEMA_VIOLATION", "INPUT_MALFORMED", "INPUT_TOO_LARGE", "RUN_VALUE_TOO_LARGE")


class ToolNotFound(GatewayError):
    """No server of the gateway has a tool of this name. Nothing was stored; the key is free."""

    codes = ("TOOL_NOT_FOUND",)


class ToolQuarantined(GatewayError):
    """The tool's definition has changed, and an operator has not accepted it yet. Nothing was stored or sent."""

    codes = ("TOOL_QUARANTINED",)


class NotFound(GatewayError):
    """There is no such trace, run, procedure, schedule or blob, or it is not for this principal to see."""

    codes = (
        "TRACE_NOT_FOUND",
        "RUN_NOT_FOUND",
        "PROCEDURE_NOT_FOUND",
        "SCHEDULE_NOT_FOUND",
        "BLOB_NOT_FOUND",
        "ROUTE_NOT_FOUND",
    )


class RunIdTaken(GatewayError):
    """A run with this id exists, with another procedure or another input. Nothing was started."""

    codes = ("RUN_ID_TAKEN",)


class RateLimited(GatewayError):
    """More was asked than the gateway admits, for as long as the client was willing to repeat it."""

    codes = ("RATE_LIMITED", "TOO_MANY_IN_FLIGHT", "HTTP_429")


class Busy(GatewayError):
    """The gateway or its store could not take the request, for as long as the client was willing to repeat it."""

    codes = (
        "GATEWAY_BUSY",
        "STORE_BUSY",
        "STORE_UNAVAILABLE",
        "STORE_OUTCOME_UNKNOWN",
        "STATE_LOCK_ACQUIRE_FAILED",
        "SHUTTING_DOWN",
        "REQUEST_TIMEOUT",
        "HTTP_502",
        "HTTP_503",
        "HTTP_504",
    )


class AnswerInvalid(GatewayError):
    """What answered is no gateway, or one that this SDK does not understand. What was asked may have happened."""

    codes = ("GATEWAY_ANSWER_INVALID",)

    @classmethod
    def found(cls, status: int, detail: str) -> AnswerInvalid:
        """`detail` says what came instead of an answer."""
        remedy = "Check TGA_URL: it names the gateway alone, as http://127.0.0.1:8420."
        return cls(status, {"code": "GATEWAY_ANSWER_INVALID", "detail": detail, "remedy": remedy})


class CallFailed(TgaError):
    """The call was made, or certainly not, and it failed for good; the key keeps this answer.

    `code` is that of the effect (`HTTP_422`, `MCP_TOOL_ERROR`, `NOT_SENT`, ...), `output` what the tool server said,
    `effect` the recorded effect. To try once more is a new call with a new key. `may_have_run` is False with NOT_SENT
    alone: then nothing was ever sent.
    """

    code = "CALL_FAILED"

    def __init__(self, code: str, message: str, *, effect: Mapping[str, Any], output: Any = None) -> None:
        super().__init__(message, code=code)
        self.effect = dict(effect)
        self.output = output
        self.may_have_run = effect.get("basis") != "not_sent"

    def __str__(self) -> str:
        return f"{self.code}: {self.message}"


class OutcomeUnknown(CallFailed):
    """The call was sent, no definite answer came, and the gateway has stopped asking: it may have been executed.

    The key keeps this answer. Find out at the tool server before a new call is made.
    """


class Unfinished(TgaError):
    """The call is on the record and not over. The same call with the same key goes on waiting where this one stopped;
    it never executes anything twice. `state` and `waiting` are the trace's."""

    code = "CALL_UNFINISHED"
    retryable = True
    may_have_run = True

    def __init__(self, message: str, *, state: str | None = None, waiting: str | None = None) -> None:
        super().__init__(message)
        self.state = state
        self.waiting = waiting


class ApprovalPending(Unfinished):
    """A person has to decide first, and has not, within `wait`. Nothing was executed so far."""

    code = "APPROVAL_PENDING"
    may_have_run = False


class CallHeld(Unfinished):
    """The outcome is unknown, and the gateway holds the call until an operator says what became of it."""

    code = "CALL_HELD"


class RunUnfinished(TgaError):
    """The run has not ended within the time given. `status` says where it stands; ask again whenever you like."""

    code = "RUN_UNFINISHED"
    retryable = True

    def __init__(self, message: str, *, run_id: str, status: str) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.status = status


class RunFailed(TgaError):
    """A run has no result: it failed, was cancelled, was parked or has diverged (`status`).

    `error` is what the journal has: `{type, message, retryable}`, or nothing. `Client.retry` has one that was not
    cancelled go on from what is recorded.
    """

    code = "RUN_FAILED"

    def __init__(self, message: str, *, run_id: str, status: str, error: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        self.run_id = run_id
        self.status = status
        self.error = dict(error or {})


class KeyUnstable(TgaError):
    """A part of an idempotency key has no stable form: the same thing could get another key tomorrow."""

    code = "KEY_UNSTABLE"


class SettingInvalid(TgaError):
    """The address of the gateway or the API key cannot be used as it is given."""

    code = "SETTING_INVALID"


class GatewayUnreachable(TgaError):
    """No gateway answered. What was asked may have happened: ask again with the same key or id."""

    code = "GATEWAY_UNREACHABLE"
    retryable = True


class ValueNotSerializable(TgaError):
    """A value that is to be recorded has no form that a replay could read back."""

    code = "RUN_VALUE_NOT_SERIALIZABLE"


class ValueInvalid(TgaError):
    """An input, output, state or answer is not of its declared type. `where` names the place: `input.items[2]`."""

    code = "RUN_VALUE_INVALID"

    def __init__(self, message: str, *, where: str) -> None:
        super().__init__(message)
        self.where = where


class TierInvalid(TgaError):
    """This tier cannot be had with this way of resuming."""

    code = "RUN_TIER_INVALID"


class NotDeterministic(TgaError):
    """A program did outside a recorded operation what a replay would do differently."""

    code = "RUN_NOT_DETERMINISTIC"


class ProcedureInvalid(TgaError):
    """A procedure, task or flow is declared in a way that cannot be run; the message says what to change."""

    code = "PROCEDURE_INVALID"


class ExtraMissing(TgaError):
    """A package that comes with an extra of the SDK is not installed on this worker. The message has the command."""

    code = "EXTRA_MISSING"
    retryable = True  # another worker may have it

    def __init__(self, *, module: str, extra: str) -> None:
        super().__init__(
            f"the package {module!r} is not installed here; it comes with the extra {extra!r}: "
            f"pip install 'tga-sdk[{extra}]'"
        )
        self.module = module
        self.extra = extra


class ModelRefused(TgaError):
    """A model is not loaded, or not used, as it is specified; the message says what to change."""

    code = "MODEL_REFUSED"


class PredictionFailed(TgaError):
    """A model's service did not answer with a prediction."""

    code = "PREDICTION_FAILED"


class PredictionTimedOut(PredictionFailed):
    """A prediction took longer than it was given. A thread that computes it is not ended by that."""

    code = "PREDICTION_TIMED_OUT"
    retryable = True


class OperationError(TgaError):
    """An operation failed, and the journal says so: the program gets the same error now and in every replay.

    `type` is what failed, in one word: of a step the name of the exception's class, of a tool the gateway's code.
    `path` is the operation's address in the run.
    """

    code = "OPERATION_FAILED"

    def __init__(self, type: str, message: str, *, retryable: bool = False, path: str = "") -> None:  # noqa: A002
        super().__init__(message, retryable=retryable)
        self.type = type
        self.path = path

    def __str__(self) -> str:
        where = f" (operation {self.path})" if self.path else ""
        return f"{self.type}: {self.message}{where}"

    def document(self) -> dict[str, Any]:
        """This error as the journal has it."""
        return {"type": self.type, "message": self.message, "retryable": self.retryable}


class StepError(OperationError):
    """The body of a step, sub-procedure, agent's turn or prediction raised. `type` is its exception's class."""

    code = "STEP_FAILED"


class ToolError(OperationError):
    """A tool call failed for certain, was denied, or could not be made. `effect` is what the gateway recorded of it."""

    code = "TOOL_FAILED"

    def __init__(
        self,
        type: str,  # noqa: A002
        message: str,
        *,
        retryable: bool = False,
        path: str = "",
        effect: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(type, message, retryable=retryable, path=path)
        self.effect = effect


class ChildError(OperationError):
    """A child run failed, or was cancelled."""

    code = "CHILD_FAILED"


class TimedOut(OperationError):
    """No answer came in time, or a body took longer than it was given."""

    code = "TIMED_OUT"


class Interrupted(OperationError):
    """A step that runs at most once had begun when its worker was lost. Whether it happened is not known."""

    code = "INTERRUPTED"


class Stop(BaseException):
    """This attempt is over: the worker has lost the run, gives it back, or leaves it until what it waits for has come.
    Nothing of the program may catch it for good, and nothing that it does afterwards is recorded."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason
