"""What people do to runs: start, answer, signal, cancel, retry, fork. Over HTTP.

An answer is to exactly the question that was shown: it names the digest of what stands on the screen.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from app.cli.client import GatewayClient, path_to
from app.cli.run_drawing import STATUS_STYLE, canonical_or_json, duration, shown_value
from app.cli.run_journal import Item, apart_ms, journal_of, read_journal
from app.cli.run_looking import rests, show_what_next, wait_for_rest
from app.cli.running import refuse
from app.cli.showing import confirmed, is_watched, notes, output, print_json, printable, shown_json
from app.core.canonical import canonical_bytes, parse_json
from app.core.errors import (
    ChecksumMismatch,
    InputMalformed,
    InputTooLarge,
    ProcedureNotFound,
    RunAnswerInvalid,
    RunAnswerUnasked,
    TgaError,
)
from app.core.limits import RUN_INLINE_BYTES_MAX

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


async def start_run(
    client: GatewayClient,
    procedure: str,
    *,
    given: str | None,
    run_id: str | None,
    version: str | None,
    wait: bool,
    as_json: bool,
    program_digest: str | None = None,
    is_strict: bool = False,
) -> bool:
    """The run's id on stdout; with `wait` its output. True unless it ended without being completed."""
    body: dict[str, Any] = {"procedure": procedure, "input": None if given is None else parsed_input(given)}
    named = {"run_id": run_id, "version": version, "program_digest": program_digest}
    body |= {name: value for name, value in named.items() if value is not None}
    if is_strict:
        body["strict_determinism"] = True
    run = (await client.post("/v1/runs", body)).document
    replayed = " (it was started before, with the same input)" if run["replayed"] else ""
    if not wait:
        _say(run, replayed)
        print_json(run) if as_json else output.print(run["run_id"], markup=False)
        return True
    _say(run, replayed)
    run = await wait_for_rest(client, run["run_id"])
    return await _show_result(client, run, as_json=as_json)


async def _show_result(client: GatewayClient, run: dict[str, Any], *, as_json: bool) -> bool:
    if as_json:
        print_json(run)
    elif run["state"] == "COMPLETED":
        took = duration(apart_ms(run["started_at"], run["updated_at"]))
        notes.print(f"[green]COMPLETED[/] run {run['run_id']} in {took}")
        value = run["output"]
        output.print(
            canonical_or_json(value["value"]) if value["tier"] == "inline" else json.dumps(value), markup=False
        )
    else:
        _say(run)
        if run["error"]:
            notes.print(printable(f"{run['error']['type']}: {run['error']['message']}"), markup=False)
        items = [item async for item in read_journal(client, run["run_id"], after=run["sequence_number"] - 1000)]
        show_what_next(run, journal_of(items), to=notes)
    return run["state"] not in ("FAILED", "CANCELLED", "PARKED", "DIVERGED")


def parsed_input(text: str) -> Any:
    """JSON; `-` reads it from stdin."""
    try:
        return parse_json(sys.stdin.buffer.read() if text == "-" else text.encode())
    except InputMalformed as error:
        error.next_step = "The input is one JSON value, as --input '{\"order\": 7}'; - reads it from stdin."
        raise


class Signing(NamedTuple):
    """A person's own key, and the name that they answer under."""

    key: Ed25519PrivateKey
    principal_id: str


def signing_with(key_file: Path | None, principal_id: str | None) -> Signing | None:
    """As --sign-with and --as say; they come together."""
    if key_file is None and principal_id is None:
        return None
    if key_file is None or principal_id is None:
        refuse("--sign-with and --as come together")
    from app.cli.signing import load_private_key  # here, because cryptography takes long to load

    return Signing(load_private_key(key_file), principal_id)


async def answer_run(
    client: GatewayClient, run_id: str, path: str, text: str | None, *, is_json: bool, signing: Signing | None = None
) -> bool:
    """Show the question, and answer exactly that one. A value that does not fit leaves it open."""
    question = await open_question(client, run_id, path)
    if is_watched():
        show_question(question)
    if text is None:
        if not is_watched():
            raise InputMalformed(
                "there is no terminal to ask on", remedy="Give the answer: `tga run answer ID PATH VALUE`."
            )
        text = output.input("[dim]answer:[/] ")
    value = parse_json(text) if is_json else typed(text, question["request"]["answer_schema"])
    return await send_answer(client, question, value, signing)


