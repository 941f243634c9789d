"""A run in memory: its records, and where it stands after them.

`MemoryRun.add` is the one judge of what a record may say: what the real gateway's fold refuses is refused here, with
the same code. What stands at an address is asked of `tga_sdk.journal`, which is what workers ask, too.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from tga_sdk.canonical import canonical
from tga_sdk.journal import Begun, Ended, Journal
from tga_sdk.testing.messages import BRANCHES_MAX, PATH_LEVELS_MAX, SIGNAL_IDS_KEPT, STATE_BYTES_MAX
from tga_sdk.testing.problems import Problem

AT_WORK: Final = ("SCHEDULED", "RUNNING", "WAITING")
RESTING: Final = ("FAILED", "PARKED", "DIVERGED")
TERMINAL: Final = ("COMPLETED", "CANCELLED")
OPEN: Final = (*AT_WORK, *RESTING)
ANSWERED: Final = frozenset({"tool", "ask", "sleep", "signal", "child"})

# (state, artifact, verdict): the state after it. As app/domain/runs/transitions.py has it.
TRANSITIONS: Final[dict[tuple[str, str, str], str]] = {
    ("SCHEDULED", "run_attempt", "LEASED"): "RUNNING",
    **{("RUNNING", "run_attempt", change): "SCHEDULED" for change in ("RELEASED", "LOST", "FAILED")},
    **{(state, "run_attempt", "FENCED"): state for state in AT_WORK},
    ("RUNNING", "run_intent", ""): "RUNNING",
    ("RUNNING", "run_checkpoint", ""): "RUNNING",
    ("WAITING", "run_answer", "YES"): "SCHEDULED",
    **{(state, "run_answer", "NO"): state for state in OPEN},
    **{(state, "run_signal", ""): state for state in OPEN},
    **{(state, "run_escalation", ""): state for state in AT_WORK},
    ("RUNNING", "run_suspension", ""): "WAITING",
    ("RUNNING", "run_end", "COMPLETED"): "COMPLETED",
    ("RUNNING", "run_end", "DIVERGED"): "DIVERGED",
    **{(state, "run_end", "FAILED"): "FAILED" for state in AT_WORK},
    **{(state, "run_end", "PARKED"): "PARKED" for state in ("SCHEDULED", "RUNNING")},
    **{(state, "run_end", "CANCELLED"): "CANCELLED" for state in OPEN},
    **{(state, "run_resumption", ""): "SCHEDULED" for state in RESTING},
}
_VERDICT: Final = {"run_attempt": "change", "run_answer": "wakes", "run_end": "outcome"}
# Written by the gateway when it records: a repeat of the same request has others.
_OF_THE_MOMENT: Final = frozenset({"at", "ended_at", "not_before", "answered_at"})


class Record(NamedTuple):
    """One entry: `said` is its artifact."""

    sequence_number: int
    artifact_type: str
    artifact_digest: str
    recorded_at: str
    from_state: str
    to_state: str
    said: dict[str, Any]

    def shown(self) -> dict[str, Any]:
        """As GET checkpoints shows it."""
        return {
            **copy.deepcopy(self.said),
            "sequence_number": self.sequence_number,
            "artifact_type": self.artifact_type,
            "artifact_digest": self.artifact_digest,
            "recorded_at": self.recorded_at,
        }


class WaitingSignal(NamedTuple):
    name: str
    signal_id: str
    sequence_number: int


@dataclass
class MemoryRun:
    """Where a run stands. Changed by `add`, and by nothing else; the last four fields are no part of the journal."""

    run_id: str
    records: list[Record] = field(default_factory=list)
    state: str = "SCHEDULED"
    entry_digest: str = ""
    updated_at: str = ""
    started_at: str = ""
    version: str = ""
    program_digest: str = ""
    attempt: int = 0
    failures: int = 0
    fenced: int = 0
    worker_name: dict[str, str] | None = None
    not_before: str | None = None
    journal: Journal = field(default_factory=Journal)
    levels: dict[str, int] = field(default_factory=dict)  # of questions: how often each was escalated
    begun: dict[str, Record] = field(default_factory=dict)  # the intent of what has begun and not ended, in order
    signals: list[WaitingSignal] = field(default_factory=list)
    signal_ids: list[str] = field(default_factory=list)
    document: dict[str, Any] = field(default_factory=dict)
    awaits: list[str] = field(default_factory=list)
    wake: str = "ANY"
    # What a scheduler knows.
    salt: bytes = b""
    draw_salt: bytes = b""
    lease: str | None = None
    worker: str | None = None

    @property
    def start(self) -> dict[str, Any]:
        return self.records[0].said

    @property
    def sequence_number(self) -> int:
        return len(self.records)

    @property
    def positions(self) -> int:
        return self.journal.performed_inside("")

    @property
    def end(self) -> dict[str, Any] | None:
        """How it ended; None while it is at work."""
        if self.state in AT_WORK:
            return None
        return next((one.said for one in reversed(self.records) if one.artifact_type == "run_end"), None)

    def add(self, artifact_type: str, said: dict[str, Any], *, at: str, source: MemoryRun | None = None) -> Record:
        """Record one more artifact; Problem where the run does not admit it, and then the run may be half changed."""
        verdict = str(said[_VERDICT[artifact_type]]) if artifact_type in _VERDICT else ""
        before = self.state
        after = "SCHEDULED" if not self.records else TRANSITIONS.get((before, artifact_type, verdict))
        if after is None:
            raise Problem(
                "STATE_INVALID_TRANSITION",
                f"{artifact_type} {verdict}".strip() + f" is not admitted in {before}",
                expected=before,
                found=artifact_type,
            )
        digest = digest_of(artifact_type, said)
        record = Record(len(self.records) + 1, artifact_type, digest, at, before, after, said)
        _APPLY[artifact_type](self, record, source)
        self.records.append(record)
        chained = canonical([self.entry_digest, record.sequence_number, artifact_type, digest])
        self.entry_digest = hashlib.sha256(chained).hexdigest()
        self.state = after
        self.updated_at = at
        if after != "RUNNING":
            self.lease = self.worker = None
        return record

    def verify_next(self, path: str) -> None:
        """Problem unless an operation may begin or end at this address."""
        scope, position = place_of(path)
        if scope:
            around = around_of(scope)
            if isinstance(self.journal.look(around), Ended) or not self._is_open(scope):
                self.verify_next(around)
        following = self.journal.next_position(scope)
        expected = f"{scope}.{following}" if scope else str(following)
        if position < following:
            raise Problem("RUN_POSITION_TAKEN", f"operation {path} has ended already", expected=expected, found=path)
        if position > following:
            raise Problem("RUN_POSITION_GAP", f"operation {path} comes before its turn", expected=expected, found=path)

    def _is_open(self, scope: str) -> bool:
        return self.journal.next_position(scope) > 1

    def has_never_begun(self, path: str) -> bool:
        """Whether it is certain that no operation at this address has begun yet."""
        scope, position = place_of(path)
        if path in self.begun:
            return False
        following = self.journal.next_position(scope)
        is_entered = following > 1 or any(place_of(begun)[0] == scope for begun in self.begun)
        if scope and (not is_entered or isinstance(self.journal.look(around_of(scope)), Ended)):
            return False  # over, or what had begun there is forgotten because the operation around it is tried again
        return position > following or (not scope and position == following and self.journal.try_of(path) == 1)

    def wakes_with(self, path: str) -> bool:
        """Whether an answer at this address ends the run's wait."""
        return self.state == "WAITING" and path in self.awaits and (self.wake == "ANY" or len(self.awaits) == 1)

    def failed_last(self) -> list[str]:
        """What a retry of the run reopens."""
        failed = self.journal.failed_last("")
        return [] if failed is None else [failed]

    def verify_resolvable(self, path: str) -> None:
        """Problem unless a person may say how the operation at this address ended."""
        scope, _ = place_of(path)
        if self.journal.failed_last(scope) != path:
            raise Problem(
                "RUN_POSITION_TAKEN",
                f"operation {path} cannot be resolved",
                expected="the last operation of its scope, interrupted",
                found=path,
            )

    def feed(self, record: Record) -> None:
        self.journal.add({**record.said, "artifact_type": record.artifact_type, "sequence_number": 0})
        open_paths = [path for path in self.begun if isinstance(self.journal.look(path), Begun)]
        self.begun = {path: self.begun[path] for path in open_paths}


