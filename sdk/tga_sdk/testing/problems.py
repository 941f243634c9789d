"""What the in-memory gateway refuses, with the real one's codes and statuses."""

from __future__ import annotations

from typing import Any, Final

STATUS: Final[dict[str, int]] = {
    "INPUT_MALFORMED": 400,
    "IDEMPOTENCY_KEY_MISSING": 400,
    "UNAUTHENTICATED": 401,
    "CALL_DENIED": 403,
    "TRACE_NOT_FOUND": 404,
    "RUN_NOT_FOUND": 404,
    "TOOL_NOT_FOUND": 404,
    "ROUTE_NOT_FOUND": 404,
    "PROCEDURE_NOT_FOUND": 404,
    "BLOB_NOT_FOUND": 404,
    "SCHEDULE_NOT_FOUND": 404,
    "METHOD_NOT_ALLOWED": 405,
    "CALL_IN_FLIGHT": 409,
    "RUN_ID_TAKEN": 409,
    "RUN_TOO_DEEP": 409,
    "RUN_TOO_MANY_CHILDREN": 409,
    "RUN_ENDED": 409,
    "RUN_POSITION_TAKEN": 409,
    "RUN_POSITION_GAP": 409,
    "RUN_ANSWER_UNASKED": 409,
    "RUN_BLOB_MISSING": 409,
    "STATE_CONCURRENT_EXECUTION": 409,
    "STATE_INVALID_TRANSITION": 409,
    "STATE_CHECKSUM_MISMATCH": 409,
    "RUN_COUNT_MISMATCH": 409,
    "ALREADY_DECIDED": 409,
    "REQUEST_MISMATCH": 409,
    "RUN_UNFINISHED": 409,
    "STREAM_IN_USE": 409,
    "RUN_ERASED": 410,
    "INPUT_TOO_LARGE": 413,
    "RUN_VALUE_TOO_LARGE": 413,
    "SCHEMA_VIOLATION": 422,
    "LUA_UNAVAILABLE": 409,
    "RUN_TIER_INVALID": 422,
    "RUN_ANSWER_INVALID": 422,
    "ARGUMENTS_INVALID": 422,
    "IDEMPOTENCY_KEY_REUSED": 422,
    "RUN_SIGNAL_ID_REUSED": 422,
    "IDEMPOTENCY_KEY_RESERVED": 422,
    "BLOB_MISMATCH": 422,
    "INTERNAL": 500,
    "SHUTTING_DOWN": 503,
}
_RETRY_AFTER_S: Final = {"CALL_IN_FLIGHT": 1, "STATE_CONCURRENT_EXECUTION": 1, "SHUTTING_DOWN": 2}


class Problem(Exception):
    """A refusal: its code, what was wrong, what was expected and found."""

    def __init__(self, code: str, what: str, *, expected: object = None, found: object = None) -> None:
        self.code = code
        self.what = what
        self.expected = None if expected is None else str(expected)
        self.found = None if found is None else str(found)
        self.more: dict[str, Any] = {}
        super().__init__(f"{code}: {what}")

    @property
    def status(self) -> int:
        return STATUS[self.code]

    @property
    def retry_after_s(self) -> int | None:
        return _RETRY_AFTER_S.get(self.code)

    def document(self) -> dict[str, Any]:
        """The body of the answer (RFC 9457); the real gateway's has a title and a remedy besides."""
        said = {
            "type": f"/errors#{self.code.lower()}",
            "status": self.status,
            "code": self.code,
            "detail": self.what,
            "expected": self.expected,
            "found": self.found,
            "retryable": self.retry_after_s is not None,
            "retry_after_s": self.retry_after_s,
            **self.more,
        }
        return {name: value for name, value in said.items() if value is not None}

    def told(self) -> str:
        """In one line, as a journal has it of a call that was refused."""
        if not self.expected:
            return self.what[:1024]
        found = "" if self.found is None else f", found {self.found}"
        return f"{self.what} (expected {self.expected}{found})"[:1024]
