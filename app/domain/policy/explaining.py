"""Why a request is decided as it is: every rule, and how far it got. For people who ask; not on the path of a call."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Literal

from cedarpy import PolicySet, is_authorized_batch

from app.domain.identity import Principal
from app.domain.policy.cedar import CedarPolicy, Outcome, Question
from app.domain.policy.encoding import Uid, principal_uid
from app.domain.policy.question import AskedCall, AskedStart, Verdict
from app.domain.policy.rules import Action, Rule
from app.domain.tools import Tool

Standing = Literal["decides", "applies", "condition not met", "could not be evaluated", "not about this request"]
_ACTIONS: Final[tuple[Action, ...]] = ("call", "call_unattended")


@dataclass(frozen=True, slots=True)
class Explanation:
    """`standings`: for each outcome, in its order, every rule by its place in the file."""

    verdict: Verdict
    outcomes: tuple[Outcome, ...]
    standings: tuple[list[tuple[Rule, Standing]], ...]


def explain(policy: CedarPolicy, request: AskedCall, tool: Tool) -> Explanation:
    """The same verdict as `judge`, with the standing of every rule."""
    outcomes = policy.outcomes(request, tool)
    verdict = policy.verdict_of(*outcomes)
    return _explained(policy, verdict, outcomes, lambda: policy.question(request, tool, request.principal, _ACTIONS))


def explain_start(policy: CedarPolicy, asked: AskedStart) -> Explanation:
    """The same verdict as `judge_start`, with the standing of every rule."""
    outcome = policy.start_outcome(asked)
    verdict = policy.verdict_of_start(outcome)
    return _explained(policy, verdict, (outcome,), lambda: policy.start_question(asked))


def _explained(
    policy: CedarPolicy, verdict: Verdict, outcomes: tuple[Outcome, ...], make: Callable[[], Question]
) -> Explanation:
    if any(fault.rule is None for outcome in outcomes for fault in outcome.faults):
        return Explanation(verdict, outcomes, ([],) * len(outcomes))  # it could not even be put to the rules
    question = make()
    # Rules are made permits, so that Cedar names all that hold; without conditions it names all that are about it.
    holding = _permitting(policy, question, with_conditions=True)
    about = _permitting(policy, question, with_conditions=False)
    standings = tuple(
        [(rule, _standing(rule, outcome, held, near)) for rule in policy.rules]
        for outcome, held, near in zip(outcomes, holding, about, strict=True)
    )
    return Explanation(verdict, outcomes, standings)


def _permitting(policy: CedarPolicy, question: Question, *, with_conditions: bool) -> list[set[str]]:
    """The ids that Cedar gives to the rules by their place are the same in this text as in the policy's own."""
    text = "\n".join(rule.statement.as_permit(with_conditions=with_conditions) for rule in policy.rules)
    results = is_authorized_batch(question.requests, PolicySet.from_str(text), question.entities)
    return [set(result.diagnostics.reasons) for result in results]


def _standing(rule: Rule, outcome: Outcome, held: set[str], near: set[str]) -> Standing:
    if rule in outcome.determining:
        return "decides"
    if any(fault.rule is rule for fault in outcome.faults):
        return "could not be evaluated"
    if rule.cedar_id in held:
        return "applies"
    return "condition not met" if rule.cedar_id in near else "not about this request"


def entity_text(uid: Uid) -> str:
    """As rules must write it: a slash in the owner's name is escaped there, and nowhere else."""
    return f"{uid['type']}::{json.dumps(uid['id'])}"


def explanation_document(
    policy: CedarPolicy, explanation: Explanation, asker: Principal, resource: Uid
) -> dict[str, Any]:
    verdict = explanation.verdict
    return {
        "verdict": verdict.answer,
        "rationale": verdict.rationale,
        "principal": entity_text(principal_uid(asker)),
        "resource": entity_text(resource),
        "policy_digest": policy.digest,
        "policy_ids": list(verdict.policy_ids),
        "actions": {
            outcome.action: {
                "allowed": outcome.is_allowed,
                "why_not": None if outcome.is_allowed else outcome.why_not(),
                "errors": [
                    {"id": None if fault.rule is None else fault.rule.name, "reason": fault.reason}
                    for fault in outcome.faults
                ],
                "policies": [
                    {"id": r.name, "effect": r.effect, "line": r.line, "standing": standing, "text": r.statement.text}
                    for r, standing in standings
                ],
            }
            for outcome, standings in zip(explanation.outcomes, explanation.standings, strict=True)
        },
    }
