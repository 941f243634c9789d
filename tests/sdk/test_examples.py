"""Every example of examples/README.md, by the command that is printed there, against a real gateway and its bank."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.sdk.gateways import Gateways

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted(path.name for path in (ROOT / "examples").glob("*.py"))
README = (ROOT / "examples" / "README.md").read_text("utf-8")


class Example:
    """Runs an example as it is printed; of the command only the place of the gateway is another one."""

    def __init__(self, gateways: Gateways) -> None:
        self._gateways = gateways

    def run(self, name: str, said: str = "") -> str:
        (command,) = re.findall(rf"`TGA_HOME=\.tga (\.venv/bin/python examples/{name})`", README)
        assert f"    TGA_HOME=.tga {command}\n" in (ROOT / "examples" / name).read_text("utf-8")
        environment = {"TGA_URL": self._gateways.direct_url, "TGA_API_KEY": self._gateways.world.keys["admin"]}
        done = subprocess.run(
            command.replace(".venv/bin/python", sys.executable).split(),
            cwd=ROOT,
            env={**os.environ, **environment},
            input=said,
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def booked(self) -> list[tuple[str, int]]:
        """What the bank has executed."""
        lines = [json.loads(line) for line in self._gateways.world.bank.book.read_text().splitlines()]
        return [(line["tool"], line["arguments"]["amount"]) for line in lines if line["event"] == "execution"]


@pytest.fixture
def example(gateways: Gateways) -> Example:
    return Example(gateways)


def test_an_order_waits_for_its_approval_and_is_charged_once(example: Example) -> None:
    before = len(example.booked())
    assert "status='shipped' charge_id='ch_" in example.run("order.py", "y\n")
    assert "label='ORDER-00007'" in example.run("order.py")  # the same run: nothing is asked, nothing is done
    assert example.booked()[before:] == [("charge", 250)]


def test_a_pipeline_of_large_artifacts(example: Example) -> None:
    told = example.run("pipeline.py")
    assert "pages=32" in told
    assert int(re.findall(r"bytes=(\d+)", told)[0]) > 2_000_000
    assert "words=429184 most_common='the'" in told


def test_a_nightly_flow_shows_its_steps(example: Example) -> None:
    before = len(example.booked())
    told = example.run("nightly.py").splitlines()
    assert re.fullmatch(r"\d{4}-\d\d-\d\d: \d+ after a fee of 2", told[0])
    assert told[1:] == [f"{name}: completed, tries 1" for name in ("fee", "balance", "report")]
    assert example.booked()[before:] == [("charge", 2)]


def test_a_saga_undoes_what_was_booked_the_last_first(example: Example) -> None:
    before = len(example.booked())
    told = example.run("saga.py").splitlines()
    assert told[:2] == ["approving the refund of 200", "approving the refund of 300"]
    assert re.fullmatch(r"cancelled \(\w+\): hotel, flight undone", told[2])
    assert example.booked()[before:] == [("charge", 300), ("charge", 200), ("refund", 200), ("refund", 300)]


def test_plain_function_becomes_durable(example: Example) -> None:
    invoices = "[Invoice(number=1, total=120), Invoice(number=2, total=80)]"
    told = example.run("invoices.py").splitlines()
    assert told == [f"plain:   {invoices}", f"durable: {invoices}", "alone:   number=3 total=50"]


def test_a_research_agent_pays_for_its_article_once(example: Example) -> None:
    before = len(example.booked())
    told = example.run("research_agent.py")
    assert "title='Tea and coffee'" in told
    assert "turns=4 tokens=60" in told
    assert example.run("research_agent.py") == told  # the same run: no turn is asked for, nothing is paid
    assert example.booked()[before:] == [("charge", 5)]


def test_every_example_is_in_the_list_and_tested() -> None:
    named = set(re.findall(r"^\| \[(\w+\.py)\]", README, re.MULTILINE))
    assert named == set(EXAMPLES)
    text = Path(__file__).read_text("utf-8")
    assert [name for name in EXAMPLES if f'run("{name}"' not in text] == []
