"""From stored bytes to an entry with its artifact, and back: one reader and one planner for every kind of stream.

A kind brings its documents (`StreamDocuments`): the model of its entries, and a model for each type of artifact. What
its rules are stands in its `StreamKind`; nothing here knows one kind from another.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final, Generic, NamedTuple, TypeVar

from pydantic import TypeAdapter, ValidationError

from app.core.canonical import canonical_bytes
from app.core.chain import Artifact, Head, StreamKind, verify_link
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ChecksumMismatch, SchemaViolation
from app.domain.ledger.documents import TIME_PATTERN, UUID7_PATTERN, LogEntry, StreamArtifact
from app.domain.ledger.plans import PlannedEntry

E = TypeVar("E", bound=LogEntry)
A = TypeVar("A", bound=StreamArtifact)

UUID_CHARS: Final = 36
TIME_CHARS: Final = 24
_DIGEST_CHARS: Final = 64
_BY_AND_AT: Final = re.compile((UUID7_PATTERN + TIME_PATTERN).encode("ascii"))
_TEMPLATES_MAX: Final = 1_024
# Ids that JSON writes as they are. A tenant's name may hold a quotation mark.
_PLAIN: Final = re.compile(r"[0-9A-Za-z._:@+-]*")


class Record(NamedTuple, Generic[E, A]):
    """An entry with the artifact that it commits to; None when the payload is gone and only its digest stands."""

    entry: E
    artifact: A | None

    @property
    def stream(self) -> str:
        return self.entry.stream


class StreamDocuments(Generic[E, A]):
    """The documents of one kind of stream, as they are read from the store and written to it."""

    __slots__ = ("_artifact_models", "_entry_model", "_identity", "_template", "_usual", "kind")

    def __init__(self, entry_model: type[E], artifact_models: Mapping[str, type[A]]) -> None:
        self.kind: StreamKind = entry_model.kind
        self._entry_model = entry_model
        self._artifact_models = artifact_models
        self._template = _entry_template(self.kind)
        self._usual = _usual_entry(self.kind)
        self._identity: TypeAdapter[str] = TypeAdapter(
            entry_model.model_fields[self.kind.id_field].rebuild_annotation()
        )

    def read(self, raw_entry: bytes, raw_artifact: bytes | None, *, entry_digest: Digest) -> Record[E, A]:
        """A stored row as documents.

        Bytes that do not hash to the digest recorded beside them are not read at all: ChecksumMismatch. What they say,
        and whether it fits the stream, is judged afterwards.
        """
        found = digest_of_bytes(raw_entry)
        if found != entry_digest:  # I5
            raise ChecksumMismatch("the stored entry does not hash to its digest", expected=entry_digest, found=found)
        entry = self._read_usual(raw_entry, found) or self._entry_model.from_body_bytes(raw_entry)
        if raw_artifact is None:
            return Record(entry, None)
        found = digest_of_bytes(raw_artifact)
        if found != entry.artifact_digest:
            raise ChecksumMismatch(
                "the stored artifact is not the one that the entry commits to",
                expected=entry.artifact_digest,
                found=found,
            )
        model = self._artifact_models.get(entry.artifact_type)
        if model is None:
            raise SchemaViolation(f"a {self.kind.name} has no such artifact", found=entry.artifact_type)
        artifact = model.from_bytes(raw_artifact)
        artifact.keep_written(raw_artifact, found)
        return Record(entry, artifact)

    def _read_usual(self, raw: bytes, digest: Digest) -> E | None:
        """An entry that is spelled as `plan` writes them, which all are that were not changed. None says nothing of
        the bytes: the model must. It admits whatever is admitted here (tests compare them), ten times slower."""
        usual = self._usual.fullmatch(raw)
        if usual is None:
            return None
        said: dict[str, Any] = {name: text.decode("ascii") for name, text in usual.groupdict().items()}
        try:
            said[self.kind.id_field] = self._identity.validate_python(said.pop("identity"))
        except ValidationError:
            return None
        said["sequence_number"] = int(said["sequence_number"])
        said["entry_digest"] = digest
        entry = self._entry_model.of_known(said)
        entry.keep_written(raw, digest)
        return entry

    def time_of_next(
        self, head: Head, raw: bytes, *, artifact_type: str, artifact_digest: Digest, to_state: str, identity: str
    ) -> str | None:
        """When it was recorded, if these bytes are the entry that `plan` would write after `head`, by whichever
        executor and at whatever time. None says nothing of them: `read` and `verify_next` must."""
        template, by, at = self.spelled(artifact_type, head.state, to_state, head.sequence_number + 1)
        executor_id, recorded_at = raw[by : by + UUID_CHARS], raw[at : at + TIME_CHARS]
        written = template % (
            artifact_digest.encode("ascii"),
            executor_id,
            head.entry_digest.encode("ascii"),
            recorded_at,
            identity.encode("ascii"),
        )
        if written != raw or _BY_AND_AT.fullmatch(executor_id + recorded_at) is None:
            return None
        return recorded_at.decode("ascii")

    def spelled(self, artifact_type: str, from_state: str, to_state: str, number: int) -> tuple[bytes, int, int]:
        """How `plan` writes an entry of this transition, still without what every entry has of its own (the artifact's
        digest, executor, the digest before, time, id); and where executor and time begin."""
        return _next_entry(self._template, artifact_type, from_state, to_state, number)

    def plan(
        self, head: Head, artifact: A, *, identity: str, executor_id: str, recorded_at: str
    ) -> tuple[PlannedEntry, Head, bool]:
        """What is stored to append `artifact` after `head`, the head after it, and whether the table admits it.

        The entry is right in place and chain by construction. Whether the artifact is about this very stream is for
        the caller to see; what is wrong is for the kind's judge to name.
        """
        sequence_number, prev_entry_digest, state, bound_digest = head
        kind, artifact_type, number = self.kind, artifact.artifact_type, sequence_number + 1
        rule, said = kind.rule_of[artifact_type], artifact.__dict__
        verdict = "" if rule.verdict_field is None else said[rule.verdict_field]
        to_state = kind.next_state.get((state, artifact_type, verdict, number == 1))
        is_bound = rule.binds_field is None or said[rule.binds_field] == bound_digest
        written, digest = artifact.written()
        reached = to_state or state
        if _PLAIN.fullmatch(identity) is None:
            identity = canonical_bytes(identity).decode("utf-8")[1:-1]
        entry = (
            self._template
            % {
                "artifact_digest": digest,
                "artifact_type": artifact_type,
                "executor_id": executor_id,
                "from_state": state,
                "identity": identity,
                "prev_entry_digest": prev_entry_digest,
                "recorded_at": recorded_at,
                "schema_version": artifact.schema_version,
                "sequence_number": number,
                "to_state": reached,
            }
        ).encode("utf-8")
        after = Head(number, digest_of_bytes(entry), reached, digest)
        return PlannedEntry(entry, written), after, is_bound and to_state is not None

    def verify_next(self, head: Head, record: Record[E, A]) -> Head:
        """The head after this record, or the first check that fails; needs neither artifact nor folded state."""
        entry = record.entry
        return verify_link(self.kind, head, entry.link(), artifact_of(record), identity=entry.identity)


def artifact_of(record: Record[E, A]) -> Artifact | None:
    """The artifact as `verify_link` wants it; SchemaViolation when its type is not what the entry says."""
    artifact = record.artifact
    if artifact is None:
        return None
    if artifact.artifact_type != record.entry.artifact_type:
        raise SchemaViolation(
            "the artifact is of another type", expected=record.entry.artifact_type, found=artifact.artifact_type
        )
    return Artifact(artifact.__dict__, artifact.digest())


def _usual_entry(kind: StreamKind) -> re.Pattern[bytes]:
    """What the template of `kind` gives for members that its entries admit."""
    state = "|".join(kind.states)
    members = {
        "artifact_digest": "[0-9a-f]{64}",
        "artifact_type": "|".join(kind.rule_of),
        "executor_id": UUID7_PATTERN,
        "from_state": state,
        "identity": _PLAIN.pattern,
        "prev_entry_digest": "[0-9a-f]{64}",
        "recorded_at": TIME_PATTERN,
        "schema_version": r"1\.0",
        "sequence_number": "[1-9][0-9]{0,14}",
        "to_state": state,
    }
    template = _entry_template(kind).replace("%(sequence_number)d", "%(sequence_number)s")
    plain = re.split(r"%\((\w+)\)s", template)  # text and names in turn
    pattern = "".join(f"(?P<{part}>{members[part]})" if odd % 2 else re.escape(part) for odd, part in enumerate(plain))
    return re.compile(pattern.encode("ascii"))


@lru_cache(maxsize=_TEMPLATES_MAX)
def _next_entry(
    template: str, artifact_type: str, from_state: str, to_state: str, number: int
) -> tuple[bytes, int, int]:
    own = ("artifact_digest", "executor_id", "prev_entry_digest", "recorded_at", "identity")
    known = {
        "artifact_type": artifact_type,
        "from_state": from_state,
        "schema_version": "1.0",
        "sequence_number": number,
        "to_state": to_state,
    }
    written = (template % {**dict.fromkeys(own, "%b"), **known}).encode("ascii")
    first, second, third, fourth, *_ = (len(text) for text in written.split(b"%b"))
    executor_at = first + _DIGEST_CHARS + second
    return written, executor_at, executor_at + UUID_CHARS + third + _DIGEST_CHARS + fourth


def _entry_template(kind: StreamKind) -> str:
    """RFC 8785: sorted keys, no white space. No value but the stream's id holds anything that JSON would escape."""
    members = {
        "artifact_digest": '"%(artifact_digest)s"',
        "artifact_type": '"%(artifact_type)s"',
        "executor_id": '"%(executor_id)s"',
        "from_state": '"%(from_state)s"',
        "prev_entry_digest": '"%(prev_entry_digest)s"',
        "recorded_at": '"%(recorded_at)s"',
        "schema_id": f'"{kind.entry_schema_id}"',
        "schema_version": '"%(schema_version)s"',
        "sequence_number": "%(sequence_number)d",
        "to_state": '"%(to_state)s"',
        kind.id_field: '"%(identity)s"',
    }
    return "{" + ",".join(f'"{name}":{members[name]}' for name in sorted(members)) + "}"
