"""The log's key on the record: readers of the system stream learn which keys sign heads, and since when."""

from __future__ import annotations

from base64 import b64encode

from app.core.ed25519 import key_id_of
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.system.documents import SigningKey, SystemDocument
from app.domain.system.log import SystemLog, SystemState
from app.domain.system.pins import GATEWAY


async def announce_log_key(system: SystemLog, clock: Clock, public_key: bytes) -> None:
    """Announce the key on the default tenant's system stream unless it stands there, before it signs anything.

    It counts as a gateway's own key; what it signs are notes, which no decision can be taken for.
    """
    key_id = key_id_of(public_key)

    def decide(state: SystemState) -> list[SystemDocument]:
        known = state.keys.get(key_id)
        if known is not None and not known.is_retired:
            return []
        return [
            SigningKey.made(
                system_id=DEFAULT_TENANT,
                recorded_at=clock.now(),
                recorded_by=GATEWAY,
                change="announced",
                key_id=key_id,
                algorithm="Ed25519",
                public_key=b64encode(public_key).decode("ascii"),
                principal_id=None,
            )
        ]

    await system.append(DEFAULT_TENANT, decide)
