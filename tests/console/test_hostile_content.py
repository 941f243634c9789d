"""What tool servers, programs and agents write is text wherever it is shown: numbered, cut, in small pages; stderr and
definitions of tools, names, questions, states, errors and sources of runs, 5 MB and deep nesting."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

from tests.cli.hand_worker import HandWorker, ask, fail, failed, may_start, step, suspend
from tests.cli.world import World, wait_for
from tests.console.browsing import Desk, aside, open_desk

pytestmark = pytest.mark.one_in(2, of="file")

SCRIPT = "<script>window.ran=1</script><img/src=x/onerror=window.ran=1>{{7*7}}'\"><b>x"
HOSTILE = f"{SCRIPT} \u202etxt.exe\u202c \u200b \u0007"
HIDDEN = re.compile("[\u202e\u202c\u200b\u0007]")
TURNED = "\u202e" * 4_000
PAGE_BYTES_MAX = 200_000
SERVER = Path(__file__).parents[1] / "mcp" / "stdio_server.py"
DEEP: Any = json.loads('{"a":' * 50 + "1" + "}" * 50)
LINE = "-- <script>window.ran=1</script> {{7*7}} \u202e\u200b"
SOURCE = (
    """
main = procedure "main" {
    description = [[%s]],
    output = {said = {type = "string"}},
    state = {kept = {type = "string", default = ""}},
    run = function()
        state.kept = [[%s]]
        step("one", function() return {words = [[%s]]} end)
        return {said = Human.input({message = [[%s]]})}
    end
}
"""
    % ((HOSTILE.replace("\u0007", ""),) * 4)
    + (LINE + "\n") * 1_700
)


@pytest.fixture(scope="module")
def desk() -> Iterator[Desk]:
    def prepare(world: World) -> None:
        may_start(world)
        submit = '\n@id("submit") permit(principal, action == Action::"submit", resource);\n'
        world.policy.write_text(world.policy.read_text() + submit)
        command = json.dumps([sys.executable, str(SERVER), str(world.home / "evil.jsonl"), "modern"])
        table = f'\n[servers.evil]\ntransport = "mcp-stdio"\ncommand = {command}\n'
        table += '[servers.evil.tools.does]\nclass = "write"\n'
        world.config.write_text(world.config.read_text() + table)

    with open_desk(prepare) as opened:
        opened.keys["worker"] = aside(opened.world.new_key, "worker-1", "worker")
        yield opened


def read(desk: Desk, page: Page, path: str) -> str:
    """The words of a page that was opened and found harmless."""
    answer = page.goto(f"{desk.world.url}/console{path}")
    assert answer is not None
    assert answer.status == 200, (path, answer.status, answer.text()[:600])
    size = len(answer.body())
    assert size < PAGE_BYTES_MAX, (path, size)
    html = page.content()
    assert page.evaluate("window.ran ?? null") is None, path
    assert page.locator("main script, main img, main b b").count() == 0, path
    assert not HIDDEN.search(html), (path, HIDDEN.search(html))
    assert not HIDDEN.search(page.title()), path
    return page.inner_text("main")


def _does(desk: Desk, key: str, *steps: Any) -> str:
    body = {"server_id": "evil", "tool_name": "does", "arguments": {"steps": list(steps)}, "idempotency_key": key}
    status, answer = desk.ask("agent", "/v1/tool-calls", body)
    assert "trace_id" in answer, (status, answer)
    return str(answer["trace_id"])


def _result(**result: Any) -> dict[str, str | int]:
    return {"write": json.dumps({"jsonrpc": "2.0", "id": 0, "result": result}).replace('"id": 0', '"id": $ID'), "x": 0}


def test_a_tool_server_speaks_as_it_likes_and_is_read_as_text(desk: Desk) -> None:
    texts = [{"type": "text", "text": HOSTILE}, {"type": "text", "text": "A" * 20_000}]
    said = _does(
        desk, "said", _result(content=texts, structuredContent={HOSTILE: HOSTILE, "deep": DEEP["a"]["a"], "t": TURNED})
    )
    large = _does(desk, "large", {"text": 5_000_000})
    refusal = json.dumps({"jsonrpc": "2.0", "id": 0, "error": {"code": -32000, "message": HOSTILE + TURNED}})
    refused = _does(desk, "refused", {"write": refusal.replace('"id": 0', '"id": $ID'), "x": 0})
    failing = _does(desk, "failing", _result(content=texts[:1], isError=True))
    complained = _does(desk, "complained", {"complain": HOSTILE + "\n", "times": 3_000}, _result(content=[]))
    with desk.as_("admin") as page:
        for trace_id in (said, large, refused, failing, complained):
            read(desk, page, f"/calls/{trace_id}")
        words = read(desk, page, f"/calls/{said}")
        assert "U+202E" in words
        assert SCRIPT[:29] in words
        wait_for(lambda: "window.ran" in json.dumps(desk.ask("operator", "/v1/servers")[1]))
        read(desk, page, "/servers?server=evil")
        page.locator("#stderr summary").click()
        stderr = page.locator("[aria-label=stderr]").inner_text()
        assert SCRIPT in stderr
        assert "U+202E" in stderr
        read(desk, page, "/calls?tool=evil/does")
    desk.verify_quiet()


def test_what_an_agent_sends_is_refused_or_shown_as_text(desk: Desk) -> None:
    status, answer = desk.ask(
        *("agent", "/v1/tool-calls"),
        {"server_id": "bank", "tool_name": "refund", "arguments": {"amount": 5, "x": "A" * 5_000_000}},
    )
    assert status == 413, answer
    arguments = {"amount": 5, HOSTILE: HOSTILE, "turned": TURNED, "list": [HOSTILE] * 400}
    arguments |= {"nested": json.loads('{"a":' * 28 + "1" + "}" * 28)} | {f"{n}": n for n in range(900)}
    arguments |= {"names": {f"{SCRIPT}{n}": [n] for n in range(500)}}
    asked = desk.call("refund", arguments, "asked", intent=(HOSTILE + TURNED)[:4_000])
    with desk.as_("supervisor") as page:
        words = read(desk, page, f"/approvals/{asked}")
        assert SCRIPT in words
        assert "U+202E" in words
        for path in ("/", "/approvals", "/calls", f"/calls/{asked}", "/find?q=asked"):
            read(desk, page, path)
    desk.verify_quiet()


def test_a_definition_that_changed_into_something_hostile_is_compared_as_text(desk: Desk) -> None:
    _does(desk, "pinned", _result(content=[]))
    _does(desk, "described", {"describe": (HOSTILE + "\n") * 60 + TURNED[:1_000]}, _result(content=[]))

    def is_quarantined() -> bool:
        listed = desk.ask("operator", "/v1/tools?server_id=evil")[1]["items"]
        return any(one["pin"]["status"] == "quarantined" for one in listed)

    wait_for(is_quarantined)
    with desk.as_("operator") as page:
        words = read(desk, page, "/servers?server=evil")
        assert SCRIPT in words
        assert "U+202E" in words
        read(desk, page, "/")
        read(desk, page, "/policy?tool=evil/does&arguments=%7B%7D")
    desk.verify_quiet()


def _run(desk: Desk, run_id: str, **more: Any) -> HandWorker:
    worker = HandWorker(desk.world, desk.keys["worker"], procedure="hostile")
    program = {"name": "hostile", "version": "1", "program_digest": "a" * 64, "description": HOSTILE}
    worker.ask("/v1/procedures", program)
    body = {"procedure": "hostile", "run_id": run_id, "input": {HOSTILE: [HOSTILE] * 300, "deep": DEEP["a"], **more}}
    status, told = desk.ask("agent", "/v1/runs", body)
    assert status == 200, told
    worker.lease()
    return worker


def _read_everywhere(desk: Desk, run_id: str) -> str:
    with desk.as_("supervisor") as page:
        words = read(desk, page, f"/runs/{run_id}")
        for path in (f"/runs/{run_id}?at=2", f"/runs/{run_id}?at=150", "/runs", "/approvals", "/", f"/find?q={run_id}"):
            read(desk, page, path)
    return words


def test_a_run_of_two_hundred_hostile_operations_that_asks(desk: Desk) -> None:
    worker = _run(desk, "hostile-1")
    name = (SCRIPT * 2)[:128]
    changes = [{"op": "set", "at": "/kept", "to": {HOSTILE: HOSTILE, "turned": TURNED, "deep": DEEP["a"]["a"]}}]
    value = {HOSTILE: HOSTILE, "turned": TURNED[:2_000], "deep": DEEP["a"]["a"]}
    worker.put(step("1", value, name=name, state_change=changes))
    for first in range(2, 182, 60):
        worker.put(*(step(f"{n}", HOSTILE, name=name) for n in range(first, first + 60)))
    worker.put(failed("182", HOSTILE + TURNED, name=name))
    options = [f"{HOSTILE}{'w' * 500}{n}" for n in range(40)]
    question = ask("183", HOSTILE + TURNED, {"enum": options}, form="select", name=name)
    question["request"]["context"] = {"tier": "inline", "value": {HOSTILE: [HOSTILE] * 100, "deep": DEEP["a"]["a"]}}
    worker.put(question, then=suspend("183"))
    assert desk.ask("operator", "/v1/runs/hostile-1/signals", {"name": SCRIPT[:60], "value": HOSTILE})[0] == 200
    words = _read_everywhere(desk, "hostile-1")
    assert SCRIPT in words
    assert "U+202E" in words
    desk.verify_quiet()


def test_a_run_that_failed_with_hostile_words_and_one_that_diverged(desk: Desk) -> None:
    worker = _run(desk, "hostile-2")
    worker.put(step("1", name=SCRIPT), then=fail(HOSTILE + TURNED))
    assert SCRIPT in _read_everywhere(desk, "hostile-2")
    worker = _run(desk, "hostile-3")
    divergence = {"path": "1", "recorded": HOSTILE + TURNED, "performed": HOSTILE, "source": HOSTILE}
    worker.put(then={"type": "diverge", "divergence": divergence})
    assert SCRIPT in _read_everywhere(desk, "hostile-3")
    desk.verify_quiet()


def test_a_program_in_lua_is_read_as_text(desk: Desk) -> None:
    assert len(SOURCE.encode()) < 128 * 1024
    status, told = desk.ask("agent", "/v1/procedures", {"name": "turned", "language": "lua", "source": SOURCE})
    assert status in (200, 201), told
    status, told = desk.ask("agent", "/v1/runs", {"procedure": "turned", "input": {}, "run_id": "turned-1"})
    assert status == 200, told
    wait_for(lambda: desk.ask("admin", "/v1/runs/turned-1")[1]["status"] == "waiting_for_human")
    words = _read_everywhere(desk, "turned-1")
    assert SCRIPT in words
    assert LINE[:40] in words
    assert "U+202E" in words
    desk.verify_quiet()
