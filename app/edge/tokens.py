"""JSON Web Tokens (RFC 7519, RFC 8725): verified against one issuer's keys, with algorithms that are pinned."""

from __future__ import annotations

import base64
import binascii
import logging
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jwt

from app.core.canonical import parse_object
from app.core.errors import SettingInvalid, TgaError
from app.core.limits import CREDENTIAL_CHARS_MAX, JWT_HEADER_CHARS_MAX, JWT_LEEWAY_S
from app.domain.identity import DEFAULT_TENANT, ROLES, Principal
from app.edge.issuer_keys import ALGORITHMS, JwksFile, JwksUrl, KeySource

log = logging.getLogger(__name__)


class TokenRefused(Exception):
    """Why a token is not believed, in words that hold nothing of it."""


class IssuerSettings(Protocol):
    """What every issuer of tokens is configured with: whose tokens, and which claims name the principal and its
    roles."""

    @property
    def issuer(self) -> str: ...
    @property
    def algorithms(self) -> Sequence[str]: ...
    @property
    def principal_claim(self) -> str: ...
    @property
    def tenant_claim(self) -> str: ...
    @property
    def roles_claim(self) -> str: ...


class JwtSettings(IssuerSettings, Protocol):
    """`[auth.jwt]` of the configuration. Exactly one of `jwks_url` and `jwks_file` is set."""

    @property
    def audience(self) -> str: ...
    @property
    def jwks_url(self) -> str | None: ...
    @property
    def jwks_file(self) -> Path | None: ...


class JwtVerifier:
    """Tokens of one issuer, for one audience.

    The header of a token chooses among the issuer's keys and the pinned algorithms, and nothing else. Time is this
    machine's, with JWT_LEEWAY_S to either side. A token counts until it expires: only the issuer can take it back,
    by taking back the key.
    """

    def __init__(self, settings: JwtSettings, *, has_tenant: Callable[[str], Awaitable[bool]]) -> None:
        self._settings = settings
        self._has_tenant = has_tenant
        self._algorithms = list(settings.algorithms)
        self._source = _source(settings)
        required = ["exp", "iss", "aud", settings.principal_claim]
        self._options: Any = {"require": required, "enforce_minimum_key_length": True}

    async def start(self) -> None:
        """Read the keys; SettingInvalid if they are in a file that cannot be used."""
        await self._source.start()

    async def close(self) -> None:
        await self._source.close()

    async def verify(self, token: str) -> Principal | None:
        """The principal that the token names, or None for whatever is wrong with it; the log says what, at debug."""
        try:
            return await self.principal_of(await self.claims_of(token))
        except Exception as error:  # PyJWT and what is beneath it, on bytes that strangers send
            log.debug("a token was refused: %s: %s", type(error).__name__, error)
            return None

    async def claims_of(self, token: str) -> dict[str, Any]:
        """The claims of a token that the issuer signed, for this audience, now; else TokenRefused, or PyJWT's error."""
        if len(token) > CREDENTIAL_CHARS_MAX or token.count(".") != 2:
            raise TokenRefused("it is no token, or too long")
        # Before anything that costs: most of what strangers send names no key of ours.
        header = _header(token)
        kid, algorithm = header.get("kid"), header.get("alg")
        if algorithm not in self._algorithms or not isinstance(algorithm, str):
            raise TokenRefused("it is not signed with an algorithm of the configuration")
        key = await self._source.find(kid, algorithm) if isinstance(kid, str) else None
        if key is None:
            raise TokenRefused("it is not signed with a key that the issuer publishes")
        claims = jwt.decode(
            token,
            key,
            algorithms=self._algorithms,
            audience=self._settings.audience,
            issuer=self._settings.issuer,
            leeway=JWT_LEEWAY_S,
            options=self._options,
        )
        for moment in ("exp", "nbf", "iat"):  # RFC 7519: a number; PyJWT would also read a text
            if moment in claims and (isinstance(claims[moment], bool) or not isinstance(claims[moment], int | float)):
                raise TokenRefused(f"its {moment} is no number")
        return claims

    async def principal_of(self, claims: dict[str, Any]) -> Principal:
        """Whom verified claims name; TokenRefused without a role of ours, or for a tenant that does not exist."""
        principal = self._principal(claims)
        if principal is None:
            raise TokenRefused(f"it names no role of this gateway in {self._settings.roles_claim}")
        if not await self._has_tenant(principal.tenant):
            raise TokenRefused("it names a tenant that does not exist here")
        return principal

    def _principal(self, claims: dict[str, Any]) -> Principal | None:
        listed = claims.get(self._settings.roles_claim)
        roles = [role for role in ROLES if role in listed] if isinstance(listed, list) else []
        if not roles:
            return None
        return Principal.made(
            principal_id=claims[self._settings.principal_claim],
            tenant=claims.get(self._settings.tenant_claim, DEFAULT_TENANT),
            roles=roles,
        )


def _header(token: str) -> dict[str, Any]:
    segment = token.partition(".")[0]
    if not 0 < len(segment) <= JWT_HEADER_CHARS_MAX:
        return {}
    try:
        raw = base64.b64decode(segment + "=" * (-len(segment) % 4), altchars=b"-_", validate=True)
        return parse_object(raw)
    except (binascii.Error, ValueError, TgaError):
        return {}


def _source(settings: JwtSettings) -> KeySource:
    pinned = set(settings.algorithms)
    if not pinned or pinned - ALGORITHMS:
        expected = f"some of {', '.join(sorted(ALGORITHMS))}"
        raise SettingInvalid("not algorithms to verify tokens with", expected=expected, found=sorted(pinned))
    if (settings.jwks_url is None) == (settings.jwks_file is None):
        raise SettingInvalid("where the issuer's keys are", expected="one of jwks_url and jwks_file")
    if not settings.issuer or not settings.audience:
        raise SettingInvalid("tokens are checked for their issuer and audience", expected="both, not empty")
    if settings.jwks_url is not None:
        return JwksUrl(settings.jwks_url, pinned)
    return JwksFile(Path(settings.jwks_file or ""), pinned)
