"""Procedures: what runs can be started of stands on the tenant's system stream, once, and is found there again."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from app.clock import SystemClock
from app.core.canonical import parse_object
from app.core.errors import InputTooLarge, ProcedureLimitReached, ProcedureNotFound
from app.core.limits import ENCLOSED_KEYS_MAX
from app.domain.identity import Principal
from app.domain.runs import procedures as procedures_module
from app.domain.runs.procedures import ListedProgram, ListPosition, PolicySaid, Procedures, ProcedureSaid
from app.domain.system.log import SystemLog
from app.postgres.database import Database
from app.postgres.system import PostgresSystemRows
from tests.conftest import Admin
from tests.invariants.plans import verify_all
from tests.runtime.scripted import Scripted, open_scripted

WORKER: Final = Principal(principal_id="worker-1", tenant="default", roles=["worker"])
ELSEWHERE: Final = Principal(principal_id="worker-1", tenant="acme", roles=["worker"])
A, B, C = "a" * 64, "b" * 64, "c" * 64


def said(name: str = "onboard", version: str = "1", program_digest: str = A, **more: Any) -> ProcedureSaid:
    return ProcedureSaid.made(name=name, version=version, program_digest=program_digest, **more)


def procedures_of(scripted: Scripted) -> Procedures:
    return Procedures(scripted.system.log, scripted.clock)


async def recorded(admin: Admin, tenant: str = "default") -> list[tuple[str, str, str]]:
    rows = await admin.fetch(
        "SELECT artifact FROM tga.artifacts WHERE stream = $1 ORDER BY sequence_number", f"system:{tenant}"
    )
    found = [parse_object(row["artifact"]) for row in rows]
    return [
        (one["name"], one["version"], one["program_digest"])  # type: ignore[misc]
        for one in found
        if one["schema_id"] == "tga/v1/procedure_registration"
    ]


async def test_the_same_registration_again_changes_nothing(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        first = await known.register(said(tags=["crm"]), WORKER)
        again = await known.register(said(tags=["crm"]), Principal(principal_id="worker-2", tenant="default"))
        assert (first.is_new, again.is_new) == (True, False)
        assert again.program == first.program
        assert again.program.registered_by == "worker-1"
    async with open_scripted(database.gateway_url) as later:
        assert not (await procedures_of(later).register(said(tags=["crm"]), WORKER)).is_new
        assert await recorded(admin) == [("onboard", "1", A)]
        await verify_all(later.sessions)


async def test_another_digest_is_another_program_of_its_version_and_the_last_registered_is_the_newest(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        for version, digest in (("1", A), ("2", B), ("1", C)):
            assert (await known.register(said(version=version, program_digest=digest), WORKER)).is_new
        newest = await known.find("default", "onboard")
        assert (newest.version, newest.program_digest) == ("1", C)
        assert (await known.find("default", "onboard", version="2")).program_digest == B
        assert (await known.find("default", "onboard", version="1")).program_digest == C
        assert (await known.find("default", "onboard", program_digest=A)).version == "1"
        assert [one.program_digest for one in known.programs("default", "onboard", ["1"])] == [C, A]
        # A worker of the first program that starts again does not make it the newest.
        assert not (await known.register(said(), WORKER)).is_new
        assert (await known.find("default", "onboard")).program_digest == C
        # One that says something else of it does.
        assert (await known.register(said(description="anew"), WORKER)).is_new
        assert (await known.find("default", "onboard")).description == "anew"
        assert len(await recorded(admin)) == 4
        await verify_all(scripted.sessions)


async def test_gateways_that_are_told_the_same_at_once_record_it_once(database: Database, admin: Admin) -> None:
    async with AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(open_scripted(database.gateway_url)) for _ in range(3)]
        told = await asyncio.gather(
            *(procedures_of(gateway).register(said(), WORKER) for gateway in gateways for _ in range(3))
        )
        assert sum(one.is_new for one in told) == 1
        assert await recorded(admin) == [("onboard", "1", A)]


async def test_what_another_gateway_was_told_is_found_with_all_that_was_said(database: Database) -> None:
    async with open_scripted(database.gateway_url) as one, open_scripted(database.gateway_url) as other:
        looks = procedures_of(other)
        with pytest.raises(ProcedureNotFound):
            await looks.find("default", "onboard")
        schema = {"type": "object", "required": ["email"]}
        await procedures_of(one).register(said(input_schema=schema, triggers=[{"event": "signed"}]), WORKER)
        found = await looks.find("default", "onboard")
        assert (found.input_schema, found.output_schema, found.language) == (schema, None, "python")
        assert found.policy == PolicySaid().whole()
        assert (found.policy.timeout_ms, found.policy.retry.retries) == (None, 0)
        assert [program.name for program in await looks.listening("default", "signed")] == ["onboard"]
        assert await looks.listening("default", "other") == []
        # Only the newest program listens.
        await procedures_of(one).register(said(program_digest=B), WORKER)
        assert await looks.listening("default", "signed") == []


async def test_an_unknown_procedure_version_or_program_is_told_apart(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        await known.register(said(), WORKER)
        await known.register(said(version="2", program_digest=B), WORKER)
        with pytest.raises(ProcedureNotFound, match="nobody has registered a procedure offboard"):
            await known.find("default", "offboard")
        with pytest.raises(ProcedureNotFound, match="expected one of 2, 1; found 3"):
            await known.find("default", "onboard", version="3")
        with pytest.raises(ProcedureNotFound, match=f"this program of onboard; found {C}"):
            await known.find("default", "onboard", version="2", program_digest=C)


async def test_a_tenant_sees_nothing_of_anothers_procedures(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        await known.register(said(), WORKER)
        with pytest.raises(ProcedureNotFound):
            await known.find("acme", "onboard")
        assert await known.list("acme", limit=10) == ([], None)
        assert await known.listening("acme", "signed") == []
        await known.register(said(program_digest=B), ELSEWHERE)
        assert (await known.find("acme", "onboard")).program_digest == B
        assert (await known.find("default", "onboard")).program_digest == A
        assert await recorded(admin, "acme") == [("onboard", "1", B)]


async def test_a_procedure_too_many_is_refused_and_the_known_ones_stay_usable(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(procedures_module, "PROCEDURES_PER_TENANT_MAX", 2)
    monkeypatch.setattr(procedures_module, "PROGRAMS_PER_PROCEDURE_MAX", 2)
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        for name in ("a", "b"):
            await known.register(said(name), WORKER)
        with pytest.raises(ProcedureLimitReached):
            await known.register(said("c"), WORKER)
        await known.register(said("a", program_digest=B), WORKER)
        with pytest.raises(ProcedureLimitReached):
            await known.register(said("a", program_digest=C), WORKER)
        assert not (await known.register(said("a"), WORKER)).is_new
        assert (await known.register(said("a", tags=["more"]), WORKER)).is_new
        assert len(await recorded(admin)) == 4


async def test_schemas_that_fit_one_by_one_and_not_together_are_refused_before_anything_is_stored(
    database: Database, admin: Admin
) -> None:
    half = {f"k{n}": 1 for n in range(ENCLOSED_KEYS_MAX // 2 + 1)}
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(InputTooLarge):
            await procedures_of(scripted).register(said(input_schema=half, output_schema=half), WORKER)
        assert await recorded(admin) == []
        assert (await procedures_of(scripted).register(said(input_schema=half), WORKER)).is_new


async def test_pages_of_any_size_hold_every_program_once_and_in_order(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        for name, digest in (("b", A), ("a", A), ("b", B), ("c", A), ("b", C), ("a", B)):
            await known.register(said(name, program_digest=digest), WORKER)
        whole, end = await known.list("default", limit=100)
        assert end is None
        assert [(one.program.name, one.program.program_digest[0], one.is_newest) for one in whole] == [
            *(("a", "b", True), ("a", "a", False)),
            *(("b", "c", True), ("b", "b", False), ("b", "a", False), ("c", "a", True)),
        ]
        for limit in (1, 2, 3, 6, 7):
            found: list[ListedProgram] = []
            after: ListPosition | None = None
            for _ in range(7):
                page, after = await known.list("default", after=after, limit=limit)
                found += page
                if after is None:
                    break
            assert found == whole
        of_b, _ = await known.list("default", name="b", limit=100)
        assert of_b == whole[2:5]


async def test_a_gateway_that_starts_reads_the_procedures_from_the_stream(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        known = procedures_of(scripted)
        for digest in (A, B, A, C):
            await known.register(said(program_digest=digest), WORKER)
        log = SystemLog(PostgresSystemRows(scripted.sessions), scripted.ledger, SystemClock(), lambda: "unused")
        fresh = await log.refresh("default")
        assert fresh.procedures == scripted.system.log.state_of("default").procedures
        assert [digest for _, digest in fresh.procedures["onboard"]] == [A, B, C]
