"""What a call is answered with, and what is stored and sent for it, one path at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.core.errors import (
    ArgumentsInvalid,
    CallDenied,
    ChecksumMismatch,
    ConcurrentExecution,
    KeyMissing,
    KeyReused,
    OutcomeUnknown,
    RecoveryFailed,
    SchemaViolation,
    StoreBusy,
    TgaError,
    ToolNotFound,
    TraceNotHeld,
)
from app.domain.identity import Principal
from app.domain.ledger.plans import Plan, PlanGroup
from app.domain.tga import runtime as runtime_module
from app.domain.tga.documents import ToolCall, TraceId
from app.domain.tga.ports import Dispatched, Unknown
from app.domain.tga.supervision import Ruling
from app.domain.tga.transitions import TRACE
from app.postgres import writer as writer_module
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from app.postgres.writer import Writer
from tests.attacker import disarm
from tests.invariants.plans import Admin, plan_of
from tests.patience import HANG_S
from tests.runtime.scripted import (
    REFUSED,
    SUCCESS,
    TIMED_OUT,
    WRITE,
    Scripted,
    call,
    new_key,
    open_scripted,
)
from tests.traces import EXECUTOR, executing_trace, trace_id

PERSON = Principal(principal_id="ada", tenant="default", roles=["supervisor"])
TABLES = ("entries", "artifacts", "heads", "claims", "claim_effects", "execution_checkpoints", "dispatch_attempts")


async def count_rows(admin: Admin) -> dict[str, int]:
    return {
        table: await admin.fetchval(f"SELECT count(*) FROM tga.{table} WHERE stream LIKE 'trace:%'") for table in TABLES
    }


async def decide(scripted: Scripted, asked: TraceId, decision: Any) -> Any:
    digest = (await scripted.traces.load_trace(asked)).state.action_request_digest
    return await scripted.runtime.decide(asked, Ruling(decision, PERSON, digest))


async def interrupted_trace(ledger: PostgresLedger, n: int, *, attempts: int = 1) -> TraceId:
    """What a gateway left that was killed while its call was under way for the n-th time."""
    records = executing_trace(n, server_id="crm", tool_name="create", arguments={"amount": n})
    await ledger.commit(plan_of(records, owner_after=EXECUTOR, with_checkpoint=True))
    for attempt in range(2, attempts + 1):
        await ledger.commit(Plan(TRACE.stream(trace_id(n)), EXECUTOR, EXECUTOR, dispatch_attempt=attempt))
    return trace_id(n)


# Attempts


async def test_the_effect_lists_every_attempt(database: Database) -> None:
    async with open_scripted(database.gateway_url, TIMED_OUT, REFUSED, SUCCESS) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.effect is not None
    assert [(one.attempt, one.result) for one in answer.effect.attempts] == [
        (1, "timed_out"),
        (2, "answered"),  # what was refused first was not sent, and is no attempt
    ]
    assert len({(sent.tool_call_id, sent.idempotency_key) for sent in scripted.connector.sent}) == 1  # I3


@pytest.mark.parametrize(
    ("answers", "basis", "attempts"),
    [
        ([REFUSED], "not_sent", 1),
        ([TIMED_OUT], "unknown", WRITE.max_attempts),
        ([REFUSED, TIMED_OUT], "unknown", WRITE.max_attempts),
        ([TIMED_OUT, REFUSED], "unknown", 2),
        ([Unknown("retryable_answer", "503"), REFUSED], "unknown", 2),
    ],
)
async def test_a_call_that_was_never_sent_is_told_from_one_that_may_have_been(
    database: Database, answers: list[Dispatched], basis: str, attempts: int
) -> None:
    async with open_scripted(database.gateway_url, *answers) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert answer.state == "FAILED"
    assert answer.effect is not None
    assert (answer.effect.basis, len(answer.effect.attempts)) == (basis, attempts)


async def test_attempts_before_a_crash_count(database: Database, ledger: PostgresLedger) -> None:
    interrupted = await interrupted_trace(ledger, 1, attempts=2)
    async with open_scripted(database.gateway_url, TIMED_OUT) as scripted:
        answer = await scripted.runtime.recover(interrupted)
    assert answer.effect is not None
    assert [one.result for one in answer.effect.attempts] == ["interrupted", "interrupted", "timed_out"]
    assert len(scripted.connector.sent) == 1
    assert answer.effect.basis == "unknown"


async def test_waiting_between_attempts_grows_and_heeds_the_server(database: Database) -> None:
    failed = Unknown("retryable_answer", "503")
    later = Unknown("retryable_answer", "429", retry_after_ms=13_000)
    tool = replace(WRITE, max_attempts=5)
    async with open_scripted(database.gateway_url, failed, failed, later, SUCCESS, tool=tool) as scripted:
        await scripted.runtime.call(call(key=new_key()))
    assert scripted.clock.slept_s == [0.2, 0.4, 13.0]


@pytest.mark.parametrize(
    "sign", [TIMED_OUT, Unknown("retryable_answer", "409", is_at_work=True)], ids=["timed out", "409"]
)
async def test_a_tool_that_may_still_be_at_work_is_given_one_more_of_its_time_outs(
    sign: Unknown, database: Database
) -> None:
    """Asking in haste would use up the attempts, and record as unknown what is executed a second later."""
    tool = replace(WRITE, max_attempts=5, timeout_ms=8_000)
    async with open_scripted(database.gateway_url, sign, tool=tool) as scripted:
        answer = await scripted.runtime.call(call(key=new_key()))
    assert scripted.clock.slept_s == [2.0] * 4
    assert answer.effect is not None
    assert answer.effect.basis == "unknown"


# What is stored


async def test_an_allowed_call_is_two_commits_and_a_finished_ones_repeat_stores_nothing(
    database: Database, admin: Admin
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        key = new_key()
        first = await scripted.runtime.call(call(key=key))
        assert [len(plan.entries) for plan in scripted.ledger.plans] == [3, 1]
        assert scripted.ledger.plans[0].claim is not None
        rows = await count_rows(admin)
        again = await scripted.runtime.call(call(key=key))
        assert again.replayed
        assert again.effect == first.effect
        assert await count_rows(admin) == rows
        assert len(scripted.connector.sent) == 1
        with pytest.raises(KeyReused):
            await scripted.runtime.call(call(key=key, amount=2))
        with pytest.raises(KeyReused):
            await scripted.runtime.call(call(key=key, principal=Principal(principal_id="eve", tenant="default")))
        scripted.tools.tools.clear()
        assert (await scripted.runtime.call(call(key=key))).effect == first.effect, (
            "its tool is gone; its effect is not"
        )
    assert await count_rows(admin) == rows


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (call(key=None), KeyMissing),
        (call("nothing", key="k"), ToolNotFound),
        (call(key="k", amount="many"), ArgumentsInvalid),
    ],
)
async def test_a_bad_request_stores_nothing_and_uses_up_nothing(
    database: Database, admin: Admin, wrong: Any, error: type[TgaError]
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        with pytest.raises(error):
            await scripted.runtime.call(wrong)
        assert set((await count_rows(admin)).values()) == {0}
        assert scripted.connector.sent == []
        assert (await scripted.runtime.call(call(key="k"))).state == "COMPLETED"


async def test_a_policys_denial_is_recorded_and_makes_no_claim(database: Database, admin: Admin) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        scripted.supervisor.answer = "deny"
        denied = await scripted.runtime.call(call(key="k"))
        assert denied.state == "DENIED"
        assert len(scripted.ledger.plans) == 1
        rows = await count_rows(admin)
        assert (rows["entries"], rows["claims"]) == (2, 0)
        scripted.supervisor.answer = "allow"
        allowed = await scripted.runtime.call(call(key="k"))
        assert allowed.state == "COMPLETED", "the key was still free"
        scripted.supervisor.answer = "deny"
        with pytest.raises(CallDenied):  # the policy holds for whoever reads the record, too
            await scripted.runtime.call(call(key="k"))
        assert (await count_rows(admin))["entries"] == 6, "and no new trace was made of it"
        scripted.supervisor.answer = "ask"
        repeated = await scripted.runtime.call(call(key="k"))
        assert repeated.effect == allowed.effect, "what was executed is answered from the record"
    assert len(scripted.connector.sent) == 1


async def test_a_repeat_under_its_own_trace_id_is_answered_and_a_strangers_is_not_touched(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        chosen = TraceId(scripted.clock.new_id())
        asked = replace(call(key="k", trace_id=chosen), is_trace_id_chosen=True)
        first = await scripted.runtime.call(asked)
        assert (first.trace_id, first.state) == (chosen, "COMPLETED")
        again = await scripted.runtime.call(asked)
        assert (again.trace_id, again.replayed, again.effect) == (chosen, True, first.effect)
        plans = len(scripted.ledger.plans)
        with pytest.raises(ConcurrentExecution):
            await scripted.runtime.call(replace(asked, idempotency_key="another"))
        assert len(scripted.ledger.plans) == plans, "nothing was begun under it"


async def test_a_persons_denial_is_the_same_for_every_repeat(database: Database) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        scripted.supervisor.answer = "ask"
        asked = await scripted.runtime.call(call(key="k"))
        assert (asked.state, asked.waiting) == ("PENDING", "supervisor")
        assert (await scripted.runtime.call(call(key="k"))).trace_id == asked.trace_id
        denied = await decide(scripted, asked.trace_id, "DENY")
        scripted.supervisor.answer = "allow"
        repeated = await scripted.runtime.call(call(key="k"))
        assert (repeated.state, repeated.decision) == ("DENIED", denied.decision)
    assert scripted.connector.sent == []


# Commits whose answer is lost: each one, and not persisted, but persisted


@pytest.mark.parametrize("persisted", [False, True])
@pytest.mark.parametrize("place", [0, 1, 2])
async def test_an_unknown_commit_is_settled_and_nothing_is_sent_twice_for_it(
    database: Database, admin: Admin, place: int, persisted: bool
) -> None:
    """The intent, the second attempt's row, the effect."""
    async with open_scripted(database.gateway_url, TIMED_OUT, SUCCESS) as scripted:
        lose_answer(scripted, place, persisted=persisted)
        answer = await scripted.runtime.call(call(key="k"))
        assert answer.state == "COMPLETED"
        assert len(scripted.connector.sent) == 2
        assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE owner IS NOT NULL") == 0
        rows = await count_rows(admin)
        assert (rows["entries"], rows["dispatch_attempts"], rows["claim_effects"]) == (4, 1, 1)


