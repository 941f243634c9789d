"""The worker protocol: leases, heartbeats, puts, the journal, blobs."""

from __future__ import annotations

import hashlib
import re
from typing import Any

from tga_sdk.testing import messages as m
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.reading import body_of, limit_in, parameters, position_in
from tga_sdk.testing.routes.routing import Asked, Reply, json_reply, route, verify_own_id, written
from tga_sdk.testing.run import place_of


@route("POST", "/v1/worker/lease")
async def lease_runs(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.LeaseRequest, asked.raw)
    return json_reply({"runs": await asked.gateway.lease(body, asked.principal)})


@route("POST", "/v1/worker/heartbeat")
async def beat(asked: Asked) -> Reply:
    parameters(asked.query)
    body = body_of(m.BeatRequest, asked.raw)
    for one in body.runs:
        verify_own_id(one.run_id)
    with asked.gateway.lock:
        asked.gateway.engine.advance()
        return json_reply({"runs": asked.gateway.engine.beat(body)})


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
    return json_reply(answered)


@route("POST", "/v1/runs/{run_id}/checkpoints")
async def put_checkpoints(asked: Asked) -> Reply:
    parameters(asked.query)
    run_id = asked.run_id
    body = body_of(m.PutRequest, asked.raw, bytes_max=m.PUT_BYTES_MAX)
    return json_reply(await asked.gateway.put(run_id, body, asked.principal))


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
                size += len(written(record.said))
        return json_reply({"items": page, "next": page[-1]["sequence_number"] if page else None})


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
        return json_reply({"items": [engine.shown(record, number) for number, record in found]})


@route("PUT", "/v1/blobs/{sha256}")
async def put_blob(asked: Asked) -> Reply:
    sha256, found = _sha256(asked), hashlib.sha256(asked.raw).hexdigest()
    if found != sha256:
        raise Problem("BLOB_MISMATCH", "the bytes are not those of this digest", expected=sha256, found=found)
    with asked.gateway.lock:
        is_new = sha256 not in asked.gateway.engine.blobs
        asked.gateway.engine.blobs[sha256] = asked.raw
    return json_reply({"sha256": sha256, "size_bytes": len(asked.raw)}, 201 if is_new else 200)


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
