"""The distributions as a build makes them, and a fresh environment into which they are installed from a folder."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")
_THEIR_PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "somebody-elses"
version = "7"
[project.scripts]
theirs = "app.main:run"
[tool.hatch.build.targets.wheel]
packages = ["app"]
"""
_THEIR_MAIN = "from app import NAME\n\n\ndef run() -> None:\n    print(NAME)\n"


def build(project: Path, into: Path, *targets: str) -> None:
    """As `pip` and `uv` build it, with the build backend that is installed here."""
    command = [sys.executable, "-m", "hatchling", "build", "--directory", str(into)]
    for target in targets:
        command += ["--target", target]
    subprocess.run(command, cwd=project, check=True, capture_output=True)


def build_all(into: Path) -> None:
    """Both distributions, as wheel and as sdist."""
    for project in (ROOT, ROOT / "sdk"):
        build(project, into, "sdist", "wheel")


def plain_environment(**more: str) -> dict[str, str]:
    """Without anything that would lead a process back into the clone."""
    dropped = ("TGA_", "PYTHON", "VIRTUAL_ENV")
    return {**{name: value for name, value in os.environ.items() if not name.startswith(dropped)}, **more}


@dataclass(frozen=True)
class Environment:
    """A fresh virtual environment. What is no distribution of ours it takes from the tests' own, which needs no
    network: a path is added, so that nothing of ours, which is installed there by reference, comes along."""

    folder: Path

    @classmethod
    def make(cls, folder: Path) -> Environment:
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
        made = cls(folder)
        (made.site_packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        return made

    @property
    def site_packages(self) -> Path:
        (found,) = self.folder.glob("lib/python3*/site-packages")
        return found

    def bin(self, name: str) -> str:
        return str(self.folder / "bin" / name)

    def install(self, *names: str, links: Path) -> None:
        subprocess.run(
            [
                *(UV, "pip", "install", "--offline", "--no-index", "--no-deps", "--find-links", links),
                *("--python", self.bin("python"), *names),
            ],
            check=True,
            capture_output=True,
        )

    def run(self, *command: str, cwd: Path, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, cwd=cwd, env=plain_environment(**more), capture_output=True, text=True, timeout=120, check=False
        )


def make_somebody_elses(folder: Path, into: Path) -> None:
    """Another project's wheel that has a top-level package `app`, with a module and a function named as ours."""
    package = folder / "app"
    package.mkdir(parents=True)
    (folder / "pyproject.toml").write_text(_THEIR_PROJECT)
    (package / "__init__.py").write_text('NAME = "somebody else"\n')
    (package / "main.py").write_text(_THEIR_MAIN)
    build(folder, into, "wheel")


def processes_that_name(path: Path) -> Iterator[str]:
    """Every process with this path on its command line: servers are told where to keep their files."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = process.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:  # it has ended meanwhile
            continue
        if str(path) in command:
            yield f"{process.name}: {command}"
