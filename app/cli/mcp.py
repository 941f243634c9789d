"""`tga mcp`: MCP on stdin and stdout, for clients that start their servers themselves. Logs go to stderr only."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from typing import Annotated

import typer

from app.cli.client import GatewayClient
from app.cli.mcp_bridge import Bridge
from app.cli.running import run_over_http
from app.core.limits import MCP_BRIDGE_LINE_BYTES_MAX

Server = Annotated[
    str | None,
    typer.Option("--server", metavar="SERVER", help="Only this server's tools, under the names it gives them itself."),
]


def add_to(application: typer.Typer) -> None:
    application.command("mcp")(mcp_command)


def mcp_command(context: typer.Context, server: Server = None) -> None:
    """Speak MCP on stdin and stdout, for desktop clients; the gateway at TGA_URL answers.

    It survives restarts of the gateway: a call whose connection broke is sent again under the key it has, which
    never executes it twice. A client that connects while no gateway answers is told so at once. It ends when stdin
    does.
    """

    async def work(client: GatewayClient) -> bool:
        # Nothing but protocol may reach the client: whatever else is printed goes where logs go.
        output, sys.stdout = sys.stdout.buffer, sys.stderr
        logging.basicConfig(
            stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s tga mcp: %(message)s"
        )

        async def write(line: bytes) -> None:
            def written() -> None:
                output.write(line + b"\n")
                output.flush()

            await asyncio.get_running_loop().run_in_executor(None, written)

        bridge = Bridge(client, write, server=server)
        lines = _lines_of_stdin(asyncio.get_running_loop())
        try:
            while (line := await lines.get()) is not None:
                bridge.take(line)
        except BrokenPipeError:
            pass
        finally:
            await bridge.close()
        return True

    run_over_http(context, work)


def _lines_of_stdin(loop: asyncio.AbstractEventLoop) -> asyncio.Queue[bytes | None]:
    """Lines as they come, then None. Read by a daemon thread: stdin may be anything, also a terminal."""
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        source = os.fdopen(os.dup(sys.stdin.fileno()), "rb")
        while line := source.readline(MCP_BRIDGE_LINE_BYTES_MAX):
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    return lines
