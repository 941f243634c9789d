"""Verify an exported bundle of a TGA ledger. Needs Python 3.11+ and `cryptography`; no database, no network, none of
the gateway's code. Meant to be read before it is trusted: bytes, documents, streams, tree, bundle, report.

    python verify.py BUNDLE KEY [--json]

KEY is the log's verifier key (`name+id+base64`), or a file with one or more of them, a line each. It must come from
somewhere else than the bundle. Exit 0: sound. 1: something is wrong. 2: bad usage. Takes some 1 KB for each trace.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator
from functools import reduce
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

GAP, CHECKSUM, TRANSITION = "STATE_SEQUENCE_GAP", "STATE_CHECKSUM_MISMATCH", "STATE_INVALID_TRANSITION"
RECOVERY, SCHEMA, SIGNATURE = "STATE_RECOVERY_FAILED", "SCHEMA_VIOLATION", "SIGNATURE_INVALID"
MALFORMED, BUNDLE, PROOF, NOTE = "INPUT_MALFORMED", "BUNDLE_INVALID", "PROOF_INVALID", "NOTE_INVALID"
LINE_BYTES_MAX, SMALL_BYTES_MAX, SAFE_MAX, DEPTH_MAX, FINDINGS_MAX = 2_097_152, 262_144, 2**53 - 1, 64, 1_000
Json = dict[str, Any]


class Wrong(Exception):
    def __init__(self, code: str, what: str, stream: str | None = None, number: int | None = None) -> None:
        self.code, self.what, self.stream, self.number = code, what, stream, number


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
    try:
        value = json.loads(raw.decode(), object_pairs_hook=unique)
        canonical(value)
    except (ValueError, RecursionError) as error:
        raise Wrong(MALFORMED, f"not JSON: {type(error).__name__}") from None
    need(isinstance(value, dict), MALFORMED, "not a JSON object")
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
    """Whether a value fits a schema; a keyword that is not known here is an error, not passed over."""
    if isinstance(schema, bool):
        return schema
    need(schema.keys() <= RULES.keys(), BUNDLE, f"a schema uses {sorted(schema.keys() - RULES.keys())}")
    return all(RULES[name](value, rule, schema, root) for name, rule in schema.items())


TYPES = {"string": str, "object": dict, "array": list, "null": type(None), "boolean": bool, "integer": int}
RULES: dict[str, Callable[[Any, Any, Json, Json], bool]] = {  # value, rule, the schema it is in, the whole schema
    **dict.fromkeys(["$schema", "$id", "$defs", "$comment", "title", "description", "then", "else"], lambda *_: True),
    "$ref": lambda v, r, s, root: fits(v, root["$defs"][r.removeprefix("#/$defs/")], root),
    "type": lambda v, r, s, root: any(type(v) is TYPES[one] for one in ([r] if isinstance(r, str) else r)),
    "const": lambda v, r, s, root: type(v) is type(r) and v == r,
    "enum": lambda v, r, s, root: any(type(v) is type(one) and v == one for one in r),
    "pattern": lambda v, r, s, root: not isinstance(v, str) or bool(re.search(re.sub(r"\$$", r"\\Z", r), v)),
    "minLength": lambda v, r, s, root: not isinstance(v, str) or len(v) >= r,
    "maxLength": lambda v, r, s, root: not isinstance(v, str) or len(v) <= r,
    "minimum": lambda v, r, s, root: type(v) is not int or v >= r,
    "maximum": lambda v, r, s, root: type(v) is not int or v <= r,
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


def sha_of(document: Json, fields: tuple[str, ...]) -> str:
    return sha256(canonical([document[field] for field in fields]).encode())


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
CALL = ("server_id", "tool_name", "arguments", "tool_class", "idempotency_key")
UNBORN = {"number": 0, "digest": "0" * 64, "state": "", "artifact": None, "payloads": "0" * 64, "present": 0,
          "missing": 0, "broken": False, "tenant": "default", "call": None, "call_id": None}  # fmt: skip


class Streams:
    """All streams through one another, in the order of the tree. The first wrong entry ends its stream."""

    def __init__(self, schemas: dict[str, Json], complete: bool) -> None:
        self.schemas, self.complete, self.signatures, self.erased = schemas, complete, 0, 0
        self.known: dict[str, Json] = {}  # by stream: where it stands
        self.keys: dict[tuple[str, str], tuple[bytes, str | None]] = {}  # tenant and key id: the key, and whose it is
        self.claims: dict[str, str] = {}  # server, tool and idempotency key: the trace that made the call
        self.erasures: list[tuple[str, list[Any], str, int]] = []

    def document(self, raw: bytes, schema: str, bytes_max: int, **digest: str) -> Json:
        document = parse(raw, bytes_max)
        is_canonical = canonical(document).encode() == raw and not digest.keys() & document.keys()
        need(is_canonical, SCHEMA, f"the {schema} is not in canonical form")
        need(schema in self.schemas, BUNDLE, f"the schema of a {schema} is missing")
        is_fit = fits({**document, **digest}, self.schemas[schema], self.schemas[schema])
        need(is_fit, SCHEMA, f"the {schema} does not fit its schema")
        return document

    def append(self, stream: str, number: int, raw: bytes, payload: bytes | None) -> None:
        """Schema, sequence, chain and digest, transition, signature, claim: the first that fails speaks."""
        known = self.known.setdefault(stream, dict(UNBORN))
        if known["broken"]:
            return
        known["broken"] = True  # until all is well
        kind, _, identity = stream.partition(":")
        is_trace, expected, digest = kind == "trace", known["number"] + 1, sha256(raw)
        need(is_trace or kind == "system", SCHEMA, "no such kind of stream")
        need(is_trace or number == expected, GAP, f"entry {expected} is missing")
        schema = "execution_log_entry" if is_trace else "system_log_entry"
        entry = self.document(raw, schema, 262_144, entry_digest=digest)
        name, artifact = entry["artifact_type"], None
        need(is_trace or payload is not None, CHECKSUM, "the artifact is missing")
        if payload is not None:
            need(sha256(payload) == entry["artifact_digest"], CHECKSUM, "the artifact is not what the entry commits to")
            artifact = self.document(payload, name, 524_288)
        need(entry[f"{kind}_id"] == identity, SCHEMA, "the entry is of another stream")
        need(entry["sequence_number"] == number == expected, GAP, f"entry {expected} is missing, or not in its place")
        need(entry["prev_entry_digest"] == known["digest"], CHECKSUM, "the entry does not link to the one before it")
        if artifact is not None:
            need(artifact[f"{kind}_id"] == identity, CHECKSUM, "the artifact names another stream")
            is_bound = name not in BINDS or artifact[BINDS[name]] == known["artifact"]
            need(is_bound, CHECKSUM, "the artifact does not bind to the one before it")
            is_call = name != "tool_call" or known["call"] in (None, sha_of(artifact, CALL))
            is_effect = name != "tool_effect" or known["call_id"] in (None, artifact["tool_call_id"])
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
            known["call"] = known["call_id"] = None  # what is missing cannot be compared with
        known.update(number=number, digest=digest, state=entry["to_state"], artifact=entry["artifact_digest"],
                     payloads=sha256((known["payloads"] + entry["artifact_digest"]).encode()), broken=False)  # fmt: skip
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
                said = [artifact["last_sequence_number"], artifact["last_entry_digest"], folded, 0]
                self.erasures.append((artifact["erased_stream"], said, stream, number))

    def verify_decision(self, decision: Json, tenant: str) -> None:
        """Signed by a key that a system stream announced before: the gateway's, or of whoever decided."""
        signature = decision["signature"] or {"key_id": "", "value": ""}
        key, owner = self.keys.get(("default", signature["key_id"]), (b"", ""))
        if owner is not None:  # not the gateway's
            key, owner = self.keys.get((tenant, signature["key_id"]), (b"", ""))
        need(owner in (None, decision["decided_by"]["id"]), SIGNATURE, "no key of whoever decided has signed it")
        unsigned = ("policy_digest", "policy_ids", "signature")
        said = canonical({field: value for field, value in decision.items() if field not in unsigned}).encode()
        value = b64decode(signature["value"])
        is_fit = b64encode(value).decode() == signature["value"] and is_signed(key, value, said)
        need(is_fit, SIGNATURE, "the signature does not fit the decision")
        self.signatures += 1

    def end(self) -> Iterator[Wrong]:
        """Payloads may be missing only if a system stream says that they were erased, all of them."""
        for stream, said, system_stream, number in self.erasures:
            known = self.known.get(stream) if stream.startswith("trace:") else None
            if known is None and self.complete:
                yield Wrong(RECOVERY, f"the erasure is of a stream that is not here: {stream}", system_stream, number)
            elif known is not None and not known["broken"]:
                if said != [known["number"], known["digest"], known["payloads"], known["present"]]:
                    yield Wrong(RECOVERY, f"the erasure is not of {stream} as it stands", system_stream, number)
                else:
                    self.erased, known["missing"] = self.erased + known["missing"], 0
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
    is_own = raw[0] == 1 and hashlib.sha256(f"{name}\n".encode() + raw).hexdigest()[:8] == key_id
    need(is_own, NOTE, "that is no Ed25519 verifier key: name+id+base64")
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
           for known, key_id, key in keys if (known, key_id) == (name, raw[:4])]  # fmt: skip
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
    is_same = facts == {"sha256": digest.hexdigest(), "bytes": size, "lines": count}
    need(is_same, BUNDLE, f"{path.name} is not the file that was exported")


