"""The README's quickstart as a program: its steps, and the two terminals of a newcomer to run them in.

A block that says `make run` belongs to the first terminal, where it starts the gateway, or starts it again after
Ctrl-C. Every other block goes to the second one, a single `sh`, line by line as printed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.cli.world import wait_for

ROOT = Path(__file__).parents[2]
SHOWN = "# → "
ELLIPSIS = " … "
PORTS = (8420, 8421)
SECONDS_MAX = 120.0


@dataclass(frozen=True)
class Shown:
    """What the README shows below a command: pieces of its output, in this order."""

    command: str
    pieces: list[str]

    def is_in(self, output: str) -> bool:
        place = 0
        for piece in self.pieces:
            found = output.find(piece, place)
            if found < 0:
                return False
            place = found + len(piece)
        return True


@dataclass(frozen=True)
class Block:
    """One fenced block, and the name of the step that it belongs to."""

    step: str
    text: str

    @property
    def is_gateway(self) -> bool:
        return self.text.strip() == "make run"

    @property
    def shown(self) -> list[Shown]:
        lines, found = self.text.splitlines(), []
        for number, line in enumerate(lines):
            if line.startswith(SHOWN):
                found.append(Shown(lines[number - 1], line.removeprefix(SHOWN).split(ELLIPSIS)))
        return found

    def script(self, mark: str) -> str:
        """The block, with a mark printed where the README shows an answer; to sh that line is a comment."""
        lines = [f"echo; echo '{mark}'" if line.startswith(SHOWN) else line for line in self.text.splitlines()]
        return "\n".join([*lines, f"echo; echo '{mark}'", ""])


def read_blocks(readme: str) -> list[Block]:
    """Every `sh` block of the quickstart. A step begins with its name in bold."""
    section = re.search(r"^## Quickstart.*?(?=^## |\Z)", readme, re.DOTALL | re.MULTILINE)
    if section is None:
        raise ValueError("the README has no quickstart")
    blocks, step = [], "Start"
    for found in re.finditer(
        r"^\*\*(?P<step>[^*]+?)[.,]?\*\*|^```sh\n(?P<text>.*?)^```$", section[0], re.DOTALL | re.M
    ):
        if found["step"] is not None:
            step = found["step"]
        else:
            blocks.append(Block(step, found["text"]))
    return blocks


def is_free(port: int) -> bool:
    try:
        socket.create_server(("127.0.0.1", port)).close()
    except OSError:
        return False
    return True


class Newcomer:
    """A copy of the clone, and two terminals in it. The ports are those that are printed; where one is taken another
    is written in its place, in the README's blocks as in the copy, and `note` says so."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="tga-readme-"))
        self.folder.chmod(0o711)  # PostgreSQL, which under root runs as another account, must get through
        self._ports = {port: port if is_free(port) else _other_port() for port in PORTS}
        self._copy_clone()
        # Without what this run of the tests was told: a newcomer's Python also keeps what it has compiled.
        told = ("TGA_", "MAKE", "PYTHON")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(told)}
        self._environment = {**inherited, "PYTHONPATH": str(self.folder)}
        self._gateway: subprocess.Popen[bytes] | None = None
        self._told = self.folder / "gateway.out"
        self._said = self.folder / "terminal.out"
        with self._said.open("wb") as said:
            self._terminal = subprocess.Popen(
                ["sh"],
                stdin=subprocess.PIPE,
                stdout=said,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment,
                start_new_session=True,
            )
        self._blocks = 0

    @property
    def note(self) -> str:
        moved = [f"{port} is taken, {used} is used" for port, used in self._ports.items() if port != used]
        return f"ports: {', '.join(moved) or 'as printed'}"

    @property
    def book(self) -> Path:
        return self.folder / ".tga" / "bank.jsonl"

    def start_gateway(self) -> None:
        """`make run`; a second time: Ctrl-C first. What `make` has installed for the tests is not installed again."""
        self.stop_gateway()
        with self._told.open("wb") as told:
            self._gateway = subprocess.Popen(
                ["make", "-o", ".venv/.ready", "run"],
                stdin=subprocess.DEVNULL,
                stdout=told,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=self._environment,
                start_new_session=True,
            )
        gateway = self._gateway
        wait_for(lambda: "Ctrl-C stops everything" in self.told or gateway.poll() is not None, seconds=SECONDS_MAX)
        assert gateway.poll() is None, self.told

    @property
    def told(self) -> str:
        """What the gateway says in its terminal."""
        return self._told.read_text("utf-8", "replace")

    def stop_gateway(self) -> None:
        """Ctrl-C: to everything that runs in the first terminal's foreground."""
        gateway, self._gateway = self._gateway, None
        if gateway is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(gateway.pid, signal.SIGINT)
            gateway.wait(timeout=SECONDS_MAX)

    def run(self, block: Block) -> list[str]:
        """Type the block into the second terminal; what came before each answer that is shown, then the rest."""
        self._blocks += 1
        mark = f"==== {self._blocks} ===="
        path = self.folder / f"block-{self._blocks}.sh"
        path.write_text(self._with_ports(block.script(mark)), "utf-8")
        before = self._said.stat().st_size
        marks = len(block.shown) + 1

        def said() -> str:
            return self._said.read_bytes()[before:].decode("utf-8", "replace")

        assert self._terminal.stdin is not None
        self._terminal.stdin.write(f". ./{path.name}\n".encode())
        self._terminal.stdin.flush()
        wait_for(lambda: said().count(mark) == marks or self._terminal.poll() is not None, seconds=SECONDS_MAX)
        parts = said().split(mark)
        assert len(parts) == marks + 1, f"the shell ended in\n{block.text}\n{said()}"
        return parts[:-1]

    def close(self) -> None:
        try:
            self.stop_gateway()
            self._terminal.communicate(timeout=SECONDS_MAX)
        finally:
            if self._terminal.poll() is None:
                os.killpg(self._terminal.pid, signal.SIGKILL)
                self._terminal.wait()
            shutil.rmtree(self.folder, ignore_errors=True)

    def _copy_clone(self) -> None:
        for name in ("tga_gateway", "app", "tools", "schemas"):
            shutil.copytree(ROOT / name, self.folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "Makefile", self.folder)
        (self.folder / ".venv").symlink_to(ROOT / ".venv")
        for path in (*self.folder.glob("tools/*.py"), *self.folder.glob("app/demo/*"), self.folder / "app/settings.py"):
            path.write_text(self._with_ports(path.read_text("utf-8")), "utf-8")

    def _with_ports(self, text: str) -> str:
        for port, used in self._ports.items():
            text = text.replace(str(port), str(used))
        return text


def _other_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])
