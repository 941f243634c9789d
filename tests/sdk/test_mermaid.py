"""Diagrams of `tga lint --diagram` are read by mermaid's own parser, with names that it might take for its own words.

Mermaid and jsdom are installed by npm into a folder of the test. Under TGA_SOAK=1 alone: they come from the registry.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from tests.conftest import IS_SOAK
from tga_sdk.lint import lint_file, lint_source

ROOT = Path(__file__).parents[2]
PATIENCE_S = 900
NPM, NODE = shutil.which("npm"), shutil.which("node")

pytestmark = pytest.mark.skipif(
    not (IS_SOAK and NPM and NODE),
    reason="NOT TRIED: mermaid's own parser reads our diagrams; TGA_SOAK=1 installs it where Node is",
)

PARSER = """
import fs from "node:fs";
import { JSDOM } from "jsdom";
const dom = new JSDOM("<!doctype html><body></body>");
globalThis.window = dom.window;
globalThis.document = dom.window.document;
const { default: mermaid } = await import("mermaid");
for (const file of process.argv.slice(2)) {
  try { await mermaid.parse(fs.readFileSync(file, "utf8")); console.log("ok"); }
  catch (error) { console.log("refused " + String(error.message || error).split("\\n").join(" ")); }
}
"""
WORDS = [
    *("end", "subgraph", "graph", "flowchart", "click", "style", "classDef", "class", "linkStyle", "default", "href"),
    *("direction LR", "in direction TB of", "Direction TD", "accTitle: x", "accDescr: x", "accDescr { x }", "title: x"),
    *("o--o", "x--x", "--> ", "==>", "~~~", "%%{init}%%", "%% c", "---", "::: person", "@{shape: rect}", "n1@{ a: b }"),
    *("]", "[", '"', "'", "`", "``md``", ";", "|", "{{", "}}", "#", "#quot;", "#35;", "&lt;", "<b>x</b>", "\\", "a\nb"),
    *(
        "$$x$$",
        "fa:fa-x",
        "1. x",
        "- x",
        "# h",
        "**b**",
        "http://x",
        "call()",
        "\t",
        "",
        " ",
        "_",
        "ä€😀",
        "\u200f",
        "\u2028",
    ),
]
PROGRAM = """
from tga_sdk import procedure
@procedure(name={0!r})
async def p(ctx, x):
    await ctx.step({0!r}, f)
    if x == {0!r}:
        await ctx.tool({0!r}, {0!r}, {{}})
    else:
        await ctx.approve({0!r}, name={0!r})
    await ctx.gather(ctx.step({0!r}, f), ctx.sleep(1))
    for one in {0!r}:
        await ctx.signal({0!r})
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with mermaid, and a script that reads diagrams with it."""
    folder = tmp_path_factory.mktemp("mermaid")
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    command = [str(NPM), "install", "--no-audit", "--no-fund", "--silent", "mermaid@11", "jsdom@26"]
    subprocess.run(command, cwd=folder, check=True, timeout=PATIENCE_S)
    (folder / "parse.mjs").write_text(PARSER)
    return folder


def said_of(place: Path, diagrams: dict[str, str]) -> dict[str, str]:
    files = []
    for number, text in enumerate(diagrams.values()):
        files.append(place / f"{number}.mmd")
        files[-1].write_text(text)
    command = [str(NODE), "parse.mjs", *map(str, files)]
    done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=True, timeout=PATIENCE_S)
    return dict(zip(diagrams, done.stdout.splitlines(), strict=True))


def test_mermaid_reads_every_diagram(place: Path) -> None:
    files = [*(ROOT / "examples").glob("*.py"), *(ROOT / "tests" / "sdk").glob("*programs.py")]
    diagrams = {file.name: lint_file(file).diagram() for file in files}
    diagrams |= {repr(word): lint_source(PROGRAM.format(word).encode()).diagram() for word in WORDS}
    said = said_of(place, {"(no diagram)": "flowchart TD\n n1[[ -->\n", **diagrams})
    assert said.pop("(no diagram)").startswith("refused")
    assert {name: answer for name, answer in said.items() if answer != "ok"} == {}
