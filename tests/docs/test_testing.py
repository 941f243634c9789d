"""docs/testing.md as it is printed: every block of Python, and each test in it."""

from __future__ import annotations

import asyncio
import inspect
import re
import sys
import types
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "testing.md"


def test_the_page_runs_as_it_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    (tmp_path / "page_of_tests.py").write_text("\n\n".join(blocks))
    monkeypatch.syspath_prepend(str(tmp_path))  # so that run_twice can import it in another process
    monkeypatch.chdir(tmp_path)
    page = types.ModuleType("page_of_tests")
    page.__file__ = str(tmp_path / "page_of_tests.py")
    monkeypatch.setitem(sys.modules, "page_of_tests", page)
    exec(compile((tmp_path / "page_of_tests.py").read_text(), page.__file__, "exec"), page.__dict__)  # noqa: S102
    tests = {name: value for name, value in page.__dict__.items() if name.startswith("test_")}
    assert len(tests) >= 5
    for test in tests.values():
        if inspect.iscoroutinefunction(test):
            asyncio.run(test())
        else:
            test()
