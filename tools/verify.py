"""Verify an exported bundle of a TGA ledger. Needs Python 3.11+ and `cryptography`; no database, no network, none of
the gateway's code. Meant to be read before it is trusted: bytes, documents, streams, tree, report.

    python verify.py BUNDLE KEY [--json]

KEY is the log's verifier key (`name+id+base64`), or a file with one or more of them, a line each. It must come from
somewhere else than the bundle. Exit 0: sound. 1: something is wrong. 2: bad usage.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from functools import reduce
from itertools import islice
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

GAP, CHECKSUM, TRANSITION = "STATE_SEQUENCE_GAP", "STATE_CHECKSUM_MISMATCH", "STATE_INVALID_TRANSITION"
RECOVERY, SCHEMA, SIGNATURE = "STATE_RECOVERY_FAILED", "SCHEMA_VIOLATION", "SIGNATURE_INVALID"
MALFORMED, BUNDLE, PROOF, NOTE = "INPUT_MALFORMED", "BUNDLE_INVALID", "PROOF_INVALID", "NOTE_INVALID"
ENTRY_BYTES_MAX, ARTIFACT_BYTES_MAX, LINE_BYTES_MAX, SMALL_BYTES_MAX = 262_144, 524_288, 2_097_152, 262_144
SAFE_INTEGER_MAX, DEPTH_MAX, KEYS_MAX, FINDINGS_MAX = 2**53 - 1, 64, 10_000, 1_000
Json = dict[str, Any]


class Wrong(Exception):
    def __init__(self, code: str, what: str, stream: str | None = None, number: int | None = None) -> None:
        self.code, self.what, self.stream, self.number = code, what, stream, number


def need(holds: object, code: str, what: str) -> None:
    if not holds:
        raise Wrong(code, what)


# Bytes to documents: strict JSON, RFC 8785, and the keywords of JSON Schema that the contracts use.


def parse(raw: bytes, bytes_max: int) -> Json:
    """Strict: unique keys, numbers that a double holds exactly, no NUL, no lone surrogate, not too large or deep."""
    keys = 0

    def pairs(members: list[tuple[str, Any]]) -> Json:
        nonlocal keys
        keys += len(members)
        need(len(dict(members)) == len(members) and keys <= KEYS_MAX, MALFORMED, "a key is repeated, or too many")
        return dict(members)

    def number(text: str) -> int | float:
        value = float(text) if any(sign in text for sign in ".eEN") else int(text[:65])  # int("Infinity") raises
        is_safe = abs(value) <= SAFE_INTEGER_MAX or (isinstance(value, float) and 1e21 <= abs(value) < float("inf"))
        need(len(text) <= 64 and is_safe, MALFORMED, "a number that a double cannot hold exactly")
        return value

    need(len(raw) <= bytes_max, MALFORMED, f"more than {bytes_max} bytes")
    try:
        value = json.loads(raw.decode(), object_pairs_hook=pairs, parse_int=number, parse_float=number,
                           parse_constant=number)  # fmt: skip
        canonical(value)
    except (ValueError, RecursionError) as error:
        raise Wrong(MALFORMED, f"not JSON: {type(error).__name__}") from None
    need(isinstance(value, dict), MALFORMED, "not a JSON object")
    return value


def canonical(value: Any, depth: int = DEPTH_MAX) -> str:
    """RFC 8785."""
    if isinstance(value, str):
        need("\0" not in value, MALFORMED, "a string holds NUL")
        value.encode()  # raises ValueError at a lone surrogate
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, float):
        if value == int(value) and abs(value) < 1e21:
            return str(int(value))
        digits, _, exponent = repr(value).partition("e")
        if exponent and -7 < int(exponent) < 0:  # ECMAScript writes out what is not very small
            return f"{'-' * (value < 0)}0.{'0' * (-int(exponent) - 1)}{digits.lstrip('-').replace('.', '')}"
        return f"{digits}e{int(exponent):+}" if exponent else digits
    if not isinstance(value, dict | list):
        return json.dumps(value)
    need(depth > 0, MALFORMED, "nested too deeply")
    if isinstance(value, list):
        return "[" + ",".join(canonical(member, depth - 1) for member in value) + "]"
    members = sorted(value.items(), key=lambda member: member[0].encode("utf-16-be"))
    return "{" + ",".join(f"{canonical(key)}:{canonical(member, depth - 1)}" for key, member in members) + "}"


def fits(value: Any, schema: Json, root: Json) -> bool:
    """Whether a value fits a schema; a keyword that is not known here is an error, not passed over."""
    need(schema.keys() <= RULES.keys(), BUNDLE, f"a schema uses {sorted(schema.keys() - RULES.keys())}")
    return all(RULES[name](value, rule, schema, root) for name, rule in schema.items())


def is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


TYPES: dict[str, Callable[[Any], bool]] = {
    "string": lambda v: isinstance(v, str), "object": lambda v: isinstance(v, dict), "null": lambda v: v is None,
    "array": lambda v: isinstance(v, list), "boolean": lambda v: isinstance(v, bool), "integer": is_integer,
}  # fmt: skip
RULES: dict[str, Callable[[Any, Any, Json, Json], bool]] = {  # value, rule, the schema it is in, the whole schema
    **dict.fromkeys(["$schema", "$id", "$defs", "$comment", "title", "description", "then", "else"], lambda *_: True),
    "$ref": lambda v, r, s, root: fits(v, root["$defs"][r.removeprefix("#/$defs/")], root),
    "type": lambda v, r, s, root: any(TYPES[one](v) for one in ([r] if isinstance(r, str) else r)),
    "const": lambda v, r, s, root: type(v) is type(r) and v == r,
    "enum": lambda v, r, s, root: any(type(v) is type(one) and v == one for one in r),
    "pattern": lambda v, r, s, root: not isinstance(v, str) or bool(re.search(re.sub(r"\$$", r"\\Z", r), v)),
    "minLength": lambda v, r, s, root: not isinstance(v, str) or len(v) >= r,
    "maxLength": lambda v, r, s, root: not isinstance(v, str) or len(v) <= r,
    "minimum": lambda v, r, s, root: not is_integer(v) or v >= r,
    "maximum": lambda v, r, s, root: not is_integer(v) or v <= r,
    "required": lambda v, r, s, root: not isinstance(v, dict) or all(key in v for key in r),
    "properties": lambda v, r, s, root: not isinstance(v, dict) or all(fits(v[k], r[k], root) for k in r if k in v),
    "additionalProperties": lambda v, r, s, root: not isinstance(v, dict) or v.keys() <= s["properties"].keys(),
    "items": lambda v, r, s, root: not isinstance(v, list) or all(fits(member, r, root) for member in v),
    "maxItems": lambda v, r, s, root: not isinstance(v, list) or len(v) <= r,
    "anyOf": lambda v, r, s, root: any(fits(v, one, root) for one in r),
    "allOf": lambda v, r, s, root: all(fits(v, one, root) for one in r),
    "not": lambda v, r, s, root: not fits(v, r, root),
    "if": lambda v, r, s, root: fits(v, s.get("then" if fits(v, r, root) else "else", {}), root),
}  # fmt: skip


def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()


def base64(text: Any, size: int | None = None) -> bytes:
    try:
        raw = b64decode(text, validate=True)
    except (ValueError, TypeError):
        raise Wrong(BUNDLE, "that is no base64") from None
    need(b64encode(raw).decode() == text and size in (None, len(raw)), BUNDLE, "that is no base64 of that length")
    return raw


def is_signed(key: bytes, signature: bytes, message: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


# Streams: hash-chained entries, and the artifact that each commits to.

# State, artifact type and the artifact's verdict lead to a state. A trace is born PENDING.
TABLE = {("", "action_request", ""): "PENDING", ("PENDING", "supervisor_decision", "APPROVE"): "AUTHORIZED",
         ("PENDING", "supervisor_decision", "DENY"): "DENIED", ("AUTHORIZED", "tool_call", ""): "EXECUTING",
         ("EXECUTING", "tool_effect", "SUCCESS"): "COMPLETED",
         ("EXECUTING", "tool_effect", "FAILURE"): "FAILED"}  # fmt: skip
VERDICT = {"supervisor_decision": "decision", "tool_effect": "outcome"}
BINDS = {"supervisor_decision": "action_request_digest", "tool_call": "supervisor_decision_digest",
         "tool_effect": "tool_call_digest"}  # fmt: skip
UNBORN = {"number": 0, "digest": "0" * 64, "state": "", "artifact": None, "payloads": "0" * 64, "present": 0,
          "missing": 0, "broken": False, "erased": False, "tenant": "default", "call": None, "id": None}  # fmt: skip


def call_of(artifact: Json) -> list[Any]:
    return [artifact[field] for field in ("server_id", "tool_name", "arguments", "tool_class", "idempotency_key")]


class Streams:
    """All streams through one another, in the order of the tree. What is known of each is in a temporary database on
    disk, so that memory stays flat. The first wrong entry ends its stream."""

    def __init__(self, schemas: dict[str, Json], complete: bool) -> None:
        self.schemas, self.complete, self.signatures, self.erased = schemas, complete, 0, 0
        self.keys: dict[tuple[str, str], tuple[bytes, str | None]] = {}  # tenant and key id: the key, and whose it is
        self.disk = sqlite3.connect("", isolation_level=None)
        self.disk.executescript("""PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192;
            CREATE TABLE streams (stream PRIMARY KEY, known) WITHOUT ROWID;
            CREATE TABLE claims (claim PRIMARY KEY, stream) WITHOUT ROWID;
            CREATE TABLE erasures (stream, said, system_stream, number); BEGIN;""")

    def load(self, stream: str) -> Json | None:
        row = self.disk.execute("SELECT known FROM streams WHERE stream = ?", (stream,)).fetchone()
        return None if row is None else json.loads(row[0])

    def store(self, stream: str, known: Json) -> None:
        self.disk.execute("INSERT OR REPLACE INTO streams VALUES (?, ?)", (stream, json.dumps(known)))

    def judge(self, stream: str, number: int, entry: bytes, payload: bytes | None) -> None:
        known = self.load(stream) or dict(UNBORN)
        if not known["broken"]:
            try:
                self.append(stream, number, known, entry, payload)
            except Wrong as wrong:
                known["broken"] = True
                raise Wrong(wrong.code, wrong.what, stream, number) from None
            finally:
                self.store(stream, known)

    def document(self, raw: bytes, schema: str, bytes_max: int, **digest: str) -> Json:
        document = parse(raw, bytes_max)
        is_canonical = canonical(document).encode() == raw and not digest.keys() & document.keys()
        need(is_canonical, SCHEMA, f"the {schema} is not in canonical form")
        whole = {**document, **digest}
        need(fits(whole, self.schemas[schema], self.schemas[schema]), SCHEMA, f"the {schema} does not fit its schema")
        return document

    def append(self, stream: str, number: int, known: Json, raw: bytes, payload: bytes | None) -> None:
        """Schema, sequence, chain and digest, transition, signature, claim: the first that fails speaks."""
        kind, _, identity = stream.partition(":")
        need(kind in ("trace", "system"), SCHEMA, "no such kind of stream")
        is_trace, expected, digest = kind == "trace", known["number"] + 1, sha256(raw)
        need(is_trace or number == expected, GAP, f"entry {expected} is missing")
        schema = "execution_log_entry" if is_trace else "system_log_entry"
        entry = self.document(raw, schema, ENTRY_BYTES_MAX, entry_digest=digest)
        name, artifact = entry["artifact_type"], None
        need(is_trace or payload is not None, CHECKSUM, "the artifact is missing")
        if payload is not None:
            need(sha256(payload) == entry["artifact_digest"], CHECKSUM, "the artifact is not what the entry commits to")
            artifact = self.document(payload, name, ARTIFACT_BYTES_MAX)
        need(entry[f"{kind}_id"] == identity, SCHEMA, "the entry is of another stream")
        need(entry["sequence_number"] == number == expected, GAP, f"entry {expected} is missing, or not in its place")
        need(entry["prev_entry_digest"] == known["digest"], CHECKSUM, "the entry does not link to the one before it")
        if artifact is not None:
            is_bound = name not in BINDS or artifact[BINDS[name]] == known["artifact"]
            is_call = name != "tool_call" or known["call"] in (None, call_of(artifact))
            is_effect = name != "tool_effect" or known["id"] in (None, artifact["tool_call_id"])
            need(artifact[f"{kind}_id"] == identity, CHECKSUM, "the artifact names another stream")
            need(is_bound, CHECKSUM, "the artifact does not bind to the one before it")
            need(is_call and is_effect, CHECKSUM, "the tool call or effect is not of the call that was asked for")
        if is_trace:  # a system stream is OPEN, which its schema demands
            verdict = None if artifact is None else artifact[VERDICT[name]] if name in VERDICT else ""
            admitted = {after for (before, one, said), after in TABLE.items()
                        if (before, one) == (known["state"], name) and verdict in (None, said)}  # fmt: skip
            is_admitted = entry["from_state"] == (known["state"] or "PENDING") and entry["to_state"] in admitted
            need(is_admitted, TRANSITION, f"{known['state'] or 'a new trace'} does not admit this {name}")
        if artifact is not None:
            self.note(stream, number, name, artifact, known)
        else:
            known["call"] = known["id"] = None  # what is missing cannot be compared with
        known.update(number=number, digest=digest, state=entry["to_state"], artifact=entry["artifact_digest"],
                     payloads=sha256((known["payloads"] + entry["artifact_digest"]).encode()))  # fmt: skip
        known["missing" if artifact is None else "present"] += 1

    def note(self, stream: str, number: int, name: str, artifact: Json, known: Json) -> None:
        """What an artifact means for what comes later: the call, its claim, a signature, a key, an erasure."""
        match name:
            case "action_request":
                known.update(tenant=artifact["principal"]["tenant"], call=call_of(artifact))
            case "tool_call" if known["call"] is not None:
                known["id"] = artifact["tool_call_id"]
                claim = json.dumps([artifact["server_id"], artifact["tool_name"], artifact["idempotency_key"]])
                self.disk.execute("INSERT OR IGNORE INTO claims VALUES (?, ?)", (claim, stream))
                first = self.disk.execute("SELECT stream FROM claims WHERE claim = ?", (claim,)).fetchone()
                is_own = artifact["idempotency_key"] is None or first == (stream,)
                need(is_own, RECOVERY, "two traces made a call with one idempotency key")
            case "supervisor_decision" if artifact["decided_by"]["type"] in ("person", "withdrawal"):
                self.verify_decision(artifact, known["tenant"])
            case "signing_key":
                key = base64(artifact["public_key"], 32)
                is_named = artifact["key_id"] == f"ed25519:{sha256(key)[:16]}"
                need(is_named, CHECKSUM, "a key stands under another's name")
                self.keys[artifact["system_id"], artifact["key_id"]] = key, artifact["principal_id"]
            case "policy_set":
                is_named = artifact["policy_digest"] == sha256(artifact["text"].encode())
                need(is_named, CHECKSUM, "a policy stands under another's name")
            case "erasure":
                folded = reduce(lambda a, b: sha256((a + b).encode()), artifact["artifact_digests"], "0" * 64)
                said = json.dumps([artifact["last_sequence_number"], artifact["last_entry_digest"], folded, 0])
                row = (artifact["erased_stream"], said, stream, number)
                self.disk.execute("INSERT INTO erasures VALUES (?, ?, ?, ?)", row)

    def verify_decision(self, decision: Json, tenant: str) -> None:
        """Signed by a key that a system stream announced before: the gateway's, or of whoever decided."""
        signature = decision["signature"] or {"key_id": "", "value": ""}
        key, owner = self.keys.get(("default", signature["key_id"]), (b"", ""))
        if owner is not None:  # not the gateway's
            key, owner = self.keys.get((tenant, signature["key_id"]), (b"", ""))
        need(owner in (None, decision["decided_by"]["id"]), SIGNATURE, "no key of whoever decided has signed it")
        unsigned = ("policy_digest", "policy_ids", "signature")
        said = canonical({field: value for field, value in decision.items() if field not in unsigned}).encode()
        is_spelt = b64encode(b64decode(signature["value"])).decode() == signature["value"]
        is_fit = is_spelt and is_signed(key, b64decode(signature["value"]), said)
        need(is_fit, SIGNATURE, "the signature does not fit the decision")
        self.signatures += 1

    def end(self) -> Iterator[Wrong]:
        """Payloads may be missing only if a system stream says that they were erased, all of them."""
        for stream, said, system_stream, number in self.disk.execute("SELECT * FROM erasures ORDER BY rowid"):
            known = self.load(stream) if stream.startswith("trace:") else None
            if known is None and self.complete:
                yield Wrong(RECOVERY, f"the erasure is of a stream that is not here: {stream}", system_stream, number)
            elif known is not None and not known["broken"]:
                if json.loads(said) != [known["number"], known["digest"], known["payloads"], known["present"]]:
                    yield Wrong(RECOVERY, f"the erasure is not of {stream} as it stands", system_stream, number)
                else:
                    self.store(stream, {**known, "erased": True})
        for stream, raw in self.disk.execute("SELECT * FROM streams WHERE stream LIKE 'trace:%' ORDER BY stream"):
            known = json.loads(raw)
            self.erased += known["missing"] if known["erased"] else 0
            if known["missing"] and not known["erased"] and not known["broken"]:
                yield Wrong(RECOVERY, "payloads are missing, and no erasure says so", stream, known["number"])


