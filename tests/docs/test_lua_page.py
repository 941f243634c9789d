"""docs/lua.md as it is printed: the program, every command, what it says is printed; and what the command says of
programs that cannot run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lua.hosting import config
from tests.runs.world import GatewayProcess, RunsWorld, worlds

TEXT = (Path(__file__).parents[2] / "docs" / "lua.md").read_text("utf-8")


@pytest.fixture(scope="module")
def world() -> Iterator[RunsWorld]:
    yield from worlds()


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    return asyncio.run(world.gateway(config=config(world)))


def run(world: RunsWorld, gateway: GatewayProcess, folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TGA_URL": gateway.url,
            "TGA_API_KEY": world.keys["admin"],
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_the_page_runs_as_it_is_printed(world: RunsWorld, gateway: GatewayProcess, tmp_path: Path) -> None:
    program = re.findall(r"^```lua\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "order.lua").write_text(program)
    steps = re.findall(r"^```sh\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", TEXT, re.MULTILINE | re.DOTALL)
    assert len(steps) == 3
    script = "set -e\n" + "".join(f"{commands}echo '-- {number}'\n" for number, (commands, _) in enumerate(steps))
    done = run(world, gateway, tmp_path, script)
    told = re.split(r"^-- \d+\n", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, (told[-1], done.stderr)
    for printed, (commands, expected) in zip(told, steps, strict=False):
        assert [line for line in expected.splitlines() if line not in printed] == [], (commands, printed)
    assert '"total":6' in told[0]
    assert "120" in told[1]
    assert [list(world.executions(run_id).values()) for run_id in ("order-1", "order-2")] == [[1], [1]]


def test_a_file_that_cannot_run_is_refused_with_its_line(
    world: RunsWorld, gateway: GatewayProcess, tmp_path: Path
) -> None:
    (tmp_path / "bad.lua").write_text("local x = 1\nlocal y = = 2\nreturn {}\n")
    done = run(world, gateway, tmp_path, "tga run start bad.lua --wait")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "> bad.lua:2: local y = = 2" in done.stderr
    assert "PROCEDURE_SOURCE_INVALID" in done.stderr
    for words, code in (
        ("tga run start missing.lua", 2),
        ("tga run start bad.lua --file missing.txt", 2),
        ("tga run start bad --file bad.lua", 2),
        ("tga run start bad.lua --input '{'", 2),
    ):
        done = run(world, gateway, tmp_path, words)
        assert done.returncode == code, (words, done.stderr)
        assert "PROCEDURE_SOURCE_INVALID" not in done.stderr


def test_a_program_that_was_changed_and_changed_back_is_the_one_that_starts(
    world: RunsWorld, gateway: GatewayProcess, tmp_path: Path
) -> None:
    for text in ("first", "second", "first"):
        (tmp_path / "turns.lua").write_text(f'return {{is = "{text}"}}\n')
        done = run(world, gateway, tmp_path, "tga run start turns.lua --wait")
        assert done.stdout == f'{{"is":"{text}"}}\n', done.stderr


def test_a_large_file_goes_before_the_program_as_a_blob(
    world: RunsWorld, gateway: GatewayProcess, tmp_path: Path
) -> None:
    (tmp_path / "data").write_text("x" * 300_000)
    (tmp_path / "sizes.lua").write_text('return {bytes = File.size("rows.csv")}\n')
    done = run(world, gateway, tmp_path, "tga run start sizes.lua --file rows.csv=data --wait")
    assert done.stdout == '{"bytes":300000}\n', done.stderr
