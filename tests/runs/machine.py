"""A machine that drives random programs through the real engine, with random faults, against the model of trees.py.

Hypothesis chooses the program and, rule by rule, what happens next: who leases, whose request is carried out and on
which of two gateways, what goes wrong with it, what people, timers and other runs do meanwhile. Nothing happens between
rules, so that a failure is repeated and made smaller. A request can be held before or after its commit while the other
gateway goes on: what it has decided is old by then.

After the last rule nothing more goes wrong, and the run must end by itself as the model says.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple, TypeVar

import asyncpg
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from app.core.errors import RunAnswerInvalid, RunAnswerUnasked, RunEnded, TgaError
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.documents import RunAnswer, RunAttempt, RunCheckpoint, RunDocument, RunIntent
from app.domain.runs.engine.messages import LeasedRun
from app.domain.runs.engine.ports import HeadOfRun
from app.domain.runs.engine.starting import StartRequest
from app.domain.runs.ids import owner_of
from app.domain.runs.replay import RunRecord, fold
from app.domain.runs.requests import ChildRequest
from app.domain.runs.schedule import AT_WORK
from app.domain.runs.values import InlineValue
from app.domain.runs.verification import stream_checks
from app.edge.problems import status_of
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from tests.crash.world import Database
from tests.runs.engines import AGENT
from tests.runs.gateways import Gateway, TestBank, TestClock
from tests.runs.programs import PROGRAMS
from tests.runs.trees import SLEEP_MS, Tree, expected, tree_program, trees
from tests.runs.worker import REPEATED, Attempt, Boundaries, Refused, Worker, program_digest

T = TypeVar("T")
D = TypeVar("D", bound=RunDocument)
TERMINAL = ("COMPLETED", "CANCELLED")
NAMES = ("tree", "paying")
_numbers = itertools.count(1)
OFFERED = [{"name": name, "version": "1", "program_digest": program_digest(name)} for name in NAMES]


class MachineWorld:
    """Two gateways on one database, for all examples of a test."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self._runner = asyncio.Runner()
        self.bank = TestBank()
        self.clock = TestClock()
        self.seen: Counter[str] = Counter()  # what has happened, over all examples

    def __enter__(self) -> MachineWorld:
        self.run(self._open())
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.run(self._close())
        finally:
            self._runner.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def bounded() -> T:
            async with asyncio.timeout(60):
                return await work

        return self._runner.run(bounded())

    async def _open(self) -> None:
        self.admin = await asyncpg.connect(self._database.admin_url)
        self.sessions = await Sessions.open(self._database.gateway_url, sessions_max=1)
        self.gateways = [await self.new_gateway(), await self.new_gateway()]
        for name in NAMES:
            await self.gateways[0].register(name, program_digest(name))

    async def new_gateway(self) -> Gateway:
        return await Gateway(self._database.gateway_url, self.bank, self.clock).open()

    async def _close(self) -> None:
        for gateway in self.gateways:
            await gateway.kill()
        await self.sessions.close()
        await self.admin.close()

    async def restart(self, number: int) -> None:
        await self.gateways[number].kill()
        self.gateways[number] = await self.new_gateway()

    async def tell_time(self) -> None:
        """PostgreSQL has its own clock: what is due by ours is due by that one, too, and some seconds before: whoever
        looks then finds nothing to do. Holds are over, and the pauses before another attempt."""
        await self.admin.execute(
            "UPDATE tga.runs SET held_until = NULL, due_at = CASE"
            " WHEN due_at <= clock_timestamp() + $1 * interval '1 ms' THEN clock_timestamp() - interval '1 ms'"
            " ELSE due_at END WHERE held_until IS NOT NULL OR due_at > clock_timestamp()",
            self.clock.ahead_ms + 60_000,
        )

    async def findings(self, stream: str) -> list[str]:
        async with open_reader(self.sessions, stream=stream) as reader:
            return [str(error) async for error in verify_ledger(reader, stream_checks(), Report())]


