"""Runs from a terminal: what one sees of them, and what one can do to them."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from app.cli.decisions import _shown_approval
from app.cli.run_acting import typed
from app.cli.run_drawing import clock, duration, event_in_words, waits_for
from app.cli.run_journal import journal_of, place
from tests.cli.hand_worker import HandWorker, ask, complete, fail, failed, may_start, step, suspend, tool
from tests.cli.world import Told, World

YES_NO = {"type": "boolean"}


@pytest.fixture(scope="module")
def run_world(still_world: World) -> World:
    may_start(still_world)
    still_world.start()
    return still_world


@pytest.fixture(scope="module")
def hand(run_world: World) -> HandWorker:
    worker = HandWorker(run_world, run_world.new_key("worker-1", "worker"))
    worker.register()
    return worker


@pytest.fixture(scope="module")
def failed_run(run_world: World, hand: HandWorker) -> str:
    """A run with nesting, a tool, a gather, a question that was answered, and a step that failed."""
    run_id = "order-1"
    told = run_world.tga("run", "start", "onboard", "--input", '{"order":7}', "--id", run_id)
    assert (told.returncode, told.stdout) == (0, "order-1\n")
    hand.lease()
    hand.put(step("1", {"steps": 3}, logs=[{"level": "info", "text": "planned", "at": "2026-01-01T00:00:00.000Z"}]))
    hand.put(step("2.1", 1, name="fetch"))
    hand.put(then=tool("2.2", "charge", amount=5))
    hand.put(step("2", "rich", name="enrich", inner=2, state_change=[{"op": "set", "at": "/n", "to": 1}]))
    hand.put(step("3:1.1", "a", name="left"), step("3:2.1", "b", name="right"))
    hand.put(step("3", ["a", "b"], name="both", kind="gather", inner=2))
    hand.put(ask("4", "Pay 5\x1b[2J to Ada?", YES_NO), then=suspend("4"))
    return run_id


def timeline(told: Told) -> list[str]:
    """The lines of the journal, without their times."""
    assert told.returncode == 0, told.stderr
    return [line[11:] for line in told.stdout.split("\n\n")[1].splitlines()]


def test_a_run_that_waits_is_drawn_nested_and_says_what_to_type(run_world: World, failed_run: str) -> None:
    told = run_world.tga("run", "show", failed_run)
    lines = timeline(told)
    assert lines[0] == '── started by admin with {"order":7}'
    assert lines[1] == "── attempt 1, on worker hand-worker-1"
    assert [line.split()[:4] for line in lines[2:]] == [
        ["1", "✓", "step", "plan"],
        ["info:", "planned"],
        ["2", "✓", "step", "enrich"],
        ["2.1", "✓", "step", "fetch"],
        ["2.2", "✓", "tool", "bank.charge"],
        ["3", "✓", "gather", "both"],
        ["3:1.1", "✓", "step", "left"],
        ["3:2.1", "✓", "step", "right"],
        ["4", "…", "ask", "pay"],
        ["──", "the", "worker", "leaves:"],
    ]
    assert lines[5].startswith("  2.1 ")  # nested
    assert "12 ms" in lines[2]
    assert '"charge_id":"ch_1"' in lines[6]
    assert "WAITING, waits for a person" in told.stdout
    assert "asks a person: Pay 5\\x1b[2J to Ada?" in lines[10]  # a terminal obeys nothing that a program wrote
    assert "`tga run answer order-1 4`" in told.stdout
    document = run_world.json("run", "show", failed_run)
    assert document["status"] == "waiting_for_human"
    assert [item["artifact_type"] for item in document["journal"]][:3] == ["run_start", "run_attempt", "run_checkpoint"]


def test_only_the_last_entries_are_drawn_when_so_many_are_wanted(run_world: World, failed_run: str) -> None:
    told = run_world.tga("run", "show", failed_run, "--limit", "2")
    assert "entries; `--limit` shows more)" in told.stdout
    assert "plan" not in told.stdout
    assert "asks a person" in told.stdout


def test_an_answer_of_the_wrong_type_leaves_the_question_open_and_the_first_right_one_counts(
    run_world: World, failed_run: str
) -> None:
    supervisor = run_world.new_key("ada", "supervisor")
    wrong = run_world.tga("run", "answer", failed_run, "4", "maybe", TGA_API_KEY=supervisor)
    assert (wrong.returncode, "RUN_ANSWER_INVALID" in wrong.stderr) == (2, True)
    nowhere = run_world.tga("run", "answer", failed_run, "9", "yes", TGA_API_KEY=supervisor)
    assert (nowhere.returncode, "RUN_ANSWER_UNASKED" in nowhere.stderr) == (1, True)
    assert run_world.tga("run", "answer", failed_run, "4").returncode == 2  # there is no terminal to ask on
    right = run_world.tga("run", "answer", failed_run, "4", "yes", TGA_API_KEY=supervisor)
    assert (right.returncode, "Answered 4 of run order-1: true" in right.stderr) == (0, True)
    late = run_world.tga("run", "answer", failed_run, "4", "no", TGA_API_KEY=supervisor)
    assert (late.returncode, "RUN_ANSWER_UNASKED" in late.stderr) == (1, True)
    (line,) = [line for line in timeline(run_world.tga("run", "show", failed_run)) if line.startswith("4 ")]
    assert "true  by ada, signed with ed25519:" in line


def test_a_failed_run_says_where_and_goes_on_when_it_is_retried(
    run_world: World, hand: HandWorker, failed_run: str
) -> None:
    hand.lease()
    hand.put(failed("5", "no stock", name="ship", source="onboard.py:41"), then=fail("no stock"))
    told = run_world.tga("run", "show", failed_run)
    assert "at onboard.py:41" in told.stdout
    assert "── FAILED by its worker: ValueError: no stock" in told.stdout
    assert "`tga run retry order-1`" in told.stdout
    assert run_world.tga("run", "watch", failed_run).returncode == 1
    assert (
        run_world.tga("run", "start", "onboard", "--input", '{"order":7}', "--id", failed_run, "--wait").returncode == 1
    )
    again = run_world.tga("run", "retry", failed_run, "-r", "stock is there")
    assert (again.returncode, "SCHEDULED" in again.stderr) == (0, True)
    hand.lease()
    hand.put(step("5", "shipped", name="ship", try_number=2), then=complete({"a": "done"}, 5))
    lines = timeline(run_world.tga("run", "show", failed_run))
    (first,) = [number for number, line in enumerate(lines) if "try 1" in line]
    (second,) = [number for number, line in enumerate(lines) if "try 2" in line]
    (resumed,) = [number for number, line in enumerate(lines) if "resumed by admin: stock is there, opens 5" in line]
    assert first < resumed < second
    assert lines[-1] == '── COMPLETED: {"a":"done"}'
    told = run_world.tga("run", "start", "onboard", "--input", '{"order":7}', "--id", failed_run, "--wait")
    assert (told.returncode, told.stdout) == (0, '{"a":"done"}\n')
    assert "it was started before" in told.stderr
    assert run_world.tga("run", "retry", failed_run).returncode == 1


def test_the_same_id_with_another_input_is_refused_and_an_unknown_procedure_is_bad_usage(
    run_world: World, failed_run: str
) -> None:
    told = run_world.tga("run", "start", "onboard", "--input", '{"order":8}', "--id", failed_run)
    assert (told.returncode, "RUN_ID_TAKEN" in told.stderr) == (1, True)
    told = run_world.tga("run", "start", "nothing-of-this-name")
    assert (told.returncode, "PROCEDURE_NOT_FOUND" in told.stderr) == (2, True)
    told = run_world.tga("run", "start", "onboard", "--input", "{order}")
    assert (told.returncode, "one JSON value" in told.stderr) == (2, True)
    assert run_world.tga("run", "show", "nothing-of-this-name").returncode == 1
    assert run_world.tga("run", "show", failed_run, TGA_URL="http://127.0.0.1:9").returncode == 3


def test_state_is_shown_as_it_was(run_world: World, failed_run: str) -> None:
    assert json.loads(run_world.tga("run", "state", failed_run).stdout) == {"n": 1}
    assert json.loads(run_world.tga("run", "state", failed_run, "--at", "2").stdout) == {}
    assert run_world.json("run", "state", failed_run, "--at", "2") == {
        "run_id": failed_run,
        "at": 2,
        "run_state": "RUNNING",
        "state": {},
    }
    assert run_world.tga("run", "state", failed_run, "--at", "99").returncode == 2


def test_a_fork_is_drawn_with_its_source_and_compared_with_it(
    run_world: World, hand: HandWorker, failed_run: str
) -> None:
    at = next(
        item["sequence_number"]
        for item in run_world.json("run", "show", failed_run)["journal"]
        if item.get("path") == "2" and item["artifact_type"] == "run_checkpoint"
    )
    told = run_world.tga("run", "fork", failed_run, "--at", str(at), "--id", "order-1-again")
    assert (told.returncode, told.stdout) == (0, "order-1-again\n")
    hand.lease()
    hand.put(step("3:1.1", "a", name="left"), step("3:2.1", "c", name="right"))
    hand.put(step("3", ["a", "c"], name="both", kind="gather", inner=2), then=complete("other", 3))
    lines = timeline(run_world.tga("run", "show", "order-1-again"))
    forked = next(number for number, line in enumerate(lines) if line.startswith("── forked by admin from run order-1"))
    assert lines[forked - 1].split()[:4] == ["2.2", "✓", "tool", "bank.charge"]
    told = run_world.tga("run", "diff", failed_run, "order-1-again")
    assert told.returncode == 1
    assert told.stdout.startswith("First difference at 3; the same at 5 addresses, not at 4.\n")
    found = run_world.tga("run", "diff", failed_run, "order-1-again", "--json")
    document: dict[str, Any] = json.loads(found.stdout)
    assert document["first"] == "3"
    assert [(one["path"], one["fields"]) for one in document["differences"]] == [
        ("3", ["value"]),
        ("3:2.1", ["value"]),
        ("4", ["missing"]),
        ("5", ["missing"]),
    ]
    assert set(document["run"]) == {"output"}
    same = run_world.tga("run", "diff", failed_run, failed_run)
    assert (same.returncode, same.stdout) == (0, "The same at 9 addresses.\n")


def test_a_run_is_followed_until_it_rests(run_world: World, hand: HandWorker) -> None:
    run_world.tga("run", "start", "onboard", "--id", "followed")
    watched: list[Told] = []
    watcher = threading.Thread(target=lambda: watched.append(run_world.tga_process("run", "watch", "followed")))
    watcher.start()
    hand.lease()
    hand.put(step("1", 1), ask("2", "Which?", {"enum": ["a", "b"]}, form="select"), then=suspend("2"))
    watcher.join()
    (told,) = watched
    assert told.returncode == 0
    assert [line.split()[:4] for line in timeline(told)] == [
        ["──", "started", "by", "admin"],
        ["──", "attempt", "1,", "on"],
        ["1", "✓", "step", "plan"],
        ["2", "…", "ask", "pay"],
        ["──", "the", "worker", "leaves:"],
    ]
    assert "2 asks a person: Which?" in told.stdout
    waiting = run_world.tga("run", "start", "onboard", "--id", "followed", "--wait")
    assert (waiting.returncode, waiting.stdout, "Which?" in waiting.stderr) == (0, "", True)
    arguments = ("run", "watch", "followed", "--to-end")
    watcher = threading.Thread(target=lambda: watched.append(run_world.tga_process(*arguments)))
    watcher.start()
    assert run_world.tga("run", "answer", "followed", "2", "b").returncode == 0
    hand.lease()
    hand.put(then=complete(None, 2))
    watcher.join()
    assert watched[1].returncode == 0
    assert timeline(watched[1])[-1] == "── COMPLETED: null"
    lines = run_world.tga("run", "watch", "followed", "--json").stdout.splitlines()
    assert [json.loads(line)["sequence_number"] for line in lines] == list(range(1, len(lines) + 1))


def test_a_signal_is_sent_once_for_its_id(run_world: World, hand: HandWorker) -> None:
    run_world.tga("run", "start", "onboard", "--id", "signalled")
    hand.lease()
    waits = {"type": "signal", "path": "1", "name": "paid", "input_digest": "d" * 64}
    hand.put(waits, then=suspend("1"))
    assert "(`tga run signal signalled paid`)" in run_world.tga("run", "show", "signalled").stdout
    for _ in range(2):
        told = run_world.tga("run", "signal", "signalled", "paid", '{"euros": 5}', "--signal-id", "s-1")
        assert told.returncode == 0
    lines = timeline(run_world.tga("run", "show", "signalled"))
    assert [line for line in lines if "── signal" in line] == ['── signal paid from admin: {"euros":5}']
    run_world.tga("run", "cancel", "signalled", "--yes")


def test_cancelling_asks_first_and_does_nothing_without_a_terminal(run_world: World) -> None:
    run_world.tga("run", "start", "onboard", "--id", "unwanted")
    told = run_world.tga("run", "cancel", "unwanted")
    assert (told.returncode, "CONFIRMATION_NEEDED" in told.stderr) == (2, True)
    assert run_world.json("run", "show", "unwanted")["state"] == "SCHEDULED"
    told = run_world.tga("run", "cancel", "unwanted", "--yes", "-r", "not wanted any more")
    assert (told.returncode, "CANCELLED run unwanted" in told.stderr) == (0, True)
    assert (
        "── CANCELLED by admin: RUN_CANCELLED: not wanted any more" in run_world.tga("run", "show", "unwanted").stdout
    )


def test_a_diverged_run_names_both_sides_and_goes_on_with_a_version_that_is_accepted(
    run_world: World, hand: HandWorker
) -> None:
    older = HandWorker(run_world, hand.key, procedure="wandering")
    older.register()
    run_world.tga("run", "start", "wandering", "--id", "diverged", "--version", "1")
    older.lease("hand-worker-8")
    found = {"path": "1", "recorded": "step plan", "performed": "step draw", "source": "onboard.py:7"}
    older.put(step("1"), then={"type": "diverge", "divergence": found})
    told = run_world.tga("run", "show", "diverged")
    assert "At 1 the journal has step plan; the program performed step draw (onboard.py:7)." in told.stdout
    told = run_world.tga("run", "retry", "diverged", "--accept-version", "2")
    assert (told.returncode, "PROCEDURE_NOT_FOUND" in told.stderr) == (2, True)
    newer = HandWorker(run_world, hand.key, procedure="wandering", version="2")
    newer.register()
    told = run_world.tga("run", "retry", "diverged", "--accept-version", "2")
    assert told.returncode == 0, told.stderr
    assert "accepts version 2" in run_world.tga("run", "show", "diverged").stdout
    newer.lease("hand-worker-9")
    assert newer.run["run_id"] == "diverged"
    newer.put(then=complete(None, 1))


def test_runs_are_listed_newest_first_by_status_procedure_and_prefix(run_world: World, hand: HandWorker) -> None:
    for run_id in ("listed-1", "listed-2", "elsewhere"):
        run_world.tga("run", "start", "onboard", "--id", run_id)
        hand.lease()
        put = [ask("1", "Go on?", YES_NO)] if run_id == "listed-2" else []
        hand.put(*put, then=suspend("1") if put else complete(None, 0))
    listed = run_world.json("runs", "--prefix", "listed-")
    assert [(run["run_id"], run["status"]) for run in listed] == [
        ("listed-2", "waiting_for_human"),
        ("listed-1", "completed"),
    ]
    assert [run["run_id"] for run in run_world.json("runs", "--status", "waiting-for-human", "--prefix", "l")] == [
        "listed-2"
    ]
    assert run_world.tga("runs", "--procedure", "nothing-of-this-name").stdout == "No run fits.\n"
    assert run_world.tga("runs", "--status", "sleeping").returncode == 2
    (line,) = [line for line in run_world.tga("runs").stdout.splitlines() if line.startswith("listed-2 ")]
    assert line.split()[1:7] == ["waiting", "for", "human", "onboard", "1", "1"]
    (item,) = [item for item in run_world.json("approvals") if item["kind"] == "run" and item["run_id"] == "listed-2"]
    assert item["request"]["message"] == "Go on?"
    assert "listed-2 1" in run_world.tga("approvals").stdout
    own = run_world.tga("runs", TGA_API_KEY=run_world.new_key("agent-9", "agent"))
    assert (own.stdout, "may not see runs of others" in own.stderr) == (
        "No runs yet: `tga run start` starts one.\n",
        True,
    )
    run_world.tga("run", "cancel", "listed-2", "--yes")


def test_a_run_whose_program_no_worker_has_says_so(run_world: World, hand: HandWorker) -> None:
    HandWorker(run_world, hand.key, procedure="orphaned").register()
    told = run_world.tga("run", "start", "orphaned", "--id", "alone")
    assert "No worker for orphaned 1" in told.stderr
    assert "No worker for orphaned 1" in run_world.tga("run", "show", "alone").stdout
    run_world.tga("run", "cancel", "alone", "--yes")


def test_a_question_of_a_run_is_approved_and_denied_like_a_call(run_world: World, hand: HandWorker) -> None:
    for run_id, command, answer in (("to-approve", ("approve", "--yes"), True), ("to-deny", ("deny",), False)):
        run_world.tga("run", "start", "onboard", "--id", run_id)
        hand.lease()
        hand.put(ask("1", "Go on?", YES_NO), then=suspend("1"))
        if command[0] == "approve":
            assert run_world.tga("approve", f"run:{run_id}").returncode == 2  # there is no terminal to ask on
        assert run_world.tga(command[0], f"run:{run_id}", "-r", "why").returncode == 2
        told = run_world.tga(command[0], f"run:{run_id}", *command[1:])
        assert (told.returncode, "Go on?" in told.stderr) == (0, True), told.stderr
        again = run_world.tga(command[0], f"run:{run_id}", *command[1:])
        assert (again.returncode, "RUN_ANSWER_UNASKED" in again.stderr) == (1, True)
        (item,) = [i for i in run_world.json("run", "show", run_id)["journal"] if i["artifact_type"] == "run_answer"]
        assert item["value"] == {"tier": "inline", "value": answer}
        hand.lease()
        hand.put(then=complete(None, 1))


def test_an_answer_is_signed_with_ones_own_key_or_by_the_gateway(
    run_world: World, hand: HandWorker, tmp_path: Path
) -> None:
    own, stranger = tmp_path / "own", tmp_path / "stranger"
    own_id = run_world.tga("keys", "make", str(own)).stdout.strip()
    run_world.tga("keys", "make", str(stranger))
    assert run_world.tga("keys", "register", "admin", "--public-key", f"{own}.pub").returncode == 0
    for run_id, *command in (
        ("own-answer", "run", "answer", "own-answer", "1", "yes"),
        ("own-approval", "approve", "run:own-approval", "--yes"),
        ("gateways", "run", "answer", "gateways", "1", "no"),
    ):
        run_world.tga("run", "start", "onboard", "--id", run_id)
        hand.lease()
        hand.put(ask("1", "Go on?", YES_NO), then=suspend("1"))
        if run_id != "gateways":
            assert run_world.tga(*command, "--sign-with", str(own)).returncode == 2
            for key, who in ((own, "somebody-else"), (stranger, "admin")):
                told = run_world.tga(*command, "--sign-with", str(key), "--as", who)
                assert (told.returncode, "SIGNATURE_INVALID" in told.stderr) == (1, True), told.stderr
            command += ["--sign-with", str(own), "--as", "admin"]
        told = run_world.tga(*command)
        assert told.returncode == 0, told.stderr
        (item,) = [i for i in run_world.json("run", "show", run_id)["journal"] if i["artifact_type"] == "run_answer"]
        assert (item["signature"]["key_id"] == own_id) == (run_id != "gateways")
        shown = run_world.tga("run", "show", run_id).stdout
        assert f"by admin, signed with {item['signature']['key_id']}" in shown
        hand.lease()
        hand.put(then=complete(None, 1))
        assert run_world.tga("verify", f"run:{run_id}").returncode == 0


def test_what_the_scheduler_keeps_is_made_anew_from_the_streams(run_world: World, hand: HandWorker) -> None:
    """And doctor and verify say that it must be."""
    for run_id in ("asks", "under-way"):
        large = json.dumps("x" * 40_000)  # becomes a blob
        assert run_world.tga("run", "start", "onboard", "--id", run_id, "--input", large).returncode == 0
        hand.lease()
        if run_id == "asks":
            hand.put(ask("1", "Go on?", YES_NO), then=suspend("1"))
    before = rows(run_world)
    assert [q["path"] for q in before["run_requests"] if q["stream"] == "run:asks"] == ["1"]

    run_world.sql("UPDATE tga.runs SET attempt = 7 WHERE procedure = 'onboard' AND state = 'WAITING'")
    told = run_world.tga("verify", "--all")
    assert (told.returncode, "scheduled as if it were in another attempt" in told.stdout) == (1, True)
    run_world.sql("UPDATE tga.runs SET state = 'FAILED' WHERE state = 'WAITING'")
    told = run_world.tga("verify", "--all")
    assert (told.returncode, "something else in tga.runs" in told.stdout) == (1, True)
    run_world.sql("DELETE FROM tga.runs WHERE state = 'RUNNING'; TRUNCATE tga.run_requests, tga.blob_refs")
    (finding,) = [one for one in run_world_findings(run_world) if one["what"] == "scheduling of runs"]
    assert not finding["ok"]
    assert "1 open without a row" in finding["found"]
    told = run_world.tga("db", "rebuild")
    assert (told.returncode, "0 left as they were" in told.stdout) == (0, True), told.stdout
    after = rows(run_world)
    assert after["run_requests"] == before["run_requests"]
    assert after["blob_refs"] == before["blob_refs"] != []
    assert [row for row in after["runs"] if row["stream"] != "run:under-way"] == [
        row for row in before["runs"] if row["stream"] != "run:under-way"
    ]
    assert not [one for one in run_world_findings(run_world) if one["what"] == "scheduling of runs"]
    assert run_world.tga("verify", "--all").returncode == 0
    # Nobody knows which worker had it: its attempt is over, and another one goes on.
    hand.lease("hand-worker-3")
    assert (hand.run["run_id"], hand.run["attempt"]) == ("under-way", 2)
    hand.put(then=complete(None, 0))
    run_world.tga("run", "cancel", "asks", "--yes")


def rows(world: World) -> dict[str, list[dict[str, Any]]]:
    """What follows from the streams alone."""
    return {
        "runs": world.sql(
            "SELECT h.stream, r.tenant, r.procedure, r.program, r.state, r.attempt, r.failures, r.parent, r.worker "
            "FROM tga.runs r JOIN tga.heads h USING (stream_no) ORDER BY h.stream"
        ),
        "run_requests": world.sql(
            "SELECT h.stream, q.path, q.sequence_number, q.tenant FROM tga.run_requests q "
            "JOIN tga.heads h USING (stream_no) ORDER BY h.stream, q.path"
        ),
        "blob_refs": world.sql(
            "SELECT h.stream, b.sequence_number, b.tenant, b.sha256 FROM tga.blob_refs b "
            "JOIN tga.heads h USING (stream_no) ORDER BY h.stream, b.sequence_number"
        ),
    }


def run_world_findings(world: World) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(world.tga("doctor", "--json").stdout)
    return found


def test_doctor_counts_the_runs_that_need_somebody(run_world: World, hand: HandWorker) -> None:
    HandWorker(run_world, hand.key, procedure="forgotten").register()
    run_world.tga("run", "start", "forgotten", "--id", "forgotten-1")
    run_world.tga("run", "start", "onboard", "--id", "astray", "--version", "1")
    hand.lease()
    found = {"path": "1", "recorded": "step plan", "performed": "step draw", "source": None}
    hand.put(step("1"), then={"type": "diverge", "divergence": found})
    told = {one["what"]: one for one in run_world_findings(run_world)}
    assert told["runs without a worker"]["found"] == "1 run of a program that no living worker has"
    assert "1 diverged" in told["runs"]["found"]
    assert told["runs"]["ok"]
    for run_id in ("forgotten-1", "astray"):
        run_world.tga("run", "cancel", run_id, "--yes")


@pytest.mark.parametrize(
    ("text", "schema", "value"),
    [
        ("yes", YES_NO, True),
        ("N", YES_NO, False),
        ("true", YES_NO, True),
        ("5", {"type": "integer"}, 5),
        ("5", {"type": "string"}, "5"),
        ("5", {"enum": ["5", "6"]}, "5"),
        ("5", {}, 5),
        ("five", {}, "five"),
        ('{"a":1}', {"type": "object"}, {"a": 1}),
    ],
)
def test_what_is_typed_means_what_the_question_wants(text: str, schema: dict[str, Any], value: Any) -> None:
    assert typed(text, schema) == value


def test_times_and_addresses_are_read_by_people() -> None:
    assert [clock(ms) for ms in (52, 61_002, 3_600_000, 90_000_000)] == [
        "00:00.052",
        "01:01.002",
        "01:00:00",
        "1d 01:00",
    ]
    assert [duration(ms) for ms in (12, 1_234, 185_000, 7_440_000, 86_400_000)] == [
        *("12 ms", "1.2 s", "3 min 5 s", "2 h 4 min", "1 d"),
    ]
    assert sorted(["10", "3:2.1", "3", "3:10.1", "3.1", "4"], key=place) == ["3", "3.1", "3:2.1", "3:10.1", "4", "10"]


def test_an_escalated_question_says_so_wherever_it_is_shown() -> None:
    asked = {"form": "approve", "message": "Pay?", "expires_at": None}
    first = {
        "artifact_type": "run_intent",
        "sequence_number": 3,
        "path": "1",
        "kind": "ask",
        "name": "pay",
        "try_number": 1,
        "recorded_at": "2026-01-01T00:00:00.000Z",
        "input_digest": "a" * 64,
        "artifact_digest": "b" * 64,
        "request": asked,
    }
    told = {
        "artifact_type": "run_escalation",
        "sequence_number": 4,
        "path": "1",
        "level": 2,
        "announced_to": ["ops", "boss"],
    }
    operation = journal_of([first, told]).operations["1"]
    assert waits_for(operation, operation.last) == "asks a person: Pay?, escalated 2 times"
    assert event_in_words(told)[0] == "nobody has answered 1, level 2: ops, boss told"
    assert event_in_words({**told, "announced_to": []})[0] == "nobody has answered 1, level 2: no webhook to tell"
    waiting = {
        "kind": "run",
        "run_id": "r",
        "path": "1",
        "procedure": "onboard",
        "name": "pay",
        "principal_id": "agent-1",
        "expires_at": None,
        "problem": None,
        "request": asked,
        "level": 1,
    }
    assert _shown_approval(waiting)[4] == "(escalated once) Pay?"
    assert _shown_approval({**waiting, "level": 0})[4] == "Pay?"
