"""Recorded transcripts of the protocol: the same requests to a real gateway and to the one in memory.

A scenario asks, and notes what it was answered. Before two transcripts are compared, what cannot be the same in both
(times, secrets, ids that were made up, digests of documents that hold them) is replaced by its place in the order of
appearance, so that the same thing has the same name wherever it stands.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx2

PROGRAM = "a" * 64
OTHER = "b" * 64
DIGEST = "c" * 64
NOW = "2026-01-01T00:00:00.000Z"
LONG_AGO = "2026-01-01T00:00:00.000Z"
PRINCIPALS = {"agent": "agent-1", "worker": "worker-1", "supervisor": "ada", "admin": "root"}

_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z")
_MADE = re.compile(
    r"[0-9a-f]{64}|[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}|[0-9a-f]{32}|[A-Za-z0-9_-]{32}|ch_\w+"
)
_REFUSAL = re.compile(r"^([A-Z_]+: [^.;]*|[^(]*)(?:[.;] [A-Zef].*| \(expected .*\))$")  # its first sentence
_KEPT = {PROGRAM, OTHER, DIGEST}
# Said by the gateway about itself, or in the words of the library that checks schemas.
_NOT_COMPARED = {"title", "remedy", "roles", "expected", "found", "instance", "sequence_number_of_problem"}


@dataclass
class Driver:
    """Asks one gateway, as one of several principals, and notes it."""

    url: str
    keys: dict[str, str]
    transport: httpx2.AsyncBaseTransport | None = None
    worker: str = "worker-process-1"
    move: Callable[[int], None] | None = None
    notes: list[dict[str, Any]] = field(default_factory=list)

    async def __aenter__(self) -> Driver:
        self._client = httpx2.AsyncClient(transport=self.transport, timeout=60, trust_env=False)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def ask(
        self, method: str, path: str, body: Any = None, *, who: str = "agent", raw: bytes | None = None
    ) -> Any:
        content = raw if raw is not None else None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {self.keys[who]}"}
        answer = await self._client.request(method, self.url + path, content=content, headers=headers)
        is_json = "json" in answer.headers.get("Content-Type", "")
        document = json.loads(answer.content) if is_json else answer.content.decode("latin-1")
        note = {"asked": f"{method} {path}", "status": answer.status_code, "answer": document}
        if "Retry-After" in answer.headers:
            note["retry_after"] = answer.headers["Retry-After"]
        self.notes.append(note)
        return document

    async def pass_ms(self, milliseconds: int) -> None:
        """So much time passes, or is moved on."""
        if self.move is None:
            await asyncio.sleep(milliseconds / 1000)
        else:
            self.move(milliseconds)

    # Short ways to the requests of scenarios.

    async def register(self, name: str, digest: str = PROGRAM, **more: Any) -> Any:
        said = {"name": name, "version": "1", "program_digest": digest, **more}
        return await self.ask("POST", "/v1/procedures", said, who="worker")

    async def start(self, procedure: str, run_id: str, given: Any = None, **more: Any) -> Any:
        said = {"procedure": procedure, "run_id": run_id, "input": given, **more}
        return await self.ask("POST", "/v1/runs", said)

    async def lease(self, *procedures: str, wait_ms: int = 10_000, slots: int = 1, **more: Any) -> list[Any]:
        offered = [{"name": name, "version": "1", "program_digest": PROGRAM} for name in procedures]
        said = {"worker": self.worker, "name": "here", "procedures": offered, "slots": slots}
        answer = await self.ask("POST", "/v1/worker/lease", {**said, "wait_ms": wait_ms, **more}, who="worker")
        found: list[Any] = answer.get("runs", [])
        return found

    async def begin(self, name: str, given: Any = None, **policy: Any) -> Any:
        """A run of a procedure of its own, leased."""
        more: dict[str, Any] = {"policy": policy} if policy else {}
        await self.register(name, **more)
        await self.start(name, f"{name}-1", given)
        (run,) = await self.lease(name)
        return run

    async def put(self, run: Any, *puts: Any, after: int, then: Any = None, **more: Any) -> Any:
        said = {"lease": run["lease"], "attempt": run["attempt"], "after_seq": after, "puts": list(puts)}
        if then is not None:
            said["then"] = then
        return await self.ask("POST", f"/v1/runs/{run['run_id']}/checkpoints", {**said, **more}, who="worker")

    async def look(self, run_id: str) -> Any:
        return await self.ask("GET", f"/v1/runs/{run_id}")

    async def journal(self, run_id: str) -> Any:
        return await self.ask("GET", f"/v1/runs/{run_id}/checkpoints", who="worker")

    async def answer(self, run_id: str, path: str, answer: Any, **more: Any) -> Any:
        said = {"path": path, "answer": answer, **more}
        return await self.ask("POST", f"/v1/runs/{run_id}/signals", said, who="supervisor")


Scenario = Callable[[Driver], Awaitable[None]]


def normalised(notes: list[dict[str, Any]]) -> list[Any]:
    """What two gateways must agree on."""
    names: dict[str, str] = {}

    def renamed(found: re.Match[str]) -> str:
        text = found[0]
        return text if text in _KEPT else names.setdefault(text, f"#{len(names) + 1}")

    def walk(value: Any) -> Any:
        if isinstance(value, dict):
            is_problem = "code" in value and "status" in value and "detail" in value
            left_out = _NOT_COMPARED if is_problem else {"roles", "signature", "allowed_by", "traceparent"}
            return {key: walk(member) for key, member in value.items() if key not in left_out}
        if isinstance(value, list):
            return [walk(item) for item in value]
        if isinstance(value, str):
            return _REFUSAL.sub(r"\1", _MADE.sub(renamed, _TIME.sub("TIME", value)))
        return value

    return [walk(note) for note in notes]


# What is put.


def inline(value: Any) -> dict[str, Any]:
    return {"tier": "inline", "value": value}


def step(path: str, value: Any = 1, **more: Any) -> dict[str, Any]:
    return {
        "type": "checkpoint",
        "path": path,
        "kind": "step",
        "name": "plan",
        "input_digest": DIGEST,
        "outcome": "OK",
        "value": inline(value),
        "started_at": NOW,
        "duration_ms": 1,
        **more,
    }


def failed(path: str, outcome: str = "ERROR", **more: Any) -> dict[str, Any]:
    error = {"type": "ValueError", "message": "no such order", "retryable": False}
    return step(path, outcome=outcome, **{"error": error, **more}) | {"value": None}


def ask(path: str, name: str = "pay?", **question: Any) -> dict[str, Any]:
    request = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}, **question}
    return {"type": "ask", "path": path, "name": name, "input_digest": DIGEST, "request": request}


def sleep(path: str, wakes_at: str = LONG_AGO) -> dict[str, Any]:
    return {"type": "sleep", "path": path, "name": "rest", "input_digest": DIGEST, "wakes_at": wakes_at}


def signal(path: str, name: str = "paid", **more: Any) -> dict[str, Any]:
    return {"type": "signal", "path": path, "name": name, "input_digest": DIGEST, **more}


def begun(path: str, **more: Any) -> dict[str, Any]:
    return {"type": "step", "path": path, "name": "plan", "input_digest": DIGEST, **more}


def suspend(*awaits: str, **more: Any) -> dict[str, Any]:
    return {"type": "suspend", "awaits": list(awaits), **more}


def tool(path: str, name: str = "charge", arguments: Any = None, **more: Any) -> dict[str, Any]:
    said = {"type": "tool", "path": path, "input_digest": DIGEST, "server_id": "bank", "tool_name": name}
    return {**said, "arguments": {"amount": 5} if arguments is None else arguments, **more}


def child(path: str, procedure: str, given: Any = None, **more: Any) -> dict[str, Any]:
    said = {"type": "child", "path": path, "name": procedure, "input_digest": DIGEST, "procedure": procedure}
    return {**said, "input": inline(given), **more}


def complete(positions: int, output: Any = "done") -> dict[str, Any]:
    return {"type": "complete", "output": inline(output), "positions": positions}


def fail(*, retryable: bool = False) -> dict[str, Any]:
    return {"type": "fail", "error": {"type": "ValueError", "message": "no such order", "retryable": retryable}}
