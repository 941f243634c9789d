"""Programs, workers and a gateway in memory, with faults at every commit: the pure half of runs, end to end.

The gateway judges with the fold of `app.domain.runs`, the worker replays with the journal of `tga_sdk`; neither knows
the other. A program is a tree of operations. Its worker is interpreted here: branches of a gather take turns in an
order that the seed chooses, so that addresses and answers interleave differently in each attempt.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from app.core.errors import ConcurrentExecution, RunPositionTaken
from app.domain.runs.documents import RunDocument
from app.domain.runs.replay import Run
from app.domain.runs.state import RemoveAt, SetAt, apply_changes
from tests.runs import journal as documents
from tests.traces import uuid7
from tga_sdk.journal import Begun, Ended, Journal, Operation, Scope

RETRIES = 2


@dataclass(frozen=True)
class Node:
    """An operation of a program. `fails`: so many tries of its body raise. `changes`: it appends to the run's state."""

    kind: str
    name: str
    inside: tuple[Node, ...] = ()
    branches: tuple[tuple[Node, ...], ...] = ()
    fails: int = 0
    changes: bool = False
    at_most_once: bool = False
    recompute: bool = False


FIRST = Node("step", "begin")  # every program's first: it makes the list that the others append to


class Crash(Exception):
    """The worker is gone, or the gateway: the attempt ends here."""


class Stop(Exception):
    """The gateway says that the lease is over."""


class Suspended(Exception):
    pass


@dataclass
class Gateway:
    """One run. `faults` says of each commit what goes wrong: nothing, before it, or after it."""

    faults: Iterator[str]
    stored: documents.Journal = field(default_factory=documents.Journal)
    book: Counter[str] = field(default_factory=Counter)  # the tool server's own: executions by key
    effects: dict[str, str] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        return self.stored.run

    def commit(self, *artifacts: RunDocument, after: int) -> None:
        """All of them or none. A repeat, recognised by content among what came after `after`, is answered again."""
        fault = next(self.faults, "none")
        if fault == "before":
            raise Crash
        written = [artifact.digest() for artifact in artifacts]
        recent = [record.entry.artifact_digest for record in self.stored.records[after:]]
        if written != recent[: len(written)]:
            before, count = copy.deepcopy(self.run), len(self.stored.records)
            try:
                self.stored.append(*artifacts)
            except Exception as error:
                self.stored.run = before
                del self.stored.records[count:]
                if isinstance(error, ConcurrentExecution):
                    raise Stop from None
                raise
        if fault == "after":
            raise Crash
        if fault == "lost":  # the answer is lost, the same worker asks again
            self.commit(*artifacts, after=after)

    def lease(self) -> int:
        state, number = self.run.head.state, self.run.attempt
        if state == "RUNNING":
            self.stored.append(documents.attempt(number, "LOST"))
        self.stored.append(documents.attempt(number + 1))
        return number + 1

    def call_tool(self, intent: RunDocument, *, path: str, key: str, after: int) -> None:
        """Fence, intent and birth in one commit; then the effect, and the answer with it."""
        if path not in self.run.frontier.begun:
            self.commit(intent, after=after)
        elif getattr(intent, "attempt", 0) != self.run.attempt:
            raise Stop
        if key not in self.effects:
            self.book[key] += 1
            self.effects[key] = f"effect of {key}"
        begun = self.run.frontier.begun[path]
        value = documents.inline(self.effects[key])
        self.commit(documents.answer(path, begun.intent_digest, value=value), after=len(self.stored.records))

    def answer_one(self, chance: random.Random) -> None:
        """A person, or time, ends one of the waits."""
        path = chance.choice(sorted(self.run.awaits))
        begun = self.run.frontier.begun[path]
        by = documents.ANSWERED_BY[begun.kind]
        wakes = "YES" if self.run.head.state == "WAITING" else "NO"
        value = documents.inline(f"answer to {begun.name}")
        self.stored.append(documents.answer(path, begun.intent_digest, by, wakes=wakes, value=value))


class _Pause:
    """What a worker's coroutine gives to who schedules it: the addresses that it is blocked on, or nothing."""

    def __init__(self, *blocked_on: str) -> None:
        self.blocked_on = blocked_on

    def __await__(self) -> Generator[_Pause, None, None]:
        yield self


