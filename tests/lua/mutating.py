"""Programs that somebody wrote, changed as no one would: by bytes, by tokens, by lines and by what they say."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Final

from tests.lua.test_behaviours import EVERYTHING
from tests.lua.test_document import AROUND, OWN, REFERENCE
from tests.lua.test_lines import BODY, WAITS
from tests.lua.test_lua_crashes import PROGRAM

_TOKEN: Final = re.compile(
    r"--[^\n]*|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|\[\[.*?\]\]|[A-Za-z_]\w*|\d+\.?\d*|\.\.\.|\.\.|[<>=~]=|//|::|\s+|.",
    re.DOTALL,
)
_BLOCK: Final = re.compile(r"```lua\n(.*?)```", re.DOTALL)
_NUMBERS: Final = (
    "0",
    "-1",
    "1e308",
    "1e400",
    "0/0",
    "2^53",
    "9007199254740993",
    "math.mininteger",
    "0x7fffffffffffffff",
)
_TEXTS: Final = (
    '""',
    "'a b'",
    '"\\0"',
    '"\\255"',
    '"\\u{D800}"',
    "('x'):rep(5000)",
    '"main"',
    "[==[\n]==]",
    '"../x"',
    '"1s"',
)
_WORDS: Final = (
    *("nil", "true", "{}", "function() end", "null", "state", "input", "_G", "_ENV", "error", "pcall", "checkpoint"),
    *(
        "goto",
        "end",
        "return",
        "local",
        "coroutine.yield()",
        "setmetatable({}, {__index = error})",
        "tool.bank.charge{}",
    ),
    *("parallel", "step", "Human.approve", "sleep", "signal", "agent", "model", "procedure", "string.rep", "<close>"),
)
_BYTES: Final = (
    b"\x00",
    b"\xff",
    b"\xc3",
    b"\xed\xa0\x80",
    b"\xef\xbb\xbf",
    b"\x1bLua",
    b"\r",
    b"\\",
    b'"',
    b"]]",
    b"--",
)


def corpus() -> list[str]:
    """The programs of the page on Lua, of the reference where it is at hand, and of these tests."""
    pages = [Path(__file__).parents[2] / "docs" / "lua.md"]
    pages += [REFERENCE] if REFERENCE.is_file() else []
    found = [block for page in pages for block in _BLOCK.findall(page.read_text())]
    wrapped = [f'main = procedure "main" {{run = function()\n{one}\nend}}' for one in (BODY, WAITS)]
    return [*found, *wrapped, EVERYTHING, PROGRAM, OWN, AROUND + "return {}"]


def mutated(source: str, chance: random.Random) -> bytes:
    """The program after one to three changes."""
    text = source
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        text = chance.choice(_CHANGES)(text, chance)
    data = text.encode("utf-8", "surrogatepass")
    for _ in range(chance.choice((*(0,) * 8, 1, 3))):
        at = chance.randrange(len(data) + 1)
        data = data[:at] + chance.choice(_BYTES) + data[at + chance.choice((0, 1)) :]
    return data


def _of_tokens(text: str, chance: random.Random) -> str:
    tokens = _TOKEN.findall(text) or [""]
    at, other = chance.randrange(len(tokens)), chance.randrange(len(tokens))
    match chance.randrange(4):
        case 0:
            del tokens[at]
        case 1:
            tokens.insert(at, tokens[other])
        case 2:
            tokens[at], tokens[other] = tokens[other], tokens[at]
        case _:
            tokens[at] = f" {chance.choice(_WORDS)} "
    return "".join(tokens)


def _of_lines(text: str, chance: random.Random) -> str:
    lines = text.split("\n")
    at, other = chance.randrange(len(lines)), chance.randrange(len(lines))
    match chance.randrange(4):
        case 0:
            del lines[at : at + chance.randint(1, 3)]
        case 1:
            lines.insert(at, lines[other])
        case 2:
            lines[at], lines[other] = lines[other], lines[at]
        case _:
            lines[at] = f"for i = 1, {chance.choice((3, 10**9))} do {lines[at]} end"
    return "\n".join(lines)


def _of_values(text: str, chance: random.Random) -> str:
    """Another number or text, or another name that is called."""
    kind, choices = chance.choice(
        ((r"\b\d+\b", _NUMBERS), (r"\"[^\"\n]*\"", _TEXTS), (r"\b[a-z_]+\b(?=[({\"])", _WORDS))
    )
    found = list(re.finditer(kind, text))
    if not found:
        return text
    one = chance.choice(found)
    return text[: one.start()] + chance.choice(choices) + text[one.end() :]


def _of_nesting(text: str, chance: random.Random) -> str:
    depth = chance.choice((5, 150, 5_000))
    opens, closes = chance.choice(
        (("{", "}"), ("(", ")"), ("do ", " end"), ("function() ", " end"), ("if x then ", " end"))
    )
    at = chance.randrange(len(text) + 1)
    return text[:at] + opens * depth + closes * depth + text[at:]


_CHANGES: Final = (_of_tokens, _of_lines, _of_lines, *(_of_values,) * 5, _of_nesting)
