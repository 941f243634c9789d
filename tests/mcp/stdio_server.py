"""An MCP server that does what its caller asks, right or wrong. Standard library only.

    stdio_server.py BOOK ERA      (modern | legacy | dies_on_probe | silent | fragile)

`fragile` speaks the newest protocol only, and dies at the first question that it ever gets.

Every call that arrives is a line of BOOK. The tool `does` follows its argument `steps`: each is written as it stands,
with $ID for the request's id, or is one of the words below.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

BOOK, ERA = sys.argv[1], sys.argv[2]
state: dict[str, Any] = {"description": "Does as it is told.", "more": []}


def say(message: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
    sys.stdout.flush()


def tools() -> list[dict[str, Any]]:
    does = {"name": "does", "description": state["description"], "inputSchema": {"type": "object"}}
    return [does, *state["more"]] if isinstance(state["more"], list) else state["more"]


def note(message: dict[str, Any]) -> None:
    with open(BOOK, "a") as book:
        book.write(json.dumps(message) + "\n")


def step(word: Any, request_id: Any, params: dict[str, Any]) -> None:
    match word:
        case {"sleep": seconds}:
            time.sleep(seconds)
        case {"die": code}:
            sys.stdout.flush()
            os._exit(code)
        case {"die_once": marker}:
            if not os.path.exists(marker):
                open(marker, "w").close()
                os._exit(1)
        case {"progress": progress}:
            token = params["_meta"].get("progressToken")
            say({"method": "notifications/progress", "params": {"progressToken": token, "progress": progress}})
        case {"describe": description}:
            state["description"] = description
            say({"method": "notifications/tools/list_changed"})
        case {"list_bytes": size}:
            state["more"] = [{"name": "big", "description": "x" * size, "inputSchema": {"type": "object"}}]
            say({"method": "notifications/tools/list_changed"})
        case {"list": more}:
            state["more"] = more
            say({"method": "notifications/tools/list_changed"})
        case {"complain": text, "times": times}:
            for _ in range(times):
                sys.stderr.write(text)
            sys.stderr.flush()
        case {"complain": text}:
            sys.stderr.write(text)
            sys.stderr.flush()
        case {"text": size}:
            say({"id": request_id, "result": {"content": [{"type": "text", "text": "x" * size}]}})
        case {"last": size}:
            result = json.dumps({"content": [{"type": "text", "text": "x" * size}]})
            sys.stdout.write(f'{{"result": {result}, "jsonrpc": "2.0", "id": {request_id}}}\n')
            sys.stdout.flush()
        case {"write": text, "x": size}:
            sys.stdout.write(text.replace("$ID", str(request_id)).replace("$X", "x" * size) + "\n")
            sys.stdout.flush()
        case {"write_endless": text, "x": size}:
            sys.stdout.write(text.replace("$ID", str(request_id)) + "x" * size)
            sys.stdout.flush()
        case {"repeat": text, "times": times}:
            sys.stdout.write((text + "\n") * times)
            sys.stdout.flush()
        case {"endless": size}:
            for _ in range(size // 65536):
                sys.stdout.write("x" * 65536)
        case "environment":
            say({"id": request_id, "result": {"content": [], "structuredContent": dict(os.environ)}})
        case "meta":
            say({"id": request_id, "result": {"content": [], "structuredContent": params["_meta"]}})
        case "echo":
            say({"id": request_id, "result": {"content": [], "structuredContent": params["arguments"]}})
        case str():
            sys.stdout.write(word.replace("$ID", str(request_id)) + "\n")
            sys.stdout.flush()


def answer(message: dict[str, Any]) -> None:
    request_id, method, params = message.get("id"), message["method"], message.get("params", {})
    if method == "server/discover":
        if ERA == "dies_on_probe":
            os._exit(3)
        if ERA == "fragile":
            step({"die_once": f"{BOOK}.once"}, request_id, params)
        if ERA in ("modern", "fragile"):
            capabilities = {"tools": {"listChanged": True}}
            say({"id": request_id, "result": {"supportedVersions": ["2026-07-28"], "capabilities": capabilities}})
        elif ERA != "silent":
            say({"id": request_id, "error": {"code": -32601, "message": "Method not found"}})
    elif method == "initialize" and ERA == "fragile":
        say({"id": request_id, "error": {"code": -32022, "message": "Unsupported protocol version"}})
    elif method == "initialize":
        capabilities = {"tools": {"listChanged": True}}
        info = {"name": "scripted", "version": "1"}
        version = params["protocolVersion"]
        say(
            {"id": request_id, "result": {"protocolVersion": version, "capabilities": capabilities, "serverInfo": info}}
        )
    elif method == "tools/list":
        listed, start = tools(), int(params.get("cursor", 0))
        more = {"nextCursor": str(start + 2)} if start + 2 < len(listed) else {}
        say({"id": request_id, "result": {"tools": listed[start : start + 2], **more}})
    elif method == "tools/call":
        note(message)
        for word in params["arguments"].get("steps", ["echo"]):
            step(word, request_id, params)
    elif method == "notifications/cancelled":
        note(message)


def main() -> None:
    for line in sys.stdin:
        answer(json.loads(line))


if __name__ == "__main__":
    main()
