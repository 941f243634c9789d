"""Procedures that another one calls: inline, in the frame of the call, or as a child, a run of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tga_sdk.bodies import named
from tga_sdk.defaults import makes_defaults
from tga_sdk.given import to_json
from tga_sdk.journal import Ended
from tga_sdk.procedures import Procedure, procedure_of
from tga_sdk.telemetry import traced
from tga_sdk.values import decode

if TYPE_CHECKING:
    from tga_sdk.context import Context


async def run_inline(ctx: Context[Any], called: Procedure[Any, Any], given: Any) -> Any:
    """The body of a procedure that another one calls: in the frame of the call."""
    from tga_sdk import guard
    from tga_sdk.sync_context import SyncContext

    arguments: tuple[Any, ...] = ()
    if called.takes_input:
        where = f"the input of {called.name}"
        arguments = (decode({"tier": "inline", "value": given}, called.input_type, where=where),)
    attempt, frame = ctx._attempt, ctx._frame()
    callers = frame.state
    if called.state_type is not None:
        frame.state = callers.called(called.state_type, frame.scope.address)
        if makes_defaults(called.state_type):
            await ctx.checkpoint(name="state", defer=True)
    watched = frozenset({getattr(called.fn, "__module__", "")})
    try:
        with guard.watch(watched, strict=attempt.is_strict, warn=attempt._warn):
            if called.is_async:
                return await called.fn(ctx, *arguments)
            return await attempt.threads.run(lambda: called.fn(SyncContext(ctx), *arguments))
    finally:
        if frame.state is not callers:
            callers.leave(frame.state)


async def run_child(
    ctx: Context[Any], procedure: Any, given: Any, run_id: str | None, version: str | None, name: str | None
) -> Any:
    """A procedure as a run of its own, which any worker may execute; its output."""
    called = None if isinstance(procedure, str) else procedure_of(procedure)
    frame, attempt = ctx._begin()
    procedure_name = procedure if called is None else called.name
    plain = to_json(given, where=f"the input of {procedure_name}")
    operation, path, source, found = await ctx._enter(frame, "child", name or procedure_name, plain)
    with traced(attempt, found, "child", name or procedure_name, path):
        if not isinstance(found, Ended):
            attempt.verify_own()
            then: dict[str, Any] = {
                "type": "child",
                **named(operation, path, attempt.journal.try_of(path), source),
                "procedure": procedure_name,
                "input": await attempt.encoded(plain, where=f"the input of {procedure_name}"),
            }
            version = version if version is not None else (called.version if called else None)
            for field, value in (("run_id", run_id), ("version", version)):
                if value is not None:
                    then[field] = value
            await attempt.put((), then)
        output_type = None if called is None else called.output_type
        return await ctx._awaited(frame, path, operation, "child", source, output_type)
