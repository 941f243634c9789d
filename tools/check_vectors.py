"""Judge the conformance vectors a second time, from the contract alone.

    python -I -S tools/check_vectors.py [VECTORS_FILE] [--schemas DIRECTORY]

Python's standard library and the JSON Schema files; nothing of the gateway, nothing of the generator. Its own RFC
8785 writer, transition table, fold, and an interpreter of those schema keywords that the schemas use: any other
keyword is an error, so that nothing is passed over. Limits: text is trusted to be strict JSON (unique keys, no lone
surrogates), and integers are written as they are read, so they must be safe ones. Vectors of runs, beside VECTORS_FILE,
are judged by tools/verify.py, which is as foreign to the gateway as this file.
"""

from __future__ import annotations

import argparse
import base64
import collections
import hashlib
import importlib.util
import json
import re
import sys
import types
from pathlib import Path
from typing import Any, Final, cast

ROOT = Path(__file__).resolve().parent.parent
SCHEMA, GAP = "SCHEMA_VIOLATION", "STATE_SEQUENCE_GAP"
CHECKSUM, TRANSITION = "STATE_CHECKSUM_MISMATCH", "STATE_INVALID_TRANSITION"
RECOVERY = "STATE_RECOVERY_FAILED"

# (state, artifact type, verdict) -> next state; the birth has no state before it.
TABLE: dict[tuple[str | None, str, str | None], str] = {
    (None, "action_request", None): "PENDING",
    ("PENDING", "supervisor_decision", "APPROVE"): "AUTHORIZED",
    ("PENDING", "supervisor_decision", "DENY"): "DENIED",
    ("AUTHORIZED", "tool_call", None): "EXECUTING",
    ("EXECUTING", "tool_effect", "SUCCESS"): "COMPLETED",
    ("EXECUTING", "tool_effect", "FAILURE"): "FAILED",
}
VERDICT_FIELD = {"supervisor_decision": "decision", "tool_effect": "outcome"}
# Each artifact names the digest of the one before it.
BINDS_FIELD = {
    "supervisor_decision": "action_request_digest",
    "tool_call": "supervisor_decision_digest",
    "tool_effect": "tool_call_digest",
}
DIGEST_FIELDS = ("action_request_digest", "supervisor_decision_digest", "tool_call_digest", "tool_effect_digest")


class Refused(Exception):
    """A document or a log that the contract does not admit."""

    def __init__(self, code: str) -> None:
        self.code = code
        super().__init__(code)


def require(holds: bool, code: str) -> None:
    if not holds:
        raise Refused(code)


# --- RFC 8785 ---------------------------------------------------------------------------------------------------

ESCAPES = {'"': '\\"', "\\": "\\\\", "\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r"}


def canonical(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, str):
        return '"' + "".join(ESCAPES.get(c) or (f"\\u{ord(c):04x}" if c < " " else c) for c in value) + '"'
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return number(value)
    if isinstance(value, list):
        return "[" + ",".join(canonical(member) for member in value) + "]"
    # Section 3.2.3: by UTF-16 code units, not by code points.
    keys = sorted(value, key=lambda key: key.encode("utf-16-be"))
    return "{" + ",".join(canonical(key) + ":" + canonical(value[key]) for key in keys) + "}"


