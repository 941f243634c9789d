"""Any sequence of calls, repeats, decisions, crashes and recoveries; the bank's book says in the end what happened.

What a caller may rely on, in any order: once told of an effect, the same effect for ever; a key is one call; what a
person denied was never executed; and in the end nothing is left hanging.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import dataclass, field

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test

from tests.conftest import IS_SOAK
from tests.crash.world import Answer, GatewayDied, World, new_key

KEYS = 4
Arguments = dict[str, int]
TOOLS: dict[str, Arguments] = {
    "charge": {},
    "slow_charge": {"ms": 30},
    "refund": {},
    "flaky": {"fail_times": 1, "status": 503},
}


@dataclass
class Known:
    """What callers know of one key."""

    key: str = field(default_factory=new_key)
    told: dict[str, Answer] = field(default_factory=dict)  # by payload: the last answer that settles something


class CrashingGateway(RuleBasedStateMachine):
    world: World

    def __init__(self) -> None:
        super().__init__()
        self.database = self.world.make_database()
        self.config = self.world.write_config(max_attempts=50)
        self.known = {(tool, place): Known() for tool in TOOLS for place in range(KEYS)}
        self.gateway = self.world.gateway(self.database, config=self.config)
        self.waiting: list[str] = []
        self.half_decided: set[str] = set()  # a gateway died over the decision

    def teardown(self) -> None:
        try:
            self.restart(None)
            assert self.gateway.ask("recover_all")["failed"] == []
            acknowledged: dict[str, bytes] = {}
            for (tool, _), known in self.known.items():
                for payload in list(known.told):
                    answer = self.call(known, tool, json.loads(payload))
                    if answer.get("effect"):
                        acknowledged[answer["trace_id"]] = answer["effect"].encode()
            self.gateway.exit()
            self.world.verify_all_is_well(self.database, acknowledged)
            denied = "SELECT stream FROM tga.heads WHERE state = 'DENIED'"
            keys = self.database.fetch(f"SELECT idempotency_key FROM tga.claims JOIN ({denied}) AS d USING (stream)")
            assert all(self.world.bank.requests(row["idempotency_key"]) == [] for row in keys)
        finally:
            self.world.drop_database(self.database)

    def restart(self, die_at: int | None) -> None:
        self.gateway.kill()
        self.gateway = self.world.gateway(self.database, config=self.config, die_at=die_at)

    def call(self, known: Known, tool: str, arguments: Arguments) -> Answer:
        answer = self.gateway.call(tool, known.key, **arguments)
        payload = json.dumps(arguments)
        others = [told for other, told in known.told.items() if other != payload]
        if answer.get("error") == "IDEMPOTENCY_KEY_REUSED":
            assert payload not in known.told, "a call that was accepted is refused as another's"
            return answer
        assert "error" not in answer, answer
        assert others == [], "two payloads were accepted under one key"
        if answer["waiting"] is None:
            assert answer["state"] in ("COMPLETED", "DENIED")
        before = known.told.get(payload)
        if before is not None:
            assert answer["trace_id"] == before["trace_id"]
            if before["state"] in ("COMPLETED", "DENIED"):
                assert (answer["state"], answer["effect"]) == (before["state"], before["effect"])
        known.told[payload] = answer
        if answer["waiting"] == "supervisor" and answer["trace_id"] not in self.waiting:
            self.waiting.append(answer["trace_id"])
        return answer

    @rule(
        tool=st.sampled_from(sorted(TOOLS)),
        place=st.integers(min_value=0, max_value=KEYS - 1),
        amount=st.sampled_from([1, 1, 1, 2]),
    )
    def calls(self, tool: str, place: int, amount: int) -> None:
        try:
            self.call(self.known[tool, place], tool, {"amount": amount, **TOOLS[tool]})
        except GatewayDied:
            self.restart(None)

    @precondition(lambda self: self.waiting)
    @rule(decision=st.sampled_from(["APPROVE", "DENY"]), data=st.data())
    def a_person_decides(self, decision: str, data: st.DataObject) -> None:
        trace_id = data.draw(st.sampled_from(self.waiting))
        try:
            answer = self.gateway.ask("decide", trace_id=trace_id, decision=decision)
        except GatewayDied:
            self.half_decided.add(trace_id)
            self.restart(None)
            return
        # A decision that was durable before a crash stands; then the trace may still be on its way.
        refusals = {"STATE_CONCURRENT_EXECUTION"} | ({"ALREADY_DECIDED"} if trace_id in self.half_decided else set())
        assert answer.get("state") in ("COMPLETED", "DENIED") or answer["error"] in refusals
        self.waiting.remove(trace_id)

    @rule(die_at=st.integers(min_value=0, max_value=24))
    def starts_again_to_die_at_a_boundary(self, die_at: int) -> None:
        self.restart(die_at)

    @rule(tool=st.sampled_from(sorted(TOOLS)), place=st.integers(0, KEYS - 1), after_ms=st.integers(0, 40))
    def is_killed_in_the_middle_of_a_call(self, tool: str, place: int, after_ms: int) -> None:
        arguments = {"amount": 1, **TOOLS[tool]}
        self.gateway.send("call", tool=tool, key=self.known[tool, place].key, arguments=arguments)
        time.sleep(after_ms / 1000)
        self.restart(None)

    @rule()
    def recovers(self) -> None:
        with contextlib.suppress(GatewayDied):
            assert self.gateway.ask("recover_all")["failed"] == []
            return
        self.restart(None)


def test_no_sequence_of_crashes_loses_or_doubles_a_call(world: World) -> None:
    class Machine(CrashingGateway):
        pass

    Machine.world = world
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=40 if IS_SOAK else 12,
            stateful_step_count=20,
            deadline=None,
            print_blob=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
