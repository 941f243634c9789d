"""Schedules, which start runs at their times; and events, which start what listens to them."""

from __future__ import annotations

import asyncio
import re
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import ScopedPage, Shape
from app.api.openapi import request_body
from app.api.traces import json_answer
from app.config.procedure_schema import verify_against_schema
from app.core import errors
from app.core.errors import ScheduleNotFound
from app.core.limits import PROCEDURE_NAME_CHARS_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Text, Time
from app.domain.runs.scheduling import StoredSchedule
from app.domain.system.documents import CronSpec, IntervalSpec, ProcedureName, Schedule
from app.edge.body import read_body
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, name_in, parameters
from app.edge.permissions import require, require_on, scope_of
from app.edge.problems import document_of, documented
from app.edge.services import Services

Missed = Literal["skip", "one", "all"]
_SCHEDULE_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{PROCEDURE_NAME_CHARS_MAX - 1}}}")
_CRON: Final[dict[str, Any]] = {"type": "cron", "expression": "30 2 * * *", "time_zone": "Europe/Berlin"}
_LISTED: Final[dict[str, Any]] = {
    "name": "nightly",
    "procedure": "report",
    "version": None,
    "spec": _CRON,
    "missed": "one",
    "principal_id": "agent-1",
    "next_at": "2026-01-02T01:30:00.000Z",
    "last_at": "2026-01-01T01:30:00.000Z",
    "last_run_id": "nightly:2026-01-01T01:30:00.000Z",
    "last_error": None,
}


class ScheduleBody(Part):
    """`version`: left out, each run is of the newest program. `missed`: of times at which no gateway ran."""

    procedure: ProcedureName
    version: Name | None = None
    input: Annotated[Any, Field(description="Any JSON value; each run gets it.")] = None
    spec: Annotated[CronSpec | IntervalSpec, Field(discriminator="type")]
    missed: Missed = "one"


class EventBody(Part):
    """The same `event_id` again starts nothing new."""

    event_id: Name
    payload: Annotated[Any, Field(description="Any JSON value: the input of each run.")] = None


class ScheduleItem(Shape):
    name: ProcedureName
    procedure: ProcedureName
    version: Name | None
    spec: CronSpec | IntervalSpec
    missed: Missed
    principal_id: Name = Field(description="Who made it, and as whom its runs are started.")
    next_at: Time | None = Field(description="Null: it is due never again.")
    last_at: Time | None = Field(description="The last time that it was due, and what became of it:")
    last_run_id: str | None
    last_error: Text | None


class SchedulePage(ScopedPage):
    model_config = ConfigDict(json_schema_extra={"example": {"items": [_LISTED], "next": None, "scope": "tenant"}})
    items: list[ScheduleItem]


class ScheduleDocument(ScheduleItem):
    model_config = ConfigDict(json_schema_extra={"example": {**_LISTED, "input": {"day": 1}}})
    input: Any


class RemovedSchedule(Shape):
    model_config = ConfigDict(json_schema_extra={"example": {"name": "nightly", "removed": True}})
    name: ProcedureName
    removed: Literal[True]


class TriggeredRun(Shape):
    procedure: ProcedureName
    run_id: str
    is_new: bool = Field(description="False: this event had started it before.")
    problem: dict[str, Any] | None = Field(description="Why the event did not start this procedure.")


class TriggeredRuns(Shape):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                "event": "customer.signed",
                "event_id": "evt-17",
                "runs": [{"procedure": "onboard", "run_id": "onboard:evt-17", "is_new": True, "problem": None}],
            }
        }
    )
    event: Name
    event_id: Name
    runs: list[TriggeredRun]


_STORED: Final = (
    errors.ConcurrentExecution,
    errors.ChecksumMismatch,
    errors.SequenceGap,
    errors.RecoveryFailed,
    errors.LockAcquireFailed,
    errors.StoreBusy,
    errors.OutcomeUnknown,
)
_STARTED: Final = (
    errors.StartDenied,
    errors.ProcedureNotFound,
    errors.ArgumentsInvalid,
    errors.RunIdTaken,
    errors.RunEnded,
    errors.RunValueTooLarge,
)


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["schedules"])
    _add_reading(routes, services)
    _add_writing(routes, services)
    return routes


