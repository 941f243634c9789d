"""A scripted model behind HTTP, which keeps its own book of what it was asked: a provider would charge for that."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "scripted-in-lua"


def asked(number: int, tool: str, **arguments: Any) -> dict[str, Any]:
    return {"tool": tool, "args": arguments, "id": f"call-{number}"}


class ModelServer(ThreadingHTTPServer):
    """Answers the turns of each conversation by one script. `book`: how often each turn was asked, by conversation."""

    def __init__(self, turns: Sequence[Sequence[Any]]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.turns = turns
        self.book: Counter[tuple[str, int]] = Counter()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def paid(self, conversation: str) -> dict[int, int]:
        with self.lock:
            return {turn: count for (of, turn), count in self.book.items() if of == conversation}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        server: ModelServer = self.server  # type: ignore[assignment]
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with server.lock:
            server.book[body["conversation"], body["turn"]] += 1
        content = json.dumps({"parts": server.turns[body["turn"] - 1]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def model_server(turns: Sequence[Sequence[Any]]) -> Iterator[ModelServer]:
    made = ModelServer(turns)
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()


def offer_model(url: str) -> None:
    """In a gateway's process: programs may name the model. The first thing that is said names the conversation."""
    import httpx2
    from pydantic_ai.messages import ModelMessage, ModelRequest, ModelResponse, TextPart, ToolCallPart, UserPromptPart
    from pydantic_ai.models.function import AgentInfo, FunctionModel
    from pydantic_ai.usage import RequestUsage

    from tga_sdk.agents import provide_model

    async def answered(messages: list[ModelMessage], info: AgentInfo) -> ModelResponse:
        requests = [message for message in messages if isinstance(message, ModelRequest)]
        said = next(part.content for one in requests for part in one.parts if isinstance(part, UserPromptPart))
        turn = 1 + sum(isinstance(message, ModelResponse) for message in messages)
        async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
            answer = await client.post(url, json={"conversation": said, "turn": turn})
        parts = [
            TextPart(one) if isinstance(one, str) else ToolCallPart(one["tool"], one["args"], tool_call_id=one["id"])
            for one in answer.raise_for_status().json()["parts"]
        ]
        return ModelResponse(parts=parts, model_name=NAME, usage=RequestUsage(input_tokens=7, output_tokens=3))

    provide_model(NAME, FunctionModel(answered))
