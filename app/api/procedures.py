"""Procedures: workers register the programs that they have, programs in Lua are submitted as text, and everyone sees of
what runs can be started."""

from __future__ import annotations

import asyncio
from typing import Any, Final

from fastapi import APIRouter
from pydantic import ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from app.api.documents import ListPage, Shape
from app.api.openapi import request_body
from app.api.traces import json_answer
from app.config.procedure_schema import verify_procedure_schema
from app.core import errors
from app.core.canonical import parse_object
from app.core.errors import Forbidden
from app.domain.identity import Principal
from app.domain.ledger.documents import Name, Sha256, Text, Time
from app.domain.runs.procedures import ListPosition, ProcedureSaid
from app.domain.runs.submissions import LintFinding, SubmissionSaid
from app.domain.system.documents import (
    EventTrigger,
    Language,
    ProcedureName,
    ProcedurePolicy,
    ProcedureRegistration,
)
from app.domain.system.programs import Program
from app.edge.body import checked, read_bytes
from app.edge.cursors import list_cursor, list_position
from app.edge.parameters import documented_parameters, limit_in, name_in, parameters
from app.edge.permissions import may, require, require_on
from app.edge.problems import documented
from app.edge.services import Services

_SCHEMAS: Final = ("input_schema", "output_schema", "state_schema")
_LISTED: Final[dict[str, Any]] = {
    "name": "onboard",
    "version": "1.2.0",
    "program_digest": "ab" * 32,
    "language": "python",
    "tags": ["crm"],
    "triggers": [{"event": "customer.signed"}],
    "registered_at": "2026-01-01T00:00:00.000Z",
    "registered_by": "worker-1",
}
_POLICY: Final[dict[str, Any]] = {
    "timeout_ms": 3_600_000,
    "checkpoint_timeout_ms": 300_000,
    "retry": {"retries": 2, "first_ms": 1_000, "max_ms": 60_000},
    "park_after": 5,
    "retention": "keep",
}
_SAID: Final[dict[str, Any]] = {
    "name": "onboard",
    "version": "1.2.0",
    "program_digest": "ab" * 32,
    "language": "python",
    "description": "Makes an account for a new customer.",
    "input_schema": {"type": "object", "required": ["email"]},
    "policy": _POLICY,
    "triggers": [{"event": "customer.signed"}],
    "tags": ["crm"],
}


_SUBMITTED: Final[dict[str, Any]] = {
    "name": "greet",
    "language": "lua",
    "source": 'input { name = field.string{required = true} }\nreturn { greeting = "Hello, " .. input.name }\n',
    "files": {"prices.json": '{"tea": 3}'},
}


class _Program(Shape):
    name: ProcedureName
    version: Name
    program_digest: Sha256
    language: Language
    tags: list[Name]
    triggers: list[EventTrigger] = Field(description="Events of these names start it.")
    registered_at: Time
    registered_by: Name


class ProgramItem(_Program):
    is_newest: bool = Field(description="A start that names no version takes it.")


class ProcedurePage(ListPage):
    model_config = ConfigDict(json_schema_extra={"example": {"items": [{**_LISTED, "is_newest": True}], "next": None}})
    items: list[ProgramItem]


class RegisteredDocument(_Program):
    model_config = ConfigDict(json_schema_extra={"example": {**_LISTED, "is_new": True}})
    is_new: bool = Field(description="False: exactly this had been registered before, and nothing changed.")
    findings: list[LintFinding] | None = Field(
        default=None,
        description="Of a submitted program: what `tga lint` finds in it. They do not keep it from running",
    )


class FileDocument(Shape):
    name: str
    sha256: Sha256 = Field(description="GET /v1/blobs/{sha256} has its bytes.")
    size_bytes: int


class ProcedureDocument(_Program):
    model_config = ConfigDict(
        json_schema_extra={
            "example": {
                **_LISTED,
                "description": None,
                "input_schema": {"type": "object"},
                "output_schema": None,
                "state_schema": None,
                "policy": _POLICY,
                "source": None,
                "files": None,
            }
        }
    )
    description: Text | None
    input_schema: dict[str, Any] | None
    output_schema: dict[str, Any] | None
    state_schema: dict[str, Any] | None
    policy: ProcedurePolicy
    source: str | None = Field(
        description="A submitted program, for who submitted it and for supervisors, operators and auditors."
    )
    files: list[FileDocument] | None = Field(description="Its files, for the same.")


_APPENDING: Final = (
    errors.ConcurrentExecution,
    errors.ChecksumMismatch,
    errors.SequenceGap,
    errors.LockAcquireFailed,
    errors.StoreBusy,
    errors.OutcomeUnknown,
)


