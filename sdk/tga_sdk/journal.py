"""What a run has recorded, as far as a replay needs it: the one place that decides recorded, begun, or fresh.

Pure: no clock, no network, no threads. A worker feeds it the records of a run in the order of the journal, then asks
at each operation of the program what stands at its address:

1. Ended, and a replay may rely on it (`snapshot`): the program gets what is recorded; nothing is executed.
2. Ended, to be computed again (`recompute`): the program computes, and writes nothing.
3. Begun: others, or an earlier attempt, have it in hand.
4. Nothing: the program goes on live from here.
5. Another operation: the program is not the one that wrote the journal. `Diverged` names both sides.

What a finished operation performed inside is dropped as soon as its end is read, so a long journal takes little
memory; of an operation that failed it is kept until the next one of its scope, because a retry goes on from there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

ROOT: Final = ""


class Operation(NamedTuple):
    """What makes an operation the same one in every attempt."""

    kind: str
    name: str
    input_digest: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name}"


class Diverged(Exception):
    """The program performs another operation than the journal has at this address."""

    def __init__(self, path: str, *, recorded: str, performed: str, source: str | None = None) -> None:
        self.path = path
        self.recorded = recorded
        self.performed = performed
        self.source = source
        where = f" ({source})" if source else ""
        super().__init__(f"at {path}{where} the journal has {recorded}, the program performs {performed}")


class OperationsAtOnce(Exception):
    """Two operations of one scope were begun at once; their addresses would depend on time."""


@dataclass(frozen=True, slots=True)
class Ended:
    """How an operation ended. `changes`: of the run's state, those made inside it among them, in journal order."""

    operation: Operation
    outcome: str
    value: Any
    error: Mapping[str, Any] | None
    resume: str
    inner: int
    changes: tuple[Mapping[str, Any], ...]
    sequence_number: int = 0
    source: str | None = None  # the line that performed it, where that was recorded

    @property
    def failed(self) -> bool:
        return self.outcome != "OK"


@dataclass(frozen=True, slots=True)
class Begun:
    """An operation that has begun and not ended. `intent` is the record as it stands."""

    operation: Operation
    intent: Mapping[str, Any]

    @property
    def source(self) -> str | None:
        """The line that performs it, where that was recorded."""
        return self.intent.get("source")


@dataclass(slots=True)
class Scope:
    """Where operations of a program, of one operation, or of a gather's branch are numbered."""

    address: str = ROOT
    performed: int = 0
    busy_with: str | None = None

    def enter(self, operation: Operation) -> str:
        """The address of the operation that comes next; OperationsAtOnce while another one is under way."""
        if self.busy_with is not None:
            raise OperationsAtOnce(
                f"{operation} began while operation {self.busy_with} of the same scope was under way. Operations of a "
                "body come one after the other; what is to happen at the same time goes into ctx.gather: "
                "await ctx.gather(lambda: ctx.step(...), lambda: ctx.step(...))"
            )
        self.busy_with = f"{self.address}.{self.performed + 1}" if self.address else str(self.performed + 1)
        return self.busy_with

    def leave(self) -> None:
        self.performed += 1
        self.busy_with = None

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """What is raised in here refuses the operation before it has begun: its address is the next one's."""
        try:
            yield
        except BaseException:
            self.busy_with = None
            raise

    def inside(self, path: str) -> Scope:
        return Scope(path)

    def branch(self, path: str, number: int) -> Scope:
        return Scope(f"{path}:{number}")


