"""What bench.comparison has found: tables for the terminal, the lines in which a peer is better, JSON and chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rich.table import Table

from bench.comparison_chart import draw
from bench.peer_processes import PEERS

OURS, IN_PROCESS, PGBENCH = "tga over HTTP", "tga in process", "pgbench, bare inserts"

RUN, RUN_IN_PROCESS = "tga, a run over HTTP", "tga, a run in process"
RUN_OF_ONE_WORKER: Final = "tga, a run, one worker"  # over HTTP too, with one worker for all

WHATS: Final = ("call", "repeat", "run")

COUNTED_AT_ONCE: Final = 8


@dataclass(frozen=True, slots=True)
class Measured:
    """One stretch. CPU is of all who answer: gateway or peer, its tool, PostgreSQL; of pgbench's rows, the server's."""

    name: str
    what: str
    at_once: int
    per_second: float
    p50_ms: float
    p99_ms: float
    cpu_us: float


@dataclass(frozen=True, slots=True)
class Counted:
    """What a call leaves, at 8 at once: transactions that wrote and WAL of PostgreSQL, bytes of the database or of a
    peer's files."""

    name: str
    commits: float | None
    database_bytes: float
    wal_bytes: float | None


def where_peers_are_better(medians: list[Measured], counted: list[Counted]) -> list[str]:
    """In words: every line in which a peer has the better figure."""
    peers = {peer.name for peer in PEERS}
    found = {(one.what, one.name, one.at_once): one for one in medians}
    lines = []
    for one in medians:
        if one.name not in peers:
            continue
        ours = {"call": [OURS], "repeat": [OURS]}[one.what]
        if one.what == "call":
            ours = [OURS, RUN, RUN_OF_ONE_WORKER, RUN_IN_PROCESS]
        for name in ours:
            what = "run" if name in (RUN, RUN_OF_ONE_WORKER, RUN_IN_PROCESS) else one.what
            mine = found.get((what, name, one.at_once))
            if mine is None:
                continue
            better = [
                f"{words} {theirs:,.1f} against {own:,.1f}"
                for words, theirs, own, is_better in (
                    ("a second", one.per_second, mine.per_second, one.per_second > mine.per_second),
                    ("p50 ms", one.p50_ms, mine.p50_ms, one.p50_ms < mine.p50_ms),
                    ("p99 ms", one.p99_ms, mine.p99_ms, one.p99_ms < mine.p99_ms),
                    ("CPU us", one.cpu_us, mine.cpu_us, one.cpu_us < mine.cpu_us),
                )
                if is_better
            ]
            if better:
                lines.append(f"{one.name} is better than {name} at {one.at_once} ({what}): {', '.join(better)}")
    own = next((one for one in counted if one.name == OURS), None)
    for other in counted:
        if own is None or other.name not in peers:
            continue
        if other.commits is not None and own.commits is not None and other.commits < own.commits:
            lines.append(f"{other.name} commits less often: {other.commits:.1f} against {own.commits:.1f}")
        if other.database_bytes < own.database_bytes:
            lines.append(
                f"{other.name} stores less: {other.database_bytes:,.0f} bytes against {own.database_bytes:,.0f}"
            )
        if other.wal_bytes is not None and own.wal_bytes is not None and other.wal_bytes < own.wal_bytes:
            lines.append(f"{other.name} writes less WAL: {other.wal_bytes:,.0f} bytes against {own.wal_bytes:,.0f}")
    return lines


def tables(medians: list[Measured], counted: list[Counted]) -> Iterator[Table]:
    titles = {"call": "Calls", "repeat": "Repeats of finished calls", "run": "Runs of one step (for peers: calls)"}
    for what in WHATS:
        table = Table(title=f"{titles[what]}: medians of the rounds")
        for heading in ("", "at once", "a second", "p50 ms", "p99 ms", "CPU us"):
            table.add_column(heading, justify="right" if heading else "left")
        for one in (one for one in medians if one.what == what):
            figures = f"{one.per_second:,.0f}", f"{one.p50_ms:.2f}", f"{one.p99_ms:.2f}", f"{one.cpu_us:,.0f}"
            table.add_row(one.name, str(one.at_once), *figures)
        yield table
    table = Table(title=f"What a call leaves, at {COUNTED_AT_ONCE} at once")
    for heading in ("", "commits that write", "database or files, bytes", "WAL, bytes"):
        table.add_column(heading, justify="right" if heading else "left")
    for left in counted:
        commits = "-" if left.commits is None else f"{left.commits:.2f}"
        wal = "-" if left.wal_bytes is None else f"{left.wal_bytes:,.0f}"
        table.add_row(left.name, commits, f"{left.database_bytes:,.0f}", wal)
    yield table


def write(out: Path, report: dict[str, Any]) -> str:
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(report, indent=2) + "\n")
    (out / "comparison.svg").write_text(draw(report))
    return f"Written: {out / 'comparison.json'}, {out / 'comparison.svg'}"
