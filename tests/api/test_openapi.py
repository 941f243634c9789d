"""The OpenAPI document, from outside: complete, true, and what the gateway does."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cached_property
from itertools import chain, groupby
from pathlib import Path
from typing import Any

import pytest
import requests
from jsonschema import Draft202012Validator, ValidationError

from app.core import errors
from app.edge.problems import MEDIA_TYPE, STATUS
from tests import sampling
from tests.cli.world import World, wait_for
from tests.conftest import make_home
from tests.patience import HANG_S

SECONDS_MAX = 900  # a hang guard
RANDOM_CASES = 12
# SURFACES.md, "HTTP, under /v1", as far as it is built.
ROUTES = {
    "POST /v1/tool-calls",
    "GET /v1/traces",
    "GET /v1/traces/{trace_id}",
    "GET /v1/traces/{trace_id}/entries",
    "GET /v1/traces/{trace_id}/events",
    "POST /v1/traces/{trace_id}/decision",
    "POST /v1/traces/{trace_id}/recover",
    "POST /v1/traces/{trace_id}/resolve",
    "POST /v1/traces/{trace_id}/withdraw",
    "GET /v1/events",
    "GET /v1/approvals",
    "POST /v1/runs",
    "GET /v1/runs",
    "GET /v1/runs/{run_id}/entries",
    "GET /v1/runs/{run_id}/events",
    "GET /v1/runs/{run_id}/receipt",
    "GET /v1/runs/{run_id}",
    "DELETE /v1/runs/{run_id}",
    "GET /v1/runs/{run_id}/state",
    "GET /v1/runs/{run_id}/checkpoints",
    "GET /v1/runs/{run_id}/checkpoints/{path}",
    "POST /v1/runs/{run_id}/signals",
    "POST /v1/runs/{run_id}/cancel",
    "POST /v1/runs/{run_id}/fork",
    "POST /v1/runs/{run_id}/retry",
    "POST /v1/runs/{run_id}/heartbeat",
    "POST /v1/runs/{run_id}/checkpoints",
    "POST /v1/worker/lease",
    "POST /v1/worker/heartbeat",
    "GET /v1/servers",
    "GET /v1/tools",
    "POST /v1/tools/{server_id}/{tool_name}/pin",
    "GET /healthz",
    "GET /readyz",
}
# They occur where there is no operation to list them.
BESIDE_EVERY_OPERATION = {errors.RouteNotFound.code, errors.MethodNotAllowed.code}
# A status in case they should ever leave; no route lets them.
NEVER_OVER_HTTP = {
    errors.AccessNotFound.code,  # keys and tenants are managed with `tga`
    errors.KeyClaimed.code,  # answered from the trace that has the key
    errors.ApprovalNotExpired.code,  # of the sweep
    errors.RunLeaseLost.code,  # a worker is told STOP, with 200
    errors.RunTooDeep.code,  # the program is told, in the answer to its operation
    errors.RunTooManyChildren.code,  # likewise
    errors.TraceUnfinished.code,  # traces are erased with `tga erase`
    errors.SignInRefused.code,  # of the console, which is not in the document
    errors.SignInExpired.code,
    errors.IssuerUnavailable.code,
}
DAILY = {"type": "cron", "expression": "30 2 * * *", "time_zone": "Europe/Berlin"}
UNKNOWN = "0197c2a4-5f0e-7c3a-9d54-3a1f0b8e2c11"


class Outside:
    """A gateway process with traces in every state that lasts."""

    def __init__(self, home: Path) -> None:
        self.world = World(home)
        self._prepare()
        self.document: dict[str, Any] = self.get("/openapi.json").json()

    def _prepare(self) -> None:
        config = self.world.config.read_text().replace("timeout_ms = 5000", "timeout_ms = 500")
        self.world.config.write_text(config + "\n[limits]\nrequests_per_second = 100000\nburst = 100000\n")
        start = '@id("start") permit(principal, action == Action::"start", resource);'
        self.world.policy.write_text(f"{self.world.policy.read_text()}\n{start}\n")
        self.world.start()
        self.session = requests.Session()
        self.session.headers["Authorization"] = f"Bearer {self.world.admin_key()}"

    def get(self, path: str, **options: Any) -> requests.Response:
        return self.session.get(self.world.url + path, timeout=HANG_S, **options)

    def call(self, tool: str, key: str, **arguments: Any) -> requests.Response:
        body: Any = {"server_id": "bank", "tool_name": tool, "idempotency_key": key, "arguments": arguments}
        return self.session.post(f"{self.world.url}/v1/tool-calls", json=body, timeout=HANG_S)

    @cached_property
    def known(self) -> dict[str, Any]:
        """Ids for the fuzzer. Requests that wait are many, since each can be decided on once."""
        finished = [
            self.call("charge", "done", amount=1),
            self.call("fail", "failed"),
            self.call("charge", "denied", amount=13),
        ]
        held = self.call("slow_charge", "held", amount=1, ms=900)
        pending = [self.call("refund", f"waits-{n}", amount=n) for n in range(24)]
        assert [answer.status_code for answer in (*finished, held, *pending)] == [200, 200, 403, 202, *[202] * 24]
        held_id = held.json()["trace_id"]
        wait_for(lambda: self.get(f"/v1/traces/{held_id}").json()["waiting"] == "operator")

        def described(answers: list[requests.Response]) -> list[dict[str, Any]]:
            return [self.get(f"/v1/traces/{answer.json()['trace_id']}").json() for answer in answers]

        return {
            "finished": described(finished),
            "held": described([held]),
            # The first ones come up most; every second is one that waits.
            "traces": [
                trace
                for n, one in enumerate(described(pending))
                for trace in (one, described([*finished, held])[n % 4])
            ],
            "runs": self._runs(),
            "daily": DAILY,
            "schedules": self._schedules(),
            "verification_id": self._post("/v1/log/verifications", {}, 202)["verification_id"],
            "tools": [tool for tool in self.get("/v1/tools").json()["items"] if tool["server_id"] == "bank"],
        }

    def _runs(self) -> dict[str, Any]:
        """Runs that are ready, leased, waiting for an answer, failed and completed."""
        program = {"name": "onboard", "version": "1", "program_digest": "ab" * 32}
        self._post("/v1/procedures", program)
        worker = {"worker": "outside-1", "name": "outside"}
        leased: list[dict[str, Any]] = []
        for n in range(24):
            self._post("/v1/runs", {"procedure": "onboard", "input": n, "run_id": f"leased-{n}"})
        while len(leased) < 24:
            ask = {**worker, "procedures": [program], "slots": 24, "wait_ms": 5_000}
            leased += self._post("/v1/worker/lease", ask)["runs"]
        question = {"form": "approve", "message": "Pay?", "answer_schema": {"type": "boolean"}}
        asked = {"type": "ask", "path": "1", "name": "pay?", "input_digest": "ab" * 32, "request": question}
        for n, run in enumerate(leased[:18]):
            put: dict[str, Any] = {"lease": run["lease"], "attempt": 1, "after_seq": run["sequence_number"]}
            if n < 12:
                put |= {"puts": [asked], "then": {"type": "suspend", "awaits": ["1"]}}
            else:
                error = {"type": "Broken", "message": "broken", "retryable": False}
                put |= {"then": {"type": "fail", "error": error}}
            self._post(f"/v1/runs/{run['run_id']}/checkpoints", put)
        self._post("/v1/runs", {"procedure": "onboard", "run_id": "ended"})
        self._post("/v1/runs/ended/cancel", {})
        return {
            "waiting": [run["run_id"] for run in leased[:12]],
            "failed": [run["run_id"] for run in leased[12:18]],
            "leased": leased[18:],
            "worker": worker,
            "program": program,
        }

    def _schedules(self) -> list[str]:
        """Each can be removed once."""
        names = [f"daily-{n}" for n in range(24)]
        for name in names:
            body: Any = {"procedure": "onboard", "spec": DAILY}
            answer = self.session.put(f"{self.world.url}/v1/schedules/{name}", json=body, timeout=HANG_S)
            assert answer.status_code == 200, answer.text
        return names

    def _post(self, path: str, body: Any, status: int = 200) -> Any:
        answer = self.session.post(self.world.url + path, json=body, timeout=HANG_S)
        assert answer.status_code == status, answer.text
        return answer.json()

    def close(self) -> None:
        self.session.close()
        self.world.close()


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    home = make_home()
    opened = Outside(home)
    try:
        yield opened
    finally:
        opened.close()
        shutil.rmtree(home)


@pytest.fixture(scope="module")
def document(outside: Outside) -> dict[str, Any]:
    return outside.document


def operations(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        f"{method.upper()} {path}": operation
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }


def contents(operation: dict[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Status, media type and what is said of it."""
    for status, response in operation["responses"].items():
        for media_type, content in response.get("content", {}).items():
            yield status, media_type, content


