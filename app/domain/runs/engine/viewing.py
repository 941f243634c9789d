"""A run as people and programs look at it. Looking changes nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from app.core.limits import RUN_PAGE_RECORDS_MAX
from app.domain.runs.documents import RunAnswer, RunCheckpoint, RunEnd, RunIntent, RunStart
from app.domain.runs.engine.ports import LoadedRun, RunPorts
from app.domain.runs.frontier import Frontier
from app.domain.runs.paths import ROOT, path_at, place_of
from app.domain.runs.replay import Run, RunRecord
from app.domain.runs.schedule import AT_WORK
from app.domain.runs.values import InlineValue
from app.domain.runs.waiting import waiting_for

# By this name the first operation of a flow records the names of its steps: {"steps": [...]}.
FLOW_STEPS: Final = "flow.steps"
_FIRST: Final = path_at(ROOT, 1)
_EARLIER_INTENTS_MAX: Final = 16  # of what a run waits for and began long ago
_OPENING_RECORDS: Final = 8  # start, leases, and then the first operation
_CLOSING_RECORDS: Final = 16  # the end, and what others have recorded of a run that failed since
_RECORDS_A_STEP: Final = 2  # its begin and its end
_STATUS: Final = {
    "SCHEDULED": "running",
    "RUNNING": "running",
    "WAITING": "waiting",
    "FAILED": "failed",
    "PARKED": "parked",
    "DIVERGED": "diverged",
    "COMPLETED": "completed",
    "CANCELLED": "cancelled",
}


# Which states a status can mean; of WAITING, `waiting_for_human` is what waits for a person.
STATES_OF_STATUS: Final[dict[str, tuple[str, ...]]] = {
    "running": ("SCHEDULED", "RUNNING"),
    "waiting": ("WAITING",),
    "waiting_for_human": ("WAITING",),
    "completed": ("COMPLETED",),
    "failed": ("FAILED",),
    "cancelled": ("CANCELLED",),
    "parked": ("PARKED",),
    "diverged": ("DIVERGED",),
}


@dataclass(slots=True)
class StepView:
    """One operation of the program itself. `tries`: how often it was performed."""

    path: str
    kind: str
    name: str
    status: str = "in_progress"
    tries: int = 1
    attempt: int = 0
    value: Any = None
    error: Any = None
    started_at: str | None = None
    duration_ms: int | None = None


@dataclass(slots=True)
class RunView:
    """`awaits`: what it waits for. `notice`: what a person should do, where that is known. `steps_left_out`: there
    are others than `steps`."""

    loaded: LoadedRun
    status: str
    waiting: str | None
    awaits: list[dict[str, Any]]
    end: RunEnd | None
    notice: str | None
    steps: list[StepView] = field(default_factory=list)
    steps_left_out: bool = False


async def view(ports: RunPorts, run_id: str, *, steps_max: int = RUN_PAGE_RECORDS_MAX) -> RunView:
    """`steps_max`: how many of its newest steps. The fewer, the less of the journal is read; none: only for the end."""
    loaded = await ports.runs.load(run_id)
    run, start = loaded.run, loaded.start
    has_end = run.head.state not in AT_WORK
    records: list[RunRecord] = []
    steps: list[StepView] = []
    end, are_left_out = None, run.frontier.positions > 0
    if steps_max or has_end:
        few = _CLOSING_RECORDS + _RECORDS_A_STEP * steps_max
        records = await _load_newest(ports, run, min(few, RUN_PAGE_RECORDS_MAX))
        end = _end_in(records) if has_end else None
        if few < RUN_PAGE_RECORDS_MAX and (not _has_newest(records, steps_max) or (has_end and end is None)):
            records = await _load_newest(ports, run, RUN_PAGE_RECORDS_MAX)
            end = _end_in(records) if has_end else None
    if steps_max:
        steps, are_left_out = await _newest_steps(ports, run, records, steps_max)
    waiting = waiting_for(run)
    notice = await _notice(ports, run, start)
    status = status_of(run.head.state, waiting)
    awaits = awaits_of(run, await _sources(ports, run, records))
    return RunView(loaded, status, waiting, awaits, end, notice, steps, are_left_out)


async def _load_newest(ports: RunPorts, run: Run, count: int) -> list[RunRecord]:
    """So many of the newest records, in their order."""
    run_id, last = run.run_id, run.head.sequence_number
    after = max(0, last - count)
    records = await ports.runs.load_records(run_id, after=after, limit=count)
    seen = records[-1].entry.sequence_number if records else after
    while seen < last:  # a page ends early where values are large
        more = await ports.runs.load_records(run_id, after=seen, limit=count)
        if not more:
            break
        records += more
        seen = more[-1].entry.sequence_number
    return records


def _has_newest(records: list[RunRecord], steps_max: int) -> bool:
    """Whether the newest steps of the run are those of these records: there are enough, and none began before."""
    if not records or records[0].entry.sequence_number == 1:
        return True
    begun = set[str]()
    for said in (record.artifact for record in records):
        if isinstance(said, RunIntent | RunCheckpoint) and place_of(said.path).scope == ROOT:
            if said.path not in begun and said.try_number > 1:
                return False
            begun.add(said.path)
    return len(begun) >= steps_max


def _end_in(records: list[RunRecord]) -> RunEnd | None:
    return next((one.artifact for one in reversed(records) if isinstance(one.artifact, RunEnd)), None)


async def _newest_steps(
    ports: RunPorts, run: Run, records: list[RunRecord], steps_max: int
) -> tuple[list[StepView], bool]:
    """Of these records, which are the newest of the run; and whether there were more before."""
    is_all = not records or records[0].entry.sequence_number == 1
    opening = records if is_all else await ports.runs.load_records(run.run_id, after=0, limit=_OPENING_RECORDS)
    steps, flow = steps_of(records), flow_steps_in(opening)
    if flow:
        steps = flow_steps(steps, flow, run.frontier)
    return steps[-steps_max:], not is_all or len(steps) > steps_max


async def view_of_born(ports: RunPorts, loaded: LoadedRun, *, has_worker: bool = False) -> RunView:
    """As `view`, of a run that has just been started and is not read again: nothing was performed in it. `has_worker`:
    a worker for it is known to live; else the store is asked, where that matters."""
    run = loaded.run
    state, waiting = run.head.state, waiting_for(run)
    notice = None if has_worker else await _notice(ports, run, loaded.start)
    return RunView(loaded, status_of(state, waiting), waiting, awaits=[], end=None, notice=notice)


def status_of(state: str, waiting: str | None) -> str:
    return "waiting_for_human" if waiting == "person" else _STATUS[state]


def awaits_of(run: Run, sources: dict[str, str]) -> list[dict[str, Any]]:
    """What has begun and others can end, the awaited first. `sources`: by address, the line that performs it."""
    return [
        {
            "path": path,
            "kind": begun.kind,
            "name": begun.name,
            "due_at": begun.due_at,
            "level": begun.level,
            "intent_digest": begun.intent_digest,
            "is_awaited": path in run.awaits,
            "source": sources.get(path),
        }
        for path, begun in sorted(run.frontier.begun.items(), key=lambda item: item[0] not in run.awaits)
    ]


async def _sources(ports: RunPorts, run: Run, records: list[RunRecord]) -> dict[str, str]:
    """By address, the line of the program that has begun something. Of what began before these records, a few are
    read, the awaited first."""
    known = {record.entry.sequence_number: record.artifact for record in records}
    first = records[0].entry.sequence_number if records else run.head.sequence_number + 1
    begun_first = sorted(run.frontier.begun.items(), key=lambda item: item[0] not in run.awaits)
    before = [begun.sequence_number for _, begun in begun_first if begun.sequence_number < first]
    for number in before[:_EARLIER_INTENTS_MAX]:
        for earlier in await ports.runs.load_records(run.run_id, after=number - 1, limit=1):
            known[earlier.entry.sequence_number] = earlier.artifact
    found = {path: known.get(begun.sequence_number) for path, begun in run.frontier.begun.items()}
    return {path: one.source for path, one in found.items() if isinstance(one, RunIntent) and one.source is not None}


def flow_steps_in(opening: list[RunRecord]) -> list[str]:
    """The names of a flow's steps, as its first operation recorded them; empty for every other program."""
    for said in (record.artifact for record in opening):
        if isinstance(said, RunCheckpoint) and said.path == _FIRST and (said.kind, said.name) == ("step", FLOW_STEPS):
            value = said.value.value if isinstance(said.value, InlineValue) else None
            names = value.get("steps") if isinstance(value, dict) else None
            return [str(name) for name in names] if isinstance(names, list) else []
    return []


