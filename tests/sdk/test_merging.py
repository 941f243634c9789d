"""Branches of a gather that change the state: merged as each meant it, or refused with both names; never mixed up."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, TypeAdapter

from app.domain.runs.state import StateChanges, apply_changes
from tga_sdk import Context, StepError, procedure
from tga_sdk.merging import clash_of
from tga_sdk.state import State
from tga_sdk.testing import crash_everywhere_async

CHANGES: TypeAdapter[Any] = TypeAdapter(StateChanges)
many = settings(deadline=None, max_examples=300)


class Branch:
    """One branch: what it does to its copy of the state, and what it meant by that."""

    def __init__(self, rng: random.Random, number: int, state: State) -> None:
        self.rng = rng
        self.number = number
        self.state = state
        self.removed: set[int] = set()
        self.appended: list[int] = []
        self.valued: dict[int, int] = {}
        self.members: dict[str, Any] = {}
        self.is_sorted = False
        self.mark = state.mark()

    def act(self) -> None:
        items, named = self.state.view["items"], self.state.view["named"]
        kind = self.rng.choice(
            ["append", "append", "value", "remove", "pop", "member", "member", "delete", "sort", "nothing"]
        )
        if kind == "append":
            made = 1_000 * self.number + len(self.appended)
            items.append({"id": made, "value": 0})
            self.appended.append(made)
        elif kind == "value" and items:
            one = self.rng.choice(list(items))
            one["value"] = 10 * self.number + self.rng.randrange(10)
            self.valued[one["id"]] = one["value"]
        elif kind in ("remove", "pop") and items:
            gone = items[self.rng.randrange(len(items))] if kind == "remove" else items[-1]
            name = gone["id"]
            items.remove(gone)
            if name in self.appended:
                self.appended.remove(name)
            else:
                self.removed.add(name)
        elif kind == "member":
            name = self.rng.choice("abc")
            named[name] = self.members[name] = f"{self.number}"
        elif kind == "delete" and named:
            name = self.rng.choice(sorted(named))
            del named[name]
            self.members[name] = None
        elif kind == "sort":
            items.sort(key=lambda one: -one["id"])
            self.is_sorted = True


def base_of(rng: random.Random) -> dict[str, Any]:
    items = [{"id": number, "value": 0} for number in range(rng.randrange(4))]
    return {"items": items, "named": {name: "0" for name in "ab" if rng.random() < 0.7}}


def meant(base: dict[str, Any], branches: list[Branch]) -> tuple[set[int], list[int], dict[int, int], dict[str, Any]]:
    """What all branches together meant: which items are there, in which order the new ones, their values, members."""
    removed = set().union(*(branch.removed for branch in branches))
    kept = {one["id"] for one in base["items"]} - removed
    appended = [name for branch in branches for name in branch.appended]
    values = {name: value for branch in branches for name, value in branch.valued.items()}
    named = dict(base["named"])
    for branch in branches:
        named |= branch.members
    return kept | set(appended), appended, values, {name: value for name, value in named.items() if value is not None}


@many
@given(st.integers(0, 2**32))
def test_merges_never_mix_things_up(seed: int) -> None:
    rng = random.Random(seed)
    base = base_of(rng)
    state = State(None, copy.deepcopy(base))
    branches = [Branch(rng, number, state.branch()) for number in range(1, rng.choice([2, 2, 3]) + 1)]
    for branch in branches:
        for _ in range(rng.randrange(4)):
            branch.act()
    changed = [branch.state.changes_since(branch.mark) for branch in branches]
    clash = clash_of(state.document, changed)
    if clash is not None:
        first, second, at = clash
        assert 1 <= first < second <= len(branches)
        assert all(
            any(change["at"].startswith(at) or at.startswith(change["at"]) for change in changed[one - 1])
            for one in (first, second)
        )
        return
    for changes in changed:
        state.change(changes, may_be_gone=True)
    there, appended, values, named = meant(base, branches)
    found = state.document
    ids = [one["id"] for one in found["items"]]
    rearranged = any(branch.is_sorted for branch in branches)
    assert sorted(ids) == sorted(there)
    assert rearranged or [name for name in ids if name >= 1_000] == appended
    assert {one["id"]: one["value"] for one in found["items"]} == {name: values.get(name, 0) for name in ids}
    assert found["named"] == named
    replayed = copy.deepcopy(base)  # what the gateway makes of it, and whoever replays it
    apply_changes(replayed, CHANGES.validate_python(state.take(), strict=True))
    assert replayed == found


@many
@given(st.integers(0, 2**32))
def test_the_verdict_follows_from_what_is_recorded(seed: int) -> None:
    """A branch that changes much between two operations is recorded in fewer words. Who replays it has those alone, and
    judges as who was there: what a branch has changed is the same list of changes in both."""
    rng = random.Random(seed)
    state = State(None, copy.deepcopy(base_of(rng)))
    changes_max = rng.choice([1, 2, 3, 256])
    there: list[list[Any]] = []
    replayed: list[list[Any]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tga_sdk.state.CHANGES_MAX", changes_max)
        for number in (1, 2):
            branch = Branch(rng, number, state.branch())
            replay = state.branch()
            replay_mark = replay.mark()
            for _ in range(rng.randrange(4)):
                for _ in range(rng.randrange(6)):
                    branch.act()
                if rng.random() < 0.2:  # a try that fails, and is undone
                    mark = branch.state.mark()
                    branch.act()
                    branch.state.take()
                    branch.state.rollback(mark)
                    branch.state.release(mark)
                replay.recorded(branch.state.take())
            assert replay.document == branch.state.document
            there.append(branch.state.changes_since(branch.mark))
            replayed.append(replay.changes_since(replay_mark))
    assert there == replayed
    assert clash_of(state.document, there) == clash_of(state.document, replayed)


def test_branches_that_keep_to_their_own_are_merged_often() -> None:
    """The rule refuses no more than it must: what most programs do goes through."""
    base = {"items": [{"id": 0, "value": 0}], "named": {"a": "0"}}
    agreeing: list[tuple[Any, Any]] = [
        ([{"op": "set", "at": "/items/-", "to": 1}], [{"op": "set", "at": "/items/-", "to": 2}]),
        ([{"op": "set", "at": "/items/0/value", "to": 1}], [{"op": "set", "at": "/items/-", "to": 2}]),
        ([{"op": "remove", "at": "/items/0"}], [{"op": "set", "at": "/items/-", "to": 2}]),
        ([{"op": "remove", "at": "/named/a"}], [{"op": "remove", "at": "/named/a"}]),
        ([{"op": "set", "at": "/named/a", "to": 1}], [{"op": "set", "at": "/named/a", "to": 2}]),
        (
            [{"op": "set", "at": "/new", "to": []}, {"op": "set", "at": "/new/-", "to": 1}],
            [{"op": "set", "at": "/new", "to": [2]}],
        ),
    ]
    for mine, other in agreeing:
        assert clash_of(base, [mine, other]) is None, (mine, other)


@pytest.mark.parametrize(
    ("mine", "other", "at"),
    [
        ({"op": "remove", "at": "/items/0"}, {"op": "remove", "at": "/items/0"}, "/items"),
        ({"op": "remove", "at": "/items/0"}, {"op": "set", "at": "/items/0/value", "to": 1}, "/items"),
        ({"op": "set", "at": "/items", "to": []}, {"op": "set", "at": "/items/-", "to": 1}, "/items"),
        ({"op": "set", "at": "/items/0/value", "to": 1}, {"op": "set", "at": "/items/0", "to": 1}, "/items/0"),
        ({"op": "set", "at": "", "to": {}}, {"op": "set", "at": "/named/a", "to": 1}, "/"),
    ],
)
def test_what_would_hit_another_place_is_refused(mine: Any, other: Any, at: str) -> None:
    base = {"items": [{"id": 0, "value": 0}, {"id": 1, "value": 0}], "named": {"a": "0"}}
    assert clash_of(base, [[], [mine], [other]]) == (2, 3, at)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        # Its own item stands where one was that it has removed.
        (
            [{"op": "set", "at": "/items/-", "to": 1}],
            [
                {"op": "remove", "at": "/items/0"},
                {"op": "set", "at": "/items/-", "to": 2},
                {"op": "remove", "at": "/items/0"},
            ],
        ),
        # An item that it has set before it removes it.
        (
            [{"op": "set", "at": "/items/0/value", "to": 1}],
            [{"op": "set", "at": "/items/0", "to": 2}, {"op": "remove", "at": "/items/0"}],
        ),
        # Each has rearranged the list item by item, and one has appended to it before.
        (
            [{"op": "set", "at": "/items/0", "to": {"id": 0, "value": 0}}],
            [
                {"op": "set", "at": "/items/-", "to": 2},
                {"op": "set", "at": "/items/0", "to": 2},
                {"op": "set", "at": "/items/1", "to": {"id": 0, "value": 0}},
            ],
        ),
    ],
    ids=["own item in the place of a removed one", "set and removed", "rearranged beside an append"],
)
def test_items_that_have_moved_under_the_hand_are_refused_by_either_order(mine: Any, other: Any) -> None:
    base = {"items": [{"id": 0, "value": 0}]}
    assert clash_of(base, [mine, other]) == (1, 2, "/items")
    assert clash_of(base, [other, mine]) == (1, 2, "/items")


@procedure(name="merging")
async def merging(ctx: Context[Any], input: Any) -> list[Any]:
    ctx.state["items"] = ["a", "b", "c"]

    async def removes() -> None:
        ctx.state["items"].remove("a")
        await ctx.checkpoint()

    async def adds() -> None:
        ctx.state["items"].append("d")
        await ctx.checkpoint()

    said: list[Any] = []
    try:
        await ctx.gather(removes, removes, name="both")
    except StepError as error:
        said += [error.type, str(error)]
    said.append(list(ctx.state["items"]))
    await ctx.gather(removes, adds)
    return [*said, list(ctx.state["items"])]


async def test_the_program_is_told_which_branches_do_not_agree() -> None:
    tried = await crash_everywhere_async(merging)
    type_, told, before, after = tried.calm.output["value"]
    assert type_ == "RUN_MERGE_CONFLICT"
    assert "branches 1 and 2 of both have changed /items" in told
    assert (before, after) == (["a", "b", "c"], ["b", "c", "d"])
    assert tried.calm.document == {"items": ["b", "c", "d"]}


class Much(BaseModel):
    items: list[int] = []
    mine: list[int] = []


@procedure(name="merging-much", state=Much)
async def merging_much(ctx: Context[Much], input: Any) -> list[Any]:
    """Both branches append more than one checkpoint can say change by change; in one gather to lists of their own."""

    def filling(name: str) -> Any:
        async def fill() -> None:
            found = getattr(ctx.state, name)
            for number in range(300):
                found.append(number)

        async def branch() -> None:
            await ctx.step("fill", fill)
            await ctx.checkpoint()

        return branch

    said = "merged"
    try:
        await ctx.gather(filling("items"), filling("items"), name="both")
    except StepError as error:
        said = error.type
    await ctx.gather(filling("items"), filling("mine"))
    return [said, len(ctx.state.items), len(ctx.state.mine)]


async def test_a_replay_judges_a_merge_of_very_many_changes_as_it_was_judged_live() -> None:
    """Wherever the worker is lost: before the gather has ended, the next attempt knows of the branches only what is
    recorded, which is the list as a whole."""
    tried = await crash_everywhere_async(merging_much)
    assert tried.calm.output["value"] == ["RUN_MERGE_CONFLICT", 300, 300]
