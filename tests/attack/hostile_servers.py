"""Tool servers that send without end. Standard library only.

    hostile_servers.py            every kind over HTTP, each at a port of its own; the ports are printed as JSON
    hostile_servers.py stdio      an MCP server on its pipes that floods both

Each connection has a thread that writes as fast as it is read: whoever reads slowly holds it back.
"""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

OK = b"HTTP/1.1 200 OK\r\n"
EVENTS = OK + b"Content-Type: text/event-stream\r\n\r\n"
NOTE = b'{"jsonrpc":"2.0","method":"notifications/progress","params":{"progressToken":1,"progress":1}}'
CHANGED = b'{"jsonrpc":"2.0","method":"notifications/tools/list_changed"}'
PING = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'


def endless(*parts: bytes) -> Callable[[], Iterator[bytes]]:
    """The first once, the last for ever, in pieces that a write takes well."""

    def pieces() -> Iterator[bytes]:
        first, last = b"".join(parts[:-1]), parts[-1]
        yield first
        while True:
            yield last * (1 + 65_536 // len(last))

    return pieces


def trickle() -> Iterator[bytes]:
    yield b"HTTP/1.1 200 OK\r\nX: "
    while True:
        yield b"x"
        time.sleep(0.001)


# Of plain HTTP tools: what is written to each request.
TOOLS: dict[str, Callable[[], Iterator[bytes]]] = {
    "continues": endless(b"HTTP/1.1 100 Continue\r\n\r\n"),
    "hints": endless(b"HTTP/1.1 103 Early Hints\r\nLink: " + b"x" * 3_000 + b"\r\n\r\n"),
    "headers": endless(OK, b"X: y\r\n"),
    "trickle": trickle,
    "chunks": endless(OK, b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"),
}
# Of MCP servers: what is written to a call.
CALLS: dict[str, Callable[[], Iterator[bytes]]] = {
    "notes": endless(EVENTS, b"data: " + NOTE + b"\n\n: comment\n\n\n\nevent: x\ndata:\n\n"),
    "nested": endless(EVENTS, b'data: {"jsonrpc":"2.0","result":{"content":[', b'[0],"],},",{"a":[{}]},'),
}
# And to a GET: what it says of its own accord.
LISTENS: dict[str, Callable[[], Iterator[bytes]]] = {
    "unasked": endless(EVENTS, b": ping\n\n" * 20 + b"data: " + CHANGED + b"\n\ndata: " + PING + b"\n\n"),
}


def request(file: Any) -> tuple[str, dict[str, Any]]:
    method = file.readline().split()[0].decode()
    size = 0
    while (line := file.readline().strip()) != b"":
        name, _, value = line.partition(b":")
        size = int(value) if name.lower() == b"content-length" else size
    return method, json.loads(file.read(size)) if size else {}


def write(connection: socket.socket, pieces: Iterator[bytes]) -> None:
    for piece in pieces:
        connection.sendall(piece)


def serve(connection: socket.socket, kind: str) -> None:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        with connection, connection.makefile("rb") as file:
            while True:
                method, body = request(file)
                if kind in TOOLS:
                    write(connection, TOOLS[kind]())
                if body.get("method") == "tools/call" and kind in CALLS:
                    write(connection, CALLS[kind]())
                if method == "GET" and kind in LISTENS:
                    write(connection, LISTENS[kind]())
                connection.sendall(answered(body, is_modern=kind in CALLS))
    except (OSError, IndexError, ValueError):
        pass  # it went away


def answered(body: dict[str, Any], *, is_modern: bool) -> bytes:
    if "id" not in body or "method" not in body:
        return b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n"
    said = json.dumps({"jsonrpc": "2.0", "id": body["id"], **result_of(body["method"], is_modern=is_modern)}).encode()
    session = b"" if is_modern else b"Mcp-Session-Id: s\r\n"
    head = b"Content-Type: application/json\r\nContent-Length: %d\r\n" % len(said)
    return OK + session + head + b"\r\n" + said


def result_of(method: str, *, is_modern: bool) -> dict[str, Any]:
    capabilities = {"tools": {"listChanged": True}}
    match method:
        case "server/discover" if is_modern:
            return {"result": {"supportedVersions": ["2026-07-28"], "capabilities": {"tools": {}}}}
        case "initialize":
            info = {"name": "hostile", "version": "1"}
            return {"result": {"protocolVersion": "2025-11-25", "capabilities": capabilities, "serverInfo": info}}
        case "tools/list":
            tools = [{"name": "does", "inputSchema": {"type": "object"}, "annotations": {"readOnlyHint": True}}]
            return {"result": {"tools": tools}}
        case "tools/call":
            return {"result": {"content": []}}
        case _:
            return {"error": {"code": -32601, "message": "Method not found"}}


def listen(kind: str) -> int:
    server = socket.create_server(("127.0.0.1", 0), backlog=64)

    def accept() -> None:
        while True:
            connection, _ = server.accept()
            threading.Thread(target=serve, args=(connection, kind), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(server.getsockname()[1])


def over_pipes() -> None:
    for line in sys.stdin.buffer:
        body = json.loads(line)
        if "id" in body:
            said = {"jsonrpc": "2.0", "id": body["id"], **result_of(body["method"], is_modern=False)}
            if body["method"] == "tools/call":
                threading.Thread(target=flood, args=(sys.stderr.buffer, b"complaint\n"), daemon=True).start()
                flood(sys.stdout.buffer, NOTE + b"\n\nhello\n" + PING + b"\n")
            sys.stdout.buffer.write(json.dumps(said).encode() + b"\n")
            sys.stdout.buffer.flush()


def flood(file: Any, unit: bytes) -> None:
    while True:
        file.write(unit * (1 + 32_768 // len(unit)))
        file.flush()


if __name__ == "__main__":
    if sys.argv[1:] == ["stdio"]:
        over_pipes()
    else:
        print(json.dumps({kind: listen(kind) for kind in (*TOOLS, *CALLS, *LISTENS)}), flush=True)
        sys.stdin.read()
