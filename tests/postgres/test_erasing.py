"""Erasure: the payloads of a finished trace go, the chain stands, and a system stream says so; nothing else does it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import asyncpg
import pytest

from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import (
    ChecksumMismatch,
    OutcomeUnknown,
    RecoveryFailed,
    SchemaViolation,
    TgaError,
    TraceErased,
    TraceNotFound,
    TraceUnfinished,
)
from app.domain.identity import Principal
from app.domain.ledger.checks import Report
from app.domain.system.log import SystemState
from app.domain.tga.documents import JsonOutput
from app.domain.tga.erasing import ERASABLE_TRACES
from app.domain.tga.ports import Answered
from app.domain.tga.runtime import CheckedCall
from app.domain.tga.transitions import TRACE
from app.postgres.database import Database
from app.postgres.erasing import erase_stream
from app.postgres.sessions import Sessions
from tests.conftest import Admin
from tests.invariants.plans import contents, tables_naming, verify_all
from tests.runtime.scripted import PRINCIPAL, TIMED_OUT, WRITE, Scripted, call, new_key, open_scripted
from tests.runtime.supervised import ask, decide, find, holding, runtime_of
from tests.runtime.tampering import rewrite, untriggered

DELETE_PAYLOADS = "DELETE FROM tga.payloads p USING tga.heads h WHERE h.stream_no = p.stream_no AND h.stream = $1"
MARKER = "Erika-Mustermann-1964"
ANSWERED = Answered("SUCCESS", JsonOutput(encoding="json", value={"said": MARKER}))
SECRET = replace(WRITE, secret_arguments=("/card",))


async def erase(scripted: Scripted, trace_id: str, **changes: Any) -> None:
    said: dict[str, Any] = {"tenant": "default", "erased_by": "olga", "rationale": "asked for", **changes}
    executor_id = scripted.traces.executor_id()
    stream, kind = TRACE.stream(trace_id), ERASABLE_TRACES
    await erase_stream(scripted.sessions, scripted.system.log, scripted.clock, executor_id, stream, kind, **said)


@asynccontextmanager
async def erased_trace(url: str) -> AsyncIterator[tuple[Scripted, str]]:
    async with open_scripted(url, ANSWERED) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await erase(scripted, answer.trace_id)
        yield scripted, f"trace:{answer.trace_id}"


async def test_payloads_go_and_the_chain_stands(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, ANSWERED) as scripted:
        first, second = [await scripted.runtime.call(call(key=new_key())) for _ in range(2)]
        stream = f"trace:{first.trace_id}"
        before = await admin.fetch("SELECT * FROM tga.entries WHERE stream = $1 ORDER BY sequence_number", stream)
        await erase(scripted, first.trace_id)
        after = await admin.fetch("SELECT * FROM tga.entries WHERE stream = $1 ORDER BY sequence_number", stream)
        assert after == before
        assert len(after) == 4
        tables = await tables_naming(admin, stream)
        assert "payloads" not in tables
        assert (tables["links"], tables["erasures"], tables["heads"]) == (4, 1, 1)
        for claim in ("claims", "claim_effects"):
            assert await admin.fetchval(f"SELECT count(*) FROM tga.{claim} WHERE stream = $1", stream) == 1
        assert await tables_naming(admin, f"trace:{second.trace_id}") == {
            **{table: count for table, count in tables.items() if table != "erasures"},
            "payloads": 2,
        }
        report = await verify_all(scripted.sessions)
        assert (report.erased_streams, report.findings) == (1, 0)
        document = await admin.fetchval(
            "SELECT a.artifact FROM tga.erasures e JOIN tga.artifacts a"
            " ON (a.stream, a.sequence_number) = (e.system_stream, e.sequence_number) WHERE e.stream = $1",
            stream,
        )
        said = parse_object(document)
        assert (said["system_id"], said["recorded_by"], said["rationale"]) == ("default", "olga", "asked for")
        assert said["last_entry_digest"] == before[-1]["entry_digest"].hex()
        assert said["artifact_digests"] == [parse_object(row["entry"])["artifact_digest"] for row in before]


async def test_a_repeat_of_an_erased_call_executes_nothing(database: Database) -> None:
    key = new_key()
    async with open_scripted(database.gateway_url, ANSWERED) as scripted:
        answer = await scripted.runtime.call(call(key=key))
        await erase(scripted, answer.trace_id)
        for amount in (1, 2):
            with pytest.raises(TraceErased):
                await scripted.runtime.call(call(key=key, amount=amount))
        with pytest.raises(TraceErased):
            await scripted.traces.load_trace(answer.trace_id)
        with pytest.raises(TraceErased):
            await scripted.runtime.recover(answer.trace_id)
        assert len(scripted.connector.sent) == 1
        await verify_all(scripted.sessions)


@pytest.mark.parametrize("ending", ["COMPLETED", "FAILED", "DENIED"])
async def test_every_finished_trace_can_be_erased(ending: str, database: Database) -> None:
    answer_of = {"COMPLETED": ANSWERED, "FAILED": Answered("FAILURE", None, "no", MARKER), "DENIED": ANSWERED}
    async with open_scripted(database.gateway_url, answer_of[ending]) as scripted:
        scripted.supervisor.answer = "deny" if ending == "DENIED" else "allow"
        answer = await scripted.runtime.call(call(key=new_key()))
        assert answer.state == ending
        await erase(scripted, answer.trace_id)
        assert (await verify_all(scripted.sessions)).erased_streams == 1


async def test_what_cannot_be_erased_stays(database: Database, admin: Admin) -> None:
    async with open_scripted(
        database.gateway_url, TIMED_OUT, tool=replace(WRITE, on_unknown_outcome="hold")
    ) as scripted:
        held = await scripted.runtime.call(call(key=new_key()))
        waiting = await ask(scripted)
        before = await contents(admin)
        for unfinished in (held.trace_id, waiting):
            with pytest.raises(TraceUnfinished):
                await erase(scripted, unfinished)
        with pytest.raises(TraceNotFound):
            await erase(scripted, scripted.clock.new_id())
        with pytest.raises(TraceNotFound):
            await erase(scripted, held.trace_id, tenant="other")
        assert await contents(admin) == before


async def test_a_trace_is_erased_once(database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        before = await contents(admin)
        with pytest.raises(TraceErased):
            await erase(scripted, stream.partition(":")[2])
        assert await contents(admin) == before
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        answer = await one.runtime.call(call(key=new_key()))
        tries = [erase(gateway, answer.trace_id) for gateway in (one, other, one, other)]
        results = await asyncio.gather(*tries, return_exceptions=True)
        assert [type(result) for result in results if result] == [TraceErased] * 3
        assert (await verify_all(one.sessions)).erased_streams == 2


async def test_many_gateways_erase_at_once_and_one_system_stream_says_it_all(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        answers = [await one.runtime.call(call(key=new_key())) for _ in range(8)]
        await asyncio.gather(
            *(erase((one, other)[number % 2], answer.trace_id) for number, answer in enumerate(answers))
        )
        report = await verify_all(one.sessions)
        assert report.erased_streams == 8
        places = await admin.fetch("SELECT system_stream, sequence_number FROM tga.erasures")
        assert len({tuple(row) for row in places}) == 8


async def test_another_tenants_erasure_is_on_its_own_system_stream(database: Database, admin: Admin) -> None:
    tool = replace(WRITE, tenant="acme")
    async with open_scripted(database.gateway_url, tool=tool) as scripted:
        acme = Principal(principal_id="agent-1", tenant="acme")
        answer = await scripted.runtime.call(call(key=new_key(), principal=acme))
        await erase(scripted, answer.trace_id, tenant="acme")
        assert await admin.fetchval("SELECT system_stream FROM tga.erasures") == "system:acme"
        await verify_all(scripted.sessions)


async def test_a_reason_that_does_not_fit_its_schema_erases_nothing(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        before = await contents(admin)
        for wrong in ({"rationale": "r" * 4097}, {"erased_by": "two words"}):
            with pytest.raises(SchemaViolation):
                await erase(scripted, answer.trace_id, **wrong)
        assert await contents(admin) == before


async def test_a_lost_answer_is_not_taken_for_anothers_erasure(database: Database) -> None:
    """The erasure was committed and its answer lost: the second try finds it, and that it is its own."""

    class Losing:
        def __init__(self, inner: Sessions) -> None:
            self.fetch, self._inner, self.lost = inner.fetch, inner, 0

        async def commit(self, statement: str, *arguments: Any) -> list[asyncpg.Record]:
            rows = await self._inner.commit(statement, *arguments)
            if "tga.erase" in statement and not self.lost:
                self.lost += 1
                raise OutcomeUnknown("lost")
            return rows

    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        losing: Any = Losing(scripted.sessions)
        executor_id = scripted.traces.executor_id()
        await erase_stream(
            losing,
            scripted.system.log,
            scripted.clock,
            executor_id,
            TRACE.stream(answer.trace_id),
            ERASABLE_TRACES,
            tenant="default",
            erased_by="olga",
            rationale="",
        )
        assert losing.lost == 1
        assert (await verify_all(scripted.sessions)).erased_streams == 1


async def test_a_tampered_trace_is_not_erased(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, ANSWERED) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            await admin.execute(
                "UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = $1 AND sequence_number = 4",
                f"trace:{answer.trace_id}",
            )
        with pytest.raises(ChecksumMismatch):
            await erase(scripted, answer.trace_id)
        assert await admin.fetchval("SELECT count(*) FROM tga.erasures") == 0


# What is left


async def test_nothing_of_the_payload_is_left_in_any_table(database: Database, admin: Admin) -> None:
    """Arguments, secrets, intent, the answer and the reason of a decision. An announcement is gone, too."""
    tool = replace(SECRET, on_unknown_outcome="redispatch")
    async with open_scripted(database.gateway_url, TIMED_OUT, ANSWERED, tool=tool) as scripted:
        scripted.supervisor.answer = "ask"
        arguments = {"amount": 1, "name": MARKER, "card": f"4111-{MARKER}"}
        asking = CheckedCall("crm", "create", arguments, new_key(), PRINCIPAL, intent=MARKER)
        asked = await runtime_of(scripted, webhooks=("hook",)).call(asking)
        assert await admin.fetchval("SELECT count(*) FROM tga.outbox") == 1
        await decide(scripted, asked.trace_id, rationale=MARKER)
        assert (await holding(admin, MARKER)).keys() == {"payloads"}
        assert await admin.fetchval("SELECT count(*) FROM tga.sealed") == 1
        await erase(scripted, asked.trace_id)
        assert await holding(admin, MARKER) == {}
        for table in ("sealed", "outbox"):
            assert await admin.fetchval(f"SELECT count(*) FROM tga.{table}") == 0
        await verify_all(scripted.sessions)


async def test_what_an_erasure_leaves_is_named(database: Database, admin: Admin) -> None:
    """An operator's order to send again, with its reason, and the names: key, principal, tool. Not the payload."""
    tool = replace(WRITE, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, TIMED_OUT, ANSWERED, tool=tool) as scripted:
        held = await scripted.runtime.call(call(key=f"{MARKER}-key"))
        stored = await scripted.traces.load_trace(held.trace_id)
        assert stored.state.tool_call_digest is not None
        await scripted.runtime.resolve(
            held.trace_id,
            action="redispatch",
            tool_call_digest=stored.state.tool_call_digest,
            resolved_by="olga",
            rationale=f"{MARKER}-order",
        )
        await erase(scripted, held.trace_id)
        assert (await holding(admin, f"{MARKER}-order")).keys() == {"dispatch_attempts"}
        assert (await holding(admin, f"{MARKER}-key")).keys() == {"heads"}
        assert "heads" in await holding(admin, PRINCIPAL.principal_id)


