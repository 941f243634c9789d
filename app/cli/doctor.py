"""`tga doctor`: everything that must be right for the gateway to work, each with what to do if it is not.

It does not verify the ledger, and says so: that takes as long as the log is, and `tga verify --all` does it.
It changes nothing but this: an embedded database that was made before is started if it is not running, and stopped
again.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any, Final

import typer

from app.cli.blob_findings import blob_finding
from app.cli.client import GatewayClient
from app.cli.findings import Finding
from app.cli.lua_findings import lua_finding
from app.cli.policy import configured_misfits
from app.cli.run_findings import run_findings
from app.cli.running import AsJson, context_of, run
from app.cli.server_findings import server_findings
from app.cli.showing import output, print_json, printable
from app.cli.sign_in_finding import sign_in_finding
from app.clock import SystemClock
from app.config import Config, load_config
from app.connectors.registry import Registry
from app.core.errors import TgaError
from app.core.limits import RUN_LEASE_MS
from app.domain.system.log import SystemLog
from app.gateway.policy_file import load_policy
from app.keys.keyring import SEALING_VARIABLE, SIGNING_VARIABLE, Keyring
from app.keys.log_signer import load_memory
from app.postgres.api_keys import PostgresAccess
from app.postgres.clock_difference import CLOCKS_APART_MS_MAX, load_ahead_ms
from app.postgres.database import Database, is_made, open_database
from app.postgres.guards import find_problems
from app.postgres.ledger import PostgresLedger
from app.postgres.migrate import load_status
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows
from app.postgres.tree import PostgresTree
from app.settings import Settings

_WAITING: Final = """
SELECT waiting, count(*) AS many FROM tga.at_rest
 WHERE waiting IS NOT NULL AND (stream < 'run:' OR stream >= 'run;') GROUP BY waiting
