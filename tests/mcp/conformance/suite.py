"""The public conformance suite from npm, with the Node it needs; and a doorman who shows the suite's requests a key."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

_LISTED = Path(__file__).parent / "suite"
_NODE_MIN = 22


def installed() -> tuple[str, Path]:
    """Node and the suite's program; the test is skipped, with the reason, where they cannot be had."""
    if shutil.which("npm") is None:
        pytest.skip("no npm: install Node and npm to run the conformance suite")
    lock = (_LISTED / "package-lock.json").read_bytes()
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "tga-test-conformance" / hashlib.sha256(lock).hexdigest()[:16]
    if not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("package.json", "package-lock.json"):
            shutil.copy(_LISTED / name, folder / name)
        command = ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
        if done.returncode != 0:
            pytest.skip(f"npm cannot install the conformance suite: {done.stderr.strip()[-300:]}")
        (folder / "complete").touch()
    return _node(folder), folder / "node_modules" / "@modelcontextprotocol" / "conformance" / "dist" / "index.js"


def _node(folder: Path) -> str:
    for candidate in [*map(str, folder.glob("node_modules/node-*/bin/node")), shutil.which("node") or ""]:
        if candidate:
            found = subprocess.run([candidate, "--version"], capture_output=True, text=True, check=False).stdout
            if (version := re.match(r"v(\d+)\.", found)) and int(version[1]) >= _NODE_MIN:
                return candidate
    pytest.skip(f"the conformance suite needs Node {_NODE_MIN}, and npm has none for this machine")


@asynccontextmanager
async def doorman(url: str, key: str) -> AsyncIterator[str]:
    """The suite has no key to show. Everything else of its requests, Host and Origin too, comes through unchanged."""
    async with aiohttp.ClientSession(auto_decompress=False) as session:

        async def passed_on(request: web.Request) -> web.StreamResponse:
            headers = [(name, value) for name, value in request.headers.items() if name.lower() != "authorization"]
            sent = [*headers, ("Authorization", f"Bearer {key}")]
            body = await request.read()
            async with session.request(request.method, url + request.path, data=body, headers=sent) as found:
                answer = web.StreamResponse(status=found.status)
                for name, value in found.headers.items():
                    if name.lower() not in ("transfer-encoding", "connection"):
                        answer.headers.add(name, value)
                await answer.prepare(request)
                with contextlib.suppress(ConnectionResetError):  # the suite hangs up when it has seen enough
                    async for chunk in found.content.iter_any():
                        await answer.write(chunk)
                    await answer.write_eof()
                return answer

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", passed_on)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"  # type: ignore[union-attr]
        finally:
            await runner.cleanup()


Checks = dict[str, tuple[str, str]]


async def checks_of(url: str, version: str, folder: Path, *options: str) -> dict[str, Checks]:
    """What each check found: scenario to check to status and message. One process for all of them."""
    node, program = installed()
    output = folder / "-".join([version, *options]).replace("-", "")
    command = [node, str(program), "server", "--url", url, "--spec-version", version, *options, "-o", str(output)]
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await process.communicate()
    found: dict[str, Checks] = {}
    for file in output.rglob("checks.json"):
        scenario = re.sub(r"^server-|-\d{4}-\d\d-\d\dT.*$", "", file.parent.name)
        checks = found.setdefault(scenario, {})
        for check in json.loads(file.read_text()):
            if checks.get(check["id"], ("",))[0] != "FAILURE":
                checks[check["id"]] = (check["status"], str(check.get("errorMessage") or ""))
    assert found, said.decode()
    return found
