"""Execution checkpoints of runs (I4): the folded run at one entry, so that a put costs the same at any position.

One is written with the plan that takes a run past every hundredth entry, on the last entry of that plan or on any other
of it. The append function refuses one that does not stand on its entry; verification compares it with the fold.
"""

from __future__ import annotations

from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, RecoveryFailed, SequenceGap
from app.core.limits import RUN_CHECKPOINT_BYTES_MAX, RUN_CHECKPOINT_EVERY_ENTRIES
from app.domain.ledger.plans import PlannedCheckpoint
from app.domain.ledger.stored import StoredCheckpoint
from app.domain.runs.replay import Run


def is_due(*, before: int, after: int) -> bool:
    """Whether a plan that takes a run from the entry `before` to the entry `after` writes a checkpoint."""
    return after // RUN_CHECKPOINT_EVERY_ENTRIES > before // RUN_CHECKPOINT_EVERY_ENTRIES


def is_missing(*, last: int, now: int) -> bool:
    """Whether none was written where one was due: a plan holds fewer entries than lie between two checkpoints."""
    return now - last >= 2 * RUN_CHECKPOINT_EVERY_ENTRIES


def checkpoint_of(run: Run, *, created_at: str) -> PlannedCheckpoint:
    return PlannedCheckpoint(_state_of(run), created_at)


def _state_of(run: Run) -> bytes:
    return canonical_bytes(run.to_json())


def run_of(state: bytes) -> Run:
    """The run that a checkpoint's bytes hold; RecoveryFailed when they hold none."""
    try:
        return Run.from_json(parse_object(state, bytes_max=RUN_CHECKPOINT_BYTES_MAX))
    except (AttributeError, KeyError, TypeError, ValueError):
        raise RecoveryFailed("the checkpoint holds no run") from None


def verify_stored_checkpoint(checkpoint: StoredCheckpoint, folded: Run | None) -> None:
    """Raise unless its bytes hash to its digest and are what the journal folds to at its entry (None: not known)."""
    found = digest_of_bytes(checkpoint.state)
    if found != checkpoint.checkpoint_digest:  # I4
        raise ChecksumMismatch(
            "the checkpoint's state does not hash to its digest", expected=checkpoint.checkpoint_digest, found=found
        )
    run = run_of(checkpoint.state)
    if run.head.sequence_number != checkpoint.sequence_number:
        raise SequenceGap(
            "the checkpoint stands in another's place",
            expected=checkpoint.sequence_number,
            found=run.head.sequence_number,
        )
    expected = None if folded is None else digest_of_bytes(_state_of(folded))
    if expected not in (None, found):  # I4
        raise ChecksumMismatch("the checkpoint is not what the journal folds to", expected=expected, found=found)
