"""Streams: append-only, hash-chained sequences whose rules are a table.

Nothing here knows what a trace is. A `StreamKind` says which artifact may follow in which state and where it leads;
`verify_link` is the one judge of whether an entry may stand after a head, for appends, replay and verification
alike. The database's append function (app/postgres/migrations) judges by the same rules, in the
same order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from app.core.digest import GENESIS, Digest
from app.core.errors import ChecksumMismatch, InvalidTransition, SchemaViolation, SequenceGap


@dataclass(frozen=True, slots=True)
class Transition:
    """In `from_state` this artifact, with this value in its verdict field, leads to `to_state`."""

    from_state: str
    artifact_type: str
    verdict: str
    to_state: str
    is_birth: bool = False


@dataclass(frozen=True, slots=True)
class ArtifactRule:
    """What a type of artifact is called, what decides where it leads, and what it must be bound to."""

    artifact_type: str
    schema_id: str
    verdict_field: str | None = None
    binds_field: str | None = None
    settles_claim: bool = False


@dataclass(frozen=True)
class StreamKind:
    """The rules of one kind of stream. `usual_end`: the state in which most of its streams end; lists of any other are
    short, and the store has an index for them."""

    name: str
    id_field: str
    entry_schema_id: str
    birth_state: str
    artifacts: tuple[ArtifactRule, ...]
    transitions: tuple[Transition, ...]
    usual_end: str | None = None

    def stream(self, identity: str) -> str:
        """The stream's name: `kind:id`."""
        return f"{self.name}:{identity}"

    def has(self, stream: str) -> bool:
        """Whether this is the name of a stream of this kind."""
        return stream.startswith(self.name) and stream[len(self.name) : len(self.name) + 1] == ":"

    def identity_of(self, stream: str) -> str:
        """The id in `kind:id`; SchemaViolation when the stream is of another kind."""
        if not self.has(stream):
            raise SchemaViolation("the stream is of another kind", expected=f"{self.name}:id", found=stream)
        return stream[len(self.name) + 1 :]

    @cached_property
    def rule_of(self) -> Mapping[str, ArtifactRule]:
        return {rule.artifact_type: rule for rule in self.artifacts}

    @cached_property
    def next_state(self) -> Mapping[tuple[str, str, str, bool], str]:
        return {(t.from_state, t.artifact_type, t.verdict, t.is_birth): t.to_state for t in self.transitions}

    @cached_property
    def states(self) -> tuple[str, ...]:
        named = (state for t in self.transitions for state in (t.from_state, t.to_state))
        return tuple(dict.fromkeys(named))

    @cached_property
    def terminal_states(self) -> frozenset[str]:
        left = {t.from_state for t in self.transitions if not t.is_birth}
        return frozenset(state for state in self.states if state not in left)


class Head(NamedTuple):
    """Where a stream stands: its last entry, the state that made, and the artifact it committed to."""

    sequence_number: int
    entry_digest: Digest
    state: str
    artifact_digest: Digest | None

    @classmethod
    def unborn(cls, kind: StreamKind) -> Head:
        return cls(0, GENESIS, kind.birth_state, None)


class Link(NamedTuple):
    """What every entry of every kind of stream says of itself; `computed_digest` is what its bytes hash to."""

    sequence_number: int
    prev_entry_digest: str
    entry_digest: str
    computed_digest: Digest
    from_state: str
    to_state: str
    artifact_type: str
    artifact_digest: str


class Artifact(NamedTuple):
    """A parsed artifact and what its bytes hash to."""

    document: Mapping[str, object]
    computed_digest: Digest


def verify_link(kind: StreamKind, head: Head, link: Link, artifact: Artifact | None, *, identity: str) -> Head:
    """The head after `link`, or the error of the first check that fails. The checks, in their order:

    1. sequence: the next number of its stream (STATE_SEQUENCE_GAP)
    2. chain and digest: linked to the entry before, bytes and artifact as hashed (STATE_CHECKSUM_MISMATCH)
    3. transition: what the table admits (STATE_INVALID_TRANSITION)
    4. binding: the artifact is about this stream and the artifact before it (STATE_CHECKSUM_MISMATCH)

    Schemas are checked before, where bytes become documents; what else a kind binds its artifacts to is compared after.
    Without its artifact (erased, the digest stands) a link's verdict and bindings cannot be judged; the rest still is.
    """
    _verify_sequence(head, link)
    _verify_chain(head, link, artifact)
    moved = _verify_transition(kind, head, link, artifact)
    if artifact is not None:
        _verify_binding(kind, head, link, artifact, identity)
    return moved


def _verify_sequence(head: Head, link: Link) -> None:
    expected = head.sequence_number + 1
    if link.sequence_number != expected:  # I1
        raise SequenceGap("the entry is not the next of its stream", expected=expected, found=link.sequence_number)


def _verify_chain(head: Head, link: Link, artifact: Artifact | None) -> None:
    if link.prev_entry_digest != head.entry_digest:  # I5
        raise ChecksumMismatch(
            "the entry does not link to the one before it",
            expected=head.entry_digest,
            found=link.prev_entry_digest,
        )
    if link.entry_digest != link.computed_digest:  # I5
        raise ChecksumMismatch(
            "the entry's bytes do not hash to its digest",
            expected=link.entry_digest,
            found=link.computed_digest,
        )
    if artifact is not None and artifact.computed_digest != link.artifact_digest:
        raise ChecksumMismatch(
            "the artifact is not the one that the entry commits to",
            expected=link.artifact_digest,
            found=artifact.computed_digest,
        )


def _verify_binding(kind: StreamKind, head: Head, link: Link, artifact: Artifact, identity: str) -> None:
    if artifact.document.get(kind.id_field) != identity:
        raise ChecksumMismatch(
            "the artifact names another stream", expected=identity, found=artifact.document.get(kind.id_field)
        )
    rule = kind.rule_of.get(link.artifact_type)
    if rule is not None and rule.binds_field is not None:
        bound = artifact.document.get(rule.binds_field)
        if bound != head.artifact_digest:
            raise ChecksumMismatch(
                "the artifact does not bind to the one before it", expected=head.artifact_digest, found=bound
            )


def _verify_transition(kind: StreamKind, head: Head, link: Link, artifact: Artifact | None) -> Head:
    rule = kind.rule_of.get(link.artifact_type)
    is_birth = head.sequence_number == 0
    if rule is None:
        admitted: set[str] = set()
    elif artifact is None:
        admitted = {
            t.to_state
            for t in kind.transitions
            if (t.from_state, t.artifact_type, t.is_birth) == (head.state, link.artifact_type, is_birth)
        }
    else:
        verdict = "" if rule.verdict_field is None else str(artifact.document.get(rule.verdict_field))
        reached = kind.next_state.get((head.state, link.artifact_type, verdict, is_birth))
        admitted = set() if reached is None else {reached}
    if link.from_state != head.state or link.to_state not in admitted:
        leads_to = " or ".join(sorted(admitted)) or "nowhere"
        raise InvalidTransition(
            f"{head.state} does not admit this {link.artifact_type}",
            expected=f"{head.state} to {leads_to}",
            found=f"{link.from_state} to {link.to_state}",
        )
    return Head(link.sequence_number, link.computed_digest, link.to_state, Digest(link.artifact_digest))
