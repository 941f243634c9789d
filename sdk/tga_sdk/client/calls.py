"""Scripts of tool calls, and of what people do with them."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, TypeAlias

from tga_sdk.client.documents import Approval, Moved, Result, Tool, Trace, TraceItem, output_of
from tga_sdk.client.exchange import M, Pause, Reply, Script, Tries, asked, document, model, path_to
from tga_sdk.errors import (
    AnswerInvalid,
    ApprovalPending,
    CallFailed,
    CallHeld,
    Denied,
    GatewayError,
    OutcomeUnknown,
    TgaError,
    Unfinished,
    ValueInvalid,
)
from tga_sdk.given import to_json
from tga_sdk.keys import new_key
from tga_sdk.telemetry import client_call
from tga_sdk.wire import seconds_of

FOREVER: Final = "forever"
Wait: TypeAlias = float | Literal["forever"]
HOLD: Final = 25.0  # seconds for which one request is held by the gateway: less than what proxies cut off
SOON: Final = 1.0
HELD_BY_ITSELF: Final = 30.0  # for so long the gateway waits for an effect when it is not told otherwise
_PAGE: Final = 200


def seconds(wait: Wait | None) -> float:
    """A wait in seconds; for ever is infinite."""
    return math.inf if wait is None or wait == FOREVER else float(wait)


def call(
    named: str,
    server: str,
    tool: str,
    args: Mapping[str, Any] | None,
    *,
    key: str | None,
    intent: str | None,
    wait: Wait,
    timeout: float | None,
) -> Script[Result]:
    """One tool call, repeated with one key until its outcome is known. Every error carries the key."""
    if args is not None and not isinstance(args, Mapping):
        raise ValueInvalid(f"args: expected a dict of arguments by name, found {type(args).__name__}", where="args")
    chosen = new_key() if key is None else key
    calling = _Calling(named, chosen, wait, timeout)
    body: dict[str, Any] = {
        "server_id": server,
        "tool_name": tool,
        "arguments": to_json(dict(args or {}), where="args"),
        "idempotency_key": chosen,
    }
    if intent is not None:
        body["intent"] = intent
    span = client_call(server, tool)
    try:
        result = yield from calling.outcome(body, {} if span is None else span.headers())
    except BaseException as error:
        if isinstance(error, TgaError):
            error.key = chosen
            error.may_have_run = error.may_have_run or calling.may_have_run(error)
            error.trace_id = error.trace_id or calling.trace_id
        if span is not None:
            span.failed(error)
        raise
    if span is not None:
        span.ended(trace_id=result.trace_id)
    return result


class _Calling:
    """One call under way. Two clocks run: `timeout` while the gateway works or is silent, `wait` while a person is
    waited for. While a person is waited for, a gateway that is away does not end the call: it comes back."""

    def __init__(self, named: str, key: str, wait: Wait, timeout: float | None) -> None:
        self._key = key
        self._timeout = seconds(timeout)
        self._people_until = time.monotonic() + seconds(wait)
        self._tries = Tries(time.monotonic() + self._timeout, named)
        self.trace_id: str | None = None
        self.waiting: str | None = None
        self.state: str | None = None

    def may_have_run(self, error: TgaError) -> bool:
        """A refusal speaks of its own request alone; one before it may have come through without an answer."""
        if isinstance(error, (CallFailed, ApprovalPending)):
            return False  # they say it themselves
        if isinstance(error, Denied) and error.trace_id is not None:
            return False  # this very call was denied
        return self._tries.may_have_run or isinstance(error, AnswerInvalid)

    def outcome(self, body: dict[str, Any], headers: Mapping[str, str]) -> Script[Result]:
        while True:
            hold, began = self._hold(), time.monotonic()
            sent = body if hold is None else {**body, "wait_ms": round(hold * 1000)}
            wait = HELD_BY_ITSELF if hold is None else hold
            try:
                reply = yield from asked("POST", "/v1/tool-calls", sent, tries=self._tries, wait=wait, headers=headers)
            except GatewayError as error:
                if error.code not in ("CALL_IN_FLIGHT", "STATE_CONCURRENT_EXECUTION") or not error.retryable:
                    raise
                self.trace_id = error.trace_id or self.trace_id
                raise self._unfinished() from error
            found = document(reply)
            if reply.status == 200:
                return self._result(reply, found)
            yield from self._go_on(reply, found, time.monotonic() - began)

    def _hold(self) -> float | None:
        """For how long the gateway may hold the answer; None: as long as it does by itself, and not for people."""
        now = time.monotonic()
        if self.waiting is not None:
            return max(0.001, min(HOLD, self._people_until - now))
        left = max(0.001, self._tries.until - now)
        if left >= HELD_BY_ITSELF:
            return None
        # Given, it holds for people too. That one is waited for is to be known soon: from then on another clock runs.
        return min(left, SOON) if self._people_until > now else left

    def _go_on(self, reply: Reply, found: dict[str, Any], took: float) -> Script[None]:
        """It is on the record and not over: wait as long as the caller wants, then ask again."""
        trace_id, state, waiting = found.get("trace_id"), found.get("state"), found.get("waiting")
        if not isinstance(trace_id, str) or not isinstance(state, str):
            raise AnswerInvalid.found(reply.status, "the answer names no trace and no state")
        was_waiting = self.waiting is not None
        self.trace_id, self.state = trace_id, state
        self.waiting = waiting if isinstance(waiting, str) else None
        until = self._tries.until
        if self.waiting is not None:
            until = self._people_until
        elif was_waiting:
            until = time.monotonic() + self._timeout  # a person has decided: now the gateway's own time runs
        if until <= time.monotonic():
            raise self._unfinished()
        self._tries = Tries(until, self._tries.named, may_have_run=True)
        if took < 1.0:  # it was not held; the gateway says when to look again
            pause = max(0.2, seconds_of(reply.headers.get("retry-after", "")))
            yield Pause(max(0.0, min(pause, self._tries.left)))

    def _unfinished(self) -> Unfinished:
        if self.waiting == "supervisor":
            return ApprovalPending(
                f"a person has to decide on trace {self.trace_id} first; call again with the same key to wait for that",
                state=self.state,
                waiting=self.waiting,
            )
        if self.waiting is not None:
            return CallHeld(
                f"the outcome of trace {self.trace_id} is unknown, and an operator has to say what became of it; "
                "call again with the same key for the answer",
                state=self.state,
                waiting=self.waiting,
            )
        return Unfinished(
            f"trace {self.trace_id} is still being executed; call again with the same key for its outcome",
            state=self.state,
        )

    def _result(self, reply: Reply, found: dict[str, Any]) -> Result:
        effect, trace_id, state = found.get("tool_effect"), found.get("trace_id"), found.get("state")
        if not isinstance(effect, dict) or not isinstance(trace_id, str) or state not in ("COMPLETED", "FAILED"):
            raise AnswerInvalid.found(reply.status, "the answer is no effect of a tool call")
        self.trace_id = trace_id
        if state == "COMPLETED":
            call_id = found.get("tool_call_id")
            return Result(
                output=output_of(effect),
                key=self._key,
                trace_id=trace_id,
                tool_call_id=call_id if isinstance(call_id, str) else None,
                replayed=found.get("replayed") is True,
                effect=effect,
            )
        said = effect.get("error")
        code, message = "CALL_FAILED", "the tool failed"
        if isinstance(said, dict):
            code, message = str(said.get("code") or code), str(said.get("message") or message)
        kind = OutcomeUnknown if effect.get("basis") == "unknown" else CallFailed
        raise kind(code, message, effect=effect, output=output_of(effect))


def tools(tries: Tries, server: str | None) -> Script[list[Tool]]:
    return (yield from listed(tries, "/v1/tools", Tool, None, {"server_id": server}, is_paged=False))


def traces(tries: Tries, limit: int, filters: Mapping[str, str | None]) -> Script[list[TraceItem]]:
    return (yield from listed(tries, "/v1/traces", TraceItem, limit, filters))


def trace(tries: Tries, trace_id: str) -> Script[Trace]:
    reply = yield from asked("GET", "/v1/traces" + path_to(trace_id), tries=tries)
    return model(Trace, document(reply))


def approvals(tries: Tries, limit: int) -> Script[list[Approval]]:
    return (yield from listed(tries, "/v1/approvals", Approval, limit, {}))


def receipt(tries: Tries, trace_id: str) -> Script[str]:
    reply = yield from asked("GET", "/v1/traces" + path_to(trace_id) + "/receipt", tries=tries)
    try:
        return reply.content.decode()
    except UnicodeDecodeError:
        raise AnswerInvalid.found(reply.status, "the answer is no receipt") from None


def decide(
    tries: Tries, decision: str, which: str | Approval | Trace | Unfinished, rationale: str | None, hold: float
) -> Script[Moved]:
    """Approve or deny exactly the request that is given; of a trace's id, the request as it is now."""
    trace_id, digest = which if isinstance(which, str) else which.trace_id, None
    if isinstance(which, (Approval, Trace)):
        digest = which.action_request_digest
    if trace_id is None:
        raise TgaError("this is no call that waits for a person; `answer` is for the questions of runs")
    if digest is None:
        digest = (yield from trace(tries, trace_id)).action_request_digest
    body: dict[str, Any] = {"decision": decision, "action_request_digest": digest, "wait_ms": round(hold * 1000)}
    if rationale is not None:
        body["rationale"] = rationale
    path = "/v1/traces" + path_to(trace_id) + "/decision"

    def is_ours(found: Trace) -> bool:
        made = (found.artifacts or {}).get("supervisor_decision") or {}
        return made.get("decision") == decision and made.get("rationale") == rationale

    return (yield from _moved(tries, trace_id, path, body, is_ours, hold))


