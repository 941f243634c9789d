"""What people answer is signed, by the gateway for them or by themselves; and what let a run start is on the record."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.core.canonical import canonical_bytes
from app.core.ed25519 import key_id_of, verify_signature
from app.domain.ledger.documents import Signature
from app.domain.runs.documents import RunAnswer, RunStart
from app.domain.system.decision_signer import SystemDecisionSigner
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.sessions import Sessions
from tests.api.reading import PEOPLE
from tests.conftest import Admin
from tests.invariants.plans import verify_all
from tests.runs.routes import Runs, open_runs
from tests.runs.test_answering_routes import approvals
from tests.runtime.scripted import KEYS

AT = "2026-01-01T00:00:00.000Z"


@pytest.fixture
async def runs(database: Database, sessions: Sessions, ledger: PostgresLedger, tmp_path: Path) -> AsyncIterator[Runs]:
    async with open_runs(database, sessions, ledger, tmp_path) as opened:
        yield opened


async def recorded(runs: Runs, run_id: str, kind: str) -> list[dict[str, Any]]:
    items = (await runs.front.page(f"/v1/runs/{run_id}/entries"))["items"]
    return [item["artifact"] for item in items if item["entry"]["artifact_type"] == kind]


def signed(key: Ed25519PrivateKey, question: dict[str, Any], answer: Any, **changed: Any) -> dict[str, Any]:
    """The body of an answer, signed as docs/approvals.md says: written from it, without the gateway's code."""
    said = {
        "schema_id": "tga/v1/run_answer",
        "schema_version": "1.0",
        "run_id": question["run_id"],
        "path": question["path"],
        "intent_digest": question["intent_digest"],
        "outcome": "OK",
        "value": {"tier": "inline", "value": answer},
        "error": None,
        "answered_by": {"type": "person", "id": PEOPLE["supervisor"].principal_id},
        "answered_at": AT,
    }
    value = b64encode(key.sign(canonical_bytes({**said, **changed}))).decode()
    key_id = key_id_of(key.public_key().public_bytes_raw())
    return {
        "path": question["path"],
        "answer": answer,
        "intent_digest": question["intent_digest"],
        "signature": value,
        "key_id": key_id,
        "answered_at": AT,
    }


async def register(runs: Runs, key: Ed25519PrivateKey, principal_id: str) -> None:
    signer = runs.engine.engine.ports.signer
    assert isinstance(signer, SystemDecisionSigner)
    await signer.register("default", principal_id, key.public_key().public_bytes_raw(), by="admin")


async def test_the_gateway_signs_for_whom_it_has_authenticated(runs: Runs, sessions: Sessions) -> None:
    await runs.asking("r-1")
    large = "x" * 40_000
    await runs.asking("r-2", answer_schema={"type": "string"})
    for run_id, answer in (("r-1", True), ("r-2", large)):
        body = {"path": "1", "answer": answer}
        await runs.ok(await runs.front.post(f"/v1/runs/{run_id}/signals", body, "supervisor"))
        (answered,) = await recorded(runs, run_id, "run_answer")
        document = RunAnswer.model_validate(answered)
        assert document.answered_by.id == PEOPLE["supervisor"].principal_id
        assert document.signature is not None
        assert document.signature.key_id == KEYS.key_id
        assert verify_signature(KEYS.public_key_bytes, document.signature, document.signed_bytes())
    assert answered["value"]["tier"] == "artifact", "a large answer is signed by its digest"
    assert (await verify_all(sessions)).signatures == 2


async def test_a_persons_own_signature_stands_with_their_answer(runs: Runs, sessions: Sessions) -> None:
    key = Ed25519PrivateKey.generate()
    await runs.asking("r-1", answer_schema={})
    (question,) = await approvals(runs)
    own = signed(key, question, {"small": 1e-7, "wakes": "NO"})
    status, document = await runs.front.post("/v1/runs/r-1/signals", own, "supervisor")
    assert (status, document["code"]) == (422, "SIGNATURE_INVALID"), "the key is not registered yet"
    await register(runs, key, PEOPLE["supervisor"].principal_id)
    for name in ("signature", "key_id", "answered_at"):
        part = {field: value for field, value in own.items() if field != name}
        status, document = await runs.front.post("/v1/runs/r-1/signals", part, "supervisor")
        assert (status, document["code"]) == (400, "INPUT_MALFORMED"), name
    for wrong in (
        {**own, "answer": {"small": 2e-7, "wakes": "NO"}},
        {**own, "answered_at": "2026-01-01T00:00:00.001Z"},
        signed(key, question, True, path="2"),
        signed(key, question, True, run_id="r-2"),
        signed(key, question, True, intent_digest="0" * 64),
        signed(key, question, True, answered_by={"type": "person", "id": "somebody"}),
    ):
        status, document = await runs.front.post("/v1/runs/r-1/signals", wrong, "supervisor")
        assert (status, document["code"]) == (422, "SIGNATURE_INVALID"), wrong
    status, document = await runs.front.post("/v1/runs/r-1/signals", {**own, "path": None, "name": "go"}, "agent")
    assert (status, document["code"]) == (400, "INPUT_MALFORMED"), "a signal is not signed"
    assert len(await approvals(runs)) == 1
    await runs.ok(await runs.front.post("/v1/runs/r-1/signals", own, "supervisor"))
    await runs.ok(await runs.front.post("/v1/runs/r-1/signals", own, "supervisor"))  # told again
    (answered,) = await recorded(runs, "r-1", "run_answer")
    assert (
        answered["signature"] == Signature(algorithm="Ed25519", key_id=own["key_id"], value=own["signature"]).to_json()
    )
    assert answered["answered_at"] == AT
    await verify_all(sessions)


async def test_what_let_a_run_start_stands_on_its_start(runs: Runs, admin: Admin) -> None:
    """Which policy, by the digest under which the system stream has its text, and which of its rules."""
    await runs.complete("r-1")
    await runs.ok(await runs.front.post("/v1/runs/r-1/fork", {"at": 1, "run_id": "f-1"}))
    policy = runs.engine.engine.ports.supervisor
    for run_id in ("r-1", "f-1"):
        (started,) = await recorded(runs, run_id, "run_start")
        start = RunStart.model_validate(started)
        assert start.allowed_by.policy_digest == policy.digest  # type: ignore[attr-defined]  # the policy's file
        assert start.allowed_by.policy_ids, "the packaged policy permits by rules that have names"
