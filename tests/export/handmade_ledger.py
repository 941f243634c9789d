"""A ledger without a database, the same on every machine: its entries in the order of the tree, and bundles of it."""

from __future__ import annotations

import hashlib
import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.cli.bundle_files import own_schemas
from app.core.canonical import canonical_bytes
from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.core.ed25519 import key_id_of
from app.core.merkle import (
    Frontier,
    Hash,
    Range,
    consistency_ranges,
    inclusion_ranges,
    leaf_hash,
)
from app.core.note import TreeHead, VerifierKey, sign_note
from app.domain.log.bundle import (
    ENTRIES,
    HEADS,
    KEYS,
    MANIFEST,
    SCHEMAS,
    EntryLine,
    FileFacts,
    Filter,
    HeadLine,
    Manifest,
)
from app.domain.runs.replay import RunRecord
from app.domain.system.documents import Erasure, PolicySet, SigningKey, SystemDocument, ToolPin
from app.domain.system.log import SystemState, plan_system
from app.domain.tga.documents import SupervisorDecision
from app.domain.tga.replay import LogRecord
from tests.runs.samples import (
    TRACE,
    fork_of,
    interrupted,
    parent_and_child,
    sample_trace_id,
    small,
    with_tool,
)
from tests.traces import (
    EXECUTOR,
    PATHS,
    action_request,
    completed_trace,
    records_of,
    supervisor_decision,
    time_at,
    tool_call,
    tool_effect,
    trace_id,
)

Files = dict[str, bytes]


def private_key(name: str) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(name.encode()).digest())


