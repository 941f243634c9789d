"""A request whose head is that of the one before it is not parsed again: it means what the parser would make of it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import pytest
import uvicorn
from hypothesis import event, given
from hypothesis import strategies as st
from starlette.types import Receive, Scope, Send
from uvicorn.server import ServerState

from app.core.limits import KNOWN_HEAD_BYTES_MAX, KNOWN_HEAD_TRIES, KNOWN_REQUEST_BYTES_MAX
from app.edge.answers import send_json
from app.edge.body import ClientGone, read_bytes
from app.edge.protocol import CONNECTION, TRANSPORT, BoundedProtocol

HEAD: Final = b"POST /v1/tool-calls HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n\r\n"
TURNS: Final = 10  # of the loop: the application waits for nothing but the client
AFTER: Final = b"POST /a HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\nX-After: %d\r\n\r\n"


class Parsing(BoundedProtocol):
    """Parses every head anew."""

    def _is_between_requests(self) -> bool:
        return False


class Socket:
    """The client's side: what was written, and what the protocol asked of its transport."""

    def __init__(self) -> None:
        self.written = b""
        self.closing = False
        self.pauses = 0

    def write(self, data: bytes) -> None:
        self.written += data

    def close(self) -> None:
        self.closing = True

    abort = write_eof = close

    def is_closing(self) -> bool:
        return self.closing

    def can_write_eof(self) -> bool:
        return True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return default

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        self.pauses += 1

    def resume_reading(self) -> None:
        pass


class Conversation:
    """One connection, and what the application was asked on it."""

    def __init__(self, protocol: type[BoundedProtocol], loop: asyncio.AbstractEventLoop) -> None:
        self.asked: list[tuple[dict[str, Any], bytes]] = []
        config = uvicorn.Config(
            self._app,
            interface="asgi3",
            http=protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
        )
        config.load()
        self.state = ServerState()
        self.protocol = protocol(config=config, server_state=self.state, app_state={}, _loop=loop)
        self.known = 0
        begin_known = self.protocol._begin_known

        def counted(*arguments: Any) -> None:
            self.known += 1
            begin_known(*arguments)

        self.protocol._begin_known = counted  # type: ignore[method-assign, assignment]
        self.socket = Socket()
        self.protocol.connection_made(self.socket)  # type: ignore[arg-type]

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        told = {name: value for name, value in scope.items() if not callable(value)}
        assert told.pop(TRANSPORT) is self.socket
        assert told.pop(CONNECTION) is self.protocol
        told["headers"] = list(told["headers"])
        scope["headers"].append((b"x-left-here", b"1"))  # the next request does not see what this one changed
        scope["left-here"] = 1
        try:
            body = await read_bytes(scope, receive)
        except ClientGone:  # the conversation ends in the middle of a request
            return
        self.asked.append((told, body))
        await send_json(scope, send, 200, b'{"path":"%b","size":%d}' % (scope["raw_path"], len(body)))

    async def say(self, pieces: Sequence[bytes], turns: Sequence[int]) -> None:
        """`turns`: of the loop, after each piece; then as many as the application needs."""
        for piece, pause in zip(pieces, turns, strict=True):
            if not self.socket.closing:
                self.protocol.data_received(piece)
            for _ in range(pause):
                await asyncio.sleep(0)
        for _ in range(TURNS * len(pieces)):
            await asyncio.sleep(0)

    async def end(self) -> None:
        self.socket.closing = True
        self.protocol.connection_lost(None)
        await asyncio.gather(*self.state.tasks)


async def both(pieces: Sequence[bytes], turns: Sequence[int] | None = None) -> tuple[Conversation, Conversation]:
    loop = asyncio.get_running_loop()
    known, parsed = Conversation(BoundedProtocol, loop), Conversation(Parsing, loop)
    for one in (known, parsed):
        await one.say(pieces, turns or [TURNS] * len(pieces))
    assert known.asked == parsed.asked
    assert known.socket.written == parsed.socket.written
    assert known.socket.closing == parsed.socket.closing
    assert known.state.total_requests == parsed.state.total_requests
    assert (known.protocol._arrival is None) == (parsed.protocol._arrival is None)  # the time to arrive
    assert parsed.known == 0
    for one in (known, parsed):
        await one.end()
    return known, parsed