# Guards and tampering


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM tga.payloads",
        "DELETE FROM tga.payloads WHERE sequence_number = 4",
        "UPDATE tga.payloads SET artifacts[1] = '\\x00'",
        "TRUNCATE tga.payloads",
        "DELETE FROM tga.erasures",
        "UPDATE tga.erasures SET stream = 'trace:x'",
        "TRUNCATE tga.erasures",
    ],
)
async def test_a_superuser_cannot_remove_payloads_without_an_erasure(
    statement: str, database: Database, admin: Admin
) -> None:
    async with erased_trace(database.gateway_url) as (scripted, _):
        await scripted.runtime.call(call(key=new_key()))
        await admin.execute("SET session_replication_role = replica")  # gets past ordinary triggers
        with pytest.raises(asyncpg.InsufficientPrivilegeError, match="append-only"):
            await admin.execute(statement)
        await verify_all(scripted.sessions)


async def test_a_system_stream_is_never_erased(database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, _):
        state = scripted.system.log.state_of("default")
        said = {**parse_object(await last_of(admin, "artifact")), "erased_stream": "system:default"}
        artifact = canonical_bytes(said)
        entry = await _entry_of(admin, state, artifact)
        rows = await scripted.sessions.commit(
            "SELECT * FROM tga.erase(1000, 'system:default', 'system:default', $1::uuid, $2, $3, NULL)",
            scripted.traces.executor_id(),
            entry,
            artifact,
        )
        assert rows[0]["code"] == TraceUnfinished.code
        with pytest.raises(TraceNotFound):
            await erase(scripted, "default")
        async with untriggered(admin):
            await admin.execute("INSERT INTO tga.erasures VALUES ('system:default', 'system:default', 1)")
        assert [finding.what for finding in await find(scripted.sessions)] == ["a system stream is never erased"]


