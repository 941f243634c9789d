"""`tga-worker FILE.py ...`, which `tga worker` is too: serve the procedures, tasks and flows of files or modules.

Exit codes: 0 it has ended after a signal, with all runs given back; 1 the gateway refused it (its key, its role, a
registration); 2 there is nothing that it could serve; 3 the gateway cannot be reached. A second signal ends it at once,
with 128 and the signal's number: its runs are leased to others when their lease is over.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import importlib.util
import logging
import os
import signal
import site
import sys
import sysconfig
import traceback
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Final, NoReturn

from tga_sdk.errors import GatewayError, GatewayUnreachable, ProcedureInvalid, SettingInvalid, TgaError
from tga_sdk.procedures import Procedure, procedure_of
from tga_sdk.settings import api_key, gateway_urls
from tga_sdk.wire import Wire
from tga_sdk.worker import Worker

PATIENCE_S: Final = 10.0
REFUSED, NOTHING_TO_SERVE, UNREACHABLE = 1, 2, 3


class CannotServe(Exception):
    """What keeps the worker from serving, as its user is told."""

    def __init__(self, message: str, code: int = NOTHING_TO_SERVE) -> None:
        super().__init__(message)
        self.code = code


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """The command. It ends the process; see the codes above."""
    options = _parser().parse_args(argv)
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if options.verbose else logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    for name in ("httpx2", "httpcore2"):
        logging.getLogger(name).setLevel(logging.WARNING)
    try:
        served = served_in([loaded(place) for place in options.places], options.places)
        asyncio.run(_serve(options, served))
        code = 0
    except CannotServe as refused:
        print(f"{options.program}: {refused}", file=sys.stderr)  # noqa: T201
        code = refused.code
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a body that hangs in a thread would keep the process for ever


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=os.environ.get("TGA_WORKER_PROGRAM", "tga-worker"),
        description="Serve the procedures, tasks and flows of files or modules to a gateway, until SIGTERM or SIGINT.",
        epilog="The key is the one in TGA_API_KEY, with the role worker; else, for a gateway on this machine, the one "
        "in TGA_HOME/admin.key. Exit codes: 0 ended after a signal; 1 refused by the gateway; 2 nothing to serve; 3 no "
        "gateway.",
    )
    parser.add_argument("places", metavar="FILE.py", nargs="+", help="A file, or a module's name.")
    parser.add_argument("--slots", type=int, default=32, metavar="N", help="Runs at the same time (default 32).")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="Raise where a procedure does what a replay would do differently; else it is a warning.",
    )
    parser.add_argument(
        "--url",
        action="append",
        help="The gateway, more than once for several of one database (default: TGA_URL, else this machine's).",
    )
    parser.add_argument("--name", help="What people see of this worker (default: host and process).")
    parser.add_argument("--verbose", action="store_true", help="Log more.")
    parser.set_defaults(program=parser.prog)
    return parser


def loaded(place: str) -> ModuleType:
    """The module in this file, or of this name; CannotServe says what went wrong at which line of the user's own."""
    path = Path(place)
    is_file = place.endswith(".py") or path.is_file()
    if is_file and not path.is_file():
        raise CannotServe(f"there is no file {place}")
    sys.path.insert(0, str(path.resolve().parent) if is_file else os.getcwd())
    try:
        return _module_of(path.resolve()) if is_file else importlib.import_module(place)
    except SystemExit:
        raise CannotServe(
            f"{place} ends the program while it is loaded: put what it does under `if __name__ == '__main__':`"
        ) from None
    except SyntaxError as error:
        line = (error.text or "").strip()
        raise CannotServe(f"{error.filename}:{error.lineno}: {line}\n  {type(error).__name__}: {error.msg}") from None
    except Exception as error:
        said = f"{_line_of_user(error)}  {type(error).__name__}: {error}"
        raise CannotServe(f"{place} cannot be loaded\n{said}") from None


