"""A worker in plain Python: all that docs/worker-protocol.md asks of one, with an HTTP client and nothing of ours but
the pure `tga_sdk.journal`, which says what stands at an address.

    python -m tests.runs.worker URL [URL ...]        with the worker's key in TGA_API_KEY; serves tests.runs.programs

It crosses named boundaries, at which tests have it die or stop:

    lease.before, lease.answered       asked for runs; was given some
    page.before, page.answered         the same for a page of the journal
    put.before, put.answered           the same for a put that does nothing then
    tool.before, tool.answered ...     the same for one that does: tool, child, suspend, complete, fail
    body.before, body.done             a step's body is about to run; has run, and nothing is recorded of its end
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import hashlib
import hmac
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import aiohttp

from tga_sdk.journal import Begun, Diverged, Ended, Journal, Operation, Scope

Program = Callable[["Context", Any], Coroutine[Any, Any, Any]]
Body = Callable[["Context"], Coroutine[Any, Any, Any]]
Change = dict[str, Any]

REPEATED = (429, 500, 502, 503, 504)  # the answer may come when the same is asked again


class Stop(BaseException):
    """The gateway says that the run is not this worker's any more. Nothing of the program may catch it."""


class Suspended(BaseException):
    """The run waits for others, and this worker has left it."""


