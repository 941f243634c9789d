"""The walk through the files in docs/life-of-a-run.md names files and functions that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "life-of-a-run.md").read_text(encoding="utf-8")
WALK = TEXT[TEXT.index("## The same, file by file") :]
ROWS = re.findall(r"^\| (`[^|]*) \|", WALK, re.MULTILINE)


def test_the_walk_has_rows() -> None:
    assert len(ROWS) > 35


@pytest.mark.parametrize("row", ROWS)
def test_files_and_functions_of_the_walk_exist(row: str) -> None:
    source = ""
    for name in re.findall(r"`([^`]+)`", row):
        if "/" in name:
            source = (ROOT / "app" / name).read_text(encoding="utf-8")
        else:
            assert re.search(rf"(def {name}\(|class {name}\b)", source), f"{name} is not defined there"
