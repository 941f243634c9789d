"""The machine of a run, as a table. docs/state-machine-of-runs.md follows it.

Theory, before the table:

1. A run is one execution of a program. The program itself is not on the ledger: its worker is, with what it did. The
   state says who acts next: SCHEDULED gateways (they offer the run to workers), RUNNING its worker, WAITING nobody
   until time, a person, a signal or a child answers, FAILED, PARKED and DIVERGED an operator or the caller.
2. While it is RUNNING its worker appends what it is about to do (run_intent) and what it did (run_checkpoint). Neither
   moves the state: they move the frontier (frontier.py), which says at which address the next operation stands.
3. An answer is what others did for the run: a tool server, a person, time, a child. It may come in every open state,
   because others do not wait for the worker; only in WAITING does it wake the run, and only if all that the run waits
   for is there (`wakes`). Everywhere else it is recorded and found by the next replay. An escalation says that nobody
   has answered a question in time and that others were told: the question stays open, and nothing moves.
4. An attempt is a lease of the run by a worker. LEASED begins one; RELEASED, LOST and FAILED end it. A worker that
   comes back after its lease is over is refused; that it came is recorded once (FENCED), and changes nothing.
5. FAILED is not final: a caller may retry it, and what was recorded stays recorded. Only COMPLETED and CANCELLED are.
6. The fold compares an answer with its intent, not the table: several intents may be open at once (gather), so no
   artifact binds to the one before it.
"""

from __future__ import annotations

from typing import Final, Literal

from app.core.chain import ArtifactRule, StreamKind, Transition

RunState = Literal["SCHEDULED", "RUNNING", "WAITING", "FAILED", "PARKED", "DIVERGED", "COMPLETED", "CANCELLED"]
RunArtifactType = Literal[
    "run_start",
    "run_attempt",
    "run_intent",
    "run_checkpoint",
    "run_answer",
    "run_escalation",
    "run_signal",
    "run_suspension",
    "run_end",
    "run_resumption",
]

_AT_WORK: Final = ("SCHEDULED", "RUNNING", "WAITING")
_RESTING: Final = ("FAILED", "PARKED", "DIVERGED")
_OPEN: Final = (*_AT_WORK, *_RESTING)

RUN: Final = StreamKind(
    name="run",
    id_field="run_id",
    entry_schema_id="tga/v1/run_log_entry",
    birth_state="SCHEDULED",
    usual_end="COMPLETED",
    artifacts=(
        ArtifactRule("run_start", "tga/v1/run_start"),
        ArtifactRule("run_attempt", "tga/v1/run_attempt", verdict_field="change"),
        ArtifactRule("run_intent", "tga/v1/run_intent"),
        ArtifactRule("run_checkpoint", "tga/v1/run_checkpoint"),
        ArtifactRule("run_answer", "tga/v1/run_answer", verdict_field="wakes"),
        ArtifactRule("run_escalation", "tga/v1/run_escalation"),
        ArtifactRule("run_signal", "tga/v1/run_signal"),
        ArtifactRule("run_suspension", "tga/v1/run_suspension"),
        ArtifactRule("run_end", "tga/v1/run_end", verdict_field="outcome"),
        ArtifactRule("run_resumption", "tga/v1/run_resumption"),
    ),
    transitions=(
        Transition("SCHEDULED", "run_start", "", "SCHEDULED", is_birth=True),
        Transition("SCHEDULED", "run_attempt", "LEASED", "RUNNING"),
        *(Transition("RUNNING", "run_attempt", change, "SCHEDULED") for change in ("RELEASED", "LOST", "FAILED")),
        *(Transition(state, "run_attempt", "FENCED", state) for state in _AT_WORK),
        Transition("RUNNING", "run_intent", "", "RUNNING"),
        Transition("RUNNING", "run_checkpoint", "", "RUNNING"),
        Transition("WAITING", "run_answer", "YES", "SCHEDULED"),
        *(Transition(state, "run_answer", "NO", state) for state in _OPEN),
        *(Transition(state, "run_escalation", "", state) for state in _AT_WORK),
        *(Transition(state, "run_signal", "", state) for state in _OPEN),
        Transition("RUNNING", "run_suspension", "", "WAITING"),
        Transition("RUNNING", "run_end", "COMPLETED", "COMPLETED"),
        Transition("RUNNING", "run_end", "DIVERGED", "DIVERGED"),
        *(Transition(state, "run_end", "FAILED", "FAILED") for state in _AT_WORK),
        *(Transition(state, "run_end", "PARKED", "PARKED") for state in ("SCHEDULED", "RUNNING")),
        *(Transition(state, "run_end", "CANCELLED", "CANCELLED") for state in _OPEN),
        *(Transition(state, "run_resumption", "", "SCHEDULED") for state in _RESTING),
    ),
)
