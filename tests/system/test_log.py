"""System streams: several gateways append, what is read is verified, and every tampering is found."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import pytest

from app.clock import SystemClock
from app.core.canonical import canonical_bytes, parse_object
from app.core.digest import digest_of_bytes
from app.core.errors import (
    ChecksumMismatch,
    OutcomeUnknown,
    SchemaViolation,
    SequenceGap,
    StoreUnavailable,
    TgaError,
)
from app.domain.ledger.plans import Ledger, Plan, PlannedEntry
from app.domain.system.documents import PolicySet, SystemDocument
from app.domain.system.log import SystemLog, SystemState, plan_system
from app.domain.system.policies import record_policy
from app.postgres.database import Database
from app.postgres.system import PostgresSystemRows
from tests.conftest import Admin
from tests.invariants.plans import contents, verify_all
from tests.runtime.scripted import Scripted, call, new_key, open_scripted
from tests.runtime.supervised import Signer, find
from tests.runtime.tampering import rewrite, untriggered
from tests.traces import EXECUTOR, time_at

POLICY = "permit(principal, action, resource);"


async def set_policy(scripted: Scripted, text: str) -> None:
    await record_policy(scripted.system.log, scripted.clock, digest_of_bytes(text.encode()), text)


def policy_set(text: str = POLICY, **changes: Any) -> PolicySet:
    said: dict[str, Any] = {"system_id": "default", "recorded_at": time_at(1), "recorded_by": "gateway"}
    said |= {"policy_digest": digest_of_bytes(text.encode()), "text": text}
    return PolicySet(**{**said, **changes})


async def policies(admin: Admin) -> list[Any]:
    rows = await admin.fetch("SELECT artifact FROM tga.artifacts WHERE stream LIKE 'system:%' ORDER BY sequence_number")
    return [said["text"] for said in (parse_object(row["artifact"]) for row in rows) if "text" in said]


async def test_a_policy_is_recorded_when_it_changes(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        for text in ("one", "one", "two", "two", "one"):
            await set_policy(scripted, text)
        assert await policies(admin) == ["one", "two", "one"]
    async with open_scripted(database.gateway_url) as later:
        await set_policy(later, "one")
        assert await policies(admin) == ["one", "two", "one"]
        await verify_all(later.sessions)


async def test_many_gateways_append_at_once_and_nothing_is_lost(database: Database, admin: Admin) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(open_scripted(database.gateway_url)) for _ in range(4)]
        signers = [Signer() for _ in range(12)]
        await asyncio.gather(
            *(
                gateways[number % 4].system.decision_signer.register(
                    "default", f"p{number}", signer.public_key, by="olga"
                )
                for number, signer in enumerate(signers)
            )
        )
        for gateway in gateways:
            state = await gateway.system.log.refresh("default")
            assert {signer.key_id for signer in signers} <= state.keys.keys()
        assert await admin.fetchval("SELECT count(*) FROM tga.entries") == 13
        await verify_all(gateways[0].sessions)


class Losing:
    """A ledger whose answers are lost until it is told otherwise; what becomes of the plan is the fault's affair."""

    def __init__(self, inner: Ledger, fault: str) -> None:
        self._inner, self._fault = inner, fault
        self.plans: list[Plan] = []

    async def commit(self, plan: Plan) -> None:
        self.plans.append(plan)
        if len(self.plans) > 1:
            if self._fault == "but_persisted_late" and len(self.plans) == 2:
                await self._inner.commit(self.plans[0])  # it was still on its way when the stream was read
            await self._inner.commit(plan)
            return
        if self._fault == "but_persisted":
            await self._inner.commit(plan)
        raise OutcomeUnknown("lost")

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        raise AssertionError("a system stream is appended to alone")


@pytest.mark.parametrize(
    ("fault", "commits"), [("and_not_persisted", 2), ("but_persisted", 1), ("but_persisted_late", 2)]
)
async def test_a_lost_answer_appends_nothing_twice(fault: str, commits: int, database: Database, admin: Admin) -> None:
    """The plan is settled by reading: it is decided on once, and the same plan is committed again if it must be."""
    async with open_scripted(database.gateway_url) as scripted:
        losing = Losing(scripted.ledger, fault)
        log = SystemLog(PostgresSystemRows(scripted.sessions), losing, SystemClock(), scripted.traces.executor_id)
        decided = 0

        def decide(_: SystemState) -> list[SystemDocument]:
            nonlocal decided
            decided += 1
            return [policy_set("x")]

        await log.append("default", decide)
        assert (decided, len(losing.plans), await policies(admin)) == (1, commits, ["x"])
        assert all(plan.entries == losing.plans[0].entries for plan in losing.plans)


async def test_a_store_that_does_not_answer_is_not_waited_for(database: Database, admin: Admin) -> None:
    class Silent:
        async def commit(self, plan: Plan) -> None:
            raise StoreUnavailable("gone")

        async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
            raise StoreUnavailable("gone")

    async with open_scripted(database.gateway_url) as scripted:
        log = SystemLog(PostgresSystemRows(scripted.sessions), Silent(), SystemClock(), scripted.traces.executor_id)
        with pytest.raises(StoreUnavailable):
            await log.append("default", lambda _: [policy_set("x")])
        assert await policies(admin) == []


