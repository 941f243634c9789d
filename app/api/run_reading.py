"""Reading runs as streams: the list, and a run's entries. Its events and its receipt stand with those of traces."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.run_documents import RunEntryPage, RunPage
from app.api.traces import UNSOUND, json_answer, load_entries
from app.config import qualify
from app.core.errors import RunNotFound
from app.domain.runs.engine.viewing import STATES_OF_STATUS, notice_of, status_of
from app.domain.runs.transitions import RUN
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import (
    documented_parameters,
    limit_in,
    milliseconds_in,
    name_in,
    newest_in,
    parameters,
    prefix_in,
    status_in,
)
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.runs import own_run_id, run_seen_by
from app.edge.services import Services
from app.postgres.run_lists import ListedJournal, ListedRun, list_journals, list_runs

_FILTERS: Final = ("status", "procedure", "prefix", "principal_id", "since", "until", "newest", "cursor", "limit")


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["runs"])

    @routes.get(
        "/v1/runs",
        operation_id="list_runs",
        summary="List runs, newest first",
        response_model=None,
        responses={200: {"model": RunPage}, **documented()},
        openapi_extra=documented_parameters(*_FILTERS),
    )
    async def list_of_runs(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_run")
            given = parameters(request, *_FILTERS)
            status = status_in(given)
            page = await list_runs(
                services.sessions,
                scope_of(principal),
                states=None if status is None else STATES_OF_STATUS[status],
                is_waiting_for_person=status == "waiting_for_human",
                procedure=name_in(given, "procedure"),
                prefix=qualify(principal.tenant, prefix_in(given)),
                principal_id=name_in(given, "principal_id"),
                since_ms=milliseconds_in(given, "since"),
                until_ms=milliseconds_in(given, "until"),
                before=list_position("runs", given.get("cursor")),
                limit=limit_in(given),
                worker_seen_ms=services.runs.ports.lease_ms,
            )
            newest = newest_in(given)
            found = [item.run_id for item in page.items]
            journals = await list_journals(services.sessions, found, newest=newest) if newest and found else {}
            items = [_listed(item, principal.tenant, journals.get(item.run_id)) for item in page.items]
            cursor = list_cursor("runs", page.next)
            return json_answer({"items": items, "next": cursor, "scope": scope_of(principal).name})

    @routes.get(
        "/v1/runs/{run_id}/entries",
        operation_id="list_run_entries",
        summary="A run's entries and artifacts, byte for byte as they are stored",
        response_model=None,
        responses={200: {"model": RunEntryPage}, **documented(RunNotFound, *UNSOUND)},
        openapi_extra=documented_parameters("run_id", "after_seq", "limit"),
    )
    async def entries_of_run(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            page = await load_entries(services, request, RUN.stream(run_id))
            if page is None:
                raise RunNotFound("no such run")
            return json_answer(page)

    return routes


def _listed(run: ListedRun, tenant: str, journal: ListedJournal | None) -> dict[str, Any]:
    item = asdict(run)
    has_worker = item.pop("has_worker")
    return {
        **item,
        "run_id": own_run_id(tenant, run.run_id),
        "status": status_of(run.state, run.waiting),
        "notice": notice_of(run.state, run.procedure, run.version, has_worker=has_worker),
        "journal": None if journal is None else asdict(journal),
    }
