"""Crashes at every boundary of your own procedure: the same result, the same state, each effect once.

`crash_everywhere` runs a procedure once without a crash, and then once for each boundary of that run, on a fresh
gateway in memory: before a request is sent, after it was carried out and its answer lost, with the answer lost alone,
with the lease gone, before a body and after it. A new worker goes on, and what came of it is compared.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import httpx2

from tga_sdk.attempt import Attempt, Host, Over
from tga_sdk.frames import Frame
from tga_sdk.procedures import procedure_of
from tga_sdk.testing.gateway import MemoryGateway
from tga_sdk.testing.people import ScriptedPeople, plain
from tga_sdk.testing.tools import Effect, Tool, ToolFunction
from tga_sdk.testing.transport import AsyncMemoryTransport
from tga_sdk.values import blob_of
from tga_sdk.worker import Worker

RUN_ID: Final = "crash"
ToolsSaid = Mapping[str, ToolFunction | Tool] | Callable[[], Mapping[str, ToolFunction | Tool]]
PATIENCE_S: Final = 120.0
STUCK_AFTER_S: Final = 0.3

_FAULTS: Final = {
    "before": "the worker died before it sent {}",
    "after": "the worker died after {} was carried out, before it heard the answer",
    "lost": "the answer to {} was lost, and the worker asked again",
    "stop": "the lease was lost when {} arrived",
    "body.before": "the worker died before the body of {}",
    "body.after": "the worker died after the body of {}, before its end was recorded",
}


class CrashFound(AssertionError):
    """A crash changed what came of the run. `boundary` says where, `differences` what."""

    def __init__(self, procedure: str, boundary: Boundary, number: int, count: int, differences: Sequence[str]) -> None:
        self.boundary = boundary
        self.differences = list(differences)
        told = "\n".join(f"  - {one}" for one in differences)
        super().__init__(f"{procedure}, boundary {number} of {count}: {boundary}\n{told}")


class RunStuck(AssertionError):
    """The run waits for an answer that no one gives."""


@dataclass(frozen=True)
class Boundary:
    """Where a worker crashes: at the n-th of these requests or bodies. `what` is that, in words."""

    fault: str
    number: int
    what: str

    def __str__(self) -> str:
        return _FAULTS[self.fault].format(self.what)


@dataclass
class Outcome:
    """What came of a run. `gone_on`: where the program went on after it was told to stop."""

    state: str
    output: Any
    error: Mapping[str, Any] | None
    divergence: Mapping[str, Any] | None
    document: dict[str, Any]
    effects: list[Effect]
    journal: list[dict[str, Any]]
    observed: Any = None
    gone_on: list[str] = field(default_factory=list)

    @property
    def was_interrupted(self) -> bool:
        """Whether a step that runs at most once had begun when its worker was lost."""
        return any(record.get("outcome") == "INTERRUPTED" for record in self.journal)


@dataclass
class Crashes:
    """What `crash_everywhere` has tried: how it went without a crash, and the boundaries."""

    calm: Outcome
    boundaries: list[Boundary]


def crash_everywhere(procedure: Any, input: Any = None, **options: Any) -> Crashes:  # noqa: A002
    """As `crash_everywhere_async`, from code that is not async."""
    return asyncio.run(crash_everywhere_async(procedure, input, **options))


async def crash_everywhere_async(
    procedure: Any,
    input: Any = None,  # noqa: A002
    *,
    tools: ToolsSaid | None = None,
    people: ScriptedPeople | Callable[[], ScriptedPeople] | None = None,
    also: Sequence[Any] = (),
    observe: Callable[[], Any] | None = None,
    reset: Callable[[], None] | None = None,
    ignore: Callable[[Boundary], bool] | None = None,
    result: Callable[[Any], Any] | None = None,
) -> Crashes:
    """Run it once without a crash and once for each boundary; CrashFound when one of them makes a difference.

    `tools`: as MemoryGateway takes them, or a function that makes them anew for each run. `people`: who answers.
    `also`: other procedures that it starts as children. `observe`: what your step bodies have done outside (a list of
    mails, a count): compared as it is after each run; `reset` is called before each run. `ignore`: boundaries to leave
    out. `result`: what of the result is compared, where it holds the time of `ctx.now()`, which is another one when the
    crash came before it was recorded.

    Compared: the run's end, result and state; each effect by its key, tool and arguments; what `observe` returns; and
    that the program does not go on after it is told to stop. A step that runs at most once may end as `Interrupted`
    after a crash: then results may differ, and only effects that the calm run does not have are a difference.

    Not found: what a body does outside without `observe`; and what depends on time or chance and happens to be the same
    in both runs (`run_twice`, `tga lint`).
    """
    name = procedure_of(procedure).name
    made = Setting(procedure, input, tools, people, list(also), observe, reset, result)
    calm = await made.run(None)
    if calm.state not in ("COMPLETED", "FAILED"):
        raise CrashFound(name, Boundary("lost", 0, "nothing"), 0, 0, [f"without any crash the run ended {_end(calm)}"])
    boundaries = [one for one in made.boundaries if ignore is None or not ignore(one)]
    for number, boundary in enumerate(boundaries, 1):
        try:
            outcome = await made.run(boundary)
        except RunStuck as stuck:
            raise CrashFound(name, boundary, number, len(boundaries), [str(stuck)]) from None
        differences = differences_of(calm, outcome)
        if differences:
            raise CrashFound(name, boundary, number, len(boundaries), differences)
    return Crashes(calm, boundaries)


def differences_of(calm: Outcome, found: Outcome) -> list[str]:
    """In what a run differs from the one without a crash, in words."""
    told = list(found.gone_on)
    expected, have = _by_key(calm.effects), _by_key(found.effects)
    for key in have.keys() - expected.keys():
        told.append(f"an effect that the calm run does not have: {have[key]}")
    for key in expected.keys() & have.keys():
        one, other = expected[key], have[key]
        if (one.tool, one.arguments) != (other.tool, other.arguments):
            told.append(
                f"under {key} another call: {other} instead of {one}. Is the time in it, or chance, or the order of a "
                "set? ctx.now(), ctx.random(), ctx.uuid() and steps are recorded"
            )
    if found.was_interrupted:
        return told
    for key in expected.keys() - have.keys():
        told.append(f"an effect is missing: {expected[key]}")
    if calm.state != found.state:
        told.append(f"the run ended {_end(found)} instead of {_end(calm)}")
    elif calm.output != found.output:
        told.append(f"the result is {found.output!r} instead of {calm.output!r}")
    elif calm.error != found.error:
        told.append(f"the error is {found.error!r} instead of {calm.error!r}")
    if calm.document != found.document:
        told.append(f"the state is {found.document!r} instead of {calm.document!r}")
    if calm.observed != found.observed:
        told.append(
            f"observed: {found.observed!r} instead of {calm.observed!r}. A body runs again when its worker died before "
            "its end was recorded: make it idempotent (ctx.key), call a tool instead, or use at_most_once=True"
        )
    return told


def _end(outcome: Outcome) -> str:
    if outcome.divergence is not None:
        said = outcome.divergence
        return (
            f"DIVERGED: at {said['path']} ({said['source']}) the journal has {said['recorded']}, the program performs "
            f"{said['performed']}. A replay must do what was recorded: take the time from ctx.now(), chance from "
            "ctx.random() or ctx.uuid(), and everything else from a step"
        )
    if outcome.error is not None:
        return f"{outcome.state} with {outcome.error['type']}: {outcome.error['message']}"
    return outcome.state


def _by_key(effects: Sequence[Effect]) -> dict[str, Effect]:
    return {effect.key or f"call {number}": effect for number, effect in enumerate(effects)}


class Setting:
    """One procedure with all that it needs; `run` makes a fresh gateway each time."""

    def __init__(
        self,
        procedure: Any,
        given: Any,
        tools: ToolsSaid | None,
        people: ScriptedPeople | Callable[[], ScriptedPeople] | None,
        also: list[Any],
        observe: Callable[[], Any] | None,
        reset: Callable[[], None] | None,
        result: Callable[[Any], Any] | None = None,
    ) -> None:
        self.procedure = procedure
        self.given = given
        self.tools = tools
        self.people = people
        self.also = also
        self.observe = observe
        self.reset = reset
        self.result = result
        self.boundaries: list[Boundary] = []  # of the calm run
        self.last: MemoryGateway  # set by `run`

    async def run(self, boundary: Boundary | None) -> Outcome:
        if self.reset is not None:
            self.reset()
        gateway = MemoryGateway(self.tools() if callable(self.tools) else self.tools, skip_waiting=True, seed=1)
        people = self.people() if callable(self.people) else self.people
        if people is not None:
            people.attend(gateway)
        faults = Faults(gateway, boundary)
        self.last = gateway
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self._run(gateway, faults)
        finally:
            gateway.close()
            if boundary is None:
                self.boundaries = faults.passed

    async def _run(self, gateway: MemoryGateway, faults: Faults) -> Outcome:
        name = procedure_of(self.procedure).name
        worker = CrashingWorker(gateway, [self.procedure, *self.also], faults)
        others = asyncio.all_tasks()
        working = asyncio.create_task(worker.run(signals=False))
        try:
            await until_ready(worker, working)
            await start(gateway, name, self.given)
            await until_over(gateway, faults, working)
            if faults.is_dead:
                await end(working, others | gateway.calls)
                gateway.lose_workers()
                faults.revive()
                worker = CrashingWorker(gateway, [self.procedure, *self.also], faults)
                working = asyncio.create_task(worker.run(signals=False))
                await until_over(gateway, faults, working)
        finally:
            await end(working, others | gateway.calls)
        outcome = outcome_of(gateway, self.observe, faults.gone_on)
        if self.result is not None and outcome.output is not None:
            outcome.output = self.result(outcome.output)
        return outcome


async def until_ready(worker: CrashingWorker, working: asyncio.Task[None]) -> None:
    """Until it asks for runs; what it raises before, as when the gateway refuses what it registers, is raised here."""
    ready = asyncio.create_task(worker.ready.wait())
    try:
        await asyncio.wait({ready, working}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        ready.cancel()
    if working.done():
        working.result()


async def start(gateway: MemoryGateway, procedure: str, given: Any) -> None:
    async with httpx2.AsyncClient(transport=gateway.transport, base_url=gateway.url) as client:
        body = {"procedure": procedure, "run_id": RUN_ID, "input": plain(given)}
        headers = {"Authorization": f"Bearer {gateway.key}"}
        answer = await client.post("/v1/runs", content=json.dumps(body).encode(), headers=headers)
        if answer.status_code != 200:
            raise AssertionError(f"the run could not be started: {answer.text}")


async def until_over(gateway: MemoryGateway, faults: Faults, working: asyncio.Task[None]) -> None:
    """Until the run has ended, or its worker is to die; RunStuck when neither will ever come."""
    seen: tuple[object, ...] = ()
    since = 0.0

    def is_over() -> bool:
        nonlocal seen, since
        if working.done() or faults.is_dead:
            return True
        if gateway.engine.load(RUN_ID).state in ("COMPLETED", "FAILED", "CANCELLED", "PARKED", "DIVERGED"):
            return True
        stuck = gateway.stuck_on()
        if stuck is None or seen != (stuck, faults.requests):
            seen, since = (stuck, faults.requests), time.monotonic()
        elif time.monotonic() - since > STUCK_AFTER_S:
            raise RunStuck(f"the run waits for {stuck}, and nobody answers: say who does, with people=ScriptedPeople()")
        return False

    await gateway.until(is_over)
    if working.done() and not faults.is_dead:
        working.result()


async def end(working: asyncio.Task[None], others: set[asyncio.Task[Any]]) -> None:
    """The worker is gone, and all tasks that it had; `others` are not of it."""
    while not working.done():
        working.cancel()
        await asyncio.wait({working}, timeout=0.2)
    if not working.cancelled():
        working.exception()
    left = asyncio.all_tasks() - others
    for task in left:
        task.cancel()
    if left:
        await asyncio.wait(left, timeout=1.0)


def outcome_of(gateway: MemoryGateway, observe: Callable[[], Any] | None, gone_on: list[str]) -> Outcome:
    run = gateway.engine.load(RUN_ID)
    said = run.end or {}
    output = said.get("output")
    sha256 = blob_of(output)
    if sha256 is not None:
        output = gateway.engine.blobs[sha256]
    return Outcome(
        run.state,
        output,
        said.get("error"),
        said.get("divergence"),
        run.document,
        gateway.effects,
        gateway.journal(RUN_ID),
        None if observe is None else observe(),
        gone_on,
    )


class Faults:
    """What goes wrong, and when. Counts requests and bodies; heartbeats are left alone."""

    def __init__(self, gateway: MemoryGateway, boundary: Boundary | None) -> None:
        self.gateway = gateway
        self.boundary = boundary
        self.passed: list[Boundary] = []
        self.gone_on: list[str] = []
        self.is_dead = False
        self.requests = 0
        self._bodies = 0

    def revive(self) -> None:
        """Another worker: nothing goes wrong any more."""
        self.is_dead, self.boundary = False, None

    def request(self, what: str, *, is_put: bool) -> str | None:
        """What happens to this request, which is the next one."""
        number, self.requests = self.requests, self.requests + 1
        faults = ("before", "after", "lost", "stop") if is_put else ("before", "after", "lost")
        self.passed += [Boundary(fault, number, what) for fault in faults]
        return self._fault(number, faults)

    def lease(self) -> str | None:
        """A lease whose answer does not come: the worker dies, and no worker knows of the run."""
        number, self.requests = self.requests, self.requests + 1
        self.passed.append(Boundary("after", number, "the lease of the run"))
        return self._fault(number, ("after",))

    def body(self, what: str) -> str | None:
        number, self._bodies = self._bodies, self._bodies + 1
        faults = ("body.before", "body.after")
        self.passed += [Boundary(fault, number, what) for fault in faults]
        return self._fault(number, faults)

    def _fault(self, number: int, faults: Sequence[str]) -> str | None:
        if self.boundary is None or self.boundary.fault not in faults or self.boundary.number != number:
            return None
        return self.boundary.fault

    async def die(self) -> None:
        """The worker is to be ended from outside; what asked for this goes no further."""
        self.is_dead = True
        self.gateway.notify()
        await asyncio.Event().wait()


class FaultyTransport(AsyncMemoryTransport):
    def __init__(self, gateway: MemoryGateway, faults: Faults) -> None:
        super().__init__(gateway)
        self.faults = faults
        self.is_dead = False

    async def die(self) -> None:
        """Nothing of this worker happens any more; its task is ended from outside."""
        self.is_dead = True
        await self.faults.die()

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        faults = self.faults
        if self.is_dead:
            await asyncio.Event().wait()
        path = request.url.path
        if path in ("/v1/worker/heartbeat", "/v1/procedures") or path.startswith("/v1/schedules/"):  # before any run
            return await super().handle_async_request(request)
        raw = await request.aread()
        if path == "/v1/worker/lease":
            return await self._lease(request)
        is_put = request.method == "POST" and path.endswith("/checkpoints")
        fault = faults.request(described(request, raw), is_put=is_put)
        if fault == "before":
            await self.die()
        if fault == "stop":
            with self.gateway.lock:
                run = self.gateway.engine.load(path.split("/")[3])
                if run.state == "RUNNING":
                    self.gateway.engine.lose(run, "the test says so")
        answer = await super().handle_async_request(request)
        if fault == "after":
            await self.die()
        if fault == "lost":
            raise httpx2.ReadError("the test has lost the answer")
        return answer

    async def _lease(self, request: httpx2.Request) -> httpx2.Response:
        """A boundary only when it gives runs: how often a worker asks in vain is chance."""
        answer = await super().handle_async_request(request)
        runs = json.loads(answer.content).get("runs", [])
        if runs and self.faults.lease() is not None:
            await self.die()
        return answer


class CrashingWorker(Worker):
    """The SDK's worker, with faults at its requests and bodies."""

    def __init__(self, gateway: MemoryGateway, procedures: Sequence[Any], faults: Faults) -> None:
        self.ready = asyncio.Event()
        self.transport = FaultyTransport(gateway, faults)
        super().__init__(
            gateway.url, gateway.key, procedures, transport=self.transport, name="crashing", on_ready=self.ready.set
        )
        self.faults = faults

    def _begin(self, host: Host, leased: dict[str, Any]) -> None:
        attempt = CrashingAttempt(host, leased, self.procedures[leased["procedure"]])
        attempt.faults, attempt.transport = self.faults, self.transport
        task = asyncio.create_task(self._execute(attempt))
        self._running[task] = attempt
        task.add_done_callback(self._ended)