def digest_of(artifact_type: str, said: Mapping[str, Any]) -> str:
    """The digest that the real gateway's entry would name: over the document with its schema."""
    stated = {**said, "schema_id": f"tga/v1/{artifact_type}", "schema_version": "1.0"}
    return hashlib.sha256(canonical(stated)).hexdigest()


def folded(run_id: str, records: Iterable[Record], *, source: MemoryRun | None = None) -> MemoryRun:
    """The run after these records."""
    run = MemoryRun(run_id)
    for record in records:
        run.add(record.artifact_type, record.said, at=record.recorded_at, source=source)
    return run


def place_of(path: str) -> tuple[str, int]:
    """Scope and position of an address; Problem when it is nested too deeply, or a branch has too high a number."""
    if path.count(".") >= PATH_LEVELS_MAX:
        raise Problem(
            "SCHEMA_VIOLATION", "operations are nested too deeply", expected=f"{PATH_LEVELS_MAX} levels", found=path
        )
    for part in path.split("."):
        branch = part.partition(":")[2]
        if branch and int(branch) > BRANCHES_MAX:
            raise Problem("SCHEMA_VIOLATION", "a gather has too many branches", expected=BRANCHES_MAX, found=branch)
    scope, _, position = path.rpartition(".")
    return scope, int(position)


