"""What a gateway is made of: everything it has, wired together. main.py loads it for the commands that open one."""

from __future__ import annotations

import logging
import secrets
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

from app.clock import SystemClock
from app.config import Config, load_config
from app.config.answer_schema import BoundedSchemas
from app.config.telling import TelemetryConfig
from app.connectors.blobs import open_object_store
from app.connectors.callbacks import Callbacks
from app.connectors.registry import Registry
from app.connectors.webhook_notices import WebhookNotices
from app.connectors.webhooks import APPROVAL_REQUESTED, Webhooks
from app.console.sessions import Sessions as ConsoleSessions
from app.core.errors import SettingInvalid
from app.core.instruments import Instruments
from app.domain.clock import Clock
from app.domain.identity import DEFAULT_TENANT
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.engine.ports import RunPorts
from app.domain.runs.procedures import Procedures
from app.domain.runs.scheduling import Schedules
from app.domain.runs.submissions import Submissions
from app.domain.runs.triggers import Triggers
from app.domain.system.log import KnownKey, SystemLog
from app.domain.system.log_keys import announce_log_key
from app.domain.system.policies import record_policy
from app.domain.tga.announcements import Announcement
from app.domain.tga.documents import TraceId
from app.domain.tga.execution import request_of
from app.domain.tga.ports import Ports
from app.domain.tga.runtime import TgaRuntime
from app.edge.admission import Admission
from app.edge.authentication import Authenticator
from app.edge.calls import Calls
from app.edge.metrics import ProcessMetrics
from app.edge.observing import CallObserver
from app.edge.oidc import OidcProvider
from app.edge.services import Services
from app.edge.tokens import JwtVerifier
from app.gateway.admin_key import ensure_admin_key
from app.gateway.call_folding import CallFolding
from app.gateway.identity_provider import provider_of
from app.gateway.lua import LuaParts
from app.gateway.policy_file import PolicyFile
from app.gateway.quarantine import QuarantineLog
from app.gateway.runs import (
    CallsOfRuns,
    EndedTracesOf,
    EngineLink,
    JournalValues,
    RunErasure,
    SealedSecrets,
    listening,
)
from app.gateway.schedules import EngineStart, ScheduleRounds
from app.gateway.standing import WhatStands
from app.gateway.store import open_store, pool_sessions
from app.keys.keyring import Keyring
from app.keys.log_signer import LogSigner
from app.mcp_server.origins import Origins
from app.mcp_server.server import McpEndpoint
from app.mcp_server.tool_visibility import ToolVisibility
from app.postgres.api_keys import PostgresAccess
from app.postgres.blobs import PostgresBlobRows
from app.postgres.database import Database
from app.postgres.ledger import PostgresLedger
from app.postgres.mcp_key_reservations import PostgresIntents
from app.postgres.outbox import PostgresOutbox
from app.postgres.run_salts import PostgresRunSalts
from app.postgres.runs import PostgresRuns
from app.postgres.schedules import PostgresSchedules
from app.postgres.sequencer import Sequencer, TreeSession
from app.postgres.sessions import Sessions
from app.postgres.system import PostgresSystemRows, system_parts
from app.postgres.traces import PostgresTraces
from app.postgres.writer import Writer
from app.settings import Settings

logger = logging.getLogger("tga")


@dataclass(frozen=True, slots=True)
class Gateway:
    """What runs and what commands reach for. The runtime and the edge have their own references to most of it."""

    runtime: TgaRuntime
    traces: PostgresTraces
    registry: Registry
    sessions: Sessions
    system: SystemLog
    policy: PolicyFile
    webhooks: Webhooks
    notices: WebhookNotices
    sequencer: Sequencer
    schedules: ScheduleRounds
    call_folding: CallFolding
    clock: Clock
    services: Services
    mcp: McpEndpoint
    console_sessions: ConsoleSessions
    provider: OidcProvider | None
    blobs: Blobs
    database: Database
    lua: LuaParts
    telemetry: TelemetryConfig