class Refused(Exception):
    """The gateway refused the request for good."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = problem
        self.code = problem.get("code")
        super().__init__(f"{status} {self.code}: {problem}")


class OperationFailed(Exception):
    """What is recorded of an operation is an error: the program gets it, now and in every replay."""

    def __init__(self, error: Mapping[str, Any]) -> None:
        self.error = dict(error)
        self.type = error["type"]
        super().__init__(f"{error['type']}: {error['message']}")


class Interrupted(OperationFailed):
    """A step that runs at most once had begun when its worker was lost; what it did is not known."""


@dataclass
class Boundaries:
    """Those passed so far, and the one at which this process dies or stops: a name, and how many of it are passed."""

    die_at: tuple[str, int] | None = None
    stop_at: tuple[str, int] | None = None
    passed: list[str] = field(default_factory=list)

    def cross(self, name: str) -> None:
        place = (name, self.passed.count(name))
        if place == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.passed.append(name)
        if place == self.stop_at:
            os.kill(os.getpid(), signal.SIGSTOP)


class Client:
    """Requests to one of several gateways; repeated, there or at the next one, until there is an answer."""

    def __init__(self, urls: Sequence[str], key: str, boundaries: Boundaries | None = None) -> None:
        self.urls = list(urls)
        self.boundaries = boundaries or Boundaries()
        self._key = key
        self._at = 0
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Client:
        headers = {"Authorization": f"Bearer {self._key}"}
        self._session = aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=90))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def once(self, method: str, path: str, body: Any = None, *, url: str | None = None) -> tuple[int, Any]:
        """One request to one gateway."""
        assert self._session is not None
        whole = (url or self.urls[self._at % len(self.urls)]) + path
        async with self._session.request(method, whole, json=body) as answer:
            return answer.status, json.loads(await answer.read())

    async def raw(
        self, method: str, path: str, sent: bytes | None = None, *, url: str | None = None
    ) -> tuple[int, bytes]:
        """One request with a body of bytes, as those of blobs are; the status, and the bytes of the answer."""
        assert self._session is not None
        whole = (url or self.urls[self._at % len(self.urls)]) + path
        async with self._session.request(method, whole, data=sent) as answer:
            return answer.status, await answer.read()

    async def store(self, sha256: Any, content: bytes) -> None:
        """A blob, however often it takes."""
        self.boundaries.cross("blob.before")
        while True:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ConnectionError):
                status, answer = await self.raw("PUT", f"/v1/blobs/{sha256}", content)
                if status < 300:
                    break
                assert status in REPEATED, answer
            self._at += 1
            await asyncio.sleep(0.02)
        self.boundaries.cross("blob.answered")

    async def ask(self, method: str, path: str, body: Any = None, *, name: str = "") -> Any:
        """The answer, however often it takes; Refused when the gateway says no."""
        if name:
            self.boundaries.cross(f"{name}.before")
        while True:
            try:
                status, answer = await self.once(method, path, body)
            except (aiohttp.ClientError, TimeoutError, ConnectionError):
                status, answer = 503, {}
            if status < 300:
                break
            if status not in REPEATED:
                raise Refused(status, answer)
            self._at += 1
            await asyncio.sleep(0.02)
        if name:
            self.boundaries.cross(f"{name}.answered")
        return answer


@dataclass
class Worker:
    """A worker process. `is_careful`: it starts no body once its lease may be over, as the protocol asks."""

    client: Client
    programs: Mapping[str, Program]
    worker_id: str
    version: str = "1"
    name: str = "test-worker"
    slots: int = 4
    wait_ms: int = 2_000
    suspend_wait_ms: int = 0
    is_careful: bool = True
    changed: str = ""  # what makes the programs other ones
    accepts: tuple[str, ...] = ()
    tell: Callable[[dict[str, Any]], None] = lambda _: None
    time_in: Callable[[int], str] = lambda milliseconds: time_in(milliseconds)
    # Of the moment.
    holding: dict[str, Attempt] = field(default_factory=dict)
    lease_ms: int = 30_000
    heard_at: float = field(default_factory=time.monotonic)  # when the last beat that was acknowledged was sent
    bodies: list[tuple[str, str, int]] = field(default_factory=list)  # run, path and try of each body that ran
    ended: list[tuple[str, str]] = field(default_factory=list)  # run, and how its attempt ended here

    def offered(self) -> list[dict[str, Any]]:
        return [
            {
                "name": name,
                "version": self.version,
                "program_digest": program_digest(name, self.changed),
                "accepts": list(self.accepts),
            }
            for name in self.programs
        ]

    async def register(self, **policy: Any) -> None:
        for offered in self.offered():
            said: dict[str, Any] = {key: value for key, value in offered.items() if key != "accepts"}
            if policy:
                said["policy"] = policy
            await self.client.ask("POST", "/v1/procedures", said)

    async def lease(self, *, wait_ms: int | None = None, slots: int | None = None) -> list[Attempt]:
        asked = {
            "worker": self.worker_id,
            "name": self.name,
            "procedures": self.offered(),
            "slots": slots or self.slots,
            "wait_ms": self.wait_ms if wait_ms is None else wait_ms,
        }
        self.client.boundaries.cross("lease.before")
        leased = (await self.client.ask("POST", "/v1/worker/lease", asked))["runs"]
        if leased:
            self.client.boundaries.cross("lease.answered")
            self.lease_ms = leased[0]["lease_ms"]
            self.heard_at = time.monotonic()
        return [Attempt(self, run) for run in leased]

    async def beat(self) -> None:
        sent = time.monotonic()
        runs = [{"run_id": attempt.run_id, "lease": attempt.lease} for attempt in self.holding.values()]
        told = await self.client.ask(
            "POST", "/v1/worker/heartbeat", {"worker": self.worker_id, "name": self.name, "runs": runs}
        )
        self.heard_at = sent
        for one in told["runs"]:
            if one["directive"] == "STOP" and one["run_id"] in self.holding:
                self.holding[one["run_id"]].stop(one["reason"])

    def verify_heard(self) -> None:
        if self.is_careful and (time.monotonic() - self.heard_at) * 1000 > self.lease_ms:
            raise Stop("no gateway has acknowledged a heartbeat for as long as a lease lasts")

    async def perform(self, attempt: Attempt) -> None:
        self.holding[attempt.run_id] = attempt
        try:
            self.ended.append((attempt.run_id, await attempt.perform()))
            self.tell({"ended": self.ended[-1]})
        finally:
            if self.holding.get(attempt.run_id) is attempt:
                del self.holding[attempt.run_id]

    async def work(self, *, until: Callable[[], bool] = lambda: False) -> None:
        """Lease and perform runs, with heartbeats, until `until` is true."""
        tasks: set[asyncio.Task[None]] = set()
        beating = asyncio.create_task(self._beat_for_ever())
        try:
            while not until():
                free = self.slots - len(tasks)
                if free:
                    for attempt in await self.lease(slots=free, wait_ms=100 if tasks else None):
                        tasks.add(asyncio.create_task(self.perform(attempt)))
                if tasks:
                    done, tasks = await asyncio.wait(tasks, timeout=0.1, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        task.result()
        finally:
            beating.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(beating, *tasks, return_exceptions=True)

    async def _beat_for_ever(self) -> None:
        while True:
            await self.beat()
            sent = time.monotonic()
            while time.monotonic() - sent < self.lease_ms / 3000:  # how long that is, the first lease says
                await asyncio.sleep(0.02)


class Attempt:
    """One attempt of one run: the journal as this worker has seen it, and the program as it goes on."""

    def __init__(self, worker: Worker, leased: dict[str, Any]) -> None:
        self.worker = worker
        self.client = worker.client
        self.leased = leased
        self.run_id: str = leased["run_id"]
        self.lease: str = leased["lease"]
        self.number: int = leased["attempt"]
        self.salt = bytes.fromhex(leased["salt"])
        self.journal = Journal()
        self.after_seq: int = leased["first_seq"]
        self.stopped: str | None = None
        self._turn = asyncio.Lock()  # one put request at a time: a repeat is known by what comes after `after_seq`
        self._active = 1  # branches that are not blocked
        self._blocked: dict[str, asyncio.Event] = {}
        self._waits: asyncio.Task[None] | None = None
        self._main: asyncio.Task[str] | None = None

    async def read(self) -> None:
        """The journal, page by page, up to where the run was leased."""
        while self.after_seq < self.leased["sequence_number"]:
            path = f"/v1/runs/{self.run_id}/checkpoints?after_seq={self.after_seq}&limit=200"
            page = (await self.client.ask("GET", path, name="page"))["items"]
            for record in page:
                self.feed(record)
            self.after_seq = page[-1]["sequence_number"]

    def feed(self, record: dict[str, Any]) -> None:
        """A record as the gateway shows it; what a tool or a child has returned is `joined` to its answer."""
        joined = record.get("joined")
        if joined is not None and record["artifact_type"] == "run_checkpoint":  # what is sealed
            record = {**record, "value": {"tier": "inline", "value": joined}}
        elif joined is not None:
            record = {**record, "value": {"tier": "inline", "value": joined["value"]}}
        self.journal.add(record)

    async def perform(self) -> str:
        """How the attempt ended: COMPLETED, FAILED, DIVERGED, SUSPENDED, or STOP and why."""
        self._main = asyncio.create_task(self._perform())
        try:
            return await self._main
        except asyncio.CancelledError:
            if self.stopped is None:
                raise
            return self.stopped

    def stop(self, reason: str | None) -> None:
        """From outside: a heartbeat was answered with STOP."""
        self.stopped = f"STOP {reason}"
        if self._main is not None:
            self._main.cancel()

    async def _perform(self) -> str:
        await self.read()
        root = Context(self, Scope(), None, {})
        program = self.worker.programs[self.leased["procedure"]]
        given = self.leased["input"].get("value")
        main = asyncio.create_task(program(root, given))
        try:
            try:
                output = await self._until_done(main)
                self.journal.verify_end("", root.scope.performed)
                return await self._end(
                    {"type": "complete", "output": inline(output), "positions": root.scope.performed}, "COMPLETED"
                )
            except Diverged as diverged:
                said = {
                    "path": diverged.path if diverged.path != "the end" else str(root.scope.performed + 1),
                    "recorded": diverged.recorded,
                    "performed": diverged.performed,
                    "source": diverged.source,
                }
                return await self._end({"type": "diverge", "divergence": said}, "DIVERGED")
            except Refused:
                raise
            except Exception as error:
                return await self._end({"type": "fail", "error": error_of(error)}, "FAILED")
        except Suspended:
            return "SUSPENDED"
        except Stop:
            return self.stopped or "STOP"
        finally:
            main.cancel()
            await asyncio.gather(main, return_exceptions=True)

    async def _until_done(self, main: asyncio.Task[Any]) -> Any:
        """The program's result; while all its branches are blocked, the run is suspended, or waits here."""
        self._waits = asyncio.create_task(self._suspend_when_blocked())
        try:
            await asyncio.wait({main, self._waits}, return_when=asyncio.FIRST_COMPLETED)
            if self._waits.done():
                self._waits.result()
            return main.result()
        finally:
            self._waits.cancel()
            await asyncio.gather(self._waits, return_exceptions=True)

    async def _suspend_when_blocked(self) -> None:
        while True:
            await asyncio.sleep(0)
            if self._active > 0 or not self._blocked:
                await asyncio.sleep(0.001)
                continue
            awaits = sorted(self._blocked)
            then = {"type": "suspend", "awaits": awaits, "wake": "ANY", "wait_ms": self.worker.suspend_wait_ms}
            await self.put([], then, name="suspend")

    async def _end(self, then: dict[str, Any], how: str) -> str:
        await self.put([], then, name=then["type"])
        return how

    async def blocked(self, path: str) -> None:
        """Until others have ended what has begun at this address."""
        if isinstance(self.journal.look(path), Ended):
            return
        event = self._blocked[path] = asyncio.Event()
        self._active -= 1
        try:
            await event.wait()
        finally:
            self._active += 1
            self._blocked.pop(path, None)

    def count_branches(self, more: int) -> None:
        self._active += more

    async def put(self, puts: list[dict[str, Any]], then: dict[str, Any] | None = None, *, name: str = "put") -> Any:
        """What the worker has done, and does then. Feeds the journal with it and with the news."""
        async with self._turn:
            if self.stopped:
                raise Stop(self.stopped)
            body: dict[str, Any] = {
                "lease": self.lease,
                "attempt": self.number,
                "after_seq": max(self.after_seq, 0),
                "puts": puts,
            }
            if then is not None:
                body["then"] = then
            answer = await self.client.ask("POST", f"/v1/runs/{self.run_id}/checkpoints", body, name=name)
            directive = answer["directive"]
            if directive == "STOP":
                self.stopped = f"STOP {answer['reason']}"
                raise Stop(self.stopped)
            number = answer["sequence_number"]
            for put in puts:
                self.journal.add(record_of(put, number))
            if then is not None and then["type"] in ("tool", "child"):
                self.journal.add(record_of(then, number))
            if directive == "SUSPENDED":
                raise Suspended
            for record in answer["news"]:
                self.feed(record)
            self.after_seq = max(
                number, *(record["sequence_number"] for record in answer["news"] or [{"sequence_number": 0}])
            )
            for path, event in self._blocked.items():
                if not isinstance(self.journal.look(path), Begun):
                    event.set()
            return answer


