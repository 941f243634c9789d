"""The sound documents of runs that vectors are made of, and the journals they make. Nothing here comes from `app`."""

from __future__ import annotations

import base64
import copy
import hashlib
from typing import Any, Final

import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from vectors.documents import EXECUTOR_ID, GENESIS, Json, digest, log_of, seal, time_at
from vectors.system import append, signing_key

STATES: Final = ("SCHEDULED", "RUNNING", "WAITING", "FAILED", "PARKED", "DIVERGED", "COMPLETED", "CANCELLED")
PROGRAM: Final = digest("the program")
INLINE: Final[Json] = {"tier": "inline", "value": {"n": 1}}
WRONG: Final[Json] = {"type": "ValueError", "message": "no such order", "retryable": False}
# By artifact and verdict, from which states it leads where. A second time on purpose, as in documents.py.
_STAYS: Final = {state: state for state in STATES[:6]}
LEADS: Final[dict[tuple[str, str], dict[str, str]]] = {
    ("run_start", ""): {},
    ("run_attempt", "LEASED"): {"SCHEDULED": "RUNNING"},
    ("run_attempt", "RELEASED"): {"RUNNING": "SCHEDULED"},
    ("run_attempt", "LOST"): {"RUNNING": "SCHEDULED"},
    ("run_attempt", "FAILED"): {"RUNNING": "SCHEDULED"},
    ("run_attempt", "FENCED"): {state: state for state in STATES[:3]},
    ("run_intent", ""): {"RUNNING": "RUNNING"},
    ("run_checkpoint", ""): {"RUNNING": "RUNNING"},
    ("run_answer", "YES"): {"WAITING": "SCHEDULED"},
    ("run_answer", "NO"): _STAYS,
    ("run_escalation", ""): {state: state for state in STATES[:3]},
    ("run_signal", ""): _STAYS,
    ("run_suspension", ""): {"RUNNING": "WAITING"},
    ("run_end", "COMPLETED"): {"RUNNING": "COMPLETED"},
    ("run_end", "DIVERGED"): {"RUNNING": "DIVERGED"},
    ("run_end", "FAILED"): dict.fromkeys(STATES[:3], "FAILED"),
    ("run_end", "PARKED"): dict.fromkeys(STATES[:2], "PARKED"),
    ("run_end", "CANCELLED"): dict.fromkeys(STATES[:6], "CANCELLED"),
    ("run_resumption", ""): dict.fromkeys(STATES[3:6], "SCHEDULED"),
}
_VERDICT: Final = {"run_attempt": "change", "run_answer": "wakes", "run_end": "outcome"}
REQUESTS: Final[dict[str, Json]] = {
    "step": {},
    "tool": {"trace_id": "", "idempotency_key": "run:r/1", "retries": 1},
    "ask": {
        "form": "approve",
        "message": "Pay?",
        "context": INLINE,
        "answer_schema": {"type": "boolean"},
        "expires_at": time_at(59000),
        "default": None,
        "webhooks": ["ops"],
        "escalations": [{"at": time_at(20000), "webhooks": ["boss"]}, {"at": time_at(40000), "webhooks": []}],
    },
    "sleep": {"wakes_at": time_at(59000)},
    "signal": {"expires_at": None},
    "child": {"child_run_id": "child", "procedure": "pay", "version": "1"},
}
_FIELDS: Final[dict[str, Json]] = {
    "run_start": {
        "principal": {"principal_id": "agent-7", "tenant": "default", "roles": ["agent"]},
        "procedure": "onboard",
        "version": "1.2.0",
        "program_digest": PROGRAM,
        "input": INLINE,
        "started_at": time_at(0),
        "trigger": {"type": "call", "id": None},
        "parent": None,
        "forked_from": None,
        "policy": {
            "timeout_ms": None,
            "checkpoint_timeout_ms": 60_000,
            "retry": {"retries": 2, "first_ms": 100, "max_ms": 10_000},
            "park_after": 3,
            "on_parent_end": "cancel",
            "retention": "keep",
        },
        "allowed_by": {"policy_digest": digest("the policy"), "policy_ids": ["agents-start"]},
        "tags": ["nightly"],
    },
    "run_attempt": {
        "attempt": 1,
        "change": "LEASED",
        "worker": {"principal_id": "worker-1", "name": "host:1"},
        "program_digest": PROGRAM,
        "reason": None,
        "error": None,
        "not_before": None,
        "at": time_at(1000),
    },
    "run_intent": {"attempt": 1, "path": "1", "kind": "tool", "name": "crm.create", "try_number": 1},
    "run_checkpoint": {
        "attempt": 1,
        "path": "1",
        "kind": "step",
        "name": "plan",
        "outcome": "OK",
        "value": INLINE,
        "error": None,
        "resume": "snapshot",
        "try_number": 1,
        "inner": 0,
        "state_change": [],
        "logs": [],
        "started_at": time_at(2000),
        "duration_ms": 3,
        "source": "onboard.py:12",
    },
    "run_answer": {
        "path": "1",
        "intent_digest": GENESIS,
        "wakes": "NO",
        "outcome": "OK",
        "value": INLINE,
        "error": None,
        "answered_by": {"type": "tool", "id": "crm"},
        "answered_at": time_at(3000),
        "signature": None,
    },
    "run_escalation": {
        "path": "1",
        "intent_digest": GENESIS,
        "level": 1,
        "announced_to": ["boss"],
        "escalated_at": time_at(20000),
    },
    "run_signal": {"name": "paid", "signal_id": "s-1", "value": INLINE, "sent_by": "agent-7", "sent_at": time_at(4000)},
    "run_suspension": {"attempt": 1, "awaits": ["1"], "wake": "ANY"},
    "run_end": {
        "attempt": 1,
        "outcome": "COMPLETED",
        "output": INLINE,
        "error": None,
        "divergence": None,
        "positions": 0,
        "ended_by": {"type": "worker", "id": "worker-1"},
        "ended_at": time_at(5000),
    },
    "run_resumption": {
        "resumed_by": "op-1",
        "rationale": "the server is up again",
        "accepts": None,
        "reopens": [],
        "frontier_digest": GENESIS,
        "resolves": [],
        "resumed_at": time_at(6000),
    },
}