class CrashingAttempt(Attempt):
    faults: Faults
    transport: FaultyTransport

    async def run_body(self, frame: Frame, fn: Callable[..., Any], args: Sequence[Any], timeout: float | None) -> Any:
        what = f"{frame.around} at {frame.scope.address}"
        fault = self.faults.body(what)
        if fault == "body.before":
            await self.transport.die()
        result = await super().run_body(frame, fn, args, timeout)
        if fault == "body.after":
            await self.transport.die()
        return result

    async def _program(self, root: Frame) -> Any:
        """A program that ends of itself although it was told to stop has caught what ends it."""
        try:
            result = await super()._program(root)
        except (Over, asyncio.CancelledError):
            raise
        except BaseException:
            self._note_gone_on()
            raise
        self._note_gone_on()
        return result

    def _note_gone_on(self) -> None:
        task = asyncio.current_task()
        if self.over is not None or (task is not None and task.cancelling()):
            self.faults.gone_on.append(
                f"{self.procedure.name} went on after it was told to stop: `except BaseException` (or a bare `except`) "
                "catches that, too; catch Exception, or raise it again"
            )


def described(request: httpx2.Request, raw: bytes) -> str:
    """A request, in words."""
    path = request.url.path
    if path.startswith("/v1/blobs/"):
        return "the upload of a blob" if request.method == "PUT" else "the reading of a blob"
    if request.method == "GET":
        return "the reading of the journal"
    body = json.loads(raw)
    puts = [f"{_kind_of(put)} {put['name']!r} at {put['path']}" for put in body.get("puts", ())]
    then = body.get("then")
    if then is not None:
        puts.append(_then_of(then))
    return "the put of " + (" and ".join(puts) or "nothing")


def _kind_of(put: Mapping[str, Any]) -> str:
    if put["type"] != "checkpoint":
        return f"the beginning of {put['type']}"
    return f"{put['kind']}" if put["outcome"] == "OK" else f"{put['kind']} ({put['outcome']})"


def _then_of(then: Mapping[str, Any]) -> str:
    match then["type"]:
        case "tool":
            return f"the call of {then['server_id']}.{then['tool_name']} at {then['path']}"
        case "child":
            return f"the start of child {then['procedure']!r} at {then['path']}"
        case "suspend":
            return f"the suspension until {', '.join(then['awaits'])}"
        case "complete":
            return "the run's result"
        case "fail":
            return f"the run's failure ({then['error']['type']})"
        case other:
            return f"the run's end ({other})"
