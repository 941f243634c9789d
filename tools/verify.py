"""Verify an exported bundle of a TGA ledger. One file, to be read before it is trusted.

    python verify.py BUNDLE KEY [HEAD ...] [--json]

KEY is the log's verifier key (`name+id+base64`) or a file of them, from somewhere else than the bundle. HEADs are files
with signed heads or receipts that you kept: only they show an old backup, or a history that was written anew. Exit 0:
sound. 1: something is wrong. 2: bad usage. Needs Python 3.11+ and `cryptography`; no database, no network, no gateway.

Theory. A stream is a chain of entries: each holds the digest of the one before it, and of one artifact. A trace's
artifacts say what was asked, decided, called and answered; a run's are the journal of a program: what it was about to
do, what it did, what others answered, each at an address of its own; a tenant's system stream has its keys, pins,
policies and erasures. All entries of all streams are leaves of one Merkle tree, and the log's key signs the head of
that tree. So one signature vouches for all entries that the head covers, and through their digests for the artifacts.
Nobody vouches for anything else in a bundle, neither its manifest nor entries that are newer than its head: nothing
rests on those.
A log that lost signed entries begins anew as ORIGIN/epoch-2, with the same key: `epochs` tells what is lost, and why.

 1. The manifest says what to look for. Whatever matters in it is compared with what is signed.
 2. The bundle's schemas are those whose digest is pinned below: this file's, whatever the bundle brings.
 3. Heads that you kept are within the tree. KEY has signed the bundle's last head, which is its tree.
 4. Covered entries come first, each in its place in the tree: all of it in a complete bundle, else each with a proof.
 5. Each is in its place in its stream: schema, sequence, chain and digest, transition, binding. A person's decision or
    answer is signed by a key that a covered entry announced before it. One idempotency key makes one call. In a run
    every operation comes at the next address, in the current attempt; an answer is of an intent that is open, wakes
    the run exactly when that was all it waited for, and names what the trace, or the child, really answered; a
    question is escalated as its intent says. A fork goes on from the very entry that it names.
 6. Payloads are missing only where a covered erasure says so. A bundle of one tenant may withhold other tenants'
    artifacts on system streams: what is withheld vouches for nothing, and is counted.
 7. Entries without a leaf come last, on system streams only. Whether they hang together is told apart.
 8. A bundle that was exported with blobs has, under its digest, every blob that a covered entry refers to. Sealed ones
    are compared as they are. Of a bundle without them the blobs are counted as not checked.

Left to `tga verify --file`, which does all of this too: that older heads continue one another and those that you kept,
that JSON of callers and tools is canonical, that no key is of small order, that changes of a run's state fit what is
there, flat memory (here 1 KB a stream or blob), and what a bundle cannot show. Left to `tga verify --all`, which has
the database: claims, attempts, execution checkpoints, entries without a leaf.
"""

# fmt: off
from __future__ import annotations

import hashlib
import json
import re
import sys
from base64 import b64decode, b64encode
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from copy import deepcopy
from functools import reduce
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

SCHEMAS = "bfc63b8ca29871038b1266b50c58e142739f286cfa2d5bff5d657221e47ad28d"  # sha256sum schemas/* | sha256sum
GAP, CHECKSUM, TRANSITION = "STATE_SEQUENCE_GAP", "STATE_CHECKSUM_MISMATCH", "STATE_INVALID_TRANSITION"
RECOVERY, SCHEMA, SIGNATURE, NOTE = "STATE_RECOVERY_FAILED", "SCHEMA_VIOLATION", "SIGNATURE_INVALID", "NOTE_INVALID"
MALFORMED, BUNDLE, PROOF, FORKED = "INPUT_MALFORMED", "BUNDLE_INVALID", "PROOF_INVALID", "LOG_FORKED"
LINE_BYTES_MAX, SMALL_BYTES_MAX, NOTE_BYTES_MAX, FINDINGS_MAX = 2_097_152, 262_144, 65_536, 1_000
Json = dict[str, Any]
class Wrong(Exception):
    def __init__(self, code: str, what: str, stream: str | None = None, number: int | None = None) -> None:
        self.code, self.what, self.stream, self.sequence_number = code, what, stream, number
def need(holds: object, code: str, what: str) -> bool:
    if not holds:
        raise Wrong(code, what)
    return True
def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
def base64(text: str, size: int | None = None) -> bytes:
    raw = b64decode(text, validate=True)
    need(b64encode(raw).decode() == text and size in (None, len(raw)), BUNDLE, "that is no base64 of that length")
    return raw
def is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True
# Bytes to documents: strict JSON, and the keywords of JSON Schema that the pinned schemas use.
def parse(raw: bytes, bytes_max: int) -> Json:
    """A JSON object whose keys are unique, so that all readers read the same."""
    need(len(raw) <= bytes_max, MALFORMED, f"more than {bytes_max} bytes")
    value: Json = json.loads(raw.decode(), object_pairs_hook=lambda members: need(
        len(dict(members)) == len(members), MALFORMED, "a key is repeated") and dict(members))
    need(isinstance(value, dict), MALFORMED, "not a JSON object")
    return value
def written(value: Any) -> bytes:  # RFC 8785, where there are no fractions and no keys beyond U+FFFF
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()
def fits(value: Any, schema: Any, root: Json) -> bool:  # a keyword that is not known here is a KeyError
    return schema is True or all(RULES[name](value, rule, schema, root) for name, rule in schema.items())
