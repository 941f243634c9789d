"""Runs, as those see them who start, answer and follow them."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING

from tga_sdk.testing import messages as m
from tga_sdk.testing import views
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import body_of, limit_in, moment_in, number_in, one_of, parameters
from tga_sdk.testing.routes.routing import Asked, Reply, json_reply, page_of, route, written
from tga_sdk.testing.run import TERMINAL, MemoryRun

if TYPE_CHECKING:
    from tga_sdk.testing.gateway import MemoryGateway


@route("POST", "/v1/runs")
async def start_run(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.StartBody, asked.raw)
    engine = asked.gateway.engine
    with asked.gateway.lock:
        policy = None if body.policy is None else {**body.policy.to_json(), "on_parent_end": "cancel"}
        given = engine.value_of(body.input)
        program = engine.judged(body.procedure, body.version, given)
        run, was_there = engine.start(
            program,
            given,
            asked.principal,
            run_id=body.run_id or engine.new_id(),
            policy=policy,
            tags=body.tags,
            is_strict=body.strict_determinism,
        )
        return json_reply({**views.run_document(engine, run), "replayed": was_there})


@route("GET", "/v1/runs")
async def list_runs(asked: Asked) -> Reply:
    filters = ("status", "procedure", "prefix", "principal_id", "since", "until", "newest", "cursor", "limit")
    given = parameters(asked.query, *filters)
    since, until = moment_in(given, "since"), moment_in(given, "until")
    newest = number_in(given, "newest", 0, at_most=24)
    status, engine = one_of(given, "status", views.STATUSES), asked.gateway.engine
    if "prefix" in given and re.fullmatch(m.OWN_RUN_ID, given["prefix"]) is None:
        raise Problem("INPUT_MALFORMED", "prefix", expected="the beginning of a run's id")
    with asked.gateway.lock:
        engine.advance()
        items = [
            views.listed_run(engine, run, newest)
            for run in reversed(engine.runs.values())
            if status in (None, views.status_of(run))
            and given.get("procedure") in (None, run.start["procedure"])
            and given.get("principal_id") in (None, run.start["principal"]["principal_id"])
            and run.run_id.startswith(given.get("prefix", ""))
        ]
        items = [one for one in items if (since or "") <= one["started_at"] < (until or "~")]
        page, goes_on = page_of(items, given)
        return json_reply({"items": page, "next": goes_on, "scope": "tenant"})


@route("GET", "/v1/runs/{run_id}")
async def get_run(asked: Asked) -> Reply:
    given = parameters(asked.query, "steps")
    return _shown(asked, number_in(given, "steps", 1_000, at_most=1_000))


@route("DELETE", "/v1/runs/{run_id}")
async def erase_run(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        is_new = asked.gateway.engine.erase(asked.run_id)
        return json_reply({"run_id": asked.run_id, "erased": True, "is_new": is_new})


@route("GET", "/v1/runs/{run_id}/state")
async def get_run_state(asked: Asked) -> Reply:
    given = parameters(asked.query, "at")
    engine = asked.gateway.engine
    with asked.gateway.lock:
        engine.advance()
        run = asked.run()
        if "at" in given:
            at, last = number_in(given, "at", 0), run.sequence_number
            if not 1 <= at <= last:
                raise Problem("INPUT_MALFORMED", f"the run has no entry {at}", expected=f"1 to {last}", found=at)
            run = engine.at(asked.run_id, at)
        return json_reply(
            {"run_id": run.run_id, "at": run.sequence_number, "run_state": run.state, "state": run.document}
        )


@route("POST", "/v1/runs/{run_id}/signals")
async def signal_run(asked: Asked) -> Reply:
    body = body_of(m.SignalBody, asked.raw)
    is_answer = body.path is not None
    if is_answer == (body.name is not None):
        raise Problem("INPUT_MALFORMED", "an answer has a path, a signal has a name", expected="one of them")
    parameters(asked.query)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        if is_answer:
            asked.gateway.engine.answer(asked.run_id, body, asked.principal)
        else:
            asked.gateway.engine.signal(asked.run_id, body, asked.principal)
    return _shown(asked) if is_answer else _shown(asked, steps_max=0)


@route("POST", "/v1/runs/{run_id}/cancel")
async def cancel_run(asked: Asked) -> Reply:
    with asked.gateway.lock:
        asked.run()
        parameters(asked.query)
        body = body_of(m.CancelBody, asked.raw, is_optional=True)
        asked.gateway.engine.cancel(asked.run_id, ("person", asked.principal), body.rationale)
    return _shown(asked)


@route("POST", "/v1/runs/{run_id}/retry")
async def retry_run(asked: Asked) -> Reply:
    body = body_of(m.RetryBody, asked.raw, is_optional=True)
    parameters(asked.query)
    with asked.gateway.lock:
        asked.gateway.engine.resume(asked.run_id, body, asked.principal)
    return _shown(asked)


@route("POST", "/v1/runs/{run_id}/fork")
async def fork_run(asked: Asked) -> Reply:
    engine = asked.gateway.engine
    with asked.gateway.lock:
        asked.run()
        parameters(asked.query)
        body = body_of(m.ForkBody, asked.raw, is_optional=True)
        run, was_there = engine.fork(asked.run_id, body, asked.principal)
        return json_reply({**views.run_document(engine, run), "replayed": was_there})


@route("GET", "/v1/runs/{run_id}/events")
async def follow_run(asked: Asked) -> Reply:
    given = parameters(asked.query, "after_seq")
    last = asked.headers.get("Last-Event-ID")
    after = number_in({"after_seq": last} if last is not None else given, "after_seq", 0)
    with asked.gateway.lock:
        run = asked.run()
        if after > run.sequence_number:
            raise Problem("INPUT_MALFORMED", "there are not so many entries", expected=run.sequence_number, found=after)
        if after == run.sequence_number and run.state in TERMINAL:
            return Reply(204)
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    return Reply(200, headers=headers, events=_events(asked.gateway, run, after))


async def _events(gateway: MemoryGateway, run: MemoryRun, after: int) -> AsyncGenerator[bytes, None]:
    async for record in gateway.changes(run.run_id, after):
        if record is None:
            end = {"state": run.state, "sequence_number": run.sequence_number}
            yield b"event: end\ndata: " + written(end) + b"\n\n"
            return
        head = f"id: {record.sequence_number}\nevent: entry\ndata: ".encode()
        yield head + written(views.entry_item(run, record)) + b"\n\n"


@route("GET", "/v1/runs/{run_id}/entries")
async def list_run_entries(asked: Asked) -> Reply:
    given = parameters(asked.query, "after_seq", "limit")
    with asked.gateway.lock:
        run, after = asked.run(), number_in(given, "after_seq", 0)
        page = run.records[after : after + limit_in(given)]
        last = page[-1].sequence_number if page else run.sequence_number
        items = [views.entry_item(run, record) for record in page]
        return json_reply({"items": items, "next": str(last) if last < run.sequence_number else None})


def _shown(asked: Asked, steps_max: int = 1_000) -> Reply:
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        shown = views.run_document(asked.gateway.engine, asked.run())
        steps = shown["steps"]
        return json_reply(
            {**shown, "steps": steps[max(0, len(steps) - steps_max) :], "steps_left_out": len(steps) > steps_max}
        )
