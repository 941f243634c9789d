"""The bodies of operations: run, recorded, tried again."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from tga_sdk.attempt import Attempt
from tga_sdk.endings import error_document
from tga_sdk.errors import ChildError, Interrupted, OperationError, StepError, TimedOut, ToolError, ValueInvalid
from tga_sdk.frames import Frame
from tga_sdk.journal import Ended, Operation
from tga_sdk.pipe import Sent
from tga_sdk.retry import Retry
from tga_sdk.times import time_text
from tga_sdk.values import Encoded, Resume, Tier, decode, encode

LOG_LINES_MAX: Final = 64


class Body:
    """The body of one operation: run, recorded, tried again."""

    def __init__(
        self,
        attempt: Attempt,
        frame: Frame,
        path: str,
        operation: Operation,
        source: str | None,
        fn: Callable[..., Any],
        args: Sequence[Any],
        timeout: float | None,
        tier: Tier,
        resume: Resume,
        type_: Any,
    ) -> None:
        self.attempt = attempt
        self.frame = frame
        self.path = path
        self.operation = operation
        self.source = source
        self.fn = fn
        self.args = args
        self.timeout = timeout
        self.tier: Tier = tier
        self.resume: Resume = resume
        self.type = type_
        self.mark = frame.state.mark()

    async def perform(
        self, retry: Retry, *, at_most_once: bool, defer: bool, shown: bool, following: Operation | None = None
    ) -> Any:
        """`following`: the step that comes next and is shown while it runs; that it begins is recorded with this end,
        which costs no commit of its own."""
        frame, attempt = self.frame, self.attempt
        while True:
            tried = attempt.journal.try_of(self.path)
            await attempt.verify_live()
            if at_most_once or shown:
                intent = Sent({"type": "step", **named(self.operation, self.path, tried, self.source)}, frame.is_kept)
                begun = attempt.pipe.start([intent])
                if at_most_once:
                    await begun
                    await attempt.verify_live()
            inside = frame.inside(self.path, self.operation)
            inside.logs, frame.logs = frame.logs, inside.logs  # lines before it stand with what comes next
            started = time.time()
            result = await self._run(inside)
            attempt.verify_going()
            if isinstance(result, Exception):
                said = await self._fail(inside, result, tried, retry, started)
                if said is None:
                    await attempt.host.pause(retry.pause(tried))
                    continue
                raise recorded_failure(self.operation.kind, said, self.path)
            value, made = result
            if made.blob is not None:
                await attempt.upload(made.blob)
            inner = inside.scope.performed
            attempt.verify_end(self.path, inner)
            changes = frame.state.take() if self.resume == "snapshot" else ()
            sent = checkpoint_put(
                inside,
                self.path,
                self.operation,
                "OK",
                value=made.value,
                inner=inner,
                changes=changes,
                resume=self.resume,
                tried=tried,
                started=started,
                source=self.source,
                is_kept=frame.is_kept,
            )
            if defer:
                attempt.pipe.defer(sent)
            else:
                await attempt.put([sent, *self._shown(following)])
            self._leave()
            if self.tier == "event":
                return None
            if self.tier == "transient":
                return value
            where = f"the result of {self.operation}"
            return decode(made.value, self.type, None if made.blob is None else made.blob.data, where=where)

    def _shown(self, following: Operation | None) -> Sequence[Sent]:
        """The intent of the step that comes next; not of a worker that leaves: it would not run it."""
        frame, attempt = self.frame, self.attempt
        if following is None or attempt.host.is_draining:
            return ()
        scope, _, position = self.path.rpartition(".")
        path = f"{scope}.{int(position) + 1}" if scope else str(int(position) + 1)
        if attempt.journal.look(path) is not None:
            return ()
        # Which line will perform it is not known yet.
        return [Sent({"type": "step", **named(following, path, attempt.journal.try_of(path))}, frame.is_kept)]

    async def _run(self, inside: Frame) -> tuple[Any, Encoded] | Exception:
        """What the body has returned, and its recorded form; or what it raised. That is returned rather than raised, so
        that what the program gets has neither cause nor context: in a replay there is none."""
        try:
            value = await self.attempt.run_body(inside, self.fn, [own(one) for one in self.args], self.timeout)
            made = encode(value, tier=self.tier, type_=self.type, where=f"the result of {self.operation}")
            self._verify_state_unchanged()
            return value, made
        except Exception as error:
            log_failure(self.attempt, self.path, self.operation, error)
            return error

    async def recompute(self) -> Any:
        """Run it again and record nothing: what is recorded is for looking at."""
        inside = self.frame.inside(self.path, self.operation)
        result = await self._run(inside)
        self.attempt.verify_going()
        if isinstance(result, Exception):
            self._leave()
            raise recorded_failure(self.operation.kind, error_document(result), self.path)
        value, made = result
        self.attempt.verify_end(self.path, inside.scope.performed)
        self._leave()
        if self.tier in ("event", "transient"):
            return None if self.tier == "event" else value
        return decode(made.value, self.type, None if made.blob is None else made.blob.data, where=str(self.operation))

    async def interrupt(self) -> Any:
        """It had begun and may not run twice: how far it came is not known, and the program is told."""
        said = {
            "type": "INTERRUPTED",
            "message": f"{self.operation.name} had begun when its worker was lost; whether it happened is not known",
            "retryable": False,
        }
        inner = self.attempt.journal.performed_inside(self.path)
        sent = checkpoint_put(
            self.frame,
            self.path,
            self.operation,
            "INTERRUPTED",
            error=said,
            inner=inner,
            tried=self.attempt.journal.try_of(self.path),
            source=self.source,
        )
        await self.attempt.verify_live()
        await self.attempt.put([sent])
        self._leave()
        raise recorded_failure(self.operation.kind, said, self.path)

    async def _fail(
        self, inside: Frame, error: Exception, tried: int, retry: Retry, started: float
    ) -> dict[str, Any] | None:
        """Record that it failed; None when it is to be tried again."""
        await self.attempt.pipe.settle()  # of a body that ran out of time an operation may be under way
        inner = max(inside.scope.performed, self.attempt.journal.performed_inside(self.path))
        if isinstance(error, TimeoutError) and not str(error):
            error = TimeoutError(f"it took longer than {self.timeout} s")
        said = error_document(error)
        # The gateway has said that this tool call would fail again, or may have had its effect.
        is_hopeless = isinstance(error, ToolError) and not error.retryable
        is_last = is_hopeless or tried > retry.retries
        if is_last:
            self.frame.state.drop(self.mark)
        else:
            self.frame.state.rollback(self.mark)
        sent = checkpoint_put(
            inside,
            self.path,
            self.operation,
            "ERROR" if is_last else "RETRY",
            error=said,
            inner=inner,
            tried=tried,
            started=started,
            source=self.source,
            is_kept=self.frame.is_kept,
        )
        await self.attempt.put([sent])
        if not is_last:
            return None
        self._leave()
        return said

    def _verify_state_unchanged(self) -> None:
        if self.resume == "recompute" and self.frame.state.has_changed_since(self.mark):
            self.frame.state.rollback(self.mark)
            raise ValueInvalid(
                f"{self.operation.name} is computed again in every attempt, and changed the state: "
                "change it outside, from its result, or use resume='snapshot'",
                where="state",
            )

    def _leave(self) -> None:
        self.frame.state.release(self.mark)
        self.frame.scope.leave()
        if not self.frame.is_kept:
            self.attempt.journal.leave_behind(self.path)


def checkpoint_put(
    frame: Frame,
    path: str,
    operation: Operation,
    outcome: str,
    *,
    value: dict[str, Any] | None = None,
    error: dict[str, Any] | None = None,
    inner: int = 0,
    changes: Sequence[Mapping[str, Any]] = (),
    resume: Resume = "snapshot",
    tried: int = 1,
    started: float | None = None,
    source: str | None = None,
    is_kept: bool | None = None,
) -> Sent:
    """The put of an operation that has ended; the frame's log lines go with it."""
    now = time.time()
    logs, frame.logs = frame.logs, []
    put = {
        "type": "checkpoint",
        "kind": operation.kind,
        **named(operation, path, tried),
        "outcome": outcome,
        "value": value,
        "error": error,
        "resume": resume,
        "inner": inner,
        "state_change": list(changes),
        "logs": logs[:LOG_LINES_MAX],
        "started_at": time_text(now if started is None else started),
        "duration_ms": 0 if started is None else max(0, round((now - started) * 1000)),
        "source": source,
    }
    return Sent(put, frame.is_kept if is_kept is None else is_kept)


