"""The demonstration server, as a process of its own: its book and its keys survive kill -9."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.connectors.http import HttpConnector
from app.domain.tga.ports import Answered, Dispatched, NotSent, Unknown
from tests.connectors.servers import tool_call, until


class Bank:
    """The server's process, and its book as it is on disk."""

    def __init__(self, book: Path, *options: str) -> None:
        self.book = book
        command = [sys.executable, "-m", "app.demo.tool_server", "--port", "0", "--book", str(book), *options]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url.startswith("http://127.0.0.1:")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()

    def lines(self, event: str) -> list[dict[str, Any]]:
        whole = self.book.read_text().rpartition("\n")[0]
        found = [json.loads(line) for line in whole.splitlines()]
        return [line for line in found if line["event"] == event]

    async def call(self, tool: str, key: str | None = "key-1", timeout_ms: int = 5000, **arguments: Any) -> Dispatched:
        connector = HttpConnector(self.url)
        tool_class = "read" if key is None else "write"
        call = tool_call(tool_name=tool, idempotency_key=key, arguments=arguments, tool_class=tool_class)
        try:
            return await connector.dispatch(call, timeout_ms=timeout_ms)
        finally:
            await connector.close()


StartBank = Callable[..., Bank]


@pytest.fixture
def start_bank(tmp_path: Path) -> Iterator[StartBank]:
    started: list[Bank] = []

    def start(*options: str) -> Bank:
        started.append(Bank(tmp_path / "bank.jsonl", *options))
        return started[-1]

    yield start
    for bank in started:
        bank.kill()


def value_of(result: Dispatched) -> Any:
    assert isinstance(result, Answered), result
    assert result.output is not None
    return result.output.to_json()["value"]


async def test_a_repeated_key_is_answered_with_the_first_answer_and_not_executed(start_bank: StartBank) -> None:
    bank = start_bank()
    first = await bank.call("charge", amount=5)
    assert value_of(first) == {"charge_id": "ch_1", "amount": 5}
    assert await bank.call("charge", amount=5) == first
    assert value_of(await bank.call("charge", "key-2", amount=7)) == {"charge_id": "ch_2", "amount": 7}
    assert value_of(await bank.call("refund", "key-1", amount=2)) == {"refund_id": "rf_3", "amount": 2}
    assert value_of(await bank.call("balance", None)) == {"balance": 10}
    assert [line["idempotency_key"] for line in bank.lines("execution")] == ["key-1", "key-2", "key-1"]
    execution = bank.lines("execution")[0]
    assert execution["arguments"] == {"amount": 5}
    assert execution["tool_call_id"] == tool_call().tool_call_id
    assert len(bank.lines("request")) == 5


async def test_a_key_with_other_arguments_is_refused_and_not_executed(start_bank: StartBank) -> None:
    bank = start_bank()
    await bank.call("charge", amount=5)
    result = await bank.call("charge", amount=6)
    assert isinstance(result, Answered)
    assert (result.outcome, result.error_code) == ("FAILURE", "HTTP_422")
    assert len(bank.lines("execution")) == 1


async def test_a_key_is_remembered_across_kill_9(start_bank: StartBank) -> None:
    bank = start_bank()
    first = await bank.call("charge", amount=5)
    bank.kill()
    assert isinstance(await bank.call("charge", amount=5), NotSent)
    again = start_bank()
    assert await again.call("charge", amount=5) == first
    assert value_of(await again.call("charge_status", None, idempotency_key="key-1"))["executed"] is True
    assert len(again.lines("execution")) == 1


async def test_killed_in_the_middle_of_an_execution_it_executes_once_after_all(start_bank: StartBank) -> None:
    bank = start_bank()
    pending = asyncio.ensure_future(bank.call("slow_charge", amount=5, ms=60_000))
    await until(lambda: bank.lines("request"))
    bank.kill()
    result = await pending
    assert isinstance(result, Unknown)
    assert result.result == "disconnected"
    assert bank.lines("execution") == []
    again = start_bank()
    assert value_of(await again.call("charge_status", None, idempotency_key="key-1")) == {"executed": False}
    answers = [await again.call("slow_charge", amount=5, ms=0) for _ in range(2)]
    assert answers[0] == answers[1]
    assert len(again.lines("execution")) == 1


async def test_killed_at_any_moment_under_load_no_key_is_executed_twice(start_bank: StartBank) -> None:
    answered: dict[str, Any] = {}

    async def send(bank: Bank, key: str) -> None:
        result = await bank.call("charge", key, amount=1)
        if isinstance(result, Answered):
            assert answered.setdefault(key, value_of(result)) == value_of(result)

    keys = [f"key-{n}" for n in range(60)]
    for after_executions in (5, 25):
        bank = start_bank()
        sending = [asyncio.ensure_future(send(bank, key)) for key in keys]
        while sum(task.done() for task in sending) < after_executions:
            await asyncio.sleep(0)
        bank.kill()
        await asyncio.gather(*sending)
    bank = start_bank()
    await asyncio.gather(*(send(bank, key) for key in keys))
    executed = [line["idempotency_key"] for line in bank.lines("execution")]
    assert sorted(executed) == sorted(keys)
    assert len(answered) == len(keys)
    assert value_of(await bank.call("balance", None)) == {"balance": len(keys)}


