"""How a superuser slips a whole trace into the tables, with the transaction number of his choice."""

from __future__ import annotations

from collections.abc import Sequence

from app.domain.tga.documents import ActionRequest
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import LogRecord, fold
from tests.conftest import Admin


async def slip_in(admin: Admin, records: Sequence[LogRecord], *, xid: int) -> str:
    """Entries, artifacts, claim, checkpoint and head, all as they should be; no guard minds an INSERT. The stream."""
    stream, last, request = records[0].stream, records[-1].entry, records[0].artifact
    assert isinstance(request, ActionRequest)
    for record in records:
        assert record.artifact is not None
        place = (stream, record.entry.sequence_number)
        await admin.execute(
            "INSERT INTO tga.entries (stream, sequence_number, entry, entry_digest, xid)"
            " VALUES ($1, $2, $3, $4, $5::text::xid8)",
            *place,
            record.entry.body_bytes(),
            bytes.fromhex(record.entry.entry_digest),
            str(xid),
        )
        await admin.execute("INSERT INTO tga.artifacts VALUES ($1, $2, $3)", *place, record.artifact.to_bytes())
        if record.entry.to_state == "EXECUTING":
            state = fold(records[: record.entry.sequence_number])
            assert state is not None
            await admin.execute(
                "INSERT INTO tga.execution_checkpoints VALUES ($1, $2, $3, sha256($3), $4)",
                *place,
                state.to_bytes(),
                record.entry.recorded_at,
            )
    await admin.execute(
        "INSERT INTO tga.heads (stream, sequence_number, entry_digest, state, artifact_digest, is_open, tenant,"
        " principal_id, server_id, tool_name) VALUES ($1, $2, $3, $4, $5, false, $6, $7, $8, $9)",
        stream,
        last.sequence_number,
        bytes.fromhex(last.entry_digest),
        last.to_state,
        bytes.fromhex(last.artifact_digest),
        request.principal.tenant,
        request.principal.principal_id,
        request.server_id,
        request.tool_name,
    )
    claim = decide_claim(records)
    assert claim is not None
    await admin.execute(
        "INSERT INTO tga.claims VALUES ($1, $2, $3, $4, $5)", *claim[:3], stream, bytes.fromhex(claim.payload_digest)
    )
    await admin.execute("INSERT INTO tga.claim_effects VALUES ($1, $2)", stream, bytes.fromhex(last.artifact_digest))
    return stream
