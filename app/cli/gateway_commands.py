"""Commands that ask a running gateway over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer
import uuid_utils

from app.cli import decisions
from app.cli.calls import call_tool, parse_arguments
from app.cli.client import GatewayClient
from app.cli.running import AsJson, Rationale, TraceArgument, Yes, refuse, run_over_http
from app.cli.servers import accept_tool, show_servers
from app.cli.traces import show_trace, show_traces, watch_trace
from app.core.limits import CALL_WAIT_MS, CALL_WAIT_MS_MAX
from app.domain.tga.transitions import TRACE

ServerArgument = Annotated[str, typer.Argument(metavar="SERVER", help="A server of the configuration file.")]
ToolArgument = Annotated[str, typer.Argument(metavar="TOOL", help="One of its tools.")]
ArgumentPairs = Annotated[list[str] | None, typer.Option("-a", "--argument", help="name=value; JSON if it reads so.")]
Limit = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many.")]
SignWith = Annotated[
    Path | None,
    typer.Option("--sign-with", metavar="KEYFILE", help="Sign with your own registered key (see `tga keys make`)."),
]
SignAs = Annotated[
    str | None,
    typer.Option("--as", metavar="PRINCIPAL", help="With --sign-with: who you are to the gateway; it is signed too."),
]

servers = typer.Typer(help="The tool servers and their tools, with pins and health.", invoke_without_command=True)


def add_to(application: typer.Typer) -> None:
    application.command("call")(call_command)
    application.command("traces")(traces_command)
    application.command("trace")(trace_command)
    application.command("approvals")(approvals_command)
    application.command("approve")(approve_command)
    application.command("deny")(deny_command)
    application.command("withdraw")(withdraw_command)
    application.command("resolve")(resolve_command)
    application.add_typer(servers, name="servers")


def call_command(
    context: typer.Context,
    server: ServerArgument,
    tool: ToolArgument,
    argument: ArgumentPairs = None,
    text: Annotated[str | None, typer.Option("--json", help="All arguments as one JSON object; - reads stdin.")] = None,
    key: Annotated[
        str | None, typer.Option("-k", "--key", help="Idempotency key; for a write tool a new one if not given.")
    ] = None,
    intent: Annotated[str | None, typer.Option("--intent", help="What it is for; it goes on the record.")] = None,
    wait_ms: Annotated[
        int, typer.Option("--wait", metavar="MS", min=0, max=CALL_WAIT_MS_MAX, help="Wait so long for the effect.")
    ] = CALL_WAIT_MS,
) -> None:
    """Call a tool. Its output goes to stdout, all else to stderr.

    Exit 0 when it is completed, and when it waits for a person or goes on after --wait (there is no output then);
    exit 1 when it failed or was denied.
    """
    if argument and text is not None:
        refuse("give arguments with -a or with --json, not both")

    async def work(client: GatewayClient) -> bool:
        arguments = parse_arguments(argument or [], text)
        new_key = str(uuid_utils.uuid7())
        return await call_tool(
            client, server, tool, arguments, key=key, new_key=new_key, intent=intent, wait_ms=wait_ms
        )

    run_over_http(context, work)


def traces_command(
    context: typer.Context,
    state: Annotated[str | None, typer.Option(help=f"One of {', '.join(TRACE.states)}.")] = None,
    server: Annotated[str | None, typer.Option(help="Only calls of this server.")] = None,
    tool: Annotated[str | None, typer.Option(help="Only calls of this tool.")] = None,
    principal: Annotated[str | None, typer.Option(help="Only what this principal asked for.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """The newest traces."""
    wanted = None if state is None else state.upper()
    if wanted is not None and wanted not in TRACE.states:
        refuse(f"--state is one of {', '.join(TRACE.states)}")
    filters = {"state": wanted, "server_id": server, "tool_name": tool, "principal_id": principal}
    run_over_http(context, lambda client: show_traces(client, limit=limit, as_json=as_json, **filters))


def trace_command(
    context: typer.Context,
    trace_id: TraceArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Follow it until it is finished.")] = False,
    as_json: AsJson = False,
) -> None:
    """One trace as a timeline: who asked, who decided, what was sent, what came back.

    With --json one document; with --watch --json one line for each entry as it comes.
    """
    show = watch_trace if watch else show_trace
    run_over_http(context, lambda client: show(client, trace_id, as_json=as_json))


def approvals_command(context: typer.Context, limit: Limit = 200, as_json: AsJson = False) -> None:
    """What waits for a person, oldest first."""
    run_over_http(context, lambda client: decisions.show_approvals(client, limit=limit, as_json=as_json))


def approve_command(
    context: typer.Context,
    trace_id: TraceArgument,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
    yes: Yes = False,
) -> None:
    """Show a waiting request, and approve exactly that. On a terminal it asks first.

    Exit 0 when the approved call is completed or goes on, 1 when it failed.
    """
    _decide(context, trace_id, "APPROVE", rationale, sign_with, principal, yes=yes)


def deny_command(
    context: typer.Context,
    trace_id: TraceArgument,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
) -> None:
    """Show a waiting request, and deny it."""
    _decide(context, trace_id, "DENY", rationale, sign_with, principal, yes=True)


def _decide(
    context: typer.Context,
    trace_id: str,
    decision: Literal["APPROVE", "DENY"],
    rationale: str | None,
    sign_with: Path | None,
    principal: str | None,
    *,
    yes: bool,
) -> NoReturn:
    if (sign_with is None) != (principal is None):
        refuse("--sign-with and --as come together")
    run_over_http(
        context,
        lambda client: decisions.decide(
            client, trace_id, decision, rationale=rationale, sign_with=sign_with, principal=principal, yes=yes
        ),
    )


def withdraw_command(context: typer.Context, trace_id: TraceArgument, rationale: Rationale = None) -> None:
    """Take back your own request while it waits for a person."""
    run_over_http(context, lambda client: decisions.withdraw(client, trace_id, rationale=rationale))


def resolve_command(
    context: typer.Context,
    trace_id: TraceArgument,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="redispatch, succeeded or failed.")],
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record.")],
    result: Annotated[str | None, typer.Option("--output", help="With succeeded: the output, as JSON.")] = None,
) -> None:
    """Say what became of a call that is held or cannot be sent any more; or have a held one sent again."""
    if action not in ("redispatch", "succeeded", "failed"):
        refuse("ACTION is redispatch, succeeded or failed")
    if result is not None and action != "succeeded":
        refuse("--output goes with succeeded")
    run_over_http(
        context, lambda client: decisions.resolve(client, trace_id, action, rationale=rationale, result=result)
    )


@servers.callback()
def servers_command(context: typer.Context, as_json: AsJson = False) -> None:
    """The tool servers and their tools, with pins and health; exit 1 if a tool is quarantined."""
    if context.invoked_subcommand is None:
        run_over_http(context, lambda client: show_servers(client, as_json=as_json))


@servers.command("accept")
def accept_command(
    context: typer.Context,
    server: ServerArgument,
    tool: ToolArgument,
    digest: Annotated[
        str | None, typer.Option("--digest", help="Accept only this definition; else the one that is shown.")
    ] = None,
    yes: Yes = False,
) -> None:
    """Accept a tool's changed definition: show what was pinned and what is there now, and pin that."""
    run_over_http(context, lambda client: accept_tool(client, server, tool, digest=digest, yes=yes))
