"""Tools as Python functions, and the book of what they did: one key has one effect."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import hashlib
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import TypeAdapter
from pydantic.errors import (
    PydanticInvalidForJsonSchema,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
)

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.schema import misfit

ToolFunction = Callable[..., Any]
FINAL: Final = ("COMPLETED", "FAILED", "DENIED")

_current: contextvars.ContextVar[Call] = contextvars.ContextVar("tga_tool_call")


class ToolFailed(Exception):
    """Raised by a tool: it failed. Unless `unknown`, it failed for certain, and may be tried again under a new key.

    `unknown=True`: it is not known whether it happened (a connection that broke); it is never tried under another key.
    `output`: what it said all the same, as JSON.
    """

    def __init__(
        self,
        message: str = "the tool failed",
        *,
        code: str = "MCP_TOOL_ERROR",
        unknown: bool = False,
        output: Any = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.unknown = unknown
        self.output = output


@dataclass(frozen=True)
class Tool:
    """A tool of the in-memory gateway. `needs_approval`: a person decides on each call before it is made.
    `read_only`: it may be called without a key, outside of runs. `denied`: why the policy refuses a call; a text, or a
    function of the call that returns one, or None to allow it. `input_schema`: arguments that do not fit are refused;
    without one `GET /v1/tools` shows what the function's signature says, and nothing is refused."""

    function: ToolFunction
    needs_approval: bool = False
    read_only: bool = False
    denied: str | Callable[[Call], str | None] | None = None
    input_schema: Mapping[str, Any] | None = None

    def why_denied(self, call: Call) -> str | None:
        """Why the policy refuses this call; None when it does not."""
        return self.denied(call) if callable(self.denied) else self.denied

    def item(self, name: str) -> dict[str, Any]:
        """As `GET /v1/tools` lists it."""
        server, _, tool = name.partition(".")
        return {
            "server_id": server,
            "tool_name": tool,
            "tool_class": "read" if self.read_only else "write",
            "description": inspect.getdoc(self.function),
            "tags": [],
            "input_schema": dict(self.input_schema) if self.input_schema is not None else _schema_of(self.function),
            "secret_arguments": [],
            "on_unknown_outcome": "hold",
            "on_unknown_outcome_chosen": False,
            "reconcile_tool": None,
            "pin": {"status": "pinned"},
        }


def needs_approval(function: ToolFunction) -> Tool:
    """A tool whose calls wait for a person: `tools={"bank.refund": needs_approval(refund)}`."""
    return Tool(function, needs_approval=True)


def denied(why: str) -> Tool:
    """A tool whose calls the policy refuses: `tools={"bank.wire": denied("no wires before Monday")}`."""

    def never(**_: Any) -> None:
        raise AssertionError("a call that the policy refuses was made")

    return Tool(never, denied=why)


def _schema_of(function: ToolFunction) -> dict[str, Any]:
    """What its signature says of its arguments; any object, when that says nothing."""
    try:
        return TypeAdapter[Any](function).json_schema()  # type: ignore[arg-type]
    except (PydanticSchemaGenerationError, PydanticInvalidForJsonSchema, PydanticUndefinedAnnotation):
        return {"type": "object"}


@dataclass(frozen=True)
class Effect:
    """What one key did. `error`: why it failed; None when it succeeded."""

    key: str | None
    tool: str
    arguments: dict[str, Any]
    result: Any
    error: str | None
    run_id: str | None
    path: str | None

    def __str__(self) -> str:
        said = f"failed with {self.error}" if self.error else f"returned {self.result!r}"
        return f"{self.tool}({self.arguments!r}) {said} under {self.key}"


