"""The guard names the line of a procedure that does what a replay would not repeat, and nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import copy
import datetime as genuine_datetime
import importlib.util
import inspect
import logging
import os
import pickle
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from itertools import count
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import TypeAdapter

from tga_sdk import guard
from tga_sdk.errors import NotDeterministic, TgaError
from tga_sdk.guard import Finding

_numbers = count()
# How the functions that want arguments are called; all others take none.
ARGUMENTS = {
    **{f"random.{name}": "1, 2" for name in ("uniform", "randint", "gauss", "normalvariate", "lognormvariate")},
    **{f"random.{name}": "1, 2" for name in ("vonmisesvariate", "gammavariate", "betavariate", "weibullvariate")},
    **{f"random.{name}": "[1, 2]" for name in ("choice", "choices", "shuffle")},
    **{f"random.{name}": "1" for name in ("expovariate", "paretovariate", "randrange", "getrandbits", "randbytes")},
    "random.sample": "[1, 2], 1",
    **{f"secrets.{name}": "3" for name in ("randbelow", "randbits")},
    "secrets.choice": "[1, 2]",
    "os.urandom": "4",
    "os.getrandom": "4",
    "os.getenv": "'HOME'",
    "os.getenvb": "b'HOME'",
    "time.sleep": "0",
    "time.strftime": "'%Y'",
    "time.clock_gettime": "0",
    "time.clock_gettime_ns": "0",
}
OTHERS = {
    "datetime.datetime.now()": ("datetime.now()", "ctx.now"),
    "datetime.datetime.utcnow()": ("datetime.utcnow()", "ctx.now"),
    "datetime.datetime.today()": ("datetime.today()", "ctx.now"),
    "datetime.date.today()": ("date.today()", "ctx.now"),
    "os.environ['HOME']": ("os.environ['HOME']", "a step"),
    "os.environ.get('HOME')": ("os.environ['HOME']", "a step"),
    "'HOME' in os.environ": ("os.environ['HOME']", "a step"),
    "dict(os.environ)": ("os.environ", "a step"),
    "list(os.environ)": ("os.environ", "a step"),
    "random.Random()": ("random.Random() without a seed", "ctx.random"),
    "random.SystemRandom().random()": ("random.SystemRandom", "ctx.random"),
    "GENERATOR.choice([1, 2])": ("random.SystemRandom", "ctx.random"),
    "open(os.devnull).close()": (f"open({os.devnull!r})", "ctx.step"),
    "pathlib.Path(__file__).read_text()": ("open(", "ctx.tool"),
    "os.listdir('/')": ("os.listdir('/')", "ctx.step"),
    "tempfile.mkdtemp()": ("tempfile.mkdtemp(", "ctx.step"),
    "subprocess.run(['true'])": ("subprocess.Popen('true')", "ctx.step"),
    "os.system('true')": ("os.system(", "ctx.step"),
    "socket.gethostname()": ("socket.gethostname()", "ctx.step"),
    "socket.getaddrinfo('127.0.0.1', 80)": ("socket.getaddrinfo('127.0.0.1')", "ctx.step"),
    "SOCKET.connect(('127.0.0.1', 9))": ("socket.connect()", "ctx.step"),
}
HARMLESS = (
    "time.localtime(0)",
    "time.strftime('%Y', time.gmtime(0))",
    "time.ctime(0)",
    "random.Random(7).random()",
    "uuid.uuid5(uuid.NAMESPACE_DNS, 'x')",
    "datetime.datetime(2026, 1, 1)",
    "datetime.datetime.fromisoformat('2026-01-01')",
    "datetime.datetime.fromtimestamp(0)",
    "datetime.date(2026, 1, 1) + datetime.timedelta(days=1)",
    "zoneinfo.ZoneInfo('Europe/Berlin')",
    "logging.getLogger('x').warning('%s', 1)",
    "secrets.compare_digest('a', 'b')",
    "os.path.join('a', 'b')",
)
IMPORTS = (
    "import asyncio, datetime, logging, os, pathlib, random, secrets, socket, subprocess, tempfile, threading, time, "
    "uuid, zoneinfo\n"
)
GLOBALS = "GENERATOR, SOCKET = random.SystemRandom(), socket.socket(type=socket.SOCK_DGRAM)\n"


@pytest.fixture(autouse=True)
def _installed() -> Iterator[None]:
    guard.install()
    yield
    guard.uninstall()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a text as a module of its own, as a worker imports a file of procedures."""
    names = []

    def make(text: str) -> ModuleType:
        name = f"guarded_{next(_numbers)}"
        file = tmp_path / f"{name}.py"
        file.write_text(text)
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        module = sys.modules[name] = importlib.util.module_from_spec(spec)
        names.append(name)
        spec.loader.exec_module(module)
        return module

    yield make
    for name in names:
        module = sys.modules.pop(name)
        if hasattr(module, "SOCKET"):
            module.SOCKET.close()


