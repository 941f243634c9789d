"""MCP servers from npm: installed once, outside the tree, exactly as the lock says."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

_LISTED = Path(__file__).parent / "servers"


def npm_servers() -> Path:
    """The folder of the installed packages; the test is skipped, with the reason, where they cannot be had."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        pytest.skip("no Node: install Node 20 and npm to test with MCP servers from npm")
    lock = (_LISTED / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tga-test-servers" / hashlib.sha256(lock).hexdigest()[:16]
    packages = folder / "node_modules" / "@modelcontextprotocol"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock_file:
        # `npm ci` empties the folder first: of several test processes one installs, and the others wait for it.
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            _install_into(folder)
    return packages


def _install_into(folder: Path) -> None:
    for name in ("package.json", "package-lock.json"):
        shutil.copy(_LISTED / name, folder / name)
    command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    if done.returncode != 0:
        pytest.skip(f"npm cannot install the MCP servers: {done.stderr.strip()[-300:]}")
    (folder / "complete").touch()
