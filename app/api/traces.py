"""Reading traces: the list, one trace with its artifacts, its entries."""

from __future__ import annotations

from typing import Any

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import EntryPage, TraceDocument, TracePage
from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import (
    ChecksumMismatch,
    InputMalformed,
    InputTooLarge,
    InvalidTransition,
    RecoveryFailed,
    SchemaViolation,
    SequenceGap,
    TgaError,
    TraceErased,
    TraceNotFound,
)
from app.core.limits import LIST_ENTRIES_MAX
from app.domain.tga.documents import ActionRequest, TraceId
from app.domain.tga.ports import StoredTrace
from app.domain.tga.replay import LogRecord, record_from_bytes, verify_next
from app.domain.tga.transitions import TRACE
from app.edge.entries import entry_items
from app.edge.parameters import (
    documented_parameters,
    limit_in,
    own_name,
    parameters,
    sequence_in,
    trace_seen_by,
)
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.services import Services
from app.edge.trace_listing import TRACE_FILTERS, load_traces, trace_filters
from app.postgres.listing import load_head

UNSOUND = (ChecksumMismatch, SequenceGap, InvalidTransition, RecoveryFailed)


def json_answer(document: Any) -> Response:
    return Response(orjson.dumps(document), media_type="application/json")


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["traces"])

    @routes.get(
        "/v1/traces",
        operation_id="list_traces",
        summary="List traces, newest first",
        response_model=None,
        responses={200: {"model": TracePage}, **documented()},
        openapi_extra=documented_parameters(*TRACE_FILTERS, "cursor", "limit"),
    )
    async def list_of_traces(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read")
            given = parameters(request, *TRACE_FILTERS, "cursor", "limit")
            filters = trace_filters(services, principal, given)
            items, cursor = await load_traces(
                services, principal, filters, cursor=given.get("cursor"), limit=limit_in(given)
            )
            return json_answer({"items": items, "next": cursor, "scope": scope_of(principal).name})

    @routes.get(
        "/v1/traces/{trace_id}",
        operation_id="get_trace",
        summary="A trace, verified, with its artifacts as recorded",
        response_model=None,
        responses={200: {"model": TraceDocument}, **documented(TraceNotFound, *UNSOUND)},
        openapi_extra=documented_parameters("trace_id"),
    )
    async def one_trace(request: Request) -> Response:
        async with services.admitted(request) as principal:
            trace_id = await trace_seen_by(services, principal, request)
            parameters(request)
            try:
                document = await _loaded(services, trace_id)
            except (SchemaViolation, InputMalformed, InputTooLarge) as error:  # what is stored, not what was asked
                raise ChecksumMismatch(
                    "a stored document cannot be read",
                    found=f"{error.code}: {error.what}",
                    stream=TRACE.stream(trace_id),
                    sequence_number=error.sequence_number,
                ) from None
            return json_answer({**document, "server_id": own_name(principal.tenant, document["server_id"])})

    @routes.get(
        "/v1/traces/{trace_id}/entries",
        operation_id="list_entries",
        summary="A trace's entries and artifacts, byte for byte as they are stored",
        response_model=None,
        responses={200: {"model": EntryPage}, **documented(TraceNotFound, *UNSOUND)},
        openapi_extra=documented_parameters("trace_id", "after_seq", "limit"),
    )
    async def entries_of_trace(request: Request) -> Response:
        async with services.admitted(request) as principal:
            trace_id = await trace_seen_by(services, principal, request)
            page = await load_entries(services, request, TRACE.stream(trace_id))
            if page is None:
                raise TraceNotFound("no such trace")
            return json_answer(page)

    return routes


async def load_entries(services: Services, request: Request, stream: str) -> dict[str, Any] | None:
    """A page of a stream's entries, from where the request says; None when there is no such stream."""
    given = parameters(request, "after_seq", "limit")
    after_seq = sequence_in(request, given)
    page = await services.queries.entries(stream, after_seq=after_seq, limit=limit_in(given))
    if page is None:
        return None
    if not page.items and page.head > after_seq:
        gap = SequenceGap("the head stands further than the log", expected=page.head, found=after_seq)
        raise gap.at(stream=stream)
    last = page.last
    items = entry_items(page.items, after_seq=after_seq)
    return {"items": items, "next": str(last) if last is not None and last < page.head else None}


async def _loaded(services: Services, trace_id: TraceId) -> dict[str, Any]:
    try:
        async with services.read_scheduler.taken():
            stored = await services.traces.load_trace(trace_id)
    except TraceErased:
        return await _erased(services, trace_id)
    return _document(stored)


def _document(stored: StoredTrace) -> dict[str, Any]:
    state = stored.state
    artifacts: dict[str, Any] = dict.fromkeys(TRACE.rule_of)
    principal_id = expires_at = None
    for record in stored.records:
        if isinstance(record.artifact, ActionRequest):
            principal_id, expires_at = record.artifact.principal.principal_id, record.artifact.expires_at
        if record.artifact is not None:
            artifacts[record.entry.artifact_type] = orjson.Fragment(record.artifact.to_bytes())
    return {
        "trace_id": state.trace_id,
        "state": state.state,
        "waiting": stored.waiting,
        "server_id": state.server_id,
        "tool_name": state.tool_name,
        "principal_id": principal_id,
        "idempotency_key": state.idempotency_key,
        "sequence_number": state.sequence_number,
        "entry_digest": state.entry_digest,
        "action_request_digest": state.action_request_digest,
        "tool_call_digest": state.tool_call_digest,
        "tool_call_id": state.tool_call_id,
        "expires_at": expires_at,
        "attempts": [{"attempt": n, "started_at": at} for n, at in enumerate(stored.attempt_times, 2)],
        "artifacts": artifacts,
        "erased": False,
    }


async def _erased(services: Services, trace_id: TraceId) -> dict[str, Any]:
    """What entries and head still say: chain and digests are verified, what the payloads said is gone."""
    head = await load_head(services.sessions, trace_id)
    page = await services.queries.entries(TRACE.stream(trace_id), after_seq=0, limit=LIST_ENTRIES_MAX)
    if head is None or page is None:
        raise TraceNotFound("no such trace")
    place, digests = Head.unborn(TRACE), dict[str, str]()
    for stored in page.items:
        try:
            record = record_from_bytes(stored.entry, None, entry_digest=Digest(stored.entry_digest))
            place = verify_next(place, LogRecord(record.entry, None))
        except TgaError as error:
            raise error.at(stream=stored.stream, sequence_number=stored.sequence_number) from None
        digests[record.entry.artifact_type] = record.entry.artifact_digest
    if (place.sequence_number, place.entry_digest, place.state) != (
        head.sequence_number,
        head.entry_digest,
        head.state,
    ):
        raise SequenceGap("the log does not end where its head stands", expected=head.sequence_number).at(
            stream=TRACE.stream(trace_id)
        )
    return {
        "trace_id": trace_id,
        "state": head.state,
        "waiting": head.waiting,
        "server_id": head.server_id,
        "tool_name": head.tool_name,
        "principal_id": head.principal_id,
        "idempotency_key": head.idempotency_key,
        "sequence_number": head.sequence_number,
        "entry_digest": head.entry_digest,
        "action_request_digest": digests.get("action_request"),
        "tool_call_digest": digests.get("tool_call"),
        "tool_call_id": None,
        "expires_at": head.expires_at,
        "attempts": [],
        "artifacts": None,
        "erased": True,
    }
