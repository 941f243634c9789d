"""Tool servers as child processes: they end with the gateway, however it ends, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from app.connectors.mcp import child_guard
from app.connectors.mcp.child import Child
from tests.cli.world import wait_for
from tests.connectors.servers import until
from tests.mcp.standing import descendants, is_alive, scripted, standing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# Kinds of server: one that leaves; one that stays when its input ends; ones that have a child that stays: in their
# group, in a session of its own, as a daemon whose parent is gone, hidden in a family, or always as another process.
LEAVES = "import sys; sys.stdin.read()"
STAYS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
HAS_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}]); sys.stdin.read()"
IN_SESSION = HAS_CHILD.replace("])", "], start_new_session=True)")
DAEMON = f"""
import os, sys
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for number in range(3): os.close(number)
        exec({STAYS!r})
    os._exit(0)
os.wait()
sys.stdin.read()
"""
FAMILY = f"""
import os, sys
for _ in range(4):
    if os.fork() == 0:
        os.setsid()
        for _ in range(2):
            if os.fork() == 0: os.setpgid(0, 0)
        exec({STAYS!r})
sys.stdin.read()
"""
# Each process of it lives for a millisecond and leaves another one behind: whoever looks for it finds it gone. It ends
# by itself, long after every test: one that was left behind would take a core for ever.
RUNNER = """
import os, sys, time
end = time.monotonic() + 600
if os.fork() == 0:
    os.setsid()
    while time.monotonic() < end:
        if os.fork() > 0: os._exit(0)
        time.sleep(0.001)
    os._exit(0)
