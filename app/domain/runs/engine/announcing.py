"""What is told to webhooks when a run asks a person something."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

from app.domain.runs.documents import RunIntent
from app.domain.runs.engine.ports import LoadedRun, RunPorts
from app.domain.runs.engine.putting import load_artifact
from app.domain.runs.requests import AskRequest
from app.domain.runs.schedule import AT_WORK


@dataclass(frozen=True, slots=True)
class AnnouncedQuestion:
    """It holds neither message nor context: they may be sensitive, and the person who answers reads them under their
    own name."""

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


class CalledBack(NamedTuple):
    """A question that is open and names a URL, and what that is told: this question alone."""

    url: str
    intent_digest: str
    announcement: RunAnnouncement


async def load_announcement(ports: RunPorts, run_id: str, webhook: str) -> RunAnnouncement | None:
    """What this webhook is to be told of the run; None when nothing is open that concerns it."""
    loaded = await ports.runs.load(run_id)
    questions = [
        question
        async for question, asked in _open_questions(ports, loaded)
        if any(asked.told_to([webhook], level=level) for level in range(question.level + 1))
    ]
    return _announcement(loaded, questions) if questions else None


async def load_callbacks(ports: RunPorts, run_id: str) -> list[CalledBack]:
    """What is to be told to the URLs that open questions of the run name."""
    loaded = await ports.runs.load(run_id)
    return [
        CalledBack(asked.callback, question.intent_digest, _announcement(loaded, [question]))
        async for question, asked in _open_questions(ports, loaded)
        if asked.callback is not None
    ]


async def _open_questions(ports: RunPorts, loaded: LoadedRun) -> AsyncIterator[tuple[AnnouncedQuestion, AskRequest]]:
    run = loaded.run
    for path, begun in run.frontier.begun.items():
        if begun.kind != "ask" or run.head.state not in AT_WORK:
            continue
        intent = await load_artifact(ports, run.run_id, begun.sequence_number, RunIntent)
        if isinstance(intent.request, AskRequest):
            form, digest = intent.request.form, begun.intent_digest
            yield AnnouncedQuestion(path, intent.name, form, digest, begun.due_at, begun.level), intent.request


def _announcement(loaded: LoadedRun, questions: list[AnnouncedQuestion]) -> RunAnnouncement:
    run, start = loaded.run, loaded.start
    own_id = run.run_id.removeprefix(f"{loaded.tenant}/")
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
