"""Errors over HTTP: `application/problem+json` (RFC 9457) with a stable code; the one map from code to status."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson
from starlette.responses import Response

from app.core import errors
from app.core.errors import ALL_ERRORS, TgaError
from app.domain.tga.transitions import TRACE

MEDIA_TYPE: Final = "application/problem+json"

STATUS: Final[dict[type[TgaError], int]] = {
    errors.InputMalformed: 400,
    errors.KeyMissing: 400,
    errors.SignInExpired: 400,
    errors.Unauthenticated: 401,
    errors.Forbidden: 403,
    errors.SignInRefused: 403,
    errors.CallDenied: 403,
    errors.StartDenied: 403,
    errors.SubmissionDenied: 403,
    errors.TraceNotFound: 404,
    errors.RunNotFound: 404,
    errors.ToolNotFound: 404,
    errors.RouteNotFound: 404,
    errors.AccessNotFound: 404,
    errors.ProcedureNotFound: 404,
    errors.BlobNotFound: 404,
    errors.VerificationNotFound: 404,
    errors.ScheduleNotFound: 404,
    errors.MethodNotAllowed: 405,
    errors.RequestTimeout: 408,
    errors.CallInFlight: 409,
    errors.RunIdTaken: 409,
    errors.RunTooDeep: 409,
    errors.RunTooManyChildren: 409,
    errors.RunEnded: 409,
    errors.RunLeaseLost: 409,
    errors.RunPositionTaken: 409,
    errors.RunPositionGap: 409,
    errors.RunCountMismatch: 409,
    errors.RunAnswerUnasked: 409,
    errors.RunBlobMissing: 409,
    errors.ConcurrentExecution: 409,
    errors.KeyClaimed: 409,
    errors.AlreadyDecided: 409,
    errors.RequestMismatch: 409,
    errors.ApprovalExpired: 409,
    errors.ApprovalNotExpired: 409,
    errors.ToolQuarantined: 409,
    errors.TraceNotHeld: 409,
    errors.TraceUnfinished: 409,
    errors.RunUnfinished: 409,
    errors.StreamInUse: 409,
    errors.NotYetLogged: 409,
    errors.ProcedureLimitReached: 409,
    errors.ScheduleLimitReached: 409,
    errors.LuaUnavailable: 409,
    # What is stored is not sound, or cannot go on: asking again does not help, so it is no 5xx.
    errors.InvalidTransition: 409,
    errors.SequenceGap: 409,
    errors.ChecksumMismatch: 409,
    errors.RecoveryFailed: 409,
    errors.SecretMissing: 409,
    errors.BlobDamaged: 409,
    errors.TraceErased: 410,
    errors.RunErased: 410,
    errors.InputTooLarge: 413,
    errors.RunValueTooLarge: 413,
    errors.SchemaViolation: 422,
    errors.ProcedureSourceInvalid: 422,
    errors.RunTierInvalid: 422,
    errors.RunAnswerInvalid: 422,
    errors.RunCallbackRefused: 422,
    errors.ArgumentsInvalid: 422,
    errors.KeyReused: 422,
    errors.SignalIdReused: 422,
    errors.KeyReserved: 422,
    errors.SignatureInvalid: 422,
    errors.BlobMismatch: 422,
    errors.RateLimited: 429,
    errors.TooManyInFlight: 429,
    errors.HeadersTooLarge: 431,
    errors.InternalError: 500,
    errors.LockAcquireFailed: 503,
    errors.StoreBusy: 503,
    errors.StoreUnavailable: 503,
    errors.OutcomeUnknown: 503,
    errors.GatewayBusy: 503,
    errors.ShuttingDown: 503,
    errors.StoreUnfit: 503,
    errors.LogForked: 503,
    errors.IssuerUnavailable: 503,
    errors.BlobGoing: 503,
    errors.BlobStoreUnavailable: 503,
}
# Details of these are about the store and its host: they go to the log, not to callers.
_OF_THE_STORE: Final = frozenset(
    {
        errors.StoreUnavailable,
        errors.OutcomeUnknown,
        errors.StoreUnfit,
        errors.LockAcquireFailed,
        errors.BlobStoreUnavailable,
    }
)
# For these the same request, with the same key, may succeed later: who may come back is told when.
RETRY_AFTER_S: Final[dict[type[TgaError], int]] = {
    errors.RequestTimeout: 1,
    errors.RateLimited: 1,  # or as long as the principal's rate says
    errors.CallInFlight: 1,
    errors.ConcurrentExecution: 1,
    errors.NotYetLogged: 1,
    errors.TooManyInFlight: 1,
    errors.LockAcquireFailed: 1,
    errors.StoreBusy: 1,
    errors.StoreUnavailable: 2,
    errors.OutcomeUnknown: 2,
    errors.GatewayBusy: 1,
    errors.ShuttingDown: 2,
    errors.BlobGoing: 1,
    errors.BlobStoreUnavailable: 2,
}


def type_of(code: str) -> str:
    """Where the code is explained: the gateway serves docs/errors.md itself."""
    return f"/errors#{code.lower()}"


def status_of(error: TgaError) -> int:
    return STATUS.get(type(error), 500)


def retry_after_s(error: TgaError) -> int | None:
    """When the same request may be sent again; None where that does not help."""
    if error.is_lasting:
        return None
    if isinstance(error, errors.RateLimited):
        return error.retry_after_s
    return RETRY_AFTER_S.get(type(error))


def document_of(error: TgaError, **members: Any) -> dict[str, Any]:
    """The problem document. Every text in it was written for the caller."""
    trace_id = None
    if error.stream is not None and TRACE.has(error.stream):
        trace_id = TRACE.identity_of(error.stream)
    is_told = type(error) not in _OF_THE_STORE
    seconds = retry_after_s(error)
    document = {
        "type": type_of(error.code),
        "title": error.meaning,
        "status": status_of(error),
        "code": error.code,
        "detail": error.what,
        "expected": error.expected if is_told else None,
        "found": error.found if is_told else None,
        "remedy": error.next_step,
        "retryable": seconds is not None,
        "retry_after_s": seconds,
        "trace_id": trace_id,
        "sequence_number": error.sequence_number,
        "line": error.line if isinstance(error, errors.ProcedureSourceInvalid) else None,
        **members,
    }
    return {name: value for name, value in document.items() if value is not None}


def problem(error: TgaError, *, headers: Mapping[str, str] | None = None, **members: Any) -> Response:
    """The answer for an error, with Retry-After where coming back makes sense."""
    sent = dict(headers or {})
    seconds = retry_after_s(error)
    if seconds is not None:
        sent.setdefault("Retry-After", str(seconds))
    if isinstance(error, errors.Unauthenticated):
        sent["WWW-Authenticate"] = "Bearer"
    body = orjson.dumps(document_of(error, **members))
    return Response(body, status_code=status_of(error), headers=sent, media_type=MEDIA_TYPE)


def documented(*kinds: type[TgaError]) -> dict[int | str, dict[str, Any]]:
    """OpenAPI responses for these errors, grouped by status, each with an example."""
    return documented_alone(*kinds, *ANY_ROUTE)


def documented_alone(*kinds: type[TgaError]) -> dict[int | str, dict[str, Any]]:
    """The same, for routes that do not answer what every other route may."""
    grouped: dict[int, list[type[TgaError]]] = {}
    for kind in dict.fromkeys(kinds):
        grouped.setdefault(STATUS[kind], []).append(kind)
    return {status: _response(kinds_of_status) for status, kinds_of_status in sorted(grouped.items())}


# What every route may answer.
ANY_ROUTE: Final = (
    errors.Unauthenticated,
    errors.Forbidden,
    errors.InputMalformed,
    errors.InputTooLarge,
    errors.HeadersTooLarge,
    errors.RequestTimeout,
    errors.RateLimited,
    errors.TooManyInFlight,
    errors.GatewayBusy,
    errors.ShuttingDown,
    errors.StoreUnavailable,
    errors.InternalError,
)


def _response(kinds: Iterable[type[TgaError]]) -> dict[str, Any]:
    listed = list(kinds)
    examples = {kind.code: {"value": document_of(kind(kind.meaning))} for kind in listed}
    return {
        "description": " ".join(f"`{kind.code}`: {kind.meaning}" for kind in listed),
        "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": examples}},
    }


PROBLEM_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "description": "RFC 9457. `code` is stable; the rest is for people.",
    "required": ["type", "title", "status", "code", "detail", "remedy", "retryable"],
    "properties": {
        "type": {"type": "string", "description": "Where the code is explained, relative to this gateway."},
        "title": {"type": "string"},
        "status": {"type": "integer"},
        "code": {"type": "string", "enum": sorted(error.code for error in ALL_ERRORS)},
        "detail": {"type": "string"},
        "expected": {"type": "string"},
        "found": {"type": "string"},
        "remedy": {"type": "string"},
        "retryable": {
            "type": "boolean",
            "description": "Whether the same request, with the same key, may succeed later without anybody's doing.",
        },
        "retry_after_s": {
            "type": "integer",
            "minimum": 1,
            "description": "With `retryable`: after how many seconds, as the header Retry-After says too.",
        },
        "trace_id": {"type": "string"},
        "sequence_number": {"type": "integer"},
        "line": {"type": "integer", "minimum": 1, "description": "With PROCEDURE_SOURCE_INVALID: of the source."},
        "incident": {"type": "string", "description": "With INTERNAL: what to look for in the gateway's log."},
        "decision": {"type": "object", "description": "With CALL_DENIED: who denied it, and why."},
    },
}
