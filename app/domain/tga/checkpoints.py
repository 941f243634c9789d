"""Execution checkpoints of traces: whether a stored one is right (I4).

None is due: four entries are folded sooner than a checkpoint is read (docs/adr/0029). One that was written through
`write_checkpoint` is verified like everything else.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.core.canonical import parse_object
from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, SequenceGap
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import StoredCheckpoint
from app.domain.tga.execution_state import ExecutionState


def verify_stored_checkpoint(checkpoint: StoredCheckpoint, folded: ExecutionState | None) -> ExecutionState:
    """The state that it holds; raise unless its bytes hash to its digest and are what the log folds to at its entry
    (None: not known)."""
    found = digest_of_bytes(checkpoint.state)
    if found != checkpoint.checkpoint_digest:  # I4
        raise ChecksumMismatch(
            "the checkpoint's state does not hash to its digest", expected=checkpoint.checkpoint_digest, found=found
        )
    state = ExecutionState.from_json(parse_object(checkpoint.state))
    if state.sequence_number != checkpoint.sequence_number:
        raise SequenceGap(
            "the checkpoint stands in another's place", expected=checkpoint.sequence_number, found=state.sequence_number
        )
    if folded is not None and state != folded:  # I4
        raise ChecksumMismatch(
            "the checkpoint is not what the log folds to", expected=folded.digest(), found=checkpoint.checkpoint_digest
        )
    return state


def verify_erased_checkpoint(
    state: ExecutionState, head: Head, artifact_digests: Sequence[str], claim: Claim | None
) -> None:
    """Raise unless it says what entries and claim of an erased trace still say; the rest went with the payloads."""
    named = (
        state.action_request_digest,
        state.supervisor_decision_digest,
        state.tool_call_digest,
        state.tool_effect_digest,
    )
    found = [state.sequence_number, state.entry_digest, state.state, *filter(None, named)]
    expected = [head.sequence_number, head.entry_digest, head.state, *artifact_digests]
    if found != expected:  # I4
        raise ChecksumMismatch("the checkpoint does not stand on its entry", expected=expected, found=found)
    asked = (state.server_id, state.tool_name, state.idempotency_key, state.payload_digest)
    if claim is not None and asked != claim:
        raise ChecksumMismatch("the checkpoint is of another call than the claim", expected=claim[:3], found=asked[:3])
