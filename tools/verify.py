"""Verify an exported bundle of a TGA ledger. Needs Python 3.11+ and `cryptography`; no database, no network, none of
the gateway's code. Meant to be read before it is trusted: bytes, documents, streams, tree, bundle, report.

    python verify.py BUNDLE KEY [HEAD ...] [--json]

KEY is the log's verifier key (`name+id+base64`), or a file with one or more of them, a line each. It must come from
somewhere else than the bundle. HEADs are files with signed heads that you kept: only they show an old backup. Exit 0:
sound. 1: something is wrong. 2: bad usage. Takes some 1 KB for each trace. Laid out densely, to be read in one sitting.
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
from functools import reduce
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

GAP, CHECKSUM, TRANSITION = "STATE_SEQUENCE_GAP", "STATE_CHECKSUM_MISMATCH", "STATE_INVALID_TRANSITION"
RECOVERY, SCHEMA, SIGNATURE, NOTE = "STATE_RECOVERY_FAILED", "SCHEMA_VIOLATION", "SIGNATURE_INVALID", "NOTE_INVALID"
MALFORMED, BUNDLE, PROOF, FORKED = "INPUT_MALFORMED", "BUNDLE_INVALID", "PROOF_INVALID", "LOG_FORKED"
LINE_BYTES_MAX, SMALL_BYTES_MAX, SAFE_MAX, DEPTH_MAX, FINDINGS_MAX = 2_097_152, 262_144, 2**53 - 1, 64, 1_000
Json = dict[str, Any]

class Wrong(Exception):
    def __init__(self, code: str, what: str, stream: str | None = None, number: int | None = None) -> None:
        self.code, self.what, self.stream, self.sequence_number = code, what, stream, number
def need(holds: object, code: str, what: str) -> None:
    if not holds:
        raise Wrong(code, what)

# Bytes to documents: strict JSON, RFC 8785, and the keywords of JSON Schema that the contracts use.
def parse(raw: bytes, bytes_max: int) -> Json:
    """A JSON object, strictly: unique keys, and only what can be written again."""
    def unique(members: list[tuple[str, Any]]) -> Json:
        need(len(dict(members)) == len(members), MALFORMED, "a key is repeated")
        return dict(members)
    need(len(raw) <= bytes_max, MALFORMED, f"more than {bytes_max} bytes")
    value: Json = json.loads(raw.decode(), object_pairs_hook=unique)
    need(canonical(value)[0] == "{", MALFORMED, "not a JSON object")
    return value

def canonical(value: Any, depth: int = DEPTH_MAX) -> str:
    """RFC 8785, for what is not too deep, has no NUL or lone surrogate, and numbers that a double holds exactly."""
    if isinstance(value, str):
        need("\0" not in value, MALFORMED, "a string holds NUL")
        value.encode()  # raises ValueError at a lone surrogate
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, int | float):
        is_large = isinstance(value, float) and 1e21 <= abs(value) < float("inf")
        need(abs(value) <= SAFE_MAX or is_large, MALFORMED, "a number that a double cannot hold exactly")
    if isinstance(value, float):
        if value == int(value) and not is_large:
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

def fits(value: Any, schema: Any, root: Json) -> bool:
    """Whether a value fits a schema; a keyword that is not known here is a KeyError, not passed over."""
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
    "maxItems": lambda v, r, s, root: type(v) is not list or len(v) <= r,
    "anyOf": lambda v, r, s, root: any(fits(v, one, root) for one in r),
    "allOf": lambda v, r, s, root: all(fits(v, one, root) for one in r),
    "not": lambda v, r, s, root: not fits(v, r, root),
    "if": lambda v, r, s, root: fits(v, s.get("then" if fits(v, r, root) else "else", True), root)}

def sha256(raw: bytes) -> str:
    return hashlib.sha256(raw).hexdigest()
def sha_of(document: Json, fields: tuple[str, ...]) -> str:
    return sha256(canonical([document[field] for field in fields]).encode())
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

# Streams: hash-chained entries. State, artifact and its verdict lead to a state; a trace is born PENDING.
TABLE = {("", "action_request", ""): "PENDING", ("PENDING", "supervisor_decision", "APPROVE"): "AUTHORIZED",
         ("PENDING", "supervisor_decision", "DENY"): "DENIED", ("AUTHORIZED", "tool_call", ""): "EXECUTING",
         ("EXECUTING", "tool_effect", "SUCCESS"): "COMPLETED", ("EXECUTING", "tool_effect", "FAILURE"): "FAILED"}
VERDICT = {"supervisor_decision": "decision", "tool_effect": "outcome"}
BINDS = {"supervisor_decision": "action_request_digest", "tool_call": "supervisor_decision_digest",
         "tool_effect": "tool_call_digest"}
CALL = ("server_id", "tool_name", "arguments", "tool_class", "idempotency_key")
UNBORN = {"number": 0, "digest": "0" * 64, "state": "", "artifact": None, "payloads": "0" * 64, "present": 0,
          "missing": 0, "broken": False, "tenant": "default", "call": None, "call_id": None}

class Streams:
    """All streams through one another, in the order of the tree. The first wrong entry ends its stream."""
    def __init__(self, schemas: dict[str, Json], complete: bool) -> None:
        self.schemas, self.complete, self.is_covered = schemas, complete, True
        self.known: dict[str, Json] = {}  # by stream: where it stands
        self.keys: dict[tuple[str, str], tuple[bytes, str | None]] = {}  # tenant and key id: the key, and whose it is
        self.claims: dict[str, str] = {}  # server, tool and idempotency key: the trace that made the call
        self.erasures: list[tuple[str, list[Any], str, int, bool]] = []
    def document(self, raw: bytes, schema: str, bytes_max: int, **digest: str) -> Json:
        document, rules = parse(raw, bytes_max), self.schemas[schema]
        need(canonical(document).encode() == raw, SCHEMA, f"the {schema} is not in canonical form")
        is_fit = not digest.keys() & document.keys() and fits({**document, **digest}, rules, rules)
        need(is_fit, SCHEMA, f"the {schema} does not fit its schema")
        return document
    def append(self, stream: str, number: int, raw: bytes, payload: bytes | None) -> None:
        """Schema, sequence, chain and digest, transition, binding, signature, claim: the first that fails speaks."""
        known = self.known.setdefault(stream, dict(UNBORN))
        if known["broken"]:
            return
        known["broken"] = True  # until all is well
        kind, _, identity = stream.partition(":")
        is_trace, expected, digest = kind == "trace", known["number"] + 1, sha256(raw)
        need(is_trace or kind == "system", SCHEMA, "no such kind of stream")
        need(is_trace or number == expected, GAP, f"entry {expected} is missing")
        entry = self.document(raw, ("system", "execution")[is_trace] + "_log_entry", 262_144, entry_digest=digest)
        name, artifact = entry["artifact_type"], None
        need(is_trace or payload is not None, CHECKSUM, "the artifact is missing")
        if payload is not None:
            need(sha256(payload) == entry["artifact_digest"], CHECKSUM, "the artifact is not what the entry commits to")
            artifact = self.document(payload, name, 524_288)
        need(entry[f"{kind}_id"] == identity, SCHEMA, "the entry is of another stream")
        need(entry["sequence_number"] == number == expected, GAP, f"entry {expected} is missing, or not in its place")
        need(entry["prev_entry_digest"] == known["digest"], CHECKSUM, "the entry does not link to the one before it")
        if is_trace:  # a system stream is OPEN, which its schema demands
            state, verdict = known["state"], None if artifact is None else artifact.get(VERDICT.get(name, ""), "")
            admitted = [to for (at, one, v), to in TABLE.items() if (at, one) == (state, name) and verdict in (None, v)]
            is_admitted = entry["from_state"] == (state or "PENDING") and entry["to_state"] in admitted
            need(is_admitted, TRANSITION, f"{state or 'a new trace'} does not admit this {name}")
        if artifact is not None:
            need(artifact[f"{kind}_id"] == identity, CHECKSUM, "the artifact names another stream")
            is_bound = name not in BINDS or artifact[BINDS[name]] == known["artifact"]
            is_call = name != "tool_call" or known["call"] in (None, sha_of(artifact, CALL))
            is_effect = name != "tool_effect" or known["call_id"] in (None, artifact["tool_call_id"])
            need(is_bound and is_call and is_effect, CHECKSUM, "the artifact does not go with the ones before it")
            self.note(stream, number, name, artifact, known)
        else:
            known["call"] = known["call_id"] = None  # what is missing cannot be compared with
        known.update(number=number, digest=digest, state=entry["to_state"], artifact=entry["artifact_digest"],
                     payloads=sha256((known["payloads"] + entry["artifact_digest"]).encode()), broken=False)
        known["missing" if artifact is None else "present"] += 1
    def note(self, stream: str, number: int, name: str, artifact: Json, known: Json) -> None:
        """What an artifact means for what comes later: the call, its claim, a signature, a key, an erasure."""
        match name:
            case "action_request":
                known.update(tenant=artifact["principal"]["tenant"], call=sha_of(artifact, CALL))
            case "tool_call" if known["call"] is not None:
                known["call_id"] = artifact["tool_call_id"]
                claim = sha_of(artifact, ("server_id", "tool_name", "idempotency_key"))
                is_own = artifact["idempotency_key"] is None or self.claims.setdefault(claim, stream) == stream
                need(is_own, RECOVERY, "two traces made a call with one idempotency key")
            case "supervisor_decision" if artifact["decided_by"]["type"] in ("person", "withdrawal"):
                self.verify_decision(artifact, known["tenant"])
            case "signing_key":
                key = base64(artifact["public_key"], 32)
                need(artifact["key_id"] == f"ed25519:{sha256(key)[:16]}", CHECKSUM, "a key under another's name")
                self.keys[artifact["system_id"], artifact["key_id"]] = key, artifact["principal_id"]
            case "policy_set" if artifact["policy_digest"] != sha256(artifact["text"].encode()):
                raise Wrong(CHECKSUM, "a policy stands under another's name")
            case "erasure":
                folded = reduce(lambda a, b: sha256((a + b).encode()), artifact["artifact_digests"], "0" * 64)
                said = [artifact["last_sequence_number"], artifact["last_entry_digest"], folded]
                self.erasures.append((artifact["erased_stream"], said, stream, number, self.is_covered))
    def verify_decision(self, decision: Json, tenant: str) -> None:
        """Signed by a key that a system stream announced before: the gateway's, or of whoever decided."""
        signature = decision["signature"] or {"key_id": "", "value": ""}
        gateway = self.keys.get(("default", signature["key_id"]), (b"", ""))
        key, owner = gateway if gateway[1] is None else self.keys.get((tenant, signature["key_id"]), (b"", ""))
        need(owner in (None, decision["decided_by"]["id"]), SIGNATURE, "no key of whoever decided has signed it")
        said = canonical({f: v for f, v in decision.items() if f not in ("policy_digest", "policy_ids", "signature")})
        value = b64decode(signature["value"])
        is_fit = b64encode(value).decode() == signature["value"] and is_signed(key, value, said.encode())
        need(is_fit, SIGNATURE, "the signature does not fit the decision")
    def end(self) -> Iterator[Wrong]:
        """Payloads may be missing only if a system stream says that they were erased, all of them."""
        for stream, said, system_stream, number, is_covered in self.erasures:
            known = self.known.get(stream, {**UNBORN, "broken": not self.complete})
            found = [known["number"], known["digest"], known["payloads"]]
            if not known["broken"] and (found != said or (known["present"] and is_covered)):
                yield Wrong(RECOVERY, f"the erasure is not of {stream} as it stands", system_stream, number)
            elif found == said:
                known["missing"] = 0
        for stream, known in sorted(self.known.items()):
            if known["missing"] and not known["broken"]:
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
    need(sha256(f"{name}\n".encode() + raw)[:8] == key_id and raw[0] == 1, NOTE, "that is no Ed25519 verifier key")
    return name, bytes.fromhex(key_id), raw[1:]

