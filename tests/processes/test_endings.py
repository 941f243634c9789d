"""How a supervisor and its processes begin and end when something is in the way: nothing of them is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.cli.world import wait_for
from tests.conftest import make_home
from tests.processes.world import SEVERAL_STARTS_S, Client, Home, Serving, is_gone


@pytest.fixture(scope="module")
def home() -> Iterator[Home]:
    """One for the module: its database is made once."""
    folder = make_home()
    try:
        yield Home(folder)
    finally:
        shutil.rmtree(folder)


Serve = Callable[..., Serving[Home]]


@pytest.fixture
def serve(home: Home) -> Iterator[Serve]:
    """Starts them; what a test has not ended is ended after it."""
    started: list[Serving[Home]] = []

    def start(processes: int = 2, **more: str) -> Serving[Home]:
        started.append(Serving(home, processes, **more))
        return started[-1]

    yield start
    for one in started:
        one.close()


def kept_open(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def until_nothing_is_left(home: Home, *pids: int) -> None:
    wait_for(lambda: all(map(is_gone, pids)))
    wait_for(lambda: not home.database_runs())


def test_a_killed_supervisor_leaves_neither_processes_nor_a_database_and_the_port_is_free(
    home: Home, serve: Serve
) -> None:
    serving = serve().until_all_serve()
    processes = serving.processes()
    assert len(processes) == 2
    assert home.database_runs()
    client = Client(serving)
    assert client.ready()["processes"]["of"] == 2
    serving.process.kill()
    serving.wait()
    socket.create_server(("127.0.0.1", serving.port), reuse_port=False).close()
    until_nothing_is_left(home, *processes)
    client.close()


@pytest.mark.one_in(3)
@pytest.mark.parametrize("moment", ["at once", "the first process", "the others"])
def test_a_supervisor_that_is_killed_while_it_starts_leaves_nothing(home: Home, serve: Serve, moment: str) -> None:
    serving = serve(2, name=moment.replace(" ", "-"))
    seen: set[int] = set()
    if moment == "the first process":
        wait_for(lambda: bool(serving.processes()))
    elif moment == "the others":
        serving.await_line("Listening on")
    seen |= serving.processes()
    serving.process.kill()
    serving.wait()
    # A process that was started in the same moment is somebody else's child by now; it ends as the others do.
    wait_for(lambda: not processes_in(home))
    until_nothing_is_left(home, *seen)


def processes_in(home: Home) -> list[int]:
    """Gateways of this home, whoever their parent is."""
    mark = f"TGA_HOME={home.home}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0") and b"serve" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return [pid for pid in found if not is_gone(pid)]


def test_a_terminal_s_interrupt_is_heard_by_the_supervisor_alone_and_ends_all(home: Home, serve: Serve) -> None:
    serving = serve(2, name="interrupted").until_all_serve()
    processes = serving.processes()
    groups = {os.getpgid(pid) for pid in processes}
    assert os.getpgid(serving.process.pid) not in groups
    os.killpg(os.getpgid(serving.process.pid), signal.SIGINT)
    assert serving.wait() == 0
    until_nothing_is_left(home, *processes)
    assert "KeyboardInterrupt" not in serving.text()
    assert "Traceback" not in serving.text()


def test_what_cannot_begin_says_why_once_and_leaves_nothing(home: Home, serve: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        serving = serve(2, name="taken", TGA_PORT=str(taken.getsockname()[1]))
        assert serving.wait() == 2
    assert serving.text().count("SETTING_INVALID") == 1
    assert "TGA_PORT" in serving.text()
    home.config.write_text('[servers.bad]\ntransport = "pigeon"\n')
    serving = serve(2, name="bad")
    assert serving.wait() == 2
    assert serving.text().count("pigeon") == 1
    home.config.write_text("[database]\nconnections = 20\n")
    serving = serve(2, name="few")
    assert serving.wait() == 2
    assert "at least 21" in serving.text()
    home.config.write_text("")
    serving = serve(2, name="away", TGA_DATABASE_URL="postgresql://tga@127.0.0.1:1/tga")
    assert serving.wait() == 3
    assert serving.text().count("STORE_UNAVAILABLE") == 1
    until_nothing_is_left(home)


@pytest.mark.one_in(3)
def test_a_first_process_that_cannot_start_ends_all_with_its_code(home: Home, serve: Serve) -> None:
    """The supervisor finds nothing wrong here: only a process looks at the keys."""
    serving = serve(2, name="unfit", TGA_SIGNING_KEY="no key at all")
    code = serving.wait()
    assert code != 0
    assert "process 1" in serving.text()
    assert "could not be started: exit code" in serving.text()
    until_nothing_is_left(home)


@pytest.mark.one_in(3)
def test_hang_ups_in_a_row_are_served_by_few_rounds_and_no_descriptor_stays_open(home: Home, serve: Serve) -> None:
    serving = serve(2, name="storm").until_all_serve()
    serving.restart()
    before = kept_open(serving.process.pid)
    rounds = serving.text().count("Every process was started anew")
    for _ in range(200):
        serving.send(signal.SIGHUP)
    wait_for(
        lambda: serving.text().count("Starting every") == serving.text().count("was started anew") > rounds,
        seconds=SEVERAL_STARTS_S,
    )
    client = Client(serving)
    wait_for(lambda: client.ready()["processes"]["ready"] == 2)
    client.close()
    wait_for(lambda: kept_open(serving.process.pid) <= before)
    assert len(serving.processes()) == 2
    # 200 signals, and at most one round for what came while another one went on.
    assert serving.text().count("Starting every") <= rounds + 3
    processes = serving.processes()
    serving.send(signal.SIGTERM)
    assert serving.wait() == 0
    until_nothing_is_left(home, *processes)


@pytest.mark.one_in(3)
def test_a_second_signal_kills_what_still_works_and_leaves_nothing(home: Home, serve: Serve) -> None:
    serving = serve(2, name="twice").until_all_serve()
    processes = serving.processes()
    frozen = min(processes)
    os.kill(frozen, signal.SIGSTOP)  # it will never end by itself
    try:
        serving.send(signal.SIGTERM)
        serving.await_line("once more to stop at once")
        serving.send(signal.SIGTERM)
        assert serving.wait() == 0
    finally:
        if not is_gone(frozen):
            os.kill(frozen, signal.SIGKILL)
    until_nothing_is_left(home, *processes)
