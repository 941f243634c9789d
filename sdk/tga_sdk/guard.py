"""Non-determinism while it happens: which line of a procedure did outside a recorded operation what no replay repeats.

    guard.install()                                               once in a process
    with guard.watch(frozenset({"orders"}), strict=False, warn=tell):
        ...                                                       the body of a procedure of the module `orders`
        with guard.off():
            ...                                                   the body of a step, or the SDK at work

What is watched, and how a call is seen:

1. Functions of time, random, uuid, secrets and os are replaced in their modules by stand-ins that look at their caller.
   Names that the procedure's module took from there before (`from time import time`) are replaced in its globals.
2. `os.environ` is watched in its class, so `from os import environ` changes nothing.
3. `datetime` and `date`, and the module `datetime`, are replaced in the procedure's globals alone: C types cannot be
   changed, and no other code gets another class. What they make are genuine datetimes.
4. Files, sockets and processes are seen by an audit hook of the interpreter, also when a library opens them for the
   procedure.

A call counts if the context variable says that a procedure's body runs, and the caller is a line of its module. Other
tasks, other threads, asyncio, pydantic and the SDK are never reported: they run in another context, or call from
another module. A task or thread that the body starts in its own context (`create_task`, `to_thread`) is part of it.

Not seen: what a module keeps elsewhere than in its globals (`def f(clock=time.time)`), `from datetime import datetime`
inside a function, and sources of chance that are not listed here. `tga lint` finds those it can see in the text.
"""

from __future__ import annotations

import copyreg
import datetime as _datetime
import os
import random
import secrets
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextvars import ContextVar, Token
from types import CodeType, FrameType, ModuleType
from typing import Any, Final, NamedTuple

from tga_sdk.errors import NotDeterministic

CLOCK: Final = "use await ctx.now()"
TIMER: Final = "measure inside a step: await ctx.step(name, fn); or use await ctx.now()"
SLEEP: Final = "use await ctx.sleep(seconds)"
CHANCE: Final = "use ctx.random()"
UUID: Final = "use ctx.uuid()"
SECRET: Final = "make it in a step: await ctx.step(name, fn), and return it as Secret(value)"  # noqa: S105
ENVIRONMENT: Final = "read it in a step: await ctx.step(name, fn); or give it to the run as input"
MACHINE: Final = "ask for it in a step: await ctx.step(name, fn)"
OUTSIDE: Final = "do it in a step: await ctx.step(name, fn); or through a tool: await ctx.tool(server, tool, args)"


class Finding(NamedTuple):
    """A line that did what a replay would do differently. `source` is `file:line`, `call` what it called."""

    source: str
    call: str
    fix: str

    def __str__(self) -> str:
        return f"{self.source}: {self.call} outside a recorded operation, which a replay would not repeat: {self.fix}"


class Watch:
    """What is watched while a procedure's body runs. `found`: every finding so far, also those a program swallowed."""

    __slots__ = ("_lines", "found", "modules", "strict", "warn")

    def __init__(self, modules: frozenset[str], *, strict: bool, warn: Callable[[Finding], None]) -> None:
        self.modules = modules
        self.strict = strict
        self.warn = warn
        self.found: list[Finding] = []
        self._lines: set[tuple[CodeType, int]] = set()

    def report(self, frame: FrameType, call: str, fix: str) -> None:
        """Warn once of a line, or raise at every call of it."""
        place = (frame.f_code, frame.f_lineno)
        is_new = place not in self._lines
        if not is_new and not self.strict:
            return
        finding = Finding(f"{frame.f_code.co_filename}:{frame.f_lineno}", call, fix)
        if is_new:
            self._lines.add(place)
            self.found.append(finding)
        if self.strict:
            raise NotDeterministic(str(finding))
        with off():  # `warn` runs on the stack of the body: what it does is not the body's
            self.warn(finding)


_watching: ContextVar[Watch | None] = ContextVar("tga_sdk.guard", default=None)


class _Setting:
    """Sets the context variable while it is entered."""

    __slots__ = ("_token", "_watch")

    def __init__(self, watch: Watch | None) -> None:
        self._watch = watch
        self._token: Token[Watch | None] | None = None

    def __enter__(self) -> Watch | None:
        self._token = _watching.set(self._watch)
        return self._watch

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            try:  # noqa: SIM105 - `contextlib.suppress` costs more than all the rest
                _watching.reset(self._token)
            except ValueError:
                pass  # a coroutine that the garbage collector closes leaves in another context: nothing to reset there