TYPES = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool, "integer": int}
RULES: dict[str, Callable[[Any, Any, Json, Json], bool]] = {  # value, rule, the schema it is in, the whole schema
    **dict.fromkeys(["$schema", "$id", "$defs", "$comment", "title", "description", "then", "else"], lambda *_: True),
    "$ref": lambda v, r, s, root: fits(v, root["$defs"][r.removeprefix("#/$defs/")], root),
    "type": lambda v, r, s, root: any(type(v) is TYPES[one] for one in ([r] if isinstance(r, str) else r)),
    "const": lambda v, r, s, root: type(v) is type(r) and v == r,
    "enum": lambda v, r, s, root: any(type(v) is type(one) and v == one for one in r),
    "pattern": lambda v, r, s, root: type(v) is not str or bool(re.search(re.sub(r"\$$", r"\\Z", r), v)),
    "minLength": lambda v, r, s, root: type(v) is not str or len(v) >= r,
    "maxLength": lambda v, r, s, root: type(v) is not str or len(v) <= r,
    "minimum": lambda v, r, s, root: type(v) is not int or v >= r,
    "maximum": lambda v, r, s, root: type(v) is not int or v <= r,
    "required": lambda v, r, s, root: type(v) is not dict or all(key in v for key in r),
    "properties": lambda v, r, s, root: type(v) is not dict or all(fits(v[key], r[key], root) for key in r if key in v),
    "additionalProperties": lambda v, r, s, root: type(v) is not dict or v.keys() <= s["properties"].keys(),
    "items": lambda v, r, s, root: type(v) is not list or all(fits(member, r, root) for member in v),
    "minItems": lambda v, r, s, root: type(v) is not list or len(v) >= r,
    "maxItems": lambda v, r, s, root: type(v) is not list or len(v) <= r,
    "maxProperties": lambda v, r, s, root: type(v) is not dict or len(v) <= r,
    "anyOf": lambda v, r, s, root: any(fits(v, one, root) for one in r),
    "allOf": lambda v, r, s, root: all(fits(v, one, root) for one in r),
    "not": lambda v, r, s, root: not fits(v, r, root),
    "if": lambda v, r, s, root: fits(v, s.get("then" if fits(v, r, root) else "else", True), root)}
# A run, for step 5. By artifact and verdict: from which states it leads where. It is born SCHEDULED, by its start.
OPEN = ("SCHEDULED", "RUNNING", "WAITING", "FAILED", "PARKED", "DIVERGED")
RUN_VERDICT = {"run_attempt": "change", "run_answer": "wakes", "run_end": "outcome"}
RUN: dict[tuple[str, str], dict[str, str]] = {
    ("run_start", ""): {"": "SCHEDULED"},
    ("run_attempt", "LEASED"): {"SCHEDULED": "RUNNING"},
    **{("run_attempt", change): {"RUNNING": "SCHEDULED"} for change in ("RELEASED", "LOST", "FAILED")},
    ("run_attempt", "FENCED"): {state: state for state in OPEN[:3]},
    **{(name, ""): {"RUNNING": "RUNNING"} for name in ("run_intent", "run_checkpoint")},
    ("run_answer", "YES"): {"WAITING": "SCHEDULED"},
    **{(name, said): {state: state for state in OPEN} for name, said in (("run_answer", "NO"), ("run_signal", ""))},
    ("run_escalation", ""): {state: state for state in OPEN[:3]},
    ("run_suspension", ""): {"RUNNING": "WAITING"},
    **{("run_end", outcome): {"RUNNING": outcome} for outcome in ("COMPLETED", "DIVERGED")},
    ("run_end", "FAILED"): dict.fromkeys(OPEN[:3], "FAILED"),
    ("run_end", "PARKED"): dict.fromkeys(OPEN[:2], "PARKED"),
    ("run_end", "CANCELLED"): dict.fromkeys(OPEN, "CANCELLED"),
    ("run_resumption", ""): dict.fromkeys(OPEN[3:], "SCHEDULED")}
ANSWERED_BY = {"tool": ("tool", "operator", "timer"), "ask": ("person", "timer", "operator"), "sleep": ("timer",),
               "signal": ("signal", "timer"), "child": ("child",)}  # all else ends with a checkpoint