def around_of(scope: str) -> str:
    head, dot, last = scope.rpartition(".")
    return f"{head}{dot}{last.partition(':')[0]}"


def is_of_worker(record: Record, attempt: int) -> bool:
    """Whether a worker has put it in this attempt."""
    kind, said = record.artifact_type, record.said
    if kind in ("run_checkpoint", "run_intent", "run_suspension"):
        return bool(said["attempt"] == attempt)
    if kind == "run_end":
        return bool(said["attempt"] == attempt and said["ended_by"]["type"] == "worker")
    return bool(kind == "run_attempt" and said["attempt"] == attempt and said["change"] in ("RELEASED", "FAILED"))


def is_same(record: Record, artifact_type: str, said: Mapping[str, Any]) -> bool:
    """Whether what is recorded is what this request makes, whenever each was made."""
    return record.artifact_type == artifact_type and _lasting(record.said) == _lasting(said)


def _lasting(said: Mapping[str, Any]) -> bytes:
    kept = {name: value for name, value in said.items() if name not in _OF_THE_MOMENT}
    value = kept.get("value")
    if isinstance(value, dict) and value.get("tier") == "secret":
        kept["value"] = value["commitment"]
    return canonical(kept)


def _started(run: MemoryRun, record: Record, source: MemoryRun | None) -> None:
    said = record.said
    run.started_at, run.version, run.program_digest = said["started_at"], said["version"], said["program_digest"]
    origin = said["forked_from"]
    if origin is not None:
        if source is None:
            raise Problem("STATE_INVALID_TRANSITION", "the run that this one was forked from is missing")
        run.journal = copy.deepcopy(source.journal)
        run.journal.forget_begun()  # it begins anew, under the fork's own keys
        run.document = copy.deepcopy(source.document)
        apply_changes(run.document, origin["state_change"])


