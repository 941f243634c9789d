"""A tenant that knows another's trace id: it may not learn what became of the trace, nor get in the way of it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from threading import Event

import pytest

from tests.attack.client import Client, new_id
from tests.cli.world import World


@pytest.fixture(scope="module")
def intruder(world: World) -> str:
    return world.new_key("intruder", "agent", tenant="other")


@pytest.fixture
def agent(world: World) -> Iterator[Client]:
    with closing(Client(world.url, world.new_key("agent-1", "agent"))) as client:
        yield client


def test_a_call_under_anothers_trace_id_does_not_keep_its_supervisor_from_deciding(
    world: World, agent: Client, intruder: str
) -> None:
    waiting = agent.call("bank", "refund", {"amount": 5}).body["trace_id"]
    is_over = Event()

    def get_in_the_way() -> None:
        with closing(Client(world.url, intruder)) as client:
            while not is_over.is_set():
                client.call("theirs", "charge", {"amount": 1}, trace_id=waiting)

    with closing(Client(world.url, world.new_key("boss", "supervisor"))) as boss, ThreadPoolExecutor(4) as others:
        under_way = [others.submit(get_in_the_way) for _ in range(4)]
        try:
            # Never the right digest, so that each one should be refused for that, and for nothing else.
            codes = {boss.decide(waiting, "DENY", "0" * 64).code for _ in range(40)}
        finally:
            is_over.set()
        for one in under_way:
            one.result()
    assert codes == {"REQUEST_MISMATCH"}


def test_a_call_under_anothers_trace_id_does_not_tell_whether_it_was_erased(
    world: World, agent: Client, intruder: str
) -> None:
    kept = agent.call("bank", "charge", {"amount": 5}).body["trace_id"]
    erased = agent.call("bank", "charge", {"amount": 5}).body["trace_id"]
    assert world.tga("erase", erased, "-r", "asked for", "--yes").returncode == 0
    with closing(Client(world.url, intruder)) as client:
        told = [client.call("theirs", "charge", {"amount": 1}, trace_id=one) for one in (kept, erased)]
    assert told[0].body == told[1].body


def test_anothers_trace_and_one_that_does_not_exist_read_the_same(world: World, agent: Client, intruder: str) -> None:
    theirs = agent.call("bank", "refund", {"amount": 5}).body["trace_id"]
    with closing(Client(world.url, intruder)) as client:
        for path in ("", "/entries", "/receipt", "/events"):
            told = [client.ask("GET", f"/v1/traces/{one}{path}") for one in (theirs, new_id())]
            assert told[0] == told[1]
            assert told[0].status == 404
