"""`tga approvals`, `tga approve`, `tga deny`, `tga withdraw`, `tga resolve`: what people decide. Over HTTP.

A decision is about exactly the request that was shown: it names the digest of what stands on the screen.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer

from app.cli.calls import show_answer
from app.cli.client import GatewayClient, path_to
from app.cli.run_acting import decide_question, signing_with
from app.cli.run_drawing import times
from app.cli.running import (
    AsJson,
    Limit,
    Rationale,
    SignAs,
    SignWith,
    StreamArgument,
    TraceArgument,
    Yes,
    refuse,
    run_over_http,
)
from app.cli.showing import (
    confirmed,
    note_own_only,
    notes,
    output,
    print_json,
    print_table,
    printable,
    shown_json,
)
from app.cli.signing import load_private_key, signed
from app.clock import SystemClock
from app.core.canonical import parse_json
from app.core.digest import digest_of
from app.core.errors import AlreadyDecided, ChecksumMismatch, TraceErased, TraceNotHeld
from app.domain.runs.transitions import RUN
from app.domain.tga.documents import DecidedBy, SupervisorDecision
from app.domain.tga.transitions import TRACE

QuestionPath = Annotated[
    str | None,
    typer.Argument(metavar="[PATH]", help="With run:ID: which question, if several are open."),
]


def add_to(application: typer.Typer) -> None:
    application.command("approvals")(approvals_command)
    application.command("approve")(approve_command)
    application.command("deny")(deny_command)
    application.command("withdraw")(withdraw_command)
    application.command("resolve")(resolve_command)


def approvals_command(context: typer.Context, limit: Limit = 200, as_json: AsJson = False) -> None:
    """What waits for a person, soonest expiry first."""
    run_over_http(context, lambda client: show_approvals(client, limit=limit, as_json=as_json))


def approve_command(
    context: typer.Context,
    trace_id: StreamArgument,
    path: QuestionPath = None,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
    yes: Yes = False,
) -> None:
    """Show a waiting request, and approve exactly that; of a run (run:ID), answer yes.

    It asks first; without a terminal it does nothing unless given --yes. Exit 0 when the approved call is completed or
    goes on, 1 when it failed.
    """
    _decide(context, trace_id, "APPROVE", path, rationale, sign_with, principal, yes=yes)


def deny_command(
    context: typer.Context,
    trace_id: StreamArgument,
    path: QuestionPath = None,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
) -> None:
    """Show a waiting request, and deny it; of a run (run:ID), answer no."""
    _decide(context, trace_id, "DENY", path, rationale, sign_with, principal, yes=True)


def _decide(
    context: typer.Context,
    trace_id: str,
    decision: Literal["APPROVE", "DENY"],
    path: str | None,
    rationale: str | None,
    sign_with: Path | None,
    principal: str | None,
    *,
    yes: bool,
) -> NoReturn:
    if RUN.has(trace_id):
        if rationale is not None:
            refuse("-r goes with calls; a run gets an answer and nothing else")
        run_id, is_yes, signing = RUN.identity_of(trace_id), decision == "APPROVE", signing_with(sign_with, principal)
        run_over_http(
            context,
            lambda client: decide_question(client, run_id, path, is_yes=is_yes, yes=yes, signing=signing),
        )
    if path is not None:
        refuse("PATH goes with run:ID")
    if (sign_with is None) != (principal is None):
        refuse("--sign-with and --as come together")
    run_over_http(
        context,
        lambda client: decide(
            client, trace_id, decision, rationale=rationale, sign_with=sign_with, principal=principal, yes=yes
        ),
    )


def withdraw_command(context: typer.Context, trace_id: TraceArgument, rationale: Rationale = None) -> None:
    """Take back your own request while it waits for a person."""
    run_over_http(context, lambda client: withdraw(client, trace_id, rationale=rationale))


def resolve_command(
    context: typer.Context,
    trace_id: TraceArgument,
    action: Annotated[str, typer.Argument(metavar="ACTION", help="redispatch, succeeded or failed.")],
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record.")],
    result: Annotated[str | None, typer.Option("--output", help="With succeeded: the output, as JSON.")] = None,
) -> None:
    """Say what became of a call that is held or cannot be sent any more; or have a held one sent again."""
    if action not in ("redispatch", "succeeded", "failed"):
        refuse("ACTION is redispatch, succeeded or failed")
    if result is not None and action != "succeeded":
        refuse("--output goes with succeeded")
    run_over_http(context, lambda client: resolve(client, trace_id, action, rationale=rationale, result=result))


async def show_approvals(client: GatewayClient, *, limit: int, as_json: bool) -> bool:
    waiting = await client.list_items("/v1/approvals", limit=limit)
    if waiting.is_own_only:
        note_own_only("what waits of others")
    if as_json:
        print_json(waiting)
        return True
    if not waiting:
        output.print("Nothing waits for a person." if not waiting.is_own_only else "Nothing of your own waits.")
        return True
    print_table(
        ("trace or run", "tool or question", "asked by", "until", "arguments or message"),
        (_shown_approval(item) for item in waiting),
    )
    return True


def _shown_approval(item: dict[str, Any]) -> tuple[str, str, str, str, str]:
    who, until = item["principal_id"] or "", item["expires_at"] or ""
    if item["kind"] == "run":
        message = item["problem"] or item["request"]["message"]
        if item["level"]:
            message = f"(escalated {times(item['level'])}) {message}"
        return f"{item['run_id']} {item['path']}", f"{item['procedure']} {item['name'] or ''}", who, until, message
    tool = f"{item['server_id']} {item['tool_name']}"
    return item["trace_id"], tool, who, until, item["problem"] or shown_json(item["arguments"])


async def decide(
    client: GatewayClient,
    trace_id: str,
    decision: Literal["APPROVE", "DENY"],
    *,
    rationale: str | None,
    sign_with: Path | None,
    principal: str | None,
    yes: bool,
) -> bool:
    """Show the request, then decide on exactly that. True when the decision stands and what followed went well."""
    key = None if sign_with is None else load_private_key(sign_with)
    request, digest = await _waiting_request(client, trace_id)
    _show_request(request)
    if decision == "APPROVE" and not confirmed("Approve it?", yes=yes):
        notes.print("Nothing was decided.")
        return False
    body: dict[str, Any] = {"decision": decision, "action_request_digest": digest}
    if rationale is not None:
        body["rationale"] = rationale
    if key is not None and principal is not None:
        document = SupervisorDecision.made(
            trace_id=trace_id,
            action_request_digest=digest,
            decision=decision,
            decided_by=DecidedBy.made(type="person", id=principal),
            decided_at=SystemClock().now(),
            policy_digest=None,
            policy_ids=[],
            rationale=rationale,
            signature=None,
        )
        signature = signed(document, key)
        body |= {"signature": signature.value, "key_id": signature.key_id, "decided_at": document.decided_at}
    reply = await client.post(path_to("v1", "traces", trace_id, "decision"), body)
    return show_answer(reply) or decision == "DENY"


async def withdraw(client: GatewayClient, trace_id: str, *, rationale: str | None) -> bool:
    body = {} if rationale is None else {"rationale": rationale}
    show_answer(await client.post(path_to("v1", "traces", trace_id, "withdraw"), body))
    return True


async def resolve(client: GatewayClient, trace_id: str, action: str, *, rationale: str, result: str | None) -> bool:
    body: dict[str, Any] = {"action": action, "rationale": rationale}
    if result is not None:
        body["output"] = parse_json(result)
    trace = await client.get(path_to("v1", "traces", trace_id))
    if trace["waiting"] != "operator" and trace["state"] != "EXECUTING":  # whether that one can be sent, it knows best
        raise TraceNotHeld(
            "nothing to resolve",
            expected="a trace that waits for an operator or cannot be sent any more",
            found=f"{trace['state']}, waiting for {trace['waiting'] or 'nobody'}",
            stream=TRACE.stream(trace_id),
        )
    body["tool_call_digest"] = trace["tool_call_digest"]
    reply = await client.post(path_to("v1", "traces", trace_id, "resolve"), body)
    return show_answer(reply) or action == "failed"


async def _waiting_request(client: GatewayClient, trace_id: str) -> tuple[dict[str, Any], str]:
    trace = await client.get(path_to("v1", "traces", trace_id))
    stream = TRACE.stream(trace_id)
    if trace["waiting"] != "supervisor":
        raise AlreadyDecided("the request does not wait for a person", found=trace["state"], stream=stream)
    if trace["artifacts"] is None:
        raise TraceErased("its request cannot be shown", stream=stream)
    request: dict[str, Any] = trace["artifacts"]["action_request"]
    found = digest_of(request)
    if found != trace["action_request_digest"]:  # a person must not decide on another request than the recorded one
        raise ChecksumMismatch(
            "the request is not the one that waits", expected=trace["action_request_digest"], found=found, stream=stream
        )
    return request, found


def _show_request(request: dict[str, Any]) -> None:
    asker = request["principal"]
    roles = f" ({', '.join(asker['roles'])})" if asker.get("roles") else ""
    lines = [
        ("asked by", f"{asker['principal_id']}{roles}, tenant {asker['tenant']}, {request['requested_at']}"),
        ("tool", f"{request['server_id']} {request['tool_name']} ({request['tool_class']})"),
        ("arguments", shown_json(request["arguments"], indent=2)),
        ("intent", printable(request["intent"]) if request["intent"] else "(none given)"),
        ("key", request["idempotency_key"] or "(none)"),
        ("until", request["expires_at"] or "(no end)"),
    ]
    for name, value in lines:
        notes.print(f"{name:<10} ", end="", style="dim")
        notes.print(value.replace("\n", "\n" + " " * 11), markup=False)
    notes.print()
