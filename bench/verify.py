"""How fast a bundle is verified offline, and in how much memory.

    python -m bench.verify [--quick] [--traces 2500] [--times 4]

The measure is sha256 over the same bytes (entries and artifacts), as the hardware does it: what no verifier can be
quicker than. Memory is the peak of a process of its own, at one size and at a multiple of it: flat means equal.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import resource
import runpy
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from rich.console import Console
from rich.table import Table

from app.core.note import VerifierKey
from bench.measure import arguments_of
from tests.export.by_hand import lines_by_hand, write_by_hand

TRACES: Final = 2_500
TRACES_QUICK: Final = 100
TOOL: Final = Path(__file__).parents[1] / "tools" / "verify.py"


def hashing_seconds(traces: int) -> float:
    """sha256 over every entry and every artifact of these traces."""
    pieces = [piece for line, entry in lines_by_hand(min(traces, 500)) for piece in (entry, line.artifact or b"")]
    began = time.perf_counter()
    for piece in pieces:
        hashlib.sha256(piece).digest()
    return (time.perf_counter() - began) * traces / min(traces, 500)


def measured(command: list[str]) -> tuple[float, float]:
    """Seconds and peak memory in MB of a verification in a process of its own."""
    ended = subprocess.run(
        [sys.executable, "-m", "bench.verify", "--measure", *command], capture_output=True, text=True, check=False
    )
    if ended.returncode != 0:
        raise RuntimeError(ended.stderr or ended.stdout)
    seconds, peak_kb = json.loads(ended.stdout.splitlines()[-1])
    return seconds, peak_kb / 1024


def measure(which: str, folder: str, key: str) -> None:
    began = time.perf_counter()
    if which == "tga":
        from app.cli.verify_bundle import verify_bundle_command

        is_sound = asyncio.run(verify_bundle_command(Path(folder), key, as_json=True))
    else:
        tool = runpy.run_path(str(TOOL))
        bundle = tool["Bundle"](Path(folder), [tool["read_key"](key)], [])
        bundle.verify()
        is_sound = not bundle.findings
    print(json.dumps([time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss]))
    sys.exit(0 if is_sound else 1)


def main() -> None:
    parser = arguments_of("verify", __doc__)
    parser.add_argument("--traces", type=int, help=f"of four entries each (default {TRACES:,}; 250,000 make a million)")
    parser.add_argument("--times", type=int, default=4, help="the larger size, as a multiple")
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.measure:
        measure(*given.measure)
    key = Ed25519PrivateKey.generate()
    verifier = VerifierKey("example.org/bench", key.public_key().public_bytes_raw())
    table = Table("verifier", "entries", "entries/s", "of sha256 alone", "peak MB", box=None)
    with tempfile.TemporaryDirectory() as made:
        fewer = given.traces or (TRACES_QUICK if given.quick else TRACES)
        for traces in (fewer, fewer * given.times):
            folder = Path(made) / str(traces)
            write_by_hand(folder, key, verifier, traces=traces, heads=20)
            hashing = hashing_seconds(traces)
            for which in ("tga", "tools/verify.py"):
                seconds, peak = measured([which, str(folder), verifier.to_text()])
                rate, ratio = traces * 4 / seconds, hashing / seconds
                table.add_row(which, f"{traces * 4:,}", f"{rate:,.0f}", f"{ratio:.4f}", f"{peak:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
