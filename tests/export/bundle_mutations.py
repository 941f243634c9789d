"""Ways to change a bundle, as chance and as an attacker would: lines and files inserted, moved, duplicated, removed and
changed, with all that has no secret in it made to fit. Each takes its chance from a seeded generator."""

from __future__ import annotations

import json
import random
from base64 import b64encode
from collections.abc import Callable
from copy import deepcopy
from dataclasses import asdict, dataclass
from typing import Any

from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.domain.log.bundle import ENTRIES, HEADS, KEYS, MANIFEST, SCHEMAS, FileFacts, Filter
from app.domain.system.documents import SystemDocument
from app.domain.system.log import SystemState, plan_system
from tests.export.handmade_ledger import (
    BROUGHT,
    VERIFIER,
    Files,
    Ledger,
    erasure_of,
    key_document,
    pin_document,
    policy_document,
    private_key,
)
from tests.traces import EXECUTOR, time_at

Line = dict[str, Any]
ODD: list[Any] = [None, 0, -1, 1.0, 1.5, True, False, "", "0", "x", [], {}, 2**53, 2**60, [[]], {"base64": "AA=="}]
TENANTS = ["default", "acme", "other"]


@dataclass
class Mutant:
    """A bundle on its way to being another one."""

    ledger: Ledger
    chance: random.Random
    entries: list[Line]
    heads: list[Line]
    manifest: dict[str, Any]
    files: Files  # the others
    is_refitted: bool = True

    @classmethod
    def of(cls, ledger: Ledger, files: Files, chance: random.Random) -> Mutant:
        lines = {name: [json.loads(line) for line in files[name].splitlines()] for name in (ENTRIES, HEADS)}
        rest = {name: raw for name, raw in files.items() if name not in (ENTRIES, HEADS, MANIFEST)}
        return cls(ledger, chance, lines[ENTRIES], lines[HEADS], json.loads(files[MANIFEST]), rest)

    def written(self) -> Files:
        """The files, with a manifest that says of them what they are, unless an operation left it as it was."""
        files = {
            **self.files,
            ENTRIES: b"".join(_json(line) + b"\n" for line in self.entries),
            HEADS: b"".join(_json(line) + b"\n" for line in self.heads),
        }
        named = self.manifest.get("files")
        if self.is_refitted and isinstance(named, dict):
            for name in named.keys() & files.keys():
                named[name] = asdict(FileFacts.of(files[name]))
        return {**files, MANIFEST: _json(self.manifest)}

    def lines(self) -> list[Line]:
        return self.entries if self.chance.random() < 0.85 else self.heads

    def place(self, lines: list[Line]) -> int:
        return self.chance.randrange(len(lines)) if lines else 0

    def line(self) -> Line:
        """One of the entries; an empty one when there are none left."""
        return self.chance.choice(self.entries) if self.entries else {}

    def forged(self, document: SystemDocument, place: int) -> Line:
        """An entry without a leaf that continues its stream as the lines before this place leave it."""
        stream = f"system:{document.system_id}"
        before = [line for line in self.entries[:place] if line.get("stream") == stream]
        head = SystemState(document.system_id).head
        if before and isinstance(before[-1].get("entry"), str) and isinstance(before[-1].get("sequence_number"), int):
            entry = before[-1]["entry"].encode()
            head = Head(max(0, before[-1]["sequence_number"]), digest_of_bytes(entry), "OPEN", None)
        state = SystemState(document.system_id, head)
        (planned,) = plan_system(state, [document], executor_id=EXECUTOR, recorded_at=time_at(9)).entries
        entry, artifact = planned.entry.decode(), planned.artifact.decode()
        number = head.sequence_number + 1
        return {"leaf_index": None, "stream": stream, "sequence_number": number, "entry": entry, "artifact": artifact}


def _json(value: Any) -> bytes:
    return json.dumps(value).encode()


def insert_forged_key(m: Mutant) -> None:
    """The throw-away key of the poisoned ledger's approval, or any other, wherever it helps."""
    key = private_key(m.chance.choice(["throw-away", "throw-away", "gateway", "log"]))
    tenant, principal = m.chance.choice(TENANTS[:2]), m.chance.choice(["alice", None])
    _insert(m, key_document(key, principal, tenant=tenant, change=m.chance.choice(["announced", "retired"])))


def insert_forged_document(m: Mutant) -> None:
    tenant = m.chance.choice(TENANTS)
    _insert(m, m.chance.choice([policy_document("forged", tenant=tenant), pin_document("forged", tenant=tenant)]))


def _insert(m: Mutant, document: SystemDocument) -> None:
    """Before the first line of some trace, at the end, or anywhere; sometimes as if it had a leaf."""
    streams = [line.get("stream") for line in m.entries]
    first = streams.index(m.chance.choice(streams)) if streams else 0
    place = m.chance.choice([len(streams), m.place(m.entries), first])
    line = m.forged(document, place)
    if m.chance.random() < 0.2:
        line["leaf_index"] = m.chance.choice([place, len(m.ledger.rows), m.ledger.size - 1])
    m.entries.insert(place, line)


