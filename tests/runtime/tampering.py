"""What someone does who has the database in their hands: triggers off, documents rewritten, chains computed anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import GENESIS, digest_of_bytes
from tests.attacker import attacking
from tests.conftest import Admin

untriggered = attacking


async def rewrite(admin: Admin, stream: str, change: Callable[[int, dict[str, Any]], dict[str, Any]]) -> None:
    """Every artifact of a stream as `change` says, with all bindings, digests, links and the head computed anew.

    Checkpoints and what a claim says of the effect follow as well: whoever does this leaves no loose end.
    """
    rows = await admin.fetch(
        "SELECT sequence_number, entry, artifact FROM tga.entries JOIN tga.artifacts USING (stream, sequence_number)"
        " WHERE stream = $1 ORDER BY sequence_number",
        stream,
    )
    binds = {"supervisor_decision": "action_request_digest", "tool_call": "supervisor_decision_digest"}
    binds["tool_effect"] = "tool_call_digest"
    prev_entry, prev_artifact, moved = GENESIS, None, dict[str, str]()
    async with untriggered(admin):
        for row in rows:
            place, entry = row["sequence_number"], dict(parse_object(row["entry"]))
            artifact = change(place, dict(parse_object(row["artifact"], bytes_max=2**20)))
            if (field := binds.get(str(entry["artifact_type"]))) is not None and prev_artifact is not None:
                artifact[field] = prev_artifact
            raw_artifact = canonical_bytes(artifact)
            prev_artifact = digest_of_bytes(raw_artifact)
            moved[str(entry["artifact_digest"])] = prev_artifact
            entry |= {"prev_entry_digest": prev_entry, "artifact_digest": prev_artifact}
            raw_entry = canonical_bytes(entry)
            prev_entry = digest_of_bytes(raw_entry)
            moved[digest_of_bytes(row["entry"])] = prev_entry
            at = (stream, place)
            await admin.execute(
                "UPDATE tga.entries SET entry = $3, entry_digest = sha256($3)"
                " WHERE (stream, sequence_number) = ($1, $2)",
                *at,
                raw_entry,
            )
            await admin.execute(
                "UPDATE tga.artifacts SET artifact = $3 WHERE (stream, sequence_number) = ($1, $2)", *at, raw_artifact
            )
        await admin.execute(
            "UPDATE tga.heads SET entry_digest = decode($2, 'hex'), artifact_digest = decode($3, 'hex')"
            " WHERE stream = $1",
            stream,
            prev_entry,
            prev_artifact,
        )
        await admin.execute(
            "UPDATE tga.claim_effects SET artifact_digest = decode($2, 'hex') WHERE stream = $1", stream, prev_artifact
        )
        for row in await admin.fetch(
            "SELECT sequence_number, checkpoint_state FROM tga.execution_checkpoints WHERE stream = $1", stream
        ):
            state = {
                field: moved.get(value, value) if isinstance(value, str) else value
                for field, value in parse_object(row["checkpoint_state"]).items()
            }
            raw = canonical_bytes(state)
            await admin.execute(
                "UPDATE tga.execution_checkpoints SET checkpoint_state = $3, checkpoint_digest = sha256($3)"
                " WHERE (stream, sequence_number) = ($1, $2)",
                stream,
                row["sequence_number"],
                raw,
            )
