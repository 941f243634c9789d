"""Execution checkpoints of runs (I4): the folded run at one entry, so that a put costs the same at any position.

One is due at every hundredth entry where the journal has grown by as many bytes as the last one has, or by a thousand
entries: a run with a large state writes it as seldom as that takes, and together checkpoints are no larger than the
journal (ADR 45). It is written with the plan that takes the run past that entry. The append function refuses one that
does not stand on its entry; verification compares it with the fold, and misses it where it was due.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import ChecksumMismatch, RecoveryFailed, SequenceGap
from app.core.limits import (
    RUN_CHECKPOINT_BYTES_MAX,
    RUN_CHECKPOINT_EVERY_ENTRIES,
    RUN_CHECKPOINT_KEYS_MAX,
    RUN_CHECKPOINT_LATEST_ENTRIES,
)
from app.domain.ledger.plans import PlannedCheckpoint
from app.domain.ledger.stored import StoredCheckpoint
from app.domain.runs.replay import Run


@dataclass(slots=True)
class SinceCheckpoint:
    """What has come since the last execution checkpoint of a run; of a run without one, since its start."""

    entry: int = 0  # that it stands on
    checkpoint_bytes: int = 0
    journal_bytes: int = 0  # of artifacts after it
    due_at: int | None = None  # the first entry at which another was due

    def add(self, sequence_number: int, artifact_bytes: int) -> bool:
        """One more entry; whether a checkpoint is due at it."""
        self.journal_bytes += artifact_bytes
        if sequence_number % RUN_CHECKPOINT_EVERY_ENTRIES:
            return False
        is_long = sequence_number - self.entry >= RUN_CHECKPOINT_LATEST_ENTRIES
        is_due = is_long or self.journal_bytes >= self.checkpoint_bytes
        if is_due and self.due_at is None:
            self.due_at = sequence_number
        return is_due

    def write(self, sequence_number: int, checkpoint_bytes: int) -> None:
        """A checkpoint stands on this entry."""
        self.entry, self.checkpoint_bytes = sequence_number, checkpoint_bytes
        self.journal_bytes, self.due_at = 0, None

    def is_missing(self, now: int) -> bool:
        """Whether none was written where one was due: a plan holds fewer entries than lie between two checkpoints."""
        return self.due_at is not None and now - self.due_at >= RUN_CHECKPOINT_EVERY_ENTRIES


def checkpoint_of(run: Run, *, created_at: str) -> PlannedCheckpoint:
    return PlannedCheckpoint(_state_of(run), created_at)


def _state_of(run: Run) -> bytes:
    return canonical_bytes(run.to_json(), bytes_max=RUN_CHECKPOINT_BYTES_MAX, keys_max=RUN_CHECKPOINT_KEYS_MAX)


def run_of(state: bytes) -> Run:
    """The run that a checkpoint's bytes hold; RecoveryFailed when they hold none."""
    try:
        found = parse_object(state, bytes_max=RUN_CHECKPOINT_BYTES_MAX, keys_max=RUN_CHECKPOINT_KEYS_MAX)
        return Run.from_json(found)
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
    if folded is not None and folded.has_left_children and not run.has_left_children:
        folded = replace(folded, has_left_children=False)  # a checkpoint of an earlier version does not say it
    expected = None if folded is None else digest_of_bytes(_state_of(folded))
    if expected not in (None, found):  # I4
        raise ChecksumMismatch("the checkpoint is not what the journal folds to", expected=expected, found=found)
