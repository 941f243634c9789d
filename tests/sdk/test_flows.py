"""Flows, on a real gateway with real worker processes; what happened is counted in the bank's own book."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.runs.worker import Refused
from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until
from tests.sdk.serving import Served, bodies, ran
from tga_sdk import Flow, ProcedureInvalid, Schedule, Step
from tga_sdk.flows import changes_between

PROGRAMS = str(Path(__file__).with_name("flow_programs.py"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flows")


class FlowWorld:
    """A gateway, workers of the flows, and somebody who starts them."""

    def __init__(
        self, world: RunsWorld, gateway: GatewayProcess, caller: Caller, folder: Path, workers: list[Served]
    ) -> None:
        self.world = world
        self.gateway = gateway
        self.caller = caller
        self.folder = folder
        self.workers = workers

    async def serve(self) -> Served:
        """The worker of all flows; started if there is none."""
        if not self.workers or self.workers[-1].process.poll() is not None:
            await self.start_worker(PROGRAMS)
        return self.workers[-1]

    async def start_worker(self, place: str, role: str = "admin") -> Served:
        worker = Served(self.folder, self.gateway.url, self.world.keys[role], place)
        self.workers.append(worker)
        return worker

    async def start(self, flow: str, **data: Any) -> str:
        """The id of a run that was started with this data."""
        run_id = new_id(flow)
        await until(lambda: self._is_registered(flow))
        await self.caller.start(flow, {"amount": 5, **data}, run_id)
        return run_id

    async def _is_registered(self, flow: str) -> bool:
        try:
            await self.caller.agent.ask("GET", f"/v1/procedures/{flow}")
        except Refused:
            return False
        return True

    async def look(self, run_id: str) -> dict[str, Any]:
        return await self.caller.look(run_id)

    async def steps(self, run_id: str) -> dict[str, str]:
        return {step["name"]: step["status"] for step in (await self.look(run_id))["steps"]}

    async def state(self, run_id: str) -> Any:
        return (await self.caller.agent.ask("GET", f"/v1/runs/{run_id}/state"))["state"]

    async def until_at(self, run_id: str, step: str) -> None:
        """The body of this step has begun."""

        async def is_there() -> bool:
            assert (await self.look(run_id))["state"] in ("SCHEDULED", "RUNNING"), self.workers[-1].logged[-2_000:]
            return ran(self.folder, run_id)[step] > 0

        await until(is_there)

    async def end(self, run_id: str) -> dict[str, Any]:
        return await self.caller.see_through(run_id)

    def go(self, run_id: str) -> None:
        (self.folder / f"go-{run_id}").touch()


@pytest.fixture(scope="module")
def workers() -> Iterator[list[Served]]:
    """Those that run; the last one is alive, unless a test has killed it."""
    started: list[Served] = []
    yield started
    for worker in started:
        worker.process.kill()
        worker.process.wait()


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    # Workers are killed, and their leases waited for; those of living ones must not be lost on a slow machine.
    return asyncio.run(world.gateway(config=world.config(lease_ms=5_000)))


@pytest.fixture
async def flows(
    world: RunsWorld, gateway: GatewayProcess, workers: list[Served], folder: Path
) -> AsyncIterator[FlowWorld]:
    async with Caller(world, gateway.url) as caller:
        yield FlowWorld(world, gateway, caller, folder, workers)


async def test_flow_resumes_at_stage(flows: FlowWorld) -> None:
    """Its worker is killed in the middle of the second step. What had ended is not executed again, and of the step that
    was under way the tool call is not: the bank has charged once."""
    first = await flows.serve()
    run_id = await flows.start("flow-order", waits_at="charge")
    await flows.until_at(run_id, "charge")
    await first.kill()
    flows.go(run_id)
    await flows.serve()
    ended = await flows.end(run_id)
    assert ended["state"] == "COMPLETED"
    assert ended["output"]["value"]["told"] == ["plan", "charge", "ship"]
    assert ran(flows.folder, run_id) == {"plan": 1, "charge": 2, "ship": 1}
    assert list(flows.world.executions(run_id).values()) == [1]
    assert ended["attempt"] == 2


async def test_stage_says_where(flows: FlowWorld) -> None:
    """The state names the step, and has the data as the last finished step left it; also at entries of the past."""
    await flows.serve()
    run_id = await flows.start("flow-order", waits_at="ship")
    await flows.until_at(run_id, "ship")
    there = await flows.state(run_id)
    assert there["stage"] == "ship"
    assert (there["data"]["told"], there["data"]["charge"]["amount"]) == (["plan", "charge"], 5)
    flows.go(run_id)
    ended = await flows.end(run_id)
    assert await flows.state(run_id) == {"stage": None, "data": ended["output"]["value"]}
    stages = []
    for at in range(1, ended["sequence_number"] + 1):
        past = (await flows.caller.agent.ask("GET", f"/v1/runs/{run_id}/state?at={at}"))["state"]
        stages += [past["stage"]] if past and past["stage"] not in stages else []
    assert stages == ["plan", "charge", "ship", None]


async def test_run_shows_each_step(flows: FlowWorld) -> None:
    """Each is there from the beginning: pending, then in progress, then completed or failed; with what it changed."""
    await flows.serve()
    run_id = await flows.start("flow-order", waits_at="charge", fails_at="charge")
    await flows.until_at(run_id, "charge")
    expected = {"plan": "completed", "charge": "in_progress", "ship": "pending"}
    assert await flows.steps(run_id) == expected
    seen = (await flows.look(run_id))["steps"]
    assert [(step["path"], step["tries"]) for step in seen] == [("2", 1), ("3", 1), ("4", 0)]
    assert seen[0]["value"]["value"] == {"told": ["plan"]}
    flows.go(run_id)
    assert (await flows.end(run_id))["state"] == "COMPLETED"
    failing = await flows.start("flow-order", fails_at="charge")
    ended = await flows.end(failing)
    assert ended["state"] == "FAILED"
    assert await flows.steps(failing) == {"plan": "completed", "charge": "failed", "ship": "pending"}
    charged = ended["steps"][1]
    assert charged["error"] == {"type": "Wrong", "message": "charge was told to fail", "retryable": False}
    assert (await flows.state(failing))["stage"] == "charge"


async def test_event_payload_is_first_state(flows: FlowWorld) -> None:
    """It starts a run of each flow that listens, once for its id; a payload that does not fit is refused."""
    await flows.serve()
    await until(lambda: flows._is_registered("flow-nightly"))
    event = {"event_id": new_id("evt"), "payload": {"amount": 11}}
    sent = await flows.caller.agent.ask("POST", "/v1/triggers/order.placed", event)
    started = {one["procedure"]: one["run_id"] for one in sent["runs"]}
    assert set(started) == {"flow-other", "flow-listening"}
    for run_id in started.values():
        assert (await flows.end(run_id))["output"]["value"]["amount"] == 11
    again = await flows.caller.agent.ask("POST", "/v1/triggers/order.placed", event)
    assert [one["is_new"] for one in again["runs"]] == [False, False]
    wrong = {"event_id": new_id("evt"), "payload": {"amount": "much"}}
    with pytest.raises(Refused) as refused:
        await flows.caller.agent.ask("POST", "/v1/triggers/order.placed", wrong)
    assert refused.value.code == "ARGUMENTS_INVALID"


async def test_flows_do_not_mix(flows: FlowWorld) -> None:
    """Two flows with steps of the same names, started by one event and run by one worker."""
    await flows.serve()
    await until(lambda: flows._is_registered("flow-nightly"))
    event = {"event_id": new_id("evt"), "payload": {"amount": 7}}
    sent = await flows.caller.agent.ask("POST", "/v1/triggers/order.placed", event)
    runs = {one["procedure"]: await flows.end(one["run_id"]) for one in sent["runs"]}
    assert runs["flow-other"]["output"]["value"]["told"] == ["plan", "charge"]
    assert runs["flow-listening"]["output"]["value"]["told"] == ["plan", "ship"]
    keys = [one["key"] for one in bodies(flows.folder) if one["run_id"].endswith(event["event_id"])]
    assert len(keys) == len(set(keys)) == 4
    assert list(flows.world.executions(runs["flow-other"]["run_id"]).values()) == [1]
    assert flows.world.executions(runs["flow-listening"]["run_id"]) == {}


async def test_retention_kept(flows: FlowWorld) -> None:
    await flows.serve()
    run_id = await flows.start("flow-order")
    assert (await flows.end(run_id))["state"] == "COMPLETED"
    assert (await flows.look(run_id))["input"]["value"]["amount"] == 5


async def test_retention_failures_kept(flows: FlowWorld) -> None:
    await flows.serve()
    run_id = await flows.start("flow-forgotten", fails_at="plan")
    assert (await flows.end(run_id))["state"] == "FAILED"
    done = await flows.start("flow-forgotten")
    await until(lambda: _is_erased(flows, done))  # whoever erases has looked at both
    assert (await flows.look(run_id))["input"]["value"]["fails_at"] == "plan"


async def test_retention_chain_stays(flows: FlowWorld) -> None:
    """What the run carried is gone; that it ran, and that nobody has changed it, can still be verified."""
    await flows.serve()
    run_id = await flows.start("flow-forgotten", amount=4711)
    await until(lambda: _is_erased(flows, run_id))
    entries = await flows.world.fetch("SELECT entry FROM tga.entries WHERE stream = $1", f"run:{run_id}")
    assert len(entries) > 4
    left = await flows.world.fetch("SELECT artifact FROM tga.artifacts WHERE stream = $1", f"run:{run_id}")
    assert not [row for row in left if "4711" in str(row["artifact"])]
    assert await asyncio.to_thread(flows.world.database.verify) == []


async def _is_erased(flows: FlowWorld, run_id: str) -> bool:
    with contextlib.suppress(Refused):
        await flows.look(run_id)
        return False
    return True


async def test_retry_zero_is_never(flows: FlowWorld) -> None:
    """The flow says two retries; the step that says 0 is executed once, and the others three times."""
    await flows.serve()
    twice = await flows.start("flow-retried", fails_at="plan")
    never = await flows.start("flow-retried", fails_at="never")
    assert (await flows.end(twice))["state"] == (await flows.end(never))["state"] == "FAILED"
    assert ran(flows.folder, twice) == {"plan": 3}
    assert ran(flows.folder, never) == {"plan": 1, "never": 1}
    assert [step["tries"] for step in (await flows.look(twice))["steps"]] == [3, 0]
    assert [step["tries"] for step in (await flows.look(never))["steps"]] == [1, 1]


async def test_key_is_stable(flows: FlowWorld) -> None:
    """In every attempt and every try; and it is another one in every other step and run."""
    first = await flows.serve()
    run_id = await flows.start("flow-order", waits_at="ship")
    await flows.until_at(run_id, "ship")
    await first.kill()
    flows.go(run_id)
    await flows.serve()
    await flows.end(run_id)
    twice = await flows.start("flow-retried", fails_at="plan")
    await flows.end(twice)
    noted = [one for one in bodies(flows.folder) if one["run_id"] in (run_id, twice)]
    shipped = [one for one in noted if one["step"] == "ship"]
    assert [one["attempt"] for one in shipped] == [1, 2]
    keys = {(one["run_id"], one["step"]): one["key"] for one in noted}
    assert all(one["key"] == keys[one["run_id"], one["step"]] for one in noted)
    assert len(set(keys.values())) == len(keys) == 4
    assert all(run in key for (run, _), key in keys.items())


async def test_retry_reopens_the_failed_step(flows: FlowWorld) -> None:
    """Somebody has mended what was wrong: the run goes on at the step that failed, with the data that it had there."""
    await flows.serve()
    run_id = await flows.start("flow-order", fails_at="charge")
    assert (await flows.end(run_id))["state"] == "FAILED"
    flows.go(run_id)
    await flows.caller.agent.ask("POST", f"/v1/runs/{run_id}/retry", {"rationale": "mended"})
    ended = await flows.end(run_id)
    assert ended["state"] == "COMPLETED"
    assert ran(flows.folder, run_id) == {"plan": 1, "charge": 2, "ship": 1}
    assert list(flows.world.executions(run_id).values()) == [1]  # the call in it had succeeded, and is not made again


async def test_after_a_definite_failure_a_retry_is_a_new_intent(flows: FlowWorld) -> None:
    await flows.serve()
    run_id = await flows.start("flow-definite")
    assert (await flows.end(run_id))["state"] == "FAILED"
    intents = [one for one in await flows.world.journal(run_id) if one.get("kind") == "tool"]
    assert [one["request"]["idempotency_key"] for one in intents] == [f"run:{run_id}/2.1", f"run:{run_id}/2.1/r1"]


async def test_step_helpers(flows: FlowWorld) -> None:
    """`call_tool` with a function, constants and the data itself as arguments; each way to place what comes back."""
    await flows.serve()
    run_id = new_id()
    await until(lambda: flows._is_registered("flow-nightly"))
    await flows.caller.start("flow-plain", {"amount": 9}, run_id)
    ended = await flows.end(run_id)
    assert ended["state"] == "COMPLETED", ended
    data = ended["output"]["value"]
    assert (data["charge"]["amount"], data["rich"], data["counted"]) == (9, True, 3)
    assert [step["value"]["value"] for step in ended["steps"]][1:] == [{"rich": True}, {"counted": 3}, {}]
    assert list(flows.world.executions(run_id).values()) == [1, 1]


async def test_step_helpers_that_think(flows: FlowWorld) -> None:
    """`llm` with a tool of the gateway, then `agent`: each answer goes where it should; the tool is called once."""
    await flows.serve()
    run_id = await flows.start("flow-thinking")
    ended = await flows.end(run_id)
    assert ended["state"] == "COMPLETED", ended
    assert ended["output"]["value"] == {"amount": 5, "plan": "charged 4 for the plan", "letter": "Dear customer"}
    assert list(flows.world.executions(run_id).values()) == [1]
    kinds = [one["kind"] for one in await flows.world.journal(run_id) if one["artifact_type"] == "run_checkpoint"]
    assert kinds.count("turn") == 3


async def test_what_a_step_returns_is_checked(flows: FlowWorld) -> None:
    await flows.serve()
    run_id = await flows.start("flow-wrong")
    ended = await flows.end(run_id)
    assert ended["error"]["type"] == "RUN_VALUE_INVALID"
    assert "what step sold-out returned.amount" in ended["error"]["message"]


_CHANGED = """
from tests.sdk.flow_programs import Order, charge, plan
from tests.sdk.flow_programs import ship as by_sea
from tga_sdk import Flow, Step

