"""What waits for a person: bound to exact bytes, used once, signed, over in time, and judged again before it runs."""

from __future__ import annotations

import asyncio
import base64
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from app.core.digest import digest_of
from app.core.errors import (
    AlreadyDecided,
    ApprovalExpired,
    ApprovalNotExpired,
    ConcurrentExecution,
    Forbidden,
    RequestMismatch,
    SchemaViolation,
    SignatureInvalid,
    TgaError,
    ToolNotFound,
    ToolQuarantined,
)
from app.domain.identity import Principal
from app.domain.ledger.checks import Report
from app.domain.ledger.verification import verify_ledger
from app.domain.runs.verification import stream_checks
from app.domain.tga.documents import SupervisorDecision, TraceId
from app.domain.tga.runtime import CheckedCall
from app.domain.tga.supervision import Ruling
from app.postgres.database import Database
from app.postgres.reader import open_reader
from tests.attacker import disarm
from tests.conftest import Admin
from tests.invariants.plans import contents, verify_all
from tests.runtime.scripted import PRINCIPAL, TIMED_OUT, WRITE, Scripted, call, new_key, open_scripted
from tests.runtime.supervised import ADA, BOB, Signer, Skewed, ask, decide, digest_asked, find, runtime_of
from tests.runtime.tampering import rewrite

CHANGED = replace(WRITE, definition_digest=digest_of({"tool": "create, but another"}))
SHORT = replace(WRITE, approval_timeout_ms=1_000)
TRACEPARENT = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"


async def head(admin: Admin, trace_id: TraceId) -> dict[str, Any]:
    row = await admin.fetchrow("SELECT * FROM tga.heads WHERE stream = $1", f"trace:{trace_id}")
    assert row is not None
    return dict(row)


async def until_expired(admin: Admin, trace_id: TraceId) -> None:
    """By the clock that counts: the database's."""
    due = "SELECT extract(epoch FROM expires_at - clock_timestamp()) FROM tga.heads WHERE stream = $1"
    await asyncio.sleep(max(0.0, float(await admin.fetchval(due, f"trace:{trace_id}")) + 0.01))


# Waiting


