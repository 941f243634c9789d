"""Signing in at the issuer of `[auth.oidc]`: away to it, and back with a code.

What a sign-in needs to remember until the browser is back (state, nonce, the secret of PKCE, the page that was wanted)
is sealed in a cookie of its own. That cookie is SameSite=Lax: the way back is a navigation that another site began, on
which browsers send no Strict cookie. It opens nothing by itself, only the callback reads it, and it is used up once.

The session's own cookie stays Strict. It is set by the callback's answer, which is a page and no redirect: a redirect
would still belong to the navigation of the other site, and come without the session. The page leads on by itself
(`<meta http-equiv="refresh">`), from this site to this site, without a script.
"""

from __future__ import annotations

import binascii
import hashlib
import hmac
import secrets
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from app.console.pages import sign_in
from app.console.rendering import HEADERS, PATH, Renderer
from app.console.sessions import Seals, Session, Sessions
from app.console.visit import own_path, query_of, theme_of
from app.core.errors import IssuerUnavailable, SignInExpired, SignInRefused, TgaError
from app.core.limits import (
    CONSOLE_SESSION_CHARS_MAX,
    OIDC_CODE_CHARS_MAX,
    OIDC_SIGN_IN_MS,
    OIDC_SIGN_INS_MAX,
)
from app.domain.clock import Clock
from app.edge.oidc import OidcProvider
from app.edge.services import header_of

BEGIN: Final = f"{PATH}/sign-in/issuer"
CALLBACK: Final = f"{PATH}/sign-in/callback"
_COOKIE: Final = "console_sign_in_"
_COOKIE_PATH: Final = f"{PATH}/sign-in"
_CONTEXT: Final = "console sign-in"


@dataclass(frozen=True, slots=True)
class Begun:
    """A sign-in under way. `state` finds it again, `nonce` stands in the ID token, `verifier` buys it for the code."""

    state: str
    nonce: str = field(repr=False)
    verifier: str = field(repr=False)
    next: str
    expires_at: str

    @property
    def cookie_name(self) -> str:
        """One for each sign-in, so that two pages of one browser do not take each other's."""
        return _COOKIE + hashlib.sha256(self.state.encode()).hexdigest()[:16]