BY_TIME = {"sleep": ("OK",), "ask": ("TIMEOUT",), "signal": ("TIMEOUT",), "tool": ("TIMEOUT",)}
TAKEN, AHEAD, UNASKED = "RUN_POSITION_TAKEN", "RUN_POSITION_GAP", "RUN_ANSWER_UNASKED"
class Journal:
    """What a run folds to: its attempt, what it waits for, and by scope the next position, whether the operation before
    it failed, and whether the operation around has ended itself (then the scope is only kept for a retry)."""
    def __init__(self, start: Json) -> None:
        self.program, self.attempt, self.fenced = start["program_digest"], 0, 0
        self.scopes: dict[str, tuple[int, bool, bool]] = {"": (1, False, False)}
        # By address: digest of the intent, kind, name, input, when due, retries, entry, since when, level, escalations.
        self.begun: dict[str, list[Any]] = {}
        self.tries: dict[str, int] = {}
        self.named: dict[str, str] = {}  # by address: the trace or run that the intent names
        self.children = set[tuple[str, str]]()  # an address, and a run that an intent there has named
        self.defaults: dict[str, bytes] = {}  # by address: the answer of a question that nobody else answers in time
        self.signals: list[tuple[str, str]] = []
        self.awaits, self.wake = list[str](), "ANY"
    @staticmethod
    def place(path: str) -> tuple[str, int]:
        is_path = path.count(".") < 16 and all(int(branch) <= 1_000 for branch in re.findall(":([0-9]+)", path))
        need(is_path, SCHEMA, "operations are nested too deeply, or in too many branches")
        scope, _, position = path.rpartition(".")
        return scope, int(position)
    def inside(self, path: str, places: Any) -> list[str]:  # those scopes or addresses that are of the operation
        return sorted(found for found in places if found and re.match(rf"{re.escape(path)}([.:]|\Z)", found))
    def need_next(self, path: str) -> None:
        scope, position = self.place(path)
        expected, _, has_ended = self.scopes.get(scope, (1, False, True))
        if has_ended:  # it opens with its first operation, inside an operation that is itself next
            expected = 1
            if scope:
                self.need_next(re.sub(r":[0-9]+\Z", "", scope))
        need(position >= expected, TAKEN, f"operation {path} has ended already")
        need(position <= expected, AHEAD, f"operation {path} comes before its turn")
    def open(self, path: str) -> None:
        scope, position = self.place(path)
        if scope:
            self.open(re.sub(r":[0-9]+\Z", "", scope))
        expected, has_failed, has_ended = self.scopes.get(scope, (1, False, True))
        if has_ended:
            self.scopes[scope] = 1, False, False
        elif has_failed:  # what it kept for a retry is dropped
            before = f"{scope}.{position - 1}" if scope else str(position - 1)
            for kept in self.inside(before, self.scopes):
                del self.scopes[kept]
            for kept in self.inside(before, self.tries):
                del self.tries[kept]
            self.scopes[scope] = expected, False, False
    def end(self, path: str, has_failed: bool) -> None:
        self.need_next(path)
        self.open(path)
        scope, position = self.place(path)
        for inner in self.inside(path, self.scopes):
            self.scopes[inner] = *self.scopes[inner][:2], True
            if not has_failed:
                del self.scopes[inner]
        self.forget(path, () if has_failed else self.tries)
        self.scopes[scope] = position + 1, has_failed, False
    def forget(self, path: str, tries: Any) -> None:
        for begun in self.inside(path, self.begun):
            del self.begun[begun]
        for tried in self.inside(path, tries):
            del self.tries[tried]
    def retry(self, path: str, reopens: bool = False) -> None:
        """Another try of what is next; or, of a run that failed, of what ended last."""
        scope, position = self.place(path)
        if reopens:
            self.need_failed(path)
            self.scopes[scope] = position, False, False
        else:
            self.need_next(path)
            self.open(path)
            self.forget(path, ())
        for inner in self.inside(path, self.scopes):
            expected, has_failed, _ = self.scopes[inner]
            self.scopes[inner] = expected - has_failed, False, False
            if has_failed:
                failed = f"{inner}.{expected - 1}"
                self.tries[failed] = self.tries.get(failed, 1) + 1
        self.tries[path] = self.tries.get(path, 1) + 1
    def need_failed(self, path: str) -> None:
        scope, position = self.place(path)
        is_it = self.scopes.get(scope, (0, False, False))[:2] == (position + 1, True)
        need(is_it, TAKEN, f"operation {path} is not the last of its scope, or did not fail")
    def fold(self, name: str, said: Json, entry: Json) -> None:
        """The run after one more artifact that the table admits."""
        path, state = said.get("path", ""), entry["from_state"]
        if name in ("run_intent", "run_checkpoint", "run_suspension", "run_end") or (
                name == "run_attempt" and said["change"] not in ("LEASED", "FENCED")):
            need(said["attempt"] == self.attempt, "STATE_CONCURRENT_EXECUTION", "the attempt is not the current one")
        match name:
            case "run_attempt" if said["change"] == "LEASED":
                is_next = (said["attempt"], said["program_digest"]) == (self.attempt + 1, self.program)
                need(is_next, CHECKSUM, "the attempt is not the next one, or of another program")
                self.attempt, self.awaits = said["attempt"], []
            case "run_attempt" if said["change"] == "FENCED":
                is_old = self.fenced < said["attempt"] < self.attempt + (state != "RUNNING")
                need(is_old, CHECKSUM, "the fenced attempt is not over, or was recorded before")
                self.fenced = said["attempt"]
            case "run_intent":
                self.need_try(path, said)
                self.need_next(path)
                need(path not in self.begun, TAKEN, f"operation {path} has begun already")
                self.open(path)
                request = said["request"]
                due = [request[at] for at in ("expires_at", "wakes_at", "waits_until") if at in request] or [None]
                self.begun[path] = [entry["artifact_digest"], said["kind"], said["name"], said["input_digest"], due[0],
                                    request.get("retries", 0), entry["sequence_number"], entry["recorded_at"], 0,
                                    [level["at"] for level in request.get("escalations", ())],
                                    *([True] if request.get("default") is not None else [])]
                self.named[path] = f"trace:{request.get('trace_id')}" if said["kind"] == "tool" else (
                    f"run:{request.get('child_run_id')}")
                self.defaults[path] = written(request.get("default"))
            case "run_checkpoint":
                self.fold_checkpoint(path, said)
            case "run_answer":
                self.fold_answer(path, said, state)
            case "run_escalation":
                begun = self.begun.get(path, [None])
                need(begun[0] == said["intent_digest"], UNASKED, f"no such question is open at {path}")
                need(begun[8] < len(begun[9]), UNASKED, f"operation {path} is not escalated")
                is_next = said["level"] == begun[8] + 1 and said["escalated_at"] >= begun[9][begun[8]]
                need(is_next, CHECKSUM, "the escalation is not the next one, or came before its time")
                begun[8] = said["level"]
            case "run_signal":
                self.signals.append((said["name"], said["signal_id"]))
            case "run_suspension":
                for awaited in said["awaits"]:
                    is_others = self.begun.get(awaited, [None, None])[1] in ANSWERED_BY
                    need(is_others, TRANSITION, "a run waits only for what others can end")
                need(len(set(said["awaits"])) == len(said["awaits"]), CHECKSUM, "an address is awaited twice")
                self.awaits, self.wake = list(said["awaits"]), said["wake"]
            case "run_end":
                is_all = said["positions"] in (None, self.scopes[""][0] - 1)
                need(is_all, CHECKSUM, "the number of operations does not agree with the journal")
                self.begun, self.awaits = {} if entry["to_state"] not in OPEN else self.begun, []
            case "run_resumption":
                for resolved in said["resolves"]:
                    self.need_failed(resolved["path"])
                    scope, position = self.place(resolved["path"])
                    self.scopes[scope] = position + 1, resolved["outcome"] != "OK", self.scopes[scope][2]
                for reopened in said["reopens"]:
                    self.retry(reopened, reopens=True)
                frontier = {"begun": self.begun, "scopes": self.scopes, "tries": self.tries}
                need(sha256(written(frontier)) == said["frontier_digest"], CHECKSUM, "that is another frontier")
                self.program = said["accepts"]["program_digest"] if said["accepts"] else self.program
    def need_try(self, path: str, said: Json) -> None:
        need(said["try_number"] == self.tries.get(path, 1), CHECKSUM, f"that is not the next try of operation {path}")
    def fold_checkpoint(self, path: str, said: Json) -> None:
        self.need_next(path)
        self.need_try(path, said)
        begun = self.begun.get(path)
        is_it = begun is None or begun[1:4] == [said["kind"], said["name"], said["input_digest"]]
        need(is_it, TAKEN, f"another operation has begun at {path}")
        need(said["kind"] not in ANSWERED_BY, TRANSITION, f"a {said['kind']} ends with an answer")
        is_begun = said["outcome"] != "INTERRUPTED" or begun is not None
        need(is_begun, TRANSITION, "only what has begun can be interrupted")
        inner = sum(at[0] - 1 for scope, at in self.scopes.items() if scope and re.sub(r":[0-9]+\Z", "", scope) == path)
        need(said["inner"] == inner, CHECKSUM, "the number of operations inside does not agree with the journal")
        self.retry(path) if said["outcome"] == "RETRY" else self.end(path, said["outcome"] != "OK")
    def fold_answer(self, path: str, said: Json, state: str) -> None:
        begun, by = self.begun.get(path, [None, None, None, None, None, 0]), said["answered_by"]
        need(begun[0] == said["intent_digest"], UNASKED, f"nobody waits for this answer at {path}")
        need(by["type"] in ANSWERED_BY.get(begun[1], ()), UNASKED, f"a {begun[1]} is not answered so")
        is_by_time, ends = by["type"] == "timer", ("OK",) if begun[10:] else BY_TIME.get(begun[1], ())
        is_early = is_by_time and (begun[4] or "9") > said["answered_at"]
        need(not is_early, UNASKED, f"a {begun[1]} is answered by time when its own is over")
        is_fit = said["outcome"] in ends if is_by_time else said["outcome"] != "TIMEOUT"
        need(is_fit, UNASKED, f"a {begun[1]} does not end so by time, or by anything else")
        wakes = state == "WAITING" and path in self.awaits and (self.wake == "ANY" or len(self.awaits) == 1)
        need(said["wakes"] == ("YES" if wakes else "NO"), CHECKSUM, "`wakes` does not agree with the journal")
        is_it = not is_by_time or not begun[10:] or written(said["value"]) == self.defaults[path]
        need(is_it, CHECKSUM, "the answer is not the default that its intent names")
        if by["type"] == "signal":
            waiting = [signal for signal in self.signals if signal[0] == begun[2]][:1]
            need(waiting == [(begun[2], by["id"])], UNASKED, "the signal is not the next of its name")
            self.signals.remove(waiting[0])
        if said["outcome"] == "RETRY":
            need(self.tries.get(path, 1) <= begun[5], UNASKED, f"operation {path} is not tried again")
            self.retry(path)
        else:
            self.end(path, said["outcome"] != "OK")
        self.awaits = [] if wakes else [awaited for awaited in self.awaits if awaited != path]
