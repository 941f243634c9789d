"""Programs as trees of operations, the model that says what becomes of them, and the program that performs them.

A tree is JSON, and the run's input: workers in any process perform the same. The model executes nothing.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from hypothesis import strategies as st

from tests.runs.programs import returning
from tests.runs.worker import Body, Context, OperationFailed

RETRIES = 2
PAID = ["amount", "charge_id"]
NAMES = ["plan", "pay", "tell"]
SLEEP_MS = 5
Tree = list[dict[str, Any]]


class Expected(NamedTuple):
    """`log`: what is appended to the state. `tools`, `children`: how many the run itself calls and starts."""

    results: list[Any]
    log: list[str]
    tools: int
    children: int


def expected(tree: Tree, *, is_tried_again: bool = False) -> Expected:
    """`is_tried_again`: the operation around fails once at least; of what is inside, the last one is then tried again
    if it failed, and does not fail for ever."""
    results: list[Any] = []
    log: list[str] = []
    tools = children = 0
    for place, node in enumerate(tree, 1):
        kind = node["kind"]
        inner = expected(node.get("inside", []), is_tried_again=node.get("fails", 0) > 0)
        result: Any = {"tool": PAID, "ask": True, "signal": "gone", "child": PAID, "once": "once"}.get(kind)
        parts = [expected(branch) for branch in node.get("branches", ())]
        if kind in ("step", "nest", "again", "fatal"):
            has_failed = node.get("fails", 0) > RETRIES and not (is_tried_again and place == len(tree))
            result = f"failed {node['name']}" if has_failed else [node["name"], inner.results]
            log += inner.log + ([node["name"]] if node.get("changes") and not has_failed else [])
        elif kind == "gather":
            result = [part.results for part in parts]
            log += [entry for part in parts for entry in part.log]
        tools += (kind == "tool") + inner.tools + sum(part.tools for part in parts)
        children += (kind == "child") + inner.children + sum(part.children for part in parts)
        results.append(result)
    return Expected(results, log, tools, children)


def random_tree(chance: random.Random, depth: int = 0) -> Tree:
    return [random_node(chance, depth) for _ in range(chance.randint(1, 3))]


def random_node(chance: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["step", "step", "tool", "tool", "ask", "sleep", "signal", "child", "once", "again"]
    if depth < 3:
        kinds += ["nest", "nest", "gather"]
    kind = chance.choice(kinds)
    node: dict[str, Any] = {"kind": kind, "name": chance.choice(NAMES)}
    if kind in ("nest", "again") and depth < 3:
        node["inside"] = random_tree(chance, depth + 1)
    if kind in ("step", "nest"):
        node["fails"] = chance.choice([0, 0, 0, 1, 3])
        node["changes"] = chance.random() < 0.5
    if kind == "gather":
        node["branches"] = [random_tree(chance, depth + 1) for _ in range(chance.randint(1, 3))]
    return node


_names = st.sampled_from(NAMES)
_fails = st.sampled_from([0, 1, 3])
_leaves = st.one_of(
    st.fixed_dictionaries({"kind": st.just("step"), "name": _names, "fails": _fails, "changes": st.booleans()}),
    st.fixed_dictionaries(
        {"kind": st.sampled_from(["tool", "tool", "ask", "sleep", "signal", "child", "once"]), "name": _names}
    ),
)
_nodes: st.SearchStrategy[dict[str, Any]] = st.recursive(
    _leaves,
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {
                "kind": st.just("nest"),
                "name": _names,
                "fails": _fails,
                "changes": st.booleans(),
                "inside": st.lists(inner, max_size=2),
            }
        ),
        st.fixed_dictionaries({"kind": st.just("again"), "name": _names, "inside": st.lists(inner, max_size=2)}),
        st.fixed_dictionaries(
            {
                "kind": st.just("gather"),
                "name": _names,
                "branches": st.lists(st.lists(inner, min_size=1, max_size=2), min_size=1, max_size=3),
            }
        ),
    ),
    max_leaves=6,
)
# `fatal`: its first try ends the run, and a retry of the run lets it go on; only the program itself has such.
_fatal = st.fixed_dictionaries({"kind": st.just("fatal"), "name": _names, "fails": st.just(1)})
trees: st.SearchStrategy[Tree] = st.lists(st.one_of(_nodes, _nodes, _nodes, _fatal), min_size=1, max_size=4)


async def tree_program(ctx: Context, tree: Tree) -> Any:
    async def begin(inside: Context) -> None:
        inside.change("/log", [])

    await ctx.step("begin", begin)
    return {"results": await perform_all(ctx, tree), "log": ctx.state["log"]}


async def perform_all(ctx: Context, tree: Tree) -> list[Any]:
    return [await perform(ctx, node) for node in tree]


async def perform(ctx: Context, node: dict[str, Any]) -> Any:
    kind, name = node["kind"], node["name"]
    if kind == "tool":
        return sorted(await ctx.tool("bank", "charge", {"amount": 1}))
    if kind == "ask":
        return await ctx.ask(name)
    if kind == "sleep":
        return await ctx.sleep(SLEEP_MS, name)
    if kind == "signal":
        return await ctx.signal(name)
    if kind == "child":
        return await ctx.child("paying", {"amount": 2})
    if kind == "gather":
        return await ctx.gather(*(branch_of(branch) for branch in node["branches"]), name=name)
    if kind == "fatal":
        return await ctx.step(name, body_of(node))
    try:
        if kind == "once":
            return await ctx.step(name, returning("once"), at_most_once=True)
        resume = "recompute" if kind == "again" else "snapshot"
        return await ctx.step(name, body_of(node), retries=RETRIES, resume=resume)
    except OperationFailed:
        return "once" if kind == "once" else f"failed {name}"  # whether it was done is not known: then as if it was


def branch_of(tree: Tree) -> Body:
    async def branch(ctx: Context) -> Any:
        return await perform_all(ctx, tree)

    return branch


def body_of(node: dict[str, Any]) -> Body:
    async def body(inside: Context) -> Any:
        inner = await perform_all(inside, node.get("inside", []))
        if inside.attempt.journal.try_of(inside.scope.address) <= node.get("fails", 0):
            raise ValueError(node["name"])
        if node.get("changes"):
            inside.change("/log/-", node["name"])
        return [node["name"], inner]

    return body
