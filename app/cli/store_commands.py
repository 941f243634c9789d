"""Commands that work on the store itself, whether a gateway runs or not; and the gateway itself."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from app.cli.erasing import erase
from app.cli.export import export_command
from app.cli.receipt import show_receipt
from app.cli.recovery import recover
from app.cli.running import (
    AsJson,
    MaybeTrace,
    TraceArgument,
    Yes,
    checked_trace_id,
    context_of,
    refuse,
    run,
    run_in_gateway,
)
from app.cli.verify import verify
from app.cli.verify_bundle import verify_bundle_command
from app.domain.identity import DEFAULT_TENANT
from app.domain.log.bundle import Filter

if TYPE_CHECKING:
    from app.gateway.wiring import Gateway


def add_to(application: typer.Typer) -> None:
    application.command("serve")(serve_command)
    application.command("recover")(recover_command)
    application.command("verify")(verify_command)
    application.command("export")(export_bundle_command)
    application.command("receipt")(receipt_command)
    application.command("erase")(erase_command)


def serve_command(context: typer.Context) -> None:
    """Run the gateway on TGA_HOST and TGA_PORT until SIGINT or SIGTERM.

    It also recovers what was interrupted, lets requests expire, follows the policy file and announces what waits. To
    authenticate, callers send a key as `Authorization: Bearer`; the first start writes an administrator's key to
    TGA_HOME/admin.key, and `tga keys create` makes others.
    """

    # Here, because the web framework takes as long to load as all the rest: only who serves waits for it.
    from app.gateway.serving import serve

    async def work(gateway: Gateway) -> bool:
        return await serve(gateway, context_of(context).settings)

    run_in_gateway(context, work)


def recover_command(
    context: typer.Context,
    trace_id: MaybeTrace = None,
    everything: Annotated[bool, typer.Option("--all", help="Every trace that has no living executor.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue traces whose executor is gone; exit 1 if any could not be recovered."""
    if (trace_id is None) != everything:
        refuse("name one trace, or say --all")
    run_in_gateway(context, lambda gateway: recover(gateway, trace_id, dry_run=dry_run, as_json=as_json))


def verify_command(
    context: typer.Context,
    trace_id: MaybeTrace = None,
    everything: Annotated[bool, typer.Option("--all", help="Every stream, and the tree over them.")] = False,
    file: Annotated[Path | None, typer.Option("--file", help="An exported bundle; needs no database.")] = None,
    key: Annotated[
        str | None, typer.Option("--key", metavar="PUB", help="The log's public key, or a file of such keys.")
    ] = None,
    head: Annotated[
        list[Path] | None, typer.Option("--head", help="A tree head or receipt that was kept; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Recompute every digest, link, transition, artifact, claim, checkpoint and head; exit 1 if anything is wrong.

    With --all the tree is compared with every signed head that is stored, that the signer remembers and that --head
    names: a truncated, deleted, changed, forked or restored log is told apart, and since when it cannot be trusted.
    With --file an exported bundle is judged by --key alone.
    """
    heads = head or []
    if (trace_id is not None) + everything + (file is not None) != 1:
        refuse("name one trace, or say --all, or --file")
    if file is not None:
        if key is None:
            refuse("--file needs --key: the log's public key, from somewhere else than the bundle")
        run(verify_bundle_command(file, key, heads=heads, as_json=as_json))
    if not everything and (heads or key is not None):
        refuse("--head and --key go with --all or --file")
    run(verify(context_of(context).settings, trace_id, as_json=as_json, heads=heads, key=key))


def _moment(text: str | None) -> str | None:
    """An RFC 3339 time or a date as entries write times: UTC, with milliseconds."""
    if text is None:
        return None
    try:
        read = datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter("a time is written like 2026-11-16 or 2026-11-16T12:00:00Z") from None
    at = read.replace(tzinfo=UTC) if read.tzinfo is None else read.astimezone(UTC)
    return at.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def export_bundle_command(
    context: typer.Context,
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new folder for the bundle.")],
    since: Annotated[
        str | None, typer.Option(help="Only traces that began then or later.", metavar="TIME", callback=_moment)
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="Only traces that began before.", metavar="TIME", callback=_moment)
    ] = None,
    tenant: Annotated[str | None, typer.Option(help="Only this tenant's traces.")] = None,
    trace_id: Annotated[
        str | None, typer.Option("--trace", metavar="ID", help="Only this trace.", callback=checked_trace_id)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Finish an export that was interrupted.")] = False,
    as_json: AsJson = False,
) -> None:
    """Write a bundle of the ledger that anyone can verify offline: entries, artifacts, proofs, heads, keys, schemas."""
    wanted = Filter(since=since, until=until, tenant=tenant, trace_id=trace_id)
    run(export_command(context_of(context).settings, folder, wanted=wanted, resume=resume, as_json=as_json))


def receipt_command(context: typer.Context, trace_id: TraceArgument) -> None:
    """Print the proof that a trace's last entry is in the log, with the signed tree head. Keep it elsewhere."""
    run(show_receipt(context_of(context).settings, trace_id))


def erase_command(
    context: typer.Context,
    trace_id: TraceArgument,
    rationale: Annotated[str, typer.Option("-r", "--rationale", help="Why; it goes on the record.")],
    tenant: Annotated[str, typer.Option("--tenant", help="Whose trace it is.")] = DEFAULT_TENANT,
    yes: Yes = False,
) -> None:
    """Remove the payloads of a finished trace, for ever. Its entries and digests stand, and so does the erasure.

    On a terminal it asks first. Names stay: tenant, principal, server, tool and idempotency key.
    """
    run_in_gateway(context, lambda gateway: erase(gateway, trace_id, tenant=tenant, rationale=rationale, yes=yes))
