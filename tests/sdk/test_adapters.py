"""The gateway's tools for models: what they are called, what a model is told, and pydantic-ai's agents with them.

The other frameworks are installed and tried by test_adapters_installed.py.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic_ai import Agent, ModelMessage, ModelResponse, TextPart, ToolCallPart
from pydantic_ai.messages import ToolReturnPart
from pydantic_ai.models.function import AgentInfo, FunctionModel

from tests.patience import HANG_S
from tests.sdk.gateways import Gateways, Subject, subject
from tga_sdk import AsyncClient, Tool, errors
from tga_sdk.adapters.offering import Offered, Terms, explained, framework, offer, told
from tga_sdk.adapters.pydantic_ai import GatewayToolset

EXAMPLES = Path(__file__).parents[2] / "examples" / "adapters"
CHARGE = Offered("bank_charge", "bank", "charge", "Charge.", {"type": "object"}, is_read=False)


@pytest.fixture
async def client(gateways: Gateways) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(gateways.url, gateways.world.keys["agent"]) as made:
        yield made


def saying(*turns: ToolCallPart) -> FunctionModel:
    """A model that makes these tool calls, one a turn, and then says what it was told."""

    def scripted(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        number = sum(isinstance(message, ModelResponse) for message in messages)
        if number < len(turns):
            return ModelResponse(parts=[turns[number]])
        told = [part for message in messages for part in message.parts if isinstance(part, ToolReturnPart)]
        return ModelResponse(parts=[TextPart("\n".join(f"{part.outcome}: {part.content}" for part in told))])

    return FunctionModel(scripted)


def calling(tool: str, amount: Any, call_id: str | None = None) -> ToolCallPart:
    return ToolCallPart(f"bank_{tool}", {"amount": amount}, tool_call_id=call_id or f"call_{uuid.uuid4().hex}")


async def answered(model: FunctionModel, toolset: GatewayToolset, **more: Any) -> list[str]:
    return str((await Agent(model, toolsets=[toolset]).run("go", **more)).output).splitlines()


async def test_a_model_is_told_what_became_of_each_call(client: AsyncClient, gateways: Gateways) -> None:
    model = saying(calling("charge", "x"), calling("charge", 42), calling("charge", 13), calling("refund", 1))
    unfit, done, denied, pending = await answered(model, GatewayToolset(client, only=["bank"]))
    assert re.match(r"retried: The arguments do not fit: .*/amount; expected .*integer", unfit)
    assert re.match(r"success: .*'amount': 42", done)
    assert re.match(r"failed: Denied: .* by the policy: forbidden by no-thirteen .*Do not ask", denied)
    assert re.match(r"failed: A person has to approve this call first \(trace ", pending)


async def test_a_tool_call_that_the_framework_repeats_is_executed_once(client: AsyncClient, gateways: Gateways) -> None:
    conversation, call = str(uuid.uuid4()), calling("charge", 5, "call_1")  # an id that others have too
    for _ in range(2):
        await answered(saying(call), GatewayToolset(client), conversation_id=conversation)
    (key,) = [key for key in gateways.world.all_executions() if conversation in key]
    assert gateways.executions(key) == 1
    other = str(uuid.uuid4())
    await answered(saying(call), GatewayToolset(client), conversation_id=other)
    assert [gateways.executions(key) for key in gateways.world.all_executions() if other in key] == [1]


async def test_a_toolset_waits_for_the_person_if_it_is_told_to(client: AsyncClient, gateways: Gateways) -> None:
    toolset = GatewayToolset(client, wait="forever")
    running = asyncio.create_task(answered(saying(calling("refund", 7)), toolset))
    async with subject(AsyncClient, gateways.url, gateways.world.keys["supervisor"]) as person:
        waiting = await _waiting(person, 7)
        await person.approve(waiting)
    (line,) = await asyncio.wait_for(running, HANG_S)
    assert "'amount': 7" in line


async def _waiting(person: Subject, amount: int) -> Any:
    async with asyncio.timeout(HANG_S):
        while True:
            for item in await person.approvals():
                if item.arguments == {"amount": amount}:
                    return item
            await asyncio.sleep(0.02)


async def test_what_a_model_cannot_act_on_is_raised(client: AsyncClient, gateways: Gateways) -> None:
    toolset = GatewayToolset(client, only=["bank/charge"], timeout=HANG_S)
    gateways.relay.lead_to(None)
    model = saying(calling("charge", 1))
    try:
        with pytest.raises(errors.GatewayUnreachable):
            await answered(model, GatewayToolset(AsyncClient("http://127.0.0.1:9", "key", give_up_after=0.1)))
    finally:
        gateways.relay.lead_to(gateways.direct_url)
    await answered(model, toolset)
    async with AsyncClient(gateways.url, gateways.world.keys["supervisor"]) as person:
        with pytest.raises(errors.Forbidden):
            await answered(model, GatewayToolset(person))


@pytest.mark.parametrize("name", ["pydantic_ai_agent"])
async def test_the_example_runs_as_it_is_printed(name: str, gateways: Gateways) -> None:
    environment = {"TGA_URL": gateways.url, "TGA_API_KEY": gateways.world.keys["agent"], "PATH": ""}
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    done = await asyncio.to_thread(
        subprocess.run, command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert done.returncode == 0, done.stderr
    unfit, charged, pending = done.stdout.splitlines()
    assert ("do not fit" in unfit, "42" in charged, "has to approve" in pending) == (True, True, True)


NAMES = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=80)


@given(st.lists(st.tuples(NAMES, NAMES), max_size=12, unique=True))
def test_every_tool_gets_a_name_of_its_own_that_models_take(pairs: list[tuple[str, str]]) -> None:
    made = offer([Tool(server_id=server, tool_name=tool) for server, tool in pairs])
    names = [one.name for one in made]
    assert len(set(names)) == len(pairs)
    assert all(re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", name) for name in names)
    assert [(one.server, one.tool) for one in made] == pairs


def test_names_that_would_be_the_same_are_told_apart_and_quarantined_tools_left_out() -> None:
    tools = [Tool(server_id="a_b", tool_name="c"), Tool(server_id="a", tool_name="b_c")]
    first, second = offer(tools)
    assert (first.name, second.name.startswith("t_a_b_c_")) == ("a_b_c", True)
    changed = Tool(server_id="x", tool_name="y", pin={"status": "quarantined"})
    assert offer([changed, *tools], only=["x", "a/b_c"])[0].tool == "b_c"
    assert offer([Tool(server_id="x", tool_name="y")])[0].schema == {"type": "object", "properties": {}}


def test_an_id_that_others_may_have_needs_a_scope() -> None:
    with pytest.raises(errors.TgaError, match="scope") as caught:
        Terms().options(CHARGE, "call_1")
    assert caught.value.code == "TOOL_CALL_ID_NOT_UNIQUE"
    one, other = (Terms(scope=scope).options(CHARGE, "call_1")["key"] for scope in ("a", "b"))
    assert one != other
    assert one == Terms().options(CHARGE, "call_1", "a")["key"]
    assert Terms().options(CHARGE, "call_0123456789abcdef")["key"]
    assert "key" not in Terms().options(CHARGE, None)


def test_only_what_a_model_can_act_on_is_told_to_it() -> None:
    effect = {"basis": "answer", "error": {"code": "HTTP_422", "message": "no"}}
    for shown, words in (
        (errors.Denied(403, {"code": "CALL_DENIED", "detail": "no"}), "Do not ask"),
        (errors.ArgumentsInvalid(422, {"detail": "x", "expected": "y"}), "expected y"),
        (errors.ToolNotFound(404, {"detail": "gone"}), "cannot be called"),
        (errors.CallFailed("HTTP_422", "no", effect=effect, output={"why": 1}), '{"why": 1}'),
        (errors.OutcomeUnknown("OUTCOME_UNKNOWN", "?", effect={"basis": "unknown"}), "not known"),
        (errors.CallHeld("x"), "operator"),
        (errors.Unfinished("x"), "still at work"),
        (errors.ApprovalPending("x"), "approve"),
    ):
        assert words in str(explained(shown))
    silent: list[Callable[[], errors.TgaError]] = [
        lambda: errors.Unauthorized(401, {}),
        lambda: errors.Forbidden(403, {}),
        lambda: errors.KeyReused(422, {}),
        lambda: errors.RateLimited(429, {}),
        lambda: errors.AnswerInvalid.found(200, "x"),
        lambda: errors.GatewayUnreachable("x"),
    ]
    assert [explained(make()) for make in silent] == [None] * len(silent)
    assert told(b"\x00") == '{"base64": "AA=="}'


def test_a_missing_framework_is_named_with_its_extra() -> None:
    with pytest.raises(errors.ExtraMissing, match=r"pip install 'tga-sdk\[langchain\]'"):
        framework("no_such_framework.tools", extra="langchain")
    # One that is there and broken says so itself.
    with pytest.raises(ModuleNotFoundError):
        framework("tests.sdk.broken_framework", extra="langchain")
    program = """
import sys
sys.modules |= {"langchain_core": None, "agents": None, "claude_agent_sdk": None}
import importlib, tga_sdk
for name in ("langchain", "openai_agents", "claude_agent"):
    try:
        importlib.import_module(f"tga_sdk.adapters.{name}")
    except tga_sdk.ExtraMissing as error:
        print(error.extra)
"""
    tried = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert tried.stdout.split() == ["langchain", "openai-agents", "claude-agent"]