def public_of(key: Ed25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


LOG_KEY = private_key("log")
VERIFIER = VerifierKey("example.org/handmade", public_of(LOG_KEY))


@dataclass
class Row:
    """`original`: what the artifact said; `artifact`: what is stored of it now."""

    stream: str
    number: int
    entry: bytes
    original: bytes
    artifact: bytes | None

    @property
    def tenant(self) -> str | None:
        return self.stream.partition(":")[2] if self.stream.startswith("system:") else None


@dataclass
class Ledger:
    """`rows` are the leaves, those behind the last of `sizes` are covered by no head. `forged`: leaves whose decision
    no announced key has signed."""

    rows: list[Row] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    forged: set[int] = field(default_factory=set)

    def system(self, *documents: SystemDocument) -> None:
        for document in documents:
            before = [row for row in self.rows if row.stream == f"system:{document.system_id}"]
            head = SystemState(document.system_id).head
            if before:
                head = Head(len(before), digest_of_bytes(before[-1].entry), "OPEN", None)
            plan = plan_system(
                SystemState(document.system_id, head), [document], executor_id=EXECUTOR, recorded_at=time_at(0)
            )
            (planned,) = plan.entries
            self.rows.append(
                Row(plan.stream, head.sequence_number + 1, planned.entry, planned.artifact, planned.artifact)
            )

    def traces(self, *traces: Sequence[LogRecord | RunRecord]) -> None:
        """Their entries through one another: the first of each, then the second of each."""
        for place in range(max(map(len, traces))):
            for records in traces:
                if place < len(records):
                    record = records[place]
                    assert record.artifact is not None
                    artifact = record.artifact.to_bytes()
                    self.rows.append(Row(record.stream, place + 1, record.entry.body_bytes(), artifact, artifact))

    def erase(self, n: int, *, tenant: str = "default") -> None:
        self.erase_stream(f"trace:{trace_id(n)}", tenant=tenant)

    def erase_stream(self, stream: str, *, tenant: str = "default") -> None:
        erased = [row for row in self.rows if row.stream == stream]
        self.system(erasure_of(erased, tenant))
        for row in erased:
            row.artifact = None

    def sign(self) -> None:
        self.sizes.append(len(self.rows))

    @property
    def size(self) -> int:
        return self.sizes[-1]

    def leaf_hashes(self) -> list[Hash]:
        return [leaf_hash(row.entry) for row in self.rows]

    def head(self, size: int) -> TreeHead:
        return TreeHead(VERIFIER.name, size, self.root_of(Range(0, size)))

    def root_of(self, leaves: Range) -> Hash:
        frontier = Frontier()
        for row in self.rows[leaves.start : leaves.end]:
            frontier.append(leaf_hash(row.entry))
        return frontier.root()

    def inclusion(self, index: int, size: int) -> list[Hash]:
        return [self.root_of(leaves) for leaves in inclusion_ranges(index, size)]

    def note(self, size: int, key: Ed25519PrivateKey = LOG_KEY, name: str = VERIFIER.name) -> str:
        return sign_note(self.head(size).to_text(), VerifierKey(name, public_of(key)), key.sign)

    def bundle(self, wanted: Filter | None = None, *, size: int | None = None) -> Files:
        """As an export writes it; up to an older head, if one is named."""
        chosen, until = wanted or Filter(), size or self.size
        complete, sizes = chosen.is_everything, [one for one in self.sizes if one <= until]
        lines = list(self._lines(chosen, until))
        heads = []
        for before, one in zip([0, *sizes], sizes, strict=False):
            is_proven = not complete and before > 0
            proof = [self.root_of(leaves) for leaves in consistency_ranges(before, one)] if is_proven else None
            heads.append(HeadLine(one, self.note(one), proof).to_line())
        files = {
            ENTRIES: b"".join(line.to_line() for line in lines),
            HEADS: b"".join(heads),
            KEYS: json.dumps({"origin": VERIFIER.name, "verifier_keys": [VERIFIER.to_text()]}).encode(),
            **{SCHEMAS + name: raw for name, raw in own_schemas().items()},
        }
        facts = {name: FileFacts.of(raw) for name, raw in files.items()}
        manifest = Manifest(time_at(0), VERIFIER.name, until, self.head(until).root, chosen, facts)
        return {**files, MANIFEST: manifest.to_bytes()}

    def _lines(self, wanted: Filter, size: int) -> Iterator[EntryLine]:
        of_gateways = [row for row in self.rows[:size] if row.tenant == "default" and _is_gateway_key(row)]
        last_key = max(row.number for row in of_gateways)
        for index, row in enumerate(self.rows):
            is_covered = index < size
            is_shared = row.tenant == "default" and wanted.tenant not in (None, "default")
            if is_shared:
                is_wanted = is_covered and row.number <= last_key
            else:
                is_wanted = self._is_wanted(row, wanted) and (is_covered or row.tenant is not None)
            if is_wanted:
                artifact = None if is_shared and not _is_gateway_key(row) else row.artifact
                proof = self.inclusion(index, size) if is_covered and not wanted.is_everything else None
                place = index if is_covered else None
                yield EntryLine(place, row.stream, row.number, row.entry, artifact, proof)

    def _is_wanted(self, row: Row, wanted: Filter) -> bool:
        tenant = row.tenant or self.tenant_of(row.stream)
        is_other_trace = row.tenant is None and wanted.trace_id not in (None, row.stream.partition(":")[2])
        if wanted.run_id is not None and row.tenant is None and row.stream not in BROUGHT[wanted.run_id]:
            return False
        return wanted.tenant in (None, tenant) and not is_other_trace

    def tenant_of(self, stream: str) -> str:
        birth = next(row for row in self.rows if row.stream == stream)
        return str(json.loads(birth.original)["principal"]["tenant"])


def _is_gateway_key(row: Row) -> bool:
    return b'"principal_id":null' in row.original


def erasure_of(rows: Sequence[Row], tenant: str) -> Erasure:
    """One that says exactly what stands in these rows."""
    request, claim = json.loads(rows[0].original), None
    if "idempotency_key" in request:
        key = {name: request[name] for name in ("server_id", "tool_name", "idempotency_key")}
        claim = {"key_digest": digest_of_bytes(canonical_bytes(key)), "payload_commitment": "ab" * 32}
    return Erasure.made(
        system_id=tenant,
        recorded_at=time_at(9),
        recorded_by="admin",
        erased_stream=rows[0].stream,
        last_sequence_number=len(rows),
        last_entry_digest=digest_of_bytes(rows[-1].entry),
        artifact_digests=[digest_of_bytes(row.original) for row in rows],
        claim=claim,
        rationale="asked to",
    )


def key_document(
    key: Ed25519PrivateKey, principal_id: str | None, *, tenant: str = "default", change: str = "announced"
) -> SigningKey:
    return SigningKey.made(
        system_id=tenant,
        recorded_at=time_at(0),
        recorded_by="admin",
        change=change,
        key_id=key_id_of(public_of(key)),
        algorithm="Ed25519",
        public_key=b64encode(public_of(key)).decode(),
        principal_id=principal_id,
    )


def policy_document(text: str, *, tenant: str = "default") -> PolicySet:
    digest = digest_of_bytes(text.encode())
    return PolicySet(system_id=tenant, recorded_at=time_at(0), recorded_by="gateway", policy_digest=digest, text=text)


def pin_document(tool: str, *, tenant: str = "default") -> ToolPin:
    return ToolPin(
        system_id=tenant,
        recorded_at=time_at(0),
        recorded_by="gateway",
        server_id="crm",
        tool_name=tool,
        change="pinned",
        definition_digest=digest_of_bytes(tool.encode()),
        definition={"description": tool, "bounds": [0.5, 1e-7]},
    )


def decided_trace(n: int, key: Ed25519PrivateKey, who: str, *, tenant: str = "default") -> list[LogRecord]:
    """A finished trace whose decision a person made, signed with this key."""
    request = action_request(n, principal={"principal_id": "agent-1", "tenant": tenant}, server_id=f"{tenant}/crm")
    unsigned = supervisor_decision(request, decided_by={"type": "person", "id": who})
    value = b64encode(key.sign(unsigned.signed_bytes())).decode()
    signature = {"algorithm": "Ed25519", "key_id": key_id_of(public_of(key)), "value": value}
    decision = SupervisorDecision.model_validate({**unsigned.to_json(), "signature": signature})
    call = tool_call(n, request, decision)
    return records_of(request, decision, call, tool_effect(call))


# By run: the streams that its bundle holds.
BROUGHT = {
    "fork": {"run:small", "run:fork"},
    "parent": {"run:parent", "run:child"},
    "with-tool": {"run:with-tool", f"trace:{sample_trace_id()}"},
}


def _add_runs(made: Ledger) -> None:
    """Runs that name one another and a trace, one of them erased; a fork comes when its source has gone on."""
    trace, first, (parent, child) = list(completed_trace(TRACE)), small(), parent_and_child()
    runs = (first, parent, child, with_tool(trace), interrupted(), small("erased"))
    made.traces(trace, *(run.records for run in runs))
    made.traces(fork_of(first, 3).records)
    made.erase_stream("run:erased")


@cache
def ledger(*, is_poisoned: bool = False, has_runs: bool = False) -> Ledger:
    """Two tenants with all that a bundle can hold, three heads, two entries behind the last one. Poisoned: with an
    approval in alice's name that a throw-away key has signed."""
    made = Ledger()
    gateway, alice, carol, old = (private_key(name) for name in ("gateway", "alice", "carol", "old"))
    made.system(key_document(LOG_KEY, None), key_document(alice, "alice"), pin_document("one"))
    made.system(key_document(old, None), key_document(gateway, None))
    made.system(key_document(carol, "carol", tenant="acme"), pin_document("two", tenant="acme"))
    made.traces(decided_trace(1, alice, "alice"), PATHS["DENIED"](2), decided_trace(3, old, "bob"))
    made.sign()
    made.system(key_document(old, None, change="retired"), policy_document("permit(principal, action, resource);"))
    made.traces(
        decided_trace(4, carol, "carol", tenant="acme"),
        decided_trace(5, gateway, "dave", tenant="acme"),
        decided_trace(6, alice, "alice"),
    )
    if is_poisoned:
        first = len(made.rows)
        made.traces(decided_trace(7, private_key("throw-away"), "alice"))
        made.forged.add(first + 1)
    made.erase(1)
    if has_runs:
        _add_runs(made)
    made.sign()
    made.traces(PATHS["EXECUTING"](8), decided_trace(9, gateway, "dave", tenant="acme"))
    made.erase(5, tenant="acme")
    made.system(pin_document("three"))
    made.sign()
    made.system(key_document(private_key("young"), "erin"), pin_document("four", tenant="acme"))
    return made
