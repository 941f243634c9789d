"""What the in-memory engine keeps, and the documents that it makes itself."""

from __future__ import annotations

import copy
import hashlib
import hmac
import secrets
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing.clock import Clock, written
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.run import (
    AT_WORK,
    MemoryRun,
    Record,
    blobs_of,
    digest_of,
    folded,
    is_of_worker,
)
from tga_sdk.testing.tools import Tools

if TYPE_CHECKING:
    from tga_sdk.testing.scheduling import MemorySchedule


@dataclass
class Program:
    """A registered program. `said` is what its worker said of it."""

    said: dict[str, Any]
    registered_at: str
    registered_by: str
    number: int


@dataclass
class Seen:
    """A worker process: when it was last heard of, and what it can run. `held`: requests of it that wait here."""

    at_ms: int
    programs: set[tuple[str, str, str]] = field(default_factory=set)
    held: int = 0


class Stored(NamedTuple):
    """What a put has come to."""

    directive: str
    sequence_number: int
    reason: str | None = None
    state: str | None = None


class Made(NamedTuple):
    """An artifact that a request makes."""

    artifact_type: str
    said: dict[str, Any]


class Store:
    def __init__(self, clock: Clock, tools: Tools, *, lease_ms: int) -> None:
        # Set here for good.
        self.clock = clock
        self.tools = tools
        self.lease_ms = lease_ms
        # Changed by requests and by time, one at a time.
        self.runs: dict[str, MemoryRun] = {}
        self.sources: dict[str, MemoryRun] = {}  # of forks: the run that each goes on from, as it stood
        self.erased: set[str] = set()
        self.programs: dict[str, dict[tuple[str, str], Program]] = {}
        self.blobs: dict[str, bytes] = {}
        self.secrets: dict[str, Any] = {}
        self.workers: dict[str, Seen] = {}
        self.schedules: dict[str, MemorySchedule] = {}
        self.agenda: list[tuple[int, int, Callable[[], None]]] = []  # what scripted people do, and when
        self.on_change: list[Callable[[MemoryRun, Record], None]] = []
        self._numbers = 0
        self.executor_id = self.new_id()
        self.seed: bytes | None = None  # of the salts; None: they are random

    def now(self) -> str:
        return written(self.clock.now_ms())

    def later(self, milliseconds: float) -> str:
        return written(self.clock.now_ms() + milliseconds)

    def new_id(self) -> str:
        made = bytearray(self.clock.now_ms().to_bytes(6, "big") + secrets.token_bytes(10))
        made[6], made[8] = 0x70 | made[6] & 0x0F, 0x80 | made[8] & 0x3F
        return str(uuid.UUID(bytes=bytes(made)))

    def new_salt(self, run_id: str, what: str) -> bytes:
        """Sixteen bytes that key a run's digests, or its draws."""
        if self.seed is None:
            return secrets.token_bytes(16)
        return hmac.new(self.seed, f"{what}\0{run_id}".encode(), hashlib.sha256).digest()[:16]

    def schedule(self, at_ms: int, do: Callable[[], None]) -> None:
        """Have this done at that time of the gateway's clock."""
        self._numbers += 1
        self.agenda.append((at_ms, self._numbers, do))

    def load(self, run_id: str) -> MemoryRun:
        run = self.runs.get(run_id)
        if run is None:
            raise Problem("RUN_NOT_FOUND", "no such run")
        if run_id in self.erased:
            raise Problem("RUN_ERASED", "the run's payloads were erased")
        return run

    def commit(self, run: MemoryRun, made: Sequence[Made], then: Callable[[], Sequence[Made]] = tuple) -> None:
        """All of them or none; `then` is asked for more when the first are there."""
        before = len(run.records)
        kept = (run.lease, run.worker, run.salt, run.draw_salt)
        try:
            for one in made:
                self._add(run, one)
            for one in then():
                self._add(run, one)
        except Problem as problem:
            problem.more["sequence_number"] = run.sequence_number + 1
            again = folded(run.run_id, run.records[:before], source=self.sources.get(run.run_id))
            again.lease, again.worker, again.salt, again.draw_salt = kept
            run.__dict__.update(again.__dict__)
            raise
        self._changed(run, before)

    def _add(self, run: MemoryRun, made: Made) -> None:
        for ref in blobs_of(made.said):
            self._verify_blob(ref)
        run.add(made.artifact_type, made.said, at=self.now())

    def _changed(self, run: MemoryRun, before: int) -> None:
        for record in run.records[before:]:
            for heard in list(self.on_change):
                heard(run, record)
        if len(run.records) > before and run.state in ("COMPLETED", "CANCELLED", "FAILED"):
            self.tell_relatives(run)

    def _verify_blob(self, ref: Mapping[str, Any]) -> None:
        stored = self.blobs.get(ref["sha256"])
        if stored is None or len(stored) != ref["size_bytes"]:
            raise Problem(
                "RUN_BLOB_MISSING",
                "an entry refers to a blob that is not stored",
                expected=ref["sha256"],
                found="nothing" if stored is None else f"{len(stored)} bytes",
            )

    def value_of(self, given: Any) -> dict[str, Any]:
        """A JSON value as the journal keeps it: in it, or beside it when it is large."""
        raw = canonical(given)
        if len(raw) <= m.INLINE_BYTES_MAX:
            return {"tier": "inline", "value": given}
        sha256 = hashlib.sha256(raw).hexdigest()
        self.blobs[sha256] = raw
        ref = {"sha256": sha256, "size_bytes": len(raw), "media_type": "application/json", "serializer": "json"}
        return {"tier": "artifact", "ref": ref}

    def news(self, run: MemoryRun, after: int, attempt: int) -> list[dict[str, Any]]:
        recent = run.records[after : after + m.PAGE_RECORDS_MAX]
        return [self.shown(record) for record in recent if not is_of_worker(record, attempt)]

    def shown(self, record: Record, number: int | None = None) -> dict[str, Any]:
        """A record as workers read it: `joined` is what a tool or a child has returned, and what is sealed."""
        shown = record.shown()
        if number is not None:
            shown["sequence_number"] = number
        value = record.said.get("value") or {}
        if record.artifact_type == "run_answer":
            shown["joined"] = None
            if value.get("tier") == "effect":
                effect = self.tools.by_trace[value["trace_id"]].effect
                shown["joined"] = None if effect is None else copy.deepcopy(effect["output"])
            elif value.get("tier") == "run":
                end = self.load(value["run_id"]).end
                shown["joined"] = None if end is None else copy.deepcopy(end["output"])
        elif record.artifact_type == "run_checkpoint" and value.get("tier") == "secret":
            shown["joined"] = copy.deepcopy(self.secrets[value["ref"]["sha256"]])
        return shown

    def answer_due(self, run: MemoryRun) -> None:
        """Sleeps that are over, questions and waits that have expired."""
        for path, intent in list(run.begun.items()):
            due_at, now = due_of(intent), self.now()
            if run.state not in AT_WORK or path not in run.begun:
                continue
            if due_at is None or due_at > now:
                self._escalate(run, intent, now)
                continue
            said, request = intent.said, intent.said["request"]
            if said["kind"] == "sleep":
                made = self._answer(run, said, by=("timer", "sleep"), value={"tier": "inline", "value": None})
            elif request.get("default") is not None:
                made = self._answer(run, said, by=("timer", "default"), value=request["default"])
            else:
                what = "the call was not over at" if said["kind"] == "tool" else "nobody answered until"
                error = {"type": "TIMEOUT", "message": f"{what} {due_at}", "retryable": False}
                made = self._answer(run, said, by=("timer", "expiry"), error=error, outcome="TIMEOUT")
            self.commit(run, [made])

    def _escalate(self, run: MemoryRun, intent: Record, now: str) -> None:
        """No person has answered a question by the time that it says: that is recorded, and the question stays open."""
        path = intent.said["path"]
        for level, one in enumerate(intent.said["request"].get("escalations", ()), 1):
            if level > run.levels[path] and one["at"] <= now:
                said = {"run_id": run.run_id, "path": path, "intent_digest": intent.artifact_digest, "level": level}
                self.commit(run, [Made("run_escalation", {**said, "announced_to": [], "escalated_at": now})])

    def tell_relatives(self, run: MemoryRun) -> None:
        """A run has ended: those who wait for it are told."""
        raise NotImplementedError

    def _intent(self, run: MemoryRun, kind: str, name: str, then: Any, attempt: int, request: Any) -> Made:
        said = {"run_id": run.run_id, "attempt": attempt, "path": then.path, "kind": kind, "name": name}
        said |= {"input_digest": then.input_digest, "try_number": then.try_number, "request": request}
        if then.source is not None:
            said["source"] = then.source
        return Made("run_intent", said)

    def _answer(
        self,
        run: MemoryRun,
        intent: Mapping[str, Any],
        *,
        by: tuple[str, str],
        value: Any = None,
        error: Any = None,
        outcome: str | None = None,
    ) -> Made:
        path = intent["path"]
        begun = run.begun.get(path)
        digest = begun.artifact_digest if begun is not None else digest_of("run_intent", intent)
        said = {
            "run_id": run.run_id,
            "path": path,
            "intent_digest": digest,
            "wakes": "YES" if run.wakes_with(path) else "NO",
            "outcome": outcome or ("OK" if error is None else "ERROR"),
            "value": value,
            "error": error,
            "answered_by": {"type": by[0], "id": by[1][:256]},
            "answered_at": self.now(),
            "signature": None,
        }
        return Made("run_answer", said)

    def _attempt(
        self,
        run: MemoryRun,
        change: str,
        attempt: int,
        *,
        worker: dict[str, str] | None = None,
        reason: str | None = None,
        error: Any = None,
        not_before: str | None = None,
    ) -> Made:
        said = {
            "run_id": run.run_id,
            "attempt": attempt,
            "change": change,
            "worker": worker or run.worker_name or {"principal_id": "nobody", "name": "nobody"},
            "program_digest": run.program_digest,
            "reason": reason,
            "error": error,
            "not_before": not_before,
            "at": self.now(),
        }
        return Made("run_attempt", said)

    def _end_of(
        self,
        run: MemoryRun,
        outcome: str,
        *,
        by: tuple[str, str],
        output: Any = None,
        error: Any = None,
        divergence: Any = None,
        positions: int | None = None,
    ) -> Made:
        said = {
            "run_id": run.run_id,
            "attempt": run.attempt,
            "outcome": outcome,
            "output": output,
            "error": error,
            "divergence": divergence,
            "positions": positions,
            "ended_by": {"type": by[0], "id": by[1]},
            "ended_at": self.now(),
        }
        return Made("run_end", said)