# The tree (RFC 6962), and its heads (C2SP signed-note and tlog-checkpoint).


def node(left: bytes, right: bytes) -> bytes:
    return hashlib.sha256(b"\1" + left + right).digest()


def proven(index: int, size: int, proof: list[bytes], leaf: bytes) -> bytes:
    """The root that an inclusion proof leads to."""
    if size == 1 and index == 0 and not proof:
        return leaf
    need(size > 1 and proof, PROOF, "the proof has the wrong length, or the leaf is beyond the tree")
    half = 1 << ((size - 1).bit_length() - 1)
    if index < half:
        return node(proven(index, half, proof[:-1], leaf), proof[-1])
    return node(proof[-1], proven(index - half, size - half, proof[:-1], leaf))


def continued(old: int, new: int, proof: list[bytes], old_root: bytes | None) -> tuple[bytes, bytes]:
    """The roots of both trees that a consistency proof leads to. `old_root` is None where the proof has to say it."""
    if old == new and len(proof) == (old_root is None):
        return (old_root or proof[0], old_root or proof[0])
    need(0 < old < new and proof, PROOF, "the proof has the wrong length")
    half = 1 << ((new - 1).bit_length() - 1)
    if old <= half:
        before, after = continued(old, half, proof[:-1], old_root)
        return before, node(after, proof[-1])
    before, after = continued(old - half, new - half, proof[:-1], None)
    return node(proof[-1], before), node(proof[-1], after)


