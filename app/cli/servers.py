"""`tga servers`: the tool servers and their tools, with pins and health; `accept` takes a changed definition."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.text import Text

from app.cli.client import GatewayClient, path_to
from app.cli.running import AsJson, ServerArgument, ToolArgument, Yes, run_over_http
from app.cli.showing import confirmed, notes, output, print_json, print_table
from app.core.errors import RequestMismatch, ToolNotFound

commands = typer.Typer(help="The tool servers and their tools, with pins and health.", invoke_without_command=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="servers")


@commands.callback()
def servers_command(context: typer.Context, as_json: AsJson = False) -> None:
    """The tool servers and their tools, with pins and health; exit 1 if a tool is quarantined."""
    if context.invoked_subcommand is None:
        run_over_http(context, lambda client: show_servers(client, as_json=as_json))


@commands.command("accept")
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


async def show_servers(client: GatewayClient, *, as_json: bool) -> bool:
    """True unless a tool is quarantined."""
    servers = (await client.get("/v1/servers"))["items"]
    tools = (await client.get("/v1/tools"))["items"]
    if as_json:
        print_json({"servers": servers, "tools": tools})
    elif not servers:
        output.print("No servers: name some in tga.toml.")
    else:
        print_table(
            ("server", "address", "answered", "failed", "at work", "last failure"),
            (
                (
                    server["server_id"],
                    server["base_url"] or server["transport"],
                    str(server["health"]["answered"]),
                    str(server["health"]["failed"]),
                    str(server["health"]["dispatching"] + server["health"]["waiting"]),
                    _last_failure(server["health"]),
                )
                for server in servers
            ),
        )
        _tell_of_problems(servers)
        output.print()
        print_table(
            ("server", "tool", "class", "tags", "pin", "definition"),
            (
                (
                    tool["server_id"],
                    tool["tool_name"],
                    tool["tool_class"],
                    " ".join(tool["tags"]),
                    _pin_cell(tool["pin"]),
                    tool["definition_digest"][:16] + "…",
                )
                for tool in tools
            ),
        )
        _tell_of_quarantined(tools)
    return all(tool["pin"]["status"] == "pinned" for tool in tools)


async def accept_tool(client: GatewayClient, server: str, tool: str, *, digest: str | None, yes: bool) -> bool:
    """Accept the definition that was shown, or the one that is named; any other is refused."""
    listed = (await client.get("/v1/tools", server_id=server))["items"]
    found = next((item for item in listed if item["tool_name"] == tool), None)
    if found is None:
        raise ToolNotFound(f"no tool {server} {tool}", remedy="See `tga servers`.")
    pin = found["pin"]
    notes.print(f"pinned   {pin['pinned_digest'] or '(nothing)'}", markup=False)
    notes.print(f"present  {pin['found_digest']}", markup=False)
    if pin["status"] == "pinned":
        output.print(f"Nothing to accept: {server} {tool} is what is pinned.", markup=False)
        return True
    accepted = digest or pin["found_digest"]
    if accepted != pin["found_digest"]:
        raise RequestMismatch("that is not the tool's present definition", expected=pin["found_digest"], found=accepted)
    if not confirmed(f"Accept the present definition of {server} {tool}?", yes=yes):
        notes.print("Nothing was accepted.")
        return False
    path = path_to("v1", "tools", server, tool, "pin")
    answer = (await client.post(path, {"definition_digest": accepted})).document
    output.print(f"{server} {tool} is {answer['status']} as {answer['pinned_digest']}.", markup=False)
    return bool(answer["status"] == "pinned")


def _pin_cell(pin: dict[str, Any]) -> Text:
    return Text(pin["status"], style="green" if pin["status"] == "pinned" else "bold red")


def _last_failure(health: dict[str, Any]) -> str:
    return f"{health['last_failure_kind']} {health['last_failure_at']}" if health["last_failure_at"] else ""


def _tell_of_problems(servers: list[dict[str, Any]]) -> None:
    for server in servers:
        connection = server["connection"] or {}
        if connection.get("state", "connected") != "connected" and connection["last_error"]:
            output.print(f"{server['server_id']}: {connection['state']}: {connection['last_error']}", markup=False)
        for problem in connection.get("problems", ()):
            output.print(f"{server['server_id']}: {problem}", markup=False)


def _tell_of_quarantined(tools: list[dict[str, Any]]) -> None:
    for tool in tools:
        if tool["pin"]["status"] != "pinned":
            name = f"{tool['server_id']} {tool['tool_name']}"
            output.print(
                f"\n{name} is not what was pinned, and is not called. Look at the change, then: tga servers accept"
                f" {name}",
                markup=False,
            )
