"""The hostile programs of attempts*.lua, each with the ends that it may meet."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final, NamedTuple

NOTHING, REFUSED, CPU, MEMORY = "NOTHING", "REFUSED", "CPU", "MEMORY"
_TITLE: Final = re.compile(r"^--- (.+): ([A-Z ]+)$", re.MULTILINE)


class Attempt(NamedTuple):
    name: str
    ends: tuple[str, ...]
    source: str


def _attempts(file: str) -> list[Attempt]:
    _, *parts = _TITLE.split((Path(__file__).parent / file).read_text())
    return [
        Attempt(name, tuple(ends.split()), source.strip())
        for name, ends, source in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]


ATTEMPTS: Final = [
    one for file in ("attempts.lua", "attempts_again.lua", "attempts_third.lua") for one in _attempts(file)
]
