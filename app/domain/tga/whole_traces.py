"""Read a usual trace from its request to its end at once, for callers that have all its rows at hand.

Nearly all rows of a ledger are those of traces that the policy allowed and a tool server answered: four rows, or two if
the policy denied them. Each row must be what `read_usual` (usual_artifacts.py) accepts after the one before; together
most of what is compared is the same bytes, so that nothing need be remembered from row to row. None says nothing: the
walk judges the rows one after the other. Tests compare the two over changed bytes.
"""

from __future__ import annotations

import re
from binascii import hexlify
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, NamedTuple

from app.core.canonical import read_canonical
from app.core.chain import Head
from app.core.digest import GENESIS, Digest
from app.core.limits import ARTIFACT_BYTES_MAX
from app.domain.ledger.documents import TIME_PATTERN, UUID7_PATTERN
from app.domain.ledger.plans import Claim
from app.domain.ledger.records import TIME_CHARS, UUID_CHARS
from app.domain.tga.replay import TRACE_DOCUMENTS
from app.domain.tga.usual_artifacts import (
    AFTER_REQUESTED,
    ARGUMENTS,
    CALL,
    DECISION,
    REQUEST,
    effect_parts,
    is_bounded,
    payload_digest_in,
)

ROWS_CALLED: Final = 4
ROWS_DENIED: Final = 2


class _Spelled(NamedTuple):
    """How an entry is written, without what it has of its own; the same as it is compared; where executor and time
    begin in the latter."""

    entry: bytes
    compared: bytes
    by: int
    at: int


class Spelling(NamedTuple):
    """The entries of a trace that was completed, failed or denied, in their order."""

    completed: tuple[_Spelled, ...]
    failed: tuple[_Spelled, ...]
    denied: tuple[_Spelled, ...]


def _spelling(*, is_escaped: bool) -> Spelling:
    def spelled(artifact_type: str, from_state: str, to_state: str, number: int) -> _Spelled:
        entry, by, at = TRACE_DOCUMENTS.spelled(artifact_type, from_state, to_state, number)
        if not is_escaped:
            return _Spelled(entry, entry, by, at)
        # A quotation mark has a backslash before it, there is nothing else to escape. What goes in has neither.
        own = ("0" * 64, "0" * UUID_CHARS, "0" * 64, "0" * TIME_CHARS, "0" * UUID_CHARS)
        written = entry % tuple(text.encode("ascii") for text in own)
        marks = [by + written[:by].count(b'"'), at + written[:at].count(b'"')]
        return _Spelled(entry, entry.replace(b'"', b'\\"'), *marks)

    asked = spelled("action_request", "PENDING", "PENDING", 1)
    denied = spelled("supervisor_decision", "PENDING", "DENIED", 2)
    allowed = spelled("supervisor_decision", "PENDING", "AUTHORIZED", 2)
    called = spelled("tool_call", "AUTHORIZED", "EXECUTING", 3)
    completed, failed = (spelled("tool_effect", "EXECUTING", end, 4) for end in ("COMPLETED", "FAILED"))
    return Spelling((asked, allowed, called, completed), (asked, allowed, called, failed), (asked, denied))


STORED: Final = _spelling(is_escaped=False)
IN_LINES: Final = _spelling(is_escaped=True)  # of a bundle: a text within a text
_BY_AND_AT: Final = re.compile(f"(?:{UUID7_PATTERN}{TIME_PATTERN})*".encode("ascii"))
_GENESIS: Final = GENESIS.encode("ascii")


class WholeTrace(NamedTuple):
    """A trace that has ended, and is right by itself. `claim`: of its key, if it has one. `is_called`: a call was made,
    and has an effect. `attempts`: that the effect lists."""

    head: Head
    entries: list[bytes]
    entry_digests: list[bytes]  # in hex
    claim: Claim | None
    is_called: bool
    tenant: str
    principal_id: str
    server_id: str
    tool_name: str
    expires_at: str | None
    attempts: int