def due_of(intent: Record) -> str | None:
    """When what has begun ends by itself, if it does."""
    request = intent.said["request"]
    due: str | None = request.get("wakes_at") or request.get("expires_at") or request.get("waits_until")
    return due


def next_of(run: MemoryRun, intent: Record) -> str | None:
    """When something happens to what has begun by itself: it is over, or others are told of it."""
    due, escalations = due_of(intent), intent.said["request"].get("escalations", ())
    times = [one["at"] for one in escalations[run.levels[intent.said["path"]] :][:1]]
    return min([*times, *([] if due is None else [due])], default=None)


def verify_size(value: Mapping[str, Any] | None, where: str) -> None:
    """Problem unless it may stand in the journal itself."""
    if value is None or value["tier"] not in ("inline", "event"):
        return
    try:
        size = len(canonical(value["value"]))
    except (NotCanonical, RecursionError) as error:
        raise Problem(
            "SCHEMA_VIOLATION", f"the value of {where} is no JSON that can be recorded", found=error
        ) from None
    if size > m.INLINE_BYTES_MAX:
        raise Problem(
            "RUN_VALUE_TOO_LARGE",
            f"the value of {where} is too large for the journal",
            expected=f"at most {m.INLINE_BYTES_MAX} bytes inline",
            found=size,
        )
