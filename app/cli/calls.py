"""`tga call`, and what every answer about a trace looks like. Over HTTP."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer
import uuid_utils

from app.cli.client import GatewayClient, Reply
from app.cli.running import ArgumentPairs, ServerArgument, ToolArgument, refuse, run_over_http
from app.cli.showing import decided_by, notes, print_output, printable, styled_state
from app.core.canonical import parse_json, parse_object
from app.core.errors import CallDenied, InputMalformed, TgaError
from app.core.limits import CALL_WAIT_MS, CALL_WAIT_MS_MAX


def add_to(application: typer.Typer) -> None:
    application.command("call")(call_command)


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
        int | None,
        typer.Option(
            "--wait",
            metavar="MS",
            min=0,
            max=CALL_WAIT_MS_MAX,
            help=f"Wait so long for the effect, and for a person. Without it {CALL_WAIT_MS}, and not for people.",
        ),
    ] = None,
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


def parse_arguments(pairs: list[str], text: str | None) -> dict[str, Any]:
    """`-a k=v` pairs, each value JSON if it reads as JSON and text otherwise; or one JSON object."""
    if text is not None:
        return parse_object(sys.stdin.buffer.read() if text == "-" else text)
    arguments: dict[str, Any] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            # Not shown whole: an argument without its sign may be a secret.
            raise InputMalformed("an argument is not name=value", remedy="Write -a name=value.")
        try:
            arguments[name] = parse_json(value)
        except TgaError:
            arguments[name] = value
    return arguments


async def call_tool(
    client: GatewayClient,
    server: str,
    tool: str,
    arguments: dict[str, Any],
    *,
    key: str | None,
    new_key: str,
    intent: str | None,
    wait_ms: int | None,
) -> bool:
    """True when the call is completed, or is durable and under way."""
    chosen = key
    if key is None and await _is_write(client, server, tool):
        chosen = new_key
        notes.print(f"idempotency key [bold]{chosen}[/] (repeat with -k {chosen} to be answered from the record)")
    body: dict[str, Any] = {"server_id": server, "tool_name": tool, "arguments": arguments}
    given = {"idempotency_key": chosen, "intent": intent, "wait_ms": wait_ms}
    body |= {name: value for name, value in given.items() if value is not None}
    patience_ms = CALL_WAIT_MS if wait_ms is None else wait_ms
    reply = await client.post("/v1/tool-calls", body, wait_ms=patience_ms, shown=(CallDenied.code,))
    return show_answer(reply)


async def _is_write(client: GatewayClient, server: str, tool: str) -> bool:
    """Whether a new key is to be made. For a tool that is not there the call itself says so, better than we could."""
    listed = (await client.get("/v1/tools", server_id=server))["items"]
    return any(item["tool_name"] == tool and item["tool_class"] == "write" for item in listed)


def show_answer(reply: Reply) -> bool:
    """Words to stderr, the tool's output to stdout. True when it is completed, or waits or goes on."""
    document = reply.document
    if reply.problem is not None and document.get("trace_id") is None:
        raise reply.problem
    state = "DENIED" if reply.problem is not None else document["state"]
    trace_id, waiting, effect = document["trace_id"], document.get("waiting"), document.get("tool_effect")
    replayed = " (answered from the record)" if document.get("replayed") else ""
    notes.print(f"{styled_state(state)} trace {trace_id}{replayed}")
    if waiting == "supervisor":
        notes.print(f"It waits for a person: `tga approve {trace_id}` or `tga deny {trace_id}`.")
    elif waiting == "operator":
        notes.print(f"Its outcome is unknown, and it is held: `tga resolve {trace_id} …` ends that.")
    elif state == "DENIED":
        _show_denial(document.get("decision"))
    elif effect is None:
        notes.print(f"It goes on: `tga trace {trace_id} --watch` follows it.")
    if effect is not None:
        if effect["error"] is not None:
            notes.print(printable(f"{effect['error']['code']}: {effect['error']['message']}"), markup=False)
        print_output(effect)
    return state not in ("FAILED", "DENIED")


def _show_denial(decision: dict[str, Any] | None) -> None:
    if decision is None:
        return
    because = f": {decision['rationale']}" if decision["rationale"] else ""
    policies = f" ({', '.join(decision['policy_ids'])})" if decision["policy_ids"] else ""
    notes.print(printable(f"Denied {decided_by(decision['decided_by'])}{because}{policies}"), markup=False)
