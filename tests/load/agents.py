"""What agents do: call, repeat, ask for approvals, withdraw, read, and send what should be refused."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

from tests.load.asking import Client, Reply, Unresolved

CALLS: Final = "/v1/tool-calls"
TERMINAL: Final = frozenset({"COMPLETED", "FAILED", "DENIED"})
KEPT_MAX: Final = 200  # calls that a client remembers, to repeat them
# What is to become of a request that waits: its intent, which a supervisor reads.
APPROVE, DENY, RACE, WITHDRAW, EXPIRE = "approve", "deny", "race", "withdraw", "expire"


@dataclass(frozen=True, slots=True)
class Done:
    """A call and the bytes that it was answered with; `effect_sha256` None for one that was denied."""

    tool: str
    key: str
    arguments: dict[str, Any]
    effect_sha256: str | None


class Agent:
    """A closed loop of things to do until `stop_s`; what was begun is brought to its end."""

    def __init__(self, client: Client, stop_s: float, others: list[str]) -> None:
        self._client = client
        self._rng = client.rng
        self._stop_s = stop_s
        self._others = others  # ids of everybody's traces: what one must not see
        self._numbers = itertools.count(1)
        self._done: list[Done] = []
        self._mine: list[str] = []
        self._actions: list[tuple[int, Callable[[], Awaitable[None]]]] = [
            (40, self._write),
            (14, self._repeat),
            (10, self._read),
            (9, self._ask_for_approval),
            (4, self._reuse_key),
            (3, self._denied),
            (8, self._look),
            (4, self._foreign),
            (8, self._bad),
        ]

    async def run(self) -> None:
        weights = [weight for weight, _ in self._actions]
        waiting: set[asyncio.Task[None]] = set()
        try:
            while time.monotonic() < self._stop_s:
                ((_, action),) = self._rng.choices(self._actions, weights)
                if action == self._ask_for_approval:
                    # It waits for a person; meanwhile the agent does other things, but does not pile them up.
                    waiting = {task for task in waiting if not task.done()}
                    if len(waiting) < 3:
                        waiting.add(asyncio.create_task(self._ask_for_approval()))
                else:
                    await action()
                await asyncio.sleep(self._rng.expovariate(8))
            await asyncio.gather(*waiting)
        except Unresolved:
            self._client.complain("end", "a call was never answered")

    def _body(self, tool: str, key: str | None, arguments: dict[str, Any], **more: Any) -> dict[str, Any]:
        named = {} if key is None else {"idempotency_key": key}
        return {"server_id": "bank", "tool_name": tool, "arguments": arguments, **named, **more}

    def _new_key(self) -> str:
        return f"{self._client.name}-{next(self._numbers)}"

    async def _call(self, what: str, tool: str, key: str | None, arguments: dict[str, Any], **more: Any) -> Reply:
        """Until it is told what became of it; every repeat is exactly the same request."""
        body = self._body(tool, key, arguments, **more)
        # Denied: by the time that a repeat of a lost request comes, somebody has decided.
        expect = [200, 202, *(["CALL_DENIED"] if what == "ask" else [])]
        return await self._client.ask_until_told(what, "POST", CALLS, body, expect=expect, tool=tool, key=key)

    def _keep(self, reply: Reply, done: Done) -> None:
        for kept, value in ((self._mine, reply.trace_id), (self._others, reply.trace_id), (self._done, done)):
            kept.append(value)  # type: ignore[arg-type]
            if len(kept) > KEPT_MAX:
                del kept[self._rng.randrange(len(kept))]

    async def _write(self) -> None:
        amount, more = self._rng.randrange(14, 1000), dict[str, Any]()
        tool = self._rng.choices(("charge", "flaky", "pay_card", "slow_charge"), (80, 6, 6, 8))[0]
        arguments: dict[str, Any] = {"amount": amount}
        if tool == "flaky":
            arguments |= {"fail_times": 1, "status": 503}
        elif tool == "pay_card":
            arguments |= {"card": f"{self._rng.randrange(10**15, 10**16)}"}
        elif tool == "slow_charge":
            arguments |= {"ms": self._rng.randrange(50, 400)}
            more = {"wait_ms": self._rng.choice((0, 50, 30_000))}
        key = self._new_key()
        reply = await self._call("write", tool, key, arguments, **more)
        if reply.status == 202:
            state = await self._client.follow(reply.trace_id)
            reply = await self._call("write, again", tool, key, arguments)
            if reply.seen.state != state:
                self._client.complain("write", f"it ended {state} and is answered {reply.body[:200]!r}")
        if reply.seen.state != "COMPLETED":
            self._client.complain("write", f"not completed: {reply.body[:500]!r}")
        self._keep(reply, Done(tool, key, arguments, reply.seen.effect_sha256))

    async def _repeat(self) -> None:
        if not self._done:
            return
        done = self._rng.choice(self._done)
        body = self._body(done.tool, done.key, done.arguments)
        expect = ["CALL_DENIED"] if done.effect_sha256 is None else [200]
        reply = await self._client.ask("repeat", "POST", CALLS, body, expect=expect, tool=done.tool, key=done.key)
        if reply is None or reply.is_later:
            return
        if reply.seen.effect_sha256 != done.effect_sha256 or reply.headers.get("idempotent-replayed") != "true":
            self._client.complain("repeat", f"a repeat of {done} was answered {reply.body[:500]!r}")

    async def _read(self) -> None:
        reply = await self._client.ask(
            "read", "POST", CALLS, self._body("balance", None, {}), expect=[200], tool="balance"
        )
        if reply is not None and reply.status == 200 and reply.seen.state != "COMPLETED":
            self._client.complain("read", f"not completed: {reply.body[:500]!r}")

    async def _ask_for_approval(self) -> None:
        fate = self._rng.choices((APPROVE, DENY, RACE, WITHDRAW, EXPIRE), (40, 20, 15, 15, 10))[0]
        tool = "refund_soon" if fate == EXPIRE else "refund"
        key, arguments = self._new_key(), {"amount": self._rng.randrange(1, 100)}
        reply = await self._call("ask", tool, key, arguments, intent=fate)
        if fate in (WITHDRAW, RACE):
            await self._client.pause(0.0, 0.8)
            await self._client.ask_until_told(
                "withdraw",
                "POST",
                f"/v1/traces/{reply.trace_id}/withdraw",
                {"rationale": "no longer needed"},
                expect=[200, "ALREADY_DECIDED"],
                trace_id=reply.trace_id,
            )
        state = await self._end_of(reply)
        expected = {APPROVE: {"COMPLETED"}, RACE: {"COMPLETED", "DENIED"}}.get(fate, {"DENIED"})
        if state not in expected:
            self._client.complain("ask", f"{fate} ended {state}", trace_id=reply.trace_id)
        again = self._body(tool, key, arguments, intent=fate)
        told = await self._client.ask_until_told(
            "ask, again", "POST", CALLS, again, expect=[200, "CALL_DENIED"], tool=tool, key=key
        )
        if (told.status == 200) != (state == "COMPLETED"):
            self._client.complain("ask", f"it ended {state} and is answered {told.body[:300]!r}")
        self._keep(reply, Done(tool, key, arguments, told.seen.effect_sha256))

    async def _end_of(self, reply: Reply) -> str:
        if reply.seen.state in TERMINAL or reply.seen.code == "CALL_DENIED":
            return str(reply.seen.state or "DENIED")
        if self._rng.random() < 0.5:
            return await self._client.follow(reply.trace_id)
        while True:
            path = f"/v1/traces/{reply.trace_id}"
            found = await self._client.ask_until_told("trace", "GET", path, expect=[200])
            if found.document["state"] in TERMINAL:
                return str(found.document["state"])
            await self._client.pause(0.3, 0.8)

    async def _reuse_key(self) -> None:
        if self._done:
            done = self._rng.choice(self._done)
            body = self._body(done.tool, done.key, {**done.arguments, "amount": 1001})
            await self._client.ask("reuse", "POST", CALLS, body, expect=["IDEMPOTENCY_KEY_REUSED"])

    async def _denied(self) -> None:
        body = self._body("charge", self._new_key(), {"amount": 13})
        reply = await self._client.ask("denied", "POST", CALLS, body, expect=["CALL_DENIED"])
        if reply is not None and reply.seen.code == "CALL_DENIED" and not reply.document.get("trace_id"):
            self._client.complain("denied", "denied without a trace")

    async def _look(self) -> None:
        mine = self._rng.choice(self._mine) if self._mine else None
        paths = ["/v1/traces?limit=20", "/v1/traces?state=COMPLETED&limit=5", "/v1/tools", "/v1/servers", "/v1/events"]
        if mine is not None:
            paths += [f"/v1/traces/{mine}", f"/v1/traces/{mine}/entries", f"/v1/traces/{mine}/receipt"] * 2
        path = self._rng.choice(paths)
        if path.endswith("/receipt"):  # a text
            return await self._look_at_receipt(path)
        await self._client.ask("look", "GET", path, expect=[200])
        return None

    async def _look_at_receipt(self, path: str) -> None:
        reply = await self._client.ask("receipt", "GET", path, expect=[200, "NOT_YET_LOGGED"], text=True)
        if reply is not None and reply.status == 200 and b"\nindex " not in reply.body:
            self._client.complain("receipt", f"no receipt: {reply.body[:200]!r}")

    async def _foreign(self) -> None:
        theirs = [trace_id for trace_id in self._others if trace_id not in self._mine]
        if theirs:
            path = f"/v1/traces/{self._rng.choice(theirs)}" + self._rng.choice(("", "/entries", "/events"))
            await self._client.ask("foreign", "GET", path, expect=["TRACE_NOT_FOUND"])

    async def _bad(self) -> None:
        good = self._body("charge", self._new_key(), {"amount": 20})
        method, path, body, headers, code = self._rng.choice(
            (
                ("POST", CALLS, b'{"server_id": "bank", "tool', {}, "INPUT_MALFORMED"),
                ("POST", CALLS, b'{"server_id": "a", "server_id": "b"}', {}, "INPUT_MALFORMED"),
                ("POST", CALLS, b"\xff\xfe", {}, "INPUT_MALFORMED"),
                ("POST", CALLS, b'{"a":' * 100, {}, "INPUT_TOO_LARGE"),
                ("POST", CALLS, b" " * 300_000, {}, "INPUT_TOO_LARGE"),
                ("POST", CALLS, {**good, "colour": "red"}, {}, "SCHEMA_VIOLATION"),
                ("POST", CALLS, {**good, "wait_ms": -1}, {}, "SCHEMA_VIOLATION"),
                ("POST", CALLS, {**good, "arguments": {"amount": "much"}}, {}, "ARGUMENTS_INVALID"),
                ("POST", CALLS, {**good, "tool_name": "nothing"}, {}, "TOOL_NOT_FOUND"),
                ("POST", CALLS, {**good, "idempotency_key": None}, {}, "IDEMPOTENCY_KEY_MISSING"),
                ("POST", CALLS, good, {"Authorization": "Bearer nobody"}, "UNAUTHENTICATED"),
                ("POST", CALLS, good, {"Idempotency-Key": "another"}, "INPUT_MALFORMED"),
                ("GET", "/v1/traces?limit=many", None, {}, "INPUT_MALFORMED"),
                ("GET", "/v1/events?after=nowhere", None, {}, "INPUT_MALFORMED"),
                ("GET", "/v1/nothing", None, {}, "ROUTE_NOT_FOUND"),
                ("DELETE", "/v1/traces", None, {}, "METHOD_NOT_ALLOWED"),
            )
        )
        await self._client.ask("bad", method, path, body, expect=[code], headers=headers)
