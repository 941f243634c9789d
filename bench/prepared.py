"""The gateway's own two transactions without the gateway: `tga.append` with all its checks, unbatched, by pgbench.

The plans are those of real calls, made beforehand by the runtime, so what is timed is the database's part alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from app.clock import SystemClock
from app.core.errors import TgaError
from app.domain.ledger.plans import Plan
from app.domain.tga.ports import Ports
from app.domain.tga.runtime import TgaRuntime
from app.gateway.policy_file import PolicyFile
from bench.baseline import Baseline, Step
from bench.cost import measuring_session
from bench.gateway import Answering, OneTool, completed, fresh_calls
from bench.measure import Server

# One row is one call: nothing of it is looked for elsewhere, so that finding it costs next to nothing.
_TABLE: Final = """
CREATE SCHEMA prepared;
CREATE SEQUENCE prepared.next CACHE 20;
CREATE UNLOGGED TABLE prepared.calls (
    number bigint PRIMARY KEY, stream text, executor uuid, key text, payload bytea,
    e1 bytea, a1 bytea, e2 bytea, a2 bytea, e3 bytea, a3 bytea, e4 bytea, a4 bytea
) WITH (fillfactor = 100);
"""
_NONE: Final = ", ".join(["NULL"] * 9)  # attempts, secrets, webhooks
_REFUSED_OR_USED_UP: Final = "CASE WHEN bool_and(r.code IS NULL) THEN max(c.number) ELSE 1 / (0 * count(*)) END"
_BEGIN: Final = f"""SELECT {_REFUSED_OR_USED_UP} AS number FROM prepared.calls AS c, LATERAL tga.append(
 5000, ARRAY[c.stream], ARRAY[c.executor], ARRAY[c.executor], ARRAY[NULL::text],
 ARRAY[1,1,1], ARRAY[c.e1,c.e2,c.e3], ARRAY[c.a1,c.a2,c.a3],
 ARRAY[1], ARRAY['crm'], ARRAY['create_ticket'], ARRAY[c.key], ARRAY[c.payload],
 NULL, NULL, NULL, {_NONE}) AS r
 WHERE c.number = (SELECT nextval('prepared.next')) \\gset""".replace("\n", "")
_END: Final = f"""SELECT {_REFUSED_OR_USED_UP} FROM prepared.calls AS c, LATERAL tga.append(
 5000, ARRAY[c.stream], ARRAY[c.executor], ARRAY[NULL::uuid], ARRAY[NULL::text],
 ARRAY[1], ARRAY[c.e4], ARRAY[c.a4], NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, {_NONE}) AS r
 WHERE c.number = :number""".replace("\n", "")


class _Recording:
    """A ledger that keeps the plans, and commits nothing."""

    def __init__(self) -> None:
        self.plans: dict[str, list[Plan]] = {}

    async def commit(self, plan: Plan) -> None:
        self.plans.setdefault(plan.stream, []).append(plan)

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        for plan in plans:
            await self.commit(plan)
        return [None] * len(plans)


class _Executor:
    def __init__(self) -> None:
        self._executor_id = SystemClock().new_id()

    def executor_id(self) -> str:
        return self._executor_id


class _Unpinned:
    async def verify(self, tool: object) -> None:
        return None


async def plans_of_calls(count: int) -> AsyncIterator[tuple[Plan, Plan]]:
    """What the runtime commits before and after each of so many allowed calls."""
    ledger, tools, nothing = _Recording(), OneTool(Answering()), Any
    runtime = TgaRuntime(
        Ports(
            ledger=ledger,
            traces=_Executor(),  # type: ignore[arg-type]
            tools=tools,
            connectors=tools,
            supervisor=PolicyFile.open(None),
            pins=_Unpinned(),  # type: ignore[arg-type]
            vault=nothing,  # type: ignore[arg-type]
            decision_signer=nothing,  # type: ignore[arg-type]
            clock=SystemClock(),
        )
    )
    calls = fresh_calls("prepared")
    for _ in range(count):
        answer = await completed(runtime, next(calls))
        begin, end = ledger.plans.pop(f"trace:{answer.trace_id}")
        yield begin, end


@asynccontextmanager
async def prepared_baseline(server: Server, calls: int) -> AsyncIterator[Baseline | None]:
    """The baseline, with so many calls to make; None where there is no pgbench."""
    baseline = Baseline(server, Step(schema=_TABLE, statements=(_BEGIN, _END), values={}))
    if baseline.pgbench is None:
        yield None
        return
    await baseline.prepare()
    async with measuring_session(server.admin_url) as session:
        columns = ["e1", "a1", "e2", "a2", "e3", "a3", "e4", "a4", "payload"]
        for column in columns:  # in the row, not compressed
            await session.execute(f"ALTER TABLE prepared.calls ALTER COLUMN {column} SET STORAGE PLAIN")
        rows = [_row(number, *plans) async for number, plans in _numbered(calls)]
        await session.copy_records_to_table("calls", schema_name="prepared", records=rows)
        await session.execute("VACUUM ANALYZE prepared.calls")
    yield baseline


async def _numbered(calls: int) -> AsyncIterator[tuple[int, tuple[Plan, Plan]]]:
    number = 0
    async for plans in plans_of_calls(calls):
        number += 1
        yield number, plans


def _row(number: int, begin: Plan, end: Plan) -> tuple[Any, ...]:
    claim = begin.claim
    assert claim is not None
    assert (len(begin.entries), len(end.entries)) == (3, 1)
    documents = [part for planned in (*begin.entries, *end.entries) for part in planned]
    payload = bytes.fromhex(claim.payload_digest)
    return (
        number,
        begin.stream,
        begin.executor_id,
        claim.idempotency_key,
        payload,
        *documents,
    )
