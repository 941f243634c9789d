"""Schedules and events of this gateway, wired to its engine of runs."""

from __future__ import annotations

from typing import Final

from app.config import qualify
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.starting import StartRequest
from app.domain.runs.scheduling import Schedules
from app.domain.runs.starting import RunStarted, StartAsked, StartRun
from app.edge.runs import own_run_id

_FINISH_EVERY_ROUNDS: Final = 15  # changes are unfinished only after a gateway has died at the wrong moment


class EngineStart:
    """The StartRun port, on the engine."""

    def __init__(self, engine: RunEngine) -> None:
        self._starting = engine.starting

    async def __call__(self, asked: StartAsked) -> RunStarted:
        tenant = asked.principal.tenant
        started = await self._starting.start(
            StartRequest(
                principal=asked.principal,
                procedure=asked.procedure,
                version=asked.version,
                input=await self._starting.value_of(tenant, asked.input),
                run_id=qualify(tenant, asked.run_id),
                trigger=asked.trigger.type,
                trigger_id=asked.trigger.id,
            )
        )
        return RunStarted(own_run_id(tenant, started.run_id), is_new=not started.replayed)


class ScheduleRounds:
    """What a gateway does for schedules without being asked: it fires those that are due, and now and then finishes
    changes of them whose gateways have died."""

    def __init__(self, schedules: Schedules, start: StartRun) -> None:
        self._schedules = schedules
        self._start = start
        self._rounds = 0

    async def once(self) -> None:
        if self._rounds % _FINISH_EVERY_ROUNDS == 0:
            await self._schedules.finish()
        self._rounds += 1
        await self._schedules.fire_due(self._start)
