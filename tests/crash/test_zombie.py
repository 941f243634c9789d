"""Two gateways, one trace. A living owner is left alone; one that was taken for dead is fenced when it wakes up."""

from __future__ import annotations

import json
import signal

import pytest

from tests.crash.world import Answer, Database, Gateway, World, await_truth, new_key


def test_a_sweep_leaves_a_living_gateways_call_alone(world: World, base: Database) -> None:
    first, second, key = world.gateway(base), world.gateway(base), new_key()
    number = first.send("call", tool="slow_charge", key=key, arguments={"amount": 3, "ms": 500})
    world.bank.await_request(key)
    (row,) = base.fetch("SELECT stream FROM tga.heads WHERE stream LIKE 'trace:%'")
    for _ in range(5):
        swept = second.ask("recover_all")
        assert (swept["recovered"], swept["failed"]) == ([], [])
        refused = second.ask("recover", trace_id=row["stream"].removeprefix("trace:"))
        assert refused["error"] == "STATE_CONCURRENT_EXECUTION"
    answer = first.receive(number)
    assert answer["state"] == "COMPLETED"
    assert len(world.bank.requests(key)) == 1
    end(world, base, answer, first, second)


@pytest.mark.parametrize("successor", ["is still driving", "has finished"])
def test_a_gateway_that_was_taken_for_dead_is_fenced_when_it_wakes_up(
    world: World, base: Database, successor: str
) -> None:
    config, key = world.write_config(max_attempts=50), new_key()
    stop_at = "dispatch.before" if successor == "is still driving" else None
    first, second = world.gateway(base, config=config), world.gateway(base, config=config, stop_at=stop_at)
    executor_id = first.ask("executor")["executor_id"]
    number = first.send("call", tool="slow_charge", key=key, arguments={"amount": 3, "ms": 1000})
    world.bank.await_request(key)
    first.signal(signal.SIGSTOP)
    base.end_owner_session(executor_id)
    sweep = second.send("recover_all")
    # Its own attempt is on record: it has taken over.
    await_truth(lambda: bool(base.fetch("SELECT FROM tga.dispatch_attempts")))
    if successor == "is still driving":
        second.await_stopped()
        await_truth(lambda: len(world.bank.executions(key)) == 1)
        first.signal(signal.SIGCONT)
        await_truth(lambda: first.ask("boundaries_passed")["refusals"] != [])
        assert first.ask("boundaries_passed")["refusals"] == ["STATE_CONCURRENT_EXECUTION"]
        assert base.effects() == {}, "the late effect was refused"
        second.signal(signal.SIGCONT)
        assert len(second.receive(sweep)["recovered"]) == 1
    else:
        assert len(second.receive(sweep)["recovered"]) == 1
        first.signal(signal.SIGCONT)
    answer = first.receive(number)
    assert answer["state"] == "COMPLETED", answer
    assert first.ask("boundaries_passed")["refusals"], "the late effect was refused"
    effects = base.effects()
    assert list(effects.values()) == [answer["effect"].encode()], "the caller is answered from the record"
    assert json.loads(answer["effect"])["attempts"][0]["result"] == "interrupted", "the successor's effect stands"
    assert len(world.bank.executions(key)) == 1
    end(world, base, answer, first, second)


def test_a_gateway_that_was_taken_for_dead_between_two_attempts_does_not_send_again(
    world: World, base: Database
) -> None:
    """While it waited, its successor brought the call to its end; the retry it was about to make is not made."""
    key = new_key()
    first, second = world.gateway(base), world.gateway(base)
    executor_id = first.ask("executor")["executor_id"]
    number = first.send("call", tool="flaky", key=key, arguments={"amount": 3, "fail_times": 1, "status": 503})
    world.bank.await_request(key)
    await_truth(lambda: "dispatch.answered" in first.ask("boundaries_passed")["passed"])
    first.signal(signal.SIGSTOP)
    base.end_owner_session(executor_id)
    requests = len(world.bank.requests(key))
    second.ask("recover_all")
    assert len(world.bank.executions(key)) == 1
    first.signal(signal.SIGCONT)
    answer = first.receive(number)
    assert answer["state"] == "COMPLETED"
    # At most the one that was leaving when it was stopped.
    assert len(world.bank.requests(key)) <= requests + 1
    end(world, base, answer, first, second)


def end(world: World, base: Database, answer: Answer, *gateways: Gateway) -> None:
    for gateway in gateways:
        gateway.exit()
    world.verify_all_is_well(base, {answer["trace_id"]: answer["effect"].encode()})
