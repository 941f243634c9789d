"""Plans into PostgreSQL: one function call, one commit, a result for each plan (I7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import asyncpg
import orjson

from app.core.digest import Digest
from app.core.errors import BY_CODE, KeyClaimed, LockAcquireFailed, OutcomeUnknown, StoreUnavailable, TgaError
from app.core.limits import (
    BATCH_BYTES_MAX,
    BATCH_PLANS_MAX,
    LOCK_TIMEOUT_MS,
    SINGLE_LOCK_FAILURES_MAX,
    SINGLE_LOCK_TIMEOUT_MS,
    WINNER_BYTES_MAX,
)
from app.domain.ledger.plans import Plan, PlanGroup
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Record, Sessions
from app.postgres.traces import recorded_call

_APPEND = """
SELECT * FROM tga.append($1, $2::text[], $3::uuid[], $4::uuid[], $5::text[],
                         $6::int[], $7::bytea[], $8::bytea[],
                         $9::int[], $10::text[], $11::text[], $12::text[], $13::bytea[],
                         $14::int[], $15::bytea[], $16::text[],
                         $17::int[], $18::int[], $19::bytea[],
                         $20::int[], $21::bytea[], $22::bytea[], $23::int[], $24::int[], $25::text[])
"""
# With what only few batches bring; the others do not send so many empty arrays.
_APPEND_MORE = _APPEND.replace(
    "$25::text[])",
    "$25::text[], $26::int[], $27::int[], $28::jsonb[], $29::int[], $30::bigint[], $31::bytea[], $32::bigint[])",
)
_ALWAYS_SENT = 7  # columns: what each plan and each entry says


def _with_winners(append: str) -> str:
    """A plan that loses its claim brings the recorded call along: a repeat is answered from it without another look."""
    return f"""
SELECT a.*, CASE WHEN a.code = '{KeyClaimed.code}' AND starts_with(a.claimed_by, '{TRACE.stream("")}')
                 THEN tga.recorded_call(a.claimed_by, {WINNER_BYTES_MAX}) END AS winner
  FROM ({append}) AS a
