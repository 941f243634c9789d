"""The wheels in a fresh environment, beside another project's package `app`: both work, and neither sees the other."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import __version__
from app.postgres.migrate import packaged_migrations
from tests.cli.world import wait_for
from tests.conftest import Server, make_home
from tests.packaging.installed import (
    UV,
    Environment,
    build_all,
    make_somebody_elses,
    plain_environment,
    processes_that_name,
)
from tests.patience import HANG_S

MCP_SERVER = Path(__file__).parents[1] / "mcp" / "stdio_server.py"
BANK_URL = "http://127.0.0.1:8421"
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
IS_SOAK = os.environ.get("TGA_SOAK") == "1"


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheels")
    build_all(folder)
    make_somebody_elses(tmp_path_factory.mktemp("theirs") / "project", folder)
    return folder


@pytest.fixture(scope="module")
def environment(wheels: Path) -> Iterator[Environment]:
    folder = make_home()
    made = Environment.make(folder / "venv")
    made.install("tga-gateway", "tga-sdk", "somebody-elses", links=wheels)
    yield made
    shutil.rmtree(folder)


def test_each_of_two_packages_named_app_works(environment: Environment, tmp_path: Path) -> None:
    told = environment.run(environment.bin("theirs"), cwd=tmp_path)
    assert (told.returncode, told.stdout) == (0, "somebody else\n"), told.stderr
    for name in ("tga", "tga-gateway"):
        told = environment.run(environment.bin(name), "--version", cwd=tmp_path)
        assert (told.returncode, told.stdout) == (0, f"tga {__version__}\n"), told.stderr


def test_ours_wins_in_our_process_wherever_it_is_started(environment: Environment, tmp_path: Path) -> None:
    """From a folder that has an `app` too, and with one on PYTHONPATH."""
    shutil.copytree(environment.site_packages / "app", tmp_path / "app")
    for command in ([environment.bin("tga")], [environment.bin("python"), "-m", "tga_gateway"]):
        told = environment.run(*command, "--version", cwd=tmp_path, PYTHONPATH=str(tmp_path))
        assert (told.returncode, told.stdout) == (0, f"tga {__version__}\n"), told.stderr


def test_importing_ours_changes_nothing_for_others(environment: Environment, tmp_path: Path) -> None:
    program = (
        "import sys; before = list(sys.path); import tga_gateway, tga_sdk, app; print(app.NAME, before == sys.path)"
    )
    told = environment.run(environment.bin("python"), "-c", program, cwd=tmp_path)
    assert told.stdout == "somebody else True\n", told.stderr


def test_in_a_process_that_has_loaded_another_app_ours_is_not_mixed_with_it(
    environment: Environment, tmp_path: Path
) -> None:
    program = "import app.main; from tga_gateway.__main__ import run; run()"
    told = environment.run(environment.bin("python"), "-c", program, cwd=tmp_path)
    assert (told.returncode, told.stdout) == (1, "")
    assert "another package `app`" in told.stderr
    assert "Traceback" not in told.stderr


def test_workers_see_the_users_own_app_and_not_ours(environment: Environment, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("import app\n\nprint(app.NAME)\n")
    for command in ([environment.bin("tga-worker")], [environment.bin("tga"), "worker"]):
        told = environment.run(*command, "mine.py", cwd=tmp_path, TGA_API_KEY="k")
        assert (told.returncode, told.stdout) == (2, "somebody else\n"), told.stderr
        assert "no procedure found in mine.py" in told.stderr


async def test_the_migrations_come_with_the_wheel(server: Server, environment: Environment, tmp_path: Path) -> None:
    name = f"tga_wheel_{os.getpid()}"
    await server.execute_as_root(f"CREATE DATABASE {name}")
    try:
        url = server.url("postgres", name)
        told = environment.run(environment.bin("tga"), "db", "migrate", cwd=tmp_path, TGA_DATABASE_URL=url)
        assert told.stdout.count("applied") == len(packaged_migrations()), told.stderr
    finally:
        await server.execute_as_root(f"DROP DATABASE {name} WITH (FORCE)")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return int(taken.getsockname()[1])


class Demo:
    """`tga demo` as a process, in a home of its own, with a bank on a port that is free."""

    def __init__(self, command: list[str], home: Path, packaged_config: str) -> None:
        self.home = home
        self._told = home / "told"
        stdio = [sys.executable, str(MCP_SERVER), str(home / "mcp.book"), "modern"]
        config = packaged_config.replace(BANK_URL, f"http://127.0.0.1:{free_port()}")
        config += f'\n[servers.stdio]\ntransport = "mcp-stdio"\ncommand = {stdio!r}\n'.replace("'", '"')
        (home / "tga.toml").write_text(config)
        self.environment = plain_environment(TGA_HOME=str(home), TGA_PORT="0")
        with self._told.open("w") as told:
            self.process = subprocess.Popen(
                command, cwd=home, env=self.environment, stdout=told, stderr=subprocess.STDOUT, start_new_session=True
            )

    @property
    def told(self) -> str:
        return self._told.read_text("utf-8")

    def wait_until_ready(self) -> None:
        wait_for(lambda: "Ctrl-C stops everything" in self.told or self.process.poll() is not None, seconds=180)
        assert self.process.poll() is None, self.told
        assert "EXECUTING → COMPLETED" in self.told

    def wait_until_listening(self) -> None:
        wait_for(lambda: "Listening on" in self.told or self.process.poll() is not None, seconds=180)
        assert self.process.poll() is None, self.told

    def suggested(self, *words: str) -> str:
        """The suggested command that has these words."""
        (found,) = [line for line in self.told.splitlines() if all(word in line for word in words)]
        return found.strip()

    def sh(self, script: str) -> str:
        """In another terminal."""
        url = self.suggested("export TGA_URL=")
        done = subprocess.run(
            ["sh", "-ec", f"{url}\n{script}"],
            cwd=self.home,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def get(self, path: str) -> str:
        url = self.suggested("export TGA_URL=").partition("=")[2]
        key = (self.home / "admin.key").read_text().strip()
        request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"})  # noqa: S310
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
            return str(answer.read().decode("utf-8"))

    def stop(self, number: signal.Signals) -> None:
        """Whatever happened, nothing is left of it."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            self.process.wait(timeout=120)
        finally:
            if self.process.poll() is None:
                os.killpg(self.process.pid, signal.SIGKILL)


