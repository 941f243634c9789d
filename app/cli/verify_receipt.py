"""`tga verify --receipt`: judge one receipt with the log's public key; no database, no network."""

from __future__ import annotations

import json
from pathlib import Path

from app.cli.showing import output, printable
from app.cli.verify_bundle import load_keys
from app.core.canonical import parse_object
from app.core.errors import NoteInvalid, ProofInvalid, SettingInvalid, TgaError
from app.core.limits import NOTE_BYTES_MAX
from app.core.merkle import leaf_hash, verify_inclusion
from app.core.note import TlogProof, TreeHead, open_note
from app.domain.ledger.documents import LogEntry
from app.domain.log.heads import fits
from app.domain.runs.documents import RunLogEntry
from app.domain.runs.transitions import RUN
from app.domain.tga.documents import ExecutionLogEntry


async def verify_receipt_command(path: Path, key: str, *, as_json: bool = False) -> bool:
    """True when the log's key signed a head of a tree that holds exactly the entry in the receipt."""
    keys, proof = load_keys(key), _read(path)
    try:
        head = TreeHead.from_text(open_note(proof.note, keys, fits))
        verify_inclusion(leaf_hash(proof.extra), index=proof.index, size=head.size, proof=proof.hashes, root=head.root)
        entry = _entry(proof.extra)
    except TgaError as error:
        _show_wrong(error, as_json=as_json)
        return False
    told = {
        "sound": True,
        "origin": head.origin,
        "tree_size": head.size,
        "leaf_index": proof.index,
        entry.kind.id_field: entry.identity,
        "entry": parse_object(proof.extra),
    }
    if as_json:
        output.print(json.dumps(told), markup=False, soft_wrap=True)
        return True
    output.print("[green]✓[/] The log's key signed that this entry is in the log.")
    for label, value in (
        (entry.kind.name, entry.identity),
        ("entry", f"{entry.sequence_number}: {entry.from_state} to {entry.to_state}, {entry.artifact_type}"),
        ("artifact", f"{entry.artifact_digest} (sha256 of its bytes)"),
        ("recorded", entry.recorded_at),
        ("log", f"{printable(head.origin)}, leaf {proof.index:,} of {head.size:,}"),
    ):
        output.print(f"    {label:<9}{value}", markup=False)
    output.print("What it cannot tell: what the artifact says, and whether anything came after this entry.")
    return True


def _entry(raw: bytes) -> LogEntry:
    """As its schema says: of a run, or of a trace."""
    is_run = parse_object(raw).get("schema_id") == RUN.entry_schema_id
    return (RunLogEntry if is_run else ExecutionLogEntry).from_body_bytes(raw)


def _read(path: Path) -> TlogProof:
    try:
        with path.open("rb") as file:
            proof = TlogProof.from_text(file.read(NOTE_BYTES_MAX + 1).decode("utf-8"))
    except (OSError, UnicodeError, NoteInvalid) as error:
        raise SettingInvalid(
            f"{path} holds no receipt", expected="what `tga receipt` prints", found=error, remedy="Get it again."
        ) from None
    if not proof.extra:
        raise SettingInvalid(
            f"the receipt in {path} does not carry its entry",
            expected="a line `extra` with the entry",
            found="none",
            remedy="Get it again: `tga receipt ID`, or GET /v1/traces/ID/receipt.",
        )
    return proof


def _show_wrong(error: TgaError, *, as_json: bool) -> None:
    what = {
        NoteInvalid: "the head in the receipt is not signed by this key",
        ProofInvalid: "the entry in the receipt is not in the tree that was signed",
    }.get(type(error), error.what)
    if as_json:
        found = {"sound": False, "code": error.code, "what": what, "expected": error.expected, "found": error.found}
        output.print(json.dumps(found), markup=False, soft_wrap=True)
        return
    output.print(f"[bold red]✗[/] [red]{error.code}[/]", end="  ")
    output.print(printable(f"{what}: {error.what}" if what != error.what else what), markup=False)
    output.print("    Do not rely on this receipt. Is it the log's own key, from somewhere else than the receipt?")
