"""Schedules and events, which start runs beside their callers."""

from __future__ import annotations

import re
from typing import Any

from tga_sdk.testing import messages as m
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import body_of, parameters
from tga_sdk.testing.routes.routing import Asked, Reply, json_reply, page_of, route


@route("GET", "/v1/schedules")
async def list_schedules(asked: Asked) -> Reply:
    given = parameters(asked.query, "cursor", "limit")
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        known = asked.gateway.engine.schedules
        page, goes_on = page_of([known[name].item() for name in sorted(known)], given)
        return json_reply({"items": page, "next": goes_on, "scope": "tenant"})


@route("GET", "/v1/schedules/{name}")
async def get_schedule(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        found = asked.gateway.engine.load_schedule(asked.named["name"])
        return json_reply({**found.item(), "input": found.said["input"]})


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
        return json_reply({**made.item(), "input": made.said["input"]})


@route("DELETE", "/v1/schedules/{name}")
async def remove_schedule(asked: Asked) -> Reply:
    parameters(asked.query)
    with asked.gateway.lock:
        name = asked.gateway.engine.load_schedule(asked.named["name"]).name
        del asked.gateway.engine.schedules[name]
        return json_reply({"name": name, "removed": True})


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
    return json_reply({"event": event, "event_id": body.event_id, "runs": runs})