@asynccontextmanager
async def open_gateway(settings: Settings) -> AsyncIterator[Gateway]:
    """A gateway on its database, fit or refused; closed in the order that loses nothing."""
    config = load_config(settings.config_file)
    pool = pool_sessions(config, settings.processes)
    policy = PolicyFile.open(config.policy.file if config.policy else None)
    _verify_home(settings)
    keyring = Keyring.open(settings.keys)
    log_signer = LogSigner.open(settings.keys, origin=config.log.origin)
    clock, instruments = SystemClock(), Instruments()
    objects = open_object_store(config.blobs.url, folder=settings.home / "blobs")
    async with AsyncExitStack() as stack:
        registry = Registry.from_config(config)
        stack.push_async_callback(registry.close)
        database = await stack.enter_async_context(open_store(settings))
        url = database.gateway_url
        sessions = await stack.enter_async_context(await Sessions.open(url, sessions_max=pool))
        traces = await stack.enter_async_context(await PostgresTraces.open(sessions, url))
        access = await stack.enter_async_context(await PostgresAccess.open(sessions, url))
        writer = Writer(PostgresLedger(sessions), instruments)
        stack.push_async_callback(writer.close)
        system = system_parts(
            sessions, writer, clock, keyring, executor_id=traces.executor_id, definition_of=registry.definition
        )
        await system.decision_signer.announce()
        await announce_log_key(system.log, clock, log_signer.public_key)
        await record_policy(system.log, clock, policy.digest, policy.text)
        quarantine = QuarantineLog(system.pins)
        registry.on_discovery = quarantine.see
        await registry.start()  # their tools are pinned as they are discovered
        for unpinned in await quarantine.see(registry.tools()):
            logger.warning("%s", unpinned)
        tenants = {DEFAULT_TENANT, *config.tenants, *(server.tenant for server in config.servers.values())}
        for tenant in tenants:
            await access.create_tenant(tenant)
        await ensure_admin_key(access, settings.admin_key_file)
        link = EngineLink()
        told_of_approvals = [name for name, one in config.webhooks.items() if APPROVAL_REQUESTED in one.events]
        observer = CallObserver(instruments)
        runtime = TgaRuntime(
            Ports(
                ledger=writer,
                traces=traces,
                tools=registry,
                connectors=registry,
                supervisor=policy,
                pins=system.pins,
                vault=system.vault,
                decision_signer=system.decision_signer,
                clock=clock,
                approval_webhooks=told_of_approvals,
                companion_of=link.companion_of,
                observer=observer,
            )
        )
        stack.push_async_callback(runtime.close)
        tokens = None
        if config.auth.jwt is not None:
            tokens = JwtVerifier(config.auth.jwt, has_tenant=access.has_tenant)
            stack.push_async_callback(tokens.close)
        provider = None
        if config.auth.oidc is not None:
            provider = provider_of(config, has_tenant=access.has_tenant)
            stack.push_async_callback(provider.close)
        callbacks = Callbacks(config.callbacks, link.callbacks, public_url=config.public_url)
        webhooks = _webhooks(config, sessions, traces, link, keyring, clock, instruments, callbacks)
        stack.push_async_callback(webhooks.close)
        blobs = Blobs(PostgresBlobRows(sessions), objects, clock, size_bytes_max=config.blobs.max_bytes)
        sequencer = Sequencer(lambda: TreeSession.open(url), log_signer, instruments=instruments)
        procedures = Procedures(system.log, clock)
        calls = CallsOfRuns()
        salts, values = PostgresRunSalts(sessions, keyring), JournalValues(blobs)
        erasure = RunErasure(sessions, system.log, clock, traces.executor_id)
        link.engine = engine = RunEngine(
            RunPorts(
                ledger=writer,
                runs=PostgresRuns(sessions),
                salts=salts,
                procedures=procedures,
                supervisor=policy,
                tools=calls,
                values=values,
                secrets=SealedSecrets(blobs, values, salts, keyring),
                signer=system.decision_signer,
                schemas=BoundedSchemas(),
                clock=clock,
                executor_id=traces.executor_id,
                new_lease=partial(secrets.token_urlsafe, 24),
                incarnation=traces.incarnation,
                lease_ms=config.runs.lease_ms,
                ask_webhooks=told_of_approvals,
                verify_callback=callbacks.verify,
                instruments=instruments,
            ),
            EndedTracesOf(traces),
            erase=erasure.erase_as_agreed,
        )
        stack.push_async_callback(engine.close)
        await stack.enter_async_context(listening(engine, url))
        lua = LuaParts(config, procedures, system.log, PostgresSystemRows(sessions))
        start = EngineStart(engine)
        schedules = Schedules(system.log, PostgresSchedules(sessions), clock)
        services = Services(
            runtime=runtime,
            runs=engine,
            erasure=erasure,
            traces=traces,
            sessions=sessions,
            registry=registry,
            pins=system.pins,
            procedures=procedures,
            submissions=Submissions(procedures, blobs, policy, lua),
            program_submitted=lua.program_submitted,
            schedules=schedules,
            triggers=Triggers(procedures, start),
            authenticator=Authenticator(access, tokens),
            admission=Admission(config.limits),
            clock=clock,
            log=sequencer,
            blobs=blobs,
            store=database,
            policy=policy,
            signing_keys=partial(_own_keys, system.log),
            stopping=engine.ports.stopping,
            instruments=instruments,
            observer=observer,
        )
        if config.telemetry.metrics != "off":
            metrics = ProcessMetrics(
                services,
                needs_key=config.telemetry.metrics == "key",
                queue=lambda: writer.queue,
                leads=lambda: sequencer.is_working,
                worker_silent_ms=config.runs.lease_ms,
            )
            services = replace(services, metrics=metrics)
        calls.calls = Calls(services)
        lua.connect(services)
        yield Gateway(
            runtime=runtime,
            traces=traces,
            registry=registry,
            sessions=sessions,
            system=system.log,
            policy=policy,
            webhooks=webhooks,
            notices=WebhookNotices(
                webhooks,
                {name: webhook.events for name, webhook in config.webhooks.items()},
                WhatStands(sessions, registry, system.pins, sequencer, tenants, lease_ms=config.runs.lease_ms).look,
                clock,
            ),
            sequencer=sequencer,
            schedules=ScheduleRounds(schedules, start),
            call_folding=CallFolding(sessions, services.replays, services.read_scheduler, services.stopping),
            clock=clock,
            services=services,
            mcp=McpEndpoint(
                services,
                PostgresIntents(sessions, traces.executor_id),
                ToolVisibility(system.pins, policy),
                origins=Origins(hosts=[settings.host, *config.mcp.allowed_hosts], origins=config.mcp.allowed_origins),
                hold_ms=config.mcp.hold_ms,
                task_after_ms=config.mcp.task_after_ms,
            ),
            console_sessions=ConsoleSessions(services.authenticator, access, keyring, clock, access.spent_sessions),
            provider=provider,
            blobs=blobs,
            database=database,
            lua=lua,
            telemetry=config.telemetry,
        )


