"""Requests, tools and policies to judge."""

from __future__ import annotations

from typing import Any

from app.core.digest import digest_of
from app.domain.identity import Principal
from app.domain.policy.cedar import CedarPolicy
from app.domain.policy.question import Verdict
from app.domain.tga.documents import ActionRequest
from app.domain.tools import Tool
from tests.traces import action_request

PERMIT_ALL = '@id("all") permit(principal, action, resource);\n'


def tool_of(*tags: str, **fields: Any) -> Tool:
    chosen: dict[str, Any] = {
        "server_id": "bank",
        "tool_name": "charge",
        "tool_class": "write",
        "tags": frozenset(tags),
    }
    return Tool(**{**chosen, "definition_digest": digest_of({}), **fields})


def principal_of(name: str = "agent-1", *roles: str, tenant: str = "default") -> Principal:
    return Principal.model_validate({"principal_id": name, "tenant": tenant, "roles": list(roles)})


def request_of(arguments: dict[str, Any] | None = None, **fields: Any) -> ActionRequest:
    chosen = {"server_id": "bank", "tool_name": "charge", "arguments": {} if arguments is None else arguments}
    return action_request(1, **{**chosen, **fields})


def judged(text: str, arguments: dict[str, Any] | None = None, *tags: str, **fields: Any) -> Verdict:
    return CedarPolicy(text).judge(request_of(arguments, **fields), tool_of(*tags))


def answer(text: str, arguments: dict[str, Any] | None = None, *tags: str, **fields: Any) -> str:
    return judged(text, arguments, *tags, **fields).answer
