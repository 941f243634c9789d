"""A gateway to measure: the real runtime, writer, traces, policy and clock, one tool, and a connector that is told."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from app.clock import SystemClock
from app.core.digest import digest_of
from app.core.errors import ToolNotFound
from app.core.instruments import Instruments
from app.domain.identity import Principal
from app.domain.tga.documents import JsonOutput, ToolCall
from app.domain.tga.execution import Answer
from app.domain.tga.ports import Answered, Connector, Dispatched, MaySend, Observer, Ports, Withheld
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tools import Tool
from app.gateway.policy_file import PolicyFile
from app.keys.keyring import Keyring
from app.postgres.sessions import Sessions
from app.postgres.system import system_parts
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from bench.cost import Session, cost_of
from bench.measure import CountingLedger

TOOL: Final = Tool(
    server_id="crm",
    tool_name="create_ticket",
    tool_class="write",
    definition_digest=digest_of({"tool_name": "create_ticket"}),
)
PRINCIPAL: Final = Principal(principal_id="agent-1", tenant="default")
KEYS: Final = Keyring.open(
    Path("there is no such folder"), {"TGA_SIGNING_KEY": "S" * 42 + "U=", "TGA_SEALING_KEY": "T" * 42 + "U="}
)
_OUTPUT: Final = JsonOutput(encoding="json", value={"ticket_id": "T-1"})


class OneTool:
    """The registry and all connectors: one tool, at one server, and its arguments are not looked at."""

    def __init__(self, connector: Connector) -> None:
        self._connector = connector

    def resolve(self, server_id: str, tool_name: str) -> Tool:
        if (server_id, tool_name) != (TOOL.server_id, TOOL.tool_name):
            raise ToolNotFound("no such tool", found=f"{server_id} {tool_name}")
        return TOOL

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None:
        return None

    @asynccontextmanager
    async def place(self, server_id: str) -> AsyncIterator[Connector]:
        yield self._connector


class Answering:
    """Every call succeeds at once."""

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        if may_send is not None and not await may_send():
            return Withheld()
        return Answered("SUCCESS", _OUTPUT)


class Silent:
    """No call is ever answered; each is announced when it comes."""

    def __init__(self, announce: Callable[[], None]) -> None:
        self._announce = announce

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        if may_send is not None and not await may_send():
            return Withheld()
        self._announce()
        never: asyncio.Future[Dispatched] = asyncio.get_running_loop().create_future()
        return await never


@dataclass(frozen=True, slots=True)
class Gateway:
    runtime: TgaRuntime
    ledger: CountingLedger


@asynccontextmanager
async def open_gateway(
    url: str,
    connector: Connector,
    *,
    sessions_max: int = 8,
    observer: Observer | None = None,
    instruments: Instruments | None = None,
    writer_type: type[Writer] = Writer,
) -> AsyncIterator[Gateway]:
    tools = OneTool(connector)
    async with (
        await Sessions.open(url, sessions_max=sessions_max) as sessions,
        await PostgresTraces.open(sessions, url) as traces,
    ):
        ledger = CountingLedger(sessions)
        writer = writer_type(ledger, instruments)
        clock = SystemClock()
        system = system_parts(
            sessions, writer, clock, KEYS, executor_id=traces.executor_id, definition_of=lambda tool: tool.input_schema
        )
        await system.pins.see([TOOL])
        ports = Ports(
            ledger=writer,
            traces=traces,
            tools=tools,
            connectors=tools,
            supervisor=PolicyFile.open(None),
            pins=system.pins,
            vault=system.vault,
            decision_signer=system.decision_signer,
            clock=clock,
            observer=observer,
        )
        runtime = TgaRuntime(ports)
        try:
            yield Gateway(runtime, ledger)
        finally:
            await runtime.close()
            await writer.close()


def fresh_calls(name: str) -> Iterator[CheckedCall]:
    """Calls that nobody has made before, if nobody used this name before; some 100 bytes of arguments."""
    n = 0
    while True:
        n += 1
        yield CheckedCall(
            server_id=TOOL.server_id,
            tool_name=TOOL.tool_name,
            arguments={"title": f"ticket {n}", "priority": 2, "text": "It does not work. " * 4},
            idempotency_key=f"{name}-{n}",
            principal=PRINCIPAL,
        )


async def completed(runtime: TgaRuntime, call: CheckedCall) -> Answer:
    answer = await runtime.call(call)
    if answer.state != "COMPLETED" or answer.replayed:
        raise RuntimeError(f"not executed: {answer}")
    return answer


async def cost_of_calls(url: str, observer: Session, name: str, count: int) -> tuple[int, int]:
    """Transactions and round trips of so many allowed calls with fresh keys, one after the other."""

    async def call_all(url: str, times: int) -> None:
        calls = fresh_calls(f"{name}-{times}")
        async with open_gateway(url, Answering(), sessions_max=1) as gateway:
            for _ in range(1 + times):  # the first prepares the statement
                await completed(gateway.runtime, next(calls))

    return await cost_of(url, observer, call_all, count)
