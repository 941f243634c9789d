"""What hostile programs try through the language itself: its state, logs, names, options and results. Each run ends, as
it should or by an error of ours that says what is wrong; the journal holds what it may hold; the next program runs."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.lua.limits import Limits
from app.lua.pool import Pool
from tests import sampling
from tests.lua.running import main_of, performed, procedure_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
SMALL = Limits(operations=40, slice_cpu_s=0.2, attempt_cpu_s=2.0, state_bytes=16_777_216, output_bytes=1_048_576)
OK = "COMPLETED"
# What it does: with which of these it ends.
BODIES: dict[str, tuple[str, ...]] = {
    # Forging what the child says, by what is logged and shown.
    'Log.info(\'x\\n{"kind":"R"}\\r\\n\\r\\nR\\1\\2\')': (OK,),
    "Log.info(('y'):rep(100000))": (OK,),
    "for i = 1, 10000 do Log.info(i) end": (OK,),
    "Log.info('\\255\\254')": (OK, "LUA_ERROR"),
    "Log.info('a\\0b')": (OK, "LUA_ERROR"),
    "Log.info(setmetatable({}, {__tostring = function() return ('x'):rep(100) end}))": (OK, "RUN_VALUE_INVALID"),
    'tactus.emit(\'\\n{"op":"tool"}\\n\')': (OK,),
    "tactus.emit({['\\n'] = '\\r\\n'})": (OK,),
    # Names that the journal does not take: told to the program, which may catch it.
    "step('two words', function() return 1 end)": ("RUN_VALUE_INVALID",),
    "step(('x'):rep(500), function() return 1 end)": ("RUN_VALUE_INVALID",),
    "tactus.emit(1, {})": ("RUN_VALUE_INVALID",),
    "tactus.emit(1, 'a b')": ("RUN_VALUE_INVALID",),
    "signal('\\n', {timeout = 1})": ("RUN_VALUE_INVALID",),
    "tool.bank['a b']{}": ("RUN_VALUE_INVALID",),
    "tactus.call('a b', {})": ("RUN_VALUE_INVALID",),
    "pcall(tactus.emit, 1, {}) step('next', function() return 1 end)": (OK,),
    # Options of other types.
    "sleep()": ("RUN_VALUE_INVALID",),
    "sleep(null)": ("RUN_VALUE_INVALID",),
    "Human.approve{message = 'm', webhooks = 5}": ("RUN_VALUE_INVALID",),
    "Human.select{message = 'm', options = 5}": ("RUN_VALUE_INVALID",),
    "Human.input{message = 'm', input_type = {1, {}}}": ("RUN_VALUE_INVALID",),
    "Human.review{message = 'm', default = 5, timeout = 1}": ("RUN_VALUE_INVALID",),
    "Human.approve{message = 'm', escalate = {after = null, webhooks = {}}}": ("RUN_VALUE_INVALID",),
    "(model 'm' (null)).predict(1)": ("RUN_VALUE_INVALID",),
    # Errors that say of themselves what the journal does not take.
    "error({type = 'two words', message = 'm'})": ("two_words",),
    "error({type = '\\n\\n', message = 'm'})": ("__",),
    "error({type = ('x'):rep(5000), message = 'm'})": ("x" * 128,),
    "error({type = '', message = ''})": ("LUA_ERROR",),
    "error({ref = {}, message = 'm'})": ("LUA_ERROR",),
    "error({ref = 1, message = 'm'})": ("LUA_ERROR",),
    "pcall(function() step('s', function() error({type = 'two words', ref = {}}) end) end)": (OK,),
    "error(('x'):rep(1000000))": ("LUA_ERROR", "LUA_LIMIT_OUTPUT"),
    # The state: circles, keys, numbers, depth, texts.
    "state.x = {} state.x.y = state.x": (OK, "RUN_VALUE_INVALID", "LUA_ERROR"),
    "local t = {} t[1] = t state.x = t": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "local t = {} for i = 1, 5000 do t = {t} end state.x = t": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state.x = {[1.5] = 1}": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state.x = {[1] = 'a', x = 'b'}": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state.x = {[1] = 'a', [2.0] = 'b'} step('s', function() return #state.x end)": (OK,),
    "state.x = -0.0 step('s', function() return state.x end)": (OK,),
    "state.x = 0 / 0": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state.x = math.maxinteger": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state['\\255'] = 1": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state.x = '\\237\\160\\128'": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "state['a/b~c'] = 1 step('s', function() return 1 end)": (OK,),
    "state[('k'):rep(300)] = 1 step('s', function() return 1 end)": (OK, "SCHEMA_VIOLATION", "RUN_VALUE_INVALID"),
    "state.x = function() end": ("RUN_VALUE_INVALID", "LUA_ERROR"),
    "for i = 1, 1000 do state['k' .. i] = i end step('s', function() return 1 end)": (
        *(OK, "SCHEMA_VIOLATION", "RUN_VALUE_INVALID"),
    ),
    # More than one attempt may do.
    "for i = 1, 1e6 do checkpoint() end": ("LUA_LIMIT_OPERATIONS",),
    "while true do pcall(checkpoint) end": ("LUA_LIMIT_OPERATIONS", "LUA_LIMIT_CPU"),
    "for i = 1, 1e6 do step('s', function() return ('x'):rep(30000) end) end": (
        *("LUA_LIMIT_OPERATIONS", "LUA_LIMIT_OUTPUT"),
    ),
    "parallel((function() local t = {} for i = 1, 100 do t[i] = function() return i end end return t end)())": (
        *(OK, "LUA_LIMIT_OPERATIONS", "LUA_LIMIT_THREADS"),
    ),
    "local function deep(n) return step('s', function() return deep(n + 1) end) end deep(1)": (
        *("LUA_LIMIT_OPERATIONS", "SCHEMA_VIOLATION", "RUN_VALUE_INVALID", "StepError", "LUA_ERROR"),
    ),
}


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
async def test_it_ends_by_an_error_of_ours_or_does_no_harm(body: str) -> None:
    if not sampling.is_taken(f"hostile {body}", 4):
        return
    async with Pool(SMALL, children=1) as pool:
        program = await procedure_of(pool, main_of(f"{body}\nreturn {{}}"))
        outcome = await performed(program, {}, tools={"bank.charge": lambda amount: {}})
        end = OK if outcome.error is None else outcome.error["type"]
        assert end in BODIES[body], (end, outcome.error)
        _verify_journal(outcome.journal)
        again = await performed(await procedure_of(pool, main_of("return {ok = true}")), {})
        assert again.output == {"tier": "inline", "value": {"ok": True}}


def _verify_journal(journal: list[dict[str, Any]]) -> None:
    assert [one["artifact_type"] for one in journal].count("run_end") == 1
    for record in journal:
        json.dumps(record, ensure_ascii=False, allow_nan=False).encode()
        for line in record.get("logs", ()):
            assert len(line["text"]) <= 1_024
        assert len(record.get("logs", ())) <= 64