class Worker:
    """One attempt of a program."""

    def __init__(self, gateway: Gateway, program: Sequence[Node], chance: random.Random) -> None:
        self.gateway = gateway
        self.program = program
        self.chance = chance
        self.attempt = gateway.lease()
        self.journal = Journal()
        self.bodies: Counter[tuple[str, int]] = Counter()
        self.state: dict[str, Any] = {}
        self.recorded_again: list[str] = []
        self.is_zombie = False
        for number, record in enumerate(gateway.stored.records, start=1):
            assert record.artifact is not None
            self._feed(number, record.artifact)

    def _feed(self, number: int, artifact: RunDocument) -> None:
        said: dict[str, Any] = {**artifact.to_json()}
        self.journal.add({**said, "artifact_type": artifact.artifact_type, "sequence_number": number})

    def _catch_up(self) -> None:
        for number in range(self.journal.sequence_number + 1, len(self.gateway.stored.records) + 1):
            artifact = self.gateway.stored.records[number - 1].artifact
            assert artifact is not None
            self._feed(number, artifact)

    def _put(self, *artifacts: RunDocument) -> None:
        self._catch_up()
        self.gateway.commit(*artifacts, after=len(self.gateway.stored.records))
        self._catch_up()

    def drive(self) -> Any:
        """The program's result; Suspended when it waits, Crash or Stop when the attempt is over."""
        main = self._perform_all([FIRST, *self.program], Scope(), self.state)
        try:
            while True:
                pause = main.send(None)
                if pause.blocked_on:
                    self._put(documents.suspension(*pause.blocked_on, attempt=self.attempt))
                    raise Suspended
        except StopIteration as done:
            self.journal.verify_end("", self._performed)
            self._put(
                documents.end(attempt=self.attempt, positions=self._performed, output=documents.inline(done.value))
            )
            return done.value
        finally:
            main.close()

    async def _each(self, nodes: Sequence[Node], scope: Scope, state: dict[str, Any]) -> list[Any]:
        results = []
        for node in nodes:
            await _Pause()
            results.append(await self._perform(node, scope, state))
        return results

    def _perform_all(self, nodes: Sequence[Node], scope: Scope, state: dict[str, Any]) -> Any:
        async def whole() -> list[Any]:
            results = await self._each(nodes, scope, state)
            self._performed = scope.performed
            return results

        return whole()

    async def _perform(self, node: Node, scope: Scope, state: dict[str, Any]) -> Any:
        operation = Operation(**documents.identity(node.kind, node.name))
        path = scope.enter(operation)
        found = self.journal.match(path, operation)
        if isinstance(found, Ended) and found.resume == "snapshot":
            _apply(state, found.changes)
            result = found.value["value"] if found.outcome == "OK" else f"failed {node.name}"
        elif node.kind in documents.ANSWERED_BY:
            result = await self._ask_others(node, path)
        elif node.kind == "gather":
            result = await self._gather(node, path, state)
        else:
            result = await self._step(node, path, state, found)
        scope.leave()
        return result

    async def _ask_others(self, node: Node, path: str) -> Any:
        tried = self.journal.try_of(path)
        named: dict[str, Any] = {"attempt": self.attempt, "try_number": tried}
        key = f"run:r/{path}" + (f"/r{tried}" if tried > 1 else "")
        if node.kind == "tool":
            request = {"trace_id": uuid7(1), "idempotency_key": key, "retries": 0}
            self._catch_up()
            self.gateway.call_tool(
                documents.intent(path, "tool", node.name, request=request, **named),
                path=path,
                key=key,
                after=len(self.gateway.stored.records),
            )
            self._catch_up()
        elif not isinstance(self.journal.look(path), Begun):
            self._put(documents.intent(path, node.kind, node.name, **named))
        while not isinstance(found := self.journal.look(path), Ended):
            await _Pause(path)
            self._catch_up()
        return found.value["value"]

    async def _gather(self, node: Node, path: str, state: dict[str, Any]) -> Any:
        copies = [copy.deepcopy(state) for _ in node.branches]
        scopes = [Scope().branch(path, number) for number in range(1, len(node.branches) + 1)]
        running: dict[int, Any] = {
            at: self._each(branch, scopes[at], copies[at]) for at, branch in enumerate(node.branches)
        }
        results: dict[int, Any] = {}
        blocked: dict[int, tuple[str, ...]] = {}
        try:
            while running:
                if len(blocked) == len(running):
                    await _Pause(*(awaited for paths in blocked.values() for awaited in paths))
                    blocked.clear()
                at = self.chance.choice(sorted(running.keys() - blocked.keys()))
                try:
                    pause = running[at].send(None)
                    if pause.blocked_on:
                        blocked[at] = pause.blocked_on
                except StopIteration as done:
                    results[at] = done.value
                    del running[at]
                await _Pause()
        finally:
            for coroutine in running.values():
                coroutine.close()
        added = [entry for branch in copies for entry in branch["log"][len(state["log"]) :]]
        result = [results[at] for at in sorted(results)]
        changes = _appended(added)
        self._end(node, path, result, inner=sum(scope.performed for scope in scopes), changes=changes)
        _apply(state, changes)
        return result

    async def _step(self, node: Node, path: str, state: dict[str, Any], found: Ended | Begun | None) -> Any:
        if isinstance(found, Begun):
            self._end(node, path, None, outcome="INTERRUPTED", inner=self.journal.performed_inside(path))
            return f"failed {node.name}"
        before = copy.deepcopy(state)
        while True:
            # What the last try changed is dropped; what is recorded inside is applied again when it is met again.
            state.clear()
            state.update(copy.deepcopy(before))
            tried = self.journal.try_of(path)
            if node.at_most_once:
                named: dict[str, Any] = {"attempt": self.attempt, "try_number": tried}
                self._put(documents.intent(path, "step", node.name, **named))
            if found is None:
                self._note_body(node, path, tried)
            scope = Scope(path)
            inner = await self._each(node.inside, scope, state)
            if tried <= node.fails:
                is_last = tried > RETRIES
                self.journal.verify_end(path, scope.performed)
                self._end(node, path, None, outcome="ERROR" if is_last else "RETRY", inner=scope.performed)
                if is_last:
                    return f"failed {node.name}"
                continue
            result = [node.name, inner]
            if found is None:
                self.journal.verify_end(path, scope.performed)
                changes = _appended([node.name] if node.changes else [])
                if node == FIRST:
                    changes = [{"op": "set", "at": "/log", "to": []}]
                self._end(node, path, result, inner=scope.performed, changes=changes)
                _apply(state, changes)
            return result

    def _note_body(self, node: Node, path: str, tried: int) -> None:
        self.bodies[(path, tried)] += 1
        try:
            self.gateway.run.frontier.verify_next(path)
        except RunPositionTaken:
            if not self.is_zombie:
                self.recorded_again.append(path)

    def _end(
        self,
        node: Node,
        path: str,
        result: Any,
        *,
        inner: int,
        outcome: str = "OK",
        changes: Sequence[dict[str, Any]] = (),
    ) -> None:
        self._put(
            documents.checkpoint(
                path,
                node.kind,
                node.name,
                attempt=self.attempt,
                try_number=self.journal.try_of(path),
                outcome=outcome,
                value=documents.inline(result) if outcome == "OK" else None,
                resume="recompute" if node.recompute else "snapshot",
                inner=inner,
                state_change=list(changes),
            )
        )


