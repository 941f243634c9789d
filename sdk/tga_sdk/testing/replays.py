"""Replays of recorded journals: golden ones, and the one that a run has just written.

A replay executes nothing that is recorded. So it finds a program that does something else than it did when the journal
was written: another operation, another input, another end. It cannot find what happens to be the same this time, nor
what a body does: bodies are not run.
"""

from __future__ import annotations

import asyncio
import base64
import importlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from tga_sdk.procedures import procedure_of
from tga_sdk.testing.crashes import (
    RUN_ID,
    CrashingWorker,
    Faults,
    Outcome,
    Setting,
    ToolsSaid,
    differences_of,
    end,
    outcome_of,
    until_over,
)
from tga_sdk.testing.gateway import MemoryGateway
from tga_sdk.testing.people import ScriptedPeople
from tga_sdk.testing.run import MemoryRun

FORM: Final = "tga/golden/1"
_SEEDS: Final = ("1", "4242")


class NotTheSame(AssertionError):
    """A replay, or a second run, was not as the first."""


def record_golden(procedure: Any, input: Any, path: str | Path, **options: Any) -> Outcome:  # noqa: A002
    """Run it once, and keep the journal in a file: `replay_golden` compares later versions of the program with it.

    `options`: `tools`, `people` and `also`, as `crash_everywhere` takes them.
    """
    return asyncio.run(record_golden_async(procedure, input, path, **options))


async def record_golden_async(procedure: Any, input: Any, path: str | Path, **options: Any) -> Outcome:  # noqa: A002
    """As `record_golden`, from code that is async."""
    golden, outcome = await _recorded(procedure, input, **options)
    written = json.dumps(golden, indent=1, ensure_ascii=False) + "\n"
    await asyncio.to_thread(Path(path).write_text, written)
    return outcome


def replay_golden(procedure: Any, path: str | Path, *, also: Sequence[Any] = ()) -> Outcome:
    """Replay a golden journal with the program as it is now; NotTheSame when it does something else.

    What is found: the program performs another operation at some address, with another input, or ends otherwise. Bodies
    are not run, tools are not called.
    """
    return asyncio.run(replay_golden_async(procedure, path, also=also))


async def replay_golden_async(procedure: Any, path: str | Path, *, also: Sequence[Any] = ()) -> Outcome:
    """As `replay_golden`, from code that is async."""
    golden = json.loads(await asyncio.to_thread(Path(path).read_text))
    if golden.get("form") != FORM:
        raise ValueError(f"{path} is no golden journal: expected form {FORM}, found {golden.get('form')!r}")
    return await _replayed(procedure, golden, also=also, what=f"the golden journal {path}")


def run_twice(procedure: Any, input: Any = None, **options: Any) -> Outcome:  # noqa: A002
    """As `run_twice_async`, from code that is not async."""
    return asyncio.run(run_twice_async(procedure, input, **options))


async def run_twice_async(
    procedure: Any,
    input: Any = None,  # noqa: A002
    *,
    tools: ToolsSaid | None = None,
    people: ScriptedPeople | Callable[[], ScriptedPeople] | None = None,
    also: Sequence[Any] = (),
    hash_seeds: Sequence[str] = _SEEDS,
) -> Outcome:
    """Run it, replay its journal, and replay it again in other processes with other hash seeds; NotTheSame if one of
    these does something else.

    Finds: operations, names, arguments and results that come from the clock, from chance, from the order of a set, from
    module state that a first run has changed. The replays come later than the run, with another random state.

    Does not find: what is the same in all of them by chance; what depends on the machine or its files; and, for a
    procedure that another process cannot import (made inside a function, or in `__main__`), the order of sets.
    """
    golden, outcome = await _recorded(procedure, input, tools=tools, people=people, also=also)
    await _replayed(procedure, golden, also=also, what="its own journal")
    place = place_of(procedure)
    if place is not None and all(place_of(one) is not None for one in also):
        for seed in hash_seeds:
            await asyncio.to_thread(_replay_elsewhere, [procedure, *also], golden, seed)
    return outcome


async def _recorded(
    procedure: Any,
    given: Any,
    *,
    tools: ToolsSaid | None = None,
    people: ScriptedPeople | Callable[[], ScriptedPeople] | None = None,
    also: Sequence[Any] = (),
) -> tuple[dict[str, Any], Outcome]:
    """The journal of a run as a document, and what came of the run."""
    setting = Setting(procedure, given, tools, people, list(also), None, None)
    outcome = await setting.run(None)
    if outcome.state not in ("COMPLETED", "FAILED"):
        raise NotTheSame(f"the run ended {outcome.state}: {outcome.error}")
    return golden_of(setting.last, outcome), outcome


def golden_of(gateway: MemoryGateway, outcome: Outcome) -> dict[str, Any]:
    """A run of a gateway in memory as a golden journal."""
    run = gateway.engine.load(RUN_ID)
    calls = {call.trace_id: call.effect for call in gateway.tools.by_trace.values() if call.run_id == RUN_ID}
    children = [
        one.said["value"]["run_id"] for one in run.records if (one.said.get("value") or {}).get("tier") == "run"
    ]
    return {
        "form": FORM,
        "procedure": run.start["procedure"],
        "salt": run.salt.hex(),
        "draw_salt": run.draw_salt.hex(),
        "records": [
            {"artifact_type": one.artifact_type, "recorded_at": one.recorded_at, **one.said} for one in run.records
        ],
        "effects": calls,
        "children": {name: gateway.engine.load(name).end for name in children},
        "blobs": {sha256: base64.b64encode(raw).decode() for sha256, raw in gateway.engine.blobs.items()},
        "state": outcome.document,
    }


