"""Programs in Lua over HTTP: judged before anything is stored, kept, readable again by those who may, and run as they
were submitted, whatever is submitted later."""

from __future__ import annotations

import asyncio
import hashlib
from base64 import b64encode
from collections.abc import Iterator
from typing import Any

import pytest

from app.core.limits import LUA_FILE_BYTES_MAX, LUA_SOURCE_BYTES_MAX
from tests.lua.hosting import Person, config, key_of
from tests.runs.world import GatewayProcess, RunsWorld, worlds

HELLO = """
input { name = field.string{required = true} }
output { greeting = field.string{required = true} }
return {greeting = "Hello, " .. input.name}
"""
WAITS = """
main = procedure "main" {run = function()
    local name = "%s"
    state.asked = Human.approve({message = "Go on?"})
    return {name = name}
end}
"""


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    return asyncio.run(world.gateway(config=config(world)))


@pytest.fixture
def agent(world: RunsWorld, gateway: GatewayProcess) -> Person:
    return Person(gateway.url, world.keys["agent"])


@pytest.fixture
def admin(world: RunsWorld, gateway: GatewayProcess) -> Person:
    return Person(gateway.url, world.keys["admin"])


async def names(person: Person) -> list[str]:
    _, page = await person.ask("GET", "/v1/procedures")
    return [item["name"] for item in page["items"]]


async def test_a_program_is_submitted_started_and_read_again(world: RunsWorld, agent: Person, admin: Person) -> None:
    files = {"a.txt": "plain", "b.bin": {"base64": b64encode(b"\xff\x00").decode()}}
    said = await agent.submitted("hello", HELLO, files=files)
    assert (said["language"], said["version"], said["is_new"], said["findings"]) == ("lua", "1", True, [])
    run = await agent.rested(await agent.start("hello", {"name": "Ada"}))
    assert (run["state"], run["output"]["value"]) == ("COMPLETED", {"greeting": "Hello, Ada"})
    assert run["program_digest"] == said["program_digest"]
    assert run["worker"] == {"principal_id": "lua", "name": "lua"}
    again = await agent.submitted("hello", HELLO, files=files)
    assert (again["is_new"], again["program_digest"]) == (False, said["program_digest"])
    other = await agent.submitted("hello", HELLO, files={**files, "a.txt": "plan"})
    assert other["is_new"]
    assert other["program_digest"] != said["program_digest"]
    status, read = await agent.ask("GET", "/v1/procedures/hello", program_digest=said["program_digest"])
    assert status == 200
    assert read["source"] == HELLO
    assert {file["name"]: file["sha256"] for file in read["files"]} == {
        "a.txt": hashlib.sha256(b"plain").hexdigest(),
        "b.bin": hashlib.sha256(b"\xff\x00").hexdigest(),
    }
    assert read["input_schema"]["required"] == ["name"]


async def test_the_source_is_for_who_submitted_it_and_for_those_who_oversee(
    world: RunsWorld, gateway: GatewayProcess, agent: Person
) -> None:
    await agent.submitted("secretive", HELLO)
    for role, may in (("agent", False), ("auditor", True), ("operator", True), ("worker", False)):
        other = Person(gateway.url, await key_of(world, f"reads-{role}", role))
        status, read = await other.ask("GET", "/v1/procedures/secretive")
        assert status == 200
        assert (read["source"] == HELLO, read["files"] == []) == (may, may), role


@pytest.mark.parametrize(
    ("source", "line", "found"),
    [
        ("local x = 1\nif x then\n", None, "'end' expected"),
        ("x = 1\ny = = 2\n", 2, "unexpected symbol"),
        ("local t = nil\nt.x = 1\nmain = procedure 'main' {run = function() end}", 2, "nil"),
        ('a = procedure "a" {run = print}\nb = procedure "b" {run = print}\n', None, "no main"),
        ("while true do end", None, "CPU"),
        ("\x1bLua", None, ""),
    ],
)
async def test_what_cannot_run_is_refused_with_its_line_and_nothing_is_stored(
    world: RunsWorld, agent: Person, source: str, line: int | None, found: str
) -> None:
    before = await world.fetch("SELECT count(*) FROM tga.blobs")
    status, problem = await agent.submit("refused", source)
    assert (status, problem["code"]) == (422, "PROCEDURE_SOURCE_INVALID"), problem
    assert found in problem["found"], problem
    if line is not None:
        assert problem["line"] == line
        assert f"refused.lua:{line}" in problem["detail"]
    assert problem["expected"]
    assert problem["remedy"]
    assert "refused" not in await names(agent)
    assert await world.fetch("SELECT count(*) FROM tga.blobs") == before


@pytest.mark.parametrize(
    ("more", "status", "code"),
    [
        ({"source": "-- " + "x" * LUA_SOURCE_BYTES_MAX}, 413, "INPUT_TOO_LARGE"),
        ({"source": "  \n"}, 422, "SCHEMA_VIOLATION"),
        ({"files": {"a": {"base64": "!"}}}, 422, "SCHEMA_VIOLATION"),
        ({"files": {"../a": "x"}}, 422, "SCHEMA_VIOLATION"),
        ({"files": {"a/../b": "x"}}, 422, "SCHEMA_VIOLATION"),
        ({"files": {f"f{n}": "x" for n in range(33)}}, 422, "SCHEMA_VIOLATION"),
        ({"files": {"a": {"sha256": "ab" * 32}}}, 404, "BLOB_NOT_FOUND"),
        ({"name": "no:colons"}, 422, "SCHEMA_VIOLATION"),
        ({"program_digest": "ab" * 32}, 422, "SCHEMA_VIOLATION"),
    ],
)
async def test_bounds_and_shapes_are_told_in_words(agent: Person, more: dict[str, Any], status: int, code: str) -> None:
    said = {"name": "bounded", "language": "lua", "source": HELLO, **more}
    found, problem = await agent.ask("POST", "/v1/procedures", said)
    assert (found, problem["code"]) == (status, code), problem
    assert "bounded" not in await names(agent)


