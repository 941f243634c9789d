"""Programs that runs can be started of, and schedules, as a system stream tells of them: what memory keeps of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from app.core.digest import Digest, digest_of
from app.domain.system.documents import ProcedureRegistration, Schedule

ProgramKey = tuple[str, str]  # version and program digest

_OF_THE_RECORD = ("recorded_at", "recorded_by")


@dataclass(frozen=True, slots=True)
class Program:
    """A registered program without what is large; the entry at `sequence_number` has all of it."""

    name: str
    version: str
    program_digest: str
    language: str
    tags: tuple[str, ...]
    events: tuple[str, ...]
    said_digest: Digest  # of all that was said of it: the same again is no news
    sequence_number: int
    registered_at: str
    registered_by: str

    @classmethod
    def of(cls, document: ProcedureRegistration, sequence_number: int) -> Self:
        return cls(
            document.name,
            document.version,
            document.program_digest,
            document.language,
            tuple(document.tags),
            tuple(trigger.event for trigger in document.triggers),
            digest_said(document),
            sequence_number,
            document.recorded_at,
            document.recorded_by,
        )

    @property
    def key(self) -> ProgramKey:
        return self.version, self.program_digest


Procedures = dict[str, dict[ProgramKey, Program]]  # by name; of each the newest registration last


@dataclass(frozen=True, slots=True)
class KnownSchedule:
    """A schedule that stands; the entry at `sequence_number` says what it is."""

    sequence_number: int
    said_digest: Digest
    principal_id: str

    @classmethod
    def of(cls, document: Schedule, sequence_number: int) -> Self:
        return cls(sequence_number, digest_said(document), document.principal.principal_id)


def digest_said(document: ProcedureRegistration | Schedule) -> Digest:
    """Of what is said of the program or schedule; by whom and when it was recorded does not count."""
    return digest_of({name: value for name, value in document.to_json().items() if name not in _OF_THE_RECORD})


def with_program(procedures: Procedures, program: Program) -> Procedures:
    """One more; what was registered of the same program before is replaced, and the procedure's newest is this one."""
    programs = dict(procedures.get(program.name, {}))
    programs.pop(program.key, None)
    programs[program.key] = program
    return {**procedures, program.name: programs}
