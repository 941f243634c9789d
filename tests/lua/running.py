"""Lua programs on the gateway in memory: declared, served, run; with real child processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.lua.driver import LuaProcedure, lua_procedure
from app.lua.options import LuaOptions
from app.lua.pool import Pool
from app.lua.programs import Source, declared
from tga_sdk.testing.crashes import Outcome, Setting
from tga_sdk.testing.people import ScriptedPeople


async def procedure_of(
    pool: Pool,
    text: str,
    *,
    name: str = "program.lua",
    files: Mapping[str, bytes] | None = None,
    options: LuaOptions | None = None,
) -> LuaProcedure:
    """The source as a procedure that any worker serves."""
    source = Source(name, text, files or {})
    return lua_procedure(source, await declared(pool, source), pool, options=options or LuaOptions())


async def performed(
    procedure: Any, given: Any = None, *, tools: Any = None, people: ScriptedPeople | None = None
) -> Outcome:
    """One run of it, without a crash."""
    return await Setting(procedure, given, tools, people, [], None, None, None).run(None)


async def run_lua(
    pool: Pool, text: str, given: Any = None, *, tools: Any = None, people: ScriptedPeople | None = None, **more: Any
) -> Outcome:
    return await performed(await procedure_of(pool, text, **more), given, tools=tools, people=people)


def main_of(body: str, *, state: str = "nil", given: str = "nil", output: str = "nil") -> str:
    """A file whose main procedure has this body."""
    return (
        f'main = procedure "main" {{ input = {given}, output = {output}, state = {state}, run = function()\n'
        f"{body}\nend }}"
    )


def checkpoints(outcome: Outcome) -> list[tuple[str, str, str, Any]]:
    """Path, kind, name and value of what has ended."""
    return [
        (one["path"], one["kind"], one["name"], (one.get("value") or {}).get("value"))
        for one in outcome.journal
        if one["artifact_type"] == "run_checkpoint"
    ]
