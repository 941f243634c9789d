"""Events start runs: of each procedure whose newest program listens to the event, one run for each id of an event."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from app.core.errors import TgaError
from app.domain.identity import Principal
from app.domain.runs.documents import Trigger
from app.domain.runs.procedures import Procedures
from app.domain.runs.schedules import run_of_event
from app.domain.runs.starting import StartAsked, StartRun


@dataclass(frozen=True, slots=True)
class Triggered:
    """`error`: why the event did not start this procedure; the others were started all the same."""

    procedure: str
    run_id: str
    is_new: bool = False
    error: TgaError | None = None


class Triggers:
    def __init__(self, procedures: Procedures, start: StartRun) -> None:
        self._procedures = procedures
        self._start = start

    async def send(self, principal: Principal, event: str, event_id: str, payload: Any) -> list[Triggered]:
        """Start what listens, as this principal; the same event again starts nothing new. Raises if there are
        listeners and none could be started: the first error."""
        found: list[Triggered] = []
        for program in await self._procedures.listening(principal.tenant, event):
            run_id = run_of_event(program.name, event_id)
            trigger = Trigger(type="event", id=event_id)
            asked = StartAsked(principal, program.name, None, run_id, payload, trigger)
            try:
                started = await self._start(asked)
            except TgaError as error:
                found.append(Triggered(program.name, run_id, error=error))
            else:
                found.append(Triggered(program.name, started.run_id, started.is_new))
        errors = [one.error for one in found if one.error is not None]
        if errors and len(errors) == len(found):
            raise errors[0]
        return found
