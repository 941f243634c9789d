"""The gateway as a worker of its own: any gateway takes any run, one that stops or dies leaves nothing undone, and
nobody from outside speaks as it."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Iterator
from functools import partial
from typing import Any

import httpx2
import pytest

from app.domain.identity import Principal
from app.edge.services import IN_PROCESS
from app.gateway.in_process import InProcessTransport
from tests.connectors.servers import raw_server
from tests.lua.hosting import Person, config
from tests.runs.world import RunsWorld, until, worlds
from tests.webhooks.sending import OK, Delivery

CHARGES = """
input { amount = field.number{required = true} }
local paid = {}
for i = 1, 3 do paid[i] = tool.bank.charge{amount = input.amount} end
state.ok = Human.approve({message = "Go on?"})
paid[4] = tool.bank.charge{amount = input.amount}
return {charges = #paid, ok = state.ok}
"""


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


async def test_a_run_goes_on_at_another_gateway_when_its_own_stops_or_dies(world: RunsWorld) -> None:
    # The lease is what the test waits for when a gateway dies.
    settings = config(world, lease_ms=1_000)
    first, second = await world.gateway(config=settings), await world.gateway(config=settings)
    there, here = Person(first.url, world.keys["agent"]), Person(second.url, world.keys["agent"])
    supervisor = Person(second.url, world.keys["supervisor"])
    await there.submitted("charges", CHARGES)
    stopped, killed = [await there.start("charges", {"amount": n}, run_id=f"moved-{n}") for n in (1, 2)]
    for run_id in (stopped, killed):
        await there.rested(run_id, "waiting_for_human")
    first.signal(signal.SIGTERM)  # it waits for nobody: its runs are at rest
    await until(lambda: not first.is_alive())
    await supervisor.ask("POST", f"/v1/runs/{stopped}/signals", {"path": "4", "answer": True})
    run = await here.rested(stopped)
    assert run["output"]["value"] == {"charges": 4, "ok": True}
    third = await world.gateway(config=settings)
    await second.kill()
    here, supervisor = Person(third.url, world.keys["agent"]), Person(third.url, world.keys["supervisor"])
    await supervisor.ask("POST", f"/v1/runs/{killed}/signals", {"path": "4", "answer": True})
    assert (await here.rested(killed))["output"]["value"] == {"charges": 4, "ok": True}
    status, _ = await here.submit("charges", CHARGES.replace("3 do", "2 do"))  # on the one that is left
    assert status == 200
    assert [sum(world.executions(run_id).values()) for run_id in (stopped, killed)] == [4, 4]
    await third.kill()
    await world.verify_all_is_well()


async def test_runs_under_way_are_given_back_or_ended_when_the_gateway_stops(world: RunsWorld) -> None:
    gateway = await world.gateway(config=config(world))
    agent = Person(gateway.url, world.keys["agent"])
    await agent.submitted("many", "for i = 1, 200 do tool.bank.charge{amount = i} end\nreturn {}")
    run_id = await agent.start("many", run_id="drained")
    await until(lambda: sum(world.executions("drained").values()) >= 5)
    gateway.signal(signal.SIGTERM)
    await until(lambda: not gateway.is_alive())
    (row,) = await world.fetch(
        "SELECT state, attempt FROM tga.runs r JOIN tga.heads h USING (stream_no, state) WHERE h.stream = 'run:drained'"
    )
    assert row["state"] in ("SCHEDULED", "COMPLETED"), "a lease of a minute would keep it from others"
    other = await world.gateway(config=config(world))
    agent = Person(other.url, world.keys["agent"])
    assert (await agent.rested(run_id))["state"] == "COMPLETED"
    assert sum(world.executions("drained").values()) == 200
    await other.kill()
    await world.verify_all_is_well()


async def test_a_disabled_host_says_so(world: RunsWorld) -> None:
    gateway = await world.gateway(config=config(world, "enabled = false"))
    status, problem = await Person(gateway.url, world.keys["agent"]).submit("off", "return {}")
    assert (status, problem["code"]) == (409, "LUA_UNAVAILABLE")
    await gateway.kill()


async def test_a_question_has_its_own_url_told_where_that_is_allowed(world: RunsWorld) -> None:
    async with raw_server(OK) as server:
        host = server.url.removeprefix("http://")
        allowed = f'[callbacks]\nallowed_hosts = ["{host}"]\nprivate_hosts = ["127.0.0.1"]'
        gateway = await world.gateway(config=config(world, allowed))
        agent, supervisor = (Person(gateway.url, world.keys[role]) for role in ("agent", "supervisor"))
        await agent.submitted("told", "return {ok = Human.approve({message = 'Go on?', callback = input.url})}")
        run_id = await agent.start("told", {"url": f"{server.url}/q"})
        await until(lambda: bool(server.requests))
        told = Delivery.of(server.requests[0]).document
        (question,) = told["questions"]
        answer = {"path": question["path"], "answer": True, "intent_digest": question["intent_digest"]}
        assert (await supervisor.ask("POST", told["callback"], answer))[0] == 200
        assert (await agent.rested(run_id))["output"]["value"] == {"ok": True}
        elsewhere = await agent.rested(await agent.start("told", {"url": "http://169.254.169.254/latest"}))
        assert (elsewhere["state"], elsewhere["error"]["type"]) == ("FAILED", "RUN_CALLBACK_REFUSED")
        assert "169.254.169.254" in elsewhere["error"]["message"]
        await gateway.kill()


async def test_strict_determinism_refuses_what_lint_finds(world: RunsWorld) -> None:
    gateway = await world.gateway(config=config(world, "strict_determinism = true"))
    agent = Person(gateway.url, world.keys["agent"])
    status, problem = await agent.submit("strict", "local a = 1\nlocal x = os.time()\nreturn {x = x}")
    assert (status, problem["code"], problem["line"]) == (422, "PROCEDURE_SOURCE_INVALID", 2)
    assert "TGL101" in problem["detail"]
    status, _ = await agent.submit("strict", "return {x = checkpoint(function() return os.time() end)}")
    assert status == 200
    # Nobody from outside is the gateway's own worker, whatever they send.
    async with httpx2.AsyncClient() as client:
        for headers in ({IN_PROCESS: "lua"}, {"Authorization": f"Bearer {IN_PROCESS}"}, {"tga-principal": "lua"}):
            answer = await client.post(f"{gateway.url}/v1/worker/lease", json={}, headers=headers)
            assert answer.status_code == 401
        answer = await client.post(f"{gateway.url}/v1/worker/lease?{IN_PROCESS}=lua", json={})
        assert answer.status_code == 401
    await gateway.kill()


async def test_the_transport_says_who_asks_and_hangs_up_on_demand() -> None:
    seen: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(scope)
        asked = await receive()
        if scope["path"] == "/waits":
            assert (await receive())["type"] == "http.disconnect"
        await send({"type": "http.response.start", "status": 201, "headers": [(b"x-is", b"there")]})
        await send({"type": "http.response.body", "body": asked["body"] + b"!", "more_body": False})

    principal = Principal(principal_id="lua", tenant="other", roles=["worker"])
    transport = InProcessTransport(app, principal)
    answer = await transport.handle_async_request(httpx2.Request("PUT", "http://x/a%20b?c=d", content=b"body"))
    assert (answer.status_code, await answer.aread(), answer.headers["x-is"]) == (201, b"body!", "there")
    assert (seen[0][IN_PROCESS], seen[0]["path"], seen[0]["query_string"]) == (principal, "/a b", b"c=d")
    waiting = asyncio.create_task(transport.handle_async_request(httpx2.Request("GET", "http://x/waits")))
    await asyncio.sleep(0)
    transport.hang_up()
    assert (await waiting).status_code == 201


async def test_a_run_with_a_tool_call_is_four_commits_and_reads_nothing_back(world: RunsWorld) -> None:
    """Start and lease; intent and the call's birth; its effect and the answer; the end. What the gateway has just
    stored it tells without reading it."""
    gateway = await world.gateway(config=config(world))
    agent = Person(gateway.url, world.keys["agent"])
    await agent.submitted("pays", "return tool.bank.charge{amount = 1}")
    await agent.rested(await agent.start("pays"))  # from here on program and worker are known
    before = gateway.places

    async def has_ended(run_id: str) -> bool:  # asked of the database: the gateway would read the run to answer
        rows = await world.fetch("SELECT is_open FROM tga.heads WHERE stream = $1", f"run:{run_id}")
        return not rows[0]["is_open"]

    started = []
    for _ in range(5):
        started.append(await agent.start("pays"))
        await until(partial(has_ended, started[-1]))
    passed = gateway.places - before
    assert [(await agent.rested(run_id))["output"]["value"]["amount"] for run_id in started] == [1] * 5
    assert passed["load_records"] == 0
    commits = {place: count for place, count in passed.items() if place.startswith("commit:")}
    assert commits == {
        "commit:run_start+run_attempt.LEASED": 5,
        "commit:run_intent.tool+trace": 5,
        "commit:run_answer.tool+trace": 5,
        "commit:run_end.COMPLETED": 5,
    }
    await gateway.kill()


REFUSED_READ = """
local ok, problem = pcall(step, "read", function()
    return http_client.get("http://elsewhere.test/")
end, {retry = {retries = 3, first = 0}})
return {ok = ok, type = problem.type, retryable = problem.retryable}
"""


async def test_a_host_that_is_not_allowed_is_not_asked_for_again(world: RunsWorld) -> None:
    settings = config(world, '[lua.http]\nallowed_hosts = ["example.com"]')
    policy = world.place / "policy.cedar"
    policy.write_text(policy.read_text() + '@id("web") permit(principal, action, resource);')
    gateway = await world.gateway(config=settings)
    person = Person(gateway.url, world.keys["agent"])
    await person.submitted("refused-read", REFUSED_READ)
    run_id = await person.start("refused-read", run_id="refused-read-1")
    run = await person.rested(run_id)
    assert run["output"]["value"] == {"ok": False, "type": "HTTP_NOT_ALLOWED", "retryable": False}
    _, journal = await person.ask("GET", f"/v1/runs/{run_id}/entries")
    types = [one["entry"]["artifact_type"] for one in journal["items"]]
    assert types.count("run_intent") == 1, types
