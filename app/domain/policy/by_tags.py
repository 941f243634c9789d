"""The packaged policy: a tool tagged `approval` waits for a person, every other one is allowed."""

from __future__ import annotations

from typing import Final

from app.core.digest import digest_of
from app.domain.tga.models import ActionRequest
from app.domain.tga.ports import Tool, Verdict

APPROVAL_TAG: Final = "approval"
POLICY_ID: Final = "packaged-default"
_DIGEST: Final = digest_of({"policy_id": POLICY_ID, "asks_for_tag": APPROVAL_TAG})


class TagPolicy:
    """A Supervisor that looks at the tool alone. It never denies; policies that do are configured."""

    async def judge(self, request: ActionRequest, tool: Tool) -> Verdict:
        answer = "ask" if APPROVAL_TAG in tool.tags else "allow"
        return Verdict(answer, policy_digest=_DIGEST, policy_ids=[POLICY_ID])  # type: ignore[arg-type]
