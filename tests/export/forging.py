"""What an attacker writes into a bundle: system entries that chain, and that no signed head covers."""

from __future__ import annotations

from base64 import b64encode

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.chain import Head
from app.core.digest import digest_of_bytes
from app.core.ed25519 import key_id_of
from app.domain.system.documents import Erasure, SigningKey, SystemDocument
from app.domain.system.log import SystemState, plan_system
from tests.export.changing import Line
from tests.traces import EXECUTOR, time_at

SYSTEM_STREAM = "system:default"


def forged_line(lines: list[Line], document: SystemDocument) -> Line:
    """An entry without a leaf that continues the document's system stream where these lines leave it."""
    stream = f"system:{document.system_id}"
    before = [line for line in lines if line["stream"] == stream]
    head = SystemState(document.system_id).head
    if before:
        entry = before[-1]["entry"].encode()
        head = Head(before[-1]["sequence_number"], digest_of_bytes(entry), "OPEN", None)
    state = SystemState(document.system_id, head)
    (planned,) = plan_system(state, [document], executor_id=EXECUTOR, recorded_at=time_at(9)).entries
    return {
        "leaf_index": None,
        "stream": stream,
        "sequence_number": head.sequence_number + 1,
        "entry": planned.entry.decode(),
        "artifact": planned.artifact.decode(),
    }


def key_of(private: Ed25519PrivateKey, *, principal_id: str | None = "alice", tenant: str = "default") -> SigningKey:
    public = private.public_key().public_bytes_raw()
    return SigningKey.made(
        system_id=tenant,
        recorded_at=time_at(0),
        recorded_by="admin",
        change="announced",
        key_id=key_id_of(public),
        algorithm="Ed25519",
        public_key=b64encode(public).decode(),
        principal_id=principal_id,
    )


def erasure_of(lines: list[Line], stream: str, *, tenant: str = "default") -> Erasure:
    """One that says exactly what these lines say of the stream."""
    entries = [line["entry"] for line in lines if line["stream"] == stream]
    return Erasure.made(
        system_id=tenant,
        recorded_at=time_at(9),
        recorded_by="admin",
        erased_stream=stream,
        last_sequence_number=len(entries),
        last_entry_digest=digest_of_bytes(entries[-1].encode()),
        artifact_digests=[digest_in(entry) for entry in entries],
        claim=None,
        rationale="nobody asked",
    )


def digest_in(entry: str) -> str:
    return entry.partition('"artifact_digest":"')[2][:64]


def stripped(lines: list[Line], stream: str) -> list[Line]:
    """The lines without this stream's payloads."""
    return [{**line, "artifact": None} if line["stream"] == stream else line for line in lines]