def _verify_home(settings: Settings) -> None:
    """Raise SettingInvalid unless files can be made in the home: else what is made there first would be blamed."""
    try:
        settings.home.mkdir(mode=0o711, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=settings.home):
            pass
    except OSError as error:
        raise SettingInvalid(
            f"the home directory {settings.home} cannot be written to",
            expected="a folder in which this account may make files",
            found=error.strerror,
            remedy="Name another one in TGA_HOME, or let this account write there.",
        ) from None


def _own_keys(system: SystemLog) -> dict[str, KnownKey]:
    """The gateways' own keys, by id, as the system stream announced them when it was last read; retired ones too."""
    keys = system.state_of(DEFAULT_TENANT).keys
    return {key_id: key for key_id, key in keys.items() if key.principal_id is None}


def _webhooks(
    config: Config,
    sessions: Sessions,
    traces: PostgresTraces,
    link: EngineLink,
    keyring: Keyring,
    clock: Clock,
    instruments: Instruments,
    callbacks: Callbacks,
) -> Webhooks:
    async def announcement(trace_id: TraceId) -> Announcement | None:
        stored = await traces.load_trace(trace_id)
        return Announcement.of(request_of(stored)) if stored.waiting == "supervisor" else None

    outbox = PostgresOutbox(sessions)
    return Webhooks(
        {name: webhook.url for name, webhook in config.webhooks.items()},
        outbox,
        load=announcement,
        load_run=link.announcement,
        sign=keyring.sign,
        clock=clock,
        instruments=instruments,
        formats={name: webhook.format for name, webhook in config.webhooks.items()},
        public_url=config.public_url,
        callbacks=callbacks,
    )
