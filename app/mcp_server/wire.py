"""JSON-RPC 2.0 as MCP uses it: one message a request, strict JSON, errors with our stable code in `data.code`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import orjson

from app.config.wording import shown
from app.core import errors
from app.core.canonical import parse_json
from app.core.errors import InputMalformed, InputTooLarge, SchemaViolation, TgaError
from app.edge.problems import document_of, status_of

PARSE_ERROR: Final = -32700
INVALID_REQUEST: Final = -32600
METHOD_NOT_FOUND: Final = -32601
INVALID_PARAMS: Final = -32602
INTERNAL_ERROR: Final = -32603
HEADER_MISMATCH: Final = -32020
MISSING_CAPABILITY: Final = -32021
UNSUPPORTED_VERSION: Final = -32022
REFUSED: Final = -32000  # by the gateway, not by the protocol: `data.code` says why

# With these the protocol says something; all others are statuses of HTTP.
_STATUS: Final = {
    PARSE_ERROR: 400,
    INVALID_REQUEST: 400,
    INVALID_PARAMS: 400,
    METHOD_NOT_FOUND: 404,
    HEADER_MISMATCH: 400,
    MISSING_CAPABILITY: 400,
    UNSUPPORTED_VERSION: 400,
}
_ID_CHARS_MAX: Final = 256

RequestId = str | int


class RpcError(Exception):
    """What is answered instead of a result."""

    def __init__(self, code: int, message: str, *, data: Any = None, status: int | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.data = data
        self.status = _STATUS.get(code, 200) if status is None else status

    @classmethod
    def of(cls, error: TgaError) -> RpcError:
        """A problem: its document is the data, its status that of HTTP."""
        if isinstance(error, InputMalformed):
            code = PARSE_ERROR
        elif isinstance(error, (InputTooLarge, errors.HeadersTooLarge)):
            code = INVALID_REQUEST
        elif isinstance(error, (SchemaViolation, errors.ToolNotFound, errors.TraceNotFound)):
            code = INVALID_PARAMS
        elif isinstance(error, errors.InternalError):
            code = INTERNAL_ERROR
        else:
            code = REFUSED
        status = _STATUS[code] if code in (PARSE_ERROR, INVALID_PARAMS) else status_of(error)
        return cls(code, f"{error.code}: {error.what}", data=document_of(error), status=status)


@dataclass(frozen=True, slots=True)
class Message:
    """A request, or without an id a notification."""

    method: str
    params: dict[str, Any]
    id: RequestId | None

    @property
    def is_notification(self) -> bool:
        return self.id is None

    @property
    def meta(self) -> dict[str, Any]:
        meta = self.params.get("_meta")
        return meta if isinstance(meta, dict) else {}


def id_in(raw_id: Any) -> RequestId | None:
    """An id that can be answered to; None for what is none."""
    if isinstance(raw_id, str) and len(raw_id) <= _ID_CHARS_MAX:
        return raw_id
    return raw_id if isinstance(raw_id, int) and not isinstance(raw_id, bool) else None


def read_message(raw: bytes) -> Message:
    """The message, or RpcError. A batch is none, nor is an answer: the gateway asks clients nothing."""
    try:
        body = parse_json(raw)
    except (InputMalformed, InputTooLarge) as error:
        raise RpcError.of(error) from None
    if not isinstance(body, dict):
        raise Unreadable(None, INVALID_REQUEST, "the body must be one JSON-RPC message")
    request_id = id_in(body.get("id"))
    method, params = body.get("method"), body.get("params", {})
    if body.get("jsonrpc") != "2.0" or not isinstance(method, str) or ("id" in body and request_id is None):
        raise Unreadable(request_id, INVALID_REQUEST, "not a JSON-RPC 2.0 request or notification")
    if not isinstance(params, dict):
        raise Unreadable(request_id, INVALID_PARAMS, "params must be an object")
    return Message(method, params, request_id)


class Unreadable(RpcError):
    """A message that is no request, but whose id could be read."""

    def __init__(self, request_id: RequestId | None, code: int, message: str) -> None:
        super().__init__(code, message, data={"code": SchemaViolation.code})
        self.request_id = request_id


def text_param(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise RpcError(
            INVALID_PARAMS,
            f"params.{name} must be text, and not empty",
            data={"code": SchemaViolation.code, "found": shown(value)},
        )
    return value


def result_bytes(request_id: RequestId, result: dict[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": request_id, "result": result})


def error_bytes(request_id: RequestId | None, error: RpcError) -> bytes:
    body: dict[str, Any] = {"code": error.code, "message": error.message}
    if error.data is not None:
        body["data"] = error.data
    return orjson.dumps({"jsonrpc": "2.0", "id": request_id, "error": body})


def notification_bytes(method: str, params: dict[str, Any]) -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "method": method, "params": params})


def event_bytes(message: bytes) -> bytes:
    """One server-sent event. JSON written here holds no line feed."""
    return b"event: message\ndata: " + message + b"\n\n"
