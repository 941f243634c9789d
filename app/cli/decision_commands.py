"""Commands that ask a running gateway over HTTP: what waits for a person, and what the person says."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

from app.cli import decisions
from app.cli.running import AsJson, Limit, Rationale, TraceArgument, Yes, refuse, run_over_http

SignWith = Annotated[
    Path | None,
    typer.Option("--sign-with", metavar="KEYFILE", help="Sign with your own registered key (see `tga keys make`)."),
]
SignAs = Annotated[
    str | None,
    typer.Option("--as", metavar="PRINCIPAL", help="With --sign-with: who you are to the gateway; it is signed too."),
]


def add_to(application: typer.Typer) -> None:
    application.command("approvals")(approvals_command)
    application.command("approve")(approve_command)
    application.command("deny")(deny_command)
    application.command("withdraw")(withdraw_command)
    application.command("resolve")(resolve_command)


def approvals_command(context: typer.Context, limit: Limit = 200, as_json: AsJson = False) -> None:
    """What waits for a person, oldest first."""
    run_over_http(context, lambda client: decisions.show_approvals(client, limit=limit, as_json=as_json))


def approve_command(
    context: typer.Context,
    trace_id: TraceArgument,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
    yes: Yes = False,
) -> None:
    """Show a waiting request, and approve exactly that. On a terminal it asks first.

    Exit 0 when the approved call is completed or goes on, 1 when it failed.
    """
    _decide(context, trace_id, "APPROVE", rationale, sign_with, principal, yes=yes)


def deny_command(
    context: typer.Context,
    trace_id: TraceArgument,
    rationale: Rationale = None,
    sign_with: SignWith = None,
    principal: SignAs = None,
) -> None:
    """Show a waiting request, and deny it."""
    _decide(context, trace_id, "DENY", rationale, sign_with, principal, yes=True)


def _decide(
    context: typer.Context,
    trace_id: str,
    decision: Literal["APPROVE", "DENY"],
    rationale: str | None,
    sign_with: Path | None,
    principal: str | None,
    *,
    yes: bool,
) -> NoReturn:
    if (sign_with is None) != (principal is None):
        refuse("--sign-with and --as come together")
    run_over_http(
        context,
        lambda client: decisions.decide(
            client, trace_id, decision, rationale=rationale, sign_with=sign_with, principal=principal, yes=yes
        ),
    )


def withdraw_command(context: typer.Context, trace_id: TraceArgument, rationale: Rationale = None) -> None:
    """Take back your own request while it waits for a person."""
    run_over_http(context, lambda client: decisions.withdraw(client, trace_id, rationale=rationale))


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
    run_over_http(
        context, lambda client: decisions.resolve(client, trace_id, action, rationale=rationale, result=result)
    )