def watch(
    module_names: frozenset[str], *, strict: bool = False, warn: Callable[[Finding], None] = lambda _: None
) -> _Setting:
    """While entered, the body of a procedure of these modules runs. Nothing is seen unless `install` was called.

    `warn` gets each line once; with `strict` NotDeterministic is raised at the line instead, each time.
    """
    watched = frozenset(name for name in module_names if name.partition(".")[0] != _SDK)
    if _installed:
        for name in watched:
            _rebind(name)
    return _Setting(Watch(watched, strict=strict, warn=warn))


def off() -> _Setting:
    """While entered, nothing is reported: the body of a recorded operation, or the SDK itself, runs."""
    return _Setting(None)


def watching() -> Watch | None:
    """What is watched in this context now."""
    return _watching.get()


# Callers.

# Modules of the standard library that a call passes through on its way to what is watched: not the caller.
_PASSED_THROUGH: Final = frozenset({"random", "uuid", "secrets", "os", "collections.abc", "_collections_abc", __name__})
# What these open is theirs: modules, sources and zones that are loaded on first use, and log files.
_OWN_BUSINESS: Final = (
    *("importlib", "_frozen_importlib", "_frozen_importlib_external", "zipimport", "pkgutil", "linecache"),
    *("traceback", "inspect", "tokenize", "warnings", "logging", "zoneinfo", "encodings", "locale", "gettext"),
    *("weakref", "pydantic", "pydantic_core", "tga_sdk"),
)
_SDK: Final = __name__.partition(".")[0]  # a flow's program is the SDK's own, and its steps are recorded
# What dataclasses and attrs generate has the globals of the module, and no line in it: its caller has one.
_GENERATED: Final = ("<string>", "<attrs generated")
_FRAMES: Final = 64


def _look(call: str, fix: str, frame: FrameType | None) -> None:
    """Report the call if its caller is a line of the procedure's module."""
    watch = _watching.get()
    if watch is None:
        return
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if name not in _PASSED_THROUGH and not frame.f_code.co_filename.startswith(_GENERATED):
            if name in watch.modules:
                watch.report(frame, call, fix)
            return
        frame = frame.f_back


def _look_far(call: str, fix: str, frame: FrameType | None) -> None:
    """Report the call at the line of the procedure's module from which libraries were led to it."""
    watch = _watching.get()
    left = _FRAMES
    while watch is not None and frame is not None and left:
        name = frame.f_globals.get("__name__") or ""
        if name in watch.modules and not frame.f_code.co_filename.startswith(_GENERATED):
            watch.report(frame, call, fix)
            return
        if name.partition(".")[0] in _OWN_BUSINESS or (name == "asyncio.events" and frame.f_code.co_name == "_run"):
            return  # the latter: from here on the frames are the event loop's, and not the caller's
        frame = frame.f_back
        left -= 1


# Stand-ins for functions.


class _StandIn:
    """A function of a module that looks at its caller first.

    Like a builtin, and unlike a Python function, it does not bind `self` when a class has it as a member.
    """

    def __init__(
        self, original: Callable[..., Any], module: str, name: str, fix: str, explicit_from: int | None
    ) -> None:
        self.__wrapped__ = original
        self.__module__ = module
        self.__name__ = self.__qualname__ = name
        self.__doc__ = original.__doc__
        self._call = f"{module}.{name}()"
        self._fix = fix
        self._explicit_from = explicit_from  # with so many arguments it says what it is told, and asks no clock

    def __call__(self, *args: Any, **named: Any) -> Any:
        if _watching.get() is not None and (self._explicit_from is None or len(args) < self._explicit_from):
            _look(self._call, self._fix, sys._getframe(1))
        return self.__wrapped__(*args, **named)

    def __reduce__(self) -> str:
        return self.__name__

    def __repr__(self) -> str:
        return repr(self.__wrapped__)


_OF_RANDOM: Final = (
    *("random", "uniform", "triangular", "randint", "randrange", "choice", "choices", "shuffle", "sample", "randbytes"),
    *("getrandbits", "gauss", "normalvariate", "lognormvariate", "expovariate", "vonmisesvariate", "gammavariate"),
    *("betavariate", "paretovariate", "weibullvariate", "binomialvariate", "seed", "getstate"),
)
_WATCHED: Final[tuple[tuple[ModuleType, tuple[str, ...], str], ...]] = (
    (time, ("time", "time_ns", "localtime", "gmtime", "ctime", "asctime", "strftime", "clock_gettime"), CLOCK),
    (time, ("monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time", "process_time_ns"), TIMER),
    (time, ("thread_time", "thread_time_ns", "clock_gettime_ns"), TIMER),
    (time, ("sleep",), SLEEP),
    (random, _OF_RANDOM, CHANCE),
    (uuid, ("uuid1", "uuid4", "uuid6", "uuid7", "getnode"), UUID),
    (secrets, ("token_bytes", "token_hex", "token_urlsafe", "choice", "randbelow", "randbits"), SECRET),
    (os, ("urandom", "getrandom"), SECRET),
    (os, ("getenv", "getenvb"), ENVIRONMENT),
    (os, ("getpid", "getppid", "getcwd", "getcwdb", "cpu_count", "getloadavg", "times", "uname"), MACHINE),
)
_EXPLICIT_FROM: Final = {"localtime": 1, "gmtime": 1, "ctime": 1, "asctime": 1, "strftime": 2}


