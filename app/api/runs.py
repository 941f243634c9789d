"""Runs: start them, look at them, answer what they ask, end them, have them tried again."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from app.api.openapi import request_body
from app.api.run_documents import OwnRunId, RunDescribed, RunErasedDocument, RunStarted, RunStateDocument
from app.api.signatures import SignatureText, own_signature
from app.api.traces import json_answer
from app.core import errors
from app.core.errors import InputMalformed
from app.core.limits import RUN_PAGE_RECORDS_MAX, RUN_TAGS_MAX
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Part, Sha256, Text, Time
from app.domain.runs.documents import Accepted, ForkedFrom, Resolved, RunPolicy
from app.domain.runs.engine.answering import OwnSignature
from app.domain.runs.engine.starting import StartRequest
from app.domain.runs.engine.viewing import RunView, view, view_of_born
from app.domain.runs.procedures import PolicySaid
from app.domain.runs.state import StateChanges
from app.domain.runs.trace_context import traceparent_of
from app.domain.runs.values import Path
from app.edge.body import read_body
from app.edge.calls import traceparent_in
from app.edge.parameters import documented_parameters, number_in, parameters, steps_in
from app.edge.permissions import Action, require, require_on
from app.edge.problems import documented
from app.edge.runs import own_run_id, qualified, run_seen_by
from app.edge.services import Services

OF_RUNS: Final = (
    errors.RunNotFound,
    errors.RunErased,
    errors.RunEnded,
    errors.RunIdTaken,
    errors.RunAnswerUnasked,
    errors.RunAnswerInvalid,
    errors.SignatureInvalid,
    errors.RunValueTooLarge,
    errors.RunPositionTaken,
    errors.SchemaViolation,
    errors.InputTooLarge,
    errors.ConcurrentExecution,
    errors.InvalidTransition,
    errors.ChecksumMismatch,
    errors.SequenceGap,
    errors.RecoveryFailed,
    errors.SecretMissing,
    errors.LockAcquireFailed,
    errors.StoreBusy,
    errors.OutcomeUnknown,
)


class StartBody(Part):
    """`run_id`: chosen by the caller, so that a repeat is the same run; without it one is made. `program_digest`: this
    very program, not the newest of the procedure or version. `strict_determinism`: what a replay would not repeat (the
    time, random numbers, ... outside of an operation) stops this run, also where its worker only warns of it."""

    procedure: Name
    version: Name | None = None
    program_digest: Sha256 | None = None
    input: Annotated[Any, Field(description="Any JSON value.")] = None
    run_id: OwnRunId | None = None
    policy: PolicySaid | None = None
    tags: Annotated[list[Name], Field(max_length=RUN_TAGS_MAX)] = Field(default_factory=list)
    strict_determinism: bool = False


class SignalBody(Part):
    """Either `path` and `answer`, for a question that is open there, or `name` and `value`, for a signal.

    An answer may bring `signature`, `key_id` and `answered_at`, together or not at all: without them the gateway signs.
    """

    path: Path | None = None
    answer: Annotated[Any, Field(description="Any JSON value that fits the question.")] = None
    intent_digest: Sha256 | None = None
    name: Name | None = None
    value: Annotated[Any, Field(description="Any JSON value.")] = None
    signal_id: Name | None = None
    signature: SignatureText | None = None
    key_id: Name | None = None
    answered_at: Time | None = None

    @property
    def own_signature(self) -> OwnSignature | None:
        """The person's own; InputMalformed where it is incomplete, or of a signal."""
        given = own_signature(self.signature, self.key_id, self.answered_at, "answered_at")
        if given is not None and self.path is None:
            raise InputMalformed(
                "a signal is not signed",
                expected="an answer: `path` and `answer`",
                found="a name",
                remedy="Leave the signature out.",
            )
        return None if given is None else OwnSignature(*given)


class CancelBody(Part):
    rationale: Text | None = None


