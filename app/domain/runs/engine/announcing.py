"""What is told to webhooks when a run asks a person something."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.domain.runs.documents import RunIntent
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.engine.putting import load_artifact
from app.domain.runs.requests import AskRequest
from app.domain.runs.schedule import AT_WORK


@dataclass(frozen=True, slots=True)
class AnnouncedQuestion:
    """It holds neither message nor context: they may be sensitive, and whoever answers reads them under their own
    name."""

    path: str
    name: str
    form: str
    intent_digest: str
    expires_at: str | None
    level: int  # how often it was escalated: who was told first has not answered


@dataclass(frozen=True, slots=True)
class RunAnnouncement:
    """The questions of a run that are open now. `callback`: where to POST `{path, answer, intent_digest}`, at this
    gateway."""

    kind: Literal["run"]
    run_id: str
    procedure: str
    version: str
    principal_id: str
    tenant: str
    questions: list[AnnouncedQuestion]
    callback: str


async def load_announcement(ports: RunPorts, run_id: str, webhook: str) -> RunAnnouncement | None:
    """What this webhook is to be told of the run; None when nothing is open that concerns it."""
    loaded = await ports.runs.load(run_id)
    run, start = loaded.run, loaded.start
    questions = []
    for path, begun in run.frontier.begun.items():
        if begun.kind != "ask" or run.head.state not in AT_WORK:
            continue
        intent = await load_artifact(ports, run_id, begun.sequence_number, RunIntent)
        if not isinstance(intent.request, AskRequest):
            continue
        if any(intent.request.told_to([webhook], level=level) for level in range(begun.level + 1)):
            form, digest = intent.request.form, begun.intent_digest
            questions.append(AnnouncedQuestion(path, intent.name, form, digest, begun.due_at, begun.level))
    if not questions:
        return None
    own_id = run_id.removeprefix(f"{loaded.tenant}/")
    return RunAnnouncement(
        "run",
        own_id,
        start.procedure,
        run.version,
        start.principal.principal_id,
        loaded.tenant,
        questions,
        f"/v1/runs/{own_id}/signals",
    )
