"""What is put by is bounded, and whoever does not read holds nobody; hostile words stay on their line."""

from __future__ import annotations

import json
import logging
import threading
from typing import Any

import pytest

from app.core.instruments import Instruments
from app.core.limits import LOG_LINES_QUEUED_MAX, SPANS_QUEUED_MAX
from app.edge.call_lines import LineWriter, word
from app.edge.observing import CallObserver
from app.edge.otlp import INTERNAL, Place, Span
from app.edge.spans import SpanQueue
from app.gateway.logs import JsonFormatter, TextFormatter
from tests.telemetry.receiver import read

HOSTILE = [
    "a b",
    "a\nb",
    "a\r\nINFO tga.calls: call",
    'x" y="z',
    "\x1b[31mred",
    "a\u2028b",
    "\x85",
    "\x7f",
    "",
    "=",
    "ü",
]


@pytest.mark.parametrize("value", HOSTILE)
def test_a_hostile_word_stays_one_word(value: str) -> None:
    written = word(value)
    assert len(written.splitlines()) == 1
    assert written.isascii()
    assert written.isprintable()
    assert written.startswith('"') == written.endswith('"')
    assert written.startswith('"'), "what is not plain is quoted"


def test_a_plain_word_is_written_as_it_is() -> None:
    assert word("acme/pay-2.charge") == "acme/pay-2.charge"
    assert len(word("x " * 5_000)) < 300


@pytest.mark.parametrize("value", HOSTILE)
def test_what_is_logged_is_one_line(value: str) -> None:
    record = logging.LogRecord("tga", logging.WARNING, __file__, 1, "server %s is down", (value,), None)
    assert len(TextFormatter().format(record).splitlines()) == 1
    written = JsonFormatter().format(record)
    assert len(written.splitlines()) == 1
    assert json.loads(written)["message"] == f"server {value} is down"


FORGED = "2026-01-01T00:00:00.000Z INFO tga.calls: call trace_id=x state=COMPLETED"


def test_an_error_whose_words_a_stranger_chose_forges_no_line() -> None:
    try:
        raise ValueError(f"not a number: '\n{FORGED}\n{FORGED}'")
    except ValueError as error:
        record = logging.LogRecord("tga", logging.ERROR, __file__, 1, "a defect", (), (ValueError, error, None))
    first, *others = TextFormatter().format(record).splitlines()
    assert first.endswith("ERROR tga: a defect")
    assert len(others) >= 3
    assert all(line.startswith("    ") for line in others)
    assert len(JsonFormatter().format(record).splitlines()) == 1


@pytest.mark.parametrize("made", [TextFormatter, JsonFormatter])
def test_a_message_that_cannot_be_put_together_is_a_line_all_the_same(made: type[logging.Formatter]) -> None:
    """`logging` would write a traceback with the arguments, on lines of its own."""
    for said, arguments in (("%d", ("secret",)), ("%s %s", ("secret",)), ("none", ("secret",))):
        record = logging.LogRecord("tga", logging.ERROR, __file__, 1, said, arguments, None)
        written = made().format(record)
        assert len(written.splitlines()) == 1
        assert "secret" not in written
        assert said in written
    record = logging.LogRecord("tga", logging.ERROR, __file__, 1, "%s", ("x" * 10**6,), None)
    assert len(made().format(record)) < 10_000


def test_a_traceback_is_inside_its_object() -> None:
    try:
        raise ValueError("gone\nwrong")
    except ValueError as error:
        record = logging.LogRecord("tga", logging.ERROR, __file__, 1, "a defect", (), (ValueError, error, None))
    written = JsonFormatter().format(record)
    assert len(written.splitlines()) == 1
    assert "gone\nwrong" in json.loads(written)["traceback"]


def test_lines_that_nobody_takes_are_dropped_and_counted() -> None:
    instruments, reads = Instruments(), threading.Event()
    written: list[bytes] = []

    def write(raw: bytes) -> None:
        reads.wait()
        written.append(raw)

    writer = LineWriter(instruments, write)
    for number in range(3 * LOG_LINES_QUEUED_MAX):
        writer.put(f"line {number}")
    dropped = instruments.lines_dropped.values[()]
    assert LOG_LINES_QUEUED_MAX <= dropped <= 2 * LOG_LINES_QUEUED_MAX
    reads.set()
    writer.close()
    lines = b"".join(written).decode().splitlines()
    assert lines[0] == "line 0"
    assert len(lines) == 3 * LOG_LINES_QUEUED_MAX - dropped


class Stuck:
    """A collector that takes a connection and never answers, until it is let go."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.taken = 0

    def send(self, body: bytes) -> bool:
        self.goes_on.wait()
        self.taken += len(read(body))
        return True

    def close(self) -> None:
        self.goes_on.set()


def test_spans_that_nobody_takes_are_dropped_and_counted() -> None:
    instruments, stuck = Instruments(), Stuck()
    queue = SpanQueue(stuck, instruments, {})
    span = Span("one", Place(1, 2), None, INTERNAL, 1, 2, {})
    for _ in range(3 * SPANS_QUEUED_MAX // 8):
        queue.put([span] * 8)
    dropped = instruments.spans.values["dropped",]
    assert SPANS_QUEUED_MAX < dropped <= 2 * SPANS_QUEUED_MAX
    stuck.goes_on.set()
    queue.close()
    assert instruments.spans.values["exported",] == stuck.taken == 3 * SPANS_QUEUED_MAX - dropped


def test_a_defect_in_telemetry_ends_no_call(caplog: pytest.LogCaptureFixture) -> None:
    observer = CallObserver(Instruments())
    broken: Any = None
    with caplog.at_level(logging.ERROR, logger="tga"):
        observer.rested(broken, broken)
        observer.repeated(broken, broken)
    assert [record.message for record in caplog.records] == [
        "a defect in the gateway's telemetry; calls go on without it"
    ], "once"