def _module_of(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise CannotServe(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _line_of_user(error: BaseException) -> str:
    """Where in the user's own code it came from: the innermost line that is neither of Python nor installed."""
    others = [sysconfig.get_path("stdlib"), *site.getsitepackages(), str(Path(__file__).parent)]
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((*others, "<frozen"))
    ]
    return f"  {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}\n" if frames else ""


def served_in(modules: Iterable[ModuleType], places: Sequence[str]) -> list[Any]:
    """The procedures, tasks and flows that stand in these modules, in their order."""
    found: dict[int, Any] = {}
    for module in modules:
        for value in vars(module).values():
            if isinstance(value, type):
                continue
            try:
                procedure_of(value)
            except ProcedureInvalid as error:
                if hasattr(type(value), "procedure"):  # a task or flow that cannot be run
                    raise CannotServe(str(error)) from error
                continue
            found[id(value)] = value
    served = list(found.values())
    if not served:
        raise CannotServe(
            f"no procedure found in {', '.join(places)}: expected a function with @procedure or @task, or a Flow, at "
            "the module's top level"
        )
    return served


def described(value: Any) -> str:
    """One line about what is served."""
    one: Procedure[Any, Any] = procedure_of(value)
    kind = type(value).__name__.lower()
    told = f"{kind:9} {one.name} {one.version}"
    if kind == "flow":
        told += f": {' → '.join(value.names)}"
        told += "".join(f", on event {event.name}" for event in value.events)
        told += "".join(f", {schedule.described()}" for schedule in value.schedules)
    return told


async def _serve(options: argparse.Namespace, served: list[Any]) -> None:
    try:
        urls = gateway_urls(options.url)
        key = api_key(None, urls)
    except SettingInvalid as error:
        raise CannotServe(error.message, REFUSED) from error
    if key is None:
        raise CannotServe(
            "TGA_API_KEY is not set: put a key with the role worker into it; for the gateway that `make run` started "
            "here, TGA_HOME=.tga will do",
            REFUSED,
        )

    def tell() -> None:
        for value in served:
            print(described(value))  # noqa: T201
        print(f"Serving at {' and '.join(urls)} as {worker.name}. Ctrl-C or SIGTERM ends it.", flush=True)  # noqa: T201

    try:
        worker = Worker(
            urls,
            key,
            served,
            slots=options.slots,
            strict_determinism=options.strict,
            name=options.name,
            on_ready=tell,
        )
        _end_on_signals(worker, options.program)
        await _verify_reachable(urls, key)
        await worker.run(signals=False)
    except GatewayUnreachable as error:
        raise CannotServe(f"{error.message} (--url or TGA_URL names another)", UNREACHABLE) from error
    except GatewayError as error:
        raise CannotServe(_refusal(error), REFUSED) from error
    except ProcedureInvalid as error:
        raise CannotServe(error.message, NOTHING_TO_SERVE) from error
    except TgaError as error:
        raise CannotServe(error.message, REFUSED) from error


def _end_on_signals(worker: Worker, program: str) -> None:
    """The first one lets bodies end and gives the runs back; the second one does not wait, not even for threads."""
    seen: list[int] = []

    def take(number: int) -> None:
        seen.append(number)
        if len(seen) > 1:
            os._exit(128 + number)
        print(f"{program}: ending; what is under way is recorded first. Again: end at once.", file=sys.stderr)  # noqa: T201
        worker.stop()

    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, take, number)


async def _verify_reachable(urls: Sequence[str], key: str) -> None:
    """A gateway that is away when the worker starts is told of at once; one that goes away later is waited for."""
    wire = Wire(urls, key, give_up_after=PATIENCE_S)
    try:
        await wire.ask("GET", "/v1/procedures?limit=1")
    finally:
        await wire.close()


def _refusal(error: GatewayError) -> str:
    if error.status == 401:
        return "the gateway does not know the key in TGA_API_KEY: is it one of this gateway, and still valid?"
    if error.status == 403:
        return (
            f"the key in TGA_API_KEY may not serve runs ({error.message}): it needs the role worker, as "
            "`tga keys create worker-1 --role worker` gives it"
        )
    return f"the gateway refused: {error.message} ({error.code})"


if __name__ == "__main__":
    main()
