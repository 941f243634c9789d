"""The branches of a gather: each a scope of its own, so that no address depends on which of them was faster."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, cast

from tga_sdk import guard
from tga_sdk.attempt import Attempt
from tga_sdk.bodies import checkpoint_put, gathered, log_failure, recorded_failure
from tga_sdk.changes import Change
from tga_sdk.endings import error_document
from tga_sdk.errors import TgaError
from tga_sdk.frames import Frame, enter
from tga_sdk.given import to_json
from tga_sdk.journal import Operation
from tga_sdk.merging import clash_of
from tga_sdk.values import Encoded, encode

Branch = Callable[[], Any] | Coroutine[Any, Any, Any]


async def gather(
    frame: Frame,
    path: str,
    operation: Operation,
    source: str | None,
    branches: Sequence[Branch],
    types: Sequence[Any],
) -> list[Any]:
    """Run all branches to their end; record their results, or the error of the first that failed, as one operation."""
    attempt = frame.attempt
    frames = [frame.branch(path, number, operation) for number in range(1, len(branches) + 1)]
    marks = [one.state.mark() for one in frames]
    running = _Running(attempt, len(branches))
    tasks = [asyncio.create_task(running.run(*pair)) for pair in zip(branches, frames, strict=True)]
    try:
        results = await asyncio.gather(*tasks, return_exceptions=True)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, Exception):
            raise result
    attempt.verify_going()
    inner = sum(one.scope.performed for one in frames)
    attempt.verify_end(path, inner)
    logs = [line for one in frames for line in one.logs]
    frame.logs.extend(logs[: max(0, 64 - len(frame.logs))])
    changed = [one.state.changes_since(mark) for one, mark in zip(frames, marks, strict=True)]
    found = _results(operation, results, types)
    if not isinstance(found, Exception):
        found = _disagreement(frame, operation, changed) or found
    if isinstance(found, Exception):
        log_failure(attempt, path, operation, found)
        said = error_document(found)
        await attempt.put([checkpoint_put(frame, path, operation, "ERROR", error=said, inner=inner, source=source)])
        _leave(frame, path)
        raise recorded_failure("gather", said, path)
    plain, made = found
    if made.blob is not None:
        await attempt.upload(made.blob)
    for changes in changed:
        frame.state.change(changes, may_be_gone=True)
    taken = frame.state.take()
    sent = checkpoint_put(frame, path, operation, "OK", value=made.value, inner=inner, changes=taken, source=source)
    await attempt.put([sent])
    _leave(frame, path)
    return gathered(plain, types, operation.name)


def _results(
    operation: Operation, results: Sequence[Any], types: Sequence[Any]
) -> tuple[list[Any], Encoded] | Exception:
    """The results as plain data and as recorded, or the first error: returned, so that what is raised has no cause."""
    failed = next((result for result in results if isinstance(result, Exception)), None)
    if failed is not None:
        return failed
    try:
        plain = [
            _plain(result, type_, f"branch {number} of {operation.name}")
            for number, (result, type_) in enumerate(zip(results, types, strict=True), 1)
        ]
        return plain, encode(plain, where=f"the results of {operation}")
    except Exception as error:
        return error


def _disagreement(frame: Frame, operation: Operation, changed: Sequence[Sequence[Change]]) -> TgaError | None:
    """Why the branches' changes of the state cannot all be made, if they cannot."""
    clash = clash_of(frame.state.document, changed)
    if clash is None:
        return None
    first, second, at = clash
    said = f"branches {first} and {second} of {operation.name} have changed {at} of the state in ways that do not agree"
    way_out = "have branches return what they found, and change the state after the gather"
    return TgaError(f"{said}: {way_out}", code="RUN_MERGE_CONFLICT")


class _Running:
    """The branches that have not ended. Each can go on by itself; the last to end hands over to who gathers."""

    def __init__(self, attempt: Attempt, branches: int) -> None:
        self._attempt = attempt
        self._left = branches
        attempt.waiting.count_branches(branches - 1 if branches else 0)

    async def run(self, branch: Branch, frame: Frame) -> Any:
        enter(frame)
        try:
            if inspect.iscoroutine(branch):
                return await branch
            if inspect.iscoroutinefunction(branch):
                return await branch()
            return await self._attempt.threads.called(cast("Callable[[], Any]", branch))
        finally:
            frame.is_over = True
            self._left -= 1
            if self._left:
                self._attempt.waiting.count_branches(-1)


def _plain(result: Any, type_: Any, where: str) -> Any:
    """A branch's result as plain data, by its type."""
    with guard.off():
        made = encode(result, tier="inline", type_=type_, where=where, inline_max=1 << 40)
    return made.value["value"] if "value" in made.value else to_json(result, where=where)


def _leave(frame: Frame, path: str) -> None:
    frame.scope.leave()
    if not frame.is_kept:
        frame.attempt.journal.leave_behind(path)
