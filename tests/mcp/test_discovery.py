"""Which tools an MCP server has: listed, checked, bounded, and followed when they change."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mcp_types import ListToolsResult

from app.config import ServerConfig
from app.config.bounded_schema import TooManySteps, bounded_validator_of, first_misfit
from app.connectors.mcp.discovery import McpTool, discover
from app.connectors.mcp.session import Listing, Session
from app.connectors.mcp.wire import Message, Outgoing, Reply
from app.connectors.registry import Registry
from app.core.errors import ArgumentsInvalid, StoreUnavailable, ToolNotFound
from app.core.limits import MCP_LISTING_BYTES_MAX, MCP_PAGES_MAX, MCP_PROBLEMS_MAX
from app.domain.tools import Tool
from app.mcp_server.tool_catalogue import _described
from tests.connectors.servers import until
from tests.core.test_enclosing import EXAMPLES, near_limits
from tests.mcp.standing import scripted, standing, structured

OBJECT = {"type": "object"}


def deep(levels: int) -> Any:
    return {"a": deep(levels - 1)} if levels else 1


def server(**fields: Any) -> ServerConfig:
    return ServerConfig.model_validate({"transport": "mcp-stdio", "command": ["x"], **fields})


def tool(name: Any = "a", schema: Any = None, **fields: Any) -> dict[str, Any]:
    return {"name": name, "inputSchema": OBJECT if schema is None else schema, **fields}


def found(*tools: dict[str, Any], **config: Any) -> dict[str, McpTool]:
    return {tool.tool_name: tool for tool in discover("it", server(**config), Listing(list(tools))).tools}


def problems(*tools: dict[str, Any], **config: Any) -> str:
    return "\n".join(discover("it", server(**config), Listing(list(tools))).problems)


# Class and what the operator adds.


def test_a_tool_is_a_write_unless_the_operator_says_otherwise() -> None:
    says_read = tool(annotations={"readOnlyHint": True})
    assert found(says_read)["a"].tool_class == "write"
    assert found(says_read, trust_annotations=True)["a"].tool_class == "read"
    assert found(tool(annotations={"readOnlyHint": "yes"}), trust_annotations=True)["a"].tool_class == "write"
    assert found(tool(), tools={"a": {"class": "read"}})["a"].tool_class == "read"
    assert found(says_read, trust_annotations=True, tools={"a": {"class": "write"}})["a"].tool_class == "write"


def test_what_the_operator_adds_holds_for_the_discovered_tool() -> None:
    added = {"tags": ["approval"], "on_unknown_outcome": "hold", "secret_arguments": ["/card"]}
    known = found(tool(), tools={"a": {**added, "approval_timeout_ms": 5000}}, timeout_ms=7, max_attempts=2)["a"]
    assert (known.tags, known.on_unknown_outcome) == (frozenset({"approval"}), "hold")
    assert (known.secret_arguments, known.approval_timeout_ms) == (("/card",), 5000)
    assert (known.timeout_ms, known.max_attempts) == (7, 2)


def test_an_operators_word_on_a_tool_that_is_not_there_is_reported() -> None:
    assert "'b' is configured, but the server has no such tool" in problems(tool(), tools={"b": {"class": "read"}})


def test_a_secret_that_the_schema_has_no_place_for_keeps_the_tool_out() -> None:
    closed = {"type": "object", "properties": {"pan": {}}, "additionalProperties": False}
    assert found(tool(schema=closed), tools={"a": {"secret_arguments": ["/card"]}}) == {}
    assert "'a' is left out: secret_arguments" in problems(
        tool(schema=closed), tools={"a": {"secret_arguments": ["/card"]}}
    )


# The definition and its digest.


@pytest.mark.parametrize(
    "change",
    [
        {"description": "Other."},
        {"title": "Other"},
        {"inputSchema": {"type": "object", "properties": {}}},
        {"outputSchema": OBJECT},
        {"annotations": {"destructiveHint": False}},
    ],
)
def test_whatever_a_tool_says_of_itself_is_in_its_digest(change: dict[str, Any]) -> None:
    digests = {found(tool())["a"].definition_digest, found({**tool(), **change})["a"].definition_digest}
    assert len(digests) == 2


def test_what_changes_with_every_listing_is_not_in_its_digest() -> None:
    noisy = tool(_meta={"at": 1}, icons=[{"src": "x"}])
    assert found(noisy)["a"].definition_digest == found(tool())["a"].definition_digest
    assert found(noisy)["a"].listed == noisy


def test_what_no_client_could_read_is_not_listed_on() -> None:
    icons = [{"src": "x", "sizes": "48x48"}]
    odd = tool(title=None, annotations={"readOnlyHint": "yes", "title": 7, "other": 1}, icons=icons, _meta=[])
    assert found(odd)["a"].listed == tool(annotations={"other": 1})
    good = [{"src": "x", "sizes": ["48x48"], "theme": "dark"}]
    assert found(tool(icons=good, _meta={"a": 1}))["a"].listed == tool(icons=good, _meta={"a": 1})


CLIENTS = [SimpleNamespace(is_modern=is_modern) for is_modern in (True, False)]


def verify_readable(tools: Sequence[McpTool]) -> None:
    """By the official client's types, and by what others ask of schemas beyond them."""
    for client in CLIENTS:
        described = [_described(known.tool_name, known, client) for known in tools]  # type: ignore[arg-type]
        ListToolsResult.model_validate({"tools": described, "resultType": "complete"}, strict=True)
        for one in described:
            schemas = [one["inputSchema"], *([one["outputSchema"]] if "outputSchema" in one else [])]
            assert None not in one.values()
            assert one["inputSchema"]["type"] == "object"
            for schema in schemas if not client.is_modern else ():
                assert schema["type"] == "object"
                assert all(isinstance(member, dict) for member in schema.get("properties", {}).values())


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(near_limits(), max_size=3))
def test_whatever_a_server_lists_a_client_can_read_what_is_listed_on(listed: list[dict[str, Any]]) -> None:
    verify_readable(discover("it", server(), Listing([*listed, tool("good")])).tools)