def _add_reading(routes: APIRouter, services: Services) -> None:
    @routes.get(
        "/v1/schedules",
        operation_id="list_schedules",
        summary="List schedules by name, with when each is due next",
        response_model=None,
        responses={200: {"model": SchedulePage}, **documented()},
        openapi_extra=documented_parameters("cursor", "limit"),
    )
    async def list_of_schedules(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_schedule")
            given = parameters(request, "cursor", "limit")
            scope, limit = scope_of(principal), limit_in(given)
            after = list_position("schedules", given.get("cursor"))
            found = await services.schedules.page(
                principal.tenant, principal_id=scope.principal_id, after=after, limit=limit + 1
            )
            cursor = list_cursor("schedules", found[limit - 1].name if len(found) > limit else None)
            return json_answer({"items": [_item(one) for one in found[:limit]], "next": cursor, "scope": scope.name})

    @routes.get(
        "/v1/schedules/{name}",
        operation_id="get_schedule",
        summary="One schedule, with the input of its runs",
        response_model=None,
        responses={200: {"model": ScheduleDocument}, **documented(errors.ScheduleNotFound, *_STORED)},
        openapi_extra=documented_parameters(in_path=("name",)),
    )
    async def one_schedule(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_schedule")
            parameters(request)
            stored = await _seen(services, principal, request.path_params["name"])
            recorded = await services.schedules.load_recorded(stored)
            return json_answer({**_item(stored), "input": recorded.input})


def _add_writing(routes: APIRouter, services: Services) -> None:
    @routes.put(
        "/v1/schedules/{name}",
        operation_id="set_schedule",
        summary="Make a schedule, or change it; the same again changes nothing",
        response_model=None,
        responses={
            200: {"model": ScheduleDocument},
            **documented(errors.SchemaViolation, errors.ProcedureNotFound, errors.ScheduleLimitReached, *_STORED),
        },
        openapi_extra=request_body(ScheduleBody, {"procedure": "report", "spec": _CRON}, in_path=("name",)),
    )
    async def set_schedule(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "write_schedule")
            parameters(request)
            body = await read_body(request.scope, request.receive, ScheduleBody)
            schedule = Schedule.made(
                system_id=principal.tenant,
                recorded_at=services.clock.now(),
                recorded_by=principal.principal_id,
                name=request.path_params["name"],
                procedure=body.procedure,
                version=body.version,
                input=body.input,
                spec=body.spec,
                missed=body.missed,
                principal=principal,
            )
            program = await services.procedures.find(principal.tenant, body.procedure, version=body.version)
            await asyncio.to_thread(verify_against_schema, "the input", body.input, program.input_schema)
            stored = await services.schedules.set(
                schedule, verify_owner=lambda owner_id: require_on(principal, "write_schedule", owner_id=owner_id)
            )
            return json_answer({**_item(stored), "input": body.input})

    @routes.delete(
        "/v1/schedules/{name}",
        operation_id="remove_schedule",
        summary="Remove a schedule; runs that it has started go on",
        response_model=None,
        responses={200: {"model": RemovedSchedule}, **documented(errors.ScheduleNotFound, *_STORED)},
        openapi_extra=documented_parameters(in_path=("name",)),
    )
    async def remove_schedule(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "write_schedule")
            parameters(request)
            stored = await _seen(services, principal, request.path_params["name"])
            is_there = await services.schedules.remove(
                principal.tenant,
                stored.name,
                removed_by=principal.principal_id,
                verify_owner=lambda owner_id: require_on(principal, "write_schedule", owner_id=owner_id),
            )
            if not is_there:
                raise ScheduleNotFound(f"there is no schedule {stored.name}")
            return json_answer({"name": stored.name, "removed": True})

    @routes.post(
        "/v1/triggers/{name}",
        operation_id="send_event",
        summary="Send an event: it starts a run of each procedure that listens to its name, once for each id",
        response_model=None,
        responses={200: {"model": TriggeredRuns}, **documented(errors.SchemaViolation, *_STARTED, *_STORED)},
        openapi_extra=request_body(EventBody, {"event_id": "evt-17", "payload": {"email": "a@b.c"}}, in_path=("name",)),
    )
    async def send_event(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "trigger")
            parameters(request)
            event = name_in(request.path_params, "name") or ""
            body = await read_body(request.scope, request.receive, EventBody)
            sent = await services.triggers.send(principal, event, body.event_id, body.payload)
            runs = [
                {
                    "procedure": one.procedure,
                    "run_id": one.run_id,
                    "is_new": one.is_new,
                    "problem": None if one.error is None else document_of(one.error),
                }
                for one in sent
            ]
            return json_answer({"event": event, "event_id": body.event_id, "runs": runs})


async def _seen(services: Services, principal: Principal, name: str) -> StoredSchedule:
    """The schedule, if this principal may see it; a foreign one is as good as none."""
    if _SCHEDULE_NAME.fullmatch(name) is None:  # the store cannot even be asked for every text
        raise ScheduleNotFound("no schedule has such a name")
    stored = await services.schedules.load(principal.tenant, name)
    if scope_of(principal).principal_id not in (None, stored.principal_id):
        raise ScheduleNotFound(f"there is no schedule {name}")
    return stored


def _item(stored: StoredSchedule) -> dict[str, Any]:
    told = stored._asdict()
    return {name: told[name] for name in ScheduleItem.model_fields}
