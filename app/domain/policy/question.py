"""What a policy is asked, and what it answers. A trace's action request is such a question."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from app.core.digest import Digest
from app.domain.addresses import RunOfCall
from app.domain.identity import Principal


class AskedCall(Protocol):
    """The call that is to be decided: who asks for which tool, with what."""

    @property
    def principal(self) -> Principal: ...

    @property
    def server_id(self) -> str: ...

    @property
    def tool_name(self) -> str: ...

    @property
    def arguments(self) -> dict[str, Any]:
        """As they are recorded: secret ones only as commitments."""
        ...

    @property
    def idempotency_key(self) -> str | None: ...

    @property
    def intent(self) -> str | None: ...

    @property
    def tool_definition_digest(self) -> str | None: ...

    @property
    def run(self) -> RunOfCall | None:
        """The run that makes the call; None: a direct one."""
        ...


@dataclass(frozen=True, slots=True)
class AskedStart:
    """The start of a run that is to be decided: who asks for which program, with what, and what made it ask."""

    principal: Principal
    procedure: str
    version: str
    program_digest: str
    tags: Sequence[str]
    input: Any
    trigger_type: str
    trigger_id: str | None = None


@dataclass(frozen=True, slots=True)
class AskedSubmission:
    """A program that is to be stored for a procedure: who submits it, and what it says of itself."""

    principal: Principal
    procedure: str
    version: str
    program_digest: str
    tags: Sequence[str]
    language: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a policy says about a request. `ask`: a person must decide."""

    answer: Literal["allow", "deny", "ask"]
    policy_digest: Digest | None
    policy_ids: Sequence[str] = ()
    rationale: str | None = None
