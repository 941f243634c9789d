"""The verifiable log over HTTP: its signed head, proofs, the key to verify them with, and receipts of traces and runs.

The head and the proofs are for everyone who may call at all: they are hashes, and say nothing of who did what. A
receipt is for those who may see the trace or run.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import Request
from starlette.responses import Response

from app.api.traces import json_answer
from app.core.errors import ChecksumMismatch, InputMalformed, NotYetLogged, RunNotFound, TgaError, TraceNotFound
from app.core.limits import RECEIPT_POLL_MS, RECEIPT_WAIT_MS
from app.core.merkle import Hash
from app.core.note import TlogProof
from app.domain.log.heads import SignedHead
from app.domain.runs.transitions import RUN
from app.domain.tga.transitions import TRACE
from app.edge.parameters import documented_parameters, number_in, parameters, trace_seen_by
from app.edge.problems import documented
from app.edge.runs import run_seen_by
from app.edge.services import Services
from app.postgres.tree import Place, PostgresTree

_TEXT: Final = "text/plain; charset=utf-8"
_NOTE_EXAMPLE: Final = (
    "tga.example/log\n4\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n"
    "— tga.example/log Az3grlgtzPICa5OS8npVmf1Myq/5IznZZlMVW5ndRQhwR7xL50ewmXZHTIJqzuRmZIlyBFRIHIqGbplVBvoKLoWGhwU=\n"
)
_PROOF_EXAMPLE: Final = (
    "c2sp.org/tlog-proof@v1\nindex 2\nCsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=\n\n" + _NOTE_EXAMPLE
)

HashText = Annotated[str, Field(pattern=r"^[A-Za-z0-9+/]{43}=$", description="SHA-256 in base64.")]
_HASH_EXAMPLE: Final = "CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I="


class InclusionProof(BaseModel):
    """That leaf `index` is in the tree of `size` leaves: RFC 9162, section 2.1.3; from the leaf's sibling up."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"index": 2, "size": 4, "hashes": [_HASH_EXAMPLE]}]})
    index: int
    size: int
    hashes: list[HashText]


class ConsistencyProof(BaseModel):
    """That the tree of `new` leaves begins with the tree of `old` leaves: RFC 9162, section 2.1.4."""

    model_config = ConfigDict(json_schema_extra={"examples": [{"old": 2, "new": 4, "hashes": [_HASH_EXAMPLE]}]})
    old: int
    new: int
    hashes: list[HashText]


