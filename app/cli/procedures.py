"""`tga procedures`: of what runs can be started."""

from __future__ import annotations

from typing import Annotated

import typer

from app.cli.client import GatewayClient
from app.cli.running import AsJson, Limit, run_over_http
from app.cli.showing import output, print_json, print_table


def add_to(application: typer.Typer) -> None:
    application.command("procedures")(procedures_command)


def procedures_command(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="Only programs of this procedure.")] = None,
    limit: Limit = 50,
    as_json: AsJson = False,
) -> None:
    """The procedures that runs can be started of, with every program that was registered of each, newest first."""
    run_over_http(context, lambda client: show_procedures(client, name=name, limit=limit, as_json=as_json))


async def show_procedures(client: GatewayClient, *, name: str | None, limit: int, as_json: bool) -> bool:
    items = await client.list_items("/v1/procedures", limit=limit, procedure=name)
    if as_json:
        print_json(items)
        return True
    if not items:
        told = "No procedures" if name is None else f"Nobody has registered a procedure {name}"
        output.print(f"{told}: a worker registers those that it has when it starts.", markup=False)
        return True
    print_table(
        ("procedure", "version", "", "program", "language", "started by", "tags", "registered", "by"),
        (
            (
                item["name"],
                item["version"],
                "newest" if item["is_newest"] else "",
                item["program_digest"][:16] + "…",
                item["language"],
                " ".join(trigger["event"] for trigger in item["triggers"]),
                " ".join(item["tags"]),
                item["registered_at"],
                item["registered_by"],
            )
            for item in items
        ),
    )
    return True
