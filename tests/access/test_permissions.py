"""The access table: what each role may do, written down a second time; and what it may do to what others started."""

from __future__ import annotations

from typing import Final, get_args

import pytest

from app.core.errors import Forbidden
from app.domain.identity import ROLES, Principal, Role
from app.edge.permissions import MAY, MAY_TO_OTHERS, Action, may, require, require_on, scope_of

READS: Final = {"read", "read_procedure", "read_run", "read_schedule", "read_blob"}
TO_RUNS: Final = {"start_run", "signal_run", "cancel_run", "retry_run", "fork_run"}
SUBMITS: Final = {"submit_procedure", "read_source"}
EXPECTED: Final[dict[Role, set[str]]] = {
    "agent": {*READS, *TO_RUNS, "call", "withdraw", "trigger", "write_schedule", "write_blob", *SUBMITS},
    "worker": {*READS, "call", "withdraw", "work", "register_procedure", "write_blob"},
    "supervisor": {*READS, "read_tenant", "read_policy", "decide", "answer_run", "read_source"},
    "operator": {
        *(*READS, *TO_RUNS, "read_tenant", "read_policy", "recover", "resolve", "pin"),
        *("resume_run", "erase_run", "trigger", "verify_log"),
        *("write_schedule", "read_metrics", *SUBMITS),
    },
    "auditor": {*READS, "read_tenant", "read_source", "read_keys", "read_metrics", "read_policy", "verify_log"},
    "admin": set(get_args(Action)),
}


def principal(*roles: Role, name: str = "ada") -> Principal:
    return Principal(principal_id=name, tenant="default", roles=list(roles))


def test_the_table_has_every_action() -> None:
    assert set(MAY) == set(get_args(Action))
    assert set(MAY_TO_OTHERS) <= set(MAY)


@pytest.mark.parametrize("role", ROLES)
def test_a_role_may_do_exactly_what_is_its_own(role: Role) -> None:
    found = {action for action in get_args(Action) if may(principal(role), action)}
    assert found == EXPECTED[role]


@pytest.mark.parametrize("action", get_args(Action))
def test_without_a_role_nothing_is_admitted(action: Action) -> None:
    for nobody in (principal(), Principal(principal_id="ada", tenant="default")):
        with pytest.raises(Forbidden, match="admin"):
            require(nobody, action)


@pytest.mark.parametrize("action", sorted(MAY_TO_OTHERS))
@pytest.mark.parametrize("role", ROLES)
def test_an_agent_does_it_to_its_own_only_an_operator_to_any(role: Role, action: Action) -> None:
    admits_own = action in EXPECTED[role]
    admits_any = admits_own and role != "agent"
    for owner, admits in (("ada", admits_own), ("bob", admits_any)):
        if admits:
            require_on(principal(role), action, owner_id=owner)
        else:
            with pytest.raises(Forbidden):
                require_on(principal(role), action, owner_id=owner)


def test_who_has_two_roles_may_do_what_either_may() -> None:
    both = principal("agent", "supervisor")
    require(both, "start_run")
    require_on(both, "answer_run", owner_id="bob")
    with pytest.raises(Forbidden):
        require_on(both, "cancel_run", owner_id="bob")


@pytest.mark.parametrize(("role", "sees"), [("agent", "ada"), ("worker", "ada"), ("auditor", None), ("operator", None)])
def test_agents_and_workers_see_their_own(role: Role, sees: str | None) -> None:
    assert scope_of(principal(role)).principal_id == sees
