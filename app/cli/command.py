"""The command `tga`: what it offers, and where that is. How it exits is in running.py."""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

from app import __version__

# As `tga --help` shows them: the name, the module of app.cli that has it, and its help's first sentence.
COMMANDS: Final = (
    ("call", "calls", "Call a tool."),
    ("traces", "traces", "The newest traces."),
    ("trace", "traces", "One trace as a timeline: who asked, who decided, what was sent, what came back."),
    ("stats", "statistics", "How many calls there were, what became of them, and how quick, by tool."),
    ("approvals", "decisions", "What waits for a person, soonest expiry first."),
    (
        "approve",
        "decisions",
        "Show a waiting request, and approve exactly that; of a run (run:ID), answer yes.",
    ),
    ("deny", "decisions", "Show a waiting request, and deny it; of a run (run:ID), answer no."),
    ("withdraw", "decisions", "Take back your own request while it waits for a person."),
    (
        "resolve",
        "decisions",
        "Say what became of a call that is held or cannot be sent any more; or have a held one sent again.",
    ),
    ("serve", "serve", "Run the gateway on TGA_HOST and TGA_PORT until SIGINT or SIGTERM."),
    (
        "demo",
        "demo",
        "Run the gateway beside a small tool server, make one call, and say what to try; until SIGINT or SIGTERM.",
    ),
    ("recover", "recovery", "Continue traces whose executor is gone; exit 1 if any could not be recovered."),
    (
        "verify",
        "verify",
        "Recompute every digest, link, transition, artifact, claim, checkpoint and head; exit 1 if anything is wrong.",
    ),
    (
        "export",
        "export",
        "Write a bundle of the ledger that anyone can verify offline: entries, artifacts, proofs, heads, keys, "
        "schemas.",
    ),
    (
        "receipt",
        "receipt",
        "Print the proof that the last entry of a trace or run is in the log, with the signed tree head.",
    ),
    ("erase", "erasing", "Remove the payloads of a finished trace or run, for ever."),
    ("init", "init", "Write a commented tga.toml and policy.cedar into TGA_HOME, to start from."),
    (
        "doctor",
        "doctor",
        "Look at everything that must be right: configuration, policy, keys, database, streams, clock, the running "
        "gateway, its tool servers, runs, and what waits; exit 1 if anything is wrong.",
    ),
    ("mcp", "mcp", "Speak MCP on stdin and stdout, for desktop clients; the gateway at TGA_URL answers."),
    ("servers", "servers", "The tool servers and their tools, with pins and health."),
    (
        "procedures",
        "procedures",
        "The procedures that runs can be started of, with every program that was registered of each, newest first.",
    ),
    ("runs", "runs", "The newest runs, and what each waits for."),
    ("run", "runs", "One run: start it, look at it, answer what it asks, end it, have it tried again."),
    ("schedules", "schedules", "Schedules: what starts runs at its times."),
    (
        "lint",
        "lint",
        "Find in a file of procedures what a replay would not repeat; exit 1 if anything is found.",
    ),
    (
        "worker",
        "worker",
        "Serve the procedures, tasks and flows of FILE.py to the gateway, until SIGTERM or SIGINT.",
    ),
    ("log", "log", "The verifiable log: begin a new epoch when entries that were signed are lost."),
    ("db", "db", "The database: its schema, whether it is fit, backup, restore, rebuild, and its end."),
    ("keys", "keys", "API keys, and keys that sign and seal."),
    ("tenants", "tenants", "Tenants: whose traces, keys and tools are apart."),
    ("policy", "policy", "The Cedar policy: check a file, and ask why."),
)


class Later(TyperCommand):
    """A command whose module, with all that it imports, is loaded when it is run or asked for its own help."""

    def __init__(self, name: str, module: str, summary: str) -> None:
        super().__init__(name, help=summary)
        self._known_as, self._module = name, module

    def load(self) -> Any:
        """The command itself."""
        holder = typer.Typer(rich_markup_mode=None)
        import_module(f"app.cli.{self._module}").add_to(holder)
        return typer.main.get_group(holder).commands[self._known_as]

    def make_context(self, *args: Any, **settings: Any) -> Any:
        return self.load().make_context(*args, **settings)


class Commands(TyperGroup):
    """Those of the table."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        for name, module, summary in COMMANDS:
            self.add_command(Later(name, module, summary))


application = typer.Typer(
    name="tga",
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tga {__version__}")
        raise typer.Exit


@application.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Every tool call decided, dispatched once, and on a log that can be verified.

    call, traces, trace, stats, approvals, approve, deny, withdraw, resolve, servers, procedures, runs, run, schedules,
    worker and mcp ask a running gateway: the one at TGA_URL (default: http://TGA_HOST:TGA_PORT, which is
    http://127.0.0.1:8420), with the key in TGA_API_KEY (default, on the same machine: the one in TGA_HOME/admin.key).
    lint reads files. All others work on the store, whether a gateway runs or not.

    TGA_HOME (default ~/.tga) is where state lives; TGA_DATABASE_URL names a PostgreSQL server, else the embedded
    one is used.

    Exit codes: 0 fine; 1 found something wrong, or was refused (a failed or denied call, a key or role that does not
    do); 2 bad usage; 3 cannot reach what it needs (the gateway or the store is away or busy: try again).
    """


command = typer.main.get_command(application)