def read_key(text: str) -> tuple[str, bytes, bytes]:
    name, key_id, encoded = [*text.strip().split("+", 2), "", ""][:3]
    raw = base64(encoded, 33)
    is_own = raw[0] == 1 and hashlib.sha256(f"{name}\n".encode() + raw).hexdigest()[:8] == key_id
    need(is_own, NOTE, "that is no Ed25519 verifier key: name+id+base64")
    return name, bytes.fromhex(key_id), raw[1:]


def read_head(note: str, keys: list[tuple[str, bytes, bytes]]) -> tuple[bool, str, int, bytes]:
    """Whether a trusted key has signed it, its origin, size and root. A wrong signature under such a key spoils it."""
    text, _, rest = note.rpartition("\n\n")
    head = re.fullmatch(r"([^\n]+)\n(0|[1-9][0-9]{0,15})\n([^\n]+)", text)
    lines = [re.fullmatch(r"— ([^\s+]+) ([A-Za-z0-9+/=]+)", line) for line in rest.removesuffix("\n").split("\n")]
    is_note = rest.endswith("\n") and all(lines) and len(lines) <= 64 and not re.search(r"[\0-\x09\x0b-\x1f]", note)
    if head is None or not is_note:
        raise Wrong(NOTE, "that is no signed tree head")
    signatures = [(line[1], base64(line[2])) for line in lines if line]
    fit = [is_signed(key, raw[4:], f"{text}\n".encode()) for name, raw in signatures
           for known, key_id, key in keys if (known, key_id) == (name, raw[:4])]  # fmt: skip
    need(all(fit), NOTE, "a signature under a trusted key does not fit")
    return bool(fit), head[1], int(head[2]), base64(head[3], 32)