class Context:
    """What a program is given: its operations, in one scope. `around` is the operation whose scope this is."""

    def __init__(self, attempt: Attempt, scope: Scope, around: Operation | None, state: dict[str, Any]) -> None:
        self.attempt = attempt
        self.scope = scope
        self.around = around
        self.state = state
        self.applied: list[Change] = []  # in this scope, in their order
        self._pending: list[Change] = []  # of the operation around, until it ends

    @property
    def run_id(self) -> str:
        return self.attempt.run_id

    def change(self, at: str, to: Any) -> None:
        """Change the run's state when the step that this is the body of has ended well."""
        self._pending.append({"op": "set", "at": at, "to": to})

    async def step(
        self,
        name: str,
        body: Body,
        *,
        given: Any = None,
        retries: int = 0,
        at_most_once: bool = False,
        resume: str = "snapshot",
        tier: str = "inline",
    ) -> Any:
        """Run a body, and record how it ended."""
        operation = self._operation("step", name, given)
        path = self.scope.enter(operation)
        journal = self.attempt.journal
        found = journal.match(path, operation, source=name)
        if isinstance(found, Ended) and (found.resume == "snapshot" or found.failed):
            recorded = self._recorded(found)
            return await self._downloaded(found.value["ref"]) if (found.value or {}).get("ref") else recorded
        if isinstance(found, Begun):
            error = {"type": "INTERRUPTED", "message": f"{name} had begun", "retryable": False}
            await self._put_end(operation, path, "INTERRUPTED", error=error, inner=journal.performed_inside(path))
            self.scope.leave()
            raise Interrupted(error)
        before = copy.deepcopy(self.state)
        while True:
            tried = journal.try_of(path)
            if at_most_once:
                await self.attempt.put([{"type": "step", **_named(operation, path, tried)}], name="intent")
            self.state.clear()
            self.state.update(copy.deepcopy(before))
            inside = Context(self.attempt, Scope(path), operation, self.state)
            if found is None:
                self.attempt.worker.verify_heard()
                self.attempt.client.boundaries.cross("body.before")
                self.attempt.worker.bodies.append((self.run_id, path, tried))
            try:
                value = await body(inside)
            except (Refused, Diverged):
                raise
            except Exception as error:
                journal.verify_end(path, inside.scope.performed)
                if found is not None:
                    raise
                outcome = "RETRY" if tried <= retries else "ERROR"
                said = error_of(error)
                await self._put_end(operation, path, outcome, error=said, inner=inside.scope.performed, tried=tried)
                if outcome == "RETRY":
                    continue
                self.applied += inside.applied
                self.scope.leave()
                raise OperationFailed(said) from error
            if found is None:
                self.attempt.client.boundaries.cross("body.done")
                journal.verify_end(path, inside.scope.performed)
                await self._put_end(
                    operation,
                    path,
                    "OK",
                    value=await self._valued(tier, value),
                    inner=inside.scope.performed,
                    changes=inside._pending,
                    resume=resume,
                    tried=tried,
                )
            self.applied += inside.applied
            self._apply(inside._pending)
            self.scope.leave()
            return None if tier == "event" else value

    async def _valued(self, tier: str, value: Any) -> dict[str, Any]:
        """What is said of a value; an artifact's bytes are stored before."""
        if tier != "artifact":
            return {"tier": "transient"} if tier == "transient" else {"tier": tier, "value": value}
        content = json.dumps(value).encode()
        ref = {"sha256": hashlib.sha256(content).hexdigest(), "size_bytes": len(content)}
        await self.attempt.client.store(ref["sha256"], content)
        return {"tier": "artifact", "ref": {**ref, "media_type": "application/json", "serializer": "json"}}

    async def _downloaded(self, ref: dict[str, Any]) -> Any:
        status, content = await self.attempt.client.raw("GET", f"/v1/blobs/{ref['sha256']}")
        assert (status, hashlib.sha256(content).hexdigest()) == (200, ref["sha256"])
        return json.loads(content)

    async def gather(self, *bodies: Body, name: str = "gather") -> list[Any]:
        """Branches at the same time, each a scope of its own with a copy of the state; merged in their order."""
        operation = self._operation("gather", name, len(bodies))
        path = self.scope.enter(operation)
        found = self.attempt.journal.match(path, operation)
        if isinstance(found, Ended):
            return self._recorded(found)  # type: ignore[no-any-return]
        branches = [
            Context(self.attempt, self.scope.branch(path, number), operation, copy.deepcopy(self.state))
            for number in range(1, len(bodies) + 1)
        ]
        self.attempt.count_branches(len(bodies) - 1)

        async def run(body: Body, branch: Context) -> Any:
            try:
                return await body(branch)
            finally:
                self.attempt.count_branches(-1)

        tasks = [asyncio.create_task(run(*pair)) for pair in zip(bodies, branches, strict=True)]
        try:
            results = list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self.attempt.count_branches(1)
        changes = [change for branch in branches for change in branch.applied]
        inner = sum(branch.scope.performed for branch in branches)
        self.attempt.journal.verify_end(path, inner)
        await self._put_end(operation, path, "OK", value=inline(results), inner=inner, changes=changes)
        self._apply(changes)
        self.scope.leave()
        return results

    async def tool(self, server: str, tool: str, arguments: dict[str, Any], *, retries: int = 0) -> Any:
        operation = self._operation("tool", f"{server}.{tool}", arguments)
        path = self.scope.enter(operation)
        journal = self.attempt.journal
        found = journal.match(path, operation)
        while not isinstance(found, Ended):
            if found is None or journal.look(path) is not None:
                then = {
                    "type": "tool",
                    "path": path,
                    "input_digest": operation.input_digest,
                    "try_number": journal.try_of(path),
                    "server_id": server,
                    "tool_name": tool,
                    "arguments": arguments,
                    "retries": retries,
                }
                answer = await self.attempt.put([], then, name="tool")
                if answer["result"]["status"] == "pending":
                    await self.attempt.blocked(path)
            found = journal.match(path, operation)
        return self._recorded(found)

    async def ask(self, name: str, *, schema: dict[str, Any] | None = None, **request: Any) -> Any:
        asked = {"form": "approve", "message": name, "answer_schema": schema or {"type": "boolean"}, **request}
        return await self._wait("ask", name, {"form": asked["form"], "message": name}, {"request": asked})

    async def sleep(self, milliseconds: int, name: str = "sleep") -> Any:
        return await self._wait("sleep", name, milliseconds, {"wakes_at": self.attempt.worker.time_in(milliseconds)})

    async def signal(self, name: str, *, expires_in_ms: int | None = None) -> Any:
        more = {} if expires_in_ms is None else {"expires_at": time_in(expires_in_ms)}
        return await self._wait("signal", name, None, more)

    async def child(self, procedure: str, given: Any = None, *, run_id: str | None = None) -> Any:
        operation = self._operation("child", procedure, given)
        path = self.scope.enter(operation)
        found = self.attempt.journal.match(path, operation)
        if found is None:
            then = {
                "type": "child",
                **{key: value for key, value in _named(operation, path, 1).items() if key != "kind"},
                "procedure": procedure,
                "input": inline(given),
            }
            if run_id is not None:
                then["run_id"] = run_id
            await self.attempt.put([], then, name="child")
        return await self._awaited(operation, path)

    async def _wait(self, kind: str, name: str, given: Any, more: dict[str, Any]) -> Any:
        operation = self._operation(kind, name, given)
        path = self.scope.enter(operation)
        if self.attempt.journal.match(path, operation) is None:
            await self.attempt.put([{"type": kind, **_named(operation, path, 1), **more}], name=kind)
        return await self._awaited(operation, path)

    async def _awaited(self, operation: Operation, path: str) -> Any:
        await self.attempt.blocked(path)
        found = self.attempt.journal.match(path, operation)
        assert isinstance(found, Ended), found
        return self._recorded(found)

    def _recorded(self, found: Ended) -> Any:
        """What the journal has: the program gets it, and nothing is executed."""
        self.scope.leave()
        self._apply(found.changes)
        if found.outcome == "INTERRUPTED":
            raise Interrupted(found.error or {})
        if found.failed:
            raise OperationFailed(found.error or {})
        return found.value["value"] if found.value["tier"] == "inline" else None

    def _apply(self, changes: Sequence[Any]) -> None:
        self.applied += changes
        apply(self.state, changes)

    def _operation(self, kind: str, name: str, given: Any) -> Operation:
        return Operation(kind, name, input_digest(self.attempt.salt, given, self.around))

    async def _put_end(
        self,
        operation: Operation,
        path: str,
        outcome: str,
        *,
        inner: int,
        value: Any = None,
        error: Any = None,
        changes: Sequence[Change] = (),
        resume: str = "snapshot",
        tried: int | None = None,
    ) -> None:
        put = {
            "type": "checkpoint",
            **_named(operation, path, tried or self.attempt.journal.try_of(path)),
            "outcome": outcome,
            "value": value,
            "error": error,
            "resume": resume,
            "inner": inner,
            "state_change": list(changes),
            "started_at": time_in(0),
            "duration_ms": 0,
        }
        await self.attempt.put([{**put, "kind": operation.kind}])


