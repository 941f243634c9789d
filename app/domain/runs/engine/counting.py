"""What is counted of a change of a run, once it is stored."""

from __future__ import annotations

from app.core.instruments import Instruments
from app.domain.runs.documents import RunAttempt, RunCheckpoint, RunEscalation
from app.domain.runs.engine.work import Work
from app.domain.runs.values import ArtifactValue, SecretValue, Value


def count_change(instruments: Instruments, work: Work) -> None:
    state = work.run.head.state
    if state != work.state_before:
        instruments.run_changes.add((state,))
    for artifact, size_bytes in zip(work.added, work.sizes_bytes(), strict=True):
        match artifact:
            case RunCheckpoint():
                _count_checkpoint(instruments, artifact.value, size_bytes)
            case RunAttempt() if artifact.change != "FENCED":  # every put that is refused is counted where it is
                instruments.leases.add((artifact.change.lower(),))
            case RunEscalation():
                instruments.escalations.add()


def _count_checkpoint(instruments: Instruments, value: Value | None, size_bytes: int) -> None:
    """Of a value that stands in the journal the whole document counts: its own size is not known apart."""
    tier = "none" if value is None else value.tier
    instruments.checkpoints.add((tier,))
    instruments.checkpoint_bytes.add(
        (tier,), value.ref.size_bytes if isinstance(value, ArtifactValue | SecretValue) else size_bytes
    )
