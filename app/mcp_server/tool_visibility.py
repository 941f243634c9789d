"""Which tools a model is told of: those that are what they were when they were pinned, and that could be called.

A quarantined tool is not listed: the changed description must not reach a model before an operator has read it. Neither
is one that the policy denies whatever the arguments are. Both can still be asked for by name, and are refused on the
record: this list spares models what is useless to them, and decides nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Final, Protocol

from app.core.digest import Digest
from app.core.limits import POLICY_TOOLS_AT_ONCE, PRINCIPALS_REMEMBERED
from app.domain.identity import Principal
from app.domain.system.pins import PinState
from app.domain.tools import Tool

_Asker = tuple[str, str, tuple[str, ...]]
# All of a tool that a policy can read.
_Told = tuple[str, str, str, frozenset[str], str]


class Policy(Protocol):
    @property
    def digest(self) -> Digest: ...

    def might_allow(self, principal: Principal, tools: Sequence[Tool]) -> list[bool]: ...


class PolicyInForce(Protocol):
    @property
    def policy(self) -> Policy: ...


class PinStates(Protocol):
    def state_of(self, tool: Tool) -> PinState: ...


class ToolVisibility:
    """Asks the policy of each principal and tool once, a few at a time, and remembers that while the policy is the
    same; for so many principals, and for the tools that they asked for last."""

    def __init__(self, pins: PinStates, supervisor: PolicyInForce) -> None:
        self._pins: Final = pins
        self._supervisor: Final = supervisor
        self._digest: Digest | None = None
        self._known: dict[_Asker, dict[_Told, bool]] = {}

    async def visible(self, principal: Principal, tools: Sequence[Tool]) -> list[Tool]:
        pinned = [tool for tool in tools if self._pins.state_of(tool).status == "pinned"]
        known = await self._asked(principal, pinned)
        return [tool for tool in pinned if known.get(_told(tool), True)]

    async def _asked(self, principal: Principal, tools: Sequence[Tool]) -> dict[_Told, bool]:
        policy = self._supervisor.policy
        if policy.digest != self._digest:
            self._known, self._digest = {}, policy.digest
        asker = (principal.tenant, principal.principal_id, tuple(sorted(principal.roles or ())))
        before = self._known.get(asker, {})
        told = {_told(tool): tool for tool in tools}
        answers = {key: before[key] for key in told if key in before}
        missing = [key for key in told if key not in before]
        for start in range(0, len(missing), POLICY_TOOLS_AT_ONCE):
            if start:
                await asyncio.sleep(0)  # calls go on meanwhile
            some = missing[start : start + POLICY_TOOLS_AT_ONCE]
            answers |= zip(some, policy.might_allow(principal, [told[key] for key in some]), strict=True)
        if missing and policy.digest == self._digest:
            self._remember(asker, answers)
        return answers

    def _remember(self, asker: _Asker, answers: dict[_Told, bool]) -> None:
        self._known.pop(asker, None)
        while len(self._known) >= PRINCIPALS_REMEMBERED:
            del self._known[next(iter(self._known))]
        self._known[asker] = answers


def _told(tool: Tool) -> _Told:
    return tool.server_id, tool.tool_name, tool.tool_class, tool.tags, tool.tenant
