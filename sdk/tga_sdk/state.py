"""The state of a run: JSON that its program keeps, changed through proxies that record each change as a delta.

`ctx.state` behaves like the declared model or, without one, like a dict. Its lists, dicts and models are parts of the
state: `ctx.state.items.append(1)` is recorded as one change, however long the list is. What is put in is copied: an
object that a program keeps and changes later changes nothing in the state, so read it from there before changing it.
What `pop()`, `copy()` and `model_copy()` give is a value of its own. A part that was removed or replaced can still be
read; changing it is refused.

Each change is checked when it is made: ValueInvalid names the place, and nothing has changed. A field's own validators
are asked when the field is assigned; those of the whole model, and bounds of a list or dict, are asked after each
change inside, which costs what they look at, and they cannot change what they look at. What is required may be missing
until it is first set.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel

from tga_sdk.changes import Change, Document, Follower, Mark
from tga_sdk.shapes import defaults_of, shape_of
from tga_sdk.tracked import root_of
from tga_sdk.values import copied

CHANGES_MAX: Final = 256
"""A checkpoint carries so many; beyond, whole members are recorded instead."""


class State:
    """The state as one branch of the program sees it. Changes are pending until an operation takes them along."""

    __slots__ = ("_document", "_model", "view")

    def __init__(self, model: type[BaseModel] | None, document: dict[str, Any], *, is_copy: bool = False) -> None:
        """An empty one of a model begins with one pending change: the defaults, of whatever is not required. So the
        journal shows them, and a default that is made anew each time (an id, a time) is the same in every attempt."""
        self._model = model
        self._document = Document(document)
        shape = shape_of(dict[str, Any] if model is None else model)
        self.view: Any = root_of(self._document, shape)
        if model is not None and not document and not is_copy:
            defaults = defaults_of(shape)
            if defaults:
                self._document.change([{"op": "set", "at": "", "to": defaults}])

    @property
    def document(self) -> dict[str, Any]:
        """The state as plain JSON, as it is now. Not a copy: read it, and change it through `view`."""
        return self._document.root

    def pending(self) -> list[Change]:
        """The changes since the last `take`, in the worker protocol's form."""
        return self._document.pending

    def take(self) -> list[Change]:
        """The same, and they are not pending any more. More than 256 become whole members of the state."""
        return self._document.take(CHANGES_MAX)

    def drop(self, floor: Mark | None = None) -> None:
        """Undo what is pending, but nothing from before `floor`; costs what those changes cost, not what the state
        does."""
        self._document.drop(floor)

    def apply(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Make recorded changes; they are not pending, and what is pending comes after them.

        ValueInvalid, and nothing has changed, when one names what is not there.
        """
        self._document.apply(list(changes))

    def put_before_pending(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """The same: what is pending comes after."""
        self._document.apply(list(changes))

    def change(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Make changes that are written as recorded ones, and have them pending."""
        self._document.change(list(changes))

    def mark(self) -> Mark:
        """Where the log of changes stands now. Until it is released, all changes after it are kept, so that they can be
        undone, also those that were taken or applied. Marks nest."""
        return self._document.mark()

    def release(self, mark: Mark) -> None:
        """Nobody rolls back to this mark any more."""
        self._document.release(mark)

    def rollback(self, mark: Mark) -> None:
        """Undo all since the mark; what was pending then is pending again. The mark stays."""
        self._document.rollback(mark)

    def changes_since(self, mark: Mark) -> list[Change]:
        """All changes since the mark, in their order: pending, taken and applied."""
        return self._document.since(mark)

    def has_changed_since(self, mark: Mark) -> bool:
        return self._document.has_changed_since(mark)

    def follow(self, follower: Follower | None) -> None:
        """From here on this one is told of every change that is made or undone, whoever makes it; None: nobody is."""
        self._document.follower = follower

    def branch(self) -> State:
        """An independent copy: what is pending here is part of its document, and nothing is pending there."""
        return State(self._model, copied(self._document.root), is_copy=True)