def watched_names() -> list[str]:
    """Every function that is replaced, as `module.name`; those that this version of Python has."""
    return [f"{module.__name__}.{name}" for module, names, _ in _WATCHED for name in names if hasattr(module, name)]


# os.environ, and generators of chance.


def _environ_getitem(self: Any, key: Any) -> Any:
    if _watching.get() is not None:
        _look(f"os.environ[{key!r}]", ENVIRONMENT, sys._getframe(1))
    return _originals[os._Environ, "__getitem__"](self, key)


def _environ_iter(self: Any) -> Iterator[Any]:
    if _watching.get() is not None:
        _look("os.environ", ENVIRONMENT, sys._getframe(1))
    return iter(_originals[os._Environ, "__iter__"](self))


def _random_seed(self: Any, a: Any = None, *rest: Any, **named: Any) -> Any:
    if a is None and _watching.get() is not None:
        _look("random.Random() without a seed", CHANCE, sys._getframe(1))
    return _originals[random.Random, "seed"](self, a, *rest, **named)


def _random_urandom(size: int) -> bytes:
    if _watching.get() is not None:
        _look("random.SystemRandom", CHANCE, sys._getframe(1))
    return os.urandom(size)


_PATCHED: Final[tuple[tuple[Any, str, Callable[..., Any]], ...]] = (
    (os._Environ, "__getitem__", _environ_getitem),
    (os._Environ, "__iter__", _environ_iter),
    (random.Random, "seed", _random_seed),
    (random, "_urandom", _random_urandom),
)


# datetime.


class _Genuine(type):
    """The class of the stand-ins for `datetime` and `date`: to isinstance, == and pickle they are the genuine ones."""

    def __instancecheck__(cls, instance: object) -> bool:
        genuine = _GENUINE.get(id(cls))
        return isinstance(instance, genuine) if genuine else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        genuine = _GENUINE.get(id(cls))
        return issubclass(subclass, genuine) if genuine else super().__subclasscheck__(subclass)

    def __eq__(cls, other: object) -> bool:
        genuine = _GENUINE.get(id(cls))
        return cls is other or (genuine is not None and genuine is other)

    def __hash__(cls) -> int:
        return hash(_GENUINE.get(id(cls)) or id(cls))


def _reduced(cls: Any) -> Any:
    genuine = _GENUINE.get(id(cls))
    return cls.__qualname__ if genuine is None else (_genuine, (genuine.__name__,))


def _genuine(name: str) -> Any:
    return getattr(_datetime, name)


class _Date(_datetime.date, metaclass=_Genuine):
    __slots__ = ()

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return _datetime.date.__new__(_datetime.date if cls is _Date else cls, *args, **named)

    @classmethod
    def today(cls) -> Any:
        _look("date.today()", CLOCK, sys._getframe(1))
        return _datetime.date.today() if cls is _Date else super().today()  # noqa: DTZ011

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(_datetime.date)


class _Datetime(_datetime.datetime, metaclass=_Genuine):
    __slots__ = ()

    def __new__(cls, *args: Any, **named: Any) -> Any:
        return _datetime.datetime.__new__(_datetime.datetime if cls is _Datetime else cls, *args, **named)

    @classmethod
    def now(cls, tz: _datetime.tzinfo | None = None) -> Any:
        _look("datetime.now()", CLOCK, sys._getframe(1))
        return _datetime.datetime.now(tz) if cls is _Datetime else super().now(tz)

    @classmethod
    def utcnow(cls) -> Any:
        _look("datetime.utcnow()", CLOCK, sys._getframe(1))
        return _datetime.datetime.utcnow() if cls is _Datetime else super().utcnow()  # noqa: DTZ003

    @classmethod
    def today(cls) -> Any:
        _look("datetime.today()", CLOCK, sys._getframe(1))
        return _datetime.datetime.today() if cls is _Datetime else super().today()  # noqa: DTZ002

    @classmethod
    def __get_pydantic_core_schema__(cls, _: Any, handler: Callable[[Any], Any]) -> Any:
        return handler(_datetime.datetime)


