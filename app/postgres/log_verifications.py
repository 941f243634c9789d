"""Verifications of the whole log, kept in the store: any gateway reads them, and one at a time works on each."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Final

import asyncpg

from app.core.limits import LOG_VERIFICATION_SILENT_MS, LOG_VERIFICATIONS_KEPT
from app.postgres.sessions import Sessions

_COLUMNS: Final = """
       v.verification_id, v.tenant, v.attempt, v.told,
       v.ended_at IS NULL AND v.beat_at <= statement_timestamp() - $1 * interval '1 millisecond' AS is_silent
"""
_LIST: Final = f"""
SELECT {_COLUMNS}
  FROM tga.log_verifications v WHERE v.tenant = $2 ORDER BY v.begun_at DESC, v.verification_id DESC LIMIT $3
"""  # noqa: S608 - constants of this file
_LOAD: Final = f"""
SELECT {_COLUMNS}
  FROM tga.log_verifications v WHERE v.verification_id = $2 AND v.tenant = $3
"""  # noqa: S608 - constants of this file
_LAST_CONCLUSIVE: Final = f"""
SELECT {_COLUMNS}
  FROM tga.log_verifications v WHERE v.is_conclusive ORDER BY v.ended_at DESC LIMIT 1
"""  # noqa: S608 - constants of this file


@dataclass(frozen=True, slots=True)
class KeptVerification:
    """`told`: the document that clients of its tenant get. `is_silent`: the gateway that worked on it is gone."""

    verification_id: str
    tenant: str
    attempt: int
    told: dict[str, Any]
    is_silent: bool


class LogVerificationStore:
    """`silent_ms`: after how long without a word a gateway is taken for gone."""

    def __init__(self, sessions: Sessions, *, silent_ms: int = LOG_VERIFICATION_SILENT_MS) -> None:
        self._sessions = sessions
        self._silent_ms = silent_ms

    async def begin(self, verification_id: str, tenant: str, told: dict[str, Any]) -> bool:
        """False while another one of the tenant runs, on any gateway."""
        statement = "SELECT tga.begin_log_verification($1, $2, $3, $4) AS is_mine"
        (row,) = await self._sessions.commit(statement, verification_id, tenant, _text(told), LOG_VERIFICATIONS_KEPT)
        return bool(row["is_mine"])

    async def take(self, verification_id: str) -> int | None:
        """The attempt to work on it with; None when its gateway is alive, or another one was first."""
        statement = "SELECT tga.take_log_verification($1, $2) AS attempt"
        (row,) = await self._sessions.commit(statement, verification_id, self._silent_ms)
        attempt: int | None = row["attempt"]
        return attempt

    async def save(
        self, verification_id: str, attempt: int, told: dict[str, Any], *, is_over: bool, is_conclusive: bool
    ) -> bool | None:
        """Whether a caller wants it stopped; None when it is this attempt's no more."""
        statement = "SELECT tga.save_log_verification($1, $2, $3, $4, $5) AS is_to_stop"
        (row,) = await self._sessions.commit(statement, verification_id, attempt, _text(told), is_over, is_conclusive)
        is_to_stop: bool | None = row["is_to_stop"]
        return is_to_stop

    async def stop(self, verification_id: str, tenant: str) -> None:
        await self._sessions.commit("SELECT tga.stop_log_verification($1, $2)", verification_id, tenant)

    async def load(self, verification_id: str, tenant: str) -> KeptVerification | None:
        rows = await self._sessions.fetch(_LOAD, self._silent_ms, verification_id, tenant)
        return _kept(rows[0]) if rows else None

    async def newest_first(self, tenant: str) -> list[KeptVerification]:
        rows = await self._sessions.fetch(_LIST, self._silent_ms, tenant, LOG_VERIFICATIONS_KEPT)
        return [_kept(row) for row in rows]

    async def last_conclusive(self) -> KeptVerification | None:
        """The last one of any tenant that ended sound or wrong: there is one log for all of them."""
        rows = await self._sessions.fetch(_LAST_CONCLUSIVE, self._silent_ms)
        return _kept(rows[0]) if rows else None

    async def tenants_of(self, streams: list[str]) -> dict[str, str | None]:
        rows = await self._sessions.fetch("SELECT stream, tenant FROM tga.heads WHERE stream = ANY($1)", streams)
        return {row["stream"]: row["tenant"] for row in rows}


def _kept(row: asyncpg.Record) -> KeptVerification:
    return KeptVerification(
        row["verification_id"],
        row["tenant"],
        row["attempt"],
        json.loads(row["told"]),
        row["is_silent"],
    )


def _text(told: dict[str, Any]) -> str:
    """In ASCII: what was found in a database that was tampered with may be any text."""
    return json.dumps(told)
