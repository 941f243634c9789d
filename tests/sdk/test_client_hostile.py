"""Whatever answers, and however: only a TgaError leaves a client, in bounded time; what says "later" is asked later."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conftest import IS_SOAK
from tests.sdk.gateways import KINDS, Subject
from tga_sdk import Client, errors

Answerer = Callable[[bytes], bytes | None]
EFFECT = {"outcome": "SUCCESS", "output": {"encoding": "json", "value": {"ok": 1}}, "error": None, "basis": "answer"}
DONE = {"trace_id": "t-1", "tool_call_id": "c-1", "state": "COMPLETED", "replayed": False, "tool_effect": EFFECT}


class Stranger:
    """A server that answers each request with the bytes that it is told to, then closes. In a thread of its own."""

    def __init__(self) -> None:
        self.answer: Answerer = lambda _: None
        self.requests: list[bytes] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> Stranger:
        self._thread.start()
        starting = asyncio.start_server(self._serve, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(starting, self._loop).result(30)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._server.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError), contextlib.closing(writer):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), 0
            )
            request = head + await reader.readexactly(length)
            self.requests.append(request)
            answer = self.answer(request)
            if answer is not None:
                writer.write(answer)
                await writer.drain()


@pytest.fixture(scope="module")
def stranger() -> Iterator[Stranger]:
    with Stranger() as made:
        yield made


def http(status: int, body: Any, *headers: str, kind: str = "application/json") -> bytes:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = [f"HTTP/1.1 {status} X", f"Content-Type: {kind}", f"Content-Length: {len(content)}", "Connection: close"]
    return "\r\n".join([*lines, *headers, "", ""]).encode("latin-1") + content


def problem(status: int, code: str, *headers: str, retryable: bool = True, **more: Any) -> bytes:
    document = {"code": code, "detail": "not now", "remedy": "wait", "retryable": retryable, **more}
    return http(status, document, *headers, kind="application/problem+json")


def in_turn(*answers: bytes | None) -> Answerer:
    """Each once, then the last one for ever."""
    told = itertools.chain(answers, itertools.repeat(answers[-1]))
    return lambda _: next(told)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
WORDS = st.sampled_from(
    [
        "trace_id",
        "state",
        "waiting",
        "tool_effect",
        "code",
        "retryable",
        "items",
        "next",
        "run_id",
        "status",
        "output",
        "procedure",
        "version",
        "tier",
        "value",
        "detail",
        "error",
        "basis",
        "encoding",
        "data",
        "kind",
        "decision",
        "ref",
        "sha256",
        "serializer",
        "artifacts",
        "at",
        "run_state",
    ]
)
NEAR = st.dictionaries(
    WORDS,
    JSON | st.sampled_from(["COMPLETED", "FAILED", "EXECUTING", "completed", "inline", "base64", "supervisor", True]),
    max_size=8,
)
BODIES = (
    st.binary(max_size=60)
    | (JSON | NEAR | st.builds(lambda one, more: {**DONE, **one, "tool_effect": more}, NEAR, NEAR)).map(
        lambda value: json.dumps(value).encode()
    )
    | st.just(b"[" * 100_000)
    | st.just(b'{"items": [' + b"[" * 50_000)
)
ANSWERS = st.binary(max_size=80) | st.builds(
    http,
    st.sampled_from([200, 200, 200, 201, 202, 204, 206])
    | st.sampled_from([400, 401, 403, 404, 409, 422, 429, 500, 503])
    | st.integers(100, 999),
    BODIES,
    st.sampled_from(["X: 1", "Retry-After: 0", "Retry-After: \xb2", "Location: http://[", "Content-Encoding: gzip"]),
    kind=st.sampled_from(["application/json", "application/problem+json", "text/event-stream", "text/html", ""]),
)
ASKED: list[Callable[[Subject], Any]] = [
    lambda one: one.call("bank", "charge", {"amount": 1}, timeout=0.02),
    lambda one: one.call("bank", "charge", {"amount": 1}, timeout=0.02, wait=0.02),
    lambda one: one.tools(),
    lambda one: one.traces(limit=3),
    lambda one: one.approve("t-1", timeout=0.02),
    lambda one: one.start("onboard", {"x": 1}),
    lambda one: one.result("r-1", int, timeout=0.02),
    lambda one: one.checkpoints("r-1"),
    lambda one: one.state("r-1"),
    lambda one: one.delete("r-1"),
    lambda one: one.trigger("x", "y"),
    lambda one: one.receipt("t-1"),
    lambda one: one.followed("events", "t-1"),
]


@pytest.fixture(scope="module")
def impatient(stranger: Stranger) -> Iterator[tuple[asyncio.Runner, list[Subject]]]:
    """Both clients, made once: a new one loads the certificates of the machine."""
    with asyncio.Runner() as runner:
        made = [Subject(kind(stranger.url, "key", give_up_after=0.02)) for kind in KINDS]
        yield runner, made
        for each in made:
            runner.run(each.closed())


async def _error_of(asking: Any) -> errors.TgaError | None:
    try:
        await asyncio.wait_for(asking, 60)
    except errors.TgaError as error:
        return error
    return None


@given(answer=ANSWERS, which=st.integers(0, len(ASKED) - 1), number=st.integers(0, 1))
@settings(max_examples=3_000 if IS_SOAK else 80, deadline=None)
def test_only_a_tga_error_leaves_a_client_whatever_answers(
    impatient: tuple[asyncio.Runner, list[Subject]], stranger: Stranger, answer: bytes, which: int, number: int
) -> None:
    runner, subjects = impatient
    stranger.answer = lambda _: answer
    error = runner.run(_error_of(ASKED[which](subjects[number])))
    if error is not None:
        assert str(error)
        assert isinstance(error.retryable, bool)
        assert isinstance(error.code, str)
        assert error.trace_id is None or isinstance(error.trace_id, str)
        assert error.key or which >= 2


@pytest.mark.parametrize("which", range(len(ASKED)))
@pytest.mark.parametrize("number", range(len(KINDS)), ids=["sync", "async"])
def test_an_answer_of_another_shape_is_invalid(
    impatient: tuple[asyncio.Runner, list[Subject]], stranger: Stranger, which: int, number: int
) -> None:
    runner, subjects = impatient
    deep = b'{"items": ' + b"[" * 50_000
    for status in (200, 202):
        for body in (b"", b"{}", b"[]", b"null", b'"x"', b"\xff", b'{"items": [1]}', b'{"trace_id": 1}', deep):
            stranger.answer = in_turn(http(status, body))
            error = runner.run(_error_of(ASKED[which](subjects[number])))
            if error is None:  # no shape is asked of a receipt, nor of the end of a deletion
                assert which in (9, 11)
            else:
                assert type(error) in (errors.AnswerInvalid, errors.GatewayUnreachable), (body, error)


@pytest.fixture(params=KINDS, ids=["sync", "async"])
def one(request: pytest.FixtureRequest, stranger: Stranger) -> Iterator[Subject]:
    stranger.requests.clear()
    made = Subject(request.param(stranger.url, "key"))
    yield made
    if isinstance(made.client, Client):
        made.client.close()


def keys_of(stranger: Stranger) -> set[str]:
    return {json.loads(request.partition(b"\r\n\r\n")[2])["idempotency_key"] for request in stranger.requests}


@pytest.mark.parametrize(
    "later",
    [
        problem(429, "RATE_LIMITED", "Retry-After: 0"),
        problem(503, "GATEWAY_BUSY"),
        problem(503, "STORE_OUTCOME_UNKNOWN"),
        problem(409, "CALL_IN_FLIGHT", trace_id="t-1"),
        problem(408, "REQUEST_TIMEOUT"),
        problem(500, "INTERNAL", retryable=False),
        http(502, b"<html>bad gateway</html>", kind="text/html"),
        http(504, b""),
        http(202, {"trace_id": "t-1", "state": "EXECUTING", "waiting": None}, "Retry-After: 0"),
        http(200, {**DONE, "state": "COMPLETED"})[:40],  # the connection breaks in the middle
        None,
    ],
    ids=lambda answer: "closed" if answer is None else answer[9:40].decode("latin-1").split("\r")[0] + str(len(answer)),
)
async def test_what_says_later_is_asked_again_with_the_same_key(
    one: Subject, stranger: Stranger, later: bytes | None
) -> None:
    stranger.answer = in_turn(later, later, http(200, DONE))
    done = await one.call("bank", "charge", {"amount": 1}, timeout=30)
    assert (done.output, done.trace_id) == ({"ok": 1}, "t-1")
    assert (len(stranger.requests), len(keys_of(stranger))) == (3, 1)


async def test_retry_after_is_kept(one: Subject, stranger: Stranger) -> None:
    stranger.answer = in_turn(problem(503, "SHUTTING_DOWN", "Retry-After: 1"), http(200, DONE))
    began = time.monotonic()
    await one.call("bank", "charge", timeout=30)
    assert time.monotonic() - began >= 1.0
    # Who may not wait so long is told at once.
    stranger.answer = in_turn(problem(429, "RATE_LIMITED", "Retry-After: 50"))
    with pytest.raises(errors.RateLimited) as caught:
        await one.call("bank", "charge", timeout=5)
    assert (caught.value.retryable, caught.value.may_have_run) == (True, False)


async def test_while_a_person_is_waited_for_the_absence_of_the_gateway_does_not_count(
    one: Subject, stranger: Stranger
) -> None:
    waiting = http(202, {"trace_id": "t-1", "state": "PENDING", "waiting": "supervisor"}, "Retry-After: 0")
    away: list[bytes | None] = [None] * 5  # with the pauses between them more than a second
    stranger.answer = in_turn(waiting, *away, waiting, *away, http(200, DONE))
    done = await one.call("bank", "refund", {"amount": 1}, wait="forever", timeout=0.3)
    assert (done.output, len(stranger.requests), len(keys_of(stranger))) == ({"ok": 1}, 13, 1)
    # Without a wait it does, and the error says where the call was seen last.
    stranger.answer = in_turn(http(202, {"trace_id": "t-1", "state": "EXECUTING", "waiting": None}), *away)
    with pytest.raises(errors.GatewayUnreachable) as caught:
        await one.call("bank", "charge", {"amount": 1}, timeout=2.0)
    assert (caught.value.trace_id, caught.value.may_have_run) == ("t-1", True)


async def test_a_transport_within_the_process_is_asked_like_a_gateway() -> None:
    """As MemoryGateway is: its answers are there whole."""
    transport = httpx2.MockTransport(lambda request: httpx2.Response(200, json=DONE))
    for kind in KINDS:
        made = Subject(kind("http://memory", "key", transport=transport))
        assert (await made.call("bank", "charge")).output == {"ok": 1}
        await made.closed()


async def test_a_refusal_after_a_lost_answer_says_that_the_call_may_have_run(one: Subject, stranger: Stranger) -> None:
    for code, status in (("UNAUTHENTICATED", 401), ("TOOL_NOT_FOUND", 404), ("FORBIDDEN", 403)):
        refusal = problem(status, code, retryable=False)
        for answers, may_have_run in (((refusal,), False), ((None, refusal), True)):
            stranger.answer = in_turn(*answers)
            with pytest.raises(errors.GatewayError) as caught:
                await one.call("bank", "charge", timeout=30)
            assert (caught.value.code, caught.value.may_have_run) == (code, may_have_run)


async def test_a_defect_of_the_gateway_is_not_asked_about_for_ever(one: Subject, stranger: Stranger) -> None:
    stranger.answer = in_turn(problem(500, "INTERNAL", retryable=False))
    with pytest.raises(errors.GatewayError) as caught:
        await one.call("bank", "charge", timeout=20)
    assert (caught.value.code, caught.value.may_have_run, len(stranger.requests)) == ("INTERNAL", True, 4)


async def test_the_key_follows_no_redirect(one: Subject, stranger: Stranger) -> None:
    stranger.answer = in_turn(http(307, b"", "Location: http://127.0.0.1:9/elsewhere"))
    with pytest.raises(errors.GatewayError):
        await one.call("bank", "charge", timeout=5)
    assert len(stranger.requests) == 1


async def test_an_answer_without_end_is_cut_off(
    one: Subject, stranger: Stranger, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("connection", "following"):
        monkeypatch.setattr(f"tga_sdk.client.{module}.ANSWER_BYTES_MAX", 1_000)
    stranger.answer = in_turn(http(200, b"x" * 100_000))
    with pytest.raises(errors.AnswerInvalid, match="without end"):
        await one.tools()
    stranger.answer = in_turn(http(200, b"data: " + b"x" * 100_000, kind="text/event-stream"))
    with pytest.raises(errors.AnswerInvalid, match="without end"):
        await one.followed("events", "t-1")


async def test_events_that_leave_one_out_are_not_believed(one: Subject, stranger: Stranger) -> None:
    def entry(number: int) -> bytes:
        told = {"sequence_number": number, "entry_digest": "d", "entry": {"artifact_type": "x", "to_state": "y"}}
        return b"id: %d\nevent: entry\ndata: %b\n\n" % (number, json.dumps(told).encode())

    stranger.answer = in_turn(http(200, entry(1) + entry(3), kind="text/event-stream"))
    with pytest.raises(errors.AnswerInvalid, match="one is missing"):
        await one.followed("events", "t-1")
    # The first connection breaks off after entry 2; the second one repeats it. Each is told once.
    end = b'event: end\ndata: {"state": "COMPLETED"}\n\n'
    stranger.requests.clear()
    stranger.answer = in_turn(
        http(200, entry(1) + entry(2), kind="text/event-stream"),
        http(200, entry(2) + entry(3) + end, kind="text/event-stream"),
    )
    assert [item.sequence_number for item in await one.followed("events", "t-1")] == [1, 2, 3]
    assert b"last-event-id: 2" in stranger.requests[1].lower()
