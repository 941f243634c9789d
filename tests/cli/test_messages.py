"""Messages that were weak: each says what, what was expected, what was found, and what to do."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from app.config import load_config
from app.core.errors import SettingInvalid
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import Answer
from app.mcp_server.results import not_over
from tests.api.wire import open_front
from tests.cli.test_demo import run_until_it_says
from tests.cli.world import World, trace_of
from tests.patience import HANG_S
from tests.traces import trace_id

DOCS = Path(__file__).parents[2] / "docs"
HTTP = '[servers.pay]\ntransport = "http"\nbase_url = "http://127.0.0.1:1"\n'
TOOL = HTTP + '[servers.pay.tools.charge]\nclass = "write"\n'
CONFIGURATIONS = {
    "a command given as a string": (
        '[servers.fs]\ntransport = "mcp-stdio"\ncommand = "npx -y SECRET"\n',
        ["servers.fs.command", 'a list of the program and its arguments, each a text: ["npx", "-y"', "found a text"],
    ),
    "a credential written into the file": (
        HTTP + 'credentials = { Authorization = "Bearer SECRET" }\n',
        ["servers.pay.credentials.Authorization", '{ env = "NAME" } or { file = "PATH" }', "found a text"],
    ),
    "a table that is a list": ("servers = [1]\n", ["servers", "expected a table"]),
    "a number in quotes": (HTTP + 'timeout_ms = "5"\n', ["servers.pay.timeout_ms", "expected a whole number", "'5'"]),
    "a schema with a misspelt type": (
        TOOL + 'input_schema = { type = "object", properties = { a = { type = "strnig" } } }\n',
        ["/properties/a/type is not JSON Schema 2020-12", "array, boolean, integer, null", "found 'strnig'"],
    ),
}


@pytest.mark.parametrize("what", CONFIGURATIONS)
def test_a_configuration_that_is_wrong_is_told_in_its_own_words(what: str, tmp_path: Path) -> None:
    written, told = CONFIGURATIONS[what]
    (tmp_path / "tga.toml").write_text(written)
    with pytest.raises(SettingInvalid) as raised:
        load_config(tmp_path / "tga.toml")
    message = str(raised.value)
    assert [part for part in told if part not in message] == [], message
    for riddle in ("SECRET", "Config", "instance of", "Input should be", " characters", "anyOf"):
        assert riddle not in message, message


async def test_a_taken_port_is_named(front_port: int) -> None:
    with pytest.raises(SettingInvalid, match=f"port {front_port} of 127.0.0.1") as raised:
        async with open_front(port=front_port):
            pass
    assert "TGA_PORT" in str(raised.value)


@pytest.fixture
def front_port() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def test_a_home_that_cannot_be_written_to_is_named_and_not_the_keys(world: World, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    home = tmp_path / "file" / "home"
    told = world.tga("serve", TGA_HOME=str(home))
    assert told.returncode == 2
    assert f"the home directory {home} cannot be written to" in told.stderr
    assert "TGA_HOME" in told.stderr
    assert "key" not in told.stderr


def test_a_wrong_key_says_where_it_came_from_and_which_gateway_refused_it(world: World, tmp_path: Path) -> None:
    told = world.tga("traces", TGA_API_KEY="tga_0000000000000000_wrong")
    assert told.returncode == 1
    assert f"found the key from TGA_API_KEY, at {world.url}" in told.stderr
    (tmp_path / "admin.key").write_text("tga_0000000000000000_wrong\n")
    (tmp_path / "admin.key").chmod(0o600)
    told = world.tga("traces", TGA_HOME=str(tmp_path))
    assert f"found the key from {tmp_path / 'admin.key'}, at {world.url}" in told.stderr
    assert "tga keys create" in told.stderr


def test_the_policy_denies_and_approves_without_stammering(world: World) -> None:
    made = world.tga("call", "bank", "charge", "-a", "amount=3", "-k", "words-1")
    told = world.tga("trace", trace_of(made)).stdout
    assert "APPROVE by the policy" in told
    assert "policy policy" not in told


def test_one_is_one(world: World, tmp_path: Path) -> None:
    made = trace_of(world.tga("call", "bank", "charge", "-a", "amount=3", "-k", "words-2"))
    assert world.tga("receipt", made).returncode == 0  # a head covers it
    assert world.tga("export", str(tmp_path / "one"), "--trace", made).returncode == 0
    key = world.tga("keys", "show", "log").stdout.strip()
    told = world.tga("verify", "--file", str(tmp_path / "one"), "--key", key).stdout
    assert re.search(r"\b1 trace\b", told), told
    assert not re.search(r"\b1 (traces|entries|findings|streams|leaves|heads|decisions)\b", told), told


def test_a_call_that_waits_for_a_person_is_not_titled_as_being_executed() -> None:
    answer = Answer(TraceId(trace_id(1)), "PENDING", None, None, None, "supervisor")
    client: Any = type("Client", (), {"is_modern": True})()
    problem = not_over(answer, client, "k", waited_ms=5_000)["_meta"]["tga/problem"]
    assert "still being executed" not in problem["title"]
    assert "waits for a person" in problem["title"]
    assert "waits for a person" in problem["detail"]


def test_no_document_imports_what_is_private_to_another_project() -> None:
    for document in DOCS.rglob("*.md"):
        found = re.findall(r"(?m)^\s*(?:from|import) [\w.]*\b_\w+.*$|^\s*from [\w.]+ import _\w+", document.read_text())
        assert found == [], document


def test_the_printed_agent_runs(world: World) -> None:
    (printed,) = re.findall(
        r"## An agent in plain Python.*?```python\n(.*?)```", (DOCS / "mcp.md").read_text(), re.DOTALL
    )
    key = world.new_key("printed-agent", "agent")
    program = printed.replace("tga_...", key).replace("http://127.0.0.1:8420", world.url)
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=HANG_S, check=False, cwd="/"
    )
    assert told.returncode == 0, told.stderr
    assert "bank__charge" in told.stdout


def test_the_demonstration_runs_where_its_port_is_taken(home: Path) -> None:
    with suppress(OSError), socket.create_server(("127.0.0.1", 8421)):  # taken by us, or by somebody else
        told = run_until_it_says(home, "Ctrl-C stops everything")
        assert "(Port 8421, where it is otherwise, is taken.)" in told
        assert "EXECUTING → COMPLETED" in told
        return
    told = run_until_it_says(home, "Ctrl-C stops everything")
    assert "(Port 8421, where it is otherwise, is taken.)" in told
