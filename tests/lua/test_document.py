"""The reference's examples run as they are written: agents with a scripted model under the names that it uses, and
predictions by a service here. Where an example leaves something out ("..."), the least is put there. An own variant of
the largest one runs where the reference is not at hand."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from app.lua.options import LuaOptions
from app.lua.pool import Pool
from tests.lua.running import checkpoints, performed, procedure_of
from tga_sdk.agents import provide_model
from tga_sdk.testing import ScriptedPeople
from tga_sdk.testing.crashes import Outcome
from tga_sdk.testing.models import ScriptedModel, call

pytestmark = pytest.mark.asyncio(loop_scope="module")
REFERENCE: Final = Path(__file__).parents[3] / "shared" / "reference" / "tactus-durable-execution.md"

# What the fragments take for granted: agents, models, functions and data that the text speaks of.
AROUND: Final = """
local function said(...) return "said" end
local model_name = "claude-sonnet-4-20250514"
Worker = agent "worker" {model = model_name}
Publisher = agent "publisher" {model = model_name}
Researcher = agent "researcher" {model = model_name}
Deployer = agent "deployer" {model = model_name}
Analyst = agent "analyst" {model = model_name}
IntentClassifier = model "intent_classifier" {type = "http", endpoint = "http://example.com/"}
QuoteExtractor = model "quote_extractor" {type = "http", endpoint = "http://example.com/"}
Embedder = model "embedder" {type = "http", endpoint = "http://example.com/"}
Classifier = IntentClassifier
web_search, read_file = said, said
ResearchReport = {title = field.string{required = true}}
text, x, doc, document, user_message, large_document, raw_data = "t", "x", "d", "d", "u", "l", "r"
really_expensive_computation, risky_external_call, call_api, call_another_api = said, said, said, said
compute_embeddings, cluster_embeddings, prepare_for_upload, process_batch = said, said, said, said
external_api = {upload = said}
items, batches = {"a", "b", "c"}, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}
function split(text, size) return {"one", "two", "three"} end
function join(list) return table.concat(list, " ") end
summarize_chunk = procedure "summarize_chunk" {input = {chunk = {type = "string"}}, run = function()
    return {summary = "short " .. input.chunk}
end}
"""
OWN: Final = """
handle = procedure "handle" {
    input = {issue = {type = "string", required = true}, history = {type = "array"}},
    output = {resolution = {type = "string"}},
    run = function()
        Supervisor = agent "supervisor" {model = "claude-sonnet-4-20250514", system_prompt = "Decide."}
        Supervisor({message = input.issue})
        return {resolution = Supervisor.output}
    end
}
main = procedure "main" {
    input = {user_message = {type = "string", required = true}},
    output = {response = {type = "string"}, resolved = {type = "boolean"}},
    state = {category = {type = "string"}, escalated = {type = "boolean", default = false}},
    run = function()
        local Intent = model "intent_classifier" {type = "http", endpoint = "http://example.com/"}
        local Billing = agent "billing" {model = "claude-sonnet-4-20250514", system_prompt = "Bill."}
        state.category = Intent.predict(input.user_message)
        Billing()
        response = Billing.output
        state.escalated = Human.approve({message = "Escalate to supervisor?"})
        if state.escalated then
            response = handle({issue = input.user_message, history = Billing.messages}).resolution
        end
        return {response = response, resolved = true}
    end
}
"""
SUPPORT: Final = [
    ("model", "intent_classifier"),
    ("turn", "billing"),
    ("turn", "supervisor"),
    ("call", "handle_escalation"),
]


def blocks() -> list[str]:
    if not REFERENCE.exists():
        return []
    return re.findall(r"^```lua\n(.*?)^```", REFERENCE.read_text(), re.S | re.M)


def block(begin: str) -> str:
    if not REFERENCE.exists():
        pytest.skip("the reference is not at hand")
    [found] = [one for one in blocks() if begin in one]
    return found


def fragments() -> list[tuple[int, str]]:
    """Those that are no whole file: statements that stand in a procedure."""
    whole = re.compile(r"^\w+ = procedure|^procedure|^main = |^input \{|^-- \w+\.tactus\.lua", re.M)
    return [(number, one) for number, one in enumerate(blocks()) if not whole.search(one)]


@asynccontextmanager
async def predicting() -> AsyncIterator[LuaOptions]:
    """A service that answers every question with `billing`; models are specified by the operator."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = re.search(rb"content-length: (\d+)", head.lower())
        await reader.readexactly(int(length[1]) if length else 0)
        body = json.dumps("billing").encode()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n")
        writer.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    spec = {"type": "http", "endpoint": f"http://127.0.0.1:{port}/"}
    async with server:
        yield LuaOptions(models=dict.fromkeys(("intent_classifier", "quote_extractor", "embedder"), spec))