def read_whole(
    trace_id: bytes, compared: Sequence[bytes], artifacts: Sequence[bytes], spelling: Spelling
) -> WholeTrace | None:
    """The trace of this id that these rows are, in their order and all of them; its entries are spelled so."""
    if len(artifacts) not in (ROWS_DENIED, ROWS_CALLED):
        return None
    request, decision = artifacts[0], artifacts[1]
    split = request.rfind(AFTER_REQUESTED)
    if split <= 0 or not request.startswith(ARGUMENTS) or not is_bounded(request) or not is_bounded(decision):
        return None
    asked, decided = REQUEST.fullmatch(request, split), DECISION.fullmatch(decision)
    if asked is None or decided is None:
        return None
    expires_at, key, principal_id, tenant, server_id, tool_class, tool_name, of_trace = asked.groups()
    if of_trace != trace_id or (key is None and tool_class == b"write"):  # I2
        return None
    if read_canonical(request[len(ARGUMENTS) : split], bytes_max=ARTIFACT_BYTES_MAX) is None:
        return None
    digests = [hexlify(sha256(artifact).digest()) for artifact in artifacts]
    bound, verdict, of_trace = decided.groups()
    if bound != digests[0] or of_trace != trace_id:
        return None
    attempts, is_called = 0, len(artifacts) == ROWS_CALLED
    if not is_called:
        if verdict != b"DENY":
            return None
        state, spelled = "DENIED", spelling.denied
    else:
        call = artifacts[2]
        sent = CALL.fullmatch(call, split) if verdict == b"APPROVE" and is_bounded(call) else None
        if sent is None or call[:split] != request[:split]:  # I3: these are the arguments
            return None
        same_key, on_unknown, reconcile_tool, to_server, bound, call_id, same_class, to_tool, of_trace = sent.groups()
        if (same_key, to_server, same_class, to_tool) != (key, server_id, tool_class, tool_name):  # I3
            return None
        if bound != digests[1] or of_trace != trace_id or (on_unknown == b"reconcile") != (reconcile_tool is not None):
            return None
        effect = _read_effect(artifacts[3], trace_id, bound=digests[2], call_id=call_id)
        if effect is None:
            return None
        is_success, attempts = effect
        state, spelled = ("COMPLETED", spelling.completed) if is_success else ("FAILED", spelling.failed)
    before, by_and_at = _GENESIS, b""
    entries, entry_digests = [], []
    for found, digest, (template, as_compared, by, at) in zip(compared, digests, spelled, strict=True):
        own = (digest, found[by : by + UUID_CHARS], before, found[at : at + TIME_CHARS], trace_id)
        if found != as_compared % own:  # I1, I5
            return None
        by_and_at += own[1] + own[3]
        entry = template % own
        before = hexlify(sha256(entry).digest())
        entries.append(entry)
        entry_digests.append(before)
    if _BY_AND_AT.fullmatch(by_and_at) is None:
        return None
    server, tool = server_id.decode("ascii"), tool_name.decode("ascii")
    claim = None
    if key is not None:
        claim = Claim(server, tool, key.decode("ascii"), payload_digest_in(request, split, server_id, tool_name))
    return WholeTrace(
        Head(len(entries), Digest(before.decode("ascii")), state, Digest(digests[-1].decode("ascii"))),
        entries,
        entry_digests,
        claim,
        is_called,
        tenant.decode("ascii"),
        principal_id.decode("ascii"),
        server,
        tool,
        None if expires_at is None else expires_at.decode("ascii"),
        attempts,
    )


def _read_effect(raw: bytes, trace_id: bytes, *, bound: bytes, call_id: bytes) -> tuple[bool, int] | None:
    """Whether the call succeeded, and how many attempts are listed."""
    parts = effect_parts(raw) if is_bounded(raw) else None
    if parts is None:
        return None
    said, last = parts
    if last.groups() != (bound, call_id, trace_id):  # I3
        return None
    attempts, no_error, outcome = said.groups()
    if (outcome == b"SUCCESS") != (no_error is not None):
        return None
    return no_error is not None, attempts.count(b'"attempt":')
