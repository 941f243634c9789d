"""What `tga doctor` finds about runs: which need a person, and whether the scheduler sees them as they stand."""

from __future__ import annotations

from collections.abc import AsyncIterator

from app.cli.findings import Finding
from app.cli.showing import counted
from app.postgres.run_rows import load_standing
from app.postgres.sessions import Sessions


async def run_findings(sessions: Sessions, *, lease_ms: int) -> AsyncIterator[Finding]:
    found = await load_standing(sessions, lease_ms=lease_ms)
    if found.without_worker:
        yield Finding(
            "runs without a worker",
            True,
            f"{counted(found.without_worker, 'run')} of a program that no living worker has",
            "Start a worker that has it: `tga runs --status running` lists them, `tga run show ID` names the program.",
            warning=True,
        )
    resting = {"failed": found.failed, "parked": found.parked, "diverged": found.diverged}
    told = ", ".join(f"{many} {status}" for status, many in resting.items() if many)
    needed = found.parked + found.diverged
    remedy = "See `tga runs --status parked` and `--status diverged`, then `tga run show ID`." if needed else None
    yield Finding("runs", True, f"{told or 'none'} for an operator", remedy, warning=needed > 0)
    unseen = {
        "open without a row in tga.runs": found.without_row,
        "in another state there": found.elsewhere,
        "rows without a stream": found.without_stream,
    }
    wrong = ", ".join(f"{many} {what}" for what, many in unseen.items() if many)
    if wrong:
        yield Finding(
            "scheduling of runs", False, wrong, "Run `tga db rebuild`: it folds them anew from their streams."
        )
