"""Kill the gateway at every boundary, start another, recover: nothing is lost, nothing is done twice.

Not sampled: the lists below are all boundaries that the paths have, and a test compares them with what a gateway
passes that nobody kills.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field

import pytest

from tests.crash.world import Answer, Database, Gateway, GatewayDied, World, new_key

COMMIT = ["commit.before", "commit.rolled_back", "commit.done"]
DISPATCH = ["dispatch.before", "dispatch.sent", "dispatch.answered"]
TAKE = ["acquire.done"]
ANSWER = ["answer.before"]


@dataclass
class Caller:
    """Someone who wants one call done, and repeats it with its key until it is."""

    tool: str
    arguments: dict[str, int]
    key: str = field(default_factory=new_key)

    def pursue(self, gateway: Gateway) -> Answer:
        answer = gateway.call(self.tool, self.key, **self.arguments)
        if answer["waiting"] == "supervisor":
            answer = gateway.ask("decide", trace_id=answer["trace_id"], decision="APPROVE")
        return answer


PATHS = {
    "a fresh call": (("charge", {"amount": 7}), [*COMMIT, *DISPATCH, *COMMIT, *ANSWER]),
    "a call that a person approves": (
        ("refund", {"amount": 7}),
        [*COMMIT, *ANSWER, *TAKE, *COMMIT, *DISPATCH, *COMMIT, *ANSWER],
    ),
    "a call that is tried twice": (
        ("flaky", {"amount": 7, "fail_times": 1, "status": 503}),
        [*COMMIT, *DISPATCH, *COMMIT, *DISPATCH, *COMMIT, *ANSWER],
    ),
}
RECOVERY = [*TAKE, *COMMIT, *DISPATCH, *COMMIT, *ANSWER]
SENT = COMMIT.index("commit.done") + 1 + DISPATCH.index("dispatch.sent")

CUTS = [
    pytest.param(path, place, id=f"{path}-{place}-{name}")
    for path, (_, boundaries) in PATHS.items()
    for place, name in enumerate(boundaries)
]
RECOVERY_CUTS = [pytest.param(place, id=f"{place}-{name}") for place, name in enumerate(RECOVERY)]


def killed(world: World, base: Database, caller: Caller, *, die_at: int) -> None:
    gateway = world.gateway(base, die_at=die_at)
    with pytest.raises(GatewayDied):
        caller.pursue(gateway)
    gateway.wait_end()


def verify_recovery(world: World, base: Database, caller: Caller) -> None:
    """A gateway that lives finishes what was begun; the caller comes back and is told of the one effect."""
    stood = base.effects()
    gateway = world.gateway(base)
    assert gateway.ask("recover_all")["failed"] == []
    assert gateway.ask("recover_all")["recovered"] == [], "one sweep leaves nothing for another"
    answer = caller.pursue(gateway)
    assert answer["state"] == "COMPLETED"
    repeated = caller.pursue(gateway)
    assert repeated["replayed"]
    assert repeated["effect"] == answer["effect"]
    gateway.exit()
    effects = base.effects()
    assert stood.items() <= effects.items(), "a recorded effect stands, byte for byte"
    assert len(effects) == 1
    world.verify_all_is_well(base, {answer["trace_id"]: answer["effect"].encode()})
    assert len(world.bank.executions(caller.key)) == 1


@pytest.mark.parametrize("path", PATHS)
def test_the_lists_are_all_the_boundaries_that_there_are(world: World, base: Database, path: str) -> None:
    (tool, arguments), boundaries = PATHS[path]
    gateway = world.gateway(base)
    assert Caller(tool, arguments).pursue(gateway)["state"] == "COMPLETED"
    assert gateway.ask("boundaries_passed")["passed"] == boundaries


def test_the_list_is_all_the_boundaries_of_a_recovery(world: World, base: Database) -> None:
    killed(world, base, Caller("slow_charge", {"amount": 7, "ms": 50}), die_at=SENT)
    gateway = world.gateway(base)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    # The first request may still be executing: then it is asked again, as a call that is tried twice.
    passed = gateway.ask("boundaries_passed")["passed"]
    assert passed[: len(RECOVERY) - 4] == RECOVERY[:-4]
    assert passed[-4:] == RECOVERY[-4:]


@pytest.mark.parametrize(("path", "place"), CUTS)
def test_a_crash_at_any_boundary_loses_nothing_and_repeats_nothing(
    world: World, base: Database, path: str, place: int
) -> None:
    (tool, arguments), _ = PATHS[path]
    caller = Caller(tool, arguments)
    killed(world, base, caller, die_at=place)
    verify_recovery(world, base, caller)


@pytest.mark.parametrize("place", RECOVERY_CUTS)
def test_a_crash_at_any_boundary_of_a_recovery_is_recovered_from(world: World, base: Database, place: int) -> None:
    caller = Caller("charge", {"amount": 7})
    killed(world, base, caller, die_at=SENT)
    gateway = world.gateway(base, die_at=place)
    with pytest.raises(GatewayDied):
        gateway.ask("recover_all")
    verify_recovery(world, base, caller)


@pytest.mark.parametrize("place", RECOVERY_CUTS)
def test_a_crash_in_the_recovery_of_a_recovery_is_recovered_from(world: World, base: Database, place: int) -> None:
    caller = Caller("charge", {"amount": 7})
    killed(world, base, caller, die_at=SENT)
    for _ in range(2):
        gateway = world.gateway(base, die_at=place)
        # Where the first recovery had recorded the effect the second finds nothing to do.
        with contextlib.suppress(GatewayDied):
            assert gateway.ask("recover_all")["recovered"] == []
        gateway.kill()
    verify_recovery(world, base, caller)


def test_attempts_are_counted_across_crashes_and_end(world: World, base: Database) -> None:
    """A call that kills its gateway whenever it is sent is not sent for ever."""
    config = world.write_config(max_attempts=3)
    caller = Caller("slow_charge", {"amount": 7, "ms": 600_000})
    gateway = world.gateway(base, die_at=SENT, config=config)
    with pytest.raises(GatewayDied):
        caller.pursue(gateway)
    for _ in range(2):
        gateway = world.gateway(base, die_at=RECOVERY.index("dispatch.sent"), config=config)
        with pytest.raises(GatewayDied):
            gateway.ask("recover_all")
    gateway = world.gateway(base, config=config)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    effect = json.loads(gateway.call(caller.tool, caller.key, **caller.arguments)["effect"])
    assert (effect["outcome"], effect["basis"]) == ("FAILURE", "unknown")
    assert [attempt["result"] for attempt in effect["attempts"]] == ["interrupted"] * 3
    assert len(world.bank.requests(caller.key)) == 3
    gateway.exit()
    assert base.verify() == []
    assert base.unrested() == []
