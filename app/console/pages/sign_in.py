"""Sign in: who are you? A refused key is never echoed."""

from __future__ import annotations

from collections.abc import Mapping
from urllib.parse import quote

from starlette.requests import Request
from starlette.responses import Response

from app.console.rendering import Renderer
from app.console.visit import own_path, query_of, theme_of


def quoted(path: str) -> str:
    return quote(path, safe="/")


def page(
    renderer: Renderer,
    request: Request,
    now: str,
    *,
    form: Mapping[str, str] | None = None,
    is_refused: bool = False,
) -> Response:
    given = query_of(request) if form is None else form
    context = {
        "next": own_path(given.get("next")),
        "has_ended": "ended" in given,
        "is_refused": is_refused,
        "theme": theme_of(request),
        "now": now,
    }
    return renderer.page("sign_in.html", context, status=403 if is_refused else 200)
