"""How `tga run show` and `tga run watch` draw a journal: one line for each operation, nested as the program nests them.

    00:00.052  1      ✓ step plan                          12 ms  {"steps": 3}
    00:00.060  2      ✗ step charge                       1.2 s   ToolError: the card was refused
    00:00.061    2.1  ✓ tool bank/lookup                   80 ms  {"id": 4}

The time is counted from the run's start, and for what a fork has of its source from the source's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from rich.console import Console
from rich.text import Text

from app.cli.run_journal import Item, Journal, Operation, Try, apart_ms
from app.cli.showing import output, printable, shown_json
from app.core.canonical import canonical_bytes

STATUS_STYLE: Final = {
    "running": "cyan",
    "waiting": "yellow",
    "waiting_for_human": "yellow",
    "completed": "green",
    "failed": "red",
    "cancelled": "dim",
    "parked": "red",
    "diverged": "red",
}
_MARKS: Final = {
    None: ("…", "yellow"),
    "OK": ("✓", "green"),
    "ERROR": ("✗", "red"),
    "TIMEOUT": ("✗", "red"),
    "INTERRUPTED": ("!", "red"),
    "RETRY": ("↻", "yellow"),
}
_CLOCK_WIDTH: Final = 9
_WHAT_WIDTH: Final = 36
_TOOK_WIDTH: Final = 9
_LEFT: Final = " " * (_CLOCK_WIDTH + 2)


def clock(ms: int) -> str:
    """01:02.345 after the start; from an hour on 01:02:03, from a day on 2d 01:02."""
    minutes, rest = divmod(max(ms, 0), 60_000)
    if minutes < 60:
        return f"{minutes:02}:{rest // 1000:02}.{rest % 1000:03}"
    hours, minutes = divmod(minutes, 60)
    if hours < 24:
        return f"{hours:02}:{minutes:02}:{rest // 1000:02}"
    return f"{hours // 24}d {hours % 24:02}:{minutes:02}"


def duration(ms: int) -> str:
    """12 ms, 1.2 s, 3 min 5 s, 2 h 4 min, 3 d 2 h."""
    if ms < 1_000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    seconds = ms // 1000
    for size, name, lesser_size, lesser in ((86_400, "d", 3_600, "h"), (3_600, "h", 60, "min"), (60, "min", 1, "s")):
        if seconds >= size:
            rest = seconds % size // lesser_size
            return f"{seconds // size} {name}" + (f" {rest} {lesser}" if rest else "")
    return f"{seconds} s"


def shown_value(value: dict[str, Any] | None, joined: Any = None) -> str:
    """A value of the journal, wherever it is kept."""
    match None if value is None else value["tier"], value:
        case (("inline" | "event"), dict(found)):
            return canonical_or_json(found["value"])
        case "artifact", dict(found):
            reference = found["ref"]
            return f"{reference['size_bytes']:,} bytes of {reference['media_type']}, blob {reference['sha256'][:16]}…"
        case "secret", _:
            return "(sealed)"
        case "transient", _:
            return "(not recorded: it runs again in each attempt)"
        case "effect", dict(found):
            return f"{_joined(joined)}  trace {found['trace_id']}"
        case "run", dict(found):
            return f"{_joined(joined)}  run {found['run_id']}"
        case _:
            return ""


def canonical_or_json(value: Any) -> str:
    """On one line, with everything escaped that a terminal would obey."""
    return printable(canonical_bytes(value).decode()) if not isinstance(value, float) else shown_json(value)


def _joined(joined: Any) -> str:
    """What a tool or a child has returned: the output of an effect, or a value."""
    if joined is None:
        return "(nothing)"
    if joined.get("encoding") == "json":
        return canonical_or_json(joined["value"])
    return shown_value(joined) if "tier" in joined else shown_json(joined)


class Timeline:
    """Prints lines as they come. On a terminal what does not fit into its width is cut; in a pipe nothing is."""

    def __init__(self, started_at: str, console: Console = output) -> None:
        self._console = console
        self._start = started_at  # since when the time is counted

    def draw(self, journal: Journal) -> None:
        """All of it: operations as the program performs them, each try a line of its own, and between them what
        happened to the run as a whole."""
        events = list(journal.events)
        first = journal.first_entries()
        for operation in journal.in_order():
            for one in operation.tries:
                is_first = one is operation.tries[0]
                began = first[operation.path] if is_first else one.sequence_number
                while events and events[0]["sequence_number"] < began:
                    self.event(events.pop(0))
                self._line(operation, one)
        for event in events:
            self.event(event)

    def event(self, item: Item) -> None:
        """What concerns the run as a whole: its start, its attempts, signals, its end."""
        if item["artifact_type"] == "run_start":
            self._start = item["recorded_at"]
        told, style = event_in_words(item)
        if told:
            self._print(self._clock(item["recorded_at"]), Text(f"── {printable(told)}", style=style))

    def record(self, item: Item, journal: Journal) -> None:
        """What one more entry says, of a journal that already has it."""
        operation = journal.operations.get(item.get("path", ""))
        if operation is None or item["artifact_type"] == "run_escalation":
            self.event(item)
        else:
            self._line(operation, operation.last, at=item["recorded_at"])

    def _line(self, operation: Operation, one: Try, *, at: str | None = None) -> None:
        is_last = one is operation.last
        mark, style = _MARKS.get(one.outcome, ("?", "red"))
        indent = "  " * operation.depth
        line = Text().append(f"{indent}{operation.path:<5} ", style="dim" if operation.depth else "")
        line.append(f"{mark} ", style=style)
        line.append(f"{operation.kind} ", style="dim")
        line.append(printable(operation.name), style="bold" if is_last else "")
        if one.number > 1 or not is_last:
            line.append(f"  try {one.number}", style="yellow")
        line.append(" " * max(1, _WHAT_WIDTH - line.cell_len))
        took = "" if one.took_ms is None else duration(one.took_ms)
        line.append(f"{took:>{_TOOK_WIDTH}}  ", style="dim")
        for text, text_style in _result(operation, one):
            line.append(text, style=text_style)
        self._print(self._clock(at or one.began_at), line)
        if one.outcome not in (None, "OK") and one.source is not None and is_last:
            self._print("", Text(f"{indent}      at {printable(one.source)}", style="dim"))
        for log in one.logs:
            self._print("", Text(f"{indent}      {log['level']}: {printable(log['text'])}", style="dim"))

    def _clock(self, at: str) -> str:
        return clock(apart_ms(self._start, at))

    def _print(self, when: str, line: Text) -> None:
        whole = Text().append(f"{when:>{_CLOCK_WIDTH}}  ", style="dim").append_text(line)
        if self._console.is_terminal:
            whole.truncate(self._console.width, overflow="ellipsis")
        self._console.print(whole, no_wrap=True)


def _result(operation: Operation, one: Try) -> Iterator[tuple[str, str]]:
    if one.outcome is None:
        yield printable(waits_for(operation, one)), "yellow"
    elif one.outcome == "OK":
        yield shown_value(one.value, one.joined), ""
        if one.resume == "recompute":
            yield "  (recomputed)", "dim"
    elif one.error is not None:
        yield printable(f"{one.error['type']}: {one.error['message']}"), "red"
        if one.value is not None and one.value["tier"] == "effect":
            yield f"  trace {one.value['trace_id']}", "dim"
    if one.answered_by is not None and one.answered_by["type"] in ("person", "operator", "timer"):
        by = one.answered_by
        signed = f", signed with {one.signed_with}" if one.signed_with else ""
        yield printable(f"  by {by['id']}{signed}" if by["type"] != "timer" else f"  by time: {by['id']}"), "dim"


def waits_for(operation: Operation, one: Try) -> str:
    """What an operation that has begun waits for."""
    request = one.request or {}
    match operation.kind:
        case "ask":
            until = f", until {request['expires_at']}" if request.get("expires_at") else ""
            level = f", escalated {times(one.level)}" if one.level else ""
            return f"asks a person: {request.get('message')}{until}{level}"
        case "sleep":
            return f"sleeps until {request.get('wakes_at')}"
        case "signal":
            until = f" until {request['expires_at']}" if request.get("expires_at") else ""
            return f"waits for the signal {operation.name}{until}"
        case "child":
            return f"waits for run {request.get('child_run_id')} of {request.get('procedure')} {request.get('version')}"
        case "tool":
            return f"waits for trace {request.get('trace_id')}"
        case _:
            return "has begun"


def times(level: int) -> str:
    return "once" if level == 1 else f"{level} times"


def event_in_words(item: Item) -> tuple[str, str]:
    """What an entry says of the run as a whole, and in which style; nothing for what is told elsewhere."""
    match item["artifact_type"]:
        case "run_start":
            return _start_in_words(item), ""
        case "run_attempt":
            return _attempt_in_words(item)
        case "run_escalation":
            told = f": {', '.join(item['announced_to'])} told" if item["announced_to"] else ": no webhook to tell"
            return f"nobody has answered {item['path']}, level {item['level']}{told}", "yellow"
        case "run_signal":
            return f"signal {item['name']} from {item['sent_by']}: {shown_value(item['value'])}", ""
        case "run_suspension":
            together = " and ".join(item["awaits"]) if item["wake"] == "ALL" else " or ".join(item["awaits"])
            return f"the worker leaves: it waits for {together}", "dim"
        case "run_resumption":
            again = f", opens {' '.join(item['reopens'])} again" if item["reopens"] else ""
            accepts = f", accepts version {item['accepts']['version']}" if item["accepts"] else ""
            return f"resumed by {item['resumed_by']}: {item['rationale']}{again}{accepts}", "yellow"
        case "run_end":
            style = STATUS_STYLE[item["outcome"].lower()]
            if item["outcome"] == "COMPLETED":
                return f"COMPLETED: {shown_value(item['output'])}", style
            by = item["ended_by"]
            ender = f" by {by['id']}" if by["type"] == "person" else f" by its {by['type']}"
            return f"{item['outcome']}{ender}: {item['error']['type']}: {item['error']['message']}", style
        case _:
            return "(payload missing)", "red"


def _start_in_words(item: Item) -> str:
    by = item["principal"]["principal_id"]
    given = shown_value(item["input"])
    trigger = item["trigger"]
    match trigger["type"]:
        case "fork":
            origin = item["forked_from"]
            return f"forked by {by} from run {origin['run_id']} after entry {origin['sequence_number']}"
        case "child":
            return f"started for {by} by run {item['parent']['run_id']} at {item['parent']['path']} with {given}"
        case "schedule" | "event":
            return f"started for {by} by {trigger['type']} {trigger['id']} with {given}"
        case _:
            return f"started by {by} with {given}"


def _attempt_in_words(item: Item) -> tuple[str, str]:
    attempt, worker = f"attempt {item['attempt']}", item["worker"]["name"]
    because = f": {item['reason']}" if item.get("reason") else ""
    if item.get("error"):
        because += f": {item['error']['type']}: {item['error']['message']}"
    again = f", again from {item['not_before']} on" if item.get("not_before") else ""
    match item["change"]:
        case "LEASED":
            return f"{attempt}, on worker {worker}", "bold"
        case "RELEASED":
            return f"{attempt} given back by {worker}{because}{again}", "dim"
        case "LOST":
            return f"{attempt} lost{because}{again}", "red"
        case "FAILED":
            return f"{attempt} failed{because}{again}", "red"
        case _:
            return f"worker {worker} came back after its {attempt} was over, and was refused{because}", "red"
