"""Commands that ask a running gateway over HTTP: calls, traces and servers."""

from __future__ import annotations

from typing import Annotated

import typer
import uuid_utils

from app.cli.calls import call_tool, parse_arguments
from app.cli.client import GatewayClient
from app.cli.running import AsJson, Limit, TraceArgument, Yes, refuse, run_over_http
from app.cli.servers import accept_tool, show_servers
from app.cli.traces import show_trace, show_traces, watch_trace
from app.core.limits import CALL_WAIT_MS, CALL_WAIT_MS_MAX
from app.domain.tga.transitions import TRACE

ServerArgument = Annotated[str, typer.Argument(metavar="SERVER", help="A server of the configuration file.")]
ToolArgument = Annotated[str, typer.Argument(metavar="TOOL", help="One of its tools.")]
ArgumentPairs = Annotated[list[str] | None, typer.Option("-a", "--argument", help="name=value; JSON if it reads so.")]
servers = typer.Typer(help="The tool servers and their tools, with pins and health.", invoke_without_command=True)


def add_to(application: typer.Typer) -> None:
    application.command("call")(call_command)
    application.command("traces")(traces_command)
    application.command("trace")(trace_command)
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
