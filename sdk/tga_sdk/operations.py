"""What all operations of a run share: an address, a look at the journal, and a record of their end."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from tga_sdk.attempt import Attempt
from tga_sdk.bodies import checkpoint_put, named, recorded_error
from tga_sdk.errors import ProcedureInvalid, Stop
from tga_sdk.frames import Frame, caller, current_frame
from tga_sdk.given import input_digest
from tga_sdk.journal import Begun, Ended, Operation
from tga_sdk.pipe import Sent
from tga_sdk.telemetry import traced

CARRIES_NOTHING: Final = frozenset({"tool", "ask", "sleep", "signal", "child"})  # no state change, no log lines


class Operations:
    """The part of `ctx` that its operations are made of. Each of them begins (`_begin`), takes the next address and
    asks the journal (`_enter`), and then either returns what is recorded (`_recorded`), is recorded (`_mark`), or waits
    for others to end it (`_wait`)."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt

    def _frame(self) -> Frame:
        frame = current_frame()
        if frame is None or frame.attempt is not self._attempt:
            raise ProcedureInvalid(
                "this ctx was used outside of its run: in a thread or task that its body did not start"
            )
        if frame.is_over:
            raise Stop("this body has ended, or took too long and was given up: what goes on of it performs nothing")
        return frame

    def _begin(self) -> tuple[Frame, Attempt]:
        self._attempt.verify_going()
        return self._frame(), self._attempt

    def _operation(self, frame: Frame, kind: str, name: str, given: Any) -> Operation:
        return Operation(kind, name, input_digest(self._attempt.salt, given, frame.around))

    async def _enter(
        self, frame: Frame, kind: str, name: str, given: Any
    ) -> tuple[Operation, str, str | None, Ended | Begun | None]:
        """The operation that comes next in this frame, its address, its line in the program, and what the journal has
        of it."""
        operation = self._operation(frame, kind, name, given)
        path = frame.scope.enter(operation)
        source = caller()
        return operation, path, source, await self._attempt.match(frame, path, operation, source)

    async def _recorded(self, frame: Frame, path: str, found: Ended, type_: Any = None) -> Any:
        """What the journal has of this operation: the program gets it, and nothing is executed."""
        if found.changes:
            frame.state.recorded(found.changes)
        if found.operation.kind not in CARRIES_NOTHING:
            frame.logs.clear()
        frame.scope.leave()
        if not frame.is_kept:
            self._attempt.journal.leave_behind(path)
        if found.failed:
            raise recorded_error(found, path)
        value = found.value
        if value is None or value["tier"] in ("event", "transient"):
            return None
        return await self._attempt.decoded(value, type_, where=f"operation {path} ({found.operation})")

    async def _mark(
        self,
        frame: Frame,
        path: str,
        operation: Operation,
        value: dict[str, Any],
        source: str | None,
        *,
        defer: bool,
    ) -> None:
        """Record an operation that has no body."""
        sent = checkpoint_put(frame, path, operation, "OK", value=value, changes=frame.state.take(), source=source)
        if defer:
            self._attempt.pipe.defer(sent)
        else:
            await self._attempt.put([sent])
        frame.scope.leave()

    async def _wait(
        self, kind: str, name: str, given: Any, more: Callable[[], dict[str, Any]], type_: Any = None
    ) -> Any:
        """An operation that others end."""
        frame, attempt = self._begin()
        operation, path, source, found = await self._enter(frame, kind, name, given)
        with traced(attempt, found, kind, name, path):
            if found is None:
                attempt.verify_own()
                with frame.scope.refusing():
                    said = more()
                put = {"type": kind, **named(operation, path, attempt.journal.try_of(path), source), **said}
                await attempt.put([Sent(put, frame.is_kept)])
            return await self._awaited(frame, path, operation, kind, source, type_)

    async def _awaited(
        self, frame: Frame, path: str, operation: Operation, kind: str, source: str | None, type_: Any
    ) -> Any:
        found = await self._attempt.match(frame, path, operation, source)
        while not isinstance(found, Ended):
            await self._attempt.waiting.blocked(path, kind)
            found = await self._attempt.match(frame, path, operation, source)
        return await self._recorded(frame, path, found, type_)


def line_text() -> str:
    """The line of the program that asked, as the end of a message about it."""
    source = caller()
    return "" if source is None else f" ({source})"
