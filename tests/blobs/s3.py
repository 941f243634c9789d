"""An S3 of the tests' own: as much of its protocol as obstore speaks to store, read and delete an object.

It keeps what it was sent by whom: objects, uploads in parts that have not ended, and every request.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web


@dataclass
class FakeS3:
    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[str, dict[int, bytes]] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    fails: bool = False  # answers 503 to everything
    port: int = 0

    async def answer(self, request: web.Request) -> web.Response:
        self.requests.append(f"{request.method} {request.path_qs}")
        if self.fails:
            return web.Response(status=503, text="<Error><Code>SlowDown</Code></Error>")
        path, query, body = request.path, request.query, await request.read()
        upload = query.get("uploadId")
        match request.method:
            case "POST" if "uploads" in query:
                new = f"upload-{len(self.requests)}"
                self.uploads[new] = {}
                return _xml(
                    f"<InitiateMultipartUploadResult><UploadId>{new}</UploadId></InitiateMultipartUploadResult>"
                )
            case "POST" if "delete" in query:
                keys = re.findall(r"<Key>(.*?)</Key>", body.decode())
                for key in keys:
                    self.objects.pop(f"{path}/{key}", None)
                deleted = "".join(f"<Deleted><Key>{key}</Key></Deleted>" for key in keys)
                return _xml(f"<DeleteResult>{deleted}</DeleteResult>")
            case "PUT" if upload is not None:
                self.uploads[upload][int(query["partNumber"])] = body
                return web.Response(headers={"ETag": _etag(body)})
            case "POST" if upload is not None:
                parts = self.uploads.pop(upload)
                self.objects[path] = b"".join(parts[number] for number in sorted(parts))
                return _xml(f"<CompleteMultipartUploadResult><ETag>{_etag(b'')}</ETag></CompleteMultipartUploadResult>")
            case "DELETE" if upload is not None:
                self.uploads.pop(upload, None)
                return web.Response(status=204)
            case "PUT":
                self.objects[path] = body
                return web.Response(headers={"ETag": _etag(body)})
            case "DELETE":
                self.objects.pop(path, None)
                return web.Response(status=204)
            case "GET" | "HEAD":
                return self._read(request)
        return web.Response(status=400)

    def _read(self, request: web.Request) -> web.Response:
        found = self.objects.get(request.path)
        if found is None:
            return web.Response(status=404, text="<Error><Code>NoSuchKey</Code></Error>")
        headers = {"ETag": _etag(found), "Last-Modified": "Thu, 01 Jan 2026 00:00:00 GMT"}
        if request.method == "HEAD":
            return web.Response(headers={**headers, "Content-Length": str(len(found))})
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
        if asked is None:
            return web.Response(body=found, headers=headers)
        start, end = int(asked[1]), min(int(asked[2]), len(found) - 1)
        if start >= len(found):
            return web.Response(status=416)
        headers["Content-Range"] = f"bytes {start}-{end}/{len(found)}"
        return web.Response(status=206, body=found[start : end + 1], headers=headers)

    def environment(self) -> dict[str, str]:
        """What a gateway needs to find it."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self.port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "secret",
        }


def _etag(body: bytes) -> str:
    return f'"{hashlib.sha256(body).hexdigest()[:32]}"'


def _xml(text: str) -> web.Response:
    return web.Response(text=text, content_type="application/xml")


@asynccontextmanager
async def open_s3() -> AsyncIterator[FakeS3]:
    s3 = FakeS3()
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", s3.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    s3.port = runner.addresses[0][1]
    try:
        yield s3
    finally:
        await runner.cleanup()
