"""How far a run has come: the next position of each open scope, and what has begun. Never the whole journal.

A gateway judges a put by the frontier alone, so a put costs the same at any position; a worker replays against the
journal. What the frontier admits:

1. `begin` admits an operation at exactly the next position of its scope. Scopes open on the way: an operation inside
   operation 3 is admitted while 3 itself has not ended.
2. `end` admits the same place, ends what has begun there, and moves the scope on. What was open inside is closed.
3. An operation that failed keeps the scopes inside it until the next operation of its own scope comes: a retry goes
   on from there. `reopen` is that retry: of each scope inside, the last operation, if it failed, is next again.
4. Everything else is refused: a smaller position is taken, a greater one leaves a gap.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from app.core.errors import RunPositionGap, RunPositionTaken
from app.domain.runs.paths import ROOT, is_scope_inside, operation_of, path_at, place_of


class Begun(NamedTuple):
    """An operation that has begun and not ended: what its end must agree with, when it is due by itself, how often it
    may be tried again, which entry holds its intent, and since when. Of a question: how often it was escalated
    (`level`), when it is, and whether it has a default, which answers it when its time is over."""

    intent_digest: str
    kind: str
    name: str
    input_digest: str
    due_at: str | None = None
    retries: int = 0
    sequence_number: int = 0
    begun_at: str = ""
    level: int = 0
    escalates_at: tuple[str, ...] = ()
    has_default: bool = False

    def to_json(self) -> list[Any]:
        return [*self[:9], list(self.escalates_at), *([True] if self.has_default else [])]

    @classmethod
    def from_json(cls, stated: list[Any]) -> Self:
        return cls._make([*stated[:9], tuple(stated[9]), len(stated) > 10])

    @property
    def next_at(self) -> str | None:
        """When something is to be done about it by itself: it is over, or others are told."""
        times = [*self.escalates_at[self.level :][:1], *([] if self.due_at is None else [self.due_at])]
        return min(times, default=None)


class ScopePosition(NamedTuple):
    """`next`: the position of the operation that comes next. `failed`: the one before it ended with an error.
    `ended`: the operation around has ended itself; its scopes are only kept for a retry."""

    next: int = 1
    failed: bool = False
    ended: bool = False


@dataclass(slots=True)
class Frontier:
    """Changed in place by a fold; every method leaves it as it was when it raises."""

    scopes: dict[str, ScopePosition] = field(default_factory=lambda: {ROOT: ScopePosition()})
    begun: dict[str, Begun] = field(default_factory=dict)
    tries: dict[str, int] = field(default_factory=dict)  # of operations that are tried again, from 2

    @property
    def positions(self) -> int:
        """How many operations the program itself has performed."""
        return self.scopes[ROOT].next - 1

    def performed_inside(self, path: str) -> int:
        """How many operations stand directly inside this one, in all its branches together."""
        return sum(at.next - 1 for scope, at in self.scopes.items() if scope and operation_of(scope) == path)

    def try_of(self, path: str) -> int:
        return self.tries.get(path, 1)

    def verify_next(self, path: str) -> None:
        """Raise unless an operation may begin or end at this address: RunPositionTaken or RunPositionGap."""
        scope, position = place_of(path)
        at = self.scopes.get(scope)
        if at is None or at.ended:
            # A scope opens with its first operation, and only inside an operation that is itself next.
            if scope:
                self.verify_next(operation_of(scope))
            at = ScopePosition()
        if position < at.next:
            raise RunPositionTaken(f"operation {path} has ended already", expected=path_at(scope, at.next), found=path)
        if position > at.next:
            raise RunPositionGap(
                f"operation {path} comes before its turn", expected=path_at(scope, at.next), found=path
            )

    def may_come_again(self, path: str) -> bool:
        """Whether an operation at this address can still begin: it has not ended, or a retry can reopen it."""
        scope, position = place_of(path)
        at = self.scopes.get(scope)
        return at is not None and (position >= at.next or (at.failed and position == at.next - 1))

    def has_never_begun(self, path: str) -> bool:
        """Whether it is certain that no operation at this address has begun yet. Of an address inside an operation that
        is tried again it may not be: what had begun there is forgotten."""
        scope, position = place_of(path)
        at = self.scopes.get(scope)
        if at is None or at.ended or path in self.begun:
            return False
        return position > at.next or (scope == ROOT and position == at.next and self.try_of(path) == 1)

    def begin(self, path: str, begun: Begun) -> None:
        """An intent at this address. A second one there is RunPositionTaken."""
        self.verify_next(path)
        if path in self.begun:
            raise RunPositionTaken(f"operation {path} has begun already", expected="its end", found="another intent")
        self._open(path)
        self.begun[path] = begun

    def end(self, path: str, *, failed: bool = False) -> None:
        """The operation at this address has ended, and whatever is inside with it."""
        self.verify_next(path)
        scope, position = place_of(path)
        self._open(path)
        for inside in [inner for inner in self.scopes if inner and is_scope_inside(inner, path)]:
            if failed:
                self.scopes[inside] = self.scopes[inside]._replace(ended=True)
            else:
                del self.scopes[inside]
        self._forget(path, keep_tries=failed)
        self.scopes[scope] = ScopePosition(position + 1, failed)

    def retry(self, path: str) -> None:
        """A try of the operation at this address has failed, and another comes; so it has not ended."""
        self.verify_next(path)
        self._open(path)
        tries = self.try_of(path)
        self._forget(path, keep_tries=True)
        self._reopen_inside(path)
        self.tries[path] = tries + 1

    def reopen(self, path: str) -> None:
        """An operation that ended with an error is next again, and of what is inside it what failed last.

        RunPositionTaken when it is not the last of its scope, or did not fail.
        """
        scope, position = place_of(path)
        at = self.scopes.get(scope)
        if at is None or at.next != position + 1 or not at.failed:
            raise RunPositionTaken(
                f"operation {path} cannot be reopened",
                expected="the last operation of its scope, ended with an error",
                found=path,
            )
        self.scopes[scope] = ScopePosition(position)
        self._reopen_inside(path)
        self.tries[path] = self.try_of(path) + 1

    def resolve(self, path: str, *, failed: bool) -> None:
        """A person's word on how the operation at this address ended, which was interrupted and is the last of its
        scope; RunPositionTaken when it is not."""
        scope, position = place_of(path)
        at = self.scopes.get(scope)
        if at is None or at.next != position + 1 or not at.failed:
            raise RunPositionTaken(
                f"operation {path} cannot be resolved",
                expected="the last operation of its scope, interrupted",
                found=path,
            )
        self.scopes[scope] = at._replace(failed=failed)

    def failed_last(self) -> list[str]:
        """The operations of the program's own scope whose error came last: what a retry of the run reopens."""
        at = self.scopes[ROOT]
        return [path_at(ROOT, at.next - 1)] if at.failed else []

    def _open(self, path: str) -> None:
        """Open the scope of this address and those around it; what a failed operation before it kept is dropped."""
        scope, position = place_of(path)
        if scope:
            self._open(operation_of(scope))
        at = self.scopes.get(scope)
        if at is None or at.ended:
            self.scopes[scope] = ScopePosition()
        elif at.failed:
            before = path_at(scope, position - 1)
            for inside in [inner for inner in self.scopes if inner and is_scope_inside(inner, before)]:
                del self.scopes[inside]
            for kept in [tried for tried in self.tries if tried == before or is_scope_inside(tried, before)]:
                del self.tries[kept]
            self.scopes[scope] = ScopePosition(at.next)

    def _forget(self, path: str, *, keep_tries: bool) -> None:
        for begun in [inner for inner in self.begun if is_scope_inside(inner, path)]:
            del self.begun[begun]
        if not keep_tries:
            for tried in [inner for inner in self.tries if is_scope_inside(inner, path)]:
                del self.tries[tried]

    def _reopen_inside(self, path: str) -> None:
        for scope in sorted(inner for inner in self.scopes if inner and is_scope_inside(inner, path)):
            at = self.scopes[scope]
            if at.failed:
                failed = path_at(scope, at.next - 1)
                self.scopes[scope] = ScopePosition(at.next - 1)
                self.tries[failed] = self.try_of(failed) + 1
            else:
                self.scopes[scope] = at._replace(ended=False)

    def to_json(self) -> dict[str, Any]:
        """As an execution checkpoint and a resumption state it."""
        return {
            "begun": {path: begun.to_json() for path, begun in self.begun.items()},
            "scopes": {scope: [at.next, at.failed, at.ended] for scope, at in self.scopes.items()},
            "tries": dict(self.tries),
        }

    @classmethod
    def from_json(cls, stated: dict[str, Any]) -> Self:
        return cls(
            {scope: ScopePosition(*at) for scope, at in stated["scopes"].items()},
            {path: Begun.from_json(begun) for path, begun in stated["begun"].items()},
            dict(stated["tries"]),
        )

    def copy(self) -> Frontier:
        return Frontier(dict(self.scopes), dict(self.begun), dict(self.tries))