@pytest.mark.parametrize(
    "odd",
    [
        tool(schema={}),
        tool(schema={"type": ["object", "null"], "properties": {"a": True, "b": False, "c": {"type": "string"}}}),
        tool(outputSchema={"type": "array"}),
        tool(outputSchema={"type": "object", "properties": {"a": True}}),
        tool(outputSchema={"type": "object", "properties": 7}),
        tool(annotations={"title": 7, "readOnlyHint": None, "destructiveHint": "no"}, title=None, description=None),
        tool(icons=[{}], _meta=7),
        tool(icons=[{"src": "x", "theme": "pink"}]),
    ],
)
def test_what_other_clients_would_refuse_the_whole_list_for_is_listed_as_they_read_it(odd: dict[str, Any]) -> None:
    known = discover("it", server(), Listing([odd])).tools
    assert len(known) == 1
    verify_readable(known)


# What is left out, and only that.


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (tool(""), "name"),
        (tool("a b"), "name"),
        (tool("x" * 129), "name"),
        (tool(".."), "name"),
        (tool("é"), "name"),
        (tool(7), "name"),
        ({"inputSchema": OBJECT}, "name"),
        ({"name": "a"}, "inputSchema"),
        (tool(schema=[]), "inputSchema"),
        (tool(schema={"type": "nonsense"}), "is not JSON Schema"),
        (tool(schema={"$ref": "https://example.org/schema"}), "local reference"),
        (tool(schema={"$ref": "#/nowhere"}), "a reference to a part of this schema"),
        (tool(schema={"$ref": "#"}), "too long"),
        (tool(schema={"$schema": "http://json-schema.org/draft-03/schema#"}), "2020-12, 2019-09 or draft-07"),
        (tool(schema={"type": "object", "description": "x" * 70_000}), "cannot be recorded"),
        (tool(description="x" * 17_000), "at most 16384 characters"),
        (tool(description=7), "its description is not what MCP says"),
        (tool(title={}), "its title is not what MCP says"),
        (tool(annotations=[]), "its annotations is not what MCP says"),
        (tool(outputSchema=True), "its outputSchema is not what MCP says"),
        (tool(schema={"type": "object", "maximum": float("nan")}), "cannot be recorded"),
        (tool(schema={"type": "object", "properties": {"a": {"type": "number", "x-mcp-header": "A"}}}), "x-mcp-header"),
    ],
)
def test_a_tool_that_does_not_hold_is_left_out_alone_and_said_so(bad: dict[str, Any], why: str) -> None:
    assert set(found(bad, tool("good"))) == {"good"}
    assert why in problems(bad, tool("good"))


def test_a_schema_that_doubles_at_every_step_is_given_up() -> None:
    defs = {f"d{n}": {"allOf": [{"$ref": f"#/$defs/d{n + 1}"}] * 2} for n in range(40)}
    schema = {"type": "object", "$defs": {**defs, "d40": {}}, "$ref": "#/$defs/d0"}
    began = time.thread_time()
    assert "takes too long" in problems(tool(schema=schema))
    assert time.thread_time() - began < 5


