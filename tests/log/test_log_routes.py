"""The log over HTTP, on real sockets: what is answered verifies with nothing but the key; receipts only for whom the
trace is there to see."""

from __future__ import annotations

import asyncio
import json
from base64 import b64decode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from app.core.errors import LogForked
from app.core.merkle import Hash, leaf_hash, verify_consistency, verify_inclusion
from app.core.note import TlogProof, TreeHead, VerifierKey, open_note
from app.domain.log.condition import LogCondition
from app.domain.log.heads import fits
from app.keys.log_signer import LogSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sequencer import Sequencer
from app.postgres.sessions import Sessions
from tests.api.reading import Front, World
from tests.invariants.plans import plan_of
from tests.log.conftest import append, caught_up, sequencing
from tests.log.standing import QuietLog
from tests.traces import completed_trace, pending_trace, trace_id

TEXT = "text/plain; charset=utf-8"


async def ask(front: Front, path: str, who: str | None = "agent") -> tuple[int, str, str]:
    """Status, content type and body."""
    headers = {} if who is None else {"Authorization": f"Bearer {who}"}
    async with front.client.get(f"http://127.0.0.1:{front.port}{path}", headers=headers) as response:
        return response.status, response.headers["Content-Type"], (await response.read()).decode()


async def code_of(front: Front, path: str, who: str | None = "agent") -> tuple[int, str]:
    status, kind, body = await ask(front, path, who)
    assert kind == "application/problem+json", body
    return status, json.loads(body)["code"]


@asynccontextmanager
async def opened(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, folder: Path
) -> AsyncIterator[tuple[Front, Sequencer]]:
    async with (
        sequencing(database, signer) as sequencer,
        World(database, sessions, ledger, folder, sequencer).open() as front,
    ):
        yield front, sequencer


async def head_of(front: Front, key: VerifierKey) -> TreeHead:
    status, kind, note = await ask(front, "/v1/log/checkpoint")
    assert (status, kind) == (200, TEXT)
    return TreeHead.from_text(open_note(note, [key], fits))


def hashes_in(body: str) -> list[Hash]:
    return [Hash(b64decode(one, validate=True)) for one in json.loads(body)["hashes"]]


async def test_head_key_and_proofs_verify_with_nothing_but_what_is_answered(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path
) -> None:
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await append(ledger, 3)
        await caught_up(sessions)
        status, kind, text = await ask(front, "/v1/log/key")
        assert (status, kind) == (200, TEXT)
        key = VerifierKey.from_text(text)
        assert key == signer.verifier_key
        first = await head_of(front, key)
        await append(ledger, 77)
        await caught_up(sessions)
        last = await head_of(front, key)
        assert (first.size, last.size) == (12, 320)

        status, kind, body = await ask(front, f"/v1/log/proof/consistency?old={first.size}&new={last.size}")
        assert (status, kind) == (200, "application/json")
        assert {**json.loads(body), "hashes": None} == {"old": 12, "new": 320, "hashes": None}
        verify_consistency(old=12, new=320, old_root=first.root, new_root=last.root, proof=hashes_in(body))

        rows = await sessions.fetch(
            "SELECT l.leaf_index, e.entry FROM tga.leaves l JOIN tga.entries e USING (stream, sequence_number)"
        )
        for row in rows[::37]:
            _, _, body = await ask(front, f"/v1/log/proof/inclusion?index={row['leaf_index']}&size=320")
            verify_inclusion(
                leaf_hash(row["entry"]), index=row["leaf_index"], size=320, proof=hashes_in(body), root=last.root
            )
        for old in (0, 320):
            _, _, body = await ask(front, f"/v1/log/proof/consistency?old={old}&new=320")
            assert hashes_in(body) == []


async def test_a_receipt_proves_the_last_entry_as_it_is_sent(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path
) -> None:
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await append(ledger, 20)
        for n, records in ((9_001, completed_trace(9_001)), (9_002, pending_trace(9_002))):
            await ledger.commit(plan_of(records))
            status, kind, text = await ask(front, f"/v1/traces/{trace_id(n)}/receipt")  # waits for its head
            assert (status, kind) == (200, TEXT), text
            proof = TlogProof.from_text(text)
            assert proof.to_text() == text
            head = TreeHead.from_text(open_note(proof.note, [signer.verifier_key], fits))
            _, _, raw = await front.get(f"/v1/traces/{trace_id(n)}/entries")
            entry = raw.split(b'"entry":')[-1].split(b',"artifact":')[0]
            assert json.loads(entry)["sequence_number"] == len(records)
            verify_inclusion(leaf_hash(entry), index=proof.index, size=head.size, proof=proof.hashes, root=head.root)


