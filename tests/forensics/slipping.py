"""How a superuser slips a whole trace into the tables, with the transaction number of his choice."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.tga.documents import ActionRequest
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord
from tests.conftest import Admin


async def slip_in(admin: Admin, records: Sequence[LogRecord], *, xid: int) -> str:
    """Entries, artifacts, claim and head, all as they should be; no guard minds an INSERT. The stream."""
    stream, last, request = records[0].stream, records[-1].entry, records[0].artifact
    assert isinstance(request, ActionRequest)
    claim = decide_claim(records)
    assert claim is not None
    number = await admin.fetchval(
        "INSERT INTO tga.heads (stream_no, stream, sequence_number, entry_digest, state, artifact_digest, is_open,"
        " tenant, principal_id, subject, name, idempotency_key, payload_digest, effect_digest)"
        " VALUES (nextval('tga.stream_numbers'), $1, $2, $3, $4, $5, false, $6, $7, $8, $9, $10, $11, $5)"
        " RETURNING stream_no",
        stream,
        last.sequence_number,
        bytes.fromhex(last.entry_digest),
        last.to_state,
        bytes.fromhex(last.artifact_digest),
        request.principal.tenant,
        request.principal.principal_id,
        *claim[:3],
        bytes.fromhex(claim.payload_digest),
    )
    for record in records:
        entry = record.entry
        await admin.execute(
            "INSERT INTO tga.links (stream_no, sequence_number, xid, place, places, executor_id, entry_digest,"
            " prev_entry_digest, artifact_digest, recorded_at, artifact_type, from_state, to_state)"
            " VALUES ($1, $2::bigint, $3::text::xid8, $2::bigint, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
            number,
            entry.sequence_number,
            str(xid),
            len(records),
            entry.executor_id,
            bytes.fromhex(entry.entry_digest),
            bytes.fromhex(entry.prev_entry_digest),
            bytes.fromhex(entry.artifact_digest),
            entry.recorded_at,
            entry.artifact_type,
            entry.from_state,
            entry.to_state,
        )
    artifacts = [record.artifact.to_bytes() for record in records if record.artifact is not None]
    await admin.execute("INSERT INTO tga.payloads VALUES ($1, 1, $2)", number, artifacts)
    return stream
