"""Repeats of calls: which keys may be one, and what was read and verified of them before.

Nothing rests on what is remembered here. A key that was forgotten is found when its claim is lost; a key that stands
here by mistake costs one look. What was verified counts only while the store gives the very same bytes again.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

from app.core.limits import REPEAT_KEYS_EXPECTED_MAX, REPEATS_VERIFIED_BYTES_MAX, REPEATS_VERIFIED_MAX
from app.domain.tga.documents import ActionRequest, TraceId
from app.domain.tga.execution import Answer, answer_of, request_of
from app.domain.tga.ports import RecordedCall


class _Verified(NamedTuple):
    fingerprint: bytes
    size_bytes: int
    request: ActionRequest
    answer: Answer


class Repeats:
    """What one process remembers of calls that are over, in bounded memory; the oldest is forgotten first."""

    def __init__(self) -> None:
        # Keys of calls that this process answered. Numbers instead of keys: two keys may share one.
        self._expected: OrderedDict[int, None] = OrderedDict()
        # Finished traces as they were last read, and how many bytes those were.
        self._verified: OrderedDict[TraceId, _Verified] = OrderedDict()
        self._verified_bytes = 0

    def is_expected(self, server_id: str, tool_name: str, idempotency_key: str | None) -> bool:
        """Whether a call with this key may be a repeat: then the store is asked before anything is appended."""
        return idempotency_key is not None and hash((server_id, tool_name, idempotency_key)) in self._expected

    def expect(self, server_id: str, tool_name: str, idempotency_key: str | None) -> None:
        if idempotency_key is None:
            return
        self._expected[hash((server_id, tool_name, idempotency_key))] = None
        if len(self._expected) > REPEAT_KEYS_EXPECTED_MAX:
            self._expected.popitem(last=False)

    def read(self, recorded: RecordedCall) -> tuple[ActionRequest, Answer]:
        """What was asked and where it stands, verified (I5): now, or when the store said the same, byte for byte."""
        known = self._verified.get(recorded.trace_id)
        if known is not None and known.fingerprint == recorded.fingerprint:
            self._verified.move_to_end(recorded.trace_id)
            return known.request, known.answer
        stored = recorded.read()
        request, answer = request_of(stored), answer_of(stored)
        if answer.is_final:
            self._remember(_Verified(recorded.fingerprint, recorded.size_bytes, request, answer))
        return request, answer

    def _remember(self, verified: _Verified) -> None:
        former = self._verified.pop(verified.answer.trace_id, None)
        self._verified_bytes += verified.size_bytes - (0 if former is None else former.size_bytes)
        self._verified[verified.answer.trace_id] = verified
        while len(self._verified) > REPEATS_VERIFIED_MAX or self._verified_bytes > REPEATS_VERIFIED_BYTES_MAX:
            _, oldest = self._verified.popitem(last=False)
            self._verified_bytes -= oldest.size_bytes