def flow_steps(seen: list[StepView], flow: list[str], frontier: Frontier) -> list[StepView]:
    """Of what was seen exactly the flow's steps, then those to come. What ended before the records that were looked at
    is left out, as it is of other programs."""
    steps = {step.path: step for step in seen if step.path != _FIRST}
    for number, name in enumerate(flow, 2):
        path = path_at(ROOT, number)
        if number > frontier.positions and path not in steps:
            has_begun = path in frontier.begun
            status, tries = ("in_progress", frontier.try_of(path)) if has_begun else ("pending", 0)
            steps[path] = StepView(path, "step", name, status=status, tries=tries)
    return list(steps.values())


def steps_of(records: list[RunRecord]) -> list[StepView]:
    """The operations of the program's own scope, in their order."""
    steps: dict[str, StepView] = {}
    for record in records:
        said = record.artifact
        if isinstance(said, RunIntent | RunCheckpoint | RunAnswer) and place_of(said.path).scope == ROOT:
            _note(steps, said)
    return list(steps.values())


def _note(steps: dict[str, StepView], said: RunIntent | RunCheckpoint | RunAnswer) -> None:
    if isinstance(said, RunIntent):
        step = steps.setdefault(said.path, StepView(said.path, said.kind, said.name))
        step.status, step.tries, step.attempt = "in_progress", said.try_number, said.attempt
        return
    if isinstance(said, RunCheckpoint):
        step = steps.setdefault(said.path, StepView(said.path, said.kind, said.name))
        step.tries, step.attempt = said.try_number, said.attempt
        step.started_at, step.duration_ms = said.started_at, said.duration_ms
    elif said.path not in steps:
        return
    else:
        step = steps[said.path]
    step.status = {"OK": "completed", "RETRY": "retrying", "INTERRUPTED": "interrupted"}.get(said.outcome, "failed")
    step.value = None if said.value is None else said.value.to_json()
    step.error = None if said.error is None else said.error.to_json()


async def _notice(ports: RunPorts, run: Run, start: RunStart) -> str | None:
    state, has_worker = run.head.state, True
    if state == "SCHEDULED":
        program = f"{run.version}@{run.program_digest}"
        has_worker = await ports.runs.has_worker(
            start.principal.tenant, start.procedure, program, within_ms=ports.lease_ms
        )
    return notice_of(state, start.procedure, run.version, has_worker=has_worker)


def notice_of(state: str, procedure: str, version: str, *, has_worker: bool) -> str | None:
    """What a person should do about a run in this state, where that is known."""
    if state == "SCHEDULED" and not has_worker:
        return f"no worker for {procedure} {version}: start one, or one that accepts this version"
    if state == "PARKED":
        return "attempts end without a checkpoint: look at the worker's log, then retry or cancel it"
    if state == "DIVERGED":
        return "the program is not the one that wrote the journal: deploy the old one, accept this one, or fork"
    return None