async def test_a_large_file_is_a_blob_before_and_one_that_is_too_large_is_refused(agent: Person) -> None:
    for size, expected in ((300_000, 200), (LUA_FILE_BYTES_MAX + 1, 413)):
        data = b"x" * size
        sha256 = hashlib.sha256(data).hexdigest()
        async with __import__("httpx2").AsyncClient(timeout=60) as client:
            headers = {"Authorization": f"Bearer {agent._key}"}
            put = await client.put(f"{agent.url}/v1/blobs/{sha256}", content=data, headers=headers)
            assert put.status_code in (200, 201)
        status, said = await agent.submit("large", HELLO, files={"data": {"sha256": sha256}})
        assert status == expected, said


async def test_the_policy_decides_who_submits(world: RunsWorld, agent: Person, admin: Person) -> None:
    source = 'main = procedure "main" {tags = {"forbidden"}, run = function() return {} end}'
    status, problem = await agent.submit("judged", source)
    assert (status, problem["code"]) == (403, "PROCEDURE_SUBMIT_DENIED"), problem
    assert "no policy permits this submission" in problem["found"]
    assert "judged" not in await names(admin)


async def test_tenants_see_nothing_of_each_other_and_run_their_own(
    world: RunsWorld, gateway: GatewayProcess, agent: Person
) -> None:
    theirs = Person(gateway.url, await key_of(world, "eve", "agent", tenant="other"))
    await agent.submitted("shared-name", 'return {of = "default"}')
    assert await names(theirs) == []
    status, problem = await theirs.ask("GET", "/v1/procedures/shared-name")
    assert (status, problem["code"]) == (404, "PROCEDURE_NOT_FOUND")
    await theirs.submitted("shared-name", 'return {of = "other"}')
    for person, of in ((theirs, "other"), (agent, "default")):
        run = await person.rested(await person.start("shared-name"))
        assert run["output"]["value"] == {"of": of}


async def test_a_changed_source_never_resumes_an_old_run(
    world: RunsWorld, gateway: GatewayProcess, agent: Person
) -> None:
    person = Person(gateway.url, world.keys["supervisor"])
    first = await agent.submitted("pinned", WAITS % "first")
    old = await agent.start("pinned")
    assert (await agent.rested(old, "waiting_for_human"))["status"] == "waiting_for_human"
    second = await agent.submitted("pinned", WAITS % "second")
    assert second["version"] == first["version"]
    assert second["program_digest"] != first["program_digest"]
    new = await agent.start("pinned")
    await agent.rested(new, "waiting_for_human")
    chosen = await agent.start("pinned", program_digest=first["program_digest"])
    await agent.rested(chosen, "waiting_for_human")
    for run_id, name in ((old, "first"), (new, "second"), (chosen, "first")):
        status, _ = await person.ask("POST", f"/v1/runs/{run_id}/signals", {"path": "1", "answer": True})
        assert status == 200
        run = await agent.rested(run_id)
        assert run["output"]["value"] == {"name": name}


async def test_the_record_is_sound_and_collection_takes_no_source(world: RunsWorld, agent: Person) -> None:
    await agent.submitted("kept", HELLO)
    assert await asyncio.to_thread(world.database.verify) == []
    referred = await world.fetch(
        "SELECT b.state FROM tga.blobs b JOIN tga.blob_refs r USING (tenant, sha256)"
        " JOIN tga.heads h ON h.stream_no = r.stream_no WHERE h.stream = 'system:default' AND b.sha256 = $1",
        hashlib.sha256(HELLO.encode()).digest(),
    )
    assert {row["state"] for row in referred} == {"used"}
    taken = await world.fetch("SELECT sha256 FROM tga.take_idle_blobs(0, 0, 1000)")
    assert hashlib.sha256(HELLO.encode()).digest() not in {row["sha256"] for row in taken}


async def test_findings_come_with_the_answer(agent: Person) -> None:
    said = await agent.submitted("found", "local x = os.time()\nreturn {x = x}")
    assert [(one["code"], one["line"]) for one in said["findings"]] == [("TGL101", 1)]


async def test_a_strict_start_stops_its_own_run_and_no_other(agent: Person, admin: Person) -> None:
    await agent.submitted("draws", "Human.approve({message = 'Go on?'})\nreturn {drawn = math.random(10)}")
    strict, plain = [await agent.start("draws", strict_determinism=is_strict) for is_strict in (True, False)]
    for run_id in (strict, plain):
        await agent.rested(run_id, "waiting_for_human")  # a later attempt meets the line: the record says that it stops
        status, said = await admin.ask("POST", f"/v1/runs/{run_id}/signals", {"path": "1", "answer": True})
        assert status == 200, said
    stopped, completed = await agent.rested(strict), await agent.rested(plain)
    assert (stopped["state"], stopped["strict_determinism"]) == ("FAILED", True)
    assert stopped["error"]["type"] == "RUN_NOT_DETERMINISTIC"
    assert "draws.lua:2: math.random stands outside a checkpoint" in stopped["error"]["message"]
    assert (completed["state"], completed["strict_determinism"]) == ("COMPLETED", False)
