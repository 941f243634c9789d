"""A client of a real gateway, as plain as an attacker's; and what the attacked world has more than others."""

from __future__ import annotations

import json
from dataclasses import dataclass
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

from app.clock import SystemClock

SERVERS = """
[tenants.other]

[servers.theirs]
transport = "http"
base_url = "{url}"
tenant = "other"

[servers.theirs.tools.charge]
class = "write"

[servers.theirs.tools.refund]
class = "write"
tags = ["approval"]
"""


@dataclass(frozen=True)
class Said:
    status: int
    body: Any

    @property
    def code(self) -> str | None:
        code: str | None = self.body.get("code")
        return code


class Client:
    """One kept connection under one key."""

    def __init__(self, url: str, key: str) -> None:
        self._key = key
        self.connection = HTTPConnection(urlsplit(url).netloc, timeout=60)

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Said:
        sent = None if body is None else json.dumps(body).encode()
        self.connection.request(method, path, sent, {"Authorization": f"Bearer {self._key}", **headers})
        answer = self.connection.getresponse()
        return Said(answer.status, json.loads(answer.read()))

    def call(self, server: str, tool: str, arguments: dict[str, Any], **fields: Any) -> Said:
        asked = {"server_id": server, "tool_name": tool, "arguments": arguments, "idempotency_key": new_id(), **fields}
        return self.ask("POST", "/v1/tool-calls", asked)

    def decide(self, trace_id: str, decision: str, digest: str) -> Said:
        asked = {"decision": decision, "action_request_digest": digest}
        return self.ask("POST", f"/v1/traces/{trace_id}/decision", asked)

    def close(self) -> None:
        self.connection.close()


def new_id() -> str:
    return SystemClock().new_id()
