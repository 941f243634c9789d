"""What every adapter does: offer the gateway's tools to a model, call them with a key, and say what became of it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Final

from tga_sdk.client.calls import Wait
from tga_sdk.client.documents import Result, Tool
from tga_sdk.errors import (
    ApprovalPending,
    ArgumentsInvalid,
    CallFailed,
    CallHeld,
    Denied,
    ExtraMissing,
    OutcomeUnknown,
    TgaError,
    ToolNotFound,
    ToolQuarantined,
    Unfinished,
)
from tga_sdk.keys import key_for

NAME_CHARS_MAX: Final = 64
_ID_CHARS_MIN: Final = 16
_ODD: Final = re.compile(r"[^A-Za-z0-9_-]")


def framework(module: str, *, extra: str) -> Any:
    """A module of the framework; ExtraMissing when it is not installed."""
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module == error.name or module.startswith(f"{error.name}.")):
            raise  # it is there, and broken
        raise ExtraMissing(module=module.partition(".")[0], extra=extra) from None


@dataclass(frozen=True, slots=True)
class Offered:
    """A tool of the gateway as a model sees it. `name` fits what models take: letters, digits, `_` and `-`, at most
    64."""

    name: str
    server: str
    tool: str
    description: str
    schema: dict[str, Any]
    is_read: bool


@dataclass(frozen=True, slots=True)
class Terms:
    """How an adapter calls tools.

    `wait`: seconds, or "forever", for a person's decision; 0 tells the model that a person has to decide. `scope`: what
    the ids of tool calls are unique in, for example a conversation's id.
    """

    wait: Wait = 0.0
    timeout: float | None = 60.0
    scope: str | None = None

    def options(self, offered: Offered, call_id: str | None, scope: str | None = None) -> dict[str, Any]:
        """Of `Client.call`: the key is the same for the same tool call, so a framework that repeats one, also after a
        crash, executes it once. Without an id of the framework each call is a call of its own."""
        options: dict[str, Any] = {"wait": self.wait, "timeout": self.timeout}
        within = self.scope or scope
        if call_id is not None:
            if within is None and len(call_id) < _ID_CHARS_MIN:
                raise TgaError(
                    f"the model's tool call has the id {call_id!r}, which another conversation may have too: its call "
                    "would be answered with what that one did. Give `scope`, for example the conversation's id",
                    code="TOOL_CALL_ID_NOT_UNIQUE",
                )
            options["key"] = key_for("agent", within or "", call_id, offered.server, offered.tool)
        return options


def offer(tools: Iterable[Tool], *, only: Collection[str] | None = None) -> list[Offered]:
    """The tools that a model may be shown: those that are not quarantined, and of them `only` these (`server`, or
    `server/tool`). Each gets a name of its own."""
    made: list[Offered] = []
    taken: set[str] = set()
    for tool in tools:
        whole = f"{tool.server_id}/{tool.tool_name}"
        if tool.is_quarantined or (only is not None and not {tool.server_id, whole} & set(only)):
            continue
        name = _name(tool.server_id, tool.tool_name, taken)
        taken.add(name)
        made.append(
            Offered(
                name=name,
                server=tool.server_id,
                tool=tool.tool_name,
                description=tool.description or f"The tool {tool.tool_name} of {tool.server_id}.",
                schema=_schema(tool.input_schema),
                is_read=tool.tool_class == "read",
            )
        )
    return made


def _name(server: str, tool: str, taken: Collection[str]) -> str:
    name = f"{_ODD.sub('_', server)}_{_ODD.sub('_', tool)}"
    if len(name) <= NAME_CHARS_MAX and name not in taken and (name[:1].isalpha() or name[:1] == "_"):
        return name
    digest = hashlib.sha256(f"{server}/{tool}".encode()).hexdigest()[:8]
    return f"t_{name}"[: NAME_CHARS_MAX - 9] + f"_{digest}"


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    """As models want it: an object with properties."""
    return {"type": "object", "properties": {}, **schema}


def told(result: Result | Any) -> str:
    """What a tool answered, as text for a model."""
    output = result.output if isinstance(result, Result) else result
    if isinstance(output, str):
        return output
    if isinstance(output, bytes):
        return json.dumps({"base64": base64.b64encode(output).decode()})
    return json.dumps(output, ensure_ascii=False)


def is_correctable(error: TgaError) -> bool:
    """Whether the model can do better with other arguments."""
    return isinstance(error, ArgumentsInvalid)


def explained(error: TgaError) -> str | None:
    """What a model is told of a call that has no result; None when that is nothing that a model could act on (no
    gateway, no right to call, a key used twice): then the error is its programmer's."""
    named = f" (trace {error.trace_id})" if error.trace_id else ""
    if isinstance(error, ArgumentsInvalid):
        found = f"; found {error.problem['found']}" if error.problem.get("found") else ""
        expected = f"; expected {error.problem['expected']}" if error.problem.get("expected") else ""
        return f"The arguments do not fit: {error.message}{expected}{found}. Nothing was done. Correct them."
    if isinstance(error, Denied):
        return f"Denied: {error.message}{named}. Nothing was done. Do not ask for the same again."
    if isinstance(error, ApprovalPending):
        return f"A person has to approve this call first{named}. Nothing was done yet. Do not call it again."
    if isinstance(error, OutcomeUnknown):
        return f"It is not known whether this was done{named}: {error.message}. Do not call it again; tell the user."
    if isinstance(error, CallFailed):
        output = f" The tool answered: {told(error.output)}" if error.output is not None else ""
        return f"The tool failed: {error.message}.{output}"
    if isinstance(error, CallHeld):
        return f"It is not known whether this was done, and an operator looks into it{named}. Do not call it again."
    if isinstance(error, Unfinished):
        return f"The tool is still at work{named}. Do not call it again."
    if isinstance(error, (ToolNotFound, ToolQuarantined)):
        return f"This tool cannot be called: {error.message}. Nothing was done."
    return None
