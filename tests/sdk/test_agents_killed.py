"""A worker process with an agent is killed with SIGKILL while its model, or a tool of it, is being asked.

The model server keeps its own book of what it was asked: that is what a provider would charge for.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import IS_SOAK
from tests.crash.world import PATIENCE_S
from tests.runs.world import GatewayProcess, RunsWorld, new_id, until
from tests.sdk.serving import Served
from tga_sdk import AsyncClient

PROGRAM = str(Path(__file__).parent / "agent_programs.py")


def tool_call(number: int, name: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": name, "args": arguments, "id": f"call-{number}"}


TURNS: list[list[Any]] = [
    [tool_call(1, "bank__charge", amount=5)],
    [
        "Twice more.",
        tool_call(2, "bank__charge", amount=6),
        tool_call(3, "bank__charge", amount=6),
        tool_call(4, "note", text="x"),
    ],
    [tool_call(5, "note", text="x")],
    ["Done."],
]


class ModelServer(ThreadingHTTPServer):
    """Answers turns by a script. Whoever asks what `kills` says is killed, once, before it has the answer."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.book: Counter[str] = Counter()
        self.kills: str | None = None
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: ModelServer = self.server  # type: ignore[assignment]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        asked = f"turn {body['turn']}" if self.path == "/turn" else "note"
        with server.lock:
            server.book[asked] += 1
            is_killed = server.kills == asked
            if is_killed:
                server.kills = None
                os.kill(body["pid"], signal.SIGKILL)
                return
        answer = {"parts": TURNS[body["turn"] - 1]} if self.path == "/turn" else {"noted": body["text"].upper()}
        content = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def model() -> Iterator[ModelServer]:
    found = ModelServer()
    thread = threading.Thread(target=found.serve_forever)
    thread.start()
    yield found
    found.shutdown()
    thread.join()
    found.server_close()


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> Iterator[GatewayProcess]:
    yield asyncio.run(world.gateway())
    world.kill_processes()


KILLED_AT = ["turn 1", "turn 2", "turn 3", "turn 4", "note"] if IS_SOAK else ["turn 2", "note"]


@pytest.mark.parametrize("killed_at", KILLED_AT)
async def test_recorded_turns_are_not_paid_again(
    world: RunsWorld, gateway: GatewayProcess, model: ModelServer, tmp_path: Path, killed_at: str
) -> None:
    model.kills = killed_at
    run_id = new_id("paid")
    key = world.keys["worker"]

    def serve() -> Served:
        return Served(tmp_path, gateway.url, key, PROGRAM, MODEL_URL=model.url)

    first = serve()
    workers = [first]
    try:
        async with AsyncClient(gateway.url, world.keys["agent"]) as client:
            await first.until_told("paid-research")
            await client.start("paid-research", "what?", run_id=run_id)
            await until(lambda: first.process.poll() is not None)
            assert first.process.returncode == -signal.SIGKILL, first.logged
            workers.append(serve())
            output = await client.result(run_id, timeout=PATIENCE_S)
            attempts = (await client.status(run_id)).attempt
    finally:
        for worker in workers:
            worker.stop()
    assert output == {"output": "Done.", "requests": 4, "tokens": 28}
    assert attempts >= 2
    once = Counter({"turn 1": 1, "turn 2": 1, "turn 3": 1, "turn 4": 1, "note": 2})
    once[killed_at] += 1  # what was under way is asked, and paid, twice; nothing that was recorded is
    assert model.book == once
    executed = world.executions(run_id)
    assert len(executed) == 3, executed
    assert set(executed.values()) == {1}
    turns = [one for one in await world.journal(run_id) if one.get("kind") == "turn"]
    assert [one["value"]["value"]["response"]["usage"]["input_tokens"] for one in turns] == [7, 7, 7, 7]


async def test_nothing_is_left_to_mend(world: RunsWorld) -> None:
    await world.verify_all_is_well()