def number(value: float) -> str:
    """ECMAScript's Number::toString. `repr` gives the same shortest digits; only where the point goes differs."""
    if value == 0:
        return "0"  # also for -0.0
    mantissa, _, exponent = repr(abs(value)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    fraction = "" if fraction == "0" else fraction
    point = len(whole) + int(exponent or 0)
    digits = whole + fraction
    stripped = digits.lstrip("0")
    point -= len(digits) - len(stripped)
    digits = stripped.rstrip("0")
    count = len(digits)
    if count <= point <= 21:
        text = digits + "0" * (point - count)
    elif 0 < point <= 21:
        text = digits[:point] + "." + digits[point:]
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        sign = "+" if point > 0 else "-"
        text = digits[0] + ("." + digits[1:] if count > 1 else "") + "e" + sign + str(abs(point - 1))
    return ("-" if value < 0 else "") + text


def digest(value: Any) -> str:
    return hashlib.sha256(canonical(value).encode()).hexdigest()


# --- JSON Schema ------------------------------------------------------------------------------------------------

SILENT = {"$schema", "$id", "$comment", "$defs", "title", "description", "then", "else"}
TYPES: dict[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "null": (type(None),),
}


class Schemas:
    def __init__(self, directory: Path) -> None:
        documents = [json.loads(path.read_text("utf-8")) for path in sorted(directory.glob("*.schema.json"))]
        self.by_id = {document["$id"]: document for document in documents}

    def fits(self, name: str, value: Any) -> bool:
        root = self.by_id["urn:tga:schema:v1:" + name]
        return self.admits(root, value, root)

    def admits(self, schema: Any, value: Any, root: Any) -> bool:
        if isinstance(schema, bool):
            return schema
        return all(self.keyword(key, schema, value, root) for key in schema if key not in SILENT)

    def keyword(self, key: str, schema: Any, value: Any, root: Any) -> bool:
        rule = schema[key]
        is_text, is_map, is_list = isinstance(value, str), isinstance(value, dict), isinstance(value, list)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        match key:
            case "$ref":
                if rule.startswith("#/$defs/"):
                    return self.admits(root["$defs"][rule.removeprefix("#/$defs/")], value, root)
                return self.admits(self.by_id[rule], value, self.by_id[rule])
            case "type":
                return isinstance(value, TYPES[rule]) and not isinstance(value, bool)
            case "const":
                return same(rule, value)
            case "enum":
                return any(same(member, value) for member in rule)
            case "required":
                return not is_map or all(field in value for field in rule)
            case "properties":
                return not is_map or all(self.admits(rule[f], value[f], root) for f in rule if f in value)
            case "additionalProperties":
                return rule is not False or not is_map or all(field in schema["properties"] for field in value)
            case "items":
                return not is_list or all(self.admits(rule, member, root) for member in value)
            case "maxItems":
                return not is_list or len(value) <= rule
            case "pattern":
                return not is_text or re.search(rule, value) is not None
            case "minLength":
                return not is_text or len(value) >= rule
            case "maxLength":
                return not is_text or len(value) <= rule
            case "minimum":
                return not is_number or value >= rule
            case "maximum":
                return not is_number or value <= rule
            case "anyOf":
                return any(self.admits(choice, value, root) for choice in rule)
            case "allOf":
                return all(self.admits(part, value, root) for part in rule)
            case "not":
                return not self.admits(rule, value, root)
            case "if":
                branch = "then" if self.admits(rule, value, root) else "else"
                return self.admits(schema.get(branch, True), value, root)
        raise ValueError(f"the schemas use a keyword that this file does not know: {key}")


def same(left: Any, right: Any) -> bool:
    # In JSON true is not 1; in Python it is.
    return left == right and isinstance(left, bool) == isinstance(right, bool)


# --- The contract -----------------------------------------------------------------------------------------------


def fold_next(schemas: Schemas, state: Any, record: Any) -> Any:
    """The execution state after one more record; the first check that fails speaks.

    Schema, sequence, chain and digest, transition, binding. `moved` compares the rest of what an artifact binds to.
    """
    entry, artifact = record["entry"], record["artifact"]
    require(schemas.fits("execution_log_entry", entry), SCHEMA)
    kind = entry["artifact_type"]
    require(artifact is None or schemas.fits(kind, artifact), SCHEMA)
    require(state is None or entry["trace_id"] == state["trace_id"], SCHEMA)
    require(entry["sequence_number"] == (state["sequence_number"] if state else 0) + 1, GAP)  # I1
    require(entry["prev_entry_digest"] == (state["entry_digest"] if state else "0" * 64), CHECKSUM)  # I5
    body = {field: value for field, value in entry.items() if field != "entry_digest"}
    require(entry["entry_digest"] == digest(body), CHECKSUM)  # I5
    before = next((state[f] for f in reversed(DIGEST_FIELDS) if state[f] is not None), None) if state else None
    verdict = None
    if artifact is not None:
        require(entry["artifact_digest"] == digest(artifact), CHECKSUM)
        verdict = artifact[VERDICT_FIELD[kind]] if kind in VERDICT_FIELD else None
    standing = state["state"] if state else None
    admitted = {
        to for (at, of, by), to in TABLE.items() if (at, of) == (standing, kind) and (artifact is None or by == verdict)
    }
    require(entry["from_state"] == (standing or "PENDING") and entry["to_state"] in admitted, TRANSITION)
    require(artifact is not None, RECOVERY)
    require(artifact["trace_id"] == entry["trace_id"], CHECKSUM)
    require(kind not in BINDS_FIELD or artifact[BINDS_FIELD[kind]] == before, CHECKSUM)
    return moved(state, entry, artifact)


def moved(state: Any, entry: Any, artifact: Any) -> Any:
    kind = entry["artifact_type"]
    if kind == "action_request":
        state = {"schema_id": "tga/v1/execution_state", "schema_version": "1.0", "trace_id": entry["trace_id"]}
        state |= {field: artifact[field] for field in ("server_id", "tool_name", "tool_class", "idempotency_key")}
        state |= {"payload_digest": payload(artifact), "tool_call_id": None, **dict.fromkeys(DIGEST_FIELDS)}
    elif kind == "tool_call":  # exactly the call that was decided on, and no other
        require(payload(artifact) == state["payload_digest"], CHECKSUM)
        require(all(artifact[field] == state[field] for field in ("tool_class", "idempotency_key")), CHECKSUM)
        state = {**state, "tool_call_id": artifact["tool_call_id"]}
    elif kind == "tool_effect":
        require(artifact["tool_call_id"] == state["tool_call_id"], CHECKSUM)
    at = {"state": entry["to_state"], "updated_at": entry["recorded_at"]}
    at |= {field: entry[field] for field in ("sequence_number", "entry_digest")}
    return {**state, **at, f"{kind}_digest": entry["artifact_digest"]}


def payload(call: Any) -> str:
    return digest({field: call[field] for field in ("server_id", "tool_name", "arguments")})


def recovery(state: Any, claim_effect: str | None) -> Any:
    """What a recovered trace calls for; I3: without an effect the same call again, with one never."""
    if state["state"] == "EXECUTING":
        require(claim_effect is None, RECOVERY)  # the claim knows an effect that the log does not
        return {"action": "dispatch", **{field: state[field] for field in ("tool_call_id", "idempotency_key")}}
    return {
        "action": {"PENDING": "ask_supervisor", "AUTHORIZED": "append_tool_call"}.get(state["state"], "return_result")
    }


def verify_checkpoint(schemas: Schemas, checkpoint: Any, entry: Any) -> Any:
    require(schemas.fits("execution_checkpoint", checkpoint), SCHEMA)
    state = checkpoint["checkpoint_state"]
    require(checkpoint["checkpoint_digest"] == digest(state), CHECKSUM)  # I4
    require(checkpoint["trace_id"] == state["trace_id"], CHECKSUM)
    require(entry is not None, CHECKSUM)
    behind = ("tool_effect_digest", "tool_call_digest", "supervisor_decision_digest", "action_request_digest")
    stands_on = {
        "trace_id": state["trace_id"],
        "sequence_number": state["sequence_number"],
        "entry_digest": state["entry_digest"],
        "to_state": state["state"],
        "recorded_at": state["updated_at"],
        "artifact_digest": next(state[field] for field in behind if state[field]),
    }
    require(all(entry[field] == value for field, value in stands_on.items()), CHECKSUM)
    return state


def fold_system(schemas: Schemas, state: Any, record: Any) -> Any:
    """What counts after one more record of a system stream; the first check that fails speaks."""
    entry, artifact = record["entry"], record["artifact"]
    require(schemas.fits("system_log_entry", entry), SCHEMA)
    require(artifact is None or schemas.fits(entry["artifact_type"], artifact), SCHEMA)
    state = state or {
        "system_id": entry["system_id"],
        "at": 0,
        "head": "0" * 64,
        "pins": {},
        "keys": {},
        "policy": None,
        "procedures": {},
        "schedules": {},
    }
    require(entry["system_id"] == state["system_id"], SCHEMA)
    require(entry["sequence_number"] == state["at"] + 1, GAP)  # I1
    require(entry["prev_entry_digest"] == state["head"], CHECKSUM)  # I5
    body = {field: value for field, value in entry.items() if field != "entry_digest"}
    require(entry["entry_digest"] == digest(body), CHECKSUM)  # I5
    require(artifact is not None and entry["artifact_digest"] == digest(artifact), CHECKSUM)
    require(artifact["system_id"] == entry["system_id"], CHECKSUM)
    state = {**state, "at": entry["sequence_number"], "head": entry["entry_digest"]}
    match entry["artifact_type"]:
        case "tool_pin":
            tool = artifact["server_id"], artifact["tool_name"]
            pinned, quarantined = state["pins"].get(tool, (None, ()))
            if artifact["change"] == "quarantined" and pinned is not None:
                pin = pinned, (*quarantined, artifact["definition_digest"])
            else:
                pin = artifact["definition_digest"], ()
            return {**state, "pins": {**state["pins"], tool: pin}}
        case "signing_key":
            name = hashlib.sha256(base64.b64decode(artifact["public_key"])).hexdigest()[:16]
            require(artifact["key_id"] == f"ed25519:{name}", CHECKSUM)
            known = artifact["principal_id"], artifact["change"] == "retired"
            return {**state, "keys": {**state["keys"], artifact["key_id"]: known}}
        case "policy_set":
            require(artifact["policy_digest"] == hashlib.sha256(artifact["text"].encode()).hexdigest(), CHECKSUM)
            return {**state, "policy": artifact["policy_digest"]}
        case "log_epoch":
            former = artifact["former"]
            epoch, origin = state.get("epoch", (1, former["origin"]))
            require((artifact["epoch"], former["origin"]) == (epoch + 1, origin), CHECKSUM)
            root = base64.b64encode(bytes.fromhex(former["root"])).decode()
            require(former["note"].startswith(f"{origin}\n{former['size']}\n{root}\n\n"), CHECKSUM)
            require(artifact["leaves_lost"] == former["size"] - artifact["kept_size"], CHECKSUM)
            return {**state, "epoch": (artifact["epoch"], artifact["origin"])}
        case "procedure_registration":
            program = artifact["version"], artifact["program_digest"]
            others = [known for known in state["procedures"].get(artifact["name"], ()) if known != program]
            return {**state, "procedures": {**state["procedures"], artifact["name"]: [*others, program]}}
        case "schedule":
            return {**state, "schedules": {**state["schedules"], artifact["name"]: state["at"]}}
        case "schedule_removal":
            kept = {name: at for name, at in state["schedules"].items() if name != artifact["name"]}
            return {**state, "schedules": kept}
    return state


def told(state: Any) -> Any:
    """A system stream's state, in the form of a vector's `expect`."""
    state = state or {"pins": {}, "keys": {}, "policy": None, "procedures": {}, "schedules": {}}
    return {
        "pins": [
            {
                "server_id": tool[0],
                "tool_name": tool[1],
                "definition_digest": pin[0],
                "quarantined_digests": sorted(pin[1]),
            }
            for tool, pin in sorted(state["pins"].items())
        ],
        "keys": [
            {"key_id": key_id, "principal_id": known[0], "is_retired": known[1]}
            for key_id, known in sorted(state["keys"].items())
        ],
        "policy_digest": state["policy"],
        "procedures": {
            name: [{"version": version, "program_digest": program} for version, program in programs]
            for name, programs in state["procedures"].items()
        },
        "schedules": state["schedules"],
    }


def judged(schemas: Schemas, section: str, vector: Any) -> Any:
    """What this file says of a vector, in the form of its `expect`."""
    place, state = 0, cast("Any", None)
    fold = fold_system if section == "system_vectors" else fold_next
    try:
        if section == "checkpoint_vectors":
            state = verify_checkpoint(schemas, vector["checkpoint"], vector["entry"])
        for record in vector["tail" if section == "checkpoint_vectors" else "records"]:
            place += 1
            state = fold(schemas, state, record)
        if section == "recovery_vectors":
            return {"ok": True, "state": state["state"], **recovery(state, vector["claim_effect"])}
    except Refused as refused:
        return {"error": refused.code, "at": place}
    if section == "system_vectors":
        return {"ok": True, "system_state": told(state)}
    if state is not None and not schemas.fits("execution_state", state):
        return {"error": "the folded state does not fit its schema", "at": place}
    return {"ok": True, "state": state and state["state"], "execution_state": state}


_ED25519 = (".hazmat.primitives.asymmetric", ".hazmat.primitives.asymmetric.ed25519")


_P: Final = 2**255 - 19
_L: Final = 2**252 + 27742317777372353535851937790883648493
_D: Final = -121665 * pow(121666, _P - 2, _P) % _P
_BASE_Y: Final = 4 * pow(5, _P - 2, _P) % _P
Point = tuple[int, int, int, int]


def _added(p: Point, q: Point) -> Point:
    a, b = (p[1] - p[0]) * (q[1] - q[0]) % _P, (p[1] + p[0]) * (q[1] + q[0]) % _P
    c, d = 2 * p[3] * q[3] * _D % _P, 2 * p[2] * q[2] % _P
    e, f, g, h = b - a, d - c, d + c, b + a
    return e * f % _P, g * h % _P, f * g % _P, e * h % _P


def _times(factor: int, point: Point) -> Point:
    result: Point = (0, 1, 1, 0)
    while factor:
        if factor & 1:
            result = _added(result, point)
        point, factor = _added(point, point), factor >> 1
    return result


def _point(raw: bytes) -> Point:
    """RFC 8032, 5.1.3; ValueError for what is no point."""
    number = int.from_bytes(raw, "little")
    sign, y = number >> 255, number & ((1 << 255) - 1)
    square = (y * y - 1) * pow(_D * y * y + 1, _P - 2, _P) % _P
    x = pow(square, (_P + 3) // 8, _P)
    if (x * x - square) % _P:
        x = x * pow(2, (_P - 1) // 4, _P) % _P
    if y >= _P or (x * x - square) % _P or (x == 0 and sign):
        raise ValueError("no point of the curve")
    x = _P - x if x & 1 != sign else x
    return x, y, 1, x * y % _P


class PlainPublicKey:
    """Ed25519 (RFC 8032, 5.1.7) in plain Python: slow, and for verifying alone."""

    def __init__(self, raw: bytes) -> None:
        self._raw, self._point = raw, _point(raw)

    @classmethod
    def from_public_bytes(cls, raw: bytes) -> PlainPublicKey:
        return cls(raw)

    def verify(self, signature: bytes, message: bytes) -> None:
        r, s = signature[:32], int.from_bytes(signature[32:], "little")
        if len(signature) != 64 or s >= _L:
            raise ValueError("no signature")
        h = int.from_bytes(hashlib.sha512(r + self._raw + message).digest(), "little") % _L
        left = _times(s, _point(_BASE_Y.to_bytes(32, "little")))
        right = _added(_point(r), _times(h, self._point))
        same_x = (left[0] * right[2] - right[0] * left[2]) % _P == 0
        if not same_x or (left[1] * right[2] - right[1] * left[2]) % _P:
            raise ValueError("the signature does not fit")


def load_verifier() -> Any:
    """tools/verify.py as a module. It verifies signatures with `cryptography`; where that is absent, with what is
    below."""
    if importlib.util.find_spec("cryptography") is None:
        for name in ("", ".exceptions", ".hazmat", ".hazmat.primitives", *_ED25519):
            absent = sys.modules[f"cryptography{name}"] = types.ModuleType(f"cryptography{name}")
            vars(absent).update(InvalidSignature=ValueError, Ed25519PublicKey=PlainPublicKey)
    spec = importlib.util.spec_from_file_location("verify", ROOT / "tools" / "verify.py")
    if spec is None or spec.loader is None:
        raise SystemExit("tools/verify.py cannot be loaded")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judged_run(verifier: Any, schemas: dict[str, Any], vector: Any) -> Any:
    """What tools/verify.py says of a run vector, in the form of its `expect`."""
    streams = verifier.Streams(schemas, True, None, collections.Counter())
    for record in vector["records"]:
        origin = (record["artifact"] or {}).get("forked_from")
        if isinstance(origin, dict):
            streams.origins[f"run:{origin['run_id']}", origin["sequence_number"]] = None
    places: dict[tuple[str, int], int] = {}
    for place, record in enumerate(vector["records"], start=1):
        body = {field: value for field, value in record["entry"].items() if field != "entry_digest"}
        raw, payload = (canonical(part).encode() for part in (body, record["artifact"]))
        number = record["entry"]["sequence_number"]
        places.setdefault((record["stream"], number), place)
        try:
            streams.append(record["stream"], number, raw, payload)
        except verifier.Wrong as wrong:
            return {"error": wrong.code, "at": place}
    for found in streams.end_covered():
        return {"error": found.code, "at": places[found.stream, found.sequence_number]}
    return {"ok": True, "states": {stream: known["state"] for stream, known in streams.known.items()}}


def check_runs(path: Path, directory: Path) -> tuple[int, int]:
    """How many vectors of runs pass, and how many fail."""
    document, verifier = json.loads(path.read_text("utf-8")), load_verifier()
    schemas = {
        file.name.removesuffix(".schema.json"): json.loads(file.read_text("utf-8"))
        for file in directory.glob("*.schema.json")
    }
    counts, failed = {"positive": 0, "negative": 0}, 0
    for vector in document["run_vectors"]:
        expected = vector["expect"]
        counts["negative" if "error" in expected else "positive"] += 1
        found = judged_run(verifier, schemas, vector)
        if found != expected:
            failed += 1
            print(f"run_vectors: {vector['name']}: expected {json.dumps(expected)}, found {json.dumps(found)}")
    if counts != document["counts"] or counts["negative"] <= counts["positive"]:
        failed += 1
        print(f"counts of runs: the header says {document['counts']}, the file holds {counts}")
    return len(document["run_vectors"]) - failed, failed


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Judge the conformance vectors without the gateway's code.")
    vectors = ROOT / "test_vectors" / "tga" / "state_transition_vectors.json"
    parser.add_argument("vectors", nargs="?", type=Path, default=vectors)
    parser.add_argument("--schemas", type=Path, default=ROOT / "schemas" / "tga" / "v1")
    options = parser.parse_args(arguments)
    schemas = Schemas(options.schemas)
    document = json.loads(options.vectors.read_text("utf-8"))
    passed = failed = 0
    counts = {"positive": 0, "negative": 0}
    for section in ("log_vectors", "recovery_vectors", "checkpoint_vectors", "system_vectors"):
        for vector in document[section]:
            expected = {key: value for key, value in vector["expect"].items() if key != "documents_valid"}
            counts["negative" if "error" in expected else "positive"] += 1
            found = judged(schemas, section, vector)
            if found == expected:
                passed += 1
            else:
                failed += 1
                print(f"{section}: {vector['name']}: expected {json.dumps(expected)}, found {json.dumps(found)}")
    if counts != document["counts"] or counts["negative"] <= counts["positive"]:
        failed += 1
        print(f"counts: the header says {document['counts']}, the file holds {counts}")
    runs = options.vectors.with_name("run_vectors.json")
    if runs.is_file():
        passed, failed = (a + b for a, b in zip((passed, failed), check_runs(runs, options.schemas), strict=True))
    print(f"{passed} passed, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
