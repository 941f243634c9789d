"""Every exception of the SDK. Each says its code, what happened, and whether the same may be tried again.

What the gateway or the SDK refuses is a `TgaError`. What the journal of a run has recorded of an operation is an
`OperationError`: the program gets the same one now and in every replay. `Stop` and `Suspended` end a program from
outside; they are no `Exception`, so that `except Exception` in a program lets them pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar


class TgaError(Exception):
    """What the SDK raises. `code` is stable; `retryable` says whether the same, unchanged, may succeed later."""

    code: str = "TGA_ERROR"
    retryable: bool = False

    def __init__(self, message: str, *, code: str | None = None, retryable: bool | None = None) -> None:
        super().__init__(message)
        self.message = message
        if code is not None:
            self.code = code
        if retryable is not None:
            self.retryable = retryable


class GatewayError(TgaError):
    """The gateway refused a request. `problem` is its answer (RFC 9457), `status` the HTTP status."""

    code = "GATEWAY_ERROR"

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        self.trace_id: str | None = self.problem.get("trace_id")
        said = self.problem.get("detail") or self.problem.get("title") or f"the gateway answered {status}"
        super().__init__(str(said), code=str(self.problem.get("code") or f"HTTP_{status}"))


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
    _of_type: ClassVar[dict[str, type[OperationError]]] = {}

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
    """Nobody answered in time, or a body took longer than it was given."""

    code = "TIMED_OUT"


class Interrupted(OperationError):
    """A step that runs at most once had begun when its worker was lost. Nobody knows whether it happened."""

    code = "INTERRUPTED"


class Stop(BaseException):
    """The run is not this worker's any more. Nothing of the program may catch it, and nothing it does is recorded."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class Suspended(BaseException):
    """The run waits for others; this worker has left it, and it is leased again when it wakes."""
