"""The run's state as programs see it: each change is checked, recorded as the gateway wants it, and can be undone."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from app.domain.runs.state import StateChanges, apply_changes
from tga_sdk.state import State

many = settings(deadline=None, max_examples=120)
CHANGES: TypeAdapter[Any] = TypeAdapter(StateChanges)

KEYS = ("a", "b/c", "d~e", "", "-", "0", "ä", "line\nbreak", "x" * 300, "~1")


def applied(document: dict[str, Any], changes: list[dict[str, Any]]) -> dict[str, Any]:
    """What the gateway makes of a document and the changes of one checkpoint."""
    document = copy.deepcopy(document)
    apply_changes(document, CHANGES.validate_python(changes, strict=True))
    return document


def parts_in(items: Any) -> list[Any]:
    return [item for item in items if not isinstance(item, str | int | float | None)]


class Twins:
    """A state, and plain Python data to which the same is done."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.state = State(None, {})
        self.plain: dict[str, Any] = {}

    def value(self, depth: int = 0) -> Any:
        kind = self.rng.randrange(8 if depth < 3 else 5)
        if kind == 5:
            return [self.value(depth + 1) for _ in range(self.rng.randrange(4))]
        if kind >= 6:
            # What is put in has its keys in the order that the gateway writes them in.
            return {key: self.value(depth + 1) for key in sorted(self.rng.sample(KEYS, self.rng.randrange(4)))}
        return self.rng.choice([0, 1, -5, True, False, None, "t", "", 1.5, "é"])

    def part(self) -> tuple[Any, Any]:
        """The same list or dict in both."""
        view: Any = self.state.view
        plain: Any = self.plain
        while self.rng.random() < 0.7:
            inside = [
                key
                for key in (plain if isinstance(plain, dict) else range(len(plain)))
                if isinstance(plain[key], dict | list)
            ]
            if not inside:
                break
            key = self.rng.choice(inside)
            view, plain = view[key], plain[key]
        return view, plain

    def change(self) -> None:
        view, plain = self.part()
        change = self.of_list() if isinstance(plain, list) else self.of_dict()
        outcome = []
        for one in (view, plain):
            try:
                outcome.append(("returned", copy.deepcopy(change(one))))
            except (IndexError, KeyError, ValueError, TypeError) as error:
                outcome.append(("raised", type(error)))
        assert outcome[0] == outcome[1]

    def of_dict(self) -> Callable[[Any], Any]:
        key, value, more = self.rng.choice(KEYS), self.value(), {self.rng.choice(KEYS): self.value() for _ in range(3)}
        is_rare = self.rng.random() < 0.2
        return self.rng.choice(
            [
                lambda one: one.__setitem__(key, copy.deepcopy(value)),
                lambda one: one.__setitem__(key, copy.deepcopy(value)),
                lambda one: one.__delitem__(key),
                lambda one: one.pop(key),
                lambda one: one.pop(key, 5),
                lambda one: one.popitem(),
                lambda one: one.setdefault(key, copy.deepcopy(value)),
                lambda one: one.update(copy.deepcopy(more)),
                lambda one: one.update(a=1, b=2),
                lambda one: one.__ior__(copy.deepcopy(more)) and None,
                lambda one: one | {"a": 1},
                lambda one: one.clear() if is_rare else None,
                lambda one: list(one.items()),
                lambda one: [*one.keys(), *one.values(), len(one), key in one, one.get(key)],
            ]
        )

    def of_list(self) -> Callable[[Any], Any]:
        rng = self.rng
        at, to, step = rng.randrange(-5, 5), rng.randrange(-5, 6), rng.choice([None, 1, 2, -1])
        times = rng.choice([0, 1])
        value, values = self.value(), [self.value() for _ in range(rng.randrange(4))]
        many_values = [self.value(2) for _ in range(20)]
        return rng.choice(
            [
                lambda one: one.append(copy.deepcopy(value)),
                lambda one: one.append(copy.deepcopy(value)),
                lambda one: one.extend(copy.deepcopy(values)),
                lambda one: one.extend(copy.deepcopy(many_values)),
                lambda one: one.insert(at, copy.deepcopy(value)),
                lambda one: one.pop(),
                lambda one: one.pop(at),
                lambda one: one.remove(value),
                lambda one: one.reverse(),
                lambda one: one.sort(key=repr),
                lambda one: one.sort(key=lambda item: isinstance(item, str), reverse=True),
                lambda one: one.clear(),
                lambda one: one.__setitem__(at, copy.deepcopy(value)),
                lambda one: one.__setitem__(slice(at, to), copy.deepcopy(values)),
                lambda one: one.__setitem__(slice(at, to, step), copy.deepcopy(values)),
                lambda one: one.__delitem__(at),
                lambda one: one.__delitem__(slice(at, to, step)),
                lambda one: one.__iadd__(copy.deepcopy(values)) and None,
                lambda one: one.__imul__(times) and None,
                # Of lists inside, plain Python has the same ones twice then, and the state copies.
                lambda one: one.__imul__(2 if len(one) < 20 and not parts_in(one) else 1) and None,
                lambda one: one + values,
                lambda one: [one[at:to], value in one, one.count(value), len(one), list(reversed(one))],
                lambda one: one.index(value),
                lambda one: one[at],
            ]
        )


@many
@given(st.randoms(use_true_random=False), st.integers(1, 40), st.integers(1, 6))
def test_whatever_is_done_the_deltas_give_the_same_document_and_can_be_undone(
    rng: random.Random, changes: int, rounds: int
) -> None:
    twins = Twins(rng)
    recorded: dict[str, Any] = {}
    for _ in range(rounds):
        before = copy.deepcopy(twins.state.document)
        order = str(before)
        plain_before = copy.deepcopy(twins.plain)
        for _ in range(changes):
            twins.change()
            assert twins.state.view == twins.plain
        assert twins.state.document == twins.plain
        if rng.random() < 0.3:
            twins.state.drop()
            assert str(twins.state.document) == order
            twins.plain = plain_before
        else:
            recorded = applied(recorded, twins.state.take())
            assert twins.state.pending() == []
            assert recorded == twins.state.document == twins.plain
        assert type(twins.state.document) is dict


@many
@given(st.randoms(use_true_random=False), st.integers(1, 40))
def test_a_replay_applies_what_was_taken(rng: random.Random, changes: int) -> None:
    twins = Twins(rng)
    replayed = State(None, {})
    for _ in range(3):
        for _ in range(changes):
            twins.change()
        replayed.apply(twins.state.take())
        assert str(replayed.document) == str(twins.state.document)  # programs go through dicts in their order
        assert replayed.pending() == []
