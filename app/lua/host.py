"""Submitted programs in Lua, executed by this gateway: for each tenant that has some, a worker of the SDK, which asks
the gateway's own routes without a socket; the bodies of programs run in the children of one pool.

Any gateway of a database may take any run: each offers all submitted programs, old ones too, so a run goes on with the
very program that it is pinned to. Nothing is started before a tenant has a program, and no child before one is read or
runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

import httpx2

from app.core.errors import TgaError
from app.core.limits import LUA_LOOK_EVERY_MS, LUA_OFFERS_MAX
from app.lua.driver import lua_procedure
from app.lua.options import LuaOptions
from app.lua.pool import Pool
from app.lua.programs import Declaration, Source, declared
from tga_sdk.context import Context
from tga_sdk.procedures import Procedure
from tga_sdk.wire import Wire
from tga_sdk.worker import Worker

logger = logging.getLogger("tga")

NAME: Final = "lua"  # of the workers, for people and on the record
_PROGRAMS_KEPT_MAX: Final = 256
_URL: Final = "http://in-process"


class ProgramKey(NamedTuple):
    """One submitted program; a run names just these."""

    name: str
    version: str
    program_digest: str


class SubmittedPrograms(Protocol):
    """What was submitted, on all gateways."""

    async def look(self) -> dict[str, Sequence[ProgramKey]]:
        """The programs of every tenant that has some."""
        ...

    async def load(self, tenant: str, key: ProgramKey) -> Source:
        """Text and files, verified."""
        ...


class OwnTransport(httpx2.AsyncBaseTransport):
    """The way to the gateway's own routes, as one tenant's worker."""

    def hang_up(self) -> None:
        """Questions that are held open until there is something to say are answered now, with what there is."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class HostSettings:
    """`drain_s`: how long bodies may take to end when the gateway stops."""

    children: int = 2
    slots: int = 64
    drain_s: float = 8.0


class LuaHost:
    """Belongs to the loop in which `run` is called."""

    def __init__(
        self,
        programs: SubmittedPrograms,
        transport_for: Callable[[str], OwnTransport],
        options: LuaOptions,
        settings: HostSettings,
    ) -> None:
        # Set here for good.
        self._programs = programs
        self._transport_for = transport_for
        self._settings = settings
        self.options = options
        # Made when the first program is read; closed when `run` ends.
        self._pool: Pool | None = None
        self._looking = asyncio.Event()
        self._workers: dict[tuple[str, int], tuple[_LuaWorker, asyncio.Task[None]]] = {}
        # By tenant and program, the longest unused first: what is made of a source can be made again.
        self._made: dict[tuple[str, ProgramKey], Procedure[..., Any]] = {}

    @property
    def pool(self) -> Pool:
        if self._pool is None:
            self._pool = Pool(self.options.limits, self._settings.children)
        return self._pool

    async def declared(self, source: Source) -> tuple[Declaration, Procedure[..., Any]]:
        """What the source declares, and the procedure that it is; raises what `app.lua.programs.declared` raises."""
        declaration = await declared(self.pool, source)
        return declaration, lua_procedure(source, declaration, self.pool, options=self.options)

    def program_submitted(self, tenant: str) -> None:
        """A program was submitted here: look now."""
        self._looking.set()

    async def run(self, stopping: asyncio.Event) -> None:
        """Until `stopping` is set; then bodies end and are recorded, their runs are given back, and children are ended.
        A crash loses nothing that was recorded: the runs are leased anew when their leases are over."""
        is_away = False
        try:
            while not stopping.is_set():
                try:
                    await self._look()
                    is_away = False
                except TgaError as error:
                    if not is_away:
                        logger.warning("the look for Lua programs waits: %s", error)
                    is_away = True
                await self._pause(stopping)
        finally:
            await self._end()

    async def _pause(self, stopping: asyncio.Event) -> None:
        waiting = [asyncio.create_task(stopping.wait()), asyncio.create_task(self._looking.wait())]
        try:
            await asyncio.wait(waiting, timeout=LUA_LOOK_EVERY_MS / 1000, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in waiting:
                task.cancel()
        self._looking.clear()

    async def _look(self) -> None:
        for tenant, programs in (await self._programs.look()).items():
            for part, first in enumerate(range(0, len(programs), LUA_OFFERS_MAX)):
                offered = programs[first : first + LUA_OFFERS_MAX]
                known = self._workers.get((tenant, part))
                if known is None or known[1].done():
                    self._start(tenant, part, offered)
                else:
                    known[0].offer(offered)

    def _start(self, tenant: str, part: int, offered: Sequence[ProgramKey]) -> None:
        worker = _LuaWorker(self, tenant, offered, self._transport_for(tenant), self._settings)
        task = asyncio.create_task(worker.run(signals=False), name=f"lua worker of {tenant}")
        self._workers[tenant, part] = worker, task

    async def _end(self) -> None:
        for worker, _ in self._workers.values():
            worker.stop()
        tasks = [task for _, task in self._workers.values()]
        if tasks:
            await asyncio.wait(tasks, timeout=self._settings.drain_s + 2)
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(ended, Exception):
                logger.error("a worker of Lua programs has failed", exc_info=ended)
        if self._pool is not None:
            await self._pool.close()

    async def procedure(self, tenant: str, key: ProgramKey) -> Procedure[..., Any]:
        """The program, ready to run; made once, and kept while it is used."""
        made = self._made.pop((tenant, key), None)
        if made is None:
            _, made = await self.declared(await self._programs.load(tenant, key))
        self._made[tenant, key] = made
        while len(self._made) > _PROGRAMS_KEPT_MAX:
            del self._made[next(iter(self._made))]
        return made


class _LuaWorker(Worker):
    """Serves the submitted programs of one tenant, each in the version and with the digest that a run names. They come
    while it works, and none goes. Nothing is registered: whoever submitted them did that."""

    questions = 2  # while one is answered and asked anew, a start finds the other one waiting: both are one commit
    watches_programs = False  # they run in other processes, and the gateway's own code is no program

    def __init__(
        self,
        lua: LuaHost,
        tenant: str,
        offered: Sequence[ProgramKey],
        transport: OwnTransport,
        settings: HostSettings,
    ) -> None:
        super().__init__(
            _URL, None, (), slots=settings.slots, transport=transport, name=NAME, drain_seconds=settings.drain_s
        )
        self._lua = lua
        self._tenant = tenant
        self._offered = tuple(offered)
        self._own = transport

    def offer(self, offered: Sequence[ProgramKey]) -> None:
        """From now on these; a question for runs that is under way is asked anew if they are others."""
        if tuple(offered) != self._offered:
            self._offered = tuple(offered)
            self._own.hang_up()

    def _served(self) -> dict[str, Procedure[Any, Any]]:
        return {}

    def _offers(self) -> list[dict[str, Any]]:
        return [{**key._asdict(), "accepts": []} for key in self._offered]

    async def _register(self, wire: Wire) -> None:
        return None

    def _procedure_of(self, leased: dict[str, Any]) -> Procedure[Any, Any]:
        """The program is read inside the attempt: what is wrong with it then is the run's error."""
        key = ProgramKey(leased["procedure"], leased["version"], leased["program_digest"])

        async def body(ctx: Context[Any], given: Any = None) -> Any:
            found = await self._lua.procedure(self._tenant, key)
            return await found.fn(ctx, given)

        return Procedure(name=key.name, version=key.version, fn=body, digest=key.program_digest)
