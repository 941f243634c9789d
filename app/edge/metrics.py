"""What `/metrics` shows: counters as they stand, and what is so at the moment, read off when it is asked.

The store is asked with one statement, at most every few seconds however often Prometheus asks; when it does not answer
`tga_store_up` is 0, and what was read of it is not shown any more.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from app import __version__
from app.core.errors import LogForked, TgaError
from app.core.instruments import Instruments
from app.core.limits import METRICS_STORE_EVERY_MS, METRICS_STORE_WAIT_MS
from app.core.measuring import exposition
from app.edge.services import Services
from app.postgres.standing import Standing, load_standing

_CONDITIONS: Final = ("ok", "stalled", "failing", "unlogged", "forked")
_PAGE_BYTES: Final = resource.getpagesize()


class ProcessMetrics:
    """Of one gateway process."""

    def __init__(
        self,
        services: Services,
        *,
        needs_key: bool,
        queue: Callable[[], tuple[int, int]],
        leads: Callable[[], bool],
        worker_silent_ms: int,
    ) -> None:
        # Set here for good. `queue`: of plans that wait to be committed; `leads`: whether this gateway sequences.
        self.needs_key = needs_key
        self._services = services
        self._instruments: Instruments = services.instruments
        self._queue = queue
        self._leads = leads
        self._worker_silent_ms = worker_silent_ms
        self._started_at = time.time()
        # What the store said last, until when that is believed, and the look that is under way.
        self._standing: Standing | None = None
        self._believed_until = 0.0
        self._looking: asyncio.Task[None] | None = None

    async def render(self) -> bytes:
        """All metrics, in Prometheus's text format."""
        if time.monotonic() >= self._believed_until:
            if self._looking is None:
                self._looking = asyncio.create_task(self._look())
            await asyncio.shield(self._looking)
        if self._services.observer is not None and self._services.observer.spans is not None:
            self._services.observer.spans.count()
        self._read_gateway()
        self._read_log()
        self._read_process()
        self._read_store()
        return exposition(self._instruments.all())

    async def _look(self) -> None:
        try:
            async with asyncio.timeout(METRICS_STORE_WAIT_MS / 1000):
                self._standing = await load_standing(self._services.sessions, worker_silent_ms=self._worker_silent_ms)
        except (TgaError, TimeoutError):
            self._standing = None
        finally:
            self._believed_until = time.monotonic() + METRICS_STORE_EVERY_MS / 1000
            self._looking = None

    def _read_gateway(self) -> None:
        shown, services = self._instruments, self._services
        shown.in_flight.set(services.admission.in_flight)
        shown.followers.set(services.admission.subscribed)
        shown.workers_waiting.set(services.runs.leasing.waiting)
        servers = services.registry.servers()
        shown.executing.show({(one.server_id,): services.runtime.at_work(one.server_id) for one in servers})
        shown.server_up.show({(one.server_id,): int(one.status.is_callable) for one in servers})
        plans, size_bytes = self._queue()
        shown.queue_plans.set(plans)
        shown.queue_bytes.set(size_bytes)
        use = services.sessions.use
        shown.pool.show({("used",): use.used, ("idle",): use.idle, ("max",): use.max})
        shown.pool_waiting.set(use.waiting)

    def _read_log(self) -> None:
        shown, log = self._instruments, self._services.log
        state = "forked" if isinstance(log.fault, LogForked) else log.condition.state
        shown.log_condition.show({(one,): int(one == state) for one in _CONDITIONS})
        shown.log_leads.set(int(self._leads()))

    def _read_store(self) -> None:
        shown, found = self._instruments, self._standing
        shown.store_up.set(int(found is not None))
        gauges = (
            *(shown.approvals, shown.approvals_age, shown.held_now, shown.runs, shown.runs_unworked, shown.workers),
            *(shown.webhook_backlog, shown.log_size, shown.log_delay),
        )
        if found is None:
            for gauge in gauges:
                gauge.show({})
            return
        shown.approvals.show({("call",): found.calls_waiting, ("run",): found.questions})
        shown.approvals_age.show({("call",): found.calls_waiting_s, ("run",): found.questions_s})
        shown.held_now.set(found.calls_held)
        shown.runs.show({(state,): count for state, count in found.runs.items()})
        shown.runs_unworked.set(found.runs_without_worker)
        shown.workers.set(found.workers)
        shown.webhook_backlog.set(found.announcements)
        shown.log_size.set(found.log_size)
        shown.log_delay.set(found.log_delay_s)

    def _read_process(self) -> None:
        shown = self._instruments
        used = resource.getrusage(resource.RUSAGE_SELF)
        shown.build.show({(__version__,): 1})
        shown.cpu_seconds.set(used.ru_utime + used.ru_stime)
        shown.tasks.set(len(asyncio.all_tasks()))
        shown.started_at.set(self._started_at)
        shown.files_max.set(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        shown.collections.show({(str(n),): told["collections"] for n, told in enumerate(gc.get_stats())})
        try:
            shown.resident_bytes.set(int(Path("/proc/self/statm").read_text("ascii").split()[1]) * _PAGE_BYTES)
            shown.open_files.set(len(os.listdir("/proc/self/fd")))
        except OSError:  # not Linux
            shown.resident_bytes.show({})
            shown.open_files.show({})
