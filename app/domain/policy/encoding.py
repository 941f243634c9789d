"""How a request is put to Cedar: who asks, for which tool or procedure, and arguments or input as Cedar values.

Every JSON value has exactly one Cedar value, and what Cedar has no form for becomes one that compares with nothing:

| JSON                                   | Cedar                                                             |
|----------------------------------------|-------------------------------------------------------------------|
| true, false, string                    | itself                                                            |
| number without a fraction, 64 bits     | Long; 100.0 and 1e2 are 100, as they are on the record            |
| number with at most 4 decimal places   | decimal, if it is in decimal's range                              |
| any other number                       | the entity Json::"1.5e-7", which no rule can order                |
| null                                   | the entity Json::"null"                                           |
| array                                  | set: order and repeats are lost, so [1, 1] is [1]                 |
| object                                 | record                                                            |

In Cedar's JSON the keys __entity, __extn and __expr make values of other kinds. An agent that sends them would choose
entities for the policy to see, so they go by another name: a `$` is put before them, and before those that already
begin so ("$__entity" becomes "$$__entity"). Thus no argument can be an entity but Json::, and no two objects are alike.

Comparing with `<` or `like` what is of another kind is an error for Cedar, and an error denies (app/domain/policy/
cedar.py). `==` between kinds is false, not an error.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Any, Final

import rfc8785

from app.core.errors import InputTooLarge
from app.core.limits import POLICY_VALUES_MAX
from app.domain.identity import DEFAULT_TENANT, Principal
from app.domain.policy.question import AskedCall, AskedStart, AskedSubmission
from app.domain.tools import Tool

JSON_TYPE: Final = "Json"
RUN_FIELDS: Final = ("run_id", "procedure", "version", "path")  # what rules see of a call's run
CEDAR_KEYS: Final = ("__entity", "__extn", "__expr")
_ESCAPED_KEY: Final = re.compile(rf"\$*(?:{'|'.join(CEDAR_KEYS)})")
_LONG_MIN: Final = -(2**63)
_LONG_MAX: Final = 2**63 - 1
# Cedar takes about as many times longer to read them.
_FORMLESS_COUNTS: Final = 5
# What Python writes of a double with at most four decimal places; the whole part keeps well within decimal's range.
_DECIMAL: Final = re.compile(r"-?[0-9]{1,14}\.[0-9]{1,4}")

Uid = dict[str, str]


def principal_uid(principal: Principal) -> Uid:
    return {"type": "Principal", "id": named_id(principal.tenant, principal.principal_id)}


def tool_uid(tool: Tool) -> Uid:
    return {"type": "Tool", "id": named_id(tool.server_id, tool.tool_name)}


def procedure_uid(asked: AskedStart | AskedSubmission) -> Uid:
    """By its name; outside the default tenant `tenant/name`. The name of a procedure has no slash."""
    tenant = asked.principal.tenant
    return {"type": "Procedure", "id": asked.procedure if tenant == DEFAULT_TENANT else f"{tenant}/{asked.procedure}"}


def named_id(owner: str, name: str) -> str:
    """`owner/name`, so that no two pairs give the same text: a slash in the owner is written %2F."""
    return f"{owner.replace('%', '%25').replace('/', '%2F')}/{name}"


def principal_entity(principal: Principal) -> dict[str, Any]:
    roles = sorted(set(principal.roles or ()))
    return {
        "uid": principal_uid(principal),
        "attrs": {"id": principal.principal_id, "tenant": principal.tenant, "roles": roles},
        "parents": [{"type": "Role", "id": role} for role in roles],
    }


def tool_entity(tool: Tool) -> dict[str, Any]:
    return {
        "uid": tool_uid(tool),
        "attrs": {
            "server": tool.server_id,
            "name": tool.tool_name,
            "class": tool.tool_class,
            "tags": sorted(tool.tags),
            "tenant": tool.tenant,
        },
        "parents": [{"type": "Server", "id": tool.server_id}],
    }


def procedure_entity(asked: AskedStart | AskedSubmission) -> dict[str, Any]:
    return {
        "uid": procedure_uid(asked),
        "attrs": {
            "name": asked.procedure,
            "version": asked.version,
            "program_digest": asked.program_digest,
            "tags": sorted(set(asked.tags)),
            "tenant": asked.principal.tenant,
        },
        "parents": [],
    }


def context_of_start(asked: AskedStart, *, fields: Collection[str] | None) -> dict[str, Any]:
    """The context, with these fields of it (None: all). Raises InputTooLarge when the input holds too much."""
    trigger = {"type": asked.trigger_type}
    if asked.trigger_id is not None:
        trigger["id"] = asked.trigger_id
    context: dict[str, Any] = {"trigger": trigger}
    if fields is None or "input" in fields:
        context["input"] = cedar_value(asked.input)
    return context


def context_of(
    request: AskedCall, *, arguments: Iterable[str] | None, fields: Collection[str] | None
) -> dict[str, Any]:
    """The context, with these arguments and fields of the request (None: all). Raises InputTooLarge when the arguments
    hold too much."""
    chosen = request.arguments
    if arguments is not None:
        chosen = {name: chosen[name] for name in _plain_names(arguments) if name in chosen}
    context: dict[str, Any] = {"arguments": cedar_value(chosen)}
    for field in ("intent", "idempotency_key", "tool_definition_digest"):
        value = getattr(request, field)
        if value is not None and (fields is None or field in fields):
            context[field] = value
    if request.run is not None and (fields is None or "run" in fields):
        context["run"] = {field: getattr(request.run, field) for field in RUN_FIELDS}
    return context


def _plain_names(names: Iterable[str]) -> Iterable[str]:
    """Names of arguments from names in the context."""
    return map(plain_name, names)


def plain_name(name: str) -> str:
    """The name of an argument, or of a member of one, from the name that it has in the context."""
    return name[1:] if name.startswith("$") and _ESCAPED_KEY.fullmatch(name) else name


def cedar_value(value: Any) -> Any:
    """The value in Cedar's JSON form. Raises InputTooLarge; for what is not JSON, ValueError or TypeError."""
    return _Encoding().value(value)


class _Encoding:
    """Counts what it encodes: what Cedar would take too long over is refused."""

    __slots__ = ("values_left",)

    def __init__(self) -> None:
        self.values_left = POLICY_VALUES_MAX

    def value(self, value: Any) -> Any:
        self._count(1)
        match value:
            case bool() | str():
                return value
            case int() if _LONG_MIN <= value <= _LONG_MAX:
                return value
            case float() if value.is_integer() and _LONG_MIN <= value <= _LONG_MAX:
                # The record writes 100.0 as 100 and reads it back as that: a policy must see the same both times.
                return int(value)
            case int() | float() | None:
                self._count(_FORMLESS_COUNTS - 1)
                return _formless(value)
            case list():
                return [self.value(item) for item in value]
            case dict():
                return {_key(key): self.value(item) for key, item in value.items()}
        raise TypeError("not a JSON value")

    def _count(self, values: int) -> None:
        self.values_left -= values
        if self.values_left < 0:
            raise InputTooLarge("too many values for the policy", expected=f"at most {POLICY_VALUES_MAX}")


def _formless(value: float | None) -> Any:
    written = str(value)
    if isinstance(value, float) and _DECIMAL.fullmatch(written):
        return {"__extn": {"fn": "decimal", "arg": written}}
    if isinstance(value, float) or value is None:
        written = rfc8785.dumps(value).decode()
    return {"__entity": {"type": JSON_TYPE, "id": written}}


def _key(key: str) -> str:
    return f"${key}" if _ESCAPED_KEY.fullmatch(key) else key
