"""What a trace's answer, or an error, is to an MCP client.

| what is known                               | what is answered                                                  |
|---------------------------------------------|-------------------------------------------------------------------|
| an MCP server's result, error result or not | that result, unchanged; `_meta` gains our ids                     |
| an MCP server's JSON-RPC error              | a JSON-RPC error with its code and message                        |
| an HTTP tool's JSON                         | `structuredContent`, and the same as text                         |
| an HTTP tool's image, sound or other bytes  | an image, audio, text or embedded resource                        |
| a failure, a denial, any refusal            | an `isError` result that says code, what, what to do, and trace   |
"""

from __future__ import annotations

import base64
from typing import Any, Final

import orjson

from app.connectors.mcp.discovery import McpTool
from app.core.errors import CallInFlight, TgaError
from app.domain.tga.documents import Base64Output, DigestOutput, JsonOutput, ToolEffect
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Output
from app.domain.tga.transitions import TRACE
from app.domain.tools import Tool
from app.edge.answers import denial_of, summary_of
from app.edge.problems import document_of
from app.mcp_server.envelope import Client
from app.mcp_server.wire import INTERNAL_ERROR, INVALID_PARAMS, RpcError

TRACE_KEY: Final = "tga/trace-id"
IDEMPOTENCY_KEY: Final = "tga/idempotency-key"
PROPOSED_KEY: Final = "tga/proposed-key"
REPLAYED_KEY: Final = "tga/replayed"

_RESERVED: Final = range(-32768, -31999)  # JSON-RPC's own; what the protocol adds to them means something between two


def result_of(answer: Answer, tool: Tool | None, client: Client, key: str | None) -> dict[str, Any]:
    """The result of a finished call; RpcError where the tool's own server answered with an error of JSON-RPC."""
    if answer.effect is None:
        return _of_denial(answer, client, key)
    effect = answer.effect
    if effect.outcome == "SUCCESS":
        result = _of_success(effect.output, tool, answer.trace_id)
    else:
        result = _of_failure(effect, tool, answer.trace_id)
    return finished(result, client, trace_id=answer.trace_id, key=key, replayed=answer.replayed)


def finished(
    result: dict[str, Any],
    client: Client,
    *,
    trace_id: str | None = None,
    key: str | None = None,
    replayed: bool = False,
) -> dict[str, Any]:
    """With our ids in `_meta`, and the fields that the client's version asks for."""
    ids = {TRACE_KEY: trace_id, IDEMPOTENCY_KEY: key, REPLAYED_KEY: replayed or None}
    said = {name: value for name, value in ids.items() if value is not None}
    meta = result.get("_meta")
    made = {name: value for name, value in result.items() if name != "resultType"}
    if said:
        made["_meta"] = {**(meta if isinstance(meta, dict) else {}), **said}
    if client.is_modern:
        made["resultType"] = "complete"
    return made


def refusal(error: TgaError, client: Client, *, key: str | None = None, **members: Any) -> dict[str, Any]:
    """A call that was refused, as a result: so that the model which made it reads why, and what it can do."""
    problem = document_of(error, **members)
    lines = [f"{error.code}: {error.what}."]
    lines += [f"{name.capitalize()}: {problem[name]}." for name in ("expected", "found") if name in problem]
    decision = members.get("decision") or {}
    if decision.get("rationale"):
        lines.append(f"Reason given: {decision['rationale']}")
    lines.append(f"What to do: {error.next_step}")
    if "trace_id" in problem:
        lines.append(f"Trace: {problem['trace_id']}")
    result = {"content": [_text("\n".join(lines))], "isError": True, "_meta": {"tga/problem": problem}}
    return finished(result, client, trace_id=problem.get("trace_id"), key=key)


def not_over(answer: Answer, client: Client, key: str | None, *, waited_ms: int) -> dict[str, Any]:
    """The call is on record and not over, and the client cannot be made to wait longer."""
    repeat = "Call the tool again with exactly the same arguments: it is recognised as this call"
    if key is not None:
        repeat += f" (programs: with _meta {IDEMPOTENCY_KEY} = {key})"
    else:
        repeat = "Look at the trace, or ask for a task next time"
    if answer.waiting == "supervisor":
        what, then = "the call waits for a person to decide", "once somebody has decided"
    elif answer.waiting == "operator":
        what, then = "the outcome is unknown and waits for an operator to look", "once somebody has looked"
    else:
        what, then = "the call is still being executed", "in a while"
    error = CallInFlight(
        f"{what}, after {waited_ms // 1000} s",
        remedy=f"{repeat}, {then}, and asking again does not execute it again.",
        stream=TRACE.stream(answer.trace_id),
    )
    return refusal(error, client, key=key, state=answer.state, waiting=answer.waiting)


