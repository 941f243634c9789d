"""Verify what is sealed beside a trace. It stands outside the ledger, but without it secret arguments cannot be sent,
and a repeat of the call cannot be told from another call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from app.core.errors import RecoveryFailed, SecretMissing, TgaError
from app.domain.ledger.stored import StoredSeal
from app.domain.tga.secrets import find_redactions, reveal, salt_from, seal_context, values_from
from app.domain.tga.transitions import TRACE

_REMEDY = (
    "Somebody changed the table of sealed secrets: restore the row from a backup, and find out who has the rights."
)


class SecretArguments(Protocol):
    """A trace, and the arguments as they stand on its record."""

    @property
    def trace_id(self) -> str: ...

    @property
    def arguments(self) -> dict[str, Any]: ...


class Unseals(Protocol):
    """Opens what was sealed; SecretMissing when the key is not here, or what is there was changed."""

    def unseal(self, sealed: bytes, *, context: str) -> bytes: ...


def seal_errors(
    request: SecretArguments, sealed: StoredSeal | None, *, is_finished: bool, may_lack: bool, unseals: Unseals | None
) -> Iterator[TgaError]:
    """What is wrong with the secrets of a trace whose log is sound.

    `may_lack`: it was denied at once, when nothing had been sealed yet. Without `unseals` it is seen that salt and
    values are there, but not that they are the right ones.
    """
    places = find_redactions(request.arguments)
    if sealed is None:
        if places and not may_lack:
            yield SecretMissing(
                "the sealed salt is missing", expected=f"a salt for {', '.join(places)}", remedy=_REMEDY
            )
        return
    if not places:
        yield RecoveryFailed("secrets are sealed for a trace that has none", expected="nothing")
        return
    if is_finished and sealed.values is not None:
        yield RecoveryFailed("sealed values stand that were to be forgotten with the end of the call", expected="none")
    if not is_finished and sealed.values is None:
        yield SecretMissing("the sealed values of an unfinished call are missing", remedy=_REMEDY)
    if unseals is not None:
        yield from _opened_errors(request, sealed, places, unseals)


def _opened_errors(
    request: SecretArguments, sealed: StoredSeal, places: list[str], unseals: Unseals
) -> Iterator[TgaError]:
    stream = TRACE.stream(request.trace_id)
    try:
        salt, pointers = salt_from(unseals.unseal(sealed.salt, context=seal_context(stream, "salt")))
        if sorted(pointers) != places:
            raise SecretMissing("the sealed salt is of other arguments", expected=places, found=pointers)
    except (TgaError, ValueError) as error:
        yield _named("the sealed salt", error)
        return
    if sealed.values is None:
        return
    try:
        values = values_from(unseals.unseal(sealed.values, context=seal_context(stream, "values")))
        if sorted(values) != places:
            raise SecretMissing("they are of other arguments", expected=places, found=sorted(values))
        reveal(request.arguments, values, salt=salt)
    except (TgaError, ValueError) as error:
        yield _named("the sealed values", error)


def _named(what: str, error: Exception) -> SecretMissing:
    if isinstance(error, SecretMissing):
        return SecretMissing(
            f"{what} cannot be used: {error.what}", expected=error.expected, found=error.found, remedy=_REMEDY
        )
    return SecretMissing(f"{what} cannot be read", remedy=_REMEDY)
