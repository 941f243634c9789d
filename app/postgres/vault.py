"""Secret arguments on PostgreSQL: sealed beside the ledger, in the transaction that records the call."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

from app.core.canonical import canonical_bytes, parse_object
from app.core.errors import SecretMissing
from app.core.limits import REDACTION_SALT_BYTES
from app.domain.ledger.plans import Sealed
from app.domain.tga.documents import TraceId
from app.domain.tga.ports import Salt
from app.domain.tga.secrets import sealed_document, values_from
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
        written = canonical_bytes({"salt": salt.salt.hex(), "pointers": list(salt.pointers)})
        return Sealed(
            self._seals.seal(written, context=_context(trace_id, "salt")),
            self._seals.seal(sealed_document(values), context=_context(trace_id, "values")),
        )

    async def load_salt(self, trace_id: TraceId) -> Salt | None:
        rows = await self._sessions.fetch(_SEALED, TRACE.stream(trace_id))
        return self._salt(trace_id, rows[0]["sealed_salt"]) if rows else None

    async def load_secrets(self, trace_id: TraceId) -> tuple[Salt, dict[str, Any]]:
        rows = await self._sessions.fetch(_SEALED, TRACE.stream(trace_id))
        if not rows or rows[0]["sealed_values"] is None:
            raise SecretMissing("the call's secret values are gone", stream=TRACE.stream(trace_id))
        values = self._seals.unseal(rows[0]["sealed_values"], context=_context(trace_id, "values"))
        return self._salt(trace_id, rows[0]["sealed_salt"]), values_from(values)

    def _salt(self, trace_id: TraceId, sealed: bytes) -> Salt:
        read = parse_object(self._seals.unseal(sealed, context=_context(trace_id, "salt")))
        match read:
            case {"salt": str(salt), "pointers": list(pointers)}:
                return Salt(bytes.fromhex(salt), [str(pointer) for pointer in pointers])
        raise SecretMissing("the sealed salt cannot be read", stream=TRACE.stream(trace_id))


def _context(trace_id: TraceId, field: str) -> str:
    return f"{TRACE.stream(trace_id)} {field}"
