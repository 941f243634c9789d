"""What stands and wants a person, as webhooks are told of it: held calls, tools in quarantine, a forked log, runs
that are parked or have diverged."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator

from app.connectors.registry import Registry
from app.connectors.webhook_notices import Notice
from app.core.errors import LogForked
from app.core.limits import LIST_ITEMS_MAX, RUN_LEASE_MS, WEBHOOK_NOTICES_MAX
from app.domain.ledger.queries import Visibility
from app.domain.system.pins import Pins
from app.edge.services import Log
from app.postgres.listing import TraceFilters, list_traces
from app.postgres.run_lists import list_runs
from app.postgres.sessions import Sessions


class WhatStands:
    def __init__(
        self,
        sessions: Sessions,
        registry: Registry,
        pins: Pins,
        log: Log,
        tenants: Iterable[str],
        *,
        lease_ms: int = RUN_LEASE_MS,
    ) -> None:
        self._sessions = sessions
        self._registry = registry
        self._pins = pins
        self._log = log
        self._tenants = sorted(tenants)
        self._lease_ms = lease_ms

    async def look(self) -> list[Notice]:
        found = [*self._forks(), *self._quarantined()]
        for tenant in self._tenants:
            found += await self._held(tenant)
            found += await self._stopped(tenant)
        return found

    def _forks(self) -> Iterator[Notice]:
        fault = self._log.fault
        if isinstance(fault, LogForked):
            # What is expected names the signed head: another fork is another notice.
            named = hashlib.sha256(f"{fault.what} {fault.expected}".encode()).hexdigest()[:16]
            told = {"detail": fault.what, "expected": fault.expected, "found": fault.found, "remedy": fault.next_step}
            yield Notice("log_forked", f"log-forked-{named}", {"origin": self._log.verifier_key.name, **told})

    def _quarantined(self) -> Iterator[Notice]:
        for tool in self._registry.tools():
            state = self._pins.state_of(tool)
            if state.status != "quarantined" or state.pinned_digest is None:
                continue
            told = {
                "tenant": tool.tenant,
                "server_id": tool.server_id,
                "tool_name": tool.tool_name,
                "pinned_digest": state.pinned_digest,
                "found_digest": state.found_digest,
            }
            name = re.sub(r"[^!-~]", "?", f"{tool.server_id}.{tool.tool_name}")
            yield Notice("tool_quarantined", f"quarantine-{name}-{state.found_digest[:16]}", told)

    async def _held(self, tenant: str) -> list[Notice]:
        """Executing traces that wait for an operator, the newest first."""
        found: list[Notice] = []
        before: str | None = None
        while len(found) < WEBHOOK_NOTICES_MAX:
            page = await list_traces(
                self._sessions,
                Visibility(tenant, None),
                TraceFilters(states=["EXECUTING"], waiting="operator"),
                before=before,
                limit=LIST_ITEMS_MAX,
            )
            for item in page.items:
                if item.waiting == "operator":
                    told = {
                        "tenant": tenant,
                        "trace_id": item.trace_id,
                        "server_id": item.server_id,
                        "tool_name": item.tool_name,
                        "principal_id": item.principal_id,
                        "held_since": item.updated_at,
                    }
                    since = re.sub(r"\D", "", item.updated_at)
                    found.append(Notice("call_held", f"{item.trace_id}-held-{since}", told))
            before = page.next
            if before is None:
                break
        return found

    async def _stopped(self, tenant: str) -> list[Notice]:
        """Runs that nothing goes on with until an operator does, the newest first."""
        found: list[Notice] = []
        before: str | None = None
        while len(found) < WEBHOOK_NOTICES_MAX:
            page = await list_runs(
                self._sessions,
                Visibility(tenant, None),
                states=("PARKED", "DIVERGED"),
                before=before,
                limit=LIST_ITEMS_MAX,
                worker_seen_ms=self._lease_ms,
            )
            for item in page.items:
                told = {
                    "tenant": tenant,
                    "run_id": item.run_id.removeprefix(f"{tenant}/"),
                    "procedure": item.procedure,
                    "version": item.version,
                    "attempt": item.attempt,
                    "principal_id": item.principal_id,
                    "since": item.updated_at,
                }
                # Retried and stopped again, it is another notice.
                name, since = re.sub(r"[^!-~]", "?", item.run_id), re.sub(r"\D", "", item.updated_at)
                state = item.state.lower()
                found.append(Notice(f"run_{state}", f"{name}-{state}-{since}", told))
            before = page.next
            if before is None:
                break
        return found
