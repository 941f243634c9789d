"""The Moore machine of a trace, as a table. docs/state-machine.md and the database's rules follow it."""

from __future__ import annotations

from typing import Final, Literal

from app.core.chain import ArtifactRule, StreamKind, Transition

State = Literal["PENDING", "AUTHORIZED", "EXECUTING", "COMPLETED", "FAILED", "DENIED"]
ArtifactType = Literal["action_request", "supervisor_decision", "tool_call", "tool_effect"]

TRACE: Final = StreamKind(
    name="trace",
    id_field="trace_id",
    entry_schema_id="tga/v1/execution_log_entry",
    birth_state="PENDING",
    artifacts=(
        ArtifactRule("action_request", "tga/v1/action_request"),
        ArtifactRule(
            "supervisor_decision",
            "tga/v1/supervisor_decision",
            verdict_field="decision",
            binds_field="action_request_digest",
        ),
        ArtifactRule("tool_call", "tga/v1/tool_call", binds_field="supervisor_decision_digest"),
        ArtifactRule(
            "tool_effect",
            "tga/v1/tool_effect",
            verdict_field="outcome",
            binds_field="tool_call_digest",
            settles_claim=True,
        ),
    ),
    transitions=(
        Transition("PENDING", "action_request", "", "PENDING", is_birth=True),
        Transition("PENDING", "supervisor_decision", "APPROVE", "AUTHORIZED"),
        Transition("PENDING", "supervisor_decision", "DENY", "DENIED"),
        Transition("AUTHORIZED", "tool_call", "", "EXECUTING"),
        Transition("EXECUTING", "tool_effect", "SUCCESS", "COMPLETED"),
        Transition("EXECUTING", "tool_effect", "FAILURE", "FAILED"),
    ),
)