def _appended(entries: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"op": "set", "at": "/log/-", "to": entry} for entry in entries]


def _apply(state: dict[str, Any], changes: Sequence[Any]) -> None:
    apply_changes(state, [(SetAt if change["op"] == "set" else RemoveAt).made_of(dict(change)) for change in changes])


@dataclass
class Outcome:
    result: Any
    state: dict[str, Any]
    gateway: Gateway
    bodies: Counter[tuple[str, int]]
    recorded_again: list[str]
    attempts: int


def run_to_the_end(program: Sequence[Node], *, seed: int, faults: Iterator[str], zombies: bool = False) -> Outcome:
    """Lease, drive, lose and lease again until the run is completed."""
    chance = random.Random(seed)
    gateway = Gateway(faults)
    bodies: Counter[tuple[str, int]] = Counter()
    again: list[str] = []
    frozen: list[Worker] = []
    for attempts in range(1, 1_000):
        worker = Worker(gateway, program, chance)
        try:
            worker.drive()
        except Crash:
            if zombies:
                frozen.append(worker)
        except Suspended:
            gateway.answer_one(chance)
        except Stop as error:
            raise AssertionError("the living worker was stopped") from error
        bodies += worker.bodies
        again += worker.recorded_again
        for zombie in frozen:
            _wake(zombie)
        frozen.clear()
        while gateway.run.head.state == "WAITING":
            gateway.answer_one(chance)
        if gateway.run.head.state == "COMPLETED":
            end = gateway.stored.records[-1].artifact
            return Outcome(end.output.value, gateway.run.state, gateway, bodies, again, attempts)  # type: ignore[union-attr]
    raise AssertionError("the run never ends")


def _wake(zombie: Worker) -> None:
    """A worker whose lease is over goes on as if it were not: nothing that it does may stand."""
    gateway = zombie.gateway
    if gateway.run.head.state == "RUNNING":
        gateway.lease()
    before, book = len(gateway.stored.records), Counter(gateway.book)
    zombie.is_zombie = True
    try:
        zombie.drive()
    except AssertionError:
        raise
    except Exception:  # noqa: S110 - whatever stops it
        pass
    assert len(gateway.stored.records) == before, "a zombie's record was stored"
    assert gateway.book == book, "a zombie's call was made"