@pytest.fixture(autouse=True)
def scripted() -> None:
    talking = ["I see.", *["More."] * 20]
    provide_model("claude-sonnet-4-20250514", lambda: ScriptedModel(*talking))
    provide_model("claude-sonnet-4", lambda: ScriptedModel(*talking))
    provide_model("openai:gpt-4o", lambda: ScriptedModel(call("done", reason="complete"), "It is done."))
    provide_model("gpt-4o", lambda: ScriptedModel(*talking))


async def run(pool: Pool, text: str, given: Any = None, *, name: str = "example.lua") -> Outcome:
    people = ScriptedPeople({"approve": True, "input": "more context", "approval.approve_1": True})
    tools = {"http_client.get": lambda url: {"status": 200, "body": url}}
    async with predicting() as options:
        program = await procedure_of(pool, text, name=name, files={"config.json": b"{}"}, options=options)
        outcome = await performed(program, given, tools=tools, people=people)
    assert outcome.state == "COMPLETED", (outcome.error, text)
    return outcome


def ended(outcome: Outcome) -> list[tuple[str, str]]:
    return [(kind, name) for _, kind, name, _ in checkpoints(outcome)]


async def test_customer_support(pool: Pool) -> None:
    given = {"user_message": "I need help with my bill"}
    outcome = await run(pool, block("-- customer_support.tactus.lua"), given, name="customer_support.tactus.lua")
    assert outcome.output["value"] == {"response": "I see.", "resolved": True}
    assert outcome.document == {"category": "billing", "escalated": True}
    assert ended(outcome) == SUPPORT


async def test_own_variant_of_customer_support(pool: Pool) -> None:
    outcome = await run(pool, OWN, {"user_message": "help"})
    assert outcome.output["value"] == {"response": "I see.", "resolved": True}
    assert ended(outcome) == [(kind, name.replace("_escalation", "")) for kind, name in SUPPORT]


async def test_script_mode_examples(pool: Pool) -> None:
    greeting = await run(pool, block('"Hello, " .. input.name'), {"name": "Ada"})
    assert greeting.output["value"] == {"greeting": "Hello, Ada!"}
    agent = await run(pool, block("done = tactus.done"), {"task": "tidy up"})
    assert agent.output["value"] == {"result": "Success"}
    assert ended(agent) == [("turn", "auto_agent_1"), ("step", "done"), ("turn", "auto_agent_1")]
    state = await run(pool, block("doubled = state.result"), {"value": 4})
    assert (state.output["value"], state.document) == ({"doubled": 8}, {"original": 4, "result": 8})


async def test_procedure_examples(pool: Pool) -> None:
    calling = "main = procedure 'main' {run = function() return my_procedure({document = 'text'}) end}"
    anatomy = await run(pool, block("my_procedure = procedure") + calling)
    assert anatomy.output["value"] == {"summary": "...", "word_count": 42}
    loop = await run(pool, AROUND + block("state.summaries[i] = result.summary"), {"document": "text"})
    assert loop.output["value"] == {"result": "short one short two short three"}
    assert ended(loop)[:3] == [("call", "summarize_chunk")] * 3
    for begin in ("-- helpers.tactus.lua", 'description = "Processes customer support inquiries"'):
        text = block(begin).replace("{...}", "{}").replace("function() ... end", "function() return {} end")
        await run(pool, text)
    schema = block('procedure "order_fulfillment"')
    await run(pool, schema + 'main = procedure "main" {run = function() return {} end}')
    warned = await run(pool, block("-- ⚠️ WARNING!"))
    assert 0 <= warned.output["value"]["value"] < 1