async def test_a_receipt_is_only_for_whom_the_trace_is_there(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path
) -> None:
    path = f"/v1/traces/{trace_id(9_003)}/receipt"
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await ledger.commit(plan_of(completed_trace(9_003)))
        for who in ("agent", "auditor"):
            assert (await ask(front, path, who))[0] == 200
        absent = await ask(front, f"/v1/traces/{trace_id(9_004)}/receipt", "acme")
        assert absent[0] == 404
        for who in ("agent-2", "acme", "acme-agent"):
            assert await ask(front, path, who) == absent, "as if there were no such trace"
        assert await code_of(front, path, "nobody") == (403, "FORBIDDEN")
        assert (await code_of(front, path, None))[0] == 401
        assert await code_of(front, "/v1/traces/nonsense/receipt") == (404, "TRACE_NOT_FOUND")


async def test_the_head_and_proofs_are_for_everyone_who_is_someone(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path
) -> None:
    paths = (
        "/v1/log/checkpoint",
        "/v1/log/key",
        "/v1/log/proof/inclusion?index=0&size=4",
        "/v1/log/proof/consistency?old=1&new=4",
    )
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await append(ledger, 1)
        await caught_up(sessions)
        for path in paths:
            for who in ("agent", "auditor", "acme", "nobody"):
                assert (await ask(front, path, who))[0] == 200, (path, who)
            assert await code_of(front, path, None) == (401, "UNAUTHENTICATED")
            assert await code_of(front, path, "stranger") == (401, "UNAUTHENTICATED")


IMPOSSIBLE = (
    "inclusion",
    "inclusion?index=0",
    "inclusion?size=4",
    "inclusion?index=4&size=4",
    "inclusion?index=0&size=0",
    "inclusion?index=0&size=5",
    "inclusion?index=-1&size=4",
    "inclusion?index=00&size=4",
    "inclusion?index=0&size=4&size=4",
    "inclusion?index=0&size=4&x=1",
    "inclusion?index=0&size=99999999999999999999",
    "inclusion?index=%C3%A9&size=4",
    "inclusion?index=&size=",
    "consistency?old=3&new=2",
    "consistency?old=0&new=5",
    "consistency?old=1.0&new=4",
    "consistency?old=1&new=4%00",
)


async def test_a_proof_that_cannot_be_is_refused_by_name(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path
) -> None:
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await append(ledger, 1)
        await caught_up(sessions)
        for query in IMPOSSIBLE:
            assert await code_of(front, f"/v1/log/proof/{query}") == (400, "INPUT_MALFORMED"), query


async def test_what_no_head_covers_yet_is_told_so_in_time(
    database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path
) -> None:
    """Nobody sequences."""
    await ledger.commit(plan_of(completed_trace(9_005)))
    async with World(database, sessions, ledger, tmp_path).open() as front:
        assert await code_of(front, "/v1/log/checkpoint") == (409, "NOT_YET_LOGGED")
        assert await code_of(front, "/v1/log/proof/inclusion?index=0&size=1") == (409, "NOT_YET_LOGGED")
        loop = asyncio.get_running_loop()
        since = loop.time()
        assert await code_of(front, f"/v1/traces/{trace_id(9_005)}/receipt") == (409, "NOT_YET_LOGGED")
        assert loop.time() - since > 0.9  # it waited for a head; and no longer than until it was told so


async def test_a_fork_shows_in_readiness_and_so_does_a_stall(
    database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path
) -> None:
    log = QuietLog()
    async with World(database, sessions, ledger, tmp_path, log).open() as front:

        async def ready() -> tuple[int, Any]:
            await asyncio.sleep(0.55)  # what was found is believed for a moment
            status, _, body = await ask(front, "/readyz", None)
            return status, json.loads(body)

        assert await ready() == (200, {"status": "ok", "log": "ok"})
        log.condition = LogCondition("stalled", "a transaction")
        assert await ready() == (200, {"status": "ok", "log": "stalled", "reason": "a transaction"})
        log.fault = LogForked("the tree is smaller than one that was signed")
        status, document = await ready()
        assert (status, document["code"]) == (503, "LOG_FORKED")
        log.fault, log.condition = None, LogCondition()
        assert (await ready())[0] == 200


async def test_a_part_of_the_tree_that_is_gone_is_no_internal_error(
    database: Database, sessions: Sessions, ledger: PostgresLedger, signer: LogSigner, tmp_path: Path, admin: Any
) -> None:
    async with opened(database, sessions, ledger, signer, tmp_path) as (front, _):
        await append(ledger, 70)
        await caught_up(sessions)
        await admin.execute("ALTER TABLE tga.tree_nodes DISABLE TRIGGER ALL; DELETE FROM tga.tree_nodes")
        assert await code_of(front, "/v1/log/proof/inclusion?index=270&size=280") == (409, "STATE_CHECKSUM_MISMATCH")
