"""What is written to the ledger: plans, each appended whole or not at all; and the port they go through.

Streams of every kind go this way. A plan is the unit of atomicity (I7): entries with their artifacts, the claim of
an idempotency key, an execution checkpoint, a dispatch attempt, references to blobs, the row of a schedule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from app.core.canonical import JsonValue, canonical_bytes, canonical_members
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import TgaError


class PlannedEntry(NamedTuple):
    """The stored bytes of an entry (without its digest) and of the artifact that it commits to."""

    entry: bytes
    artifact: bytes


class Claim(NamedTuple):
    """One key, one stream, for ever (I2). The payload digest tells a repeat from a misuse of the key."""

    server_id: str
    tool_name: str
    idempotency_key: str
    payload_digest: Digest

    def key_digest(self) -> Digest:
        """Which key it is, without saying it: two claims of one key have the same."""
        key: dict[str, JsonValue] = {
            "server_id": self.server_id,
            "tool_name": self.tool_name,
            "idempotency_key": self.idempotency_key,
        }
        return digest_of_bytes(canonical_members(key) or canonical_bytes(key))


class PlannedCheckpoint(NamedTuple):
    """The canonical bytes of a folded state; the ledger hashes them and compares the entry that they name."""

    state: bytes
    created_at: str


class Sealed(NamedTuple):
    """A stream's secrets as they are kept outside the ledger: unreadable without the sealing key."""

    salt: bytes
    values: bytes


class OpenAsk(NamedTuple):
    """A question that stands open at this address; the entry that asks it, and until when it can be answered; since
    when, and how often others were told that nobody has answered."""

    path: str
    sequence_number: int
    expires_at: str | None
    asked_at: str
    level: int


class ScheduleRow(NamedTuple):
    """When a stream is due, and for whom: the row that gateways look for. Always the whole row, a function of the state
    that the plan leaves; tenant and state are added by the store, from the head. Times are RFC 3339.

    `due_in_ms`: so long after the commit by the store's clock, whatever `due_at` says by the gateway's; None: then.
    `parent` is the stream that waits for this one, `forked_from` the one that it goes on from, `failures` counts since
    the last progress.
    """

    procedure: str
    program: str
    created_at: str
    attempt: int = 0
    failures: int = 0
    worker: str | None = None
    due_at: str | None = None
    due_in_ms: int | None = None
    parent: str | None = None
    deadline_at: str | None = None
    forked_from: str | None = None
    asks: Sequence[OpenAsk] = ()  # all that are open then


class BlobUse(NamedTuple):
    """An entry of the plan refers to a blob. It must be stored, for the stream's tenant and with this size."""

    sequence_number: int
    sha256: Digest
    size_bytes: int


class Plan(NamedTuple):
    """What one executor appends to a stream in one transaction; who owns it afterwards, and whom it waits for.

    `dispatch_attempt` is the number of a send after the first; its row is the fence of that send. `resolution` is the
    operator's order behind it, if there was one. A plan of nothing but a checkpoint changes neither owner nor waiting.
    `sealed` comes with the birth; `forgets_secrets` removes the values again. `announce_to` names webhooks to be told.
    `schedule` replaces the stream's row; without one it stays. A blob that is not stored refuses the plan.
    """

    stream: str
    executor_id: str
    owner_after: str | None
    entries: Sequence[PlannedEntry] = ()
    claim: Claim | None = None
    checkpoint: PlannedCheckpoint | None = None
    dispatch_attempt: int | None = None
    resolution: bytes | None = None
    waiting_after: str | None = None
    sealed: Sealed | None = None
    forgets_secrets: bool = False
    announce_to: Sequence[str] = ()
    schedule: ScheduleRow | None = None
    blobs: Sequence[BlobUse] = ()

    def size_bytes(self) -> int:
        size = 0 if self.checkpoint is None else len(self.checkpoint.state)
        if self.sealed is not None:
            size += len(self.sealed.salt) + len(self.sealed.values)
        for entry, artifact in self.entries:
            size += len(entry) + len(artifact)
        return size


class PlanGroup(NamedTuple):
    """Plans of different streams that are committed in one transaction.

    `needs` is empty, or names for each plan the place (from 0) of another one that makes no claim, or None: a plan
    whose needed plan is refused is refused in the same words. Two that need each other stand or fall together.
    """

    plans: Sequence[Plan]
    needs: Sequence[int | None] = ()

    def verify(self, plans_max: int) -> None:
        """ValueError when it can be no group: the caller has made a mistake."""
        if not 0 < len(self.plans) <= plans_max:
            raise ValueError(f"a group is 1 to {plans_max} plans, this one has {len(self.plans)}")
        if len({plan.stream for plan in self.plans}) < len(self.plans):
            raise ValueError("two plans of one stream cannot share a transaction")
        if self.needs and len(self.needs) != len(self.plans):
            raise ValueError("a group says of each of its plans which one it needs, or of none")
        for place, needed in enumerate(self.needs):
            is_other = needed is None or (0 <= needed < len(self.plans) and needed != place)
            if not is_other or (needed is not None and self.plans[needed].claim is not None):
                raise ValueError(f"plan {place} of the group must need another one that makes no claim: {needed}")


class Ledger(Protocol):
    """Durable when it returns. Raises the error of the first check that failed; then nothing of the plan is stored.

    OutcomeUnknown is the exception: the plan may have been stored, and only reading the stream tells.
    """

    async def commit(self, plan: Plan) -> None: ...

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        """Plans of different streams in one transaction, as in a PlanGroup; for each its error, or None when durable.

        Each is admitted or refused by itself, but for those that need another. What fails the transaction as a whole,
        OutcomeUnknown among it, is the error of every plan.
        """
        ...
