"""`tga lint`: each rule finds what it is for, at its place, and nothing else."""

from __future__ import annotations

import ast
import contextlib
import json
import random
import re
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from app.cli.command import application
from tests.sdk.lint_programs import GOOD, MARKED
from tga_sdk.lint import RULES, LintError, Rule, lint_file, lint_source
from tga_sdk.lint.rules import program_of

ROOT = Path(__file__).resolve().parents[2]


def found(text: str) -> list[tuple[int, str]]:
    return [(finding.line, finding.code) for finding in lint_source(text.encode()).findings]


def expected(text: str) -> list[tuple[int, str]]:
    return [
        (number, code)
        for number, line in enumerate(text.splitlines(), 1)
        for code in re.findall(r"TGA\d+", line.partition("  # TGA")[1] + line.partition("  # TGA")[2])
    ]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_finds_its_bad_example_and_not_its_good_one(rule: Rule) -> None:
    assert [code for _, code in found(program_of(rule.bad))] == [rule.code]
    assert found(program_of(rule.good)) == []


def test_every_marked_line_is_found_and_no_other() -> None:
    wanted = expected(MARKED)
    assert {code for _, code in wanted} == {rule.code for rule in RULES}, "a rule without a program"
    assert found(MARKED) == wanted


def test_good_programs_have_no_findings() -> None:
    report = lint_source(GOOD.encode())
    assert report.findings == []
    assert report.procedures == ["render", "order", "thank", "saga", "nightly"]


