"""`tga policy`: what the policy is worth, and why it decides as it does. Directly on the files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from app.cli.calls import parse_arguments
from app.cli.explaining import explain_call
from app.cli.gateway_commands import ArgumentPairs, ServerArgument, ToolArgument
from app.cli.policy import check_policy
from app.cli.running import AsJson, Tenant, context_of, refuse, run
from app.domain.identity import DEFAULT_TENANT, Role

_ROLES = ", ".join(get_args(Role))

policy_commands = typer.Typer(help="The Cedar policy: check a file, and ask why.", no_args_is_help=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(policy_commands, name="policy")


@policy_commands.command("check")
def check_policy_command(
    context: typer.Context,
    file: Annotated[Path | None, typer.Argument(metavar="[FILE]", help="The policy; else the packaged one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Whether the gateway would take this policy, and what is in it; exit 1 if it would not.

    Warns of rules that can never match the configured tools; what MCP servers have is not asked."""

    async def work() -> bool:
        return await check_policy(file, config=context_of(context).settings.config_file, as_json=as_json)

    run(work())


@policy_commands.command("explain")
def explain_policy_command(
    context: typer.Context,
    server: ServerArgument,
    tool: ToolArgument,
    argument: ArgumentPairs = None,
    text: Annotated[
        str | None, typer.Option("--arguments", help="All arguments as one JSON object; - reads stdin.")
    ] = None,
    principal: Annotated[str, typer.Option("--principal", help="Who would ask.")] = "someone",
    role: Annotated[list[str] | None, typer.Option("--role", help=f"With which roles: {_ROLES}.")] = None,
    tenant: Tenant = DEFAULT_TENANT,
    intent: Annotated[str | None, typer.Option("--intent", help="What it would be for.")] = None,
    as_json: AsJson = False,
) -> None:
    """Which policy decides this call, and why. Nothing is called; exit 1 if it would be denied."""
    if argument and text is not None:
        refuse("give arguments with -a or with --arguments, not both")

    async def work() -> bool:
        return await explain_call(
            context_of(context).settings,
            server,
            tool,
            parse_arguments(argument or [], text),
            principal_fields={"principal_id": principal, "tenant": tenant, "roles": role or ["agent"]},
            intent=intent,
            as_json=as_json,
        )

    run(work())
