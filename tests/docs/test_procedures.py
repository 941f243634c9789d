"""docs/procedures.md: its program is one, and its table names what `ctx` has."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tga_sdk import Context, Stop, SyncContext
from tga_sdk.attempt import Over
from tga_sdk.lint import lint_source
from tga_sdk.procedures import Procedure, Task

TEXT = (Path(__file__).parents[2] / "docs" / "procedures.md").read_text()
PROGRAM = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)[0]


def test_the_program_is_a_procedure_as_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "shipping.py").write_text(PROGRAM)
    monkeypatch.syspath_prepend(str(tmp_path))
    module: ModuleType = __import__("shipping")
    try:
        ship = module.ship
        assert isinstance(ship, Procedure)
        assert (ship.name, ship.version, ship.accepts) == ("ship", "1.2.0", ("1.1.0",))
        assert ship.state_type is module.Progress
        assert ship.registration()["input_schema"]["required"] == ["number", "amount"]
        assert isinstance(module.weigh, Task)
        assert module.weigh(4) == 2.0
    finally:
        del sys.modules["shipping"]


def test_every_operation_of_the_table_is_one_of_ctx() -> None:
    table = TEXT[TEXT.index("## Operations") : TEXT.index("## What is guaranteed")]
    first_cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    named = {name for cell in first_cells for name in re.findall(r"`(\w+)", cell)} - {"ctx"}
    public = {name for name in dir(Context) if not name.startswith("_")} - {"perform", "run_id", "attempt"}
    assert named == public
    assert public - {"agent", "model"} <= set(dir(SyncContext))


def test_what_ends_an_attempt_is_the_stop_that_the_page_names() -> None:
    assert "gets `Stop`, which is no `Exception`" in TEXT
    assert issubclass(Over, Stop)
    assert not issubclass(Stop, Exception)


def test_the_program_has_no_finding() -> None:
    assert list(lint_source(PROGRAM.encode(), "ship.py").findings) == []