# Streams, for steps 5 to 7. By artifact of a trace: in which state it may come, what it binds to, the field of its
# verdict, and where each verdict leads to. A trace is born PENDING; a system stream is always OPEN, as its schema says.
TRACE: dict[str, tuple[str, str, str, dict[str, str]]] = {
    "action_request": ("", "", "", {"": "PENDING"}),
    "supervisor_decision": ("PENDING", "action_request", "decision", {"APPROVE": "AUTHORIZED", "DENY": "DENIED"}),
    "tool_call": ("AUTHORIZED", "supervisor_decision", "", {"": "EXECUTING"}),
    "tool_effect": ("EXECUTING", "tool_call", "outcome", {"SUCCESS": "COMPLETED", "FAILURE": "FAILED"})}
FOREIGN = ("action_request", "tool_call", "tool_effect", "tool_pin", "run_start", "run_intent", "run_checkpoint",
           "run_answer", "run_signal", "run_end", "run_resumption")  # hold JSON that callers and tools wrote
ENTRY = {"trace": "execution_log_entry", "run": "run_log_entry", "system": "system_log_entry"}
CALL = ("server_id", "tool_name", "idempotency_key", "tool_class", "arguments")
UNBORN = {"number": 0, "digest": "0" * 64, "state": "", "artifact": None, "payloads": "0" * 64, "present": 0,
          "missing": 0, "broken": False, "erased": False, "tenant": "default", "call": None, "call_id": None,
          "journal": None, "begun_by": None}
def referred(name: str, artifact: Json) -> list[Json]:
    """The blobs that an artifact refers to, each with its digest and size."""
    if name == "procedure_registration":
        return [source for one in [artifact.get("program_source")] if one for source in (one, *one["files"])]
    request = artifact["request"] if name == "run_intent" else {}
    values = [artifact.get(field) for field in ("value", "input", "output")] if name.startswith("run_") else []
    values += [request.get("context"), request.get("default")]
    values += [one.get("value") for one in artifact.get("resolves", ())] if name == "run_resumption" else []
    return [value["ref"] for value in values if type(value) is dict and value.get("tier") in ("artifact", "secret")]
