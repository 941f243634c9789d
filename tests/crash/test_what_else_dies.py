"""The gateway lives and what it stands on dies: PostgreSQL's sessions, PostgreSQL, the tool server."""

from __future__ import annotations

import json
import os
import signal
import time

import pytest

from tests.crash.world import Answer, Bank, Database, Gateway, GatewayDied, World, await_truth, new_key, worlds

CALLS = 60


def executed_once(world: World, base: Database, gateway: Gateway, answer: Answer, key: str) -> None:
    assert answer.get("state") == "COMPLETED", answer
    gateway.exit()
    world.verify_all_is_well(base, {answer["trace_id"]: answer["effect"].encode()})
    assert len(world.bank.executions(key)) == 1


# PostgreSQL


@pytest.mark.parametrize("which", ["the owner's", "all"])
def test_a_call_survives_the_loss_of_postgres_sessions(world: World, base: Database, which: str) -> None:
    gateway, key = world.gateway(base), new_key()
    first_id = gateway.ask("executor")["executor_id"]
    number = gateway.send("call", tool="slow_charge", key=key, arguments={"amount": 5, "ms": 300})
    world.bank.await_request(key)
    if which == "all":
        assert base.end_all_sessions() >= 2
    else:
        base.end_owner_session(first_id)
    answer = gateway.receive(number)
    assert gateway.ask("executor").get("executor_id") != first_id, "a lost session is a dead id"
    assert len(world.bank.requests(key)) == 1, "the answer that was read is recorded, not asked for again"
    executed_once(world, base, gateway, answer, key)


def test_a_retry_after_the_loss_of_the_owner_session_is_made_under_the_new_id(world: World, base: Database) -> None:
    """Under the dead id everyone might take the trace while its retry is on its way."""
    gateway, key = world.gateway(base), new_key()
    first_id = gateway.ask("executor")["executor_id"]
    number = gateway.send("call", tool="flaky", key=key, arguments={"amount": 5, "fail_times": 2, "status": 503})
    world.bank.await_request(key)
    base.end_owner_session(first_id)
    answer = gateway.receive(number)
    assert len(json.loads(answer["effect"])["attempts"]) == 3
    executed_once(world, base, gateway, answer, key)


