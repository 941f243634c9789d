"""Templates and static files: loaded once, escaped always, served with a policy that admits nothing else."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup
from starlette.responses import Response

from app.console import components, icons, shown_text

PATH: Final = "/console"
_HERE: Final = Path(__file__).parent
_MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}

POLICY: Final = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types console"
)
HEADERS: Final = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
# Text or bytes of a caller, program or tool server: opened on its own it can do nothing at all.
SANDBOX: Final = {**HEADERS, "Content-Security-Policy": "default-src 'none'; sandbox; frame-ancestors 'none'"}


@dataclass(frozen=True, slots=True)
class StaticFile:
    body: bytes
    media_type: str
    version: str


class Renderer:
    """Static files are addressed by their digest, so that browsers may keep them for good."""

    def __init__(self, pages: Iterable[str] = ()) -> None:
        """`pages`: the paths that there are; a link to another part of the console leads nowhere, and is none."""
        self._parts = {path.split("/")[1] for path in pages}
        self._files = {file.name: _loaded(file) for file in sorted((_HERE / "static").iterdir()) if file.is_file()}
        self._environment = Environment(
            loader=FileSystemLoader(_HERE / "templates"),
            undefined=StrictUndefined,
            autoescape=True,
            trim_blocks=True,
            lstrip_blocks=True,
            auto_reload=False,
        )
        self._environment.globals.update(
            icon=icons.icon,
            state=components.state_pill,
            dg=components.digest,
            tid=components.identity,
            copy_btn=components.copy_button,
            cli=components.command,
            tool=components.tool,
            json_view=components.json_view,
            shown=shown_text.shown,
            version=components.version,
            hidden_in=shown_text.hidden_in,
            sealed=shown_text.sealed,
            clock_time=components.clock_time,
            at=components.absolute_time,
            span=components.span,
            between_ms=components.between_ms,
            spark=components.sparkline,
            bar=components.bar,
            static=self._address,
            href=self._href,
        )
        self._environment.filters["commas"] = components.commas

    def page(self, template: str, context: dict[str, Any], *, status: int = 200) -> Response:
        now = context["now"]
        made = self._environment.get_template(template).render(
            **context,
            t=lambda text, words=None: components.relative_time(text, now, words),
            ago=lambda text: components.ago(text, now),
        )
        headers = {**HEADERS, "Cache-Control": "no-store"}
        return Response(made, status_code=status, media_type="text/html; charset=utf-8", headers=headers)

    def static(self, name: str) -> Response | None:
        file = self._files.get(name)
        if file is None:
            return None
        headers = {**HEADERS, "Cache-Control": "public, max-age=31536000, immutable"}
        return Response(file.body, media_type=file.media_type, headers=headers)

    def _href(self, path: str) -> Markup:
        """The attribute of a link into a part of the console that there is; else nothing."""
        part = path.partition("?")[0].split("/")[1]
        return Markup('href="{}{}"').format(PATH, path) if part in self._parts else Markup("")

    def _address(self, name: str) -> str:
        return f"{PATH}/static/{name}?v={self._files[name].version}"


def _loaded(file: Path) -> StaticFile:
    body = file.read_bytes()
    return StaticFile(body, _MEDIA_TYPES[file.suffix], hashlib.sha256(body).hexdigest()[:12])
