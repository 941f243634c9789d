"""Following a trace or a run, and following the ledger."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import FeedPage
from app.api.traces import UNSOUND, json_answer
from app.core.errors import InputMalformed, RunNotFound, SequenceGap, StoreUnfit, TgaError, TraceNotFound
from app.core.limits import EVENTS_HEARTBEAT_MS, EVENTS_PAGE_BYTES_MAX, EVENTS_SEND_WAIT_MS, LIST_ITEMS_MAX
from app.domain.identity import Principal
from app.domain.ledger.queries import EntryPage, Feed, FeedPosition, StreamQueries, Visibility
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.edge.cursors import feed_cursor, feed_position
from app.edge.entries import entry_items, feed_item
from app.edge.parameters import documented_parameters, limit_in, parameters, sequence_in, trace_seen_by
from app.edge.permissions import require, scope_of
from app.edge.problems import documented
from app.edge.runs import run_seen_by
from app.edge.services import Services, header_of
from app.edge.streaming import MEDIA_TYPE, Events, EventStream, event, mark
from app.edge.watching import FeedWatch, StreamWatch

_ENTRY: Final = "entry"
EVENT_SCHEMA: Final[dict[str, Any]] = {
    "type": "object",
    "description": "Of one event of the stream, not of its whole text.",
    "required": ["event", "data"],
    "properties": {
        "id": {"type": "string", "description": "For Last-Event-ID."},
        "event": {"enum": [_ENTRY, "end", "problem"]},
        "data": {"type": "string", "contentMediaType": "application/json"},
    },
}
_FEED: Final[dict[int | str, dict[str, Any]]] = {
    200: {
        "model": FeedPage,
        "description": "A page; or, for `Accept: text/event-stream`, one event `entry` for each item and whatever "
        "comes later, its id a cursor.",
        "content": {
            MEDIA_TYPE: {
                "schema": EVENT_SCHEMA,
                "example": {"id": "Zjc0Mi40", "event": _ENTRY, "data": "an item of the page, as JSON"},
            }
        },
    }
}


def _stream_of(kind: str) -> dict[int | str, dict[str, Any]]:
    return {
        200: {
            "description": "One event `entry` for each entry, its id the sequence number, its data as an item of "
            f"`/v1/{kind}s/{{{kind}_id}}/entries`; after the last entry of a finished {kind} an event `end`. An event "
            "`problem` says why the stream breaks off.",
            "content": {
                MEDIA_TYPE: {
                    "schema": EVENT_SCHEMA,
                    "example": {"event": "end", "data": '{"state":"COMPLETED","sequence_number":4}'},
                }
            },
        },
        204: {"description": f"The {kind} is finished and all its entries were received: nothing is to come back for."},
    }


def router(
    services: Services, *, heartbeat_ms: int = EVENTS_HEARTBEAT_MS, send_wait_ms: int = EVENTS_SEND_WAIT_MS
) -> APIRouter:
    routes = APIRouter(tags=["events"])
    streams, feed = StreamWatch(services.queries), FeedWatch(services.feed)
    times = {"heartbeat_ms": heartbeat_ms, "send_wait_ms": send_wait_ms}

    @routes.get(
        "/v1/traces/{trace_id}/events",
        operation_id="follow_trace",
        summary="Follow a trace as server-sent events, from any entry on",
        response_model=None,
        response_class=Response,  # else the document would promise JSON
        responses={**_stream_of("trace"), **documented(TraceNotFound, *UNSOUND)},
        openapi_extra=documented_parameters("trace_id", "after_seq", "Last-Event-ID"),
    )
    async def events_of_trace(request: Request) -> Response:
        async def opens(principal: Principal) -> Events | None:
            trace_id = await trace_seen_by(services, principal, request)
            return await followed(request, TRACE.stream(trace_id), TraceNotFound("no such trace"))

        return EventStream(services, request, opens, **times)

    @routes.get(
        "/v1/runs/{run_id}/events",
        operation_id="follow_run",
        summary="Follow a run as server-sent events, from any entry on",
        response_model=None,
        response_class=Response,  # else the document would promise JSON
        responses={**_stream_of("run"), **documented(RunNotFound, *UNSOUND)},
        openapi_extra=documented_parameters("run_id", "after_seq", "Last-Event-ID"),
    )
    async def events_of_run(request: Request) -> Response:
        async def opens(principal: Principal) -> Events | None:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            return await followed(request, RUN.stream(run_id), RunNotFound("no such run"))

        return EventStream(services, request, opens, **times)

    async def followed(request: Request, stream: str, missing: TgaError) -> Events | None:
        after_seq = sequence_in(request, parameters(request, "after_seq"))
        page = await _entries(services.queries, stream, after_seq)
        if page is None:
            raise missing
        if after_seq > page.head:
            raise InputMalformed("there are not so many entries", expected=f"at most {page.head}", found=after_seq)
        if after_seq == page.head and not page.is_open:
            return None
        return _stream_events(services.queries, streams, stream, page, after_seq)

    @routes.get(
        "/v1/events",
        operation_id="list_events",
        summary="Every entry that one may see, in the order of the ledger, from any place on",
        response_model=None,
        responses={**_FEED, **documented(StoreUnfit)},
        openapi_extra=documented_parameters("after", "limit", "Last-Event-ID"),
    )
    async def events_of_ledger(request: Request) -> Response:
        if _wants_events(request):

            async def opens(principal: Principal) -> Events | None:
                require(principal, "read")
                given = parameters(request, "after", "limit")
                last = header_of(request.scope, b"last-event-id")
                after = feed_position(given.get("after") if last is None else last)
                return _feed_events(services.feed, feed, scope_of(principal), after, limit_in(given))

            return EventStream(services, request, opens, **times)
        async with services.admitted(request) as principal:
            require(principal, "read")
            given = parameters(request, "after", "limit")
            after = feed_position(given.get("after"))
            page = await services.feed.page(scope_of(principal), after=after, limit=limit_in(given))
            items = [feed_item(item.stored) for item in page.items]
            return json_answer({"items": items, "next": feed_cursor(page.next)})

    return routes


async def _stream_events(
    queries: StreamQueries, watch: StreamWatch, stream: str, page: EntryPage, after_seq: int
) -> AsyncGenerator[bytes, None]:
    """From `after_seq` on without gap or repeat: the next entry is always the one after the last that was sent.

    While an event is on its way to a slow client nothing of it is kept here, only what is left of its page.
    """
    with watch.watching(stream, page.head) as watched:
        while True:
            head, end = page.head, None if page.is_open else page.state
            items = deque(entry_items(page.items, after_seq=after_seq))
            del page
            while items:
                after_seq = items[0]["sequence_number"]
                yield event(_ENTRY, items.popleft(), identity=str(after_seq))
            if after_seq >= head:
                if end is not None:
                    yield event("end", {"state": end, "sequence_number": head})
                    return
                shared = await watched.beyond(after_seq)
                if shared is not None:
                    page = shared
                    del shared
                    continue
            read = await _entries(queries, stream, after_seq)
            if read is None or not read.items:
                gap = SequenceGap("the head stands further than the log", expected=head, found=after_seq)
                raise gap.at(stream=stream)
            page = read
            del read


async def _feed_events(
    entries: Feed, watch: FeedWatch, scope: Visibility, after: FeedPosition, limit: int
) -> AsyncGenerator[bytes, None]:
    while True:
        page = await entries.page(scope, after=after, limit=limit, bytes_max=EVENTS_PAGE_BYTES_MAX)
        items, following, is_quiet = deque(page.items), page.next, page.next == after and not page.items
        del page
        while items:
            after = items[0].position
            yield event(_ENTRY, feed_item(items.popleft().stored), identity=feed_cursor(after))
        if is_quiet:
            await watch.beyond(after.xid)
        elif following != after:  # past what this follower may not see: it need not be looked at again
            after = following
            yield mark(feed_cursor(after))


async def _entries(queries: StreamQueries, stream: str, after_seq: int) -> EntryPage | None:
    return await queries.entries(stream, after_seq=after_seq, limit=LIST_ITEMS_MAX, bytes_max=EVENTS_PAGE_BYTES_MAX)


def _wants_events(request: Request) -> bool:
    accepted = ",".join(value for name, value in request.headers.items() if name == "accept").lower()
    return any(media_range.partition(";")[0].strip() == MEDIA_TYPE for media_range in accepted.split(","))
