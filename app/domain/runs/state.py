"""A run's state, as JSON that its program keeps: changed by deltas, each recorded with the checkpoint it came with.

`/a/b` names a member, `/a/0` an item of a list that is there, `/a/-` the place after its last. `~1` stands for a slash
and `~0` for a tilde (RFC 6901). The whole state is an object.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, StringConstraints

from app.core.canonical import canonical_bytes
from app.core.errors import InputTooLarge, SchemaViolation
from app.core.limits import DEPTH_MAX, RUN_STATE_CHANGES_MAX, SHOWN_CHARS_MAX
from app.domain.ledger.documents import Part

_STATE_LEVEL = 1  # at which the state stands in a checkpoint of its run
Pointer = Annotated[str, StringConstraints(max_length=256, pattern=r"^(/[^/\x00-\x1f]*)*$")]


class SetAt(Part):
    """From here on this is the value at the pointer."""

    _depth: ClassVar[int] = 4  # at most: in the changes of a fork
    op: Literal["set"]
    at: Pointer
    to: Any


class RemoveAt(Part):
    op: Literal["remove"]
    at: Pointer


Change = SetAt | RemoveAt
StateChanges = Annotated[list[Annotated[Change, Field(discriminator="op")]], Field(max_length=RUN_STATE_CHANGES_MAX)]


def apply_changes(state: dict[str, Any], changes: Iterable[Change]) -> None:
    """Apply them in order, in place: all of them, or none and SchemaViolation naming the first that does not fit.

    Costs what the changes cost, whatever the size of the state.
    """
    undo: list[Callable[[], Any]] = []
    try:
        for change in changes:
            undo.append(_apply(state, change))
    except SchemaViolation:
        for step in reversed(undo):
            step()
        raise


def verify_levels(changes: Iterable[Change]) -> None:
    """SchemaViolation where a change leaves the state nested more deeply than a document can be that holds it: the
    checkpoint of the run. Each of many changes may be flat, and set something inside of what the last one has set."""
    for change in changes:
        levels = change.at.count("/") + _STATE_LEVEL
        try:
            canonical_bytes(change.to if isinstance(change, SetAt) else None, depth=min(levels, DEPTH_MAX))
        except InputTooLarge:
            raise SchemaViolation(
                "a change of a run's state nests it too deeply",
                expected=f"at most {DEPTH_MAX - _STATE_LEVEL} levels",
                found=change.at[:SHOWN_CHARS_MAX],
            ) from None


def _apply(state: dict[str, Any], change: Change) -> Callable[[], Any]:
    """Apply one change; what it returns takes it back."""
    steps = [step.replace("~1", "/").replace("~0", "~") for step in change.at.split("/")[1:]]
    if not steps:
        if isinstance(change, RemoveAt) or not isinstance(change.to, dict):
            raise SchemaViolation("a run's state is an object", expected="an object", found="something else")
        before = dict(state)
        _replace(state, copy.deepcopy(change.to))
        return lambda: _replace(state, before)
    holder: Any = state
    for step in steps[:-1]:
        holder = _inside(holder, step, change.at)
    if isinstance(holder, dict):
        return _put_member(holder, steps[-1], change)
    if isinstance(holder, list):
        return _put_item(holder, steps[-1], change)
    raise _nothing_there(change.at)


def _replace(state: dict[str, Any], by: dict[str, Any]) -> None:
    state.clear()
    state.update(by)


def _inside(holder: Any, step: str, at: str) -> Any:
    if isinstance(holder, dict) and step in holder:
        return holder[step]
    if isinstance(holder, list) and (index := _index(step)) is not None and index < len(holder):
        return holder[index]
    raise _nothing_there(at)


def _put_member(holder: dict[str, Any], name: str, change: Change) -> Callable[[], Any]:
    was_there, before = name in holder, holder.get(name)
    if isinstance(change, RemoveAt):
        if not was_there:
            raise _nothing_there(change.at)
        del holder[name]
    else:
        holder[name] = copy.deepcopy(change.to)  # the document stays what it is when the state goes on changing
    return (lambda: holder.__setitem__(name, before)) if was_there else (lambda: holder.__delitem__(name))


def _put_item(holder: list[Any], step: str, change: Change) -> Callable[[], Any]:
    index = len(holder) if step == "-" else _index(step)
    if index is None or index > len(holder) or (isinstance(change, RemoveAt) and index == len(holder)):
        raise _nothing_there(change.at)
    if isinstance(change, SetAt) and index == len(holder):
        holder.append(copy.deepcopy(change.to))
        return holder.pop
    before = holder[index]
    if isinstance(change, RemoveAt):
        del holder[index]
        return lambda: holder.insert(index, before)
    holder[index] = copy.deepcopy(change.to)
    return lambda: holder.__setitem__(index, before)


def _nothing_there(at: str) -> SchemaViolation:
    return SchemaViolation(
        "a change of a run's state names what is not there", expected="a member or an item that is there", found=at
    )


def _index(step: str) -> int | None:
    if not (step.isascii() and step.isdigit()) or (len(step) > 1 and step[0] == "0") or len(step) > 9:
        return None
    return int(step)
