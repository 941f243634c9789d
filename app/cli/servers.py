"""`tga servers`: the tool servers and their tools, with pins and health; `accept` takes a changed definition."""

from __future__ import annotations

from typing import Annotated, Any, Final

import typer
from rich.text import Text

from app.cli.client import GatewayClient, path_to
from app.cli.running import AsJson, ServerArgument, ToolArgument, Yes, run_over_http
from app.cli.showing import confirmed, notes, output, print_json, print_table, printable
from app.core.errors import RequestMismatch, ToolNotFound

commands = typer.Typer(help="The tool servers and their tools, with pins and health.", invoke_without_command=True)


_COMPLAINTS_SHOWN: Final = 3
_STYLE_OF_LINE: Final = {"-": "red", "+": "green"}


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="servers")


@commands.callback()
def servers_command(context: typer.Context, as_json: AsJson = False) -> None:
    """The tool servers and their tools, with pins and health; exit 1 if a server is down or a tool quarantined."""
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
    """Accept a tool's changed definition: show what was pinned and what is there now, line by line, and pin that."""
    run_over_http(context, lambda client: accept_tool(client, server, tool, digest=digest, yes=yes))


async def show_servers(client: GatewayClient, *, as_json: bool) -> bool:
    """True unless a server is down or a tool is quarantined."""
    servers = (await client.get("/v1/servers"))["items"]
    tools = (await client.get("/v1/tools"))["items"]
    if as_json:
        print_json({"servers": servers, "tools": tools})
    elif not servers:
        output.print("No servers: name some in tga.toml.")
    else:
        print_table(
            ("server", "address", "state", "since", "answered", "failed", "at work", "last failure"),
            (
                (
                    server["server_id"],
                    server["base_url"] or server["transport"],
                    _state_cell(server["status"]["state"]),
                    _to_the_second(server["status"]["since"]),
                    str(server["health"]["answered"]),
                    str(server["health"]["failed"]),
                    str(server["health"]["dispatching"] + server["health"]["waiting"]),
                    _last_failure(server["health"]),
                )
                for server in servers
            ),
        )
        for server in servers:
            _tell_of_status(server)
            _tell_of_problems(server)
        output.print()
        print_table(
            ("server", "tool", "class", "if the outcome is unknown", "tags", "pin", "definition"),
            (
                (
                    tool["server_id"],
                    tool["tool_name"],
                    tool["tool_class"],
                    _choice_cell(tool),
                    " ".join(tool["tags"]),
                    _pin_cell(tool["pin"]),
                    tool["definition_digest"][:16] + "…",
                )
                for tool in tools
            ),
        )
        _tell_of_quarantined(tools)
    return all(tool["pin"]["status"] == "pinned" for tool in tools) and all(
        server["status"]["state"] != "down" for server in servers
    )


async def accept_tool(client: GatewayClient, server: str, tool: str, *, digest: str | None, yes: bool) -> bool:
    """Accept the definition that was shown, or the one that is named; any other is refused."""
    listed = (await client.get("/v1/tools", server_id=server))["items"]
    found = next((item for item in listed if item["tool_name"] == tool), None)
    if found is None:
        raise ToolNotFound(f"no tool {server} {tool}", remedy="See `tga servers`.")
    pin = found["pin"]
    if pin["status"] != "pinned":
        _show_change(await client.get(path_to("v1", "tools", server, tool, "pin")))
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


def _show_change(compared: dict[str, Any]) -> None:
    """Both definitions as a diff. The gateway has named what is invisible; what a terminal would obey is escaped."""
    since = f"pinned since {_to_the_second(compared['since'])}" if compared["since"] else "never pinned"
    notes.print(f"{compared['server_id']} {compared['tool_name']}, {since} (-), and as it is now (+):", markup=False)
    for line in compared["diff"]:
        notes.print(Text(printable(line), style=_STYLE_OF_LINE.get(line[:1], "default")))
    for hidden in compared["hidden"]:
        whose = "the present definition" if hidden["where"] == "found" else "the pinned definition"
        times = "once" if hidden["times"] == 1 else f"{hidden['times']} times"
        told = f"Hidden in {whose}: {hidden['character']}, {times}, at {hidden['at']}"
        notes.print(Text(printable(told), style="bold yellow"))


def _choice_cell(tool: dict[str, Any]) -> Text:
    """What happens to a write whose answer is lost, in the words of the configuration."""
    if tool["tool_class"] != "write":
        return Text("")
    choice = tool["on_unknown_outcome"]
    if choice == "reconcile":
        return Text(printable(f"reconcile, by {tool['reconcile_tool']}"))
    if tool["on_unknown_outcome_chosen"]:
        return Text(choice)
    return Text(f"{choice} (nobody chose)", style="yellow")


def _pin_cell(pin: dict[str, Any]) -> Text:
    return Text(pin["status"], style="green" if pin["status"] == "pinned" else "bold red")


def _state_cell(state: str) -> Text:
    return Text(state, style={"up": "green", "starting": "yellow", "down": "bold red"}.get(state, "default"))


def _to_the_second(time: str) -> str:
    return f"{time[:19].replace('T', ' ')}Z"


def _last_failure(health: dict[str, Any]) -> str:
    return f"{health['last_failure_kind']} {health['last_failure_at']}" if health["last_failure_at"] else ""


def _tell_of_status(server: dict[str, Any]) -> None:
    """Of a server that cannot be called: why, the last that it complained of, and what to do."""
    status, name = server["status"], server["server_id"]
    if status["state"] == "starting":
        _say(f"\n{name} is still starting. Its tools appear when it is ready.")
    elif status["state"] == "down":
        _say(f"\n{name} is down since {_to_the_second(status['since'])}: {status['last_error']}.")
        complaints = (server["connection"] or {}).get("stderr", "").strip().splitlines()
        for line in complaints[-_COMPLAINTS_SHOWN:]:
            _say(f"  its stderr: {line}")
        if status["remedy"]:
            _say(f"  What to do: {status['remedy']}")


def _tell_of_problems(server: dict[str, Any]) -> None:
    for problem in (server["connection"] or {}).get("problems", ()):
        _say(f"{server['server_id']}: {problem}")


def _say(line: str) -> None:
    """What servers wrote may hold anything: it is shown with escapes."""
    output.print("\n".join(map(printable, line.split("\n"))), markup=False)


def _tell_of_quarantined(tools: list[dict[str, Any]]) -> None:
    for tool in tools:
        if tool["pin"]["status"] != "pinned":
            name = f"{tool['server_id']} {tool['tool_name']}"
            output.print(
                f"\n{name} is not what was pinned, and is not called. Look at the change, then: tga servers accept"
                f" {name}",
                markup=False,
            )