"""


def add_to(application: typer.Typer) -> None:
    application.command("doctor")(doctor_command)


def doctor_command(context: typer.Context, as_json: AsJson = False) -> None:
    """Look at everything that must be right: configuration, policy, keys, database, streams, clock, the running
    gateway, its tool servers, runs, and what waits; exit 1 if anything is wrong."""
    run(examine(context_of(context).settings, as_json=as_json))


async def examine(settings: Settings, *, as_json: bool) -> bool:
    """True when everything is right."""
    findings = []
    async for finding in _findings(settings):
        findings.append(finding)
        if not as_json:
            _show(finding)
    if as_json:
        print_json([{"ok": finding.is_right, **_told(finding)} for finding in findings])
    wrong = sum(not finding.is_right for finding in findings)
    if not as_json:
        output.print("What was looked at is as it must be." if not wrong else f"{wrong} of {len(findings)} are wrong.")
        output.print("The ledger was not verified: `tga verify --all` does that.")
    return wrong == 0


def _told(finding: Finding) -> dict[str, object]:
    told = asdict(finding)
    del told["is_right"]
    return told


def _show(finding: Finding) -> None:
    standing = "[yellow]warn [/]" if finding.warning else "[green]ok   [/]"
    output.print(standing if finding.is_right else "[bold red]wrong[/]", end="  ")
    output.print(printable(f"{finding.what}: {finding.found}"), markup=False)
    if finding.remedy is not None:
        output.print(f"       {printable(finding.remedy)}", markup=False)


async def _findings(settings: Settings) -> AsyncIterator[Finding]:
    config: Config | None = None
    try:
        config = load_config(settings.config_file)
        await Registry.from_config(config).close()
        servers = len(config.servers)
        yield Finding("configuration", True, f"{settings.config_file}, {_count(servers, 'server')}")
    except TgaError as error:
        yield _wrong("configuration", error)
    if config is not None:
        async for finding in _policy(config):
            yield finding
        yield await lua_finding(config)
        if config.auth.oidc is not None:
            yield await sign_in_finding(config)
    yield _keys(settings)
    async for finding in _database(settings, config):
        yield finding
    async for finding in _gateway(settings):
        yield finding


async def _policy(config: Config) -> AsyncIterator[Finding]:
    try:
        policy = load_policy(config.policy.file if config.policy else None)
    except TgaError as error:
        yield _wrong("policy", error)
        return
    where = str(config.policy.file) if config.policy else "the packaged one"
    yield Finding("policy", True, f"{where}, digest {policy.digest[:16]}…")
    warnings = list(policy.warnings)
    with contextlib.suppress(TgaError):  # why there are no tools to compare with, the finding before this one says
        warnings += await configured_misfits(policy, config)
    for warning in warnings:
        yield Finding("policy rule", True, warning, warning=True)


def _keys(settings: Settings) -> Finding:
    given = [bool(os.environ.get(name)) for name in (SIGNING_VARIABLE, SEALING_VARIABLE)]
    there = [(settings.keys / name).exists() for name in ("signing.key", "sealing.key")]
    if not all(one or other for one, other in zip(given, there, strict=True)):
        # Opening the keyring would make them, and a folder that was lost must not be replaced unseen.
        remedy = "They are made at the first start. If this is not the first one: put them back from your backup."
        return Finding("keys", not any(there) and not settings.admin_key_file.exists(), "none yet", remedy)
    try:
        keyring = Keyring.open(settings.keys)
    except TgaError as error:
        return _wrong("keys", error)
    return Finding("keys", True, f"signing {keyring.key_id}, sealing {keyring.sealing_key_id}")


def _no_database(settings: Settings) -> Finding:
    """Of a home without a cluster: opening the database would make one, and a lost one must not be replaced unseen."""
    remedy = f"It is made in {settings.home} at the first start. If this is not the first one: check TGA_HOME."
    return Finding("database", not settings.admin_key_file.exists(), "none yet", remedy)


async def _database(settings: Settings, config: Config | None) -> AsyncIterator[Finding]:
    if not is_made(settings.home, settings.database_url):
        yield _no_database(settings)
        return
    try:
        async with open_database(settings.home, settings.database_url) as database:
            status = await load_status(database.admin_url)
            yield Finding("database", True, database.where)
            pending = [f"{migration.version:04}_{migration.name}" for migration in status.pending]
            yield Finding(
                "schema",
                not pending,
                f"pending: {', '.join(pending)}" if pending else f"{len(status.applied)} migrations applied",
                "Run `tga db migrate`." if pending else None,
            )
            problems = await find_problems(database.admin_url)
            for problem in problems:
                found = f"expected {problem.expected}, found {problem.found}"
                yield Finding(problem.what, not problem.refuses, found, problem.remedy, warning=not problem.refuses)
            if not any(problem.refuses for problem in problems):
                yield Finding("guards", True, "settings are safe, and the schema is as its migrations made it")
            if not pending:
                async with await Sessions.open(database.gateway_url, sessions_max=2) as sessions:
                    yield await _clock(sessions)
                    async for finding in _system(sessions, database):
                        yield finding
                    yield await _memory(settings, sessions)
                    yield await _waiting(sessions)
                    lease_ms = RUN_LEASE_MS if config is None else config.runs.lease_ms
                    async for finding in run_findings(sessions, lease_ms=lease_ms):
                        yield finding
                    yield await blob_finding(settings, config, sessions)
    except TgaError as error:
        yield _wrong("database", error)


async def _clock(sessions: Sessions) -> Finding:
    apart = abs(await load_ahead_ms(sessions, SystemClock()))
    is_right = apart <= CLOCKS_APART_MS_MAX
    remedy = None if is_right else "Set both clocks by NTP: requests expire by the database's, and are dated by ours."
    return Finding("clock", is_right, f"{apart:.0f} ms from the database's", remedy)


async def _system(sessions: Sessions, database: Database) -> AsyncIterator[Finding]:
    log = SystemLog(PostgresSystemRows(sessions), PostgresLedger(sessions), SystemClock(), lambda: "")
    for tenant in await PostgresAccess(sessions, database.gateway_url).list_tenants():
        what = f"system stream of {tenant.tenant}"
        try:
            state = await log.refresh(tenant.tenant)
            keys = sum(not key.is_retired for key in state.keys.values())
            found = f"{_count(state.head.sequence_number, 'entry', 'entries')}, {_count(keys, 'key')} in use"
            yield Finding(what, True, found)
        except TgaError as error:
            yield _wrong(what, error)


async def _memory(settings: Settings, sessions: Sessions) -> Finding:
    """What the log's signer remembers, by the file alone: opening the signer would make its key."""
    what = "log's memory"
    try:
        latest = await PostgresTree(sessions).latest_head()
    except TgaError as error:
        return _wrong(what, error)
    if latest is None:
        return Finding(what, True, "no head has been signed yet")
    signed = f"the newest published head has {_count(latest.head.size, 'leaf', 'leaves')}"
    if (settings.keys / "log.head").exists():
        return _compared_memory(settings, latest.head.size, signed)
    remedy = (
        "Without it a gateway goes on from the newest head in the database, also in that of an old backup. Put it back "
        "first, or compare with a head that somebody else kept: `tga verify --all --head FILE --key PUB`."
    )
    return Finding(what, True, f"log.head is missing in {settings.keys}, but {signed}", remedy, warning=True)