@pytest.fixture
def demo_home() -> Iterator[Path]:
    home = make_home()
    yield home
    shutil.rmtree(home)


def packaged_config(environment: Environment) -> str:
    return (environment.site_packages / "tga_gateway" / "app" / "demo" / "tga.toml").read_text("utf-8")


def test_the_demonstration_runs_and_ends_on_a_signal_leaving_nothing_behind(
    environment: Environment, demo_home: Path
) -> None:
    demo = Demo([environment.bin("tga"), "demo"], demo_home, packaged_config(environment))
    try:
        demo.wait_until_ready()
        assert "tools/crash.py" not in demo.told  # a clone has it
        assert "COMPLETED" in demo.sh(demo.suggested("traces").replace("traces", "traces --json"))
        demo.sh(demo.suggested("order-9"))
        # A tool server that the gateway starts, through a guard that is a program of its own.
        assert '"stdio"' in demo.sh(f"{environment.bin('tga')} servers --json")
        assert any(MCP_SERVER.name in command for command in processes_that_name(demo_home))
        (demo_home / "log.pub").write_text(demo.get("/v1/log/key").splitlines()[0])
        printed = demo.sh(f"{environment.bin('tga')} export bundle").splitlines()
        for line in printed[1:]:
            assert "sound" in demo.sh(line.partition(": ")[2].replace("PUB", "log.pub")).lower(), line
        assert len(printed) == 3, printed
    finally:
        demo.stop(signal.SIGTERM)
    assert demo.process.returncode == 0, demo.told
    assert list(processes_that_name(demo_home)) == []


@pytest.mark.parametrize("number", SIGNALS if IS_SOAK else SIGNALS[:1])
def test_a_signal_while_it_starts_leaves_nothing_behind_either(
    number: signal.Signals, environment: Environment, demo_home: Path
) -> None:
    demo = Demo([environment.bin("tga"), "demo"], demo_home, packaged_config(environment))
    try:
        wait_for(lambda: "Starting" in demo.told or demo.process.poll() is not None, seconds=120)
    finally:
        demo.stop(number)
    assert demo.process.returncode == 128 + number, demo.told
    assert list(processes_that_name(demo_home)) == []


def test_the_bank_does_not_outlive_a_demonstration_that_is_killed(environment: Environment, demo_home: Path) -> None:
    demo = Demo([environment.bin("tga"), "demo"], demo_home, packaged_config(environment))
    try:
        wait_for(lambda: "Starting" in demo.told or demo.process.poll() is not None, seconds=120)
    finally:
        demo.stop(signal.SIGKILL)
    wait_for(lambda: not any("tool_server.py" in command for command in processes_that_name(demo_home)))
    # PostgreSQL, if it was there already, stays: whoever comes next takes it over, and the last one stops it.
    told = environment.run(environment.bin("tga"), "db", "status", cwd=demo_home, TGA_HOME=str(demo_home))
    assert told.returncode in (0, 1) or "there is no database in" in told.stderr, told.stderr
    wait_for(lambda: list(processes_that_name(demo_home)) == [])


def test_uvx_runs_it_from_a_folder_of_wheels(wheels: Path, environment: Environment, demo_home: Path) -> None:
    uvx = [str(UV), "tool", "run", "--find-links", str(wheels), "--python", sys.executable]
    tried = subprocess.run(
        [*uvx, "tga-gateway", "--version"], cwd=demo_home, env=plain_environment(), capture_output=True, text=True,
        check=False, timeout=300,
    )  # fmt: skip
    if re.search("[Ff]ailed to fetch|connect|certificate", tried.stderr):
        pytest.skip(f"the registry cannot be reached: {tried.stderr[-200:]}")
    assert tried.stdout == f"tga {__version__}\n", tried.stderr
    for words in (["demo"], ["serve"]) if IS_SOAK else (["demo"],):
        demo = Demo([*uvx, "tga-gateway", *words], demo_home, packaged_config(environment))
        try:
            if words == ["demo"]:
                demo.wait_until_ready()
                assert "COMPLETED" in demo.sh(f"{demo.suggested('traces')} --json")
            demo.wait_until_listening()
        finally:
            demo.stop(signal.SIGTERM)
        assert demo.process.returncode == 0, demo.told
        assert list(processes_that_name(demo_home)) == []
