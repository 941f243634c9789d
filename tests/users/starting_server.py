"""An MCP server that starts well, late or never. Speaks 2026-07-28 only. Standard library only.

starting_server.py held FILE     says nothing until FILE is there
starting_server.py dies          complains and ends
starting_server.py mute          reads, and never answers
starting_server.py changing FILE the tool `send` is described by FILE, read at each listing; sending "announce"
                                     says that the tools have changed
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

MODE = sys.argv[1]


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def described() -> str:
    if MODE != "changing":
        return "Sends a message."
    with open(sys.argv[2], encoding="utf-8") as file:
        return file.read()


def result_of(method: str) -> dict[str, Any] | None:
    match method:
        case "server/discover":
            return {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}
        case "tools/list":
            schema = {"type": "object", "properties": {"text": {"type": "string"}}}
            return {"tools": [{"name": "send", "description": described(), "inputSchema": schema}]}
        case "tools/call":
            return {"content": [{"type": "text", "text": "sent"}]}
    return None


def main() -> None:
    if MODE == "dies":
        sys.stderr.write("starting\ncannot open its mailbox: no such folder\n")
        sys.exit(3)
    while MODE == "held" and not os.path.exists(sys.argv[2]):
        time.sleep(0.02)
    for line in sys.stdin:
        message = json.loads(line)
        if MODE == "mute" or "id" not in message:
            continue
        if message.get("params", {}).get("arguments", {}).get("text") == "announce":
            say({"method": "notifications/tools/list_changed"})
        result = result_of(message["method"])
        if result is None:  # what the official library answers to `initialize` on a connection of the newest protocol
            say({"id": message["id"], "error": {"code": -32022, "message": "Unsupported protocol version"}})
        else:
            say({"id": message["id"], "result": result})


if __name__ == "__main__":
    main()
