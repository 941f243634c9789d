"""The policy: Cedar rules on who may call which tool with which arguments, and start which procedure with which input,
parsed once, asked at every request.

`call` not allowed: deny. `call` allowed, `call_unattended` not: ask a person. Both: allow. What no policy permits is
denied. Cedar skips a policy that it cannot evaluate, a `forbid` among them, so that arguments which make a `forbid`
fail would pass it: here any policy that cannot be evaluated denies, whatever the others say.

A decision depends on nothing but what Cedar is told, and Cedar is told only what some rule reads, so a decision is
remembered by that: most policies read who and what, and few arguments.

`start` not allowed: the run is not started. `submit` not allowed: the program is not stored. No person is asked.

`approve` is what a person does whose role already admits it. The policy only narrows that: a `forbid` denies, and a
file with a `permit` that names Action::"approve" denies what none of them permits. A file without one allows it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import orjson
from cedarpy import AuthzResult, Decision, PolicySet, is_authorized_batch, policies_to_json_str

from app.core.digest import Digest, digest_of_bytes
from app.core.errors import InputTooLarge, PolicyInvalid
from app.core.limits import POLICY_IDS_MAX, POLICY_MEMORY_CONTEXT_BYTES_MAX, POLICY_MEMORY_VERDICTS_MAX
from app.domain.identity import Principal
from app.domain.policy.encoding import (
    Uid,
    context_of,
    context_of_start,
    principal_entity,
    principal_uid,
    procedure_entity,
    procedure_uid,
    tool_entity,
    tool_uid,
)
from app.domain.policy.fitting import find_misfits
from app.domain.policy.question import AskedCall, AskedStart, AskedSubmission, Verdict
from app.domain.policy.reach import relaxed
from app.domain.policy.rules import Action, Rule, arguments_read, context_read, find_mistakes, find_warnings, read_rules
from app.domain.policy.source import Statement, place_of_error, read_statements
from app.domain.tools import Tool

_MISTAKES_TOLD_MAX: Final = 5
_NAMES_TOLD_MAX: Final = 5
_REASON_CHARS_MAX: Final = 200
_ERROR: Final = re.compile(r"error while evaluating policy `(policy[0-9]+)`: (.*)", re.DOTALL)
# What Cedar says when it cannot evaluate a policy may quote arguments. These forms quote only the policy itself.
_TELLABLE: Final = re.compile(
    r"type error: expected [\w ,:()\[\]`]+, got [\w :()`]+|record does not have the attribute `[^`]*`"
    r"|recursion limit reached"
)
_UNTELLABLE: Final = (
    ("integer overflow", "integer overflow"),
    ("extension function", "a text or number cannot be read"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Why nothing can be said: the rule that could not be evaluated; none if it was the request. Quotes no argument."""

    rule: Rule | None
    reason: str

    def __str__(self) -> str:
        if self.rule is None:
            return self.reason
        return f"{self.rule.name} could not be evaluated: {self.reason}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the policy says about one action. `determining`: the rules that decided; none when nothing permits it."""

    action: Action
    is_allowed: bool
    determining: tuple[Rule, ...] = ()
    faults: tuple[Fault, ...] = ()

    def why_not(self) -> str:
        told = [str(fault) for fault in self.faults[:_NAMES_TOLD_MAX]]
        if self.determining:
            told.insert(0, f"forbidden by {_listed([rule.name for rule in self.determining])}")
        return "; ".join(told) or f"no policy permits {_TOLD[self.action]}"


_TOLD: Final[dict[Action, str]] = {
    "call": "this call",
    "call_unattended": "this call unattended",
    "approve": "this approval",
    "start": "this start",
    "submit": "this submission",
}


@dataclass(frozen=True, slots=True)
class Question:
    """Requests to Cedar, and the entities that they are about."""

    requests: list[dict[str, Any]]
    entities: str


