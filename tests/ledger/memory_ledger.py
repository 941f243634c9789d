"""The Ledger port in memory: what a plan means in as few lines as possible, to compare the real one with.

Streams of any kinds whose documents it is given. It knows owners, entries, claims, needs, blobs and schedules; not
checkpoints, attempts, secrets or webhooks, which no group needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.canonical import parse_object
from app.core.chain import Head
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ConcurrentExecution, KeyClaimed, RunBlobMissing, TgaError, TraceNotFound
from app.core.limits import BATCH_PLANS_MAX
from app.domain.ledger.plans import Claim, Plan, PlanGroup, PlannedEntry, ScheduleRow
from app.domain.ledger.records import StreamDocuments


@dataclass
class MemoryStream:
    head: Head
    owner: str | None = None
    waiting: str | None = None
    tenant: str | None = None
    entries: list[PlannedEntry] = field(default_factory=list)
    claim: Claim | None = None
    schedule: ScheduleRow | None = None


@dataclass
class MemoryLedger:
    """`blobs` are those that are stored, with their sizes, by tenant and digest; `refs` what refers to them."""

    documents: Mapping[str, StreamDocuments[Any, Any]]
    streams: dict[str, MemoryStream] = field(default_factory=dict)
    blobs: dict[tuple[str, Digest], int] = field(default_factory=dict)
    refs: set[tuple[str, int, Digest]] = field(default_factory=set)

    async def commit(self, plan: Plan) -> None:
        (error,) = await self.commit_all([plan])
        if error is not None:
            raise error

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        PlanGroup(plans, needs).verify(BATCH_PLANS_MAX)
        streams, refs = dict(self.streams), set(self.refs)
        refused: dict[int, TgaError] = {}
        while True:  # until no more plans fall with those that they need
            results: list[TgaError | None] = []
            for place, plan in enumerate(plans):
                needed = needs[place] if needs else None
                try:
                    self._judge_and_store(plan, None if needed is None else refused.get(needed))
                    results.append(None)
                except TgaError as error:
                    results.append(error.at(stream=plan.stream))
            falling = {place: error for place, error in enumerate(results) if error is not None}
            if falling.keys() == refused.keys():
                return results
            refused, self.streams, self.refs = falling, dict(streams), set(refs)

    def _judge_and_store(self, plan: Plan, refusal_of_needed: TgaError | None) -> None:
        documents = self.documents[plan.stream.partition(":")[0]]
        found = self.streams.get(plan.stream) or MemoryStream(Head.unborn(documents.kind))
        if not plan.entries and found.head.sequence_number == 0:
            raise TraceNotFound("the stream has no entries")
        if found.owner not in (None, plan.executor_id):
            raise ConcurrentExecution("another executor owns the stream", expected=plan.executor_id, found=found.owner)
        head, tenant = found.head, found.tenant
        for planned in plan.entries:
            record = documents.read(planned.entry, planned.artifact, entry_digest=digest_of_bytes(planned.entry))
            tenant = tenant or tenant_of(parse_object(planned.artifact))
            try:
                head = documents.verify_next(head, record)
            except TgaError as error:
                raise error.at(stream=plan.stream, sequence_number=head.sequence_number + 1) from None
        for use in plan.blobs:
            if self.blobs.get((str(tenant), use.sha256)) != use.size_bytes:
                raise RunBlobMissing("an entry refers to a blob that is not stored")
        if refusal_of_needed is not None:
            raise type(refusal_of_needed)(refusal_of_needed.what)
        if plan.claim is not None:
            for name, other in self.streams.items():
                if other.claim is not None and other.claim[:3] == plan.claim[:3]:
                    raise KeyClaimed(
                        "another claim stands in the way",
                        owner_stream=name,
                        owner_payload_digest=other.claim.payload_digest,
                    )
        self.streams[plan.stream] = MemoryStream(
            head,
            plan.owner_after,
            plan.waiting_after,
            tenant,
            [*found.entries, *plan.entries],
            plan.claim or found.claim,
            plan.schedule or found.schedule,
        )
        self.refs |= {(plan.stream, use.sequence_number, use.sha256) for use in plan.blobs}


def tenant_of(birth: Mapping[str, Any]) -> str:
    return str(birth["tenant"] if "tenant" in birth else birth["principal"]["tenant"])