async def _replayed(procedure: Any, golden: Mapping[str, Any], *, also: Sequence[Any], what: str) -> Outcome:
    gateway = MemoryGateway(skip_waiting=True)
    run = _restored(gateway, procedure, golden)
    recorded_end = run.end or {}
    expected = Outcome(
        run.state,
        recorded_end.get("output"),
        recorded_end.get("error"),
        None,
        golden["state"],
        [],
        [],
    )
    count = _reopen(gateway, run, procedure)
    faults = Faults(gateway, None)
    worker = CrashingWorker(gateway, [procedure, *also], faults)
    others = asyncio.all_tasks()
    working = asyncio.create_task(worker.run(signals=False))
    try:
        async with asyncio.timeout(30):
            await until_over(gateway, faults, working)
    finally:
        await end(working, others | gateway.calls)
        gateway.close()
    found = outcome_of(gateway, None, faults.gone_on)
    if found.output is not None and isinstance(found.output, bytes):
        found.output = recorded_end.get("output")  # the same reference, or the comparison below fails
    told = differences_of(expected, found)
    for record in found.journal[count:]:
        if record["artifact_type"] in ("run_checkpoint", "run_intent") and not _is_end(record):
            told.append(f"it performs {record['kind']} {record['name']!r} at {record['path']}, which is not recorded")
    if told:
        lines = "\n".join(f"  - {one}" for one in told)
        raise NotTheSame(f"{procedure_of(procedure).name} does not do what {what} says:\n{lines}")
    return found


def _restored(gateway: MemoryGateway, procedure: Any, golden: Mapping[str, Any]) -> MemoryRun:
    """The recorded run in a gateway of its own, up to its end."""
    engine = gateway.engine
    for sha256, raw in golden["blobs"].items():
        engine.blobs[sha256] = base64.b64decode(raw)
    for trace_id, effect in golden["effects"].items():
        gateway.tools.restore(trace_id, effect)
    for name, ended in golden["children"].items():
        engine.runs[name] = _ended_child(name, golden["records"][0], ended)
    run = MemoryRun(RUN_ID)
    run.salt, run.draw_salt = bytes.fromhex(golden["salt"]), bytes.fromhex(golden["draw_salt"])
    for record in golden["records"]:
        said = {name: value for name, value in record.items() if name not in ("artifact_type", "recorded_at")}
        run.add(record["artifact_type"], said, at=record["recorded_at"])
    engine.runs[RUN_ID] = run
    return run


def _ended_child(name: str, start: Mapping[str, Any], ended: dict[str, Any]) -> MemoryRun:
    """Of a child only its end is known; its parent reads no more than its answer."""
    child = MemoryRun(name)
    said = {key: value for key, value in start.items() if key not in ("artifact_type", "recorded_at")}
    child.add("run_start", {**said, "run_id": name}, at=start["recorded_at"])
    child.state = ended["outcome"]
    child.records.append(child.records[0]._replace(artifact_type="run_end", said=ended))
    return child


def _reopen(gateway: MemoryGateway, run: MemoryRun, procedure: Any) -> int:
    """Take its end back, as if the worker had died before it was recorded; how many records are left."""
    records = [one for one in run.records if one.artifact_type != "run_end"]
    if _is_end(records[-1].said):  # it was recorded together with the run's end
        records.pop()
    again = MemoryRun(RUN_ID)
    again.salt, again.draw_salt = run.salt, run.draw_salt
    program = procedure_of(procedure)
    for record in records:
        again.add(record.artifact_type, record.said, at=record.recorded_at)
    again.version, again.program_digest = program.version, program.digest
    gateway.engine.runs[RUN_ID] = again
    if again.state == "RUNNING":
        gateway.engine.lose(again, "the journal is replayed")
    return again.sequence_number


def _is_end(said: Mapping[str, Any]) -> bool:
    """Whether this is the checkpoint of what a program changed after its last operation."""
    return (said.get("kind"), said.get("name")) == ("checkpoint", "end")


def place_of(procedure: Any) -> tuple[str, str] | None:
    """Module and name under which another process can import it; None when it cannot."""
    fn = procedure_of(procedure).fn
    module, name = getattr(fn, "__module__", ""), getattr(fn, "__qualname__", "")
    if module in ("", "__main__") or "<locals>" in name:
        return None
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        return (module, name) if procedure_of(found) is procedure_of(procedure) else None
    except Exception:
        return None


def _replay_elsewhere(procedures: Sequence[Any], golden: Mapping[str, Any], seed: str) -> None:
    places = [place_of(one) for one in procedures]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "journal.json"
        file.write_text(json.dumps({"golden": golden, "places": places, "path": sys.path}))
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-m", "tga_sdk.testing.replays", str(file)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 3:
        raise NotTheSame(f"with PYTHONHASHSEED={seed}, in another process: {done.stdout.strip()}")
    if done.returncode != 0:
        raise AssertionError(f"the replay in another process broke off:\n{done.stderr}")


def _main(file: str) -> int:
    said = json.loads(Path(file).read_text())
    sys.path[:] = said["path"]
    procedures = []
    for module, name in said["places"]:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
        procedures.append(found)
    try:
        asyncio.run(_replayed(procedures[0], said["golden"], also=procedures[1:], what="its own journal"))
    except NotTheSame as error:
        sys.stdout.write(str(error))
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
