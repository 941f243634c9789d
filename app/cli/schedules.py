"""`tga schedules`: what starts runs at its times. Over HTTP."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from app.cli.client import GatewayClient, path_to
from app.cli.run_acting import parsed_input
from app.cli.running import AsJson, Limit, Yes, refuse, run_over_http
from app.cli.showing import confirmed, note_own_only, notes, output, print_json, print_table, printable
from app.core.errors import ScheduleNotFound

if TYPE_CHECKING:
    from collections.abc import Mapping

MISSED: Final = ("skip", "one", "all")
_UNITS_MS: Final = {"s": 1_000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_SAID: Final = ("procedure", "version", "input", "spec", "missed")  # the fields that the creator of a schedule gives

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="The schedule, as `tga schedules list` shows it.")]

commands = typer.Typer(help="Schedules: what starts runs at its times.", no_args_is_help=True)


def add_to(application: typer.Typer) -> None:
    application.add_typer(commands, name="schedules")


@commands.command("list")
def list_command(context: typer.Context, limit: Limit = 50, as_json: AsJson = False) -> None:
    """Schedules by name: when each is due next, and what became of the last time."""
    run_over_http(context, lambda client: list_schedules(client, limit=limit, as_json=as_json))


@commands.command("show")
def show_command(context: typer.Context, name: NameArgument, as_json: AsJson = False) -> None:
    """One schedule, with the input of its runs."""
    run_over_http(context, lambda client: show_schedule(client, name, as_json=as_json))


@commands.command("create")
def create_command(
    context: typer.Context,
    name: Annotated[str, typer.Argument(metavar="NAME", help="What it is called; its runs are NAME:TIME.")],
    procedure: Annotated[
        str, typer.Argument(metavar="PROCEDURE", help="What it starts, as `tga procedures` shows it.")
    ],
    cron: Annotated[
        str | None, typer.Option("--cron", metavar="'M H D M W'", help="At these local times: five fields of cron.")
    ] = None,
    zone: Annotated[
        str | None,
        typer.Option("--zone", metavar="ZONE", help="With --cron: the time zone, as Europe/Berlin; else UTC."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option("--every", metavar="N(s|m|h|d)", help="Every so often, counted from now: 30s, 15m, 1d."),
    ] = None,
    given: Annotated[
        str | None, typer.Option("--input", metavar="JSON", help="What each run is started with; - reads stdin.")
    ] = None,
    version: Annotated[
        str | None, typer.Option(help="Runs of this version; without it each run is of the newest program.")
    ] = None,
    missed: Annotated[
        str, typer.Option(help="Of times at which no gateway ran: skip them, one run for the last, or all.")
    ] = "one",
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Make a schedule: --cron or --every says when. The same again changes nothing.

    If there is another of this name it asks before changing it; without a terminal it does nothing unless given --yes.
    """
    if missed not in MISSED:
        refuse(f"--missed is one of {', '.join(MISSED)}")
    body = {"procedure": procedure, "version": version, "spec": spec_of(cron, zone, every), "missed": missed}

    async def create(client: GatewayClient) -> bool:
        body["input"] = None if given is None else parsed_input(given)
        return await create_schedule(client, name, body, yes=yes, as_json=as_json)

    run_over_http(context, create)


@commands.command("delete")
def delete_command(context: typer.Context, name: NameArgument, yes: Yes = False, as_json: AsJson = False) -> None:
    """Remove a schedule; runs that it has started go on.

    It asks first; without a terminal it does nothing unless given --yes.
    """
    run_over_http(context, lambda client: delete_schedule(client, name, yes=yes, as_json=as_json))


def spec_of(cron: str | None, zone: str | None, every: str | None) -> dict[str, Any]:
    """When it is due, as the API takes it; refused unless exactly one of the two ways is given."""
    if (cron is None) == (every is None):
        refuse("say when with one of --cron and --every")
    if every is None:
        return {"type": "cron", "expression": cron, "time_zone": zone or "UTC"}
    if zone is not None:
        refuse("--zone goes with --cron")
    said = re.fullmatch(r"([0-9]{1,9})([smhd])", every)
    if said is None:
        refuse("--every is a number and a unit, such as 30s, 15m, 12h or 1d")
    return {"type": "interval", "every_ms": int(said[1]) * _UNITS_MS[said[2]]}


