"""Sessions of the console: a credential is exchanged for a sealed cookie that holds no secret.

A session names the API key that opened it. Every request looks that key up again, so a revoked or expired key ends its
sessions at once. A session that a token opened holds the principal until the token expires; one of a sign-in at the
issuer holds it for as long as `[auth.oidc]` says.
"""

from __future__ import annotations

import binascii
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import orjson
from pydantic import ValidationError

from app.core.errors import TgaError, Unauthenticated
from app.core.limits import CONSOLE_SESSION_CHARS_MAX, CONSOLE_SESSION_MS
from app.domain.clock import Clock
from app.domain.identity import ApiKeyLookup, Principal, parse_api_key

SCHEME: Final = "Session"
_CONTEXT: Final = "console session"


class Seals(Protocol):
    """The gateway's keyring."""

    def seal(self, plaintext: bytes, *, context: str) -> bytes: ...

    def unseal(self, sealed: bytes, *, context: str) -> bytes: ...


class SpentSessions(Protocol):
    """What was ended or used, as all gateways on the database know it."""

    async def spend(self, value: str, *, until: str) -> bool:
        """False: a gateway has spent it before. Durable when this returns."""
        ...

    async def is_spent(self, value: str) -> bool: ...


class Authenticates(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal: ...


@dataclass(frozen=True, slots=True)
class Session:
    """`csrf` stands in every form of the session. `cookie` is the session as the browser holds it."""

    session_id: str
    csrf: str = field(repr=False)
    expires_at: str
    key_id: str | None
    principal: Principal | None
    is_of_issuer: bool  # opened by signing in at the issuer of [auth.oidc]
    cookie: str = field(repr=False)


class Sessions:
    """Opens, reads and ends sessions; as an authenticator it takes `Authorization: Session <cookie>` and nothing else.

    A session is one of every gateway that has the sealing key, on one database. Ending it counts at all of them a
    moment after it is durable, as a revoked key does, and stays so until the session would have expired anyway.
    """

    def __init__(
        self, authenticator: Authenticates, keys: ApiKeyLookup, seals: Seals, clock: Clock, spent: SpentSessions
    ) -> None:
        self._authenticator = authenticator
        self._keys = keys
        self.seals = seals
        self._clock = clock
        self._spent = spent

    async def open(self, credential: str) -> Session:
        """A session for the principal of this API key or token; else Unauthenticated, without a word about why."""
        principal = await self._authenticator.authenticate(f"Bearer {credential}")
        presented = parse_api_key(credential)
        expires_at = self._clock.after(CONSOLE_SESSION_MS)
        if presented is None:
            expires_at = min(expires_at, _expiry_of(credential))
        return self._sealed(
            session_id=secrets.token_urlsafe(16),
            csrf=secrets.token_urlsafe(24),
            expires_at=expires_at,
            key_id=None if presented is None else presented.key_id,
            principal=principal if presented is None else None,
        )

    def open_as(self, principal: Principal, *, life_ms: int) -> Session:
        """A session for a principal whose ID token, from the issuer of `[auth.oidc]`, was just verified."""
        return self._sealed(
            session_id=secrets.token_urlsafe(16),
            csrf=secrets.token_urlsafe(24),
            expires_at=self._clock.after(life_ms),
            key_id=None,
            principal=principal,
            is_of_issuer=True,
        )

    def read(self, cookie: str | None) -> Session | None:
        """The session in a cookie; None when it is none of ours or has expired. Whether it was ended, `authenticate`
        asks."""
        if not cookie or len(cookie) > CONSOLE_SESSION_CHARS_MAX:
            return None
        try:
            sealed = urlsafe_b64decode(cookie.encode("ascii") + b"=" * (-len(cookie) % 4))
            fields: dict[str, Any] = orjson.loads(self.seals.unseal(sealed, context=_CONTEXT))
            principal = None if fields["principal"] is None else Principal.model_validate(fields["principal"])
            session = Session(
                fields["session_id"],
                fields["csrf"],
                fields["expires_at"],
                fields["key_id"],
                principal,
                fields.get("is_of_issuer", False),
                cookie,
            )
        except (TgaError, ValidationError, ValueError, KeyError, TypeError, binascii.Error):
            return None
        return None if session.expires_at <= self._clock.now() else session

    async def end(self, session: Session) -> None:
        """Durable when this returns."""
        await self._spent.spend(session.session_id, until=session.expires_at)

    async def use_once(self, value: str, *, until: str) -> bool:
        """False: a browser has presented this value before, at this gateway or another. Remembered until `until`."""
        return await self._spent.spend(value, until=until)

    async def authenticate(self, authorization: str | None) -> Principal:
        """The session's principal as it is now, or Unauthenticated."""
        scheme, _, cookie = (authorization or "").partition(" ")
        session = self.read(cookie) if scheme == SCHEME else None
        if session is not None and await self._spent.is_spent(session.session_id):
            session = None
        if session is not None and session.principal is not None:
            return session.principal
        if session is not None and session.key_id is not None:
            key = self._keys.cached_key(session.key_id) or await self._keys.load_key(session.key_id)
            if key is not None and key.is_valid:
                return key.principal
        raise Unauthenticated("the session has ended")

    def _sealed(
        self,
        *,
        session_id: str,
        csrf: str,
        expires_at: str,
        key_id: str | None,
        principal: Principal | None,
        is_of_issuer: bool = False,
    ) -> Session:
        fields = {
            "session_id": session_id,
            "csrf": csrf,
            "expires_at": expires_at,
            "key_id": key_id,
            "principal": None if principal is None else principal.to_json(),
            "is_of_issuer": is_of_issuer,
        }
        sealed = self.seals.seal(orjson.dumps(fields), context=_CONTEXT)
        cookie = urlsafe_b64encode(sealed).rstrip(b"=").decode("ascii")
        return Session(session_id, csrf, expires_at, key_id, principal, is_of_issuer, cookie)


def _expiry_of(token: str) -> str:
    """When a verified token expires."""
    payload = token.split(".")[1]
    claims = orjson.loads(urlsafe_b64decode(payload + "=" * (-len(payload) % 4)))
    at = datetime.fromtimestamp(int(claims["exp"]), UTC)
    return at.strftime("%Y-%m-%dT%H:%M:%S.000Z")
