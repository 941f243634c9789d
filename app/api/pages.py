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
from app.core.errors import ALL_ERRORS
from app.edge.services import header_of

_STYLE: Final = (
    "body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color-scheme:light dark}"
    "pre{overflow-x:auto;padding:.7rem;border:1px solid #8886;border-radius:6px;font-size:13px}"
    "h2{margin-top:2.5rem;border-top:1px solid #8886;padding-top:1rem}code{font-size:.95em}summary{cursor:pointer}"
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
        return Response(_page("TGA Gateway API", _operations(document())), media_type="text/html", headers=_POLICY)

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


def _operations(document: dict[str, Any]) -> str:
    parts = [
        f"<p>{html.escape(document['info']['description'])}</p>",
        '<p><a href="/openapi.json">/openapi.json</a></p>',
    ]
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            parts.append(f"<h2><code>{method.upper()} {html.escape(path)}</code></h2>")
            parts.append(f"<p>{html.escape(operation.get('summary', ''))}</p>")
            for parameter in operation.get("parameters", []):
                name, about = html.escape(parameter["name"]), html.escape(parameter.get("description", ""))
                parts.append(f"<p><code>{name}</code> ({html.escape(parameter['in'])}) {about}</p>")
            body = operation.get("requestBody", {}).get("content", {}).get("application/json")
            if body is not None:
                parts.append(_details("Body", body))
            for status, response in operation["responses"].items():
                parts.append(_details(f"{status} {response['description']}", response.get("content", {})))
    return "".join(parts)


def _details(summary: str, value: Any) -> str:
    shown = html.escape(orjson.dumps(value, option=orjson.OPT_INDENT_2).decode()) if value else ""
    return f"<details><summary>{html.escape(summary)}</summary>{f'<pre>{shown}</pre>' if shown else ''}</details>"