class CedarPolicy:
    """A policy file's text, parsed and checked. Raises PolicyInvalid with the line. It never changes."""

    def __init__(self, text: str, *, name: str = "policy") -> None:
        statements = read_statements(text, name=name)
        if not statements:
            raise PolicyInvalid(
                f"{name} has no policy", remedy="To deny everything, write: forbid(principal, action, resource);"
            )
        self._set, policies = _parsed(text, statements, name)
        self.text: Final = text
        self.digest: Final[Digest] = digest_of_bytes(text.encode("utf-8"))
        self.rules: Final[Sequence[Rule]] = tuple(_rules_of(policies, statements, name))
        self.warnings: Final[Sequence[str]] = tuple(find_warnings(self.rules))
        self._by_id = {rule.cedar_id: rule for rule in self.rules}
        self._arguments_read = arguments_read(self.rules)
        self._context_read = context_read(self.rules)
        self._judged: dict[Hashable, Verdict] = {}
        self._relaxed: PolicySet | None = None
        self._permits_approvals = any(r.effect == "permit" and r.names_action("approve") for r in self.rules)

    def misfits(self, tools: Iterable[Tool], *, undiscovered: Collection[str] = ()) -> list[str]:
        """Rules that can never match with these tools, as `find_misfits` tells of them; `warnings` need no tools."""
        return find_misfits(self.rules, tools, undiscovered=undiscovered)

    def judge(self, request: AskedCall, tool: Tool) -> Verdict:
        """Allow, ask or deny; never raises, and allows only on Cedar's explicit word for both actions."""
        seen = self._all_that_decides(request, tool)
        if seen is None or (verdict := self._judged.get(seen)) is None:
            outcomes = self.outcomes(request, tool)
            verdict = self.verdict_of(*outcomes)
            if seen is not None and not any(outcome.faults for outcome in outcomes):
                self._remember(seen, verdict)
        return verdict

    def might_allow(self, principal: Principal, tools: Sequence[Tool]) -> list[bool]:
        """Of each tool, whether there may be arguments with which the principal could call it; False is certain, and
        True promises nothing (app/domain/policy/reach.py). One question for all of them; never raises."""
        if not tools:
            return []
        asks = principal_uid(principal)
        action, context = {"type": "Action", "id": "call"}, '{"arguments":{}}'
        requests = [
            {"principal": asks, "action": action, "resource": tool_uid(tool), "context": context} for tool in tools
        ]
        try:
            if self._relaxed is None:
                self._relaxed = relaxed(self.rules)
            entities = orjson.dumps([principal_entity(principal), *map(tool_entity, tools)]).decode()
            results = is_authorized_batch(requests, self._relaxed, entities)
            return [result.decision is not Decision.Deny or bool(result.diagnostics.errors) for result in results]
        except Exception:
            return [True] * len(tools)  # they are decided on all the same when they are called

    def _all_that_decides(self, request: AskedCall, tool: Tool) -> Hashable | None:
        """All that Cedar is told of a request: what is the same in this is judged the same. None: too much to keep."""
        context = b""
        if self._arguments_read != frozenset() or self._context_read != frozenset():
            try:
                context = orjson.dumps(self._context_of(request), option=orjson.OPT_SORT_KEYS)
            except Exception:
                return None  # asking says what is wrong with it
            if len(context) > POLICY_MEMORY_CONTEXT_BYTES_MAX:
                return None
        asks = request.principal
        roles = None if asks.roles is None else tuple(asks.roles)
        known = (tool.server_id, tool.tool_name, tool.tool_class, tool.tags, tool.tenant)
        return request.server_id, request.tool_name, asks.principal_id, asks.tenant, roles, known, context

    def _all_that_decides_a_start(self, asked: AskedStart) -> Hashable | None:
        """As `_all_that_decides`. What triggered a run differs in each: a policy that reads it is asked each time."""
        context = b""
        if self._context_read is None or "trigger" in self._context_read:
            return None
        if "input" in self._context_read:
            try:
                told = context_of_start(asked, fields=self._context_read)["input"]
                context = orjson.dumps(told, option=orjson.OPT_SORT_KEYS)
            except Exception:
                return None  # asking says what is wrong with it
            if len(context) > POLICY_MEMORY_CONTEXT_BYTES_MAX:
                return None
        asks = asked.principal
        roles = None if asks.roles is None else tuple(asks.roles)
        known = (asked.procedure, asked.version, asked.program_digest, tuple(asked.tags))
        return "start", asks.principal_id, asks.tenant, roles, known, context

    def _remember(self, seen: Hashable, verdict: Verdict) -> None:
        if len(self._judged) >= POLICY_MEMORY_VERDICTS_MAX:
            del self._judged[next(iter(self._judged))]
        self._judged[seen] = verdict

    def _context_of(self, request: AskedCall) -> dict[str, Any]:
        return context_of(request, arguments=self._arguments_read, fields=self._context_read)

    def outcomes(self, request: AskedCall, tool: Tool) -> tuple[Outcome, Outcome]:
        """For `call` and `call_unattended`."""
        call, unattended = self._ask(request, tool, request.principal, ("call", "call_unattended"))
        return call, unattended

    def verdict_of(self, call: Outcome, unattended: Outcome) -> Verdict:
        if not call.is_allowed:
            return self._verdict("deny", call.why_not(), (call,))
        if not unattended.is_allowed:
            return self._verdict("ask", unattended.why_not(), (call, unattended))
        return self._verdict("allow", None, (call, unattended))

    def judge_approval(self, request: AskedCall, tool: Tool, approver: Principal) -> Verdict:
        """Allow or deny, as the module says; never raises."""
        (outcome,) = self._ask(request, tool, approver, ("approve",))
        silent = not (outcome.is_allowed or outcome.faults or outcome.determining or self._permits_approvals)
        if outcome.is_allowed or silent:
            return self._verdict("allow", None, (outcome,))
        return self._verdict("deny", outcome.why_not(), (outcome,))

    def judge_start(self, asked: AskedStart) -> Verdict:
        """Allow or deny; never raises, and allows only on Cedar's explicit word."""
        seen = self._all_that_decides_a_start(asked)
        if seen is None or (verdict := self._judged.get(seen)) is None:
            outcome = self.start_outcome(asked)
            verdict = self.verdict_of_start(outcome)
            if seen is not None and not outcome.faults:
                self._remember(seen, verdict)
        return verdict

    def start_outcome(self, asked: AskedStart) -> Outcome:
        (outcome,) = self._put(
            ("start",), lambda: self.start_question(asked), too_large="the input holds too many values"
        )
        return outcome

    def verdict_of_start(self, outcome: Outcome) -> Verdict:
        if outcome.is_allowed:
            return self._verdict("allow", None, (outcome,))
        return self._verdict("deny", outcome.why_not(), (outcome,))

    def start_question(self, asked: AskedStart) -> Question:
        """What is put to Cedar. Raises what encoding raises."""
        entities = [principal_entity(asked.principal), procedure_entity(asked)]
        request = {
            "principal": principal_uid(asked.principal),
            "action": {"type": "Action", "id": "start"},
            "resource": procedure_uid(asked),
            "context": orjson.dumps(context_of_start(asked, fields=self._context_read)).decode(),
        }
        return Question([request], orjson.dumps(entities).decode())

    def judge_submission(self, asked: AskedSubmission) -> Verdict:
        """Allow or deny; never raises, and allows only on Cedar's explicit word."""
        (outcome,) = self._put(
            ("submit",), lambda: self.submission_question(asked), too_large="the program says too much of itself"
        )
        return self.verdict_of_start(outcome)

    def submission_question(self, asked: AskedSubmission) -> Question:
        """What is put to Cedar. Raises what encoding raises."""
        entities = [principal_entity(asked.principal), procedure_entity(asked)]
        request = {
            "principal": principal_uid(asked.principal),
            "action": {"type": "Action", "id": "submit"},
            "resource": procedure_uid(asked),
            "context": orjson.dumps({"language": asked.language}).decode(),
        }
        return Question([request], orjson.dumps(entities).decode())

    def _verdict(self, answer: Any, rationale: str | None, outcomes: Iterable[Outcome]) -> Verdict:
        names = {rule.name: None for o in outcomes for rule in (*o.determining, *_faulty(o))}
        return Verdict(answer, self.digest, tuple(names)[:POLICY_IDS_MAX], rationale)

    def _ask(self, request: AskedCall, tool: Tool, principal: Principal, actions: Sequence[Action]) -> list[Outcome]:
        if (request.server_id, request.tool_name) != (tool.server_id, tool.tool_name):
            return _nothing_said(actions, "the request is for another tool")
        make = partial(self.question, request, tool, principal, actions)
        return self._put(actions, make, too_large="the arguments that the policy reads hold too many values")

    def _put(self, actions: Sequence[Action], make: Callable[[], Question], *, too_large: str) -> list[Outcome]:
        """Cedar's answers to the question that `make` makes."""
        try:
            question = make()
            results = is_authorized_batch(question.requests, self._set, question.entities)
            return [self._outcome(action, result) for action, result in zip(actions, results, strict=True)]
        except InputTooLarge:
            return _nothing_said(actions, too_large)
        except Exception:
            return _nothing_said(actions, "the request could not be put to the policy")
        except BaseException as error:
            # A panic in the extension is no Exception; everything else that is none (an interrupt) is not ours.
            if type(error).__name__ != "PanicException":
                raise
            return _nothing_said(actions, "the policy engine failed")

    def question(self, request: AskedCall, tool: Tool, principal: Principal, actions: Sequence[Action]) -> Question:
        """What is put to Cedar. Raises what encoding raises."""
        context = self._context_of(request)
        entities = [principal_entity(principal), tool_entity(tool)]
        if "approve" in actions:
            context["requester"] = {"__entity": principal_uid(request.principal)}
            if not request.principal.is_same_as(principal):  # Cedar takes no entity twice
                entities.append(principal_entity(request.principal))
        written = orjson.dumps(context).decode()
        asks: Uid = principal_uid(principal)
        requests = [
            {
                "principal": asks,
                "action": {"type": "Action", "id": action},
                "resource": tool_uid(tool),
                "context": written,
            }
            for action in actions
        ]
        return Question(requests, orjson.dumps(entities).decode())

    def _outcome(self, action: Action, result: AuthzResult) -> Outcome:
        faults = [self._fault(error) for error in result.diagnostics.errors]
        rules = sorted((self._by_id[reason] for reason in result.diagnostics.reasons), key=lambda rule: rule.place)
        effects = {rule.effect for rule in rules}
        match result.decision:
            case Decision.Allow if effects == {"permit"}:
                if not faults:
                    return Outcome(action, True, tuple(rules))
                rules = []  # what permitted it did not decide: the fault did
            case Decision.Deny if effects <= {"forbid"}:
                pass
            case Decision.NoDecision if faults:
                pass
            case _:
                return _nothing_said([action], "the policy engine gave no clear answer")[0]
        return Outcome(action, False, tuple(rules), tuple(faults))

    def _fault(self, error: str) -> Fault:
        found = _ERROR.fullmatch(error)
        if found is None or found.group(1) not in self._by_id:
            return Fault(None, "the request could not be put to the policy")
        return Fault(self._by_id[found.group(1)], _told_reason(found.group(2)))


