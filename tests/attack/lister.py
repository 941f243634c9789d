"""An MCP server that lists what a file says, and answers every call with its arguments. Standard library only.

lister.py FILE      (each line a tool, as it is listed)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any


def answer(request_id: Any, raw_result: str) -> None:
    sys.stdout.write(f'{{"jsonrpc": "2.0", "id": {json.dumps(request_id)}, "result": {raw_result}}}\n')
    sys.stdout.flush()


def main(path: Path) -> None:
    for line in sys.stdin:
        message = json.loads(line)
        match message["method"]:
            case "initialize":
                told = {"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": {"name": "x"}}
                answer(message["id"], json.dumps(told))
            case "tools/list":
                answer(message["id"], f'{{"tools": [{",".join(path.read_text().splitlines())}]}}')
            case "tools/call":
                said = {"content": [], "structuredContent": message["params"]["arguments"]}
                answer(message["id"], json.dumps(said))
            case _ if "id" in message:
                error = {"code": -32601, "message": "no"}
                sys.stdout.write(json.dumps({"jsonrpc": "2.0", "id": message["id"], "error": error}) + "\n")
                sys.stdout.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