DIALECT = "https://json-schema.org/draft/2020-12/schema"
EVIL = {"pattern": "^(a+)+$"}


@pytest.mark.parametrize(
    ("schema", "arguments"),
    [
        ({"properties": {"a": EVIL}}, {"a": "a" * 40 + "!"}),
        ({"properties": {"a": {"$schema": DIALECT, **EVIL}}}, {"a": "a" * 40 + "!"}),
        ({"$schema": DIALECT, "properties": {"a": {"$ref": "#"}}, "patternProperties": {"^(a+)+$": False}}, {"a": {}}),
        ({"$defs": {"a": {"$schema": DIALECT, **EVIL}}, "properties": {"a": {"$ref": "#/$defs/a"}}}, {"a": "aaa!"}),
        ({"properties": {"a": {"$schema": DIALECT, "patternProperties": {"^(a+)+$": False}}}}, {"a": {"a" * 40: 1}}),
        ({"properties": {"a": {"$schema": "http://json-schema.org/draft-07/schema#", **EVIL}}}, {"a": "a" * 40 + "!"}),
    ],
)
def test_no_expression_of_a_server_is_run_whatever_a_part_of_its_schema_calls_itself(
    schema: dict[str, Any], arguments: dict[str, Any]
) -> None:
    """jsonschema goes over to its own validator where a part has a $schema; it would not come back from these."""
    known = found(tool(schema={"type": "object", **schema}))["a"]
    assert first_misfit(bounded_validator_of(known.input_schema), arguments) is None


TIMES = range(700)
COSTLY: dict[str, dict[str, Any]] = {
    "types of many kinds": {"type": [one for n in range(4_000) for one in (n, f"a{n}")]},
    "references to anchors": {
        "$defs": {f"a{n}": {"$anchor": f"a{n}"} for n in TIMES},
        "allOf": [{"$ref": f"#a{n}"} for n in TIMES],
    },
    "dynamic references": {
        "$defs": {f"a{n}": {"$dynamicAnchor": f"a{n}"} for n in TIMES},
        "allOf": [{"$dynamicRef": f"#a{n}"} for n in TIMES],
    },
    "alternatives": {"anyOf": [{"x": {}}] * 5_900},
    "passes over a list": {"properties": {"a": {"allOf": [{"items": {}}] * 400}}},
    "passes over a list for something": {"properties": {"a": {"allOf": [{"not": {"contains": {"const": 1}}}] * 300}}},
    "passes over items to tell them apart": {"properties": {"a": {"allOf": [{"uniqueItems": True}] * 300}}},
    "errors that nobody reads": {
        "$defs": {
            "one": {"anyOf": [{"type": "string"}] * 20},
            "two": {"anyOf": [{"$ref": "#/$defs/one"}] * 20},
            "three": {"anyOf": [{"$ref": "#/$defs/two"}] * 20},
        },
        "properties": {"a": {"$ref": "#/$defs/three"}},
    },
    "more of those": {"properties": {"a": {"items": {"anyOf": [{"enum": [n]} for n in range(400)]}}}},
}
STEPS_S_MAX = 7  # of CPU time for each; it takes less than one, and ten to seventy without the bounds
LARGE: list[dict[str, Any]] = [{}, {"a": [0] * 60_000}, {"a": [[n] for n in range(20_000)]}, {"a": [[[0] * 60_000]]}]


@pytest.mark.parametrize("what", COSTLY)
def test_a_schema_takes_bounded_work_to_check_and_to_check_against(what: str) -> None:
    began = time.process_time()
    known = list(found(tool(schema=COSTLY[what])).values())
    assert time.process_time() - began < STEPS_S_MAX
    for arguments in LARGE if known else ():
        began = time.process_time()
        with contextlib.suppress(TooManySteps):
            first_misfit(bounded_validator_of(known[0].input_schema), arguments)
        assert time.process_time() - began < STEPS_S_MAX


def test_a_large_schema_of_the_usual_kind_is_taken_with_large_arguments() -> None:
    one = {"type": "object", "properties": {"x": {"type": "string"}, "y": {"$ref": "#/$defs/y"}}, "required": ["x"]}
    more = {f"field_{n}": {"type": "string", "description": "d" * 50} for n in range(500)}
    schema = {"type": "object", "$defs": {"y": {"type": "number"}}, "properties": {"all": {"items": one}, **more}}
    known = found(tool(schema=schema))["a"]
    validator = bounded_validator_of(known.input_schema)
    arguments: dict[str, Any] = {"all": [{"x": "a", "y": 1.5}] * 2_000}
    assert first_misfit(validator, arguments) is None
    arguments["all"].append({"x": 7})
    assert first_misfit(validator, arguments) is not None


