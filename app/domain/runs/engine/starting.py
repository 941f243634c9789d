"""Starting runs: by a call, an event, a schedule, as a child, or as a fork of another run."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from app.core.canonical import canonical_bytes
from app.core.errors import (
    ArgumentsInvalid,
    ConcurrentExecution,
    InvalidTransition,
    OutcomeUnknown,
    RunEnded,
    RunIdTaken,
    RunNotFound,
    SecretMissing,
    SequenceGap,
)
from app.core.limits import RUN_INLINE_BYTES_MAX
from app.domain.identity import Principal
from app.domain.policy.question import Verdict
from app.domain.runs.documents import AllowedBy, ForkedFrom, Parent, RunPolicy, RunStart, Trigger
from app.domain.runs.engine.artifacts import verify_given
from app.domain.runs.engine.leasing import Leasing
from app.domain.runs.engine.ports import LoadedRun, RunPorts, RunSalt
from app.domain.runs.engine.table import RunTable
from app.domain.runs.engine.work import Work
from app.domain.runs.ids import owner_of
from app.domain.runs.judging import judge_start
from app.domain.runs.replay import Run
from app.domain.runs.state import StateChanges
from app.domain.runs.values import InlineValue, Value
from app.domain.system.documents import ProcedureRegistration


@dataclass(frozen=True, slots=True)
class StartRequest:
    """Who starts what. `run_id` is qualified by its tenant; None: one is made."""

    principal: Principal
    procedure: str
    input: Value
    version: str | None = None
    run_id: str | None = None
    trigger: Literal["call", "schedule", "event", "child", "fork"] = "call"
    trigger_id: str | None = None
    policy: RunPolicy | None = None
    tags: list[str] = field(default_factory=list)
    parent: Parent | None = None
    program_digest: str | None = None  # this very program, not the newest of its version
    is_strict: bool = False  # what a replay would not repeat stops it


@dataclass(frozen=True, slots=True)
class Started:
    """`replayed`: the run was there already, started with the same procedure and input. `born`: the run as this start
    has stored it, which needs not be read; None where it may have gone on since."""

    run_id: str
    state: str
    replayed: bool
    born: LoadedRun | None = field(default=None, compare=False, repr=False)


class JudgedStart(NamedTuple):
    """A program that may be started so, and the policy's word on it."""

    program: ProcedureRegistration
    allowed_by: AllowedBy


