"""Every benchmark runs to its end in its `--quick` form. No test asserts what it measures."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
HANG_S: Final = 600  # a guard against waiting for ever, not a bound on speed
# What each prints besides its heading: the ratios it is there for, whatever they are.
RATIO: Final = r"\d+\.\d+"
PRINTS: Final = {
    "comparison": (
        r"tga over HTTP +│ +8 │ +[\d,]+ │",
        r"tga, a run over HTTP +│ +8 │",
        r"tga, a run in process +│ +8 │",
        rf"tga over HTTP +│ +{RATIO} │ +[\d,]+ │",
    ),
    "append": (rf"writer +│ +128 │ +{RATIO}", "Flatness", r"100 │ +64 │ +1\.00"),
    "lean": (rf"of a call │ +30 │ +[\d,]+ │ +[\d,]+ │ +{RATIO}", "HOT updates of heads"),
    "tool_call": (rf"at least 1\.5 of the same transactions, unbatched; found {RATIO}",),
    "telemetry": (r"metrics and lines +│ +\d+\.\d+ │ +[+-]\d+\.\d+", "Aim for metrics and lines"),
    "runs": (rf"put +│ +128 │ +{RATIO}", "Flatness", r"A checkpoint leaves [\d,]+ bytes", "are read back in"),
    "sdk": (r"live, one run +│ +[\d,]+", r"replayed: steps 20 to 40 take [\d,]+ us each"),
    "lua": (r"live: a checkpoint takes [\d,]+ us of CPU", "replayed: a checkpoint takes", r"32 at once: \d+ a second"),
    "recovery": (rf"transactions per trace, one a read +│ +{RATIO}", rf"plans in a commit +│ +{RATIO}"),
    "http": (rf"32 at once: over HTTP {RATIO} of the calls in process", r"admission +│ +\d+", r"database +│ +\d+"),
    "shares": (r"fresh +│ +32 │ +this │ +[\d,]+", r"repeat +│ +32 │ +this │ +[\d,]+"),
    "mcp": (rf"write +│ tga mcp +(│ +{RATIO} ){{5}}",),
    "sequencer": (rf"while sequencing +│ +[\d,]+ │ +{RATIO}", rf"when catching up +│ +[\d,]+ │ +{RATIO}"),
    "pages": (r"overview +│ +[\d,]+ │", r"\d+ of \d+ addresses met the aim, analysed"),
    "flat": (rf"8 │ +buffers │ +{RATIO} │ +{RATIO} │ +{RATIO} │",),
    "verify": (
        rf"tga +1,600 +[\d,]+ +{RATIO} +{RATIO} +{RATIO}",
        rf"tools/verify\.py +1,600 +[\d,]+ +{RATIO}",
        "entry of a run",
    ),
    "processes": (rf"0\.15 │ +2 │ +[\d,]+ │ +{RATIO} │",),
    "soak": (r"fresh calls, .* runs", r"descriptors +│", r"tasks +│"),
    "load": ("requests: .* a second", "SIGKILL", "\n0 findings"),
}


def _benches() -> list[str]:
    return sorted(path.stem for path in (ROOT / "bench").glob("*.py") if "\ndef main(" in path.read_text())


def test_make_bench_runs_every_benchmark() -> None:
    in_makefile = set(re.findall(r"-m bench\.(\w+)", (ROOT / "Makefile").read_text()))
    assert sorted(in_makefile) == _benches() == sorted(PRINTS)


@pytest.mark.one_in(8)
@pytest.mark.parametrize("name", PRINTS)
def test_a_benchmark_ends_well_and_prints_its_ratios(name: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", f"bench.{name}", "--quick"],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=5 * HANG_S,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    for pattern in PRINTS[name]:
        assert re.search(pattern, ended.stdout), f"{pattern} is not in\n{ended.stdout}"
