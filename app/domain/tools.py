"""A tool as the registry knows it: what the policy, the pins and the executor are told of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from app.core.digest import Digest
from app.core.limits import UNREACHABLE_FOR_MS

ToolClass = Literal["read", "write"]
OnUnknownOutcome = Literal["redispatch", "reconcile", "hold"]

# The only member of the object that stands on the record in place of a secret argument.
REDACTED: Final = "$redacted"


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool as the registry knows it. `definition_digest` tells one definition from another. `is_discovered`: its
    server described it, and may describe others without end."""

    is_discovered: ClassVar[bool] = False
    server_id: str
    tool_name: str
    tool_class: ToolClass
    definition_digest: Digest
    on_unknown_outcome: OnUnknownOutcome = "redispatch"
    is_outcome_chosen: bool = False  # whether an operator has chosen the line above, or it is the default
    reconcile_tool: str | None = None
    tags: frozenset[str] = frozenset()
    timeout_ms: int = 30_000
    max_attempts: int = 5
    unreachable_for_ms: int = UNREACHABLE_FOR_MS
    tenant: str = "default"
    description: str | None = None
    approval_timeout_ms: int = 86_400_000
    secret_arguments: tuple[str, ...] = ()  # JSON pointers
    input_schema: dict[str, Any] = field(default_factory=lambda: {"type": "object"}, hash=False)
