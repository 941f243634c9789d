"""`make run`: the gateway over HTTP, a small real tool server beside it, one call made, and what to try next."""

from __future__ import annotations

import contextlib
import dataclasses
import shlex
import socket
import subprocess
import sys

import uvloop
from rich.console import Console

from app.cli.client import GatewayClient
from app.cli.traces import show_trace
from app.core.errors import TgaError
from app.gateway.serving import serve
from app.main import open_gateway
from app.settings import Settings

TOOL_SERVER_PORT = 8421
console = Console(highlight=False, soft_wrap=True)


async def run(settings: Settings) -> None:
    where = "TGA_DATABASE_URL" if settings.database_url else f"the embedded PostgreSQL in {settings.home}"
    console.print(f"Starting on {where} …", markup=False)
    async with open_gateway(settings) as gateway:

        async def on_listening(url: str) -> None:
            try:
                await make_a_call(dataclasses.replace(settings, url=url, api_key=None))
            except TgaError as error:  # a configuration of one's own may have no bank
                console.print(f"\nThe demonstration's call was not made: {error}", markup=False)
            tell_what_to_try(settings, url)

        await serve(gateway, settings, on_listening=on_listening)
    console.print("Stopped.")


async def make_a_call(settings: Settings) -> None:
    body = {
        "server_id": "bank",
        "tool_name": "charge",
        "arguments": {"amount": 4200},
        "idempotency_key": "order-7",
        "intent": "charge for order 7",
    }
    async with GatewayClient.open(settings) as client:
        answer = (await client.post("/v1/tool-calls", body)).document
        console.print("\nOne tool call over HTTP, from request to effect:\n")
        await show_trace(client, answer["trace_id"], as_json=False)


def tell_what_to_try(settings: Settings, url: str) -> None:
    key = shlex.quote(str(settings.admin_key_file))
    call = '{"server_id":"bank","tool_name":"%s","arguments":{"amount":%d},"idempotency_key":"%s"}'
    curl = f'curl -s {url}/v1/tool-calls -H "Authorization: Bearer $(cat {key})" -d'
    exports = [f"export TGA_HOME={shlex.quote(str(settings.home))}"]
    if settings.url != "http://127.0.0.1:8420":
        exports.append(f"export TGA_URL={url}")
    console.print("\n[bold]Try, in another terminal in this folder:[/]")
    for title, commands in {
        "A call over HTTP; again, and it is answered from the record: charged once": [
            f"{curl} '{call % ('charge', 42, 'order-8')}'"
        ],
        "The same with the command tga, which finds the gateway and the key by itself": [
            *exports,
            ".venv/bin/tga call bank charge -a amount=42 -k order-9",
            ".venv/bin/tga traces",
        ],
        "A refund waits for a person: ask for one, look, approve it (or deny it)": [
            f"{curl} '{call % ('refund', 5, 'refund-1')}'",
            ".venv/bin/tga approvals",
            ".venv/bin/tga approve ID",
        ],
        "Kill a gateway in the middle of a call: the call is finished, once": [".venv/bin/python tools/crash.py"],
        "Change the record as a superuser: it is found": [".venv/bin/python tools/tamper.py"],
    }.items():
        console.print(f"\n  [dim]# {title}[/]")
        for command in commands:
            console.print(f"  {command}", markup=False)
    console.print(f"\n  [dim]# The API:[/] {url}/docs")
    console.print("\nCtrl-C stops everything.\n")


def is_free(host: str, port: int) -> bool:
    """Whether one could listen there now."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((str(address[0]), port), family=family):
            return True
    except OSError:
        return False


def refuse(what: str) -> int:
    console.print("[bold red]error[/] ", end="")
    console.print(what, markup=False)
    return 3


def main() -> int:
    try:
        settings = Settings.from_environment()
        if not is_free(settings.host, settings.port):
            return refuse(
                f"port {settings.port} of {settings.host} is taken: another gateway? "
                "Stop it, or choose another port: TGA_PORT=8430 make run"
            )
        if not is_free("127.0.0.1", TOOL_SERVER_PORT):
            return refuse(
                f"port {TOOL_SERVER_PORT} is taken, which the demonstration's tool server needs: another `make run`?"
            )
        settings.home.mkdir(parents=True, exist_ok=True, mode=0o711)
        return run_beside_tool_server(settings)
    except TgaError as error:
        return refuse(str(error))
    except KeyboardInterrupt:
        return 130


def run_beside_tool_server(settings: Settings) -> int:
    book = settings.home / "bank.jsonl"
    command = [sys.executable, "-m", "app.demo.tool_server", "--port", str(TOOL_SERVER_PORT), "--book", str(book)]
    # In a session of its own: Ctrl-C is for the gateway, which then ends the tool server.
    tool_server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        url = tool_server.stdout.readline().strip() if tool_server.stdout else ""
        if not url:
            return refuse("the demonstration's tool server did not start")
        console.print(f"A tool server of its own is at {url}; its book of executions is {book}", markup=False)
        uvloop.run(run(settings))
        return 0
    finally:
        tool_server.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            tool_server.wait(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
