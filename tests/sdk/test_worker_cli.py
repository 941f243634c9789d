"""`tga-worker` and `tga worker`: what they serve, how they end, and what they say when they cannot."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.runs.world import Caller, GatewayProcess, RunsWorld, new_id, until
from tests.sdk.serving import Served
from tga_sdk import worker_cli
from tga_sdk.worker_cli import UNREACHABLE, CannotServe

PROGRAMS = str(Path(__file__).with_name("slow_programs.py"))
TGA = Path(sys.executable).with_name("tga")


@pytest.fixture(scope="module")
def gateway(world: RunsWorld) -> GatewayProcess:
    # One worker leaves a run behind, and its lease is waited for; that of a living one must not be lost.
    return asyncio.run(world.gateway(config=world.config(lease_ms=5_000)))


@pytest.fixture
async def caller(world: RunsWorld, gateway: GatewayProcess) -> AsyncIterator[Caller]:
    async with Caller(world, gateway.url) as made:
        yield made


class Serving:
    """Starts workers in one folder, and leaves none."""

    def __init__(self, folder: Path, gateway: GatewayProcess, keys: dict[str, str]) -> None:
        self.folder = folder
        self.gateway = gateway
        self.keys = keys
        self.started: list[Served] = []

    def start(self, *words: str, role: str = "worker", **environment: str) -> Served:
        worker = Served(self.folder, self.gateway.url, self.keys[role], *(words or (PROGRAMS,)), **environment)
        self.started.append(worker)
        return worker

    async def ended(self, *words: str, role: str = "worker", **environment: str) -> tuple[int, str]:
        """How a worker ended that could not serve, and what it said."""
        worker = self.start(*words, role=role, **environment)
        await until(lambda: worker.process.poll() is not None)
        return worker.process.returncode, worker.logged


@pytest.fixture
def serving(world: RunsWorld, gateway: GatewayProcess, tmp_path: Path) -> Iterator[Serving]:
    made = Serving(tmp_path, gateway, world.keys)
    yield made
    for worker in made.started:
        worker.process.kill()
        worker.process.wait()


async def test_it_says_what_it_serves_and_drains_when_it_is_told_to_end(serving: Serving, caller: Caller) -> None:
    """The body that is under way ends and is recorded; what comes after it is another worker's."""
    worker = serving.start()
    await worker.until_told("Serving at")
    assert worker.told.splitlines()[:3] == ["procedure slow 1", "procedure reads-a-clock 1", "task      add 1"]
    run_id = new_id("slow")
    await caller.start("slow", "drained", run_id)
    await until((serving.folder / "drained").exists)
    worker.process.send_signal(signal.SIGTERM)
    await until(lambda: "ending; what is under way is recorded first" in worker.logged)
    (serving.folder / "go").touch()
    assert worker.process.wait(60) == 0
    seen = await caller.look(run_id)
    assert [(step["name"], step["status"]) for step in seen["steps"]] == [("first", "completed")]
    assert f"run {run_id}: attempt 1 ended: RELEASED" in worker.logged
    serving.start()
    ended = await caller.see_through(run_id)
    assert (ended["output"]["value"], ended["attempt"]) == (["drained", "DRAINED"], 2)
    assert (serving.folder / "drained").read_text() == "begun\n"


async def test_a_second_signal_ends_it_at_once(serving: Serving, caller: Caller) -> None:
    worker = serving.start()
    await worker.until_told("Serving at")
    run_id = new_id("slow")
    await caller.start("slow", "twice", run_id)
    await until((serving.folder / "twice").exists)
    worker.process.send_signal(signal.SIGINT)
    await until(lambda: "Again: end at once" in worker.logged)
    worker.process.send_signal(signal.SIGINT)
    assert worker.process.wait(60) == 128 + signal.SIGINT  # although the body in its thread goes on for ever
    (serving.folder / "go").touch()
    serving.start()
    assert (await caller.see_through(run_id))["output"]["value"] == ["twice", "TWICE"]


async def test_strict_raises_where_a_replay_would_differ(serving: Serving, caller: Caller) -> None:
    worker = serving.start(PROGRAMS, "--strict", "--slots", "2", "--name", "the-strict-one")
    await worker.until_told("as the-strict-one")
    run_id = new_id("clock")
    await caller.start("reads-a-clock", None, run_id)
    ended = await caller.see_through(run_id)
    assert ended["error"]["type"] == "RUN_NOT_DETERMINISTIC"
    assert worker.stop() == 0


async def test_the_gateways_command_does_the_same(serving: Serving) -> None:
    environment = {"TGA_URL": serving.gateway.url, "TGA_API_KEY": serving.keys["agent"], "PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [TGA, "worker", PROGRAMS], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "tga worker: the key in TGA_API_KEY may not serve runs" in done.stderr
    assert "tga keys create worker-1 --role worker" in done.stderr


async def test_a_key_that_nobody_knows_is_told_of(serving: Serving) -> None:
    code, said = await serving.ended(TGA_API_KEY="tga_nobody_knows_it")
    assert (code, "the gateway does not know the key in TGA_API_KEY" in said) == (1, True), said


async def test_a_gateway_that_is_not_there_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_cli, "PATIENCE_S", 0.2)
    monkeypatch.setenv("TGA_API_KEY", "k")
    options = worker_cli._parser().parse_args([PROGRAMS, "--url", "http://127.0.0.1:1"])
    served = worker_cli.served_in([worker_cli.loaded(PROGRAMS)], [PROGRAMS])
    with pytest.raises(CannotServe, match=r"no answer from http://127.0.0.1:1.*is the gateway running\?") as refused:
        await worker_cli._serve(options, served)
    assert refused.value.code == UNREACHABLE


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("x = 1\n", "no procedure found in"),
        ("x = 1\nimport nonsense_of_mine\n", "mine.py:2: import nonsense_of_mine\n  ModuleNotFoundError: No module"),
        ("def f(:\n    pass\n", "mine.py:1: def f(:\n  SyntaxError: invalid syntax"),
        ("raise SystemExit(3)\n", "ends the program while it is loaded: put what it does under"),
        (
            "from tga_sdk import procedure\n\n\n@procedure\ndef f(a, b, c): ...\n",
            "mine.py:4: @procedure\n  ProcedureInvalid: f: expected a function (ctx, input)",
        ),
        (
            "from tga_sdk import procedure as p\ndef f(ctx): ...\na = p(name='same')(f)\nb = p(name='same')(f)\n",
            "two procedures have the name same",
        ),
    ],
    ids=["none", "import", "syntax", "exit", "declaration", "twice"],
)  # fmt: skip
def test_a_file_that_cannot_be_served_is_told_of_at_the_users_own_line(text: str, told: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(text)
    done = subprocess.run(
        [sys.executable, "-m", "tga_sdk.worker_cli", str(file), "--url", "http://127.0.0.1:1"],
        env={"TGA_API_KEY": "k"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert "worker_cli.py" not in done.stderr


def test_what_is_no_file_is_told_of() -> None:
    with pytest.raises(CannotServe, match=r"there is no file nowhere\.py"):
        worker_cli.loaded("nowhere.py")
    with pytest.raises(CannotServe, match="No module named 'nowhere_at_all'"):
        worker_cli.loaded("nowhere_at_all")