class Streams:
    """All streams through one another, in the order of the tree. The first wrong entry ends its stream."""
    def __init__(self, schemas: dict[str, Json], complete: bool, tenant: str | None, counts: Counter[str]) -> None:
        self.schemas, self.complete, self.tenant, self.counts = schemas, complete, tenant, counts
        self.is_covered = True  # until the covered entries have ended; whatever comes then counts for nothing
        self.known: dict[str, Json] = {}  # by stream: where it stands
        self.keys: dict[tuple[str, str], Json] = {}  # by tenant and key id: how it was announced
        self.claims: dict[str, str] = {}  # by digest of server, tool and idempotency key: the trace that made the call
        self.erasures: list[tuple[str, int, Json]] = []  # where each stands, and what it says
        self.epochs: dict[str, list[Json]] = {}  # by stream; the log's are on system:default
        self.origins: dict[tuple[str, int], tuple[str, Journal | None] | None] = {}  # entries that forks go on from
        self.references: list[tuple[str, int, str, str, str]] = []  # where it stands; stream, field, digest there
        self.blobs: dict[tuple[str, int], tuple[str, int]] = {}  # by digest and size: an entry that refers to it
    def document(self, raw: bytes, schema: str, bytes_max: int, **digest: str) -> Json:
        document, rules = parse(raw, bytes_max), self.schemas[schema]
        need(schema in FOREIGN or written(document) == raw, SCHEMA, f"the {schema} is not in canonical form")
        is_fit = not digest.keys() & document.keys() and fits({**document, **digest}, rules, rules)
        need(is_fit, SCHEMA, f"the {schema} does not fit its schema")
        return document
    def append(self, stream: str, number: int, raw: bytes, payload: bytes | None) -> None:
        """Schema, sequence, chain and digest, transition, binding, what it rests on: the first that fails speaks."""
        kind, _, identity = stream.partition(":")
        need(self.is_covered or kind == "system", GAP, "only system entries may be newer than the tree")
        known = self.known.setdefault(stream, dict(UNBORN))
        if known["broken"]:
            return
        known["broken"] = True  # until all is well
        is_system, expected, digest, artifact = kind == "system", known["number"] + 1, sha256(raw), None
        need(kind in ENTRY, SCHEMA, "no such kind of stream")
        need(not is_system or number == expected, GAP, f"entry {expected} is missing")
        entry = self.document(raw, ENTRY[kind], 262_144, entry_digest=digest)
        name, committed = entry["artifact_type"], entry["artifact_digest"]
        if payload is None:  # erased, or withheld from another tenant
            may_lack = not is_system or (self.is_covered and self.tenant not in (None, identity))
            need(may_lack, CHECKSUM, "the artifact is missing")
        else:
            need(sha256(payload) == committed, CHECKSUM, "the artifact is not what the entry commits to")
            artifact = self.document(payload, name, 524_288)
        need(entry[f"{kind}_id"] == identity, SCHEMA, "the entry is of another stream")
        need(entry["sequence_number"] == number == expected, GAP, f"entry {expected} is missing, or not in its place")
        need(entry["prev_entry_digest"] == known["digest"], CHECKSUM, "the entry does not link to the one before it")
        state, binds, verdict, leads_to = TRACE.get(name, ("", "", "", {}))
        if kind == "run":
            to_state = [leads.get(known["state"]) for (of, said), leads in RUN.items() if of == name and (
                artifact is None or artifact.get(RUN_VERDICT.get(name, ""), "") == said)]
            is_next = entry["from_state"] == (known["state"] or "SCHEDULED") and entry["to_state"] in to_state
            need(is_next, TRANSITION, f"{known['state']} does not admit this {name}")
        if kind == "trace":
            admitted = [to for said, to in leads_to.items() if artifact is None or artifact.get(verdict, "") == said]
            is_next = known["state"] == state and entry["from_state"] == (state or "PENDING")
            need(is_next and entry["to_state"] in admitted, TRANSITION, f"{known['state']} does not admit this {name}")
        if artifact is not None:
            need(artifact[f"{kind}_id"] == identity, CHECKSUM, "the artifact names another stream")
            is_bound = not binds or artifact[f"{binds}_digest"] == known["artifact"]
            is_call = name != "tool_call" or known["call"] in (None, sha256(written([artifact[f] for f in CALL])))
            is_effect = name != "tool_effect" or known["call_id"] in (None, artifact["tool_call_id"])
            need(is_bound and is_call and is_effect, CHECKSUM, "the artifact does not go with the ones before it")
            self.note(stream, number, name, artifact, known)
            if kind == "run":
                self.follow(stream, number, name, artifact, payload or b"", entry, known)
            for ref in referred(name, artifact) if self.is_covered else ():
                self.blobs.setdefault((ref["sha256"], ref["size_bytes"]), (stream, number))
        else:
            known["call"] = known["call_id"] = known["journal"] = None  # what is missing cannot be compared with
            self.counts["payloads withheld"] += is_system
        known["missing" if artifact is None else "present"] += not is_system
        if (stream, number) in self.origins and self.is_covered:
            self.origins[stream, number] = digest, None if known["missing"] else deepcopy(known["journal"])
        known.update(number=number, digest=digest, state=entry["to_state"], artifact=committed, broken=False,
                     payloads=sha256((known["payloads"] + committed).encode()))
    def note(self, stream: str, number: int, name: str, artifact: Json, known: Json) -> None:
        """What an artifact rests on, and what it means for what comes later."""
        match name:
            case "action_request":
                known.update(tenant=artifact["principal"]["tenant"], call=sha256(written([artifact[f] for f in CALL])))
                need(self.tenant in (None, known["tenant"]), BUNDLE, "a trace of another tenant than the bundle's")
            case "tool_call" if known["call"] is not None:
                known["call_id"], claim = artifact["tool_call_id"], sha256(written({f: artifact[f] for f in CALL[:3]}))
                is_own = artifact["idempotency_key"] is None or self.claims.setdefault(claim, stream) == stream
                need(is_own, RECOVERY, "two traces made a call with one idempotency key")
            case "supervisor_decision" if artifact["decided_by"]["type"] in ("person", "withdrawal"):
                added = ("policy_digest", "policy_ids", "signature")
                text = written({f: v for f, v in artifact.items() if f not in added})
                self.verify_signed(text, artifact["signature"], artifact["decided_by"]["id"], known["tenant"])
            case "policy_set" if artifact["policy_digest"] != sha256(artifact["text"].encode()):
                raise Wrong(CHECKSUM, "a policy stands under another's name")
            case "signing_key":
                key_id = f"ed25519:{sha256(base64(artifact['public_key'], 32))[:16]}"
                need(artifact["key_id"] == key_id, CHECKSUM, "a key stands under another's name")
                if self.is_covered:
                    self.keys[artifact["system_id"], key_id] = artifact
            case "erasure" if self.is_covered:
                self.erasures.append((stream, number, artifact))
            case "log_epoch":
                told, said, lost = self.epochs.setdefault(stream, []), artifact["former"], artifact["leaves_lost"]
                last = told[-1] if told else {"epoch": 1, "origin": said["origin"]}
                head = f"{last['origin']}\n{said['size']}\n{b64encode(bytes.fromhex(said['root'])).decode()}\n\n"
                is_next = artifact["epoch"] == last["epoch"] + 1 and said["origin"] == last["origin"]
                is_told = said["note"].startswith(head) and said["size"] == artifact["kept_size"] + lost
                need(is_next and is_told, CHECKSUM, "an epoch of the log does not follow the one before, or miscounts")
                told.append(artifact)
    def follow(self, stream: str, number: int, name: str, said: Json, raw: bytes, entry: Json, known: Json) -> None:
        """A run's journal, and what it says of other streams: that is compared when all were seen."""
        if name == "run_start":
            tenant = said["principal"]["tenant"]
            need(self.tenant in (None, tenant), BUNDLE, "a run of another tenant than the bundle's")
            known.update(tenant=tenant, begun_by=said["parent"] and said["parent"]["intent_digest"])
            self.counts["runs"] += 1
            known["journal"] = self.forked(said) if said["forked_from"] else Journal(said)
        elif known["journal"] is not None and not known["missing"]:
            journal = known["journal"]
            named, value = journal.named.get(said.get("path", "")), said.get("value") or {"tier": ""}
            journal.fold(name, said, entry)
            if name == "run_intent" and said["kind"] == "child" and said["request"]["child_run_id"] is not None:
                child = journal.named[said["path"]]
                if (said["path"], child) not in journal.children:  # else a retry takes it up again
                    self.references.append((stream, number, child, "begun_by", entry["artifact_digest"]))
                journal.children.add((said["path"], child))
            if name == "run_answer" and value["tier"] in ("effect", "run"):
                of, field, found = (f"trace:{value['trace_id']}", "artifact", value["tool_effect_digest"]) if (
                    value["tier"] == "effect") else (f"run:{value['run_id']}", "digest", value["entry_digest"])
                need(named == of, CHECKSUM, "the answer is not of what its intent names")
                self.references.append((stream, number, of, field, found))
            known["journal"] = None if entry["to_state"] not in OPEN else journal
        if name == "run_answer" and said["answered_by"]["type"] in ("person", "operator"):
            # Cut out of the bytes, in which all that comes before each of the two is plain: not written again, because
            # the value may hold fractions.
            text = raw.replace(b',"signature":' + written(said["signature"]), b"", 1)
            text = text.removesuffix(f',"wakes":"{said["wakes"]}"}}'.encode()) + b"}"
            self.verify_signed(text, said["signature"], said["answered_by"]["id"], known["tenant"])
    def forked(self, start: Json) -> Journal | None:
        """A fork goes on from where its source stood; what had begun there begins anew."""
        origin, journal = start["forked_from"], Journal(start)
        digest, source = self.origins.get((f"run:{origin['run_id']}", origin["sequence_number"])) or (None, None)
        need(digest or not self.complete, RECOVERY, "the entry that the run was forked from is missing")
        need(digest in (None, origin["entry_digest"]), CHECKSUM, "the fork names another origin")
        self.counts["runs that could not be folded"] += source is None
        if source is not None:
            journal.scopes, journal.tries = dict(source.scopes), dict(source.tries)
        return source and journal
    def verify_signed(self, said: bytes, signature: Json | None, by: str, tenant: str) -> None:
        """Signed by a key that a covered entry announced before: a gateway's, or that of whose word it is. What the
        gateway added is not in `said`."""
        nobody, signature = {"principal_id": "", "public_key": ""}, signature or {"key_id": "", "value": ""}
        gateway = self.keys.get(("default", signature["key_id"]), nobody)
        key = gateway if gateway["principal_id"] is None else self.keys.get((tenant, signature["key_id"]), nobody)
        is_own = key["principal_id"] in (None, by)
        is_fit = is_own and is_signed(base64(key["public_key"]), base64(signature["value"]), said)
        need(is_fit, SIGNATURE, "no key of whoever decided or answered has signed this")
    def end_covered(self) -> Iterator[Wrong]:
        """Step 6, when all that is covered was seen."""
        self.is_covered = False
        for system_stream, number, said in self.erasures:
            stream, claim = said["erased_stream"], said["claim"]
            known = self.known.get(stream, {**UNBORN, "broken": not self.complete})
            folded = said.get("payloads_digest") or reduce(
                lambda a, b: sha256((a + b).encode()), said["artifact_digests"], "0" * 64)
            is_it = [known["number"], known["digest"], known["payloads"], known["present"]] == [
                said["last_sequence_number"], said["last_entry_digest"], folded, 0]
            is_own = claim is None or self.claims.setdefault(claim["key_digest"], stream) == stream
            if not is_own or not (is_it or known["broken"]):
                yield Wrong(RECOVERY, f"{stream} is not what was erased, or another has its key", system_stream, number)
            elif is_it:
                known["missing"], known["erased"] = 0, True
        for stream, number, of, field, digest in self.references:
            known = self.known.get(of, {})
            if (not known and self.complete) or (known and not known["broken"] and known[field] != digest and not (
                    field == "begun_by" and known["erased"])):
                code = CHECKSUM if known else RECOVERY
                yield Wrong(code, f"that is not what {of} is, or it is missing", stream, number)
            self.counts["answers that a partial bundle cannot show"] += not known and not self.complete
        yield from (Wrong(RECOVERY, "payloads are missing, and no covered erasure says so", stream, known["number"])
                    for stream, known in sorted(self.known.items()) if known["missing"] and not known["broken"])
