"""For whom a run rests, in the words of `heads.waiting`: lists and people look for runs by it.

| state | waiting |
|---|---|
| SCHEDULED | worker |
| RUNNING | nothing: its worker acts |
| WAITING | person, signal, child, tool or time: the first of these that it awaits |
| FAILED, PARKED, DIVERGED | operator |
| COMPLETED, CANCELLED | nothing |
"""

from __future__ import annotations

from typing import Final

from app.core.errors import RecoveryFailed
from app.domain.runs.replay import Run

_IN_STATE: Final[dict[str, str | None]] = {
    "SCHEDULED": "worker",
    "RUNNING": None,
    "FAILED": "operator",
    "PARKED": "operator",
    "DIVERGED": "operator",
    "COMPLETED": None,
    "CANCELLED": None,
}
# In the order in which they are named when a run awaits several: first who has to be told that something waits.
_OF_KIND: Final = {"ask": "person", "signal": "signal", "child": "child", "tool": "tool", "sleep": "time"}


def waiting_for(run: Run) -> str | None:
    """What a plan that leaves the run so states as `waiting_after`."""
    if run.head.state != "WAITING":
        return _IN_STATE[run.head.state]
    begun = run.frontier.begun
    awaited = {begun[path].kind for path in run.awaits if path in begun}
    for kind, whom in _OF_KIND.items():
        if kind in awaited:
            return whom
    raise RecoveryFailed(
        "the run waits for nothing that anybody could answer", stream=f"run:{run.run_id}", found=str(run.awaits)
    )
