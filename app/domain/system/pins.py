"""Pins: a tool is what it was when it was first seen, until an operator says otherwise.

The first definition of a tool is pinned on its tenant's system stream. Another definition under the same name is put on
the record and refused from then on (`TOOL_QUARANTINED`) until an operator accepts exactly that one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from app.core.digest import digest_of
from app.core.errors import ChecksumMismatch, InputMalformed, InputTooLarge, RequestMismatch, ToolQuarantined
from app.core.limits import PINS_AT_ONCE_MAX, PINS_PER_SERVER_MAX, QUARANTINED_PER_PIN_MAX
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.system.documents import SystemDocument, ToolPin
from app.domain.system.log import SystemLog, SystemState
from app.domain.tools import Tool

GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class PinState:
    status: Literal["pinned", "quarantined"]
    pinned_digest: str | None
    found_digest: str
    since: str | None


@dataclass(frozen=True, slots=True)
class PinComparison:
    """What is pinned and what is there now, both as they were described; `pinned` is None if nothing ever was."""

    state: PinState
    pinned: dict[str, Any] | None
    found: dict[str, Any]


@dataclass(slots=True)
class _Piece:
    """Tools that are looked at together, and why some of them are not put on the record."""

    tools: list[Tool]
    unpinned: list[str] = field(default_factory=list)


class Pins:
    """What is pinned, asked before every call; the answer comes from memory unless it would be a refusal."""

    def __init__(self, system: SystemLog, clock: Clock, definition_of: Callable[[Tool], dict[str, Any]]) -> None:
        self._system = system
        self._clock = clock
        self._definition_of = definition_of

    def state_of(self, tool: Tool) -> PinState:
        pin = self._system.state_of(tool.tenant).pins.get((tool.server_id, tool.tool_name))
        if pin is None:
            return PinState("quarantined", None, tool.definition_digest, None)
        status: Literal["pinned", "quarantined"] = (
            "pinned" if pin.definition_digest == tool.definition_digest else "quarantined"
        )
        return PinState(status, pin.definition_digest, tool.definition_digest, pin.since)

    async def compare(self, tool: Tool) -> PinComparison:
        """Both definitions, the pinned one from the record. Raises ChecksumMismatch when that is not what it was."""
        pin = (await self._system.refresh(tool.tenant)).pins.get((tool.server_id, tool.tool_name))
        if pin is None:
            return PinComparison(self.state_of(tool), None, self._definition_of(tool))
        document = await self._system.load(tool.tenant, pin.sequence_number)
        if not isinstance(document, ToolPin) or digest_of(document.definition) != pin.definition_digest:
            raise ChecksumMismatch("the record of the pinned definition was changed", expected=pin.definition_digest)
        return PinComparison(self.state_of(tool), document.definition, self._definition_of(tool))

    async def see(self, tools: Iterable[Tool]) -> list[str]:
        """Pin every tool that was never seen; put on the record each that is not what it was.

        Says what is not put on the record, and why. Such a tool is not called, and keeps no other from being pinned.
        """
        unpinned: list[str] = []
        by_tenant: dict[str, list[Tool]] = {}
        for tool in tools:
            by_tenant.setdefault(tool.tenant, []).append(tool)
        for tenant, of_tenant in by_tenant.items():
            # In pieces, so that no transaction grows with the configuration.
            for start in range(0, len(of_tenant), PINS_AT_ONCE_MAX):
                piece = _Piece(of_tenant[start : start + PINS_AT_ONCE_MAX])
                await self._system.append(tenant, partial(self._seen, piece))
                unpinned += piece.unpinned
        return unpinned

    async def verify(self, tool: Tool, *, refresh_first: bool = False) -> None:
        """Raise ToolQuarantined unless the tool's definition is the pinned one. A refusal is checked with the store
        first: an operator may have accepted it through another gateway. With `refresh_first` so is a consent: another
        definition may have been accepted there."""
        if refresh_first:
            await self._system.refresh(tool.tenant)
        if self.state_of(tool).status == "pinned":
            return
        if not refresh_first:
            await self._system.refresh(tool.tenant)
        if self.state_of(tool).status != "pinned":
            await self.see([tool])
        state = self.state_of(tool)
        if state.status != "pinned":
            change = "is not pinned" if state.pinned_digest is None else "has changed"
            raise ToolQuarantined(
                f"the definition of {tool.server_id} {tool.tool_name} {change}",
                expected=state.pinned_digest,
                found=state.found_digest,
            )

    async def accept(self, tool: Tool, *, definition_digest: str, accepted_by: Principal) -> PinState:
        """An operator's word that exactly this definition is the right one."""
        if definition_digest != tool.definition_digest:
            raise RequestMismatch(
                "that is not the tool's present definition", expected=tool.definition_digest, found=definition_digest
            )

        def decide(state: SystemState) -> list[SystemDocument]:
            pin = state.pins.get((tool.server_id, tool.tool_name))
            if pin is not None and pin.definition_digest == definition_digest:
                return []
            return [self._pin(tool, "accepted", accepted_by.principal_id)]

        await self._system.append(tool.tenant, decide)
        return self.state_of(tool)

    def _seen(self, piece: _Piece, state: SystemState) -> list[SystemDocument]:
        documents: list[SystemDocument] = []
        piece.unpinned = []  # asked again when another gateway was faster
        pinned = Counter(server_id for server_id, _ in state.pins)
        for tool in piece.tools:
            pin = state.pins.get((tool.server_id, tool.tool_name))
            if pin is None and tool.is_discovered and pinned[tool.server_id] >= PINS_PER_SERVER_MAX:
                piece.unpinned.append(
                    f"tool {tool.tool_name} is not pinned: the server has shown {PINS_PER_SERVER_MAX} tools already; "
                    "an operator can accept it"
                )
            elif pin is None:
                documents += self._written(piece, tool, "pinned")
                pinned[tool.server_id] += 1
            elif (
                tool.definition_digest not in (pin.definition_digest, *pin.quarantined_digests)
                and len(pin.quarantined_digests) < QUARANTINED_PER_PIN_MAX
            ):
                documents += self._written(piece, tool, "quarantined")
        return documents

    def _written(self, piece: _Piece, tool: Tool, change: Literal["pinned", "quarantined"]) -> list[SystemDocument]:
        try:
            pin = self._pin(tool, change, GATEWAY)
            pin.written()
        except (InputMalformed, InputTooLarge, ValueError) as error:
            # A definition's own limit leaves room for this (ENCLOSING_BYTES): a defect, but one tool's and not all's.
            piece.unpinned.append(f"tool {tool.tool_name} cannot be pinned: {type(error).__name__}")
            return []
        return [pin]

    def _pin(self, tool: Tool, change: Literal["pinned", "quarantined", "accepted"], by: str) -> ToolPin:
        return ToolPin(
            system_id=tool.tenant,
            recorded_at=self._clock.now(),
            recorded_by=by,
            server_id=tool.server_id,
            tool_name=tool.tool_name,
            change=change,
            definition_digest=tool.definition_digest,
            definition=self._definition_of(tool),
        )
