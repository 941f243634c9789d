"""`tga policy explain`: the call as the gateway would put it to the policy, with nothing stored and nothing sent."""

from __future__ import annotations

from typing import Any

from app.cli.policy import explain_policy
from app.clock import SystemClock
from app.config import load_config
from app.connectors.registry import Registry
from app.core.limits import REDACTION_SALT_BYTES
from app.domain.identity import Principal
from app.domain.tga.documents import ActionRequest
from app.domain.tga.secrets import find_secrets, redact
from app.settings import Settings


async def explain_call(
    settings: Settings,
    server: str,
    tool_name: str,
    arguments: dict[str, Any],
    *,
    principal_fields: dict[str, Any],
    intent: str | None,
    as_json: bool,
) -> bool:
    """True unless the policy denies it. ToolNotFound and ArgumentsInvalid where the gateway would answer with them."""
    config = load_config(settings.config_file)
    clock = SystemClock()
    registry = Registry.from_config(config)
    try:
        principal = Principal.made(**principal_fields)
        tool = registry.resolve_for(principal.tenant, server, tool_name)
        registry.verify_arguments(tool, arguments)
        secrets = find_secrets(arguments, tool.secret_arguments)
        request = ActionRequest.made(
            trace_id=clock.new_id(),
            requested_at=clock.now(),
            expires_at=clock.after(tool.approval_timeout_ms),
            principal=principal,
            server_id=tool.server_id,
            tool_name=tool.tool_name,
            tool_class=tool.tool_class,
            tool_definition_digest=tool.definition_digest,
            # As the policy sees them: secret arguments only as commitments.
            arguments=redact(arguments, secrets, salt=bytes(REDACTION_SALT_BYTES)) if secrets else arguments,
            idempotency_key="explain" if tool.tool_class == "write" else None,
            intent=intent,
        )
        return explain_policy(config.policy.file if config.policy else None, tool, request, as_json=as_json)
    finally:
        await registry.close()