def _compared_memory(settings: Settings, published: int, signed: str) -> Finding:
    try:
        memory = load_memory(settings.keys)
    except TgaError as error:
        return _wrong("log's memory", error)
    if memory is None or memory.head.size <= published:
        return Finding("log's memory", True, f"log.head is there; {signed}")
    remedy = (
        "A gateway that runs publishes it within a second. If it stays so, an old backup was restored: see "
        '"Backup and restore" in docs/operations.md, and `tga log new-epoch`.'
    )
    found = f"log.head is of {_count(memory.head.size, 'leaf', 'leaves')}, but {signed}"
    return Finding("log's memory", True, found, remedy, warning=True)


async def _waiting(sessions: Sessions) -> Finding:
    many = {row["waiting"]: row["many"] for row in await sessions.fetch(_WAITING)}
    held, asked = many.get("operator", 0), many.get("supervisor", 0)
    remedy = "See `tga traces --state executing`, then `tga resolve`." if held else None
    return Finding("waiting", True, f"{asked} for a supervisor, {held} held for an operator", remedy)


async def _gateway(settings: Settings) -> AsyncIterator[Finding]:
    what = f"gateway at {settings.url.rpartition('@')[2]}"
    try:
        async with GatewayClient.open(settings) as client:
            ready = await client.get("/readyz")
            await client.get("/v1/traces", limit=1)
            yield _log_standing(what, ready)
            if processes := ready.get("processes"):
                yield _processes(processes)
            async for finding in server_findings(client, ready):
                yield finding
    except TgaError as error:
        yield _wrong(what, error)


def _processes(standing: dict[str, int]) -> Finding:
    found = f"{standing['ready']} of {standing['of']} take requests"
    if standing["ready"] >= standing["of"]:
        return Finding("processes", True, found)
    remedy = "The others are starting, or end again and again: the gateway's log says which, and how they ended."
    return Finding("processes", True, found, remedy, warning=True)


def _log_standing(what: str, ready: dict[str, Any]) -> Finding:
    if ready.get("log") == "ok":
        return Finding(what, True, "ready, and takes the key")
    found = f"takes calls, but its log is {ready.get('log')}: {ready.get('reason')}"
    return Finding(what, True, found, "The gateway's own log says more.", warning=True)


def _wrong(what: str, error: TgaError) -> Finding:
    return Finding(what, False, str(error).removesuffix(f". {error.next_step}"), error.next_step)


def _count(number: int, one: str, many: str | None = None) -> str:
    return f"{number:,} {one if number == 1 else many or one + 's'}"
