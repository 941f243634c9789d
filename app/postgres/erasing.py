"""Erase a finished stream's payloads: the erasure goes onto its tenant's system stream, or nothing is erased.

Entries, digests, claims and the operator's orders to send again stay, and so do the names that heads and claims hold:
of a trace its tenant, principal, server, tool and idempotency key.
"""

from __future__ import annotations

import secrets
from typing import Any

import asyncpg

from app.core.chain import Head
from app.core.digest import GENESIS, Digest, digest_of_bytes
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
from app.core.limits import CLAIM_SALT_BYTES, ERASURE_DIGESTS_MAX, LOCK_TIMEOUT_MS
from app.domain.clock import Clock
from app.domain.ledger.checks import AnyRecord, Report, with_payload
from app.domain.ledger.erasing import ErasableKind
from app.domain.ledger.plans import Claim
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.system.documents import SYSTEM, ErasedClaim, Erasure
from app.domain.system.log import SystemLog, plan_system
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.state_store import verify_head

_STREAM = """
SELECT h.stream_no, h.sequence_number, h.entry_digest, h.is_open, h.state, h.artifact_digest,
       r.stream IS NOT NULL AS is_erased,
       h.subject, h.name, h.idempotency_key, h.payload_digest, h.effect_digest AS effect
  FROM tga.heads h
  LEFT JOIN tga.erasures r USING (stream)
 WHERE h.stream = $1 AND h.tenant = $2 AND h.sequence_number > 0
"""
_RECORDS = """
SELECT e.entry, e.entry_digest, e.artifact FROM tga.records e WHERE e.stream_no = $1 ORDER BY e.sequence_number
"""
_DIGESTS = """
SELECT l.sequence_number, l.artifact_digest FROM tga.links l
 WHERE l.stream_no = $1 AND l.sequence_number > $2 ORDER BY l.sequence_number LIMIT $3
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

    Raises TraceNotFound or RunNotFound (another tenant's is as good as none), TraceUnfinished or RunUnfinished,
    TraceErased or RunErased, and StreamInUse while an open run refers to it. A stream that does not verify is not
    erased, whatever is wrong with it: its payloads are the evidence.
    """
    head, payloads, claim = await _load_finished(sessions, stream, kind, tenant)
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
            claim=None if claim is None or salt is None else ErasedClaim.of(claim, salt=salt),
            rationale=rationale,
            **payloads,
        )
        if await _is_erased(sessions, system, executor_id, erasure, kind, salt=salt, sent=sent):
            return
    raise ConcurrentExecution(
        "others append to the system stream all the time, or the store does not answer", stream=SYSTEM.stream(tenant)
    )


async def _is_erased(
    sessions: Sessions,
    system: SystemLog,
    executor_id: str,
    erasure: Erasure,
    kind: ErasableKind,
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
        # The function speaks of traces, whatever the stream is.
        of_kind = {
            TraceNotFound.code: kind.not_found,
            TraceErased.code: kind.erased,
            TraceUnfinished.code: kind.unfinished,
        }
        raised = of_kind.get(row["code"], BY_CODE[row["code"]])
        error = raised(row["what"], expected=row["expected"], found=row["found"])
        raise error.at(stream=erasure.erased_stream)
    await system.refresh(erasure.system_id)
    return True


async def _recorded_digest(sessions: Sessions, stream: str) -> Digest | None:
    rows = await sessions.fetch(_RECORDED, stream)
    return Digest(rows[0]["digest"].hex()) if rows else None


async def _load_finished(
    sessions: Sessions, stream: str, kind: ErasableKind, tenant: str
) -> tuple[Head, dict[str, Any], Claim | None]:
    """The stream's head, what the erasure says of its payloads, and its claim; all of it verified: after the erasure
    they cannot be compared any more."""
    name = kind.documents.kind.name
    rows = await sessions.fetch(_STREAM, stream, tenant)
    if not rows:
        raise kind.not_found(f"no such {name}", stream=stream)
    row = rows[0]
    if row["is_erased"]:
        raise kind.erased("the payloads were erased before", stream=stream)
    if row["is_open"]:
        raise kind.unfinished(f"the {name} is not finished", found=row["state"], stream=stream)
    claim = None
    if row["idempotency_key"] is not None:
        payload_digest = Digest(row["payload_digest"].hex())
        claim = Claim(row["subject"], row["name"], row["idempotency_key"], payload_digest)
    try:
        if kind.verify is None:
            head = await _verify_in_pages(sessions, stream, row)
        else:
            effect = None if row["effect"] is None else Digest(row["effect"].hex())
            head = kind.verify(await _records(sessions, kind, row["stream_no"]), claim, effect)
        verify_head(head, stream=stream, head_sequence=row["sequence_number"], head_digest=row["entry_digest"])
    except TgaError as error:
        again = await sessions.fetch(_STREAM, stream, tenant)
        if again and again[0]["is_erased"]:  # by another, while it was read
            raise kind.erased("the payloads were erased before", stream=stream) from None
        raise error.at(stream=stream) from None
    return head, await _payloads(sessions, row["stream_no"], head.sequence_number), claim


async def _verify_in_pages(sessions: Sessions, stream: str, row: asyncpg.Record) -> Head:
    """By the walk of `tga verify`, which follows its entries to the head that is stored; it raises what it finds."""
    async with open_reader(sessions, stream=stream) as reader:
        async for error in verify_ledger(reader, stream_checks(), Report()):
            raise error
    return Head(
        row["sequence_number"], Digest(row["entry_digest"].hex()), row["state"], Digest(row["artifact_digest"].hex())
    )


async def _records(sessions: Sessions, kind: ErasableKind, stream_no: int) -> list[AnyRecord]:
    read = kind.documents.read
    return [
        read(row["entry"], row["artifact"], entry_digest=Digest(row["entry_digest"].hex()))
        for row in await sessions.fetch(_RECORDS, stream_no)
    ]


async def _payloads(sessions: Sessions, stream_no: int, entries: int) -> dict[str, Any]:
    """The fields of an erasure that say which payloads went: their digests, or of many what they fold to."""
    listed: list[str] = []
    folded, after = GENESIS, 0
    while rows := await sessions.fetch(_DIGESTS, stream_no, after, ERASURE_DIGESTS_MAX):
        after = rows[-1]["sequence_number"]
        for row in rows:
            digest = row["artifact_digest"].hex()
            folded = with_payload(folded, digest)
            listed += [digest] if entries <= ERASURE_DIGESTS_MAX else []
    if entries <= ERASURE_DIGESTS_MAX:
        return {"artifact_digests": listed}
    return {"artifact_digests": [], "payloads_digest": folded}
