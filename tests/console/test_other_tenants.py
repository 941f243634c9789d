"""An id of another tenant is answered as an id that never was, byte for byte: on every page, form and GET of the API
that the console passes on."""

from __future__ import annotations

import hashlib
import inspect
import json
import re
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from app.console.site import FORMS, PAGES, ConsoleSite
from tests.cli.hand_worker import may_start
from tests.cli.world import World, wait_for
from tests.conftest import make_home
from tests.console.visiting import Visitor
from tests.patience import HANG_S

pytestmark = pytest.mark.one_in(2, of="file")

PROGRAM = """
main = procedure "main" {
    output = {said = {type = "boolean"}},
    run = function()
        Log.info("nobody else's")
        step("prepare", function() return {words = "nobody else's"} end)
        return {said = Human.approve({message = "nobody else's?"})}
    end
}
"""
BLOB = b"nobody else's bytes"
# What the router has besides pages and forms: none of it names anything that is recorded.
OTHERS = ["", "/sign-in", "/sign-in", "/sign-out", "/theme", "/times", "/static/{{name}}", "/live"]
# What differs between any two looks at one page: the time, and how far the log has come.
MOVING = re.compile(r'\d{4}-\d\d-\d\dT[\d:.]+Z|<a class="pulse.*?</a>|<time.*?</time>', re.DOTALL)
INSTALLATION = {"server_id", "tool_name"}  # servers and tools are those of the installation, for all tenants


@dataclass
class Strangers:
    """A gateway with two tenants: `of_default` knows every id, `eve` is an administrator of the other."""

    world: World
    keys: dict[str, str]
    ids: dict[str, list[tuple[str, str]]]  # by the name in a path: an id of the tenant default, and one of nothing

    def ask(self, who: str, path: str, body: object = None, method: str | None = None) -> tuple[int, dict[str, Any]]:
        raw = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(  # noqa: S310
            self.world.url + path, data=raw, method=method, headers={"Authorization": f"Bearer {self.keys[who]}"}
        )
        with urllib.request.urlopen(request, timeout=HANG_S) as answer:  # noqa: S310
            return answer.status, json.loads(answer.read() or b"{}")


def unknown(known: str) -> str:
    """Of the same shape, and of nothing: its digits are others."""
    turned = known.translate(str.maketrans("0123456789", "1032547698"))
    return f"{known[:15]}{turned[15:]}" if re.match(r"[0-9a-f]{8}-", known) else turned


def _fill(house: Strangers) -> None:
    """Something of every kind that has an id, of the tenant default."""
    call = {"server_id": "bank", "arguments": {"amount": 5}, "intent": "nobody else's"}
    waits = house.ask("agent", "/v1/tool-calls", {**call, "tool_name": "refund", "idempotency_key": "key-1"})[1]
    done = house.ask("agent", "/v1/tool-calls", {**call, "tool_name": "charge", "idempotency_key": "key-2"})[1]
    house.ask("agent", "/v1/procedures", {"name": "private-1", "language": "lua", "source": PROGRAM})
    house.ask("agent", "/v1/runs", {"procedure": "private-1", "input": {}, "run_id": "private-run-11"})
    wait_for(lambda: house.ask("agent", "/v1/runs/private-run-11")[1]["status"] == "waiting_for_human")
    house.ask("operator", "/v1/runs/private-run-11/fork", {"at": 3, "run_id": "private-fork-12"})
    spec = {"type": "interval", "every_ms": 86_400_000}
    house.ask("operator", "/v1/schedules/private-1", {"procedure": "private-1", "input": {}, "spec": spec}, "PUT")
    sha256 = hashlib.sha256(BLOB).hexdigest()
    house.ask("agent", f"/v1/blobs/{sha256}", BLOB, "PUT")
    verification = house.ask("auditor", "/v1/log/verifications", {})[1]["verification_id"]
    known = {
        "trace_id": [waits["trace_id"], done["trace_id"]],
        "run_id": ["private-run-11", "private-fork-12"],
        "verification_id": [verification],
        "name": ["private-1"],
        "sha256": [sha256],
    }
    house.ids = {name: [(str(one), unknown(str(one))) for one in ids] for name, ids in known.items()}
    house.ids["path"] = [("1", "1")]  # an operation's place says nothing without the id of its run


@pytest.fixture(scope="module")
def house() -> Iterator[Strangers]:
    world = World(make_home())
    try:
        may_start(world)
        submit = '\n@id("submit") permit(principal, action == Action::"submit", resource);\n'
        world.policy.write_text(world.policy.read_text() + submit)
        with world.config.open("a") as config:  # one administrator asks for everything, as fast as she can
            config.write("\n[limits]\nrequests_per_second = 100000\nburst = 100000\n")
        world.start()
        keys = {role: world.new_key(f"{role}-1", role) for role in ("agent", "operator", "auditor")}
        assert world.tga("tenants", "create", "acme").returncode == 0
        keys["eve"] = world.new_key("eve", "admin", tenant="acme")
        made = Strangers(world, keys, {})
        _fill(made)
        yield made
    finally:
        world.close()