@pytest.mark.parametrize("persisted", [False, True])
@pytest.mark.parametrize("waits_for", ["supervisor", "operator"])
async def test_an_unknown_commit_of_a_wait_leaves_the_trace_to_the_person_and_owned_by_nobody(
    database: Database, admin: Admin, waits_for: str, persisted: bool
) -> None:
    tool = replace(WRITE, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, TIMED_OUT, tool=tool) as scripted:
        if waits_for == "supervisor":
            scripted.supervisor.answer = "ask"
        lose_answer(scripted, 0 if waits_for == "supervisor" else 1, persisted=persisted)
        answer = await scripted.runtime.call(call(key="k"))
        assert answer.waiting == waits_for
        (head,) = await admin.fetch("SELECT owner, waiting FROM tga.heads WHERE stream LIKE 'trace:%'")
        assert (head["owner"], head["waiting"]) == (None, waits_for)


async def test_a_lost_claim_after_an_unknown_commit_leaves_no_trace(database: Database, admin: Admin) -> None:
    async with (
        open_scripted(database.gateway_url) as scripted,
        open_scripted(database.gateway_url) as other,
    ):

        async def lose(_: Plan) -> None:
            scripted.ledger.before = None
            await other.runtime.call(call(key="k"))
            raise OutcomeUnknown("the commit's answer was lost")

        scripted.ledger.before = lose
        assert (await scripted.runtime.call(call(key="k"))).replayed
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE stream LIKE 'trace:%'") == 1
    assert len(scripted.connector.sent) + len(other.connector.sent) == 1