def router(services: Services) -> APIRouter:
    routes = APIRouter(tags=["procedures"])

    @routes.post(
        "/v1/procedures",
        operation_id="register_procedure",
        summary="Register a program that runs can be started of; the same again changes nothing",
        response_model=None,
        responses={
            200: {"model": RegisteredDocument},
            **documented(
                errors.SchemaViolation,
                errors.ProcedureLimitReached,
                errors.ProcedureSourceInvalid,
                errors.SubmissionDenied,
                errors.LuaUnavailable,
                errors.BlobNotFound,
                errors.BlobDamaged,
                errors.BlobGoing,
                errors.BlobStoreUnavailable,
                errors.RunBlobMissing,
                *_APPENDING,
            ),
        },
        openapi_extra=_either_body(),
    )
    async def register(request: Request) -> Response:
        async with services.admitted(request) as principal:
            parameters(request)
            if not may(principal, "submit_procedure"):
                require(principal, "register_procedure")
            fields = parse_object(await read_bytes(request.scope, request.receive))
            if fields.get("language") == "lua":
                return await submit(fields, principal)
            require(principal, "register_procedure")
            said = checked(ProcedureSaid, fields)
            for name in _SCHEMAS:
                schema = getattr(said, name)
                if schema is not None:
                    await asyncio.to_thread(verify_procedure_schema, f"the body at /{name}", schema)
            registered = await services.procedures.register(said, principal)
            return json_answer({**_program(registered.program), "is_new": registered.is_new})

    async def submit(fields: dict[str, Any], principal: Principal) -> Response:
        require(principal, "submit_procedure")
        registered, findings = await services.submissions.submit(checked(SubmissionSaid, fields), principal)
        services.program_submitted(principal.tenant)
        told = {**_program(registered.program), "is_new": registered.is_new}
        return json_answer({**told, "findings": [finding.to_json() for finding in findings]})

    @routes.get(
        "/v1/procedures",
        operation_id="list_procedures",
        summary="List the tenant's programs by the name of their procedure, of each the newest first",
        response_model=None,
        responses={200: {"model": ProcedurePage}, **documented(errors.ChecksumMismatch, errors.SequenceGap)},
        openapi_extra=documented_parameters("procedure", "cursor", "limit"),
    )
    async def list_of_procedures(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_procedure")
            given = parameters(request, "procedure", "cursor", "limit")
            position = list_position("procedures", given.get("cursor"))
            after = None
            if position is not None:
                name, _, number = position.rpartition(":")
                after = ListPosition(name, int(number))
            listed, goes_on = await services.procedures.list(
                principal.tenant, name=name_in(given, "procedure"), after=after, limit=limit_in(given)
            )
            items = [{**_program(one.program), "is_newest": one.is_newest} for one in listed]
            cursor = None if goes_on is None else f"{goes_on.name}:{goes_on.sequence_number}"
            return json_answer({"items": items, "next": list_cursor("procedures", cursor)})

    @routes.get(
        "/v1/procedures/{name}",
        operation_id="load_procedure",
        summary="One program with its schemas: the newest, or the newest of a version, or the one of a digest",
        response_model=None,
        responses={
            200: {"model": ProcedureDocument},
            **documented(
                errors.ProcedureNotFound,
                errors.ChecksumMismatch,
                errors.SequenceGap,
                errors.RecoveryFailed,
                errors.BlobNotFound,
                errors.BlobDamaged,
                errors.BlobStoreUnavailable,
            ),
        },
        openapi_extra=documented_parameters("version", "program_digest", in_path=("name",)),
    )
    async def load_procedure(request: Request) -> Response:
        async with services.admitted(request) as principal:
            require(principal, "read_procedure")
            given = parameters(request, "version", "program_digest")
            found = await services.procedures.find(
                principal.tenant,
                request.path_params["name"],
                version=name_in(given, "version"),
                program_digest=name_in(given, "program_digest"),
            )
            return json_answer({**_procedure(found), **await source_for(principal, found)})

    async def source_for(principal: Principal, found: ProcedureRegistration) -> dict[str, Any]:
        """Text and files of a submitted program, for those who may read them."""
        nothing = {"source": None, "files": None}
        try:
            require_on(principal, "read_source", owner_id=found.recorded_by)
        except Forbidden:
            return nothing
        program = await services.submissions.load(principal.tenant, found)
        if program is None or found.program_source is None:
            return nothing
        return {"source": program.text, "files": [file.to_json() for file in found.program_source.files]}

    return routes


def _either_body() -> dict[str, Any]:
    """What a worker says of a program that it has, or a program as text."""
    registered, submitted = request_body(ProcedureSaid, _SAID), request_body(SubmissionSaid, _SUBMITTED)
    (one,), (other,) = (body["requestBody"]["content"].values() for body in (registered, submitted))
    examples = {"a worker's program": {"value": _SAID}, "a program in Lua": {"value": _SUBMITTED}}
    either = {"schema": {"anyOf": [one["schema"], other["schema"]]}, "examples": examples}
    return {"requestBody": {"required": True, "content": {"application/json": either}}}


def _program(program: Program) -> dict[str, Any]:
    return {
        "name": program.name,
        "version": program.version,
        "program_digest": program.program_digest,
        "language": program.language,
        "tags": list(program.tags),
        "triggers": [{"event": event} for event in program.events],
        "registered_at": program.registered_at,
        "registered_by": program.registered_by,
    }


def _procedure(found: ProcedureRegistration) -> dict[str, Any]:
    said = {name: value for name, value in found.to_json().items() if name in ProcedureDocument.model_fields}
    return {**said, "registered_at": found.recorded_at, "registered_by": found.recorded_by}
