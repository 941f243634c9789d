"""What is known of a call after what an MCP server said to it.

| what the server did                                        | what is known                                          |
|------------------------------------------------------------|--------------------------------------------------------|
| a result                                                   | SUCCESS, with the result unchanged                     |
| a result with `isError: true`                              | FAILURE, definite, MCP_TOOL_ERROR                      |
| a result that asks for more input, or is no object         | FAILURE, definite, MCP_INPUT_REQUIRED, MCP_BAD_RESULT  |
| an answer too large to be read whole                       | as above and below, told by looking through it; only   |
|                                                            | its digest is kept                                     |
| an answer in which that is not to be told: without end, or | FAILURE, definite, ANSWER_TOO_LARGE                    |
| too deep, or with `isError`, `error` or `id` twice         |                                                        |
| a JSON-RPC error                                           | FAILURE, definite, MCP_<code>, the error is the output |
| -32000 (connection closed, no session), -32001 (timed out) | Unknown, `retryable_answer`                            |
| HTTP 4xx without JSON-RPC                                  | FAILURE, definite, HTTP_<status>                       |
| HTTP 408, 409, 425, 429, 5xx; 404 to a session             | Unknown, `retryable_answer`                            |
| an answer that is not JSON-RPC                             | Unknown, `retryable_answer`                            |
| no answer in time; connection or process ended             | Unknown, `timed_out`, `disconnected`                   |
| nothing could be written                                   | NotSent                                                |

-32603 is definite: the server has ended its work on this very request and says that it failed. Many servers use it for
every error of a tool, and a server that ignores keys would execute such a call once for each attempt.
"""

from __future__ import annotations

import base64
import hashlib
from http import HTTPStatus
from typing import Any, Final

from app.connectors.answers import is_retryable, plain, storable_json
from app.connectors.json_scanner import Kind
from app.connectors.mcp.large import Large
from app.connectors.mcp.wire import (
    CONNECTION_CLOSED,
    REQUEST_TIMEOUT,
    Heard,
    Message,
    Oversize,
    Refusal,
    Reply,
    Silence,
)
from app.core.canonical import canonical_bytes
from app.core.errors import InputMalformed, InputTooLarge
from app.core.limits import DOCUMENT_BYTES_MAX, TEXT_CHARS_MAX
from app.domain.tga.documents import Base64Output, DigestOutput, JsonOutput
from app.domain.tga.ports import Answered, Dispatched, NotSent, Output, Unknown

TOOL_ERROR: Final = "MCP_TOOL_ERROR"
ANSWER_TOO_LARGE: Final = "ANSWER_TOO_LARGE"
_UNSETTLED: Final = frozenset({CONNECTION_CLOSED, REQUEST_TIMEOUT})


def conclude(heard: Heard, *, has_session: bool) -> Dispatched:
    """`has_session`: the request named an HTTP session, which the server may have forgotten."""
    match heard:
        case Silence("not_sent" | "withheld", detail):
            return NotSent(plain(detail))
        case Silence("unwritable", detail):
            return NotSent(plain(detail), is_hopeless=True)
        case Silence("timed_out", detail):
            return Unknown("timed_out", plain(detail))
        case Silence(_, detail):
            return Unknown("disconnected", plain(detail))
        case Oversize(large):
            return _of_large(large, has_session=has_session)
        case Refusal():
            return _of_status(heard, has_session=has_session)
        case Reply():
            return _of_reply(heard, has_session=has_session)


def is_session_lost(heard: Heard) -> bool:
    """Whether the answer may mean that the server does not know the session (any more)."""
    match heard:
        case Refusal(status):
            return status in (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)
        case Reply(message, status):
            code = (message.error or {}).get("code")
            is_unsettled = isinstance(code, int) and code in _UNSETTLED
            return message.error is not None and (is_unsettled or status == HTTPStatus.NOT_FOUND)
    return False


def _of_status(refusal: Refusal, *, has_session: bool) -> Dispatched:
    status, said = refusal.status, plain(refusal.detail)
    is_forgotten = has_session and status == HTTPStatus.NOT_FOUND
    if status < 300 or is_retryable(status) or is_forgotten:
        at_work = status == HTTPStatus.CONFLICT
        return Unknown("retryable_answer", said, retry_after_ms=refusal.retry_after_ms, is_at_work=at_work)
    if status < 400:
        said += "; redirects are not followed: configure the address that is meant"
    return Answered("FAILURE", None, error_code=f"HTTP_{status}", error_message=said)


