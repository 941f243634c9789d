"""Tool servers as child processes: they end with the gateway, however it ends, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from app.connectors.mcp.child import Child
from tests.cli.world import wait_for
from tests.connectors.servers import until
from tests.mcp.standing import descendants, is_alive, scripted, standing

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")

# Three kinds of server: one that leaves, one that stays when its input ends, and one that has a child that stays.
LEAVES = "import sys; sys.stdin.read()"
STAYS = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
HAS_CHILD = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {STAYS!r}]); sys.stdin.read()"


async def started(program: str, processes: int) -> tuple[Child, list[int]]:
    child = await Child.start([sys.executable, "-c", program], environment={}, folder=Path("/"), inherit=os.environ)
    await until(lambda: len(descendants(child.pid)) == processes)
    await asyncio.sleep(0.3)  # until the last of them has begun
    return child, [child.pid, *descendants(child.pid)]


@pytest.mark.parametrize(("program", "processes"), [(LEAVES, 1), (STAYS, 1), (HAS_CHILD, 2)])
async def test_nothing_is_left_after_a_stop(program: str, processes: int) -> None:
    child, pids = await started(program, processes)
    await child.stop()
    await until(lambda: not any(map(is_alive, pids)))


async def test_a_server_that_does_not_leave_is_asked_before_it_is_killed(tmp_path: Path) -> None:
    asked = tmp_path / "asked"
    program = f"import signal, time; signal.signal(15, lambda *_: open({str(asked)!r}, 'w')); time.sleep(600)"
    child, pids = await started(program, 1)
    await child.stop()
    assert asked.exists()
    await until(lambda: not any(map(is_alive, pids)))


async def test_nothing_is_left_when_the_command_ends_by_itself() -> None:
    child, pids = await started(HAS_CHILD, 2)
    os.kill(pids[1], signal.SIGKILL)
    await until(lambda: not any(map(is_alive, pids)))
    assert "code 137" in await child.ended()
    await child.stop()


async def test_a_killed_guard_takes_the_command_with_it() -> None:
    child, pids = await started(STAYS, 1)
    os.kill(child.pid, signal.SIGKILL)
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


def killed(folder: Path, config: str, kill: Callable[[subprocess.Popen[str]], None], *, processes: int) -> list[int]:
    """The children of a process with such a registry, which was killed."""
    path = folder / "tga.toml"
    path.write_text(config)
    gateway = subprocess.Popen([sys.executable, "-c", GATEWAY, str(path)], stdout=subprocess.PIPE, text=True)
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
    children = killed(tmp_path, config, lambda gateway: gateway.kill(), processes=5)
    wait_for(lambda: not any(map(is_alive, children)), seconds=10)


async def test_a_closed_registry_leaves_no_process(tmp_path: Path) -> None:
    async with standing(tmp_path, scripted(tmp_path)) as world:
        assert world.connection().state == "connected"
        children = descendants(os.getpid())
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