def router(services: Services) -> APIRouter:
    routes, tree = APIRouter(tags=["log"]), PostgresTree(services.sessions)

    @routes.get(
        "/v1/log/checkpoint",
        operation_id="get_checkpoint",
        summary="The newest tree head, as a signed note (C2SP tlog-checkpoint)",
        response_class=Response,
        responses={200: _text("The note.", _NOTE_EXAMPLE), **documented(NotYetLogged)},
    )
    async def checkpoint(request: Request) -> Response:
        async with services.admitted(request):
            parameters(request)
            return _text_answer((await _latest(tree)).note)

    @routes.get(
        "/v1/log/key",
        operation_id="get_log_key",
        summary="The public key that verifies new heads (C2SP verifier key)",
        response_class=Response,
        responses={
            200: _text("The key.", "tga.example/log+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW\n"),
            **documented(),
        },
    )
    async def key(request: Request) -> Response:
        async with services.admitted(request):
            parameters(request)
            return _text_answer(services.log.verifier_key.to_text() + "\n")

    @routes.get(
        "/v1/log/proof/inclusion",
        operation_id="prove_inclusion",
        summary="That a leaf is in the tree of a size",
        response_model=None,
        responses={200: {"model": InclusionProof}, **documented(NotYetLogged, ChecksumMismatch)},
        openapi_extra=documented_parameters("index", "size"),
    )
    async def inclusion(request: Request) -> Response:
        async with services.admitted(request):
            given = parameters(request, "index", "size")
            index, size = number_in(given, "index"), number_in(given, "size")
            _expect("size", size, at_most=(await _latest(tree)).head.size)
            _expect("index", index, at_most=size - 1)
            hashes = await tree.inclusion_proof(index, size)
            return json_answer({"index": index, "size": size, "hashes": _encoded(hashes)})

    @routes.get(
        "/v1/log/proof/consistency",
        operation_id="prove_consistency",
        summary="That the tree of one size begins with the tree of another",
        response_model=None,
        responses={200: {"model": ConsistencyProof}, **documented(NotYetLogged, ChecksumMismatch)},
        openapi_extra=documented_parameters("old", "new"),
    )
    async def consistency(request: Request) -> Response:
        async with services.admitted(request):
            given = parameters(request, "old", "new")
            old, new = number_in(given, "old"), number_in(given, "new")
            _expect("new", new, at_most=(await _latest(tree)).head.size)
            _expect("old", old, at_most=new)
            hashes = await tree.consistency_proof(old, new)
            return json_answer({"old": old, "new": new, "hashes": _encoded(hashes)})

    @routes.get(
        "/v1/traces/{trace_id}/receipt",
        operation_id="get_receipt",
        summary="Proof that a trace's last entry is in the log (C2SP tlog-proof)",
        response_class=Response,
        responses={
            200: _text(
                "The proof. Its leaf is the trace's last entry, byte for byte as `/entries` sends it; the line `extra` "
                "holds it in base64, so that the receipt can be verified alone.",
                _PROOF_EXAMPLE,
            ),
            **documented(TraceNotFound, NotYetLogged, ChecksumMismatch),
        },
        openapi_extra=documented_parameters("trace_id"),
    )
    async def receipt(request: Request) -> Response:
        async with services.admitted(request) as principal:
            trace_id = await trace_seen_by(services, principal, request)
            parameters(request)
            return await _receipt(tree, TRACE.stream(trace_id), TraceNotFound("no such trace"))

    @routes.get(
        "/v1/runs/{run_id}/receipt",
        operation_id="get_run_receipt",
        summary="Proof that a run's last entry is in the log (C2SP tlog-proof)",
        response_class=Response,
        responses={
            200: _text("The proof. Its leaf is the run's last entry, as with receipts of traces.", _PROOF_EXAMPLE),
            **documented(RunNotFound, NotYetLogged, ChecksumMismatch),
        },
        openapi_extra=documented_parameters("run_id"),
    )
    async def receipt_of_run(request: Request) -> Response:
        async with services.admitted(request) as principal:
            run_id = await run_seen_by(services, principal, request.path_params["run_id"])
            parameters(request)
            return await _receipt(tree, RUN.stream(run_id), RunNotFound("no such run"))

    return routes


async def _receipt(tree: PostgresTree, stream: str, missing: TgaError) -> Response:
    found = await _place_in_time(tree, stream)
    if found is None:
        raise missing
    sequence_number, place = found
    hashes = await tree.inclusion_proof(place.index, place.signed.head.size)
    entry = await tree.entry_bytes(stream, sequence_number)
    return _text_answer(TlogProof(place.index, hashes, place.signed.note, entry).to_text())


async def _latest(tree: PostgresTree) -> SignedHead:
    latest = await tree.latest_head()
    if latest is None:
        raise NotYetLogged("the log has no signed head yet")
    return latest


async def _place_in_time(tree: PostgresTree, stream: str) -> tuple[int, Place] | None:
    """Which the stream's last entry is, and where it stands; waits a little for a head that covers it. None: there is
    no such stream."""
    sequence_number = await tree.last_sequence_number(stream)
    if sequence_number is None:
        return None
    deadline = asyncio.get_running_loop().time() + RECEIPT_WAIT_MS / 1000
    while (place := await tree.place_of(stream, sequence_number)) is None:
        if asyncio.get_running_loop().time() >= deadline:
            raise NotYetLogged("no signed head covers the last entry yet").at(
                stream=stream, sequence_number=sequence_number
            )
        await asyncio.sleep(RECEIPT_POLL_MS / 1000)
    return sequence_number, place


def _expect(what: str, found: int, *, at_most: int) -> None:
    if found > at_most:
        raise InputMalformed(f"{what} is beyond the tree", expected=f"at most {at_most}", found=found)


def _encoded(hashes: Sequence[Hash]) -> list[str]:
    return [b64encode(one).decode("ascii") for one in hashes]


def _text_answer(text: str) -> Response:
    return Response(text.encode("utf-8"), headers={"Content-Type": _TEXT, "Cache-Control": "no-store"})


def _text(description: str, example: str) -> dict[str, Any]:
    return {"description": description, "content": {_TEXT: {"schema": {"type": "string"}, "example": example}}}