def request(body: bytes) -> bytes:
    return HEAD % len(body) + body


@pytest.mark.asyncio
async def test_the_second_request_with_the_same_head_is_known_whatever_its_length() -> None:
    bodies = [b"{}", b"{}", b'{"a":1}', b"x" * 1000, b""]
    known, _ = await both([request(body) for body in bodies])
    assert [body for _, body in known.asked] == bodies
    assert known.known == len(bodies) - 1
    lengths = [dict(told["headers"])[b"content-length"] for told, _ in known.asked]
    assert lengths == [b"%d" % len(body) for body in bodies]


UNKNOWN: Final = {
    "more than it says": [request(b"{}"), request(b"{}") + request(b"[]"), request(b"{}")],
    "in two pieces": [request(b"{}"), HEAD % 2, b"{}", request(b"[1]")],
    "cut in the middle of its head": [request(b"{}"), request(b"{}")[:20], request(b"{}")[20:]],
    "a length of another kind": [request(b"{}"), HEAD.replace(b"%d", b"+2") + b"{}"],
    "a length with spaces": [request(b"{}"), HEAD.replace(b"%d", b"2 ") + b"{}"],
    "a length that is too long": [request(b"{}"), HEAD.replace(b"%d", b"00000000002") + b"{}"],
    "no length": [request(b"{}"), HEAD.replace(b"%d", b"") + b"{}"],
    "two lengths": [request(b"{}"), HEAD.replace(b"%d", b"2\r\nContent-Length: 3") + b"{}"],
    "a header more": [request(b"{}"), HEAD.replace(b"%d", b"2\r\nX: 1") + b"{}"],
    "another case": [request(b"{}"), request(b"{}").replace(b"Host", b"host")],
    "another path": [request(b"{}"), request(b"{}").replace(b"/v1/tool-calls", b"/v1/tool-call5")],
    "another key": [request(b"{}"), request(b"{}").replace(b"Bearer k", b"Bearer j")],
    "empty lines before it": [request(b"{}"), b"\r\n" + request(b"{}")],
    "another header after its length": [AFTER % (2, 1) + b"{}", AFTER % (2, 2) + b"{}"],
    "empty lines after it": [request(b"{}") + b"\r\n", request(b"{}") + b"[]", request(b"{}") + b"\r\n"],
    "empty lines between": [request(b"{}"), b"\r\n", request(b"{}")],
    "the beginning of another before it": [request(b"{}"), b"POST /v1", request(b"{}")],
    "the rest of one that came in two pieces": [b"PO", request(b"{}")[2:], request(b"{}")[2:]],
    "nothing after the head that says there is": [request(b"{}"), HEAD % 2],
}


@pytest.mark.asyncio
@pytest.mark.parametrize("what", UNKNOWN)
async def test_what_differs_from_the_known_head_is_parsed(what: str) -> None:
    await both(UNKNOWN[what])


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "head",
    [
        HEAD.replace(b"HTTP/1.1", b"HTTP/1.0"),
        HEAD.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"),
        HEAD.replace(b"\r\n\r\n", b"\r\nConnection: keep-alive\r\n\r\n"),
        HEAD.replace(b"\r\n\r\n", b"\r\nExpect: 100-continue\r\n\r\n"),
        HEAD.replace(b"\r\n\r\n", b"\r\nUpgrade: h2c\r\n\r\n"),
        HEAD.replace(b"\r\n\r\n", b"\r\nX-Long: " + b"a" * KNOWN_HEAD_BYTES_MAX + b"\r\n\r\n"),
        b"GET /v1/traces HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
    ids=["1.0", "close", "keep-alive", "expect", "upgrade", "long", "no length"],
)
async def test_heads_that_say_more_than_a_length_are_never_known(head: bytes) -> None:
    message = head % 2 + b"{}" if b"%d" in head else head
    known, _ = await both([message] * 3)
    assert known.known == 0