class Bundle:
    def __init__(self, folder: Path, keys: list[tuple[str, bytes, bytes]]) -> None:
        self.folder, self.keys, self.findings = folder, keys, list[Wrong]()
        self.counts = dict.fromkeys(("leaves", "after_head", "heads", "heads_signed"), 0)

    def attempt(self, what: Callable[..., None], *arguments: Any) -> None:
        """What is wrong is a finding, at the stream and number that come first, if they do."""
        place = arguments[:2] if len(arguments) > 1 else (None, None)
        try:
            what(*arguments)
        except Wrong as wrong:
            code = BUNDLE if wrong.code == MALFORMED and place[0] is None else wrong.code
            self.findings.append(Wrong(code, wrong.what, *place))
        except (KeyError, TypeError, AttributeError, ValueError, OSError) as error:
            self.findings.append(Wrong(BUNDLE, f"a file is not what it should be: {error!r}"))

    def verify(self) -> None:
        """Of the files with lines, the first line that cannot be read ends the file."""
        self.attempt(self.read_manifest)
        if not self.findings:
            self.schemas: dict[str, Json] = {}
            for name in sorted(self.files.keys() - {"entries.jsonl", "heads.jsonl"}):
                self.attempt(self.read_small, name)
            self.streams, self.roots = Streams(self.schemas, self.complete), dict[int, bytes]()
            self.attempt(self.verify_heads)
            self.attempt(self.verify_entries)
            self.findings += self.streams.end()

    def read_manifest(self) -> None:
        need((self.folder / "manifest.json").is_file(), BUNDLE, "there is no manifest: the export did not finish")
        manifest = parse((self.folder / "manifest.json").read_bytes(), SMALL_BYTES_MAX)
        self.files, self.complete, self.origin = manifest["files"], manifest["complete"], manifest["origin"]
        self.tree = manifest["tree"]["size"], base64(manifest["tree"]["root"], 32)
        is_whole = self.complete is (set(manifest["filter"].values()) == {None})
        need(is_whole and manifest["format"] == "tga-bundle/1", BUNDLE, "no manifest that is known here")
        need({"entries.jsonl", "heads.jsonl", "keys.json"} <= self.files.keys(), BUNDLE, "a file is missing")

    def read_small(self, name: str) -> None:
        is_known = re.fullmatch(r"keys\.json|schemas/[a-z_]{1,64}\.schema\.json", name)
        need(is_known, BUNDLE, "no bundle has such a file")  # and no way leads out of the folder
        text = b"".join(lines(self.folder / name, self.files[name]))
        self.schemas[name.removeprefix("schemas/").partition(".")[0]] = parse(text, SMALL_BYTES_MAX)

    def verify_heads(self) -> None:
        """In order, signed, in a partial bundle each proven to continue the one before; the last is the tree."""
        last, trusted = (0, b""), False
        for raw in lines(self.folder / "heads.jsonl", self.files["heads.jsonl"]):
            line = parse(raw, LINE_BYTES_MAX)
            trusted, origin, size, root = read_head(line["note"], self.keys)
            self.counts["heads"] += 1
            self.counts["heads_signed"] += trusted
            need(last[0] < size == line["size"], BUNDLE, "the heads are not in order")
            need(origin == self.origin or not trusted, BUNDLE, "a head is of another log")
            if last[0] and not self.complete:
                proof = [base64(found, 32) for found in line.get("proof", ())]
                is_next = continued(last[0], size, proof, last[1]) == (last[1], root)
                need(is_next, PROOF, f"the head of size {size} does not continue the one before")
            last, self.roots[size] = (size, root), root
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
                              else found.encode() for found in (line["entry"], line["artifact"]))  # fmt: skip
            is_line = type(stream) is str and type(number) is int and number > 0 and type(index) in (int, type(None))
            need(is_line and entry is not None, BUNDLE, "a line is not what it should be")
            self.attempt(self.verify_leaf, stream, number, index, entry, line.get("proof", ()))
            self.attempt(self.streams.append, stream, number, entry, payload)
            if len(self.findings) >= FINDINGS_MAX:
                return
        is_all = not self.complete or self.counts["leaves"] == self.tree[0]
        need(is_all, GAP, f"the bundle ends before its tree: {self.counts['leaves']} of {self.tree[0]} entries")

    def verify_leaf(self, stream: str, number: int, index: int | None, entry: bytes, hashes: list[str]) -> None:
        self.counts["after_head" if index is None else "leaves"] += 1
        if index is None:
            return need(stream.startswith("system:"), GAP, "only system entries may be newer than the tree")
        leaf, before, self.last = hashlib.sha256(b"\0" + entry).digest(), self.last, index
        if not self.complete:
            need(index > before, GAP, "leaves are repeated or out of order")
            root = proven(index, self.tree[0], [base64(found, 32) for found in hashes], leaf)
            return need(root == self.tree[1], PROOF, "the proof does not lead to the root")
        self.edge.append((1, leaf))
        while len(self.edge) > 1 and self.edge[-1][0] == self.edge[-2][0]:
            (_, right), (size, left) = self.edge.pop(), self.edge.pop()
            self.edge.append((2 * size, node(left, right)))
        if self.is_known:  # after the first that is not the one that was signed, no root can be right
            self.is_known = index == before + 1
            need(self.is_known, GAP, "leaves are missing, repeated or out of order")
            root = reduce(lambda right, left: node(left[1], right), self.edge[-2::-1], self.edge[-1][1])
            self.is_known = self.roots.get(index + 1, root) == root
            need(self.is_known, PROOF, f"an entry up to leaf {index} is not the one that was signed")
        return None


def main() -> int:
    arguments = [argument for argument in sys.argv[1:] if argument != "--json"]
    try:
        folder, key = arguments
        keys = [read_key(text) for text in (Path(key).read_text() if Path(key).is_file() else key).split()]
    except (Wrong, OSError, ValueError):
        print(__doc__)
        return 2
    bundle = Bundle(Path(folder), keys)
    bundle.verify()
    findings = [{"code": wrong.code, "what": wrong.what, "stream": wrong.stream, "sequence_number": wrong.number}
                for wrong in bundle.findings]  # fmt: skip
    if "--json" in sys.argv:
        print(json.dumps({"sound": not findings, "checked": bundle.counts, "findings": findings}))
    else:
        for found in findings:
            print("WRONG  {code}  {stream} {sequence_number}: {what}".format(**found))
        print("checked:", ", ".join(f"{count} {name}" for name, count in bundle.counts.items()))
        print("sound" if not findings else f"{len(findings)} findings: do not trust it")
        print("Not known: what came after the last head; what a partial bundle leaves out; what erased payloads said.")
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
