"""One request of a person who is signed in: who it is, the API as that person, and answers."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import parse_qsl, urlsplit

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from app.console.gateway_api import ApiProblem, SessionApi
from app.console.rendering import HEADERS, PATH, Renderer
from app.console.sessions import Session
from app.core.errors import Forbidden, InputMalformed, InputTooLarge
from app.core.limits import CONSOLE_FORM_BYTES_MAX, QUERY_PARAMETERS_MAX
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.edge.body import read_bytes
from app.edge.permissions import MAY, Action, may
from app.edge.services import header_of

THEME_COOKIE: Final = "console_theme"
TIMES_COOKIE: Final = "console_times"
_THEMES: Final = frozenset({"light", "dark"})
# How far back lists look, by what it is called in forms and addresses.
HOURS: Final = {"last hour": 1, "last 24 h": 24, "last 7 days": 168}
_FORM: Final = "application/x-www-form-urlencoded"


@dataclass(slots=True)
class Visit:
    """`form`: what was typed, for a POST; its token was compared before anybody sees it."""

    request: Request
    principal: Principal
    session: Session
    api: SessionApi
    renderer: Renderer
    clock: Clock
    form: dict[str, str] = field(default_factory=dict)

    @property
    def query(self) -> dict[str, str]:
        return query_of(self.request)

    def may(self, action: Action) -> bool:
        return may(self.principal, action)

    def roles_for(self, action: Action) -> str:
        """What the place of a button that is not there says: which roles have it."""
        return " or ".join(sorted(MAY[action]))

    async def page(self, template: str, *, nav: str, status: int = 200, **context: Any) -> Response:
        """`nav`: which entry of the navigation this page belongs to."""
        return self.renderer.page(
            template,
            {
                **context,
                "nav": nav,
                "frame": await self._frame(),
                "me": self.principal,
                "may": self.may,
                "roles_for": self.roles_for,
                "csrf": self.session.csrf,
                "theme": theme_of(self.request),
                "times": times_of(self.request),
                "now": self.clock.now(),
                "here": here_of(self.request),
            },
            status=status,
        )

    def since(self, words: str | None) -> str | None:
        """When the time began that a list is limited to, by one of HOURS; None: any time."""
        return self.clock.after(-HOURS[words] * 3_600_000) if words in HOURS else None

    def go(self, path: str) -> Response:
        """After a form: a page that can be loaded again without sending anything again."""
        return RedirectResponse(f"{PATH}{path}", status_code=303, headers=HEADERS)

    async def _frame(self) -> dict[str, Any]:
        """What the sidebar says on every page. A part that cannot be had is left out, and says so."""

        async def found(path: str, **query: int) -> Any | None:
            try:
                return await self.api.find(path, **query)
            except ApiProblem:
                return None

        async def head() -> str | None:
            try:
                return await self.api.text("/v1/log/checkpoint")
            except ApiProblem:
                return None

        waiting, tools, note, ready, standing = await asyncio.gather(
            found("/v1/approvals", limit=1), found("/v1/tools"), head(), found("/readyz"), found("/v1/log/standing")
        )
        listed = [] if tools is None else tools["items"]
        return {
            "waiting": "" if waiting is None else counted(waiting["count"]),
            "quarantined": len([one for one in listed if one["pin"]["status"] == "quarantined"]),
            "log": log_strip(note, ready, standing),
        }


def counted(count: Mapping[str, Any]) -> str:
    """How many calls and questions wait for a person, in words that a badge has room for; nothing for none."""
    total = count["calls"] + count["questions"]
    return f"{total:,}{'' if count['is_exact'] else '+'}" if total else ""


def log_strip(
    note: str | None, ready: Mapping[str, Any] | None, standing: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Size of the newest signed head, what the gateway says about its log, and what the last verification said."""
    lines = (note or "").split("\n")
    size = int(lines[1]) if len(lines) > 2 and lines[1].isdigit() else None
    condition = "unknown" if ready is None else str(ready.get("log", "unknown"))
    verified = None if standing is None else standing["verified"]
    return {
        "size": size,
        "condition": condition,
        "reason": None if ready is None else ready.get("reason"),
        "finding": verified if verified is not None and verified["state"] == "wrong" else None,
        "sound": verified if verified is not None and verified["state"] == "sound" else None,
    }


def query_of(request: Request) -> dict[str, str]:
    """The query's parameters, each once, empty ones left out; what a page does not know it ignores."""
    raw = request.scope["query_string"].decode("latin-1")
    try:
        pairs = parse_qsl(raw, keep_blank_values=False, max_num_fields=4 * QUERY_PARAMETERS_MAX)
    except ValueError:
        raise InputMalformed("the query cannot be read") from None
    return dict(pairs)


def theme_of(request: Request) -> str | None:
    theme = request.cookies.get(THEME_COOKIE)
    return theme if theme in _THEMES else None


def times_of(request: Request) -> str:
    """Whether the visitor has chosen local time. What is sent is in UTC either way: only a browser knows its zone."""
    return "local" if request.cookies.get(TIMES_COOKIE) == "local" else "utc"


def here_of(request: Request) -> str:
    query = request.url.query
    return request.url.path + (f"?{query}" if query else "")


def own_path(text: str | None) -> str:
    """An address inside the console that a form named, or the overview: no visitor is sent elsewhere."""
    if not text or not text.startswith(f"{PATH}/") or any(one in text for one in "\\\r\n"):
        return f"{PATH}/"
    parts = urlsplit(text)
    return f"{PATH}/" if parts.scheme or parts.netloc else text


async def form_of(request: Request) -> dict[str, str]:
    """The fields of a form that this very site has sent; Forbidden for a form from elsewhere."""
    _verify_origin(request)
    if (header_of(request.scope, b"content-type") or "").partition(";")[0].strip().lower() != _FORM:
        raise InputMalformed("not a form", expected=_FORM)
    raw = await read_bytes(request.scope, request.receive)
    if len(raw) > CONSOLE_FORM_BYTES_MAX:
        raise InputTooLarge("the form is too large", expected=f"at most {CONSOLE_FORM_BYTES_MAX} bytes", found=len(raw))
    try:
        pairs = parse_qsl(raw.decode("utf-8"), keep_blank_values=True, max_num_fields=64, errors="strict")
    except ValueError:
        raise InputMalformed("the form cannot be read") from None
    # Browsers end lines with two characters; what goes on the record has one.
    return {name: value.replace("\r\n", "\n") for name, value in pairs}


def verify_csrf(session: Session, form: Mapping[str, str]) -> None:
    """Raise Forbidden unless the form came from a page of this session."""
    if not hmac.compare_digest(session.csrf.encode(), form.get("csrf", "").encode()):
        raise Forbidden("the form is not from a page of this session", remedy="Load the page again, then send it.")


def _verify_origin(request: Request) -> None:
    site = header_of(request.scope, b"sec-fetch-site")
    origin = header_of(request.scope, b"origin")
    host = header_of(request.scope, b"host")
    if site not in (None, "same-origin") or (origin is not None and urlsplit(origin).netloc != host):
        raise Forbidden("the form was sent by another site", remedy="Open the console itself, and send it from there.")