def strip_and_excuse(m: Mutant) -> None:
    """Payloads of one trace, or of all, removed; with an erasure that says exactly so."""
    streams = sorted({row.stream for row in m.ledger.rows if row.tenant is None})
    for stream in streams if m.chance.random() < 0.2 else [m.chance.choice(streams)]:
        tenant = m.chance.choice([m.ledger.tenant_of(stream), "default"])
        rows = [row for row in m.ledger.rows[: m.ledger.size] if row.stream == stream]
        for line in m.entries:
            if line.get("stream") == stream:
                line["artifact"] = None
        if m.chance.random() < 0.9:
            place = m.chance.choice([len(m.entries), m.place(m.entries)])
            m.entries.insert(place, m.forged(erasure_of(rows, tenant), place))


def strip(m: Mutant) -> None:
    m.line()["artifact"] = None


def restore(m: Mutant) -> None:
    """What was erased or withheld stands again."""
    said: dict[Any, str] = {(row.stream, row.number): row.original.decode() for row in m.ledger.rows}
    is_whole = m.chance.random() < 0.5
    for line in m.entries if is_whole else [m.line()]:
        # Another mutation may have put a list in either place.
        place = (line.get("stream"), line.get("sequence_number"))
        if isinstance(place[0], str) and isinstance(place[1], int):
            line["artifact"] = said.get(place, line.get("artifact"))


def _text(value: Any) -> str:
    return value if isinstance(value, str) else ""


def remove_line(m: Mutant) -> None:
    lines = m.lines()
    del lines[m.place(lines) : m.place(lines) + m.chance.choice([1, 1, 3])]


def remove_stream(m: Mutant) -> None:
    """Some stream, or its tail: what a partial bundle cannot show."""
    stream = m.line().get("stream")
    keep = m.chance.choice([0, 1, 2, 3])
    found = [line for line in m.entries if line.get("stream") == stream]
    dropped = {id(line) for line in found[keep:]}
    m.entries[:] = [line for line in m.entries if id(line) not in dropped]


def cut_tail(m: Mutant) -> None:
    lines = m.lines()
    del lines[m.place(lines) :]


def duplicate_line(m: Mutant) -> None:
    lines = m.lines()
    if lines:
        lines.insert(m.chance.choice([m.place(lines), len(lines)]), deepcopy(m.chance.choice(lines)))


def duplicate_uncovered(m: Mutant) -> None:
    """The same line again, without its leaf."""
    m.entries.insert(m.chance.choice([m.place(m.entries), len(m.entries)]), {**deepcopy(m.line()), "leaf_index": None})


def move_line(m: Mutant) -> None:
    lines = m.lines()
    if lines:
        lines.insert(m.place(lines), lines.pop(m.place(lines)))


def move_between_files(m: Mutant) -> None:
    if m.entries and m.heads:
        one, other = m.chance.choice([(m.entries, m.heads), (m.heads, m.entries)])
        other.insert(m.place(other), one.pop(m.place(one)))


def swap_lines(m: Mutant) -> None:
    lines = m.lines()
    if lines:
        one, other = m.place(lines), m.place(lines)
        lines[one], lines[other] = lines[other], lines[one]


def swap_fields(m: Mutant) -> None:
    """Two lines exchange one of their fields: an artifact, a proof, a place."""
    one, other, name = m.line(), m.line(), m.chance.choice(["artifact", "entry", "proof", "leaf_index", "stream"])
    if name in one and name in other:
        one[name], other[name] = other[name], one[name]


def uncover(m: Mutant) -> None:
    m.line()["leaf_index"] = None


def cover(m: Mutant) -> None:
    """Entries behind the head pretend to have a leaf."""
    for line in m.entries:
        if line.get("leaf_index") is None:
            line["leaf_index"] = m.ledger.size + m.chance.choice([-1, 0, 1])
            if m.chance.random() < 0.5:
                line["proof"] = deepcopy(m.line().get("proof", []))


def odd_index(m: Mutant) -> None:
    line = m.line() if m.chance.random() < 0.7 else m.entries[m.chance.randrange(2)] if len(m.entries) > 1 else {}
    index = line.get("leaf_index")
    spelled = (
        [float(index), str(index), -index, index + 1, [index], bool(index)] if isinstance(index, int) else [0, "0"]
    )
    line["leaf_index"] = m.chance.choice([*spelled, *ODD])


def odd_field(m: Mutant) -> None:
    lines = m.lines()
    if lines:
        line = lines[m.place(lines)]
        if line:
            line[m.chance.choice(sorted(line))] = deepcopy(m.chance.choice(ODD))