async def last_of(admin: Admin, column: str) -> bytes:
    """The last entry, or artifact, of the system stream."""
    row = await admin.fetchrow(
        "SELECT * FROM tga.entries JOIN tga.artifacts USING (stream, sequence_number)"
        " WHERE stream = 'system:default' ORDER BY sequence_number DESC LIMIT 1"
    )
    assert row is not None
    return bytes(row[column])


async def _entry_of(admin: Admin, state: SystemState, artifact: bytes) -> bytes:
    last = await last_of(admin, "entry")
    body = {
        **parse_object(last),
        "sequence_number": state.head.sequence_number + 1,
        "prev_entry_digest": state.head.entry_digest,
        "artifact_digest": digest_of_bytes(artifact),
    }
    return canonical_bytes(body)


@pytest.mark.parametrize("change", [{"erased_stream": "trace:another"}, {"schema_id": "tga/v1/tool_pin"}])
async def test_the_database_takes_no_erasure_of_something_else(
    change: dict[str, str], database: Database, admin: Admin
) -> None:
    async with erased_trace(database.gateway_url) as (scripted, _):
        answer = await scripted.runtime.call(call(key=new_key()))
        artifact = canonical_bytes(
            {**parse_object(await last_of(admin, "artifact")), "erased_stream": f"trace:{answer.trace_id}", **change}
        )
        entry = await _entry_of(admin, await scripted.system.log.refresh("default"), artifact)
        before = await contents(admin)
        rows = await scripted.sessions.commit(
            "SELECT * FROM tga.erase(1000, $1, 'system:default', $2::uuid, $3, $4, NULL)",
            f"trace:{answer.trace_id}",
            scripted.traces.executor_id(),
            entry,
            artifact,
        )
        assert rows[0]["code"] == SchemaViolation.code
        assert await contents(admin) == before


