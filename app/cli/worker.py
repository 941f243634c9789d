"""`tga worker`: serve the procedures, tasks and flows of a file, with the SDK."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from app.cli.running import context_of


def add_to(application: typer.Typer) -> None:
    application.command("worker")(worker_command)


def worker_command(
    context: typer.Context,
    places: Annotated[list[str], typer.Argument(metavar="FILE.py", help="A file, or a module's name.")],
    slots: Annotated[int, typer.Option(min=1, max=256, help="Runs at the same time.")] = 32,
    strict: Annotated[
        bool, typer.Option("--strict", help="Raise where a procedure does what a replay would do differently.")
    ] = False,
    name: Annotated[str | None, typer.Option(help="What people see of this worker.")] = None,
    verbose: Annotated[bool, typer.Option("--verbose", help="Log more.")] = False,
) -> None:
    """Serve the procedures, tasks and flows of FILE.py to the gateway, until SIGTERM or SIGINT.

    A signal lets what is under way end and be recorded, and gives the runs back; a second one ends it at once. The
    worker outlives restarts of the gateway. `tga-worker`, of the SDK alone, does the same where the gateway is not
    installed.
    """
    settings = context_of(context).settings
    words = ["--slots", str(slots), *(["--strict"] if strict else []), *(["--verbose"] if verbose else [])]
    words += [] if name is None else ["--name", name]
    environment = {
        **os.environ,
        "TGA_HOME": str(settings.home),
        "TGA_URL": settings.url,
        "TGA_WORKER_PROGRAM": "tga worker",
    }
    # A process without the gateway's own packages: the user's code may have a package `app` too.
    command = [sys.executable, "-m", "tga_sdk.worker_cli", *words, "--", *places]
    os.execve(sys.executable, command, environment)  # noqa: S606
