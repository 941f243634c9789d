"""A runtime in this process: real PostgreSQL, but tools, time and the supervisor are what the test says."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from app.clock import SystemClock
from app.core.digest import digest_of
from app.core.errors import ArgumentsInvalid, TgaError, ToolNotFound
from app.domain.identity import Principal
from app.domain.ledger.plans import Ledger, Plan
from app.domain.policy.question import Verdict
from app.domain.tga.documents import ActionRequest, JsonOutput, ToolCall, TraceId
from app.domain.tga.ports import Answered, Connector, Dispatched, MaySend, NotSent, Observer, Ports, Unknown, Withheld
from app.domain.tga.runtime import CheckedCall, TgaRuntime
from app.domain.tools import Tool
from app.keys.keyring import Keyring
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.system import SystemParts, system_parts
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer

SUCCESS = Answered("SUCCESS", JsonOutput(encoding="json", value={"done": True}))
TIMED_OUT = Unknown("timed_out", "no answer within 5000 ms")
REFUSED = NotSent("no request: connection refused")
PRINCIPAL = Principal(principal_id="agent-1", tenant="default")
WRITE = Tool("crm", "create", "write", digest_of({"tool": "create"}), max_attempts=3)
READ = replace(WRITE, tool_name="read", tool_class="read")

Script = Callable[[ToolCall], Awaitable[Dispatched]]
_numbers = itertools.count(1)


def call(
    tool: str = "create",
    *,
    key: str | None = None,
    amount: Any = 1,
    trace_id: TraceId | None = None,
    principal: Principal = PRINCIPAL,
) -> CheckedCall:
    return CheckedCall("crm", tool, {"amount": amount}, key, principal, trace_id=trace_id)


def new_key() -> str:
    return f"key-{next(_numbers)}"


class ScriptedConnector:
    """Answers with what the list says, in its order, then for ever with its last; counts what was sent."""

    def __init__(self, *answers: Dispatched | Script) -> None:
        self.answers = list(answers or (SUCCESS,))
        self.sent: list[ToolCall] = []
        self.sent_arguments: list[dict[str, Any]] = []
        self.traceparents: list[str | None] = []

    @property
    def sends_of_key(self) -> Counter[str | None]:
        return Counter(sent.idempotency_key for sent in self.sent)

    @asynccontextmanager
    async def place(self, server_id: str) -> AsyncIterator[Connector]:
        yield self

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
        self.sent.append(call)
        self.sent_arguments.append(call.arguments if arguments is None else arguments)
        self.traceparents.append(traceparent)
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return await answer(call) if callable(answer) else answer


class Tools:
    def __init__(self, *tools: Tool) -> None:
        self.tools = {(tool.server_id, tool.tool_name): tool for tool in tools}

    def resolve(self, server_id: str, tool_name: str) -> Tool:
        try:
            return self.tools[server_id, tool_name]
        except KeyError:
            raise ToolNotFound(f"no tool {tool_name}") from None

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None:
        if not isinstance(arguments.get("amount"), int):
            raise ArgumentsInvalid("arguments at /amount", expected="an integer")


class Says:
    """A supervisor with one answer for everything."""

    def __init__(self, answer: Literal["allow", "deny", "ask"]) -> None:
        self.answer = answer
        self.may_not_approve: set[str] = set()

    async def judge(self, request: ActionRequest, tool: Tool) -> Verdict:
        return Verdict(self.answer, policy_digest=digest_of({"says": self.answer}), policy_ids=["says"])

    async def judge_approval(self, request: ActionRequest, tool: Tool, approver: Principal) -> Verdict:
        answer: Literal["allow", "deny"] = "deny" if approver.principal_id in self.may_not_approve else "allow"
        return Verdict(answer, policy_digest=digest_of({"says": answer}), policy_ids=["says-approve"])


class FakeClock(SystemClock):
    """Real time but for waiting, which is only noted."""

    def __init__(self) -> None:
        super().__init__()
        self.slept_s: list[float] = []

    def jitter(self) -> float:
        return 1.0

    async def sleep(self, seconds: float) -> None:
        self.slept_s.append(seconds)
        await asyncio.sleep(0)


class CountingLedger:
    """Every plan that was committed, or tried; `before` is called ahead of each and may raise."""

    def __init__(self, inner: Ledger) -> None:
        self.plans: list[Plan] = []
        self.before: Callable[[Plan], Awaitable[None]] | None = None
        self.after: Callable[[Plan], Awaitable[None]] | None = None
        self._inner = inner

    async def commit(self, plan: Plan) -> None:
        self.plans.append(plan)
        if self.before is not None:
            await self.before(plan)
        await self._inner.commit(plan)
        if self.after is not None:
            await self.after(plan)

    async def commit_all(self, plans: Sequence[Plan], needs: Sequence[int | None] = ()) -> list[TgaError | None]:
        self.plans += plans
        for plan in plans:
            if self.before is not None:
                await self.before(plan)
        results = await self._inner.commit_all(plans, needs)
        for plan, error in zip(plans, results, strict=True):
            if self.after is not None and error is None:
                await self.after(plan)
        return results


@dataclass
class Scripted:
    """A runtime and all that it was given."""

    runtime: TgaRuntime
    ledger: CountingLedger
    traces: PostgresTraces
    sessions: Sessions
    connector: ScriptedConnector
    clock: FakeClock
    tools: Tools
    supervisor: Says
    system: SystemParts
    url: str = field(repr=False)


KEYS = Keyring.open(
    Path("there is no such folder"), {"TGA_SIGNING_KEY": "S" * 42 + "U=", "TGA_SEALING_KEY": "T" * 42 + "U="}
)


async def open_system(sessions: Sessions, ledger: Ledger, traces: PostgresTraces) -> SystemParts:
    """Pins, secrets and signatures as main.py wires them, under keys that are known; the gateway's key is announced."""
    system = system_parts(
        sessions,
        ledger,
        SystemClock(),
        KEYS,
        executor_id=traces.executor_id,
        definition_of=lambda tool: {"tool_name": tool.tool_name},
    )
    await system.decision_signer.announce()
    return system


@asynccontextmanager
async def open_scripted(
    url: str,
    *answers: Dispatched | Script,
    tool: Tool = WRITE,
    real_time: bool = False,
    observer: Observer | None = None,
) -> AsyncIterator[Scripted]:
    async with await Sessions.open(url) as sessions, await PostgresTraces.open(sessions, url) as traces:
        writer = Writer(PostgresLedger(sessions))
        ledger, connector, clock = CountingLedger(writer), ScriptedConnector(*answers), FakeClock()
        tools, supervisor = Tools(tool, READ), Says("allow")
        system = await open_system(sessions, writer, traces)
        runtime = TgaRuntime(
            Ports(
                ledger=ledger,
                traces=traces,
                tools=tools,
                connectors=connector,
                supervisor=supervisor,
                pins=system.pins,
                vault=system.vault,
                decision_signer=system.decision_signer,
                clock=SystemClock() if real_time else clock,
                observer=observer,
            )
        )
        try:
            yield Scripted(runtime, ledger, traces, sessions, connector, clock, tools, supervisor, system, url)
        finally:
            await runtime.close()
            await writer.close()
