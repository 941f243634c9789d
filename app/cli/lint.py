"""`tga lint`: what a replay would not repeat, found in the text of a file of procedures."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from app.cli.showing import counted, notes, output, print_json, printable
from tga_sdk.lint import LintError, Report
from tga_sdk.lint import lint_file as lint_python

if TYPE_CHECKING:
    from app.lua.lint import LuaReport

_EXIT_FOUND: Final = 1
_EXIT_UNREADABLE: Final = 2


def add_to(application: typer.Typer) -> None:
    application.command("lint")(lint_command)


def lint_command(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="Files of procedures: Python, or Lua (.lua).")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    diagram: Annotated[bool, typer.Option("--diagram", help="Draw each procedure as a mermaid flowchart.")] = False,
) -> None:
    """Find in a file of procedures what a replay would not repeat; exit 1 if anything is found.

    The file is read, and never imported. Each finding names its line, the rule (docs/lint.md explains them), why, and
    what to do instead; a comment `# tga: ignore[TGA101]` silences a rule in its line. Files of Lua (.lua) have rules of
    their own (docs/lint-lua.md), and `-- tga: ignore[TGL101]`.

    Exit codes: 0 nothing found, 1 something found, 2 a file that cannot be read as Python or Lua.
    """
    reports: list[Report | LuaReport] = []
    drawings: dict[str, str] = {}
    errors: list[LintError] = []
    for file in files:
        try:
            report = lint_file(file)
            if diagram:
                drawings[report.file] = report.diagram()
            reports.append(report)
        except LintError as found:
            errors.append(found)
    if as_json:
        print_json(_document(reports, drawings, errors))
    elif diagram:
        for drawing in drawings.values():
            output.print(drawing, markup=False, end="")
    else:
        _print_findings(reports)
    for error in errors:
        notes.print(f"[bold red]error[/] {error.code}", end="")
        notes.print(f": {printable(error.message)}", markup=False)
    is_wrong = any(report.findings for report in reports) and not (diagram and not as_json)
    raise typer.Exit(_EXIT_UNREADABLE if errors else _EXIT_FOUND if is_wrong else 0)


def lint_file(file: Path) -> Report | LuaReport:
    if file.suffix != ".lua":
        return lint_python(file)
    from app.lua.lint import lint_file as lint_lua  # its parser is loaded only for files of Lua

    return lint_lua(file)


def _document(
    reports: list[Report | LuaReport], drawings: dict[str, str], errors: list[LintError]
) -> dict[str, object]:
    return {
        "files": [
            {
                "file": report.file,
                "procedures": report.procedures,
                "findings": [finding.document() for finding in report.findings],
                **({"diagram": drawings[report.file]} if report.file in drawings else {}),
            }
            for report in reports
        ],
        "errors": [{"code": error.code, "message": error.message} for error in errors],
    }


def _print_findings(reports: list[Report | LuaReport]) -> None:
    total = 0
    for report in reports:
        total += len(report.findings)
        for finding in report.findings:
            place = f"{finding.file}:{finding.line}:{finding.column}"
            output.print(f"[bold]{finding.code}[/] ", end="")
            output.print(printable(f"{place}: {finding.what}"), markup=False)
            output.print(printable(f"       why: {finding.why}"), markup=False)
            output.print(printable(f"       instead: {finding.fix}"), markup=False)
    programs = sum(len(report.procedures) for report in reports)
    if reports:
        said = counted(total, "finding") if total else "Nothing found"
        output.print(f"{said} in {counted(programs, 'program')} of {counted(len(reports), 'file')}.", markup=False)
