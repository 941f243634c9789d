"""Who is calling, which keys there are, and what an id, a key or a digest belongs to; nothing of another tenant."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest

from app.api.reading_documents import FoundPage, KeyPage, MeDocument
from app.postgres.api_keys import PostgresAccess
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import ACME, PEOPLE, Front, World, folded, person
from tests.traces import completed_trace, failed_trace, trace_id


@pytest.fixture
async def front(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Front]:
    async with World.of(database, sessions, ledger, tmp_path).open() as opened:
        yield opened


async def found(front: Front, sought: str, who: str = "auditor") -> list[tuple[str, str, str, int | None]]:
    page = await front.page(f"/v1/find?q={quote(sought)}", who)
    FoundPage.model_validate(page)
    return [(one["kind"], one["id"], one["by"], one["sequence_number"]) for one in page["items"]]


@pytest.mark.parametrize("who", ["auditor", "agent", "worker", "nobody", "acme"])
async def test_a_caller_is_told_who_it_is_and_what_it_may(front: Front, who: str) -> None:
    told = await front.page("/v1/me", who)
    MeDocument.model_validate(told)
    principal = PEOPLE[who]
    assert (told["principal_id"], told["tenant"], told["roles"]) == (
        principal.principal_id,
        principal.tenant,
        list(principal.roles or ()),
    )
    assert told["scope"] == ("tenant" if "auditor" in told["roles"] else "own")
    assert ("read_keys" in told["may"]) == ("auditor" in told["roles"])
    assert ("call" in told["may"]) == bool({"agent", "worker"} & set(told["roles"]))


async def test_keys_are_listed_page_by_page_without_their_secrets_and_only_the_tenants_own(
    front: Front, sessions: Sessions, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    access = PostgresAccess(sessions, database.gateway_url)
    await access.create_tenant("acme")
    made = [
        await access.create_key(name=f"key {n}", principal_id=f"p-{n}", roles=["agent"], created_by="test")
        for n in range(5)
    ]
    other = await access.create_key(
        name="theirs", principal_id="theirs", roles=["agent"], created_by="test", tenant="acme"
    )
    await access.revoke_key(made[1].listed.key_id)
    monkeypatch.setitem(PEOPLE, "root", person("root", "admin"))
    for who in ("auditor", "root"):
        items: list[Any] = []
        cursor = ""
        while True:
            status, page, raw = await front.get(f"/v1/keys?limit=2{cursor}", who)
            assert status == 200
            KeyPage.model_validate(page)
            assert not any(key.text.split("_", 2)[2].encode() in raw for key in (*made, other))
            assert b"secret" not in raw
            items += page["items"]
            if page["next"] is None:
                break
            cursor = f"&cursor={page['next']}"
        assert [one["key_id"] for one in items] == [key.listed.key_id for key in made]
        assert [one["is_valid"] for one in items] == [True, False, True, True, True]
    assert [one["key_id"] for one in (await front.page("/v1/keys", "acme"))["items"]] == [other.listed.key_id]
    for who in ("agent", "supervisor", "operator", "worker"):
        status, problem, _ = await front.get("/v1/keys", who)
        assert (status, problem["code"]) == (403, "FORBIDDEN")


async def test_an_id_a_key_and_every_digest_lead_to_their_trace_and_to_nobody_elses(
    front: Front, sessions: Sessions
) -> None:
    mine, others, theirs = completed_trace(1), failed_trace(2, principal=_agent_2()), completed_trace(3, **ACME)
    for records in (mine, others, theirs):
        await front.append_trace(records)
    assert await found(front, trace_id(1)) == [("trace", trace_id(1), "id", None)]
    assert await found(front, trace_id(1).upper()) == [("trace", trace_id(1), "id", None)]
    assert await found(front, trace_id(3)) == []
    await folded(sessions)
    # The server `crm` is not registered for the default tenant: its key is found by what was folded.
    assert await found(front, "key-1") == [("trace", trace_id(1), "idempotency_key", None)]
    assert await found(front, "key-3") == []
    assert await found(front, "key-3", "acme") == [("trace", trace_id(3), "idempotency_key", None)]
    for records, n in ((mine, 1), (others, 2)):
        for place, record in enumerate(records, 1):
            assert record.artifact is not None
            for digest in (record.entry.digest(), record.entry.artifact_digest):
                assert await found(front, digest) == [("trace", trace_id(n), "digest", place)]
                assert await found(front, digest, "acme") == []
                seen = await found(front, digest, "agent-2")
                assert bool(seen) == (n == 2)
    assert await found(front, "0" * 64) == []
    near = mine[0].entry.digest()[:63]
    assert await found(front, near + ("0" if mine[0].entry.digest()[-1] != "0" else "1")) == []


async def test_the_key_of_a_registered_tool_is_found_before_anything_is_folded(front: Front) -> None:
    await front.append_trace(completed_trace(7, server_id="pay", tool_name="charge", idempotency_key="order 7/b"))
    assert await found(front, "order 7/b") == [("trace", trace_id(7), "idempotency_key", None)]


@pytest.mark.parametrize("query", ["", "?q=", "?q=%00", "?q=%C3%A4", "?q=" + "x" * 256, "?q=a&q=b", "?q=a&other=1"])
async def test_what_can_be_no_id_is_refused(front: Front, query: str) -> None:
    status, problem, _ = await front.get(f"/v1/find{query}")
    assert (status, problem["code"]) == (400, "INPUT_MALFORMED")


def _agent_2() -> dict[str, str]:
    return {"principal_id": "agent-2", "tenant": "default"}