async def test_payloads_removed_without_an_erasure_are_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            await admin.execute("DELETE FROM tga.artifacts WHERE stream LIKE 'trace:%' AND sequence_number = 1")
        found = await find(scripted.sessions)
        assert {(error.stream, error.sequence_number) for error in found} >= {(f"trace:{answer.trace_id}", 1)}
        with pytest.raises(TgaError):
            await scripted.traces.load_trace(answer.trace_id)


async def test_an_erasure_row_without_its_document_is_found(database: Database, admin: Admin) -> None:
    """What a superuser would do to be rid of payloads: say that they were erased."""
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        stream = f"trace:{answer.trace_id}"
        await admin.execute("INSERT INTO tga.erasures VALUES ($1, 'system:default', 99)", stream)
        await admin.execute(DELETE_PAYLOADS, stream)
        report = Report()
        found = await find(scripted.sessions, report)
        assert [(error.stream, error.what) for error in found] == [(stream, "the erasure is not on the record")]
        assert (report.findings, report.broken_streams) == (1, 1)


async def test_an_erasure_row_that_points_at_another_document_is_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        await admin.execute("INSERT INTO tga.erasures VALUES ($1, 'system:default', 1)", f"trace:{answer.trace_id}")
        await admin.execute(DELETE_PAYLOADS, f"trace:{answer.trace_id}")
        assert [error.code for error in await find(scripted.sessions)] == [SchemaViolation.code]


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"erased_stream": "trace:another"}, "the erasure is of something else"),
        ({"last_entry_digest": "0" * 64}, "the erasure is of something else"),
        ({"last_sequence_number": 3}, "the erasure is of something else"),
        ({"artifact_digests": []}, "the erasure names other payloads"),
        ({"artifact_digests": ["0" * 64] * 4}, "the erasure names other payloads"),
    ],
    ids=str,
)
async def test_an_erasure_of_something_else_is_found(
    change: dict[str, Any], what: str, database: Database, admin: Admin
) -> None:
    """The system stream is rewritten and its chain computed anew; only the erasure no longer fits the trace."""
    async with erased_trace(database.gateway_url) as (scripted, stream):
        await rewrite(admin, "system:default", lambda _, said: {**said, **change} if "erased_stream" in said else said)
        found = await find(scripted.sessions)
        assert [(error.stream, error.what) for error in found] == [(stream, what)]


