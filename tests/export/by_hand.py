"""Bundles without a database: for fuzzing and for measuring, of any size, in flat memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.cli.bundle_files import own_schemas
from app.core.digest import digest_of_bytes
from app.core.merkle import Frontier, leaf_hash
from app.core.note import TreeHead, VerifierKey, sign_note
from app.domain.log.bundle import ENTRIES, HEADS, KEYS, MANIFEST, SCHEMAS, EntryLine, FileFacts, HeadLine, Manifest
from tests.traces import completed_trace

Artifacts = Mapping[tuple[str, int], bytes]


def lines_by_hand(
    traces: int, artifacts: Artifacts | None = None, **overrides: Any
) -> Iterator[tuple[EntryLine, bytes]]:
    """The entries of finished traces, as many interleaved as fit a round: 1 of each, then 2 of each.

    `artifacts` are put in place of a stream's n-th one, and its entry commits to them.
    """
    index, changed = 0, artifacts or {}
    for first in range(0, traces, 50):
        together = [completed_trace(n, **overrides) for n in range(first, min(first + 50, traces))]
        for place in range(4):
            for records in together:
                record = records[place]
                assert record.artifact is not None
                entry, artifact = record.entry.body_bytes(), record.artifact.to_bytes()
                other = changed.get((record.stream, place + 1))
                if other is not None:
                    entry = entry.replace(digest_of_bytes(artifact).encode(), digest_of_bytes(other).encode())
                    artifact = other
                yield EntryLine(index, record.stream, place + 1, entry, artifact), entry
                index += 1


def write_by_hand(
    folder: Path,
    key: Ed25519PrivateKey,
    verifier: VerifierKey,
    *,
    traces: int = 0,
    heads: int = 2,
    lines: Sequence[EntryLine] | None = None,
    **overrides: Any,
) -> int:
    """A complete bundle, of finished traces or of these lines; returns how many bytes entries and artifacts have."""
    (folder / SCHEMAS).mkdir(parents=True, exist_ok=True)
    frontier, signed, payload = Frontier(), [], 0
    count = traces * 4 if lines is None else len(lines)
    every = max(1, count // heads)
    given = lines_by_hand(traces, **overrides) if lines is None else ((line, line.entry) for line in lines)
    with (folder / ENTRIES).open("wb") as file:
        for line, entry in given:
            file.write(line.to_line())
            payload += len(entry) + len(line.artifact or b"")
            frontier.append(leaf_hash(entry))
            if frontier.size % every == 0 or frontier.size == count:
                head = TreeHead(verifier.name, frontier.size, frontier.root())
                signed.append(HeadLine(head.size, sign_note(head.to_text(), verifier, key.sign)).to_line())
    (folder / HEADS).write_bytes(b"".join(signed))
    (folder / KEYS).write_text(json.dumps({"origin": verifier.name, "verifier_keys": [verifier.to_text()]}))
    for name, raw in own_schemas().items():
        (folder / SCHEMAS / name).write_bytes(raw)
    names = [ENTRIES, HEADS, KEYS, *(SCHEMAS + name for name in own_schemas())]
    files = {name: _facts(folder / name) for name in names}
    manifest = Manifest("2026-01-01T00:00:00.000Z", verifier.name, frontier.size, frontier.root(), files=files)
    (folder / MANIFEST).write_bytes(manifest.to_bytes())
    return payload


def _facts(path: Path) -> FileFacts:
    digest, size, lines = hashlib.sha256(), 0, 0
    with path.open("rb") as file:
        for line in file:
            digest.update(line)
            size, lines = size + len(line), lines + 1
    return FileFacts(digest.hexdigest(), size, lines)
