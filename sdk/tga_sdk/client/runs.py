"""Scripts of runs: start, look, wait, answer, end, try again."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Protocol, TypeAlias, runtime_checkable
from uuid import uuid4

from tga_sdk.client.documents import Approval, Run, RunState, Triggered
from tga_sdk.client.exchange import Pause, Script, Tries, Watched, asked, document, model, path_to
from tga_sdk.errors import AnswerInvalid, GatewayError, RunFailed, RunUnfinished, TgaError
from tga_sdk.given import to_json
from tga_sdk.telemetry import run_start
from tga_sdk.values import decode

_LOOKS_FIRST: Final = 0.05
_LOOKS_LAST: Final = 5.0
_WATCHED: Final = 10.0  # seconds that one stream of events is followed before the run is looked at again
_BLOB_BYTES_MAX: Final = 5 * 1024**3
_BLOB_BYTES_A_SECOND: Final = 250_000  # at least so much comes over a line that is not broken
_LOOKS_SHARE: Final = 0.1  # of the time waited so far: who waits long is told a little later


@runtime_checkable
class Named(Protocol):
    """A procedure, or anything that has its name and version."""

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...


@runtime_checkable
class HasProcedure(Protocol):
    """What a procedure was made of, as a Flow."""

    @property
    def procedure(self) -> Named: ...


ProcedureLike: TypeAlias = str | Named | HasProcedure


def start(
    tries: Tries,
    procedure: ProcedureLike,
    given: Any,
    *,
    run_id: str | None,
    version: str | None,
    policy: Mapping[str, Any] | None,
    tags: Sequence[str],
    strict_determinism: bool,
) -> Script[Run]:
    """Once for its id, which is made here if none is given: a repeat finds the run that the first one started."""
    name, own_version = _named(procedure)
    chosen = run_id or f"run-{uuid4()}"
    body: dict[str, Any] = {"procedure": name, "input": to_json(given, where="input"), "run_id": chosen}
    if version or own_version:
        body["version"] = version or own_version
    if policy is not None:
        body["policy"] = dict(policy)
    if tags:
        body["tags"] = list(tags)
    if strict_determinism:
        body["strict_determinism"] = True
    span = run_start(name, chosen)
    try:
        with naming(chosen):
            headers = {} if span is None else span.headers()
            reply = yield from asked("POST", "/v1/runs", body, tries=tries, headers=headers)
            run = model(Run, document(reply))
    except BaseException as error:
        if span is not None:
            span.failed(error)
        raise
    if span is not None:
        span.linked(reply.headers.get("traceresponse"))
        span.ended()
    return run


def status(tries: Tries, run_id: str, *, steps: int | None = None) -> Script[Run]:
    with naming(run_id):
        return model(Run, document((yield from asked("GET", _of(run_id), tries=tries, query={"steps": steps}))))


def wait(named: str, run_id: str, *, timeout: float, silence: float) -> Script[Run]:
    """Until the run has ended. `silence`: how long the gateway may be away before that is an error."""
    yield from _ended(named, run_id, timeout=timeout, silence=silence)
    with naming(run_id):
        return (yield from status(Tries(time.monotonic() + silence, named), run_id))


def _ended(named: str, run_id: str, *, timeout: float, silence: float) -> Script[Run]:
    """The run when it has ended, without its steps: to look at it costs the same however long it is."""
    began = time.monotonic()
    with naming(run_id):
        while True:
            now = time.monotonic()
            run = yield from status(Tries(min(now + silence, max(began + timeout, now + 1.0)), named), run_id, steps=0)
            if run.has_ended:
                return run
            waited = time.monotonic() - began
            if waited >= timeout:
                raise RunUnfinished(
                    f"run {run_id} is {run.status} after {timeout:g} s" + (f": {run.notice}" if run.notice else ""),
                    run_id=run_id,
                    status=run.status,
                )
            pause = min(max(_LOOKS_FIRST, waited * _LOOKS_SHARE), _LOOKS_LAST)
            followed = time.monotonic()
            yield Watched(_of(run_id) + "/events", run.sequence_number, min(_WATCHED, timeout - waited))
            followed = time.monotonic() - followed
            if followed < pause:  # it rests, or cannot be followed; a look tells, and no look comes right after another
                run = yield from status(
                    Tries(min(now + silence, max(began + timeout, now + 1.0)), named), run_id, steps=0
                )
                if run.has_ended:
                    return run
                yield Pause(max(0.0, min(pause - followed, timeout - (time.monotonic() - began))))


def result(named: str, run_id: str, type_: Any, *, timeout: float, silence: float) -> Script[Any]:
    """What the run returned, as `type_` where one is given."""
    run = yield from _ended(named, run_id, timeout=timeout, silence=silence)
    with naming(run_id):
        if run.status != "completed":
            error = run.error or {}
            said = f"{error.get('type')}: {error.get('message')}" if error else (run.notice or "no error is recorded")
            raise RunFailed(f"run {run_id} is {run.status}: {said}", run_id=run_id, status=run.status, error=run.error)
        blob = None
        if run.output is not None and run.output.get("tier") == "artifact":
            blob = yield from _blob(named, silence, run.output)
        return decode(run.output, type_, blob, where="output")


def _blob(named: str, silence: float, value: Mapping[str, Any]) -> Script[bytes]:
    ref = value.get("ref")
    sha256, size = (ref.get("sha256"), ref.get("size_bytes")) if isinstance(ref, dict) else (None, None)
    if not isinstance(sha256, str) or not isinstance(size, int) or not 0 <= size <= _BLOB_BYTES_MAX:
        raise AnswerInvalid.found(200, "the output is stored elsewhere, and the answer does not say where")
    takes = size / _BLOB_BYTES_A_SECOND
    tries = Tries(time.monotonic() + silence + takes, named)
    path = "/v1/blobs" + path_to(sha256)
    reply = yield from asked("GET", path, tries=tries, wait=takes, bytes_max=max(size, 65_536))
    if hashlib.sha256(reply.content).hexdigest() != sha256:
        raise AnswerInvalid.found(reply.status, "the output is not what its digest says")
    return reply.content


def signal(tries: Tries, run_id: str, name: str, value: Any, signal_id: str | None) -> Script[Run]:
    """Once for its id, which is made here if none is given."""
    body = {"name": name, "value": to_json(value, where="value"), "signal_id": signal_id or f"signal-{uuid4()}"}
    return (yield from _post(tries, run_id, "/signals", body))


def answer(tries: Tries, run_id: str, path: str, given: Any, intent_digest: str | None) -> Script[Run]:
    body: dict[str, Any] = {"path": path, "answer": to_json(given, where="answer")}
    if intent_digest is not None:
        body["intent_digest"] = intent_digest
    return (yield from _post(tries, run_id, "/signals", body))


def answered(tries: Tries, which: str | Approval, path: str | None, given: Any) -> Script[Run]:
    """Answer a question by its run and path; an Approval is answered as exactly that question."""
    if isinstance(which, str):
        if path is None:
            raise TgaError("an answer needs the path of its question: `status(run_id).awaits` has it")
        return (yield from answer(tries, which, path, given, None))
    if which.run_id is None or which.path is None:
        raise TgaError("this is no question of a run; `approve` and `deny` are for calls")
    return (yield from answer(tries, which.run_id, which.path, given, which.intent_digest))


def cancel(tries: Tries, run_id: str, rationale: str | None) -> Script[Run]:
    return (yield from _post(tries, run_id, "/cancel", {} if rationale is None else {"rationale": rationale}))


def retry(
    tries: Tries,
    run_id: str,
    rationale: str | None,
    accepts: Mapping[str, Any] | None,
    resolves: Sequence[Mapping[str, Any]],
) -> Script[Run]:
    body: dict[str, Any] = {} if rationale is None else {"rationale": rationale}
    if accepts is not None:
        body["accepts"] = dict(accepts)
    if resolves:
        body["resolves"] = [dict(one) for one in resolves]
    try:
        return (yield from _post(tries, run_id, "/retry", body))
    except GatewayError as error:
        if error.code != "RUN_ENDED" or not tries.may_have_run:
            raise
        found = yield from status(tries, run_id)
        if found.has_ended:
            raise error from None
        return found  # an answer was lost, and the run goes on: that was this


def fork(
    tries: Tries,
    run_id: str,
    *,
    at: int | None,
    new_id: str | None,
    version: str | None,
    state_change: Sequence[Mapping[str, Any]],
) -> Script[Run]:
    """Once for its new id, which is made here if none is given."""
    body: dict[str, Any] = {"run_id": new_id or f"run-{uuid4()}"}
    body |= {name: value for name, value in (("at", at), ("version", version)) if value is not None}
    if state_change:
        body["state_change"] = [dict(one) for one in state_change]
    with naming(body["run_id"]):
        return (yield from _post(tries, run_id, "/fork", body))


def checkpoints(tries: Tries, run_id: str, after: int | None) -> Script[list[dict[str, Any]]]:
    """The journal, page after page."""
    records: list[dict[str, Any]] = []
    with naming(run_id):
        while True:
            reply = yield from asked("GET", _of(run_id) + "/checkpoints", tries=tries, query={"after_seq": after})
            page = document(reply)
            items, following = page.get("items"), page.get("next")
            if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
                raise AnswerInvalid.found(reply.status, "the answer is no page of a journal")
            records += items
            if not items or not isinstance(following, int) or following == after:
                return records
            after = following


def checkpoint(tries: Tries, run_id: str, path: str) -> Script[list[dict[str, Any]]]:
    with naming(run_id):
        reply = yield from asked("GET", _of(run_id) + "/checkpoints" + path_to(path), tries=tries)
        items = document(reply).get("items")
        if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
            raise AnswerInvalid.found(reply.status, "the answer is no list of records")
        return items


def state(tries: Tries, run_id: str, at: int | None) -> Script[RunState]:
    with naming(run_id):
        return model(
            RunState, document((yield from asked("GET", _of(run_id) + "/state", tries=tries, query={"at": at})))
        )


def delete(tries: Tries, run_id: str) -> Script[bool]:
    """True when this erased the payloads, False when they had been erased before."""
    with naming(run_id):
        found = document((yield from asked("DELETE", _of(run_id), tries=tries)))
        return found.get("is_new") is True or tries.may_have_run


def trigger(tries: Tries, name: str, event_id: str, payload: Any) -> Script[Triggered]:
    body = {"event_id": event_id, "payload": to_json(payload, where="payload")}
    reply = yield from asked("POST", "/v1/triggers" + path_to(name), body, tries=tries)
    return model(Triggered, document(reply))


def _post(tries: Tries, run_id: str, path: str, body: dict[str, Any]) -> Script[Run]:
    with naming(run_id):
        return model(Run, document((yield from asked("POST", _of(run_id) + path, body, tries=tries))))


class naming:  # noqa: N801
    """Puts the run's id into every error raised inside, unless a nearer one is there."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if isinstance(error, TgaError) and error.run_id is None:
            error.run_id = self._run_id


def _of(run_id: str) -> str:
    return "/v1/runs" + path_to(run_id)


def _named(procedure: Any) -> tuple[str, str | None]:
    if isinstance(procedure, str):
        return procedure, None
    inner = getattr(procedure, "procedure", procedure)  # a Flow has one
    name, version = getattr(inner, "name", None), getattr(inner, "version", None)
    if not isinstance(name, str):
        raise TgaError(f"a {type(procedure).__name__} is no procedure: give its name, or what @procedure made")
    return name, version if isinstance(version, str) else None
