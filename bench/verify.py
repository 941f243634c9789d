"""How fast a bundle is verified offline, and in how much memory.

    python -m bench.verify [--quick] [--traces 2500] [--times 4] [--rounds 3]

Processor time, of one core. The measures are sha256 over the same bytes (entries and artifacts), as the hardware does
it, which no verifier can be quicker than; and the same walk step by step, which judges whatever is not usual. All of
them take turns; the best of the rounds counts. Memory is the peak of a process of its own, at one size and at a
multiple of it: flat means equal.

Then the larger bundle with `--jobs`, by the clock, from the start of the command to its verdict; and entries of runs,
which have no quick way.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

from app.cli.bundle_files import DiskMemory
from app.cli.verify_workers import usable_cores
from app.core.merkle import leaf_hash
from app.core.note import VerifierKey
from app.domain.ledger.checks import Report
from app.domain.log.bundle import EntryLine
from app.domain.log.streams import BundleWalk
from app.domain.runs.verification import stream_checks
from bench.measure import arguments_of
from tests.export.by_hand import lines_by_hand, write_by_hand
from tests.runs.samples import SampleRun

TRACES: Final = 2_500
TRACES_QUICK: Final = 100
TOOL: Final = Path(__file__).parents[1] / "tools" / "verify.py"


VERIFIERS: Final = ("tga", "step by step", "tools/verify.py")


def hashing_seconds(traces: int) -> float:
    """sha256 over every entry and every artifact of these traces."""
    pieces = [piece for line, entry in lines_by_hand(min(traces, 500)) for piece in (entry, line.artifact or b"")]
    began = time.process_time()
    for piece in pieces:
        hashlib.sha256(piece).digest()
    return (time.process_time() - began) * traces / min(traces, 500)


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds of processor time and peak memory in MB of a verification in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench.verify", "--measure", *command], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr or ended.stdout)
    seconds, peak_kb = json.loads(ended.stdout.splitlines()[-1])
    return seconds, peak_kb / 1024


def measure(which: str, folder: str, key: str) -> None:
    if which == "tools/verify.py":
        tool = runpy.run_path(str(TOOL))
        began = time.process_time()
        bundle = tool["Bundle"](Path(folder), [tool["read_key"](key)], [])
        bundle.verify()
        is_sound = not bundle.findings
    else:
        from app.cli.verify_bundle import verify_bundle_command
        from tests.export.test_usual_rows import step_by_step

        began = time.process_time()
        with step_by_step() if which == "step by step" else nullcontext():
            is_sound = asyncio.run(verify_bundle_command(Path(folder), key, as_json=True, jobs=1))
    print(json.dumps([time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
    sys.exit(0 if is_sound else 1)


def _add_rows(table: Table, folder: Path, key: str, traces: int, *, rounds: int) -> None:
    seconds: dict[str, list[float]] = {which: [] for which in VERIFIERS}
    peaks, hashing = {}, []
    for _ in range(rounds):
        hashing.append(hashing_seconds(traces))
        for which in VERIFIERS:
            taken, peaks[which] = measured([which, str(folder), key])
            seconds[which].append(taken)
    entries, strict = traces * 4, min(seconds["step by step"])
    for which in VERIFIERS:
        best = min(seconds[which])
        rate, each = f"{entries / best:,.0f}", f"{best / entries * 1e6:.1f}"
        ratios = f"{min(hashing) / best:.4f}", f"{strict / best:.2f}"
        table.add_row(which, f"{entries:,}", rate, each, *ratios, f"{peaks[which]:.0f}")


def measured_jobs(folder: Path, key: str, jobs: int) -> tuple[float, float, float]:
    """Seconds by the clock, seconds of processor time of all processes, and the largest peak among them in MB."""
    command = [sys.executable, "-m", "app.main", "verify", "--file", str(folder), "--key", key, "--jobs", str(jobs)]
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    taken, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return taken, used, after.ru_maxrss / 1024


def _jobs_table(folder: Path, key: str, entries: int, *, rounds: int) -> Table:
    table = Table("jobs", "entries/s", "to one", "processor s", box=None)
    counts = sorted({1, 2, usable_cores()})
    found = {jobs: [measured_jobs(folder, key, jobs) for _ in range(rounds)] for jobs in counts}
    alone = min(found[1])[0]
    for jobs in counts:
        taken, used, _ = min(found[jobs])
        table.add_row(str(jobs), f"{entries / taken:,.0f}", f"{alone / taken:.2f}", f"{used:.2f}")
    return table


def run_entry_us(runs: int, checkpoints: int) -> float:
    """Microseconds of processor time for an entry of a run, in a bundle's walk."""
    lines: list[bytes] = []
    for number in range(runs):
        run = SampleRun(f"bench-{number}")
        run.add("attempt", 1)
        for place in range(1, checkpoints + 1):
            run.add("checkpoint", str(place), state_change=[{"op": "set", "at": "/n", "to": place}])
        run.add("end", positions=checkpoints)
        for place, (entry, artifact) in enumerate(run.records, 1):
            assert artifact is not None
            line = EntryLine(len(lines), entry.stream, place, entry.body_bytes(), artifact.to_bytes())
            lines.append(line.to_line())
    kinds = stream_checks()
    with DiskMemory(kinds) as memory:
        walk = BundleWalk(kinds, Report(), memory, complete=True)
        began = time.process_time()
        for raw in lines:
            line = EntryLine.from_line(raw)
            leaf_hash(line.entry)
            for error in walk.judge(line):
                raise error
        return (time.process_time() - began) / len(lines) * 1e6


def main() -> None:
    parser = arguments_of("verify", __doc__)
    parser.add_argument("--traces", type=int, help=f"of four entries each (default {TRACES:,}; 250,000 make a million)")
    parser.add_argument("--times", type=int, default=4, help="the larger size, as a multiple")
    parser.add_argument("--rounds", type=int, help="in which all verifiers take turns (default 3)")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey("example.org/bench", key.public_key().public_bytes_raw())
    table = Table(
        "verifier", "entries", "entries/s a core", "us an entry", "of sha256", "of step by step", "peak MB", box=None
    )
    console = Console()
    with tempfile.TemporaryDirectory() as made:
        fewer = given.traces or (TRACES_QUICK if given.quick else TRACES)
        for traces in (fewer, fewer * given.times):
            folder = Path(made) / str(traces)
            write_by_hand(folder, key, verifier, traces=traces, heads=20)
            _add_rows(table, folder, verifier.to_text(), traces, rounds=given.rounds or (1 if given.quick else 3))
        console.print(table)
        jobs = _jobs_table(folder, verifier.to_text(), traces * 4, rounds=given.rounds or (1 if given.quick else 3))
        console.print(jobs)
    us = run_entry_us(5 if given.quick else 50, 20)
    console.print(f"An entry of a run takes {us:.0f} us.")


if __name__ == "__main__":
    main()