def read_head(note: str, keys: list[tuple[str, bytes, bytes]]) -> tuple[bool, str, int, bytes]:
    """Whether a trusted key has signed it, its origin, size and root. A wrong signature under such a key spoils it."""
    text, _, rest = note.rpartition("\n\n")
    head = re.fullmatch(r"([^\n]+)\n([1-9][0-9]{0,15})\n([^\n]+)", text)
    lines = [re.fullmatch(r"— ([^\s+]+) ([A-Za-z0-9+/=]+)", line) for line in rest.removesuffix("\n").split("\n")]
    is_note = rest.endswith("\n") and all(lines) and len(lines) <= 64 and not re.search(r"[\0-\x09\x0b-\x1f]", note)
    if head is None or not is_note:
        raise Wrong(NOTE, "that is no signed tree head")
    signatures = [(line[1], base64(line[2])) for line in lines if line]
    fit = [is_signed(key, raw[4:], f"{text}\n".encode()) for name, raw in signatures
           for known, key_id, key in keys if (known, key_id) == (name, raw[:4])]
    need(all(fit), NOTE, "a signature under a trusted key does not fit")
    return bool(fit), head[1], int(head[2]), base64(head[3], 32)

# The bundle, and what can be said of it.
def lines(path: Path, facts: Json) -> Iterator[bytes]:
    """The lines of a file, none longer than it may be; at their end, whether it is the file that was exported."""
    digest, size, count = hashlib.sha256(), 0, 0
    need(path.is_file(), BUNDLE, f"{path.name} is missing, or no file")
    with path.open("rb") as file:
        while line := file.readline(LINE_BYTES_MAX + 1):
            digest.update(line)
            size, count = size + len(line), count + 1
            yield line
    need(facts == {"sha256": digest.hexdigest(), "bytes": size, "lines": count}, BUNDLE, f"{path.name} was changed")

