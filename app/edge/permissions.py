"""Who may do what over HTTP, as a table; and how far a principal sees."""

from __future__ import annotations

from typing import Final, Literal

from app.core.errors import Forbidden
from app.domain.identity import Principal, Role
from app.domain.ledger.queries import Visibility

Action = Literal["call", "read", "read_tenant", "decide", "withdraw", "recover", "resolve", "pin"]

# `admin` may do everything, within its own tenant.
MAY: Final[dict[Action, frozenset[Role]]] = {
    "call": frozenset({"agent", "worker"}),
    "read": frozenset({"agent", "supervisor", "operator", "auditor", "worker"}),
    "read_tenant": frozenset({"supervisor", "operator", "auditor"}),  # not only what it asked for itself
    "decide": frozenset({"supervisor"}),
    "withdraw": frozenset({"agent", "worker"}),
    "recover": frozenset({"operator"}),
    "resolve": frozenset({"operator"}),
    "pin": frozenset({"operator"}),
}


def may(principal: Principal, action: Action) -> bool:
    roles = set(principal.roles or ())
    return "admin" in roles or not roles.isdisjoint(MAY[action])


def require(principal: Principal, action: Action) -> None:
    """Raise Forbidden unless one of the principal's roles admits the action."""
    if not may(principal, action):
        raise Forbidden(
            f"not admitted: {action}",
            expected=f"one of the roles {', '.join(sorted({*MAY[action], 'admin'}))}",
            found=", ".join(principal.roles or ()) or "none",
        )


def scope_of(principal: Principal) -> Visibility:
    """What it may see: its tenant's traces, or of these only its own."""
    own_only = not may(principal, "read_tenant")
    return Visibility(principal.tenant, principal.principal_id if own_only else None)
