"""A command loads what it needs, and nothing else that takes long to load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.cli.command import COMMANDS, Later

HEAVY = {
    *("aiohttp", "asyncio", "asyncpg", "cedarpy", "cryptography", "cryptography.x509", "fastapi", "jsonschema", "jwt"),
    *("jsonschema_rs", "mcp", "rich.console", "starlette", "uvicorn", "uvloop"),
    *("app.domain.tga.documents", "app.gateway.wiring", "app.mcp_server"),
}
RUNS = {"asyncio", "rich.console", "uvloop"}
ASKS = RUNS
READS = RUNS | {"asyncpg"}
MODELS = {"app.domain.tga.documents"}
JUDGES = READS | MODELS | {"cryptography"}
TRACE = "01990000-0000-7000-8000-000000000001"
# Really run, where neither a gateway nor a database answers; and what of the above each has loaded in the end.
LOADED = {
    "": set[str](),
    "--help": set[str](),
    "--version": set[str](),
    "nonsense": set[str](),
    "init": RUNS,
    "init --help": RUNS,
    "db status": READS,
    "db migrate --help": READS,
    "call bank balance": ASKS,
    "traces": ASKS,
    "traces --help": ASKS,
    f"trace {TRACE}": ASKS,
    "servers": ASKS,
    "procedures": ASKS,
    "schedules list": ASKS,
    "lint nonsense.py": {"rich.console"},
    "lint --help": {"rich.console"},
    "mcp --help": ASKS,
    "approvals": ASKS | MODELS | {"cryptography"},
    "verify --all": JUDGES,
    "verify --help": JUDGES,
    "export bundle": READS | {"cryptography"},
    f"receipt {TRACE}": READS | {"cryptography"},
    "keys list": JUDGES,
    "tenants list": READS,
    "serve --help": RUNS,
    "demo --help": ASKS | {"jsonschema"},
    "policy check": ASKS | MODELS | {"cedarpy", "jsonschema"},
    "doctor": ASKS | JUDGES | {"cedarpy", "jsonschema"},
}
PROGRAM = """
import sys
from app.main import run

try:
    run()
finally:
    print("loaded:", *sys.modules)
"""


@pytest.mark.parametrize("words", LOADED)
def test_a_command_loads_what_it_needs_and_nothing_else_that_is_heavy(words: str, tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("TGA_")}
    nowhere = {"TGA_URL": "http://127.0.0.1:1", "TGA_API_KEY": "k", "TGA_DATABASE_URL": "postgresql://127.0.0.1:1/tga"}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words.split()],
        cwd=tmp_path,
        env={**inherited, **nowhere, "TGA_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert HEAVY.intersection(done.stdout.split("loaded: ")[1].split()) == LOADED[words]


@pytest.mark.parametrize(("name", "module", "summary"), COMMANDS)
def test_the_table_of_commands_says_what_each_says_of_itself(name: str, module: str, summary: str) -> None:
    stand_in = Later(name, module, summary)
    command = stand_in.load()
    assert stand_in.get_short_help_str(1_000) == command.get_short_help_str(1_000) == summary
    for width in range(20, 120):
        assert stand_in.get_short_help_str(width) == command.get_short_help_str(width)
