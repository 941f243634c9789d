"""What a replay would not repeat, found in the text of a program: `tga lint FILE.py`.

    report = lint_file(Path("orders.py"))
    for finding in report.findings: print(finding)
    print(report.diagram())

The file is parsed and never imported, so nothing of it runs. A report is not a proof: what is imported from other files
is not read, and what a name means is followed only within the file. The guard (`tga_sdk.guard`) sees what happens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tga_sdk.lint.diagram import drawn
from tga_sdk.lint.judging import judged
from tga_sdk.lint.rules import RULES as RULES
from tga_sdk.lint.rules import Rule as Rule
from tga_sdk.lint.scopes import Module, read_module
from tga_sdk.lint.source import ALL, LintError, Source, parsed, read_source

__all__ = ["RULES", "Finding", "LintError", "Report", "Rule", "lint_file", "lint_source"]


class Finding(NamedTuple):
    """A line that breaks a rule. `code` is stable, and docs/lint.md has a section for it."""

    file: str
    line: int
    column: int
    code: str
    what: str
    why: str
    fix: str
    procedure: str | None

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}: {self.code} {self.what}: {self.why}; {self.fix}"

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return self._asdict()


@dataclass(frozen=True)
class Report:
    """What was found in a file. `procedures`: the names of the programs it declares."""

    file: str
    findings: list[Finding]
    procedures: list[str]
    _module: Module

    def diagram(self) -> str:
        """Every procedure of the file as one mermaid flowchart: operations, branches, loops, and waits for people."""
        try:
            return drawn(self._module)
        except RecursionError:
            raise LintError(f"{self.file}: expected a program that can be drawn, found one nested too deeply") from None


def lint_file(path: Path) -> Report:
    """Judge a file; LintError when it cannot be read as Python."""
    return _judged(read_source(path))


def lint_source(data: bytes, name: str = "<source>") -> Report:
    """Judge a text as the contents of a file of this name; LintError when it is not Python."""
    return _judged(parsed(data, name))


def _judged(source: Source) -> Report:
    try:
        module = read_module(source.tree)
        found = judged(module)
    except RecursionError:
        raise LintError(
            f"{source.name}: expected a program that can be followed, found one nested too deeply"
        ) from None
    findings = [
        Finding(source.name, one.line, one.column, one.code, one.what, one.why, one.fix, one.procedure)
        for one in found
        if not _is_ignored(source, one.code, one.line, one.end_line)
    ]
    return Report(source.name, findings, [declared.name for declared in module.declared], module)


def _is_ignored(source: Source, code: str, first: int, last: int) -> bool:
    silenced = (
        (source.ignored.get(first, frozenset()) | source.ignored.get(last, frozenset())) if source.ignored else ()
    )
    return code in silenced or frozenset(silenced) >= ALL
