"""What a replay would not repeat, found in the text of a program in Lua: `tga lint FILE.lua`.

As `tga_sdk.lint` for Python: the same findings, the same drawing. The text is parsed and never run. A report is not a
proof: what a table holds is not followed, and what a program builds with `load` is not read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from app.lua.lint.diagram import declared, drawn
from app.lua.lint.judging import judged
from app.lua.lint.rules import RULES as RULES
from app.lua.lint.scopes import Program, read_program
from app.lua.lint.source import Source, parsed, read_source
from tga_sdk.lint import Finding, LintError
from tga_sdk.lint.source import ALL

__all__ = ["RULES", "Finding", "LintError", "LuaReport", "lint_file", "lint_source"]


@dataclass(frozen=True)
class LuaReport:
    """What was found in a file. `procedures`: the names of the programs it declares."""

    file: str
    findings: list[Finding]
    procedures: list[str]
    _program: Program

    def diagram(self) -> str:
        """Every procedure of the file as one mermaid flowchart: operations, branches, loops, and waits for people."""
        try:
            return drawn(self._program, self.file)
        except RecursionError:
            raise _too_deep(self.file) from None


def lint_file(path: Path) -> LuaReport:
    """Judge a file; LintError when it cannot be read as Lua."""
    return _judged(read_source(path))


def lint_source(data: bytes, name: str = "<source>") -> LuaReport:
    """Judge a text as the contents of a file of this name; LintError when it is not Lua."""
    return _judged(parsed(data, name))


def _judged(source: Source) -> LuaReport:
    try:
        program = read_program(source.root)
        found = judged(program)
        procedures = [name for name, _ in declared(program, source.name)]
    except RecursionError:
        raise _too_deep(source.name) from None
    findings = [
        Finding(source.name, one.line, one.column, one.code, one.what, one.why, one.fix, one.procedure)
        for one in found
        if not _is_ignored(source, one.code, one.line, one.end_line)
    ]
    return LuaReport(source.name, findings, procedures, program)


def _is_ignored(source: Source, code: str, first: int, last: int) -> bool:
    silenced = source.ignored.get(first, frozenset()) | source.ignored.get(last, frozenset())
    return code in silenced or silenced >= ALL


def _too_deep(name: str) -> LintError:
    return LintError(f"{name}: expected a program that can be followed, found one nested too deeply")