def _parsed(text: str, statements: list[Statement], name: str) -> tuple[PolicySet, dict[str, Any]]:
    try:
        return PolicySet.from_str(text), orjson.loads(policies_to_json_str(text))
    except orjson.JSONDecodeError:
        raise PolicyInvalid(f"{name} nests too deeply", remedy="Write it as several policies.") from None
    except ValueError as error:
        line, fault = place_of_error(statements, _fault_in)
        place = name if line is None else f"{name}, line {line}"
        raise PolicyInvalid(f"{place}: {fault or error}") from None


def _fault_in(text: str) -> str | None:
    try:
        PolicySet.from_str(text)
    except ValueError as error:
        return str(error)
    return None


def _rules_of(policies: dict[str, Any], statements: list[Statement], name: str) -> list[Rule]:
    if policies["templates"]:
        first = min(policies["templates"], key=lambda cedar_id: int(cedar_id.removeprefix("policy")))
        line = statements[int(first.removeprefix("policy"))].line
        raise PolicyInvalid(
            f"{name}, line {line}: a policy has a slot (?principal or ?resource)",
            remedy="Name the principal or the tool: nothing here fills slots, and such a policy would do nothing.",
        )
    rules = read_rules(policies, statements)
    mistakes = list(find_mistakes(rules))
    if mistakes:
        more = len(mistakes) - _MISTAKES_TOLD_MAX
        told = "; ".join(mistakes[:_MISTAKES_TOLD_MAX]) + (f"; and {more} more" if more > 0 else "")
        raise PolicyInvalid(f"{name}, {told}")
    return rules


def _nothing_said(actions: Iterable[Action], reason: str) -> list[Outcome]:
    return [Outcome(action, False, faults=(Fault(None, reason),)) for action in actions]


def _faulty(outcome: Outcome) -> list[Rule]:
    return [fault.rule for fault in outcome.faults if fault.rule is not None]


def _told_reason(reason: str) -> str:
    if _TELLABLE.fullmatch(reason):
        return reason[:_REASON_CHARS_MAX]
    return next((told for sign, told in _UNTELLABLE if sign in reason), "an operation in it failed")


def _listed(names: Sequence[str]) -> str:
    more = len(names) - _NAMES_TOLD_MAX
    return ", ".join(names[:_NAMES_TOLD_MAX]) + (f" and {more} more" if more > 0 else "")
