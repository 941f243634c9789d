"""Who may do what over HTTP and MCP, as tables; and how far a principal sees."""

from __future__ import annotations

from typing import Final, Literal

from app.core.errors import Forbidden
from app.domain.identity import Principal, Role
from app.domain.ledger.queries import Visibility

Action = Literal[
    "call",
    "read",
    "read_tenant",
    "read_keys",
    "read_policy",
    "verify_log",
    "decide",
    "withdraw",
    "recover",
    "resolve",
    "pin",
    "register_procedure",
    "submit_procedure",
    "read_source",
    "read_procedure",
    "start_run",
    "read_run",
    "signal_run",
    "answer_run",
    "cancel_run",
    "retry_run",
    "resume_run",
    "fork_run",
    "erase_run",
    "trigger",
    "read_schedule",
    "write_schedule",
    "work",
    "read_blob",
    "write_blob",
    "read_metrics",
]

_EVERYONE: Final[frozenset[Role]] = frozenset({"agent", "supervisor", "operator", "auditor", "worker"})

# `admin` may do everything, within its own tenant.
MAY: Final[dict[Action, frozenset[Role]]] = {
    "call": frozenset({"agent", "worker"}),
    "read": _EVERYONE,
    "read_tenant": frozenset({"supervisor", "operator", "auditor"}),  # not only what it asked for itself
    "read_keys": frozenset({"auditor"}),  # whose they are and until when; never a secret
    "read_policy": frozenset({"supervisor", "operator", "auditor"}),
    "verify_log": frozenset({"operator", "auditor"}),  # other tenants' findings are counted, and not named
    "decide": frozenset({"supervisor"}),
    "withdraw": frozenset({"agent", "worker"}),
    "recover": frozenset({"operator"}),
    "resolve": frozenset({"operator"}),
    "pin": frozenset({"operator"}),
    "register_procedure": frozenset({"worker"}),
    "submit_procedure": frozenset({"agent", "operator"}),  # as far as the policy permits Action::"submit"
    "read_procedure": _EVERYONE,
    "read_source": frozenset({"agent", "supervisor", "operator", "auditor"}),  # of a submitted program, with its files
    "start_run": frozenset({"agent", "operator"}),
    "read_run": _EVERYONE,  # its state, journal, entries, events and receipt, as far as `scope_of` goes
    "signal_run": frozenset({"agent", "operator"}),  # by name; an open question is answered with `answer_run`
    "answer_run": frozenset({"supervisor"}),
    "cancel_run": frozenset({"agent", "operator"}),
    "retry_run": frozenset({"agent", "operator"}),  # one that failed
    "resume_run": frozenset({"operator"}),  # one that is parked or diverged; accept a version, resolve a step
    "fork_run": frozenset({"agent", "operator"}),
    "erase_run": frozenset({"operator"}),
    "trigger": frozenset({"agent", "operator"}),
    "read_schedule": _EVERYONE,
    "write_schedule": frozenset({"agent", "operator"}),
    "work": frozenset({"worker"}),  # lease, heartbeat, put, and the pages of the journal of what it leased
    "read_blob": _EVERYONE,
    "write_blob": frozenset({"agent", "worker"}),
    "read_metrics": frozenset({"operator", "auditor"}),  # those of the installation's own tenant (app/api/metrics.py)
}
# Of what is done to one run or schedule: who may do it to those of others too. Every other role that `MAY` admits does
# it to its own only.
MAY_TO_OTHERS: Final[dict[Action, frozenset[Role]]] = {
    "read_source": frozenset({"supervisor", "operator", "auditor"}),
    "signal_run": frozenset({"operator"}),
    "answer_run": frozenset({"supervisor"}),
    "cancel_run": frozenset({"operator"}),
    "retry_run": frozenset({"operator"}),
    "resume_run": frozenset({"operator"}),
    "fork_run": frozenset({"operator"}),
    "erase_run": frozenset({"operator"}),
    "write_schedule": frozenset({"operator"}),
}


def may(principal: Principal, action: Action) -> bool:
    return _has_one(principal, MAY[action])


def require(principal: Principal, action: Action) -> None:
    """Raise Forbidden unless one of the principal's roles admits the action."""
    if not may(principal, action):
        raise Forbidden(
            f"not admitted: {action}",
            expected=f"one of the roles {', '.join(sorted({*MAY[action], 'admin'}))}",
            found=_told(principal),
        )


def require_on(principal: Principal, action: Action, *, owner_id: str) -> None:
    """As `require`, of a run that `owner_id` started or a schedule that it made, in the principal's own tenant. Look
    first whether the principal can see it at all."""
    require(principal, action)
    others = MAY_TO_OTHERS[action]
    if owner_id != principal.principal_id and not _has_one(principal, others):
        raise Forbidden(
            f"not admitted: {action} of what another principal started",
            expected=f"one of the roles {', '.join(sorted({*others, 'admin'}))}",
            found=_told(principal),
        )


def actions_of(principal: Principal) -> list[Action]:
    """What the table admits it to, in the table's order. A policy can still deny a call or an approval."""
    return [action for action in MAY if may(principal, action)]


def scope_of(principal: Principal) -> Visibility:
    """What it may see: its tenant's traces and runs, or of these only its own."""
    own_only = not may(principal, "read_tenant")
    return Visibility(principal.tenant, principal.principal_id if own_only else None)


def _has_one(principal: Principal, roles: frozenset[Role]) -> bool:
    held = set(principal.roles or ())
    return "admin" in held or not held.isdisjoint(roles)


def _told(principal: Principal) -> str:
    return ", ".join(principal.roles or ()) or "none"
