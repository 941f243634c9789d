"""What an id, an idempotency key or a digest belongs to, as far as a principal sees. Only exact matches, by index."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal

from app.config import qualify
from app.core.errors import InputMalformed
from app.core.limits import FIND_CHARS_MAX
from app.domain.addresses import OWN_RUN_ID_PATTERN
from app.domain.identity import Principal
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.edge.parameters import own_name
from app.edge.permissions import scope_of
from app.edge.runs import own_run_id
from app.edge.services import Services
from app.postgres.finding import FoundStream, find_by_digest, find_by_key, find_by_name

_SOUGHT: Final = re.compile(rf"[!-~]([ -~]{{0,{FIND_CHARS_MAX - 2}}}[!-~])?")
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_UUID: Final = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_RUN_ID: Final = re.compile(OWN_RUN_ID_PATTERN)


@dataclass(frozen=True, slots=True)
class Found:
    """A trace or run, and by what it was found. `sequence_number`: at which of its entries the digest stands."""

    kind: Literal["trace", "run"]
    id: str
    by: Literal["id", "idempotency_key", "digest"]
    sequence_number: int | None
    state: str
    waiting: str | None
    server_id: str | None
    tool_name: str | None
    procedure: str | None
    principal_id: str | None
    updated_at: str


def sought_in(given: dict[str, str]) -> str:
    """What `q` asks for; InputMalformed for what no id, key or digest can be."""
    sought = given.get("q", "").strip(" ")
    if not _SOUGHT.fullmatch(sought):
        raise InputMalformed(
            "q", expected=f"1 to {FIND_CHARS_MAX} printable ASCII characters", remedy="Say what to look for."
        )
    return sought


async def find(services: Services, principal: Principal, sought: str) -> list[Found]:
    """Every trace and run within the principal's scope whose id or key this is, or one of whose entries or artifacts
    has this digest; at most FIND_ITEMS_MAX of each. What is not there and what belongs to others look the same."""
    scope, tenant = scope_of(principal), principal.tenant
    found: list[Found] = []
    names = [TRACE.stream(sought.lower())] if _UUID.fullmatch(sought.lower()) else []
    if _RUN_ID.fullmatch(sought):
        names.append(RUN.stream(qualify(tenant, sought)))
    if names:
        found += [_found(tenant, one, "id") for one in await find_by_name(services.sessions, scope, names)]
    tools = [(tool.server_id, tool.tool_name) for tool in services.registry.tools(tenant)]
    by_key = await find_by_key(services.sessions, scope, sought, tools=tools)
    found += [_found(tenant, one, "idempotency_key") for one in by_key]
    if _DIGEST.fullmatch(sought.lower()):
        by_digest = await find_by_digest(services.sessions, scope, bytes.fromhex(sought))
        found += [_found(tenant, one, "digest") for one in by_digest]
    return found


def _found(tenant: str, one: FoundStream, by: Literal["id", "idempotency_key", "digest"]) -> Found:
    is_run = RUN.has(one.stream)
    identity = (RUN if is_run else TRACE).identity_of(one.stream)
    return Found(
        kind="run" if is_run else "trace",
        id=own_run_id(tenant, identity) if is_run else identity,
        by=by,
        sequence_number=one.sequence_number,
        state=one.state,
        waiting=one.waiting,
        server_id=None if is_run else own_name(tenant, one.subject),
        tool_name=None if is_run else one.name,
        procedure=one.subject if is_run else None,
        principal_id=one.principal_id,
        updated_at=one.updated_at,
    )
