"""Schedules and events of this gateway, wired to its engine of runs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Final

from app.config import qualify
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.starting import StartRequest
from app.domain.runs.scheduling import Schedules
from app.domain.runs.starting import RunStarted, StartAsked, StartRun
from app.edge.runs import own_run_id

_SYNC_EVERY_ROUNDS: Final = 60  # rows are missing only after a gateway has died at the wrong moment


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
    """What a gateway does for schedules without being asked: fires those that are due, and now and then makes sure that
    every one on the record has its row."""

    def __init__(self, schedules: Schedules, start: StartRun, tenants: Callable[[], Awaitable[Iterable[str]]]) -> None:
        self._schedules = schedules
        self._start = start
        self._tenants = tenants
        self._rounds = 0

    async def once(self) -> None:
        if self._rounds % _SYNC_EVERY_ROUNDS == 0:
            await self._schedules.sync(await self._tenants())
        self._rounds += 1
        await self._schedules.fire_due(self._start)
