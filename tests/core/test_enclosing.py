"""What others write leaves room for the documents around it: whatever passes its own limit can be recorded and sent.

The limit of an inner thing is made from that of the outer one (`app/core/limits.py`). Here the largest inner things are
made, in each direction, and every document that comes to stand around them is written and read again.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.config import ServerConfig
from app.connectors.mcp.discovery import discover
from app.connectors.mcp.session import Listing, Session
from app.core.canonical import canonical_bytes, canonical_enclosed, parse_object
from app.core.errors import InputTooLarge
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    ATTEMPTS_LISTED_MAX,
    BATCH_BYTES_MAX,
    DEPTH_MAX,
    DOCUMENT_BYTES_MAX,
    ENCLOSED_BYTES_MAX,
    ENCLOSED_DEPTH_MAX,
    ENCLOSED_KEYS_MAX,
    ENCLOSING_BYTES,
    KEYS_MAX,
    MCP_DEFINITION_BYTES_MAX,
    NAME_CHARS_MAX,
    PINS_AT_ONCE_MAX,
    POINTER_CHARS_MAX,
    SECRET_ARGUMENTS_MAX,
    TEXT_CHARS_MAX,
)
from app.domain.ledger.documents import Document
from app.domain.system.documents import PolicySet, ToolPin
from app.domain.tga.documents import ActionRequest, ToolCall, ToolEffect
from app.domain.tga.secrets import find_secrets, redact, sealed_document, values_from
from tests.traces import action_request, supervisor_decision, time_at, tool_call, tool_effect

EXAMPLES: Final = 2_000 if os.environ.get("TGA_SOAK") else 60
NAME: Final = "n" * NAME_CHARS_MAX
# A character that JSON writes as six: nothing takes more.
TEXT: Final = "\x01" * TEXT_CHARS_MAX
# Deep enough that redacting there goes deeper than anything else in the arguments.
POINTER_STEPS: Final = min(ENCLOSED_DEPTH_MAX - 1, POINTER_CHARS_MAX // 2)


def nested(levels: int, leaf: Any = 1, *, key: str = "a") -> dict[str, Any]:
    value = leaf
    for level in range(levels):
        value = [value] if level % 3 == 1 and level < levels - 1 else {key: value}
    assert isinstance(value, dict)
    return value


def of_bytes(size: int, unit: str = "x") -> dict[str, Any]:
    width = len(canonical_bytes(unit)) - 2
    frame = len(canonical_bytes({"a": ""}))
    whole, rest = divmod(size - frame, width)
    return {"a": unit * whole + "x" * rest}


def numbers(size: int) -> dict[str, Any]:
    """Each takes four characters where it came from and sixteen here."""
    made: dict[str, Any] = {"a": [9e15] * ((size - len('{"a":[]}')) // 17)}
    return {**made, "b": "x" * (size - len(canonical_bytes({**made, "b": ""})))}


LARGEST: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "deep": lambda: nested(ENCLOSED_DEPTH_MAX),
    "deep, with a number that is not plain": lambda: nested(ENCLOSED_DEPTH_MAX, 1.5),
    "keys": lambda: {str(n): 1 for n in range(ENCLOSED_KEYS_MAX)},
    "keys, spread": lambda: {"a": [{"k": 1.5}] * (ENCLOSED_KEYS_MAX - 1)},
    "bytes": lambda: of_bytes(ENCLOSED_BYTES_MAX),
    "bytes of escapes": lambda: of_bytes(ENCLOSED_BYTES_MAX, "\x01"),
    "bytes of two and four": lambda: of_bytes(ENCLOSED_BYTES_MAX, "é\U0001f600"),
    "numbers": lambda: numbers(ENCLOSED_BYTES_MAX),
}
BEYOND: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "deep": lambda: nested(ENCLOSED_DEPTH_MAX + 1),
    "keys": lambda: {str(n): 1 for n in range(ENCLOSED_KEYS_MAX + 1)},
    "bytes": lambda: of_bytes(ENCLOSED_BYTES_MAX + 1),
}


@pytest.fixture(params=LARGEST)
def largest(request: pytest.FixtureRequest) -> dict[str, Any]:
    made = LARGEST[request.param]()
    canonical_enclosed(made)
    return made


@pytest.mark.parametrize("what", BEYOND)
def test_one_more_is_refused(what: str) -> None:
    with pytest.raises(InputTooLarge) as refused:
        canonical_enclosed(BEYOND[what]())
    bound = {"deep": ENCLOSED_DEPTH_MAX, "keys": ENCLOSED_KEYS_MAX, "bytes": ENCLOSED_BYTES_MAX}[what]
    assert str(bound) in str(refused.value.expected)


def test_the_inner_limits_are_made_from_the_outer_ones() -> None:
    assert ENCLOSED_DEPTH_MAX < DEPTH_MAX
    assert ENCLOSED_KEYS_MAX < KEYS_MAX
    assert ENCLOSED_BYTES_MAX < ARTIFACT_BYTES_MAX
    assert PINS_AT_ONCE_MAX * (MCP_DEFINITION_BYTES_MAX + ENCLOSING_BYTES) <= BATCH_BYTES_MAX
    assert PINS_AT_ONCE_MAX >= 1


def reads_back(document: Document) -> None:
    raw = document.to_bytes()
    assert len(raw) <= ARTIFACT_BYTES_MAX
    assert type(document).from_bytes(raw).to_bytes() == raw


# Arguments.


def widest_request(arguments: dict[str, Any]) -> ActionRequest:
    return action_request(
        1,
        arguments=arguments,
        server_id=NAME,
        tool_name=NAME,
        principal={"principal_id": NAME, "tenant": NAME, "roles": ["agent", "supervisor", "operator", "auditor"]},
        idempotency_key="k" * 255,
        intent=TEXT,
        expires_at=time_at(9),
        traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        tool_definition_digest="0" * 64,
    )


def call_of(request: ActionRequest) -> ToolCall:
    return tool_call(1, request, supervisor_decision(request), on_unknown_outcome="reconcile", reconcile_tool=NAME)


def test_a_call_with_the_largest_arguments_can_be_recorded_to_its_end(largest: dict[str, Any]) -> None:
    """The tool call is written long after the request, when a person has approved it: it must not fail then."""
    for request in (action_request(1, arguments=largest), widest_request(largest)):
        reads_back(request)
        reads_back(call_of(request))


def test_a_call_with_the_largest_arguments_can_be_sent_to_an_mcp_server(largest: dict[str, Any]) -> None:
    for version in ("2025-11-25", "2026-07-28"):
        session = Session(None, version, {}, None)  # type: ignore[arg-type]
        meta = {"tga/tool-call-id": "i" * 36, "tga/idempotency-key": "k" * 384, "traceparent": "t" * 55}
        outgoing = session.call(
            NAME, largest, meta, param_headers=lambda _: {}, on_progress=lambda _: None, may_send=None
        )
        assert outgoing.written()


@pytest.mark.parametrize("leaf", [1, "secret", {"card": "x" * 1000}])
def test_secrets_in_the_largest_arguments_can_be_sealed_and_committed_to(leaf: Any) -> None:
    """What is recorded in the place of a short secret is longer and two levels deeper than the secret."""
    levels = POINTER_STEPS - 1
    secrets = {chr(ord("a") + number): nested(levels, leaf, key="s") for number in range(SECRET_ARGUMENTS_MAX)}
    arguments: dict[str, Any] = {**secrets, "z": {str(n): 1 for n in range(ENCLOSED_KEYS_MAX - 3000)}, "zz": ""}
    arguments["zz"] = "x" * (ENCLOSED_BYTES_MAX - len(canonical_bytes(arguments)))
    canonical_enclosed(arguments)
    deepest = nested(levels, leaf, key="s")
    steps: list[str] = []
    at: Any = deepest
    while at != leaf:
        steps.append("0" if isinstance(at, list) else "s")
        at = at[0] if isinstance(at, list) else at["s"]
    pointers = [f"/{name}/{'/'.join(steps)}" for name in secrets]
    found = find_secrets(arguments, pointers)
    assert len(found) == SECRET_ARGUMENTS_MAX
    assert values_from(sealed_document(found)) == found
    redacted = redact(arguments, found, salt=bytes(32))
    for request in (action_request(1, arguments=redacted), widest_request(redacted)):
        reads_back(request)
        reads_back(call_of(request))
    whole = find_secrets(arguments, [f"/{name}" for name in arguments])
    assert values_from(sealed_document(whole)) == whole


# Outputs.


def widest_effect(output: Any) -> ToolEffect:
    request = action_request(1)
    attempt = {"started_at": time_at(3), "ended_at": time_at(4), "result": "retryable_answer"}
    return tool_effect(
        tool_call(1, request, supervisor_decision(request)),
        outcome="FAILURE",
        basis="resolution",
        output={"encoding": "json", "value": output},
        error={"code": NAME, "message": TEXT},
        resolution={"action": "failed", "resolved_by": NAME, "rationale": TEXT, "resolved_at": time_at(5)},
        attempts=[{"attempt": 1000 - number, **attempt} for number in range(ATTEMPTS_LISTED_MAX)],
    )


def test_the_largest_output_fits_its_effect_whatever_else_the_effect_says(largest: dict[str, Any]) -> None:
    try:
        canonical_enclosed(largest, bytes_max=DOCUMENT_BYTES_MAX)
    except InputTooLarge:
        largest = of_bytes(DOCUMENT_BYTES_MAX, "\x01")
    reads_back(widest_effect(largest))


# Definitions.


def pin_of(definition: dict[str, Any]) -> ToolPin:
    return ToolPin(
        system_id=NAME,
        recorded_at=time_at(1),
        recorded_by=NAME,
        server_id=NAME,
        tool_name=NAME,
        change="quarantined",
        definition_digest="0" * 64,
        definition=definition,
    )


def server(**fields: Any) -> ServerConfig:
    return ServerConfig.model_validate({"transport": "mcp-stdio", "command": ["x"], **fields})


GOOD: Final = {"name": "good", "inputSchema": {"type": "object"}}


def offered(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"name": "a" * NAME_CHARS_MAX, "inputSchema": {"type": "object", **schema}, **more}


def short_keys(count: int) -> list[dict[str, int]]:
    """As many keys as no other JSON has in so few bytes."""
    signs = [chr(n) for n in range(32, 127) if chr(n) not in '"\\\\']
    whole, rest = divmod(count, len(signs))
    return [*[dict.fromkeys(signs, 0)] * whole, dict.fromkeys(signs[:rest], 0)]


def filled(tool: dict[str, Any], size: int = MCP_DEFINITION_BYTES_MAX) -> dict[str, Any]:
    return {**tool, "description": "", "x": "x" * (size - len(canonical_bytes({**tool, "description": "", "x": ""})))}


DEFINITIONS: Final[dict[str, dict[str, Any]]] = {
    "as deep as one may be": offered({"const": nested(ENCLOSED_DEPTH_MAX - 2)}),
    "a schema of depth 60": offered({"const": nested(60)}),
    "as many keys as one may have": offered({"const": short_keys(ENCLOSED_KEYS_MAX - 4)}),
    "9,990 keys": offered({"const": short_keys(9_986)}),
    "9,997 keys": offered({"const": short_keys(9_993)}),
    "10,001 keys": offered({"const": short_keys(9_997)}),
    "as many bytes as one may have": filled(offered({})),
    "as many bytes, of escapes": offered({"const": "\x01" * 10_800}),
    "one byte more": filled(offered({}), MCP_DEFINITION_BYTES_MAX + 1),
    "annotations that are deep": offered({}, annotations=nested(60)),
    "an output schema with many keys": offered({}, outputSchema={"type": "object", "const": short_keys(9_000)}),
}


@pytest.mark.parametrize("what", DEFINITIONS)
def test_a_definition_that_passes_its_own_limit_can_be_pinned_and_no_other_is_lost(what: str) -> None:
    found = discover("s" * NAME_CHARS_MAX, server(), Listing([DEFINITIONS[what], GOOD]))
    assert "good" in [tool.tool_name for tool in found.tools]
    for tool in found.tools:
        reads_back(pin_of(tool.definition))
    assert (len(found.tools) == 2) == what.startswith("as ")
    assert ("left out" in "".join(found.problems)) == (not what.startswith("as "))


KEYS = st.text(st.sampled_from('ab$"\\é\x01'), max_size=4)
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**60), 2**60),
    st.floats(),
    st.text(st.sampled_from('a"\\é\x01\x00\ud800\U0001f600'), max_size=8),
)
ANYTHING = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)
KEYWORDS = st.sampled_from(
    ["properties", "items", "allOf", "anyOf", "$defs", "$ref", "type", "enum", "required", "pattern", "$schema", "not"]
) | st.sampled_from(
    ["$id", "const", "default", "$anchor", "$dynamicRef", "additionalProperties", "x-mcp-header", "description"]
)


@st.composite
def near_limits(draw: st.DrawFn) -> dict[str, Any]:
    """A definition that is near one of its limits, on either side, with anything in it."""
    schema: dict[str, Any] = draw(st.dictionaries(KEYWORDS, ANYTHING, max_size=4))
    match draw(st.sampled_from(["deep", "keys", "bytes", "plain"])):
        case "deep":
            schema["const"] = nested(draw(st.integers(ENCLOSED_DEPTH_MAX - 5, DEPTH_MAX + 2)), draw(LEAVES))
        case "keys":
            count = draw(st.integers(ENCLOSED_KEYS_MAX - 30, KEYS_MAX + 5))
            leaf = draw(LEAVES)
            schema["const"] = [*short_keys(count), leaf]
        case "bytes":
            size = MCP_DEFINITION_BYTES_MAX - draw(st.integers(-100, 600))
            schema["const"] = of_bytes(size, draw(st.sampled_from(["x", '"', "\x01", "é", "\U0001f600"])))["a"]
    members = ("title", "description", "outputSchema", "annotations", "icons", "_meta")
    more = draw(st.dictionaries(st.sampled_from(members), ANYTHING, max_size=2))
    name = draw(st.sampled_from(["a", "b", "good", "n" * NAME_CHARS_MAX]) | ANYTHING)
    return {"name": name, "inputSchema": draw(st.just(schema) | ANYTHING), **more}


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(near_limits(), max_size=3))
def test_whatever_a_server_lists_is_pinned_or_left_out_alone(listed: list[dict[str, Any]]) -> None:
    first = {**GOOD, "name": "first"}
    found = discover("s", server(), Listing([first, *listed, {**GOOD, "name": "last"}]))
    names = [tool.tool_name for tool in found.tools]
    assert names[0] == "first"
    assert names[-1] == "last"
    assert len(set(names)) == len(names)
    assert len(found.tools) + len(found.problems) == len(listed) + 2
    for tool in found.tools:
        reads_back(pin_of(tool.definition))


# Policies.


def test_the_largest_policy_that_can_be_recorded_fits_its_document() -> None:
    for unit in ("\n", '"', "é"):
        text = of_bytes(ENCLOSED_BYTES_MAX, unit)["a"][:262_144]
        canonical_enclosed(text)
        policy = PolicySet(system_id=NAME, recorded_at=time_at(1), recorded_by=NAME, policy_digest="0" * 64, text=text)
        assert parse_object(policy.to_bytes(), bytes_max=ARTIFACT_BYTES_MAX)["text"] == text