class IssuerSignIn:
    """The two routes, and where a sign-out goes on."""

    def __init__(
        self, provider: OidcProvider, sessions: Sessions, seals: Seals, clock: Clock, renderer: Renderer
    ) -> None:
        self.provider = provider
        self._sessions = sessions
        self._seals = seals
        self._clock = clock
        self._renderer = renderer

    async def begin(self, request: Request) -> Response:
        """To the issuer. Whoever came by another name of this gateway goes to its public one first: cookies and the
        way back belong to that."""
        query = query_of(request)
        wanted = own_path(query.get("next"))
        public = self.provider.public_url
        if header_of(request.scope, b"host") != public.partition("://")[2].partition("/")[0] and "here" not in query:
            at = f"{public}{BEGIN}?here=1&next={sign_in.quoted(wanted)}"  # once: proxies may change the host
            return RedirectResponse(at, status_code=303, headers=HEADERS)
        begun = Begun(
            secrets.token_urlsafe(24),
            secrets.token_urlsafe(24),
            secrets.token_urlsafe(48),
            wanted,
            self._clock.after(OIDC_SIGN_IN_MS),
        )
        try:
            at = await self.provider.authorization_url(state=begun.state, nonce=begun.nonce, verifier=begun.verifier)
        except IssuerUnavailable as error:
            return self._refused(request, error, wanted)
        made = RedirectResponse(at, status_code=303, headers={**HEADERS, "Cache-Control": "no-store"})
        older = [name for name in request.cookies if name.startswith(_COOKIE)]
        for name in older[: max(0, len(older) - OIDC_SIGN_INS_MAX + 1)]:
            made.delete_cookie(name, path=_COOKIE_PATH, httponly=True, samesite="lax")
        made.set_cookie(
            begun.cookie_name,
            self._sealed(begun),
            max_age=OIDC_SIGN_IN_MS // 1000,
            path=_COOKIE_PATH,
            httponly=True,
            samesite="lax",
            secure=self.is_secure,
        )
        return made

    async def back(self, request: Request, cookie: str) -> Response:
        """`cookie`: the name of the session's. Whatever happens, this sign-in is used up."""
        query = query_of(request)
        begun = self._begun(request.cookies, query.get("state", ""))
        if begun is None:
            why = "it was begun more than 10 minutes ago, in another browser, or its answer was taken before"
            return self._refused(request, SignInExpired("the sign-in is not under way here", found=why), f"{PATH}/")
        try:
            session = await self._redeemed(begun, query)
        except (IssuerUnavailable, SignInExpired, SignInRefused) as error:
            made = self._refused(request, error, begun.next)
        else:
            made = self._renderer.page(
                "signed_in.html", {"next": begun.next, "theme": theme_of(request), "now": self._clock.now()}
            )
            made.headers["Referrer-Policy"] = "no-referrer"  # this page's address holds the code
            made.set_cookie(cookie, session.cookie, path=PATH, httponly=True, samesite="strict", secure=self.is_secure)
        made.delete_cookie(begun.cookie_name, path=_COOKIE_PATH, httponly=True, samesite="lax")
        return made

    async def ended(self, request: Request, session: Session) -> Response | None:
        """After a sign-out here: a page that leads on to the issuer, if it ends sessions too. The form may not lead
        elsewhere itself, as the policy of its page says."""
        if not session.is_of_issuer or session.principal is None:
            return None
        try:
            at = await self.provider.end_session_url(hint=session.principal.principal_id)
        except IssuerUnavailable:
            return None
        if at is None:
            return None
        context = {"at": at, "issuer": self.provider.name, "theme": theme_of(request), "now": self._clock.now()}
        return self._renderer.page("signed_out.html", context)

    @property
    def is_secure(self) -> bool:
        return self.provider.public_url.startswith("https://")

    async def _redeemed(self, begun: Begun, query: Mapping[str, str]) -> Session:
        if not await self._sessions.use_once(begun.state, until=begun.expires_at):
            raise SignInExpired("the answer of this sign-in was taken before")
        if "error" in query:
            said = "".join(sign for sign in query["error"][:64] if sign.isascii() and (sign.isalnum() or sign in "_-"))
            raise SignInRefused("the identity provider refused", found=said)
        code = query.get("code", "")
        if not 0 < len(code) <= OIDC_CODE_CHARS_MAX:
            raise SignInRefused("the identity provider sent no code")
        principal = await self.provider.redeem(
            code=code, nonce=begun.nonce, verifier=begun.verifier, named_issuer=query.get("iss")
        )
        return self._sessions.open_as(principal, life_ms=self.provider.session_ms)

    def _refused(self, request: Request, error: TgaError, wanted: str) -> Response:
        form = {"next": wanted}
        return sign_in.page(
            self._renderer, request, self._clock.now(), form=form, issuer=self.provider.name, problem=error
        )

    def _sealed(self, begun: Begun) -> str:
        fields = {
            "state": begun.state,
            "nonce": begun.nonce,
            "verifier": begun.verifier,
            "next": begun.next if len(begun.next) < CONSOLE_SESSION_CHARS_MAX // 2 else f"{PATH}/",
            "expires_at": begun.expires_at,
        }
        return urlsafe_b64encode(self._seals.seal(orjson.dumps(fields), context=_CONTEXT)).rstrip(b"=").decode("ascii")

    def _begun(self, cookies: Mapping[str, str], state: str) -> Begun | None:
        """The sign-in of this state, if this browser began it and it has not expired."""
        cookie = cookies.get(_COOKIE + hashlib.sha256(state.encode()).hexdigest()[:16])
        if not cookie or len(cookie) > CONSOLE_SESSION_CHARS_MAX:
            return None
        try:
            sealed = urlsafe_b64decode(cookie.encode("ascii") + b"=" * (-len(cookie) % 4))
            fields: dict[str, Any] = orjson.loads(self._seals.unseal(sealed, context=_CONTEXT))
            begun = Begun(**fields)
        except (TgaError, ValueError, TypeError, binascii.Error):
            return None
        is_this = hmac.compare_digest(begun.state.encode(), state.encode())
        return begun if is_this and begun.expires_at > self._clock.now() else None