class Bundle:
    def __init__(self, folder: Path, keys: list[tuple[str, bytes, bytes]], kept: list[str]) -> None:
        self.folder, self.keys, self.kept, self.findings = folder, keys, kept, list[Wrong]()
        self.counts = Counter[str]()
    def attempt(self, what: Callable[..., None], *arguments: Any) -> None:
        """What is wrong is a finding, at the stream and number that come first, if they do."""
        place = arguments[:2] if len(arguments) > 1 else (None, None)
        try:
            what(*arguments)
        except (Wrong, KeyError, TypeError, AttributeError, ValueError, RecursionError, OSError) as error:
            wrong = error if isinstance(error, Wrong) else Wrong(MALFORMED, f"not what it should be: {error!r}")
            code = BUNDLE if wrong.code == MALFORMED and place[0] is None else wrong.code
            self.findings.append(Wrong(code, wrong.what, *place))
    def verify(self) -> None:
        self.attempt(self.read_manifest)
        if not self.findings:
            self.schemas: dict[str, Json] = {}
            for name in sorted(self.files.keys() - {"entries.jsonl", "heads.jsonl"}):
                self.attempt(self.read_small, name)
            self.streams = Streams(self.schemas, self.complete)
            self.roots: dict[int, tuple[bytes, str]] = {}  # by size: what was signed, and the code when it is not so
            for part in (self.verify_kept, self.verify_heads, self.verify_entries):
                self.attempt(part)
            self.findings += self.streams.end()
    def read_manifest(self) -> None:
        need((self.folder / "manifest.json").is_file(), BUNDLE, "there is no manifest: the export did not finish")
        manifest = parse((self.folder / "manifest.json").read_bytes(), SMALL_BYTES_MAX)
        self.files, self.complete, self.origin = manifest["files"], manifest["complete"], manifest["origin"]
        self.tree = manifest["tree"]["size"], base64(manifest["tree"]["root"], 32)
        is_whole = self.complete is (set(manifest["filter"].values()) == {None}) and "keys.json" in self.files
        need(is_whole and manifest["format"] == "tga-bundle/1", BUNDLE, "no manifest that is known here")
    def read_small(self, name: str) -> None:
        need(re.fullmatch(r"keys\.json|schemas/[a-z_]{1,64}\.schema\.json", name), BUNDLE, "no bundle has such a file")
        text = b"".join(lines(self.folder / name, self.files[name]))
        self.schemas[name.removeprefix("schemas/").partition(".")[0]] = parse(text, SMALL_BYTES_MAX)
    def verify_kept(self) -> None:
        """Heads from elsewhere: without them an old backup, or a history that was rewritten, looks sound."""
        for note in self.kept:
            trusted, _, size, root = read_head(note[note.find(f"{self.origin}\n"):], self.keys)  # as a receipt ends
            need(trusted, NOTE, "a head that was kept is not signed by the key")
            self.roots[size] = root, FORKED
            if size > self.tree[0]:
                self.findings.append(Wrong(FORKED, f"the bundle ends before the head of size {size} that was kept"))
    def verify_heads(self) -> None:
        """In order, signed, in a partial bundle each proven to continue the one before; the last is the tree."""
        last, trusted = (0, b""), False
        for raw in lines(self.folder / "heads.jsonl", self.files["heads.jsonl"]):
            line = parse(raw, LINE_BYTES_MAX)
            trusted, origin, size, root = read_head(line["note"], self.keys)
            self.counts["heads signed" if trusted else "heads not signed by the key"] += 1
            need(last[0] < size == line["size"], BUNDLE, "the heads are not in order")
            need(origin == self.origin or not trusted, BUNDLE, "a head is of another log")
            if last[0] and not self.complete:
                proof = [base64(found, 32) for found in line.get("proof", ())]
                is_next = continued(last[0], size, proof, last[1]) == (last[1], root)
                need(is_next, PROOF, f"the head of size {size} does not continue the one before")
            if self.roots.get(size, (root, PROOF))[0] != root:
                self.findings.append(Wrong(FORKED, f"the head of size {size} that was kept has another root"))
            last, self.roots[size] = (size, root), (root, PROOF)
        need(last == self.tree, BUNDLE, "the last head is not the bundle's tree")
        need(trusted, NOTE, "nobody who is trusted has signed the bundle's tree")
    def verify_entries(self) -> None:
        """Every line: its place in the tree, then its place in its stream."""
        self.edge: list[tuple[int, bytes]] = []  # the complete subtrees at the right edge of the tree
        self.last, self.is_known = -1, True
        for raw in lines(self.folder / "entries.jsonl", self.files["entries.jsonl"]):
            line = parse(raw, LINE_BYTES_MAX)
            index, stream, number = line["leaf_index"], line["stream"], line["sequence_number"]
            entry, payload = (None if found is None else base64(found["base64"]) if isinstance(found, dict)
                              else found.encode() for found in (line["entry"], line["artifact"]))
            is_line = type(stream) is str and type(number) is int and number > 0 and type(index) in (int, type(None))
            need(is_line and entry is not None, BUNDLE, "a line is not what it should be")
            self.streams.is_covered = index is not None
            self.attempt(self.verify_leaf, stream, number, index, entry, line.get("proof", ()))
            self.attempt(self.streams.append, stream, number, entry, payload)
            need(len(self.findings) < FINDINGS_MAX, BUNDLE, "there may be more findings: verification stopped here")
        need(not self.complete or self.counts["leaves"] == self.tree[0], GAP, "the bundle ends before its tree does")
    def verify_leaf(self, stream: str, number: int, index: int | None, entry: bytes, hashes: list[str]) -> None:
        self.counts["entries after the head" if index is None else "leaves"] += 1
        leaf, before = hashlib.sha256(b"\0" + entry).digest(), self.last
        self.last = before if index is None else index
        if index is None:
            need(stream.startswith("system:"), GAP, "only system entries may be newer than the tree")
        elif not self.complete:
            need(index > before, GAP, "leaves are repeated or out of order")
            root = proven(index, self.tree[0], [base64(found, 32) for found in hashes], leaf)
            need(root == self.tree[1], PROOF, "the proof does not lead to the root")
        else:
            self.edge.append((1, leaf))
            while len(self.edge) > 1 and self.edge[-1][0] == self.edge[-2][0]:
                (_, right), (size, left) = self.edge.pop(), self.edge.pop()
                self.edge.append((2 * size, node(left, right)))
            was_known, self.is_known = self.is_known, self.is_known and index == before + 1
            need(self.is_known or not was_known, GAP, "leaves are missing, repeated or out of order")
            if self.is_known and index + 1 in self.roots:  # after the first that does not fit, no root can be right
                root = reduce(lambda right, left: node(left[1], right), self.edge[-2::-1], self.edge[-1][1])
                self.is_known = root == self.roots[index + 1][0]
                need(self.is_known, self.roots[index + 1][1], f"an entry up to leaf {index} is not what was signed")

def main() -> int:
    try:
        folder, key, *heads = [argument for argument in sys.argv[1:] if argument != "--json"]
        keys = [read_key(text) for text in (Path(key).read_text() if Path(key).is_file() else key).split()]
        bundle = Bundle(Path(folder), keys, [Path(head).read_text() for head in heads])
    except (Wrong, OSError, ValueError):
        print(__doc__)
        return 2
    bundle.verify()
    if "--json" in sys.argv:
        found = [vars(wrong) for wrong in bundle.findings]
        print(json.dumps({"sound": not found, "checked": bundle.counts, "findings": found}))
    else:
        print(*(f"WRONG  {w.code}  {w.stream} {w.sequence_number}: {w.what!a}" for w in bundle.findings), sep="\n")
        print("not known: what came after the last head; what a partial bundle leaves out; what erased payloads said")
        print(f"{len(bundle.findings)} findings: not sound" if bundle.findings else "sound", dict(bundle.counts))
    return 1 if bundle.findings else 0

if __name__ == "__main__":
    sys.exit(main())