_GENUINE: Final[dict[int, type]] = {id(_Date): _datetime.date, id(_Datetime): _datetime.datetime}
for _cls, _name in ((_Date, "date"), (_Datetime, "datetime")):
    _cls.__module__, _cls.__name__, _cls.__qualname__ = "datetime", _name, _name
copyreg.pickle(_Genuine, _reduced)

_DATETIME: Final = ModuleType("datetime", _datetime.__doc__)  # for a procedure's module that has `import datetime`
_DATETIME.__dict__.update({**vars(_datetime), "datetime": _Datetime, "date": _Date})


# Files, sockets and processes.

_EVENTS: Final = frozenset(
    {
        *("open", "os.listdir", "os.scandir", "os.walk", "os.fwalk", "glob.glob", "glob.glob/2", "pathlib.Path.glob"),
        *("pathlib.Path.rglob", "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chdir"),
        *("os.truncate", "os.chmod", "os.chown", "os.utime", "shutil.copyfile", "shutil.copytree", "shutil.move"),
        *("shutil.rmtree", "shutil.make_archive", "shutil.unpack_archive", "tempfile.mkstemp", "tempfile.mkdtemp"),
        *("sqlite3.connect", "builtins.input"),
        *("socket.connect", "socket.bind", "socket.getaddrinfo", "socket.gethostbyname", "socket.gethostbyaddr"),
        *("socket.getnameinfo", "socket.gethostname", "socket.sendto", "socket.sendmsg", "urllib.Request"),
        *("http.client.connect", "smtplib.connect", "ftplib.connect", "imaplib.open", "poplib.connect"),
        *("subprocess.Popen", "os.system", "os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.spawn", "os.kill"),
        *("pty.spawn", "webbrowser.open"),
    }
)


def _audit(event: str, args: tuple[Any, ...]) -> None:
    if event in _EVENTS and _installed and _watching.get() is not None:
        zones = sys.modules.get("zoneinfo")
        if zones is not None and args and isinstance(args[0], str) and args[0].startswith(zones.TZPATH):
            return  # ZoneInfo reads a zone in C, on first use
        shown = f"({args[0]!r})" if args and isinstance(args[0], str) else "()"
        _look_far(event.partition("/")[0] + shown, OUTSIDE, sys._getframe(1))


# Installing.

_lock: Final = threading.Lock()
_installed = False
_has_hook = False
_originals: dict[tuple[Any, str], Any] = {}
_stand_ins: dict[int, Any] = {}  # by the id of the original, which `_originals` keeps alive
_rebound: dict[str, tuple[ModuleType, dict[str, tuple[Any, Any]]]] = {}


def install() -> None:
    """Put the stand-ins in place, once in a process; a second call does nothing.

    A replaced function costs its callers about a fifth of a microsecond more while no body is watched.
    """
    global _installed, _has_hook
    with _lock:
        if _installed:
            return
        for module, names, fix in _WATCHED:
            for name in names:
                original = getattr(module, name, None)
                if original is not None:
                    stand_in = _StandIn(original, module.__name__, name, fix, _EXPLICIT_FROM.get(name))
                    _originals[module, name] = original
                    _stand_ins[id(original)] = stand_in
                    setattr(module, name, stand_in)
        for owner, name, function in _PATCHED:
            _originals[owner, name] = getattr(owner, name)
            setattr(owner, name, function)
        _stand_ins[id(_datetime)] = _DATETIME
        _stand_ins[id(_datetime.datetime)] = _Datetime
        _stand_ins[id(_datetime.date)] = _Date
        if not _has_hook:
            sys.addaudithook(_audit)  # stays for good: Python has no way to remove it
            _has_hook = True
        _installed = True


def uninstall() -> None:
    """Put everything back: for tests. Modules that took a stand-in by name keep it; it does nothing any more."""
    global _installed
    with _lock:
        if not _installed:
            return
        _installed = False
        for module, replaced in _rebound.values():
            for name, (original, stand_in) in replaced.items():
                if module.__dict__.get(name) is stand_in:
                    setattr(module, name, original)
        for (owner, name), original in _originals.items():
            setattr(owner, name, original)
        for kept in (_rebound, _stand_ins):
            kept.clear()


def _rebind(name: str) -> None:
    """Replace what the module has taken by name from the watched ones before they were replaced."""
    module = sys.modules.get(name)
    known = _rebound.get(name)
    if module is None or (known is not None and known[0] is module):
        return
    with _lock:
        replaced: dict[str, tuple[Any, Any]] = {}
        for key, value in list(vars(module).items()):
            stand_in = _stand_ins.get(id(value))
            if stand_in is not None:
                replaced[key] = (value, stand_in)
                setattr(module, key, stand_in)
        _rebound[name] = (module, replaced)