def _named(operation: Operation, path: str, tried: int) -> dict[str, Any]:
    return {"path": path, "name": operation.name, "input_digest": operation.input_digest, "try_number": tried}


def record_of(sent: Mapping[str, Any], number: int) -> dict[str, Any]:
    """What the journal has of this worker's own put, as far as a replay needs it."""
    if sent["type"] == "checkpoint":
        return {**sent, "artifact_type": "run_checkpoint", "sequence_number": number}
    name = f"{sent['server_id']}.{sent['tool_name']}" if sent["type"] == "tool" else sent["name"]
    return {**sent, "artifact_type": "run_intent", "kind": sent["type"], "name": name, "sequence_number": number}


def input_digest(salt: bytes, given: Any, around: Operation | None) -> str:
    """HMAC-SHA256 over the canonical JSON of the input and of the operation around, keyed with the run's salt."""
    said = json.dumps([given, around], sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hmac.new(salt, said.encode(), hashlib.sha256).hexdigest()


def program_digest(name: str, changed: str = "") -> str:
    return hashlib.sha256(f"{name}{changed}".encode()).hexdigest()


def inline(value: Any) -> dict[str, Any]:
    return {"tier": "inline", "value": value}


def error_of(error: BaseException) -> dict[str, Any]:
    if isinstance(error, OperationFailed):
        return error.error
    return {"type": type(error).__name__, "message": str(error) or type(error).__name__, "retryable": False}


def time_in(milliseconds: int) -> str:
    at = datetime.now(UTC) + timedelta(milliseconds=milliseconds)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def apply(state: dict[str, Any], changes: Sequence[Any]) -> None:
    """Changes of a run's state: `{op: set, at: pointer, to}`; `/-` appends to a list."""
    for change in changes:
        *parents, last = change["at"].split("/")[1:]
        place: Any = state
        for part in parents:
            place = place[int(part)] if isinstance(place, list) else place[part]
        if isinstance(place, list):
            place.append(copy.deepcopy(change["to"]))
        else:
            place[last] = copy.deepcopy(change["to"])


async def serve(urls: Sequence[str], key: str, worker_id: str, boundaries: Boundaries, **options: Any) -> None:
    """A worker for all programs of the tests, until its process is ended."""
    from tests.runs.programs import PROGRAMS

    async with Client(urls, key, boundaries) as client:
        with contextlib.suppress(asyncio.CancelledError):
            await Worker(client, PROGRAMS, worker_id, **options).work()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1:], os.environ["TGA_API_KEY"], f"worker-{os.getpid()}-{time.time_ns()}", Boundaries()))
