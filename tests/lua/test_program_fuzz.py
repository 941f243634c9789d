"""Programs that were changed at random, and bytes that are none: submitted over the route, linted, drawn, and executed
under limits. Only errors of ours come out, every run has its end, and the host serves as before.

Sampled by a seed that is printed; TGA_SEED repeats it, thousands in soak.
"""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import json
import os
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any, Final

import httpx2
import pytest

from app.domain.runs.procedures import PolicySaid, ProcedureSaid
from app.lua.driver import lua_procedure
from app.lua.limits import Limits
from app.lua.lint import LintError, lint_source
from app.lua.options import LuaOptions
from app.lua.pool import ChildLost, Pool
from app.lua.programs import LuaSourceInvalid, Source, declared
from tests import sampling
from tests.crash.world import PATIENCE_S
from tests.lua.hosting import ENDED, Person, config
from tests.lua.mutating import corpus, mutated
from tests.lua.test_lua_crashes import children_of
from tests.runs.world import GatewayProcess, RunsWorld, until, worlds
from tga_sdk.testing import ScriptedPeople
from tga_sdk.testing.crashes import RunStuck, Setting

LIMITS: Final = Limits(
    state_bytes=16_777_216, slice_cpu_s=0.1, attempt_cpu_s=1.0, operations=100, threads=50, output_bytes=4_194_304
)
OF_PYTHON: Final = {
    name for name, one in vars(builtins).items() if isinstance(one, type) and issubclass(one, BaseException)
} | {"ValidationError"}
RAW: Final = (
    b"",
    b"\xff\xfe\xfd",
    b"\xef\xbb\xbfreturn {}",
    b"\x1bLua\x54\x00\x19\x93\r\n\x1a\n",
    b"\x00" * 1_000,
    b"return '\xed\xa0\x80'",
    b"return '\xf4\x90\x80\x80'",
    b"--" + b"x" * 120_000,
    b"return " + b"(" * 50_000 + b"1" + b")" * 50_000,
    b"return " + b"{" * 190 + b"}" * 190,
    b"return " + b"- " * 60_000 + b"1",
    b"x = " + b"a." * 60_000 + b"b",
    b"return " + b"'x' .. " * 15_000 + b"'y'",
    b"f" + b"()" * 60_000,
    b"return " + b"9" * 120_000,
    b"return [" + b"=" * 60_000 + b"[",
    b"function f() " * 9_000 + b"end " * 9_000,
    b"local " + b",".join(b"a%d" % n for n in range(300)) + b" = 1",
    b"error('a:\xc2\xb2: b', 0)",
    b"error('a:" + b"9" * 5_000 + b": b', 0)",
    b"error({type = 'two words', message = 'x', ref = {}})",
    b"main = procedure 'main' {tags = 5, run = function() end}",
    b"main = procedure 'main' {tags = {'two words'}, run = function() end}",
    b"main = procedure 'main' {accepts = 5, run = function() end}",
    b"main = procedure 'main' {retry = {retries = -1}, run = function() end}",
    b"main = procedure 'main' {description = ('x'):rep(5000), run = function() end}",
    b"main = procedure 'main' {description = 'a\\0b', timeout = 1e12, run = function() end}",
)


def seed() -> int:
    found = int(os.environ.get("TGA_SEED") or sampling.number("mutated programs"))
    print(f"TGA_SEED={found}")
    return found


def programs(count: int) -> Iterator[tuple[str, bytes]]:
    whole, first = corpus(), seed()
    for number in range(count):
        name = f"{first}-{number}"
        chance = random.Random(name)
        yield name, mutated(chance.choice(whole), chance)


async def declared_or_refused(pool: Pool, data: bytes) -> Any:
    """The procedure, as far as it would be registered; None: it is refused, by an error of ours."""
    source = Source("program.lua", data.decode("utf-8", "replace"), {})
    try:
        declaration = await declared(pool, source)
    except LuaSourceInvalid:
        return None
    except ChildLost as lost:
        if lost.is_guilty:
            return None
        raise
    made = lua_procedure(source, declaration, pool, options=LuaOptions(limits=LIMITS))
    registered = made.registration()
    ProcedureSaid(
        name="program",
        version=declaration.version,
        program_digest="0" * 64,
        description=declaration.description,
        policy=PolicySaid.made_of(made.policy.document()),
        tags=list(declaration.tags),
        input_schema=registered.get("input_schema"),
    )
    return made


def linted(data: bytes) -> None:
    with contextlib.suppress(LintError):
        lint_source(data, "program.lua").diagram()


def told(outcome: Any) -> str:
    """How it ended; where that was not by an error of ours, the assertion says with what."""
    ends = [one for one in outcome.journal if one["artifact_type"] == "run_end"]
    assert [outcome.journal[-1]] == ends
    if outcome.state == "COMPLETED":
        return "COMPLETED"
    assert outcome.state in ("FAILED", "PARKED")
    assert outcome.error["type"] not in OF_PYTHON, outcome.error
    assert "sandbox failed" not in outcome.error["message"]
    assert "Traceback" not in outcome.error["message"]
    return str(outcome.error["type"])


