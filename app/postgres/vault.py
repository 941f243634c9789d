"""Secret arguments on PostgreSQL: sealed beside the ledger, in the transaction that records the call."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from app.core.errors import SecretMissing
from app.core.limits import REDACTION_SALT_BYTES
from app.domain.ledger.plans import Sealed
from app.domain.tga.documents import TraceId
from app.domain.tga.ports import Salt
from app.domain.tga.secrets import salt_document, salt_from, seal_context, sealed_document, values_from
from app.domain.tga.transitions import TRACE
from app.postgres.sessions import Sessions

_SEALED = "SELECT sealed_salt, sealed_values FROM tga.sealed WHERE stream = $1"


class Seals(Protocol):
    """AES-256-GCM under a key that is not in the database; `context` says what the sealed thing is."""

    def seal(self, plaintext: bytes, *, context: str) -> bytes: ...

    def unseal(self, sealed: bytes, *, context: str) -> bytes: ...


class PostgresVault:
    """The Vault port. Salt and values are sealed apart: the values go when the trace is finished, the salt stays, so
    that a repeat of the call can be told from another."""

    def __init__(self, sessions: Sessions, seals: Seals) -> None:
        self._sessions = sessions
        self._seals = seals

    def new_salt(self, pointers: Sequence[str]) -> Salt:
        return Salt(secrets.token_bytes(REDACTION_SALT_BYTES), tuple(pointers))

    def seal(self, trace_id: TraceId, salt: Salt, values: dict[str, Any]) -> Sealed:
        stream = TRACE.stream(trace_id)
        return Sealed(
            self._seals.seal(salt_document(salt.salt, salt.pointers), context=seal_context(stream, "salt")),
            self._seals.seal(sealed_document(values), context=seal_context(stream, "values")),
        )

    async def load_secrets(self, trace_id: TraceId) -> tuple[Salt, dict[str, Any]]:
        rows = await self._sessions.fetch(_SEALED, TRACE.stream(trace_id))
        if not rows or rows[0]["sealed_values"] is None:
            raise SecretMissing("the call's secret values are gone", stream=TRACE.stream(trace_id))
        values = self._seals.unseal(rows[0]["sealed_values"], context=seal_context(TRACE.stream(trace_id), "values"))
        return self.open_salt(trace_id, rows[0]["sealed_salt"]), values_from(values)

    def open_salt(self, trace_id: TraceId, sealed: bytes) -> Salt:
        stream = TRACE.stream(trace_id)
        try:
            return Salt(*salt_from(self._seals.unseal(sealed, context=seal_context(stream, "salt"))))
        except SecretMissing as error:
            raise error.at(stream=stream) from None
