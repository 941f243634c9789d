"""What is asked of both gateways: every route that programs and their callers use, every directive, every refusal."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

from tests.sdk.transcripts import (
    LONG_AGO,
    NOW,
    OTHER,
    PROGRAM,
    Driver,
    Scenario,
    ask,
    begun,
    child,
    complete,
    fail,
    failed,
    inline,
    signal,
    sleep,
    step,
    suspend,
    tool,
)

FAR = "2099-01-01T00:00:00.000Z"


async def procedures(d: Driver) -> None:
    await d.register("procs")
    await d.register("procs")
    await d.register("procs", OTHER, policy={"retry": {"retries": 2}}, tags=["x"], description="other")
    await d.register("procs", PROGRAM, description="said anew")
    await d.ask("GET", "/v1/procedures?procedure=procs")
    await d.ask("GET", "/v1/procedures/procs")
    await d.ask("GET", f"/v1/procedures/procs?program_digest={OTHER}")
    await d.ask("GET", "/v1/procedures/procs?version=9")
    await d.ask("GET", "/v1/procedures/nobodys")
    await d.ask("GET", "/v1/procedures/procs?color=1")
    await d.register("no spaces")
    await d.register("procs", "short")
    await d.register("procs", unknown=1)
    await d.register("procs", input_schema={"type": "nothing"})


async def starting(d: Driver) -> None:
    await d.start("starting", "start-1")
    await d.register(
        "starting", input_schema={"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}}
    )
    await d.start("starting", "start-1", {"a": 1}, tags=["t"])
    await d.start("starting", "start-1", {"a": 1})
    await d.start("starting", "start-1", {"a": 2})
    await d.start("starting", "start-2", {"a": "x"})
    await d.start("starting", "start-2", {})
    await d.start("starting", "start-2", {"a": 1}, version="9")
    await d.start("starting", "start 2", {"a": 1})
    await d.start("starting", "start-2", {"a": 1}, colour=1)
    await d.start("starting", "start-2", {"a": 1}, policy={"timeout_ms": 0})
    await d.start("starting", "start-3", {"a": 1}, policy={"timeout_ms": 5_000_000})
    await d.ask("POST", "/v1/runs", raw=b"{")
    await d.ask("POST", "/v1/runs", raw=b'{"procedure": "starting", "procedure": "starting"}')
    await d.ask("POST", "/v1/runs", raw=b'{"procedure": "starting", "input": NaN}')
    await d.ask("POST", "/v1/runs", raw=b'{"procedure": "starting", "input": 9007199254740993}')
    await d.ask("POST", "/v1/runs", raw=b"[]")
    await d.look("start-1")
    await d.look("nobody")
    await d.look("%21")
    await d.ask("GET", "/v1/runs/start-1?x=1")
    await d.ask("GET", "/v1/runs?prefix=start-&status=running", who="admin")
    await d.ask("GET", "/v1/runs?prefix=start-&limit=0")
    await d.ask("GET", "/v1/runs?prefix=start-&status=happy")
    await d.ask("GET", "/v1/runs?prefix=start-&status=completed", who="admin")
    await d.ask("GET", "/v1/runs/start-1/state")
    await d.ask("GET", "/v1/runs/start-1/state?at=1")
    await d.ask("GET", "/v1/runs/start-1/state?at=2")
    await d.ask("GET", "/v1/runs/start-1/state?at=x")
    await d.ask("GET", "/v1/runs/start-1/checkpoints/1", who="worker")
    await d.ask("GET", "/v1/runs/start-1/checkpoints/0", who="worker")
    await d.ask("GET", "/v1/runs/start-1/checkpoints?after_seq=x", who="worker")
    await d.ask("GET", "/v1/runs/start-1/checkpoints?after_seq=1", who="worker")
    for limit in (0, 1000, 1001):
        await d.ask("GET", f"/v1/runs/start-1/checkpoints?limit={limit}", who="worker")
    await d.ask("GET", "/v1/runs/nobody/checkpoints", who="worker")
    await d.register("large")
    await d.start("large", "large-1", ["x" * 40_000])
    (run,) = await d.lease("large")
    await d.ask("GET", f"/v1/blobs/{run['input']['ref']['sha256']}", who="worker")


async def puts(d: Driver) -> None:
    run = await d.begin("puts", {"x": 1})
    await d.put(run, step("1", state_change=[{"op": "set", "at": "/n", "to": [1]}]), after=2)
    await d.put(run, step("1", state_change=[{"op": "set", "at": "/n", "to": [1]}]), after=2)
    await d.put(run, step("1", 2), after=2)
    await d.put(run, step("1", 2), after=3)
    await d.put(run, step("3"), after=3)
    await d.put(run, step("2", inner=1), after=3)
    await d.put(run, step("2", try_number=2), after=3)
    await d.put(run, step("2", value={"tier": "transient"}), after=3)
    await d.put(run, step("2", "x" * 40_000), after=3)
    await d.put(run, step("2", value=None), after=3)
    await d.put(run, step("2", kind="tool"), after=3)
    await d.put(run, step("2", kind="dance"), after=3)
    await d.put(
        run,
        step("2", outcome="INTERRUPTED", value=None, error={"type": "I", "message": "", "retryable": False}),
        after=3,
    )
    await d.put(run, step("2.0"), after=3)
    await d.put(run, step("2", name="two words"), after=3)
    await d.put(run, step(".".join("1" * 17)), after=3)
    await d.put(run, step("2", state_change=[{"op": "set", "at": "/a/b", "to": 1}]), after=3)
    await d.put(run, step("2", state_change=[{"op": "remove", "at": "/a"}]), after=3)
    await d.put(run, step("2", state_change=[{"op": "set", "at": "", "to": 1}]), after=3)
    await d.put(run, step("2", resume="recompute", state_change=[{"op": "set", "at": "/n", "to": 1}]), after=3)
    await d.put(run, *(step(str(at)) for at in range(2, 67)), after=3)
    await d.put(run, *(step(str(at), "x" * 32_000) for at in range(2, 12)), after=3)
    await d.put(run, step("2"), step("3", 2), step("5"), after=3)
    await d.put(run, step("2"), step("3", state_change=[{"op": "set", "at": "/n/-", "to": 2}]), after=3)
    await d.put(run, step("3"), after=4)
    await d.put(run, step("4", value={"tier": "event", "value": "shown"}), after=5)
    await d.put(run, step("5", resume="recompute", value={"tier": "transient"}), after=6)
    await d.put(run, step("6", value={"tier": "secret", "value": {"card": 7}}), after=7)
    await d.put(run, step("6", value={"tier": "secret", "value": {"card": 7}}), after=7)
    await d.put(run, after=8, then=complete(5))
    await d.put(run, after=8, then=complete(7))
    await d.put(run, after=8)
    await d.put(run, after=-1)
    await d.put(run, after=8, lease="x" * 32)
    await d.put(run, after=8, attempt=2)
    await d.look("puts-1")
    await d.put(run, step("7", logs=[{"level": "info", "text": "hi", "at": NOW}]), after=8, then=complete(7))
    await d.put(run, step("7", logs=[{"level": "info", "text": "hi", "at": NOW}]), after=8, then=complete(7))
    await d.put(run, step("8"), after=10)
    await d.put(run, after=10, then={"type": "release"})
    await d.journal("puts-1")
    await d.ask("GET", "/v1/runs/puts-1/checkpoints?after_seq=2&limit=3", who="worker")
    await d.ask("GET", "/v1/runs/puts-1/checkpoints/6", who="worker")
    await d.look("puts-1")
    for at in (1, 3, 5, 9):
        await d.ask("GET", f"/v1/runs/puts-1/state?at={at}")
    await d.ask("POST", "/v1/runs/nobody/checkpoints", {"lease": "x" * 32, "attempt": 1, "after_seq": 0}, who="worker")


async def blobs(d: Driver) -> None:
    run = await d.begin("blobs")
    data = b"some bytes"
    sha256 = hashlib.sha256(data).hexdigest()
    ref = {"sha256": sha256, "size_bytes": len(data), "media_type": "text/plain", "serializer": "bytes"}
    await d.put(run, step("1", value={"tier": "artifact", "ref": ref}), after=2)
    await d.ask("GET", f"/v1/blobs/{sha256}", who="worker")
    await d.ask("PUT", f"/v1/blobs/{'0' * 64}", raw=data, who="worker")
    await d.ask("PUT", "/v1/blobs/short", raw=data, who="worker")
    await d.ask("PUT", f"/v1/blobs/{sha256}", raw=data, who="worker")
    await d.ask("PUT", f"/v1/blobs/{sha256}", raw=data, who="worker")
    await d.ask("GET", f"/v1/blobs/{sha256}", who="worker")
    await d.put(run, step("1", value={"tier": "artifact", "ref": {**ref, "size_bytes": 3}}), after=2)
    await d.put(run, step("1", value={"tier": "artifact", "ref": ref}), after=2)
    await d.put(run, after=3, then={"type": "complete", "output": {"tier": "artifact", "ref": ref}, "positions": 1})
    await d.look("blobs-1")


async def nesting(d: Driver) -> None:
    run = await d.begin("nesting")
    await d.put(run, step("1.1"), after=2)
    await d.put(run, step("1.1.2"), after=3)
    await d.put(run, step("2"), after=3)
    await d.put(run, step("1", inner=0), after=3)
    await d.put(run, failed("1.2"), after=3)
    await d.put(run, failed("1", "RETRY", inner=2), after=4)
    await d.put(run, step("1.1"), after=5)
    await d.put(run, step("1.2"), after=5)
    await d.put(run, step("1.2", try_number=2), after=5)
    await d.put(run, step("1", inner=2, try_number=2), after=6)
    await d.put(run, step("1.3"), after=7)
    changes = [{"op": "set", "at": "/log", "to": []}]
    await d.put(run, step("2:1.1", state_change=changes), step("2:2.1"), step("2:2.2.1"), after=7)
    await d.put(run, step("2:1001.1"), after=10)
    await d.put(run, step("2:2.2", inner=1), after=10)
    await d.put(run, step("2", kind="gather", inner=2), after=11)
    await d.put(run, step("2", kind="gather", inner=3, state_change=changes), after=11)
    await d.put(run, failed("3.1"), failed("3", inner=1), step("4"), after=12)
    await d.put(run, step("3.2"), after=15)
    await d.put(run, begun("5"), after=15)
    await d.put(run, begun("5"), after=15)
    await d.put(run, begun("5"), after=16)
    await d.put(run, step("5", name="other"), after=16)
    await d.put(run, after=16, then=suspend("5"))
    await d.put(run, step("6"), after=16)
    await d.look("nesting-1")
    await d.put(run, failed("5", "INTERRUPTED"), after=16)
    await d.put(run, after=17, then=complete(5))
    await d.look("nesting-1")
    await d.journal("nesting-1")
    await d.ask("GET", "/v1/runs/nesting-1/state")


async def tools(d: Driver) -> None:
    run = await d.begin("tools")
    await d.put(run, step("1"), after=2, then=tool("2"))
    await d.put(run, step("1"), after=2, then=tool("2"))
    await d.put(run, after=5, then=tool("2"))
    await d.put(run, after=5, then=tool("3", "nothing"))
    await d.put(run, after=7, then=tool("4", "fail", {}))
    await d.put(run, after=9, then=tool("5", "fail", {}, retries=1))
    await d.put(run, after=11, then=tool("5", "fail", {}, retries=1, try_number=1))
    await d.put(run, after=11, then=tool("5", "fail", {}, retries=1, try_number=2))
    await d.put(run, after=13, then=tool("7"))
    await d.put(run, step("6"), after=13, then=tool("7:1.1"))
    await d.put(run, after=16, then=tool("7", arguments=[]))
    await d.look("tools-1")
    await d.put(run, step("7", kind="gather", inner=1), after=16, then=complete(7))
    await d.journal("tools-1")
    await d.put(run, after=18, then=tool("8"))
    await d.look("tools-1")


async def asking(d: Driver) -> None:
    run = await d.begin("asking")
    await d.put(run, ask("1", answer_schema={"type": "nothing"}), after=2)
    early, wrong = {"at": LONG_AGO, "webhooks": []}, {"at": "2025-01-01T00:00:00.000Z", "webhooks": []}
    await d.put(run, ask("1", escalations=[early, wrong]), after=2)
    await d.put(run, ask("1"), after=2, then=suspend("1"))
    await d.put(run, ask("1"), after=2, then=suspend("1"))
    seen = await d.look("asking-1")
    listed = await d.ask("GET", "/v1/approvals?limit=200", who="supervisor")
    listed["items"] = [one for one in listed["items"] if one.get("run_id") == "asking-1"]  # of this scenario
    assert listed.pop("count")["questions"] >= 1  # of all that go on at the same time
    await d.ask("GET", "/v1/runs?prefix=asking-&status=waiting_for_human", who="admin")
    await d.ask("GET", "/v1/runs?prefix=asking-&status=waiting", who="admin")
    await d.answer("asking-1", "1", "yes")
    await d.answer("asking-1", "2", True)
    await d.answer("asking-1", "1", True, intent_digest=OTHER)
    await d.ask("POST", "/v1/runs/asking-1/signals", {"path": "1", "name": "x"}, who="supervisor")
    await d.ask("POST", "/v1/runs/asking-1/signals", {}, who="supervisor")
    await d.answer("asking-1", "1", True, intent_digest=seen["awaits"][0]["intent_digest"])
    await d.answer("asking-1", "1", True)
    await d.answer("asking-1", "1", False)
    await d.ask("POST", "/v1/runs/asking-1/signals", {"path": "1", "answer": True}, who="admin")
    (again,) = await d.lease("asking")
    await d.put(run, step("2"), after=4)
    await d.put(run, step("2"), after=4)
    await d.journal("asking-1")
    await d.put(again, step("2"), after=again["sequence_number"])
    past = {"expires_at": LONG_AGO}
    asked = [ask("3:1.1", **past, default=inline(False)), ask("3:2.1", **past)]
    told = await d.put(again, *asked, after=8, then=suspend("3:1.1", wait_ms=5_000))
    await d.put(again, after=told["sequence_number"], then=suspend("3:2.1", wait_ms=5_000))
    await d.journal("asking-1")
    await d.put(again, step("3", kind="gather", inner=2), after=12, then=suspend("4"))  # nothing has begun there
    await d.put(again, step("3", kind="gather", inner=2), after=12)
    await d.put(again, ask("4", expires_at=FAR), ask("5:1.1"), after=13)
    await d.put(again, ask("4", expires_at=FAR), after=13)
    await d.look("asking-1")
    await d.ask("POST", "/v1/runs/asking-1/cancel", {"rationale": "enough"})
    await d.ask("POST", "/v1/runs/asking-1/cancel")
    await d.put(again, step("4"), after=14)
    await d.answer("asking-1", "4", True)
    await d.look("asking-1")


async def holding(d: Driver) -> None:
    """A suspension that is held ends with an answer, with a signal, or when its time is over."""
    run = await d.begin("holding")

    async def soon(asked: Any) -> None:
        await asyncio.sleep(0.1)
        await d.ask("POST", "/v1/runs/holding-1/signals", asked, who="admin")

    for at, (put, asked) in enumerate(
        [(ask("1"), {"path": "1", "answer": True}), (signal("2"), {"name": "paid", "value": 5, "signal_id": "s-1"})]
    ):
        answering = asyncio.create_task(soon(asked))
        d_notes = len(d.notes)
        await d.put(run, put, after=2 + [0, 2][at], then=suspend(put["path"], wait_ms=30_000))
        await answering
        d.notes[d_notes:] = sorted(d.notes[d_notes:], key=lambda note: note["asked"])
    late = [{"at": LONG_AGO, "webhooks": ["x"]}, {"at": FAR, "webhooks": []}]
    await d.put(run, ask("3", escalations=late), after=7)
    await d.put(run, after=8, then=suspend("3", wait_ms=50))
    await d.look("holding-1")


async def signals(d: Driver) -> None:
    run = await d.begin("signals")

    async def send(name: str, value: Any, signal_id: str) -> None:
        said = {"name": name, "value": value, "signal_id": signal_id}
        await d.ask("POST", "/v1/runs/signals-1/signals", said)

    await send("paid", 1, "s-1")
    await send("paid", 2, "s-2")
    await send("paid", 2, "s-2")
    await send("paid", 3, "s-2")
    await send("other", 2, "s-2")
    await send("other", 3, "s-3")
    await d.put(run, signal("1"), after=2)
    await d.put(run, signal("1"), after=2)
    await d.put(run, signal("2:1.1"), signal("2:2.1"), after=7)
    await d.look("signals-1")
    await send("paid", 4, "s-4")
    await d.put(run, after=10, then=suspend("2:2.1"))
    await d.put(run, step("2", kind="gather", inner=2), after=12)
    await d.put(run, signal("3", expires_at=LONG_AGO), after=13, then=suspend("3"))
    (run,) = await d.lease("signals")
    await d.put(run, after=run["sequence_number"], then=complete(3))
    await send("paid", 5, "s-5")
    await send("paid", 1, "s-1")
    await send("paid", True, "s-1")
    await d.journal("signals-1")
    await d.look("signals-1")


async def sleeping(d: Driver) -> None:
    run = await d.begin("sleeping")
    await d.put(run, sleep("1"), after=2, then=suspend("1"))
    (run,) = await d.lease("sleeping")
    await d.put(
        run, sleep("2:1.1", FAR), sleep("2:2.1", FAR), ask("2:3.1"), after=6, then=suspend("2:1.1", "2:2.1", wake="ALL")
    )
    await d.look("sleeping-1")
    await d.ask("GET", "/v1/runs/sleeping-1/state")
    await d.ask("POST", "/v1/runs/sleeping-1/cancel", {})
    await d.journal("sleeping-1")


async def children(d: Driver) -> None:
    await d.register("kid")
    run = await d.begin("parent")
    await d.put(run, step("1"), after=2, then=child("2", "kid", {"a": 1}))
    await d.put(run, step("1"), after=2, then=child("2", "kid", {"a": 1}))
    await d.put(run, after=4, then=suspend("2"))
    (kid,) = await d.lease("kid")
    await d.look(kid["run_id"])
    await d.put(kid, after=2, then=complete(0, {"of": "kid"}))
    (run,) = await d.lease("parent")
    await d.put(run, after=run["sequence_number"], then=child("3", "nobodys"))
    await d.put(run, after=9, then=child("4", "kid", run_id="kid-4"))
    (kid,) = await d.lease("kid")
    await d.put(kid, after=2, then=fail())
    await d.put(run, after=10, then=suspend("4", wait_ms=10_000))
    await d.put(run, after=11, then=child("5", "kid", run_id="kid-4"))
    await d.put(run, after=11, then=child("5", "kid", run_id="kid-4"))
    await d.put(run, after=13, then=child("6", "kid", run_id="kid-6"))
    await d.ask("POST", "/v1/runs/parent-1/cancel", {})
    await d.journal("parent-1")
    while (await d.ask("GET", "/v1/runs/kid-6"))["state"] != "CANCELLED":
        d.notes.pop()
        await asyncio.sleep(0.02)
    await d.look("parent-1")
    await d.ask("GET", "/v1/runs?prefix=kid-", who="admin")


async def failing(d: Driver) -> None:
    run = await d.begin("failing", retry={"retries": 1, "first_ms": 1, "max_ms": 1})
    await d.put(run, step("1"), failed("2"), after=2, then=fail(retryable=True))
    await d.put(run, step("1"), failed("2"), after=2, then=fail(retryable=True))
    (run,) = await d.lease("failing")
    await d.put(run, after=6, then=fail(retryable=True))
    await d.look("failing-1")
    await d.ask("POST", "/v1/runs/failing-1/retry", {"rationale": "again"})
    await d.ask("POST", "/v1/runs/failing-1/retry")
    (run,) = await d.lease("failing")
    await d.put(run, step("2"), after=9)
    await d.put(run, step("2", try_number=2), after=9)
    await d.put(run, failed("3.1"), begun("3.2"), after=10)
    await d.put(run, failed("3", inner=1), after=12, then=fail())
    await d.ask("POST", "/v1/runs/failing-1/retry")
    (run,) = await d.lease("failing")
    await d.put(run, step("3.1", try_number=2), step("3", try_number=2, inner=1), after=16, then=complete(3))
    await d.ask("POST", "/v1/runs/failing-1/retry")
    await d.ask("POST", "/v1/runs/failing-1/cancel")
    await d.journal("failing-1")
    await d.look("failing-1")
    await d.ask("DELETE", "/v1/runs/failing-1", who="admin")
    await d.ask("DELETE", "/v1/runs/failing-1", who="admin")
    await d.look("failing-1")
    await d.journal("failing-1")


async def diverging(d: Driver) -> None:
    run = await d.begin("diverging")
    told = {"path": "2", "recorded": "step a", "performed": "step b", "source": "x.py:1"}
    await d.put(run, step("1"), begun("2"), after=2, then={"type": "diverge", "divergence": told})
    await d.put(run, step("1"), begun("2"), after=2, then={"type": "diverge", "divergence": told})
    await d.look("diverging-1")
    await d.ask("DELETE", "/v1/runs/diverging-1", who="admin")
    word = {"path": "2", "outcome": "OK", "value": inline(1), "error": None}
    await d.ask("POST", "/v1/runs/diverging-1/retry", {"resolves": [word]}, who="admin")
    accepts = {"version": "2", "program_digest": OTHER}
    await d.ask("POST", "/v1/runs/diverging-1/retry", {"accepts": accepts}, who="admin")
    await d.lease("diverging", wait_ms=0)
    await d.look("diverging-1")
    offered = [{"name": "diverging", "version": "2", "program_digest": OTHER}]
    (run,) = await d.lease(procedures=offered)
    await d.put(run, failed("2", "INTERRUPTED"), after=run["sequence_number"], then=fail())
    await d.ask("POST", "/v1/runs/diverging-1/retry", {"resolves": [word]}, who="admin")
    (run,) = await d.lease(procedures=offered)
    await d.put(run, after=run["sequence_number"], then={"type": "release", "reason": "stopping"})
    await d.put(run, after=run["sequence_number"], then={"type": "release", "reason": "stopping"})
    (run,) = await d.lease(procedures=offered)
    await d.put(run, after=run["sequence_number"], then=complete(2))
    await d.journal("diverging-1")


async def forking(d: Driver) -> None:
    run = await d.begin("forking")
    changes = [{"op": "set", "at": "/n", "to": 1}]
    await d.put(run, step("1", state_change=changes), after=2, then=tool("2"))
    await d.put(run, step("3", state_change=[{"op": "set", "at": "/n", "to": 2}]), ask("4"), after=5, then=suspend("4"))
    await d.ask("POST", "/v1/runs/forking-1/fork", {"at": 99})
    await d.ask(
        "POST",
        "/v1/runs/forking-1/fork",
        {"at": 5, "run_id": "fork-5", "state_change": [{"op": "set", "at": "/m", "to": 3}]},
    )
    await d.ask("POST", "/v1/runs/forking-1/fork", {"at": 5, "run_id": "fork-5"})
    (fork,) = await d.lease("forking")
    await d.ask("GET", "/v1/runs/fork-5/state")
    await d.journal("fork-5")
    await d.ask("GET", "/v1/runs/fork-5/checkpoints?after_seq=-2&limit=2", who="worker")
    await d.put(fork, step("2"), after=2)
    await d.put(fork, step("3"), after=2)
    await d.ask("POST", "/v1/runs/fork-5/fork", {"run_id": "fork-of-fork"})
    (second,) = await d.lease("forking")
    await d.journal("fork-of-fork")
    await d.put(second, after=2, then=complete(3))
    await d.ask("POST", "/v1/runs/forking-1/fork", {"run_id": "fork-last"})
    (third,) = await d.lease("forking")
    await d.put(third, ask("4"), after=2, then=suspend("4"))
    await d.answer("forking-1", "4", True)
    await d.ask("POST", "/v1/runs/forking-1/fork", {"run_id": "fork-last"})
    await d.look("fork-last")
    await d.look("forking-1")


async def strict(d: Driver) -> None:
    """What a start said of determinism every lease says again, of a fork too; a repeat does not change it."""
    await d.register("strict")
    await d.start("strict", "strict-0", strict_determinism="yes")
    await d.start("strict", "strict-1", strict_determinism=True)
    await d.start("strict", "strict-1")
    (run,) = await d.lease("strict")
    await d.put(run, ask("1"), after=2, then=suspend("1"))
    await d.journal("strict-1")
    await d.answer("strict-1", "1", True)
    await d.lease("strict")
    await d.ask("POST", "/v1/runs/strict-1/fork", {"at": 2, "run_id": "strict-fork"})
    await d.lease("strict")
    await d.start("strict", "strict-2", strict_determinism=False)
    await d.lease("strict")


async def seen_more(d: Driver) -> None:
    """A worker that has seen more of the journal than the store has is stopped: it goes by what was lost."""
    run = await d.begin("seen")
    await d.put(run, step("1"), after=2)
    await d.put(run, step("2"), after=9)
    beat = {"run_id": "seen-1", "lease": run["lease"], "after_seq": 9}
    said = {"worker": d.worker, "name": "here", "runs": [beat]}
    await d.ask("POST", "/v1/worker/heartbeat", said, who="worker")
    await d.journal("seen-1")


async def heartbeats(d: Driver) -> None:
    run = await d.begin("beating")

    async def beat(*runs: Any, **more: Any) -> None:
        said = {"worker": d.worker, "name": "here", "runs": list(runs), **more}
        await d.ask("POST", "/v1/worker/heartbeat", said, who="worker")

    mine = {"run_id": "beating-1", "lease": run["lease"], "after_seq": 2}
    await beat(mine)
    await d.ask("POST", "/v1/runs/beating-1/signals", {"name": "paid", "value": 1, "signal_id": "s-1"})
    await beat(mine, {"run_id": "nobody", "lease": "x" * 32}, {**mine, "lease": "y" * 32})
    await beat(mine, worker="short")
    await beat({"run_id": "a/b", "lease": "x" * 32})
    one = {"worker": d.worker, "name": "here", "runs": [mine]}
    await d.ask("POST", "/v1/runs/beating-1/heartbeat", one, who="worker")
    await d.ask("POST", "/v1/runs/beating-2/heartbeat", one, who="worker")
    nobody = {**one, "runs": [{"run_id": "nobody", "lease": "x" * 32}]}
    await d.ask("POST", "/v1/runs/nobody/heartbeat", nobody, who="worker")
    await d.ask("POST", "/v1/runs/beating-1/cancel")
    await beat(mine)
    await d.lease("beating", wait_ms=0)
    await d.lease("beating", wait_ms=60_001)
    await d.lease("beating", slots=0)
    await d.lease(procedures=[])


async def losing(d: Driver) -> None:
    """A worker that is not heard of loses its run; too often, and the run is parked."""
    await d.register("losing", policy={"park_after": 2})
    await d.start("losing", "losing-1")
    (run,) = await d.lease("losing", worker="worker-that-dies-1")
    await d.pass_ms(1_001)
    (again,) = await d.lease("losing", worker="worker-that-dies-2")
    await d.put(run, step("1"), after=2)
    await d.pass_ms(1_001)
    while (await d.ask("GET", "/v1/runs/losing-1"))["state"] != "PARKED":
        d.notes.pop()
        await asyncio.sleep(0.05)
    await d.put(again, step("1"), after=4)
    await d.ask("POST", "/v1/runs/losing-1/retry", {}, who="admin")
    (run,) = await d.lease("losing", worker="worker-that-lives")
    await d.put(run, after=run["sequence_number"], then=complete(0))
    await d.journal("losing-1")


async def running_out(d: Driver) -> None:
    run = await d.begin("late", timeout_ms=3_000)
    await d.pass_ms(3_000)
    while (await d.ask("GET", "/v1/runs/late-1"))["state"] != "FAILED":
        d.notes.pop()
        await asyncio.sleep(0.05)
    await d.put(run, step("1"), after=2)
    await d.journal("late-1")


async def calling(d: Driver) -> None:
    """Calls of tools outside of runs."""

    async def call(name: str = "charge", **more: Any) -> Any:
        said = {"server_id": "bank", "tool_name": name, "arguments": {"amount": 7}, **more}
        answer = await d.ask("POST", "/v1/tool-calls", said)
        effect = answer.get("tool_effect")
        if effect is not None:  # the whole record of the attempts stands on the ledger only
            answer["tool_effect"] = {one: effect[one] for one in ("outcome", "basis")}
            answer["tool_effect"]["output"] = sorted(effect["output"]["value"])
            answer["tool_effect"]["has_failed"] = effect["error"] is not None
        return answer

    await call(idempotency_key="k-1")
    await call(idempotency_key="k-1")
    await call(idempotency_key="k-1", arguments={"amount": 8})
    await call()
    await call("nothing", idempotency_key="k-2")
    await call("balance", arguments={})
    await call(idempotency_key="run:x/1")
    await call(idempotency_key=" k")
    await call(arguments=[])


async def events(d: Driver) -> None:
    await d.register("told", triggers=[{"event": "user.created"}])
    await d.ask("POST", "/v1/triggers/user.created", {"event_id": "e-1", "payload": {"a": 1}})
    await d.ask("POST", "/v1/triggers/user.created", {"event_id": "e-1", "payload": {"a": 1}})
    await d.ask("POST", "/v1/triggers/nothing", {"event_id": "e-1"})
    await d.ask("POST", "/v1/triggers/user.created", {})
    await d.look("told:e-1")


async def schedules(d: Driver) -> None:
    """Made, changed, listed, fired once, and removed. The one that fires is due every second, and is removed after."""
    schema = {"type": "object", "properties": {"day": {"type": "integer"}}}
    await d.register("nightly", input_schema=schema)
    cron = {"type": "cron", "expression": "30 2 29 2 *", "time_zone": "Europe/Berlin"}

    async def put(name: str, **more: Any) -> Any:
        return await d.ask("PUT", f"/v1/schedules/{name}", {"procedure": "nightly", "spec": cron, "input": {}, **more})

    await put("s-1", input={"day": 1})
    await put("s-1", input={"day": 1})
    await put("s-1", input={"day": 2}, missed="all")
    await put("s-2", version="1")
    await put("s-3", procedure="nobody")
    await put("s-3", version="2")
    await put("s-3", input={"day": "x"})
    await put("s-3", spec={**cron, "time_zone": "Europe/Nowhere"})
    await put("s-3", spec={**cron, "expression": "30 2 * *"})
    await put("s-3", spec={**cron, "expression": "61 2 * * *"})
    await put("s-3", spec={**cron, "expression": "0 0 31 2 *"})
    await put("s-3", spec={"type": "interval", "every_ms": 999})
    await put("s-3", missed="never")
    await d.ask("GET", "/v1/schedules/s-1")
    await d.ask("GET", "/v1/schedules/s-3")
    await d.ask("DELETE", "/v1/schedules/s-1")
    await d.ask("DELETE", "/v1/schedules/s-1")
    await put("s-4", spec={"type": "interval", "every_ms": 31_536_000_000})
    await put("s-5", spec={"type": "interval", "every_ms": 1_000}, input={"day": 3})
    await d.pass_ms(1_100)
    while True:
        found = await d.ask("GET", "/v1/schedules/s-5")
        if found["last_run_id"] is not None:
            break
        d.notes.pop()
        await asyncio.sleep(0.05)
    await d.ask("DELETE", "/v1/schedules/s-5")
    await d.look(found["last_run_id"])
    await d.ask("GET", "/v1/schedules?limit=10", who="admin")


async def lines(d: Driver) -> None:
    """Workers say which line of the program begins something, or do not."""
    run = await d.begin("lines")
    await d.put(run, {**ask("1:1.1"), "source": "lines.py:3"}, {**sleep("1:2.1", FAR), "source": "lines.py:4"}, after=2)
    await d.put(run, {**ask("1:1.1"), "source": "lines.py:3"}, {**sleep("1:2.1", FAR), "source": "lines.py:4"}, after=2)
    await d.put(run, signal("1:3.1", source="lines.py:5"), begun("1:4.1", source="ä.py:6"), signal("1:5.1"), after=4)
    await d.put(run, after=7, then=child("1:6.1", "nobodys", source="lines.py:7"))
    await d.put(run, after=9, then=tool("1:7.1", source="lines.py:8", wait_ms=10_000))
    await d.put(run, signal("1:8.1", source=9), after=11)
    await d.put(run, signal("1:8.1", source="x" * 4_097), after=11)
    await d.put(run, signal("1:8.1", source=None), after=11)
    await d.look("lines-1")
    await d.put(run, after=12, then=suspend("1:1.1", "1:3.1", "1:5.1"))
    await d.look("lines-1")
    await d.journal("lines-1")


LEASES_ARE_SHORT: list[Scenario] = [losing]
SCENARIOS: list[Scenario] = [
    procedures,
    starting,
    puts,
    blobs,
    nesting,
    tools,
    asking,
    holding,
    signals,
    sleeping,
    children,
    failing,
    diverging,
    forking,
    strict,
    heartbeats,
    seen_more,
    running_out,
    calling,
    events,
    schedules,
    lines,
]