class WaitingClient:
    """A worker's way to the gateways: its request waits here until a rule carries it out."""

    def __init__(self) -> None:
        self.boundaries = Boundaries()
        self.request: tuple[str, Any] | None = None
        self.has_request = asyncio.Event()
        self._answer: asyncio.Future[Any] | None = None

    async def ask(self, method: str, path: str, body: Any = None, *, name: str = "") -> Any:
        self.request, self._answer = (path, body), asyncio.get_running_loop().create_future()
        self.has_request.set()
        return await self._answer

    def answer(self, answer: Any) -> None:
        assert self._answer is not None
        future, self._answer, self.request = self._answer, None, None
        self.has_request.clear()
        if future.done():  # the program has been left meanwhile
            return
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class Bodies(list[tuple[str, str, int]]):
    def __init__(self, note: Callable[[tuple[str, str, int]], None]) -> None:
        super().__init__()
        self._note = note

    def append(self, body: tuple[str, str, int]) -> None:
        self._note(body)
        super().append(body)


class Working:
    """One attempt, as its worker performs it."""

    def __init__(self, world: MachineWorld, leased: LeasedRun, note: Callable[[Working, str, int], None]) -> None:
        self.leased = leased
        self.client = WaitingClient()
        client: Any = self.client
        worker = Worker(client, {**PROGRAMS, "tree": tree_program}, "worker-of-machine", is_careful=False)
        worker.time_in = lambda milliseconds: world.clock.after(milliseconds * 1_000)
        worker.bodies = Bodies(lambda body: note(self, body[1], body[2]))
        told = {**asdict(leased), "input": leased.input.to_json()}
        self.task = asyncio.get_running_loop().create_task(worker.perform(Attempt(worker, told)))
        self.is_flying = False

    @property
    def run_id(self) -> str:
        return self.leased.run_id

    @property
    def is_over(self) -> bool:
        return self.task.done()

    async def settle(self) -> None:
        """Until it asks for something, or is through."""
        asks = asyncio.ensure_future(self.client.has_request.wait())
        await asyncio.wait({asks, self.task}, return_when=asyncio.FIRST_COMPLETED)
        asks.cancel()
        if self.task.done():
            self.task.result()

    async def lose(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)


@dataclass
class Flying:
    """A request that is held at a commit of its gateway."""

    task: asyncio.Task[Any]
    gateway: int
    commits: int  # those that it had made before
    is_after: bool
    working: Working | None


class Watched(NamedTuple):
    """Before a request: whether the attempt's lease is over, how long the journal is, how many calls the ledger knows
    of, and how many requests the bank has had."""

    one: Working
    is_over: bool
    sequence_number: int
    calls: int
    requests: int


FATES = st.sampled_from([None, None, None, "rolled_back", "unknown", "held_before", "held_after"])
COMMITS = st.sampled_from([0, 0, 1, 2])
GATEWAYS = st.sampled_from([0, 1])
SELDOM = st.sampled_from([False, False, False, True])
FAULTS = st.sampled_from(["none", "none", "none", "none", "lost_before", "lost_after", "repeated"])