def seen(module: ModuleType, body: Callable[[], Any], *, strict: bool = False) -> list[Finding]:
    found: list[Finding] = []
    with guard.watch(frozenset({module.__name__}), strict=strict, warn=found.append):
        result = body()
        if inspect.iscoroutine(result):
            asyncio.run(result)
    return found


def written() -> list[tuple[str, str, str]]:
    """Each watched call: how it is written, what the finding says was called, and a part of the fix."""
    replaced = [(f"{name}({ARGUMENTS.get(name, '')})", f"{name}()", "") for name in guard.watched_names()]
    return [*replaced, *((call, *said) for call, said in OTHERS.items())]


def test_guard_line(made: Callable[[str], ModuleType]) -> None:
    """Every watched call in a procedure's own body, each at its own line; none of them in a step."""
    calls = written()
    body = "".join(f"    {call}\n" for call, _, _ in calls)
    module = made(f"{IMPORTS}{GLOBALS}def body():\n{body}")
    found = seen(module, module.body)
    assert [finding.source for finding in found] == [f"{module.__file__}:{line}" for line in range(4, 4 + len(calls))]
    for finding, (call, said, fix) in zip(found, calls, strict=True):
        assert finding.call.startswith(said), call
        assert fix in finding.fix
        assert "ctx." in finding.fix

    def recorded() -> None:
        with guard.off():
            module.body()

    assert seen(module, recorded) == []
    assert seen(module, lambda: None) == []


@pytest.mark.parametrize(("call", "said", "fix"), written())
def test_guard_strict(made: Callable[[str], ModuleType], call: str, said: str, fix: str) -> None:
    """The call raises, with the line and the fix, each time; what it would have done is not done."""
    module = made(f"{IMPORTS}{GLOBALS}def body():\n    return {call}\n")
    found = guard.watch(frozenset({module.__name__}), strict=True)
    with found as watch:
        for _ in range(2):
            with pytest.raises(NotDeterministic, match=r"outside a recorded operation") as raised:
                module.body()
            assert raised.value.code == "RUN_NOT_DETERMINISTIC"
            assert f"{module.__file__}:4: {said}" in raised.value.message
            assert fix in raised.value.message
            assert isinstance(raised.value, TgaError)
        assert watch is not None
        assert len(watch.found) == 1  # also when the program swallows what is raised
    module.body()


def test_what_a_replay_would_repeat_is_not_reported(made: Callable[[str], ModuleType]) -> None:
    module = made(IMPORTS + "def body():\n" + "".join(f"    {call}\n" for call in HARMLESS))
    assert seen(module, module.body, strict=True) == []


def test_a_line_is_told_once(made: Callable[[str], ModuleType]) -> None:
    module = made("import time\ndef body():\n    for _ in range(1000):\n        time.time()\n    time.time()\n")
    assert [finding.source[-2:] for finding in seen(module, module.body)] == [":4", ":5"]
    assert len(seen(module, module.body)) == 2, "another body is told again"


def test_names_that_the_module_took_before_are_seen(made: Callable[[str], ModuleType]) -> None:
    guard.uninstall()
    module = made(
        "from time import time as clock\nfrom random import choice\nfrom uuid import uuid4\nfrom os import environ\n"
        "from datetime import datetime, date as day\nimport datetime as dt\n"
        "def body():\n    clock()\n    choice([1])\n    uuid4()\n    environ['HOME']\n    datetime.now()\n"
        "    day.today()\n    dt.datetime.now()\n    dt.date.today()\n"
    )
    own = dict(vars(module))
    guard.install()
    assert [int(finding.source.rpartition(":")[2]) for finding in seen(module, module.body)] == list(range(8, 16))
    guard.uninstall()
    assert {name: value for name, value in vars(module).items() if value is not own[name]} == {}


def test_everything_is_put_back() -> None:
    import secrets
    import uuid

    modules = {module.__name__: module for module in (time, random, uuid, secrets, os)}
    names = [name.split(".") for name in guard.watched_names()]
    guard.uninstall()
    before = [getattr(modules[module], name) for module, name in names]
    methods = [os._Environ.__getitem__, os._Environ.__iter__, random.Random.seed]
    guard.install()
    guard.install()
    assert not any(getattr(modules[module], name) in before for module, name in names)
    guard.uninstall()
    guard.uninstall()
    assert [getattr(modules[module], name) for module, name in names] == before
    assert [os._Environ.__getitem__, os._Environ.__iter__, random.Random.seed] == methods


