"""The blobs to which a run's documents refer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from app.domain.runs.documents import RunDocument, RunIntent
from app.domain.runs.values import ArtifactValue, BlobReference, SecretValue


def referred_by(artifact: RunDocument) -> Iterator[tuple[BlobReference, bool]]:
    """What a document refers to in the blob store, and whether that is sealed."""
    values: list[Any] = [artifact.__dict__.get(name) for name in ("value", "input", "output")]
    if isinstance(artifact, RunIntent):
        values += [getattr(artifact.request, "context", None), getattr(artifact.request, "default", None)]
    values += [resolved.value for resolved in artifact.__dict__.get("resolves", ())]
    for value in values:
        if isinstance(value, ArtifactValue | SecretValue):
            yield value.ref, isinstance(value, SecretValue)


def blobs_of(artifact: RunDocument) -> Iterator[BlobReference]:
    """What a document refers to in the blob store."""
    for ref, _ in referred_by(artifact):
        yield ref