def _of_reply(reply: Reply, *, has_session: bool) -> Dispatched:
    error = reply.message.error
    if error is not None:
        return _of_error(error, _stored_value(error), reply, has_session=has_session)
    result = reply.message.result
    members = result if isinstance(result, dict) else None
    said = None if members is None else _first_text(members)
    return _of_result(members, _stored(reply.message.result_bytes or b"null"), said)


def _of_large(large: Large, *, has_session: bool) -> Dispatched:
    whole = DigestOutput(encoding="digest", sha256=large.sha256, size_bytes=large.size_bytes, truncated=True)
    if not large.is_told:
        said = "the server's answer is too large to be read, and what was looked through does not tell its outcome"
        return Answered("FAILURE", whole, error_code=ANSWER_TOO_LARGE, error_message=said)
    if large.member("error") is not None:
        error = {"code": large.member("error", "code"), "message": large.member("error", "message")}
        return _of_error(error, whole, Reply(Message({})), has_session=has_session)
    output: Output
    if (raw := large.result_bytes) is not None:
        output = _stored(raw)
    else:
        sha256, size_bytes = large.result_sha256, large.result_size_bytes
        output = DigestOutput(encoding="digest", sha256=sha256, size_bytes=size_bytes, truncated=True)
    names = ("isError", "resultType")
    members = {name: large.member("result", name) for name in names if large.has("result", name)}
    return _of_result(members if large.member("result") is Kind.OBJECT else None, output, None)


def _of_error(error: dict[str, Any], output: Output | None, reply: Reply, *, has_session: bool) -> Dispatched:
    code = error.get("code")
    is_number = isinstance(code, int) and not isinstance(code, bool)
    said = plain(f"the server answered with error {code}: {error.get('message')}", TEXT_CHARS_MAX)
    is_forgotten = has_session and reply.status == HTTPStatus.NOT_FOUND
    if (is_number and code in _UNSETTLED) or is_retryable(reply.status) or is_forgotten:
        at_work = reply.status == HTTPStatus.CONFLICT
        return Unknown("retryable_answer", plain(said), retry_after_ms=reply.retry_after_ms, is_at_work=at_work)
    number = code if is_number and abs(code) < 10**9 else "ERROR"  # type: ignore[arg-type]
    return Answered("FAILURE", output, error_code=f"MCP_{number}", error_message=said)


def _of_result(result: dict[str, Any] | None, output: Output, text: str | None) -> Dispatched:
    """`text` is the first of what the tool says, where it was read."""
    if result is None:
        said = "the server's result is not an object"
        return Answered("FAILURE", output, error_code="MCP_BAD_RESULT", error_message=said)
    if result.get("isError") is True:
        said = text or "the tool says that it failed"
        return Answered("FAILURE", output, error_code=TOOL_ERROR, error_message=said)
    if result.get("resultType", "complete") != "complete":
        said = "the server wants more input, which the gateway cannot give"
        return Answered("FAILURE", output, error_code="MCP_INPUT_REQUIRED", error_message=said)
    return Answered("SUCCESS", output)


def _stored(raw: bytes) -> Output:
    if len(raw) > DOCUMENT_BYTES_MAX:
        sha256 = hashlib.sha256(raw).hexdigest()
        return DigestOutput(encoding="digest", sha256=sha256, size_bytes=len(raw), truncated=True)
    try:
        return JsonOutput(encoding="json", value=storable_json(raw))
    except (InputMalformed, InputTooLarge):
        data = base64.b64encode(raw).decode("ascii")
        return Base64Output(encoding="base64", media_type="application/json", data=data)


def _stored_value(error: dict[str, Any]) -> Output | None:
    try:
        return _stored(canonical_bytes(error, bytes_max=DOCUMENT_BYTES_MAX))
    except (InputMalformed, InputTooLarge):
        return None


def _first_text(result: dict[str, Any]) -> str:
    content = result.get("content")
    for part in content if isinstance(content, list) else ():
        if isinstance(part, dict) and isinstance(part.get("text"), str):
            return plain(part["text"], TEXT_CHARS_MAX)
    return "the tool says that it failed"
