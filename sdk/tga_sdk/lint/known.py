"""What names mean: of the standard library and of common libraries, and of a procedure's context."""

from __future__ import annotations

import ast
from typing import Final

# Operations of `ctx` that are recorded, each awaited in an async body.
OPERATIONS: Final = frozenset(
    {
        *("tool", "step", "perform", "checkpoint", "approve", "input", "select", "review", "sleep", "signal", "call"),
        *("gather", "now", "emit", "patched"),
    }
)
# Those whose function, given by position, runs as a recorded body.
BODIES: Final = {"step": 1, "perform": 2}
PEOPLE: Final = frozenset({"approve", "input", "select", "review"})

CLOCK: Final = frozenset(
    {
        *(f"time.{name}" for name in ("time", "time_ns", "monotonic", "monotonic_ns", "perf_counter", "process_time")),
        *(f"time.{name}" for name in ("perf_counter_ns", "process_time_ns", "thread_time", "clock_gettime")),
        *(f"datetime.datetime.{name}" for name in ("now", "utcnow", "today")),
        *("datetime.date.today", "pandas.Timestamp.now", "pandas.Timestamp.utcnow", "arrow.now", "arrow.utcnow"),
        *("pendulum.now", "pendulum.today", "django.utils.timezone.now"),
    }
)
# These ask the clock unless they are given a time: how many arguments that takes.
CLOCK_UNLESS_GIVEN: Final = {
    "time.localtime": 1,
    "time.gmtime": 1,
    "time.ctime": 1,
    "time.asctime": 1,
    "time.strftime": 2,
}
UUIDS: Final = frozenset({"uuid.uuid1", "uuid.uuid4", "uuid.uuid6", "uuid.uuid7", "uuid.getnode"})
CHANCE: Final = ("random.", "secrets.", "numpy.random.", "os.urandom", "os.getrandom")
# Generators that repeat what they drew when they are given a seed.
SEEDED: Final = frozenset(
    {"random.Random", "numpy.random.default_rng", "numpy.random.RandomState", "numpy.random.SeedSequence"}
)
NOT_CHANCE: Final = frozenset({"secrets.compare_digest", "numpy.random.Generator"})
MACHINE: Final = frozenset(
    {
        *("os.getenv", "os.getenvb", "os.getpid", "os.getppid", "os.getcwd", "os.cpu_count", "os.getloadavg"),
        *("os.uname", "os.getlogin", "socket.gethostname", "socket.getfqdn", "getpass.getuser", "threading.get_ident"),
        *("threading.current_thread", "multiprocessing.cpu_count", "asyncio.get_running_loop().time"),
    }
)
MACHINE_MODULES: Final = ("platform.",)
MACHINE_VALUES: Final = frozenset({"os.environ", "os.environb", "sys.argv"})
PER_PROCESS: Final = frozenset({"builtins.hash", "builtins.id"})
OUTSIDE: Final = frozenset(
    {
        *("builtins.open", "builtins.input", "io.open", "urllib.request.urlopen", "urllib.request.urlretrieve"),
        *("os.listdir", "os.scandir", "os.walk", "os.remove", "os.unlink", "os.rename", "os.replace", "os.mkdir"),
        *("os.makedirs", "os.rmdir", "os.stat", "os.system", "os.popen", "os.kill", "os.fork", "os.open", "os.chdir"),
        *("os.path.exists", "os.path.isfile", "os.path.isdir", "os.path.getsize", "os.path.getmtime"),
        *("asyncio.open_connection", "asyncio.start_server", "asyncio.create_subprocess_exec"),
        *("asyncio.create_subprocess_shell", "sqlite3.connect", "psycopg.connect", "psycopg2.connect"),
        *("asyncpg.connect", "asyncpg.create_pool", "boto3.client", "boto3.resource", "redis.Redis", "smtplib.SMTP"),
        *("socket.create_connection", "socket.getaddrinfo", "socket.gethostbyname", "aiohttp.ClientSession"),
        *("aiohttp.request", "aiofiles.open", "anyio.open_file"),
    }
)
OUTSIDE_MODULES: Final = ("subprocess.", "shutil.", "glob.", "tempfile.", "requests.", "httpx.")
NOT_OUTSIDE: Final = (
    *("httpx.URL", "httpx.Timeout", "httpx.Limits", "httpx.Headers", "httpx.Client", "httpx.AsyncClient"),
    *("requests.Session", "requests.session", "subprocess.list2cmdline"),
)
OF_PATHS: Final = frozenset(
    {
        *("read_text", "read_bytes", "write_text", "write_bytes", "open", "exists", "is_file", "is_dir", "iterdir"),
        *("glob", "rglob", "unlink", "mkdir", "rmdir", "touch", "rename", "replace", "stat"),
    }
)
PATHS: Final = frozenset({"pathlib.Path", "pathlib.PosixPath", "pathlib.Path.cwd", "pathlib.Path.home"})
SLEEPS: Final = frozenset({"time.sleep", "asyncio.sleep", "anyio.sleep", "trio.sleep"})
CONCURRENT: Final = frozenset(
    {
        *("asyncio.gather", "asyncio.create_task", "asyncio.ensure_future", "asyncio.wait", "asyncio.as_completed"),
        *("asyncio.to_thread", "asyncio.run", "asyncio.run_coroutine_threadsafe", "threading.Thread"),
        *("anyio.to_thread.run_sync", "threading.Timer", "multiprocessing.Process"),
    }
)
CONCURRENT_METHODS: Final = frozenset({"create_task", "submit", "run_in_executor", "start_soon", "apply_async"})
TIMEOUTS: Final = frozenset(
    {"asyncio.wait_for", "asyncio.timeout", "asyncio.timeout_at", "anyio.fail_after", "anyio.move_on_after"}
)
SWALLOWS: Final = frozenset(
    {"builtins.BaseException", "asyncio.CancelledError", "asyncio.exceptions.CancelledError", "tga_sdk.Stop"}
    | {"tga_sdk.errors.Stop"}
)
UNSERIALISABLE: Final = {
    "builtins.open": "an open file",
    "io.open": "an open file",
    "tempfile.NamedTemporaryFile": "an open file",
    "tempfile.TemporaryFile": "an open file",
    **{f"threading.{name}": "a lock" for name in ("Lock", "RLock", "Semaphore", "Condition", "Event")},
    **{f"asyncio.{name}": "a lock" for name in ("Lock", "Semaphore", "Condition", "Event", "Queue")},
    **{f"httpx.{name}": "a client" for name in ("Client", "AsyncClient")},
    **{f"requests.{name}": "a client" for name in ("Session", "session")},
    **{f"boto3.{name}": "a client" for name in ("client", "resource", "Session")},
    "aiohttp.ClientSession": "a client",
    "redis.Redis": "a client",
    "socket.socket": "a socket",
    "sqlite3.connect": "a connection",
    "psycopg.connect": "a connection",
    "psycopg2.connect": "a connection",
    "asyncpg.connect": "a connection",
    "asyncpg.create_pool": "a connection",
    "subprocess.Popen": "a process",
    "builtins.iter": "an iterator",
    "builtins.map": "an iterator",
    "builtins.filter": "an iterator",
    "builtins.zip": "an iterator",
}
ORDER_DOES_NOT_MATTER: Final = frozenset(
    f"builtins.{name}" for name in ("sorted", "set", "frozenset", "len", "sum", "min", "max", "any", "all")
)
ORDER_MATTERS: Final = frozenset(
    f"builtins.{name}" for name in ("list", "tuple", "enumerate", "zip", "map", "filter", "iter", "dict")
)
CALLED_AT_ONCE: Final = frozenset(
    {*(f"builtins.{name}" for name in ("map", "filter", "sorted", "min", "max")), "functools.reduce"}
)
MUTATING: Final = frozenset(
    {
        *("append", "extend", "insert", "remove", "pop", "clear", "sort", "reverse", "add", "discard", "update"),
        *("setdefault", "popitem", "appendleft", "popleft", "difference_update", "intersection_update"),
    }
)
SET_METHODS: Final = frozenset({"union", "intersection", "difference", "symmetric_difference", "copy"})
SET_OPERATORS: Final = (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)
CHEAP: Final = frozenset({"builtins", "json", "dataclasses", "typing", "collections", "functools", "enum", "datetime"})


def non_determinism(name: str, call: ast.Call | None) -> tuple[str, str] | None:
    """The code of the rule that a name breaks when it is called (or read, without a call), and how to say it."""
    if call is None:
        return ("TGA103", name) if name in MACHINE_VALUES else None
    said = f"{name.removeprefix('builtins.')}()"
    given = len(call.args) + len(call.keywords)
    if name in CLOCK or given < CLOCK_UNLESS_GIVEN.get(name, 0):
        return "TGA101", said
    if name in UUIDS or (name.startswith(CHANCE) and name not in NOT_CHANCE and not (name in SEEDED and given)):
        return "TGA102", said
    if name in MACHINE or name.startswith(MACHINE_MODULES):
        return "TGA103", said
    if name in SLEEPS:
        zero = call.args and isinstance(call.args[0], ast.Constant) and not call.args[0].value
        return None if zero else ("TGA107", said)
    if name in OUTSIDE or (name.startswith(OUTSIDE_MODULES) and not name.startswith(NOT_OUTSIDE)):
        return "TGA104", said
    if name in PER_PROCESS:
        return "TGA105", said
    return None
