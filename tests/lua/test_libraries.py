"""The sandbox's libraries answer as Lua's own do, where those are safe and the same in every process.

The trusted parts run here beside the real libraries, in one Lua state of this process, on inputs that hypothesis makes.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import lupa.lua54 as lupa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.lua.pool import Pool
from tests import sampling
from tests.lua.states import LANGUAGE, value_of

PARTS = Path(__file__).resolve().parents[2] / "app" / "lua"
EXAMPLES = 4 * sampling.share(500, 100)


def _compared() -> Any:
    """A function of a name and its arguments: what C answers, and what the counted matcher answers."""
    lua = lupa.LuaRuntime(encoding="latin-1", register_eval=False)
    source = (PARTS / "patterns.lua").read_text()
    counted = source.replace("STEPS_IN_C_MAX <const> = 200000", "STEPS_IN_C_MAX <const> = -1").replace(
        "(length <= 16777216 and repetitions(pattern) == 0)", "false"
    )
    assert counted.count("= -1") > source.count("= -1")
    return lua.eval(
        """function(source)
          local raw = {}
          for name, value in pairs(_G) do raw[name] = value end
          local patterns = assert(load(source, '=[patterns]'))(raw)
          local function all(name, library, text, pattern, extra)
            if name == 'gmatch' then
              local found = {}
              for a, b, c in library.gmatch(text, pattern, 1) do
                found[#found + 1] = tostring(a) .. '|' .. tostring(b) .. '|' .. tostring(c)
                if #found > 200 then break end
              end
              return table.concat(found, ';')
            elseif name == 'gsub' then
              return library.gsub(text, pattern, extra, #text + 1)
            elseif name == 'gsub function' then
              local function replace(a, b) return tostring(a) .. '<' .. tostring(b) .. '>' end
              return library.gsub(text, pattern, replace, #text + 1)
            elseif name == 'gsub table' then
              return library.gsub(text, pattern, {a = 'A', aa = false, [1] = 'one', b = 7}, #text + 1)
            end
            return library[name](text, pattern, extra)
          end
          local function shown(ok, ...)
            if not ok then
              local problem = (...):gsub('^%[?[^%]:]*%]?:%d+: ', '')
              return 'error: ' .. problem:gsub('invalid capture index.*', 'invalid capture index')
            end
            local found = {}
            for index = 1, select('#', ...) do found[index] = tostring((select(index, ...))) end
            return table.concat(found, ',')
          end
          return function(name, text, pattern, extra)
            local theirs = shown(pcall(all, name, string, text, pattern, extra))
            return theirs, shown(pcall(all, name, patterns, text, pattern, extra))
          end
        end"""
    )(counted)


COMPARED = _compared()
TEXTS = st.text("ab()1 .\xe9\x00", max_size=8)
ITEMS = st.sampled_from(
    [
        "a",
        "b",
        ".",
        "%a",
        "%d",
        "%s",
        "%w",
        "%A",
        "[ab]",
        "[^a]",
        "[a-z]",
        "[%a1]",
        "[]]",
        "[^%s]",
        "%.",
        "()",
        "(a)",
        "(.-)",
        "%1",
        "%2",
        "%b()",
        "%f[a]",
        "%f[%A]",
        "(",
        ")",
        "[",
        "%",
        "$",
        "^",
        "(b*)",
        "\x00",
    ]
)
PATTERNS = st.lists(st.tuples(ITEMS, st.sampled_from(["", "", "*", "+", "-", "?"])), max_size=5).map(
    lambda parts: "".join(item + repeat for item, repeat in parts)
)


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(["", "^"]), TEXTS, PATTERNS, st.integers(-9, 10))
def test_find_and_match_find_what_c_finds(anchor: str, text: str, pattern: str, init: int) -> None:
    for name in ("find", "match"):
        theirs, ours = COMPARED(name, text, anchor + pattern, init)
        assert ours == theirs


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.sampled_from(["", "^"]), TEXTS, PATTERNS, st.sampled_from(["x", "<%0>", "%1", "%%", "%2", "%", "%z", ""]))
def test_gmatch_and_gsub_give_what_c_gives(anchor: str, text: str, pattern: str, replacement: str) -> None:
    for name in ("gmatch", "gsub", "gsub function", "gsub table"):
        theirs, ours = COMPARED(name, text, anchor + pattern, replacement)
        # C looks at captures where the replacement needs them; here a pattern that leaves one open is always refused.
        assert ours in (theirs, "error: unfinished capture"), name


@pytest.fixture
async def pool() -> AsyncIterator[Pool]:
    async with Pool(children=1, language=LANGUAGE) as pool:
        yield pool


EXPRESSIONS = """
('x'):rep(3, '-')
('x'):rep(-1)
('%d %5.2f %s %q %x'):format(3, 2.5, true, 'a\\n', 255)
string.format('%s %s', nil, 'x')
string.format('%-5s|%5s|%.2s', 'a', 'b', 'ccc')
string.format('%i', '10')
('a,b,,c'):find(',', 1, true)
('hello'):find('l', -2)
('hello'):find('', 10)
('hello'):find('', 6)
('key = value'):match('^(%w+)%s*=%s*(%w+)$')
('hello world'):gsub('o', '0', 1)
('abc'):gsub('', '-')
('abc'):gsub('%w', '%0%0')
('abc def'):gsub('(%w+) (%w+)', '%2 %1')
('x'):gsub('x', {x = 1})
('x = 1, y = 2'):gsub('(%w+) = (%w+)', function(k, v) return v end)
select('#', table.unpack({1, nil, 3}, 1, 3))
table.concat({1, 2, 'x'}, ', ', 2)
table.concat({}, ',')
table.unpack({1, 2, 3}, 2)
table.unpack({}, 1, 2)
table.remove({1, 2, 3}, 1)
table.remove({})
table.concat(table.move({1, 2, 3}, 1, 3, 2), ',')
table.concat(table.move({1, 2, 3}, 2, 3, 1), ',')
tostring(1e15)
tostring(-0.0)
tostring(2^63)
tostring(nil)
tostring(1e100)
math.type(1)
math.tointeger(3.0)
math.maxinteger
7 // 2
7.5 // 2
-7 % 3
1 << 62
tonumber('0x10')
tonumber('z', 36)
tonumber('  12  ')
tonumber('1e')
#'h\\u{e9}'
utf8.len('h\\u{e9}')
utf8.char(233, 8364)
('%w+'):len()
os.time({year = 2020, month = 1, day = 1, hour = 12})
os.date('!%Y-%m-%d %H:%M:%S', 86400)
os.date('!*t', 0).year
string.pack('<i4', 7):byte(1, -1)
string.unpack('<i4', '\\7\\0\\0\\0')
next({})
next({a = 1})
rawlen({1, 2})
rawequal('a', 'a')
select(-1, 1, 2, 3)
type(next)
pcall(error, 'x', 0)
pcall(error)
xpcall(error, function(e) return e .. '!' end, 'x')
select('#', pcall(error, nil))
coroutine.isyieldable()
coroutine.wrap(function(...) return select('#', ...) end)(1, nil, nil)
load('return 1 + 1')()
load('syntax error here')
load('return ...', 'name', 't', {})(5)
assert(1, 2, 3)
""".strip().splitlines()


async def test_expressions_have_the_values_that_lua_gives_them(pool: Pool) -> None:
    lua = lupa.LuaRuntime(encoding="utf-8", register_eval=False)
    shown = """
      local function shown(...)
        local found = {}
        for index = 1, select('#', ...) do
          local value = (select(index, ...))
          local text = tostring(value):gsub('%[string.-%]:', 'chunk:'):gsub('load [%w ]+:', 'chunk:')
          found[index] = type(value) .. ' ' .. text
        end
        return table.concat(found, '; ')
      end
    """
    listed = "\n".join(f"pcall(function() found[{at}] = shown({each}) end)" for at, each in enumerate(EXPRESSIONS, 1))
    program = f"{shown} local found = {{}} {listed} return found"
    theirs = list(lua.execute(program).values())
    ours = await value_of(pool, program)
    assert len(ours) == len(EXPRESSIONS)
    assert dict(zip(EXPRESSIONS, ours, strict=True)) == dict(zip(EXPRESSIONS, theirs, strict=True))


@settings(max_examples=EXAMPLES // 4, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 5), st.integers()), max_size=40))
def test_sort_is_stable_and_sorts(pairs: list[tuple[int, int]]) -> None:
    assert [tuple(pair) for pair in SORTED(json.dumps(pairs))] == sorted(pairs, key=lambda pair: pair[0])


def _sorted() -> Any:
    lua = lupa.LuaRuntime(encoding="utf-8", register_eval=False)
    source = (PARTS / "tables.lua").read_text()
    start = source.index("local function merge_sort")
    merge_sort = source[start : source.index("local function less")]
    sort = lua.execute(f"{merge_sort} return merge_sort")
    before = lua.eval("function(a, b) return a[1] < b[1] end")

    def run(text: str) -> list[list[int]]:
        pairs = json.loads(text)
        table = lua.table_from([lua.table_from([first, str(second)]) for first, second in pairs])
        sort(table, len(pairs), before)
        return [[pair[1], int(pair[2])] for pair in table.values()]

    return run


SORTED = _sorted()
