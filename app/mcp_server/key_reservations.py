"""Keys for calls that come without one: the re-issue of a call whose answer did not arrive gets the key of that call,
every other call a new one. docs/mcp.md says what is recognised, and why.

Two equal calls of one principal are told apart when the fate of the first is known, and the second waits until then:
its answer arrived, so the second is another call; or its connection broke, so the second is the same call again.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import Any, Final, Protocol

from app.core.canonical import canonical_bytes
from app.core.digest import digest_of_bytes
from app.core.errors import CallInFlight, TgaError
from app.domain.identity import Principal
from app.domain.tga.secrets import find_secrets, redact
from app.domain.tools import Tool
from app.mcp_server.delivery import Delivery
from app.postgres.mcp_key_reservations import Begun

logger = logging.getLogger("tga")

_POLL_FIRST_MS: Final = 10
_POLL_MAX_MS: Final = 250
_NO_SALT: Final = bytes(32)


class Intents(Protocol):
    async def begin(self, fingerprint: bytes, *, server_id: str, tool_name: str, proposed_key: str) -> Begun: ...

    async def wait(self, fingerprint: bytes, wait_ms: int) -> None: ...

    async def leave(self, fingerprint: bytes, begun: Begun) -> None: ...

    async def settle(self, fingerprint: bytes, begun: Begun) -> None: ...


def fingerprint_of(principal: Principal, tool: Tool, arguments: dict[str, Any]) -> bytes:
    """What makes two calls equal. Secret arguments count only by being there: a digest of one could be guessed."""
    secrets = find_secrets(arguments, tool.secret_arguments) if tool.secret_arguments else {}
    if secrets:
        arguments = redact(arguments, dict.fromkeys(secrets), salt=_NO_SALT)
    told: dict[str, Any] = {
        "tenant": principal.tenant,
        "principal_id": principal.principal_id,
        "server_id": tool.server_id,
        "tool_name": tool.tool_name,
        "arguments": arguments,
    }
    return bytes.fromhex(digest_of_bytes(canonical_bytes(told)))


@dataclass(slots=True)
class Intent:
    """A call under a key that the gateway chose. In the end it is settled or left; `conclude` does one of them."""

    _intents: Intents
    _fingerprint: bytes
    begun: Begun

    @property
    def key(self) -> str:
        return self.begun.key

    @property
    def is_again(self) -> bool:
        return self.begun.verdict == "again"

    async def conclude(self, delivery: Delivery | None) -> None:
        """`delivery`: of the answer that ends the call; None when there was none."""
        with contextlib.suppress(asyncio.CancelledError):
            # The request that waits here may be cancelled; what was learned is recorded all the same.
            await asyncio.shield(asyncio.create_task(self._concluded(delivery)))

    async def _concluded(self, delivery: Delivery | None) -> None:
        try:
            if delivery is not None and await delivery.arrived():
                await self._intents.settle(self._fingerprint, self.begun)
            else:
                await self._intents.leave(self._fingerprint, self.begun)
        except TgaError as error:  # the safe side: an answer of which nothing is known is owed
            logger.warning("whether an answer over MCP arrived could not be recorded: %s", error)

    async def forget(self) -> None:
        await self._intents.settle(self._fingerprint, self.begun)


async def begin(
    intents: Intents, principal: Principal, tool: Tool, arguments: dict[str, Any], *, proposed_key: str, wait_ms: int
) -> Intent:
    """The call's key. CallInFlight when an equal call's fate is not known after `wait_ms`."""
    fingerprint = fingerprint_of(principal, tool, arguments)
    loop = asyncio.get_running_loop()
    deadline, pause_ms = loop.time() + wait_ms / 1000, _POLL_FIRST_MS
    while True:
        begun = await intents.begin(
            fingerprint, server_id=tool.server_id, tool_name=tool.tool_name, proposed_key=proposed_key
        )
        if begun.verdict != "busy":
            return Intent(intents, fingerprint, begun)
        if loop.time() >= deadline:
            raise CallInFlight(
                "an equal call of yours is still being answered",
                remedy="If this is the same call, wait for its answer. If it is a second one, make it when the first "
                f"is answered, or with a key of its own in _meta; the first has the key {begun.key}.",
            )
        await intents.wait(fingerprint, pause_ms)
        pause_ms = min(pause_ms * 2, _POLL_MAX_MS)
