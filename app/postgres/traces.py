"""The runtime's Traces on PostgreSQL: load a trace whole and verified, find claims."""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Final

import asyncpg
from pydantic import ValidationError

from app.core.canonical import parse_object
from app.core.digest import Digest
from app.core.errors import (
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    TgaError,
    TraceErased,
    TraceNotFound,
)
from app.domain.ledger.stored import StoredCheckpoint
from app.domain.tga.checkpoints import verify_stored_checkpoint
from app.domain.tga.documents import Resolution, TraceId
from app.domain.tga.ports import RecordedCall, StoredTrace
from app.domain.tga.replay import LogRecord, fold, head_of, record_from_bytes
from app.domain.tga.transitions import TRACE
from app.postgres.call_lookup import CallLookup
from app.postgres.owner import PostgresOwner
from app.postgres.ownership import Executor
from app.postgres.sessions import Sessions
from app.postgres.state_store import verify_head

_LOOKED_UP = "LEFT JOIN LATERAL (SELECT * FROM {table} o WHERE o.stream = h.stream LIMIT 1) AS {name} ON true"
# All of a trace and of its claim: one statement, one snapshot, one round trip.
_RECORDED = """
SELECT {place}h.stream, h.payload_digest, s.sealed_salt,
       h.sequence_number, h.entry_digest, h.owner::text, h.waiting, h.effect_digest AS effect,
       e.entries, e.digests, e.artifacts, a.times, a.resolution,
       k.checkpoint_state, k.checkpoint_digest, k.sequence_number AS checkpoint_sequence,
       s.stream IS NOT NULL AS has_secrets, r.stream IS NOT NULL AS is_erased
  FROM {heads}
  LEFT JOIN tga.sealed s ON s.stream = h.stream
  LEFT JOIN tga.erasures r ON r.stream = h.stream
 CROSS JOIN LATERAL (
       SELECT array_agg(e.entry ORDER BY e.sequence_number) AS entries,
              array_agg(e.entry_digest ORDER BY e.sequence_number) AS digests,
              array_agg(e.artifact ORDER BY e.sequence_number) AS artifacts
         FROM tga.records e
        WHERE e.stream_no = h.stream_no) AS e
  LEFT JOIN LATERAL (
       SELECT k.* FROM tga.execution_checkpoints k WHERE k.stream = h.stream
        ORDER BY k.sequence_number DESC LIMIT 1) AS k ON true
 CROSS JOIN LATERAL (
       SELECT array_agg(to_char(d.started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
                        ORDER BY d.attempt) AS times,
              (array_agg(d.resolution ORDER BY d.attempt DESC) FILTER (WHERE d.resolution IS NOT NULL))[1] AS resolution
         FROM tga.dispatch_attempts d WHERE d.stream = h.stream) AS a
"""
_TRACE = _RECORDED.format(place="", heads="(SELECT $1::text AS stream) AS asked LEFT JOIN tga.heads h USING (stream)")
_CALL = _RECORDED.format(place="", heads="tga.heads h") + (
    " WHERE h.subject = $1 AND h.name = $2 AND h.idempotency_key = $3"
)
# Of many keys. Each of what is joined is found by its index, key by key, however the planner counts: LIMIT keeps it
# from joining whole tables.
_CALLS = (
    _RECORDED.replace("LEFT JOIN tga.sealed s ON s.stream = h.stream", _LOOKED_UP.format(table="tga.sealed", name="s"))
    .replace("LEFT JOIN tga.erasures r ON r.stream = h.stream", _LOOKED_UP.format(table="tga.erasures", name="r"))
    .format(
        place="u.place::integer AS place, ",
        heads="""unnest($1::text[], $2::text[], $3::text[]) WITH ORDINALITY AS u(subject, name, key, place)
 CROSS JOIN LATERAL (
       SELECT * FROM tga.heads w WHERE w.subject = u.subject AND w.name = u.name AND w.idempotency_key = u.key
        LIMIT 1) AS h""",
    )
)
_JUDGED = (
    "stream",
    "sequence_number",
    "entry_digest",
    "owner",
    "waiting",
    "effect",
    "times",
    "resolution",
    "checkpoint_state",
    "checkpoint_digest",
    "checkpoint_sequence",
    "has_secrets",
    "is_erased",
)
_EXPIRED = """
SELECT stream FROM tga.at_rest WHERE waiting = 'supervisor' AND expires_at <= statement_timestamp()
 ORDER BY expires_at LIMIT $1
"""


