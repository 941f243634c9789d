"""The rules of `tga lint`: their codes are stable, and docs/lint.md is made of this table.

`bad` and `good` are bodies of a procedure `(ctx, input)`; what stands before a line `---` stands before the procedure.
"""

from __future__ import annotations

from textwrap import indent
from typing import Final, NamedTuple


class Rule(NamedTuple):
    """What is found, why it matters, and what to do instead."""

    code: str
    title: str
    why: str
    fix: str
    bad: str
    good: str


_AGAIN: Final = "the body is executed again in each attempt, and must do the same again"
_STEP: Final = "do it in a step: await ctx.step(name, fn)"

RULES: Final = (
    Rule(
        "TGA101",
        "the clock is asked outside a recorded operation",
        f"{_AGAIN}; the clock says something else each time",
        "use await ctx.now()",
        "import time\n---\nstarted = time.time()\nawait ctx.tool('crm', 'create', {'at': started})",
        "started = await ctx.now()\nawait ctx.tool('crm', 'create', {'at': started.isoformat()})",
    ),
    Rule(
        "TGA102",
        "chance outside a recorded operation",
        f"{_AGAIN}; chance decides anew each time",
        "use ctx.random() or ctx.uuid(); what needs more belongs into a step",
        "from random import choice as pick\n---\nawait ctx.tool('mail', 'send', {'to': pick(input['people'])})",
        "people = input['people']\nawait ctx.tool('mail', 'send', {'to': people[int(ctx.random() * len(people))]})",
    ),
    Rule(
        "TGA103",
        "the environment or the machine is asked outside a recorded operation",
        f"{_AGAIN}, on another machine perhaps",
        "read it in a step: await ctx.step(name, fn); or give it to the run as input",
        "import os\n---\nawait ctx.tool('crm', 'create', {'region': os.environ['REGION']})",
        "import os\n---\nregion = await ctx.step('region', lambda: os.environ['REGION'])\n"
        "await ctx.tool('crm', 'create', {'region': region})",
    ),
    Rule(
        "TGA104",
        "files, network or processes outside a recorded operation",
        f"{_AGAIN}; what is outside has changed meanwhile, or is changed twice",
        f"{_STEP}; or through a tool: await ctx.tool(server, tool, args)",
        "from pathlib import Path\n---\ntext = Path('orders.csv').read_text()\n"
        "await ctx.tool('crm', 'load', {'text': text})",
        "from pathlib import Path\n---\ntext = await ctx.step('read', Path('orders.csv').read_text)\n"
        "await ctx.tool('crm', 'load', {'text': text})",
    ),
    Rule(
        "TGA105",
        "hash() or id() outside a recorded operation",
        "both differ between processes, and a replay is another process",
        "use a digest, as hashlib.sha256(text).hexdigest(), or the value itself",
        "await ctx.tool('crm', 'shard', {'number': hash(input['name']) % 8})",
        "from zlib import crc32\n---\nawait ctx.tool('crm', 'shard', {'number': crc32(input['name'].encode()) % 8})",
    ),
    Rule(
        "TGA106",
        "a set is iterated over",
        "the order of a set differs between processes, and with it the order of what is performed",
        "iterate over sorted(...), or keep a list or a dict",
        "for name in set(input['names']):\n    await ctx.tool('crm', 'create', {'name': name})",
        "for name in sorted(set(input['names'])):\n    await ctx.tool('crm', 'create', {'name': name})",
    ),
    Rule(
        "TGA107",
        "a sleep by the clock of this process",
        "it holds a worker, is lost in a crash, and is slept again in each attempt",
        "use await ctx.sleep(seconds)",
        "import asyncio\n---\nawait asyncio.sleep(3600)\nawait ctx.tool('mail', 'remind', {})",
        "await ctx.sleep(3600)\nawait ctx.tool('mail', 'remind', {})",
    ),
    Rule(
        "TGA108",
        "the name of an operation differs in each attempt",
        "an operation is known by its name: the journal has another one, and the run diverges",
        "use a fixed name; what varies is an argument",
        "import time\n---\nawait ctx.step(f'load-{time.time()}', load, input)",
        "await ctx.step('load', load, input)",
    ),
    Rule(
        "TGA109",
        "ctx.attempt decides what is performed",
        "the attempt's number differs between a run and its replay, and so would the operations",
        "use it in logs alone",
        "if ctx.attempt == 1:\n    await ctx.tool('mail', 'welcome', {})",
        "ctx.log(f'attempt {ctx.attempt}')\nawait ctx.tool('mail', 'welcome', {})",
    ),
    Rule(
        "TGA110",
        "non-determinism before an operation inside a recorded body",
        "a crash inside the body has it executed again, and then the operation inside is another one",
        "use ctx.now(), ctx.random(), ctx.uuid() or a step of its own also inside a body that performs operations",
        "import time\n---\nasync def pay():\n    at = time.time()\n"
        "    return await ctx.tool('bank', 'pay', {'at': at})\nawait ctx.step('pay', pay)",
        "async def pay():\n    at = await ctx.now()\n    return await ctx.tool('bank', 'pay', {'at': at.isoformat()})\n"
        "await ctx.step('pay', pay)",
    ),
    Rule(
        "TGA201",
        "an operation is not awaited",
        "it is never performed",
        "write await before it",
        "ctx.tool('crm', 'create', {})\nawait ctx.sleep(1)",
        "await ctx.tool('crm', 'create', {})\nawait ctx.sleep(1)",
    ),
    Rule(
        "TGA202",
        "operations at the same time, without ctx.gather",
        "their addresses would depend on which of them is faster",
        "use await ctx.gather(...): each branch is numbered by itself",
        "import asyncio\n---\nawait asyncio.gather(ctx.tool('crm', 'create', {}), ctx.tool('mail', 'welcome', {}))",
        "await ctx.gather(lambda: ctx.tool('crm', 'create', {}), lambda: ctx.tool('mail', 'welcome', {}))",
    ),
    Rule(
        "TGA203",
        "a time-out by the clock of this process around operations",
        "in a replay, where what is recorded takes no time, it ends otherwise",
        "use timeout= of the operation",
        "import asyncio\n---\nasync with asyncio.timeout(60):\n    await ctx.signal('paid')",
        "await ctx.signal('paid', timeout=60)",
    ),
    Rule(
        "TGA204",
        "branches share the variable of a loop",
        "a function sees the variable as the loop has left it: every branch does the same",
        "bind it: functools.partial(branch, item), or lambda item=item: ...",
        "await ctx.gather(*[lambda: ctx.tool('crm', 'create', {'id': one}) for one in input['ids']])",
        "await ctx.gather(*[lambda one=one: ctx.tool('crm', 'create', {'id': one}) for one in input['ids']])",
    ),
    Rule(
        "TGA301",
        "what stops a run is caught",
        "when the run is cancelled or another worker has taken it, the body would go on",
        "catch Exception, which lets Stop pass; or raise again",
        "try:\n    await ctx.tool('crm', 'create', {})\nexcept BaseException:\n    ctx.log('failed')",
        "try:\n    await ctx.tool('crm', 'create', {})\nexcept Exception:\n    ctx.log('failed')",
    ),
    Rule(
        "TGA302",
        "return in finally, after operations",
        "it discards what stops the run, as a bare except would",
        "return after the try statement",
        "try:\n    await ctx.tool('crm', 'create', {})\nfinally:\n    return 1",
        "try:\n    await ctx.tool('crm', 'create', {})\nfinally:\n    ctx.log('tried')\nreturn 1",
    ),
    Rule(
        "TGA401",
        "state outside the run is changed outside a step",
        f"{_AGAIN}: the change is made once more in each, and other runs see it",
        "keep it in ctx.state, which is recorded; or change it in a step",
        "DONE = []\n---\nDONE.append(input['id'])\nawait ctx.tool('crm', 'create', {'number': len(DONE)})",
        "ctx.state.done.append(input['id'])\nawait ctx.tool('crm', 'create', {'number': len(ctx.state.done)})",
    ),
    Rule(
        "TGA402",
        "a recorded body changes what is around it",
        "a replay skips the body and returns its result: the change is missing",
        "return what the body has found, or change ctx.state",
        "found = []\nasync def look():\n    found.append(1)\nawait ctx.step('look', look)\n"
        "await ctx.tool('crm', 'load', {'found': found})",
        "async def look():\n    return [1]\nfound = await ctx.step('look', look)\n"
        "await ctx.tool('crm', 'load', {'found': found})",
    ),
    Rule(
        "TGA403",
        "a value that cannot be recorded goes into or out of a recorded body",
        "arguments and results are recorded as JSON, bytes or text, and a replay has nothing else",
        "make it inside the body, and return what was read from it",
        "import sqlite3\n---\nbooks = sqlite3.connect('books.db')  # tga: ignore[TGA104]\n"
        "await ctx.step('count', lambda: books.execute('select count(*) from book').fetchone()[0])",
        "import sqlite3\n---\ndef count():\n    books = sqlite3.connect('books.db')\n"
        "    return books.execute('select count(*) from book').fetchone()[0]\nawait ctx.step('count', count)",
    ),
    Rule(
        "TGA404",
        "a value that is not kept is to be skipped in a replay",
        "what is not recorded cannot be returned: the step is refused with RUN_TIER_INVALID",
        "add resume='recompute', or choose a tier that is kept",
        "await ctx.step('model', load, tier='transient')",
        "await ctx.step('model', load, tier='transient', resume='recompute')",
    ),
    Rule(
        "TGA501",
        "ctx.checkpoint() after a computation",
        "a checkpoint records the state, and no result: each replay computes everything before it again",
        "ctx.step is the way: await ctx.step(name, fn) records the result",
        "scores = [load(one) for one in input['rows']]\nctx.state.best = max(scores)\nawait ctx.checkpoint()",
        "scores = await ctx.step('score', lambda: [load(one) for one in input['rows']])\nctx.state.best = max(scores)\n"
        "await ctx.checkpoint()",
    ),
    Rule(
        "TGA601",
        "two programs of one name and version",
        "runs are given to programs by name and version, and a worker can have only one of each",
        "give one of them another name, or another version",
        "@procedure(name='example')\nasync def other(ctx, input):\n    return 1\n---\nreturn 2",
        "@procedure(name='example', version='2')\nasync def other(ctx, input):\n    return 1\n---\nreturn 2",
    ),
    Rule(
        "TGA602",
        "two steps of one name in a flow",
        "steps of a flow are told apart by name, and the flow is refused",
        "give each step a name of its own",
        "FLOW = Flow('books', steps=[Step('load', load), Step('load', load)])\n---\nreturn 1",
        "FLOW = Flow('books', steps=[Step('load', load), Step('sort', load)])\n---\nreturn 1",
    ),
    Rule(
        "TGA603",
        "a procedure is not a function (ctx, input) or (ctx)",
        "a worker calls it with these two, and it is refused with PROCEDURE_INVALID",
        "write a function of the module; several values go into one pydantic model",
        "@procedure\nasync def pay(ctx, amount, currency):\n    return 1\n---\nreturn 2",
        "@procedure\nasync def pay(ctx, payment):\n    return 1\n---\nreturn 2",
    ),
)
RULE_OF: Final = {rule.code: rule for rule in RULES}
_BEFORE: Final = "from tga_sdk import Flow, Step, procedure\n\n\ndef load(given=None):\n    return given\n\n\n"