sys.stdin.read()
"""
OUTER, INNER, COMMAND = 0, 1, 2
KINDS = {"leaves": (LEAVES, 3), "stays": (STAYS, 3), "child": (HAS_CHILD, 4), "session": (IN_SESSION, 4)}
ESCAPING = {"session": (IN_SESSION, 4), "daemon": (DAEMON, 4), "family": (FAMILY, 3 + 4 * 4), "runner": (RUNNER, 4)}


@pytest.fixture
def mark() -> Iterator[str]:
    """In the environment of all that a test starts, so that nothing of it goes unseen or is left behind."""
    made = f"TGA_TEST_MARK={uuid.uuid4()}"
    yield made
    for _ in range(100):
        left = marked(made)
        if not left:
            break
        for pid in left:
            # By its group, which a process that forks all the time does not leave.
            with suppress(ProcessLookupError, PermissionError):
                group = os.getpgid(pid)
                os.killpg(group, signal.SIGKILL) if group != os.getpgrp() else os.kill(pid, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Every living process with the mark, whoever its parent is."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes() and is_alive(int(folder.name)):
                found.append(int(folder.name))
    return found


def none_is_left(mark: str) -> bool:
    """Seen twice: one that is just being born has no environment yet."""
    return not marked(mark) and not marked(mark)


async def started(program: str, processes: int, mark: str = "A=1") -> tuple[Child, list[int]]:
    """The child, and the pids of both guards, the command and the rest."""
    child = await Child.start(
        [sys.executable, "-c", program], environment=dict([mark.split("=")]), folder=Path("/"), inherit=os.environ
    )
    await until(lambda: len(descendants(child.pid)) >= processes - 1)
    await asyncio.sleep(0.3)  # until the last of them has begun
    return child, [child.pid, *descendants(child.pid)]


@pytest.mark.parametrize("kind", KINDS | ESCAPING)
async def test_nothing_is_left_after_a_stop(kind: str, mark: str) -> None:
    child, pids = await started(*(KINDS | ESCAPING)[kind], mark)
    assert len(marked(mark)) >= 3
    await child.stop()
    await until(lambda: not any(map(is_alive, pids)))
    await until(lambda: none_is_left(mark))


@pytest.mark.parametrize("who", [OUTER, INNER, COMMAND])
@pytest.mark.parametrize("kind", ESCAPING)
async def test_nothing_is_left_when_one_of_them_is_killed(kind: str, who: int, mark: str) -> None:
    child, pids = await started(*ESCAPING[kind], mark)
    os.kill(pids[who], signal.SIGKILL)
    await until(lambda: none_is_left(mark))
    assert "code" in await child.ended()
    await child.stop()


@pytest.mark.parametrize("who", [OUTER, INNER])
async def test_a_guard_that_is_asked_to_end_asks_the_command_first(who: int, mark: str, tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = f"import signal, sys; signal.signal(15, lambda *_: open({str(asked)!r}, 'w').close() or sys.exit(7)); "
    child, pids = await started(program + "sys.stdin.read()", 3, mark)
    os.kill(pids[who], signal.SIGTERM)
    await until(lambda: none_is_left(mark))
    assert asked.exists()
    await child.stop()


async def test_orphans_that_end_while_the_server_lives_leave_no_zombie(mark: str) -> None:
    program = "import os, sys\nfor _ in range(20):\n if os.fork() == 0:\n  os.fork(); os._exit(0)\nsys.stdin.read()"
    child, pids = await started(program, 3 + 20, mark)  # its own children it does not wait for
    assert [pid for pid in descendants(pids[INNER]) if parent_of(pid) == pids[INNER]] == [pids[COMMAND]]
    await child.stop()


def parent_of(pid: int) -> int:
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return 0  # it is gone


async def test_the_lifeline_is_not_the_commands() -> None:
    """Whoever held its other end would keep the guard from noticing that the gateway is gone."""
    child, pids = await started("import sys; sys.stdin.read()", 3)
    held = [os.readlink(f"/proc/{pids[COMMAND]}/fd/{number}") for number in os.listdir(f"/proc/{pids[COMMAND]}/fd")]
    assert len(held) == 3
    await child.stop()


async def test_children_are_found_also_where_the_kernel_keeps_no_lists_of_them() -> None:
    child, pids = await started(FAMILY, 3 + 4 * 4)
    by_parents = child_guard._children_by_parents()
    left, found = [child.pid], list[int]()
    while left:
        children = by_parents(left.pop())
        found, left = found + children, left + children
    assert sorted(found) == sorted(pids[1:]) == sorted(child_guard._descendants(child.pid))
    await child.stop()


async def test_a_server_that_does_not_leave_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = f"import signal, time; signal.signal(15, lambda *_: open({str(asked)!r}, 'w')); time.sleep(600)"
    child, pids = await started(program, 3)
    await child.stop()
    assert asked.exists()
    await until(lambda: not any(map(is_alive, pids)))


async def test_nothing_is_left_when_the_command_ends_by_itself() -> None:
    child, pids = await started(HAS_CHILD, 4)
    os.kill(pids[COMMAND], signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    assert "code 137" in await child.ended()
    await child.stop()


async def test_both_guards_killed_at_once_take_the_command_with_them() -> None:
    """The most that can be promised then: the kernel kills the command with its parent."""
    child, pids = await started(STAYS, 3)
    for who in (OUTER, INNER):
        os.kill(pids[who], signal.SIGSTOP)
    for who in (OUTER, INNER):
        os.kill(pids[who], signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    await child.stop()


GATEWAY = """
import asyncio, sys
from pathlib import Path
from app.config import load_config
from app.connectors.registry import Registry

