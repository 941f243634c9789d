"""`tga lint FILE.lua`: a comment `-- TGL101` at the end of a line says what is found there, and nothing else is."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from app.cli.command import application
from app.lua.lint import RULES, LintError, LuaReport, lint_source
from app.lua.lint.known import GLOBALS, MEMBERS, NONDETERMINISTIC
from app.lua.pool import Pool
from tests.lua.running import run_lua

_MARK = re.compile(r"-- (TGL[0-9]+(?: TGL[0-9]+)*)$")
MARKED = """
local random = math.random
handle = procedure "handle" {
    input = {issue = {type = "string", required = true}},
    run = function()
        Supervisor = agent "supervisor" {
            model = "scripted",
            system_prompt = function() return "You are agent " .. math.random(100000) end,
        }
        Supervisor({message = input.issue})
        return {resolution = Supervisor.output}
    end
}

local function stamp() return os.time() end
local function never() return os.date("%Y", 0) .. os.time({year = 2020, month = 1, day = 1}) end
local function now() return os.clock() end -- TGL101

main = procedure "main" {
    state = {x = {type = "number"}},
    run = function()
        local chosen = random() > 0.5 -- TGL101
        local doubled = chosen
        state.safe = checkpoint(function() return math.random(100) end)
        state.also = Step.checkpoint(stamp)
        if doubled then -- TGL102
            Human.approve({message = "Deploy?"})
        end
        state.x = os.getenv("HOME") -- TGL101 TGL201
        state.list[1] = now()
        state.y = chosen -- TGL102 TGL201
        step("pay", function()
            local at = os.time() -- TGL103
            tool.bank.pay{at = at}
            local after = os.time()
            return after
        end)
        local total = 0
        for i = 1, 1000 do total = total + i end
        checkpoint() -- TGL301
        state.total = total
        checkpoint()
        state.deep = compute_everything(state.total) -- TGL401
        checkpoint() -- TGL301
        Human.reviw{message = "?"} -- TGL402
        Step.record(print) -- TGL402
        io.write("x") -- TGL401
        os.execute("x") -- TGL402
        local time = math.random(3) -- tga: ignore[TGL101]
        local Human = {shout = print}
        Human.shout(never())
        repeat local left = total until left > 0
        for key, value in pairs(state) do Log.info(key, value) end
        goto finished
        ::finished::
        return {result = handle({issue = "x"})}
    end
}
"""


def found_in(text: str) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for finding in lint_source(text.encode(), "p.lua").findings:
        found.setdefault(finding.line, []).append(finding.code)
    return {line: sorted(codes) for line, codes in found.items()}


def test_exactly_the_marked_lines_are_found() -> None:
    expected = {
        number: match[1].split()
        for number, line in enumerate(MARKED.splitlines(), 1)
        if (match := _MARK.search(line)) is not None
    }
    assert found_in(MARKED) == expected


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.code)
def test_each_rule_finds_its_bad_example_and_nothing_in_its_good_one(rule: object) -> None:
    assert isinstance(rule, type(RULES[0]))
    bad, good = lint_source(rule.bad.encode()), lint_source(rule.good.encode())
    assert {finding.code for finding in bad.findings} == {rule.code}
    assert all(finding.fix and finding.why for finding in bad.findings)
    assert good.findings == []


@pytest.mark.parametrize("name", [".".join(path) for path in NONDETERMINISTIC])
def test_each_of_the_seven_functions_is_found_outside_a_checkpoint_and_not_inside(name: str) -> None:
    assert found_in(f"local x = {name}()\nreturn x") == {1: ["TGL101"]}
    assert found_in(f"local library = {name}\nreturn library()") == {2: ["TGL101"]}
    for inside in (
        "checkpoint(function() {} end)",
        "Step.checkpoint(function() {} end)",
        'step("s", function() {} end)',
    ):
        assert found_in("return " + inside.replace("{}", f"return {name}()")) == {}


def test_a_library_that_the_program_defines_itself_is_its_own() -> None:
    assert found_in("local math = {random = function() return 4 end}\nreturn math.random()") == {}
    assert found_in("local function f(os) return os.time() end\nreturn f({time = tostring})") == {}


@pytest.mark.parametrize(
    ("text", "line", "found"),
    [
        ("x = 1\nif x then\n", 2, "if"),
        ("local x = = 1", 1, "="),
        ("x = 1\ny = }", 2, "}"),
    ],
)
def test_a_syntax_error_says_its_line(text: str, line: int, found: str) -> None:
    with pytest.raises(LintError) as refused:
        lint_source(text.encode(), "p.lua")
    assert refused.value.message.startswith(f"p.lua:{line}: expected Lua 5.4, found:"), refused.value.message


def test_what_is_no_text_too_large_or_nested_too_deeply_is_refused_in_words() -> None:
    for data, word in ((b"x = '\xff'", "UTF-8"), (b"-" * 200_000, "at most"), (b"x = " + b"(" * 30_000, "Lua 5.4")):
        with pytest.raises(LintError, match=word):
            lint_source(data)
    deep = b"x = " + b"(" * 30_000 + b"1" + b")" * 30_000
    with pytest.raises(LintError, match="nested too deeply"):
        lint_source(deep)


@pytest.mark.parametrize(
    "line", ["checkpoint()\n", "x = os.time() y = x\n", "f(x)\n", "for i=1,2 do g() end\n", "a.b.c=1\n"]
)
def test_a_program_of_the_largest_size_is_judged_in_a_time_that_grows_with_it(line: str) -> None:
    def cpu_s(size: int) -> float:
        began = time.process_time()
        lint_source((line * (size // len(line))).encode())
        return time.process_time() - began

    cpu_s(1_000)
    small, large = max(cpu_s(16_000), 0.05), cpu_s(128_000)
    assert large < small * 40, (small, large)


def diagram_of(text: str) -> str:
    report = lint_source(text.encode(), "order.lua")
    assert isinstance(report, LuaReport)
    return report.diagram()


def test_the_drawing_shows_operations_branches_loops_and_people() -> None:
    drawn = diagram_of("""
        Worker = agent "worker" {model = "m"}
        local function greet() Worker({message = "hello"}) end
        main = procedure "main" {run = function()
            for i, item in ipairs(input.items) do
                tool.crm.create{name = item}
                if i > 3 then break end
            end
            step("research", function() greet() end)
            if Human.approve({message = "Publish?"}) then
                parallel{function() tool.mail.send{} end, function() sleep(3) end}
            elseif state.x then
                return {}
            else
                state.y = checkpoint(function() return 1 end)
            end
            return {}
        end}
    """)
    for part in (
        'subgraph g1["main"]',
        '{"for i, item in ipairs#40;input.items#41;"}',
        '["tool crm.create"]',
        '["step research"]',
        '["agent Worker hello"]',
        '{{"Human.approve Publish?"}}:::person',
        '{"state.x"}',
        '["tool mail.send"]',
        '[/"sleep"/]:::wait',
        '["checkpoint"]',
    ):
        assert part in drawn, (part, drawn)
    assert drawn.count("subgraph") == drawn.count("    end\n") == 2
    assert "greet" not in drawn  # drawn where it is called


def test_a_script_is_drawn_under_the_name_of_its_file() -> None:
    assert 'subgraph g1["order"]' in diagram_of("tool.crm.create{}\nreturn {}")


def test_the_command_takes_lua_and_python_together(tmp_path: Path) -> None:
    good, bad, broken = tmp_path / "good.lua", tmp_path / "bad.lua", tmp_path / "broken.lua"
    good.write_text(RULES[0].good)
    bad.write_text(RULES[0].bad)
    broken.write_text("x =")
    python = tmp_path / "some.py"
    python.write_text("from tga_sdk import procedure\n\n\n@procedure\nasync def p(ctx):\n    return 1\n")

    def run(*words: str) -> tuple[int, str, str]:
        told = CliRunner().invoke(application, ["lint", *words])
        return told.exit_code, told.stdout, told.stderr

    assert run(str(good), str(python)) == (0, "Nothing found in 2 programs of 2 files.\n", "")
    code, said, _ = run(str(bad))
    assert code == 1
    assert f"TGL101 {bad}:1:4: math.random() outside a checkpoint" in said
    assert "instead: state.x = checkpoint(" in said
    code, _, error = run(str(broken))
    assert code == 2
    assert f"LINT_SOURCE_INVALID: {broken}:1:" in error
    code, said, _ = run("--json", "--diagram", str(bad), str(broken))
    document = json.loads(said)
    assert code == 2
    assert document["files"][0]["findings"][0]["code"] == "TGL101"
    assert document["files"][0]["procedures"] == ["bad"]
    assert document["files"][0]["diagram"].startswith("flowchart TD")
    assert len(document["errors"]) == 1
    assert run(str(tmp_path / "missing.lua"))[0] == 2


async def test_the_names_that_lint_knows_are_those_that_a_program_finds() -> None:
    text = """
        local names, members = {}, {}
        for name in pairs(_G) do names[#names + 1] = name end
        for _, owner in ipairs({"Human", "Step", "os"}) do
            members[owner] = {}
            for name in pairs(_G[owner]) do table.insert(members[owner], name) end
        end
        return {names = names, members = members}
    """
    async with Pool(children=1) as pool:
        outcome = await run_lua(pool, text)
    assert outcome.output is not None
    found = outcome.output["value"]
    assert set(found["names"]) == GLOBALS
    assert {owner: frozenset(names) for owner, names in found["members"].items()} == MEMBERS
