"""What commands print: to a person on a terminal, or to a program in a pipe.

Texts that callers and tool servers chose are shown with everything escaped that a terminal would obey or hide.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from typing import Any, Final

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from app.core.canonical import canonical_bytes
from app.core.errors import ConfirmationNeeded

output = Console(highlight=False, soft_wrap=True)
notes = Console(stderr=True, highlight=False, soft_wrap=True)

STATE_STYLE: Final = {
    "COMPLETED": "green",
    "FAILED": "red",
    "DENIED": "red",
    "PENDING": "yellow",
    "AUTHORIZED": "cyan",
    "EXECUTING": "cyan",
}
_PIPE_WIDTH: Final = 400


def printable(text: str) -> str:
    """With escapes in place of control characters, and of those that turn or hide what is around them: what a person
    reads before deciding must be what is there."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


_DECIDERS = {
    "policy": "by the policy",
    "expiry": "by expiry: nobody decided in time",
    "withdrawal": "by its own caller",
}


def decided_by(decider: dict[str, Any]) -> str:
    """Who decided: the policy, time, its caller, or a person by name."""
    return _DECIDERS.get(decider["type"], f"by {decider['id']}")


def counted(number: int, one: str, many: str | None = None) -> str:
    """1 trace, 2 traces."""
    return f"{number:,} {one if number == 1 else many or one + 's'}"


def shown_json(value: Any, *, indent: int | None = None) -> str:
    """JSON for the eye. Escapes that JSON does not demand are added where a terminal needs them."""
    lines = json.dumps(value, ensure_ascii=False, indent=indent).split("\n")
    return "\n".join(printable(line) for line in lines)


def print_json(document: Any) -> None:
    output.print(json.dumps(document), markup=False)


def styled_state(state: str) -> str:
    return f"[{STATE_STYLE.get(state, 'bold')}]{escape(state)}[/]"


def print_table(headings: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> None:
    """Cells are plain text unless they are Text. In a pipe nothing is cut off; on a terminal its width decides."""
    table = Table(box=None, pad_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=True, min_width=min(len(heading), 12))
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    console = output if output.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)
    console.print(table)


def state_cell(state: str, waiting: str | None) -> Text:
    cell = Text(state, style=STATE_STYLE.get(state, "bold"))
    return cell.append(f" (waits for {waiting})", style="default") if waiting else cell


def output_of(effect: dict[str, Any]) -> str:
    """A tool effect's output, as it is recorded: a repeat prints the same bytes."""
    found = effect.get("output")
    if found is None:
        return "null"
    if found["encoding"] == "json":
        return canonical_bytes(found["value"]).decode()
    return json.dumps(found)


def print_output(effect: dict[str, Any]) -> None:
    text = output_of(effect)
    output.print(printable(text) if output.is_terminal else text, markup=False)


def note_own_only(hidden: str) -> None:
    """Say that a list is not all there is: silence would be taken for it."""
    notes.print(
        f"This key's role may not see {hidden}: that takes supervisor, operator, auditor or admin.", style="yellow"
    )


def is_watched() -> bool:
    """Whether a person sits at both ends, who can be asked."""
    return sys.stdin.isatty() and output.is_terminal


def confirmed(question: str, *, yes: bool) -> bool:
    """Ask the person at the terminal. Without one nothing is taken for consent but `--yes`: ConfirmationNeeded."""
    if yes:
        return True
    if not is_watched():
        raise ConfirmationNeeded(f'there is no terminal on which to ask "{question}"')
    return output.input(f"{escape(question)} [dim](y/N)[/] ").strip().lower() in ("y", "yes")
