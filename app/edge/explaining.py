"""Why a call would be decided as it would be: for the API, the console and `tga policy explain`. Nothing is stored or
sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from app.connectors.registry import Registry
from app.core.errors import InternalError
from app.core.limits import REDACTION_SALT_BYTES
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT, Principal, Role
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.encoding import tool_uid
from app.domain.policy.explaining import explain, explanation_document
from app.domain.tga.documents import ActionRequest
from app.domain.tga.secrets import find_secrets, redact
from app.domain.tools import Tool

if TYPE_CHECKING:  # the command line explains without a gateway, and loads none of it
    from app.edge.services import Services


@dataclass(frozen=True, slots=True)
class SupposedCall:
    """A call that is only asked about. `procedure` and `version`: as a run of this procedure would make it."""

    server_id: str
    tool_name: str
    arguments: dict[str, Any] = field(default_factory=dict)
    intent: str | None = None
    procedure: str | None = None
    version: str = "1"


def request_of(registry: Registry, clock: Clock, asker: Principal, call: SupposedCall) -> tuple[Tool, ActionRequest]:
    """The tool, and the request as the policy would see it: secret arguments only as commitments. ToolNotFound and
    ArgumentsInvalid where the gateway would answer with them."""
    tool = registry.resolve_for(asker.tenant, call.server_id, call.tool_name)
    registry.verify_arguments(tool, call.arguments)
    secrets = find_secrets(call.arguments, tool.secret_arguments)
    made_by: dict[str, Any] = {}
    if call.procedure is not None:
        known = {"procedure": call.procedure, "version": call.version}
        made_by["run"] = {"run_id": "explain", **known, "path": "1", "attempt": 1, "worker": "explain"}
    salt = bytes(REDACTION_SALT_BYTES)
    request = ActionRequest.made(
        trace_id=clock.new_id(),
        requested_at=clock.now(),
        expires_at=clock.after(tool.approval_timeout_ms),
        principal=asker,
        server_id=tool.server_id,
        tool_name=tool.tool_name,
        tool_class=tool.tool_class,
        tool_definition_digest=tool.definition_digest,
        arguments=redact(call.arguments, secrets, salt=salt) if secrets else call.arguments,
        idempotency_key="explain" if tool.tool_class == "write" else None,
        intent=call.intent,
        **made_by,
    )
    return tool, request


def policy_in_force(services: Services) -> CedarPolicy:
    if services.policy is None:
        raise InternalError("this gateway has no policy")
    return services.policy.policy


def explain_supposed(
    services: Services, reader: Principal, call: SupposedCall, *, principal_id: str, roles: Sequence[Role]
) -> dict[str, Any]:
    """The verdict, both questions, and each rule's standing, for a call within the reader's own tenant. Readers of
    other tenants than the gateway's own get no rule's text, and only rules that are about the call: rules may name
    other tenants. Raises as `request_of`."""
    policy = policy_in_force(services)
    asker = Principal.made(principal_id=principal_id, tenant=reader.tenant, roles=list(roles))
    tool, request = request_of(services.registry, services.clock, asker, call)
    document = explanation_document(policy, explain(policy, request, tool), asker, tool_uid(tool))
    if reader.tenant != DEFAULT_TENANT:
        for action in document["actions"].values():
            action["policies"] = [
                {**rule, "text": None} for rule in action["policies"] if rule["standing"] != "not about this request"
            ]
    return document
