"""Rows that are judged at once are judged as step by step: over changed bytes the walk finds the same, word for word,
and holds the same of the stream afterwards. What is judged at once is what the strict path accepts, nothing else."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import orjson
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from app.cli.bundle_files import DiskMemory
from app.core.digest import digest_of_bytes
from app.core.errors import BundleInvalid
from app.domain.ledger.checks import Report, Standing, StreamChecks
from app.domain.log.bundle import EntryLine
from app.domain.log.streams import BundleWalk
from app.domain.runs.verification import stream_checks
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import LogRecord
from app.domain.tga.verification import TraceKind
from tests.sampling import IS_SOAK, share
from tests.traces import PATHS, completed_trace, failed_trace, traces, uuid7

Row = tuple[bytes, bytes | None]
EXAMPLES = 5_000 if IS_SOAK else share(300, 30)
QUIET = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
ACTED: dict[str, Any] = {
    "arguments": {"amount": 12, "note": "caf\u00e9 at 10:30 for 16.5", "list": [{"a": None}, -1, True]}
}
# Other spellings of a document, and pieces of others: each makes sense in some place of it.
PIECES = [
    b'"',
    b"\\",
    b" ",
    b"\n",
    b"\x00",
    b"\xff",
    b"0",
    b"1.0",
    b"1e2",
    b"-0",
    b"9007199254740993",
    b"1.5",
    b"null",
    b"true",
]
PIECES += [
    b",",
    b":",
    b"{}",
    b"[]",
    b'"a":1,',
    b"\\u0041",
    b"\\u0000",
    b"\\/",
    b"\xc3\xa9",
    b"e\xcc\x81",
    b"\xed\xa0\x80",
]
PIECES += [
    b"DENY",
    b"APPROVE",
    b"FAILURE",
    b"SUCCESS",
    b"read",
    b"person",
    b"hold",
    b"reconcile",
    b"resolution",
    b"unknown",
]


def rows_of(records: Sequence[LogRecord]) -> list[Row]:
    return [(r.entry.body_bytes(), None if r.artifact is None else r.artifact.to_bytes()) for r in records]


def rechained(rows: Sequence[Row], place: int, artifact: bytes) -> list[Row]:
    """The rows with another artifact, as whoever holds the database would write them: every digest and link fits."""
    changed = list(rows)
    renamed: dict[Any, Any] = {}
    for at in range(place, len(rows)):
        old_entry, old_artifact = rows[at]
        assert old_artifact is not None
        new = artifact if at == place else _renamed(old_artifact, renamed)
        renamed[digest_of_bytes(old_artifact)] = digest_of_bytes(new)
        entry = _renamed(old_entry, renamed)
        renamed[digest_of_bytes(old_entry)] = digest_of_bytes(entry)
        changed[at] = entry, new
    return changed


def _renamed(raw: bytes, renamed: dict[Any, Any]) -> bytes:
    for old, new in renamed.items():
        raw = raw.replace(old.encode(), new.encode())
    return raw


@contextmanager
def step_by_step() -> Iterator[None]:
    """The walk without what judges rows at once."""
    with pytest.MonkeyPatch.context() as patched:
        trace = type(TraceKind.begin(stream_checks()["trace"]))  # type: ignore[arg-type]
        patched.setattr(trace, "follow_usual", StreamChecks.follow_usual)
        patched.setattr(TraceKind, "has_whole_streams", False)
        patched.setattr(EntryLine, "_usual", classmethod(lambda cls, line: None))
        yield


def judged(stream: str, rows: Sequence[Row], *, tenant: str | None = None) -> tuple[list[Any], list[Any]]:
    """Every finding about these rows, and what is held of the stream after each of them."""
    kinds = stream_checks()
    found: list[Any] = []
    held: list[Any] = []
    with DiskMemory(kinds) as memory:
        walk = BundleWalk(kinds, Report(), memory, complete=True, tenant=tenant)
        for number, (entry, artifact) in enumerate(rows, 1):
            errors = list(walk.judge(EntryLine(number - 1, stream, number, entry, artifact)))
            found += [(type(e), e.what, e.expected, e.found, e.stream, e.sequence_number) for e in errors]
            at = memory.load(stream)
            held.append(None if at is None else _held(at))
        found += [(type(error), error.what) for error in walk.end_covered()]
    return found, held


def _held(at: Standing) -> Any:
    head, own, *rest = orjson.loads(at.to_bytes())
    if own is not None and own.get("state") is not None:  # in any order, with its defaults
        own["state"] = ExecutionState.of_known(own["state"]).to_json()
    return [head, own, *rest]


def assert_judged_the_same(stream: str, rows: Sequence[Row], **given: Any) -> None:
    at_once = judged(stream, rows, **given)
    with step_by_step():
        assert at_once == judged(stream, rows, **given)


@pytest.mark.parametrize("path", PATHS)
def test_rows_of_every_path_are_judged_at_once(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> Iterator[Any]:
        raise AssertionError("judged step by step")

    records = PATHS[path](1, **ACTED)
    assert_judged_the_same(records[0].stream, rows_of(records))
    monkeypatch.setattr(BundleWalk, "_follow", refuse)
    assert judged(records[0].stream, rows_of(records))[0] == []


@QUIET
@given(traces(), st.sampled_from([None, "default", "other"]))
def test_any_trace_is_judged_the_same(records: list[LogRecord], tenant: str | None) -> None:
    assert_judged_the_same(records[0].stream, rows_of(records), tenant=tenant)


@st.composite
def changed_rows(draw: st.DrawFn) -> tuple[str, list[Row]]:
    records = draw(st.sampled_from([completed_trace(1, **ACTED), failed_trace(2, **ACTED)]) | traces())
    rows = rows_of(records)
    place = draw(st.integers(0, len(rows) - 1))
    entry, artifact = rows[place]
    assert artifact is not None
    if draw(st.integers(0, 3)) == 0:
        rows[place] = draw(changed(entry)), artifact
    elif draw(st.booleans()):
        rows = rechained(rows, place, draw(changed(artifact)))
    else:  # what another place, or another trace, has here
        other = rows_of(completed_trace(3, **ACTED))
        rows[place] = draw(st.sampled_from([*other, *rows, (entry, None)]))
    return records[0].stream, rows


@st.composite
def changed(draw: st.DrawFn, raw: bytes) -> bytes:
    """A document of which something is flipped, left out, put in, repeated, spelled or ordered in another way."""
    members = re.findall(rb'"[a-z_]+":(?:"[^"]*"|[^",{}\[\]]+|\{[^{}]*\})', raw)
    for _ in range(draw(st.integers(1, 2))):
        at = draw(st.integers(0, max(0, len(raw) - 1)))
        kind = draw(
            st.sampled_from(["flip", "insert", "delete", "piece", "member", "drop", "escape", "normalise", "value"])
        )
        if kind == "flip":
            raw = raw[:at] + bytes([raw[at] ^ 1 << draw(st.integers(0, 7))]) + raw[at + 1 :] if raw else raw
        elif kind == "insert":
            raw = raw[:at] + bytes([draw(st.integers(0, 255))]) + raw[at:]
        elif kind == "delete":
            raw = raw[:at] + raw[at + draw(st.integers(1, 3)) :]
        elif kind == "piece":
            raw = raw[:at] + draw(st.sampled_from(PIECES)) + raw[at + draw(st.integers(0, 3)) :]
        elif kind == "member" and members:  # a key that is repeated, in any place
            raw = raw.replace(b",", b"," + draw(st.sampled_from(members)) + b",", draw(st.integers(1, 4)))
        elif kind == "drop" and members:
            raw = raw.replace(draw(st.sampled_from(members)) + b",", b"", 1)
        elif kind == "escape":
            raw = raw[:at] + b"\\u%04x" % raw[at] + raw[at + 1 :] if raw else raw
        elif kind == "normalise":
            raw = unicodedata.normalize("NFD", raw.decode("utf-8", "replace")).encode()
        elif kind == "value" and members:
            name = draw(st.sampled_from(members)).partition(b":")[0]
            value = draw(
                st.sampled_from([b"null", b"1", b"1.0", b"true", b'""', b'"x"', b'" "', b"[]", b"{}", b'"a\\"b"'])
            )
            raw = re.sub(
                re.escape(name) + rb':(?:"[^"]*"|[^",{}\[\]]+)',
                name.replace(b"\\", b"\\\\") + b":" + value.replace(b"\\", b"\\\\"),
                raw,
                count=1,
            )
    return raw


@QUIET
@given(changed_rows())
def test_changed_rows_are_judged_the_same(given: tuple[str, list[Row]]) -> None:
    assert_judged_the_same(*given)


@pytest.mark.parametrize("place", range(4))
def test_every_byte_of_a_row_that_is_changed_is_judged_the_same(place: int) -> None:
    """Each position once, each with another change; the artifact is committed to as it then is."""
    rows, stream = rows_of(completed_trace(1, **ACTED)), completed_trace(1)[0].stream
    entry, artifact = rows[place]
    assert artifact is not None
    step = share(3, 17)
    for at in range(place % step, len(artifact), step):
        other = artifact[:at] + (b"", b"0", b"x", b'"', b" ")[at % 5] + artifact[at + 1 :]
        assert_judged_the_same(stream, rechained(rows, place, other)[: place + 1])
    for at in range(place % step, len(entry), step):
        other = entry[:at] + (b"", b"0", b"x", b'"', b" ")[at % 5] + entry[at + 1 :]
        assert_judged_the_same(stream, [*rows[:place], (other, artifact)])


OTHER = uuid7(99, role="other").encode()
WRONG = {
    "a write without a key": (0, rb'"idempotency_key":"key-1"', b'"idempotency_key":null'),
    "another trace": (0, rb'"trace_id":"[^"]*"', b'"trace_id":"%b"' % OTHER),
    "arguments of other order": (0, rb'\{"amount":12,', b'{"zebra":1,"amount":12,'),
    "arguments with a key twice": (0, rb'\{"amount":12,', b'{"amount":12,"amount":12,'),
    "arguments with a number of other form": (0, rb'"amount":12,', b'"amount":12.0,'),
    "a key that is no key": (0, rb'"idempotency_key":"key-1"', b'"idempotency_key":"key-1 "'),
    "a name that is too long": (0, rb'"tool_name":"[^"]*"', b'"tool_name":"%b"' % (b"x" * 129)),
    "a member more": (0, rb',"intent"', b',"extra":1,"intent"'),
    "a decision of nobody": (1, rb'"type":"policy"', b'"type":"nobody"'),
    "a decision of another verdict": (1, rb'"APPROVE"', b'"DENY"'),
    "a person who has not signed": (1, rb'"type":"policy"', b'"type":"person"'),
    "a call with other arguments": (2, rb'"amount":12,', b'"amount":13,'),
    "a call with another key": (2, rb'"idempotency_key":"key-1"', b'"idempotency_key":"key-2"'),
    "a call of another class": (2, rb'"tool_class":"write"', b'"tool_class":"read"'),
    "a call of another tool": (2, rb'"tool_name":"[^"]*"', b'"tool_name":"other"'),
    "a call that reconciles with nothing": (2, rb'"redispatch"', b'"reconcile"'),
    "an effect of another call": (3, rb'"tool_call_id":"[^"]*"', b'"tool_call_id":"%b"' % OTHER),
    "an effect of another trace": (3, rb'"trace_id":"[^"]*"', b'"trace_id":"%b"' % OTHER),
    "a failure that says not why": (3, rb'"SUCCESS"', b'"FAILURE"'),
    "an attempt that is none": (3, rb'"attempt":1', b'"attempt":0'),
    "an answer of other form": (3, rb'"T-1"', b"1e16"),
    "an answer that is two": (3, rb'"value":', b'"value":1,"value":'),
}


@pytest.mark.parametrize("defect", WRONG)
def test_what_is_wrong_is_left_to_the_strict_path(defect: str) -> None:
    """The changed artifact is committed to, so that nothing but itself is wrong."""
    place, old, new = WRONG[defect]
    records = completed_trace(1, **ACTED)
    rows, stream = rows_of(records), records[0].stream
    artifact = re.sub(old, lambda _: new, rows[place][1] or b"", count=1)
    assert artifact != rows[place][1]
    changed_to = rechained(rows, place, artifact)
    assert judged(stream, changed_to)[0] != []
    assert_judged_the_same(stream, changed_to)


def test_rows_of_another_stream_are_left_to_the_strict_path() -> None:
    ours, theirs = completed_trace(1)[0].stream, rows_of(completed_trace(2))
    assert judged(ours, theirs)[0] != []
    assert_judged_the_same(ours, theirs)


LINE = EntryLine(7, "trace:x", 1, b'{"a":"caf\xc3\xa9 \\"b\\""}', b'{"n":12}').to_line()


@settings(QUIET, max_examples=2 * EXAMPLES)
@example(LINE.replace(b'{"leaf_index":7,', b'{"leaf_index":7,"leaf_index":7,'))
@example(LINE.replace(b":7,", b":7.0,"))
@example(LINE.replace(b":7,", b":true,"))
@example(LINE.replace(b":7,", b":9007199254740993,"))
@example(LINE.replace(b"trace:x", b"\\u0000"))
@example(LINE.replace(b'"artifact":', b'"proof":[],"artifact":'))
@example(LINE.replace(b'"artifact":', b'"other":1,"artifact":'))
@example(LINE.replace(b"trace:x", b"x" * 256))
@example(LINE.removesuffix(b"\n"))
@example(b"[]")
@given(changed(LINE))
def test_a_line_that_is_read_at_once_is_the_one_that_the_strict_reader_reads(raw: bytes) -> None:
    def read() -> EntryLine | tuple[object, ...]:
        try:
            return EntryLine.from_line(raw)
        except BundleInvalid as error:
            return error.what, error.expected, error.found

    at_once = read()
    with step_by_step():
        assert at_once == read()