def named(operation: Operation, path: str, tried: int, source: str | None = None) -> dict[str, Any]:
    said = {"path": path, "name": operation.name, "input_digest": operation.input_digest, "try_number": tried}
    return said if source is None else {**said, "source": source}


def recorded_error(found: Ended, path: str) -> OperationError:
    """The error that the journal has, as the class that the program can catch."""
    said = dict(found.error or {"type": found.outcome, "message": f"{found.operation} ended as {found.outcome}"})
    if found.outcome == "INTERRUPTED":
        said["type"] = "INTERRUPTED"
    if found.outcome == "TIMEOUT":
        said["type"] = "TIMEOUT"
    return recorded_failure(found.operation.kind, said, path, effect=found.value)


def recorded_failure(
    kind: str, said: Mapping[str, Any], path: str, *, effect: Mapping[str, Any] | None = None
) -> OperationError:
    type_, message, retryable = said["type"], said.get("message", ""), bool(said.get("retryable"))
    if type_ in ("TIMEOUT", "TimeoutError"):
        return TimedOut(type_, message, retryable=retryable, path=path)
    if type_ == "INTERRUPTED":
        return Interrupted(type_, message, retryable=retryable, path=path)
    if kind == "tool":
        return ToolError(type_, message, retryable=retryable, path=path, effect=effect)
    if kind == "child":
        return ChildError(type_, message, retryable=retryable, path=path)
    return StepError(type_, message, retryable=retryable, path=path)


def own(value: Any) -> Any:
    """A copy for the body, of what it could change: the program must not see that, because in a replay no body runs."""
    if hasattr(type(value), "_tga_value"):
        return value  # a part of the run's state: what the body changes there is recorded
    if isinstance(value, dict | list | tuple | set | BaseModel) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type)
    ):
        return copy.deepcopy(value)
    return value


def log_failure(attempt: Attempt, path: str, operation: Operation, error: Exception | None) -> None:
    """For readers of the worker's log: the journal, and so the program, has class and message alone."""
    if not isinstance(error, OperationError):
        attempt.log.warning("run %s at %s: %s failed", attempt.run_id, path, operation, exc_info=error)


def gathered(values: Any, types: Sequence[Any], name: str) -> list[Any]:
    return [
        decode({"tier": "inline", "value": value}, type_, where=f"branch {number} of {name}")
        for number, (value, type_) in enumerate(zip(values, types, strict=True), 1)
    ]