async def test_a_waiting_request_is_owned_by_nobody_and_locks_nothing(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        found = await head(admin, asked)
        assert (found["state"], found["owner"], found["waiting"]) == ("PENDING", None, "supervisor")
        held = await admin.fetch(
            # But for the one that says that the executor lives.
            "SELECT l.locktype, l.mode FROM pg_locks l JOIN pg_database d ON d.oid = l.database"
            " WHERE d.datname = current_database() AND l.pid <> pg_backend_pid()"
            "   AND (l.locktype <> 'advisory' OR NOT l.granted OR l.pid NOT IN (SELECT pid FROM pg_stat_activity"
            "        WHERE application_name <> ''))"
        )
        assert held == []
        assert scripted.runtime.at_work(WRITE.server_id) == 0
        assert scripted.connector.sent == []


async def test_what_waits_survives_the_gateway_and_the_decision_may_come_through_another(database: Database) -> None:
    async with open_scripted(database.gateway_url) as first:
        asked = await ask(first)
    async with open_scripted(database.gateway_url) as second:
        assert [one async for one in second.runtime.recover_all()] == []
        answer = await decide(second, asked)
        assert (answer.state, len(second.connector.sent)) == ("COMPLETED", 1)
        await verify_all(second.sessions)


async def test_an_approval_runs_the_call_once_and_is_on_the_record(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        key = new_key()
        asked = await ask(scripted, key=key)
        answer = await decide(scripted, asked, rationale="seen")
        assert answer.decision is not None
        assert (answer.decision.decided_by.type, answer.decision.decided_by.id) == ("person", "ada")
        assert (answer.decision.rationale, answer.state) == ("seen", "COMPLETED")
        assert set(answer.decision.policy_ids) == {"says", "says-approve"}
        repeat = await scripted.runtime.call(call(key=key))
        assert (repeat.replayed, repeat.trace_id, len(scripted.connector.sent)) == (True, asked, 1)
        assert (await verify_all(scripted.sessions)).signatures == 1


async def test_a_denial_keeps_the_key_used_and_sends_nothing(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        key = new_key()
        asked = await ask(scripted, key=key)
        answer = await decide(scripted, asked, "DENY")
        repeat = await scripted.runtime.call(call(key=key))
        assert (answer.state, repeat.state, repeat.trace_id) == ("DENIED", "DENIED", asked)
        assert scripted.connector.sent == []
        assert (await verify_all(scripted.sessions)).signatures == 1


@pytest.mark.parametrize("decision", ["APPROVE", "DENY"])
async def test_a_decision_binds_to_the_bytes_of_one_request(decision: Any, database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, other = await ask(scripted), await ask(scripted, amount=2)
        before = await contents(admin)
        with pytest.raises(RequestMismatch):
            await decide(scripted, asked, decision, action_request_digest=await digest_asked(scripted, other))
        assert await contents(admin) == before | {"heads": (await contents(admin))["heads"]}
        found = await head(admin, asked)
        assert (found["state"], found["owner"], found["waiting"]) == ("PENDING", None, "supervisor")
        assert (await decide(scripted, asked)).state == "COMPLETED"


@pytest.mark.parametrize("second", ["APPROVE", "DENY"])
@pytest.mark.parametrize("first", ["APPROVE", "DENY"])
async def test_a_decision_is_used_once(first: Any, second: Any, database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        await decide(scripted, asked, first)
        with pytest.raises(AlreadyDecided):
            await decide(scripted, asked, second)
        with pytest.raises(AlreadyDecided):
            await scripted.runtime.withdraw(asked, PRINCIPAL)
        with pytest.raises(AlreadyDecided):
            await scripted.runtime.expire(asked)
        assert len(scripted.connector.sent) == (first == "APPROVE")
        await verify_all(scripted.sessions)


async def test_many_approve_at_once_and_the_call_runs_once(database: Database) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(open_scripted(database.gateway_url)) for _ in range(3)]
        asked = await ask(gateways[0])
        digest = await digest_asked(gateways[0], asked)
        rulings = [
            gateway.runtime.decide(asked, Ruling("APPROVE", who, digest)) for gateway in gateways for who in (ADA, BOB)
        ]
        results = await asyncio.gather(*rulings, return_exceptions=True)
        refused = [result for result in results if isinstance(result, BaseException)]
        assert len(refused) == 5
        assert {type(error) for error in refused} <= {AlreadyDecided, ConcurrentExecution}
        assert sum(len(gateway.connector.sent) for gateway in gateways) == 1
        await verify_all(gateways[0].sessions)


# Signatures


async def test_a_supervisors_own_signature_is_kept_and_verified(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        await scripted.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
        answer = await scripted.runtime.decide(asked, await signer.ruling(scripted, asked))
        assert answer.decision is not None
        assert answer.decision.signature is not None
        assert (answer.decision.signature.key_id, answer.state) == (signer.key_id, "COMPLETED")
        assert (await verify_all(scripted.sessions)).signatures == 1


async def test_a_key_registered_through_another_gateway_counts_at_once(database: Database) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        asked, signer = await ask(one), Signer()
        await other.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
        assert (await one.runtime.decide(asked, await signer.ruling(one, asked))).state == "COMPLETED"


async def refused_signature(scripted: Scripted, admin: Admin, asked: TraceId, ruling: Ruling) -> None:
    before = await contents(admin)
    with pytest.raises(SignatureInvalid):
        await scripted.runtime.decide(asked, ruling)
    after = await contents(admin)
    assert {table: rows for table, rows in after.items() if table != "heads"} == {
        table: rows for table, rows in before.items() if table != "heads"
    }
    found = await head(admin, asked)
    assert (found["state"], found["owner"], found["waiting"]) == ("PENDING", None, "supervisor")
    assert scripted.connector.sent == []


async def test_a_signature_by_an_unregistered_key_is_refused(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        await refused_signature(scripted, admin, asked, await Signer().ruling(scripted, asked))


@pytest.mark.parametrize("through", ["this gateway", "another gateway"])
async def test_a_signature_by_a_retired_key_is_refused(through: str, database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted, open_scripted(database.gateway_url) as other:
        asked, signer = await ask(scripted), Signer()
        await scripted.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
        retiring = scripted if through == "this gateway" else other
        await retiring.system.decision_signer.retire("default", signer.key_id, by="olga")
        await refused_signature(scripted, admin, asked, await signer.ruling(scripted, asked))


async def test_a_signature_by_another_principals_key_is_refused(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        await scripted.system.decision_signer.register("default", "bob", signer.public_key, by="bob")
        await refused_signature(scripted, admin, asked, await signer.ruling(scripted, asked))


async def test_a_key_of_another_tenant_counts_for_nothing_here(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        await scripted.system.decision_signer.register("acme", "ada", signer.public_key, by="ada")
        await refused_signature(scripted, admin, asked, await signer.ruling(scripted, asked))


@pytest.mark.parametrize(
    "signed_as",
    [
        {"decision": "DENY"},
        {"rationale": "other"},
        {"action_request_digest": "0" * 64},
        {"trace_id": "00000000-0000-7000-8000-000000000000"},
        {"decided_at": "2026-01-01T00:00:00.000Z"},
        {"decided_by": {"type": "person", "id": "bob"}},
    ],
    ids=lambda change: next(iter(change)),
)
async def test_a_signature_under_other_words_is_refused(
    signed_as: dict[str, Any], database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        await scripted.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
        await refused_signature(scripted, admin, asked, await signer.ruling(scripted, asked, **signed_as))


async def test_a_signature_without_its_time_is_refused(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        ruling = await signer.ruling(scripted, asked)
        for half in (replace(ruling, decided_at=None), replace(ruling, signature=None)):
            with pytest.raises(SchemaViolation):
                await scripted.runtime.decide(asked, half)


def _swapped(place: int, document: dict[str, Any]) -> dict[str, Any]:
    if place == 2:
        document["signature"]["value"] = "A" * 86 + "=="
    return document


def _removed(place: int, document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "signature": None} if place == 2 else document


def _another_person(place: int, document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "decided_by": {"type": "person", "id": "bob"}} if place == 2 else document


def _other_words(place: int, document: dict[str, Any]) -> dict[str, Any]:
    return {**document, "rationale": "never said"} if place == 2 else document


@pytest.mark.parametrize("tamper", [_swapped, _removed, _another_person, _other_words], ids=lambda one: one.__name__)
@pytest.mark.parametrize("signs", ["the gateway", "the supervisor"])
async def test_a_forged_decision_is_found_though_the_chain_was_computed_anew(
    tamper: Any, signs: str, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, signer = await ask(scripted), Signer()
        if signs == "the supervisor":
            await scripted.system.decision_signer.register("default", "ada", signer.public_key, by="ada")
            await scripted.runtime.decide(asked, await signer.ruling(scripted, asked))
        else:
            await decide(scripted, asked)
        await rewrite(admin, f"trace:{asked}", lambda _, document: document)
        assert (await verify_all(scripted.sessions)).signatures == 1  # computed anew, nothing changed: sound
        await rewrite(admin, f"trace:{asked}", tamper)
        found = await find(scripted.sessions)
        assert [(error.stream, error.sequence_number, error.code) for error in found] == [
            (f"trace:{asked}", 2, SignatureInvalid.code)
        ]


async def test_a_key_that_no_system_stream_knows_is_found(database: Database, admin: Admin) -> None:
    """The announcement is replaced by another key's; the system stream itself still hangs together."""
    async with open_scripted(database.gateway_url) as scripted:
        asked, other = await ask(scripted), Signer()
        await decide(scripted, asked)

        def replaced(_: int, document: dict[str, Any]) -> dict[str, Any]:
            if document["schema_id"] == "tga/v1/signing_key":
                document |= {"key_id": other.key_id, "public_key": base64.b64encode(other.public_key).decode()}
            return document

        await rewrite(admin, "system:default", replaced)
        found = await find(scripted.sessions)
        assert [(error.stream, error.what) for error in found] == [(f"trace:{asked}", "no system stream knows the key")]


async def test_a_withdrawal_is_signed_and_verified_too(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        answer = await scripted.runtime.withdraw(asked, PRINCIPAL, rationale="never mind")
        assert answer.decision is not None
        assert (answer.state, answer.decision.decided_by.type) == ("DENIED", "withdrawal")
        assert (await verify_all(scripted.sessions)).signatures == 1
        await rewrite(admin, f"trace:{asked}", _removed)
        assert [error.code for error in await find(scripted.sessions)] == [SignatureInvalid.code]


async def test_only_its_own_caller_withdraws_a_request(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        for other in (ADA, Principal(principal_id="agent-1", tenant="acme")):
            with pytest.raises(Forbidden):
                await scripted.runtime.withdraw(asked, other)
        answer = await scripted.runtime.withdraw(
            asked, Principal(principal_id="agent-1", tenant="default", roles=["agent"])
        )
        assert answer.state == "DENIED"
        assert scripted.connector.sent == []


# Judged again


async def test_who_may_not_approve_does_not_but_may_deny(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        scripted.supervisor.may_not_approve = {"ada"}
        asked, other = await ask(scripted), await ask(scripted)
        with pytest.raises(Forbidden):
            await decide(scripted, asked)
        assert (await head(admin, asked))["state"] == "PENDING"
        assert (await decide(scripted, other, "DENY")).state == "DENIED"
        assert (await decide(scripted, asked, approver=BOB)).state == "COMPLETED"
        await verify_all(scripted.sessions)


def _policy_denies(scripted: Scripted) -> None:
    scripted.supervisor.answer = "deny"


def _tool_changed(scripted: Scripted) -> None:
    scripted.tools.tools["crm", "create"] = CHANGED


def _tool_gone(scripted: Scripted) -> None:
    del scripted.tools.tools["crm", "create"]


@pytest.mark.parametrize(
    ("change", "refusal"),
    [(_policy_denies, Forbidden), (_tool_changed, ToolQuarantined), (_tool_gone, ToolNotFound)],
    ids=lambda one: one.__name__,
)
async def test_what_changed_while_a_request_waited_is_asked_again_before_it_runs(
    change: Any, refusal: type[TgaError], database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked, other = await ask(scripted), await ask(scripted)
        change(scripted)
        with pytest.raises(refusal):
            await decide(scripted, asked)
        found = await head(admin, asked)
        assert (found["state"], found["owner"], found["waiting"]) == ("PENDING", None, "supervisor")
        assert (await decide(scripted, other, "DENY")).state == "DENIED"
        assert scripted.connector.sent == []
        scripted.tools.tools["crm", "create"], scripted.supervisor.answer = WRITE, "allow"
        assert (await decide(scripted, asked)).state == "COMPLETED"
        await verify_all(scripted.sessions)


async def test_a_changed_tool_that_was_accepted_still_is_not_what_was_asked_for(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        scripted.tools.tools["crm", "create"] = CHANGED
        digest = CHANGED.definition_digest
        await scripted.system.pins.accept(CHANGED, definition_digest=digest, accepted_by=ADA)
        with pytest.raises(ToolQuarantined, match="since the request was made"):
            await decide(scripted, asked)
        assert scripted.connector.sent == []


# Expiry


async def test_a_late_approval_fails_unswept_whatever_the_gateways_clock_says(database: Database, admin: Admin) -> None:
    """The request was made by a gateway whose clock is a day behind: by the database's clock its time is over."""
    async with open_scripted(database.gateway_url) as scripted:
        behind = runtime_of(scripted, clock=Skewed(-2 * WRITE.approval_timeout_ms))
        key = new_key()
        asked = await ask(scripted, runtime=behind, key=key)
        with pytest.raises(ApprovalExpired):
            await decide(scripted, asked, runtime=behind)
        found = await head(admin, asked)
        assert (found["state"], found["waiting"], found["owner"]) == ("DENIED", None, None)
        repeat = await scripted.runtime.call(call(key=key))
        assert repeat.decision is not None
        assert (repeat.state, repeat.decision.decided_by.type) == ("DENIED", "expiry")
        assert scripted.connector.sent == []
        await verify_all(scripted.sessions)


@pytest.mark.parametrize("late", ["DENY", "withdrawal"])
async def test_a_late_denial_is_late_too(late: str, database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted, runtime=runtime_of(scripted, clock=Skewed(-2 * WRITE.approval_timeout_ms)))
        deed = decide(scripted, asked, "DENY") if late == "DENY" else scripted.runtime.withdraw(asked, PRINCIPAL)
        with pytest.raises(ApprovalExpired):
            await deed
        await scripted.runtime.expire_all()
        assert (await scripted.traces.load_trace(asked)).state.state == "DENIED"
        await verify_all(scripted.sessions)


async def test_a_gateway_whose_clock_is_ahead_expires_nothing_early(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        ahead = runtime_of(scripted, clock=Skewed(2 * WRITE.approval_timeout_ms))
        with pytest.raises(ApprovalNotExpired):
            await ahead.expire(asked)
        assert await ahead.expire_all() == 0
        found = await head(admin, asked)
        assert (found["state"], found["waiting"], found["owner"]) == ("PENDING", "supervisor", None)
        assert (await decide(scripted, asked, runtime=ahead)).state == "COMPLETED"


async def test_what_is_due_expires_and_nothing_else(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        behind = runtime_of(scripted, clock=Skewed(-2 * WRITE.approval_timeout_ms))
        due = [await ask(scripted, runtime=behind) for _ in range(3)]
        waiting = await ask(scripted)
        assert await scripted.runtime.expire_all() == 3
        assert await scripted.runtime.expire_all() == 0
        for trace_id in due:
            stored = await scripted.traces.load_trace(trace_id)
            assert (stored.state.state, stored.waiting) == ("DENIED", None)
        assert (await scripted.traces.load_trace(waiting)).state.state == "PENDING"
        await verify_all(scripted.sessions)


async def test_one_that_cannot_expire_does_not_stop_the_others(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        behind = runtime_of(scripted, clock=Skewed(-2 * WRITE.approval_timeout_ms))
        broken, due = [await ask(scripted, runtime=behind) for _ in range(2)]
        await disarm(admin)
        await admin.execute("UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = $1", f"trace:{broken}")
        assert await scripted.runtime.expire_all() == 1
        assert (await scripted.traces.load_trace(due)).state.state == "DENIED"


@pytest.mark.parametrize("round_number", range(3))
async def test_at_the_instant_of_expiry_exactly_one_decision_stands(
    round_number: int, database: Database, admin: Admin
) -> None:
    """Approvals, withdrawals and sweeps from several gateways, all around the moment at which the time is over."""
    async with AsyncExitStack() as stack:
        gateways = [
            await stack.enter_async_context(open_scripted(database.gateway_url, tool=SHORT, real_time=True))
            for _ in range(3)
        ]
        asked = [await ask(gateways[0]) for _ in range(4)]
        digests = {trace_id: await digest_asked(gateways[0], trace_id) for trace_id in asked}
        await until_expired(admin, asked[0])  # the first is just over, the last is about to be

        async def act(gateway: Scripted, trace_id: TraceId, what: str) -> None:
            for _ in range(4):
                try:
                    if what == "approve":
                        await gateway.runtime.decide(trace_id, Ruling("APPROVE", ADA, digests[trace_id]))
                    elif what == "withdraw":
                        await gateway.runtime.withdraw(trace_id, PRINCIPAL)
                    else:
                        await gateway.runtime.expire(trace_id)
                except (AlreadyDecided, ApprovalExpired, ApprovalNotExpired, ConcurrentExecution):
                    await asyncio.sleep(0.002)

        deeds = ("approve", "withdraw", "expire")
        await asyncio.gather(
            *(
                act(gateway, trace_id, deeds[(number + shift + round_number) % 3])
                for number, gateway in enumerate(gateways)
                for trace_id in asked
                for shift in (0, 1)
            )
        )
        await asyncio.sleep(0.1)
        await gateways[0].runtime.expire_all()
        sent = sum((gateway.connector.sends_of_key for gateway in gateways), start=Counter[str | None]())
        for trace_id in asked:
            stored = await gateways[0].traces.load_trace(trace_id)
            (decision,) = [r.artifact for r in stored.records if isinstance(r.artifact, SupervisorDecision)]
            approved = decision.decision == "APPROVE"
            assert sent[stored.state.idempotency_key] == (1 if approved else 0)
            assert stored.state.state == ("COMPLETED" if approved else "DENIED")
        await verify_all(gateways[0].sessions)


# Trace context, announcements


async def test_the_callers_trace_context_reaches_the_tool(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asking = CheckedCall("crm", "create", {"amount": 1}, new_key(), PRINCIPAL, traceparent=TRACEPARENT)
        await scripted.runtime.call(asking)
        await scripted.runtime.call(call(key=new_key()))
        assert scripted.connector.traceparents == [TRACEPARENT, None]


async def test_the_trace_context_survives_waiting_and_the_gateway(database: Database) -> None:
    asking = CheckedCall("crm", "create", {"amount": 1}, new_key(), PRINCIPAL, traceparent=TRACEPARENT)
    async with open_scripted(database.gateway_url) as first:
        first.supervisor.answer = "ask"
        asked = await first.runtime.call(asking)
    async with open_scripted(database.gateway_url, TIMED_OUT, TIMED_OUT) as second:
        await decide(second, asked.trace_id)
        assert second.connector.traceparents == [TRACEPARENT] * WRITE.max_attempts


async def test_the_trace_context_is_sent_again_by_recovery(database: Database) -> None:
    class Died(BaseException):
        pass

    async def die(_: object) -> Any:
        raise Died

    asking = CheckedCall("crm", "create", {"amount": 1}, new_key(), PRINCIPAL, traceparent=TRACEPARENT)
    async with open_scripted(database.gateway_url, die) as first:
        with pytest.raises(Died):
            await first.runtime.call(asking)
    async with open_scripted(database.gateway_url) as second:
        recovered = [one async for one in second.runtime.recover_all()]
        assert [one.answer is not None and one.answer.state for one in recovered] == ["COMPLETED"]
        assert second.connector.traceparents == [TRACEPARENT]


async def test_who_is_to_be_told_is_told_in_the_transaction_in_which_waiting_begins(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        telling = runtime_of(scripted, webhooks=("one", "two"))
        await telling.call(call(key=new_key()))
        scripted.supervisor.answer = "deny"
        await telling.call(call(key=new_key()))
        assert await admin.fetchval("SELECT count(*) FROM tga.outbox") == 0
        scripted.ledger.plans.clear()
        asked = await ask(scripted, runtime=telling)
        rows = await admin.fetch("SELECT webhook, stream, xmin::text FROM tga.outbox ORDER BY webhook")
        assert [(row["webhook"], row["stream"]) for row in rows] == [
            ("one", f"trace:{asked}"),
            ("two", f"trace:{asked}"),
        ]
        born = await admin.fetchval("SELECT xmin::text FROM tga.heads WHERE stream = $1", f"trace:{asked}")
        assert {row["xmin"] for row in rows} == {born}
        assert len(scripted.ledger.plans) == 1


async def test_a_refused_request_tells_nobody(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        key = new_key()
        await scripted.runtime.call(call(key=key))
        scripted.supervisor.answer = "ask"
        repeat = await runtime_of(scripted, webhooks=("one",)).call(call(key=key))
        assert repeat.state == "COMPLETED"
        assert await admin.fetchval("SELECT count(*) FROM tga.outbox") == 0


async def test_verification_of_one_trace_says_what_is_wrong_with_its_keys_stream(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        asked = await ask(scripted)
        await decide(scripted, asked)
        await disarm(admin)
        await admin.execute("UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream = 'system:default'")
        report = Report()
        async with open_reader(scripted.sessions, stream=f"trace:{asked}") as reader:
            found = [error.stream async for error in verify_ledger(reader, stream_checks(), report)]
        assert found == ["system:default", f"trace:{asked}"]
        assert (report.streams, report.findings) == (1, 2)
