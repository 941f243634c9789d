"""A demonstration for operators: kill -9 the gateway in the middle of a call, and see the call finished once.

It stands alone: a tool server, an embedded PostgreSQL and two gateways of its own, in a folder that is removed in the
end. The tool server's book is the judge.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib import resources
from pathlib import Path

from rich.console import Console

from app.core.errors import TgaError
from app.postgres.embedded.server import EmbeddedPostgres

console = Console(highlight=False, soft_wrap=True)
WAIT_S = 30.0
KEY = "order-7"
CALL = ["call", "bank", "slow_charge", "-a", "amount=7", "-a", "ms=1500", "-k", KEY]


class World:
    """A home with a tool server's address in its configuration, and the processes that were started in it."""

    def __init__(self, home: Path, stack: ExitStack) -> None:
        self.home = home
        self.book = home / "bank.jsonl"
        self._stack = stack
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
        self._environment = {**clean, "TGA_HOME": str(home), "TGA_PORT": "0"}
        url = self._start(["-m", "app.demo.tool_server", "--port", "0", "--book", str(self.book)])[1].strip()
        demo = resources.files("app.demo").joinpath("tga.toml").read_text("utf-8")
        (home / "tga.toml").write_text(demo.replace("http://127.0.0.1:8421", url), "utf-8")

    def start_gateway(self) -> subprocess.Popen[str]:
        gateway, line = self._start(["-m", "app.main", "serve"])
        if "http://" not in line:
            raise RuntimeError("the gateway did not start")
        self._environment["TGA_URL"] = line.split()[2]
        return gateway

    def tga(self, *arguments: str, stderr: int = subprocess.DEVNULL) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "app.main", *arguments]
        return subprocess.Popen(command, env=self._environment, stdout=subprocess.PIPE, stderr=stderr, text=True)

    def tell(self, *arguments: str) -> int:
        """Run a command, shown as it is."""
        console.print(f"   $ tga {' '.join(arguments)}", markup=False)
        process = self.tga(*arguments, stderr=subprocess.STDOUT)
        told, _ = process.communicate()
        console.print("   " + told.strip().replace("\n", "\n   "), markup=False)
        return process.returncode

    def lines(self, event: str) -> int:
        if not self.book.exists():
            return 0
        lines = [json.loads(line) for line in self.book.read_text("utf-8").splitlines() if line.endswith("}")]
        return sum(line["event"] == event and line["tool"] == "slow_charge" for line in lines)

    def wait_for_request(self) -> bool:
        deadline = time.monotonic() + WAIT_S
        while not self.lines("request"):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.02)
        return True

    def _start(self, arguments: list[str]) -> tuple[subprocess.Popen[str], str]:
        process = subprocess.Popen(
            [sys.executable, *arguments], env=self._environment, stdout=subprocess.PIPE, text=True
        )
        self._stack.callback(_end, process)
        return process, process.stdout.readline() if process.stdout else ""


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(timeout=30)
    except subprocess.TimeoutExpired:
        process.kill()


def demonstrate(world: World) -> int:
    first = world.start_gateway()
    console.print(f"1. A gateway (pid {first.pid}) is asked for slow_charge with the key [bold]{KEY}[/] …")
    caller = world.tga(*CALL)
    if not world.wait_for_request():
        console.print("[bold red]error[/] the tool server did not get the call")
        return 3
    first.send_signal(signal.SIGKILL)
    first.wait()
    caller.communicate()
    console.print("2. … and is killed with -9 while the tool is still at work. Its caller got no answer.")
    second = world.start_gateway()
    console.print(f"3. Another gateway (pid {second.pid}) starts, and finds what has no living executor.")
    console.print("4. The caller asks again, with the same key:")
    code = world.tell(*CALL)
    console.print("5. What stands on the record:")
    trace = json.loads(world.tga("traces", "--json").communicate()[0])[0]
    world.tell("trace", trace["trace_id"])
    executions = world.lines("execution")
    style = "green" if executions == 1 else "bold red"
    console.print(f"6. The tool server's own book: [{style}]{executions} execution[/] of this key.")
    return 0 if executions == 1 and code == 0 else 1


def main() -> int:
    home = Path(tempfile.mkdtemp(prefix="tga-crash-"))
    home.chmod(0o711)
    console.print("Starting a tool server, PostgreSQL and a gateway of their own …")
    try:
        # Held here, the database outlives the killed gateway and is gone in the end.
        with EmbeddedPostgres(home), ExitStack() as stack:
            return demonstrate(World(home, stack))
    except TgaError as error:
        console.print(f"[bold red]error[/] {error}")
        return 3
    finally:
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
