"""Lua procedures in this gateway: what compiles a submitted program."""

from __future__ import annotations

from collections.abc import Mapping

from app.core.errors import LuaUnavailable
from app.domain.runs.submissions import DeclaredProgram


class NoLua:
    """The Compiler of a gateway that executes no Lua."""

    async def declared(self, name: str, source: str, files: Mapping[str, bytes]) -> DeclaredProgram:
        raise LuaUnavailable(f"the program {name} cannot be executed here")