def document(name: str, run_id: str = "r", /, **changes: Any) -> Json:
    """A document with sensible fields; those that follow from the changed ones follow."""
    said: Json = {**copy.deepcopy(_FIELDS[name]), **changes}
    if name in ("run_intent", "run_checkpoint"):
        said.setdefault("input_digest", digest([said["kind"], said["name"]]))
    if name == "run_intent":
        said.setdefault("request", copy.deepcopy(REQUESTS[said["kind"]]))
        if said["request"].get("trace_id") == "":
            said["request"]["trace_id"] = TOOL_TRACE[0]["entry"]["trace_id"]
    if name in ("run_checkpoint", "run_answer") and said["outcome"] != "OK":
        said |= {"value": changes.get("value"), "error": changes.get("error", WRONG)}
    if name == "run_attempt" and said["change"] == "FAILED":
        said["error"] = WRONG
    if name == "run_end" and said["outcome"] != "COMPLETED":
        said |= {"output": None, "error": WRONG, "positions": changes.get("positions")}
        if said["outcome"] == "DIVERGED":
            said["divergence"] = {"path": "2", "recorded": "step plan", "performed": "step pay", "source": None}
    return {"schema_id": f"tga/v1/{name}", "schema_version": "1.0", "run_id": run_id, **said}


# Keys of vectors, from seeds that everybody has: they protect nothing.
_SEEDS: Final = {None: "gateway", "ann": "ann", "bob": "bob"}
_UNSIGNED: Final = ("wakes", "signature")


def key_pair(owner: str | None) -> tuple[Ed25519PrivateKey, str, str]:
    """The private key of a person, or, None, of the gateway; its id, and its public half in base64."""
    private = Ed25519PrivateKey.from_private_bytes(hashlib.sha256(f"vector key of {_SEEDS[owner]}".encode()).digest())
    public = private.public_key().public_bytes_raw()
    return private, f"ed25519:{hashlib.sha256(public).hexdigest()[:16]}", base64.b64encode(public).decode()


def signed(answer: Json, *, key_of: str | None = None) -> Json:
    """The answer with a signature over all but what the gateway adds, by the gateway's key or a person's own."""
    private, key_id, _ = key_pair(key_of)
    said = rfc8785.dumps({name: value for name, value in answer.items() if name not in _UNSIGNED})
    value = base64.b64encode(private.sign(said)).decode()
    return {**answer, "signature": {"algorithm": "Ed25519", "key_id": key_id, "value": value}}


TOOL_TRACE: Final[list[Json]] = log_of(("action_request", "approval", "tool_call", "success"))
TRACE_STREAM: Final = f"trace:{TOOL_TRACE[0]['entry']['trace_id']}"


class Log:
    """Records of several streams in the order of their commits, and where each run stands."""

    def __init__(self) -> None:
        self.records: list[Json] = []
        self._heads: dict[str, tuple[int, str, str]] = {}
        self._system: list[Json] = []

    def add(self, name: str, run_id: str = "r", /, *, entry: Json | None = None, **changes: Any) -> str:
        """Append to a run, as the table leads; `entry` replaces fields of the entry. The digest of the artifact. What a
        person answers is signed by the gateway, whose key is announced before, unless a signature is given."""
        said = document(name, run_id, **changes)
        if (
            name == "run_answer"
            and said["answered_by"]["type"] in ("person", "operator")
            and "signature" not in changes
        ):
            self.announce(None)
            said = signed(said)
        return self.put(said, entry=entry)

    def announce(self, owner: str | None, **changes: Any) -> None:
        """The system stream says whose key this is; once."""
        _, key_id, public_key = key_pair(owner)
        key = {"key_id": key_id, "public_key": public_key, "principal_id": owner, **changes}
        step = signing_key(**key)
        if all(step[1] != record["artifact"] for record in self._system):
            self._system = append(self._system, step)
            self.records.append({"stream": "system:default", **self._system[-1]})

    def put(self, said: Json, *, entry: Json | None = None) -> str:
        run_id, name = said["run_id"], said["schema_id"].removeprefix("tga/v1/")
        number, link, state = self._heads.get(run_id, (0, GENESIS, "SCHEDULED"))
        verdict = said.get(_VERDICT.get(name, ""), "")
        leads_to = "SCHEDULED" if number == 0 else LEADS.get((name, verdict), {}).get(state, state)
        body: Json = {
            "schema_id": "tga/v1/run_log_entry",
            "schema_version": "1.0",
            "run_id": run_id,
            "sequence_number": number + 1,
            "prev_entry_digest": link,
            "executor_id": EXECUTOR_ID,
            "recorded_at": time_at(100 * len(self.records) % 60_000),
            "from_state": state,
            "to_state": leads_to,
            "artifact_type": name,
            "artifact_digest": digest(said),
            **(entry or {}),
        }
        sealed = seal(body)
        self.records.append({"stream": f"run:{run_id}", "entry": sealed, "artifact": said})
        self._heads[run_id] = number + 1, sealed["entry_digest"], sealed["to_state"]
        return str(sealed["artifact_digest"])

    def add_trace(self, records: list[Json]) -> None:
        self.records += [{"stream": TRACE_STREAM, **record} for record in records]

    def entry_digest(self, run_id: str) -> str:
        return self._heads[run_id][1]