def test_calls_in_flight_survive_a_kill_of_the_whole_postgres_server() -> None:
    """The gateways go on by themselves: they find the server again, take new ids, and settle what they do not know."""
    for world in worlds():
        base = world.make_database()
        gateways = [world.gateway(base) for _ in range(2)]
        first_ids = {gateway.ask("executor")["executor_id"] for gateway in gateways}
        calls: dict[int, tuple[Gateway, str, str, dict[str, int]]] = {}
        for place in range(CALLS):
            tool, arguments = [
                ("charge", {"amount": place}),
                ("slow_charge", {"amount": place, "ms": 50 + 10 * place}),
                ("flaky", {"amount": place, "fail_times": 1, "status": 503}),
            ][place % 3]
            calls[place] = (gateways[place % 2], new_key(), tool, arguments)
        sent = {place: send(calls[place]) for place in range(CALLS * 2 // 3)}
        world.bank.await_request(calls[CALLS // 2][1])
        kill_postgres(world)
        sent |= {place: send(calls[place]) for place in calls if place not in sent}
        time.sleep(0.3)
        world.postgres.start()
        answers: dict[int, Answer] = {}
        while sent:
            refused = []
            for place, number in sent.items():
                answer = calls[place][0].receive(number)
                if "error" not in answer:
                    answers[place] = answer
                    continue
                # Refused before anything was stored, or not known within the time a caller waits: the caller repeats.
                assert answer["error"] in ("STORE_UNAVAILABLE", "STORE_OUTCOME_UNKNOWN"), answer
                refused.append(place)
            time.sleep(0.05)
            sent = {place: send(calls[place]) for place in refused}
        assert {answer["state"] for answer in answers.values()} == {"COMPLETED"}
        assert [len(world.bank.executions(key)) for _, key, _, _ in calls.values()] == [1] * CALLS
        for gateway in gateways:
            assert gateway.ask("executor")["executor_id"] not in first_ids
            swept = gateway.ask("recover_all")
            assert (swept["recovered"], swept["failed"]) == ([], [])
            gateway.exit()
        world.verify_all_is_well(base, {a["trace_id"]: a["effect"].encode() for a in answers.values()})
        assert len(base.effects()) == CALLS


def send(call: tuple[Gateway, str, str, dict[str, int]]) -> int:
    gateway, key, tool, arguments = call
    return gateway.send("call", tool=tool, key=key, arguments=arguments)


def kill_postgres(world: World) -> None:
    pid = world.postgres.postmaster_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    await_truth(lambda: world.postgres.postmaster_pid() is None)


# The tool server


def test_a_call_survives_a_kill_of_its_tool_server(world: World, base: Database) -> None:
    """It is sent again, with the same ids, until the server is back; the server executes it once."""
    gateway, key = world.gateway(base), new_key()
    number = gateway.send("call", tool="slow_charge", key=key, arguments={"amount": 5, "ms": 300})
    world.bank.await_request(key)
    world.bank.kill()
    time.sleep(0.1)
    world.bank.start()
    answer = gateway.receive(number)
    results = [attempt["result"] for attempt in json.loads(answer["effect"])["attempts"]]
    assert results[0] == "disconnected"
    assert set(results[1:-1]) <= {"refused"}
    assert results[-1] == "answered"
    executed_once(world, base, gateway, answer, key)


# A tool server that ignores keys


def held(world: World, base: Database, careless: Bank) -> tuple[Gateway, Answer, str]:
    """A call whose gateway was killed while the careless bank worked on it; a second gateway has looked at it."""
    key, config = new_key(), world.write_config()
    gateway = world.gateway(base, config=config, bank=careless)
    gateway.send("call", server="holding", tool="slow_charge", key=key, arguments={"amount": 5, "ms": 100})
    careless.await_request(key)
    gateway.kill()
    gateway = world.gateway(base, config=config, bank=careless)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    answer = gateway.ask("call", server="holding", tool="slow_charge", key=key, arguments={"amount": 5, "ms": 100})
    assert (answer["state"], answer["waiting"]) == ("EXECUTING", "operator")
    await_truth(lambda: len(careless.executions(key)) == 1)
    assert gateway.ask("recover_all")["recovered"] == [], "no sweep touches what waits for an operator"
    assert len(careless.requests(key)) == 1
    return gateway, answer, key


@pytest.mark.parametrize(("action", "sends"), [("succeeded", 1), ("failed", 1), ("redispatch", 2)])
def test_hold_sends_once_and_waits_for_an_operator(
    world: World, base: Database, careless: Bank, action: str, sends: int
) -> None:
    gateway, waiting, key = held(world, base, careless)
    answer = gateway.ask("resolve", trace_id=waiting["trace_id"], action=action)
    assert answer["state"] == ("FAILED" if action == "failed" else "COMPLETED")
    effect = json.loads(answer["effect"])
    assert effect["basis"] == ("answer" if action == "redispatch" else "resolution")
    assert effect["resolution"]["action"] == action
    # `redispatch` is the operator's order, and this bank then executes a second time: that is what `hold` guards.
    assert len(careless.requests(key)) == len(careless.executions(key)) == sends
    again = gateway.ask("resolve", trace_id=waiting["trace_id"], action="redispatch")
    assert again["error"] == "TRACE_NOT_HELD"
    assert len(careless.requests(key)) == sends
    gateway.exit()
    assert base.verify() == []
    assert base.unrested() == []


def test_a_crash_after_an_operators_redispatch_waits_for_an_operator_again(
    world: World, base: Database, careless: Bank
) -> None:
    gateway, waiting, key = held(world, base, careless)
    gateway.exit()
    # acquire, three of the commit, dispatch.before: killed while the second send is under way
    gateway = world.gateway(base, bank=careless, die_at=5)
    with pytest.raises(GatewayDied):
        gateway.ask("resolve", trace_id=waiting["trace_id"], action="redispatch")
    gateway = world.gateway(base, bank=careless)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    assert len(careless.requests(key)) == 2
    answer = gateway.ask("resolve", trace_id=waiting["trace_id"], action="succeeded", output={"charge_id": "ch_1"})
    assert answer["state"] == "COMPLETED"
    assert len(careless.requests(key)) == 2
    gateway.exit()
    assert base.verify() == []


@pytest.mark.parametrize("was_executed", [True, False])
def test_reconcile_asks_the_server_and_repeats_only_what_was_not_executed(
    world: World, base: Database, careless: Bank, was_executed: bool
) -> None:
    key, arguments = new_key(), {"amount": 5, "ms": 100}
    # killed while the server works, or before it was asked at all
    gateway = world.gateway(base, bank=careless, die_at=4 if was_executed else 3)
    with pytest.raises(GatewayDied):
        gateway.ask("call", server="asking", tool="slow_charge", key=key, arguments=arguments)
    await_truth(lambda: len(careless.executions(key)) == was_executed)
    gateway = world.gateway(base, bank=careless)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    answer = gateway.ask("call", server="asking", tool="slow_charge", key=key, arguments=arguments)
    assert answer["state"] == "COMPLETED"
    assert json.loads(answer["effect"])["basis"] == ("reconciliation" if was_executed else "answer")
    assert len(careless.executions(key)) == 1
    gateway.exit()
    assert base.verify() == []


def test_redispatch_to_a_server_that_ignores_keys_executes_at_least_once(
    world: World, base: Database, careless: Bank
) -> None:
    """The limit of the promise: once at most needs a server that honours keys, or `hold`, or `reconcile`."""
    key, arguments = new_key(), {"amount": 5, "ms": 50}
    gateway = world.gateway(base, bank=careless, die_at=4)
    with pytest.raises(GatewayDied):
        gateway.ask("call", server="repeating", tool="slow_charge", key=key, arguments=arguments)
    gateway = world.gateway(base, bank=careless)
    assert len(gateway.ask("recover_all")["recovered"]) == 1
    answer = gateway.ask("call", server="repeating", tool="slow_charge", key=key, arguments=arguments)
    assert answer["state"] == "COMPLETED"
    assert len(careless.executions(key)) == len(careless.requests(key)) == 2
    assert {line["tool_call_id"] for line in careless.requests(key)} == {answer["tool_call_id"]}
