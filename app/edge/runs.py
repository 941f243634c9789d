"""What every way in shares for runs: their ids with and without the tenant, who sees one, and records as callers get
them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

from app.config import qualify
from app.core.errors import RunErased, RunNotFound, TraceErased, TraceNotFound
from app.domain.addresses import OWN_RUN_ID_PATTERN
from app.domain.identity import Principal
from app.domain.runs.documents import RunAnswer, RunCheckpoint, RunEnd
from app.domain.runs.engine.journal import JournalRecord
from app.domain.runs.replay import RunRecord
from app.domain.runs.transitions import RUN
from app.domain.runs.values import ChildValue, EffectValue, SecretValue
from app.domain.tga.documents import ActionRequest, ToolEffect, TraceId
from app.domain.tga.execution import answer_of
from app.edge.permissions import Action, may, require, scope_of
from app.edge.services import Services

_OWN_ID: Final = re.compile(OWN_RUN_ID_PATTERN)


def qualified(principal: Principal, own_id: str) -> str:
    """The run's id on the log; RunNotFound for what can be none."""
    if _OWN_ID.fullmatch(own_id) is None:
        raise RunNotFound("no such run", expected="letters, digits and . _ : -, at most 96")
    return qualify(principal.tenant, own_id)


def own_run_id(tenant: str, run_id: str) -> str:
    """What the tenant calls its run."""
    return run_id.removeprefix(f"{tenant}/")


async def run_seen_by(services: Services, principal: Principal, own_id: str, action: Action = "read_run") -> str:
    """The run's id on the log, if this principal may see it; else RunNotFound, whether it exists or not."""
    require(principal, action)
    run_id = qualified(principal, own_id)
    if not await services.queries.is_visible(RUN.stream(run_id), scope_of(principal)):
        raise RunNotFound("no such run")
    return run_id


async def run_read_by(services: Services, principal: Principal, own_id: str) -> str:
    """As `run_seen_by`, for the journal: a worker reads those of its whole tenant, because it may be leased any."""
    if may(principal, "work"):
        return run_of_worker(principal, own_id)
    return await run_seen_by(services, principal, own_id)


def run_of_worker(principal: Principal, own_id: str) -> str:
    """The run's id on the log, for a worker: it works for everybody of its tenant. The store is not asked: an id of
    another tenant's cannot be written here, and what does not exist has no lease."""
    require(principal, "work")
    return qualified(principal, own_id)


async def shown_records(
    services: Services,
    principal: Principal,
    records: Iterable[RunRecord],
    effects: Mapping[str, ToolEffect | None] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """As `shown_journal`. `effects`: those of these traces need not be read."""
    return await shown_journal(
        services, principal, [JournalRecord(record.entry.sequence_number, record) for record in records], effects
    )


async def shown_journal(
    services: Services,
    principal: Principal,
    records: Iterable[JournalRecord],
    effects: Mapping[str, ToolEffect | None] = MappingProxyType({}),
) -> list[dict[str, Any]]:
    """Records as workers read them: what the artifact says, with its number. `joined` is what a tool or a child has
    returned, which stands on a stream of its own, and for workers what is sealed. A worker goes on from it, so for
    workers what cannot be joined is an error; others see that it is gone."""
    is_worker = may(principal, "work")
    shown = []
    for number, record in records:
        said = {} if record.artifact is None else record.artifact.to_json()
        for left_out in ("schema_id", "schema_version"):
            said.pop(left_out, None)
        said.update(
            run_id=own_run_id(principal.tenant, record.entry.run_id),
            sequence_number=number,
            artifact_type=record.entry.artifact_type,
            artifact_digest=record.entry.artifact_digest,
            recorded_at=record.entry.recorded_at,
        )
        if isinstance(record.artifact, RunAnswer):
            try:
                said["joined"] = await _joined(services, principal.tenant, record.artifact, effects)
            except (TraceErased, RunErased):
                if is_worker:
                    raise
                said["joined"] = None
        elif isinstance(record.artifact, RunCheckpoint) and isinstance(record.artifact.value, SecretValue):
            said["joined"] = None
            if is_worker:
                said["joined"] = await services.runs.ports.secrets.open(
                    principal.tenant, record.entry.run_id, record.artifact.path, record.artifact.value
                )
        shown.append(said)
    return shown


async def _joined(
    services: Services,
    tenant: str,
    answer: RunAnswer,
    effects: Mapping[str, ToolEffect | None] = MappingProxyType({}),
) -> Any:
    """What a tool or a child has returned, which stands on its own stream; never another tenant's, whatever the journal
    names."""
    value = answer.value
    if isinstance(value, EffectValue) and value.trace_id in effects:
        return _output_of(effects[value.trace_id])
    if isinstance(value, EffectValue):
        trace = await services.traces.load_trace(TraceId(value.trace_id))
        asked = trace.records[0].artifact
        if not isinstance(asked, ActionRequest) or asked.principal.tenant != tenant:
            raise TraceNotFound("no such trace")
        return _output_of(answer_of(trace).effect)
    if isinstance(value, ChildValue):
        runs = services.runs.ports.runs
        child = await runs.load(value.run_id)
        if child.tenant != tenant:
            raise RunNotFound("no such run")
        last = await runs.load_records(value.run_id, after=child.run.head.sequence_number - 1, limit=1)
        end = last[0].artifact if last else None
        return end.output.to_json() if isinstance(end, RunEnd) and end.output is not None else None
    return None


def _output_of(effect: ToolEffect | None) -> Any:
    return None if effect is None or effect.output is None else effect.output.to_json()
