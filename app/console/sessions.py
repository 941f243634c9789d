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

    Ending one is remembered by this gateway until it would have expired anyway; another gateway, or this one after
    a restart, knows only that the browser has dropped it. Whoever fears a copy revokes the key.
    """

    def __init__(self, authenticator: Authenticates, keys: ApiKeyLookup, seals: Seals, clock: Clock) -> None:
        self._authenticator = authenticator
        self._keys = keys
        self.seals = seals
        self._clock = clock
        self._ended: dict[str, str] = {}  # by id: until when it is remembered

    async def open(self, credential: str) -> Session:
        """A session for whoever holds this credential, or Unauthenticated without a word about why."""
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
        """A session for somebody whom the issuer of `[auth.oidc]` vouched for, just now."""
        return self._sealed(
            session_id=secrets.token_urlsafe(16),
            csrf=secrets.token_urlsafe(24),
            expires_at=self._clock.after(life_ms),
            key_id=None,
            principal=principal,
            is_of_issuer=True,
        )

    def read(self, cookie: str | None) -> Session | None:
        """The session in a cookie; None when it is none of ours, has expired or was ended."""
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
        now = self._clock.now()
        return None if session.expires_at <= now or session.session_id in self._ended else session

    def end(self, session: Session) -> None:
        self._remember(session.session_id, session.expires_at)

    def _remember(self, value: str, until: str) -> None:
        now = self._clock.now()
        self._ended = {known: other for known, other in self._ended.items() if other > now}
        self._ended[value] = until

    async def use_once(self, value: str, *, until: str) -> bool:
        """Whether nobody used this value before; it is remembered until then."""
        if value in self._ended:
            return False
        self._remember(value, until)
        return True

    async def authenticate(self, authorization: str | None) -> Principal:
        """The session's principal as it is now, or Unauthenticated."""
        scheme, _, cookie = (authorization or "").partition(" ")
        session = self.read(cookie) if scheme == SCHEME else None
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