def withdraw(tries: Tries, which: str | Approval | Trace | Unfinished, rationale: str | None) -> Script[Moved]:
    trace_id = which if isinstance(which, str) else which.trace_id
    if trace_id is None:
        raise TgaError("this is no call that can be taken back")

    def is_ours(found: Trace) -> bool:
        made = (found.artifacts or {}).get("supervisor_decision") or {}
        by = made.get("decided_by")
        return isinstance(by, dict) and by.get("type") == "withdrawal"

    body = {} if rationale is None else {"rationale": rationale}
    return (yield from _moved(tries, trace_id, "/v1/traces" + path_to(trace_id) + "/withdraw", body, is_ours, 30.0))


def _moved(
    tries: Tries, trace_id: str, path: str, body: dict[str, Any], is_ours: Callable[[Trace], bool], hold: float
) -> Script[Moved]:
    """What was asked for, once. Where an answer was lost and the repeat finds it done, it was done by this."""
    try:
        reply = yield from asked("POST", path, body, tries=tries, wait=hold)
    except GatewayError as error:
        if error.code != "ALREADY_DECIDED" or not tries.may_have_run:
            raise
        found = yield from trace(tries, trace_id)
        if not is_ours(found):
            raise
        artifacts = found.artifacts or {}
        return Moved(
            trace_id=found.trace_id,
            state=found.state,
            waiting=found.waiting,
            decision=artifacts.get("supervisor_decision"),
            tool_effect=artifacts.get("tool_effect"),
        )
    return model(Moved, document(reply))


def listed(
    tries: Tries,
    path: str,
    kind: type[M],
    limit: int | None,
    filters: Mapping[str, Any],
    *,
    is_paged: bool = True,
) -> Script[list[M]]:
    """Page after page, until there are so many or no more."""
    items: list[M] = []
    cursor: str | None = None
    while limit is None or len(items) < limit:
        asked_for = {"limit": min(_PAGE, (limit or _PAGE) - len(items)), "cursor": cursor} if is_paged else {}
        reply = yield from asked("GET", path, tries=tries, query={**filters, **asked_for})
        page = document(reply)
        found, following = page.get("items"), page.get("next")
        if not isinstance(found, list):
            raise AnswerInvalid.found(reply.status, "the answer is no page of a list")
        items += [model(kind, item) for item in found]
        if not isinstance(following, str) or following == cursor or not found:
            break
        cursor = following
    return items if limit is None else items[:limit]
