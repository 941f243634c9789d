"""A gateway as a process of its own, driven by JSON lines, that kills itself at a boundary it was told.

Composed as app.main composes it, but with ports that are wrapped: nothing in `app` knows of it. A boundary is a moment
at which a crash leaves something else behind than a moment earlier. They are counted as they are passed, and `die_at`
is the place of one among them:

    acquire.done          the trace is owned, and not yet loaded
    commit.before         nothing was sent to PostgreSQL
    commit.rolled_back    sent, and its backend was ended before it could commit: not persisted
    commit.done           persisted, and not acknowledged
    dispatch.before       nothing was sent to the tool server
    dispatch.sent         the tool server has the request; no answer was read
    dispatch.answered     the answer was read; no effect is recorded
    answer.before         all is done; the caller does not know it

With `stop_at`, the name of one of them, it stops itself there once (SIGSTOP), until it is woken; `stop_after` of them
are passed before. `send.before` is such a place, too: the connector has a connection, and the next things are its last
question and the first byte.

Started through a zygote, which has imported everything and forks: a process that starts in milliseconds can be killed
hundreds of times in a test.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import asyncpg

from app.clock import SystemClock
from app.config import load_config
from app.connectors.registry import Registry
from app.core.errors import TgaError
from app.domain.identity import Principal
from app.domain.ledger.plans import Ledger, Plan
from app.domain.tga.documents import JsonOutput, ToolCall, TraceId
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Connector, Connectors, Dispatched, MaySend, Ports, RecordedCall, StoredTrace, Traces
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tga.supervision import Ruling
from app.gateway.policy_file import PolicyFile
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from tests.runtime.scripted import open_system

PRINCIPAL = Principal(principal_id="agent-1", tenant="default")
PERSON = Principal(principal_id="ada", tenant="default", roles=["supervisor"])


@dataclass(frozen=True)
class Options:
    gateway_url: str
    admin_url: str
    config: str
    book: str
    die_at: int | None = None
    stop_at: str | None = None
    stop_after: int = 0


class Boundaries:
    """The boundaries passed so far, and the one at which this process dies."""

    def __init__(self, options: Options) -> None:
        self.passed: list[str] = []
        self.refusals: list[str] = []  # codes with which the store refused a commit
        self._die_at = options.die_at
        self._stop_at = options.stop_at
        self._stop_after = options.stop_after

    def is_last(self) -> bool:
        return len(self.passed) == self._die_at

    def cross(self, name: str) -> None:
        if self.is_last():
            die()
        self.passed.append(name)
        self.stop_if_told(name)

    def stop_if_told(self, name: str) -> None:
        if name == self._stop_at:
            self._stop_after -= 1
            if self._stop_after < 0:
                self._stop_at = None
                os.kill(os.getpid(), signal.SIGSTOP)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class MinedLedger:
    def __init__(self, inner: Ledger, boundaries: Boundaries, admin_url: str) -> None:
        self._inner = inner
        self._boundaries = boundaries
        self._admin_url = admin_url

    async def commit(self, plan: Plan) -> None:
        self._boundaries.cross("commit.before")
        if self._boundaries.is_last():
            await self._roll_back(plan)
        self._boundaries.cross("commit.rolled_back")
        try:
            await self._inner.commit(plan)
        except TgaError as error:
            self._boundaries.refusals.append(error.code)
            raise
        self._boundaries.cross("commit.done")

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        self._boundaries.cross("commit.before")
        results = await self._inner.commit_all(plans, needs)
        self._boundaries.refusals += [error.code for error in results if error is not None]
        self._boundaries.cross("commit.done")
        return results

    async def _roll_back(self, plan: Plan) -> None:
        """Let the commit wait for a lock inside its transaction, and end its backend there."""
        admin = await asyncpg.connect(self._admin_url)
        await admin.execute("SELECT pg_advisory_lock(tga.stream_lock_key($1::text))", plan.stream)
        task = asyncio.create_task(self._inner.commit(plan))
        waiting = "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        while (pid := await admin.fetchval(waiting)) is None:
            await asyncio.sleep(0.002)
        await admin.execute("SELECT pg_terminate_backend($1)", pid)
        while await admin.fetchval("SELECT count(*) FROM pg_stat_activity WHERE pid = $1", pid):
            await asyncio.sleep(0.002)
        die()
        await task


class MinedConnector:
    def __init__(self, inner: Connector, boundaries: Boundaries, book: Path) -> None:
        self._inner = inner
        self._boundaries = boundaries
        self._book = book

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        async def asked_last() -> bool:
            self._boundaries.stop_if_told("send.before")
            return may_send is None or await may_send()

        def send() -> Awaitable[Dispatched]:
            return self._inner.dispatch(
                call, timeout_ms=timeout_ms, traceparent=traceparent, arguments=arguments, may_send=asked_last
            )

        self._boundaries.cross("dispatch.before")
        if self._boundaries.is_last():
            noted = self._requests(call)
            task = asyncio.ensure_future(send())
            while self._requests(call) == noted:
                await asyncio.sleep(0.002)
            die()
            await task
        self._boundaries.cross("dispatch.sent")
        dispatched = await send()
        self._boundaries.cross("dispatch.answered")
        return dispatched

    def _requests(self, call: ToolCall) -> int:
        lines = self._book.read_bytes().splitlines()
        return sum(b'"request"' in line and call.tool_call_id.encode() in line for line in lines)


class MinedConnectors:
    def __init__(self, inner: Connectors, boundaries: Boundaries, book: Path) -> None:
        self._inner = inner
        self._boundaries = boundaries
        self._book = book

    @asynccontextmanager
    async def place(self, server_id: str) -> AsyncIterator[Connector]:
        async with self._inner.place(server_id) as connector:
            yield MinedConnector(connector, self._boundaries, self._book)


class MinedTraces:
    def __init__(self, inner: Traces, boundaries: Boundaries) -> None:
        self._inner = inner
        self._boundaries = boundaries

    async def acquire(self, stream: str) -> str:
        executor_id = await self._inner.acquire(stream)
        self._boundaries.cross("acquire.done")
        return executor_id

    async def release(self, stream: str, executor_id: str) -> None:
        await self._inner.release(stream, executor_id)

    async def load_trace(self, trace_id: TraceId) -> StoredTrace:
        return await self._inner.load_trace(trace_id)

    async def find_call(self, server_id: str, tool_name: str, idempotency_key: str) -> RecordedCall | None:
        return await self._inner.find_call(server_id, tool_name, idempotency_key)

    async def list_recoverable(self, kind: str, *, after: str | None, limit: int) -> list[str]:
        return await self._inner.list_recoverable(kind, after=after, limit=limit)

    async def is_known(self, trace_id: TraceId) -> bool:
        return await self._inner.is_known(trace_id)

    async def list_expired(self, *, limit: int) -> list[TraceId]:
        return await self._inner.list_expired(limit=limit)

    def executor_id(self) -> str:
        return self._inner.executor_id()

    async def is_alive(self, executor_id: str) -> bool:
        return await self._inner.is_alive(executor_id)


class Service:
    """Commands, each a task of its own, as the requests of a server are."""

    def __init__(self, runtime: TgaRuntime, traces: Traces, boundaries: Boundaries) -> None:
        self._runtime = runtime
        self._traces = traces
        self._boundaries = boundaries
        self._tasks: set[asyncio.Task[None]] = set()

    async def serve(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._say({"id": 0, "ready": os.getpid()})
        while line := await reader.readline():
            command = json.loads(line)
            if command["do"] == "exit":
                break
            task = asyncio.create_task(self._obey(command))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _obey(self, command: dict[str, Any]) -> None:
        try:
            answer = await getattr(self, f"_{command.pop('do')}")(**{k: v for k, v in command.items() if k != "id"})
        except TgaError as error:
            answer = {"error": error.code, "message": str(error)}
        if "passed" not in answer:
            self._boundaries.cross("answer.before")
        self._say({**answer, "id": command["id"]})

    def _say(self, answer: dict[str, Any]) -> None:
        # One write of one line: two tasks never mix, and a line that was begun is complete.
        os.write(sys.stdout.fileno(), json.dumps(answer).encode() + b"\n")

    async def _call(
        self,
        tool: str,
        arguments: dict[str, Any],
        key: str | None,
        server: str = "bank",
        wait_ms: int | None = None,
    ) -> dict[str, Any]:
        call = CheckedCall(server, tool, arguments, key, PRINCIPAL)
        return _told(await self._runtime.call(call, wait_ms=wait_ms))

    async def _decide(self, trace_id: TraceId, decision: Any) -> dict[str, Any]:
        stored = await self._traces.load_trace(trace_id)
        digest = stored.state.action_request_digest
        answer = await self._runtime.decide(trace_id, Ruling(decision, PERSON, digest))
        return _told(answer)

    async def _resolve(self, trace_id: TraceId, action: Any, output: Any = None) -> dict[str, Any]:
        stored = await self._traces.load_trace(trace_id)
        answer = await self._runtime.resolve(
            trace_id,
            action=action,
            tool_call_digest=str(stored.state.tool_call_digest),
            resolved_by="ada",
            rationale="looked at the bank's book",
            output=None if output is None else JsonOutput(encoding="json", value=output),
        )
        return _told(answer)

    async def _recover(self, trace_id: TraceId) -> dict[str, Any]:
        return _told(await self._runtime.recover(trace_id))

    async def _recover_all(self) -> dict[str, Any]:
        recovered = [one async for one in self._runtime.recover_all()]
        return {
            "recovered": [one.trace_id for one in recovered if one.error is None],
            "failed": [str(one.error) for one in recovered if one.error is not None],
        }

    async def _executor(self) -> dict[str, Any]:
        return {"executor_id": self._traces.executor_id()}

    async def _boundaries_passed(self) -> dict[str, Any]:
        return {"passed": self._boundaries.passed, "refusals": self._boundaries.refusals}


def _told(answer: Answer) -> dict[str, Any]:
    return {
        "trace_id": answer.trace_id,
        "state": answer.state,
        "tool_call_id": answer.tool_call_id,
        "waiting": answer.waiting,
        "replayed": answer.replayed,
        "effect": None if answer.effect is None else answer.effect.to_bytes().decode(),
    }


@asynccontextmanager
async def open_service(options: Options) -> AsyncIterator[Service]:
    """As app.main.open_gateway, on a database that is there and fit."""
    boundaries = Boundaries(options)
    registry = Registry.from_config(load_config(Path(options.config)))
    try:
        async with (
            await Sessions.open(options.gateway_url) as sessions,
            await PostgresTraces.open(sessions, options.gateway_url) as postgres_traces,
        ):
            writer = Writer(PostgresLedger(sessions))
            traces = MinedTraces(postgres_traces, boundaries)
            system = await open_system(sessions, writer, postgres_traces)
            await system.pins.see(registry.tools())
            runtime = TgaRuntime(
                Ports(
                    ledger=MinedLedger(writer, boundaries, options.admin_url),
                    traces=traces,
                    tools=registry,
                    connectors=MinedConnectors(registry, boundaries, Path(options.book)),
                    supervisor=PolicyFile.open(None),
                    pins=system.pins,
                    vault=system.vault,
                    decision_signer=system.decision_signer,
                    clock=SystemClock(),
                )
            )
            try:
                yield Service(runtime, traces, boundaries)
            finally:
                await runtime.close()
                await writer.close()
    finally:
        await registry.close()


async def _main(options: Options) -> None:
    async with open_service(options) as service:
        await service.serve()


# The zygote


def command_line() -> list[str]:
    return [sys.executable, "-m", "tests.crash.gateway"]


def fork_gateway(zygote: socket.socket, options: Options, *, stdin: int, stdout: int) -> int:
    """Ask the zygote for a gateway; returns its process id."""
    socket.send_fds(zygote, [json.dumps(asdict(options)).encode()], [stdin, stdout])
    return int(zygote.recv(64))


def _serve_forks(control: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        raw, descriptors, _, _ = socket.recv_fds(control, 65536, 2)
        if not raw:
            return
        pid = os.fork()
        if pid == 0:
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for number, descriptor in enumerate(descriptors):
                os.dup2(descriptor, number)
                os.close(descriptor)
            with contextlib.suppress(KeyboardInterrupt):
                asyncio.run(_main(Options(**json.loads(raw))))
            sys.stdout.flush()
            os._exit(0)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


if __name__ == "__main__":
    _serve_forks(socket.socket(fileno=os.dup(0)))
