"""Another process that wants the same traces.

    python -m tests.invariants.appender URL race|drive|hold CONTESTANT FIRST_TRACE TRACES TASKS

It says `ready`, waits for a line, does it, and says what came of it in one line of JSON. `hold` acquires the first
trace, says `held`, and keeps it until a line comes or it is killed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from app.core.errors import ConcurrentExecution, TgaError
from app.domain.tga.replay import LogRecord, advance, fold
from app.domain.tga.state_store import TgaStateStore
from app.postgres.ledger import PostgresLedger
from app.postgres.ownership import Executor
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.traces import action_request, supervisor_decision, time_at, tool_call, tool_effect, trace_id, uuid7


@dataclass
class Outcome:
    """`won`: trace, sequence number and digest of each entry that was acknowledged. `lost`: codes, counted."""

    won: list[tuple[int, int, str]] = field(default_factory=list)
    lost: Counter[str] = field(default_factory=Counter)

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        said: dict[str, Any] = json.loads(line)
        return cls([(n, sequence, digest) for n, sequence, digest in said["won"]], Counter(said["lost"]))


def _next_of(records: list[LogRecord], n: int, contestant: int) -> LogRecord:
    """What this contestant would append next: the same artifact as everyone, in an entry that nobody else makes."""
    request = action_request(n)
    decision = supervisor_decision(request)
    call = tool_call(n, request, decision)
    artifact = (request, decision, call, tool_effect(call))[len(records)]
    executor_id = uuid7(contestant, role="executor")
    state = fold(records) if records else None
    return advance(state, artifact, executor_id=executor_id, recorded_at=time_at(len(records)))[0]


async def race(store: TgaStateStore, n: int, contestant: int, outcome: Outcome) -> None:
    """Append whatever comes next until the trace has ended, owning nothing."""
    while len(records := await store.list_log_entries(trace_id(n), 0)) < 4:
        record = _next_of(records, n, contestant)
        try:
            await store.append_log_entry(record)
        except TgaError as error:
            outcome.lost[error.code] += 1
        else:
            outcome.won.append((n, record.entry.sequence_number, record.entry.entry_digest))


async def execution(store: TgaStateStore, n: int, contestant: int, outcome: Outcome) -> None:
    """Acquire, append the next entry, release; until the trace has ended. Whoever holds it loses no append."""
    while True:
        try:
            await store.acquire_trace_lock(trace_id(n))
        except ConcurrentExecution as error:
            outcome.lost[error.code] += 1
            await asyncio.sleep(0.001)
            continue
        records = await store.list_log_entries(trace_id(n), 0)
        if len(records) < 4:
            record = _next_of(records, n, contestant)
            await store.append_log_entry(record)
            outcome.won.append((n, record.entry.sequence_number, record.entry.entry_digest))
        await store.release_trace_lock(trace_id(n))
        if len(records) == 4:
            return


async def contend(store: TgaStateStore, what: str, contestant: int, first: int, traces: int, tasks: int) -> Outcome:
    """All tasks want one trace at a time, each as a contestant of its own."""
    outcome = Outcome()
    step = {"race": race, "drive": execution}[what]
    for n in range(first, first + traces):
        async with asyncio.TaskGroup() as group:
            for task in range(tasks):
                group.create_task(step(store, n, contestant + task, outcome))
    return outcome


async def _main(url: str, what: str, contestant: int, first: int, traces: int, tasks: int) -> None:
    async with await Sessions.open(url, sessions_max=6) as sessions, await Executor.open(url) as executor:
        store = PostgresStateStore(sessions, PostgresLedger(sessions), executor)
        if what == "hold":
            await store.acquire_trace_lock(trace_id(first))
            print("held", flush=True)
            sys.stdin.readline()
            return
        async with sessions.reading():
            print("ready", flush=True)
        sys.stdin.readline()
        outcome = await contend(store, what, contestant, first, traces, tasks)
        print(json.dumps({"won": outcome.won, "lost": outcome.lost}), flush=True)


if __name__ == "__main__":
    _url, _what, *_numbers = sys.argv[1:]
    asyncio.run(_main(_url, _what, *map(int, _numbers)))
