"""The lean ledger against the one before it: `python -m bench.lean [--quick]`.

Both schemas stand in databases of one server and take the same plans in turns: what an append costs the server's
processor, what a call leaves in the database and in the write-ahead log, and how many updates of heads were HOT.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Final, TypeAlias

import asyncpg
from rich.console import Console
from rich.table import Table

from app.domain.ledger.plans import Plan, PlannedCheckpoint
from app.domain.tga.idempotency import decide_claim
from app.domain.tga.replay import fold
from app.postgres.ledger import _ALWAYS_SENT as ALWAYS_SENT
from app.postgres.ledger import _APPEND as APPEND
from app.postgres.ledger import _columns as columns_of
from app.postgres.migrate import migrate
from app.postgres.sessions import GATEWAY_ROLE
from bench.measure import WARMUP_STEPS, Server, arguments_of, run_bench
from bench.streams import TraceTemplate
from tests.invariants.plans import planned
from tests.postgres.old_schema import old_migrations
from tests.traces import EXECUTOR, action_request, records_of, supervisor_decision, time_at, tool_call, tool_effect

Session: TypeAlias = "asyncpg.Connection[asyncpg.Record]"
BATCHES: Final = (1, 10, 30)
ARGUMENT_CHARS: Final = 420  # with names and punctuation some 500 bytes
OLD, NEW = "before", "lean"


@dataclass(frozen=True, slots=True)
class Scale:
    """How much to measure."""

    rounds: int
    calls: int

    @classmethod
    def full(cls) -> Scale:
        return cls(rounds=12, calls=4_000)

    @classmethod
    def quick(cls) -> Scale:
        return cls(rounds=2, calls=60)


class Calls:
    """Plans of allowed calls with some 500 bytes of arguments that repeat nothing, as the runtime of each schema made
    them: the old one with an execution checkpoint."""

    _numbers: ClassVar = itertools.count(1_000_001)  # other traces than those of the template

    def __init__(self) -> None:
        chance = random.Random(7)
        self._chance = chance
        self._words = [
            "".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9))) for _ in range(2000)
        ]

    def make(self, count: int, schema: str) -> list[tuple[Plan, Plan]]:
        return [self._call(schema) for _ in range(count)]

    def _call(self, schema: str) -> tuple[Plan, Plan]:
        n = next(self._numbers)
        text = " ".join(self._chance.choices(self._words, k=80))[:ARGUMENT_CHARS]
        key = f"{self._chance.getrandbits(96):024x}{n:08x}"
        request = action_request(n, arguments={"title": f"ticket {n}", "body": text}, idempotency_key=key)
        decision = supervisor_decision(request)
        call = tool_call(n, request, decision)
        records = records_of(request, decision, call, tool_effect(call))
        stream, state = records[0].stream, fold(records[:3])
        assert state is not None
        begin = Plan(stream, EXECUTOR, EXECUTOR, [planned(record) for record in records[:3]], decide_claim(records[:1]))
        if schema == OLD:
            begin = begin._replace(checkpoint=PlannedCheckpoint(state.to_bytes(), time_at(3)))
        return begin, Plan(stream, EXECUTOR, None, [planned(records[3])])


class _Entries:
    """Plans of one entry each, four to a trace, with little in them."""

    _numbers: ClassVar = itertools.count(1)

    def __init__(self) -> None:
        self._template = TraceTemplate()

    def make(self, count: int, schema: str) -> list[tuple[Plan, ...]]:
        del schema
        return [tuple(self._template.plans(next(self._numbers))) for _ in range(count)]


async def append(session: Session, plans: Sequence[Plan], schema: str = NEW) -> None:
    columns: tuple[list[Any] | None, ...] = columns_of(plans)
    if schema == NEW:  # lists that a batch does not bring are not sent
        columns = (*columns[:ALWAYS_SENT], *[column or None for column in columns[ALWAYS_SENT:]])
    for row in await session.fetch(APPEND, 5_000, *columns):
        if row["code"] is not None:
            raise AssertionError(f"refused: {row}")


async def cpu_us(session: Session, plans: Sequence[Plan], schema: str = NEW) -> float:
    """What the backend's processor spent on this append and its commit, whoever else is busy on this machine."""
    before = _spent_ns(session)
    await append(session, plans, schema)
    return (_spent_ns(session) - before) / 1_000


def _spent_ns(session: Session) -> int:
    return int(Path(f"/proc/{session.get_server_pid()}/schedstat").read_text("utf-8").split()[0])


