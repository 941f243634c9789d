"""Procedures: programs that runs can be started of. Each registration stands on its tenant's system stream.

A program is a version of a procedure and a digest. The same registration again changes nothing, so that workers may
register at every start; another digest under the same version is another program of it. What was registered last is the
procedure's newest program: a start that names no version takes that one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, Final, Literal, NamedTuple, Protocol

from pydantic import Field

from app.core.canonical import canonical_enclosed
from app.core.errors import ProcedureLimitReached, ProcedureNotFound, RecoveryFailed
from app.core.limits import (
    PROCEDURE_TRIGGERS_MAX,
    PROCEDURES_KEPT_MAX,
    PROCEDURES_PER_TENANT_MAX,
    PROGRAMS_PER_PROCEDURE_MAX,
    RUN_TAGS_MAX,
)
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Sha256, Text
from app.domain.system.documents import (
    EventTrigger,
    Language,
    Milliseconds,
    ProcedureName,
    ProcedurePolicy,
    ProcedureRegistration,
    ProgramSource,
    RetryPolicy,
    SystemDocument,
)
from app.domain.system.log import SystemLog, SystemState
from app.domain.system.programs import Program, digest_said

_NAMES_TOLD_MAX: Final = 5


class RetrySaid(Part):
    """As RetryPolicy; what is left out is as here."""

    retries: Annotated[int, Field(ge=0, le=1_000)] = 0
    first_ms: Milliseconds = 1_000
    max_ms: Milliseconds = 60_000


class PolicySaid(Part):
    """As ProcedurePolicy; what is left out is as here: no limit of time, no retry, and everything is kept."""

    timeout_ms: Milliseconds | None = None
    checkpoint_timeout_ms: Milliseconds | None = None
    retry: RetrySaid = RetrySaid()
    park_after: Annotated[int, Field(ge=1, le=1_000)] = 5
    retention: Literal["keep", "delete_on_success"] = "keep"

    def whole(self) -> ProcedurePolicy:
        retry = RetryPolicy(**self.retry.model_dump())
        return ProcedurePolicy(**{**self.model_dump(), "retry": retry})


class ProcedureSaid(Part):
    """What is said of a program when it is registered. Schemas are null where any value will do."""

    name: ProcedureName
    version: Name = "1"
    program_digest: Sha256
    language: Language = "python"
    description: Text | None = None
    input_schema: dict[str, Any] | None = None
    output_schema: dict[str, Any] | None = None
    state_schema: dict[str, Any] | None = None
    policy: PolicySaid = PolicySaid()
    triggers: list[EventTrigger] = Field(default=[], max_length=PROCEDURE_TRIGGERS_MAX)
    tags: list[Name] = Field(default=[], max_length=RUN_TAGS_MAX)


class Registered(NamedTuple):
    """`is_new`: this registration is on the record since now; else it had been before."""

    program: Program
    is_new: bool


@dataclass(frozen=True, slots=True)
class ListedProgram:
    """`is_newest`: a start of the procedure that names no version takes it."""

    program: Program
    is_newest: bool


class ListPosition(NamedTuple):
    """Where a list of programs goes on: after the program of this name that this entry registered."""

    name: str
    sequence_number: int


class ProgramLookup(Protocol):
    """What the engine of runs asks about programs."""

    async def find(
        self, tenant: str, name: str, *, version: str | None = None, program_digest: str | None = None
    ) -> ProcedureRegistration:
        """The newest program of this procedure, or of this version of it, or this very one; ProcedureNotFound."""
        ...

    def programs(self, tenant: str, name: str, versions: Collection[str]) -> list[Program]:
        """All known programs of these versions, the newest first: what a worker may take that accepts them."""
        ...


class Procedures:
    """Registers and finds programs. Registrations of other gateways are known here a second later at most."""

    def __init__(self, system: SystemLog, clock: Clock) -> None:
        self._system = system
        self._clock = clock
        # Registrations as they stand, with their schemas: they never change, so any of them may be forgotten.
        self._kept: dict[tuple[str, int], ProcedureRegistration] = {}

    async def register(
        self, said: ProcedureSaid, registered_by: Principal, *, source: ProgramSource | None = None
    ) -> Registered:
        """Durable when it returns. `source`: of a submitted program, whose blobs are stored; they stay as long as the
        registration. Raises InputTooLarge or InputMalformed where it could not be recorded, ProcedureLimitReached, and
        RunBlobMissing."""
        canonical_enclosed([said.input_schema, said.output_schema, said.state_schema])
        tenant = registered_by.tenant
        stated = {field: getattr(said, field) for field in ProcedureSaid.model_fields if field != "policy"}
        if source is not None:
            stated["program_source"] = source
        document = ProcedureRegistration(
            system_id=tenant,
            recorded_at=self._clock.now(),
            recorded_by=registered_by.principal_id,
            **stated,
            policy=said.policy.whole(),
        )
        is_new = False

        def decide(state: SystemState) -> list[SystemDocument]:
            nonlocal is_new
            is_new = _is_news(state, document)
            return [document] if is_new else []

        state = await self._system.append(tenant, decide)
        program = state.procedures[said.name][said.version, said.program_digest]
        return Registered(program, is_new)

    async def find(
        self, tenant: str, name: str, *, version: str | None = None, program_digest: str | None = None
    ) -> ProcedureRegistration:
        """The newest program of this procedure, or of this version of it, or this very one; ProcedureNotFound."""
        program = _newest(self._programs(tenant, name), version, program_digest)
        if program is None:
            # Another gateway may have registered it since the stream was last read.
            await self._system.refresh(tenant)
            program = _newest(self._programs(tenant, name), version, program_digest)
        if program is None:
            raise self._not_found(tenant, name, version, program_digest)
        return await self._load(tenant, program)

    def programs(self, tenant: str, name: str, versions: Collection[str]) -> list[Program]:
        """All known programs of these versions, the newest first."""
        return [program for program in self._programs(tenant, name) if program.version in versions]

    async def listening(self, tenant: str, event: str) -> list[Program]:
        """The newest program of each procedure, where that one listens to this event; by name."""
        state = await self._system.refresh(tenant)
        newest = (next(reversed(state.procedures[name].values())) for name in sorted(state.procedures))
        return [program for program in newest if event in program.events]

    async def list(
        self, tenant: str, *, name: str | None = None, after: ListPosition | None = None, limit: int
    ) -> tuple[list[ListedProgram], ListPosition | None]:
        """Programs by the name of their procedure, of each the newest first; and where the list goes on."""
        state = await self._system.refresh(tenant)
        names = sorted(state.procedures) if name is None else [name] if name in state.procedures else []
        page = list(islice(_listed(state, names, after), limit + 1))
        if len(page) <= limit:
            return page, None
        last = page[limit - 1].program
        return page[:limit], ListPosition(last.name, last.sequence_number)

    def _programs(self, tenant: str, name: str) -> Sequence[Program]:
        return list(reversed(self._system.state_of(tenant).procedures.get(name, {}).values()))

    async def _load(self, tenant: str, program: Program) -> ProcedureRegistration:
        key = tenant, program.sequence_number
        kept = self._kept.get(key)
        if kept is None:
            kept = _registration(await self._system.load(tenant, program.sequence_number), program)
            if len(self._kept) >= PROCEDURES_KEPT_MAX:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = kept
        return kept

    def _not_found(self, tenant: str, name: str, version: str | None, program_digest: str | None) -> ProcedureNotFound:
        programs = self._programs(tenant, name)
        if not programs:
            return ProcedureNotFound(f"nobody has registered a procedure {name}")
        versions = list(dict.fromkeys(program.version for program in programs))
        more = len(versions) - _NAMES_TOLD_MAX
        told = ", ".join(versions[:_NAMES_TOLD_MAX]) + (f" and {more} more" if more > 0 else "")
        if version is not None and version not in versions:
            return ProcedureNotFound(
                f"nobody has registered this version of {name}", expected=f"one of {told}", found=version
            )
        return ProcedureNotFound(f"nobody has registered this program of {name}", found=program_digest)


def _is_news(state: SystemState, document: ProcedureRegistration) -> bool:
    programs = state.procedures.get(document.name, {})
    known = programs.get((document.version, document.program_digest))
    if known is not None:
        return known.said_digest != digest_said(document)
    if document.name not in state.procedures and len(state.procedures) >= PROCEDURES_PER_TENANT_MAX:
        raise ProcedureLimitReached(
            "the tenant has as many procedures as it can have", expected=f"at most {PROCEDURES_PER_TENANT_MAX}"
        )
    if len(programs) >= PROGRAMS_PER_PROCEDURE_MAX:
        raise ProcedureLimitReached(
            f"{document.name} has as many programs as a procedure can have",
            expected=f"at most {PROGRAMS_PER_PROCEDURE_MAX}",
        )
    return True


def _newest(programs: Sequence[Program], version: str | None, program_digest: str | None) -> Program | None:
    for program in programs:
        if version in (None, program.version) and program_digest in (None, program.program_digest):
            return program
    return None


def _listed(state: SystemState, names: Sequence[str], after: ListPosition | None) -> Iterator[ListedProgram]:
    for name in names:
        if after is not None and name < after.name:
            continue
        programs = list(reversed(state.procedures[name].values()))
        for place, program in enumerate(programs):
            is_seen = after is not None and name == after.name and program.sequence_number >= after.sequence_number
            if not is_seen:
                yield ListedProgram(program, is_newest=place == 0)


def _registration(document: SystemDocument, program: Program) -> ProcedureRegistration:
    if not isinstance(document, ProcedureRegistration) or digest_said(document) != program.said_digest:
        raise RecoveryFailed(
            "the system stream has something else where a procedure was registered",
            expected=f"{program.name} {program.version}",
            sequence_number=program.sequence_number,
        )
    return document
