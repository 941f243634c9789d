"""Gateways in this process, for tests that drive runs step by step: the real engine and the real runtime of traces on
real PostgreSQL. What is not real is the tool server, time, and the wire; and commits go wrong as the test says.

A commit's fate, of the first one that a request comes to, or of one after it:

    rolled_back    nothing is stored, and the gateway does not know it          and_not_persisted
    unknown        it is stored, and the gateway does not know it               but_persisted
    held_before    the gateway stops before it; then it goes on, or is killed
    held_after     the gateway stops after it; then it goes on, or is killed
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from app.clock import SystemClock
from app.config.answer_schema import BoundedSchemas
from app.core.digest import digest_of
from app.core.errors import OutcomeUnknown, TgaError
from app.domain.ledger.plans import Ledger, Plan
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.journal import load_journal
from app.domain.runs.engine.messages import LeasedRun, LeaseRequest, PutRequest
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.procedures import PolicySaid, Procedures, ProcedureSaid
from app.domain.tga.documents import JsonOutput, ToolCall
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Answered, Connector, Dispatched, MaySend, Ports, Withheld
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tools import Tool
from app.edge.runs import shown_journal, shown_records
from app.gateway.policy_file import PolicyFile
from app.gateway.runs import EndedTracesOf, EngineLink
from app.postgres.ledger import PostgresLedger
from app.postgres.run_salts import PostgresRunSalts
from app.postgres.runs import PostgresRuns
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from tests.runs.engines import WORKER
from tests.runtime.scripted import KEYS, Says, Tools, open_system

CHARGE = Tool("bank", "charge", "write", digest_of({"tool": "charge"}), max_attempts=3)


class TestClock(SystemClock):
    """Real time, moved on by the test; waiting takes none."""

    __test__ = False

    def __init__(self) -> None:
        super().__init__()
        self.ahead_ms = 0

    def now(self) -> str:
        return self.after(0)

    def after(self, milliseconds: int) -> str:
        at = datetime.now(UTC) + timedelta(milliseconds=self.ahead_ms + milliseconds)
        return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")

    def jitter(self) -> float:
        return 1.0

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(0)


class TestBank:
    """A tool server that honours keys, with a book of what it has executed."""

    __test__ = False

    def __init__(self) -> None:
        self.executions: Counter[str] = Counter()
        self.requests = 0

    @contextlib.asynccontextmanager
    async def place(self, server_id: str) -> AsyncIterator[Connector]:
        yield self

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        if may_send is not None and not await may_send():
            return Withheld()
        self.requests += 1
        key = call.idempotency_key or ""
        if not self.executions[key]:
            self.executions[key] += 1
        return Answered("SUCCESS", JsonOutput(encoding="json", value={"amount": 1, "charge_id": key}))

    def of(self, run_id: str) -> dict[str, int]:
        """What was executed for this run, by path."""
        prefix = f"run:{run_id}/"
        return {key.removeprefix(prefix): count for key, count in self.executions.items() if key.startswith(prefix)}


class FatefulLedger:
    """Commits of runs and of their calls meet the fate that was set, once."""

    def __init__(self, inner: Ledger) -> None:
        self._inner = inner
        self._fate: tuple[str, int] | None = None
        self._go_on = asyncio.Event()
        self._is_dead = False
        self.is_held = asyncio.Event()

    def set_fate(self, fate: str | None, at: int = 0) -> None:
        """Of the commit that comes after `at` others. Whoever is still held goes on."""
        self._fate = None if fate is None else (fate, at)
        self._go_on.set()
        self._go_on = asyncio.Event()
        self.is_held.clear()

    def release(self) -> None:
        self._go_on.set()

    def kill(self) -> None:
        self._is_dead = True
        self._go_on.set()

    async def commit(self, plan: Plan) -> None:
        error = (await self._with_fate(lambda: self._commit_one(plan), 1))[0]
        if error is not None:
            raise error

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        return await self._with_fate(lambda: self._inner.commit_all(plans, needs), len(plans))

    async def _commit_one(self, plan: Plan) -> list[TgaError | None]:
        try:
            await self._inner.commit(plan)
        except TgaError as error:
            return [error]
        return [None]

    async def _with_fate(
        self, work: Callable[[], Awaitable[list[TgaError | None]]], plans: int
    ) -> list[TgaError | None]:
        fate = self._next_fate()
        lost: list[TgaError | None] = [OutcomeUnknown("the connection broke while it committed") for _ in range(plans)]
        if fate == "rolled_back":
            return lost
        if fate == "held_before":
            await self._hold()
        self._verify_alive()
        result = await work()
        if fate == "held_after":
            await self._hold()
        self._verify_alive()
        return lost if fate == "unknown" else result

    async def _hold(self) -> None:
        go_on = self._go_on
        self.is_held.set()
        await go_on.wait()

    def _verify_alive(self) -> None:
        if self._is_dead:
            raise asyncio.CancelledError

    def _next_fate(self) -> str | None:
        if self._fate is None:
            return None
        fate, at = self._fate
        self._fate = (fate, at - 1) if at else None
        return None if at else fate


class _RuntimeCalls:
    runtime: TgaRuntime

    async def call(self, call: CheckedCall, *, wait_ms: int) -> Answer:
        return await self.runtime.call(call, wait_ms=wait_ms)


class Gateway:
    """One gateway. `lease_ms` is 1: who is judged has been silent for longer."""

    def __init__(self, url: str, bank: TestBank, clock: TestClock) -> None:
        self._url = url
        self._bank = bank
        self._clock = clock

    async def open(self) -> Self:
        self._stack = stack = contextlib.AsyncExitStack()
        sessions = await stack.enter_async_context(await Sessions.open(self._url))
        traces = await stack.enter_async_context(await PostgresTraces.open(sessions, self._url))
        writer = Writer(PostgresLedger(sessions))
        stack.push_async_callback(writer.close)
        self.ledger = FatefulLedger(writer)
        system = await open_system(sessions, writer, traces)
        self.procedures = Procedures(system.log, self._clock)
        link, calls = EngineLink(), _RuntimeCalls()
        self.runtime = calls.runtime = TgaRuntime(
            Ports(
                ledger=self.ledger,
                traces=traces,
                tools=Tools(CHARGE),
                connectors=self._bank,
                supervisor=Says("allow"),
                pins=system.pins,
                vault=system.vault,
                decision_signer=system.decision_signer,
                clock=self._clock,
                companion_of=link.companion_of,
            )
        )
        nothing: Any = None  # neither blobs nor secrets are put here
        self.engine = link.engine = RunEngine(
            RunPorts(
                ledger=self.ledger,
                runs=PostgresRuns(sessions),
                salts=PostgresRunSalts(sessions, KEYS),
                procedures=self.procedures,
                supervisor=PolicyFile.open(None),
                tools=calls,
                values=nothing,
                secrets=nothing,
                signer=system.decision_signer,
                schemas=BoundedSchemas(),
                clock=self._clock,
                executor_id=traces.executor_id,
                new_lease=partial(secrets.token_urlsafe, 24),
                incarnation=traces.incarnation,
                lease_ms=1,
            ),
            EndedTracesOf(traces),
        )
        self._services: Any = SimpleNamespace(runs=self.engine, traces=traces)
        return self

    async def kill(self) -> None:
        """Nothing that it had begun goes on; what was committed stands."""
        self.ledger.kill()
        for _, task in list(self.runtime._executions._running.values()):
            task.cancel()
        await self.engine.close()
        await self.runtime.close()
        await self._stack.aclose()

    async def register(self, name: str, digest: str) -> None:
        policy = PolicySaid.made_of({"park_after": 1_000})
        said = ProcedureSaid(name=name, version="1", program_digest=digest, policy=policy)
        await self.procedures.register(said, WORKER)

    async def lease(self, worker: str, offered: list[dict[str, Any]]) -> list[LeasedRun]:
        request = {"worker": worker, "name": "here", "procedures": offered, "slots": 1, "wait_ms": 0}
        return await self.engine.leasing.lease(LeaseRequest.made_of(request), WORKER)

    async def ask(self, path: str, body: Any) -> Any:
        """What a worker asks over HTTP: a page of the journal, or a put."""
        address = urlsplit(path)
        run_id = address.path.split("/")[3]
        if body is None:
            ports, after = self.engine.ports, int(parse_qs(address.query)["after_seq"][0])
            start = (await self.engine.table.peek(run_id)).start
            page = await load_journal(ports, run_id, start, after=after, limit=200)
            return {"items": await shown_journal(self._services, WORKER, page)}
        answer = await self.engine.put(run_id, PutRequest.made_of(body), WORKER)
        return {
            "directive": answer.directive,
            "reason": answer.reason,
            "sequence_number": answer.sequence_number,
            "news": await shown_records(self._services, WORKER, answer.news),
            "result": answer.result,
        }

    async def settle(self) -> None:
        """What it does on its own after a request: other runs are told, other gateways are."""
        await asyncio.gather(*self.engine._tasks, return_exceptions=True)

    async def recover(self) -> None:
        async with contextlib.aclosing(self.runtime.recover_all()) as recovered:
            async for _ in recovered:
                pass
