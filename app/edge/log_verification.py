"""The whole log verified on request: one verification of a tenant at a time, on whichever gateway was asked.

How far each has come is kept in the store, so that every gateway can be asked. The gateway that works on one writes
there every second; one that has been silent for long is gone, and the gateway that looks at its verification next takes
it over, from the first entry on. A gateway that was only slow notices with its next word that it was overtaken, and
leaves it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Final

from app.core.errors import ConcurrentExecution, TgaError, VerificationNotFound
from app.core.limits import LOG_VERIFICATION_SAVE_MS, LOG_VERIFICATION_SILENT_MS
from app.domain.identity import Principal
from app.edge.log_walk import CONCLUSIVE, LogVerification, walk_log
from app.postgres.log_verifications import KeptVerification, LogVerificationStore

if TYPE_CHECKING:
    from app.edge.services import Services

logger = logging.getLogger("tga")
_STOP_LOOKS_MAX: Final = 40
_STOP_LOOK_EVERY_S: Final = 0.25


class LogVerifications:
    """What this gateway works on, and the way to those of all gateways."""

    def __init__(self, *, save_ms: int = LOG_VERIFICATION_SAVE_MS, silent_ms: int = LOG_VERIFICATION_SILENT_MS) -> None:
        self._save_s = save_ms / 1000
        self._silent_ms = silent_ms
        self._tasks: dict[str, asyncio.Task[None]] = {}  # by id: those that this gateway works on
        self._turn = asyncio.Semaphore(1)  # of several tenants one is walked at a time: each walk takes a session
        self._changed = asyncio.Event()  # replaced whenever something was saved here

    async def start(self, services: Services, by: Principal) -> dict[str, Any]:
        """The document of a new one; ConcurrentExecution while another one of the tenant runs on any gateway."""
        store, now = self._store(services), services.clock.now()
        run = LogVerification(services.clock.new_id(), by.tenant, by.principal_id, now)
        told = await run.told(store)
        if not await store.begin(run.verification_id, run.tenant, told):
            await self.newest_first(services, by.tenant)  # one whose gateway is gone goes on here
            raise ConcurrentExecution(
                "a verification of the log is running", remedy="Follow it, or stop it, and start again."
            )
        self._work_on(services, run)
        return told

    async def newest_first(self, services: Services, tenant: str) -> list[dict[str, Any]]:
        kept = await self._store(services).newest_first(tenant)
        for one in kept:
            await self._take_over(services, one)
        return [one.told for one in kept]

    async def load(self, services: Services, verification_id: str, tenant: str) -> dict[str, Any]:
        """VerificationNotFound for one that is not the tenant's."""
        kept = await self._store(services).load(verification_id, tenant)
        if kept is None:
            raise VerificationNotFound("no such verification")
        await self._take_over(services, kept)
        return kept.told

    async def last_conclusive(self, services: Services) -> KeptVerification | None:
        return await self._store(services).last_conclusive()

    async def follow(self, services: Services, verification_id: str, tenant: str) -> AsyncIterator[dict[str, Any]]:
        """Where it stands, again and again as it goes on, the end last."""
        before = None
        while True:
            changed = self._changed
            told = await self.load(services, verification_id, tenant)
            if told != before:
                yield told
            if told["state"] != "running":
                return
            before = told
            with contextlib.suppress(TimeoutError):  # another gateway's words are only in the store
                await asyncio.wait_for(changed.wait(), self._save_s)

    async def stop(self, services: Services, verification_id: str, tenant: str) -> dict[str, Any]:
        """Stop it, wherever it runs; what was found so far stays. Its document, which says `running` if the gateway
        that works on it has not noticed in time."""
        told = await self.load(services, verification_id, tenant)
        if told["state"] != "running":
            return told
        await self._store(services).stop(verification_id, tenant)
        for _ in range(_STOP_LOOKS_MAX):
            task = self._tasks.get(verification_id)
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
            told = await self.load(services, verification_id, tenant)
            if told["state"] != "running":
                break
            await asyncio.sleep(_STOP_LOOK_EVERY_S)
        return told

    def _store(self, services: Services) -> LogVerificationStore:
        return LogVerificationStore(services.sessions, silent_ms=self._silent_ms)

    async def _take_over(self, services: Services, kept: KeptVerification) -> None:
        if not kept.is_silent or kept.verification_id in self._tasks:
            return
        attempt = await self._store(services).take(kept.verification_id)
        if attempt is not None:
            self._work_on(services, LogVerification.again(kept.told, kept.tenant, attempt))

    def _work_on(self, services: Services, run: LogVerification) -> None:
        task = asyncio.create_task(self._verify(services, run))
        self._tasks[run.verification_id] = task
        task.add_done_callback(lambda _: self._tasks.pop(run.verification_id, None))

    async def _verify(self, services: Services, run: LogVerification) -> None:
        walking = asyncio.create_task(self._walk_in_turn(services, run))
        ending = asyncio.create_task(services.stopping.wait())
        saving = asyncio.create_task(self._save_now_and_then(services, run))
        try:
            await asyncio.wait({walking, ending, saving}, return_when=asyncio.FIRST_COMPLETED)
            if walking.done():
                walking.result()
            else:
                run.state = "stopped"
        except asyncio.CancelledError:
            run.state = "stopped"
        except TgaError as error:
            run.state, run.error = "failed", f"{error.code}: {error.what}"
        except Exception:
            logger.exception("a defect in the verification of the log")
            run.state, run.error = "failed", "INTERNAL: a defect; the gateway's log says more"
        finally:
            for task in (walking, ending, saving):
                task.cancel()
            await asyncio.gather(walking, ending, saving, return_exceptions=True)
        run.phase, run.ended_at = "over", services.clock.now()
        with contextlib.suppress(TgaError):  # the store is away: it stays open there, and is taken over later
            await self._save(services, run)

    async def _walk_in_turn(self, services: Services, run: LogVerification) -> None:
        async with self._turn:
            await walk_log(services, run)

    async def _save_now_and_then(self, services: Services, run: LogVerification) -> None:
        """Returns when the verification is to be stopped, or is this gateway's no more."""
        while True:
            await asyncio.sleep(self._save_s)
            with contextlib.suppress(TgaError):  # a word less: the next one may be heard
                if await self._save(services, run) is not False:
                    return

    async def _save(self, services: Services, run: LogVerification) -> bool | None:
        store = self._store(services)
        is_over, told = run.phase == "over", await run.told(store)
        is_conclusive = run.state in CONCLUSIVE
        told["state"] = run.state if is_over else "running"  # the walk says its last word when all of it is saved
        is_to_stop = await store.save(
            run.verification_id, run.attempt, told, is_over=is_over, is_conclusive=is_over and is_conclusive
        )
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return is_to_stop
