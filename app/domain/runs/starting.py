"""The port by which events and schedules start runs. The engine of runs is behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from app.domain.identity import Principal
from app.domain.runs.documents import Trigger


@dataclass(frozen=True, slots=True)
class StartAsked:
    """A run that is to be started. `run_id` is as its tenant knows it; `version` None: the newest program."""

    principal: Principal
    procedure: str
    version: str | None
    run_id: str
    input: Any
    trigger: Trigger


class RunStarted(NamedTuple):
    """`is_new`: False when the run with this id, procedure and input had been started before."""

    run_id: str
    is_new: bool


class StartRun(Protocol):
    """Starts a run once: durable when it returns, and the same again is the same run. Raises StartDenied,
    ProcedureNotFound, SchemaViolation and what the store raises."""

    async def __call__(self, asked: StartAsked) -> RunStarted: ...
