"""Sign in: who are you? A refused key is never echoed."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from app.console.rendering import Renderer
from app.console.visit import own_path, query_of, theme_of
from app.core.errors import TgaError
from app.edge.problems import document_of, status_of


def quoted(path: str) -> str:
    return quote(path, safe="/")


def page(
    renderer: Renderer,
    request: Request,
    now: str,
    *,
    form: Mapping[str, str] | None = None,
    is_refused: bool = False,
    issuer: str | None = None,
    problem: TgaError | None = None,
) -> Response:
    """`issuer`: what the button of `[auth.oidc]` says, if there is one. `problem`: why signing in there failed."""
    given = query_of(request) if form is None else form
    context = {
        "next": own_path(given.get("next")),
        "has_ended": "ended" in given,
        "is_refused": is_refused,
        "issuer": issuer,
        "problem": None if problem is None else document_of(problem),
        "theme": theme_of(request),
        "now": now,
    }
    status = 403 if is_refused else 200 if problem is None else status_of(problem)
    return renderer.page("sign_in.html", context, status=status)
