"""docs/agents.md as it is printed: its programs run on a real gateway, and leave the journal that it shows."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.crash.world import PATIENCE_S
from tests.runs.conftest import started_world, world
from tests.runs.world import GatewayProcess, RunsWorld, new_id
from tga_sdk import AsyncClient, serving

__all__ = ["started_world", "world"]

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/agents.md").read_text("utf-8")


class Intents(BaseHTTPRequestHandler):
    asked = 0

    def do_POST(self) -> None:
        type(self).asked += 1
        text = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = json.dumps("billing" if "invoice" in text else "general").encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture
def intents() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Intents)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> Iterator[GatewayProcess]:
    yield asyncio.run(world.gateway())
    world.kill_processes()


async def test_the_page_runs_as_it_is_printed(
    world: RunsWorld, gateway: GatewayProcess, intents: str, tmp_path: Path
) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    page = tmp_path / "page.py"
    page.write_text(f"MODEL_URL = {intents!r}\n" + "\n\n".join(blocks))
    loaded = importlib.util.spec_from_file_location("agents_page", page)
    assert loaded is not None
    assert loaded.loader is not None
    said: Any = importlib.util.module_from_spec(loaded)
    loaded.loader.exec_module(said)
    programs = [said.research, said.story, said.from_data, said.intent]
    outputs: dict[str, Any] = {}
    journals: dict[str, list[dict[str, Any]]] = {}
    async with (
        serving(*programs, url=gateway.url, key=world.keys["worker"]),
        AsyncClient(gateway.url, world.keys["agent"]) as client,
    ):
        for program, given in zip(programs, ["what?", "tell", said.SPEC, "my invoice"], strict=True):
            run_id = new_id("page")
            await client.start(program.name, given, run_id=run_id)
            outputs[program.name] = await client.result(run_id, timeout=PATIENCE_S)
            journals[program.name] = await world.journal(run_id)
    assert outputs["page-research"] == "Tea is a drink."
    assert outputs["page-story"].strip() == "Once upon a time."
    assert outputs["page-data"] == "success (no tool calls)"
    assert outputs["page-intent"] == "billing"
    ends = ("run_checkpoint", "run_intent")
    records = [one for one in journals["page-research"] if one["artifact_type"] in ends]
    shown = [f"{one['path']} {one['kind']} {one['name']}" for one in records]
    assert shown == re.findall(r"^```text journal\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0].splitlines()
    assert [one["value"]["tier"] for one in journals["page-story"] if one.get("kind") == "emit"] == ["event"]
    [prediction] = [one for one in journals["page-intent"] if one.get("kind") == "model"]
    assert (prediction["name"], prediction["value"]["value"]) == ("intent", "billing")
    assert "predicted in" in prediction["logs"][0]["text"]
    assert Intents.asked == 1
