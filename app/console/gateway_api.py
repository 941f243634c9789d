"""The gateway's own HTTP API, asked inside the process: a page gets what every client gets, by the same rules."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any, Final
from urllib.parse import quote, urlencode

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.console.sessions import SCHEME

_DROPPED: Final = frozenset({b"authorization", b"cookie", b"content-length", b"content-type", b"accept-encoding"})


class ApiProblem(Exception):
    """What the API refused: its status and its problem document."""

    def __init__(self, status: int, document: dict[str, Any]) -> None:
        super().__init__(str(document.get("code")))
        self.status = status
        self.document = document

    @property
    def code(self) -> str:
        return str(self.document.get("code") or "INTERNAL_ERROR")


@dataclass(frozen=True, slots=True)
class ApiAnswer:
    status: int
    body: bytes

    @property
    def document(self) -> Any:
        return orjson.loads(self.body)


class GatewayApi:
    """`app` is the API behind an authenticator that takes sessions. It listens on no socket."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def as_session(self, cookie: str) -> SessionApi:
        return SessionApi(self._app, cookie)

    async def pass_on(self, scope: Scope, receive: Receive, send: Send, *, path: str, cookie: str) -> None:
        """The same request to another path of the API, as this session."""
        headers = [(name, value) for name, value in scope["headers"] if name not in _DROPPED]
        await self._app({**scope, **_place(path), "headers": [*headers, _authorization(cookie)]}, receive, send)


class SessionApi:
    """The API as one session sees it."""

    def __init__(self, app: ASGIApp, cookie: str) -> None:
        self._app = app
        self._cookie = cookie

    async def get(self, path: str, **query: str | int | None) -> Any:
        """The document of a GET, or ApiProblem. None values are left out of the query."""
        return (await self.ask("GET", path, query=query)).document

    async def text(self, path: str, **query: str | int | None) -> str:
        return (await self.ask("GET", path, query=query)).body.decode("utf-8")

    async def find(self, path: str, **query: str | int | None) -> Any | None:
        """As `get`; None for what does not exist, is not there yet or may not be seen."""
        try:
            return await self.get(path, **query)
        except ApiProblem as problem:
            if problem.status in (403, 404, 405, 409, 410):
                return None
            raise

    async def post(self, path: str, body: dict[str, Any]) -> ApiAnswer:
        return await self.ask("POST", path, body=orjson.dumps(body))

    async def ask(
        self, method: str, path: str, *, query: dict[str, str | int | None] | None = None, body: bytes = b""
    ) -> ApiAnswer:
        given = urlencode([(name, value) for name, value in (query or {}).items() if value is not None])
        scope: Scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            **_place(path),
            "query_string": given.encode("ascii"),
            "root_path": "",
            "headers": [(b"host", b"console"), _authorization(self._cookie)],
            "client": None,
            "server": None,
        }
        answer = _Collected()
        await self._app(scope, _Once(body), answer)
        if answer.status >= 400:
            raise ApiProblem(answer.status, orjson.loads(bytes(answer.body)))
        return ApiAnswer(answer.status, bytes(answer.body))


class _Once:
    """A body in one piece; then the client stays for as long as it is waited for."""

    def __init__(self, body: bytes) -> None:
        self._body: bytes | None = body

    async def __call__(self) -> Message:
        if self._body is None:
            await asyncio.Event().wait()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}


class _Collected:
    def __init__(self) -> None:
        self.status = 500
        self.body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        else:
            self.body += message.get("body", b"")


def _place(path: str) -> dict[str, Any]:
    return {"path": path, "raw_path": quote(path).encode("ascii")}


def _authorization(cookie: str) -> tuple[bytes, bytes]:
    return b"authorization", f"{SCHEME} {cookie}".encode("ascii")
