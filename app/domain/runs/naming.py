"""Which other streams a run names: export and erasure follow them."""

from __future__ import annotations

from typing import Any

from app.core.canonical import parse_object
from app.core.errors import TgaError
from app.core.limits import ARTIFACT_BYTES_MAX
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE


def named_streams(artifact: bytes) -> list[str]:
    """The streams that a start or an intent names and on which the verification of its run rests; none if it cannot be
    read."""
    try:
        said: dict[str, Any] = parse_object(artifact, bytes_max=ARTIFACT_BYTES_MAX)
    except TgaError:
        return []
    found: list[str] = []
    for within, member, kind in (
        (said.get("request"), "trace_id", TRACE),
        (said.get("request"), "child_run_id", RUN),
        (said.get("forked_from"), "run_id", RUN),
    ):
        if isinstance(within, dict) and isinstance(within.get(member), str):
            found.append(kind.stream(within[member]))
    return found