@pytest.mark.parametrize("torn", ['{"event": "execution", "tool": "charge", "idempotency_key": "key-2", "arg', "{"])
async def test_a_line_torn_by_a_power_failure_did_not_happen(start_bank: StartBank, torn: str) -> None:
    bank = start_bank()
    first = await bank.call("charge", amount=5)
    bank.kill()
    with bank.book.open("a") as book:
        book.write(torn)
    again = start_bank()
    assert await again.call("charge", amount=5) == first
    assert value_of(await again.call("charge", "key-2", amount=1))["charge_id"] == "ch_2"
    assert len(again.lines("execution")) == 2


async def test_a_key_being_executed_is_answered_409(start_bank: StartBank) -> None:
    bank = start_bank()
    slow = asyncio.ensure_future(bank.call("slow_charge", amount=5, ms=1500))
    await until(lambda: bank.lines("request"))
    for result in (
        await bank.call("slow_charge", amount=5, ms=1500),
        await bank.call("charge_status", None, idempotency_key="key-1"),
    ):
        assert isinstance(result, Unknown)
        assert result.result == "retryable_answer"
        assert "409" in result.detail
    assert value_of(await slow) == {"charge_id": "ch_1", "amount": 5}
    assert len(bank.lines("execution")) == 1


async def test_a_caller_that_hangs_up_does_not_stop_an_execution(start_bank: StartBank) -> None:
    bank = start_bank()
    result = await bank.call("slow_charge", timeout_ms=100, amount=5, ms=1000)
    assert isinstance(result, Unknown)
    assert result.result == "timed_out"
    await until(lambda: bank.lines("execution"))
    status = value_of(await bank.call("charge_status", None, idempotency_key="key-1"))
    assert status == {"executed": True, "output": {"charge_id": "ch_1", "amount": 5}}
    assert value_of(await bank.call("slow_charge", amount=5, ms=1000)) == status["output"]
    assert len(bank.lines("execution")) == 1


async def test_flaky_fails_as_often_as_it_is_told_even_across_kill_9(start_bank: StartBank) -> None:
    bank = start_bank()
    for _ in range(2):
        assert isinstance(await bank.call("flaky", amount=5, fail_times=3, status=503), Unknown)
    bank.kill()
    bank = start_bank()
    assert isinstance(await bank.call("flaky", amount=5, fail_times=3, status=503), Unknown)
    assert bank.lines("execution") == []
    assert value_of(await bank.call("flaky", amount=5, fail_times=3, status=503))["amount"] == 5
    assert len(bank.lines("execution")) == 1


async def test_a_definite_refusal_executes_nothing(start_bank: StartBank) -> None:
    bank = start_bank()
    refusals: list[tuple[str, str | None, dict[str, Any], str]] = [
        ("fail", None, {}, "HTTP_422"),
        ("fail", None, {"status": 404}, "HTTP_404"),
        ("none", "key-1", {}, "HTTP_404"),
        ("charge", None, {"amount": 5}, "HTTP_400"),
        ("charge", "key-1", {"amount": "5"}, "HTTP_422"),
        ("charge", "key-1", {}, "HTTP_422"),
    ]
    for tool, key, arguments, code in refusals:
        result = await bank.call(tool, key, **arguments)
        assert isinstance(result, Answered)
        assert (result.outcome, result.error_code) == ("FAILURE", code)
        assert "error" in value_of(result)
    assert bank.lines("execution") == []
    assert value_of(await bank.call("charge", amount=5))["amount"] == 5  # a refusal does not use up the key


async def test_a_server_that_ignores_keys_executes_every_request(start_bank: StartBank) -> None:
    bank = start_bank("--ignore-keys", "--latency-ms", "5")
    for _ in range(3):
        await bank.call("charge", amount=5)
    assert len(bank.lines("execution")) == 3


async def test_a_card_is_charged_once_and_only_its_last_four_digits_are_booked(start_bank: StartBank) -> None:
    bank = start_bank()
    first = await bank.call("pay_card", amount=5, card="4111222233334444")
    assert value_of(first) == {"charge_id": "ch_1", "amount": 5, "card": "ends in 4444"}
    assert await bank.call("pay_card", amount=5, card="4111222233334444") == first
    assert len(bank.lines("execution")) == 1
    for key, card in (("key-1", "4111222233335555"), ("key-2", "x")):
        refused = await bank.call("pay_card", key, amount=5, card=card)
        assert isinstance(refused, Answered)
        assert refused.error_code == "HTTP_422"
    assert "411122223333" not in bank.book.read_text()
    assert value_of(await bank.call("balance", None)) == {"balance": 5}


async def test_both_kinds_of_refund_are_given_back(start_bank: StartBank) -> None:
    bank = start_bank()
    await bank.call("charge", amount=9)
    await bank.call("refund", amount=2)
    assert value_of(await bank.call("refund_soon", amount=3)) == {"refund_id": "rf_3", "amount": 3}
    assert value_of(await bank.call("balance", None)) == {"balance": 4}