async def test_what_another_gateway_appended_is_read_on_from_where_one_stands(database: Database) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        await set_policy(one, "new")
        assert other.system.log.state_of("default").policy_digest is None
        await other.system.log.refresh_all()
        assert other.system.log.state_of("default") == one.system.log.state_of("default")


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE tga.artifacts SET artifact = artifact || ' ' WHERE stream LIKE 'system:%' AND sequence_number = 2",
        "UPDATE tga.entries SET entry = entry || ' ' WHERE stream LIKE 'system:%' AND sequence_number = 2",
        "DELETE FROM tga.artifacts WHERE stream LIKE 'system:%' AND sequence_number = 2",
        "DELETE FROM tga.entries WHERE stream LIKE 'system:%' AND sequence_number = 2",
        "UPDATE tga.entries SET entry_digest = sha256('x') WHERE stream LIKE 'system:%' AND sequence_number = 2",
        "UPDATE tga.entries SET sequence_number = 9 WHERE stream LIKE 'system:%' AND sequence_number = 2",
    ],
)
async def test_a_tampered_system_stream_is_found_and_not_taken_over(
    statement: str, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        for text in ("one", "two"):
            await set_policy(scripted, text)
        await scripted.runtime.call(call(key=new_key()))
        async with untriggered(admin):
            await admin.execute(statement)
        found = await find(scripted.sessions)
        assert [(error.stream, error.sequence_number) for error in found] == [("system:default", 2)]
        fresh = SystemLog(
            PostgresSystemRows(scripted.sessions), scripted.ledger, SystemClock(), scripted.traces.executor_id
        )
        with pytest.raises(TgaError):
            await fresh.refresh("default")
        assert fresh.state_of("default") == SystemState("default")


async def test_a_tail_that_was_cut_off_is_found(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await set_policy(scripted, "one")
        async with untriggered(admin):
            for table in ("entries", "artifacts"):
                await admin.execute(f"DELETE FROM tga.{table} WHERE stream = 'system:default' AND sequence_number = 2")
        assert [error.code for error in await find(scripted.sessions)] == [ChecksumMismatch.code]


def _other_key(_: int, said: dict[str, Any]) -> dict[str, Any]:
    if said["schema_id"] == "tga/v1/signing_key":
        said["public_key"] = base64.b64encode(Signer().public_key).decode()
    return said


def _other_text(_: int, said: dict[str, Any]) -> dict[str, Any]:
    return {**said, "text": "forbid(principal, action, resource);"} if "text" in said else said


@pytest.mark.parametrize("tamper", [_other_key, _other_text], ids=lambda one: one.__name__)
async def test_a_key_or_policy_under_anothers_name_is_found_though_the_chain_was_computed_anew(
    tamper: Any, database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await set_policy(scripted, POLICY)
        await rewrite(admin, "system:default", lambda _, said: said)
        await verify_all(scripted.sessions)
        await rewrite(admin, "system:default", tamper)
        found = await find(scripted.sessions)
        assert [(error.stream, error.what) for error in found] == [
            ("system:default", "a key or policy stands under another's name")
        ]


# What the database itself refuses


@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"sequence_number": 2}, SequenceGap),
        ({"prev_entry_digest": "1" * 64}, ChecksumMismatch),
        ({"artifact_digest": "1" * 64}, ChecksumMismatch),
        ({"system_id": "acme"}, SchemaViolation),
        ({"schema_id": "tga/v1/execution_log_entry"}, SchemaViolation),
        ({"artifact_type": "tool_pin"}, SchemaViolation),
        ({"from_state": "CLOSED"}, TgaError),
        ({"to_state": "CLOSED"}, TgaError),
        ({"artifact_type": "note"}, TgaError),
    ],
    ids=str,
)
async def test_the_database_refuses_what_does_not_fit_its_system_stream(
    change: dict[str, Any], refusal: type[TgaError], database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        state = SystemState("fresh")
        document = policy_set(system_id="fresh")
        plan = plan_system(state, [document], executor_id=EXECUTOR, recorded_at=time_at(1))
        entry = canonical_bytes({**parse_object(plan.entries[0].entry), **change})
        before = await contents(admin)
        wrong = Plan(plan.stream, EXECUTOR, None, [PlannedEntry(entry, plan.entries[0].artifact)])
        with pytest.raises(refusal):
            await scripted.ledger.commit(wrong)
        assert await contents(admin) == before
        await scripted.ledger.commit(plan)


async def test_an_artifact_of_another_tenant_is_refused_by_the_database(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        plan = plan_system(SystemState("fresh"), [policy_set()], executor_id=EXECUTOR, recorded_at=time_at(1))
        with pytest.raises(ChecksumMismatch):
            await scripted.ledger.commit(plan)


async def test_the_longest_policy_is_stored_whole_or_refused_before_it_is_stored(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        await set_policy(scripted, "p" * 262_144)
        before = await contents(admin)
        with pytest.raises(TgaError):
            await set_policy(scripted, "\n" * 262_144)  # each of them is two bytes in JSON
        assert await contents(admin) == before
        await verify_all(scripted.sessions)