def test_a_deep_schema_is_left_out() -> None:
    schema: dict[str, Any] = {"type": "object"}
    for _ in range(200):
        schema = {"type": "object", "properties": {"a": schema}}
    assert found(tool(schema=schema)) == {}


def test_a_name_that_is_listed_twice_counts_once() -> None:
    assert found(tool(description="1"), tool(description="2"))["a"].description == "1"
    assert "listed twice" in problems(tool(), tool())


def test_the_problems_that_are_kept_are_bounded() -> None:
    said = discover("it", server(), Listing([tool("a b")] * 1000)).problems
    assert len(said) == MCP_PROBLEMS_MAX
    assert "969 more" in said[-1]


# Arguments against a schema that the server wrote.


def verify(schema: dict[str, Any], arguments: dict[str, Any]) -> None:
    known = found(tool(schema=schema))["a"]
    registry = Registry({}, [known], {}, pool=None)  # type: ignore[arg-type]
    registry.verify_arguments(known, arguments)


@pytest.mark.parametrize(
    "dialect",
    [
        {},
        {"$schema": "https://json-schema.org/draft/2020-12/schema"},
        {"$schema": "https://json-schema.org/draft/2019-09/schema"},
        {"$schema": "http://json-schema.org/draft-07/schema#"},
    ],
)
def test_arguments_are_checked_in_every_common_dialect(dialect: dict[str, Any]) -> None:
    schema = {
        **dialect,
        "type": "object",
        "required": ["n"],
        "properties": {"n": {"type": "integer"}, "pattern": {"type": "string"}},
        "additionalProperties": False,
    }
    verify(schema, {"n": 1, "pattern": "("})
    for wrong in ({}, {"n": "1"}, {"n": 1, "m": 1}, {"n": 1, "pattern": 1}):
        with pytest.raises(ArgumentsInvalid):
            verify(schema, wrong)


def test_an_expression_of_the_server_is_never_run() -> None:
    slow = "^(a+)+$"
    schema = {
        "type": "object",
        "properties": {"s": {"type": "string", "pattern": slow}},
        "patternProperties": {slow: {"type": "integer"}},
        "additionalProperties": False,
        "unevaluatedProperties": False,
    }
    began = time.thread_time()
    verify(schema, {"s": "a" * 50_000 + "!", "a" * 50_000 + "!": 1})
    assert time.thread_time() - began < 1


MANY = {"l": [[n] for n in range(9000)]}


def test_arguments_that_take_too_long_to_check_are_refused_in_time() -> None:
    began = time.thread_time()
    with pytest.raises(ArgumentsInvalid, match="too long"):
        verify({"type": "object", "properties": {"l": {"items": {"enum": [[n] for n in range(5000)]}}}}, MANY)
    assert time.thread_time() - began < 3


def test_many_items_are_compared_in_time() -> None:
    schema = {"type": "object", "properties": {"l": {"uniqueItems": True}}}
    began = time.thread_time()
    verify(schema, MANY)
    assert time.thread_time() - began < 3
    with pytest.raises(ArgumentsInvalid):
        verify(schema, {"l": [1, {"a": [2]}, {"a": [2]}]})


# Through a running server.