def test_helpers_of_the_module_are_seen_at_their_own_line_and_libraries_are_not(
    made: Callable[[str], ModuleType],
) -> None:
    library = made(
        "import time, uuid\nfrom dataclasses import dataclass, field\ndef stamp():\n    return time.time()\n"
    )
    module = made(
        "import time, uuid, logging, asyncio\nfrom dataclasses import dataclass, field\n"
        f"from pydantic import BaseModel, Field\nimport {library.__name__} as library\n"
        "def helper():\n    return time.time()\n"
        "@dataclass\nclass Made:\n    id: object = field(default_factory=uuid.uuid4)\n"
        "class Model(BaseModel):\n    id: uuid.UUID = Field(default_factory=uuid.uuid4)\n"
        "async def body():\n    library.stamp()\n    Model()\n    logging.getLogger('a').warning('x')\n"
        "    await asyncio.sleep(0.001)\n    helper()\n    Made()\n"
    )
    assert [(f.source.rpartition(":")[2], f.call) for f in seen(module, module.body)] == [
        ("6", "time.time()"),
        ("18", "uuid.uuid4()"),
    ]


NESTED = """
import asyncio, threading, time
from tga_sdk import guard

def told():
    return time.time()

async def branch():
    await asyncio.sleep(0)
    return time.time()

async def step():
    with guard.off():
        await asyncio.gather(asyncio.create_task(branch()), asyncio.to_thread(told))

async def other_task(started, go):
    started.set()
    await go.wait()
    time.time()

async def body(go):
    await asyncio.create_task(branch())
    await asyncio.to_thread(told)
    await step()
    thread = threading.Thread(target=told)
    thread.start()
    thread.join()
    go.set()
    await asyncio.sleep(0)
"""


async def test_tasks_of_the_body_are_watched_and_other_tasks_and_threads_are_not(
    made: Callable[[str], ModuleType],
) -> None:
    module = made(NESTED)
    found: list[Finding] = []
    started, go = asyncio.Event(), asyncio.Event()
    other = asyncio.create_task(module.other_task(started, go))  # of the same module, and another context
    await started.wait()
    beside = threading.Thread(target=module.told)
    with guard.watch(frozenset({module.__name__}), strict=False, warn=found.append):
        beside.start()
        await module.body(go)
    await other
    beside.join()
    lines = [finding.source.rpartition(":")[2] for finding in found]
    assert lines == ["10", "6"]  # `branch` in a task, and `told` in a thread that has the body's context
    module.told()
    await module.branch()
    assert len(found) == 2


async def test_two_bodies_at_once_have_their_own_findings(made: Callable[[str], ModuleType]) -> None:
    text = "import asyncio, time\nasync def body(turns):\n    for _ in range(turns):\n        await asyncio.sleep(0)\n"
    loud, quiet = made(text + "        time.time()\n"), made(text)
    told: dict[str, list[Finding]] = {loud.__name__: [], quiet.__name__: []}

    async def run(module: ModuleType) -> None:
        with guard.watch(frozenset({module.__name__}), strict=False, warn=told[module.__name__].append):
            await module.body(20)

    await asyncio.gather(run(loud), run(quiet), run(loud))
    assert [len(findings) for findings in told.values()] == [2, 0]


def test_a_library_that_opens_something_for_the_body_is_seen_at_the_bodys_line(
    made: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "late.py").write_text("import time\nTAKEN = time.time()\n")
    module = made(
        "import json, pathlib, sys, urllib.request\n"
        "def body(folder):\n    json.loads(pathlib.Path(folder, 'x.json').read_text())\n"
        "    try:\n        urllib.request.urlopen('http://127.0.0.1:9/')\n    except OSError:\n        pass\n"
        "    sys.path.insert(0, folder)\n    import late\n    sys.path.remove(folder)\n"
    )
    (tmp_path / "x.json").write_text("{}")
    found = seen(module, lambda: module.body(str(tmp_path)))
    sys.modules.pop("late")
    assert [f.source.rpartition(":")[2] for f in found] == ["3", "5"]  # a module that is loaded late is no finding


def test_async_connections_of_the_body_are_seen(made: Callable[[str], ModuleType]) -> None:
    module = made(
        "import asyncio\nasync def body():\n    try:\n        await asyncio.open_connection('127.0.0.1', 9)\n"
        "    except OSError:\n        pass\n    process = await asyncio.create_subprocess_exec('true')\n"
        "    await process.wait()\n"
    )
    assert [f.source.rpartition(":")[2] for f in seen(module, module.body)] == ["4", "7"]


