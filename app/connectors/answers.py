"""What connectors share in reading answers and in saying who calls: what can be stored, and what can be shown."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

from app.core.canonical import JsonValue, canonical_enclosed, parse_json
from app.core.errors import InputTooLarge
from app.core.limits import (
    DOCUMENT_BYTES_MAX,
    ENCLOSED_DEPTH_MAX,
    ENCLOSED_KEYS_MAX,
    OUTPUT_VALUES_MAX,
    RETRY_AFTER_MS_MAX,
)
from app.domain.tga.documents import ToolCall

DETAIL_CHARS_MAX: Final = 256
_RETRYABLE_4XX = frozenset({408, 409, 425, 429})
_RETRY_AFTER_S = re.compile(r"[0-9]{1,9}")
_HTTP_DATE = re.compile(r"[A-Z][a-z]{2}, [0-9]{2} [A-Z][a-z]{2} [0-9]{4} [0-9]{2}:[0-9]{2}:[0-9]{2} GMT")
_TRACEPARENT = re.compile(r"00-(?!0{32})([0-9a-f]{32})-[0-9a-f]{16}-([0-9a-f]{2})")
_UNPRINTABLE = re.compile(r"[^ -~]")
# RFC 8785 writes 1e15, four characters, as sixteen.
_CANONICAL_GROWTH_MAX = 4


def traceparent_of(call: ToolCall, callers: str | None) -> str:
    """W3C Trace Context, version 00: the call is the parent; the trace is the caller's, else its own, sampled."""
    known = _TRACEPARENT.fullmatch(callers or "")
    trace, flags = known.groups() if known else (call.trace_id.replace("-", ""), "01")
    return f"00-{trace}-{call.tool_call_id.replace('-', '')[-16:]}-{flags}"


def is_retryable(status: int) -> bool:
    """Whether an HTTP status leaves open what became of the request."""
    return status in _RETRYABLE_4XX or status >= 500


def retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """Of headers named in lower case: seconds, or a date by this machine's clock (RFC 9110, section 10.2.3); a date
    that is over means now."""
    written = headers.get("retry-after", "").strip()
    if _RETRY_AFTER_S.fullmatch(written):
        return min(int(written) * 1000, RETRY_AFTER_MS_MAX)
    if not _HTTP_DATE.fullmatch(written):
        return None
    try:
        wait_s = (parsedate_to_datetime(written) - datetime.now(UTC)).total_seconds()
    except (ValueError, TypeError):  # the 31st of February; a zone that is none
        return None
    return max(0, min(int(wait_s * 1000), RETRY_AFTER_MS_MAX))


def storable_json(raw: bytes) -> JsonValue:
    """The value, if it is strict JSON that an effect can carry; else InputMalformed or InputTooLarge.

    An effect that cannot be written would leave the outcome unknown, and the call would be sent again for ever.
    """
    # Before anything is parsed: every value costs time in each document that quotes it, whatever its size.
    if raw.count(b",") + raw.count(b"[") + raw.count(b"{") > OUTPUT_VALUES_MAX:
        raise InputTooLarge("too many values", expected=f"at most {OUTPUT_VALUES_MAX} in an output")
    value = parse_json(raw)
    may_be_large = (
        len(raw) * _CANONICAL_GROWTH_MAX > DOCUMENT_BYTES_MAX
        or raw.count(b":") > ENCLOSED_KEYS_MAX
        or raw.count(b"[") + raw.count(b"{") > ENCLOSED_DEPTH_MAX
    )
    if may_be_large:
        canonical_enclosed(value, bytes_max=DOCUMENT_BYTES_MAX)
    return value


def plain(text: str, chars_max: int = DETAIL_CHARS_MAX) -> str:
    """Printable ASCII, not long. A server chooses these characters; a lone surrogate or NUL could not be stored."""
    return _UNPRINTABLE.sub("?", text[:chars_max])