@pytest.mark.asyncio
async def test_a_body_in_chunks_is_never_known() -> None:
    chunked = b"POST /a HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    known, _ = await both([chunked, chunked, request(b"{}"), chunked])
    assert known.known == 0
    assert [body for _, body in known.asked] == [b"{}"] * 4


@pytest.mark.asyncio
async def test_a_long_request_is_parsed_although_its_head_is_known() -> None:
    bodies = [b"{}", b"x" * KNOWN_REQUEST_BYTES_MAX, b"{}"]
    known, _ = await both([request(body) for body in bodies])
    assert [len(body) for _, body in known.asked] == [len(body) for body in bodies]
    assert known.known == 1


@pytest.mark.asyncio
async def test_a_client_whose_heads_differ_is_not_looked_at_for_ever() -> None:
    heads = [request(b"{}").replace(b"/v1/", b"/v%d/" % number) for number in range(KNOWN_HEAD_TRIES + 2)]
    known, _ = await both([*heads, *[heads[-1]] * 3])
    assert known.known == 0
    # One that is known gives the tries back.
    known, _ = await both([head for head in heads for _ in range(2)])
    assert known.known == len(heads)


@pytest.mark.asyncio
async def test_a_known_head_waits_for_the_answer_before_it() -> None:
    known, _ = await both([request(b"{}"), request(b"[1]"), request(b"[2]"), request(b"[3]")], [TURNS, 0, 0, TURNS])
    assert [body for _, body in known.asked] == [b"{}", b"[1]", b"[2]", b"[3]"]
    assert known.known == 1


_LENGTHS = st.sampled_from([b"%d", b"%d", b"%d", b" %d", b"%d ", b"0%d", b"+%d", b"%d\r\nContent-Length: %d", b"%dx"])
_NAMES = st.sampled_from(
    [b"Content-Length", b"Content-Length", b"content-length", b"CONTENT-LENGTH", b"Content-Length "]
)
_EXTRA = st.sampled_from(
    [
        b"",
        b"",
        b"",
        b"X: 1\r\n",
        b"X: content-length: 7\r\n",
        b" folded: 1\r\n",
        b"Connection: close\r\n",
        b"Host: b\r\n",
        b"\r\n",
    ]
)
_ENDS = st.sampled_from([b"\r\n", b"\r\n", b"\r\n", b"\n"])
_BODIES = st.sampled_from(
    [b"", b"{}", b'{"a":1}', b"\r\n\r\n", b"POST / HTTP/1.1\r\nHost: a\r\n\r\n", b"0123456789" * 3]
)


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    body, lie = draw(_BODIES), draw(st.sampled_from([0, 0, 0, 0, 1, -1]))
    length = draw(_LENGTHS).replace(b"%d", b"%d" % max(0, len(body) + lie))
    target = draw(st.sampled_from([b"/a", b"/a", b"/b?c=%20"]))
    before, after, end = draw(_EXTRA), draw(_EXTRA), draw(_ENDS)
    head = b"POST %b HTTP/1.1%bHost: a\r\n%b%b: %b%b%b\r\n" % (target, end, before, draw(_NAMES), length, end, after)
    return head + body


@given(st.lists(messages(), min_size=1, max_size=3), st.lists(st.integers(0, 2), max_size=8), st.data())
def test_any_conversation_is_the_same_as_parsed(kinds: list[bytes], order: list[int], data: st.DataObject) -> None:
    """The same few messages again and again, sometimes cut, sometimes two at once: with known heads and without."""
    stream = [kinds[0], *(kinds[number % len(kinds)] for number in order)]
    pieces: list[bytes] = []
    for message in stream:
        how = data.draw(st.sampled_from(["whole", "whole", "whole", "cut", "joined"]))
        if how == "cut":
            at = data.draw(st.integers(0, len(message)))
            pieces += [message[:at], message[at:]]
        elif how == "joined" and pieces:
            pieces[-1] += message
        else:
            pieces.append(message)

    pieces = [piece for piece in pieces if piece]
    turns = data.draw(st.lists(st.sampled_from([0, 1, TURNS, TURNS]), min_size=len(pieces), max_size=len(pieces)))

    async def talk() -> None:
        known, _ = await both(pieces, turns)
        event(f"known: {min(known.known, 3)}")

    asyncio.run(talk())