def lose_answer(scripted: Scripted, place: int, *, persisted: bool) -> None:
    async def lose(_: Plan) -> None:
        if len(scripted.ledger.plans) == place + 1:
            raise OutcomeUnknown("the commit's answer was lost")

    if persisted:
        scripted.ledger.after = lose
    else:
        scripted.ledger.before = lose


# An executor that lost its id


async def lose_executor(scripted: Scripted, admin: Admin) -> None:
    """End its owner session, and wait until it has a new id."""
    old = scripted.traces.executor_id()
    await admin.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ExclusiveLock'"
        " AND (classid::bigint << 32 | objid::bigint) = tga.executor_lock_key($1::text::uuid)",
        old,
    )
    while True:
        await asyncio.sleep(0.005)
        try:
            if scripted.traces.executor_id() != old:
                return
        except TgaError:
            continue


async def test_what_a_successor_finished_is_not_sent_by_the_predecessor(database: Database, admin: Admin) -> None:
    """I3: the intent is durable, the executor's id dies before the first send, another brings the call to its end."""
    async with (
        open_scripted(database.gateway_url) as scripted,
        open_scripted(database.gateway_url) as successor,
    ):

        async def be_replaced(_: Plan) -> None:
            scripted.ledger.after = None
            await lose_executor(scripted, admin)
            assert [one.error async for one in successor.runtime.recover_all()] == [None]

        scripted.ledger.after = be_replaced
        answer = await scripted.runtime.call(call(key="k"))
        assert answer.state == "COMPLETED"
        assert answer.replayed
        assert scripted.connector.sent == []
        assert len(successor.connector.sent) == 1