EXAMPLES = sorted(ROOT.glob("examples/**/*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_the_examples_have_no_findings(example: Path) -> None:
    assert [str(finding) for finding in lint_file(example).findings] == []
    verify_mermaid(lint_file(example).diagram())


def test_a_finding_says_where_what_why_and_what_to_do() -> None:
    text = "import time\nfrom tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    return  time.time()\n"
    (finding,) = lint_source(text.encode(), "p.py").findings
    assert str(finding) == (
        "p.py:5:13: TGA101 time.time() outside a recorded operation: the body is executed again in each attempt, and "
        "must do the same again; the clock says something else each time; use await ctx.now()"
    )
    assert finding.document()["procedure"] == "p"


def test_comments_silence_rules_and_strings_do_not() -> None:
    head = "import time\nfrom tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    "
    for comment, stays in (
        ("# tga: ignore[TGA101]", False),
        ("# tga: ignore[TGA102, tga101]  because", False),
        ("#tga:ignore", False),
        ("# noqa  # tga: ignore[TGA101]", False),
        ("# tga: ignore[TGA102]", True),
        ("# tga: ignore[]", True),
        ("+ len('# tga: ignore')", True),
        ("", True),
    ):
        assert bool(found(f"{head}return time.time() {comment}\n")) is stays, comment
    assert found(f"{head}return time.time(\n    )  # tga: ignore[TGA101]\n") == []


def test_a_file_is_never_imported(tmp_path: Path) -> None:
    file = tmp_path / "loud.py"
    file.write_text(f"open({str(tmp_path / 'made')!r}, 'w')\nraise SystemExit(3)\n")
    before = set(sys.modules)
    assert lint_file(file).findings == []
    assert not (tmp_path / "made").exists()
    assert "loud" not in set(sys.modules) - before


# Hostile sources.

DEEP = 5_000
HOSTILE = {
    "syntax": b"def f(:\n",
    "null": b"x = 1\x00\n",
    "latin1": b"x = 'caf\xe9'\n",
    "unknown encoding": b"# -*- coding: klingon -*-\nx = 1\n",
    "binary": bytes(range(256)) * 4,
    "parentheses": b"(" * DEEP + b")" * DEEP,
    "indented": b"".join(b" " * n + b"if x:\n" for n in range(200)),
    "utf16": "x = 1".encode("utf-16"),
    "huge": b"#" * (4 * 1024 * 1024 + 1),
    "cookie says utf-8 and lies": b"# coding: utf-8\nx = '\xff'\n",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_no_python_is_refused_with_words(name: str) -> None:
    with pytest.raises(LintError, match=r"expected .* found") as refused:
        lint_source(HOSTILE[name], "x.py")
    assert refused.value.code == "LINT_SOURCE_INVALID"
    assert "x.py" in refused.value.message


def test_other_encodings_are_read() -> None:
    text = "import time\nfrom tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    return time.time()  # é\n"
    assert [code for _, code in found(text)] == ["TGA101"]
    for data in (
        b"\xef\xbb\xbf" + text.encode(),
        b"# coding: latin-1\n" + text.encode("latin-1"),
        text.replace("\n", "\r\n").encode(),
        text.replace("\n", "\r").encode(),
    ):
        assert [finding.code for finding in lint_source(data).findings] == ["TGA101"]


@pytest.mark.parametrize("chain", ["x" + ".y" * DEEP, "+".join("x" * DEEP), "x" + "()" * DEEP, "not " * 900 + "x"])
def test_what_is_nested_too_deeply_is_refused_and_not_crashed_upon(chain: str) -> None:
    text = f"from tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    await ctx.step('a', lambda: {chain})\n"
    with contextlib.suppress(LintError):
        verify_mermaid(lint_source(text.encode()).diagram())


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.binary(max_size=200) | st.text(max_size=200).map(lambda text: text.encode("utf-8", "surrogatepass")))
def test_only_own_errors_escape_from_arbitrary_bytes(data: bytes) -> None:
    with contextlib.suppress(LintError):
        verify_mermaid(lint_source(data).diagram())


PARTS = [line for text in (MARKED, GOOD) for line in text.splitlines() if line.startswith("    ")]
OTHERS = [
    *(
        "    async with ctx.x() as (a, *b):",
        "    for ctx in ctx:",
        "    del ctx, x[ctx]",
        "    x: int",
        "    ctx = ctx.tool",
    ),
    *(
        "    global x, ctx",
        "    match ctx.now():",
        "        case {'a': [*_, ctx]}:",
        "    import ctx",
        "    pass",
        "    else:",
    ),
    *(
        "    lambda ctx: ctx.gather(*ctx, **ctx)",
        "    try:",
        "    except* ValueError:",
        "    finally:",
        "    while ctx.now():",
    ),
    *(
        "    ctx.step()",
        "    ctx.step(*x)",
        "    ctx.step(**x)",
        "    ctx.gather(*[*x])",
        "    async def ctx(ctx): ctx.ctx()",
    ),
    *(
        "    [ctx async for ctx in ctx.tool()]",
        "    with (yield) as ctx:",
        "    @procedure",
        "    class ctx(ctx.step()):",
    ),
    *(
        "    Flow()",
        "    Step()",
        "    Flow('a', [Step, Step('x'), *y])",
        "    procedure()()",
        "    task(procedure)",
        "    del x",
    ),
]


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(st.sampled_from([*PARTS, *OTHERS]), max_size=12), st.integers(0, 3))
def test_only_own_errors_escape_from_shuffled_programs(lines: list[str], depth: int) -> None:
    """Lines of real programs in any order: most of what parses is nonsense, and none of it may surprise."""
    head = "from tga_sdk import *\nfrom tga_sdk import procedure\n@procedure\nasync def p(ctx, x):\n    pass"
    kept = [head]
    for line in lines:
        for text in (line, "    " * depth + line, line + "\n" + "    " * (depth + 2) + "pass"):
            try:
                ast.parse("\n".join([*kept, text]))
            except (SyntaxError, ValueError):
                continue
            kept.append(text)
            break
    report = lint_source("\n".join(kept).encode())
    verify_mermaid(report.diagram())
    for finding in report.findings:
        assert finding.line >= 1
        assert finding.column >= 1


# The diagram.

_TEXT = r'"[^"\\\[\](){}<>|`]*"'
_NODE = rf"n\d+(\[{_TEXT}\]|\(\[{_TEXT}\]\)|\{{{_TEXT}\}}|\{{\{{{_TEXT}\}}\}}|\[/{_TEXT}/\])(:::(person|wait))?"
_LINE = re.compile(rf"    ({_NODE}|n\d+ -->(\|{_TEXT}\|)? n\d+|subgraph g\d+\[{_TEXT}\]|end|classDef \w+ [\w:#,]+)")


def verify_mermaid(text: str) -> None:
    """Of mermaid's grammar what a diagram uses: every line, every node known, every subgraph closed."""
    first, *lines = text.splitlines()
    assert first == "flowchart TD"
    known: set[str] = set()
    used: set[str] = set()
    depth = 0
    for line in lines:
        assert _LINE.fullmatch(line), line
        word = line.split()[0]
        depth += {"subgraph": 1, "end": -1}.get(word, 0)
        assert depth >= 0
        if " --> " in line or "-->|" in line:
            used |= {word, line.split()[-1]}
        elif word.startswith("n"):
            name = re.match(r"n\d+", word)
            assert name is not None
            known.add(name[0])
    assert depth == 0
    assert used <= known


def test_the_diagram_shows_operations_in_order_branches_loops_gathers_and_people() -> None:
    text = """
from functools import partial
from tga_sdk import procedure

async def notify(ctx, who):
    await ctx.tool("mail", "send", {"to": who})

@procedure(name="order", version="2")
async def order(ctx, input):
    if input.total > 100 and not await ctx.approve("pay?"):
        return None
    for item in input.items:
        if item.bad:
            continue
        try:
            await ctx.tool("stock", "reserve", {"id": item.id})
        except Exception:
            await ctx.sleep(3)
            break
    async def ship():
        await ctx.tool("depot", "ship", {})
    await ctx.step("ship", ship)
    await ctx.gather(lambda: notify(ctx, "a"), *[partial(notify, ctx, p) for p in input.people])
    raise ValueError("x")
"""
    drawing = lint_source(text.encode()).diagram()
    verify_mermaid(drawing)
    assert [line.strip() for line in drawing.splitlines()] == [
        "flowchart TD",
        'subgraph g1["order 2"]',
        'n1(["procedure"])',
        'n2{{"approve pay?"}}:::person',
        "n1 --> n2",
        "n3{\"input.total #62; 100 and #40;not await ctx.approve#40;'pay?'#41;#41;\"}",
        "n2 --> n3",
        'n4{"for each item of input.items"}',
        'n3 -->|"no"| n4',
        'n5{"item.bad"}',
        'n4 -->|"next"| n5',
        'n5 -->|"yes"| n4',
        'n6{"try"}',
        'n5 -->|"no"| n6',
        'n7["tool stock.reserve"]',
        "n6 --> n7",
        'n8[/"sleep 3"/]:::wait',
        'n6 -->|"except Exception"| n8',
        "n7 --> n4",
        'subgraph g2["step ship"]',
        'n9["tool depot.ship"]',
        'n4 -->|"done"| n9',
        "n8 --> n9",
        "end",
        'n10["gather"]',
        "n9 --> n10",
        'n11["tool mail.send"]',
        "n10 --> n11",
        'n12["tool mail.send"]',
        'n10 -->|"for each p of input.people"| n12',
        'n13["all done"]',
        "n11 --> n13",
        "n12 --> n13",
        "n14([\"raise ValueError#40;'x'#41;\"])",
        "n13 --> n14",
        'n15(["end"])',
        'n3 -->|"yes"| n15',
        "end",
        "classDef person fill:#fde68a,stroke:#b45309",
        "classDef wait fill:#e0e7ff,stroke:#4338ca",
    ]


@pytest.mark.parametrize("text", [MARKED, GOOD, "", "x = 1"], ids=["marked", "good", "empty", "none"])
def test_every_diagram_keeps_to_the_grammar(text: str) -> None:
    verify_mermaid(lint_source(text.encode()).diagram())


def test_labels_hold_nothing_that_mermaid_would_read() -> None:
    chosen = random.Random(7)
    for _ in range(50):
        name = "".join(chosen.choice("\"'#;`|<>&{}[]()\\%\nä end --> \u202e") for _ in range(20))
        text = f"from tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    await ctx.step({name!r}, len)\n"
        verify_mermaid(lint_source(text.encode()).diagram())


def test_no_label_is_a_statement_of_mermaid() -> None:
    """Seen refused by mermaid 11: tests/sdk/test_mermaid.py asks the real parser."""
    text = "from tga_sdk import procedure\n@procedure\nasync def p(ctx):\n    await ctx.step('in direction LR', len)\n"
    drawing = lint_source(text.encode()).diagram()
    assert "direction LR" not in drawing
    assert "in #100;irection LR" in drawing


# The command.


def test_the_command(tmp_path: Path) -> None:
    good, bad, broken = tmp_path / "good.py", tmp_path / "bad.py", tmp_path / "broken.py"
    good.write_text(GOOD)
    bad.write_text(program_of(RULES[0].bad))
    broken.write_text("def f(:")

    def run(*words: str) -> tuple[int, str, str]:
        told = CliRunner().invoke(application, ["lint", *words])
        return told.exit_code, told.stdout, told.stderr

    assert run(str(good)) == (0, "Nothing found in 5 programs of 1 file.\n", "")
    code, said, _ = run(str(good), str(bad))
    assert code == 1
    assert f"TGA101 {bad}:" in said
    assert "instead: use await ctx.now()" in said
    assert said.endswith("1 finding in 6 programs of 2 files.\n")
    code, _, error = run(str(bad), str(broken))
    assert code == 2
    assert f"LINT_SOURCE_INVALID: {broken}:1:" in error
    assert run(str(tmp_path / "missing.py"))[0] == 2
    assert run(str(tmp_path))[0] == 2
    assert run()[0] == 2
    code, said, _ = run("--json", "--diagram", str(bad), str(broken))
    document = json.loads(said)
    assert code == 2
    assert [finding["code"] for finding in document["files"][0]["findings"]] == ["TGA101"]
    assert document["errors"][0]["code"] == "LINT_SOURCE_INVALID"
    verify_mermaid(document["files"][0]["diagram"])
    code, said, _ = run("--diagram", str(bad))
    assert code == 0
    verify_mermaid(said)