class RetryBody(Part):
    rationale: Text | None = None
    accepts: Accepted | None = None
    resolves: Annotated[list[Resolved], Field(max_length=64)] = Field(default_factory=list)


class ForkBody(Part):
    """`at`: after which entry; without it after the last."""

    at: Annotated[int, Field(ge=1)] | None = None
    run_id: OwnRunId | None = None
    version: Name | None = None
    state_change: StateChanges = Field(default_factory=list)


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["runs"])
    engine = services.runs

    @routes.post(
        "/v1/runs",
        operation_id="start_run",
        summary="Start a run of a procedure; the same id with the same input is the same run",
        response_model=None,
        responses={
            200: {"model": RunStarted},
            **documented(*OF_RUNS, errors.ProcedureNotFound, errors.StartDenied, errors.ArgumentsInvalid),
        },
        openapi_extra=request_body(StartBody, {"procedure": "onboard", "input": {"email": "a@example.org"}}),
    )
    async def start(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "start_run")
            parameters(request)
            body = await read_body(request.scope, request.receive, StartBody)
            policy = None
            if body.policy is not None:
                policy = RunPolicy.made_of({**body.policy.whole().model_dump(), "on_parent_end": "cancel"})
            own_id = body.run_id or services.clock.new_id()
            started = await engine.starting.start(
                StartRequest(
                    principal=principal,
                    procedure=body.procedure,
                    version=body.version,
                    program_digest=body.program_digest,
                    input=await engine.starting.value_of(principal.tenant, body.input),
                    run_id=qualified(principal, own_id),
                    policy=policy,
                    tags=body.tags,
                    is_strict=body.strict_determinism,
                )
            )
            callers, observer = traceparent_in(request.scope["headers"]), engine.observer
            if callers is not None and observer is not None and not started.replayed:
                observer.started(started.run_id, body.procedure, callers)
            if started.born is None:
                document = await _shown(services, principal.tenant, started.run_id)
            else:
                run, procedure = started.born.run, started.born.start.procedure
                program = f"{run.version}@{run.program_digest}"
                has_worker = engine.leasing.has_seen_worker(principal.tenant, procedure, program)
                seen = await view_of_born(engine.ports, started.born, has_worker=has_worker)
                document = shown(seen, principal.tenant)
            answer = json_answer({**document, "replayed": started.replayed})
            answer.raw_headers.append((b"traceresponse", traceparent_of(started.run_id).encode("ascii")))
            return answer

    @routes.get(
        "/v1/runs/{run_id}",
        operation_id="get_run",
        summary="Where a run stands, what it waits for, and its steps",
        response_model=None,
        responses={200: {"model": RunDescribed}, **documented(*OF_RUNS)},
        openapi_extra=documented_parameters("run_id", "steps"),
    )
    async def one_run(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            steps_max = steps_in(parameters(request, "steps"))
            return json_answer(await _shown(services, principal.tenant, run_id, steps_max=steps_max))

    @routes.get(
        "/v1/runs/{run_id}/state",
        operation_id="get_run_state",
        summary="The state that the program keeps, now or after an entry of the journal",
        response_model=None,
        responses={200: {"model": RunStateDocument}, **documented(*OF_RUNS)},
        openapi_extra=documented_parameters("run_id", "at"),
    )
    async def state(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            given = parameters(request, "at")
            if "at" in given:
                at = number_in(given, "at")
                last = (await engine.ports.runs.load(run_id)).run.head.sequence_number
                if not 1 <= at <= last:
                    raise InputMalformed(
                        f"the run has no entry {at}",
                        expected=f"1 to {last}",
                        found=at,
                        remedy="Name an entry that it has; without `at` it is the last one.",
                    )
                run = await engine.ports.runs.load_at(run_id, at)
            else:
                run = (await engine.ports.runs.load(run_id)).run
            return json_answer(
                {
                    "run_id": own_run_id(principal.tenant, run_id),
                    "at": run.head.sequence_number,
                    "run_state": run.head.state,
                    "state": run.state,
                }
            )

    @routes.post(
        "/v1/runs/{run_id}/signals",
        operation_id="signal_run",
        summary="Answer a question of the run, or send it a signal",
        response_model=None,
        responses={200: {"model": RunDescribed}, **documented(*OF_RUNS, errors.SignalIdReused)},
        openapi_extra=request_body(SignalBody, {"path": "3", "answer": True}, in_path=("run_id",)),
    )
    async def signal(request: Request) -> Response:
        async with services.admitted(request) as principal:
            body = await read_body(request.scope, request.receive, SignalBody)
            is_answer = body.path is not None
            if is_answer == (body.name is not None):
                raise InputMalformed(
                    "an answer has a path, a signal has a name",
                    expected="one of them",
                    found="both" if is_answer else "neither",
                    remedy="Send `path` and `answer`, or `name` and `value`.",
                )
            action: Action = "answer_run" if is_answer else "signal_run"
            run_id = await run_seen_by(services, principal, request.path_params["run_id"], action)
            await _require_on(services, principal, action, run_id)
            parameters(request)
            signed, given = body.own_signature, body.answer if is_answer else body.value
            value = await engine.starting.value_of(principal.tenant, given)
            if body.path is not None:
                await engine.answering.answer(
                    run_id,
                    body.path,
                    given,
                    value,
                    principal,
                    intent_digest=body.intent_digest,
                    signed=signed,
                )
            elif body.name is not None:
                signal_id = body.signal_id or services.clock.new_id()
                await engine.answering.signal(run_id, body.name, signal_id, value, principal)
            # Who sends many signals is not to have the journal read for each of them.
            steps_max = RUN_PAGE_RECORDS_MAX if is_answer else 0
            return json_answer(await _shown(services, principal.tenant, run_id, steps_max=steps_max))

    @routes.post(
        "/v1/runs/{run_id}/cancel",
        operation_id="cancel_run",
        summary="End a run now; its worker is told at its next contact",
        response_model=None,
        responses={200: {"model": RunDescribed}, **documented(*OF_RUNS)},
        openapi_extra=request_body(CancelBody, {"rationale": "the order was withdrawn"}, in_path=("run_id",)),
    )
    async def cancel(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"], "cancel_run")
            await _require_on(services, principal, "cancel_run", run_id)
            parameters(request)
            body = await read_body(request.scope, request.receive, CancelBody, is_optional=True)
            await engine.answering.cancel(run_id, principal.principal_id, rationale=body.rationale)
            return json_answer(await _shown(services, principal.tenant, run_id))

    @routes.post(
        "/v1/runs/{run_id}/retry",
        operation_id="retry_run",
        summary="Have a run that failed, was parked or has diverged go on",
        response_model=None,
        responses={200: {"model": RunDescribed}, **documented(*OF_RUNS)},
        openapi_extra=request_body(RetryBody, {"rationale": "the server is up again"}, in_path=("run_id",)),
    )
    async def retry(request: Request) -> Response:
        async with services.admitted(request) as principal:
            body = await read_body(request.scope, request.receive, RetryBody, is_optional=True)
            run_id = await run_seen_by(services, principal, request.path_params["run_id"], "retry_run")
            needs_operator = (await engine.ports.runs.load(run_id)).run.head.state in ("PARKED", "DIVERGED")
            action: Action = "resume_run" if needs_operator or body.accepts or body.resolves else "retry_run"
            await _require_on(services, principal, action, run_id)
            parameters(request)
            await engine.answering.resume(
                run_id,
                principal,
                rationale=body.rationale or "retry",
                accepts=body.accepts,
                resolves=body.resolves,
            )
            return json_answer(await _shown(services, principal.tenant, run_id))

    @routes.post(
        "/v1/runs/{run_id}/fork",
        operation_id="fork_run",
        summary="Start a run that goes on from an entry of this one's journal",
        response_model=None,
        responses={200: {"model": RunStarted}, **documented(*OF_RUNS, errors.ProcedureNotFound, errors.StartDenied)},
        openapi_extra=request_body(ForkBody, {"at": 12}, in_path=("run_id",)),
    )
    async def fork(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"], "fork_run")
            await _require_on(services, principal, "fork_run", run_id)
            parameters(request)
            body = await read_body(request.scope, request.receive, ForkBody, is_optional=True)
            started = await engine.starting.fork(
                run_id,
                at=body.at,
                principal=principal,
                run_id=qualified(principal, body.run_id or services.clock.new_id()),
                state_change=body.state_change,
                version=body.version,
            )
            document = await _shown(services, principal.tenant, started.run_id)
            return json_answer({**document, "replayed": started.replayed})

    @routes.delete(
        "/v1/runs/{run_id}",
        operation_id="erase_run",
        summary="Erase the payloads of a run that has ended, for ever; its entries and digests stand",
        response_model=None,
        responses={
            200: {"model": RunErasedDocument},
            **documented(*OF_RUNS, errors.RunUnfinished, errors.StreamInUse),
        },
        openapi_extra=documented_parameters("run_id"),
    )
    async def erase(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"], "erase_run")
            parameters(request)
            is_new = True
            try:
                await services.erasure.erase(
                    run_id, tenant=principal.tenant, erased_by=principal.principal_id, rationale="DELETE over HTTP"
                )
            except errors.RunErased:
                is_new = False
            engine.table.forget(run_id)
            return json_answer({"run_id": own_run_id(principal.tenant, run_id), "erased": True, "is_new": is_new})

    return routes


async def _require_on(services: Services, principal: Principal, action: Action, run_id: str) -> None:
    start = (await services.runs.table.peek(run_id)).start
    require_on(principal, action, owner_id=start.principal.principal_id)


async def _shown(
    services: Services, tenant: str, run_id: str, *, steps_max: int = RUN_PAGE_RECORDS_MAX
) -> dict[str, Any]:
    return shown(await view(services.runs.ports, run_id, steps_max=steps_max), tenant)


def shown(seen: RunView, tenant: str) -> dict[str, Any]:
    """A run as GET /v1/runs/{run_id} answers it."""
    run, start, end = seen.loaded.run, seen.loaded.start, seen.end
    return {
        "run_id": own_run_id(tenant, run.run_id),
        "procedure": start.procedure,
        "version": run.version,
        "program_digest": run.program_digest,
        "state": run.head.state,
        "status": seen.status,
        "waiting": seen.waiting,
        "notice": seen.notice,
        "attempt": run.attempt,
        "failures": run.failures,
        "worker": None if run.worker is None else {"principal_id": run.worker[0], "name": run.worker[1]},
        "principal_id": start.principal.principal_id,
        "input": start.input.to_json(),
        "output": None if end is None or end.output is None else end.output.to_json(),
        "error": None if end is None or end.error is None else end.error.to_json(),
        "divergence": None if end is None or end.divergence is None else end.divergence.to_json(),
        "awaits": seen.awaits,
        "steps": [asdict(step) for step in seen.steps],
        "steps_left_out": seen.steps_left_out,
        "sequence_number": run.head.sequence_number,
        "entry_digest": run.head.entry_digest,
        "started_at": start.started_at,
        "updated_at": run.updated_at,
        "trigger": start.trigger.to_json(),
        "parent": None if start.parent is None else own_run_id(tenant, start.parent.run_id),
        "forked_from": _fork(start.forked_from, tenant),
        "policy": start.policy.to_json(),
        "tags": start.tags,
        "strict_determinism": start.is_strict,
    }


def _fork(origin: ForkedFrom | None, tenant: str) -> dict[str, Any] | None:
    return None if origin is None else {**origin.to_json(), "run_id": own_run_id(tenant, origin.run_id)}
