"""What `tga --help` promises is there, and every command and option is explained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.testing import CliRunner

from app.cli.command import Later, application, command

_OF_RUN = ("start", "show", "watch", "answer", "signal", "cancel", "retry", "fork", "state", "diff")
# SURFACES: what is there in this version.
PROMISED = (
    *(
        "stats",
        "serve",
        "call",
        "traces",
        "trace",
        "approvals",
        "approve",
        "deny",
        "recover",
        "resolve",
        "withdraw",
        "erase",
    ),
    *(
        "verify",
        "export",
        "receipt",
        "init",
        "doctor",
        "servers",
        "servers/accept",
        "procedures",
        "lint",
        "runs",
        *(f"run/{name}" for name in _OF_RUN),
        *(f"schedules/{name}" for name in ("list", "show", "create", "delete")),
        "log/new-epoch",
        "db/backup",
        "db/restore",
        "db/rebuild",
        "db/drop",
        "db/migrate",
        "db/status",
    ),
    *(
        "keys/create",
        "keys/list",
        "keys/revoke",
        "keys/register",
        "keys/retire",
        "keys/make",
        "keys/rotate",
        "keys/show",
    ),
    *("tenants/create", "tenants/list", "policy/check", "policy/explain", "policy/explain-start", "mcp", "demo"),
    "worker",
)
READING = (
    *("stats", "traces", "trace", "approvals", "servers", "verify", "recover", "doctor", "db/status"),
    *("keys/list", "tenants/list", "policy/check", "policy/explain"),
    *("lint", "runs", "run/show", "run/watch", "run/state", "run/diff", "schedules/list", "schedules/show"),
)


def leaves(found: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    commands = getattr(found, "commands", {})
    if path and (not commands or getattr(found, "invoke_without_command", False)):
        yield "/".join(path), found
    for name, inner in commands.items():
        yield from leaves(inner.load() if isinstance(inner, Later) else inner, (*path, name))


COMMANDS = dict(leaves(command))


def test_every_promised_command_is_there_and_no_other() -> None:
    assert set(COMMANDS) == set(PROMISED)


@pytest.mark.parametrize("name", PROMISED)
def test_every_command_and_option_is_explained(name: str) -> None:
    told = CliRunner().invoke(application, [*name.split("/"), "--help"])
    assert told.exit_code == 0
    assert COMMANDS[name].help
    shown = " ".join(told.stdout.split())
    for parameter in COMMANDS[name].params:
        if parameter.name == "help":
            continue
        assert getattr(parameter, "help", None), parameter.name
        assert (parameter.metavar or "").strip("[]") in shown or parameter.opts[0] in shown


@pytest.mark.parametrize("name", READING)
def test_every_reading_command_prints_json(name: str) -> None:
    assert any("--json" in parameter.opts for parameter in COMMANDS[name].params)


def test_the_commands_that_need_a_gateway_are_those_that_help_names() -> None:
    modules = {name.partition("/")[0]: found.callback.__module__ for name, found in COMMANDS.items()}
    help_text = " ".join(CliRunner().invoke(application, ["--help"]).stdout.split())
    named = help_text.split("verified. ")[1].split(" ask a running gateway")[0].replace(" and ", ", ").split(", ")
    asking = {
        f"app.cli.{topic}"
        for topic in (
            *("calls", "traces", "statistics", "servers", "procedures", "runs", "schedules", "decisions", "worker"),
            "mcp",
        )
    }
    assert set(named) == {name for name, module in modules.items() if module in asking}
