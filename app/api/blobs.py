"""Blobs over HTTP: large values of runs, by their SHA-256, streamed in and out. A tenant has its own.

Who knows a digest may read the blob, within the tenant: the digest is as good as the bytes for comparing, and nobody
guesses it. Uploading what is there already stores nothing, and a repeat is harmless.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.config.wording import shown
from app.core.digest import Digest
from app.core.errors import (
    BlobDamaged,
    BlobGoing,
    BlobMismatch,
    BlobNotFound,
    BlobStoreUnavailable,
    GatewayBusy,
    InputMalformed,
    OutcomeUnknown,
)
from app.core.limits import BLOB_PIECE_BYTES, BLOB_SEND_WAIT_MS, BLOB_TRANSFERS_MAX
from app.domain.runs.blobs import BlobContent
from app.edge.body import ClientGone
from app.edge.parameters import parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.protocol import LONG_BODY, TRANSPORT
from app.edge.services import Services, header_of

_MEDIA_TYPE: Final = "application/octet-stream"
_SHA256: Final = re.compile(r"[0-9a-f]{64}")
_EXAMPLE: Final = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
_PARAMETER: Final = {
    "name": "sha256",
    "in": "path",
    "required": True,
    "schema": {"type": "string", "pattern": f"^{_SHA256.pattern}$"},
    "example": _EXAMPLE,
}
_BYTES: Final[dict[str, Any]] = {_MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}, "example": "abc"}}


class StoredBlob(BaseModel):
    """What is stored; an entry of a run can refer to it now, and for a day at least."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"sha256": _EXAMPLE, "size_bytes": 3}]})
    sha256: str
    size_bytes: int


def router(services: Services) -> APIRouter:
    routes, transfers = APIRouter(tags=["blobs"]), _Transfers()

    @routes.put(
        "/v1/blobs/{sha256}",
        operation_id="put_blob",
        summary="Store bytes under their SHA-256",
        response_model=None,
        responses={
            200: {"model": StoredBlob, "description": "The same bytes were there already."},
            201: {"model": StoredBlob, "description": "They are stored."},
            **documented(BlobMismatch, BlobGoing, BlobStoreUnavailable, OutcomeUnknown),
        },
        openapi_extra={"parameters": [_PARAMETER], "requestBody": {"required": True, "content": _BYTES}},
    )
    async def put(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "write_blob")
            parameters(request)
            sha256 = _sha256(request)
            stated_bytes = _stated_bytes(request.scope)
            with transfers.one():
                request.scope[LONG_BODY] = True
                size_bytes, is_new = await services.blobs.put(
                    principal.tenant, sha256, _pieces(request.receive), stated_bytes=stated_bytes
                )
            answer = StoredBlob(sha256=sha256, size_bytes=size_bytes)
            return Response(answer.model_dump_json(), status_code=201 if is_new else 200, media_type="application/json")

    @routes.get(
        "/v1/blobs/{sha256}",
        operation_id="get_blob",
        summary="The bytes, once all of them are verified",
        response_class=Response,
        responses={
            200: {"description": "The bytes.", "content": _BYTES},
            **documented(BlobNotFound, BlobDamaged, BlobStoreUnavailable),
        },
        openapi_extra={"parameters": [_PARAMETER]},
    )
    async def get(request: Request) -> Response:
        return _Download(services, transfers, request)

    @routes.head(
        "/v1/blobs/{sha256}",
        operation_id="head_blob",
        summary="Whether it is stored, and its size; the bytes are not looked at",
        response_class=Response,
        responses={200: {"description": "It is stored."}, **documented(BlobNotFound)},
        openapi_extra={"parameters": [_PARAMETER]},
    )
    async def head(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_blob")
            parameters(request)
            sha256 = _sha256(request)
            size_bytes = await services.blobs.find(principal.tenant, sha256)
            return Response(headers={**_headers(sha256), "Content-Length": str(size_bytes)})

    return routes


class _Download(Response):
    """Sends a blob in pieces, and the next one when the client has taken the last. Nothing is sent before all of it was
    verified; if the second reading differs, the answer is cut off before its end."""

    def __init__(self, services: Services, transfers: _Transfers, request: Request) -> None:
        super().__init__()
        self._services = services
        self._transfers = transfers
        self._request = request

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = self._request
        async with self._services.admitted(request) as principal:
            require(principal, "read_blob")
            parameters(request)
            sha256 = _sha256(request)
            with self._transfers.one():
                content = await self._services.blobs.open(principal.tenant, sha256)
                headers = {**_headers(sha256), "Content-Length": str(content.size_bytes)}
                raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": raw})
                await self._send_pieces(content, send)

    async def _send_pieces(self, content: BlobContent, send: Send) -> None:
        try:
            async with aclosing(_small(content)) as pieces:
                async for piece in pieces:
                    async with asyncio.timeout(BLOB_SEND_WAIT_MS / 1000):
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            # Closing would wait for the client to take what is buffered, and it takes nothing.
            self._request.scope[TRANSPORT].abort()
            raise ClientGone from None


class _Transfers:
    """Uploads and downloads under way: each holds some megabytes."""

    def __init__(self) -> None:
        self._count = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        if self._count >= BLOB_TRANSFERS_MAX:
            raise GatewayBusy("as many blobs are under way as the gateway takes", expected=BLOB_TRANSFERS_MAX)
        self._count += 1
        try:
            yield
        finally:
            self._count -= 1


async def _small(content: BlobContent) -> AsyncGenerator[bytes, None]:
    async for piece in content.pieces():
        for start in range(0, len(piece), BLOB_PIECE_BYTES):
            yield piece[start : start + BLOB_PIECE_BYTES]


async def _pieces(receive: Receive) -> AsyncIterator[bytes]:
    while (message := await receive())["type"] == "http.request":
        yield message.get("body", b"")
        if not message.get("more_body", False):
            return
    raise ClientGone


def _sha256(request: Request) -> Digest:
    given: str = request.path_params["sha256"]
    if not _SHA256.fullmatch(given):
        raise InputMalformed("not a SHA-256", expected="64 lowercase hex digits", found=shown(given))
    return Digest(given)


def _stated_bytes(scope: Scope) -> int | None:
    encoding = header_of(scope, b"content-encoding")
    if encoding is not None and encoding.strip().lower() not in ("", "identity"):
        raise InputMalformed("the body is encoded", expected="no Content-Encoding", found=shown(encoding))
    stated = header_of(scope, b"content-length")
    return None if stated is None else int(stated)  # the parser has made sure that it is a number


def _headers(sha256: Digest) -> dict[str, str]:
    """Headers with which a browser neither shows the bytes as a page nor keeps them."""
    return {
        "Content-Type": _MEDIA_TYPE,
        "Content-Disposition": "attachment",
        "X-Content-Type-Options": "nosniff",
        "Cache-Control": "no-store",
        "ETag": f'"{sha256}"',
    }
