"""Signing in by OpenID Connect: the authorization code flow with PKCE (OpenID Connect Core 1.0, RFC 7636, RFC 9700).

In order: where the issuer is asked is read from its discovery document; the browser is sent there with `state`,
`nonce` and the digest of a secret; the code that it brings back is exchanged by the gateway itself, with that secret;
the ID token that comes for it is verified like any bearer token, then its nonce and its party.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol
from urllib.parse import quote_plus, urlencode

import jwt
from yarl import URL

from app.connectors.http_connection import HttpFailure
from app.core.canonical import parse_object
from app.core.errors import IssuerUnavailable, SettingInvalid, SignInRefused, TgaError
from app.core.limits import (
    JWKS_BYTES_MAX,
    OIDC_ANSWER_BYTES_MAX,
    OIDC_DISCOVERY_AGE_MAX_MS,
    OIDC_DISCOVERY_BYTES_MAX,
    OIDC_EXCHANGES_MAX,
    OIDC_RETRY_AFTER_MS,
    OIDC_TIMEOUT_MS,
)
from app.domain.identity import Principal
from app.edge.issuer_keys import ask_issuer, parse_jwks, safe_url
from app.edge.tokens import IssuerSettings, JwtVerifier, TokenRefused

logger = logging.getLogger("tga")

DISCOVERY: Final = "/.well-known/openid-configuration"
_FORM: Final = {"Content-Type": "application/x-www-form-urlencoded", "Accept": "application/json"}
# What of a token is told to the person who signs in; of all else only that it is not believed.
_TOLD: Final[dict[type[Exception], str]] = {
    jwt.ExpiredSignatureError: "it has expired",
    jwt.ImmatureSignatureError: "it is not valid yet; compare the clocks of gateway and provider",
    jwt.InvalidAudienceError: "it was issued for another client",
    jwt.InvalidIssuerError: "another issuer made it",
    jwt.MissingRequiredClaimError: "it lacks a claim that is needed",
    jwt.InvalidSignatureError: "its signature is not the issuer's",
}


class OidcSettings(IssuerSettings, Protocol):
    """`[auth.oidc]` of the configuration."""

    @property
    def client_id(self) -> str: ...
    @property
    def scopes(self) -> Sequence[str]: ...
    @property
    def name(self) -> str | None: ...
    @property
    def session_ms(self) -> int: ...


@dataclass(frozen=True, slots=True)
class IssuerMetadata:
    """What the discovery document says, as far as it is used. `names_itself`: its answers carry `iss` (RFC 9207)."""

    authorization_endpoint: URL
    token_endpoint: URL
    jwks_uri: str
    end_session_endpoint: URL | None
    takes_basic: bool
    names_itself: bool


@dataclass(frozen=True, slots=True)
class _TokenSettings:
    """The rules of `[auth.jwt]`, for ID tokens: the audience is the client."""

    issuer: str
    audience: str
    algorithms: Sequence[str]
    jwks_url: str
    principal_claim: str
    tenant_claim: str
    roles_claim: str
    jwks_file: None = None


class OidcProvider:
    """One issuer, as one client of it.

    Guarantees: `redeem` returns a principal only for an ID token that this issuer signed for this client and this very
    sign-in. It does not know when the issuer takes a person's rights back: a sign-in counts for `session_ms`.
    """

    def __init__(
        self,
        settings: OidcSettings,
        *,
        public_url: str,
        has_tenant: Callable[[str], Awaitable[bool]],
        secret: Callable[[], str] | None = None,
    ) -> None:
        """`secret`: the client's, read anew each time; None for a client that has none."""
        self.public_url = public_url.rstrip("/")
        self.session_ms = settings.session_ms
        self.name = settings.name or URL(settings.issuer).host or settings.issuer
        self._settings = settings
        self._has_tenant = has_tenant
        self._secret = secret
        self._issuer_url = safe_url(settings.issuer, "the issuer is not at a safe place")
        self._exchanges = asyncio.Semaphore(OIDC_EXCHANGES_MAX)
        # Read from the issuer: when first needed, and again when old. A failure leaves what was read before.
        self._metadata: IssuerMetadata | None = None
        self._failure = IssuerUnavailable("the identity provider was not asked yet")
        self._asked_at_s = -math.inf
        self._reading: asyncio.Lock = asyncio.Lock()
        self._verifier: tuple[str, JwtVerifier] | None = None  # by the address of the keys

    @property
    def redirect_uri(self) -> str:
        return f"{self.public_url}/console/sign-in/callback"

    async def close(self) -> None:
        if self._verifier is not None:
            await self._verifier[1].close()

    async def metadata(self) -> IssuerMetadata:
        """From the discovery document; IssuerUnavailable if there is none that can be used."""
        async with self._reading:  # one asks, the others get its answer
            age_ms = (time.monotonic() - self._asked_at_s) * 1000
            is_known = self._metadata is not None
            if age_ms > (OIDC_DISCOVERY_AGE_MAX_MS if is_known else OIDC_RETRY_AFTER_MS):
                try:
                    self._metadata = await self._discover()
                except IssuerUnavailable as error:
                    self._failure = error
                    logger.warning("the identity provider's discovery document: %s", error)
                self._asked_at_s = time.monotonic()
            if self._metadata is None:
                raise self._failure
            return self._metadata

    async def verify_keys(self) -> None:
        """Raise IssuerUnavailable unless the issuer publishes a key that can verify an ID token."""
        url = URL((await self.metadata()).jwks_uri)
        status, raw = await self._asked("GET", url, bytes_max=JWKS_BYTES_MAX)
        try:
            keys = parse_jwks(raw, self._settings.algorithms) if status == 200 else {}
        except TgaError:
            keys = {}
        if not keys:
            expected = f"a key with an id, for one of {', '.join(self._settings.algorithms)}"
            raise IssuerUnavailable(
                "the provider publishes no key that can be used",
                expected=expected,
                remedy="Compare `algorithms` of [auth.oidc] with what the provider signs ID tokens with.",
            )

    async def authorization_url(self, *, state: str, nonce: str, verifier: str) -> str:
        """Where the browser is sent. `verifier` itself stays here: the issuer is told its digest."""
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode("ascii")).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self._settings.client_id,
            "redirect_uri": self.redirect_uri,
            "scope": " ".join(self._settings.scopes),
            "state": state,
            "nonce": nonce,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        return str((await self.metadata()).authorization_endpoint.update_query(asked))

    async def end_session_url(self, *, hint: str) -> str | None:
        """Where a browser ends its session at the issuer too (RP-Initiated Logout 1.0); None where it cannot."""
        endpoint = (await self.metadata()).end_session_endpoint
        if endpoint is None:
            return None
        asked = {
            "client_id": self._settings.client_id,
            "post_logout_redirect_uri": f"{self.public_url}/console/sign-in",
            "logout_hint": hint,
        }
        return str(endpoint.update_query(asked))

    async def redeem(self, *, code: str, nonce: str, verifier: str, named_issuer: str | None) -> Principal:
        """Who signed in. SignInRefused for whatever is not as it must be, IssuerUnavailable without an answer.

        The checks, in order: the answer names no other issuer; the code is exchanged once, with the verifier; the ID
        token has a pinned algorithm, a published key, signature, issuer, audience, times; it is of this sign-in
        (`nonce`) and for this client (`azp`); its claims name a principal with a role, in a tenant that exists.
        """
        metadata = await self.metadata()
        if named_issuer is None and metadata.names_itself:
            raise SignInRefused("the answer does not say which issuer it is from", expected="the parameter iss")
        if named_issuer is not None and named_issuer != self._settings.issuer:
            raise SignInRefused("the answer is from another issuer")
        token = await self._exchanged(metadata, code, verifier)
        try:
            tokens = await self._tokens(metadata.jwks_uri)
            claims = await tokens.claims_of(token)
            self._verify_party(claims, nonce)
            return await tokens.principal_of(claims)
        except Exception as error:  # PyJWT and what is beneath it, on what the issuer sent
            why = str(error) if isinstance(error, TokenRefused) else _TOLD.get(type(error), "it cannot be verified")
            logger.warning("a sign-in was refused: the ID token is not believed: %s (%s)", why, type(error).__name__)
            raise SignInRefused("the provider's ID token is not believed", found=why) from None

    def _verify_party(self, claims: dict[str, Any], nonce: str) -> None:
        given = claims.get("nonce")
        if not isinstance(given, str) or not hmac.compare_digest(given.encode(), nonce.encode()):
            raise TokenRefused("it is not of this sign-in: its nonce is another, or missing")
        several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
        if (several or "azp" in claims) and claims.get("azp") != self._settings.client_id:
            raise TokenRefused("it was issued for another client")
        if "iat" not in claims:
            raise TokenRefused("it lacks a claim that is needed")

    async def _exchanged(self, metadata: IssuerMetadata, code: str, verifier: str) -> str:
        """The ID token for a code. A code that was used before is the issuer's to refuse."""
        fields = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self.redirect_uri,
            "code_verifier": verifier,
            "client_id": self._settings.client_id,
        }
        headers = dict(_FORM)
        if self._secret is not None:
            try:
                secret = self._secret()
            except Exception as error:  # the file is gone, or is no secret: nothing of it is told
                logger.error("the client secret of [auth.oidc] cannot be read: %s", type(error).__name__)
                raise IssuerUnavailable("the gateway cannot show the provider who it is") from None
            if metadata.takes_basic:
                del fields["client_id"]
                pair = f"{quote_plus(self._settings.client_id)}:{quote_plus(secret)}"  # RFC 6749, section 2.3.1
                headers["Authorization"] = "Basic " + base64.b64encode(pair.encode()).decode()
            else:
                fields["client_secret"] = secret
        status, raw = await self._asked(
            "POST", metadata.token_endpoint, headers=headers, body=urlencode(fields).encode()
        )
        answer = _parsed(raw, OIDC_ANSWER_BYTES_MAX)
        if status in (400, 401, 403):
            reason = _plain(answer.get("error"))
            logger.warning("a sign-in was refused: the provider did not take the code: %s", reason)
            raise SignInRefused("the provider did not take the code: it was used before, or is too old", found=reason)
        if status != 200 or not isinstance(answer.get("id_token"), str):
            logger.warning("a sign-in failed: the token endpoint answered %d without an ID token", status)
            raise IssuerUnavailable("the provider sent no ID token", expected="status 200", found=status)
        token: str = answer["id_token"]
        return token

    async def _discover(self) -> IssuerMetadata:
        url = URL(str(self._issuer_url).rstrip("/") + DISCOVERY, encoded=True)
        status, raw = await self._asked("GET", url, bytes_max=OIDC_DISCOVERY_BYTES_MAX)
        if status != 200:
            raise IssuerUnavailable("the provider's discovery document cannot be had", expected="200", found=status)
        said = _parsed(raw, OIDC_DISCOVERY_BYTES_MAX)
        if said.get("issuer") != self._settings.issuer:
            raise IssuerUnavailable(
                "the provider calls itself otherwise than [auth.oidc] does",
                expected=self._settings.issuer,
                found=_plain(said.get("issuer")),
                remedy="Write the issuer exactly as its discovery document has it, with or without a / at its end.",
            )
        if "S256" not in _listed(said, "code_challenge_methods_supported", "S256"):
            raise IssuerUnavailable("the provider does not take PKCE", expected="S256")
        methods = _listed(said, "token_endpoint_auth_methods_supported", "client_secret_basic")
        ends = said.get("end_session_endpoint")
        try:
            return IssuerMetadata(
                _endpoint(said, "authorization_endpoint"),
                _endpoint(said, "token_endpoint"),
                str(_endpoint(said, "jwks_uri")),
                None if ends is None else _endpoint(said, "end_session_endpoint"),
                takes_basic="client_secret_basic" in methods or "client_secret_post" not in methods,
                names_itself=said.get("authorization_response_iss_parameter_supported") is True,
            )
        except SettingInvalid as error:
            raise IssuerUnavailable("the provider's discovery document cannot be used", found=error.what) from None

    async def _asked(
        self,
        method: str,
        url: URL,
        *,
        headers: dict[str, str] | None = None,
        body: bytes | None = None,
        bytes_max: int = OIDC_ANSWER_BYTES_MAX,
    ) -> tuple[int, bytes]:
        try:
            async with asyncio.timeout(OIDC_TIMEOUT_MS / 1000), self._exchanges:
                return await ask_issuer(method, url, bytes_max=bytes_max, headers=headers, body=body)
        except (TimeoutError, HttpFailure, OSError, ValueError) as error:
            why = "no answer in time" if isinstance(error, TimeoutError) else _plain(str(error))
            logger.warning("the identity provider cannot be reached: %s", why)
            raise IssuerUnavailable("the identity provider cannot be reached", found=why) from None

    async def _tokens(self, jwks_uri: str) -> JwtVerifier:
        if self._verifier is None or self._verifier[0] != jwks_uri:
            old, chosen = self._verifier, self._settings
            fields = _TokenSettings(
                chosen.issuer,
                chosen.client_id,
                chosen.algorithms,
                jwks_uri,
                chosen.principal_claim,
                chosen.tenant_claim,
                chosen.roles_claim,
            )
            self._verifier = (jwks_uri, JwtVerifier(fields, has_tenant=self._has_tenant))
            if old is not None:
                await old[1].close()
        return self._verifier[1]


def _endpoint(said: dict[str, Any], name: str) -> URL:
    found = said.get(name)
    return safe_url(found if isinstance(found, str) else "", f"{name} is not a safe address")


def _listed(said: dict[str, Any], name: str, usual: str) -> list[Any]:
    found = said.get(name, [usual])
    return found if isinstance(found, list) else []


def _parsed(raw: bytes, bytes_max: int) -> dict[str, Any]:
    try:
        return parse_object(raw, bytes_max=bytes_max)
    except TgaError:
        raise IssuerUnavailable("the provider's answer cannot be read", expected="a JSON object") from None


def _plain(text: object) -> str:
    """A few printable characters of what the provider or a browser said."""
    return "".join(sign if " " <= sign <= "~" else "?" for sign in str(text)[:100])
