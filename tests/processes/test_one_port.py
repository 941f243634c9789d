"""`tga serve --processes N`: one port, several processes, one database; what they do together and how they are started
anew, replaced and ended. Clients here keep their connections and try nothing again."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.world import World, wait_for
from tests.processes.world import Callers, Client, Serving, executions, is_gone, world_of_processes

PROCESSES = 2


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with world_of_processes() as made:
        yield made


@pytest.fixture(scope="module")
def serving(world: World) -> Iterator[Serving[World]]:
    made = Serving(world, PROCESSES)
    try:
        yield made.until_all_serve()
    finally:
        made.close()


def one_at_each(serving: Serving[World]) -> list[Client]:
    """A connection to every process, by their numbers. Those that were closed a moment ago may still be counted."""
    found: dict[int, Client] = {}
    spare: list[Client] = []
    while len(found) < PROCESSES:
        client = Client(serving)
        number = client.process()
        if number in found:
            spare.append(client)  # kept open: the next one goes elsewhere
        else:
            found[number] = client
    for client in spare:
        client.close()
    return [found[number] for number in sorted(found)]


def test_connections_are_spread_evenly_and_each_stays_where_it_is(serving: Serving[World]) -> None:
    clients = [Client(serving) for _ in range(8)]
    at = [client.process() for client in clients]
    assert Counter(at) == {1: 4, 2: 4}
    assert [client.process() for client in clients] == at
    for client in clients:
        client.close()


def test_readiness_and_doctor_say_how_many_take_requests(serving: Serving[World]) -> None:
    client = Client(serving)
    standing = client.ready()["processes"]
    client.close()
    assert (standing["of"], standing["ready"]) == (PROCESSES, PROCESSES)
    told = serving.world.tga("doctor")
    assert "2 of 2 take requests" in told.stdout, told.stdout + told.stderr


def test_metrics_of_all_processes_are_shown_by_any(serving: Serving[World]) -> None:
    clients = one_at_each(serving)
    called: Counter[str] = Counter()
    for client, calls in zip(clients, (2, 3), strict=True):
        number = str(client.process())
        for index in range(calls):
            client.call("charge", f"metrics-{number}-{index}", amount=1)
            called[number] += 1
    for client in clients:
        shown = client.ask("GET", "/metrics")[1].decode()
        assert shown.count("# TYPE tga_calls_total counter") == 1
        series = [line for line in shown.splitlines() if not line.startswith("#")]
        assert all('{process="' in line for line in series)
        counted: Counter[str] = Counter()
        for line in series:
            if line.startswith("tga_calls_total{") and 'tool="charge"' in line:
                counted[line.split('process="')[1].split('"')[0]] += int(line.rpartition(" ")[2])
        assert counted == called
        leading = [line for line in series if line.startswith("tga_log_leading{")]
        assert len(leading) == PROCESSES
        client.close()
    # One sequences; which one may change hands while the metrics are read.
    wait_for(lambda: leaders(serving) == 1)


def leaders(serving: Serving[World]) -> int:
    client = Client(serving)
    shown = client.ask("GET", "/metrics")[1].decode()
    client.close()
    return sum(int(line.rpartition(" ")[2]) for line in shown.splitlines() if line.startswith("tga_log_leading{"))


def test_a_verification_that_one_process_makes_is_shown_and_stopped_by_any(serving: Serving[World]) -> None:
    clients = one_at_each(serving)
    one, other = clients
    status, content = one.ask("POST", "/v1/log/verifications")
    assert status == 202, content
    path = f"/v1/log/verifications/{json.loads(content)['verification_id']}"
    wait_for(lambda: json.loads(other.ask("GET", path)[1])["state"] == "sound")
    assert [client.ask("GET", path)[1] for client in clients] == [one.ask("GET", path)[1]] * PROCESSES
    assert [json.loads(client.ask("GET", "/v1/log/verifications")[1])["items"] for client in clients] == [
        [json.loads(one.ask("GET", path)[1])]
    ] * PROCESSES
    status, content = other.ask("POST", f"{path}/stop")
    assert (status, json.loads(content)["state"]) == (200, "sound")  # it was over; what it found stays
    assert other.ask("GET", "/v1/log/verifications/unknown")[0] == 404
    for client in clients:
        client.close()


def test_started_anew_one_by_one_no_call_is_refused_or_lost_and_connections_stay(serving: Serving[World]) -> None:
    before = serving.processes()
    callers = Callers(serving, 6, prefix="anew")
    idle = [Client(serving) for _ in range(4)]
    for client in idle:
        client.process()
    callers.await_more(20)
    serving.restart()
    callers.await_more(20)
    callers.stop()
    assert callers.failures == []
    assert len(serving.processes()) == PROCESSES
    assert serving.processes().isdisjoint(before)
    assert {client.process() for client in idle} <= {1, 2}  # on the connections that they had
    for client in idle:
        client.close()
    executed = executions(serving.world)
    assert {key: executed.get(key) for key in callers.made} == dict.fromkeys(callers.made, 1)


@pytest.mark.one_in(3)
def test_a_slow_call_is_answered_by_the_process_that_has_it_though_it_was_told_to_leave(
    serving: Serving[World],
) -> None:
    clients = [Client(serving) for _ in range(PROCESSES)]
    before = serving.processes()
    callers = Callers(serving, 2, prefix="slow")
    body = {"server_id": "bank", "tool_name": "slow_charge", "arguments": {"amount": 7, "ms": 3000}}
    for number, client in enumerate(clients):
        raw = json.dumps({**body, "idempotency_key": f"slowly-{number}"})
        client._connection.request("POST", "/v1/tool-calls", raw, {"Authorization": f"Bearer {client._key}"})
    wait_for(lambda: all(serving.world.requests(f"slowly-{number}") for number in range(PROCESSES)))
    serving.restart()
    for client in clients:
        answer = client._connection.getresponse()
        assert (answer.status, json.loads(answer.read())["state"]) == (200, "COMPLETED")
        client.close()
    callers.stop()
    assert callers.failures == []
    assert serving.processes().isdisjoint(before)


@pytest.mark.one_in(3)
def test_a_configuration_that_cannot_be_used_leaves_the_processes_as_they_are(serving: Serving[World]) -> None:
    before, good = serving.processes(), serving.world.config.read_text()
    callers = Callers(serving, 2, prefix="bad")
    serving.world.config.write_text(good + '\n[servers.bad]\ntransport = "pigeon"\n')
    try:
        serving.send(signal.SIGHUP)
        serving.await_line("stays, and no other is started anew")
    finally:
        serving.world.config.write_text(good)
    callers.await_more(4)
    callers.stop()
    assert callers.failures == []
    assert serving.processes() == before
    assert "pigeon" in serving.text()  # the process that could not start has said why
    serving.restart()
    assert serving.processes().isdisjoint(before)


@pytest.mark.one_in(3)
def test_a_process_that_is_told_to_end_gives_its_connections_to_the_others(serving: Serving[World]) -> None:
    callers = Callers(serving, 4, prefix="told")
    callers.await_more(8)
    told = min(serving.processes())
    os.kill(told, signal.SIGTERM)
    wait_for(lambda: is_gone(told))
    wait_for(lambda: len(serving.processes()) == PROCESSES)
    callers.await_more(8)
    callers.stop()
    assert callers.failures == []
    assert f"({told}) ended: exit code 0" in serving.text()


def test_a_process_that_is_killed_is_replaced_and_said_so(serving: Serving[World]) -> None:
    killed = min(serving.processes())
    os.kill(killed, signal.SIGKILL)
    serving.await_line(f"({killed}) ended: killed by SIGKILL; it is started again")
    client = Client(serving)
    assert client.call("charge", "after-a-kill", amount=1)["state"] == "COMPLETED"
    wait_for(lambda: client.ready()["processes"]["ready"] == PROCESSES)
    client.close()
    assert len(serving.processes()) == PROCESSES
    assert killed not in serving.processes()


@pytest.mark.one_in(3)
def test_a_process_that_is_frozen_gets_no_new_connections_and_is_there_again_when_it_wakes(
    serving: Serving[World],
) -> None:
    clients = awake, frozen = one_at_each(serving)
    pid = next(pid for pid in serving.processes() if f"--process\0{frozen.process()}\0" in command_of(pid))
    os.kill(pid, signal.SIGSTOP)
    try:
        serving.await_line(f"({pid}) gives no sign of life")
        wait_for(lambda: awake.ready()["processes"]["ready"] == PROCESSES - 1)
        more = [Client(serving) for _ in range(6)]  # more than the other has
        assert {client.process() for client in more} == {awake.process()}
    finally:
        os.kill(pid, signal.SIGCONT)
    serving.await_line(f"({pid}) is back")
    assert frozen.call("charge", "after-a-freeze", amount=1)["state"] == "COMPLETED"
    for client in (*clients, *more):
        client.close()


@pytest.mark.one_in(3)
def test_a_hang_up_that_reaches_every_process_is_the_supervisor_s(serving: Serving[World]) -> None:
    before = serving.processes()
    rounds = serving.text().count("Every process was started anew")
    for pid in (*before, serving.process.pid):
        os.kill(pid, signal.SIGHUP)
    serving.await_line("Every process was started anew", count=rounds + 1)
    assert serving.processes().isdisjoint(before)
    assert not any(f"({pid}) ended: " in serving.text() for pid in before)


def command_of(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text()


def test_told_to_stop_all_of_them_answer_what_they_have_and_end(serving: Serving[World]) -> None:
    """The last one here: it ends the processes of this module."""
    processes = serving.processes()
    clients = [Client(serving) for _ in range(PROCESSES)]
    body = {"server_id": "bank", "tool_name": "slow_charge", "arguments": {"amount": 7, "ms": 1000}}
    for number, client in enumerate(clients):
        raw = json.dumps({**body, "idempotency_key": f"ending-{number}"})
        client._connection.request("POST", "/v1/tool-calls", raw, {"Authorization": f"Bearer {client._key}"})
    wait_for(lambda: all(serving.world.requests(f"ending-{number}") for number in range(PROCESSES)))
    serving.send(signal.SIGTERM)
    for number, client in enumerate(clients):
        answer = client._connection.getresponse()
        assert answer.status == 200, answer.read()
        client.close()
        assert serving.world.executions(f"ending-{number}") == 1
    assert serving.wait() == 0
    assert all(is_gone(pid) for pid in processes)
    verified = serving.world.tga("verify", "--all")
    assert verified.returncode == 0, verified.stdout + verified.stderr