async def test_all_pages_are_read(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        await world.call({"list": [tool(f"t{n}") for n in range(7)]}, "echo")
        await until(lambda: len(world.registry.tools()) == 8)


class Lists:
    """A link to a server that lists so many tools on so many pages, of so many bytes."""

    def __init__(self, tools_per_page: int, pages: int, *, page_bytes: int = 0) -> None:
        self.tools_per_page, self.pages, self.asked = tools_per_page, pages, 0
        self.page = bytes(page_bytes)

    async def request(self, outgoing: Outgoing, *, timeout_s: float | None) -> Reply:
        self.asked += 1
        listed = [tool(f"t{self.asked}-{n}") for n in range(self.tools_per_page)]
        more = {"nextCursor": "more"} if self.asked < self.pages else {}
        return Reply(Message({"id": outgoing.request_id, "result": {"tools": listed, **more}}, self.page))


@pytest.mark.parametrize(
    ("tools_per_page", "pages", "kept"), [(600, 1, 512), (100, 1000, 512), (1, 1000, 64), (1, 3, 3)]
)
async def test_a_list_without_an_end_is_read_to_its_bound(tools_per_page: int, pages: int, kept: int) -> None:
    link = Lists(tools_per_page, pages)
    listing = await Session(link, "2025-11-25", {}, None).list_tools()  # type: ignore[arg-type]
    assert len(listing.tools) == kept
    assert link.asked <= MCP_PAGES_MAX
    assert ("left out" in "".join(listing.problems)) == (kept < tools_per_page * pages)


@pytest.mark.parametrize("era", ["modern", "legacy"])
async def test_a_changed_tool_is_seen_and_given_to_who_pins(tmp_path: Path, era: str) -> None:
    seen: list[Sequence[Tool]] = []

    async def see(tools: Sequence[Tool]) -> Sequence[str]:
        seen.append(tools)
        return ()

    async with standing(tmp_path, scripted(tmp_path, era)) as world:
        world.registry.on_discovery = see
        before = world.registry.resolve("it", "does").definition_digest
        await world.call({"describe": "Other."}, "echo")
        await until(lambda: world.registry.resolve("it", "does").description == "Other.")
        await until(lambda: seen)
        after = world.registry.resolve("it", "does")
        assert after.definition_digest != before
        assert seen[-1] == (after,)
        assert world.registry.definition(after)["description"] == "Other."


async def test_the_bytes_of_a_list_are_bounded_over_all_its_pages() -> None:
    link = Lists(1, 10, page_bytes=MCP_LISTING_BYTES_MAX // 2)
    listing = await Session(link, "2025-11-25", {}, None).list_tools()  # type: ignore[arg-type]
    assert (len(listing.tools), link.asked) == (2, 3)
    assert f"more than {MCP_LISTING_BYTES_MAX} bytes; the rest is left out" in listing.problems[0]


async def test_what_a_server_lists_that_is_no_tool_is_left_out_and_counted() -> None:
    class Strange(Lists):
        async def request(self, outgoing: Outgoing, *, timeout_s: float | None) -> Reply:
            return Reply(Message({"result": {"tools": [7, tool(), None, "x"]}}))

    listing = await Session(Strange(1, 1), "2025-11-25", {}, None).list_tools()  # type: ignore[arg-type]
    assert listing.tools == [tool()]
    assert listing.problems == ["3 of what it lists are no tools, and left out"]


@pytest.mark.parametrize("listed", [{"list_bytes": 5_000_000}, {"list": "none"}])
async def test_a_list_that_cannot_be_read_leaves_the_tools_as_they_were(tmp_path: Path, listed: Any) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        await world.call(listed, "echo")
        await until(lambda: world.connection().problems)
        assert "cannot be read, and they stay as they were" in world.connection().problems[0]
        assert structured(await world.call("echo")) == {"steps": ["echo"]}
        assert world.connection().connects == 1
        await world.call({"list": [tool("extra")]}, "echo")
        await until(lambda: len(world.registry.tools()) == 2)
        assert world.connection().problems == ()


async def test_what_is_wrong_with_a_servers_tools_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        for extra in ("one", "two"):
            await world.call({"list": [tool("deep", schema={"const": deep(55)}), tool(extra)]}, "echo")
            await until(lambda extra=extra: extra in [known.tool_name for known in world.registry.tools()])  # type: ignore[misc]
        told = [record.getMessage() for record in caplog.records if "deep" in record.getMessage()]
        assert len(told) == 1
        assert told[0].startswith("server it: tool 'deep' is left out: its description cannot be recorded: nested too")


async def test_a_store_that_is_away_does_not_cost_the_connection(tmp_path: Path) -> None:
    async def away(tools: Sequence[Tool]) -> Sequence[str]:
        raise StoreUnavailable("the store is away")

    async with standing(tmp_path, scripted(tmp_path)) as world:
        world.registry.on_discovery = away
        await world.call({"describe": "Other."}, "echo")
        await until(lambda: world.registry.resolve("it", "does").description == "Other.")
        assert structured(await world.call("echo")) == {"steps": ["echo"]}
        assert world.connection().connects == 1


async def test_a_tool_that_is_gone_is_not_found_any_more(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        await world.call({"list": [tool("extra")]}, "echo")
        await until(lambda: len(world.registry.tools()) == 2)
        await world.call({"list": []}, "echo")
        await until(lambda: len(world.registry.tools()) == 1)
        with pytest.raises(ToolNotFound):
            world.registry.resolve("it", "extra")


async def test_tools_stay_known_while_the_server_is_away(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        await world.call({"die": 1})
        assert world.registry.resolve("it", "does").tool_name == "does"
        assert structured(await world.call("echo")) == {"steps": ["echo"]}
