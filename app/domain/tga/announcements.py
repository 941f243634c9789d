"""What is told to webhooks when a trace starts to wait for a supervisor, and the outbox that it is told from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from app.core.digest import Digest
from app.domain.tga.documents import ActionRequest, TraceId


@dataclass(frozen=True, slots=True)
class Announcement:
    """A request that waits. It holds no arguments: they may be sensitive, and the person who decides reads them under
    their own name."""

    trace_id: TraceId
    action_request_digest: Digest
    server_id: str
    tool_name: str
    principal_id: str
    tenant: str
    requested_at: str
    expires_at: str | None

    @classmethod
    def of(cls, request: ActionRequest) -> Self:
        return cls(
            trace_id=TraceId(request.trace_id),
            action_request_digest=request.digest(),
            server_id=request.server_id,
            tool_name=request.tool_name,
            principal_id=request.principal.principal_id,
            tenant=request.principal.tenant,
            requested_at=request.requested_at,
            expires_at=request.expires_at,
        )


@dataclass(frozen=True, slots=True)
class OutboxRow:
    """One announcement to one webhook. `attempts` includes the present one, so it tells which gateway holds the row."""

    id: int
    webhook: str
    stream: str
    attempts: int
    created_at: str

    @property
    def identity(self) -> str:
        """The id of the trace or run."""
        return self.stream.partition(":")[2]


class Outbox(Protocol):
    """Rows are written in the transaction in which a trace starts to wait or a run asks, so none is lost and none is
    made up."""

    async def take(self, webhooks: Sequence[str], *, lease_ms: int, at_most: int) -> list[OutboxRow]:
        """Due rows, oldest first; no other gateway is given them until the lease has run out."""
        ...

    async def done(self, rows: Sequence[OutboxRow]) -> None:
        """They are never given out again."""
        ...

    async def failed(self, row: OutboxRow, error: str, *, retry_ms: int) -> None:
        """Give it out again after `retry_ms`; nothing happens if another gateway has taken the row."""
        ...

    async def drop_decided(self, *, at_most: int) -> int:
        """Remove rows, of whatever webhook, whose trace no longer waits for a supervisor, or whose run has no question
        open; tells how many."""
        ...
