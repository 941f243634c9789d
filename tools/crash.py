"""A demonstration for operators: kill -9 a gateway in the middle of a call, and see the call finished once.

Needs `make run` in another terminal: its tool server keeps the book that is the judge here.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console

from app.settings import Settings

console = Console(highlight=False, soft_wrap=True)
WAIT_S = 30.0


def lines_of(book: Path, key: str, event: str) -> int:
    if not book.exists():
        return 0
    lines = (json.loads(line) for line in book.read_text("utf-8").splitlines() if line.endswith("}"))
    return sum(line["event"] == event and line.get("idempotency_key") == key for line in lines)


def wait_for_request(book: Path, key: str, gateway: subprocess.Popen[bytes]) -> bool:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline and gateway.poll() is None:
        if lines_of(book, key, "request"):
            return True
        time.sleep(0.02)
    return False


def main() -> int:
    book = Settings.from_environment().home / "bank.jsonl"
    key = f"crash-{os.getpid()}-{int(time.time())}"
    command = [sys.executable, "-m", "app.main", "call", "bank", "slow_charge", "-a", "amount=7", "-a", "ms=1500"]
    console.print(f"1. A gateway calls slow_charge with the key [bold]{key}[/] …")
    gateway = subprocess.Popen([*command, "-k", key], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    if not wait_for_request(book, key, gateway):
        gateway.kill()
        console.print(
            "[bold red]error[/] the tool server did not get the call; is `make run` running, with this TGA_HOME?"
        )
        return 3
    gateway.send_signal(signal.SIGKILL)
    gateway.wait()
    console.print(f"2. … and is killed with -9 (pid {gateway.pid}) while the tool is still at work.")
    console.print("3. The same call again, with the same key: whoever meets the dead gateway's trace finishes it.")
    told = subprocess.run([*command, "-k", key], capture_output=True, text=True, check=False)
    console.print("   " + told.stderr.strip().replace("\n", "\n   "), markup=False)
    console.print("   " + told.stdout.strip(), markup=False)
    executions = lines_of(book, key, "execution")
    style = "green" if executions == 1 else "bold red"
    console.print(f"4. The tool server's own book: [{style}]{executions} execution[/] of this key.")
    return 0 if executions == 1 and told.returncode == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
