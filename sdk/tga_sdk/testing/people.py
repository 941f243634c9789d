"""People who answer by a script: the questions of runs, approvals of calls; and signals that come at their time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel

from tga_sdk.testing import messages as m
from tga_sdk.testing.problems import Problem
from tga_sdk.testing.run import MemoryRun, Record
from tga_sdk.testing.tools import Call

if TYPE_CHECKING:
    from tga_sdk.testing.gateway import MemoryGateway


class Ask(NamedTuple):
    """A question of a run, as a person sees it."""

    run_id: str
    path: str
    name: str
    form: str
    message: str
    context: Any


@dataclass
class _Rule:
    fits: Callable[[Ask], bool]
    answer: Any
    wrong: Sequence[Any]
    after: float


@dataclass
class _Signal:
    name: str
    value: Any
    after: float
    signal_id: str


@dataclass
class _Decision:
    tool: str
    approves: bool
    after: float
    rationale: str | None


@dataclass
class ScriptedPeople:
    """Who answers what a run asks.

        people = ScriptedPeople({"ship?": True})                       # by the question's name
        people.answer(lambda ask: ask.form == "review", {"decision": "approve"}, after=3600, wrong=["maybe"])
        people.signal("paid", {"amount": 5}, after=60)                  # a minute after the run began
        people.decide("bank.refund", approve=True)                      # a call that waits for an approval

    `after` is in seconds of the gateway's clock. `wrong` is answered first: the gateway refuses what does not fit, and
    the question stays open. An answer that is a function is called with the `Ask`. Who is asked in vain is in
    `refused`: the question, the answer and the code.
    """

    answers: Mapping[str, Any] = field(default_factory=dict)
    name: str = "ada"
    refused: list[tuple[Ask, Any, str]] = field(default_factory=list)
    _rules: list[_Rule] = field(default_factory=list)
    _signals: list[_Signal] = field(default_factory=list)
    _decisions: list[_Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        for name, answer in self.answers.items():
            self.answer(name, answer)

    def answer(
        self, which: str | Callable[[Ask], bool], answer: Any, *, after: float = 0.0, wrong: Sequence[Any] = ()
    ) -> ScriptedPeople:
        """Answer questions of this name, or those for which the function says yes."""
        fits = which if callable(which) else lambda ask: ask.name == which
        self._rules.append(_Rule(fits, answer, wrong, after))
        return self

    def signal(self, name: str, value: Any = None, *, after: float = 0.0) -> ScriptedPeople:
        """Send every run that is started by hand this signal, so many seconds after it began."""
        self._signals.append(_Signal(name, value, after, f"scripted-{len(self._signals) + 1}"))
        return self

    def decide(self, tool: str, *, approve: bool, after: float = 0.0, rationale: str | None = None) -> ScriptedPeople:
        """Approve, or deny, the calls of this tool that wait for a person."""
        self._decisions.append(_Decision(tool, approve, after, rationale))
        return self

    def attend(self, gateway: MemoryGateway) -> None:
        """From now on answer what runs of this gateway ask."""
        gateway.engine.on_change.append(lambda run, record: self._hear(gateway, run, record))
        gateway.tools.on_waiting.append(lambda call: self._hear_call(gateway, call))

    def _hear(self, gateway: MemoryGateway, run: MemoryRun, record: Record) -> None:
        engine, now_ms = gateway.engine, gateway.clock.now_ms()
        if record.artifact_type == "run_start" and record.said["parent"] is None:
            for one in self._signals:
                body = m.SignalBody(name=one.name, value=plain(one.value), signal_id=one.signal_id)
                engine.schedule(now_ms + int(one.after * 1000), partial(self._send, gateway, run, body))
        if record.artifact_type == "run_intent" and record.said["kind"] == "ask":
            request = record.said["request"]
            context = (request["context"] or {}).get("value")
            said = record.said
            ask = Ask(run.run_id, said["path"], said["name"], request["form"], request["message"], context)
            rule = next((one for one in self._rules if one.fits(ask)), None)
            if rule is not None:
                given = rule.answer(ask) if callable(rule.answer) else rule.answer
                for tried in [*rule.wrong, given]:
                    engine.schedule(now_ms + int(rule.after * 1000), partial(self._answer, gateway, ask, plain(tried)))

    def _answer(self, gateway: MemoryGateway, ask: Ask, answer: Any) -> None:
        try:
            gateway.engine.answer(ask.run_id, m.SignalBody(path=ask.path, answer=answer), self.name)
        except Problem as problem:
            self.refused.append((ask, answer, problem.code))

    def _send(self, gateway: MemoryGateway, run: MemoryRun, body: m.SignalBody) -> None:
        try:
            gateway.engine.signal(run.run_id, body, self.name)
        except Problem:
            return  # it has ended meanwhile: it waits for no answer

    def _hear_call(self, gateway: MemoryGateway, call: Call) -> None:
        name = f"{call.server_id}.{call.tool_name}"
        rule = next((one for one in self._decisions if one.tool == name), None)
        if rule is not None:
            due_ms = gateway.clock.now_ms() + int(rule.after * 1000)
            gateway.engine.schedule(due_ms, lambda: self._decide(gateway, call, rule))

    def _decide(self, gateway: MemoryGateway, call: Call, rule: _Decision) -> None:
        if call.state != "PENDING":
            return
        if rule.approves:
            gateway.tools.approve(call, by=self.name, rationale=rule.rationale)
            gateway.begin(call)
        else:
            gateway.tools.deny(call, by=self.name, rationale=rule.rationale)
            gateway.engine.tool_ended(call)
            gateway.notify()


def plain(value: Any) -> Any:
    """A model as the JSON that a person would send."""
    return value.model_dump(mode="json") if isinstance(value, BaseModel) else value
