"""The routes of the in-memory gateway: which request is answered how."""

from __future__ import annotations

import hashlib
import json
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import httpx2

from tga_sdk.canonical import NotCanonical, canonical
from tga_sdk.testing import messages as m
from tga_sdk.testing import views
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import body_of, limit_in, moment_in, number_in, one_of, parameters, position_in
from tga_sdk.testing.run import TERMINAL, MemoryRun, place_of
from tga_sdk.testing.tools import Call

if TYPE_CHECKING:
    from tga_sdk.testing.gateway import MemoryGateway


@dataclass
class Reply:
    status: int
    content: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    events: AsyncGenerator[bytes, None] | None = None


@dataclass
class Asked:
    """One request. `named`: what its path names."""

    gateway: MemoryGateway
    principal: str
    query: bytes
    headers: httpx2.Headers
    raw: bytes
    named: dict[str, str]

    def run(self) -> MemoryRun:
        return self.gateway.engine.load(self.run_id)

    @property
    def run_id(self) -> str:
        return verify_own_id(self.named["run_id"])


def verify_own_id(run_id: str) -> str:
    if re.fullmatch(m.OWN_RUN_ID, run_id) is None:
        raise Problem("RUN_NOT_FOUND", "no such run", expected="letters, digits and . _ : -, at most 96")
    return run_id


Handler = Callable[[Asked], Awaitable[Reply]]
_ROUTES: Final[list[tuple[str, re.Pattern[str], Handler]]] = []


def route(method: str, path: str) -> Callable[[Handler], Handler]:
    pattern = re.compile(re.sub(r"\{(\w+)\}", r"(?P<\1>[^/]+)", path))

    def add(handler: Handler) -> Handler:
        _ROUTES.append((method, pattern, handler))
        return handler

    return add


async def answer(gateway: MemoryGateway, request: httpx2.Request, raw: bytes) -> Reply:
    """The answer to a request; a refusal is one, too."""
    try:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise Problem("UNAUTHENTICATED", "no key was sent", expected="Authorization: Bearer KEY")
        path, is_known = request.url.path, False
        for method, pattern, handler in _ROUTES:
            match = pattern.fullmatch(path)
            if match is None:
                continue
            is_known = True
            if method == request.method:
                named = match.groupdict()
                return await handler(Asked(gateway, key, request.url.query, request.headers, raw, named))
        if is_known:
            raise Problem("METHOD_NOT_ALLOWED", f"{path} has no {request.method}")
        raise Problem("ROUTE_NOT_FOUND", f"the in-memory gateway has no route {path}")
    except Problem as problem:
        headers = {"Content-Type": "application/problem+json"}
        if problem.retry_after_s is not None:
            headers["Retry-After"] = str(problem.retry_after_s)
        return Reply(problem.status, _written(problem.document()), headers)


def _written(document: Any) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _json(document: Any, status: int = 200, **headers: str) -> Reply:
    return Reply(status, _written(document), {"Content-Type": "application/json", **headers})


# Procedures.


@route("POST", "/v1/procedures")
async def register(asked: Asked) -> Reply:
    parameters(asked.query)
    said = body_of(m.ProcedureSaid, asked.raw)
    with asked.gateway.lock:
        program, is_new = asked.gateway.engine.register(said, asked.principal)
        return _json({**views.program_document(program), "is_new": is_new})


@route("GET", "/v1/procedures")
async def list_procedures(asked: Asked) -> Reply:
    given = parameters(asked.query, "procedure", "cursor", "limit")
    with asked.gateway.lock:
        items = []
        for name in sorted(asked.gateway.engine.programs):
            if given.get("procedure") in (None, name):
                programs = list(reversed(asked.gateway.engine.programs[name].values()))
                items += [{**views.program_document(one), "is_newest": at == 0} for at, one in enumerate(programs)]
        page, goes_on = _page(items, given)
        return _json({"items": page, "next": goes_on})