async def by_air(ctx, order):
    return order.model_copy(update={"told": [*order.told, "by air"]})

first, pay, last = Step("plan", plan), Step("charge", charge), Step("ship", by_sea)
renamed = Flow("flow-changed-0", [first, Step("pay", charge), last], data=Order)
removed = Flow("flow-changed-1", [first, last], data=Order)
inserted = Flow("flow-changed-2", [first, Step("pack", by_sea), pay, last], data=Order)
other_body = Flow("flow-changed-3", [first, pay, Step("ship", by_air)], data=Order)
"""


async def test_changed_steps_are_told_by_name_and_nothing_starts_from_the_top(flows: FlowWorld) -> None:
    """A deploy that has renamed, removed or inserted a step refuses runs that were under way, and says what to do; one
    that has changed the body of a step goes on with them."""
    first = await flows.serve()
    runs = [await flows.start(f"flow-changed-{number}", waits_at="charge") for number in range(4)]
    for run_id in runs:
        await flows.until_at(run_id, "charge")
    await first.kill()
    changed = flows.folder / "changed.py"
    changed.write_text(_CHANGED)
    flows.go(runs[3])
    second = await flows.start_worker(str(changed))
    for run_id, told in zip(
        runs, ("charge was renamed to pay", "charge was removed", "pack was inserted"), strict=False
    ):
        ended = await flows.end(run_id)
        assert ended["state"] == "DIVERGED"
        assert told in ended["divergence"]["performed"]
        assert "put the names back and retry the run" in ended["divergence"]["performed"]
        assert ran(flows.folder, run_id) == {"plan": 1, "charge": 1}
    assert (await flows.end(runs[3]))["output"]["value"]["told"] == ["plan", "charge", "by air"]
    await second.kill()
    await flows.serve()
    for run_id in runs[:3]:
        flows.go(run_id)
        async with flows.world.client("admin", flows.gateway.url) as operator:
            await operator.ask("POST", f"/v1/runs/{run_id}/retry", {"rationale": "the names are back"})
        assert (await flows.end(run_id))["output"]["value"]["told"] == ["plan", "charge", "ship"]
        assert list(flows.world.executions(run_id).values()) == [1]


async def test_a_schedule_starts_runs(flows: FlowWorld) -> None:
    await flows.serve()
    async with flows.world.client("admin", flows.gateway.url) as operator:

        async def first_run() -> bool:
            with contextlib.suppress(Refused):
                found = await operator.ask("GET", "/v1/schedules/flow-nightly")
                return found["last_run_id"] is not None
            return False

        await until(first_run)
        found = await operator.ask("GET", "/v1/schedules/flow-nightly")
        assert (found["spec"], found["missed"]) == ({"type": "interval", "every_ms": 1000}, "skip")
        run = await operator.ask("GET", f"/v1/runs/{found['last_run_id']}")
        assert run["trigger"]["type"] == "schedule"
        assert run["input"]["value"]["amount"] == 3
        await operator.ask("DELETE", "/v1/schedules/flow-nightly")


async def test_a_key_that_may_not_make_schedules_is_told_of(flows: FlowWorld) -> None:
    worker = await flows.start_worker(PROGRAMS, role="worker")
    await until(lambda: worker.process.poll() is not None)
    assert worker.process.returncode == 1
    assert "the worker's key needs the role agent or operator too" in worker.logged


def test_changes_are_named() -> None:
    assert changes_between(["a", "b", "c"], ["a", "x", "c"]) == "b was renamed to x"
    assert changes_between(["a", "b"], ["b", "a"]) == "their order has changed"
    assert changes_between(["a", "b"], ["a", "x", "b"]) == "x was inserted"
    assert changes_between(["a", "b", "c"], ["b", "c", "d"]) == "a was removed; d was inserted"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Flow("empty", []), "expected at least one step"),
        (lambda: Flow("twice", [Step("a", print), Step("a", print)]), r"come twice: \['a'\]"),
        (lambda: Flow("named", [Step("a b", print)]), "a step's name is"),
        (lambda: Schedule(), "either cron= or every="),
        (lambda: Schedule(cron="0 3 * * *", every=5), "either cron= or every="),
        (lambda: Schedule(every=0.1), "at least 1 second"),
        (
            lambda: Flow("in", [Step("a", print)], data=int, trigger=Schedule(every=5, input="x")),
            "input of its schedule",
        ),
    ],
)
def test_what_cannot_be_run_is_refused_when_it_is_declared(make: Any, told: str) -> None:
    with pytest.raises(Exception, match=told) as refused:
        make()
    assert refused.type in (ProcedureInvalid,) or refused.type.__name__ == "ValueInvalid"