"""  # noqa: S608 - only our own words and numbers


_CLAIM, _CLAIM_MORE = _with_winners(_APPEND), _with_winners(_APPEND_MORE)


class PostgresLedger:
    """The Ledger port on PostgreSQL."""

    def __init__(self, sessions: Sessions, *, lock_timeout_ms: int = LOCK_TIMEOUT_MS) -> None:
        self._sessions = sessions
        self._lock_timeout_ms = lock_timeout_ms

    async def commit(self, plan: Plan) -> None:
        """Durable when it returns, or the error says why nothing of the plan is stored (or that this is unknown)."""
        (error,) = await self.commit_batch([plan])
        if error is not None:
            raise error

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        """As Ledger.commit_all."""
        group = PlanGroup(plans, needs)
        group.verify(BATCH_PLANS_MAX)
        return await self.commit_groups([group])

    async def commit_batch(self, plans: Sequence[Plan]) -> list[TgaError | None]:
        """As `commit_groups`, of plans that have nothing to do with each other."""
        return await self.commit_groups([PlanGroup((plan,)) for plan in plans])

    async def commit_groups(self, groups: Sequence[PlanGroup]) -> list[TgaError | None]:
        """All plans of all groups in one transaction; for each its error, or None when it is durable.

        The loser of one does not fail the others. A batch that the server refuses as a whole is retried group by
        group, which takes little longer than the batch did, whatever is locked.
        """
        plans = [plan for group in groups for plan in group.plans]
        if len(plans) > BATCH_PLANS_MAX or (len(groups) > 1 and sum(p.size_bytes() for p in plans) > BATCH_BYTES_MAX):
            raise ValueError(f"a batch is at most {BATCH_PLANS_MAX} plans and {BATCH_BYTES_MAX} bytes")
        try:
            rows = await self._append(plans, _needs_of(groups), self._lock_timeout_ms)
        except (OutcomeUnknown, StoreUnavailable) as error:
            return _to_each(plans, error)
        except TgaError as error:
            if len(groups) == 1:
                return _to_each(plans, error)
            return await self._commit_singly(groups, error)
        return [_error_of(row, plan) for row, plan in zip(rows, plans, strict=True)]

    async def _commit_singly(self, groups: Sequence[PlanGroup], refusal: TgaError) -> list[TgaError | None]:
        lock_timeout_ms = self._lock_timeout_ms
        if isinstance(refusal, LockAcquireFailed):
            lock_timeout_ms = min(SINGLE_LOCK_TIMEOUT_MS, lock_timeout_ms)
        results: list[TgaError | None] = []
        lock_failures = 0
        reason: TgaError | None = None  # why the rest is not tried
        for group in groups:
            if reason is not None:
                results += [_copy(reason).at(stream=plan.stream) for plan in group.plans]
                continue
            try:
                rows = await self._append(group.plans, _needs_of([group]), lock_timeout_ms)
                results += [_error_of(row, plan) for row, plan in zip(rows, group.plans, strict=True)]
            except TgaError as error:
                results += _to_each(group.plans, error)
                lock_failures += isinstance(error, LockAcquireFailed)
                if lock_failures == SINGLE_LOCK_FAILURES_MAX:
                    reason = error
                elif isinstance(error, (OutcomeUnknown, StoreUnavailable)):
                    reason = StoreUnavailable("PostgreSQL went away before it was asked")
        return results

    async def _append(self, plans: Sequence[Plan], needs: Sequence[int | None], lock_timeout_ms: int) -> list[Record]:
        has_claims = any(plan.claim is not None for plan in plans)
        columns = _columns(plans)
        # Of lists that the batch does not bring nothing is sent, written, read or verified.
        sent = (*columns[:_ALWAYS_SENT], *[column or None for column in columns[_ALWAYS_SENT:]])
        if needs or any(plan.schedule is not None or plan.blobs for plan in plans):
            statement = _CLAIM_MORE if has_claims else _APPEND_MORE
            more = [column or None for column in (needs, *_more_columns(plans))]
            return await self._sessions.commit(statement, lock_timeout_ms, *sent, *more)
        return await self._sessions.commit(_CLAIM if has_claims else _APPEND, lock_timeout_ms, *sent)


def _needs_of(groups: Sequence[PlanGroup]) -> list[int | None]:
    """For each plan the place, from 1 in the batch, of the one that it needs; empty when none needs another."""
    if not any(group.needs for group in groups):
        return []
    needs: list[int | None] = []
    for group in groups:
        first = len(needs) + 1
        needs += [None if needed is None else first + needed for needed in group.needs or [None] * len(group.plans)]
    return needs


def _columns(plans: Sequence[Plan]) -> tuple[list[Any], ...]:
    entries = [(place, planned) for place, plan in enumerate(plans, 1) for planned in plan.entries]
    claims = [(place, plan.claim) for place, plan in enumerate(plans, 1) if plan.claim is not None]
    checkpoints = [(place, plan.checkpoint) for place, plan in enumerate(plans, 1) if plan.checkpoint is not None]
    attempts = [(place, plan) for place, plan in enumerate(plans, 1) if plan.dispatch_attempt is not None]
    sealed = [(place, plan.sealed) for place, plan in enumerate(plans, 1) if plan.sealed is not None]
    announced = [(place, webhook) for place, plan in enumerate(plans, 1) for webhook in plan.announce_to]
    return (
        [plan.stream for plan in plans],
        [plan.executor_id for plan in plans],
        [plan.owner_after for plan in plans],
        [plan.waiting_after for plan in plans],
        [place for place, _ in entries],
        [planned.entry for _, planned in entries],
        [planned.artifact for _, planned in entries],
        [place for place, _ in claims],
        [claim.server_id for _, claim in claims],
        [claim.tool_name for _, claim in claims],
        [claim.idempotency_key for _, claim in claims],
        [bytes.fromhex(claim.payload_digest) for _, claim in claims],
        [place for place, _ in checkpoints],
        [checkpoint.state for _, checkpoint in checkpoints],
        [checkpoint.created_at for _, checkpoint in checkpoints],
        [place for place, _ in attempts],
        [plan.dispatch_attempt for _, plan in attempts],
        [plan.resolution for _, plan in attempts],
        [place for place, _ in sealed],
        [secrets.salt for _, secrets in sealed],
        [secrets.values for _, secrets in sealed],
        [place for place, plan in enumerate(plans, 1) if plan.forgets_secrets],
        [place for place, _ in announced],
        [webhook for _, webhook in announced],
    )


def _more_columns(plans: Sequence[Plan]) -> tuple[list[Any], ...]:
    scheduled = [(place, plan.schedule) for place, plan in enumerate(plans, 1) if plan.schedule is not None]
    blobs = [(place, use) for place, plan in enumerate(plans, 1) for use in plan.blobs]
    return (
        [place for place, _ in scheduled],
        [orjson.dumps(schedule._asdict(), default=tuple).decode() for _, schedule in scheduled],
        [place for place, _ in blobs],
        [use.sequence_number for _, use in blobs],
        [bytes.fromhex(use.sha256) for _, use in blobs],
        [use.size_bytes for _, use in blobs],
    )


def _error_of(row: asyncpg.Record, plan: Plan) -> TgaError | None:
    code = row["code"]
    if code is None:
        return None
    if code == KeyClaimed.code:
        winner = row["winner"]
        return KeyClaimed(
            row["what"],
            owner_stream=row["claimed_by"],
            owner_payload_digest=Digest(row["claimed_payload"].hex()),
            winner=None if winner is None else recorded_call(winner),
        ).at(stream=plan.stream)
    error = BY_CODE[code](row["what"], expected=row["expected"], found=row["found"])
    return error.at(stream=plan.stream, sequence_number=row["sequence_number"])


def _to_each(plans: Sequence[Plan], error: TgaError) -> list[TgaError | None]:
    if len(plans) == 1:
        return [error.at(stream=plans[0].stream)]
    return [_copy(error).at(stream=plan.stream) for plan in plans]


def _copy(error: TgaError) -> TgaError:
    # One exception for each plan: each will say its own stream.
    return type(error)(error.what, expected=error.expected, found=error.found, remedy=error.next_step)
