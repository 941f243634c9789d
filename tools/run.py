"""`make run`: the gateway's store and recovery, a small real tool server beside it, and what to try.

The gateway has no HTTP API yet: the command `tga` drives calls itself, on the same store. What runs here recovers
what a killed command leaves behind.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

import uvloop
from rich.console import Console

from app.cli.calls import show_trace
from app.cli.recovery import serve
from app.core.errors import TgaError
from app.domain.tga.models import Principal
from app.domain.tga.runtime import CheckedCall
from app.main import open_gateway
from app.settings import Settings

TOOL_SERVER_PORT = 8421
console = Console(highlight=False, soft_wrap=True)


async def run(settings: Settings) -> None:
    console.print(f"Starting the embedded PostgreSQL in {settings.home} …")
    async with open_gateway(settings) as gateway:
        console.print("One tool call, from request to effect:\n")
        principal = Principal(principal_id="demo", tenant="default")
        first = CheckedCall("bank", "charge", {"amount": 4200}, "order-7", principal, intent="charge for order 7")
        answer = await gateway.runtime.call(first)
        await show_trace(gateway, answer.trace_id, as_json=False)
        console.print("\n[bold]Try, in another terminal in this folder:[/]\n")
        for command, what in (
            (f"export TGA_HOME={shlex.quote(str(settings.home))}", ""),
            (".venv/bin/tga call bank charge -a amount=42 -k order-8", "again: answered from the record, charged once"),
            (".venv/bin/python tools/crash.py", "kills a gateway in the middle of a call; the call is finished, once"),
            (".venv/bin/python tools/tamper.py", "changes the record as a superuser; it is found"),
        ):
            console.print(f"  {command}" + (f"   [dim]# {what}[/]" if what else ""))
        console.print("\nCtrl-C stops everything.\n")
        await serve(gateway)


def main() -> int:
    settings = Settings.from_environment()
    settings.home.mkdir(parents=True, exist_ok=True, mode=0o711)
    book = settings.home / "bank.jsonl"
    command = [sys.executable, "-m", "app.demo.tool_server", "--port", str(TOOL_SERVER_PORT), "--book", str(book)]
    # In a session of its own: Ctrl-C is for the gateway, which then ends the tool server.
    tool_server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        url = tool_server.stdout.readline().strip() if tool_server.stdout else ""
        if not url:
            console.print(
                f"[bold red]error[/] the demonstration's tool server did not start; is port {TOOL_SERVER_PORT} taken?"
            )
            return 3
        console.print(f"A tool server of its own is at {url}; its book of executions is {book}")
        uvloop.run(run(settings))
        return 0
    except TgaError as error:
        console.print(f"[bold red]error[/] {error}")
        return 3
    except KeyboardInterrupt:
        return 130
    finally:
        tool_server.terminate()
        tool_server.wait(timeout=10)


if __name__ == "__main__":
    sys.exit(main())
