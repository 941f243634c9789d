"""The README's quickstart does what it says: run as printed, by sh, against a gateway that `make run` started."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator

import pytest

from tests.docs.quickstart import ROOT, Block, Newcomer, read_blocks

# What each step must bring, whatever the README says of it: pieces of what the step prints.
OUTCOMES = {
    "Allowed": ['"state":"COMPLETED","replayed":false', '"state":"COMPLETED","replayed":true'],
    "A key used again": ['"code":"IDEMPOTENCY_KEY_REUSED"', " 422"],
    "Approved": ['"state":"PENDING"', " 202", '"state":"COMPLETED"', '"type":"person","id":"ada"', " 200"],
    "Denied": ['"state":"PENDING"', '"state":"DENIED"', '"code":"CALL_DENIED"', '"type":"person"', " 403"],
    "Expired": ["DENY by expiry", '"code":"CALL_DENIED"', '"type":"expiry"', " 403"],
    "A secret": ['"$redacted":{"commitment":"', "ends in 1111"],
    "A changed tool, and a policy of your own": [
        '"code":"TOOL_QUARANTINED"',
        " 409",
        "is pinned as",
        '"state":"COMPLETED"',
        '"policy_ids":["nothing-above-10000"]',
        " 403",
    ],
    "Killed": ["killed with -9", "1 execution of this key"],
    "Tampered with": ["claim and head is right", "entry 4  STATE_CHECKSUM_MISMATCH", "the runtime refuses to go on"],
    "Verified": [
        "every digest, link, transition, claim and head is right",
        "a complete bundle",
        "Sound: ",
        "read all of it again",
    ],
}
# What the operations document says of the way back, in the same terminal.
RESTORE = '.venv/bin/tga db restore "$TGA_HOME/today.backup" --yes\n# → Restored and verified\n'
# How often the bank executed each key, by the bank's own book.
EXECUTIONS = {"order-1": 1, "order-2": 1, "order-3": 0, "refund-1": 1, "refund-2": 0, "refund-3": 0, "card-1": 1}


@pytest.fixture
def newcomer() -> Iterator[Newcomer]:
    missing = [name for name in ("curl", "make", "sh") if shutil.which(name) is None]
    if not (ROOT / ".venv" / "bin" / "tga").exists():
        missing.append(".venv, which `make test` makes")
    if missing:
        pytest.skip(f"the quickstart needs {' and '.join(missing)}")
    arrived = Newcomer()
    yield arrived
    arrived.close()


def test_every_step_does_what_the_readme_shows(newcomer: Newcomer) -> None:
    print(newcomer.note)
    printed: dict[str, str] = {}
    for block in read_blocks((ROOT / "README.md").read_text("utf-8")):
        if block.is_gateway:
            newcomer.start_gateway()
            continue
        outputs = newcomer.run(block)
        printed[block.step] = printed.get(block.step, "") + "".join(outputs)
        for shown, output in zip(block.shown, outputs, strict=False):
            assert shown.is_in(output), f"{block.step}: {shown.command}\nshows {shown.pieces}, but it printed\n{output}"
        assert outputs[-1].strip() == "" or block.step == "Start", outputs[-1]

    newcomer.stop_gateway()
    (restored, _) = newcomer.run(Block("Restored", RESTORE))
    assert "Restored and verified" in restored, restored
    assert "tell them before" not in restored  # nothing was signed after the backup

    assert {step for step in printed if step != "Start"} == OUTCOMES.keys()
    for step, pieces in OUTCOMES.items():
        assert [piece for piece in pieces if piece not in printed[step]] == [], f"{step}:\n{printed[step]}"
    assert not any("4111111111111111" in text for text in printed.values())
    book = [json.loads(line) for line in newcomer.book.read_text("utf-8").splitlines()]
    executed = Counter(line["idempotency_key"] for line in book if line["event"] == "execution")
    assert {key: executed[key] for key in EXECUTIONS} == EXECUTIONS


def test_every_command_of_a_step_shows_what_it_answers() -> None:
    """A call without an answer below it would be run, and never looked at."""
    blocks = read_blocks((ROOT / "README.md").read_text("utf-8"))
    assert [block.step for block in blocks if block.is_gateway] == ["Start", "A changed tool, and a policy of your own"]
    for block in blocks:
        lines = block.text.splitlines()
        for number, line in enumerate(lines):
            if line.startswith(("call ", "decide ", "api ", ".venv/")) and " > " not in line:
                assert lines[number + 1].startswith("# → "), line
