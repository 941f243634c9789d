"""A service that answers a POST of the input with the prediction."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any
from weakref import WeakKeyDictionary

import httpx2

from tga_sdk.errors import ModelRefused, PredictionFailed
from tga_sdk.models.specs import HttpModel
from tga_sdk.wire import REPEATED


class HttpService:
    """One pool of connections for each event loop that asks."""

    def __init__(self, spec: HttpModel) -> None:
        self._spec = spec
        self._clients: WeakKeyDictionary[asyncio.AbstractEventLoop, httpx2.AsyncClient] = WeakKeyDictionary()
        self._headers = {**spec.headers, "Content-Type": "application/json", "Accept": "application/json"}
        for header, variable in spec.headers_env.items():
            if variable not in os.environ:
                raise ModelRefused(
                    f"the header {header} comes from the environment variable {variable}, not set on this worker",
                    retryable=True,
                )
            self._headers[header] = os.environ[variable]

    async def predict(self, given: Any) -> Any:
        content = json.dumps(given, ensure_ascii=False, allow_nan=False).encode()
        try:
            async with self._client().stream(
                "POST", self._spec.endpoint, content=content, headers=self._headers
            ) as answer:
                found = await self._bounded(answer)
        except httpx2.HTTPError as error:
            raise PredictionFailed(
                f"{self._spec.endpoint} did not answer: {type(error).__name__}: {error}", retryable=True
            ) from error
        if not answer.is_success:
            raise PredictionFailed(
                f"{self._spec.endpoint} answered {answer.status_code}: {found[:200].decode(errors='replace')}",
                retryable=answer.status_code in REPEATED,
            )
        try:
            return json.loads(found)
        except ValueError as error:
            raise PredictionFailed(f"{self._spec.endpoint} answered no JSON: {found[:80]!r}") from error

    async def _bounded(self, answer: httpx2.Response) -> bytes:
        found = bytearray()
        async for part in answer.aiter_bytes():
            found += part
            if len(found) > self._spec.answer_bytes_max:
                raise PredictionFailed(
                    f"{self._spec.endpoint} answered more than {self._spec.answer_bytes_max} bytes (answer_bytes_max)"
                )
        return bytes(found)

    def _client(self) -> httpx2.AsyncClient:
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            self._clients[loop] = httpx2.AsyncClient(timeout=httpx2.Timeout(None, connect=10.0), trust_env=False)
        return self._clients[loop]


def load(spec: HttpModel) -> HttpService:
    return HttpService(spec)