def _of_denial(answer: Answer, client: Client, key: str | None) -> dict[str, Any]:
    return refusal(denial_of(answer), client, key=key, decision=summary_of(answer.decision))


def _of_success(output: Output | None, tool: Tool | None, trace_id: str) -> dict[str, Any]:
    if isinstance(output, JsonOutput) and _is_of_mcp(tool, output):
        return dict(output.value)
    if isinstance(output, JsonOutput):
        value = output.value
        structured = value if isinstance(value, dict) else {"result": value}
        return {"content": [_text(_json(value))], "structuredContent": structured, "isError": False}
    if isinstance(output, DigestOutput):
        said = (
            f"The call was executed. Its answer ({output.size_bytes} bytes, sha256 {output.sha256}) is larger than "
            f"what is kept and cannot be shown. Do not repeat the call for it.\nTrace: {trace_id}"
        )
        # Who was promised a structure and gets none must not take the text for it.
        is_promised = isinstance(tool, McpTool) and "outputSchema" in tool.listed
        return {"content": [_text(said)], "isError": is_promised}
    if isinstance(output, Base64Output):
        return {"content": [_of_bytes(output, trace_id)], "isError": False}
    return {"content": [], "isError": False}


def _is_of_mcp(tool: Tool | None, output: JsonOutput) -> bool:
    """Whether the output is a result of MCP. Of a tool that is gone, its shape must tell."""
    if tool is not None:
        return isinstance(tool, McpTool) and isinstance(output.value, dict)
    return isinstance(output.value, dict) and isinstance(output.value.get("content"), list)


def _of_failure(effect: ToolEffect, tool: Tool | None, trace_id: str) -> dict[str, Any]:
    output, error = effect.output, effect.error
    code, message = (error.code, error.message) if error else ("FAILED", "the call failed")
    if isinstance(output, JsonOutput) and _is_of_mcp(tool, output):
        if output.value.get("isError") is True:
            return dict(output.value)
        if "code" in output.value and "message" in output.value:
            raise _passed_on(output.value, code, trace_id)
    lines = [f"{code}: {message}", _BASIS[effect.basis], f"Trace: {trace_id}"]
    content = [_text("\n".join(line for line in lines if line))]
    made: dict[str, Any] = {"content": content, "isError": True}
    if isinstance(output, JsonOutput):
        content.append(_text(_json(output.value)))
        if isinstance(output.value, dict) and not isinstance(tool, McpTool):
            made["structuredContent"] = output.value
    elif isinstance(output, Base64Output):
        content.append(_of_bytes(output, trace_id))
    return made


_BASIS: Final = {
    "answer": "",
    "reconciliation": "The server was asked afterwards, and says so.",
    "resolution": "An operator says so.",
    "unknown": "Whether it was executed, and how often, is not known. Look before you call it again.",
    "not_sent": "Calling the tool again is a new call, and safe.",
}


def _passed_on(upstream: dict[str, Any], code: str, trace_id: str) -> RpcError:
    """The server's own error. Codes with which the protocol steers a client are about another connection than its."""
    number = upstream.get("code")
    is_plain = isinstance(number, int) and (number not in _RESERVED or number in (INVALID_PARAMS, INTERNAL_ERROR))
    data = {"code": code, "trace_id": trace_id}
    if "data" in upstream:
        data["data"] = upstream["data"]
    passed = number if is_plain and isinstance(number, int) else INTERNAL_ERROR
    return RpcError(passed, str(upstream.get("message")), data=data, status=200)


def _of_bytes(output: Base64Output, trace_id: str) -> dict[str, Any]:
    media_type = output.media_type
    kind = media_type.partition("/")[0].lower()
    if kind in ("image", "audio"):
        return {"type": kind, "data": output.data, "mimeType": media_type}
    uri = f"tga://traces/{trace_id}/output"
    if kind == "text":
        try:
            return _text(base64.b64decode(output.data).decode("utf-8"))
        except UnicodeDecodeError:
            pass
    return {"type": "resource", "resource": {"uri": uri, "mimeType": media_type, "blob": output.data}}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _json(value: Any) -> str:
    return value if isinstance(value, str) else orjson.dumps(value).decode()