async def send_answer(client: GatewayClient, question: Item, value: Any, signing: Signing | None) -> bool:
    run_id = question["run_id"]
    body = {"path": question["path"], "answer": value, "intent_digest": question["artifact_digest"]}
    if signing is not None:
        body |= await _signature_of(client, question, value, signing)
    run = (await client.post(path_to("v1", "runs", run_id, "signals"), body)).document
    notes.print(printable(f"Answered {question['path']} of run {run_id}: {shown_json(value)}"), markup=False)
    _say(run)
    return True


async def _signature_of(client: GatewayClient, question: Item, value: Any, signing: Signing) -> dict[str, Any]:
    """What is signed names the run as the log does, outside the default tenant with the tenant in front."""
    if len(canonical_bytes(value)) > RUN_INLINE_BYTES_MAX:
        raise InputTooLarge(
            "an answer as large as this is kept beside the journal, and cannot be signed here",
            expected=f"at most {RUN_INLINE_BYTES_MAX} bytes",
            remedy="Answer without --sign-with: the gateway signs for you.",
        )
    from app.cli.signing import signed  # here, because cryptography and the documents take long to load
    from app.clock import SystemClock
    from app.domain.runs.documents import RunAnswer

    (first,) = (await client.get(path_to("v1", "runs", question["run_id"], "entries"), limit=1))["items"]
    answer = RunAnswer.made_of(
        {
            "run_id": first["entry"]["run_id"],
            "path": question["path"],
            "intent_digest": question["artifact_digest"],
            "wakes": "NO",  # the gateway says that; it is not signed
            "outcome": "OK",
            "value": {"tier": "inline", "value": value},
            "error": None,
            "answered_by": {"type": "person", "id": signing.principal_id},
            "answered_at": SystemClock().now(),
            "signature": None,
        }
    )
    signature = signed(answer, signing.key)
    return {"signature": signature.value, "key_id": signature.key_id, "answered_at": answer.answered_at}


async def decide_question(
    client: GatewayClient, run_id: str, path: str | None, *, is_yes: bool, yes: bool, signing: Signing | None = None
) -> bool:
    """Show the question whether the run may go on, and answer exactly that one with yes or no."""
    if path is None:
        run = await client.get(path_to("v1", "runs", run_id), steps=0)
        asked = [awaited["path"] for awaited in run["awaits"] if awaited["kind"] == "ask"]
        if len(asked) != 1:
            raise RunAnswerUnasked(
                f"run {run_id} has {len(asked)} open questions",
                expected="one, or its PATH" if not asked else f"a PATH: {' or '.join(asked)}",
                found=run["state"],
            )
        path = asked[0]
    question = await open_question(client, run_id, path)
    if question["request"]["form"] != "approve":
        raise RunAnswerInvalid(
            "the question is not answered with yes or no",
            expected=f"`tga run answer {run_id} {path} VALUE`",
            found=question["request"]["form"],
        )
    show_question(question)
    if is_yes and not confirmed("Approve it?", yes=yes):
        notes.print("Nothing was answered.")
        return False
    return await send_answer(client, question, is_yes, signing)


async def open_question(client: GatewayClient, run_id: str, path: str) -> Item:
    """The question that is open at this address, as the journal has it."""
    run = await client.get(path_to("v1", "runs", run_id), steps=0)
    open_at = {awaited["path"]: awaited for awaited in run["awaits"] if awaited["kind"] == "ask"}
    if path not in open_at:
        raise RunAnswerUnasked(
            f"run {run_id} asks nothing at {path}",
            expected=" or ".join(open_at) or "no question is open",
            found=run["state"],
        )
    items = (await client.get(path_to("v1", "runs", run_id, "checkpoints", path)))["items"]
    digest = open_at[path]["intent_digest"]
    for item in reversed(items):
        if item["artifact_digest"] == digest:
            return {**item, "procedure": run["procedure"], "principal_id": run["principal_id"], "run_id": run_id}
    raise ChecksumMismatch("the question on the journal is not the one that is open", expected=digest, found="another")