def examples_of(document: dict[str, Any], content: dict[str, Any]) -> list[Any]:
    schema = content.get("schema", {})
    if "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rpartition("/")[2]]
    found: list[Any] = [given["example"] for given in (content, schema) if "example" in given]
    found += schema.get("examples", [])
    for example in content.get("examples", {}).values():
        if "$ref" in example:
            example = document["components"]["examples"][example["$ref"].rpartition("/")[2]]
        found.append(example["value"])
    return found


def verify_fits(document: dict[str, Any], schema: dict[str, Any], value: Any) -> None:
    Draft202012Validator({**schema, "components": document["components"]}).validate(value)


def test_the_document_has_every_route_that_stays(document: dict[str, Any]) -> None:
    assert operations(document).keys() >= ROUTES
    names = [operation["operationId"] for operation in operations(document).values()]
    assert len(names) == len(set(names))


def test_who_reads_the_docs_finds_the_main_route_first_and_each_operation_by_its_noun(outside: Outside) -> None:
    nouns = [operation["tags"][0] for operation in operations(outside.document).values()]
    assert nouns[0] == "tool calls"
    assert len([noun for noun, _ in groupby(nouns)]) == len(set(nouns)), "the operations of a noun stand together"
    assert [tag["name"] for tag in outside.document["tags"] if tag["name"] in nouns] == list(dict.fromkeys(nouns))
    names = {label: operation["operationId"] for label, operation in operations(outside.document).items()}
    assert names["POST /v1/traces/{trace_id}/decision"] == "decide"
    assert names["POST /v1/tool-calls"] == "call_tool"
    assert all(re.fullmatch("[a-z_]{3,20}", name) for name in names.values()), names

    page = outside.get("/docs").text
    assert "$ref" not in page
    assert "<script" not in page
    index, _, rest = page.partition("</nav>")
    assert re.findall('href="#([a-z_]+)"><code>', index) == list(names.values())
    assert all(f'<h3 id="{name}">' in rest for name in names.values())
    anchors = set(re.findall(' id="([^"]+)"', page))
    assert set(re.findall('href="#([^"]+)"', page)) <= anchors


