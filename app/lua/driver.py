"""A Lua program as a procedure of the SDK, for any worker."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.lua.execution import Execution, LuaError, lost_child
from app.lua.options import LuaOptions
from app.lua.pool import ChildLost, Chunk, Pool
from app.lua.programs import Declaration, Source, policy_of
from tga_sdk import guard
from tga_sdk.context import Context
from tga_sdk.procedures import Procedure

__all__ = ["LuaError", "LuaOptions", "LuaProcedure", "lua_procedure"]


@dataclass(frozen=True)
class LuaProcedure(Procedure[..., Any]):
    """A procedure whose body is a Lua program."""

    declaration: Declaration | None = None

    @property
    def source(self) -> str:
        """The file that it was submitted as."""
        return self.name

    def registration(self) -> dict[str, Any]:
        """What a gateway is told of it: the schemas are those of the source."""
        said = super().registration()
        if self.declaration is not None:
            schemas = {
                "input_schema": self.declaration.input_schema,
                "output_schema": self.declaration.output_schema,
                "state_schema": self.declaration.state_schema,
            }
            said |= {name: value for name, value in schemas.items() if value is not None}
        return said


def lua_procedure(source: Source, declaration: Declaration, pool: Pool, *, options: LuaOptions) -> LuaProcedure:
    """The program as a procedure of the SDK, for any worker. Its digest is that of the source and its files."""
    is_always_strict = options.strict_determinism or declaration.metadata.get("strict_determinism") is True

    async def run(ctx: Context[Any], input: Any = None) -> Any:  # noqa: A002
        leased = ctx._attempt._leased
        seed = bytes.fromhex(leased["draw_salt"])
        begun = datetime.fromisoformat(leased["started_at"].replace("Z", "+00:00"))
        epoch_ms = round(begun.timestamp() * 1000)
        chunks = [Chunk(source.name, source.text)]
        start = Execution.start(source, declaration, input)
        with guard.off():  # what the program does is watched in Lua; a process that is started for it is not its doing
            try:
                is_strict = is_always_strict or ctx._attempt.is_strict
                state, first = await pool.begin(chunks, start, seed=seed, is_strict=is_strict, epoch_ms=epoch_ms)
            except ChildLost as lost:
                raise lost_child(ctx, lost) from None
            try:
                return await Execution(ctx, state, source, declaration, options).run(first)
            finally:
                state.close()

    metadata = declaration.metadata
    return LuaProcedure(
        name=declaration.name,
        version=declaration.version,
        fn=run,
        digest=source.digest,
        accepts=tuple(str(one) for one in metadata.get("accepts") or ()),
        policy=policy_of(metadata),
        description=declaration.description,
        tags=declaration.tags,
        declaration=declaration,
    )
