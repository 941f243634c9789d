"""What a program wraps a value in to say how it is kept: as a blob, or sealed."""

from __future__ import annotations

import dataclasses
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Artifact(Generic[T]):
    """Store this value as a blob, whatever its size; the program gets the value itself, without this wrapper.

    The journal has the SHA-256 of the bytes, which are stored before the entry and verified when they are read.
    `value`: bytes, text, JSON, or a declared type. `media_type`: what to tell those who download it.
    """

    value: T
    media_type: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret(Generic[T]):
    """A result that nobody but workers of the run may read: the gateway seals it, the journal has a commitment.

    The program gets it back as a `Secret`; `.value` is what it holds. It is never shown by repr(), str() or format().
    Not protected: what the program itself does with `.value` (tool arguments that are not secret, logs, state).
    """

    value: T

    def __repr__(self) -> str:
        return "Secret(...)"