class PostgresTraces(PostgresOwner):
    """One executor's view of the traces: it owns streams, and reads what a trace is."""

    def __init__(self, sessions: Sessions, executor: Executor, url: str, **more: int) -> None:
        super().__init__(sessions, executor, url, **more)
        self._lookup: Final = CallLookup(sessions, one=_CALL, grouped=_CALLS)

    async def list_expired(self, *, limit: int) -> list[TraceId]:
        rows = await self._sessions.fetch(_EXPIRED, limit)
        return [TraceId(TRACE.identity_of(row["stream"])) for row in rows]

    async def is_known(self, trace_id: TraceId) -> bool:
        stream = TRACE.stream(trace_id)
        return bool(await self._sessions.fetch("SELECT FROM tga.heads WHERE stream = $1", stream))

    async def find_call(self, server_id: str, tool_name: str, idempotency_key: str) -> RecordedCall | None:
        row = await self._lookup.find(server_id, tool_name, idempotency_key)
        return None if row is None else recorded_call(row)

    async def load_trace(self, trace_id: TraceId) -> StoredTrace:
        """The trace, every link and digest of it verified (I5), its checkpoint (I4) and its head compared with it."""
        stream = TRACE.stream(trace_id)
        (row,) = await self._sessions.fetch(_TRACE, stream)
        return _verified(row, stream)


def recorded_call(row: asyncpg.Record) -> RecordedCall:
    """What stands in a row of a claim and its trace."""
    stream = row["stream"]
    stored = [*(row["entries"] or ()), *(row["digests"] or ()), *(row["artifacts"] or ())]
    # The sizes go first, so that no two rows are written alike.
    facts = repr(([None if part is None else len(part) for part in stored], [row[name] for name in _JUDGED]))
    fingerprint = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
    written = b"".join([part for part in stored if part is not None])
    fingerprint.update(written)
    return RecordedCall(
        TraceId(TRACE.identity_of(stream)),
        Digest(row["payload_digest"].hex()),
        row["sealed_salt"],
        fingerprint.digest(),
        len(written),
        partial(_verified, row, stream),
    )


def _verified(row: asyncpg.Record, stream: str) -> StoredTrace:
    if not row["entries"]:
        if row["sequence_number"]:
            raise SequenceGap("the head stands further than the log", expected=1, found=0, stream=stream)
        raise TraceNotFound("no such trace", stream=stream)
    if row["is_erased"]:
        raise TraceErased("the trace's payloads were erased", stream=stream)
    records = []
    for place, (raw, digest, artifact) in enumerate(
        zip(row["entries"], row["digests"], row["artifacts"], strict=True), 1
    ):
        try:
            records.append(record_from_bytes(raw, artifact, entry_digest=Digest(digest.hex())))
            if records[-1].stream != stream:
                raise SequenceGap("the entry is of another stream", expected=stream, found=records[-1].stream)
        except TgaError as error:
            raise error.at(stream=stream, sequence_number=place) from None
    state = fold(records)
    if state is None:
        raise RecoveryFailed("the log folds to nothing", stream=stream)
    verify_head(head_of(state), stream=stream, head_sequence=row["sequence_number"], head_digest=row["entry_digest"])
    if row["checkpoint_state"] is not None:
        _verify_checkpoint(row, records, stream)
    return StoredTrace(
        state=state,
        records=records,
        attempt_times=row["times"] or [],
        resolution=_resolution(row["resolution"], stream),
        claim_effect=None if row["effect"] is None else Digest(row["effect"].hex()),
        owner=row["owner"],
        waiting=row["waiting"],
        has_secrets=row["has_secrets"],
    )


def _resolution(raw: bytes | None, stream: str) -> Resolution | None:
    if raw is None:
        return None
    try:
        return Resolution.model_validate(parse_object(raw))
    except ValidationError as error:
        raise SchemaViolation("the stored resolution cannot be read", found=error, stream=stream) from None


def _verify_checkpoint(row: asyncpg.Record, records: list[LogRecord], stream: str) -> None:
    place = row["checkpoint_sequence"]
    checkpoint = StoredCheckpoint(place, row["checkpoint_state"], Digest(row["checkpoint_digest"].hex()))
    try:
        if place > len(records):
            raise SequenceGap("the checkpoint stands on an entry that is missing", expected=place, found=len(records))
        verify_stored_checkpoint(checkpoint, fold(records[:place]))  # I4
    except TgaError as error:
        raise error.at(stream=stream, sequence_number=place) from None
