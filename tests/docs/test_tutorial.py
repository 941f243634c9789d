"""docs/tutorial.md and docs/flows.md as they are printed: the program, every command, and what it says is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.runs.conftest import started_world, world
from tests.sdk.conftest import gateways
from tests.sdk.gateways import Gateways
from tga_sdk import Flow

__all__ = ["gateways", "started_world", "world"]

DOCS = Path(__file__).parents[2] / "docs"
TEXT = (DOCS / "tutorial.md").read_text("utf-8")


def test_the_tutorial_runs_as_it_is_printed(gateways: Gateways, tmp_path: Path) -> None:
    """All commands in one shell, in their order; the worker is killed in the middle. The bank has charged once."""
    (program,) = re.findall(r"^```python\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    (tmp_path / "tour.py").write_text(program)
    steps = re.findall(r"^```sh\n(.*?)^```(?:\n\n```text\n(.*?)^```)?", TEXT, re.MULTILINE | re.DOTALL)
    assert len(steps) >= 6
    script = "set -e\n" + "".join(f"{commands}echo '-- {number}'\n" for number, (commands, _) in enumerate(steps))
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "TGA_URL": gateways.direct_url,
            "TGA_API_KEY": gateways.world.keys["admin"],
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    told = re.split(r"^-- \d+\n", done.stdout, flags=re.MULTILINE)
    assert done.returncode == 0, (told[-1], done.stderr, (tmp_path / "worker.log").read_text())
    for printed, (commands, expected) in zip(told, steps, strict=False):
        assert [line for line in expected.splitlines() if line not in printed] == [], (commands, printed)
    assert list(gateways.world.executions("order-1").values()) == [1]


def test_the_flow_of_its_page_can_be_declared() -> None:
    (program,) = re.findall(r"^```python\n(.*?)^```", (DOCS / "flows.md").read_text("utf-8"), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "flows_page"}
    exec(compile(program, "flows.md", "exec"), names)  # noqa: S102
    flow = names["onboarding"]
    assert isinstance(flow, Flow)
    assert flow.names == ("greet", "charge")
