"""What is served without a key: the OpenAPI document, its page, the catalogue of errors, and health."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from app.core.errors import ALL_ERRORS
from app.edge.problems import STATUS
from tests.api.wire import CALL, Front, request

pytestmark = pytest.mark.asyncio(loop_scope="module")
PATHS = {
    "/v1/tool-calls": {"post"},
    "/v1/traces/{trace_id}/decision": {"post"},
    "/v1/traces/{trace_id}/withdraw": {"post"},
    "/v1/traces/{trace_id}/recover": {"post"},
    "/v1/traces/{trace_id}/resolve": {"post"},
    "/v1/tools/{server_id}/{tool_name}/pin": {"post"},
    "/v1/traces": {"get"},
    "/v1/traces/{trace_id}": {"get"},
    "/v1/approvals": {"get"},
    "/v1/events": {"get"},
    "/healthz": {"get"},
    "/readyz": {"get"},
}


async def openapi(front: Front) -> Any:
    reply = await front.ask(request("/openapi.json", method="GET", who=None))
    assert reply.status == 200
    return reply.document


async def test_every_route_is_documented_with_its_parts_and_its_errors(lasting_front: Front) -> None:
    document = await openapi(lasting_front)
    for path, methods in PATHS.items():
        assert methods <= set(document["paths"][path]), path
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            at = f"{method} {path}"
            named = {part["name"] for part in operation.get("parameters", []) if part["in"] == "path"}
            assert named == {part.strip("{}") for part in path.split("/") if part.startswith("{")}, at
            assert operation["summary"], at
            for status, response in operation["responses"].items():
                if int(status) >= 400:
                    examples = response["content"]["application/problem+json"]["examples"]
                    assert all(example["value"]["status"] == int(status) for example in examples.values()), at
            if path.startswith("/v1/") and operation.get("security") != []:
                assert {"400", "401", "403", "408", "413", "429", "431", "500", "503"} <= set(operation["responses"]), (
                    at
                )
            else:
                assert operation["security"] == [], at


def _value(example: Any, document: Any) -> Any:
    if "$ref" in example:
        example = document["components"]["examples"][example["$ref"].rpartition("/")[2]]
    return example["value"]


async def test_every_example_fits_its_schema(lasting_front: Front) -> None:
    document = await openapi(lasting_front)
    checked = 0
    for operations in document["paths"].values():
        for operation in operations.values():
            contents = [operation.get("requestBody", {}).get("content", {})]
            contents += [response.get("content", {}) for response in operation["responses"].values()]
            for content in contents:
                for media in content.values():
                    values = [_value(example, document) for example in media.get("examples", {}).values()]
                    values += [media["example"]] if "example" in media else []
                    schema = {**media.get("schema", {}), "components": document["components"]}
                    for value in values:
                        jsonschema.validate(value, schema, cls=jsonschema.Draft202012Validator)
                        checked += 1
    assert checked > 100


async def test_an_answer_fits_what_is_documented(lasting_front: Front) -> None:
    document = await openapi(lasting_front)
    operation = document["paths"]["/v1/tool-calls"]["post"]
    for raw in (request(body=CALL), request(body=b"{"), request(body={}), request(body=CALL, who="nobody")):
        reply = await lasting_front.ask(raw)
        content = operation["responses"][str(reply.status)]["content"]
        schema = content[reply.headers["content-type"]]["schema"]
        jsonschema.validate(reply.document, {**schema, "components": document["components"]})


async def test_the_type_of_a_problem_leads_to_its_explanation(lasting_front: Front) -> None:
    text = (await lasting_front.ask(request("/errors", method="GET", who=None))).body.decode()
    page = (await lasting_front.ask(request("/errors", method="GET", who=None, headers={"Accept": "text/html"}))).body
    for error in ALL_ERRORS:
        assert f"\n## {error.code}\n" in text
        assert f'id="{error.code.lower()}"'.encode() in page
    assert text == (Path(__file__).parents[2] / "docs" / "errors.md").read_text("utf-8")


async def test_the_pages_bring_nothing_from_elsewhere(lasting_front: Front) -> None:
    for path in ("/docs", "/errors"):
        reply = await lasting_front.ask(request(path, method="GET", who=None, headers={"Accept": "text/html"}))
        assert reply.status == 200
        assert b"<script" not in reply.body
        assert re.findall(rb'(?:href|src|url)[=(]"?https?:', reply.body) == []  # examples may name addresses
        assert "default-src 'none'" in reply.headers["content-security-policy"]


async def test_every_error_that_a_request_can_meet_has_a_status() -> None:
    # Only commands meet these. Whoever adds an error decides: here, or in `STATUS`.
    local = {
        "CHECKPOINT_MISSING",
        "CONFIRMATION_NEEDED",
        "MIGRATION_REFUSED",
        "EMBEDDED_POSTGRES_FAILED",
        "BACKUP_FAILED",
        "ENTRY_UNLOGGED",
        "SETTING_INVALID",
        "POLICY_INVALID",
        "GATEWAY_UNREACHABLE",
        "NOTE_INVALID",
        "PROOF_INVALID",
        "BUNDLE_INVALID",
        "VERIFICATION_UNFINISHED",
    }
    assert {error.code for error in ALL_ERRORS if error not in STATUS} <= local
