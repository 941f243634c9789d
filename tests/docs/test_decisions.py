"""The records of decisions: each says its status, and one that a later one amends says by which."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "adr"
RECORDS = {int(path.name[:4]): path.read_text() for path in sorted(FOLDER.glob("*.md"))}


def status_of(number: int) -> str:
    text = RECORDS[number]
    found = re.search(r"^\*\*Status:\*\* (?:Accepted|Superseded)\b.*?(?=\n\n)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, f"ADR {number} says no status"
    return found.group()


def amended_by(number: int) -> set[int]:
    """The records that this one says it amends or supersedes."""
    status = status_of(number)
    ours = [
        sentence for sentence in re.split(r"(?<=[.;]) ", status) if re.search(r"\b([Aa]mends|supersedes)\b", sentence)
    ]
    return {int(other) for sentence in ours for other in re.findall(r"\[ADR (\d+)\]", sentence)}


def test_numbers_and_titles_are_those_of_the_files() -> None:
    assert sorted(RECORDS) == list(range(1, len(RECORDS) + 1))
    for number, text in RECORDS.items():
        assert text.startswith(f"# {number}. "), number


def test_what_a_later_decision_amends_names_it() -> None:
    pairs = [(number, other) for number in RECORDS for other in amended_by(number)]
    assert len(pairs) >= 20
    for number, other in pairs:
        assert f"[ADR {number}](" in status_of(other), f"ADR {other} does not say that ADR {number} amends it"