async def test_the_example_of_steps_names_its_operations(pool: Pool) -> None:
    body = block('step("research"')
    outcome = await run(pool, f"{AROUND}\nmain = procedure 'main' {{run = function()\n{body}\nend}}")
    asks = [one["name"] for one in outcome.journal if one["artifact_type"] == "run_intent"]
    assert asks == ["approval.approve_1"]
    assert ended(outcome) == [
        ("turn", "researcher"),
        ("step", "research"),
        ("step", "approval"),
        ("turn", "publisher"),
        ("step", "publish"),
    ]
    assert outcome.document == {"phase": "researching", "findings": "I see.", "approved": True}


# What each fragment leaves in the journal: what its comments say that it does. "...": chance decides what follows.
LEFT: Final = {
    1: "model intent_classifier, turn worker, ask approve, turn publisher",
    9: "turn worker, turn worker, turn worker",
    10: "turn worker, ...",
    12: "turn researcher, step research, ask approval.approve_1, step approval, turn publisher, step publish",
    13: "turn worker, step mixed_operations",
    14: "checkpoint checkpoint",
    15: "checkpoint checkpoint, turn worker",
    16: "checkpoint checkpoint",
    17: "checkpoint checkpoint",
    18: "",
    19: "turn researcher, turn researcher",
    20: "",
    21: "model intent_classifier, model quote_extractor, model embedder",
    22: "turn researcher, model intent_classifier, model quote_extractor",
    23: "ask approve, turn deployer",
    24: "ask input, turn analyst",
    25: "turn worker, ...",
    26: "step auto_checkpoint_1, turn worker, ...",
    27: "checkpoint checkpoint, turn worker, ...",
    28: "step worker.prompt, turn worker",
    29: "turn worker, step auto_checkpoint_1",
    30: "tool http_client.get, turn worker, tool http_client.get, step auto_checkpoint_1",
    31: "step auto_checkpoint_1",
    33: "turn worker",
    34: "step auto_checkpoint_1, turn worker",
    35: "turn worker",
    36: "step auto_checkpoint_1, turn worker, step auto_checkpoint_2",
    37: "turn ...",
    38: "step auto_checkpoint_1, turn ...",
}


@pytest.mark.parametrize(("number", "text"), fragments(), ids=lambda one: str(one) if isinstance(one, int) else "")
async def test_every_fragment(pool: Pool, number: int, text: str) -> None:
    text = text.replace("({...})", '({message = "?"})')
    before = "state.results = {}\n" if "state.results[i]" in text else ""
    outcome = await run(pool, f"{AROUND}\nmain = procedure 'main' {{run = function()\n{before}{text}\nend}}")
    left = [
        f"{one['kind']} {one['name']}"
        for one in outcome.journal
        if one["artifact_type"] in ("run_intent", "run_checkpoint") and one["name"] != "end"
    ]
    expected, chance, _ = LEFT[number].partition("...")
    found = ", ".join(left)
    assert found.startswith(expected.rstrip(", ")) if chance else found == expected


# Whole files, by what they begin with or have alone: the tests above run them.
WHOLE: Final = (
    "-- customer_support.tactus.lua",
    '"Hello, " .. input.name',
    "done = tactus.done",
    "doubled = state.result",
    "my_procedure = procedure",
    "state.summaries[i] = result.summary",
    "-- helpers.tactus.lua",
    'description = "Processes customer support inquiries"',
    'procedure "order_fulfillment"',
    "-- ⚠️ WARNING!",
)


async def test_every_block_of_the_reference_is_run() -> None:
    if not REFERENCE.exists():
        pytest.skip("the reference is not at hand")
    numbers = {number for number, _ in fragments()}
    whole = [one for number, one in enumerate(blocks()) if number not in numbers]
    assert numbers == set(LEFT)
    assert sorted(begin for one in whole for begin in WHOLE if begin in one) == sorted(WHOLE)
    assert len(whole) == len(WHOLE)
