"""Which tools a principal could call at all: whether there are arguments with which the policy might say yes.

The policy is relaxed so that it no longer asks for the request's context (arguments, intent, key): of a `permit`, the
conditions that read the context are taken to hold; a `forbid` with such a condition is taken not to apply. What is
denied even so is denied whatever is asked. The other way round nothing is promised: the relaxed policy may let through
what no arguments can satisfy, and what it lets through is decided on as ever.

| condition                           | of a permit                 | of a forbid                       |
|-------------------------------------|-----------------------------|-----------------------------------|
| reads no context                    | stands                      | stands                            |
| `when { A && context... }`          | `when { A }`                | the whole rule is left out        |
| `unless { A or context... }`        | `unless { A }`              | the whole rule is left out        |
| reads the context in another way    | left out                    | the whole rule is left out        |
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

import orjson
from cedarpy import PolicySet, policies_from_json_str

from app.domain.policy.rules import Rule

_SPLIT_AT: Final = {"when": "&&", "unless": "||"}


def relaxed(rules: Iterable[Rule]) -> PolicySet:
    """The policy without what it asks of the context."""
    policies = {rule.cedar_id: body for rule in rules if (body := _relaxed_body(rule)) is not None}
    if not policies:
        return PolicySet.from_str("forbid(principal, action, resource);")
    written = {"staticPolicies": policies, "templates": {}, "templateLinks": []}
    return PolicySet.from_str(policies_from_json_str(orjson.dumps(written).decode()))


def _relaxed_body(rule: Rule) -> dict[str, Any] | None:
    conditions = list(rule.body["conditions"])
    if not any(map(_reads_context, conditions)):
        return dict(rule.body)
    if rule.effect == "forbid":
        return None
    kept = [
        {"kind": condition["kind"], "body": part}
        for condition in conditions
        for part in _parts(condition["body"], _SPLIT_AT[condition["kind"]])
        if not _reads_context(part)
    ]
    return {**rule.body, "conditions": kept}


def _parts(expression: Any, operator: str) -> Iterator[Any]:
    """What must hold (`&&` of a `when`), or must not (`||` of an `unless`), each for itself."""
    waiting = [expression]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping) and operator in found:
            waiting += [found[operator]["right"], found[operator]["left"]]
        else:
            yield found


def _reads_context(expression: Any) -> bool:
    waiting = [expression]
    while waiting:
        found = waiting.pop()
        if isinstance(found, Mapping):
            if found.get("Var") == "context":
                return True
            waiting.extend(found.values())
        elif isinstance(found, list):
            waiting.extend(found)
    return False
