"""What others do to a run: answer its questions, send it signals, cancel it, have it tried again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from app.core.canonical import canonical_bytes
from app.core.errors import RecoveryFailed, RunAnswerInvalid, RunAnswerUnasked, RunEnded, SignalIdReused
from app.core.limits import RUN_PAGE_RECORDS_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import Signature
from app.domain.runs.documents import Accepted, Resolved, RunAnswer, RunError, RunIntent, RunResumption, RunSignal
from app.domain.runs.engine.artifacts import answer_of, verify_given
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.engine.putting import D, load_artifact
from app.domain.runs.engine.table import RunTable
from app.domain.runs.engine.work import Work
from app.domain.runs.replay import digest_of_frontier, frontier_after
from app.domain.runs.requests import AskRequest
from app.domain.runs.schedule import AT_WORK
from app.domain.runs.transitions import RUN
from app.domain.runs.values import Value


@dataclass(frozen=True, slots=True)
class OwnSignature:
    """A person has signed their answer themselves, and says when they gave it."""

    signature: Signature
    answered_at: str


class Answering:
    def __init__(self, ports: RunPorts, table: RunTable) -> None:
        self._ports = ports
        self._clock = ports.clock
        self._table = table

    async def answer(
        self,
        run_id: str,
        path: str,
        answer: Any,
        value: Value,
        principal: Principal,
        *,
        intent_digest: str | None,
        signed: OwnSignature | None = None,
    ) -> str:
        """A person's answer to a question of the run; the state it leaves. The first one counts; told again by the same
        person it changes nothing. The gateway signs it for the person, unless they have `signed` it themselves.

        RunAnswerUnasked: no such question is open. RunAnswerInvalid, SignatureInvalid: it stays open.
        """
        verify_given(value, "the answer")

        async def decide(work: Work) -> str:
            begun = work.run.frontier.begun.get(path)
            if begun is None or begun.kind != "ask" or intent_digest not in (None, begun.intent_digest):
                if begun is None and await self._is_repeat(work, path, value, principal, intent_digest):
                    return work.run.head.state
                raise RunAnswerUnasked(
                    f"no such question is open at {path}",
                    expected=intent_digest or "a question",
                    found=begun.intent_digest if begun is not None and begun.kind == "ask" else "none",
                )
            intent = await load_artifact(self._ports, run_id, begun.sequence_number, RunIntent)
            if isinstance(intent.request, AskRequest):
                misfit = self._ports.schemas.misfit(intent.request.answer_schema, answer)
                if misfit is not None:
                    raise RunAnswerInvalid("the answer does not fit the question", expected=misfit, stream=work.stream)
            at = self._clock.now() if signed is None else signed.answered_at
            unsigned = answer_of(work.run, path, by="person", by_id=principal.principal_id, at=at, value=value)
            work.add(await self._signed(unsigned, signed, principal.tenant))
            return work.run.head.state

        return await self._table.change(run_id, decide)

    async def _signed(self, answer: RunAnswer, own: OwnSignature | None, tenant: str) -> RunAnswer:
        if own is None:
            return answer.model_copy(update={"signature": self._ports.signer.sign(answer.signed_bytes())})
        answer = answer.model_copy(update={"signature": own.signature})
        await self._ports.signer.verify(answer, tenant=tenant)
        return answer

    async def _is_repeat(
        self, work: Work, path: str, value: Value, principal: Principal, intent_digest: str | None
    ) -> bool:
        """Whether this very answer was recorded lately: the client that gave it did not hear that it counted."""
        found = await self._last(work, RunAnswer, lambda said: said.path == path)
        if found is None or intent_digest not in (None, found.intent_digest):
            return False
        by = (found.answered_by.type, found.answered_by.id)
        return by == ("person", principal.principal_id) and found.value == value

    async def _last(self, work: Work, kind: type[D], is_meant: Callable[[D], bool] = lambda _: True) -> D | None:
        """The newest document of this kind, among the newest of the journal."""
        after, found = max(0, work.run.head.sequence_number - RUN_PAGE_RECORDS_MAX), None
        while page := await self._ports.runs.load_records(work.run_id, after=after, limit=RUN_PAGE_RECORDS_MAX):
            after = page[-1].entry.sequence_number
            said = [one.artifact for one in page if isinstance(one.artifact, kind) and is_meant(one.artifact)]
            found = said[-1] if said else found
        return found

    async def signal(self, run_id: str, name: str, signal_id: str, value: Value, principal: Principal) -> str:
        """Send a signal, once for its id; the operation that waits for it gets it. The state it leaves.

        SignalIdReused: one of the last RUN_SIGNAL_IDS_KEPT signals has this id, and another name or value.
        """
        verify_given(value, "the signal")

        async def decide(work: Work) -> str:
            run = work.run
            if signal_id in run.signal_ids:  # a repeat, also of what the run has received and ended with
                await self._verify_same_signal(work, name, signal_id, value)
                return run.head.state
            if run.head.state in RUN.terminal_states:
                raise RunEnded("the run has ended", found=run.head.state, stream=work.stream)
            now = self._clock.now()
            work.add(
                RunSignal.made_of(
                    {
                        "run_id": run_id,
                        "name": name,
                        "signal_id": signal_id,
                        "value": value,
                        "sent_by": principal.principal_id,
                        "sent_at": now,
                    }
                )
            )
            waiting = {
                begun.sequence_number: path
                for path, begun in run.frontier.begun.items()
                if (begun.kind, begun.name) == ("signal", name)
            }
            if waiting:  # the operation that waited first: a signal that came before would have been received before
                path = waiting[min(waiting)]
                work.add(answer_of(run, path, by="signal", by_id=signal_id, at=now, value=value))
            return run.head.state

        return await self._table.change(run_id, decide)

    async def _verify_same_signal(self, work: Work, name: str, signal_id: str, value: Value) -> None:
        """Compare with the signal on the record. The fold keeps the ids in order, so it says how many came later."""
        later = work.run.signal_ids[::-1].index(signal_id)
        sent = await self._ports.runs.find_signal(work.run_id, later=later)
        if sent is None or sent.signal_id != signal_id:
            raise RecoveryFailed("the signal is not where the journal says", expected=signal_id, stream=work.stream)
        if sent.name != name:
            raise SignalIdReused(
                f"the id {signal_id} belongs to a signal of another name",
                expected=sent.name,
                found=name,
                stream=work.stream,
            )
        # Bytes and not Python's values: true is not 1.
        if canonical_bytes(sent.value.to_json()) != canonical_bytes(value.to_json()):
            raise SignalIdReused(f"the id {signal_id} belongs to a signal with another value", stream=work.stream)

    async def cancel(
        self, run_id: str, by: str, *, by_type: Literal["person", "parent"] = "person", rationale: str | None = None
    ) -> str:
        """End the run now. Its worker is told at its next contact; a call in flight ends as a trace of its own."""

        async def decide(work: Work) -> str:
            state = work.run.head.state
            if state == "CANCELLED":
                return state
            if state in RUN.terminal_states:
                raise RunEnded("the run has ended", found=state, stream=work.stream)
            error = RunError(type="RUN_CANCELLED", message=rationale or f"cancelled by {by}", retryable=False)
            now = self._clock.now()
            work.end("CANCELLED", by=by_type, by_id=by, at=now, error=error)
            return work.run.head.state

        return await self._table.change(run_id, decide)

    async def resume(
        self,
        run_id: str,
        principal: Principal,
        *,
        rationale: str,
        accepts: Accepted | None = None,
        resolves: list[Resolved] | None = None,
    ) -> str:
        """Have a run that FAILED, was PARKED or has DIVERGED go on. Of a failed one what failed last is open again;
        what was recorded before stays recorded. Told again while the run goes on, it changes nothing."""
        for one in resolves or ():
            verify_given(one.value, f"what is said of {one.path}")

        async def decide(work: Work) -> str:
            run = work.run
            state = run.head.state
            if state in AT_WORK:
                last = await self._last(work, RunResumption)
                said = (principal.principal_id, rationale, accepts, resolves or [])
                if last is not None and said == (last.resumed_by, last.rationale, last.accepts, last.resolves):
                    return state
            if state not in ("FAILED", "PARKED", "DIVERGED"):
                raise RunEnded(
                    "only a run that rests can be resumed",
                    expected="FAILED, PARKED or DIVERGED",
                    found=state,
                    stream=work.stream,
                )
            resolved = {one.path for one in resolves or ()}
            reopens = [path for path in run.frontier.failed_last() if path not in resolved] if state == "FAILED" else []
            fields: dict[str, Any] = {
                "run_id": run_id,
                "resumed_by": principal.principal_id,
                "rationale": rationale,
                "accepts": accepts,
                "reopens": reopens,
                "frontier_digest": "0" * 64,
                "resolves": resolves or [],
                "resumed_at": self._clock.now(),
            }
            draft = RunResumption.made_of(fields)
            frontier = digest_of_frontier(frontier_after(run.frontier, draft))
            work.add(RunResumption.made_of({**fields, "frontier_digest": frontier}))
            return run.head.state

        return await self._table.change(run_id, decide)
