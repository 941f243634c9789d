"""What of the suite a run takes. `make test` (TGA_SAMPLE=1) takes a sample of what is costly, another one in every run;
TGA_SEED, which its header prints, repeats one. `make soak`, and whoever runs a file alone, takes all.
"""

from __future__ import annotations

import os
import zlib

IS_SOAK = bool(os.environ.get("TGA_SOAK"))
_CHOSEN = "TGA_SEED_OF_SAMPLE"


def seed() -> str | None:
    """By which this run chooses; None: it takes all. Processes that run tests inherit it from the one above them."""
    if IS_SOAK or os.environ.get("TGA_SAMPLE") != "1":
        return None
    return os.environ.setdefault(_CHOSEN, os.environ.get("TGA_SEED") or str(os.getpid()))


def number(place: str) -> int:
    """Of this place in this run: the same in every process that takes part."""
    return zlib.crc32(f"{seed()} {place}".encode())


def is_taken(place: str, one_in: int) -> bool:
    return seed() is None or number(place) % one_in == 0


def share(whole: int, sampled: int) -> int:
    """How many of something to take."""
    return whole if seed() is None else sampled
