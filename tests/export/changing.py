"""Change a bundle as someone would who wants it to pass: its manifest is made to fit whatever was done."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app.domain.log.bundle import MANIFEST, FileFacts

Line = dict[str, Any]


def lines_of(folder: Path, name: str) -> list[Line]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def write_lines(folder: Path, name: str, lines: list[Line]) -> None:
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    refit(folder, name)


def refit(folder: Path, *names: str) -> None:
    """The manifest says of these files what they are."""
    manifest = json.loads((folder / MANIFEST).read_text())
    for name in names:
        manifest["files"][name] = asdict(FileFacts.of((folder / name).read_bytes()))
    (folder / MANIFEST).write_text(json.dumps(manifest))


def change_line(folder: Path, name: str, place: int, change: Callable[[Line], Any], *, field: str) -> Line:
    """One field of one line becomes what `change` makes of the line; the line as it is then."""
    lines = lines_of(folder, name)
    lines[place][field] = change(lines[place])
    write_lines(folder, name, lines)
    return lines[place]


def change_manifest(folder: Path, **fields: Any) -> None:
    manifest = json.loads((folder / MANIFEST).read_text())
    (folder / MANIFEST).write_text(json.dumps({**manifest, **fields}))
