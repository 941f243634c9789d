"""Streams to measure with: a kind of its own that may grow for ever, and traces made quickly from a template.

The kind `bench` exists only in databases where `register_kind` was called. It is rows of three tables and nothing
else: the append function serves it unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import asyncpg

from app.core.canonical import canonical_bytes
from app.core.chain import ArtifactRule, StreamKind, Transition
from app.core.digest import GENESIS, digest_of_bytes
from app.domain.ledger.plans import Plan, PlannedEntry
from app.domain.tga.replay import LogRecord
from tests.traces import EXECUTOR, completed_trace, time_at, trace_id

_PLAN_ENTRIES_MAX: Final = 16

BENCH: Final = StreamKind(
    name="bench",
    id_field="bench_id",
    entry_schema_id="bench/v1/entry",
    birth_state="OPEN",
    artifacts=(ArtifactRule("note", "bench/v1/note"),),
    transitions=(
        Transition("OPEN", "note", "", "OPEN", is_birth=True),
        Transition("OPEN", "note", "", "OPEN"),
    ),
)


async def register_kind(superuser: asyncpg.Connection[asyncpg.Record], kind: StreamKind = BENCH) -> None:
    """Make the kind known to this database."""
    await superuser.execute(
        "INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state) VALUES ($1, $2, $3, $4)",
        kind.name,
        kind.id_field,
        kind.entry_schema_id,
        kind.birth_state,
    )
    await superuser.executemany(
        "INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id, verdict_field, binds_field, settles_claim)"
        " VALUES ($1, $2, $3, $4, $5, $6)",
        [
            (kind.name, a.artifact_type, a.schema_id, a.verdict_field, a.binds_field, a.settles_claim)
            for a in kind.artifacts
        ],
    )
    await superuser.executemany(
        "INSERT INTO tga.transitions (kind, from_state, artifact_type, verdict, to_state, is_birth)"
        " VALUES ($1, $2, $3, $4, $5, $6)",
        [(kind.name, t.from_state, t.artifact_type, t.verdict, t.to_state, t.is_birth) for t in kind.transitions],
    )


class GrowingStream:
    """A stream of the kind `bench`: makes the plan of what comes next, which must then be committed."""

    def __init__(self, identity: str, *, filler_chars: int = 256) -> None:
        self._identity = identity
        self._filler = "x" * filler_chars
        self._digest: str = GENESIS
        self.stream = BENCH.stream(identity)
        self.sequence_number = 0

    def next_plan(self, entries: int = 1) -> Plan:
        planned = [self._next_entry() for _ in range(entries)]
        return Plan(stream=self.stream, executor_id=EXECUTOR, owner_after=None, entries=planned)

    def plans_until(self, sequence_number: int) -> Iterator[Plan]:
        """Whole plans, as large as a plan may be, until the stream has so many entries."""
        while self.sequence_number < sequence_number:
            yield self.next_plan(min(_PLAN_ENTRIES_MAX, sequence_number - self.sequence_number))

    def _next_entry(self) -> PlannedEntry:
        self.sequence_number += 1
        recorded_at = time_at(self.sequence_number)
        artifact = canonical_bytes(
            {
                "bench_id": self._identity,
                "filler": self._filler,
                "recorded_at": recorded_at,
                "schema_id": "bench/v1/note",
            }
        )
        entry = canonical_bytes(
            {
                "artifact_digest": digest_of_bytes(artifact),
                "artifact_type": "note",
                "bench_id": self._identity,
                "executor_id": EXECUTOR,
                "from_state": "OPEN",
                "prev_entry_digest": self._digest,
                "recorded_at": recorded_at,
                "schema_id": BENCH.entry_schema_id,
                "schema_version": "1.0",
                "sequence_number": self.sequence_number,
                "to_state": "OPEN",
            }
        )
        self._digest = digest_of_bytes(entry)
        return PlannedEntry(entry, artifact)


class TraceTemplate:
    """Complete traces of four entries, without a claim, at the price of some replacing and hashing.

    The documents are those of one real trace with another id in them; every digest is computed anew.
    """

    def __init__(self) -> None:
        records = completed_trace(0, tool_class="read", idempotency_key=None)
        self._id = trace_id(0).encode()
        self._documents = [_stored_bytes(record) for record in records]
        self._digests = [
            (digest_of_bytes(artifact).encode(), digest_of_bytes(entry).encode()) for artifact, entry in self._documents
        ]

    @property
    def entry_bytes(self) -> int:
        """The mean of the four."""
        return sum(len(entry) for _, entry in self._documents) // len(self._documents)

    @property
    def artifact_bytes(self) -> int:
        return sum(len(artifact) for artifact, _ in self._documents) // len(self._documents)

    def plans(self, n: int) -> list[Plan]:
        """The n-th trace (n > 0), one plan for each entry, owned until its end."""
        identity = trace_id(n).encode()
        replacements = [(self._id, identity)]
        plans: list[Plan] = []
        for (artifact, entry), (artifact_digest, entry_digest) in zip(self._documents, self._digests, strict=True):
            for old, new in replacements:
                artifact, entry = artifact.replace(old, new), entry.replace(old, new)
            new_artifact_digest = digest_of_bytes(artifact).encode()
            entry = entry.replace(artifact_digest, new_artifact_digest)
            replacements += [
                (artifact_digest, new_artifact_digest),
                (entry_digest, digest_of_bytes(entry).encode()),
            ]
            is_last = len(plans) + 1 == len(self._documents)
            plans.append(
                Plan(
                    stream=f"trace:{identity.decode()}",
                    executor_id=EXECUTOR,
                    owner_after=None if is_last else EXECUTOR,
                    entries=[PlannedEntry(entry, artifact)],
                )
            )
        return plans


def _stored_bytes(record: LogRecord) -> tuple[bytes, bytes]:
    assert record.artifact is not None
    return record.artifact.to_bytes(), record.entry.body_bytes()