class Starting:
    def __init__(self, ports: RunPorts, table: RunTable, leasing: Leasing) -> None:
        self._ports = ports
        self._clock = ports.clock
        self._table = table
        self._leasing = leasing

    async def value_of(self, tenant: str, given: Any) -> Value:
        """A JSON value as the journal keeps it: in it, or beside it when it is large."""
        raw = canonical_bytes(given)
        if len(raw) <= RUN_INLINE_BYTES_MAX:
            return InlineValue(tier="inline", value=given)
        return await self._ports.values.store(tenant, raw, media_type="application/json", serializer="json")

    async def start(self, request: StartRequest) -> Started:
        """Start it once: the same id with the same procedure and input is the same run."""
        return await self.begin(self.document(request, await self.judged(request)))

    async def judged(self, request: StartRequest) -> JudgedStart:
        tenant = request.principal.tenant
        verify_given(request.input, "the input")
        program = await self._ports.procedures.find(
            tenant, request.procedure, version=request.version, program_digest=request.program_digest
        )
        if program.input_schema is not None and isinstance(request.input, InlineValue):
            misfit = self._ports.schemas.misfit(program.input_schema, request.input.value)
            if misfit is not None:
                raise ArgumentsInvalid(f"the input does not fit procedure {program.name}", expected=misfit)
        given = request.input.value if isinstance(request.input, InlineValue) else None
        trigger = Trigger(type=request.trigger, id=request.trigger_id)
        verdict = await judge_start(self._ports.supervisor, request.principal, program, given, trigger)
        return JudgedStart(program, _said_by(verdict))

    def document(self, request: StartRequest, judged: JudgedStart) -> RunStart:
        program = judged.program
        strict = {"strict_determinism": True} if request.is_strict else {}  # left out otherwise, never false
        return RunStart.made_of(
            {
                **strict,
                "run_id": request.run_id or self._clock.new_id(),
                "principal": request.principal,
                "procedure": program.name,
                "version": program.version,
                "program_digest": program.program_digest,
                "input": request.input,
                "started_at": self._clock.now(),
                "trigger": {"type": request.trigger, "id": request.trigger_id},
                "parent": request.parent,
                "forked_from": None,
                "policy": request.policy or policy_of(program),
                "allowed_by": judged.allowed_by,
                "tags": request.tags,
            }
        )

    async def begin(self, start: RunStart) -> Started:
        """Store its start; a worker that waits here for it gets it in the same commit."""
        salt, tenant = self._ports.salts.new(), start.principal.tenant
        place = self._leasing.reserve(tenant, start.procedure, f"{start.version}@{start.program_digest}")

        async def decide(work: Work) -> LoadedRun:
            self.add_start(work, start, salt)
            if place is not None:
                owner = owner_of(place.lease, self._ports.incarnation())
                work.lease(owner, place.worker, place.name, at=self._clock.now())
            return replace(work.require(), run=replace(work.run))  # the other one is changed by its worker

        try:
            if place is not None:
                await place.note_life()
            born = await self._table.change(start.run_id, decide, is_birth=True)
            if place is not None:
                place.run_id, place.salt = start.run_id, salt
            else:
                self._leasing.keep_salt(start.run_id, salt)
        except (SequenceGap, InvalidTransition, ConcurrentExecution, OutcomeUnknown) as error:
            return await self._existing(start, error)
        finally:
            if place is not None:
                self._leasing.settle(place)
        return Started(start.run_id, born.run.head.state, replayed=False, born=born)

    def add_start(self, work: Work, start: RunStart, salt: RunSalt, *, source: Run | None = None) -> None:
        work.add(start, source=source)
        work.sealed = self._ports.salts.seal(start.run_id, salt)

    async def _existing(self, start: RunStart, error: Exception) -> Started:
        """The run that has this id, if it is this one."""
        try:
            found = await self._ports.runs.load(start.run_id)
        except RunNotFound:
            raise error from None  # it may still be on its way: the caller asks again
        if isinstance(error, OutcomeUnknown) and found.start == start:
            return Started(start.run_id, found.run.head.state, replayed=False)  # our own, whose answer was lost
        verify_same_run(found, start)
        return Started(start.run_id, found.run.head.state, replayed=True)

    async def fork(
        self,
        source_id: str,
        *,
        at: int | None,
        principal: Principal,
        run_id: str | None = None,
        state_change: StateChanges | None = None,
        version: str | None = None,
    ) -> Started:
        """A run that goes on from an entry of another one's journal, without `at` from its last. Nothing of it is
        executed again. Told again with its `run_id`, it is the same fork, also when the source has moved on."""
        origin = await self._ports.runs.load(source_id)
        last = origin.run.head.sequence_number
        number = (await self._forked_at(run_id, source_id) or last) if at is None else at
        if not 1 <= number <= last:
            raise RunEnded(f"run {source_id} has no entry {at}", expected=f"1 to {last}", found=at)
        source = await self._ports.runs.load_at(source_id, number)
        program = await self._ports.procedures.find(
            principal.tenant, origin.start.procedure, version=version or source.version
        )
        given = origin.start.input.value if isinstance(origin.start.input, InlineValue) else None
        trigger = Trigger(type="fork", id=source_id)
        verdict = await judge_start(self._ports.supervisor, principal, program, given, trigger)
        is_same_version = version is None
        start = RunStart.made_of(
            {
                **_copied(origin.start),
                "run_id": run_id or self._clock.new_id(),
                "principal": principal,
                "version": source.version if is_same_version else program.version,
                "program_digest": source.program_digest if is_same_version else program.program_digest,
                "started_at": self._clock.now(),
                "trigger": trigger,
                "parent": None,
                "allowed_by": _said_by(verdict),
                "forked_from": ForkedFrom.made_of(
                    {
                        "run_id": source_id,
                        "sequence_number": number,
                        "entry_digest": source.head.entry_digest,
                        "state_change": state_change or [],
                    }
                ),
            }
        )
        try:
            salt = await self._ports.salts.load(source_id)
        except SecretMissing:
            await self._ports.runs.load(source_id)  # RunErased where it was erased meanwhile
            raise

        async def decide(work: Work) -> None:
            self.add_start(work, start, salt, source=source)

        try:  # the append refuses it (RunErased) where the source is erased by then, and keeps it from being erased
            await self._table.change(start.run_id, decide, is_birth=True)
        except (SequenceGap, InvalidTransition, ConcurrentExecution, OutcomeUnknown) as error:
            return await self._existing(start, error)
        return Started(start.run_id, "SCHEDULED", replayed=False)

    async def _forked_at(self, run_id: str | None, source_id: str) -> int | None:
        """After which entry this run was forked from the source; None: it was not."""
        try:
            found = None if run_id is None else await self._ports.runs.load(run_id)
        except RunNotFound:
            return None
        origin = None if found is None else found.start.forked_from
        return origin.sequence_number if origin is not None and origin.run_id == source_id else None


def _copied(start: RunStart) -> dict[str, Any]:
    """What a fork's start says like its source's; it is strict if that is."""
    left_out = (
        {"schema_id", "schema_version"} if start.is_strict else {"schema_id", "schema_version", "strict_determinism"}
    )
    return {name: value for name, value in start.__dict__.items() if name not in left_out}


def _said_by(verdict: Verdict) -> AllowedBy:
    return AllowedBy(policy_digest=verdict.policy_digest, policy_ids=list(verdict.policy_ids)[:64])


def policy_of(program: ProcedureRegistration) -> RunPolicy:
    """As the procedure was registered; a child ends with its parent unless its start says otherwise."""
    return RunPolicy.of_known({**program.policy.__dict__, "on_parent_end": "cancel"})


def verify_same_run(found: LoadedRun, start: RunStart) -> None:
    """RunIdTaken unless a caller who starts this one may be told that it is the run that exists."""
    was = found.start
    is_same = (
        was.principal.is_same_as(start.principal)
        and (was.procedure, was.input, was.parent) == (start.procedure, start.input, start.parent)
        and (was.forked_from == start.forked_from)
    )
    if not is_same:
        raise RunIdTaken(
            "a run with this id was started otherwise",
            expected="the same procedure and input",
            found="another procedure, input or starter",
        )
