"""The rules of `tga lint` for Lua: their codes are stable, and docs/lint-lua.md is made of this table.

`bad` and `good` are whole programs.
"""

from __future__ import annotations

from typing import Final

from tga_sdk.lint.rules import Rule

_AGAIN: Final = "the program is executed again from its beginning in each attempt, and must do the same again"

RULES: Final = (
    Rule(
        "TGL101",
        "one of the seven functions that differ each time, outside a checkpoint",
        f"{_AGAIN}; outside a checkpoint the function is seeded or fixed, and in strict mode the run stops there",
        "state.x = checkpoint(function() return ... end)",
        'if math.random() > 0.5 then\n    tool.crm.create{name = "Ada"}\nend\nreturn {}',
        "state.is_chosen = checkpoint(function() return math.random() > 0.5 end)\nif state.is_chosen then\n"
        '    tool.crm.create{name = "Ada"}\nend\nreturn {}',
    ),
    Rule(
        "TGL102",
        "a variable across a checkpoint holds what differs each time",
        "after a restart it is computed again, and is not what the checkpoint before was made with",
        "keep it in state, from a checkpoint: state.x = checkpoint(function() return ... end)",
        "local started = os.time()  -- tga: ignore[TGL101]\ntool.crm.sync{}\nreturn {since = started}",
        "state.started = checkpoint(function() return os.time() end)\ntool.crm.sync{}\nreturn {since = state.started}",
    ),
    Rule(
        "TGL103",
        "one of the seven functions before an operation, inside a recorded body",
        "a crash inside the body has it executed again, and then the operation inside is another one",
        "take it in a checkpoint of its own first",
        'step("pay", function()\n    local at = os.time()\n    tool.bank.pay{at = at}\nend)\nreturn {}',
        "state.at = checkpoint(function() return os.time() end)\n"
        'step("pay", function()\n    tool.bank.pay{at = state.at}\nend)\nreturn {}',
    ),
    Rule(
        "TGL201",
        "state is given what differs each time, outside a checkpoint",
        "state is recorded with the next operation; a crash before it leaves nothing, and the next attempt has another "
        "value",
        "compute it in a checkpoint: state.x = checkpoint(function() return ... end)",
        "state.ticket = math.random(100000)  -- tga: ignore[TGL101]\ntool.crm.create{ticket = state.ticket}\nreturn {}",
        "state.ticket = checkpoint(function() return math.random(100000) end)\n"
        "tool.crm.create{ticket = state.ticket}\nreturn {}",
    ),
    Rule(
        "TGL301",
        "checkpoint() after a computation",
        "checkpoint() records the state, and no result: each replay computes everything before it again",
        "checkpoint(fn) is what spares it: state.x = checkpoint(function() return compute() end)",
        "function score(rows)\n    local best = 0\n    for _, row in ipairs(rows) do best = math.max(best, row) end\n"
        "    return best\nend\nstate.best = score({1, 2, 3})\ncheckpoint()\nreturn {best = state.best}",
        "function score(rows)\n    local best = 0\n    for _, row in ipairs(rows) do best = math.max(best, row) end\n"
        "    return best\nend\nstate.best = checkpoint(function() return score({1, 2, 3}) end)\n"
        "return {best = state.best}",
    ),
    Rule(
        "TGL401",
        "a name that nothing defines",
        "it is nil when the program runs, and calling or indexing it is an error",
        "define it, or mend its spelling",
        'tol.crm.create{name = "Ada"}\nreturn {}',
        'tool.crm.create{name = "Ada"}\nreturn {}',
    ),
    Rule(
        "TGL402",
        "a member that Human, Step or os does not have",
        "it is nil when the program runs, and calling it is an error",
        "use one of those that there are",
        'state.is_fine = Human.aprove{message = "Deploy?"}\nreturn {}',
        'state.is_fine = Human.approve{message = "Deploy?"}\nreturn {}',
    ),
    Rule(
        "TGL403",
        "procedures, and none of them is main",
        "a run begins with the procedure main, and a submission without one is refused; a file without procedures that "
        "are called is no script either",
        'name the entry: main = procedure "main" {run = function() ... end}',
        'order = procedure "order" {run = function()\n    return tool.crm.sync{}\nend}',
        'main = procedure "order" {run = function()\n    return tool.crm.sync{}\nend}',
    ),
)
RULE_OF: Final = {rule.code: rule for rule in RULES}


def rendered() -> str:
    """docs/lint-lua.md, without its first line."""
    lines = [
        "# The rules of `tga lint` for Lua",
        "",
        "`tga lint FILE.lua` reads a program in Lua, never runs it, and says which lines a replay would not repeat and",
        "which cannot work. A program is executed again from its beginning in each attempt, up to where its journal",
        "ends: it must perform the same operations again. What must happen once stands in an operation that is",
        "recorded: `checkpoint(fn)`, `step(name, fn)`, a tool, an agent, a question to a person. The same is watched",
        "while a program runs: it is warned about with its line, or in strict mode stopped there. [lua.md](lua.md) is",
        "the guide to such programs, and [lint.md](lint.md) has the rules for Python.",
        "",
        "- Exit codes of `tga lint FILE.lua ...`: 0 nothing found, 1 something found, 2 a file that is not Lua.",
        "- `-- tga: ignore[TGL101]` at the end of a line silences a rule there; `-- tga: ignore` silences all of them.",
        "- `--json` prints findings for programs, `--diagram` each procedure as a mermaid flowchart.",
        "- A submission (`POST /v1/procedures`, `tga run start FILE.lua`) is answered with the same findings; where",
        "  `[lua] strict_determinism` is set, those of the rules TGL1xx and TGL201 refuse it.",
        "",
        "| code | finds |",
        "|---|---|",
        *(f"| [{rule.code}](#{rule.code.lower()}) | {rule.title} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.code}", "", f"{_sentence(rule.title)} Why: {rule.why}. Instead: {rule.fix}.", ""]
        lines += ["```lua", *rule.bad.splitlines(), "```", "", "becomes", "", "```lua", *rule.good.splitlines(), "```"]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."