def drop_field(m: Mutant) -> None:
    lines = m.lines()
    line = lines[m.place(lines)] if lines else {}
    if line:
        del line[m.chance.choice(sorted(line))]


def add_field(m: Mutant) -> None:
    m.line()[m.chance.choice(["proof", "covered", "signature", "entry_digest"])] = deepcopy(m.chance.choice(ODD))


def rename_stream(m: Mutant) -> None:
    """A line, or all of a stream, under another's name."""
    streams = [*sorted({row.stream for row in m.ledger.rows}), "system:other", "run:1", "trace:", "System:default"]
    stream, new = m.line().get("stream"), m.chance.choice(streams)
    found = [line for line in m.entries if line.get("stream") == stream]
    for line in found if m.chance.random() < 0.5 else found[:1]:
        line["stream"] = new


def edit_document(m: Mutant) -> None:
    """A field of an entry or artifact; perhaps the entry commits to it, and those that follow link to it."""
    line, name = m.line(), m.chance.choice(["entry", "artifact"])
    try:
        document = json.loads(line.get(name) or "")
        field = m.chance.choice(sorted(document))
    except (ValueError, TypeError, IndexError):
        return
    others = [json.loads(row.original).get(field) for row in m.ledger.rows]
    document[field] = m.chance.choice([*filter(None, others), deepcopy(m.chance.choice(ODD))])
    try:
        line[name] = canonical_bytes(document).decode()
    except Exception:  # what cannot be written is written anyhow
        line[name] = json.dumps(document)
    if name == "artifact" and m.chance.random() < 0.7:
        _commit(line)
    if m.chance.random() < 0.5:
        _link(m, line.get("stream"))


def _commit(line: Line) -> None:
    try:
        entry = json.loads(line["entry"])
        entry["artifact_digest"] = digest_of_bytes(line["artifact"].encode())
        line["entry"] = canonical_bytes(entry).decode()
    except (KeyError, TypeError, ValueError, AttributeError):
        return


def _link(m: Mutant, stream: Any) -> None:
    """The stream's entries link to one another again, as they stand."""
    before = "0" * 64
    for line in m.entries:
        if line.get("stream") == stream and isinstance(line.get("entry"), str):
            try:
                entry = json.loads(line["entry"])
                entry["prev_entry_digest"] = before
                line["entry"] = canonical_bytes(entry).decode()
            except Exception:
                return
            before = digest_of_bytes(line["entry"].encode())


def respell(m: Mutant) -> None:
    """The same bytes as base64: nothing is changed."""
    line, name = m.line(), m.chance.choice(["entry", "artifact"])
    if isinstance(line.get(name), str):
        line[name] = {"base64": b64encode(line[name].encode()).decode()}


def whiten(m: Mutant) -> None:
    """White space where JSON allows it."""
    line, name = m.line(), m.chance.choice(["entry", "artifact"])
    if isinstance(line.get(name), str):
        line[name] = m.chance.choice([line[name] + " ", line[name].replace(":", ": ", 1), "\n" + line[name]])


def odd_proof(m: Mutant) -> None:
    line = m.line()
    proof = line.get("proof") if isinstance(line.get("proof"), list) else []
    assert isinstance(proof, list)
    zero = b64encode(bytes(32)).decode()
    line["proof"] = m.chance.choice([proof[:-1], proof[::-1], [*proof, zero], [zero] * len(proof), [], ["x"], zero])


def strangers_head(m: Mutant) -> None:
    """A head that someone else has signed: of our root or another, before ours, in its place, or after it."""
    key = private_key("stranger")
    size = m.chance.choice([*m.ledger.sizes, m.ledger.size - 1, len(m.ledger.rows)])
    note = m.ledger.note(size, key, m.chance.choice([VERIFIER.name, "example.org/stranger"]))
    if m.chance.random() < 0.3 and size in m.ledger.sizes:
        note += m.ledger.note(size).rpartition("\n\n")[2]  # our signature over the same text
    m.heads.insert(m.chance.choice([0, len(m.heads)]), {"size": size, "note": note})
    if m.chance.random() < 0.5:
        m.manifest["tree"] = {"size": size, "root": note.split("\n")[2]}


def roll_back(m: Mutant) -> None:
    """The bundle ends at an older head, as if it had been exported then."""
    size = m.chance.choice(m.ledger.sizes)
    until = m.chance.choice([size, size, size - 1])
    m.heads[:] = [line for line in m.heads if not isinstance(line.get("size"), int) or line["size"] <= size]
    m.manifest["tree"] = {"size": size, "root": m.ledger.note(size).split("\n")[2]}
    is_proven = not m.manifest.get("complete")
    kept = []
    for line in m.entries:
        index = line.get("leaf_index")
        if type(index) is int and index >= until:
            if m.chance.random() < 0.5 or not _text(line.get("stream")).startswith("system:"):
                continue
            line = {name: value for name, value in line.items() if name != "proof"} | {"leaf_index": None}
        elif type(index) is int and is_proven and 0 <= index < size:
            line["proof"] = [b64encode(found).decode() for found in m.ledger.inclusion(index, size)]
        kept.append(line)
    m.entries[:] = sorted(kept, key=lambda line: line.get("leaf_index") is None)


