"""Traces of which all rows are read at once are judged as step by step: whatever is accepted so, from lines of a bundle
or rows of a store, the strict path accepts, and ends at the same head with the same claim."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from app.cli.bundle_files import DiskMemory, FolderFiles
from app.cli.bundle_jobs import accept_in_jobs
from app.cli.leaf_file import LeafFile, read_leaves
from app.core.chain import Head
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import TgaError
from app.core.limits import BUNDLE_LINE_BYTES_MAX
from app.core.merkle import Frontier, Hash, leaf_hash
from app.core.note import VerifierKey
from app.domain.ledger.checks import Report, WholeStream
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import StoredCheckpoint, StoredEntry, StoredErasure, StoredSeal, StoredStream, Summary
from app.domain.ledger.verification import Walk, verify_stream
from app.domain.log import shares
from app.domain.log.bundle import ENTRIES, EntryLine, split_usual_lines
from app.domain.log.shares import NotShared, Share, ShareWalk
from app.domain.log.streams import BundleWalk, NotRemembered
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import ActionRequest
from app.domain.tga.idempotency import claim_of_request
from tests.export.by_hand import write_by_hand
from tests.export.test_usual_rows import (
    ACTED,
    OTHER,
    QUIET,
    WRONG,
    Row,
    changed,
    changed_rows,
    judged,
    rechained,
    rows_of,
    step_by_step,
)
from tests.export.world import judge
from tests.sampling import share
from tests.traces import PATHS, completed_trace, denied_trace, failed_trace, time_at

NAME = "example.org/whole"
RUN = {"run_id": "r-1", "procedure": "p", "version": "1", "path": "3:2.1", "attempt": 2, "worker": "w"}
USUAL = {
    "completed": completed_trace(1, **ACTED),
    "failed": failed_trace(2, **ACTED),
    "denied": denied_trace(3, **ACTED),
    "called by a run": completed_trace(4, run=RUN, **ACTED),
    "quoting": completed_trace(5, arguments={"text": 'she said "no\\maybe"\n\tand left \u00e9 \U0001f600'}),
    "read without a key": completed_trace(6, tool_class="read", idempotency_key=None),
}


def lines_of(stream: str, rows: Sequence[Row], first: int = 0) -> list[bytes]:
    return [
        EntryLine(first + place, stream, place + 1, entry, artifact).to_line()
        for place, (entry, artifact) in enumerate(rows)
    ]


def read_lines(stream: str, lines: Sequence[bytes]) -> WholeStream | None:
    """As a share reads a stream that it has held back."""
    split = split_usual_lines(stream.encode(), list(enumerate(lines)))
    return None if split is None else stream_checks()["trace"].read_whole(stream, *split)


def assert_strict_accepts(stream: str, lines: Sequence[bytes], whole: WholeStream) -> None:
    """Every line and row, step by step, with the same end."""
    with step_by_step():
        read = [EntryLine.from_line(line) for line in lines]
        assert [(one.stream, one.sequence_number) for one in read] == [(stream, n) for n in range(1, len(lines) + 1)]
        found, held = judged(stream, [(one.entry, one.artifact) for one in read])
    assert found == []
    assert held[-1][0] == list(whole.head)
    assert [one.entry for one in read] == list(whole.entries)


@pytest.mark.parametrize("name", USUAL)
def test_usual_traces_are_read_at_once(name: str) -> None:
    records = USUAL[name]
    rows, stream = rows_of(records), records[0].stream
    whole = read_lines(stream, lines_of(stream, rows))
    assert whole is not None
    assert_strict_accepts(stream, lines_of(stream, rows), whole)
    asked: Any = records[0].artifact
    is_claimed = asked.idempotency_key is not None and name != "denied"
    claim = Claim(asked.server_id, asked.tool_name, str(asked.idempotency_key), asked.payload_digest)
    assert whole.key_digest == (claim.key_digest() if is_claimed else None)


@QUIET
@given(changed_rows())
def test_what_is_accepted_of_changed_rows_the_strict_path_accepts(given: tuple[str, list[Row]]) -> None:
    stream, rows = given
    if any(artifact is None for _, artifact in rows):
        return
    try:
        lines = lines_of(stream, rows)
    except ValueError:  # nothing that a line can hold
        return
    whole = read_lines(stream, lines)
    if whole is not None:
        assert_strict_accepts(stream, lines, whole)


@QUIET
@given(st.data())
def test_what_is_accepted_of_changed_lines_the_strict_path_accepts(data: st.DataObject) -> None:
    records = USUAL[data.draw(st.sampled_from(list(USUAL)))]
    stream, lines = records[0].stream, lines_of(records[0].stream, rows_of(records))
    place = data.draw(st.integers(0, len(lines) - 1))
    lines[place] = data.draw(changed(lines[place]))
    whole = read_lines(stream, lines)
    if whole is not None:
        assert_strict_accepts(stream, lines, whole)


@pytest.mark.parametrize("place", range(4))
def test_no_byte_can_be_changed(place: int) -> None:
    """Of a line, and of an artifact that is committed to as it then is: accepted only where the strict path does."""
    records = USUAL["called by a run"]
    rows, stream = rows_of(records), records[0].stream
    lines, accepted = lines_of(stream, rows), 0
    for at in range(place % 3, len(lines[place]), share(1, 5)):
        other = lines[place][:at] + (b"", b"0", b"x", b'"', b" ", b"\\")[at % 6] + lines[place][at + 1 :]
        if other != lines[place]:
            accepted += _accepted_by_both(stream, [*lines[:place], other, *lines[place + 1 :]])
    artifact = rows[place][1]
    assert artifact is not None
    for at in range(place % 3, len(artifact), share(1, 5)):
        other = artifact[:at] + (b"", b"0", b"x", b'"', b" ", b"\\")[at % 6] + artifact[at + 1 :]
        accepted += _accepted_by_both(stream, lines_of(stream, rechained(rows, place, other)))
    assert accepted > 0, "a name, a text or a digit of a time may be another one"


def _accepted_by_both(stream: str, lines: list[bytes]) -> bool:
    whole = read_lines(stream, lines)
    if whole is not None:
        assert_strict_accepts(stream, lines, whole)
    return whole is not None


@pytest.mark.parametrize("defect", WRONG)
def test_what_is_wrong_is_not_accepted(defect: str) -> None:
    place, old, new = WRONG[defect]
    records = completed_trace(1, **ACTED)
    rows, stream = rows_of(records), records[0].stream
    artifact = re.sub(old, lambda _: new, rows[place][1] or b"", count=1)
    assert read_lines(stream, lines_of(stream, rechained(rows, place, artifact))) is None


# What would hide behind another check if it stood in one artifact alone: place by place, what is put in.
TOGETHER: dict[str, dict[int, tuple[bytes, bytes]]] = {
    "a write without a key": dict.fromkeys((0, 2), (rb'"idempotency_key":"key-1"', b'"idempotency_key":null')),
    "arguments of other order": dict.fromkeys((0, 2), (rb'\{"amount":12,', b'{"zebra":1,"amount":12,')),
    "arguments with a key twice": dict.fromkeys((0, 2), (rb'"amount":12,', b'"amount":12,"amount":12,')),
    "arguments with a number of other form": dict.fromkeys((0, 2), (rb'"amount":12,', b'"amount":12.0,')),
    "a decision on another request": {
        1: (rb'"action_request_digest":"\w+"', b'"action_request_digest":"%b"' % (b"0" * 64))
    },
    "a decision on another trace": {1: (rb'"trace_id":"[^"]*"', b'"trace_id":"%b"' % OTHER)},
    "a call by another decision": {
        2: (rb'"supervisor_decision_digest":"\w+"', b'"supervisor_decision_digest":"%b"' % (b"0" * 64))
    },
    "a call in another trace": {2: (rb'"trace_id":"[^"]*"', b'"trace_id":"%b"' % OTHER)},
    "a call to another server": {2: (rb'"server_id":"[^"]*"', b'"server_id":"other"')},
    "an effect of another call": {3: (rb'"tool_call_digest":"\w+"', b'"tool_call_digest":"%b"' % (b"0" * 64))},
}


@pytest.mark.parametrize("defect", TOGETHER)
def test_what_is_wrong_in_several_places_is_not_accepted(defect: str) -> None:
    records = completed_trace(1, **ACTED)
    rows, stream = rows_of(records), records[0].stream
    for place, (old, new) in TOGETHER[defect].items():
        artifact = re.sub(old, lambda _, new=new: new, rows[place][1] or b"", count=1)  # type: ignore[misc]
        assert artifact != rows[place][1]
        rows = rechained(rows, place, artifact)
    assert judged(stream, rows)[0] != []
    assert read_lines(stream, lines_of(stream, rows)) is None


def test_entries_that_are_wrong_are_not_accepted() -> None:
    """Of another executor than an id, and at no time."""
    records = completed_trace(1, **ACTED)
    stream = records[0].stream
    for old, new in (
        (rb'"executor_id":"[^"]*"', b'"executor_id":"%b"' % (b"x" * 36)),
        (rb'"recorded_at":"[^"]*"', b'"recorded_at":"2026-13-01T00:00:00.000Z"'),
    ):
        *before, (entry, artifact) = rows_of(records)
        rows = [*before, (re.sub(old, lambda _, new=new: new, entry), artifact)]  # type: ignore[misc]
        assert judged(stream, rows)[0] != []
        assert read_lines(stream, lines_of(stream, rows)) is None


def test_lines_that_are_wrong_by_themselves_are_not_accepted() -> None:
    records = USUAL["completed"]
    stream, lines = records[0].stream, lines_of(records[0].stream, rows_of(records))
    others = {
        "another leaf": [lines[0].replace(b'"leaf_index":0', b'"leaf_index":1'), *lines[1:]],
        "another number": [lines[0].replace(b'"sequence_number":1,"e', b'"sequence_number":2,"e'), *lines[1:]],
        "a member twice": [lines[0].replace(b'","artifact":"', b'","entry":"","artifact":"'), *lines[1:]],
        "a member more": [lines[0].removesuffix(b'"}\n') + b'","proof":[]}\n', *lines[1:]],
        "an entry that ends early": [lines[0].replace(b'\\"trace_id\\"', b'"trace_id\\"'), *lines[1:]],
        "an artifact that ends early": [lines[0].replace(b'\\"tool_name\\"', b'"tool_name\\"'), *lines[1:]],
        "other order": [lines[1], lines[0], *lines[2:]],
        "the last one missing": lines[:3],
        "of another trace": lines_of(completed_trace(9)[0].stream, rows_of(records)),
        "no newline": [*lines[:3], lines[3].removesuffix(b"\n")],
        "another end": [lines[0].removesuffix(b'"}\n') + b'"]\n', *lines[1:]],
        "NUL": [lines[0].replace(b"caf", b"\\\\u0000"), *lines[1:]],
    }
    for what, wrong in others.items():
        assert wrong != lines, what
        assert read_lines(stream, wrong) is None, what


def test_a_line_that_is_too_long_is_not_accepted_however_short_what_it_spells() -> None:
    records = completed_trace(1, arguments={"text": "A" * 400_000})
    stream, lines = records[0].stream, lines_of(records[0].stream, rows_of(records))
    for place in (0, 2):
        escaped = -(-(BUNDLE_LINE_BYTES_MAX + 1 - len(lines[place])) // 5)
        lines[place] = lines[place].replace(b"A" * escaped, b"\\u0041" * escaped, 1)
        assert BUNDLE_LINE_BYTES_MAX < len(lines[place]) <= BUNDLE_LINE_BYTES_MAX + 5
        with pytest.raises(TgaError):
            EntryLine.from_line(lines[place])
    assert read_lines(stream, lines) is None


@pytest.fixture
def key() -> Ed25519PrivateKey:
    return Ed25519PrivateKey.generate()


def verifier_of(key: Ed25519PrivateKey) -> VerifierKey:
    return VerifierKey(NAME, key.public_key().public_bytes_raw())


def numbered(rows: Sequence[tuple[str, int, Row]]) -> list[EntryLine]:
    return [EntryLine(at, stream, number, *row) for at, (stream, number, row) in enumerate(rows)]


def interleaved(traces: int) -> list[tuple[str, int, Row]]:
    """Every path, all of them begun before any goes on; those that wait end in no final state."""
    paths = list(PATHS.values())
    every = [paths[n % len(paths)](n, **ACTED) for n in range(traces)]
    longest = max(len(records) for records in every)
    return [
        (records[0].stream, place + 1, rows_of(records)[place])
        for place in range(longest)
        for records in every
        if place < len(records)
    ]


@pytest.mark.parametrize("lines_max", [1, 7, 8_192])
def test_traces_that_are_held_back_or_no_longer_are_counted_the_same(
    tmp_path: Path, key: Ed25519PrivateKey, lines_max: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shares, "WHOLE_LINES_MAX", lines_max)
    write_by_hand(tmp_path / "bundle", key, verifier_of(key), lines=numbered(interleaved(40)), heads=5)
    verdict = judge(tmp_path / "bundle", verifier_of(key))
    assert verdict.is_sound
    assert accept_in_jobs(tmp_path / "bundle", [verifier_of(key)], [], 1) == verdict.report


def test_usual_traces_are_judged_by_nobody_else(
    tmp_path: Path, key: Ed25519PrivateKey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise nothing would be gained, and no test here would say so."""

    def refuse(*_: object) -> Iterator[Any]:
        raise AssertionError("judged row by row")

    write_by_hand(tmp_path / "bundle", key, verifier_of(key), traces=60, heads=3)
    monkeypatch.setattr(BundleWalk, "_judge", refuse)
    accepted = accept_in_jobs(tmp_path / "bundle", [verifier_of(key)], [], 1)
    assert accepted is not None
    assert (accepted.leaves, accepted.streams.of_kind["trace"]) == (240, 60)


