"""What people read without a key: the catalogue of errors, and the API's documentation. No script, nothing from
elsewhere, so that it works on a machine without a network."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import Any, Final

import orjson
from fastapi import APIRouter, Request
from starlette.responses import Response

from app.api.catalogue import render_errors
from app.api.docs_page import render_docs
from app.core.errors import ALL_ERRORS
from app.edge.services import header_of

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "pre{overflow-x:auto;padding:.7rem;border:1px solid #8886;border-radius:6px;font-size:13px}"
    "h2{margin-top:2.5rem;border-top:1px solid #8886;padding-top:1rem}h3{margin-top:2rem}code{font-size:.95em}"
    "summary{cursor:pointer}table{border-collapse:collapse;width:100%;font-size:14px}"
    "td{border-top:1px solid #8884;padding:.3rem .6rem .3rem 0;vertical-align:top}nav ul ul{margin-bottom:.6rem}"
)
_POLICY: Final = {
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'",
    "Cache-Control": "no-cache",
}


def router(document: Callable[[], dict[str, Any]]) -> APIRouter:
    made = APIRouter(include_in_schema=False)

    @made.get("/openapi.json")
    async def openapi() -> Response:
        return Response(orjson.dumps(document()), media_type="application/json")

    @made.get("/docs")
    async def docs() -> Response:
        return Response(_page("TGA Gateway API", render_docs(document())), media_type="text/html", headers=_POLICY)

    @made.get("/errors")
    async def errors(request: Request) -> Response:
        if "text/html" in (header_of(request.scope, b"accept") or ""):
            return Response(_page("Errors", _errors()), media_type="text/html", headers=_POLICY)
        return Response(render_errors(), media_type="text/markdown; charset=utf-8")

    return made


def _page(title: str, content: str) -> str:
    head = f'<meta charset="utf-8"><title>{html.escape(title)}</title><style>{_STYLE}</style>'
    return (
        f'<!doctype html><html lang="en"><head>{head}</head><body><h1>{html.escape(title)}</h1>{content}</body></html>'
    )


def _errors() -> str:
    return "".join(
        f'<h2 id="{error.code.lower()}"><code>{error.code}</code></h2>'
        f"<p>{html.escape(error.meaning)}</p><p>{html.escape(error.remedy)}</p>"
        for error in ALL_ERRORS
    )
