"""An agent of a Lua program calls tools through the gateway, by itself and beside the program, and its worker dies at
every boundary on the way: each effect is once in the tool server's book, and no recorded turn is paid again."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest

from app.lua.pool import Pool
from tests import sampling
from tests.lua.running import main_of, performed, procedure_of
from tga_sdk.agents import provide_model
from tga_sdk.testing import ScriptedPeople, crash_everywhere_async
from tga_sdk.testing.models import ScriptedModel, call

pytestmark = pytest.mark.asyncio(loop_scope="module")
BODY = """
    local W = agent "worker" {
        model = "scripted-in-lua",
        system_prompt = "Charge.",
        tools = {tool.bank.charge, tool.bank.balance},
    }
    W({message = input.task})
    local first = W.output
    tool.bank.charge{amount = 100}
    state.ok = Human.approve({message = "Once more?"})
    W({message = "again"})
    return {first = first, second = W.output, ok = state.ok, said = #W.messages}
"""
TURNS = 5


class Bank:
    """A tool server with a book of its own: what it did, by the key of the call."""

    def __init__(self) -> None:
        self.book: Counter[int] = Counter()

    def tools(self) -> dict[str, Any]:
        self.book.clear()

        def charge(amount: int) -> dict[str, Any]:
            self.book[amount] += 1
            return {"amount": amount}

        return {"bank.charge": charge, "bank.balance": lambda: {"balance": 7}}


def model() -> ScriptedModel:
    return ScriptedModel(
        [call("bank.charge", amount=5), call("bank.balance")],
        [call("bank.charge", amount=6), call("bank.charge", amount=7)],
        "charged",
        call("bank.charge", amount=8),
        "charged again",
        name="scripted-in-lua",
    )


async def test_its_tools_are_the_gateways_and_a_crash_anywhere_repeats_no_effect_and_no_recorded_turn(
    pool: Pool,
) -> None:
    scripted, bank = model(), Bank()
    provide_model("scripted-in-lua", scripted)
    program = await procedure_of(pool, main_of(BODY))
    asked: list[int] = []
    books: list[Counter[int]] = []

    def reset() -> None:
        asked.append(len(scripted.requests))
        books.append(Counter(bank.book))

    def is_left_out(boundary: Any) -> bool:
        return not sampling.is_taken(f"agents in lua {boundary}", 4)

    people = ScriptedPeople({"approve": True})
    calm = await performed(program, {"task": "pay"}, tools=bank.tools, people=people)
    assert calm.output is not None, calm.error
    assert calm.output["value"] == {"first": "charged", "second": "charged again", "ok": True, "said": 10}
    assert len(scripted.requests) == TURNS
    found = await crash_everywhere_async(
        program, {"task": "pay"}, tools=bank.tools, people=people, reset=reset, ignore=is_left_out
    )
    reset()
    # The first reset comes before the calm run. Of each run: what was asked in it, and what the book has after it.
    paid = [after - before for before, after in pairwise(asked)]
    assert paid[0] == TURNS
    assert set(paid) <= {TURNS, TURNS + 1}, "only the turn that was under way is asked, and paid, again"
    assert all(book == Counter({5: 1, 6: 1, 7: 1, 8: 1, 100: 1}) for book in books[1:]), books
    assert len(paid) == len(found.boundaries) + 1
    kinds = [one["kind"] for one in calm.journal if one["artifact_type"] == "run_checkpoint" and one.get("kind")]
    assert kinds.count("turn") == TURNS


async def test_a_tool_that_fails_is_told_to_the_model_and_to_nobody_else(pool: Pool) -> None:
    """The agent goes on with what the gateway said; the program's own call of the same tool raises."""
    provide_model(
        "scripted-in-lua", ScriptedModel([call("bank.charge", amount=5)], "it did not work", name="scripted-in-lua")
    )
    body = """
        local W = agent "worker" {model = "scripted-in-lua", tools = {tool.bank.charge}}
        W({message = "pay"})
        local ok, problem = pcall(function() return tool.bank.charge{amount = 6} end)
        return {said = W.output, ok = ok, type = problem.type}
    """

    def charge(amount: int) -> None:
        raise ValueError("the bank is closed")

    outcome = await performed(await procedure_of(pool, main_of(body)), {}, tools={"bank.charge": charge})
    assert outcome.output is not None, outcome.error
    assert (outcome.output["value"]["said"], outcome.output["value"]["ok"]) == ("it did not work", False)


async def test_an_agent_has_no_tool_that_it_was_not_given(pool: Pool) -> None:
    provide_model(
        "scripted-in-lua",
        ScriptedModel([call("bank.steal", amount=5)], "it is not there", name="scripted-in-lua"),
    )
    body = """
        local W = agent "worker" {model = "scripted-in-lua", tools = {tool.bank.charge}}
        W({message = "steal"})
        return W.output
    """
    taken: list[int] = []
    tools: dict[str, Any] = {"bank.charge": lambda amount: {}, "bank.steal": lambda amount: taken.append(amount)}
    outcome = await performed(await procedure_of(pool, main_of(body)), {}, tools=tools)
    assert taken == []
    assert outcome.state in ("COMPLETED", "FAILED")
