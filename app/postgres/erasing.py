"""Erase a finished stream's payloads: the erasure goes onto its tenant's system stream, or nothing is erased.

Entries, digests, claims and the operator's orders to send again stay, and so do the names that heads and claims hold:
of a trace its tenant, principal, server, tool and idempotency key.
"""

from __future__ import annotations

import secrets

import asyncpg

from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import (
    BY_CODE,
    ChecksumMismatch,
    ConcurrentExecution,
    OutcomeUnknown,
    SequenceGap,
    TgaError,
    TraceErased,
    TraceNotFound,
    TraceUnfinished,
)
from app.core.limits import CLAIM_SALT_BYTES, LOCK_TIMEOUT_MS
from app.domain.clock import Clock
from app.domain.ledger.checks import AnyRecord
from app.domain.ledger.erasing import ErasableKind
from app.domain.ledger.plans import Claim
from app.domain.system.documents import SYSTEM, ErasedClaim, Erasure
from app.domain.system.log import SystemLog, plan_system
from app.postgres.sessions import Sessions
from app.postgres.state_store import verify_head

_STREAM = """
SELECT h.sequence_number, h.entry_digest, h.is_open, h.state, r.stream IS NOT NULL AS is_erased,
       h.subject, h.name, h.idempotency_key, h.payload_digest, h.effect_digest AS effect,
       e.entries, e.digests, e.artifacts
  FROM tga.heads h
  LEFT JOIN tga.erasures r USING (stream)
 CROSS JOIN LATERAL (
       SELECT array_agg(e.entry ORDER BY e.sequence_number) AS entries,
              array_agg(e.entry_digest ORDER BY e.sequence_number) AS digests,
              array_agg(e.artifact ORDER BY e.sequence_number) AS artifacts
         FROM tga.records e
        WHERE e.stream_no = h.stream_no) AS e
 WHERE h.stream = $1 AND h.tenant = $2 AND h.sequence_number > 0
"""
_RECORDED = """
SELECT sha256(a.artifact) AS digest FROM tga.erasures e
  JOIN tga.records a ON a.stream = e.system_stream AND a.sequence_number = e.sequence_number
 WHERE e.stream = $1
"""
_ERASE = "SELECT * FROM tga.erase($1, $2, $3, $4::uuid, $5, $6, $7)"
_TRIES_MAX = 50


async def erase_stream(
    sessions: Sessions,
    system: SystemLog,
    clock: Clock,
    executor_id: str,
    stream: str,
    kind: ErasableKind,
    *,
    tenant: str,
    erased_by: str,
    rationale: str,
) -> None:
    """Remove the payloads of this tenant's finished stream, which is of this kind; durable when it returns.

    Raises TraceNotFound (another tenant's is as good as none), TraceUnfinished, TraceErased. A stream that does not
    verify is not erased, whatever is wrong with it: its payloads are the evidence.
    """
    head, records, claim = await _load_finished(sessions, stream, kind, tenant)
    salt = None if claim is None else secrets.token_bytes(CLAIM_SALT_BYTES)
    sent: set[Digest] = set()
    for _ in range(_TRIES_MAX):
        now = clock.now()
        erasure = Erasure.made(
            system_id=tenant,
            recorded_at=now,
            recorded_by=erased_by,
            erased_stream=stream,
            last_sequence_number=head.sequence_number,
            last_entry_digest=head.entry_digest,
            artifact_digests=[record.entry.artifact_digest for record in records],
            claim=None if claim is None or salt is None else ErasedClaim.of(claim, salt=salt),
            rationale=rationale,
        )
        if await _is_erased(sessions, system, executor_id, erasure, salt=salt, sent=sent):
            return
    raise ConcurrentExecution(
        "others append to the system stream all the time, or the store does not answer", stream=SYSTEM.stream(tenant)
    )


async def _is_erased(
    sessions: Sessions,
    system: SystemLog,
    executor_id: str,
    erasure: Erasure,
    *,
    salt: bytes | None,
    sent: set[Digest],
) -> bool:
    """One try. False: another gateway was faster on the system stream, or the answer was lost."""
    before = await system.refresh(erasure.system_id)
    plan = plan_system(before, [erasure], executor_id=executor_id, recorded_at=erasure.recorded_at)
    (planned,) = plan.entries
    sent.add(digest_of_bytes(planned.artifact))
    try:
        (row,) = await sessions.commit(
            _ERASE,
            LOCK_TIMEOUT_MS,
            erasure.erased_stream,
            plan.stream,
            executor_id,
            planned.entry,
            planned.artifact,
            salt,
        )
    except OutcomeUnknown:
        return False
    if row["code"] in (SequenceGap.code, ChecksumMismatch.code):
        return False
    # By an earlier try of ours whose answer was lost?
    is_ours = row["code"] == TraceErased.code and await _recorded_digest(sessions, erasure.erased_stream) in sent
    if row["code"] is not None and not is_ours:
        error = BY_CODE[row["code"]](row["what"], expected=row["expected"], found=row["found"])
        raise error.at(stream=erasure.erased_stream)
    await system.refresh(erasure.system_id)
    return True


async def _recorded_digest(sessions: Sessions, stream: str) -> Digest | None:
    rows = await sessions.fetch(_RECORDED, stream)
    return Digest(rows[0]["digest"].hex()) if rows else None


async def _load_finished(
    sessions: Sessions, stream: str, kind: ErasableKind, tenant: str
) -> tuple[Head, list[AnyRecord], Claim | None]:
    """The stream and its claim, both verified: after the erasure nobody can compare them any more."""
    name = kind.documents.kind.name
    rows = await sessions.fetch(_STREAM, stream, tenant)
    if not rows:
        raise TraceNotFound(f"no such {name}", stream=stream)
    row = rows[0]
    if row["is_erased"]:
        raise TraceErased("the payloads were erased before", stream=stream)
    if row["is_open"]:
        raise TraceUnfinished(f"the {name} is not finished", found=row["state"], stream=stream)
    claim = None
    if row["idempotency_key"] is not None:
        payload_digest = Digest(row["payload_digest"].hex())
        claim = Claim(row["subject"], row["name"], row["idempotency_key"], payload_digest)
    effect = None if row["effect"] is None else Digest(row["effect"].hex())
    try:
        records = _records(kind, row)
        head = kind.verify(records, claim, effect)
        verify_head(head, stream=stream, head_sequence=row["sequence_number"], head_digest=row["entry_digest"])
    except TgaError as error:
        raise error.at(stream=stream) from None
    return head, records, claim


def _records(kind: ErasableKind, row: asyncpg.Record) -> list[AnyRecord]:
    places = zip(row["entries"] or (), row["digests"] or (), row["artifacts"] or (), strict=True)
    read = kind.documents.read
    return [read(entry, artifact, entry_digest=Digest(digest.hex())) for entry, digest, artifact in places]