def make_partial(m: Mutant) -> None:
    """A complete bundle as that of a tenant or of all time, each line with its proof; so that lines can be left out."""
    m.manifest["complete"] = False
    chosen = {"tenant": m.chance.choice([None, *TENANTS]), "trace_id": None, "since": time_at(0), "until": None}
    m.manifest["filter"] = chosen
    tree = m.manifest.get("tree")
    size = tree.get("size") if isinstance(tree, dict) else m.ledger.size  # another mutation may have made the tree odd
    for line in m.entries:
        index = line.get("leaf_index")
        if type(index) is int and type(size) is int and 0 <= index < size <= len(m.ledger.rows):
            line["proof"] = [b64encode(found).decode() for found in m.ledger.inclusion(index, size)]
    m.heads[:] = m.heads[-1:]


def odd_manifest(m: Mutant) -> None:
    name = m.chance.choice(sorted(m.manifest))
    inner = m.manifest[name]
    if isinstance(inner, dict) and inner and m.chance.random() < 0.7:
        key = m.chance.choice(sorted(inner))
        value = inner[key]
        spelled = [float(value), str(value), value + 1] if type(value) is int else [TENANTS[0]]
        inner[key] = m.chance.choice([*spelled, *ODD])
    else:
        m.manifest[name] = deepcopy(m.chance.choice(ODD))
    m.is_refitted = m.is_refitted and m.chance.random() < 0.5


def odd_filter(m: Mutant) -> None:
    if isinstance(m.manifest.get("filter"), dict):
        m.manifest["filter"]["tenant"] = m.chance.choice([*TENANTS, None])


def remove_file(m: Mutant) -> None:
    name = m.chance.choice(sorted(m.files))
    del m.files[name]
    if m.chance.random() < 0.7 and isinstance(m.manifest.get("files"), dict):
        m.manifest["files"].pop(name, None)


def duplicate_file(m: Mutant) -> None:
    """Under another name; perhaps the manifest names it."""
    name, raw = m.chance.choice(sorted(m.files.items()))
    copy = m.chance.choice(
        [SCHEMAS + "copy.schema.json", "entries.json", "keys2.json", SCHEMAS + name.removeprefix(SCHEMAS)]
    )
    m.files[copy] = raw
    if m.chance.random() < 0.6 and isinstance(m.manifest.get("files"), dict):
        m.manifest["files"][copy] = asdict(FileFacts.of(raw))


def change_schema(m: Mutant) -> None:
    """Permissive, with a pattern that never ends, exchanged with another, or spelled otherwise."""
    names = [name for name in sorted(m.files) if name.startswith(SCHEMAS)]
    if names:
        name, other = m.chance.choice(names), m.chance.choice(names)
        endless = b'{"type": "object", "properties": {"trace_id": {"pattern": "^((.+)+)+$X"}}}'
        m.files[name] = m.chance.choice([b"{}", b"true", endless, m.files[other], m.files[name] + b"\n"])


def change_keys(m: Mutant) -> None:
    """The keys that the bundle brings along count for nothing."""
    m.files[KEYS] = m.chance.choice([b"{}", b"", b'{"verifier_keys": ["stranger+00000000+AA=="]}'])


def leave_manifest(m: Mutant) -> None:
    m.is_refitted = False


Mutation = Callable[[Mutant], None]
MUTATIONS: list[Mutation] = [
    insert_forged_key,
    insert_forged_document,
    strip_and_excuse,
    strip,
    restore,
    remove_line,
    remove_stream,
    cut_tail,
    duplicate_line,
    duplicate_uncovered,
    move_line,
    move_between_files,
    swap_lines,
    swap_fields,
    uncover,
    cover,
    odd_index,
    odd_field,
    drop_field,
    add_field,
    rename_stream,
    edit_document,
    respell,
    whiten,
    odd_proof,
    strangers_head,
    roll_back,
    make_partial,
    odd_manifest,
    odd_filter,
    remove_file,
    duplicate_file,
    change_schema,
    change_keys,
    leave_manifest,
]

WANTED = {
    "complete": Filter(),
    "default": Filter(tenant="default"),
    "acme": Filter(tenant="acme"),
    "since": Filter(since=time_at(0)),
    **{run_id: Filter(tenant="default", run_id=run_id) for run_id in BROUGHT},
}
RUNS = sorted(BROUGHT)  # of a ledger that has them
