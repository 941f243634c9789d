"""May this principal start this procedure? The policy is asked before anything of a run is stored."""

from __future__ import annotations

from typing import Any, Protocol

from app.core.errors import StartDenied
from app.domain.identity import Principal
from app.domain.policy.question import AskedStart, Verdict
from app.domain.runs.documents import Trigger
from app.domain.system.documents import ProcedureRegistration


class StartSupervisor(Protocol):
    """The policy, as far as starts are concerned."""

    async def judge_start(self, asked: AskedStart) -> Verdict:
        """`allow` or `deny`; never raises."""
        ...


async def judge_start(
    supervisor: StartSupervisor, principal: Principal, registration: ProcedureRegistration, given: Any, trigger: Trigger
) -> Verdict:
    """The policy's word on a start with the input `given`; raises StartDenied unless it allows it."""
    verdict = await supervisor.judge_start(
        AskedStart(
            principal=principal,
            procedure=registration.name,
            version=registration.version,
            program_digest=registration.program_digest,
            tags=registration.tags,
            input=given,
            trigger_type=trigger.type,
            trigger_id=trigger.id,
        )
    )
    if verdict.answer != "allow":
        raise StartDenied(
            f"the policy does not let {principal.principal_id} start {registration.name} {registration.version}",
            found=verdict.rationale,
        )
    return verdict