def test_the_warning_may_do_what_it_likes(made: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """It runs on the stack of the body: its files, its clock are not the body's."""
    module = made("import time\ndef body():\n    time.time()\n    time.time()\n")
    log = tmp_path / "warnings"
    handler = logging.FileHandler(log, delay=True)
    logger = logging.getLogger("tests.guard")
    logger.addHandler(handler)

    def warn(finding: Finding) -> None:
        logger.warning("%s %s", finding, module.time.time())
        (tmp_path / "more").write_text("x")

    with guard.watch(frozenset({module.__name__}), strict=False, warn=warn):
        module.body()
    logger.removeHandler(handler)
    handler.close()
    assert len(log.read_text().splitlines()) == 2


DATES = """
from __future__ import annotations
import datetime as dt
import functools
from dataclasses import dataclass
from datetime import date, datetime, timedelta

class Stamp(datetime):
    pass

@functools.singledispatch
def kind(value):
    return "other"

def body(given):
    kind.register(datetime, lambda value: "datetime")
    made = [
        datetime(2026, 1, 2, 3), datetime.fromisoformat("2026-01-02"), datetime.fromtimestamp(0), date(2026, 1, 2),
        datetime.strptime("2026", "%Y"), datetime.combine(date(2026, 1, 2), given.time()), datetime.fromordinal(7),
        dt.datetime(2026, 1, 2), dt.date.fromisoformat("2026-01-02"), datetime.min, given.replace(year=3),
        datetime(2026, 1, 2) + timedelta(1), date(2026, 1, 2) - timedelta(1), datetime.fromisocalendar(2026, 1, 1),
    ]
    class Later(datetime):
        pass
    match given:
        case datetime(year=year):
            matched = year
    return {
        "made": made, "matched": matched, "kind": kind(given), "later": Later(2026, 1, 1), "type": datetime | None,
        "isinstance": [isinstance(one, date) for one in made] + [isinstance(given, (str, datetime))],
        "issubclass": [issubclass(datetime, date), issubclass(Stamp, datetime), issubclass(date, datetime)],
        "same": [type(given) == datetime, datetime == type(given), {datetime: 1}[type(given)]],
        "classes": [datetime, date], "is_later": isinstance(Later(2026, 1, 1), datetime),
    }
"""


def test_dates_stay_genuine(made: Callable[[str], ModuleType]) -> None:
    module = made(DATES)
    given = genuine_datetime.datetime(2026, 1, 2, tzinfo=genuine_datetime.UTC)
    with guard.watch(frozenset({module.__name__}), strict=True):
        assert module.datetime is not genuine_datetime.datetime, "or nothing would be watched"
        got = module.body(given)
        assert {type(one) for one in got["made"]} == {genuine_datetime.datetime, genuine_datetime.date}
        assert pickle.loads(pickle.dumps(got["made"])) == got["made"]  # noqa: S301
        assert copy.deepcopy(got["made"]) == got["made"]
        assert pickle.loads(pickle.dumps(got["classes"])) == [genuine_datetime.datetime, genuine_datetime.date]  # noqa: S301
        assert (got["matched"], got["kind"], got["is_later"]) == (2026, "datetime", True)
        assert set(got["isinstance"]) == {True}
        assert got["issubclass"] == [True, True, False]
        assert got["same"] == [True, True, 1]
        assert type(got["later"]).__mro__[1].__name__ == "datetime"
        read: Any = TypeAdapter(module.datetime).validate_json(b'"2026-01-02T00:00:00Z"')
        assert read == given
        assert type(read) is genuine_datetime.datetime


def test_stand_ins_behave_like_what_they_stand_for(made: Callable[[str], ModuleType]) -> None:
    assert pickle.loads(pickle.dumps(time.time)) is time.time  # noqa: S301
    assert pickle.loads(pickle.dumps(random.choice)) is random.choice  # noqa: S301
    assert time.time.__name__ == "time"
    assert "population" in str(inspect.signature(random.sample))

    class Timer:
        clock: Any = time.monotonic  # a builtin does not bind; a plain function in its place would

    assert Timer().clock() > 0
    random.seed(7)
    drawn = random.random()
    random.seed(7)
    assert random.random() == drawn
    assert random.Random(7).random() == drawn
    assert subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout == b"1\n"


def test_a_body_that_is_left_in_another_context_changes_nothing(made: Callable[[str], ModuleType]) -> None:
    """As when the garbage collector closes a coroutine that nobody awaited to its end."""

    def body() -> Generator[None, None, None]:
        with guard.watch(frozenset({"x"})):
            yield

    left = body()
    contextvars.copy_context().run(next, left)
    left.close()
    assert guard.watching() is None


def test_nothing_is_seen_before_it_is_installed(made: Callable[[str], ModuleType]) -> None:
    guard.uninstall()
    module = made("import time, os\ndef body():\n    time.time()\n    open(os.devnull).close()\n")
    assert seen(module, module.body) == []
