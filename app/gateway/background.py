"""What a gateway does without being asked, while it serves.

It recovers what has no living executor, lets requests expire, fires schedules, reads on in the system streams, follows
the policy file, announces what waits, sequences the log, folds what lists and statistics read, deletes blobs that
nothing refers to, and compares its clock with the store's. Each of these is a task of its own: one that fails says so,
tries again, and stops none of the others. The store being away is no reason to end.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final

from rich.console import Console

from app.core.digest import Digest
from app.core.errors import ConcurrentExecution, TgaError
from app.core.limits import (
    BLOBS_COLLECT_EVERY_MS,
    BLOBS_COLLECTED_AT_ONCE,
    CLOCK_LOOK_EVERY_MS,
    FOLD_EVERY_MS,
    LOG_ROUND_MS,
    RUN_SWEEP_MS,
    SCHEDULES_EVERY_MS,
    SWEEP_EVERY_MS,
)
from app.domain.system.policies import record_policy
from app.gateway.policy_file import live_misfits
from app.gateway.recovery_report import tell_recovered
from app.gateway.runs import RunSweep
from app.gateway.wiring import Gateway
from app.postgres.clock_difference import CLOCKS_APART_MS_MAX, load_ahead_ms

output = Console(highlight=False, soft_wrap=True)
logger = logging.getLogger("tga")

_POLICY_EVERY_MS: Final = 1_000
_SYSTEM_EVERY_MS: Final = 1_000
_SERVERS_EVERY_MS: Final = 1_000  # whether one is due; `REACH_CHECK_EVERY_MS` says how often each is


class BackgroundWork:
    """What the gateway does without being asked."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._stopping = gateway.services.stopping
        self._reported: set[str] = set()
        self._recorded_policy: Digest = gateway.policy.digest
        self._away: set[str] = set()
        self._warned: set[str] = set()
        self._fitted: object = None
        self._is_clock_wrong = False

    def all(self) -> list[Coroutine[Any, Any, None]]:
        return [
            self.repeat("recovery", self.recover, SWEEP_EVERY_MS),
            self.repeat("expiry", self.expire, SWEEP_EVERY_MS),
            self.repeat("what is due for runs", RunSweep(self._gateway.services.runs).once, RUN_SWEEP_MS),
            self.repeat("schedules", self._gateway.schedules.once, SCHEDULES_EVERY_MS),
            self.repeat("system streams", self._gateway.system.refresh_all, _SYSTEM_EVERY_MS),
            self.repeat("policy", self.follow_policy, _POLICY_EVERY_MS),
            self.repeat("the look at tool servers", self._gateway.registry.check_reach, _SERVERS_EVERY_MS),
            self.repeat("webhooks", self._gateway.webhooks.run, SWEEP_EVERY_MS),
            self.repeat("notices to webhooks", self._gateway.notices.tell, SWEEP_EVERY_MS),
            self.repeat("the log", self._gateway.sequencer.run, LOG_ROUND_MS),
            self.repeat("the fold of calls", self._gateway.call_folding.once, FOLD_EVERY_MS),
            self.repeat("collection of blobs", self.collect_blobs, BLOBS_COLLECT_EVERY_MS),
            self.repeat("the look at the clock", self.compare_clocks, CLOCK_LOOK_EVERY_MS),
        ]

    async def repeat(self, name: str, work: Callable[[], Awaitable[object]], every_ms: int) -> None:
        """Again and again until the gateway stops. However it fails, it is tried again; an outage is told of once."""
        while not self._stopping.is_set():
            try:
                await work()
            except TgaError as error:
                if name not in self._away:
                    self._away.add(name)
                    logger.warning("%s waits: %s", name, error)
            except Exception:
                logger.exception("a defect in the gateway's %s; it goes on", name)
            else:
                if name in self._away:
                    self._away.discard(name)
                    logger.warning("%s goes on", name)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), timeout=every_ms / 1000)

    async def recover(self) -> None:
        async with contextlib.aclosing(self._gateway.runtime.recover_all()) as sweep:
            async for result in sweep:
                recovered = "recovered" if result.error is None else result.error.code
                self._gateway.services.instruments.recoveries.add((recovered,))
                # One that cannot be recovered is told of once, not in every sweep.
                if not isinstance(result.error, ConcurrentExecution) and result.trace_id not in self._reported:
                    tell_recovered(result, as_json=False)
                if result.error is not None:
                    self._reported.add(result.trace_id)
                if self._stopping.is_set():
                    break

    async def collect_blobs(self) -> None:
        """As long as there is much to collect, without a pause."""
        while await self._gateway.blobs.collect() == BLOBS_COLLECTED_AT_ONCE and not self._stopping.is_set():
            pass

    async def compare_clocks(self) -> None:
        """Say it once when this clock and the store's differ, and once when they agree again."""
        ahead_ms = await load_ahead_ms(self._gateway.services.sessions, self._gateway.clock)
        self._gateway.services.instruments.clock_ahead.set(ahead_ms / 1000)
        is_wrong = abs(ahead_ms) > CLOCKS_APART_MS_MAX
        if is_wrong and not self._is_clock_wrong:
            differs = f"{abs(ahead_ms) / 1000:.1f} s {'ahead of' if ahead_ms > 0 else 'behind'} the database's"
            logger.warning(
                "this machine's clock is %s: what is recorded here is dated wrongly, and deadlines of runs come "
                "too late or too early by as much. Set both clocks by NTP.",
                differs,
            )
        elif self._is_clock_wrong and not is_wrong:
            logger.warning("this machine's clock agrees with the database's again")
        self._is_clock_wrong = is_wrong

    async def expire(self) -> None:
        expired = await self._gateway.runtime.expire_all()
        if expired:
            output.print(f"{expired} waited for a person for too long: denied.")

    def _warn_of_policy(self) -> None:
        """Each warning once for each policy. Tools come and go with their servers, so rules are compared with them
        again whenever they are others."""
        policy, registry = self._gateway.policy.policy, self._gateway.registry
        fitted = (policy.digest, registry.tools(), [s.connection and s.connection.state for s in registry.servers()])
        if fitted == self._fitted:
            return
        self._fitted = fitted
        for warning in (*policy.warnings, *live_misfits(policy, registry)):
            if warning not in self._warned:
                self._warned.add(warning)
                logger.warning("policy: %s", warning)

    async def follow_policy(self) -> None:
        """A new policy is on the record as soon as it decides; if the store is away, as soon as it is back: until then
        nothing that it decided can be stored either."""
        policy = self._gateway.policy
        found = await policy.refresh()
        if found is not None and found.error is not None:
            logger.error("the policy file cannot be used, and the policy before it stays in force: %s", found.error)
        elif found is not None:
            output.print(f"The policy file was read again: {found.digest} decides now.")
            self._warned, self._fitted = set(), None
        self._warn_of_policy()
        if policy.digest != self._recorded_policy:
            digest, text = policy.digest, policy.text
            await record_policy(self._gateway.system, self._gateway.clock, digest, text)
            self._recorded_policy = digest