def test_an_effect_is_typed_wherever_it_is_answered(outside: Outside) -> None:
    trace = outside.known["finished"][0]
    effect = trace["artifacts"]["tool_effect"]
    answer = {"trace_id": trace["trace_id"], "state": "COMPLETED", "tool_call_id": trace["tool_call_id"]}
    moved = {**answer, "waiting": None, "decision": None}
    for shape, others in (
        ("TraceDocument", trace),
        ("ToolCallAnswer", {**answer, "replayed": False}),
        ("Moved", moved),
    ):
        schema = {"$ref": f"#/components/schemas/{shape}"}

        def told(value: Any, shape: str = shape, others: dict[str, Any] = others) -> dict[str, Any]:
            if shape == "TraceDocument":
                return {**others, "artifacts": {**others["artifacts"], "tool_effect": value}}
            return {**others, "tool_effect": value}

        verify_fits(outside.document, schema, told(effect))
        for wrong in ({**effect, "outcome": "MAYBE"}, {"outcome": "SUCCESS"}, "done"):
            with pytest.raises(ValidationError):
                verify_fits(outside.document, schema, told(wrong))


def test_every_operation_has_examples_and_they_fit_their_schemas(document: dict[str, Any]) -> None:
    for label, operation in operations(document).items():
        given = [(f"{label} {status}", content) for status, _, content in contents(operation)]
        if "requestBody" in operation:
            given += [(f"{label} body", content) for content in operation["requestBody"]["content"].values()]
        assert len(given) > 1, label
        for where, content in given:
            found = examples_of(document, content)
            assert found, f"{where} has no example"
            for example in found:
                verify_fits(document, content.get("schema", {}), example)


def test_every_operation_lists_its_errors_by_code_under_their_status(document: dict[str, Any]) -> None:
    status_of = {kind.code: status for kind, status in STATUS.items()}
    seen = set()
    for label, operation in operations(document).items():
        problems = [
            (status, media_type, content) for status, media_type, content in contents(operation) if status >= "4"
        ]
        assert problems, label
        for status, media_type, content in problems:
            assert media_type == MEDIA_TYPE, (label, status)
            for code, example in content["examples"].items():
                assert (str(status_of[code]), code) == (status, example["value"]["code"]), label
                seen.add(code)
        if label.split()[1].startswith("/v1/") and operation.get("security") != []:
            assert {"401", "403", "429", "500", "503"} <= operation["responses"].keys(), label
    assert seen == status_of.keys() - BESIDE_EVERY_OPERATION - NEVER_OVER_HTTP


