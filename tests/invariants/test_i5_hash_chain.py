"""I5: whatever is done to the stored log behind the gateway's back is found, at its entry, with the right code.

An attacker here is a superuser who has switched the triggers off.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ChecksumMismatch, SequenceGap, TgaError
from app.domain.ledger.checks import Report
from app.domain.ledger.plans import Claim
from app.domain.ledger.stored import StoredCheckpoint, StoredEntry, StoredStream
from app.domain.ledger.verification import Walk, verify_ledger, verify_stream
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import ActionRequest
from app.domain.tga.execution_state import ExecutionCheckpoint
from app.domain.tga.idempotency import claim_of_request
from app.domain.tga.replay import LogRecord, fold, head_of
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from tests.attacker import attacking
from tests.conftest import Admin
from tests.traces import completed_trace, denied_trace, executing_trace, time_at, trace_id, traces

STREAM = f"trace:{trace_id(1)}"
UNFINISHED = f"trace:{trace_id(2)}"
OF_STREAM = f"WHERE stream = '{STREAM}'"


def at(sequence_number: int) -> str:
    return f"{OF_STREAM} AND sequence_number = {sequence_number}"


def flip(column: str, position: int, bit: int = 1) -> str:
    return f"{column} = set_byte({column}, {position}, get_byte({column}, {position}) # {bit})"


@dataclass
class Rows:
    """A stored stream that can be tampered with, without a database."""

    stream: str
    entries: list[StoredEntry]
    head: Any
    claim: Claim | None
    claim_effect: Digest | None
    checkpoints: list[StoredCheckpoint]

    @classmethod
    def of(cls, records: list[LogRecord]) -> Rows:
        entries = [
            StoredEntry(
                r.entry.sequence_number,
                r.entry.body_bytes(),
                Digest(r.entry.entry_digest),
                r.artifact.to_bytes() if r.artifact else None,
            )
            for r in records
        ]
        state = fold(records)
        request = records[0].artifact
        assert state is not None
        assert isinstance(request, ActionRequest)
        claim = claim_of_request(request)
        effect = None if state.tool_effect_digest is None or claim is None else Digest(state.tool_effect_digest)
        checkpoint = StoredCheckpoint(state.sequence_number, state.to_bytes(), state.digest())
        return cls(records[0].stream, entries, head_of(state), claim, effect, [checkpoint])

    async def findings(self) -> list[TgaError]:
        async def rows() -> AsyncIterator[StoredEntry]:
            for row in self.entries:
                yield row

        is_open = self.head.state in ("PENDING", "AUTHORIZED", "EXECUTING")
        stored = StoredStream(
            stream=self.stream,
            head=self.head,
            is_open=is_open,
            waiting=None,
            checkpoints=self.checkpoints,
            claim=self.claim,
            claim_effect=self.claim_effect,
            dispatch_attempts=[],
            entries=rows(),
        )
        return [error async for error in verify_stream(stored, Walk(stream_checks(), Report()))]


async def verify(sessions: Sessions) -> list[TgaError]:
    async with open_reader(sessions) as reader:
        return [error async for error in verify_ledger(reader, stream_checks(), Report())]


async def fill(store: PostgresStateStore) -> list[LogRecord]:
    records = completed_trace(1)
    for record in records:
        await store.append_log_entry(record)
    for record in executing_trace(2):
        await store.append_log_entry(record)
    state = fold(records[:3])
    assert state is not None
    await store.write_checkpoint(ExecutionCheckpoint.of(state, created_at=time_at(9)))
    return records


async def tamper(admin: Admin, *statements: str) -> None:
    async with attacking(admin):
        for statement in statements:
            await admin.execute(statement)


def places(findings: list[TgaError]) -> list[tuple[str | None, int | None, str]]:
    return [(error.stream, error.sequence_number, error.code) for error in findings]


GAP, MISMATCH = SequenceGap.code, ChecksumMismatch.code
TAMPERINGS: dict[str, tuple[list[str], set[tuple[str, int | None, str]]]] = {
    "nothing": ([], set()),
    "a_dropped_entry": ([f"DELETE FROM tga.entries {at(2)}"], {(STREAM, 2, GAP)}),
    "a_dropped_first_entry": ([f"DELETE FROM tga.entries {at(1)}"], {(STREAM, 1, GAP)}),
    "a_cut_tail": (
        [f"DELETE FROM tga.{table} {at(4)}" for table in ("entries", "artifacts")],
        {(STREAM, 4, GAP)},
    ),
    "a_dropped_artifact": (
        [f"DELETE FROM tga.artifacts {at(3)}"],
        {(STREAM, 3, "STATE_RECOVERY_FAILED")},
    ),
    "all_entries_dropped": (
        [f"DELETE FROM tga.{table} {OF_STREAM}" for table in ("entries", "artifacts")],
        {(STREAM, 1, GAP)},
    ),
    "all_but_the_claim_dropped": (
        [f"DELETE FROM tga.{table} {OF_STREAM}" for table in ("entries", "artifacts", "execution_checkpoints")]
        + [
            f"UPDATE tga.heads SET sequence_number = 0, artifact_digest = NULL, is_open = false, state = 'PENDING',"
            f" entry_digest = decode(repeat('00', 32), 'hex') {OF_STREAM}"
        ],
        {(STREAM, 1, GAP)},
    ),
    "swapped_entries": (
        [
            f"UPDATE tga.entries SET sequence_number = 105 - sequence_number {OF_STREAM} AND sequence_number IN (2, 3)",
            f"UPDATE tga.entries SET sequence_number = sequence_number - 100 {OF_STREAM} AND sequence_number > 100",
        ],
        {(STREAM, 2, MISMATCH)},
    ),
    "a_duplicated_entry": (
        [
            f"INSERT INTO tga.entries SELECT stream, 5, entry, entry_digest FROM tga.entries {at(4)}",
            f"INSERT INTO tga.artifacts SELECT stream, 5, artifact FROM tga.artifacts {at(4)}",
        ],
        {(STREAM, 5, GAP)},
    ),
    "a_flipped_byte_of_an_artifact": (
        [f"UPDATE tga.artifacts SET {flip('artifact', 40)} {at(4)}"],
        {(STREAM, 4, MISMATCH)},
    ),
    "a_changed_digest": (
        [f"UPDATE tga.entries SET {flip('entry_digest', 0)} {at(3)}"],
        {(STREAM, 3, MISMATCH)},
    ),
    "a_head_set_back": (
        [f"UPDATE tga.heads SET sequence_number = 3 {OF_STREAM}"],
        {(STREAM, 4, GAP)},
    ),
    "a_head_of_another_digest": (
        [f"UPDATE tga.heads SET entry_digest = decode(repeat('ab', 32), 'hex') {OF_STREAM}"],
        {(STREAM, 4, MISMATCH)},
    ),
    "a_head_in_another_state": (
        [f"UPDATE tga.heads SET state = 'FAILED' {OF_STREAM}"],
        {(STREAM, 4, "STATE_INVALID_TRANSITION")},
    ),
    "a_trace_closed_before_its_end": (
        [f"UPDATE tga.heads SET is_open = true {OF_STREAM}"],
        {(STREAM, 4, "STATE_INVALID_TRANSITION")},
    ),
    "a_finished_trace_that_waits": (
        [f"UPDATE tga.heads SET waiting = 'operator' {OF_STREAM}"],
        {(STREAM, 4, "STATE_INVALID_TRANSITION")},
    ),
    "a_missing_head": ([f"DELETE FROM tga.heads {OF_STREAM}"], {(STREAM, 4, GAP)}),
    "a_missing_claim": (
        [f"DELETE FROM tga.claims {OF_STREAM}", f"DELETE FROM tga.claim_effects {OF_STREAM}"],
        {(STREAM, 4, "STATE_RECOVERY_FAILED")},
    ),
    "a_missing_claim_effect": (
        [f"DELETE FROM tga.claim_effects {OF_STREAM}"],
        {(STREAM, 4, "STATE_RECOVERY_FAILED")},
    ),
    "a_claim_of_another_payload": (
        [f"UPDATE tga.claims SET payload_digest = decode(repeat('ab', 32), 'hex') {OF_STREAM}"],
        {(STREAM, 4, "STATE_RECOVERY_FAILED")},
    ),
    "a_claim_effect_of_another_digest": (
        [f"UPDATE tga.claim_effects SET artifact_digest = decode(repeat('ab', 32), 'hex') {OF_STREAM}"],
        {(STREAM, 4, "STATE_RECOVERY_FAILED")},
    ),
    "a_changed_checkpoint": (
        [f"UPDATE tga.execution_checkpoints SET {flip('checkpoint_state', 30)} {OF_STREAM}"],
        {(STREAM, 3, MISMATCH)},
    ),
    "a_recomputed_checkpoint": (
        [
            "UPDATE tga.execution_checkpoints SET checkpoint_state = "
            f"convert_to(replace(convert_from(checkpoint_state, 'UTF8'), 'crm', 'bank'), 'UTF8') {OF_STREAM}",
            f"UPDATE tga.execution_checkpoints SET checkpoint_digest = sha256(checkpoint_state) {OF_STREAM}",
        ],
        {(STREAM, 3, MISMATCH)},
    ),
    "a_checkpoint_beyond_the_log": (
        [f"UPDATE tga.execution_checkpoints SET sequence_number = 9 {OF_STREAM}"],
        {(STREAM, 5, GAP)},
    ),
    "a_missing_attempt_of_an_unfinished_trace": (
        [f"INSERT INTO tga.dispatch_attempts VALUES ('{UNFINISHED}', 3, gen_random_uuid(), now())"],
        {(UNFINISHED, None, GAP)},
    ),
    "an_attempt_that_the_effect_does_not_list": (
        [f"INSERT INTO tga.dispatch_attempts VALUES ('{STREAM}', 2, gen_random_uuid(), now())"],
        {(STREAM, None, GAP)},
    ),
    "a_claim_of_a_stream_that_never_was": (
        ["INSERT INTO tga.claims VALUES ('s', 't', 'k', 'trace:ghost', decode(repeat('ab', 32), 'hex'))"],
        {("trace:ghost", 1, GAP)},
    ),
    "a_stream_of_no_kind": (
        [f"INSERT INTO tga.entries SELECT 'nothing:1', 1, entry, entry_digest FROM tga.entries {at(1)}"],
        {("nothing:1", None, "SCHEMA_VIOLATION")},
    ),
}


@pytest.mark.parametrize("name", TAMPERINGS)
async def test_tampering_is_found_at_its_entry(
    name: str, store: PostgresStateStore, sessions: Sessions, admin: Admin
) -> None:
    statements, expected = TAMPERINGS[name]
    await fill(store)
    await tamper(admin, *statements)
    found = places(await verify(sessions))
    assert set(found) >= expected
    assert bool(found) == bool(expected)
    assert {stream for stream, _, _ in found} <= {stream for stream, _, _ in expected}
    if expected:
        assert found[0] in expected, "the first finding must be the tampered place"


async def test_a_rewritten_tail_is_found_where_it_no_longer_links(
    store: PostgresStateStore, sessions: Sessions, admin: Admin
) -> None:
    """Bytes and digest changed together: the entry after it, or the head, tells."""
    records = await fill(store)
    for place in (2, 4):
        body = parse_object(records[place - 1].entry.body_bytes())
        forged = canonical_bytes({**body, "recorded_at": time_at(77)})
        await tamper(
            admin,
            f"UPDATE tga.entries SET entry = decode('{forged.hex()}', 'hex'), "
            f"entry_digest = decode('{digest_of_bytes(forged)}', 'hex') {at(place)}",
        )
    assert places(await verify(sessions)) == [(STREAM, 3, MISMATCH), (STREAM, 4, MISMATCH)]


async def test_a_tampered_trace_is_not_loaded_and_says_where(
    store: PostgresStateStore, sessions: Sessions, admin: Admin
) -> None:
    await fill(store)
    await tamper(
        admin,
        f"UPDATE tga.entries SET {flip('entry', 100)} {at(4)}",
    )
    with pytest.raises(ChecksumMismatch) as caught:
        await store.load_state(trace_id(1))
    assert (caught.value.stream, caught.value.sequence_number) == (STREAM, 4)
    assert (await store.load_state(trace_id(2))).state == "EXECUTING"


async def test_every_byte_of_every_stored_entry_counts(
    store: PostgresStateStore, sessions: Sessions, admin: Admin
) -> None:
    """One flip in each of a spread of bytes, each found at its entry and nowhere else."""
    records = await fill(store)
    size = len(records[1].entry.body_bytes())
    for place in range(0, size, 37):
        change = f"UPDATE tga.entries SET {flip('entry', place, 4)} {at(2)}"
        await tamper(admin, change)
        assert places(await verify(sessions)) == [(STREAM, 2, MISMATCH)]
        await tamper(admin, change)
    assert await verify(sessions) == []


@given(records=traces(), data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
async def test_for_any_stream_any_flipped_byte_is_found_at_its_entry(
    records: list[LogRecord], data: st.DataObject
) -> None:
    rows = Rows.of(records)
    assert await rows.findings() == []
    place = data.draw(st.integers(0, len(rows.entries) - 1))
    row = rows.entries[place]
    target = data.draw(st.sampled_from(["entry", "artifact"]))
    raw = bytearray(row.entry if target == "entry" else row.artifact or b"")  # type: ignore[arg-type]
    position = data.draw(st.integers(0, len(raw) - 1))
    raw[position] ^= data.draw(st.integers(1, 255))
    rows.entries[place] = StoredEntry(
        row.sequence_number,
        bytes(raw) if target == "entry" else row.entry,
        row.entry_digest,
        bytes(raw) if target == "artifact" else row.artifact,
    )
    assert places(await rows.findings()) == [(rows.stream, row.sequence_number, MISMATCH)]


@given(records=traces(), data=st.data())
@settings(deadline=None, max_examples=200, suppress_health_check=[HealthCheck.too_slow])
async def test_for_any_stream_a_dropped_swapped_doubled_or_inserted_entry_is_found(
    records: list[LogRecord], data: st.DataObject
) -> None:
    rows = Rows.of(records)
    count = len(rows.entries)
    kind = data.draw(
        st.sampled_from(["drop", "swap", "double", "insert"] if count > 1 else ["drop", "double", "insert"])
    )
    place = data.draw(st.integers(0, count - 1))
    if kind == "drop":
        del rows.entries[place]
        expected = (place + 1, GAP)
    elif kind == "swap":
        place = data.draw(st.integers(0, count - 2))
        ours, theirs = rows.entries[place], rows.entries[place + 1]
        rows.entries[place] = StoredEntry(place + 1, theirs.entry, theirs.entry_digest, theirs.artifact)
        rows.entries[place + 1] = StoredEntry(place + 2, ours.entry, ours.entry_digest, ours.artifact)
        expected = (place + 1, GAP)
    elif kind == "double":
        twin = rows.entries[place]
        later = rows.entries[place + 1 :]
        rows.entries[place + 1 :] = [
            StoredEntry(place + 2 + n, row.entry, row.entry_digest, row.artifact)
            for n, row in enumerate([twin, *later])
        ]
        expected = (place + 2, GAP)
    else:
        # A foreign entry, well-formed and with the right number, pushed in before the others.
        foreign = Rows.of(denied_trace(999)).entries[min(place, 1)]
        later = rows.entries[place:]
        rows.entries[place:] = [
            StoredEntry(place + 1 + n, row.entry, row.entry_digest, row.artifact)
            for n, row in enumerate([foreign, *later])
        ]
        expected = (place + 1, "SCHEMA_VIOLATION")
    found = await rows.findings()
    first = found[0]
    assert (first.stream, first.sequence_number, first.code) == (rows.stream, *expected)