class RunsMachine(RuleBasedStateMachine):
    world: ClassVar[MachineWorld]

    def __init__(self) -> None:
        super().__init__()
        self.runs: list[str] = []
        self.working: list[Working] = []
        self.flying: Flying | None = None
        self.records: dict[str, list[RunRecord]] = {}
        self.ended_at: dict[tuple[str, str, int], int] = {}  # by run, path and try: the entry that says so
        self.restarts = 0
        self.forked: dict[str, int] = {}
        self.problems: list[str] = []
        self.is_done = False

    # --- what happens ---

    @initialize(tree=trees, many=st.integers(0, 8), may_fork=SELDOM, may_cancel=SELDOM)
    def start(self, tree: Tree, many: int, may_fork: bool, may_cancel: bool) -> None:
        self.tree, self.may_fork, self.may_cancel = tree, may_fork, may_cancel
        self.main = f"m-{os.getpid()}-{next(_numbers)}"
        self.do(self._start())
        for _ in range(many):  # so that faults come to programs that have got somewhere
            self.do(self._go_on())

    async def _start(self) -> None:
        asked = StartRequest(AGENT, "tree", InlineValue(tier="inline", value=self.tree), run_id=self.main)
        await self.world.gateways[0].engine.starting.start(asked)
        self.runs.append(self.main)

    @rule(gateway=GATEWAYS, fate=FATES, is_lost=st.sampled_from([False, False, False, True]))
    def lease(self, gateway: int, fate: str | None, is_lost: bool) -> None:
        self.do(self._lease(gateway, fate, is_lost))

    @precondition(lambda self: any(one.client.request and not one.is_flying for one in self.working))
    @rule(which=st.integers(0, 3), gateway=GATEWAYS, fault=FAULTS, fate=FATES, commits=COMMITS)
    def request(self, which: int, gateway: int, fault: str, fate: str | None, commits: int) -> None:
        ready = [one for one in self.working if one.client.request and not one.is_flying]
        self.do(self._request(ready[which % len(ready)], gateway, fault, fate, commits))

    @precondition(lambda self: self.working)
    @rule(count=st.integers(1, 6))
    def go_on(self, count: int) -> None:
        """So many requests of the newest attempt, and nothing goes wrong."""
        for _ in range(count):
            self.do(self._go_on())

    @precondition(lambda self: self.working)
    @rule(gateway=GATEWAYS, then=GATEWAYS, fate=FATES)
    def take_over(self, gateway: int, then: int, fate: str | None) -> None:
        """The worker was silent for too long, and another one gets the run; the first goes on, and knows nothing."""
        self.do(self._take_over(gateway, then, fate))

    @precondition(lambda self: len(self.working) > 1)
    @rule(gateway=GATEWAYS, fault=FAULTS)
    def old_attempt_goes_on(self, gateway: int, fault: str) -> None:
        old = [one for one in self.working[:-1] if one.client.request and not one.is_flying]
        if old:
            self.do(self._request(old[0], gateway, fault, None, 0))

    @precondition(lambda self: self.flying is None and any(one.client.request for one in self.working))
    @rule(
        gateway=GATEWAYS,
        fate=st.sampled_from(["held_before", "held_before", "held_after"]),
        commits=COMMITS,
        meanwhile=st.sampled_from(["take_over", "take_over", "loss", "answer", "signal", "time", "cancel", "restart"]),
    )
    def race(self, gateway: int, fate: str, commits: int, meanwhile: str) -> None:
        """A request is held at its commit while something else happens to the run."""
        (*_, one) = [one for one in self.working if one.client.request]
        self.do(self._request(one, gateway, "none", fate, commits))
        other = 1 - gateway
        match meanwhile:
            case "take_over":
                self.do(self._take_over(other, other, None))
            case "loss":
                self.do(self._sweep(other, judges=True, ahead=False, fate=None))
            case "answer":
                self.do(self._answer(other, None, both=True, is_wrong=False))
            case "signal":
                self.do(self._signal(other, None, "plan"))
            case "time":
                self.do(self._sweep(other, judges=False, ahead=True, fate=None))
            case "cancel" if self.may_cancel:
                self.do(self._cancel(self.main, other, None))
            case "restart" if self.flying is not None:
                self.do(self._restart(gateway))
        if self.flying is not None:
            self.do(self._release())

    @precondition(lambda self: self.working)
    @rule(which=st.integers(0, 3))
    def worker_is_lost(self, which: int) -> None:
        ready = [one for one in self.working if not one.is_flying]
        if ready:
            self.do(self._lose(ready[which % len(ready)]))

    @rule(gateway=GATEWAYS, judges=st.booleans(), ahead=st.booleans(), fate=FATES)
    def sweep(self, gateway: int, judges: bool, ahead: bool, fate: str | None) -> None:
        """`judges`: every worker was silent for too long, also one that goes on. `ahead`: time passes before."""
        self.do(self._sweep(gateway, judges=judges, ahead=ahead, fate=fate))

    @rule(gateway=GATEWAYS, fate=FATES, both=st.booleans(), is_wrong=st.booleans())
    def answer(self, gateway: int, fate: str | None, both: bool, is_wrong: bool) -> None:
        self.do(self._answer(gateway, fate, both=both, is_wrong=is_wrong))

    @rule(gateway=GATEWAYS, fate=FATES, name=st.sampled_from(["plan", "pay", "tell"]))
    def signal(self, gateway: int, fate: str | None, name: str) -> None:
        self.do(self._signal(gateway, fate, name))

    @precondition(lambda self: self.flying is not None)
    @rule()
    def release(self) -> None:
        self.do(self._release())

    @precondition(lambda self: self.flying is not None or self.restarts < 1)
    @rule(gateway=GATEWAYS)
    def restart(self, gateway: int) -> None:
        self.do(self._restart(gateway))

    @rule(gateway=GATEWAYS, fate=FATES)
    def retry(self, gateway: int, fate: str | None) -> None:
        self.do(self._retry(gateway, fate))

    @precondition(lambda self: self.may_fork and not self.forked)
    @rule(gateway=GATEWAYS, at=st.integers(2, 30))
    def fork(self, gateway: int, at: int) -> None:
        self.do(self._fork(gateway, at))

    @precondition(lambda self: self.may_cancel and len(self.records.get(self.main, ())) > 6)
    @rule(gateway=GATEWAYS, fate=FATES)
    def cancel(self, gateway: int, fate: str | None) -> None:
        self.do(self._cancel(self.main, gateway, fate))

    def teardown(self) -> None:
        if not self.runs:
            return
        try:
            if not self.is_done:
                self.is_done = True
                self.do(self._finish())
                self.world.run(self._verify())
        finally:
            for said in self._said(RunAttempt):
                self.world.seen[said.change] += 1
            self.world.run(self._leave())

    @invariant()
    def nothing_is_wrong(self) -> None:
        if self.problems:
            self.is_done = True
            raise AssertionError(self.problems)

    # --- how ---

    def do(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            self.world.run(work)
            self.world.run(self._read_on())
        except BaseException:
            self.is_done = True
            raise
        self.nothing_is_wrong()

    def _free(self, gateway: int) -> int:
        """A gateway that holds a request is asked for nothing else: the run is locked there."""
        return 1 - gateway if self.flying is not None and self.flying.gateway == gateway else gateway

    async def _carry_out(
        self,
        gateway: int,
        work: Callable[[Gateway], Awaitable[Any]],
        fate: str | None,
        commits: int = 0,
        working: Working | None = None,
    ) -> tuple[bool, Any]:
        """What came of it, an error too; False: it is held, and goes on when it is released."""
        if self.flying is not None and fate in ("held_before", "held_after"):
            fate = None
        at = self.world.gateways[gateway]
        await at.settle()  # or the fate would be another's
        at.ledger.set_fate(fate, commits)

        async def caught() -> Any:
            try:
                return await work(at)
            except TgaError as error:
                return error

        task = asyncio.get_running_loop().create_task(caught())
        held = asyncio.ensure_future(at.ledger.is_held.wait())
        await asyncio.wait({task, held}, return_when=asyncio.FIRST_COMPLETED)
        held.cancel()
        if not task.done():
            self.world.seen["held"] += 1
            self.flying = Flying(task, gateway, commits, fate == "held_after", working)
            if working is not None:
                working.is_flying = True
            return False, None
        at.ledger.set_fate(None)
        return True, task.result()

    async def _lease(self, gateway: int, fate: str | None, is_lost: bool) -> None:
        await self.world.tell_time()
        worker = f"worker-{next(_numbers)}"
        is_through, leased = await self._carry_out(self._free(gateway), lambda at: at.lease(worker, OFFERED), fate)
        if is_through and not isinstance(leased, TgaError) and not is_lost:
            await self._take(leased)

    async def _take_over(self, gateway: int, then: int, fate: str | None) -> None:
        await self._sweep(gateway, judges=True, ahead=False, fate=fate)
        await self._lease(then, None, is_lost=False)

    async def _take(self, leased: list[LeasedRun]) -> None:
        for run in leased:
            if run.run_id in self._family():
                self.working.append(Working(self.world, run, self._note_body))
                await self.working[-1].settle()
                self._forget_over()

    def _family(self) -> list[str]:
        """The runs of this example, with their children."""
        begun = [said for said in self._said(RunIntent) if isinstance(said.request, ChildRequest)]
        return [
            *self.runs,
            *(said.request.child_run_id or "" for said in begun if isinstance(said.request, ChildRequest)),
        ]

    def _said(self, kind: type[D]) -> list[D]:
        """What the runs of this example, without their children, have recorded of this kind."""
        records = [record for run_id in self.runs for record in self.records.get(run_id, ())]
        return [record.artifact for record in records if isinstance(record.artifact, kind)]

    def _open(self, kind: str) -> list[RunIntent]:
        """What has begun, and was not answered."""
        answered = {said.intent_digest for said in self._said(RunAnswer)}
        return [said for said in self._said(RunIntent) if said.kind == kind and said.digest() not in answered]

    async def _head(self, run_id: str) -> HeadOfRun:
        found: dict[str, HeadOfRun] = await self._engine().ports.runs.find_heads([run_id], tenant="default")
        return found[run_id]

    async def _request(self, one: Working, gateway: int, fault: str, fate: str | None, commits: int) -> None:
        if fault == "lost_before":
            await self._lose(one)
            return
        gateway = self._free(gateway)
        watched = await self._watch(one)
        assert one.client.request is not None
        path, body = one.client.request
        is_through, answer = await self._carry_out(gateway, lambda at: at.ask(path, body), fate, commits, one)
        if not is_through:
            return
        if fault == "repeated" and not isinstance(answer, TgaError):
            other = self._free(1 - gateway)
            is_through, again = await self._carry_out(other, lambda at: at.ask(path, body), None)
            if isinstance(again, TgaError):
                self.problems.append(f"a repeat of {body} is refused: {again!r}")
            elif body is not None and (again["directive"], again["reason"]) != (answer["directive"], answer["reason"]):
                self.problems.append(f"{body} was answered with {answer}, its repeat with {again}")
            answer = again
        await self._verify_fenced(watched, answer)
        if fault == "lost_after":
            await self._lose(one)
        else:
            await self._give(one, answer)

    async def _give(self, one: Working, answer: Any) -> None:
        if isinstance(answer, TgaError):
            status = status_of(answer)
            if status in REPEATED or one.is_over:
                return  # it asks again
            answer = Refused(status, {"code": answer.code, "what": str(answer)})
        if one.client.request is None:
            return
        one.client.answer(answer)
        await one.settle()
        self._forget_over()

    def _forget_over(self) -> None:
        self.working = [one for one in self.working if not one.is_over]

    async def _go_on(self) -> None:
        """The newest attempt's next request, or a lease where nobody works."""
        ready = [one for one in self.working if one.client.request and not one.is_flying]
        if ready:
            await self._request(ready[-1], 0, "none", None, 0)
        else:
            await self._lease(0, None, is_lost=False)

    async def _lose(self, one: Working) -> None:
        await one.lose()
        self._forget_over()

    async def _sweep(self, gateway: int, *, judges: bool, ahead: bool, fate: str | None) -> None:
        if ahead:
            self.world.clock.ahead_ms += SLEEP_MS * 2_000
        await self.world.tell_time()
        await self._carry_out(self._free(gateway), lambda at: at.engine.sweeping.sweep(judges_workers=judges), fate)

    async def _answer(self, gateway: int, fate: str | None, *, both: bool, is_wrong: bool) -> None:
        for asked in self._open("ask")[:1]:
            if (await self._head(asked.run_id)).state in AT_WORK:
                await self._answer_one(gateway, fate, asked.run_id, asked.path, both=both, is_wrong=is_wrong)

    async def _answer_one(
        self, gateway: int, fate: str | None, run_id: str, path: str, *, both: bool, is_wrong: bool
    ) -> None:
        async def answer(at: Gateway, value: Any, who: str) -> str:
            said, person = InlineValue(tier="inline", value=value), AGENT.model_copy(update={"principal_id": who})
            return await at.engine.answering.answer(run_id, path, value, said, person, intent_digest=None)

        if is_wrong:
            _, told = await self._carry_out(self._free(gateway), lambda at: answer(at, "maybe", "eve"), None)
            if not isinstance(told, RunAnswerInvalid):
                self.problems.append(f"an answer of the wrong type is taken: {told}")
        is_through, first = await self._carry_out(self._free(gateway), lambda at: answer(at, True, "ada"), fate)
        if both:
            _, second = await self._carry_out(self._free(1 - gateway), lambda at: answer(at, True, "bob"), None)
            won = [not isinstance(one, TgaError) for one in ([first] if is_through else []) + [second]]
            if is_through and won.count(True) != 1:
                self.problems.append(f"of two answers {won.count(True)} count: {first}, {second}")
            if isinstance(second, TgaError) and not isinstance(second, RunAnswerUnasked):
                self.problems.append(f"an answer that is late is told {second!r}")

    async def _signal(self, gateway: int, fate: str | None, name: str) -> None:
        said, signal_id = InlineValue(tier="inline", value="gone"), f"signal-{next(_numbers)}"
        for run_id in self.runs:
            send = partial(_signal, run_id=run_id, name=name, signal_id=signal_id, value=said)
            await self._carry_out(self._free(gateway), send, fate)
            fate = None

    async def _retry(self, gateway: int, fate: str | None) -> None:
        for run_id in self._family():
            if (await self._head(run_id)).state in ("FAILED", "PARKED"):
                await self._carry_out(self._free(gateway), partial(_resume, run_id=run_id), fate)
                return

    async def _fork(self, gateway: int, at: int) -> None:
        last = len(self.records[self.main])
        number, forked = min(at, last), f"{self.main}-f"
        for _ in range(2):
            _, told = await self._carry_out(
                self._free(gateway),
                lambda one: one.engine.starting.fork(self.main, at=number, principal=AGENT, run_id=forked),
                None,
            )
            assert not isinstance(told, TgaError), told
        self.forked[forked] = number
        self.runs.append(forked)

    async def _cancel(self, run_id: str, gateway: int, fate: str | None) -> None:
        _, told = await self._carry_out(self._free(gateway), lambda at: at.engine.answering.cancel(run_id, "ada"), fate)
        if isinstance(told, TgaError) and not isinstance(told, RunEnded):
            self.problems.append(f"cancel is told {told!r}")

    async def _release(self) -> None:
        flying, self.flying = self.flying, None
        assert flying is not None
        one = flying.working
        watched = None
        if one is not None:
            one.is_flying = False
            watched = await self._watch(one)
        self.world.gateways[flying.gateway].ledger.release()
        answer = await flying.task
        if one is None:
            if isinstance(answer, list):  # a lease whose worker has waited for it
                await self._take(answer)
            return
        if not flying.is_after and not flying.commits:
            await self._verify_fenced(watched, answer)
        if one in self.working:
            await self._give(one, answer)

    async def _restart(self, gateway: int) -> None:
        """The gateway is killed, with whatever it was doing; another process takes its place."""
        self.restarts += 1
        flying = self.flying
        if flying is not None and flying.gateway == gateway:
            self.flying = None
            if flying.working is not None:
                flying.working.is_flying = False  # it asks again, somewhere else
            self.world.gateways[gateway].ledger.kill()
            flying.task.cancel()
            await asyncio.gather(flying.task, return_exceptions=True)
        await self.world.restart(gateway)
        await self.world.tell_time()

    # --- what is watched ---

    def _engine(self) -> Any:
        return self.world.gateways[self._free(0)].engine

    async def _watch(self, one: Working) -> Watched:
        head = await self._head(one.run_id)
        owner = owner_of(one.leased.lease, self.world.gateways[0].engine.ports.incarnation())
        is_over = head.state != "RUNNING" or head.owner != owner
        calls = await self._calls_of(one.run_id) if is_over else 0
        return Watched(one, is_over, head.sequence_number, calls, self.world.bank.requests)

    async def _calls_of(self, run_id: str) -> int:
        """How many calls of the run the ledger knows of."""
        known = "SELECT count(*) FROM tga.claims WHERE idempotency_key LIKE $1"
        return int(await self.world.admin.fetchval(known, f"run:{run_id}/%"))

    async def _verify_fenced(self, watched: Watched | None, answer: Any) -> None:
        if watched is None or not watched.is_over or isinstance(answer, TgaError) or "items" in answer:
            return
        one, number = watched.one, watched.sequence_number
        self.world.seen["zombie"] += 1
        new = await self._engine().ports.runs.load_records(one.run_id, after=number, limit=100)
        stored = [
            record
            for record in new
            if not (isinstance(record.artifact, RunAttempt) and record.artifact.change == "FENCED")
        ]
        if stored:
            self.problems.append(f"a worker whose lease was over has stored {[r.artifact for r in stored]}")
        if await self._calls_of(one.run_id) != watched.calls:
            self.problems.append("a call of a worker whose lease was over was born")
        if self.world.bank.requests != watched.requests:
            self.problems.append("a worker whose lease was over has called a tool")

    def _note_body(self, one: Working, path: str, tried: int) -> None:
        place = (one.run_id, path, tried)
        is_newest = not any(other.leased.attempt > one.leased.attempt for other in self.working if other is not one)
        if is_newest and one.leased.sequence_number >= self.ended_at.get(place, sys.maxsize):
            self.problems.append(f"a recorded body runs again: {place}")

    async def _read_on(self) -> None:
        """What was recorded since."""
        for run_id in self._family():
            known = self.records.setdefault(run_id, [])
            new = await self._engine().ports.runs.load_records(run_id, after=len(known), limit=1_000)
            known += new
            for record in new:
                if isinstance(said := record.artifact, RunCheckpoint):
                    self.ended_at[run_id, said.path, said.try_number] = record.entry.sequence_number

    # --- the end ---

    async def _finish(self) -> None:
        """Nothing more goes wrong: everything ends by itself, but for questions, signals and retries."""
        if self.flying is not None:
            await self._release()
        for _ in range(400):
            for one in list(self.working):
                if one.client.request and one in self.working:
                    await self._request(one, 0, "none", None, 0)
            if self.working:
                continue
            states = [(await self._head(run_id)).state for run_id in self._family()]
            if all(state in TERMINAL for state in states):
                return
            await self._retry(0, None)
            await self._answer(0, None, both=False, is_wrong=False)
            for name in {said.name for said in self._open("signal")}:
                await self._signal(0, None, name)
            await self._read_on()
            for gateway in self.world.gateways:
                await gateway.recover()
            await self._sweep(0, judges=True, ahead=True, fate=None)
            await self._lease(0, None, is_lost=False)
        raise AssertionError(f"stranded: {states}")

    async def _verify(self) -> None:
        await self._read_on()
        for run_id in self._family():
            self.world.seen[f"{(await self._head(run_id)).state}"] += 1
        self.world.seen["fork"] += len(self.forked)
        model = expected(self.tree)
        for run_id in self.runs:
            loaded = await self._engine().ports.runs.load(run_id)
            executed = self.world.bank.of(run_id)
            assert set(executed.values()) <= {1}, executed
            records = self.records[run_id]
            answers = [said.intent_digest for one in records if isinstance(said := one.artifact, RunAnswer)]
            assert len(answers) == len(set(answers)), "one of two answers counts"
            if loaded.run.head.state == "CANCELLED":
                continue
            end: Any = records[-1].artifact
            told, wanted = end.output.value, {"results": model.results, "log": model.log}
            assert told == wanted, f"the result is {told}, the model's {wanted}"
            assert loaded.run.state == {"log": model.log}, f"the state is {loaded.run.state}, the log's {model.log}"
            before = self.records[self.main][: self.forked.get(run_id, 0)]
            answered = [
                said
                for one in before
                if isinstance(said := one.artifact, RunAnswer) and said.answered_by.type == "tool"
            ]
            assert len(executed) + len(answered) == model.tools, (executed, answered)
            if not self.forked.get(run_id):
                assert fold(records) == loaded.run
        family = self._family()
        for run_id in family:
            assert await self.world.findings(f"run:{run_id}") == []
            assert set(self.world.bank.of(run_id).values()) <= {1}
        traces = await self.world.admin.fetch(
            "SELECT stream, state, owner FROM tga.heads WHERE stream LIKE 'trace:%' AND is_open AND waiting IS NULL"
        )
        assert traces == [], "a call that nobody drives"

    async def _leave(self) -> None:
        """Whatever has become of the example, the next one has nothing to do with it."""
        if self.flying is not None:
            flying, self.flying = self.flying, None
            self.world.gateways[flying.gateway].ledger.release()
            await asyncio.gather(flying.task, return_exceptions=True)
        for one in self.working:
            await one.lose()
        for gateway in self.world.gateways:
            gateway.ledger.set_fate(None)
        for run_id in self._family():
            with contextlib.suppress(TgaError):
                await self.world.gateways[0].engine.answering.cancel(run_id, "test")


async def _signal(at: Gateway, run_id: str, name: str, signal_id: str, value: InlineValue) -> str:
    return await at.engine.answering.signal(run_id, name, signal_id, value, AGENT)


async def _resume(at: Gateway, run_id: str) -> str:
    return await at.engine.answering.resume(run_id, AGENT, rationale="again")