async def test_what_a_successor_holds_for_an_operator_is_not_sent_by_the_predecessor(
    database: Database, admin: Admin
) -> None:
    tool = replace(WRITE, on_unknown_outcome="hold")
    async with (
        open_scripted(database.gateway_url, tool=tool) as scripted,
        open_scripted(database.gateway_url, tool=tool) as successor,
    ):

        async def be_replaced(_: Plan) -> None:
            scripted.ledger.after = None
            await lose_executor(scripted, admin)
            assert [one.error async for one in successor.runtime.recover_all()] == [None]

        scripted.ledger.after = be_replaced
        answer = await scripted.runtime.call(call(key="k"))
        assert answer.waiting == "operator"
        assert scripted.connector.sent == successor.connector.sent == []


async def test_what_a_successor_ended_without_an_attempt_is_not_sent_again(database: Database, admin: Admin) -> None:
    """Its attempts were used up by its own count: no row stands in the way of the predecessor's retry."""
    async with (
        open_scripted(database.gateway_url, TIMED_OUT, SUCCESS) as scripted,
        open_scripted(database.gateway_url, tool=replace(WRITE, max_attempts=1)) as successor,
    ):

        async def be_replaced(_: ToolCall) -> Dispatched:
            await lose_executor(scripted, admin)
            assert [one.error async for one in successor.runtime.recover_all()] == [None]
            return TIMED_OUT

        scripted.connector.answers[0] = be_replaced
        answer = await scripted.runtime.call(call(key="k"))
        assert answer.state == "FAILED"
        assert answer.effect is not None
        assert answer.effect.basis == "unknown"
        assert (len(scripted.connector.sent), len(successor.connector.sent)) == (1, 0)
    assert await admin.fetchval("SELECT count(*) FROM tga.dispatch_attempts") <= 1
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE owner IS NOT NULL") == 0


async def test_a_retry_is_owned_by_an_id_that_lives(database: Database, admin: Admin) -> None:
    """Otherwise everyone might take the trace while the call is on its way."""
    owners: list[str | None] = []
    async with open_scripted(database.gateway_url, TIMED_OUT, SUCCESS) as scripted:

        async def look(_: ToolCall) -> Dispatched:
            owners.append(await admin.fetchval("SELECT owner::text FROM tga.heads WHERE stream LIKE 'trace:%'"))
            assert owners == [scripted.traces.executor_id()]
            return SUCCESS

        async def lose(_: Plan) -> None:
            if len(scripted.ledger.plans) == 2:
                await lose_executor(scripted, admin)

        scripted.ledger.before = lose
        scripted.connector.answers[1] = look
        assert (await scripted.runtime.call(call(key="k"))).state == "COMPLETED"
    assert len(owners) == 1


# Callers


async def test_a_caller_who_gives_up_does_not_interrupt_the_call(database: Database) -> None:
    sent, go_on = asyncio.Event(), asyncio.Event()

    async def slow(_: ToolCall) -> Dispatched:
        sent.set()
        await go_on.wait()
        return SUCCESS

    async with open_scripted(database.gateway_url, slow) as scripted:
        caller = asyncio.create_task(scripted.runtime.call(call(key="k")))
        await sent.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        repeat = asyncio.create_task(scripted.runtime.call(call(key="k")))
        await asyncio.sleep(0.02)
        go_on.set()
        assert (await repeat).state == "COMPLETED"
        assert len(scripted.connector.sent) == 1


# Recovery


