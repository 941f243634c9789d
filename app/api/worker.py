"""The worker protocol: lease runs, say that one lives, read journals, put what was done (docs/worker-protocol.md)."""

from __future__ import annotations

import re
from dataclasses import asdict, fields
from typing import Any, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.api.openapi import request_body
from app.api.run_documents import (
    BeatAnswered,
    BeatsAnswered,
    JournalPage,
    LeaseAnswered,
    OperationRecords,
    PutAnswered,
)
from app.api.traces import json_answer
from app.config import qualify
from app.core import errors
from app.core.canonical import parse_object
from app.core.errors import InputMalformed, InputTooLarge, RunNotFound, SchemaViolation
from app.core.limits import RUN_PAGE_RECORDS_MAX, RUN_PUT_BYTES_MAX, SAFE_INTEGER_MAX
from app.domain.identity import Principal
from app.domain.runs.engine.journal import first_seq, load_journal
from app.domain.runs.engine.messages import BeatRequest, LeasedRun, LeaseRequest, PutRequest, ThenChild, ThenTool
from app.domain.runs.engine.ports import RunObserver
from app.domain.runs.paths import place_of
from app.domain.runs.trace_context import traceparent_of
from app.edge.body import checked, read_body, read_bytes
from app.edge.calls import traceparent_in
from app.edge.parameters import documented_parameters, limit_in, parameters
from app.edge.permissions import require
from app.edge.problems import documented
from app.edge.runs import own_run_id, qualified, run_of_worker, run_read_by, shown_journal, shown_records
from app.edge.services import Services
from app.edge.streaming import GoneWith