# The tree (RFC 6962) and its heads (C2SP signed-note, tlog-checkpoint), for steps 3 and 4.
def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()
def proven(index: int, size: int, proof: list[bytes], leaf: bytes) -> bytes:  # the root that a proof leads to
    if size == 1 and index == 0 and not proof:
        return leaf
    need(size > 1 and proof, PROOF, "the proof has the wrong length, or the leaf is beyond the tree")
    half = 1 << ((size - 1).bit_length() - 1)
    if index < half:
        return node(proven(index, half, proof[:-1], leaf), proof[-1])
    return node(proof[-1], proven(index - half, size - half, proof[:-1], leaf))
def base(origin: str) -> str:
    return re.sub(r"(?<=.)/epoch-[1-9][0-9]{0,8}\Z", "", origin)  # what all epochs of a log have in common
def read_key(text: str) -> tuple[str, bytes]:
    name, key_id, encoded = [*text.strip().split("+", 2), "", ""][:3]
    raw = base64(encoded, 33)
    need(sha256(f"{name}\n".encode() + raw)[:8] == key_id and raw[0] == 1, NOTE, "that is no Ed25519 verifier key")
    return name, raw[1:]
def read_head(note: str, keys: list[tuple[str, bytes]]) -> tuple[str, int, bytes]:
    """Origin, size and root, signed by a key that is trusted for this log. A wrong one of such a key spoils it."""
    text, _, rest = note.rpartition("\n\n")
    head = re.fullmatch(r"([^\n]+)\n([1-9][0-9]{0,15})\n([^\n]+)", text)
    signed = [re.fullmatch(r"— ([^\s+]+) ([A-Za-z0-9+/=]+)", line) for line in rest.removesuffix("\n").split("\n")]
    is_note = rest.endswith("\n") and all(signed) and len(signed) <= 64 and not re.search(r"[\0-\x09\x0b-\x1f]", note)
    if head is None or not is_note or len(note.encode()) > NOTE_BYTES_MAX:
        raise Wrong(NOTE, "that is no signed tree head")
    signatures = [(line[1], base64(line[2])) for line in signed if line]
    fit = [is_signed(key, raw[4:], f"{text}\n".encode()) for name, raw in signatures for known, key in keys
           if (name == known or (name == head[1] and base(name) == base(known)))
           and sha256(f"{name}\n".encode() + b"\1" + key)[:8] == raw[:4].hex()]
    need(fit and all(fit), NOTE, "nobody who is trusted has signed the head")
    return head[1], int(head[2]), base64(head[3], 32)