def show_question(question: Item) -> None:
    request = question["request"]
    lines = [
        ("run", f"{question['run_id']} of {question['procedure']}, started by {question['principal_id']}"),
        ("asks", f"{request['message']}  (at {question['path']}, {request['form']})"),
        ("context", "(none given)" if request["context"] is None else _whole(request["context"])),
        ("answer", shown_json(request["answer_schema"])),
        ("until", request["expires_at"] or "(no end)"),
    ]
    for number, level in enumerate(request["escalations"], 1):
        lines.append((f"level {number}", f"{level['at']}: {', '.join(level['webhooks']) or 'all webhooks'} told"))
    if request["default"] is not None:
        lines.append(("then", shown_value(request["default"])))
    for name, value in lines:
        notes.print(f"{name:<10} ", end="", style="dim")
        notes.print(
            "\n".join(printable(line) for line in value.split("\n")).replace("\n", "\n" + " " * 11), markup=False
        )
    notes.print()


def _whole(value: dict[str, Any]) -> str:
    return shown_json(value["value"], indent=2) if value["tier"] == "inline" else shown_value(value)


def typed(text: str, schema: dict[str, Any]) -> Any:
    """What was typed, as the question wants it: text stays text where it asks for text, yes and no are true and false,
    one of its choices is that choice; else JSON if it reads so."""
    choices = schema.get("enum")
    if isinstance(choices, list) and text in choices:
        return text
    if schema.get("type") == "string":
        return text
    if schema.get("type") == "boolean" and text.strip().lower() in _YES_NO:
        return _YES_NO[text.strip().lower()]
    try:
        return parse_json(text)
    except TgaError:
        return text


_YES_NO = {"y": True, "yes": True, "true": True, "n": False, "no": False, "false": False}


async def signal_run(client: GatewayClient, run_id: str, name: str, text: str | None, *, signal_id: str | None) -> bool:
    value: Any = None
    if text is not None:
        value = typed(text, {})
    body = {"name": name, "value": value} | ({} if signal_id is None else {"signal_id": signal_id})
    _say((await client.post(path_to("v1", "runs", run_id, "signals"), body)).document)
    return True


async def cancel_run(client: GatewayClient, run_id: str, *, rationale: str | None, yes: bool) -> bool:
    run = await client.get(path_to("v1", "runs", run_id), steps=0)
    question = f"Cancel run {run_id} of {run['procedure']} ({run['state']}), for good?"
    if not rests_for_good(run) and not confirmed(question, yes=yes):
        notes.print("Nothing was cancelled.")
        return False
    body = {} if rationale is None else {"rationale": rationale}
    _say((await client.post(path_to("v1", "runs", run_id, "cancel"), body)).document)
    return True


def rests_for_good(run: dict[str, Any]) -> bool:
    """There is nothing to ask about: the gateway says that it has ended."""
    return run["state"] in ("COMPLETED", "CANCELLED")


async def retry_run(client: GatewayClient, run_id: str, *, rationale: str | None, accept_version: str | None) -> bool:
    body: dict[str, Any] = {} if rationale is None else {"rationale": rationale}
    if accept_version is not None:
        procedure = (await client.get(path_to("v1", "runs", run_id), steps=0))["procedure"]
        body["accepts"] = await _program(client, procedure, accept_version)
    _say((await client.post(path_to("v1", "runs", run_id, "retry"), body)).document)
    return True


async def _program(client: GatewayClient, procedure: str, version: str) -> dict[str, str]:
    """The newest program of this version: an operator names a version, the record names exactly one program."""
    listed = await client.list_items("/v1/procedures", limit=1_000, procedure=procedure)
    for item in listed:
        if item["version"] == version:
            return {"version": version, "program_digest": item["program_digest"]}
    raise ProcedureNotFound(
        f"{procedure} has no version {version}",
        expected=", ".join(dict.fromkeys(item["version"] for item in listed)) or "one that is registered",
        found=version,
    )


async def fork_run(
    client: GatewayClient, run_id: str, *, at: int | None, new_id: str | None, version: str | None, as_json: bool
) -> bool:
    """The new run's id on stdout."""
    given = (("at", at), ("run_id", new_id), ("version", version))
    body = {name: value for name, value in given if value is not None}
    run = (await client.post(path_to("v1", "runs", run_id, "fork"), body)).document
    _say(run)
    print_json(run) if as_json else output.print(run["run_id"], markup=False)
    return True


def _say(run: dict[str, Any], more: str = "") -> None:
    """One line to stderr: where the run stands."""
    style = STATUS_STYLE.get(run["status"], "bold")
    notes.print(f"[{style}]{run['state']}[/] run ", end="")
    notes.print(f"{run['run_id']}{more}", markup=False)
    if run["notice"] and not rests(run):
        notes.print(printable(f"{run['notice'][0].upper()}{run['notice'][1:]}."), markup=False)
