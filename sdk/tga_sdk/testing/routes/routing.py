"""Which request is answered by which function, and what all of these share."""

from __future__ import annotations

import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx2

from tga_sdk.testing import messages as m
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import limit_in
from tga_sdk.testing.run import MemoryRun

if TYPE_CHECKING:
    from tga_sdk.testing.gateway import MemoryGateway


@dataclass
class Reply:
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncGenerator[bytes, None] | None = None


@dataclass
class Asked:
    """One request. `named`: what its path names."""

    gateway: MemoryGateway
    principal: str
    query: bytes
    headers: httpx2.Headers
    raw: bytes
    named: dict[str, str]

    def run(self) -> MemoryRun:
        return self.gateway.engine.load(self.run_id)

    @property
    def run_id(self) -> str:
        return verify_own_id(self.named["run_id"])


def verify_own_id(run_id: str) -> str:
    if re.fullmatch(m.OWN_RUN_ID, run_id) is None:
        raise Problem("RUN_NOT_FOUND", "no such run", expected="letters, digits and . _ : -, at most 96")
    return run_id


Handler = Callable[[Asked], Awaitable[Reply]]
_ROUTES: Final[list[tuple[str, re.Pattern[str], Handler]]] = []


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))

    def add(handler: Handler) -> Handler:
        _ROUTES.append((method, pattern, handler))
        return handler

    return add


async def answer(gateway: MemoryGateway, request: httpx2.Request, raw: bytes) -> Reply:
    """The answer to a request; a refusal is one, too."""
    try:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Problem("UNAUTHENTICATED", "no key was sent", expected="Authorization: Bearer KEY")
        path, is_known = request.url.path, False
        for method, pattern, handler in _ROUTES:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            is_known = True
            if method == request.method:
                named = match.groupdict()
                return await handler(Asked(gateway, key, request.url.query, request.headers, raw, named))
        if is_known:
            raise Problem("METHOD_NOT_ALLOWED", f"{path} has no {request.method}")
        raise Problem("ROUTE_NOT_FOUND", f"the in-memory gateway has no route {path}")
    except Problem as problem:
        headers = {"Content-Type": "application/problem+json"}
        if problem.retry_after_s is not None:
            headers["Retry-After"] = str(problem.retry_after_s)
        return Reply(problem.status, written(problem.document()), headers)


def written(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def json_reply(document: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, written(document), {"Content-Type": "application/json", **headers})


def page_of(items: list[dict[str, Any]], given: dict[str, str]) -> tuple[list[dict[str, Any]], str | None]:
    """A page of these, and the cursor of the next."""
    limit, start = limit_in(given), 0
    if "cursor" in given:
        try:
            start = int(urlsafe_b64decode(given["cursor"] + "=="))
        except ValueError:
            raise Problem("INPUT_MALFORMED", "not a cursor of this list") from None
    page = items[start : start + limit]
    is_more = len(items) > start + limit
    return page, urlsafe_b64encode(str(start + limit).encode()).rstrip(b"=").decode() if is_more else None