def filled(house: Strangers, path: str) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """The path with known ids, with unknown ones, and which ids these are."""
    names = re.findall(r"\{(\w+)\}", path)
    assert set(names) - INSTALLATION <= set(house.ids), f"{path}: what is an id of this kind that another tenant has?"
    if not names or set(names) <= INSTALLATION:
        return
    for number in range(max(len(house.ids[name]) for name in names)):
        pairs = {name: house.ids[name][min(number, len(house.ids[name]) - 1)] for name in names}
        known, none = path, path
        for name, (one, other) in pairs.items():
            known, none = known.replace(f"{{{name}}}", one), none.replace(f"{{{name}}}", other)
        yield known, none, list(pairs.values())


def same(house: Strangers, eve: Visitor, known: str, none: str, ids: list[tuple[str, str]], **sent: object) -> None:
    answers = []
    for number, path in enumerate((known, none)):
        status, headers, body = eve.ask(path, **sent)  # type: ignore[arg-type]
        for pair in ids:
            body = body.replace(pair[number], "THE-ID") if len(pair[number]) > 1 else body
        body = MOVING.sub("", body)
        kept = {name: headers.get(name) for name in ("content-type", "cache-control", "location", "etag")}
        answers.append((status, kept, body))
        assert "nobody else" not in body, path
    assert answers[0][:2] == answers[1][:2], known
    differ = [
        one for one in zip(answers[0][2].split("\n"), answers[1][2].split("\n"), strict=False) if one[0] != one[1]
    ]
    assert answers[0][2] == answers[1][2], (known, differ[:3])


def test_every_route_of_the_console_is_a_page_or_a_form() -> None:
    """So none can be added that the tests below do not know."""
    routes = re.findall(r'Route\(f?"?(?:\{PATH\}|PATH)([^",]*)', inspect.getsource(ConsoleSite.__init__))
    assert sorted(routes) == sorted([*OTHERS, " + path", " + path"])


def test_another_tenants_id_is_on_every_page_as_one_that_never_was(house: Strangers) -> None:
    eve = Visitor(house.world.url)
    eve.sign_in(house.keys["eve"])
    asked = 0
    for path in PAGES:
        for known, none, ids in filled(house, path):
            same(house, eve, known, none, ids)
            same(house, eve, f"{known}?of=action_request&at=1", f"{none}?of=action_request&at=1", ids)
            assert eve.ask(f"{known}?of=action_request")[0] == 404, known
            asked += 1
    assert asked >= 8
    for pairs in house.ids.values():
        for one, other in pairs:
            if len(one) > 1:
                same(house, eve, f"/find?q={one}", f"/find?q={other}", [(one, other)])
                same(house, eve, f"/runs?procedure={one}", f"/runs?procedure={other}", [(one, other)])
    same(house, eve, "/find?q=key-1", "/find?q=key-0", [("key-1", "key-0")])


def test_another_tenants_id_moves_nothing_by_any_form(house: Strangers) -> None:
    eve = Visitor(house.world.url)
    eve.sign_in(house.keys["eve"])
    digest = house.ask("auditor", f"/v1/traces/{house.ids['trace_id'][0][0]}")[1]["action_request_digest"]
    intent = house.ask("auditor", "/v1/runs/private-run-11/checkpoints")[1]
    questions = [one for one in intent["items"] if one["artifact_type"] == "run_intent"]
    form = {
        "csrf": eve.csrf(),
        "decision": "APPROVE",
        "action_request_digest": str(digest),
        "tool_call_digest": str(digest),
        "action": "failed",
        "rationale": "mine now",
        "answer": "yes",
        "at": "3",
        "run_id": "mine",
        "path": questions[-1]["path"],
        "intent_digest": questions[-1]["artifact_digest"],
    }
    before = [house.ask("auditor", f"/v1/runs/{one}/entries")[1] for one, _ in house.ids["run_id"]]
    for path in FORMS:
        for known, none, ids in filled(house, path):
            same(house, eve, known, none, ids, form=form)
            assert eve.ask(known, form)[0] == 404, known
    assert [house.ask("auditor", f"/v1/runs/{one}/entries")[1] for one, _ in house.ids["run_id"]] == before
    assert house.ask("auditor", f"/v1/traces/{house.ids['trace_id'][0][0]}")[1]["state"] == "PENDING"


def test_another_tenants_id_is_in_the_api_that_is_passed_on_as_one_that_never_was(house: Strangers) -> None:
    eve = Visitor(house.world.url)
    eve.sign_in(house.keys["eve"])
    with urllib.request.urlopen(f"{house.world.url}/openapi.json", timeout=HANG_S) as answer:  # noqa: S310
        paths = json.load(answer)["paths"]
    asked = 0
    for path in [one for one, methods in paths.items() if "get" in methods and one.startswith("/v1/")]:
        for known, none, ids in filled(house, path):
            same(house, eve, f"/api{known}", f"/api{none}", ids)
            assert eve.ask(f"/api{known}")[0] == 404, known
            assert eve.ask(f"/api{known}", {"csrf": "x"})[0] in (404, 405), "nothing is posted this way"
            asked += 1
    assert asked >= 20