async def test_a_payload_that_was_left_standing_is_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url, ANSWERED) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        stream = f"trace:{answer.trace_id}"
        rows = await admin.fetch(
            "SELECT p.* FROM tga.payloads p JOIN tga.heads h USING (stream_no) WHERE h.stream = $1", stream
        )
        await erase(scripted, answer.trace_id)
        for row in rows:
            await admin.execute("INSERT INTO tga.payloads VALUES ($1, $2, $3)", *row.values())
        found = await find(scripted.sessions)
        assert {error.what for error in found} == {"a payload stands that was erased"}


async def test_an_erasure_on_another_tenants_stream_is_found(database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        async with untriggered(admin):
            await admin.execute("UPDATE tga.heads SET tenant = 'acme' WHERE stream = $1", stream)
        found = await find(scripted.sessions)
        assert [error.what for error in found] == ["another tenant's system stream has the erasure"]


@pytest.mark.parametrize(
    "damage", ["DELETE FROM tga.claim_effects", "UPDATE tga.claim_effects SET artifact_digest = sha256('x')"]
)
async def test_the_claim_of_an_erased_trace_must_say_its_effect(damage: str, database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        async with untriggered(admin):
            await admin.execute(damage)
        found = await find(scripted.sessions)
        assert [(error.stream, error.what) for error in found] == [(stream, "claim and log disagree on the effect")]


async def test_an_entry_of_an_erased_trace_that_is_changed_is_found(database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        async with untriggered(admin):
            await admin.execute(
                "UPDATE tga.entries SET entry = set_byte(entry, 40, 88), entry_digest = sha256(set_byte(entry, 40, 88))"
                " WHERE stream = $1 AND sequence_number = 2",
                stream,
            )
        found = await find(scripted.sessions)
        assert {(error.stream, error.sequence_number) for error in found} >= {(stream, 2)}


# The claim of an erased trace

CLAIM_FINDINGS = {
    "DELETE FROM tga.claims": "the claim of the erased trace's key is missing",
    "UPDATE tga.claims SET idempotency_key = 'another'": "the erased trace had the claim of another key",
    "UPDATE tga.claims SET server_id = 'another'": "the erased trace had the claim of another key",
    "UPDATE tga.claims SET tool_name = 'another'": "the erased trace had the claim of another key",
    "UPDATE tga.claims SET payload_digest = sha256('x')": "the payload digest of the erased trace's claim was changed",
    "UPDATE tga.erasures SET claim_salt = sha256('x')": "the payload digest of the erased trace's claim was changed",
    "UPDATE tga.erasures SET claim_salt = NULL": "the payload digest of the erased trace's claim was changed",
    # One pair of columns is the head's and the claim's.
    "UPDATE tga.heads SET name = 'other' WHERE stream LIKE 'trace:%'": "the erased trace had the claim of another key",
}


@pytest.mark.parametrize("damage", CLAIM_FINDINGS)
async def test_a_claim_of_an_erased_trace_that_is_not_what_it_was_is_found(
    damage: str, database: Database, admin: Admin
) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        async with untriggered(admin):
            await admin.execute(damage)
        found = await find(scripted.sessions)
        assert [error.stream for error in found if CLAIM_FINDINGS[damage] in error.what] == [stream]
        # The trace's checkpoint, which says of the claim what it was, may contradict the row too.
        codes = {error.code for error in found}
        assert RecoveryFailed.code in codes
        assert codes <= {RecoveryFailed.code, ChecksumMismatch.code}
        salt = await admin.fetchval("SELECT claim_salt FROM tga.erasures")
        shown = " ".join(str(error) for error in found)
        assert salt is None or salt.hex() not in shown, "nobody who reads the findings can open the commitment"


async def test_a_claim_that_is_given_to_another_trace_is_found_at_both(database: Database, admin: Admin) -> None:
    async with erased_trace(database.gateway_url) as (scripted, stream):
        other = await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            claim = await admin.fetchrow("SELECT * FROM tga.claims WHERE stream = $1", stream)
            assert claim is not None
            await admin.execute("DELETE FROM tga.claims")
            given = {**dict(claim), "stream": f"trace:{other.trace_id}"}
            await admin.execute("INSERT INTO tga.claims VALUES ($1, $2, $3, $4, $5)", *given.values())
        found = {error.stream for error in await find(scripted.sessions)}
        assert found == {stream, f"trace:{other.trace_id}"}


async def test_a_key_that_was_freed_and_used_again_is_found_at_the_erased_trace(
    database: Database, admin: Admin
) -> None:
    key = new_key()
    async with open_scripted(database.gateway_url, ANSWERED, ANSWERED) as scripted:
        first = await scripted.runtime.call(call(key=key))
        await erase(scripted, first.trace_id)
        async with untriggered(admin):
            await admin.execute("DELETE FROM tga.claims; DELETE FROM tga.claim_effects")
        second = await scripted.runtime.call(call(key=key))
        assert (second.state, len(scripted.connector.sent)) == ("COMPLETED", 2), "a superuser gets past everything"
        (found,) = await find(scripted.sessions)
        assert (found.stream, found.what) == (
            f"trace:{first.trace_id}",
            "the claim of the erased trace's key is missing",
        )


async def test_a_claim_for_an_erased_trace_that_had_none_is_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        scripted.supervisor.answer = "deny"
        denied = await scripted.runtime.call(call(key=new_key()))
        await erase(scripted, denied.trace_id)
        assert parse_object(await last_of(admin, "artifact"))["claim"] is None
        await verify_all(scripted.sessions)
        stream = f"trace:{denied.trace_id}"
        async with untriggered(admin):
            await admin.execute("INSERT INTO tga.claims VALUES ('crm', 'create', 'k', $1, sha256('x'))", stream)
        found = await find(scripted.sessions)
        assert [(error.stream, error.what) for error in found] == [(stream, "the erased trace had no claim")]


@pytest.mark.parametrize(
    "damage",
    [
        "DELETE FROM tga.claims",
        "UPDATE tga.claims SET idempotency_key = 'another'",
        "UPDATE tga.claims SET payload_digest = sha256('x')",
        "DELETE FROM tga.claim_effects",
    ],
)
async def test_a_trace_whose_claim_was_tampered_with_is_not_erased(
    damage: str, database: Database, admin: Admin
) -> None:
    """Afterwards nobody could compare the two, and the erasure would vouch for the wrong one."""
    async with open_scripted(database.gateway_url, ANSWERED) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            await admin.execute(damage)
        with pytest.raises(RecoveryFailed):
            await erase(scripted, answer.trace_id)
        assert await admin.fetchval("SELECT count(*) FROM tga.erasures") == 0


@pytest.mark.parametrize("claim", [None, {"key_digest": "0" * 64}, {"payload_commitment": "0" * 64}])
async def test_the_database_takes_no_erasure_that_says_another_claim(
    claim: dict[str, str] | None, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url, ANSWERED, ANSWERED) as scripted:
        first, second = [await scripted.runtime.call(call(key='say "a\\b/c"' if n else new_key())) for n in (0, 1)]
        await erase(scripted, first.trace_id)
        stream, salt = f"trace:{second.trace_id}", bytes(32)
        row = await admin.fetchrow("SELECT * FROM tga.claims WHERE stream = $1", stream)
        assert row is not None
        key = {name: row[name] for name in ("server_id", "tool_name", "idempotency_key")}
        right = {
            "key_digest": digest_of_bytes(canonical_bytes(key)),
            "payload_commitment": digest_of_bytes(salt + row["payload_digest"]),
        }

        async def code_of(said: Any) -> Any:
            document = {**parse_object(await last_of(admin, "artifact")), "erased_stream": stream, "claim": said}
            entry = await _entry_of(admin, await scripted.system.log.refresh("default"), canonical_bytes(document))
            rows = await scripted.sessions.commit(
                "SELECT * FROM tga.erase(1000, $1, 'system:default', $2::uuid, $3, $4, $5)",
                stream,
                scripted.traces.executor_id(),
                entry,
                canonical_bytes(document),
                salt,
            )
            return rows[0]["code"]

        before = await contents(admin)
        assert await code_of(None if claim is None else {**right, **claim}) == RecoveryFailed.code
        assert await contents(admin) == before
        assert await code_of(right) is None, "and the right one it takes"


async def test_two_erasures_of_one_payload_look_different(database: Database, admin: Admin) -> None:
    """Whoever has an export and a guess of the arguments cannot try it on the commitment: its salt is not there."""
    async with open_scripted(database.gateway_url, ANSWERED, ANSWERED) as scripted:
        said: list[Any] = []
        for _ in range(2):
            answer = await scripted.runtime.call(call(key=new_key()))
            await erase(scripted, answer.trace_id)
            said.append(parse_object(await last_of(admin, "artifact"))["claim"])
        payloads = await admin.fetch("SELECT DISTINCT payload_digest FROM tga.claims")
        assert len(payloads) == 1
        assert len({claim["payload_commitment"] for claim in said}) == 2
        for row in await admin.fetch("SELECT claim_salt FROM tga.erasures"):
            for secret in (row["claim_salt"], payloads[0]["payload_digest"]):
                assert "artifacts" not in await holding(admin, secret.hex())
