"""Several processes on one port, started as a user starts them; and clients that keep their connections and never try
again."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from app.postgres.embedded.server import EmbeddedPostgres
from tests.cli.world import World, open_world, wait_for
from tests.patience import HANG_S

SEVERAL_STARTS_S = 5 * HANG_S  # each process that starts may take as long as a test waits elsewhere
LIMITS = "\n[limits]\nrequests_per_second = 100000\nburst = 100000\n"


def children_of(pid: int) -> set[int]:
    """Its living children; none where it is gone."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == pid and state not in "ZX":
                found.add(int(entry.name))
    return found


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


class Home:
    """A home whose database nobody holds but the processes."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.config = home / "tga.toml"
        self.url = "http://127.0.0.1:1"
        self.config.write_text("")

    def environment(self, **more: str) -> dict[str, str]:
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
        return {**inherited, "TGA_HOME": str(self.home), **more}

    def admin_key(self) -> str | None:
        file = self.home / "admin.key"
        return file.read_text().strip() if file.exists() else None

    def database_runs(self) -> bool:
        return EmbeddedPostgres(self.home).postmaster_pid() is not None


Where = TypeVar("Where", World, Home)


class Serving(Generic[Where]):
    """`tga serve --processes N` in a home."""

    def __init__(self, world: Where, processes: int, *, name: str = "processes", **environment: str) -> None:
        self.world: Where = world
        self.told = world.home / f"{name}.out"
        with self.told.open("w") as told:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "app.main", "serve", "--processes", str(processes)],
                env=world.environment(**{"TGA_PORT": "0", **environment}),
                stdout=told,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_all_serve(self) -> Self:
        self.await_line("processes take requests")
        self.world.url = self.text().split("Listening on ")[1].split()[0]
        return self

    def text(self) -> str:
        return self.told.read_text()

    def await_line(self, text: str, *, count: int = 1) -> None:
        wait_for(lambda: self.text().count(text) >= count or self.process.poll() is not None, seconds=SEVERAL_STARTS_S)
        assert self.text().count(text) >= count, self.text()

    @property
    def port(self) -> int:
        return int(self.world.url.rpartition(":")[2])

    def processes(self) -> set[int]:
        return children_of(self.process.pid)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def restart(self) -> None:
        """Until all have been started anew."""
        before = self.text().count("Every process was started anew")
        self.send(signal.SIGHUP)
        self.await_line("Every process was started anew", count=before + 1)

    def wait(self) -> int:
        return self.process.wait(timeout=HANG_S)

    def close(self) -> None:
        if self.process.poll() is None:
            self.send(signal.SIGTERM)
            try:
                self.wait()
            except subprocess.TimeoutExpired:
                for pid in (self.process.pid, *self.processes()):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                self.process.wait()
                raise


class Client:
    """One connection, kept for as long as it lives. Nothing is tried again: what goes wrong is raised."""

    def __init__(self, serving: Serving[Any]) -> None:
        self._key = serving.world.admin_key()
        self._connection = http.client.HTTPConnection("127.0.0.1", serving.port, timeout=HANG_S)
        self._connection.connect()
        self.own_port = self._connection.sock.getsockname()[1]

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, bytes]:
        raw = None if body is None else json.dumps(body)
        self._connection.request(method, path, raw, {"Authorization": f"Bearer {self._key}"})
        answer = self._connection.getresponse()
        status, content = answer.status, answer.read()
        # The same connection still: http.client would open another one without a word.
        assert self._connection.sock is not None, f"the connection was closed after {status}: {content!r}"
        assert self._connection.sock.getsockname()[1] == self.own_port
        return status, content

    def call(self, tool: str, key: str, **arguments: Any) -> dict[str, Any]:
        body = {"server_id": "bank", "tool_name": tool, "arguments": arguments, "idempotency_key": key}
        status, content = self.ask("POST", "/v1/tool-calls", body)
        assert status == 200, content
        answer: dict[str, Any] = json.loads(content)
        return answer

    def ready(self) -> dict[str, Any]:
        status, content = self.ask("GET", "/readyz")
        assert status == 200, content
        answer: dict[str, Any] = json.loads(content)
        return answer

    def process(self) -> int:
        """The number of the process that has this connection now."""
        return int(self.ready()["processes"]["answered_by"])

    def close(self) -> None:
        self._connection.close()


class Callers:
    """Clients that call again and again, each on its own connection, each call with a key of its own."""

    def __init__(self, serving: Serving[Any], count: int, *, prefix: str) -> None:
        self._serving = serving
        self._stop = threading.Event()
        self.made: dict[str, dict[str, Any]] = {}
        self.failures: list[str] = []
        clients = [Client(serving) for _ in range(count)]
        self._threads = [
            threading.Thread(target=self._call, args=(client, f"{prefix}-{number}"), daemon=True)
            for number, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def _call(self, client: Client, prefix: str) -> None:
        number = 0
        try:
            while not self._stop.is_set():
                key = f"{prefix}-{number}"
                self.made[key] = client.call("charge", key, amount=1)
                number += 1
                self._stop.wait(0.01)  # the machine is for the processes, too
        except Exception as error:
            self.failures.append(f"{prefix}-{number}: {error!r}")
        finally:
            client.close()

    def await_more(self, count: int) -> None:
        """Until so many more calls were answered, or one failed."""
        target = len(self.made) + count
        wait_for(lambda: len(self.made) >= target or bool(self.failures))

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=HANG_S)
        assert not any(thread.is_alive() for thread in self._threads)


@contextlib.contextmanager
def world_of_processes() -> Iterator[World]:
    with open_world() as world:
        world.config.write_text(world.config.read_text() + LIMITS)
        yield world


def executions(world: World) -> dict[str, int]:
    """How often the bank has executed each key, by its own book."""
    counted: dict[str, int] = {}
    for line in world.book.read_text().splitlines():
        said = json.loads(line)
        if said["event"] == "execution":
            counted[said["idempotency_key"]] = counted.get(said["idempotency_key"], 0) + 1
    return counted
