"""A worker that holds a real lease and says whatever the protocol can be made to say: the gateway answers with its own
problems and never with a 5xx, does what is due all the same, and what it has recorded verifies."""

from __future__ import annotations

import os
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.core.errors import BY_CODE
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.invariants.plans import verify_all
from tests.runs.engines import PROGRAM
from tests.runs.routes import Runs, open_runs

ROUNDS = 1_500 if os.environ.get("TGA_SOAK") else 150
PATHS = ("1", "2", "3", "1.1", "1.2", "1:1.1", "1:2.1", "1:1000.1", "2:1.1.1", "999999", ".".join(["1"] * 17))
TIMES = (
    *("2020-01-01T00:00:00.000Z", "2030-01-01T00:00:00.000Z", "9999-12-31T23:59:59.999Z", "0000-01-01T00:00:00.000Z"),
    *("0001-01-01T00:00:00.000Z", "2026-02-30T00:00:00.000Z", "2023-02-29T12:00:00.000Z", "2016-12-31T23:59:60.000Z"),
)
VALUES: tuple[Any, ...] = (
    None,
    {"tier": "inline", "value": {"a": [1, 1e-7, "\u0000\ud7ff", {"": None}]}},
    {"tier": "event", "value": 1},
    {"tier": "transient"},
    {"tier": "secret", "value": "s"},
    {
        "tier": "artifact",
        "ref": {"sha256": "0" * 64, "size_bytes": 5, "media_type": "text/plain", "serializer": "text"},
    },
    {"tier": "run", "run_id": "h-0", "entry_digest": "0" * 64},
)
SCHEMAS: tuple[Any, ...] = ({}, {"type": "boolean"}, {"type": "nothing"}, {"$ref": "#/a"}, {"pattern": "(a+)+$"})


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path, lease_ms=60_000) as opened:
        yield opened


class Hostile:
    """Everything is drawn from `seed`, which is printed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)

    def operation(self) -> dict[str, Any]:
        return {
            "path": self.draw.choice(PATHS[:6]) if self.draw.random() < 0.8 else self.draw.choice(PATHS),
            "name": self.draw.choice(("it", "other", "x" * 128)),
            "input_digest": self.draw.choice((PROGRAM, "b" * 64)),
            "try_number": self.draw.choice((1, 1, 1, 2, 1_000_000)),
        }

    def put(self) -> dict[str, Any]:
        at = self.draw.choice
        said = self.operation()
        match at(("checkpoint", "checkpoint", "ask", "sleep", "signal", "step")):
            case "checkpoint":
                is_ok = self.draw.random() < 0.7
                wrong = {"type": "E", "message": "m", "retryable": at((True, False))}
                return said | {
                    "type": "checkpoint",
                    "kind": at(("step", "call", "gather", "turn", "now", "tool", "ask", "child")),
                    "outcome": "OK" if is_ok else at(("ERROR", "RETRY", "INTERRUPTED")),
                    "value": at(VALUES) if is_ok else None,
                    "error": None if is_ok else wrong,
                    "resume": at(("snapshot", "recompute")),
                    "inner": at((0, 0, 1, 2, 2**53 - 1)),
                    "state_change": at(
                        ([], [{"op": "set", "at": at(("/a", "/-", "", "/a/b/c")), "to": at((1, [], {}))}])
                    ),
                    "started_at": at(TIMES),
                    "duration_ms": at((0, 2**53 - 1)),
                }
            case "ask":
                request = {"form": "approve", "message": "?", "answer_schema": at(SCHEMAS), "default": at(VALUES)}
                levels = [{"at": one, "webhooks": []} for one in sorted(self.draw.sample(TIMES, 2))]
                return said | {
                    "type": "ask",
                    "request": request
                    | {"expires_at": at((None, *TIMES)), "context": at(VALUES), "escalations": at(([], levels))},
                }
            case "sleep":
                return said | {"type": "sleep", "wakes_at": at(TIMES)}
            case "signal":
                return said | {"type": "signal", "expires_at": at((None, *TIMES))}
            case _:
                return said | {"type": "step"}

    def then(self) -> Any:
        at = self.draw.choice
        error = {"type": "E", "message": "m", "retryable": at((True, False))}
        child = {
            "procedure": at(("onboard", "nobody-has-it")),
            "input": at(VALUES[1:]),
            "run_id": at((None, "h-0", "h/x")),
        }
        return at(
            (
                *(None, None, None),
                {"type": "suspend", "awaits": self.draw.sample(PATHS, 2), "wake": at(("ANY", "ALL"))},
                {"type": "suspend", "awaits": ["1"], "wake": "ANY", "wait_ms": 1},
                {"type": "complete", "output": at(VALUES), "positions": at((0, 1, 2))},
                {"type": "fail", "error": error},
                {"type": "release", "not_before_ms": at((None, 1, 2**53 - 1))},
                {"type": "tool", "server_id": "s", "tool_name": "t", "arguments": {}, **self.operation()},
                {"type": "child", **child, **self.operation()},
            )
        )


async def test_whatever_a_worker_says_is_answered_by_name_and_what_is_recorded_verifies(
    runs: Runs, sessions: Sessions
) -> None:
    seed = int(os.environ.get("TGA_SEED", "0")) or random.SystemRandom().randrange(1, 2**32)
    print(f"TGA_SEED={seed}")
    hostile, draw = Hostile(seed), random.Random(seed)
    held: list[dict[str, Any]] = []
    refused: set[str] = set()
    stored = 0
    for number in range(ROUNDS):
        if len(held) < 3:
            await runs.front.post("/v1/runs", {"procedure": "onboard", "run_id": f"h-{number}"}, "agent")
            held += await runs.lease(slots=3)
        run = draw.choice(held)
        body = {
            "lease": run["lease"],
            "attempt": run["attempt"],
            "after_seq": draw.choice((0, run.get("seen", 2), 10**15)),
            "puts": [hostile.put() for _ in range(draw.choice((0, 1, 1, 3)))],
            "then": hostile.then(),
        }
        status, document = await runs.front.post(f"/v1/runs/{run['run_id']}/checkpoints", body, "worker")
        assert status < 500, (document, body)
        if status != 200:
            assert document["code"] in BY_CODE, (document, body)
            refused.add(document["code"])
        else:
            stored += 1
            run["seen"] = document["sequence_number"]
            if document["directive"] != "CONTINUE":
                held.remove(run)
        if number % 10 == 0:
            await runs.engine.engine.sweeping.sweep(judges_workers=False)
    for _ in range(3):
        await runs.engine.engine.sweeping.sweep(judges_workers=False)
    items = (await runs.front.page("/v1/approvals?limit=200", "supervisor"))["items"]
    assert all(item["problem"] is None for item in items)
    for item in (await runs.front.page("/v1/runs?limit=200"))["items"]:
        for path in ("", "/checkpoints", "/state", "/entries"):
            status, document, _ = await runs.front.get(f"/v1/runs/{item['run_id']}{path}")
            assert status == 200, (item["run_id"], path, document)

    assert len(refused) >= 4, refused
    assert stored > ROUNDS / 20
    await verify_all(sessions)
