"""`tga run diff`: two runs' journals compared address by address. Over HTTP."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from rich.text import Text

from app.cli.client import GatewayClient, path_to
from app.cli.run_drawing import shown_value
from app.cli.run_journal import Journal, Operation, Try, journal_of, place, read_journal
from app.cli.showing import counted, output, print_json, printable

_FORKS_MAX: Final = 64


class Side(NamedTuple):
    """One of the two runs. `salt_of`: the run whose salt keys its input digests: of a fork that of its first source."""

    run: dict[str, Any]
    journal: Journal
    salt_of: str


class Difference(NamedTuple):
    """What each has at an address: None for nothing."""

    path: str
    fields: list[str]
    left: Operation | None
    right: Operation | None


async def diff_runs(client: GatewayClient, left_id: str, right_id: str, *, as_json: bool) -> bool:
    """True when both performed the same operations with the same results."""
    left, right = await _load(client, left_id), await _load(client, right_id)
    differences = compare(left, right)
    ends = _ends(left, right)
    if as_json:
        print_json(_document(left, right, differences, ends))
    else:
        _show(left, right, differences, ends)
    return not differences and not ends


async def _load(client: GatewayClient, run_id: str) -> Side:
    run = await client.get(path_to("v1", "runs", run_id), steps=0)
    journal = journal_of([item async for item in read_journal(client, run_id)])
    origin = run
    for _ in range(_FORKS_MAX):
        if origin["forked_from"] is None:
            break
        origin = await client.get(path_to("v1", "runs", origin["forked_from"]["run_id"]))
    return Side(run, journal, origin["run_id"])


def compare(left: Side, right: Side) -> list[Difference]:
    """By address, the first difference first. Inputs are compared where both digests are keyed with one salt."""
    ours, theirs = left.journal.operations, right.journal.operations
    has_one_salt = left.salt_of == right.salt_of
    found = []
    for path in sorted(ours.keys() | theirs.keys(), key=place):
        one, other = ours.get(path), theirs.get(path)
        fields = ["missing"] if one is None or other is None else _differing(one, other, has_one_salt=has_one_salt)
        if fields:
            found.append(Difference(path, fields, one, other))
    return found


def _differing(one: Operation, other: Operation, *, has_one_salt: bool) -> list[str]:
    sides = (_compared(one), _compared(other))
    fields = [name for name in sides[0] if sides[0][name] != sides[1][name]]
    if has_one_salt and one.last.input_digest != other.last.input_digest:
        fields.append("input")
    return fields


def _compared(operation: Operation) -> dict[str, Any]:
    """What two runs of one program have in common; not its times, workers, trace ids and keys."""
    last = operation.last
    return {
        "kind": operation.kind,
        "name": operation.name,
        "outcome": last.outcome,
        "value": _value(last),
        "error": None if last.error is None else (last.error["type"], last.error["message"]),
        "tries": len(operation.tries),
    }


def _value(one: Try) -> Any:
    """Of a tool or a child what it returned: the trace and the child are each run's own."""
    return one.joined if one.value is not None and one.value["tier"] in ("effect", "run") else one.value


def _ends(left: Side, right: Side) -> list[str]:
    names = ("procedure", "version", "program_digest", "input", "state", "output", "error")
    return [name for name in names if left.run[name] != right.run[name]]


def _show(left: Side, right: Side, differences: list[Difference], ends: list[str]) -> None:
    ids = left.run["run_id"], right.run["run_id"]
    width = max(map(len, ids))
    same = len(left.journal.operations.keys() & right.journal.operations.keys()) - sum(
        one.left is not None and one.right is not None for one in differences
    )
    if not differences:
        output.print(f"The same at {_addresses(same)}.")
    else:
        told = f"First difference at {differences[0].path}; the same at {_addresses(same)}, not at {len(differences)}."
        output.print(told, markup=False)
    for difference in differences:
        what = " and ".join(difference.fields)
        output.print(f"\n[bold]{difference.path}[/]  [dim]{what}[/]")
        for run_id, operation, style in zip(ids, (difference.left, difference.right), ("red", "green"), strict=True):
            output.print(Text(f"  {run_id:<{width}}  {_in_words(operation)}", style=style))
    if ends:
        output.print("\n[bold]the run[/]")
    for name in ends:
        for run_id, side, style in zip(ids, (left, right), ("red", "green"), strict=True):
            output.print(Text(f"  {run_id:<{width}}  {name} {_said(side.run[name])}", style=style))


def _addresses(number: int) -> str:
    return counted(number, "address", "addresses")


def _in_words(operation: Operation | None) -> str:
    if operation is None:
        return "(nothing)"
    last = operation.last
    result = shown_value(last.value, last.joined)
    if last.error is not None:
        result = f"{last.error['type']}: {last.error['message']}"
    tries = f" after {len(operation.tries)} tries" if len(operation.tries) > 1 else ""
    return printable(f"{operation.kind} {operation.name}  {last.outcome or 'open'}{tries}  {result}".rstrip())


def _said(value: Any) -> str:
    if isinstance(value, dict) and "tier" in value:
        return shown_value(value)
    if isinstance(value, dict) and "type" in value:
        return printable(f"{value['type']}: {value['message']}")
    return printable(str(value)) if value is not None else "(none)"


def _document(left: Side, right: Side, differences: list[Difference], ends: list[str]) -> dict[str, Any]:
    def shown(operation: Operation | None) -> dict[str, Any] | None:
        return (
            None if operation is None else {**_compared(operation), "sequence_number": operation.last.sequence_number}
        )

    return {
        "left": left.run["run_id"],
        "right": right.run["run_id"],
        "first": differences[0].path if differences else None,
        "differences": [
            {"path": one.path, "fields": one.fields, "left": shown(one.left), "right": shown(one.right)}
            for one in differences
        ],
        "run": {name: {"left": left.run[name], "right": right.run[name]} for name in ends},
    }