async def test_a_poisoned_trace_is_reported_and_never_sent_and_does_not_stop_the_others(
    database: Database, admin: Admin, ledger: PostgresLedger
) -> None:
    for n in range(5):
        await interrupted_trace(ledger, n, attempts=2)
    await disarm(admin)
    await admin.execute(
        "UPDATE tga.artifacts SET artifact = replace(convert_from(artifact, 'UTF8'), '\"amount\":1', '\"amount\":9')"
        "::text::bytea WHERE stream = $1 AND sequence_number = 3",
        TRACE.stream(trace_id(1)),
    )
    await admin.execute(
        'UPDATE tga.dispatch_attempts SET resolution = \'{"action":"now"}\' WHERE stream = $1',
        TRACE.stream(trace_id(3)),
    )
    async with open_scripted(database.gateway_url) as scripted:
        recovered = {one.trace_id: one async for one in scripted.runtime.recover_all()}
        assert isinstance(recovered[trace_id(1)].error, ChecksumMismatch)
        assert isinstance(recovered[trace_id(3)].error, SchemaViolation)
        fine = {trace_id(n) for n in (0, 2, 4)}
        assert {one for one, result in recovered.items() if result.error is None} == fine
        assert {sent.trace_id for sent in scripted.connector.sent} == fine
        with pytest.raises(ChecksumMismatch):
            await scripted.runtime.call(call(key="key-1"))
    assert await admin.fetchval("SELECT count(*) FROM tga.heads WHERE owner IS NOT NULL") == 0


async def test_a_trace_whose_tool_is_gone_is_left_as_it_is(
    database: Database, admin: Admin, ledger: PostgresLedger
) -> None:
    interrupted = await interrupted_trace(ledger, 1)
    rows = await count_rows(admin)
    async with open_scripted(database.gateway_url) as scripted:
        kept = dict(scripted.tools.tools)
        scripted.tools.tools.clear()
        with pytest.raises(RecoveryFailed):
            await scripted.runtime.recover(interrupted)
        assert [type(one.error) async for one in scripted.runtime.recover_all()] == [RecoveryFailed]
        assert await count_rows(admin) == rows
        assert scripted.connector.sent == []
        scripted.tools.tools.update(kept)
        assert (await scripted.runtime.recover(interrupted)).state == "COMPLETED"


# The writer


class HeldLedger(PostgresLedger):
    """Commits only when told."""

    def __init__(self, sessions: Sessions) -> None:
        super().__init__(sessions)
        self.gate = asyncio.Event()
        self.batches: list[int] = []

    async def commit_groups(self, groups: Sequence[PlanGroup]) -> list[TgaError | None]:
        plans = sum(len(group.plans) for group in groups)
        self.batches.append(plans)
        await self.gate.wait()
        return [None] * plans


def some_plan(n: int) -> Plan:
    return Plan(f"trace:{n}", EXECUTOR, None)


