"""Assume that Lua is broken into: native code in a child finds no file, no socket, no process and no way to get one."""

from __future__ import annotations

import asyncio
import json
import os
import select
import signal
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.lua import seccomp
from app.lua.pool import ChildLost, Chunk, Pool
from tests.lua.states import LANGUAGE, value_of

ROOT = Path(__file__).resolve().parents[2]
IS_LINUX = sys.platform == "linux"


def _native(user: str) -> dict[str, Any]:
    program = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from tests.lua.native import main; main()"
    done = subprocess.run(
        [sys.executable, "-I", "-c", program, user],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
        env={},
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.mark.skipif(not IS_LINUX, reason="NOT TRIED: seccomp is Linux's")
@pytest.mark.parametrize("user", ["whoever runs this", "another user"])
def test_native_code_in_a_child_is_refused_every_call(user: str) -> None:
    found = _native(user)
    assert {"seccomp", "no new privileges", "dies with parent", "memory", "no files"} <= set(found["confinement"])
    is_root = os.geteuid() == 0 and user != "another user"
    assert ("own user" in found["confinement"]) == is_root
    assert ("empty root" in found["confinement"]) == is_root
    assert {name: end for name, end in found["calls"].items() if end != "EPERM"} == {}
    assert len(found["calls"]) >= 30


@pytest.mark.skipif(not IS_LINUX, reason="NOT TRIED: /proc is Linux's")
async def test_a_child_has_no_environment_no_descriptor_and_its_own_user() -> None:
    async with Pool(children=1, language=LANGUAGE) as pool:
        await pool.report()
        (child,) = [child for child in pool._children if child is not None]
        here = Path(f"/proc/{child.pid}")
        status = dict(line.split(":\t", 1) for line in (here / "status").read_text().splitlines() if ":\t" in line)
        assert status["Seccomp"] == "2"
        assert status["NoNewPrivs"] == "1"
        assert status["Threads"] == "1"
        if os.geteuid() == 0:
            assert sorted(each.name for each in (here / "fd").iterdir()) == ["0", "1", "2"]
            assert os.readlink(here / "fd" / "2") == os.devnull
            assert {line.split("=")[0] for line in (here / "environ").read_text().split("\0") if line} <= {
                "TZ",
                "LC_ALL",
            }
            assert os.readlink(here / "root").endswith("(deleted)")
            users = {int(user) for user in status["Uid"].split()}
            assert len(users) == 1
            assert not users & {0, os.geteuid()}
            assert int(status["CapEff"], 16) == int(status["CapPrm"], 16) == 0


@pytest.mark.skipif(not IS_LINUX, reason="NOT TRIED: a parent's death is told on Linux")
def test_a_child_dies_with_its_parent_in_the_middle_of_a_slice() -> None:
    """The parent is killed, so nothing closes anything in order; the child is inside a loop and reads nothing."""
    program = f"""
import asyncio, sys
sys.path.insert(0, {str(ROOT)!r})
from app.lua.limits import Limits
from app.lua.pool import Chunk, Pool
async def main():
    pool = Pool(Limits(slice_cpu_s=600, attempt_cpu_s=600), children=1, language={LANGUAGE!r})
    state = await pool.state([Chunk("main", "while true do end")], seed=b"", is_strict=False)
    task = asyncio.create_task(state.resume(0, None))
    await asyncio.sleep(0)
    print(pool._children[0].pid, flush=True)
    await task
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        watched = os.pidfd_open(child)
        try:
            parent.kill()
            parent.wait()
            assert select.select([watched], [], [], 120)[0], "the child outlived its parent"
        finally:
            os.close(watched)


async def test_signals_to_a_child_harm_no_innocent_state() -> None:
    async with Pool(children=1, language=LANGUAGE) as pool:
        for number, is_blamed in ((signal.SIGKILL, False), (signal.SIGSEGV, True), (signal.SIGTERM, True)):
            waiting = await pool.state([Chunk("main", "return call('wait')")], seed=b"", is_strict=False)
            await waiting.resume(0, None)
            busy = await pool.state([Chunk("main", "while true do end")], seed=b"", is_strict=False)
            slices = asyncio.create_task(busy.resume(0, None))
            await asyncio.sleep(0)
            (child,) = [child for child in pool._children if child is not None]
            assert child.pid is not None
            os.kill(child.pid, number)
            with pytest.raises(ChildLost) as lost:
                await slices
            assert (lost.value.reason, lost.value.is_guilty) == ("DIED", is_blamed)
            with pytest.raises(ChildLost) as lost:
                await waiting.resume(0, "reply")
            assert not lost.value.is_guilty
            assert await value_of(pool, "return 2") == 2


@pytest.mark.parametrize("calls", [seccomp._X86_64, seccomp._AARCH64], ids=["x86_64", "aarch64"])
def test_the_filter_answers_as_the_table_says(calls: seccomp.Calls) -> None:
    """The program is interpreted here, for both architectures, over every number and the arguments that matter."""
    program = seccomp.build_filter(calls)

    def decide(number: int, *, architecture: int = calls.architecture, first: int = 0, third: int = 0) -> str:
        words = {0: number, 4: architecture, 16: first, 32: third}
        at, loaded = 0, 0
        while True:
            code, yes, no, value = struct.unpack_from("=HBBI", program, at * 8)
            at += 1
            if code == 0x20:
                loaded = words[value]
            elif code == 0x06:
                return {0x7FFF0000: "allow", 0x80000000: "kill"}.get(value, "refuse")
            else:
                is_true = {0x15: loaded == value, 0x35: loaded >= value, 0x45: bool(loaded & value)}[code]
                at += yes if is_true else no

    allowed = {number for number in range(1024) if decide(number, first=0, third=0) == "allow"}
    assert allowed == {calls.read, *calls.mapping, *calls.plain.values()}
    assert [decide(calls.read, first=fd) for fd in range(4)] == ["allow", "refuse", "refuse", "refuse"]
    assert [decide(calls.write, first=fd) for fd in range(4)] == ["refuse", "allow", "refuse", "refuse"]
    for number in calls.mapping:
        assert [decide(number, third=prot) for prot in (0, 3, 4, 7)] == ["allow", "allow", "refuse", "refuse"]
    assert decide(calls.read, architecture=0x40000003) == "kill"
    assert decide(0x40000000 | calls.read) == "kill"
