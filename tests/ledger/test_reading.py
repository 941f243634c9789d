"""A kind of the tests' own is listed, followed, exported, erased and proven into the tree as traces are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from app.core.chain import Head
from app.core.digest import Digest
from app.core.errors import RecoveryFailed, SequenceGap, TraceErased
from app.core.merkle import leaf_hash, verify_inclusion
from app.domain.ledger.checks import AnyRecord, Report
from app.domain.ledger.erasing import ErasableKind
from app.domain.ledger.plans import Claim
from app.domain.ledger.queries import FeedPosition, Visibility
from app.domain.ledger.verification import verify_ledger
from app.domain.log.bundle import Filter
from app.edge.watching import StreamWatch
from app.postgres.database import Database
from app.postgres.erasing import erase_stream
from app.postgres.feed import PostgresFeed
from app.postgres.ledger import PostgresLedger
from app.postgres.queries import PostgresQueries
from app.postgres.reader import open_reader
from app.postgres.sessions import Sessions
from app.postgres.state_store import PostgresStateStore
from app.postgres.tree import PostgresTree
from tests.conftest import Admin
from tests.export.world import World
from tests.ledger.counter import COUNTER, COUNTER_DOCUMENTS, GOAL, make_kind, new_identity, open_counters
from tests.ledger.test_verification import all_kinds, count_by_hand
from tests.traces import EXECUTOR, completed_trace

ALL = Visibility("default", None)


async def test_its_streams_are_seen_by_their_tenant_and_read_in_pages(
    database: Database, sessions: Sessions, admin: Admin
) -> None:
    await make_kind(admin)
    stream, queries = await counted_to_the_end(database), PostgresQueries(sessions)
    assert await queries.is_visible(stream, ALL)
    assert not await queries.is_visible(stream, Visibility("acme", None))
    assert await queries.sequence_numbers([stream, "counter:none"]) == {stream: GOAL}
    listed = [item for page in [await queries.streams(COUNTER, ALL)] for item in page.items]
    assert [(COUNTER.stream(item.identity), item.state) for item in listed] == [(stream, "DONE")]
    assert (await queries.streams(COUNTER, ALL, state="COUNTING")).items == []
    assert (await queries.streams(COUNTER, Visibility("acme", None))).items == []
    numbers, after = [], 0
    while (page := await queries.entries(stream, after_seq=after, limit=2)) and page.items:
        for item in page.items:
            record = COUNTER_DOCUMENTS.read(item.entry, item.artifact, entry_digest=Digest(item.entry_digest))
            assert record.artifact is not None
            numbers.append(record.artifact.value)
        after = page.items[-1].sequence_number
    assert numbers == [1, 2, 3, 4]


async def test_its_entries_are_in_the_feed_and_wake_who_follows_the_stream(
    database: Database, sessions: Sessions, admin: Admin
) -> None:
    await make_kind(admin)
    identity = new_identity()
    with StreamWatch(PostgresQueries(sessions)).watching(COUNTER.stream(identity), 0) as watched:
        stream = await counted_to_the_end(database, identity)
        known = 0
        while known < GOAL:
            await watched.beyond(known)
            known = watched.head.value
    found, after = [], FeedPosition()
    while (page := await PostgresFeed(sessions).page(ALL, after=after, limit=3)).items or page.next != after:
        found += [(item.stored.stream, item.stored.sequence_number) for item in page.items]
        after = page.next
    assert [place for place in found if place[0] == stream] == [(stream, n) for n in range(1, GOAL + 1)]
    assert (await PostgresFeed(sessions).page(Visibility("acme", None), after=FeedPosition(), limit=100)).items == []


async def test_its_entries_are_leaves_with_proofs_and_stand_in_a_tenants_bundle(
    database: Database, sessions: Sessions, store: PostgresStateStore, admin: Admin, tmp_path: Path
) -> None:
    await make_kind(admin)
    world = World(database, sessions, store, tmp_path / "keys")
    await world.announce()
    streams = await count_by_hand(PostgresLedger(sessions), [1, 2, 3], counters=2)
    await world.append(completed_trace(1))
    signed = await world.sequence()
    tree = PostgresTree(sessions)
    for stream in streams:
        place = await tree.place_of(stream, 3)
        entry = await tree.entry_bytes(stream, 3)
        assert place is not None
        assert entry is not None
        proof = await tree.inclusion_proof(place.index, signed.head.size)
        verify_inclusion(leaf_hash(entry), index=place.index, size=signed.head.size, proof=proof, root=signed.head.root)
    await world.export(tmp_path / "bundle", Filter(tenant="default"))
    lines = (tmp_path / "bundle" / "entries.jsonl").read_text("utf-8").splitlines()
    held = [json.loads(line)["stream"] for line in lines]
    assert {stream: held.count(stream) for stream in streams} == dict.fromkeys(streams, 3)
    await world.export(tmp_path / "other", Filter(tenant="acme"))
    assert not any(stream in (tmp_path / "other" / "entries.jsonl").read_text("utf-8") for stream in streams)


async def test_its_payloads_are_erased_on_the_record_and_not_if_it_is_wrong(
    database: Database, sessions: Sessions, store: PostgresStateStore, admin: Admin, tmp_path: Path
) -> None:
    await make_kind(admin)
    world = World(database, sessions, store, tmp_path / "keys")
    await world.announce()
    (stream,) = await count_by_hand(PostgresLedger(sessions), [1, 2, 3])
    said = {"tenant": "default", "erased_by": "olga", "rationale": "asked for"}

    async def erase(kind: ErasableKind) -> None:
        await erase_stream(sessions, world.system, world.clock, EXECUTOR, stream, kind, **said)

    def refuse(records: Sequence[AnyRecord], claim: Claim | None, effect: Digest | None) -> Head:
        raise RecoveryFailed("it is wrong")

    with pytest.raises(RecoveryFailed):
        await erase(ErasableKind(COUNTER_DOCUMENTS, refuse))
    with pytest.raises(SequenceGap):
        await erase(ErasableKind(COUNTER_DOCUMENTS, lambda records, claim, effect: Head.unborn(COUNTER)))
    await erase(ErasableKind(COUNTER_DOCUMENTS, _counted))
    with pytest.raises(TraceErased):
        await erase(ErasableKind(COUNTER_DOCUMENTS, _counted))
    async with open_reader(sessions) as reader:
        report = Report()
        assert [error async for error in verify_ledger(reader, all_kinds(), report)] == []
        assert report.erased_streams == 1


def _counted(records: Sequence[AnyRecord], claim: Claim | None, effect: Digest | None) -> Head:
    head = Head.unborn(COUNTER)
    for record in records:
        head = COUNTER_DOCUMENTS.verify_next(head, record)
    return head


async def counted_to_the_end(database: Database, identity: str | None = None) -> str:
    async with open_counters(database.gateway_url) as counters:
        identity = identity or new_identity()
        assert (await counters.count(identity)).is_at_rest
    return COUNTER.stream(identity)
