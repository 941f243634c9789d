"""Whatever is asked, reading answers with a page or with a problem that names what is wrong."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.core.errors import InputMalformed
from app.domain.ledger.queries import FeedPosition
from app.edge.cursors import ListKind, feed_cursor, feed_position, list_cursor, list_position
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.invariants.plans import plan_of
from tests.patience import HANG_S
from tests.traces import completed_trace, trace_id

KINDS: tuple[ListKind, ...] = ("traces", "approvals")
ONE = f"/v1/traces/{trace_id(1)}"
LISTS = ["/v1/traces", "/v1/approvals", "/v1/events", f"{ONE}/entries"]
ROUTES = [*LISTS, ONE, f"{ONE}/events", "/v1/servers", "/v1/tools"]


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        await opened.append(*(plan_of(completed_trace(n)) for n in range(3)))
        yield opened


async def refused(front: Front, path: str, **headers: str) -> str:
    """What a 400 says is wrong."""
    status, document, raw = await front.get(path, **headers)
    assert (status, document["code"]) == (400, "INPUT_MALFORMED"), (path, raw)
    return f"{document['detail']} {document.get('found', '')}"


async def test_a_parameter_that_the_route_does_not_have_is_named(front: Front) -> None:
    for route in ROUTES:
        assert "colour" in await refused(front, f"{route}?colour=red")
        for query in ("a", "limit", "&", "limit=%ff", "limit=1;2", "%00=1", "&".join(f"p{n}=1" for n in range(100))):
            await refused(front, f"{route}?{query}")
    for route in LISTS:
        assert "limit is repeated" in await refused(front, f"{route}?limit=1&limit=1")


async def test_a_limit_is_a_number_within_bounds(front: Front) -> None:
    for route in LISTS:
        for limit in ("0", "201", "-1", "1.0", "1e1", "", "+5", "%20" + "5", "٣", "9" * 5000, "0x10", "05"):
            assert "limit" in await refused(front, f"{route}?limit={quote(limit, safe='%')}")
        for limit in ("1", "200"):
            assert (await front.get(f"{route}?limit={limit}"))[0] == 200


async def test_filters_are_names_and_states(front: Front) -> None:
    for query in (
        "state=completed",
        "state=",
        "state=COMPLETED%20",
        "server_id=",
        "tool_name=a%20b",
        "principal_id=%C3%BC",
    ):
        assert query.partition("=")[0] in await refused(front, f"/v1/traces?{query}")
    assert "server_id" in await refused(front, f"/v1/tools?server_id={'x' * 129}")


async def test_a_cursor_is_one_that_this_list_gave(front: Front) -> None:
    traces = (await front.page("/v1/traces?limit=1"))["next"]
    feed = (await front.page("/v1/events?limit=1"))["next"]
    approvals = list_cursor("approvals", trace_id(1))
    assert traces
    for bad in (
        feed,
        approvals,
        traces + "=",
        traces[:-1],
        traces + "A",
        "",
        "%00",
        "Zg",
        "z" * 5000,
        "dA",
        "t",
        "./..",
    ):
        await refused(front, f"/v1/traces?cursor={bad}")
    for bad in (traces, approvals, feed + "=", "", "ZjEuOTk5OTk", "f0.0"):
        await refused(front, f"/v1/events?after={bad}")
        await refused(front, "/v1/events", Accept="text/event-stream", **{"Last-Event-ID": str(bad)})
    for bad in (traces, feed):
        await refused(front, f"/v1/approvals?cursor={bad}")


async def test_a_sequence_number_is_a_number_that_the_trace_has_reached(front: Front) -> None:
    for bad in ("-1", "x", "1.5", "9007199254740993", "1" * 400, ""):
        await refused(front, f"{ONE}/entries?after_seq={bad}")
        await refused(front, f"{ONE}/events?after_seq={bad}")
        await refused(front, f"{ONE}/events", **{"Last-Event-ID": bad})
    await refused(front, f"{ONE}/events", **{"Last-Event-ID": "5"})
    assert (await front.page(f"{ONE}/entries?after_seq=9007199254740991"))["items"] == []


async def test_an_id_that_is_none_is_not_found(front: Front) -> None:
    for bad in (
        "x",
        trace_id(1).upper(),
        f"{trace_id(1)}0",
        "%00",
        "%F0%9F%92%A9",
        "0" * 4000,
        trace_id(1).replace("-", ""),
    ):
        for suffix in ("", "/entries", "/events"):
            status, document, _ = await front.get(f"/v1/traces/{bad}{suffix}")
            assert (status, document["code"]) == (404, "TRACE_NOT_FOUND")


CHARACTERS = st.characters(min_codepoint=0x21, max_codepoint=0x7E, exclude_characters="#")
PIECES = st.one_of(
    st.sampled_from(["limit", "cursor", "after", "state", "server_id", "after_seq", "=", "&", "%", "%00", "%ff", "+"]),
    st.text(CHARACTERS, max_size=12),
    st.integers(-(2**70), 2**70).map(str),
)


async def test_no_query_is_answered_with_500(front: Front) -> None:
    """Bytes on the wire: an HTTP client would correct them."""
    seen: set[int] = set()

    @settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(
        route=st.sampled_from(ROUTES),
        pieces=st.lists(PIECES, max_size=8),
        last=st.none() | st.text(CHARACTERS, max_size=8),
    )
    @example(route="/v1/events", pieces=["after=ZjE4NDQ2NzQ0MDczNzA5NTUxNjE2LjA"], last=None)
    @example(route="/v1/events", pieces=["after=ZjE4NDQ2NzQ0MDczNzA5NTUxNjE1LjE2Mzg0"], last=None)
    def ask(route: str, pieces: list[str], last: str | None) -> None:
        raw = f"GET {route}?{''.join(pieces)} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer auditor\r\n"
        if last is not None:
            raw += f"Last-Event-ID: {last}\r\n"
        asked.append(f"{raw}Connection: close\r\n\r\n".encode())

    asked: list[bytes] = []
    ask()
    for raw in asked:
        reader, writer = await asyncio.open_connection("127.0.0.1", front.port)
        writer.write(raw)
        async with asyncio.timeout(HANG_S):
            head = await reader.readline()
        writer.close()
        seen.add(int(head.split()[1]))
    assert seen <= {200, 204, 400}, seen
    assert 400 in seen


@given(st.text(max_size=40) | st.from_regex(r"[A-Za-z0-9_-]{1,40}", fullmatch=True))
def test_any_text_is_refused_or_is_a_cursor_in_its_one_spelling(text: str) -> None:
    with contextlib.suppress(InputMalformed):
        assert feed_cursor(feed_position(text)) == text
    for kind in KINDS:
        with contextlib.suppress(InputMalformed):
            assert list_cursor(kind, list_position(kind, text)) == text


@given(st.integers(0, 2**64 - 1), st.integers(0, 16_384))
def test_a_feed_cursor_comes_back_as_it_was(xid: int, taken: int) -> None:
    cursor = feed_cursor(FeedPosition(xid, taken))
    assert feed_position(cursor) == FeedPosition(xid, taken)
    for other in KINDS:
        with pytest.raises(InputMalformed):
            list_position(other, cursor)


@given(st.integers(0, 10_000), st.integers(1, 36))
def test_a_list_cursor_comes_back_as_it_was(n: int, length: int) -> None:
    position = trace_id(n)[:length]
    assert list_position("traces", list_cursor("traces", position)) == position
    for among in (f"{n}.{length}.", f"{n}.{length}.3:2.1", f"never.{length}.1", f"never.{n}."):
        assert list_position("approvals", list_cursor("approvals", among)) == among