async def test_what_was_changed_at_random_is_refused_or_runs_to_an_end_of_ours() -> None:
    ends: Counter[str] = Counter()
    people = ScriptedPeople(dict.fromkeys(("approve", "input", "select", "review"), True)).signal("paid", 5)
    async with Pool(LIMITS, children=1) as pool:
        for name, data in programs(sampling.share(4_000 if sampling.IS_SOAK else 400, 40)):
            linted(data)
            try:
                made = await declared_or_refused(pool, data)
                if made is None:
                    ends["refused"] += 1
                    continue
                ends[await ended(made, people)] += 1
            except Exception as error:
                raise AssertionError(f"program {name}:\n{data.decode('utf-8', 'replace')}") from error
        assert (await declared(pool, Source("program.lua", "return {}", {}))).is_script
    print(dict(ends))
    assert ends["refused"]
    assert sum(ends.values()) > ends["refused"]


async def ended(made: Any, people: ScriptedPeople) -> str:
    setting = Setting(made, given_for(made.declaration.input_fields), _tools(), people, [], None, None, None)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return told(await setting.run(None))
    except RunStuck:
        return "waits"  # for a person or a signal of a name that was changed
    except AssertionError as refused:
        if '"code":"ARGUMENTS_INVALID"' not in str(refused):
            raise
        return "not started"  # by an input that does not fit what was changed


def given_for(fields: Any) -> dict[str, Any]:
    """What a program takes, as far as its declaration says."""
    of_type = {"string": "x", "boolean": True, "array": [], "object": {}, "table": {}}
    return {
        name: (one.get("enum") or [of_type.get(one.get("type"), 1)])[0]
        for name, one in (fields or {}).items()
        if one.get("default") is None
    }


def _tools() -> dict[str, Any]:
    return {"bank.charge": lambda **given: {"charge_id": "ch_1"}, "bank.balance": lambda **given: {"balance": 1}}


@pytest.mark.parametrize("data", RAW, ids=range(len(RAW)))
async def test_bytes_that_are_no_program_are_linted_and_declared_or_refused(data: bytes) -> None:
    linted(data)
    async with Pool(LIMITS, children=1) as pool:
        await declared_or_refused(pool, data)
        assert (await declared(pool, Source("program.lua", "return {}", {}))).is_script


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


def body_of(data: bytes) -> bytes:
    """As JSON, with the bytes in it as they are: also those that are no text."""
    text = json.dumps(data.decode("utf-8", "surrogateescape"), ensure_ascii=False)
    return b'{"name":"fuzzed","language":"lua","source":' + text.encode("utf-8", "surrogateescape") + b"}"


@pytest.mark.one_in(2)
async def test_over_the_route_nothing_is_an_error_of_the_gateway_and_every_run_ends(world: RunsWorld) -> None:
    lua = "slice_cpu_ms = 100\nattempt_cpu_ms = 1000\noperations = 100\nmemory_bytes = 16777216"
    gateway: GatewayProcess = await world.gateway(config=config(world, lua, lease_ms=10_000))
    agent = Person(gateway.url, world.keys["agent"])
    admin = Person(gateway.url, world.keys["admin"])
    headers = {"Authorization": f"Bearer {world.keys['agent']}", "Content-Type": "application/json"}
    raw = [(f"raw {number}", data) for number, data in enumerate(RAW)]
    chosen = [one for one in raw if sampling.is_taken(f"raw {one[0]}", 4)]
    runs: list[str] = []
    async with httpx2.AsyncClient(timeout=PATIENCE_S, trust_env=False) as client:
        for name, data in [*chosen, *programs(300 if sampling.IS_SOAK else sampling.share(30, 6))]:
            answer = await client.post(f"{gateway.url}/v1/procedures", content=body_of(data), headers=headers)
            assert answer.status_code == 200 or 400 <= answer.status_code < 500, (name, answer.text, data)
            if answer.status_code != 200:
                assert answer.json()["code"] != "INTERNAL", name
                continue
            digest = answer.json()["program_digest"]
            said = {"procedure": "fuzzed", "program_digest": digest, "version": answer.json()["version"]}
            properties = (answer.json().get("input_schema") or {}).get("properties")
            status, run = await agent.ask("POST", "/v1/runs", {**said, "input": given_for(properties)})
            assert status < 500, (name, run)
            if status == 200:
                runs.append(run["run_id"])
    waiting = ("waiting", "waiting_for_human")
    found = [await agent.rested(run_id, *waiting) for run_id in runs]
    for run in found:
        if run["status"] in waiting:
            assert (await admin.ask("POST", f"/v1/runs/{run['run_id']}/cancel", {}))[0] == 200
            run |= await agent.rested(run["run_id"])
        assert run["state"] in ENDED
        assert run["error"] is None or run["error"]["type"] not in OF_PYTHON, run["error"]
    await agent.submitted("sound", "return {}")
    assert (await agent.rested(await agent.start("sound")))["state"] == "COMPLETED"
    children = children_of(gateway.pid)
    await gateway.kill()
    await until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in children))
    await world.verify_all_is_well()