async def test_a_writer_with_too_much_waiting_refuses_at_once(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WRITER_QUEUE_PLANS_MAX", 3)
    held = HeldLedger(sessions)
    writer = Writer(held)
    waiting = [asyncio.create_task(writer.commit(some_plan(0)))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    waiting += [asyncio.create_task(writer.commit(some_plan(n))) for n in range(1, 4)]
    await asyncio.sleep(0)
    with pytest.raises(StoreBusy):
        await writer.commit(some_plan(4))
    held.gate.set()
    await asyncio.gather(*waiting)
    assert held.batches == [1, 3], "what arrived while a commit was in flight went together in the next"
    await writer.commit(some_plan(5))


@pytest.mark.parametrize("steps", range(12))
async def test_a_plan_that_arrives_as_a_batch_ends_is_not_forgotten(sessions: Sessions, steps: int) -> None:
    """At every step of the loop around the moment at which the writer has nothing left to do."""
    held = HeldLedger(sessions)
    writer = Writer(held)
    first = asyncio.create_task(writer.commit(some_plan(0)))
    while not held.batches:
        await asyncio.sleep(0)

    async def commit_after(read_scheduler: int) -> None:
        for _ in range(read_scheduler):
            await asyncio.sleep(0)
        await writer.commit(some_plan(1))

    held.gate.set()
    await asyncio.wait_for(asyncio.gather(first, commit_after(steps)), timeout=HANG_S)
    assert held.batches == [1, 1]


async def test_what_waits_is_on_its_way_before_the_callers_of_the_batch_before_it_go_on(sessions: Sessions) -> None:
    held = HeldLedger(sessions)
    writer = Writer(held)
    held.gate.set()
    on_their_way: list[int] = []

    async def commit_twice(n: int) -> None:
        await writer.commit(some_plan(n))
        on_their_way.append(len(held.batches))
        await writer.commit(some_plan(1_000 + n))

    await asyncio.gather(*(commit_twice(n) for n in range(120)))
    assert held.batches[:2] == [64, 56]
    assert on_their_way[0] == 2


async def test_another_session_takes_what_waits_long_behind_a_commit_and_no_more_than_three_do(
    sessions: Sessions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer_module, "WRITER_WAIT_MS", 60_000)
    held = HeldLedger(sessions)
    writer = Writer(held)
    waiting: list[asyncio.Task[None]] = []

    async def ask(n: int) -> None:
        waiting.append(asyncio.create_task(writer.commit(some_plan(n))))
        for _ in range(5):
            await asyncio.sleep(0)

    for n in range(4):
        await ask(n)
    assert held.batches == [1], "the others wait behind the first, which has not taken long"
    monkeypatch.setattr(writer_module, "WRITER_WAIT_MS", 0)
    for n in range(4, 8):
        await ask(n)
    assert held.batches == [1, 4, 1], "no fourth session, however long they wait"
    held.gate.set()
    await asyncio.gather(*waiting)
    assert held.batches == [1, 4, 1, 2]


async def test_what_waits_behind_a_commit_that_takes_long_does_not_wait_for_another_caller(sessions: Sessions) -> None:
    held = HeldLedger(sessions)
    writer = Writer(held)
    waiting = []
    for n in range(3):
        waiting.append(asyncio.create_task(writer.commit(some_plan(n))))
        async with asyncio.timeout(HANG_S):
            while len(held.batches) <= n:
                await asyncio.sleep(0.001)
    held.gate.set()
    await asyncio.gather(*waiting)
    assert held.batches == [1, 1, 1]


async def test_plans_that_come_together_are_one_task_for_the_writer(sessions: Sessions) -> None:
    held = HeldLedger(sessions)
    writer = Writer(held)
    waiting = [asyncio.create_task(writer.commit(some_plan(n))) for n in range(3)]
    await asyncio.sleep(0)
    assert len(writer._flushers) == 1
    held.gate.set()
    await asyncio.gather(*waiting)


@pytest.mark.parametrize("steps", range(8))
async def test_whoever_interrupts_a_writer_keeps_nobody_waiting(sessions: Sessions, steps: int) -> None:
    held = HeldLedger(sessions)
    writer = Writer(held)
    waiting = [asyncio.create_task(writer.commit(some_plan(n))) for n in range(120)]
    async with asyncio.timeout(HANG_S):
        while len(held.batches) < 2:
            await asyncio.sleep(0.001)
    flushers = list(writer._flushers)
    held.gate.set()
    for _ in range(steps):
        await asyncio.sleep(0)
    for flusher in flushers:
        flusher.cancel()
    done, pending = await asyncio.wait(waiting, timeout=HANG_S)
    assert (len(done), pending) == (120, set())
    if steps:
        assert not any(task.cancelled() for task in done), "what is committed is answered as committed"


async def test_a_refused_call_can_be_made_again(
    database: Database, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_scripted(database.gateway_url) as scripted:
        monkeypatch.setattr(writer_module, "WRITER_QUEUE_PLANS_MAX", 0)
        with pytest.raises(StoreBusy):
            await scripted.runtime.call(call(key="k"))
        assert set((await count_rows(admin)).values()) == {0}
        monkeypatch.undo()
        assert (await scripted.runtime.call(call(key="k"))).state == "COMPLETED"


async def test_an_operator_cannot_have_a_call_sent_more_often_than_the_record_can_say(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime_module, "ATTEMPTS_MAX", 2)
    tool = replace(WRITE, on_unknown_outcome="hold")
    async with open_scripted(database.gateway_url, TIMED_OUT, tool=tool) as scripted:
        held = await scripted.runtime.call(call(key="k"))
        digest = (await scripted.traces.load_trace(held.trace_id)).state.tool_call_digest
        said: Any = {"tool_call_digest": digest, "resolved_by": "olga", "rationale": ""}
        again = await scripted.runtime.resolve(held.trace_id, action="redispatch", **said)
        assert (again.waiting, len(scripted.connector.sent)) == ("operator", 2)
        with pytest.raises(TraceNotHeld, match="too often"):
            await scripted.runtime.resolve(held.trace_id, action="redispatch", **said)
        assert len(scripted.connector.sent) == 2
        ended = await scripted.runtime.resolve(held.trace_id, action="failed", **said)
        assert ended.state == "FAILED"
