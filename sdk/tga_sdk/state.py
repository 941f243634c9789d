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

A procedure that is called inline and declares a state has one of its own. While it runs, that stands in the run's state
as the member `@call:{path}`, beside what the caller keeps, so readers of the run see both; it goes when the call has
ended. Each of the two applies of recorded changes what is its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from pydantic import BaseModel

from tga_sdk.changes import POINTER_CHARS_MAX, Change, Document, Follower, Mark
from tga_sdk.errors import ValueInvalid
from tga_sdk.plain import copied
from tga_sdk.shapes import defaults_of, shape_of
from tga_sdk.tracked import root_of

CHANGES_MAX: Final = 256
"""A checkpoint carries so many; beyond, whole members are recorded instead."""
CALLED: Final = "/@call:"
"""How the pointers begin at which the states of inline calls stand."""


class State:
    """The state as one branch of the program sees it. Changes are pending until an operation takes them along."""

    __slots__ = ("_around", "_at", "_document", "_is_told", "_left", "_left_at", "_model", "view")

    def __init__(
        self,
        model: type[BaseModel] | None,
        document: dict[str, Any],
        *,
        is_copy: bool = False,
        at: str = "",
        around: State | None = None,
    ) -> None:
        """An empty one of a model begins with one pending change: the defaults, of whatever is not required. So the
        journal shows them, and a default that is made anew each time (an id, a time) is the same in every attempt.

        `at`: of an inline call, the pointer at which it stands; `around`: its caller's."""
        self._model = model
        self._at = at
        self._around = around
        self._is_told = False  # of an inline call: the journal has something of it
        # Pointers of calls that are over and whose state still stands in the journal's, as calls that failed leave it.
        self._left: dict[str, None] = {}
        self._left_at: dict[Mark, dict[str, None]] = {}
        self._document = Document(document)
        shape = shape_of(dict[str, Any] if model is None else model)
        self.view: Any = root_of(self._document, shape)
        if model is not None and not document and not is_copy:
            defaults = defaults_of(shape)
            if defaults or at:  # what is set later must stand somewhere
                self._document.change([{"op": "set", "at": "", "to": defaults}])

    @property
    def document(self) -> dict[str, Any]:
        """The state as plain JSON, as it is now. Not a copy: read it, and change it through `view`."""
        return self._document.root

    def pending(self) -> list[Change]:
        """The changes since the last `take`, in the worker protocol's form."""
        return self._document.pending

    def take(self) -> list[Change]:
        """The same, and they are not pending any more. More than 256 become whole members of the state. Of an inline
        call: what its caller has pending is taken with it, and pointers are those of the run's state."""
        return self._taken(CHANGES_MAX)

    def _taken(self, changes_max: int) -> list[Change]:
        changes = [] if self._around is None else self._around._taken(changes_max - 1)
        is_whole = any(not change["at"] for change in changes)  # what stood inside is not there any more
        changes += [{"op": "remove", "at": at} for at in self._left]
        self._left = {}
        room = max(1, changes_max - len(changes))
        if not self._at:
            own = self._document.take(room)
            for change in own:
                self._refuse_reserved(change)
            return changes + own
        pending = self._document.pending
        fits = all(len(self._at) + len(change["at"]) <= POINTER_CHARS_MAX for change in pending)
        own = self._document.take(room if fits else 0)
        if is_whole and self._is_told:
            own = [{"op": "set", "at": "", "to": copied(self._document.root)}]
        self._is_told |= bool(own)
        return changes + [{**change, "at": self._at + change["at"]} for change in own]

    @staticmethod
    def _refuse_reserved(change: Change) -> None:
        at, to = change["at"], change.get("to")
        if at.startswith(CALLED) or (not at and any(f"/{name}".startswith(CALLED) for name in to or ())):
            raise ValueInvalid("a member of the state begins with @call:, which is for inline calls", where="state")

    def drop(self, floor: Mark | None = None) -> None:
        """Undo what is pending, but nothing from before `floor`; costs what those changes cost, not what the state
        does."""
        self._document.drop(floor)

    def apply(self, changes: Iterable[Mapping[str, Any]]) -> None:
        """Make recorded changes; they are not pending, and what is pending comes after them. Those that are of another
        procedure's state are left to that one.

        ValueInvalid, and nothing has changed, when one names what is not there.
        """
        self._apply(list(changes), ())

    def _apply(self, changes: Sequence[Mapping[str, Any]], running: tuple[str, ...]) -> None:
        """`running`: the pointers of calls that this one waits for."""
        self._document.apply(self._own(changes, running))

    def recorded(self, changes: Sequence[Mapping[str, Any]], running: tuple[str, ...] = ()) -> None:
        """An operation's changes are in the journal: they take the place of what is pending, here and of callers."""
        if self._around is not None:
            self._around.recorded(changes, (self._at, *running))
        self._document.drop(None)
        self._apply(changes, running)

    def put_before_pending(self, changes: Sequence[Mapping[str, Any]], running: tuple[str, ...] = ()) -> None:
        """Make these changes, of the run's state, here and of callers: what is pending comes after."""
        if self._around is not None:
            self._around.put_before_pending(changes, (self._at, *running))
        self._apply(changes, running)

    def _own(self, changes: Sequence[Mapping[str, Any]], running: tuple[str, ...]) -> list[Mapping[str, Any]]:
        """Those of this state, as seen from its root; what becomes of calls' states is noted."""
        own: list[Mapping[str, Any]] = []
        for change in changes:
            at = change["at"]
            if self._at and (at == self._at or at.startswith(f"{self._at}/")):
                own.append({**change, "at": at[len(self._at) :]})
                self._is_told = True
            elif at.startswith(CALLED) and "/" not in at[1:]:
                if change["op"] == "remove":
                    self._left.pop(at, None)
                elif not running and not self._is_inside(at):  # else it is one of those, or left to them
                    self._left[at] = None
            elif not self._at and not at.startswith(CALLED):
                own.append(change)
        return own

    def _is_inside(self, at: str) -> bool:
        """Whether the state at this pointer is that of a call around this one."""
        return self._around is not None and (self._around._at == at or self._around._is_inside(at))

    def called(self, model: type[BaseModel], path: str) -> State:
        """The state of a procedure that is called inline, at this address."""
        return State(model, {}, at=f"{CALLED}{path}", around=self)

    def leave(self, called: State) -> None:
        """A procedure that was called inline is over, and so is its state."""
        if called._is_told:
            self._left[called._at] = None
        self._left |= called._left

    def change(self, changes: Iterable[Mapping[str, Any]], *, may_be_gone: bool = False) -> None:
        """Make changes that are written as recorded ones, and have them pending. `may_be_gone`: what is to be removed
        may be gone already."""
        self._document.change(list(changes), may_be_gone=may_be_gone)

    def mark(self) -> Mark:
        """Where the log of changes stands now. Until it is released, all changes after it are kept, so that they can be
        undone, also those that were taken or applied. Marks nest."""
        mark = self._document.mark()
        self._left_at[mark] = dict(self._left)
        return mark

    def release(self, mark: Mark) -> None:
        """This mark is not rolled back to any more."""
        self._document.release(mark)
        self._left_at.pop(mark, None)

    def rollback(self, mark: Mark) -> None:
        """Undo all since the mark; what was pending then is pending again. The mark stays."""
        self._document.rollback(mark)
        self._left = dict(self._left_at[mark])

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
        return State(self._model, copied(self._document.root), is_copy=True, at=self._at)