@dataclass(slots=True)
class Journal:
    """The records of one run, fed in their order. Kept: what has not ended, and the last of each open scope."""

    _ended: dict[str, dict[int, Ended]] = field(default_factory=dict)  # by scope and position
    _begun: dict[str, Begun] = field(default_factory=dict)
    _tries: dict[str, int] = field(default_factory=dict)
    _going: dict[str, int] = field(default_factory=dict)  # tools whose last try timed out: the try that made the call
    _passed: dict[str, int] = field(default_factory=dict)  # by scope: ended ones that the program has left behind
    _settled: dict[str, int] = field(default_factory=dict)  # by scope: up to here a failure is history
    signals: list[Mapping[str, Any]] = field(default_factory=list)
    sequence_number: int = 0

    def add(self, record: Mapping[str, Any]) -> None:
        """One more record of the journal: its `artifact_type`, its `sequence_number`, and what its artifact says."""
        self.sequence_number = record["sequence_number"]
        match record["artifact_type"]:
            case "run_start" if record.get("forked_from"):
                # What had begun in the source and not ended begins anew here; its signals were its own.
                self._begun.clear()
                self.signals.clear()
            case "run_intent":
                self._make_room(record["path"])
                self._begun[record["path"]] = Begun(_operation_of(record), record)
            case "run_checkpoint":
                self._end(record, _operation_of(record), inner=record["inner"], resume=record["resume"])
            case "run_answer":
                begun = self._begun.get(record["path"])
                if begun is not None:
                    self._end({**record, "source": begun.source}, begun.operation, inner=0, resume="snapshot")
            case "run_signal":
                self.signals.append(record)
            case "run_resumption":
                for resolved in record["resolves"]:
                    self._resolve(resolved)
                for path in record["reopens"]:
                    self._reopen(path)

    def match(self, path: str, operation: Operation, *, source: str | None = None) -> Ended | Begun | None:
        """What stands at this address; Diverged when it is another operation."""
        found = self.look(path)
        if found is not None and found.operation != operation:
            recorded, performed = str(found.operation), str(operation)
            if recorded == performed:
                recorded, performed = f"{recorded} with another input", f"{performed} with this one"
            if found.source:
                recorded = f"{recorded} ({found.source})"
            raise Diverged(path, recorded=recorded, performed=performed, source=source)
        return found

    def look(self, path: str) -> Ended | Begun | None:
        scope, position = _place_of(path)
        return self._ended.get(scope, {}).get(position) or self._begun.get(path)

    def leave_behind(self, path: str) -> None:
        """The program is past this operation and does not come back to it: of its record only the count is kept."""
        scope, position = _place_of(path)
        if self._ended.get(scope, {}).pop(position, None) is not None:
            self._passed[scope] = self._passed.get(scope, 0) + 1
        self._drop_inside(path)
        self._tries.pop(path, None)
        self._going.pop(path, None)

    def verify_end(self, path: str, performed: int, *, source: str | None = None) -> None:
        """An operation ends, or with path "" the program, after so many operations; Diverged when more are recorded."""
        begun = sum(_around(_place_of(other)[0]) == path for other in self._begun)
        recorded = self.performed_inside(path) + begun
        if recorded > performed:
            raise Diverged(
                path or "the end",
                recorded=f"{recorded} operations",
                performed=f"{performed} operations",
                source=source,
            )

    def performed_inside(self, path: str) -> int:
        """How many operations have ended directly inside this one; "": in the program itself."""
        ended = sum(len(ended) for scope, ended in self._ended.items() if _around(scope) == path)
        return ended + sum(count for scope, count in self._passed.items() if _around(scope) == path)

    def next_position(self, scope: str) -> int:
        """The position at which the next operation of this scope stands, or ends what has begun there."""
        return max(self._ended.get(scope, ()), default=0) + 1

    def forget_begun(self) -> None:
        """What has begun and not ended begins anew: a fork has keys of its own."""
        self._begun.clear()

    def try_of(self, path: str) -> int:
        """The number of the try that comes next at this address."""
        return self._tries.get(path, 1)

    def going_try(self, path: str) -> int | None:
        """Of a tool that is tried again after its time was over: the try whose call may still go on."""
        return self._going.get(path)

    def _end(self, record: Mapping[str, Any], operation: Operation, *, inner: int, resume: str) -> None:
        path, outcome = record["path"], record["outcome"]
        self._make_room(path)
        for begun in [other for other in self._begun if _is_inside(other, path)]:
            del self._begun[begun]
        if outcome == "RETRY":
            self._tries[path] = self.try_of(path) + 1
            self._going.pop(path, None)
            self._reopen_inside(path)
            return
        inside = self._ended.get(path, {})
        changes = [change for position in sorted(inside) for change in inside[position].changes]
        changes += record.get("state_change", ())
        scope, position = _place_of(path)
        ended = Ended(
            operation,
            outcome,
            record["value"],
            record["error"],
            resume,
            inner,
            tuple(changes),
            record["sequence_number"],
            record.get("source"),
        )
        if not ended.failed and resume == "snapshot":
            self._drop_inside(path)
            self._tries.pop(path, None)
            self._going.pop(path, None)
        self._ended.setdefault(scope, {})[position] = ended

    def _make_room(self, path: str) -> None:
        """The operation before this one, if it failed, will not be tried again: what it performed inside is history."""
        scope, position = _place_of(path)
        before = self._ended.get(scope, {}).get(position - 1)
        if before is not None and before.failed:
            self._drop_inside(_path_at(scope, position - 1))
            self._settled[scope] = position - 1
        around = _around(scope)
        if around:
            self._make_room(around)

    def _drop_inside(self, path: str) -> None:
        for scope in [scope for scope in self._ended if scope and _is_inside(scope, path)]:
            del self._ended[scope]
        for scope in [scope for scope in self._passed if scope and _is_inside(scope, path)]:
            del self._passed[scope]
        for tried in [other for other in self._tries if other != path and _is_inside(other, path)]:
            del self._tries[tried]
            self._going.pop(tried, None)
        for settled in [scope for scope in self._settled if scope and _is_inside(scope, path)]:
            del self._settled[settled]

    def _reopen(self, path: str) -> None:
        self._open_again(path)
        self._reopen_inside(path)

    def _reopen_inside(self, path: str) -> None:
        for scope in sorted(scope for scope in self._ended if scope and _is_inside(scope, path)):
            around = _around(scope)
            if around != path and isinstance(self.look(around), Ended):
                continue  # it has ended, to be computed again: what it performed stays performed
            failed = self.failed_last(scope)
            if failed is not None:
                self._open_again(failed)

    def _open_again(self, path: str) -> None:
        scope, position = _place_of(path)
        ended = self._ended[scope].pop(position)
        if (ended.operation.kind, ended.outcome) == ("tool", "TIMEOUT"):
            self._going.setdefault(path, self.try_of(path))
        else:
            self._going.pop(path, None)
        self._tries[path] = self.try_of(path) + 1

    def failed_last(self, scope: str) -> str | None:
        """The last operation of a scope, if it failed and nothing has begun after it: what a retry begins with."""
        ended = self._ended.get(scope, {})
        last = max(ended, default=0)
        if not last or not ended[last].failed or self._settled.get(scope, 0) >= last:
            return None
        return _path_at(scope, last)

    def _resolve(self, resolved: Mapping[str, Any]) -> None:
        scope, position = _place_of(resolved["path"])
        before = self._ended[scope][position]
        self._ended[scope][position] = Ended(
            before.operation,
            resolved["outcome"],
            resolved["value"],
            resolved["error"],
            before.resume,
            before.inner,
            before.changes,
            before.sequence_number,
            before.source,
        )


def _operation_of(record: Mapping[str, Any]) -> Operation:
    return Operation(record["kind"], record["name"], record["input_digest"])


def _place_of(path: str) -> tuple[str, int]:
    scope, _, position = path.rpartition(".")
    return scope, int(position)


def _path_at(scope: str, position: int) -> str:
    return f"{scope}.{position}" if scope else str(position)


def _around(scope: str) -> str:
    """The operation whose scope, or branch, this is; the program's own is "" in both."""
    head, dot, last = scope.rpartition(".")
    return f"{head}{dot}{last.partition(':')[0]}"


def _is_inside(address: str, path: str) -> bool:
    """Whether an address or scope is this operation, one of its branches, or anything below."""
    return address.startswith(path) and (len(address) == len(path) or address[len(path)] in ".:")
