"""Is it alive, and can it work? For supervisors, monitors and load balancers; no authentication."""

from __future__ import annotations

import asyncio
import time
from typing import Any, Final

import orjson
from fastapi import APIRouter
from starlette.responses import Response

from app.core import errors
from app.core.errors import ShuttingDown, StoreUnavailable, TgaError
from app.core.limits import READY_BELIEVED_MS, READY_CHECK_MS
from app.edge.problems import documented_alone, problem
from app.edge.services import Services

_JSON: Final = "application/json"


_READY_EXAMPLE: Final[dict[str, Any]] = {
    "status": "ok",
    "log": "ok",
    "servers": [
        {"server_id": "files", "state": "starting", "since": "2026-07-28T09:00:00.000Z"},
        {"server_id": "pay", "state": "down", "since": "2026-07-28T09:00:00.000Z", "reason": "Connection refused"},
    ],
}


def _servers_missing(services: Services) -> list[dict[str, str]]:
    """Of all tenants, and in the gateway's own words: the client has not authenticated."""
    missing = []
    for server in services.registry.servers():
        status = server.status
        if not status.is_callable:
            reason = {"reason": status.failure.reason} if status.failure is not None else {}
            missing.append({"server_id": server.server_id, "state": status.state, "since": status.since} | reason)
    return missing


class Readiness:
    """Whether the store answers and this executor can own traces. Looked up at most every so often, however often
    it is asked: the question needs no authentication, and must not be a way to keep the store busy."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._looking: asyncio.Task[TgaError | None] | None = None
        self._found: TgaError | None = None
        self._believed_until = 0.0

    async def verify(self) -> None:
        """Raise what stands in the way."""
        if self._services.stopping.is_set():
            raise ShuttingDown("the gateway is stopping")
        if time.monotonic() >= self._believed_until:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        if self._found is not None:
            raise self._found.with_traceback(None)  # one that stays would keep the frames of everyone who asked

    async def _look(self) -> TgaError | None:
        try:
            self._found = None if self._services.store is None else self._services.store.fault
            if self._found is None:
                async with asyncio.timeout(READY_CHECK_MS / 1000):
                    self._services.traces.executor_id()
                    await self._services.sessions.fetch("SELECT FROM tga.heads LIMIT 1")
                self._found = self._services.log.fault
        except TgaError as error:
            self._found = (self._services.store and self._services.store.fault) or error  # which says more, by now
        except TimeoutError:
            self._found = StoreUnavailable("the store did not answer in time")
        finally:
            self._believed_until = time.monotonic() + READY_BELIEVED_MS / 1000
            self._looking = None
        return self._found


def router(services: Services) -> APIRouter:
    made, readiness = APIRouter(), Readiness(services)
    fine = {"content": {_JSON: {"example": {"status": "ok"}}}}
    broken = (errors.InputMalformed, errors.RequestTimeout, errors.HeadersTooLarge)

    @made.get(
        "/healthz",
        summary="Is the process alive",
        tags=["health"],
        response_class=Response,
        responses={200: {"description": "It is.", **fine}, **documented_alone(*broken)},
    )
    async def healthz() -> Response:
        return Response(b'{"status":"ok"}', media_type=_JSON)

    @made.get(
        "/readyz",
        summary="Can it take calls",
        tags=["health"],
        response_class=Response,
        responses={
            200: {
                "description": "It can: the store answers. `log` is not `ok` when calls are recorded but not proven: "
                "`stalled` while a transaction that does not end keeps entries out of the log, `failing` while this "
                "gateway can sign or follow no head, `unlogged` when entries were put into the tables behind its back. "
                "`reason` says why; the gateway's own log says more. `servers` are the tool servers that cannot be "
                "called now, if there are any: those that are still starting and those that are down, since when and "
                "why. Others can be called, so this is no reason not to be ready. `processes`, where several serve the "
                "port: which one has answered, of how many, and how many of them take requests.",
                "content": {_JSON: {"example": _READY_EXAMPLE}},
            },
            **documented_alone(*broken, errors.StoreUnavailable, errors.ShuttingDown, errors.LogForked),
        },
    )
    async def readyz() -> Response:
        try:
            await readiness.verify()
        except TgaError as error:
            return problem(error)
        log = services.log.condition
        said: dict[str, Any] = {"status": "ok", "log": log.state}
        if log.reason is not None:
            said["reason"] = log.reason
        if processes := services.processes.shown():
            said["processes"] = processes
        if missing := _servers_missing(services):
            said["servers"] = missing
        return Response(orjson.dumps(said), media_type=_JSON)

    return made