def test_bundles_in_which_traces_disagree_are_not_accepted(tmp_path: Path, key: Ed25519PrivateKey) -> None:
    def rows(n: int, **given: Any) -> list[tuple[str, int, Row]]:
        records = completed_trace(n, **given)
        return [(records[0].stream, place, row) for place, row in enumerate(rows_of(records), 1)]

    one, other, keyless = rows(1), rows(2), rows(3, tool_class="read", idempotency_key=None)
    bundles = {
        "sound": [*one, *other],
        "a key twice": [*one, *rows(2, idempotency_key="key-1")],
        "a trace twice": [*one, *other, *one],
        "a trace without a key twice": [*one, *keyless, *keyless],
        "a trace that goes on after its end": [*one, (one[0][0], 5, one[3][2]), *other],
        "a trace that ends, and begins again unfinished": [*one, *other, *one[:2]],
    }
    for what, found in bundles.items():
        write_by_hand(tmp_path / what, key, verifier_of(key), lines=numbered(found), heads=1)
        accepted = accept_in_jobs(tmp_path / what, [verifier_of(key)], [], 1)
        assert (accepted is not None) == (what == "sound"), what
        assert judge(tmp_path / what, verifier_of(key)).is_sound == (what == "sound"), what


def test_what_is_held_back_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bytes, however long lines are; those that come first go first."""
    lines = [(stream.encode(), line) for stream, line in _begun(50)]
    monkeypatch.setattr(shares, "WHOLE_BYTES_MAX", 10 * len(lines[0][1]))
    kinds = stream_checks()
    with DiskMemory(kinds) as memory:
        walk = ShareWalk(Share(0, 1), kinds, memory=memory, put=lambda *_: None)
        for number, (stream, line) in enumerate(lines):
            walk.take(number, stream, line)
            assert len(walk._held) <= 11
        assert walk.end().entries == 50
        walk.take(50, lines[0][0], lines[0][1].replace(b'"leaf_index":0', b'"leaf_index":50'))
        with pytest.raises(NotShared):
            walk.end()


def _begun(traces: int) -> Iterator[tuple[str, bytes]]:
    for n in range(traces):
        records = completed_trace(n)
        yield records[0].stream, lines_of(records[0].stream, rows_of(records)[:1], n)[0]


def test_memory_tells_whole_traces_that_are_not_the_only_ones() -> None:
    kinds = stream_checks()
    records = completed_trace(1)
    whole = read_lines(records[0].stream, lines_of(records[0].stream, rows_of(records)))
    assert whole is not None
    with DiskMemory(kinds) as memory:
        memory.remember_whole(records[0].stream, whole)
        assert memory.count_whole() == {"trace": 1}
        found = memory.load(records[0].stream)
        assert found is not None
        assert (found.head, found.is_sound) == (whole.head, True)
        memory.remember_whole("trace:other", whole)  # of the same key
        with pytest.raises(NotRemembered):
            memory.count_whole()


def test_leaves_of_shares_make_the_tree_in_whatever_order_they_come(tmp_path: Path) -> None:
    leaves = [leaf_hash(b"%d" % n) for n in range(70_000)]
    paths = [tmp_path / "0", tmp_path / "1"]
    for index, path in enumerate(paths):
        with LeafFile(path) as file:
            own = [n for n in range(len(leaves)) if n % 3 % 2 == index]
            for at in range(0, len(own), 40):  # the first of each few comes last
                for number in (*own[at + 1 : at + 40], own[at]):
                    file.put(number, leaves[number])
            file.put(index, leaves[index])  # long after its neighbours were written
            file.flush()
    told = [leaf for page in read_leaves(paths) for leaf in page]
    assert told == leaves


def test_a_frontier_that_grows_by_many_is_the_one_that_grows_by_each() -> None:
    leaves = [Hash(bytes.fromhex(digest_of_bytes(b"%d" % n))) for n in range(2_100)]
    for step in (1, 2, 3, 7, 64, 255, 256, 257, 1_000, 2_100):
        for level in (1, 3, 8):
            by_many, by_each, nodes, expected = Frontier(), Frontier(), [], []
            for at in range(0, len(leaves), step):
                nodes += by_many.extend(leaves[at : at + step], from_level=level)
            for leaf in leaves:
                expected += by_each.append(leaf, from_level=level)
            assert (by_many, nodes) == (by_each, expected)


def test_lines_come_whole_or_as_pieces_that_are_too_long(tmp_path: Path) -> None:
    long = b"x" * (BUNDLE_LINE_BYTES_MAX + 5)
    (tmp_path / ENTRIES).write_bytes(b"a\n\nb" + long + b"\nlast")
    lines = list(FolderFiles(tmp_path).lines(ENTRIES))
    assert b"".join(lines) == (tmp_path / ENTRIES).read_bytes()
    assert [len(line) for line in lines] == [2, 1, BUNDLE_LINE_BYTES_MAX + 1, 6, 4]
    seam = b"y" * 262_140 + b"forked_from" + b"z" * 10
    (tmp_path / ENTRIES).write_bytes(seam)
    assert FolderFiles(tmp_path).has(ENTRIES, b"forked_from")
    assert not FolderFiles(tmp_path).has(ENTRIES, b"forked_into")


def stored(name: str, **changes: Any) -> StoredStream:
    """The trace as a store holds it, with something changed."""
    records = USUAL[name]
    rows = [
        StoredEntry(place, entry, digest_of_bytes(entry), artifact)
        for place, (entry, artifact) in enumerate(rows_of(records), 1)
    ]
    entry, asked = records[-1].entry, records[0].artifact
    assert isinstance(asked, ActionRequest)
    is_called, effect = name != "denied", Digest(entry.artifact_digest)
    claim = claim_of_request(asked) if is_called else None
    given: dict[str, Any] = {
        "stream": records[0].stream,
        "head": Head(len(rows), rows[-1].entry_digest or GENESIS, entry.to_state, effect),
        "is_open": False,
        "waiting": None,
        "checkpoints": [],
        "claim": claim,
        "claim_effect": effect if claim is not None else None,
        "dispatch_attempts": [],
        "summary": Summary("default", "agent-1", asked.server_id, asked.tool_name, None),
        "rows": rows,
        **changes,
    }
    return StoredStream(entries=_given(given["rows"]), **given)


async def _given(rows: Sequence[StoredEntry]) -> AsyncIterator[StoredEntry]:
    for row in rows:
        yield row


async def found_strictly(given: StoredStream) -> list[str]:
    with step_by_step():
        return [error.code async for error in verify_stream(given, Walk(stream_checks(), Report()))]


@pytest.mark.parametrize("name", USUAL)
async def test_usual_traces_of_a_store_are_accepted_at_once(name: str) -> None:
    assert stream_checks()["trace"].accepts_whole(stored(name))
    assert await found_strictly(stored(name)) == []


USUAL_STORED = stored("completed")
ROWS = list(USUAL_STORED.rows or ())
CLAIM, HEAD = USUAL_STORED.claim, USUAL_STORED.head
assert CLAIM is not None
assert HEAD is not None
BESIDE: dict[str, dict[str, Any]] = {
    "a head with another number": {"head": HEAD._replace(sequence_number=3)},
    "a head with another entry": {"head": HEAD._replace(entry_digest=GENESIS)},
    "a head in another state": {"head": HEAD._replace(state="FAILED")},
    "a head with another artifact": {"head": HEAD._replace(artifact_digest=GENESIS)},
    "no head": {"head": None},
    "open": {"is_open": True},
    "waiting": {"waiting": "operator"},
    "misplaced": {"misplaced_in": "at_rest"},
    "no claim": {"claim": None},
    "no claim and no effect": {"claim": None, "claim_effect": None},
    "a claim of another key": {"claim": CLAIM._replace(idempotency_key="other")},
    "a claim of another payload": {"claim": CLAIM._replace(payload_digest=GENESIS)},
    "a claim that is not settled": {"claim_effect": None},
    "a claim with another effect": {"claim_effect": GENESIS},
    "another tenant": {"summary": Summary("other", "agent-1", "crm", "create_ticket", None)},
    "another principal": {"summary": Summary("default", "agent-2", "crm", "create_ticket", None)},
    "another tool": {"summary": Summary("default", "agent-1", "crm", "other", None)},
    "another time of expiry": {"summary": Summary("default", "agent-1", "crm", "create_ticket", time_at(9))},
    "an attempt more": {"dispatch_attempts": [2]},
    "a row more beside it": {"rows_repeated": ["heads"]},
    "secrets": {"sealed": StoredSeal(b"salt", None)},
    "an erasure": {"erasure": StoredErasure("system:default", 1, None)},
    "a checkpoint": {"checkpoints": [StoredCheckpoint(4, b"{}", GENESIS)]},
    "a row with another digest": {"rows": [*ROWS[:3], ROWS[3]._replace(entry_digest=GENESIS)]},
    "a row without artifact": {"rows": [*ROWS[:3], ROWS[3]._replace(artifact=None)]},
    "a row missing": {"rows": ROWS[:3]},
    "rows in other order": {"rows": [ROWS[1], ROWS[0], *ROWS[2:]]},
    "another stream": {"stream": completed_trace(77)[0].stream},
}


@pytest.mark.parametrize("defect", BESIDE)
async def test_what_is_wrong_beside_a_trace_is_left_to_the_strict_path(defect: str) -> None:
    assert await found_strictly(stored("completed", **BESIDE[defect])) != []
    assert not stream_checks()["trace"].accepts_whole(stored("completed", **BESIDE[defect]))


async def test_a_trace_with_a_secret_argument_is_left_to_the_strict_path(monkeypatch: pytest.MonkeyPatch) -> None:
    secret = {"card": {"$redacted": {"commitment": "0" * 64}}}
    monkeypatch.setitem(USUAL, "secret", completed_trace(8, arguments=secret))
    assert await found_strictly(stored("secret")) != [], "its salt is missing"
    assert not stream_checks()["trace"].accepts_whole(stored("secret"))


async def test_an_effect_that_lists_more_attempts_than_are_stored_is_left_to_the_strict_path() -> None:
    old = rows_of(USUAL["completed"])
    once = re.search(rb'\{"attempt":1,[^}]*\}', old[3][1] or b"")
    assert once is not None
    twice = (old[3][1] or b"").replace(once[0], once[0] + b"," + once[0].replace(b'"attempt":1', b'"attempt":2'))
    rows = [
        StoredEntry(place, entry, digest_of_bytes(entry), artifact)
        for place, (entry, artifact) in enumerate(rechained(old, 3, twice), 1)
    ]
    effect, last = digest_of_bytes(twice), rows[-1].entry_digest or GENESIS
    changes = {"rows": rows, "head": Head(4, last, "COMPLETED", effect), "claim_effect": effect}
    assert await found_strictly(stored("completed", **changes)) == ["STATE_SEQUENCE_GAP"]
    assert not stream_checks()["trace"].accepts_whole(stored("completed", **changes))
    assert await found_strictly(stored("completed", dispatch_attempts=[2], **changes)) == []
