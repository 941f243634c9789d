"""Sources that nobody would write, and values that no program should return: only our own errors come out, the child
lives on, and a run that was begun has an end in its journal."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.lua.lint import LintError, lint_source
from app.lua.pool import Pool
from app.lua.programs import LuaSourceInvalid, Source, declared
from tests import sampling
from tests.lua.running import main_of, performed, procedure_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
few = settings(
    deadline=None,
    max_examples=sampling.share(150, 20),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
PIECES = (
    *("procedure", '"main"', "{", "}", "(", ")", "run", "=", "function", "()", "end", "return", "input", "state", "."),
    *("output", "field", "string", "required", "true", "nil", "1e999", "0x", "'", "[[", "]]", "--", "\n", "..", ","),
    *("step", "checkpoint", "Human", "approve", "tool", "bank", "charge", "error", "local", "x", "goto", "::x::"),
    *("setmetatable", "__index", "__close", "<close>", "_ENV", "load", "coroutine", "wrap", "\x00", "\xff", "\x1bLua"),
)
SOURCES = st.text(max_size=60) | st.lists(st.sampled_from(PIECES), max_size=30).map(" ".join)
VALUES = (
    "0/0",
    "1/0",
    "math.mininteger",
    "{[1] = 1, x = 2}",
    "{[1.5] = 1}",
    "{[{}] = 1}",
    "{[true] = 1}",
    "'\\255'",
    "'\\0'",
    "function() end",
    "coroutine.create(function() end)",
    "setmetatable({}, {__index = error})",
    "setmetatable({}, {__pairs = error, __len = error})",
    "(function() local t = {} t[1] = t return t end)()",
    "(function() local t = {} for i = 1, 60 do t = {t} end return t end)()",
    "{1, nil, 3}",
    "string.rep('x', 2000000)",
    "input",
    "state",
    "null",
    "_G",
)


@few
@given(text=SOURCES)
async def test_any_text_is_declared_or_refused_and_linted_or_refused(pool: Pool, text: str) -> None:
    with contextlib.suppress(LuaSourceInvalid):
        await declared(pool, Source("program.lua", text, {}))
    with contextlib.suppress(LintError):
        lint_source(text.encode("utf-8", "replace"), "program.lua")
    assert (await declared(pool, Source("program.lua", "return {}", {}))).is_script


@few
@given(
    value=st.sampled_from(VALUES),
    where=st.sampled_from(
        (
            "return %s",
            "state.x = %s",
            "error(%s)",
            "step('s', function() return %s end)",
            "tool.bank.charge{amount = %s}",
            "Human.approve({message = 'x', context = %s, timeout = 1, default = true})",
            "Log.info(%s)",
            "pcall(function() state.x = %s end)",
        )
    ),
)
async def test_hostile_values_end_the_run_by_an_error_of_ours_or_not_at_all(pool: Pool, value: str, where: str) -> None:
    body = (where % value) if where.startswith("return") else f"{where % value}\nreturn {{}}"
    program = await procedure_of(pool, main_of(body))
    outcome = await performed(program, {"a": [1, {"b": None}]}, tools={"bank.charge": lambda amount: {}})
    assert outcome.state in ("COMPLETED", "FAILED")
    ends = [one for one in outcome.journal if one["artifact_type"] == "run_end"]
    assert len(ends) == 1
    assert outcome.journal[-1] == ends[0]
    if outcome.state == "FAILED":
        assert outcome.error is not None
        assert outcome.error["type"]
        assert "Traceback" not in outcome.error["message"]
        assert "sandbox failed" not in outcome.error["message"]