def spec_in_words(spec: Mapping[str, Any]) -> str:
    """`30 2 * * * Europe/Berlin`, or `every 15m`."""
    if spec["type"] == "cron":
        return f"{spec['expression']} {spec['time_zone']}"
    unit = next(unit for unit in ("d", "h", "m", "s", "ms") if spec["every_ms"] % _UNITS_MS.get(unit, 1) == 0)
    return f"every {spec['every_ms'] // _UNITS_MS.get(unit, 1)}{unit}"


async def list_schedules(client: GatewayClient, *, limit: int, as_json: bool) -> bool:
    items = await client.list_items("/v1/schedules", limit=limit)
    if as_json:
        print_json(items)
        return True
    if not items:
        output.print("No schedules: `tga schedules create` makes one.")
    else:
        print_table(
            ("schedule", "starts", "version", "when", "missed", "next", "last", "what became of it", "by"),
            (
                (
                    item["name"],
                    item["procedure"],
                    item["version"] or "newest",
                    spec_in_words(item["spec"]),
                    item["missed"],
                    item["next_at"] or "never again",
                    item["last_at"] or "",
                    _outcome(item),
                    item["principal_id"],
                )
                for item in items
            ),
        )
    if items.is_own_only:
        note_own_only("schedules of others")
    return True


async def show_schedule(client: GatewayClient, name: str, *, as_json: bool) -> bool:
    schedule = await client.get(path_to("v1", "schedules", name))
    print_json(schedule) if as_json else _print_schedule(schedule)
    return True


async def create_schedule(client: GatewayClient, name: str, body: dict[str, Any], *, yes: bool, as_json: bool) -> bool:
    """True when the schedule stands as `body` says; one that stands otherwise is changed only if that is wanted."""
    path = path_to("v1", "schedules", name)
    try:
        known: dict[str, Any] | None = await client.get(path)
    except ScheduleNotFound:
        known = None
    is_same = known is not None and all(known[field] == body[field] for field in _SAID)
    if known is not None and not is_same:
        notes.print(f"There is a schedule {name}:", markup=False)
        _print_schedule(known, to_person=True)
        if not confirmed(f"Change it to {body['procedure']}, {spec_in_words(body['spec'])}?", yes=yes):
            notes.print("Nothing was changed.")
            return False
    schedule = await client.put(path, body)
    if as_json:
        print_json(schedule)
        return True
    told = "made" if known is None else "as it was" if is_same else "changed"
    next_at = schedule["next_at"]
    due = "it is due never again" if next_at is None else f"next at {next_at}"
    output.print(printable(f"Schedule {name} is {told}: {due}."), markup=False)
    return True


async def delete_schedule(client: GatewayClient, name: str, *, yes: bool, as_json: bool) -> bool:
    path = path_to("v1", "schedules", name)
    known = await client.get(path)
    question = f"Remove schedule {name} of {known['procedure']}, {spec_in_words(known['spec'])}?"
    if not confirmed(question, yes=yes):
        notes.print("Nothing was removed.")
        return False
    removed = await client.delete(path)
    if as_json:
        print_json(removed)
    else:
        output.print(f"Schedule {name} is removed; runs that it has started go on.", markup=False)
    return True


def _outcome(schedule: Mapping[str, Any]) -> str:
    if schedule["last_error"] is not None:
        return str(schedule["last_error"])
    return f"run {schedule['last_run_id']}" if schedule["last_run_id"] is not None else ""


def _print_schedule(schedule: Mapping[str, Any], *, to_person: bool = False) -> None:
    """A line a field; `to_person`: beside what the command was asked for, on stderr."""
    lines = (
        ("schedule", schedule["name"]),
        ("starts", f"{schedule['procedure']}, {schedule['version'] or 'the newest version'}"),
        ("with", json.dumps(schedule["input"], ensure_ascii=False)),
        ("when", spec_in_words(schedule["spec"])),
        ("missed", schedule["missed"]),
        ("as", schedule["principal_id"]),
        ("next", schedule["next_at"] or "never again"),
        ("last", f"{schedule['last_at']}: {_outcome(schedule)}" if schedule["last_at"] else "never yet"),
    )
    for heading, text in lines:
        (notes if to_person else output).print(f"{heading:<10}{printable(text)}", markup=False)
