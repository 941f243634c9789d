"""A worker whose every put a test writes by hand, over HTTP: what the program did is what the test says."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

from tests.cli.world import World
from tests.patience import HANG_S

PROGRAM = "a" * 64
DIGEST = "d" * 64
AT = "2026-01-01T00:00:00.000Z"


class HandWorker:
    """One worker process of one procedure, and the one run that it holds."""

    def __init__(self, world: World, key: str, *, procedure: str = "onboard", version: str = "1") -> None:
        self._url, self.key = world.url, key
        self._program = {"name": procedure, "version": version, "program_digest": PROGRAM}
        self.run: dict[str, Any] = {}
        self.seen = 0

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        request = urllib.request.Request(  # noqa: S310
            self._url + path,
            data=json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"},
        )
        try:
            with urllib.request.urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
                return dict(json.loads(answer.read()))
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from None

    def register(self) -> None:
        self.ask("/v1/procedures", self._program)

    def lease(self, worker: str = "hand-worker-1") -> None:
        """The next run, whatever it is."""
        body = {"worker": worker, "name": worker, "procedures": [self._program], "slots": 1, "wait_ms": 20_000}
        (self.run,) = self.ask("/v1/worker/lease", body)["runs"]
        self.seen = self.run["sequence_number"]

    def put(self, *puts: dict[str, Any], then: dict[str, Any] | None = None) -> dict[str, Any]:
        body = {"lease": self.run["lease"], "attempt": self.run["attempt"], "after_seq": self.seen, "puts": list(puts)}
        if then is not None:
            body["then"] = then
        answer = self.ask(f"/v1/runs/{self.run['run_id']}/checkpoints", body)
        assert answer["directive"] != "STOP", answer
        self.seen = answer["sequence_number"]
        return answer


def step(path: str, value: Any = None, *, name: str = "plan", **more: Any) -> dict[str, Any]:
    said = {"outcome": "OK", "value": {"tier": "inline", "value": value}} if "error" not in more else {}
    return {
        "type": "checkpoint",
        "path": path,
        "kind": "step",
        "name": name,
        "input_digest": DIGEST,
        "started_at": AT,
        "duration_ms": 12,
        **said,
        **more,
    }


def failed(path: str, message: str, *, name: str = "plan", **more: Any) -> dict[str, Any]:
    error = {"type": "ValueError", "message": message, "retryable": False}
    return step(path, name=name, outcome="ERROR", error=error, **more)


def ask(path: str, message: str, schema: dict[str, Any], *, form: str = "approve", name: str = "pay") -> dict[str, Any]:
    request = {"form": form, "message": message, "answer_schema": schema}
    return {"type": "ask", "path": path, "name": name, "input_digest": DIGEST, "request": request}


def tool(path: str, tool_name: str, **arguments: Any) -> dict[str, Any]:
    said = {"type": "tool", "path": path, "input_digest": DIGEST, "server_id": "bank", "tool_name": tool_name}
    return {**said, "arguments": arguments}


def suspend(*awaits: str) -> dict[str, Any]:
    return {"type": "suspend", "awaits": list(awaits)}


def complete(value: Any, positions: int) -> dict[str, Any]:
    return {"type": "complete", "output": {"tier": "inline", "value": value}, "positions": positions}


def fail(message: str) -> dict[str, Any]:
    return {"type": "fail", "error": {"type": "ValueError", "message": message, "retryable": False}}


def may_start(world: World) -> None:
    """The world's policy lets everybody start procedures; before its gateway is started."""
    world.policy.write_text(
        world.policy.read_text() + '\n@id("start") permit(principal, action == Action::"start", resource);\n'
    )