@dataclass
class Call:
    """One tool call: a trace, as far as callers see of it. `key` is what the tool server would be given."""

    trace_id: str
    server_id: str
    tool_name: str
    arguments: dict[str, Any]
    key: str | None
    principal_id: str
    intent: str | None
    requested_at: str
    run_id: str | None = None
    path: str | None = None
    state: Literal["PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "DENIED"] = "AUTHORIZED"
    waiting: str | None = None
    effect: dict[str, Any] | None = None
    decision: dict[str, Any] | None = None

    @property
    def is_final(self) -> bool:
        """Whether the call is over, however it ended."""
        return self.state in FINAL

    @property
    def tool_call_id(self) -> str:
        """The id that the tool server would see: the same for every attempt of this call."""
        made = hashlib.sha256(f"call\0{self.trace_id}".encode()).hexdigest()
        return f"{made[:8]}-{made[8:12]}-7{made[13:16]}-8{made[17:20]}-{made[20:32]}"

    @property
    def digest(self) -> str:
        """What a decision is bound to."""
        said = [self.trace_id, self.server_id, self.tool_name, self.arguments, self.key, self.requested_at]
        return hashlib.sha256(canonical(said)).hexdigest()

    def is_same_call(self, server_id: str, tool_name: str, arguments: Mapping[str, Any]) -> bool:
        """Whether a repeat with its key asks for the same; else the key is reused for something else."""
        mine = [self.server_id, self.tool_name, self.arguments]
        return canonical(mine) == canonical([server_id, tool_name, arguments])


def current_call() -> Call:
    """Inside a tool: the call that is being made, with its key, run and path."""
    return _current.get()


class Tools:
    """The tools of a gateway, and their book."""

    def __init__(self, tools: Mapping[str, ToolFunction | Tool]) -> None:
        self.tools = {name: tool if isinstance(tool, Tool) else Tool(tool) for name, tool in tools.items()}
        for name in self.tools:
            if "." not in name:
                raise ValueError(f"a tool is named server.tool, as in bank.charge, not {name!r}")
        self.by_trace: dict[str, Call] = {}
        self.by_key: dict[tuple[str, str], Call] = {}
        self.book: list[Effect] = []
        self.executing = 0
        self.on_waiting: list[Callable[[Call], None]] = []  # told of each call that waits for a person

    def restore(self, trace_id: str, effect: dict[str, Any] | None) -> None:
        """A call of which only the effect is known: for replays, in which nothing is called."""
        call = Call(trace_id, "", "", {}, None, "", None, "", state="COMPLETED")
        call.effect = effect
        self.by_trace[trace_id] = call

    def find(self, server_id: str, tool_name: str) -> Tool:
        tool = self.tools.get(f"{server_id}.{tool_name}")
        if tool is None:
            known = ", ".join(sorted(self.tools)) or "none"
            raise Problem("TOOL_NOT_FOUND", f"server {server_id} has no tool {tool_name!r}", expected=f"one of {known}")
        return tool

    def begin(self, call: Call) -> Call:
        """A new call, or, under a key that is taken by the same call, the one that exists."""
        tool = self.find(call.server_id, call.tool_name)
        if call.key is not None:
            known = self.by_key.get((f"{call.server_id}.{call.tool_name}", call.key))
            if known is not None:
                is_same = known.is_same_call(call.server_id, call.tool_name, call.arguments)
                if not is_same or known.principal_id != call.principal_id:
                    raise Problem("IDEMPOTENCY_KEY_REUSED", "the key belongs to another call")
                return known
        found = None if tool.input_schema is None else misfit(dict(tool.input_schema), call.arguments)
        if found is not None:
            raise Problem(
                "ARGUMENTS_INVALID", f"the arguments do not fit {call.server_id}.{call.tool_name}", expected=found
            )
        why = tool.why_denied(call)
        if call.key is not None and why is None:  # a call that the policy refuses leaves its key to the next one
            self.by_key[f"{call.server_id}.{call.tool_name}", call.key] = call
        self.by_trace[call.trace_id] = call
        if why is not None:
            call.state, call.decision = "DENIED", _decision("DENY", "policy", "policy", why)
        elif tool.needs_approval:
            call.state, call.waiting = "PENDING", "supervisor"
            for heard in self.on_waiting:
                heard(call)
        return call

    async def execute(self, call: Call) -> tuple[Any, Exception | None]:
        """Call the function: its result, or why it failed."""
        token = _current.set(call)
        try:
            result = self.find(call.server_id, call.tool_name).function(**copy.deepcopy(call.arguments))
            if inspect.isawaitable(result):
                result = await result
            canonical(result)
        except NotCanonical as refused:
            return None, ToolFailed(f"{call.server_id}.{call.tool_name} returned no JSON: {refused}")
        except asyncio.CancelledError:
            return None, ToolFailed("the call was cut off", code="OUTCOME_UNKNOWN", unknown=True)
        except Exception as error:
            return None, error
        finally:
            _current.reset(token)
        return result, None

    def end(self, call: Call, result: Any, error: Exception | None) -> None:
        """The call is over: its effect is in the book."""
        self.executing -= 1
        failed = None
        if error is not None:
            failed = error if isinstance(error, ToolFailed) else ToolFailed(f"{type(error).__name__}: {error}")
        output = result if failed is None else failed.output
        call.state = "COMPLETED" if failed is None else "FAILED"
        call.effect = {
            "trace_id": call.trace_id,
            "tool_call_id": call.tool_call_id,
            "outcome": "SUCCESS" if failed is None else "FAILURE",
            "basis": "unknown" if failed is not None and failed.unknown else "answer",
            "output": None if output is None and failed else {"encoding": "json", "value": copy.deepcopy(output)},
            "error": None if failed is None else {"code": failed.code, "message": failed.message},
        }
        name = f"{call.server_id}.{call.tool_name}"
        why = None if failed is None else f"{failed.code}: {failed.message}"
        self.book.append(
            Effect(call.key, name, call.arguments, None if failed else result, why, call.run_id, call.path)
        )

    def deny(self, call: Call, *, by: str, rationale: str | None, kind: str = "person") -> None:
        call.state, call.waiting = "DENIED", None
        call.decision = _decision("DENY", kind, by, rationale)

    def approve(self, call: Call, *, by: str, rationale: str | None) -> None:
        call.state, call.waiting = "AUTHORIZED", None
        call.decision = _decision("APPROVE", "person", by, rationale)


def _decision(decision: str, kind: str, by: str, rationale: str | None) -> dict[str, Any]:
    return {"decision": decision, "decided_by": {"type": kind, "id": by}, "rationale": rationale, "policy_ids": []}