def program_of(example: str) -> str:
    """An example as a file."""
    before, _, body = example.rpartition("---\n")
    imports = "".join(f"{line}\n" for line in before.splitlines() if line.startswith(("import ", "from ")))
    rest = "".join(f"{line}\n" for line in before.splitlines() if not line.startswith(("import ", "from ")))
    return f"{imports}{_BEFORE}{rest}\n\n@procedure\nasync def example(ctx, input):\n{indent(body, '    ')}\n"


def rendered() -> str:
    """docs/lint.md: every rule, with what breaks it and what does not."""
    lines = [
        "# The rules of `tga lint`",
        "",
        "`tga lint FILE.py` reads a file of procedures, never imports it, and says which lines a replay would not",
        "repeat. A procedure's body is executed again in each attempt, up to where its journal ends: it must perform",
        "the same operations again. What must happen once stands in an operation that is recorded: `ctx.step`,",
        "`ctx.tool` and the others. The same is watched while a procedure runs: a worker warns, or with `--strict`",
        "raises, at the exact line.",
        "",
        "Functions of the same file that a body calls are part of it. What is imported from elsewhere is not read.",
        "",
        "- Exit codes of `tga lint FILE.py ...`: 0 nothing found, 1 something found, 2 a file that is not Python.",
        "- `# tga: ignore[TGA101]` at the end of a line silences a rule there; `# tga: ignore` silences all of them.",
        "- `--json` prints findings for programs, `--diagram` each procedure as a mermaid flowchart.",
        "- Programs in Lua have rules of their own: [lint-lua.md](lint-lua.md).",
        "",
        "| code | finds |",
        "|---|---|",
        *(f"| [{rule.code}](#{rule.code.lower()}) | {rule.title} |" for rule in RULES),
    ]
    for rule in RULES:
        lines += ["", f"## {rule.code}", "", f"{_sentence(rule.title)} Why: {rule.why}. Instead: {rule.fix}.", ""]
        lines += ["```python", *_shown(rule.bad), "```", "", "becomes", "", "```python", *_shown(rule.good), "```"]
    return "\n".join(lines) + "\n"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _shown(example: str) -> list[str]:
    before, _, body = example.replace("'", '"').rpartition("---\n")
    lines = [line for line in before.splitlines() if line]
    return [*lines, *([""] if lines else []), *body.splitlines()]