# The bundle: the steps in their order.
class Bundle:
    def __init__(self, folder: Path, keys: list[tuple[str, bytes]], kept: list[str]) -> None:
        self.folder, self.keys, self.kept, self.counts = folder, keys, kept, Counter[str]()
        self.findings, self.after_head = list[Wrong](), list[Wrong]()  # of steps 1 to 6; of step 7
        self.epochs, self.former = list[Json](), list[tuple[str, int, bytes]]()  # breaks; kept heads from before them
    def verify(self) -> None:
        self.attempt(self.findings, self.read_manifest)
        steps = (self.verify_kept, self.verify_head, self.verify_entries, self.verify_blobs)
        for step in steps if not self.findings else ():
            self.attempt(self.findings, step)  # without manifest and schemas nothing can be judged
    def attempt(self, findings: list[Wrong], what: Callable[..., None], *arguments: Any) -> None:
        """What is wrong is a finding, at the stream and number that come first, if they do."""
        try:
            what(*arguments)
        except (Wrong, KeyError, TypeError, AttributeError, ValueError, RecursionError, OSError) as error:
            wrong = error if isinstance(error, Wrong) else Wrong(MALFORMED, f"not what it should be: {error!r}")
            place = arguments[:2] if len(arguments) > 1 else (wrong.stream, wrong.sequence_number)
            code = BUNDLE if wrong.code == MALFORMED and place[0] is None else wrong.code
            findings.append(Wrong(code, wrong.what, *place))
    def lines(self, name: str) -> Iterator[bytes]:
        """The lines of a file, none longer than it may be; at their end, whether it is the file that was exported."""
        digest, size, count, facts = hashlib.sha256(), 0, 0, self.files[name]
        need((self.folder / name).is_file(), BUNDLE, f"{name} is missing, or no file")
        with (self.folder / name).open("rb") as file:
            while line := file.readline(LINE_BYTES_MAX + 1):
                digest.update(line)
                size, count = size + len(line), count + 1
                yield line
        is_same = written(facts) == written({"sha256": digest.hexdigest(), "bytes": size, "lines": count})
        need(is_same, BUNDLE, f"{name} is not the file that was exported")
    def read_manifest(self) -> None:
        need((self.folder / "manifest.json").is_file(), BUNDLE, "there is no manifest: the export did not finish")
        with (self.folder / "manifest.json").open("rb") as file:
            said = parse(file.read(SMALL_BYTES_MAX + 1), SMALL_BYTES_MAX)
        chosen = [said["filter"][name] for name in ("tenant", "trace_id", "since", "until")]
        chosen.append(said["filter"].get("run_id"))
        is_known = said["format"] == "tga-bundle/1" and said["complete"] is (set(chosen) == {None})
        types = [type(said["created_at"]), type(said["tree"]["size"])]
        is_typed = types == [str, int] and {type(found) for found in chosen} <= {str, type(None)}
        self.has_blobs = said.get("blobs", False)
        need(is_known and is_typed and type(self.has_blobs) is bool, BUNDLE, "no manifest that is known here")
        self.files, self.origin, self.complete, self.tenant = said["files"], said["origin"], said["complete"], chosen[0]
        self.size, self.root = said["tree"]["size"], base64(said["tree"]["root"], 32)
        self.roots: dict[int, tuple[bytes, str]] = {}  # by size: what was signed, and the code when it is not so
        self.read_small_files()
    def read_small_files(self) -> None:
        """The schemas, no more and no fewer than those that are pinned. keys.json is for convenience alone."""
        schemas, listed = dict[str, Json](), ""
        for name in sorted(self.files.keys() - {"entries.jsonl", "heads.jsonl"}):
            is_ours = re.fullmatch(r"keys\.json|schemas/[a-z_]{1,64}\.schema\.json", name)
            need(is_ours, BUNDLE, "the manifest names a file that no bundle has")
            need((self.folder / name).stat().st_size <= SMALL_BYTES_MAX, BUNDLE, f"{name} is too large")
            raw = b"".join(self.lines(name))
            if name != "keys.json":
                schemas[name.removeprefix("schemas/").removesuffix(".schema.json")] = parse(raw, SMALL_BYTES_MAX)
                listed += f"{sha256(raw)}  {name}\n"
        is_pinned = sha256(listed.encode()) == SCHEMAS and "keys.json" in self.files
        need(is_pinned, BUNDLE, "the schemas are not those that are pinned here, or keys.json is missing")
        self.streams = Streams(schemas, self.complete, self.tenant, self.counts)
    def verify_kept(self) -> None:
        """Heads from elsewhere: without them an old backup, or a history that was rewritten, looks sound."""
        kept = [read_head(note[note.find(base(self.origin)):], self.keys) for note in self.kept]  # as a receipt ends
        self.former = [head for head in kept if head[0] != self.origin]
        for _, size, root in (head for head in kept if head[0] == self.origin):
            need(size <= self.size, FORKED, f"the bundle ends before the head of size {size} that was kept")
            need(size < self.size or root == self.root, FORKED, "the head that was kept has another root")
            self.roots[size] = root, FORKED
            self.counts["kept heads that a partial bundle cannot show"] += not self.complete and size < self.size
    def verify_head(self) -> None:
        last = reduce(lambda _, line: line, self.lines("heads.jsonl"), b"{}")
        is_tree = read_head(parse(last, LINE_BYTES_MAX)["note"], self.keys) == (self.origin, self.size, self.root)
        need(is_tree, BUNDLE, "the last head is not the bundle's tree")
        self.roots[self.size] = self.root, PROOF
    def verify_entries(self) -> None:
        """Covered lines: in the tree, then in their streams. When they have ended, step 6; then the others."""
        self.last, self.is_known, self.services = -1, True, list[tuple[int, bytes]]()  # complete subtrees at the edge
        self.find_forks()
        try:
            for raw in self.lines("entries.jsonl"):
                self.verify_line(**parse(raw, LINE_BYTES_MAX))
        finally:
            self.end_covered()
    def find_forks(self) -> None:
        """A fork comes long after the entry that it goes on from: what its source was there must be kept."""
        with suppress(Wrong, OSError):
            for raw in self.lines("entries.jsonl"):
                with suppress(Wrong, KeyError, TypeError, AttributeError, ValueError, RecursionError):
                    if rb'forked_from\":{' in raw:
                        origin = json.loads(parse(raw, LINE_BYTES_MAX)["artifact"])["forked_from"]
                        self.streams.origins[f"run:{origin['run_id']}", origin["sequence_number"]] = None
    def verify_line(self, leaf_index: Any, stream: Any, sequence_number: Any, entry: Any, artifact: Any,
                    proof: Any = ()) -> None:
        is_place = leaf_index is None or (type(leaf_index) is int and leaf_index >= 0)
        is_line = is_place and type(stream) is str and type(sequence_number) is int and sequence_number > 0
        need(is_line and type(proof) in (list, tuple) and len(proof) <= 128, BUNDLE, "a line is not what it should be")
        hashes = [base64(found, 32) for found in proof]
        raw, payload = (found.encode() if type(found) is str else found and base64(found["base64"])
                        for found in (entry, artifact))  # as text, or what is none
        if leaf_index is None:
            self.end_covered()
            self.counts["entries after the head"] += 1
            self.attempt(self.after_head, self.streams.append, stream, sequence_number, raw, payload)
        else:
            if not self.streams.is_covered:
                raise Wrong(BUNDLE, "a covered entry stands after one that no head covers", stream, sequence_number)
            self.attempt(self.findings, self.verify_leaf, stream, sequence_number, leaf_index, raw, hashes)
            self.attempt(self.findings, self.streams.append, stream, sequence_number, raw, payload)
        need(len(self.findings) + len(self.after_head) < FINDINGS_MAX, BUNDLE, "stopped: there may be more findings")
    def end_covered(self) -> None:
        if self.streams.is_covered:
            if self.complete and self.counts["leaves"] != self.size:
                self.findings.append(Wrong(GAP, "the bundle does not hold exactly the leaves of its tree"))
            self.findings += self.streams.end_covered()
            self.epochs = list(self.streams.epochs.get("system:default", ()))
            if self.origin != (self.epochs[-1]["origin"] if self.epochs else base(self.origin)):
                self.findings.append(Wrong(BUNDLE, "the log's epoch is not the one that the covered entries tell of"))
            ended = {one["former"]["origin"]: (one["former"]["size"], one["former"]["root"]) for one in self.epochs}
            self.findings += [Wrong(FORKED, f"a kept head of {at} is not of a log that ended") for at, size, root in
                              self.former if size >= ended.get(at, (0, ""))[0] and ended.get(at) != (size, root.hex())]
    def verify_leaf(self, stream: str, number: int, index: int, entry: bytes, proof: list[bytes]) -> None:
        self.counts["leaves"] += 1
        leaf, before, self.last = hashlib.sha256(b"\0" + entry).digest(), self.last, index
        if not self.complete:
            need(index > before, GAP, "leaves are repeated or out of order")
            need(proven(index, self.size, proof, leaf) == self.root, PROOF, "the proof does not lead to the root")
            return
        self.services.append((1, leaf))
        while len(self.services) > 1 and self.services[-1][0] == self.services[-2][0]:
            (_, right), (size, left) = self.services.pop(), self.services.pop()
            self.services.append((2 * size, node(left, right)))
        was_known, self.is_known = self.is_known, self.is_known and index == before + 1
        need(self.is_known or not was_known, GAP, "leaves are missing, repeated or out of order")
        if self.is_known and index + 1 in self.roots:  # after the first that does not fit, no root can be right
            root = reduce(lambda right, left: node(left[1], right), self.services[-2::-1], self.services[-1][1])
            self.is_known = root == self.roots[index + 1][0]
            need(self.is_known, self.roots[index + 1][1], f"an entry up to leaf {index} is not what was signed")
    def verify_blobs(self) -> None:
        for (digest, size), place in self.streams.blobs.items():
            if self.has_blobs:
                self.attempt(self.findings, self.verify_blob, *place, digest, size)
            self.counts["blobs" if self.has_blobs else "blobs not checked"] += 1
            need(len(self.findings) < FINDINGS_MAX, BUNDLE, "stopped: there may be more findings")
    def verify_blob(self, stream: str, number: int, digest: str, size: int) -> None:
        """In pieces, and never more of them than there should be."""
        path, found, left = self.folder / "blobs" / digest[:2] / digest, hashlib.sha256(), size + 1
        need(path.is_file() or not path.exists(), "BLOB_DAMAGED", f"blob {digest} is no file")
        need(path.exists(), "BLOB_NOT_FOUND", f"blob {digest} is not in the bundle")
        with path.open("rb") as file:
            while left and (piece := file.read(min(left, 1 << 18))):
                found.update(piece)
                left -= len(piece)
        need(left == 1 and found.hexdigest() == digest, "BLOB_DAMAGED", f"the bytes are not those of blob {digest}")
def main() -> int:
    try:
        folder, key, *heads = [argument for argument in sys.argv[1:] if argument != "--json"]
        keys = [read_key(text) for text in (Path(key).read_text() if Path(key).is_file() else key).split()]
        bundle = Bundle(Path(folder), keys, [Path(head).read_text() for head in heads])
    except (Wrong, OSError, ValueError):
        print(__doc__)
        return 2
    bundle.verify()
    found, after = ([vars(wrong) for wrong in wrongs] for wrongs in (bundle.findings, bundle.after_head))
    after_head = {"entries": bundle.counts["entries after the head"], "findings": after}
    said = {"sound": not found + after, "checked": bundle.counts, "findings": found, "after_head": after_head}
    print(json.dumps({**said, "epochs": bundle.epochs}, indent=None if "--json" in sys.argv else 2))
    return 1 if found + after else 0
if __name__ == "__main__":
    sys.exit(main())
