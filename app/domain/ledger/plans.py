"""What is written to the ledger: plans, each appended whole or not at all; and the port they go through.

Streams of every kind go this way. A plan is the unit of atomicity (I7): entries with their artifacts, the claim of
an idempotency key, an execution checkpoint, a dispatch attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from app.core.canonical import JsonValue, canonical_bytes
from app.core.digest import Digest, digest_of_bytes


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
        key: JsonValue = {
            "server_id": self.server_id,
            "tool_name": self.tool_name,
            "idempotency_key": self.idempotency_key,
        }
        return digest_of_bytes(canonical_bytes(key))


class PlannedCheckpoint(NamedTuple):
    """The canonical bytes of a folded state; the ledger hashes them and compares the entry that they name."""

    state: bytes
    created_at: str


class Sealed(NamedTuple):
    """A stream's secrets as they are kept outside the ledger: unreadable without the sealing key."""

    salt: bytes
    values: bytes


class Plan(NamedTuple):
    """What one executor appends to a stream in one transaction; who owns it afterwards, and whom it waits for.

    `dispatch_attempt` is the number of a send after the first; its row is the fence of that send. `resolution` is the
    operator's order behind it, if there was one. A plan of nothing but a checkpoint changes neither owner nor waiting.
    `sealed` comes with the birth; `forgets_secrets` removes the values again. `announce_to` names webhooks to be told.
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

    def size_bytes(self) -> int:
        size = 0 if self.checkpoint is None else len(self.checkpoint.state)
        if self.sealed is not None:
            size += len(self.sealed.salt) + len(self.sealed.values)
        for entry, artifact in self.entries:
            size += len(entry) + len(artifact)
        return size


class Ledger(Protocol):
    """Durable when it returns. Raises the error of the first check that failed; then nothing of the plan is stored.

    OutcomeUnknown is the exception: the plan may have been stored, and only reading the stream tells.
    """

    async def commit(self, plan: Plan) -> None: ...
