"""Our gateway as `tga serve` runs it and a tool server behind it, as processes: for benches that call over HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from bench.http_roles import Load
from bench.measure import run_on_fast_loop
from bench.peer_processes import ARGUMENTS

CONFIG: Final = """
[servers.crm]
transport = "http"
base_url = "{tool}"
max_concurrency = 256
max_in_flight = 1000
[servers.crm.tools.create_ticket]
class = "write"
input_schema = {{ type = "object", required = ["title"], properties = {{ title = {{ type = "string" }} }} }}
[limits]
requests_per_second = 1000000
burst = 1000000
"""


class CallLoad(Load):
    """Calls of the gateway's HTTP API, each with a key of its own; or the same ones again."""

    _runs: Final = itertools.count()

    def __init__(self, key: str, what: str, at_once: int) -> None:
        super().__init__(key, "", at_once)
        self._what = what
        self._run = next(self._runs)

    def request(self, connection: int, count: int) -> bytes:
        name = f"repeated-{connection}" if self._what == "repeat" else f"{self._run}-{connection}-{count}"
        call = {"server_id": "crm", "tool_name": "create_ticket", "idempotency_key": name, "arguments": ARGUMENTS}
        body = json.dumps(call).encode()
        return b"%b%d\r\n\r\n%b" % (self._head, len(body), body)


@contextlib.contextmanager
def answering(role: str, home: Path) -> Iterator[tuple[str, int]]:
    """The address and process of our gateway, or of its tool server."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    environment = {**inherited, "TGA_HOME": str(home), "TGA_PORT": "0"}
    command = [sys.executable, "-m", "bench.served", role]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}  # it writes a line for each call
    with subprocess.Popen(command, text=True, env=environment, **pipes) as process:
        try:
            assert process.stdout is not None
            url = next((line.strip() for line in process.stdout if line.startswith("http://")), "")
            if not url:
                raise RuntimeError(f"the process {role} did not start")
            yield url, process.pid
        finally:
            process.terminate()
            process.communicate(timeout=60)


async def run_tool_server() -> None:
    """Answers every call with 200 and a few bytes, as cheaply as it can be done."""
    answer = b'{"ticket_id":"T-1"}'
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(answer)

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: asyncio.BaseTransport) -> None:
            self._transport: Any = transport
            self._buffer = b""

        def data_received(self, data: bytes) -> None:
            self._buffer += data
            while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
                lower = self._buffer[:end].lower()
                at = lower.find(b"content-length:")
                length = int(lower[at + 15 :].partition(b"\r")[0]) if at >= 0 else 0
                if len(self._buffer) < end + 4 + length:
                    return
                self._buffer = self._buffer[end + 4 + length :]
                self._transport.write(head + answer)

    server = await asyncio.get_running_loop().create_server(Answering, "127.0.0.1", 0)
    sys.stdout.write(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await server.serve_forever()


async def run_gateway() -> None:
    """As `tga serve` runs it."""
    from app.gateway.serving import serve
    from app.main import open_gateway
    from app.settings import Settings

    async def listening(url: str) -> None:
        sys.stdout.write(url + "\n")
        sys.stdout.flush()

    settings = Settings.from_environment()
    async with open_gateway(settings) as gateway:
        await serve(gateway, settings, on_listening=listening)


def run_role() -> None:
    """This process is the gateway, or the tool server behind it."""
    parser = argparse.ArgumentParser(prog="python -m bench.served")
    parser.add_argument("role", choices=("gateway", "tool"))
    role = parser.parse_args().role
    with contextlib.suppress(KeyboardInterrupt):
        run_on_fast_loop(run_gateway() if role == "gateway" else run_tool_server())


if __name__ == "__main__":
    run_role()