async def main():
    registry = Registry.from_config(load_config(Path(sys.argv[1])))
    await registry.start(wait_ms=500)
    print("up", flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


def killed(
    folder: Path, config: str, kill: Callable[[subprocess.Popen[str]], None], *, processes: int, mark: str = "A=1"
) -> list[int]:
    """The children of a process with such a registry, which was killed."""
    path = folder / "tga.toml"
    path.write_text(config)
    gateway = subprocess.Popen(
        [sys.executable, "-c", GATEWAY, str(path)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | dict([mark.split("=")]),
    )
    assert gateway.stdout is not None
    try:
        assert gateway.stdout.readline() == "up\n"
        wait_for(lambda: len(descendants(gateway.pid)) >= processes)
        children = descendants(gateway.pid)
        kill(gateway)
    finally:
        gateway.kill()
        gateway.wait()
        gateway.stdout.close()
    return children


def test_children_end_when_the_gateway_is_killed(tmp_path: Path) -> None:
    stubborn = "\n".join(
        ["[servers.stays]", 'transport = "mcp-stdio"', f"command = ['{sys.executable}', '-c', '''{HAS_CHILD}''']", ""]
    )
    config = scripted(tmp_path) + stubborn
    children = killed(tmp_path, config, lambda gateway: gateway.kill(), processes=7)
    wait_for(lambda: not any(map(is_alive, children)))


def server(name: str, program: str, mark: str) -> str:
    lines = [f"[servers.{name}]", 'transport = "mcp-stdio"', f"command = ['{sys.executable}', '-c', '''{program}''']"]
    variable, value = mark.split("=")
    return "\n".join([*lines, f'env = {{ {variable} = "{value}" }}', ""])


def test_what_escaped_ends_too_when_the_gateway_is_killed(tmp_path: Path, mark: str) -> None:
    config = "".join(server(name, program, mark) for name, (program, _) in ESCAPING.items())
    processes = sum(count for _, count in ESCAPING.values())
    killed(tmp_path, config, lambda gateway: gateway.kill(), processes=processes, mark=mark)
    wait_for(lambda: none_is_left(mark))


def test_what_escaped_ends_too_when_the_gateway_is_frozen_then_killed_with_a_guard(tmp_path: Path, mark: str) -> None:
    def kill(gateway: subprocess.Popen[str]) -> None:
        gateway.send_signal(signal.SIGSTOP)
        guards = [pid for pid in descendants(gateway.pid) if parent_of(pid) == gateway.pid]
        for guard in guards:
            os.kill(guard, signal.SIGKILL)
        gateway.kill()

    config = "".join(server(name, program, mark) for name, (program, _) in ESCAPING.items())
    processes = sum(count for _, count in ESCAPING.values())
    killed(tmp_path, config, kill, processes=processes, mark=mark)
    wait_for(lambda: none_is_left(mark))


async def test_what_escaped_from_a_server_that_is_started_again_is_gone(tmp_path: Path, mark: str) -> None:
    pids = tmp_path / "pids"
    escaping = f"open({str(pids)!r}, 'a').write(str(os.getpid()) + chr(10)); {STAYS}"
    program = f"import os\nif os.fork() == 0:\n os.setsid()\n if os.fork() == 0:\n  exec({escaping!r})\n os._exit(0)"
    async with standing(tmp_path, server("it", program, mark)) as world:
        await until(lambda: pids.exists() and len(pids.read_text().splitlines()) >= 3)
        escaped = [int(line) for line in pids.read_text().splitlines()]
        await until(lambda: not any(map(is_alive, escaped)))
        assert world.connection().last_error is not None
    await until(lambda: none_is_left(mark))


async def test_where_there_are_no_subreapers_it_is_said_at_the_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert child_guard.ends_all_descendants()
    async with standing(tmp_path, scripted(tmp_path)):
        assert "outlive" not in caplog.text
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not child_guard.ends_all_descendants()
    async with standing(tmp_path, scripted(tmp_path)):
        assert "may outlive the gateway" in caplog.text


async def test_a_closed_registry_leaves_no_process(tmp_path: Path) -> None:
    before = set(descendants(os.getpid()))  # servers of the tests' own live on
    async with standing(tmp_path, scripted(tmp_path)) as world:
        assert world.connection().state == "connected"
        children = set(descendants(os.getpid())) - before
        assert len(children) >= 2
    await until(lambda: not any(map(is_alive, children)))


async def test_a_server_that_keeps_dying_is_tried_more_and_more_rarely(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    program = f"open({str(tried)!r}, 'a').write('x')"
    config = "\n".join(
        ["[servers.it]", 'transport = "mcp-stdio"', f"command = ['{sys.executable}', '-c', '''{program}''']", ""]
    )
    async with standing(tmp_path, config) as world:
        await asyncio.sleep(2.5)
        assert 2 <= len(tried.read_text()) <= 5
        assert world.connection().last_error is not None
