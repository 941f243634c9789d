"""The Moore machine of a trace, as a table. docs/state-machine.md and the database's rules follow it.

Theory, before the table:

1. A trace is one governed tool call. Its state says what must happen next, and nothing else does: PENDING asks the
   supervisor, AUTHORIZED prepares the call, EXECUTING sends it. That is a Moore machine: the action depends on the
   state alone, not on how the state was reached. So recovery needs no code of its own. It folds the log, looks the
   state up, and goes on (replay.py has the table of actions).
2. A transition is an appended artifact. No state changes without a document that says why, and each document is
   admitted in exactly one state: four documents, four places.
3. Where an artifact leads is said by one field of it, its verdict: `decision` of a supervisor_decision, `outcome` of a
   tool_effect. A reader of the log can compute the state; no state is ever written down that does not follow.
4. Each artifact names the digest of the one before it (`binds_field`): a decision is about one exact request, a call
   carries out one exact decision, an effect is of one exact call. An approval cannot be moved to another request.
5. The intent is durable before the world is touched. EXECUTING means that a call may have been sent, or not: after a
   crash only the tool server knows. The same call, with the same ids, may be sent again; another may not.
6. COMPLETED, FAILED and DENIED are final. A trace that has an effect is never sent again, and its claim keeps the key.
7. Waiting for a person is PENDING with nobody at work, at no cost. A decision that never comes is one too: expiry and
   withdrawal are DENY, by time or by the caller, in a document of the same type.
8. PENDING to PENDING happens once, at birth: entry 1 creates the trace. Anywhere else it is no transition.
"""

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
    usual_end="COMPLETED",
)
