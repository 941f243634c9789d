"""The W3C trace context of a run: derived from its id, so that every gateway, attempt and worker comes to the same.

Nothing is stored for it. A run is a trace of its own, because it may outlive its caller's by days; the two are linked.
"""

from __future__ import annotations

import hashlib

_SAMPLED = 1


def run_span(run_id: str) -> tuple[int, int]:
    """The trace of a run, and the span in it that is the run as a whole. `run_id` is the one on the log."""
    digest = hashlib.sha256(f"run {run_id}".encode()).digest()
    return int.from_bytes(digest[:16]), int.from_bytes(digest[16:24])


def attempt_span(run_id: str, attempt: int) -> int:
    """The span of one attempt, in the run's trace: the parent of what its worker does."""
    return int.from_bytes(hashlib.blake2b(f"attempt {run_id} {attempt}".encode(), digest_size=8).digest()) or 1


def traceparent_of(run_id: str, *, attempt: int | None = None, is_sampled: bool = True) -> str:
    """The context as W3C Trace Context writes it: of an attempt, or of the run as a whole."""
    trace_id, span_id = run_span(run_id)
    if attempt is not None:
        span_id = attempt_span(run_id, attempt)
    return f"00-{trace_id:032x}-{span_id:016x}-{_SAMPLED if is_sampled else 0:02x}"
