"""A gateway as a process: times and events start runs on its engine, once each, also over its death."""

from __future__ import annotations

from collections.abc import Iterator
from signal import SIGKILL
from typing import Any

import pytest
import requests

from tests.cli.world import World, wait_for
from tests.patience import HANG_S

POLICY = """
@id("starts") permit(principal, action == Action::"start", resource);
@id("no-thirteen") forbid(principal, action == Action::"start", resource == Procedure::"welcome")
when { context.trigger.type == "event" && context.input has number && context.input.number == 13 };
"""


class Gateway:
    def __init__(self, world: World) -> None:
        self.world = world
        self.session = requests.Session()

    def ask(self, method: str, path: str, body: Any = None) -> Any:
        headers = {"Authorization": f"Bearer {self.world.admin_key()}"}
        answer = self.session.request(method, self.world.url + path, json=body, headers=headers, timeout=HANG_S)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    world = World(tmp_path_factory.mktemp("schedules"))
    try:
        world.policy.write_text(POLICY)
        world.start()
        made = Gateway(world)
        for name in ("onboard", "welcome"):
            said = {"name": name, "program_digest": "a" * 64, "triggers": [{"event": "customer.signed"}]}
            made.ask("POST", "/v1/procedures", said)
        yield made
    finally:
        world.close()


def test_an_event_starts_what_listens_once_and_what_is_denied_is_told(gateway: Gateway) -> None:
    sent = gateway.ask("POST", "/v1/triggers/customer.signed", {"event_id": "evt-1", "payload": {"number": 7}})
    assert [(run["run_id"], run["is_new"]) for run in sent["runs"]] == [
        ("onboard:evt-1", True),
        ("welcome:evt-1", True),
    ]
    again = gateway.ask("POST", "/v1/triggers/customer.signed", {"event_id": "evt-1", "payload": {"number": 7}})
    assert [run["is_new"] for run in again["runs"]] == [False, False]
    run = gateway.ask("GET", "/v1/runs/onboard:evt-1")
    assert (run["procedure"], run["state"]) == ("onboard", "SCHEDULED")
    denied = gateway.ask("POST", "/v1/triggers/customer.signed", {"event_id": "evt-2", "payload": {"number": 13}})
    assert [(run["is_new"], (run["problem"] or {}).get("code")) for run in denied["runs"]] == [
        (True, None),
        (False, "RUN_START_DENIED"),
    ]
    assert gateway.ask("POST", "/v1/triggers/nothing.listens", {"event_id": "evt-1"})["runs"] == []


def test_a_schedule_starts_runs_and_goes_on_after_its_gateway_was_killed(gateway: Gateway) -> None:
    body = {"procedure": "onboard", "input": {"by": "time"}, "spec": {"type": "interval", "every_ms": 1_000}}
    gateway.ask("PUT", "/v1/schedules/ticks", body)

    def last() -> str | None:
        found: str | None = gateway.ask("GET", "/v1/schedules/ticks")["last_run_id"]
        return found

    wait_for(lambda: last() is not None)
    first = last()
    gateway.world.stop(SIGKILL)
    gateway.world.start()
    wait_for(lambda: last() not in (None, first))
    run_id = last()
    assert run_id is not None
    assert run_id.startswith("ticks:")
    run = gateway.ask("GET", f"/v1/runs/{run_id}")
    assert (run["procedure"], run["input"]["value"]) == ("onboard", {"by": "time"})
    gateway.ask("DELETE", "/v1/schedules/ticks")
    assert gateway.world.tga("verify", "--all").returncode == 0
