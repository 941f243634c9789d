"""The Claude Agent SDK with the tools of a gateway. Its API is scripted too, so it runs without any account:

pip install 'tga-sdk[claude-agent]'
python examples/adapters/claude_agent.py      # while `make run` runs, with TGA_HOME=.tga
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from claude_agent_sdk import ClaudeAgentOptions, ResultMessage, query

from tga_sdk.adapters.claude_agent import gateway_server

TURNS = [("bank_charge", {"amount": "much"}), ("bank_charge", {"amount": 42}), ("bank_refund", {"amount": 42})]


class ScriptedApi(BaseHTTPRequestHandler):
    """What a model would say: the next turn of the script, then what it was told."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if "count_tokens" in self.path:
            return self._answer("application/json", json.dumps({"input_tokens": 1}))
        block, reason = self._said(asked)
        message = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": "scripted"}
        usage = {"input_tokens": 1, "output_tokens": 1}
        if not asked.get("stream"):
            whole = {**message, "content": [block], "stop_reason": reason, "stop_sequence": None, "usage": usage}
            return self._answer("application/json", json.dumps(whole))
        if block["type"] == "tool_use":
            begun = {**block, "input": {}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
        else:
            begun, delta = {"type": "text", "text": ""}, {"type": "text_delta", "text": block["text"]}
        empty = {**message, "content": [], "stop_reason": None, "stop_sequence": None, "usage": usage}
        ended = {"stop_reason": reason, "stop_sequence": None}
        events = [
            {"type": "message_start", "message": empty},
            {"type": "content_block_start", "index": 0, "content_block": begun},
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ended, "usage": {"output_tokens": 1}},
            {"type": "message_stop"},
        ]
        text = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
        return self._answer("text/event-stream", text)

    def _said(self, asked: dict[str, Any]) -> tuple[dict[str, Any], str]:
        blocks = [block for message in asked["messages"] for block in message["content"] if isinstance(block, dict)]
        told = [block["content"] for block in blocks if block.get("type") == "tool_result"]
        if not any(tool["name"] == "mcp__tga__bank_charge" for tool in asked.get("tools") or []):
            return {"type": "text", "text": "A teller's day"}, "end_turn"  # it was asked for a title, or the like
        if len(told) < len(TURNS):
            name, args = TURNS[len(told)]
            made = {"type": "tool_use", "id": f"toolu_{uuid.uuid4().hex}", "name": f"mcp__tga__{name}", "input": args}
            return made, "tool_use"
        return {"type": "text", "text": json.dumps(told)}, "end_turn"

    def _answer(self, kind: str, text: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


async def main() -> None:
    api = ThreadingHTTPServer(("127.0.0.1", 0), ScriptedApi)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory() as home:
        options = ClaudeAgentOptions(
            mcp_servers={"tga": await gateway_server(only=["bank"])},
            allowed_tools=["mcp__tga"],
            tools=[],  # of its own tools none: files and shell are not for a teller
            model="scripted",
            cwd=home,
            setting_sources=[],
            env={
                "ANTHROPIC_BASE_URL": f"http://127.0.0.1:{api.server_port}",
                "ANTHROPIC_API_KEY": "scripted",
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "ENABLE_TOOL_SEARCH": "false",  # the script knows the tools by name
                "CLAUDE_CONFIG_DIR": home,
            },
        )
        async for message in query(prompt="Charge 42, then refund it.", options=options):
            if isinstance(message, ResultMessage):
                print(message.result)
    api.shutdown()


if __name__ == "__main__":
    asyncio.run(main())