async def measure_processor(sessions: dict[str, Session], rounds: int, *, commits: bool) -> Table:
    """`commits`: every append is committed; else the function alone is measured, in transactions of many."""
    table = Table(
        title="µs of the server's processor for one plan, lower quartile of alternating rounds: "
        + ("the function and its commit" if commits else "the function alone")
    )
    for heading in ("plans", "in a batch", OLD, NEW, "ratio"):
        table.add_column(heading, justify="right")
    for name, plans_of in (("of one entry", _Entries()), ("of a call", Calls())):
        for size in BATCHES:
            found: dict[str, list[float]] = {OLD: [], NEW: []}
            for round_number in range(-1, rounds):
                for schema, session in sessions.items():
                    async with contextlib.AsyncExitStack() as stack:
                        if not commits:
                            await stack.enter_async_context(session.transaction())
                        for _ in range(max(WARMUP_STEPS // size, 4)):
                            steps = zip(*plans_of.make(size, schema), strict=True)
                            spent = [await cpu_us(session, step, schema) for step in steps]
                            if round_number >= 0:
                                found[schema].append(sum(spent) / len(spent) / size)
            old, new = (statistics.quantiles(found[schema], n=4)[0] for schema in (OLD, NEW))
            table.add_row(name, str(size), f"{old:.0f}", f"{new:.0f}", f"{new / old:.2f}")
    return table


async def measure_bytes(schema: str, admin: Session, gateway: Session, count: int) -> tuple[str, ...]:
    await admin.execute("CHECKPOINT")
    sizes = (
        "SELECT sum(pg_total_relation_size(oid)) FROM pg_class"
        " WHERE relnamespace = 'tga'::regnamespace AND relkind = 'r'"
    )
    before, place = await admin.fetchval(sizes), await admin.fetchval("SELECT pg_current_wal_lsn()::text")
    calls = Calls()
    for start in range(0, count, 8):
        made = calls.make(8, schema)
        for step in (0, 1):
            await append(gateway, [call[step] for call in made], schema)
        if start % 64 == 0:
            await gateway.fetch("SELECT * FROM tga.integrate(1000)")
            await gateway.fetch("SELECT tga.recoverable('trace', $1::uuid, NULL, 100)", EXECUTOR)
    while (await gateway.fetchrow("SELECT has_more FROM tga.integrate(1000)"))["has_more"]:  # type: ignore[index]
        pass
    wal = await admin.fetchval("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), $1::text::pg_lsn)", place)
    await gateway.close()  # a session tells of its updates when it ends
    hot = await admin.fetchrow(
        "SELECT pg_stat_get_tuples_hot_updated(o) AS hot, pg_stat_get_tuples_updated(o) AS updates"
        "  FROM CAST('tga.heads'::regclass AS oid) AS o"
    )
    assert hot is not None
    ratio = f"{100 * hot['hot'] / hot['updates']:.0f} %" if hot["updates"] else "-"
    stored = (await admin.fetchval(sizes) - before) / count
    return schema, f"{stored:,.0f}", f"{float(wal) / count:,.0f}", ratio


async def bench(server: Server, machine: str, console: Console, scale: Scale) -> None:
    console.print(f"{machine}; {scale.rounds} rounds, {scale.calls} calls of some 500 bytes of arguments")
    root = await asyncpg.connect(server.observer_url)
    await root.execute("ALTER SYSTEM SET autovacuum = off")  # it writes when it likes
    await root.execute("SELECT pg_reload_conf()")
    table = Table(title="Bytes that a call leaves")
    for heading in ("schema", "database", "write-ahead log", "HOT updates of heads"):
        table.add_column(heading, justify="right")
    timed: dict[str, Session] = {}
    for schema, migrations in ((OLD, old_migrations()), (NEW, None)):
        for purpose in ("time", "bytes"):
            name = f"{schema}_{purpose}"
            await root.execute(f"CREATE DATABASE {name}")
            url = server.embedded.url("postgres", name)
            await migrate(url, migrations)
            gateway = await asyncpg.connect(server.embedded.url(GATEWAY_ROLE, name))
            if purpose == "time":
                timed[schema] = gateway
                continue
            admin = await asyncpg.connect(url)
            table.add_row(*await measure_bytes(schema, admin, gateway, scale.calls))
            await admin.close()
    console.print(table)
    for commits in (False, True):
        console.print(await measure_processor(timed, scale.rounds, commits=commits))
    for session in (*timed.values(), root):
        await session.close()


def main() -> None:
    scale = Scale.quick() if arguments_of("lean", __doc__).parse_args().quick else Scale.full()
    run_bench(lambda server, machine, console: bench(server, machine, console, scale))


if __name__ == "__main__":
    main()
