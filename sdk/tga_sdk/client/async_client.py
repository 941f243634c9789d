"""The client for programs with an event loop (asyncio)."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, Literal, Self, TypeVar, overload

import httpx2

from tga_sdk.client import calls, runs
from tga_sdk.client.calls import Wait, seconds
from tga_sdk.client.connection import CONNECT, LOST, WATCHED_MAX, Connection, async_chunks, lost, over_limit, within
from tga_sdk.client.documents import (
    Approval,
    Entry,
    Moved,
    Result,
    Run,
    RunItem,
    RunState,
    Tool,
    Trace,
    TraceItem,
    Triggered,
)
from tga_sdk.client.exchange import Lost, Pause, Reply, Request, Script, Watched, path_to
from tga_sdk.client.following import QUIET, Following
from tga_sdk.client.runs import ProcedureLike
from tga_sdk.errors import TgaError, Unfinished

T = TypeVar("T")
Runs = list[RunItem]
Which = str | Approval | Trace | Unfinished


class AsyncClient(Connection):
    """As `Client`, with `await`: the same methods, guarantees and errors. For one event loop.

    A call that is cancelled is not undone: what the gateway has begun goes on, and its key finds it.
    """

    def __init__(
        self,
        url: str | Sequence[str] | None = None,
        api_key: str | None = None,
        *,
        give_up_after: float | None = 60.0,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        super().__init__(url, api_key, give_up_after)
        self._http = httpx2.AsyncClient(transport=transport, **self._options())

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # -- Tools

    async def call(
        self,
        server: str,
        tool: str,
        args: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
        intent: str | None = None,
        wait: Wait = 0.0,
        timeout: float | None = 60.0,
    ) -> Result:
        """Call a tool, once for its key however often it takes, and return what it answered.

        `key` names the call: give one that is stable (`key_for("order", 7)`) and the same call made again, today or
        after a crash, is answered from the record. Without one it is made for this call, and is in the result and in
        every error. `intent` goes on the record, for those who decide.

        `timeout`: seconds for the gateway to come to an outcome (None: for ever). `wait`: seconds, or "forever", to
        wait while a person decides, on top of that; 0 does not wait for people. Both outlast restarts of the gateway.

        Raises Denied; CallFailed (failed for certain: the key keeps that answer) and OutcomeUnknown below it;
        ApprovalPending, CallHeld and Unfinished (not over: the same key goes on); ArgumentsInvalid, ToolNotFound,
        KeyReused, Unauthorized, Forbidden, RateLimited, Busy; GatewayUnreachable. Each has `key`, `trace_id`,
        `retryable` (with the same key) and `may_have_run`.
        """
        return await self._perform(
            calls.call(self._named, server, tool, args, key=key, intent=intent, wait=wait, timeout=timeout)
        )

    async def tools(self, server: str | None = None) -> list[Tool]:
        """The gateway's tools, with the schemas of their arguments; of one server, or of all."""
        return await self._perform(calls.tools(self._tries(), server))

    # -- Traces and approvals

    async def traces(
        self,
        *,
        state: str | None = None,
        server: str | None = None,
        tool: str | None = None,
        principal: str | None = None,
        limit: int = 100,
    ) -> list[TraceItem]:
        """Calls, newest first, at most `limit`; an agent sees its own."""
        filters = {"state": state, "server_id": server, "tool_name": tool, "principal_id": principal}
        return await self._perform(calls.traces(self._tries(), limit, filters))

    async def trace(self, trace_id: str) -> Trace:
        """One call, verified by the gateway, with what is recorded of it."""
        return await self._perform(calls.trace(self._tries(), trace_id))

    def events(self, trace_id: str, *, after: int = 0) -> AsyncGenerator[Entry, None]:
        """The entries of a call as they come, from the one after `after`, until it is over.

        Guaranteed: each once, in order, none left out, through restarts of the gateway.
        """
        return self._follow("/v1/traces" + path_to(trace_id) + "/events", after)

    async def approvals(self, *, limit: int = 100) -> list[Approval]:
        """What waits for a person: calls, oldest first, then questions of runs."""
        return await self._perform(calls.approvals(self._tries(), limit))

    async def approve(self, which: Which, *, rationale: str | None = None, timeout: float = 30.0) -> Moved:
        """Say yes to exactly this request, and wait up to `timeout` seconds for what it leads to.

        Given an Approval or a Trace, it counts for that request alone; given an id, for the one that waits there now.
        """
        return await self._perform(
            calls.decide(self._tries(timeout), "APPROVE", which, rationale, min(timeout, calls.HOLD))
        )

    async def deny(self, which: Which, *, rationale: str | None = None, timeout: float = 30.0) -> Moved:
        """Say no to exactly this request. `rationale` is what its caller reads."""
        return await self._perform(
            calls.decide(self._tries(timeout), "DENY", which, rationale, min(timeout, calls.HOLD))
        )

    async def withdraw(self, which: Which, *, rationale: str | None = None) -> Moved:
        """Take back one's own call that waits for a person; it is DENIED then."""
        return await self._perform(calls.withdraw(self._tries(), which, rationale))

    async def receipt(self, trace_id: str) -> str:
        """Proof that the call's last entry is in the log, as text; from a file `tga verify --receipt` judges it."""
        return await self._perform(calls.receipt(self._tries(), trace_id))

    # -- Runs

    async def start(
        self,
        procedure: ProcedureLike,
        input: Any = None,  # noqa: A002
        run_id: str | None = None,
        version: str | None = None,
        *,
        policy: Mapping[str, Any] | None = None,
        tags: Sequence[str] = (),
        strict_determinism: bool = False,
    ) -> Run:
        """Start a run. The same id with the same input is the same run, however often it is started (`replayed`).

        `procedure`: its name, or what @procedure or Flow made. Without `run_id` one is made; it is in every error.
        `strict_determinism`: what a replay would not repeat stops this run, whatever its worker is set to.
        """
        return await self._perform(
            runs.start(
                self._tries(),
                procedure,
                input,
                run_id=run_id,
                version=version,
                policy=policy,
                tags=tags,
                strict_determinism=strict_determinism,
            )
        )

    async def status(self, run_id: str, *, steps: int | None = None) -> Run:
        """Where a run stands, what it waits for, and its newest steps: so many, 0 for none, at most 1,000."""
        return await self._perform(runs.status(self._tries(), run_id, steps=steps))

    async def wait(self, run_id: str, *, timeout: float | None = None) -> Run:
        """Wait until the run has ended, however it has; RunUnfinished after `timeout` seconds. Outlasts restarts."""
        return await self._perform(runs.wait(self._named, run_id, timeout=seconds(timeout), silence=self._silence))

    @overload
    async def result(self, run_id: str, type: type[T], *, timeout: float | None = None) -> T: ...

    @overload
    async def result(self, run_id: str, type: Any = None, *, timeout: float | None = None) -> Any: ...

    async def result(self, run_id: str, type: Any = None, *, timeout: float | None = None) -> Any:  # noqa: A002
        """Wait for the run, and return what it returned; as `type`, validated, where one is given.

        RunFailed when it failed, was cancelled, parked or has diverged; RunUnfinished after `timeout` seconds.
        """
        script = runs.result(self._named, run_id, type, timeout=seconds(timeout), silence=self._silence)
        return await self._perform(script)

    async def signal(self, run_id: str, name: str, value: Any = None, *, signal_id: str | None = None) -> Run:
        """Send a signal to a run, once for its id; without one it is made for this signal.

        KeyReused: the run has a signal with this id, of another name or with another value.
        """
        return await self._perform(runs.signal(self._tries(), run_id, name, value, signal_id))

    async def answer(self, which: str | Approval, path: str | None = None, answer: Any = True) -> Run:
        """Answer a question of a run: one of `approvals()`, or the run's id and the question's path."""
        return await self._perform(runs.answered(self._tries(), which, path, answer))

    async def cancel(self, run_id: str, *, rationale: str | None = None) -> Run:
        """End a run now. What it has done stays done; its worker is told at its next contact."""
        return await self._perform(runs.cancel(self._tries(), run_id, rationale))

    async def retry(
        self,
        run_id: str,
        *,
        rationale: str | None = None,
        accepts: Mapping[str, Any] | None = None,
        resolves: Sequence[Mapping[str, Any]] = (),
    ) -> Run:
        """Have a run that failed, was parked or has diverged go on from what is recorded."""
        return await self._perform(runs.retry(self._tries(), run_id, rationale, accepts, resolves))

    async def fork(
        self,
        run_id: str,
        at: int | None = None,
        *,
        new_id: str | None = None,
        version: str | None = None,
        state_change: Sequence[Mapping[str, Any]] = (),
    ) -> Run:
        """Start a run that goes on after entry `at` of this one's journal (its last, if none is given)."""
        script = runs.fork(self._tries(), run_id, at=at, new_id=new_id, version=version, state_change=state_change)
        return await self._perform(script)

    async def list(
        self,
        *,
        status: str | None = None,
        procedure: str | None = None,
        prefix: str | None = None,
        principal: str | None = None,
        limit: int = 100,
    ) -> Runs:
        """Runs, newest first, at most `limit`."""
        filters = {"status": status, "procedure": procedure, "prefix": prefix, "principal_id": principal}
        return await self._perform(calls.listed(self._tries(), "/v1/runs", RunItem, limit, filters))

    async def watch(
        self, run_id: str, *, after: int = 0, until: Literal["rest", "end"] = "rest"
    ) -> AsyncGenerator[Entry, None]:
        """The entries of a run as they come; guaranteed as for `events`.

        `until="rest"`: to where nothing happens any more unless a person has it go on, which is also when it has
        failed, is parked or has diverged. `until="end"`: to where nothing can happen any more: it is completed or
        cancelled; a run that failed is followed on, for as long as it takes a person to retry or cancel it.
        """
        if until == "rest":
            run = await self.status(run_id)
            if run.has_ended and run.sequence_number <= after:
                return
        async with contextlib.aclosing(self._follow("/v1/runs" + path_to(run_id) + "/events", after)) as entries:
            async for entry in entries:
                yield entry
                is_rest = until == "rest" and entry.is_rest
                if is_rest and (await self.status(run_id)).sequence_number <= entry.sequence_number:
                    return  # else it was retried since

    async def checkpoints(self, run_id: str, *, after: int | None = None) -> Sequence[dict[str, Any]]:
        """The journal of a run: every record after number `after`, in order."""
        return await self._perform(runs.checkpoints(self._tries(), run_id, after))

    async def checkpoint(self, run_id: str, path: str) -> Sequence[dict[str, Any]]:
        """What the journal has of one operation."""
        return await self._perform(runs.checkpoint(self._tries(), run_id, path))

    async def state(self, run_id: str, *, at: int | None = None) -> RunState:
        """What the program keeps in `ctx.state`, now or after entry `at`."""
        return await self._perform(runs.state(self._tries(), run_id, at))

    async def delete(self, run_id: str) -> bool:
        """Erase the payloads of a run that has ended, for ever; its entries and digests stand. False: they were gone
        before."""
        return await self._perform(runs.delete(self._tries(), run_id))

    async def trigger(self, name: str, event_id: str, payload: Any = None) -> Triggered:
        """Send an event: it starts a run of each procedure that listens to its name, once for each `event_id`."""
        return await self._perform(runs.trigger(self._tries(), name, event_id, payload))

    # -- How scripts are performed

    async def _perform(self, script: Script[T]) -> T:
        came: Reply | Lost | None = None
        try:
            while True:
                wanted = script.send(came)
                came = None
                if isinstance(wanted, Watched):
                    await self._watched(wanted)
                elif isinstance(wanted, Pause):
                    await asyncio.sleep(wanted.seconds)
                else:
                    came = await self._send(wanted)
        except StopIteration as ended:
            return ended.value  # type: ignore[no-any-return]
        finally:
            script.close()

    async def _send(self, request: Request) -> Reply | Lost:
        try:
            async with (
                asyncio.timeout(request.patience + CONNECT),
                self._http.stream(
                    request.method,
                    self._url(request.path),
                    content=request.content,
                    headers=request.headers,
                    timeout=within(request.patience),
                ) as answer,
            ):
                content = bytearray()
                async for chunk in async_chunks(answer):
                    content += chunk
                    over_limit(answer.status_code, content, request.bytes_max)
                return self._heard(answer.status_code, answer.headers, content)
        except TimeoutError:
            return self._moved_on(Lost("the answer did not come whole in time"))
        except LOST as error:
            return self._moved_on(lost(error))

    async def _watched(self, wanted: Watched) -> None:
        if self._watching >= WATCHED_MAX:
            return
        self._watching += 1
        try:
            async with (
                asyncio.timeout(wanted.seconds),
                contextlib.aclosing(self._follow(wanted.path, wanted.after)) as entries,
            ):
                async for entry in entries:
                    if entry.is_rest:
                        return
        except (TimeoutError, TgaError):
            return
        finally:
            self._watching -= 1

    async def _follow(self, path: str, after: int) -> AsyncGenerator[Entry, None]:
        following = Following(path, self._named, after, self._silence)
        while not following.is_over:
            try:
                async with self._http.stream(
                    "GET", self._url(path), headers=following.headers(), timeout=within(QUIET)
                ) as answer:
                    if following.is_stream(answer.status_code, answer.headers):
                        async for chunk in async_chunks(answer):
                            for entry in following.feed(chunk):
                                yield entry
                            if following.is_over:
                                return
                    elif not following.is_over:
                        content = bytearray()
                        async for chunk in async_chunks(answer):
                            content += chunk
                            over_limit(answer.status_code, content)
                        following.refused(self._heard(answer.status_code, answer.headers, content))
            except LOST as error:
                following.lost(self._moved_on(lost(error)))
            if not following.is_over:
                await asyncio.sleep(following.pause())