def _attempt(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    said = record.said
    if said["change"] == "LEASED":
        run.attempt, run.worker_name = said["attempt"], said["worker"]
        run.not_before, run.awaits = None, []
    elif said["change"] == "FENCED":
        run.fenced = said["attempt"]
    else:
        run.failures += said["change"] != "RELEASED"
        run.not_before = said["not_before"]


def _intent(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    path = record.said["path"]
    _verify_count(f"the try of operation {path}", run.journal.try_of(path), record.said["try_number"])
    run.verify_next(path)
    if path in run.begun:
        raise Problem(
            "RUN_POSITION_TAKEN", f"operation {path} has begun already", expected="its end", found="another intent"
        )
    run.begun[path] = record
    run.levels[path] = 0
    run.feed(record)


def _checkpoint(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    said = record.said
    path, kind = said["path"], said["kind"]
    run.verify_next(path)
    _verify_count(f"the try of operation {path}", run.journal.try_of(path), said["try_number"])
    begun = run.begun.get(path)
    if begun is not None and any(begun.said[name] != said[name] for name in ("kind", "name", "input_digest")):
        raise Problem(
            "RUN_POSITION_TAKEN",
            f"another operation has begun at {path}",
            expected=f"{begun.said['kind']} {begun.said['name']}",
            found=f"{kind} {said['name']}",
        )
    if kind in ANSWERED:
        raise Problem(
            "STATE_INVALID_TRANSITION", f"a {kind} ends with an answer", expected="run_answer", found="run_checkpoint"
        )
    if said["outcome"] == "INTERRUPTED" and begun is None:
        raise Problem(
            "STATE_INVALID_TRANSITION",
            "only what has begun can be interrupted",
            expected="an intent",
            found=f"none at {path}",
        )
    _verify_count("the number of operations inside", run.journal.performed_inside(path), said["inner"])
    if ":" not in path:  # what a branch changes is its own until the gather ends
        apply_changes(run.document, said["state_change"])
    if said["state_change"] and len(canonical(run.document)) > STATE_BYTES_MAX:
        raise Problem("INPUT_TOO_LARGE", "the run's state is too large", expected=f"at most {STATE_BYTES_MAX} bytes")
    run.feed(record)
    run.failures = 0


def _answer(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    said = record.said
    path, by = said["path"], said["answered_by"]
    if by["type"] == "signal":
        run.signals.remove(next(one for one in run.signals if one.signal_id == by["id"]))
    is_woken = run.wakes_with(path)
    run.feed(record)
    run.awaits = [] if is_woken else [awaited for awaited in run.awaits if awaited != path]


def _escalation(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    run.levels[record.said["path"]] = record.said["level"]


def _signal(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    said = record.said
    run.signals.append(WaitingSignal(said["name"], said["signal_id"], record.sequence_number))
    run.signal_ids = [*run.signal_ids[1 - SIGNAL_IDS_KEPT :], said["signal_id"]]


def waits_for_nobody(path: str, kind: str) -> Problem:
    return Problem(
        "STATE_INVALID_TRANSITION",
        "a run waits only for what others can end",
        expected="a tool, ask, sleep, signal or child that has begun",
        found=f"{kind} at {path}",
    )


def _suspension(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    awaits = record.said["awaits"]
    for path in awaits:
        kind = run.begun[path].said["kind"] if path in run.begun else "nothing"
        if kind not in ANSWERED:
            raise waits_for_nobody(path, kind)
    _verify_count("how many different addresses it awaits", len(set(awaits)), len(awaits))
    run.awaits, run.wake = list(awaits), record.said["wake"]


def _end(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    if record.said["positions"] is not None:
        _verify_count("the number of operations", run.positions, record.said["positions"])
    if record.to_state in TERMINAL:
        run.begun = {}
    run.awaits = []


def _resumption(run: MemoryRun, record: Record, _: MemoryRun | None) -> None:
    said = record.said
    for resolved in said["resolves"]:
        run.verify_resolvable(resolved["path"])
    run.feed(record)
    run.failures, run.not_before, run.started_at = 0, None, said["resumed_at"]
    if said["accepts"] is not None:
        run.version, run.program_digest = said["accepts"]["version"], said["accepts"]["program_digest"]


_APPLY: Final[dict[str, Callable[[MemoryRun, Record, MemoryRun | None], None]]] = {
    "run_start": _started,
    "run_attempt": _attempt,
    "run_intent": _intent,
    "run_checkpoint": _checkpoint,
    "run_answer": _answer,
    "run_escalation": _escalation,
    "run_signal": _signal,
    "run_suspension": _suspension,
    "run_end": _end,
    "run_resumption": _resumption,
}


def _verify_count(what: str, expected: int, found: object) -> None:
    if found != expected:
        raise Problem("RUN_COUNT_MISMATCH", f"{what} does not agree with the journal", expected=expected, found=found)


def apply_changes(state: dict[str, Any], changes: Sequence[Mapping[str, Any]]) -> None:
    """Changes of a run's state, in order: `{op: set, at: pointer, to}` or `{op: remove, at}`; `/-` appends."""
    for change in changes:
        steps = [step.replace("~1", "/").replace("~0", "~") for step in change["at"].split("/")[1:]]
        is_set, to = change["op"] == "set", copy.deepcopy(change.get("to"))
        if not steps:
            if not is_set or not isinstance(to, dict):
                raise Problem("SCHEMA_VIOLATION", "a run's state is an object", expected="an object")
            state.clear()
            state.update(to)
            continue
        holder: Any = state
        for step in steps[:-1]:
            holder = _inside(holder, step, change["at"])
        _put(holder, steps[-1], change["at"], is_set, to)


def _inside(holder: Any, step: str, at: str) -> Any:
    if isinstance(holder, dict) and step in holder:
        return holder[step]
    if isinstance(holder, list) and step.isdigit() and int(step) < len(holder):
        return holder[int(step)]
    raise _nothing_there(at)


def _put(holder: Any, step: str, at: str, is_set: bool, to: Any) -> None:
    if isinstance(holder, dict) and (is_set or step in holder):
        if is_set:
            holder[step] = to
        else:
            del holder[step]
        return
    if isinstance(holder, list) and (step == "-" or step.isdigit()):
        index = len(holder) if step == "-" else int(step)
        if is_set and index == len(holder):
            holder.append(to)
            return
        if index < len(holder):
            if is_set:
                holder[index] = to
            else:
                del holder[index]
            return
    raise _nothing_there(at)


def _nothing_there(at: str) -> Problem:
    return Problem(
        "SCHEMA_VIOLATION",
        "a change of a run's state names what is not there",
        expected="a member or an item that is there",
        found=at,
    )


def blobs_of(said: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What an artifact refers to in the blob store."""
    request = said.get("request") or {}
    values = [said.get("value"), said.get("input"), said.get("output"), request.get("context"), request.get("default")]
    values += [resolved["value"] for resolved in said.get("resolves", ())]
    for value in values:
        if isinstance(value, dict) and value.get("tier") == "artifact":
            yield value["ref"]