@route("GET", "/v1/procedures/{name}")
async def load_procedure(asked: Asked) -> Reply:
    given = parameters(asked.query, "version", "program_digest")
    with asked.gateway.lock:
        found = asked.gateway.engine.find_program(
            asked.named["name"], given.get("version"), given.get("program_digest")
        )
        return _json(views.procedure_document(found))


# Runs.


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
        return _json({**views.run_document(engine, run), "replayed": was_there})


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
        page, goes_on = _page(items, given)
        return _json({"items": page, "next": goes_on, "scope": "tenant"})


@route("GET", "/v1/runs/{run_id}")
async def get_run(asked: Asked) -> Reply:
    given = parameters(asked.query, "steps")
    return _shown(asked, number_in(given, "steps", 1_000, at_most=1_000))


@route("DELETE", "/v1/runs/{run_id}")
async def erase_run(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        is_new = asked.gateway.engine.erase(asked.run_id)
        return _json({"run_id": asked.run_id, "erased": True, "is_new": is_new})


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
        return _json({"run_id": run.run_id, "at": run.sequence_number, "run_state": run.state, "state": run.document})


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
        return _json({**views.run_document(engine, run), "replayed": was_there})


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
            yield b"event: end\ndata: " + _written(end) + b"\n\n"
            return
        head = f"id: {record.sequence_number}\nevent: entry\ndata: ".encode()
        yield head + _written(views.entry_item(run, record)) + b"\n\n"


@route("GET", "/v1/runs/{run_id}/entries")
async def list_run_entries(asked: Asked) -> Reply:
    given = parameters(asked.query, "after_seq", "limit")
    with asked.gateway.lock:
        run, after = asked.run(), number_in(given, "after_seq", 0)
        page = run.records[after : after + limit_in(given)]
        last = page[-1].sequence_number if page else run.sequence_number
        items = [views.entry_item(run, record) for record in page]
        return _json({"items": items, "next": str(last) if last < run.sequence_number else None})


# Workers.


@route("POST", "/v1/worker/lease")
async def lease_runs(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.LeaseRequest, asked.raw)
    return _json({"runs": await asked.gateway.lease(body, asked.principal)})


@route("POST", "/v1/worker/heartbeat")
async def beat(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.BeatRequest, asked.raw)
    for one in body.runs:
        verify_own_id(one.run_id)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        return _json({"runs": asked.gateway.engine.beat(body)})


@route("POST", "/v1/runs/{run_id}/heartbeat")
async def beat_for_a_run(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.BeatRequest, asked.raw)
    if [one.run_id for one in body.runs] != [asked.run_id]:
        raise Problem("INPUT_MALFORMED", "the heartbeat of one run names this one", expected=asked.run_id)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        (answered,) = asked.gateway.engine.beat(body)
    if not answered["sequence_number"]:
        raise Problem("RUN_NOT_FOUND", "no such run")
    return _json(answered)


@route("POST", "/v1/runs/{run_id}/checkpoints")
async def put_checkpoints(asked: Asked) -> Reply:
    parameters(asked.query)
    run_id = asked.run_id
    body = body_of(m.PutRequest, asked.raw, bytes_max=m.PUT_BYTES_MAX)
    return _json(await asked.gateway.put(run_id, body, asked.principal))


@route("GET", "/v1/runs/{run_id}/checkpoints")
async def list_checkpoints(asked: Asked) -> Reply:
    engine = asked.gateway.engine
    with asked.gateway.lock:
        engine.advance()
        run = asked.run()
        given = parameters(asked.query, "after_seq", "limit")
        after = position_in(given, engine.first_seq(run))
        limit = limit_in(given, at_most=m.PAGE_RECORDS_MAX) if "limit" in given else m.PAGE_RECORDS_MAX
        page: list[dict[str, Any]] = []
        size = 0
        for number, record in engine.journal_of(run):
            if number > after and len(page) < limit and (not page or size < m.PAGE_BYTES_MAX):
                page.append(engine.shown(record, number))
                size += len(_written(record.said))
        return _json({"items": page, "next": page[-1]["sequence_number"] if page else None})


@route("GET", "/v1/runs/{run_id}/checkpoints/{path}")
async def load_checkpoint(asked: Asked) -> Reply:
    engine, path = asked.gateway.engine, asked.named["path"]
    with asked.gateway.lock:
        run = asked.run()
        parameters(asked.query)
        if re.fullmatch(r"[1-9][0-9]{0,6}((:[1-9][0-9]{0,6})?\.[1-9][0-9]{0,6})*", path) is None:
            raise Problem("SCHEMA_VIOLATION", "not an address of a run", expected="positions as in 3, 3.1 or 3:2.1")
        place_of(path)
        found = [(at, record) for at, record in engine.journal_of(run) if record.said.get("path") == path]
        return _json({"items": [engine.shown(record, number) for number, record in found]})


# Blobs.


@route("PUT", "/v1/blobs/{sha256}")
async def put_blob(asked: Asked) -> Reply:
    sha256, found = _sha256(asked), hashlib.sha256(asked.raw).hexdigest()
    if found != sha256:
        raise Problem("BLOB_MISMATCH", "the bytes are not those of this digest", expected=sha256, found=found)
    with asked.gateway.lock:
        is_new = sha256 not in asked.gateway.engine.blobs
        asked.gateway.engine.blobs[sha256] = asked.raw
    return _json({"sha256": sha256, "size_bytes": len(asked.raw)}, 201 if is_new else 200)


@route("GET", "/v1/blobs/{sha256}")
async def get_blob(asked: Asked) -> Reply:
    sha256 = _sha256(asked)
    stored = asked.gateway.engine.blobs.get(sha256)
    if stored is None:
        raise Problem("BLOB_NOT_FOUND", "no such blob")
    return Reply(200, stored, {"Content-Type": "application/octet-stream", "ETag": f'"{sha256}"'})


@route("HEAD", "/v1/blobs/{sha256}")
async def head_blob(asked: Asked) -> Reply:
    found = await get_blob(asked)
    return Reply(200, b"", {**found.headers, "Content-Length": str(len(found.content))})


def _sha256(asked: Asked) -> str:
    parameters(asked.query)
    given = asked.named["sha256"]
    if re.fullmatch(r"[0-9a-f]{64}", given) is None:
        raise Problem("INPUT_MALFORMED", "not a SHA-256", expected="64 lowercase hex digits", found=ascii(given))
    return given


# Calls, and what waits for people.


@route("POST", "/v1/tool-calls")
async def call_tool(asked: Asked) -> Reply:
    body = body_of(m.ToolCallBody, asked.raw)
    gateway, key = asked.gateway, asked.headers.get("Idempotency-Key", body.idempotency_key)
    if body.idempotency_key not in (None, key):
        raise Problem("INPUT_MALFORMED", "two idempotency keys", expected="one key, or the same one twice")
    with gateway.lock:
        tool = gateway.tools.find(body.server_id, body.tool_name)
        if key is None and not tool.read_only:
            raise Problem("IDEMPOTENCY_KEY_MISSING", "a write-class tool needs an idempotency key")
        if key is not None and key.startswith("run:"):
            raise Problem("IDEMPOTENCY_KEY_RESERVED", "the idempotency key is one of a run")
        try:
            canonical(body.arguments)
        except NotCanonical as error:
            raise Problem("INPUT_MALFORMED", str(error)) from None
        made = Call(
            trace_id=body.trace_id or gateway.engine.new_id(),
            server_id=body.server_id,
            tool_name=body.tool_name,
            arguments=body.arguments,
            key=key,
            principal_id=asked.principal,
            intent=body.intent,
            requested_at=gateway.engine.now(),
        )
        call = gateway.tools.begin(made)
    await gateway.made(call, wait_ms=body.wait_ms, waits_for_people="wait_ms" in body.model_fields_set)
    return _call_answer(call, is_replayed=call is not made)


def _call_answer(call: Call, *, is_replayed: bool) -> Reply:
    if call.state == "DENIED":
        raise _denial_of(call)
    if call.effect is None:
        headers = {"Location": f"/v1/traces/{call.trace_id}", "Retry-After": "1" if call.waiting is None else "5"}
        return _json({"trace_id": call.trace_id, "state": call.state, "waiting": call.waiting}, 202, **headers)
    head = {"trace_id": call.trace_id, "tool_call_id": call.tool_call_id, "state": call.state}
    headers = {"Idempotent-Replayed": "true"} if is_replayed else {}
    return _json({**head, "replayed": is_replayed, "tool_effect": call.effect}, 200, **headers)


def _denial_of(call: Call) -> Problem:
    decision = call.decision or {"decided_by": {"id": "nobody", "type": "person"}, "rationale": None}
    by, why = decision["decided_by"], decision["rationale"]
    who = {"withdrawal": "by its own caller", "policy": "by the policy"}.get(by["type"], f"by {by['id']}")
    problem = Problem("CALL_DENIED", f"the call was denied {who}" + (f": {why}" if why else ""))
    problem.more = {"trace_id": call.trace_id, "decision": decision}
    return problem


@route("GET", "/v1/traces/{trace_id}")
async def get_trace(asked: Asked) -> Reply:
    parameters(asked.query)
    return _json(views.trace_document(_trace(asked)))


@route("POST", "/v1/traces/{trace_id}/decision")
async def decide(asked: Asked) -> Reply:
    gateway, call = asked.gateway, _trace(asked)
    body = body_of(m.DecisionBody, asked.raw)
    with gateway.lock:
        if body.action_request_digest != call.digest:
            raise Problem("REQUEST_MISMATCH", "the decision is about another request", expected=call.digest)
        if call.state != "PENDING":
            was = (call.decision or {}).get("decision")
            if was != body.decision:
                raise Problem("ALREADY_DECIDED", "the call was decided on before", found=was)
        elif body.decision == "DENY":
            gateway.tools.deny(call, by=asked.principal, rationale=body.rationale)
            gateway.engine.tool_ended(call)
        else:
            gateway.tools.approve(call, by=asked.principal, rationale=body.rationale)
        gateway.notify()
    await gateway.made(call, wait_ms=body.wait_ms)
    return _moved(call)


@route("POST", "/v1/traces/{trace_id}/withdraw")
async def withdraw(asked: Asked) -> Reply:
    gateway, call = asked.gateway, _trace(asked)
    body = body_of(m.WithdrawalBody, asked.raw, is_optional=True)
    with gateway.lock:
        if call.state != "PENDING":
            raise Problem("ALREADY_DECIDED", "the call was decided on before", found=call.state)
        gateway.tools.deny(call, by=asked.principal, rationale=body.rationale, kind="withdrawal")
        gateway.engine.tool_ended(call)
        gateway.notify()
    return _moved(call)


def _moved(call: Call) -> Reply:
    if not call.is_final and call.waiting is None:
        return _call_answer(call, is_replayed=False)
    head = {"trace_id": call.trace_id, "state": call.state, "waiting": call.waiting}
    head["tool_call_id"] = None if call.effect is None else call.tool_call_id
    return _json({**head, "decision": call.decision, "tool_effect": call.effect})


@route("GET", "/v1/approvals")
async def list_approvals(asked: Asked) -> Reply:
    given = parameters(asked.query, "cursor", "limit")
    gateway = asked.gateway
    with gateway.lock:
        gateway.engine.advance()
        now = gateway.engine.now()
        calls = [views.approval(call) for call in gateway.tools.by_trace.values() if call.waiting == "supervisor"]
        questions = [
            views.question(run, intent)
            for run in gateway.engine.runs.values()
            if run.state in ("SCHEDULED", "RUNNING", "WAITING")
            for intent in run.begun.values()
            if intent.said["kind"] == "ask"
            and (intent.said["request"]["expires_at"] is None or intent.said["request"]["expires_at"] > now)
        ]
        waiting = sorted([*calls, *questions], key=lambda one: one["expires_at"] or "never")
        page, goes_on = _page(waiting, given)
        count = {"calls": len(calls), "questions": len(questions), "is_exact": True}
        return _json({"items": page, "next": goes_on, "scope": "tenant", "count": count})


@route("GET", "/v1/tools")
async def list_tools(asked: Asked) -> Reply:
    server_id = parameters(asked.query, "server_id").get("server_id")
    tools = sorted(asked.gateway.tools.tools.items())
    items = [tool.item(name) for name, tool in tools if server_id in (None, name.partition(".")[0])]
    return _json({"items": items, "next": None})


# What starts runs beside their callers.


@route("GET", "/v1/schedules")
async def list_schedules(asked: Asked) -> Reply:
    given = parameters(asked.query, "cursor", "limit")
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        known = asked.gateway.engine.schedules
        page, goes_on = _page([known[name].item() for name in sorted(known)], given)
        return _json({"items": page, "next": goes_on, "scope": "tenant"})


@route("GET", "/v1/schedules/{name}")
async def get_schedule(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        found = asked.gateway.engine.load_schedule(asked.named["name"])
        return _json({**found.item(), "input": found.said["input"]})


@route("PUT", "/v1/schedules/{name}")
async def set_schedule(asked: Asked) -> Reply:
    parameters(asked.query)
    body, name = body_of(m.ScheduleBody, asked.raw), asked.named["name"]
    if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", name) is None:
        raise Problem("SCHEMA_VIOLATION", "the name of a schedule", expected="letters, digits and . _ -, at most 63")
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        made = asked.gateway.engine.set_schedule(name, body, asked.principal)
        asked.gateway.notify()
        return _json({**made.item(), "input": made.said["input"]})


@route("DELETE", "/v1/schedules/{name}")
async def remove_schedule(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        name = asked.gateway.engine.load_schedule(asked.named["name"]).name
        del asked.gateway.engine.schedules[name]
        return _json({"name": name, "removed": True})


@route("POST", "/v1/triggers/{name}")
async def send_event(asked: Asked) -> Reply:
    parameters(asked.query)
    event, body, engine = asked.named["name"], body_of(m.EventBody, asked.raw), asked.gateway.engine
    runs: list[dict[str, Any]] = []
    with asked.gateway.lock:
        for name in sorted(engine.programs):
            program = next(reversed(engine.programs[name].values()))
            if {"event": event} not in program.said["triggers"]:
                continue
            told: dict[str, Any] = {"procedure": name, "run_id": f"{name}:{body.event_id}", "problem": None}
            try:
                given = engine.value_of(body.payload)
                engine.judged(name, None, given)
                _, was_there = engine.start(
                    program, given, asked.principal, run_id=told["run_id"], trigger=("event", body.event_id)
                )
                told["is_new"] = not was_there
            except Problem as problem:
                told |= {"is_new": False, "problem": problem.document()}
            runs.append(told)
    return _json({"event": event, "event_id": body.event_id, "runs": runs})


def _trace(asked: Asked) -> Call:
    call = asked.gateway.tools.by_trace.get(asked.named["trace_id"])
    if call is None:
        raise Problem("TRACE_NOT_FOUND", "no such trace")
    return call


def _shown(asked: Asked, steps_max: int = 1_000) -> Reply:
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        shown = views.run_document(asked.gateway.engine, asked.run())
        steps = shown["steps"]
        return _json(
            {**shown, "steps": steps[max(0, len(steps) - steps_max) :], "steps_left_out": len(steps) > steps_max}
        )


def _page(items: list[dict[str, Any]], given: dict[str, str]) -> tuple[list[dict[str, Any]], str | None]:
    """A page of these, and the cursor of the next."""
    limit, start = limit_in(given), 0
    if "cursor" in given:
        try:
            start = int(urlsafe_b64decode(given["cursor"] + "=="))
        except ValueError:
            raise Problem("INPUT_MALFORMED", "not a cursor of this list") from None
    page = items[start : start + limit]
    is_more = len(items) > start + limit
    return page, urlsafe_b64encode(str(start + limit).encode()).rstrip(b"=").decode() if is_more else None