_OF_RUNS: Final = (
    errors.RunNotFound,
    errors.RunErased,
    errors.RunPositionTaken,
    errors.RunPositionGap,
    errors.RunCountMismatch,
    errors.RunAnswerUnasked,
    errors.RunBlobMissing,
    errors.RunValueTooLarge,
    errors.RunTierInvalid,
    errors.RunCallbackRefused,
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


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["worker"])

    @routes.post(
        "/v1/worker/lease",
        operation_id="lease_runs",
        summary="Get runs to work on; waits for one up to wait_ms",
        response_model=None,
        responses={200: {"model": LeaseAnswered}, **documented(*_OF_RUNS, errors.ProcedureNotFound)},
        openapi_extra=request_body(LeaseRequest, _LEASE),
    )
    async def lease(request: Request) -> Response:
        async with services.polling(request) as principal:
            require(principal, "work")
            parameters(request)
            body = await read_body(request.scope, request.receive, LeaseRequest)
            with GoneWith(request) as gone:
                leased = await services.runs.leasing.lease(body, principal, gone=gone)
            return json_answer({"runs": [_leased(run, services.runs.observer) for run in leased]})

    @routes.post(
        "/v1/worker/heartbeat",
        operation_id="beat",
        summary="Say that the worker lives and which runs it holds",
        response_model=None,
        responses={200: {"model": BeatsAnswered}, **documented(*_OF_RUNS)},
        openapi_extra=request_body(BeatRequest, _BEAT),
    )
    async def beat(request: Request) -> Response:
        principal = await services.passing(request)
        require(principal, "work")
        parameters(request)
        body = await read_body(request.scope, request.receive, BeatRequest)
        runs = [one.model_copy(update={"run_id": qualified(principal, one.run_id)}) for one in body.runs]
        answers = await services.runs.leasing.beat(body.model_copy(update={"runs": runs}), principal)
        told = [
            {
                "run_id": own_run_id(principal.tenant, answer.run_id),
                "directive": answer.directive,
                "reason": answer.reason,
                "sequence_number": answer.sequence_number,
                "news": await shown_records(services, principal, answer.news),
            }
            for answer in answers
        ]
        return json_answer({"runs": told})

    @routes.post(
        "/v1/runs/{run_id}/heartbeat",
        operation_id="beat_for_a_run",
        summary="As /v1/worker/heartbeat, for a worker that has one run",
        response_model=None,
        responses={200: {"model": BeatAnswered}, **documented(*_OF_RUNS)},
        openapi_extra=request_body(BeatRequest, _BEAT, in_path=("run_id",)),
    )
    async def beat_for_a_run(request: Request) -> Response:
        principal = await services.passing(request)
        own_id = request.path_params["run_id"]
        run_id = run_of_worker(principal, own_id)
        parameters(request)
        body = await read_body(request.scope, request.receive, BeatRequest)
        if [one.run_id for one in body.runs] != [own_id]:
            raise InputMalformed(
                "the heartbeat of one run names this one", expected=own_id, remedy="Name the run that is in the path."
            )
        runs = [one.model_copy(update={"run_id": run_id}) for one in body.runs]
        (answer,) = await services.runs.leasing.beat(body.model_copy(update={"runs": runs}), principal)
        if not answer.sequence_number:
            raise RunNotFound("no such run")
        news = await shown_records(services, principal, answer.news)
        return json_answer({**asdict(answer), "run_id": own_id, "news": news})

    @routes.post(
        "/v1/runs/{run_id}/checkpoints",
        operation_id="put_checkpoints",
        summary="Record what the worker has done, and what it does then; STOP is a 200",
        response_model=None,
        responses={200: {"model": PutAnswered}, **documented(*_OF_RUNS, errors.ToolNotFound, errors.GatewayBusy)},
        openapi_extra=request_body(PutRequest, _PUT, in_path=("run_id",)),
    )
    async def put(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = run_of_worker(principal, request.path_params["run_id"])
            parameters(request)
            body = await _read_puts(request)
            answer = await services.runs.put(
                run_id, _qualified(body, principal), principal, traceparent=traceparent_in(request.scope["headers"])
            )
            result = answer.result
            if result is not None and "run_id" in result:
                result = {**result, "run_id": own_run_id(principal.tenant, result["run_id"])}
            return json_answer(
                {
                    "directive": answer.directive,
                    "reason": answer.reason,
                    "sequence_number": answer.sequence_number,
                    "news": await shown_records(services, principal, answer.news, answer.effects),
                    "result": result,
                }
            )

    @routes.get(
        "/v1/runs/{run_id}/checkpoints",
        operation_id="list_checkpoints",
        summary="A page of the run's journal, in its order; of a fork its source's comes first",
        response_model=None,
        responses={200: {"model": JournalPage}, **documented(*_OF_RUNS)},
        openapi_extra=documented_parameters("run_id", "after_number", "records_limit"),
    )
    async def journal(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_read_by(services, principal, request.path_params["run_id"])
            given = parameters(request, "after_seq", "limit")
            start = (await services.runs.table.peek(run_id)).start
            first = await first_seq(services.runs.ports, start)
            after = _position(given.get("after_seq"), first)
            limit = limit_in(given, at_most=RUN_PAGE_RECORDS_MAX) if "limit" in given else RUN_PAGE_RECORDS_MAX
            page = await load_journal(services.runs.ports, run_id, start, after=after, limit=limit)
            items = await shown_journal(services, principal, page)
            return json_answer({"items": items, "next": items[-1]["sequence_number"] if items else None})

    @routes.get(
        "/v1/runs/{run_id}/checkpoints/{path}",
        operation_id="load_checkpoint",
        summary="What the journal has of one operation: its intents, checkpoints and answers, in their order",
        response_model=None,
        responses={200: {"model": OperationRecords}, **documented(*_OF_RUNS)},
        openapi_extra=documented_parameters("run_id", "path"),
    )
    async def one_operation(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_read_by(services, principal, request.path_params["run_id"])
            parameters(request)
            path = request.path_params["path"]
            place_of(path)
            ports = services.runs.ports
            start = (await services.runs.table.peek(run_id)).start
            after, found = await first_seq(ports, start), []
            while page := await load_journal(ports, run_id, start, after=after, limit=RUN_PAGE_RECORDS_MAX):
                after = page[-1].sequence_number
                found += [one for one in page if getattr(one.record.artifact, "path", None) == path]
            return json_answer({"items": await shown_journal(services, principal, found)})

    return routes


async def _read_puts(request: Request) -> PutRequest:
    raw = await read_bytes(request.scope, request.receive)
    if len(raw) > RUN_PUT_BYTES_MAX:
        raise InputTooLarge("the puts are too large", expected=f"at most {RUN_PUT_BYTES_MAX} bytes", found=len(raw))
    return checked(PutRequest, parse_object(raw))


def _qualified(body: PutRequest, principal: Principal) -> PutRequest:
    """Servers and runs as the log names them."""
    then = body.then
    if isinstance(then, ThenTool):
        then = then.model_copy(update={"server_id": qualify(principal.tenant, then.server_id)})
    elif isinstance(then, ThenChild) and then.run_id is not None:
        if "/" in then.run_id:
            raise SchemaViolation("the body at /then/run_id", expected="an id without /", found=then.run_id[:64])
        then = then.model_copy(update={"run_id": qualified(principal, then.run_id)})
    return body if then is body.then else body.model_copy(update={"then": then})


def _position(given: str | None, first: int) -> int:
    """After which number of the journal; a fork's begins below 0."""
    if given is None:
        return first
    if re.fullmatch(r"0|-?[1-9][0-9]{0,15}", given) is None or abs(int(given)) > SAFE_INTEGER_MAX:
        expected = f"a whole number, -{SAFE_INTEGER_MAX} to {SAFE_INTEGER_MAX}"
        raise InputMalformed(
            "after_seq", expected=expected, found=given[:32], remedy="Correct the parameter that is named."
        )
    return max(first, int(given))


# `asdict` would copy input and policy, part by part.
_TOLD_OF_RUN: Final = tuple(field.name for field in fields(LeasedRun))


def _leased(run: LeasedRun, observer: RunObserver | None) -> dict[str, Any]:
    is_sampled = observer is None or observer.is_sampled_run(run.run_id, run.procedure)
    told = {name: getattr(run, name) for name in _TOLD_OF_RUN}
    return {
        **told,
        "run_id": own_run_id(run.tenant, run.run_id),
        "input": run.input.to_json(),
        "policy": run.policy.to_json(),
        "traceparent": traceparent_of(run.run_id, attempt=run.attempt, is_sampled=is_sampled),
    }


_LEASE: Final = {
    "worker": "019b76da-worker-1",
    "name": "host-1:4711",
    "procedures": [{"name": "onboard", "version": "1.2.0", "program_digest": "ab" * 32, "accepts": ["1.1.0"]}],
    "slots": 8,
    "wait_ms": 30_000,
}
_BEAT: Final = {
    "worker": "019b76da-worker-1",
    "name": "host-1:4711",
    "runs": [{"run_id": "order-7", "lease": "Zm9yIGV4YW1wbGUgb25seSwgbm90IGE", "after_seq": 12}],
}
_PUT: Final = {
    "lease": "Zm9yIGV4YW1wbGUgb25seSwgbm90IGE",
    "attempt": 1,
    "after_seq": 2,
    "puts": [
        {
            "type": "checkpoint",
            "path": "1",
            "kind": "step",
            "name": "plan",
            "input_digest": "ab" * 32,
            "outcome": "OK",
            "value": {"tier": "inline", "value": {"steps": 3}},
            "started_at": "2026-01-01T00:00:00.000Z",
            "duration_ms": 12,
        }
    ],
    "then": {"type": "complete", "output": {"tier": "inline", "value": "done"}, "positions": 1},
}
