"""Who reaches a run over HTTP: on every route the same runs exist, and the same roles are asked for."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.core.errors import RunNotFound
from app.domain.runs.values import ChildValue
from app.edge.runs import _joined
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.runs import journal
from tests.runs.engines import PROGRAM, step
from tests.runs.routes import OFFER, Runs, ask, open_runs

LEASE = "a-lease-that-nobody-has"
BEAT = {"worker": "worker-one", "name": "w", "runs": [{"run_id": "r-1", "lease": LEASE}]}
PUT = {"lease": LEASE, "attempt": 1, "after_seq": 2, "puts": []}
# Every route of one run, with a body that fits: who may use it on the tenant's runs, and on its own.
ROUTES: dict[str, tuple[Any, set[str], set[str]]] = {
    "GET /v1/runs/{run_id}": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/state": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/entries": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/events": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/receipt": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/verification": (None, {"auditor", "operator", "supervisor"}, {"agent", "worker"}),
    "GET /v1/runs/{run_id}/checkpoints": (None, {"auditor", "operator", "supervisor", "worker"}, {"agent"}),
    "GET /v1/runs/{run_id}/checkpoints/{path}": (None, {"auditor", "operator", "supervisor", "worker"}, {"agent"}),
    "POST /v1/runs/{run_id}/checkpoints": (PUT, {"worker"}, set()),
    "POST /v1/runs/{run_id}/heartbeat": (BEAT, {"worker"}, set()),
    "POST /v1/runs/{run_id}/signals": ({"name": "paid", "signal_id": "s-1"}, {"operator"}, {"agent"}),
    "POST /v1/runs/{run_id}/cancel": ({}, {"operator"}, {"agent"}),
    "POST /v1/runs/{run_id}/retry": ({}, {"operator"}, {"agent"}),
    "POST /v1/runs/{run_id}/fork": ({}, {"operator"}, {"agent"}),
    "DELETE /v1/runs/{run_id}": (None, {"operator"}, set()),
}
MANY = settings(
    max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def asked(runs: Runs, route: str, body: Any, who: str, run_id: str = "r-1") -> tuple[int, Any]:
    method, path = route.split()
    if isinstance(body, dict) and path.endswith("/heartbeat"):
        body = {**body, "worker": f"{who}-one", "runs": [{"run_id": run_id, "lease": LEASE}]}
    path = path.replace("{run_id}", run_id).replace("{path}", "1")
    url = f"http://127.0.0.1:{runs.front.port}{path}"
    headers = {"Authorization": f"Bearer {who}", "Content-Type": "application/json"}
    raw = None if body is None else body if isinstance(body, bytes) else json.dumps(body)
    async with runs.front.client.request(method, url, data=raw, headers=headers) as answer:
        if answer.content_type.endswith("json"):
            return answer.status, await answer.json(content_type=None)
        return answer.status, None  # a stream of events, or a proof


async def test_every_route_of_a_run_is_looked_at_here(runs: Runs) -> None:
    document = (await runs.front.get("/openapi.json", None))[1]
    found = {
        f"{method.upper()} {path}"
        for path, methods in document["paths"].items()
        for method in methods
        if "{run_id}" in path
    }
    assert found == ROUTES.keys()


async def test_a_run_that_is_unknown_or_of_another_tenant_is_not_found(runs: Runs) -> None:
    """Whether it exists shows in no answer: both are told the same, whatever the role."""
    await runs.asking("r-1")
    for route, (body, whole, own) in ROUTES.items():
        for role in {*whole, *own}:
            stranger = "acme" if role == "auditor" else f"acme-{role}"
            told = [
                await asked(runs, route, body, role, "unknown"),
                await asked(runs, route, body, stranger),
                await asked(runs, route, body, stranger, "default:r-1"),
            ]
            assert [(status, document["code"]) for status, document in told] == [(404, "RUN_NOT_FOUND")] * 3, (
                route,
                role,
            )
            assert told[0][1] == told[1][1]
    assert (await runs.front.page("/v1/runs/r-1"))["sequence_number"] == 4, "nothing was done to it"


async def test_unknown_run(runs: Runs) -> None:
    """LittleHorse: a put for a run that does not exist is an error, not an OK."""
    for run_id in ("nothing", "not%20an%20id", "a" * 97):
        status, document = await asked(runs, "POST /v1/runs/{run_id}/checkpoints", PUT, "worker", run_id)
        assert (status, document["code"]) == (404, "RUN_NOT_FOUND")


async def test_roles(runs: Runs) -> None:
    """What no role of the caller admits is refused; what is admitted for its own runs only is, for those of others, no
    run at all, or forbidden where it may see them."""
    await runs.asking("r-1")
    everyone = {"auditor", "operator", "supervisor", "worker", "agent", "agent-2", "nobody"}
    for route, (body, whole, own) in ROUTES.items():
        if "/events" in route:
            continue  # it does not end; the next test looks at it
        for who in everyone:
            status, document = await asked(runs, route, body, who)
            if who in whole or (who == "agent" and who in own):
                assert status in (200, 409), (route, who, document)  # 409: not in this state
            elif (who == "agent-2" and "agent" in own) or who in own:
                assert (status, document["code"]) == (404, "RUN_NOT_FOUND"), (route, who)
            else:
                assert (status, document["code"]) == (403, "FORBIDDEN"), (route, who)


async def test_roles_of_the_other_routes(runs: Runs) -> None:
    await runs.complete("r-1")
    lease = {"worker": "worker-two", "name": "w", "procedures": [OFFER]}
    for route, body, who_may in (
        ("GET /v1/runs/{run_id}/events", None, {"auditor", "operator", "supervisor", "agent"}),
        ("GET /v1/runs", None, {"auditor", "operator", "supervisor", "agent", "worker", "agent-2"}),
        ("POST /v1/runs", {"procedure": "onboard", "run_id": "r-1"}, {"agent", "operator"}),
        ("POST /v1/worker/lease", lease, {"worker"}),
        ("POST /v1/worker/heartbeat", {"worker": "worker-two", "name": "w"}, {"worker"}),
    ):
        for who in ("auditor", "operator", "supervisor", "worker", "agent", "agent-2", "nobody"):
            status, _ = await asked(runs, route, body, who)
            if who in who_may:
                assert status == (409 if who == "operator" and route == "POST /v1/runs" else 200), (route, who)
            else:
                assert status in (403, 404, 409), (route, who)


async def test_only_a_supervisor_answers(runs: Runs) -> None:
    await runs.asking("r-1")
    body = {"path": "1", "answer": True}
    for who in ("agent", "operator", "auditor", "worker"):
        assert (await asked(runs, "POST /v1/runs/{run_id}/signals", body, who))[0] == 403, who
    assert (await asked(runs, "POST /v1/runs/{run_id}/signals", body, "supervisor"))[0] == 200


async def test_a_worker_id_is_its_principals(runs: Runs) -> None:
    lease = {"worker": "worker-one", "name": "w", "procedures": [OFFER]}
    assert (await runs.front.post("/v1/worker/lease", lease, "worker"))[0] == 200
    status, document = await runs.front.post("/v1/worker/lease", lease, "acme-worker")
    assert (status, document["code"]) == (403, "FORBIDDEN")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_GOOD_PUT = {"lease": LEASE, "attempt": 1, "after_seq": 2, "puts": [step("1"), ask("2")], "then": None}


@MANY
@given(data=st.data())
async def test_hostile_bodies_are_refused_by_name_and_change_nothing(runs: Runs, data: Any) -> None:
    """Something of a good body is replaced by any JSON: the answer is never a 5xx, and the run stays as it was."""
    await runs.start("r-1")
    route = data.draw(st.sampled_from([route for route in ROUTES if route.startswith("POST")]))
    body: Any = json.loads(json.dumps(_GOOD_PUT if "checkpoints" in route else ROUTES[route][0]))
    parts = [(body, key) for key in body]
    for put in body.get("puts", ()):
        parts += [(put, key) for key in put]
    parts.append((body, data.draw(st.text(max_size=6))))
    part, key = data.draw(st.sampled_from(parts))
    part[key] = data.draw(JSON)
    raw = data.draw(st.sampled_from([body, json.dumps(body).encode()[:-1], b"[]", b"\xff", b'{"a":1,"a":2}']))
    who = "worker" if route.endswith(("checkpoints", "heartbeat")) else "auditor"
    status, document = await asked(runs, route, raw, who)
    assert status < 500, document
    assert (await runs.front.page("/v1/runs/r-1"))["sequence_number"] == 1


async def test_what_is_too_large_is_413(runs: Runs) -> None:
    await runs.start("r-1")
    (run,) = await runs.lease()
    large = {"tier": "inline", "value": "x" * 40_000}
    put = {"lease": run["lease"], "attempt": 1, "after_seq": 2, "puts": [{**step("1"), "value": large}]}
    status, document = await asked(runs, "POST /v1/runs/{run_id}/checkpoints", put, "worker")
    assert (status, document["code"]) == (413, "RUN_VALUE_TOO_LARGE")
    many = [{**step(str(n)), "value": {"tier": "inline", "value": "x" * 30_000}} for n in range(1, 12)]
    status, document = await asked(runs, "POST /v1/runs/{run_id}/checkpoints", {**put, "puts": many}, "worker")
    assert (status, document["code"]) == (413, "INPUT_TOO_LARGE")
    assert (await runs.front.page("/v1/runs/r-1"))["sequence_number"] == 2


async def test_old_attempt_is_stopped_with_200(runs: Runs) -> None:
    """LittleHorse: the old attempt gets OK and STOP, at every route of workers; its call is recorded once."""
    await runs.start("r-1")
    (old,) = await runs.lease()
    await runs.put(old, then={"type": "release"})
    (new,) = await runs.lease()
    assert (old["attempt"], new["attempt"]) == (1, 2)
    for _ in range(2):
        told = await runs.put(old, step("1"), after=3)
        assert (told["directive"], told["reason"]) == ("STOP", "LEASE_LOST")
    beat = {"worker": "worker-one", "name": "w", "runs": [{"run_id": "r-1", "lease": old["lease"]}]}
    for path in ("/v1/worker/heartbeat", "/v1/runs/r-1/heartbeat"):
        status, document = await runs.front.post(path, beat, "worker")
        (one,) = document.get("runs", [document])
        assert (status, one["directive"], one["reason"]) == (200, "STOP", "LEASE_LOST")
    fenced = [
        item["artifact"]["change"]
        for item in (await runs.front.page("/v1/runs/r-1/entries"))["items"]
        if item["entry"]["artifact_type"] == "run_attempt"
    ]
    assert fenced.count("FENCED") == 1
    assert new["program_digest"] == PROGRAM


async def test_no_value_that_a_worker_says_names_what_stands_on_another_stream(runs: Runs) -> None:
    """Readers of a journal are given what a tool or a child returned: a question whose default named another tenant's
    run would hand its output to whoever asks. And what no intent named would be a finding of every verification."""
    await runs.ok(await runs.front.post("/v1/procedures", OFFER, "acme-worker"))
    await runs.start("secret", who="acme-agent")
    theirs = {"tier": "run", "run_id": "acme/secret", "entry_digest": "0" * 64}
    effect = {"tier": "effect", "trace_id": "01970000-0000-7000-8000-000000000001", "tool_effect_digest": "0" * 64}
    await runs.start("r-1")
    (run,) = await runs.lease()
    positions = {"type": "complete", "positions": 0}
    for value in (theirs, effect):
        for more in (
            {"puts": [ask("1", default=value, expires_at="2020-01-01T00:00:00.000Z")]},
            {"puts": [ask("1", context=value)]},
            {"then": {**positions, "output": value}},
        ):
            body = {"lease": run["lease"], "attempt": 1, "after_seq": 2, "puts": [], **more}
            status, document = await runs.front.post("/v1/runs/r-1/checkpoints", body, "worker")
            assert (status, document["code"]) == (422, "SCHEMA_VIOLATION"), more
    failed = {**step("1"), "outcome": "ERROR", "value": None, "error": {"type": "E", "message": "", "retryable": False}}
    await runs.put(run, failed, then={"type": "fail", "error": failed["error"]})
    said = {"path": "1", "outcome": "OK", "value": theirs, "error": None}
    status, document = await runs.front.post("/v1/runs/r-1/retry", {"resolves": [said]}, "operator")
    assert (status, document["code"]) == (422, "SCHEMA_VIOLATION")


async def test_a_journal_that_names_another_tenants_run_shows_nothing_of_it(runs: Runs) -> None:
    """As if such a value had been recorded by somebody else than a gateway."""
    await runs.ok(await runs.front.post("/v1/procedures", OFFER, "acme-worker"))
    await runs.start("theirs", who="acme-agent")
    ports = runs.engine.engine.ports
    theirs = await ports.runs.load("acme/theirs")
    value = ChildValue(tier="run", run_id="acme/theirs", entry_digest=theirs.run.head.entry_digest)
    answer = journal.answer("1", "0" * 64, "child", value=value)
    with pytest.raises(RunNotFound):
        await _joined(runs.front.services, "default", answer)
    assert await _joined(runs.front.services, "acme", answer) is None