def test_the_type_of_every_problem_leads_to_where_its_code_is_explained(outside: Outside) -> None:
    page = outside.get("/errors", headers={"Accept": "text/html"})
    text = outside.get("/errors")
    assert (page.status_code, text.status_code) == (200, 200)
    assert page.headers["content-type"].startswith("text/html")
    for kind in STATUS:
        for where, anchor in ((page.text, f'id="{kind.code.lower()}"'), (text.text, f"\n## {kind.code}\n")):
            assert where.count(anchor) == 1, kind.code
    for label, operation in operations(outside.document).items():
        for _, _, content in contents(operation):
            for code, example in content.get("examples", {}).items():
                if "value" in example:
                    path, _, anchor = example["value"]["type"].partition("#")
                    assert (path, anchor) == ("/errors", code.lower()), label


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing/here", 404, "ROUTE_NOT_FOUND"),
        ("DELETE", "/v1/traces", 405, "METHOD_NOT_ALLOWED"),
        ("GET", f"/v1/traces/{UNKNOWN}", 404, "TRACE_NOT_FOUND"),
    ],
)
def test_what_no_operation_answers_is_a_problem_too(
    outside: Outside, method: str, path: str, status: int, code: str
) -> None:
    answer = outside.session.request(method, outside.world.url + path, timeout=HANG_S)
    assert (answer.status_code, answer.headers["content-type"]) == (status, MEDIA_TYPE)
    assert answer.json()["code"] == code
    verify_fits(outside.document, {"$ref": "#/components/schemas/Problem"}, answer.json())


def events_in(answer: requests.Response, count: int) -> list[dict[str, str]]:
    """The first so many events of a stream."""
    found: list[dict[str, str]] = []
    fields: dict[str, str] = {}
    for line in answer.iter_lines(chunk_size=1):
        if line:
            name, _, value = line.decode().partition(": ")
            fields[name] = value
        elif fields:
            if "data" in fields:
                found.append(fields)
            fields = {}
        if len(found) == count:
            break
    return found


def test_events_are_what_the_document_says_of_their_items(outside: Outside) -> None:
    trace_id = outside.known["finished"][0]["trace_id"]
    with outside.get(f"/v1/traces/{trace_id}/events", stream=True) as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        *entries, end = events_in(answer, 5)
    assert [(entry["id"], entry["event"]) for entry in entries] == [(str(n), "entry") for n in range(1, 5)]
    assert (end["event"], json.loads(end["data"])["state"]) == ("end", "COMPLETED")
    for entry in entries:
        verify_fits(outside.document, {"$ref": "#/components/schemas/EntryItem"}, json.loads(entry["data"]))
    with outside.get("/v1/events", stream=True, headers={"Accept": "text/event-stream"}) as answer:
        for item in events_in(answer, 20):
            verify_fits(outside.document, {"$ref": "#/components/schemas/FeedItem"}, json.loads(item["data"]))


def test_schemathesis_finds_no_500_and_no_undocumented_answer(outside: Outside, tmp_path: Path) -> None:
    """Examples, coverage and random cases, right and wrong, of every operation (`make test`: those of every third
    path); the same in every run. Opaque cursors and ids make some requests that fit the document wrong all the same, so
    that one check is left out."""
    labels = operations(outside.document)
    asked = {label for label in labels if sampling.is_taken(label.split()[1], 3)} | {"POST /v1/tool-calls"}
    (tmp_path / "known.json").write_text(json.dumps(outside.known))
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{outside.world.url}/openapi.json", "--no-color"]
    command += ["--header", f"Authorization: {outside.session.headers['Authorization']}", "--workers", "1"]
    command += ["--phases", "examples,coverage,fuzzing", "--checks", "all", "--warnings", "off"]
    command += ["--exclude-checks", "positive_data_acceptance", "--max-examples", str(RANDOM_CASES)]
    command += ["--generation-deterministic", "--request-timeout", "20", "--continue-on-failure"]
    command += chain.from_iterable(("--include-name", label) for label in sorted(asked))
    environment = outside.world.environment(
        SCHEMATHESIS_HOOKS="tests.api.schemathesis_hooks", TGA_TEST_OUTSIDE=str(tmp_path), PYTHONPATH=str(Path.cwd())
    )
    run = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False, cwd=tmp_path
    )
    assert run.returncode == 0, run.stdout[-20_000:] + run.stderr
    answers: defaultdict[str, Counter[int]] = defaultdict(Counter)
    for line in (tmp_path / "answers.jsonl").read_text().splitlines():
        label, status, _ = json.loads(line)
        answers[label][status] += 1
    print(run.stdout[-2_000:], *sorted((label, dict(found)) for label, found in answers.items()), sep="\n")
    assert answers.keys() == asked
    for label, found in answers.items():  # it got past the door
        assert found[200] + found[202] > 0, (label, found)
    assert {200, 202, 400, 401, 403, 404, 422} <= answers["POST /v1/tool-calls"].keys()
    if (decision := "POST /v1/traces/{trace_id}/decision") in asked:
        assert {200, 404, 409} <= answers[decision].keys()
    assert "Traceback" not in outside.world.told.read_text()
