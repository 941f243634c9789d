"""The policy that decides, on the record: decisions name its digest, and an auditor finds its text here."""

from __future__ import annotations

from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.system.documents import PolicySet, SystemDocument
from app.domain.system.log import SystemLog, SystemState
from app.domain.system.pins import GATEWAY


async def record_policy(system: SystemLog, clock: Clock, policy_digest: str, text: str) -> None:
    """Append the policy set unless it is the last one recorded."""

    def decide(state: SystemState) -> list[SystemDocument]:
        if state.policy_digest == policy_digest:
            return []
        return [
            PolicySet(
                system_id=DEFAULT_TENANT,
                recorded_at=clock.now(),
                recorded_by=GATEWAY,
                policy_digest=policy_digest,
                text=text,
            )
        ]

    await system.append(DEFAULT_TENANT, decide)
