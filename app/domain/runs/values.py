"""Values in a run's journal: where each is kept, and whether a replay may rely on it."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from app.domain import addresses
from app.domain.ledger.documents import Count, Name, Part, Sha256, Uuid7

RunId = addresses.RunId
Path = addresses.Path
Resume = Literal["snapshot", "recompute"]


class InlineValue(Part):
    """In the journal itself. How large it may be is for the engine to say (RUN_INLINE_BYTES_MAX)."""

    _depth: ClassVar[int] = 4  # at most: in a question's context, or in what an operator resolves
    tier: Literal["inline"]
    value: Any


class BlobReference(Part):
    """Bytes in the blob store, by their digest: stored and verified before the entry that refers to them."""

    sha256: Sha256
    size_bytes: Count
    media_type: Name
    serializer: Literal["json", "bytes", "text", "pydantic"]


class ArtifactValue(Part):
    tier: Literal["artifact"]
    ref: BlobReference


class SecretValue(Part):
    """Sealed bytes in the blob store, and what they are committed to (sealing.py): only workers get the value."""

    tier: Literal["secret"]
    ref: BlobReference
    commitment: Sha256


class EventValue(Part):
    """Shown to followers; the program gets null."""

    _depth: ClassVar[int] = 4
    tier: Literal["event"]
    value: Any


class TransientValue(Part):
    """Not recorded: the operation runs again in each attempt."""

    tier: Literal["transient"]


class EffectValue(Part):
    """What a tool answered: it stands on the tool call's own trace."""

    tier: Literal["effect"]
    trace_id: Uuid7
    tool_effect_digest: Sha256


class ChildValue(Part):
    """What a child run returned: it stands on the child's last entry."""

    tier: Literal["run"]
    run_id: RunId
    entry_digest: Sha256


Value = Annotated[
    InlineValue | ArtifactValue | SecretValue | EventValue | TransientValue | EffectValue | ChildValue,
    Field(discriminator="tier"),
]
