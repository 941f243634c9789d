"""The salts of runs on PostgreSQL: sealed beside the ledger, in the transaction that records the start."""

from __future__ import annotations

import secrets

from app.core.canonical import canonical_bytes, parse_object
from app.core.errors import SecretMissing
from app.core.limits import REDACTION_SALT_BYTES
from app.domain.ledger.plans import Sealed
from app.domain.runs.engine.ports import RunSalt
from app.domain.runs.transitions import RUN
from app.domain.tga.secrets import seal_context
from app.postgres.sessions import Sessions
from app.postgres.vault import Seals

_SEALED = "SELECT sealed_salt FROM tga.sealed WHERE stream = $1"


class PostgresRunSalts:
    """The Salts port. Input digests are keyed with a salt, because a plain digest of a card number can be guessed."""

    def __init__(self, sessions: Sessions, seals: Seals) -> None:
        self._sessions = sessions
        self._seals = seals

    def new(self) -> RunSalt:
        return RunSalt(secrets.token_bytes(REDACTION_SALT_BYTES), secrets.token_bytes(REDACTION_SALT_BYTES))

    def seal(self, run_id: str, salt: RunSalt) -> Sealed:
        stream = RUN.stream(run_id)
        document = canonical_bytes({"digests": salt.digests.hex(), "draws": salt.draws.hex()})
        return Sealed(
            self._seals.seal(document, context=seal_context(stream, "salt")),
            self._seals.seal(b"{}", context=seal_context(stream, "values")),
        )

    async def load(self, run_id: str) -> RunSalt:
        stream = RUN.stream(run_id)
        rows = await self._sessions.fetch(_SEALED, stream)
        if not rows:
            raise SecretMissing("the run's salt is gone", stream=stream)
        document = parse_object(self._seals.unseal(rows[0]["sealed_salt"], context=seal_context(stream, "salt")))
        return RunSalt(bytes.fromhex(str(document["digests"])), bytes.fromhex(str(document["draws"])))
