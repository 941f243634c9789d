"""What the HTTP edge works with, and the one way in: authenticate, admit, then do."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Final, Protocol

from starlette.types import Scope

from app.connectors.registry import Registry
from app.core.errors import InputMalformed, TgaError
from app.core.instruments import Instruments
from app.core.note import VerifierKey
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.queries import Feed, StreamQueries
from app.domain.log.condition import LogCondition
from app.domain.policy.cedar import CedarPolicy
from app.domain.runs.blobs import Blobs
from app.domain.runs.engine.engine import RunEngine
from app.domain.runs.procedures import Procedures
from app.domain.runs.scheduling import Schedules
from app.domain.runs.submissions import Submissions
from app.domain.runs.triggers import Triggers
from app.domain.system.log import KnownKey
from app.domain.system.pins import Pins
from app.domain.tga.runtime import TgaRuntime
from app.edge.admission import Admission
from app.edge.handover import Handover
from app.edge.log_verification import LogVerifications
from app.edge.observing import CallObserver
from app.edge.processes import Processes
from app.edge.read_scheduler import ReadingSessions, ReadScheduler, reader
from app.edge.replays import ReplayCounts
from app.postgres.feed import PostgresFeed
from app.postgres.queries import PostgresQueries
from app.postgres.sessions import Sessions
from app.postgres.traces import PostgresTraces

# In the scope of a request that this process makes of itself: who makes it. A request from outside cannot have it: its
# scope is made by the protocol, from what was sent, and this name is none of those it knows.
IN_PROCESS: Final = "tga.in_process_principal"


class Authenticates(Protocol):
    async def authenticate(self, authorization: str | None) -> Principal: ...


class Scoped(Protocol):
    """A Request, or anything else with the scope of one."""

    @property
    def scope(self) -> Scope: ...


class ErasesRuns(Protocol):
    async def erase(self, run_id: str, *, tenant: str, erased_by: str, rationale: str) -> None: ...


class Log(Protocol):
    """What is known here of the verifiable log: the key of its heads, and what is wrong with it."""

    @property
    def verifier_key(self) -> VerifierKey: ...

    @property
    def fault(self) -> TgaError | None: ...

    @property
    def condition(self) -> LogCondition: ...


class Metrics(Protocol):
    """`/metrics`. `needs_key`: whether a credential is asked for."""

    @property
    def needs_key(self) -> bool: ...

    async def render(self) -> bytes: ...


class PolicyInForce(Protocol):
    """The policy that decides now, and why its file as it is now is not in force, if it is not."""

    @property
    def policy(self) -> CedarPolicy: ...

    @property
    def last_error(self) -> TgaError | None: ...


class Store(Protocol):
    """What is known of the store without asking it."""

    @property
    def fault(self) -> TgaError | None: ...


@dataclass(frozen=True, slots=True)
class Services:
    """Wired by main.py. `stopping` is set when the gateway takes nothing new. `signing_keys`: the gateways' own, by id,
    as last read from the system stream; anybody may ask, so the store is not."""

    runtime: TgaRuntime
    traces: PostgresTraces
    sessions: Sessions
    registry: Registry
    pins: Pins
    procedures: Procedures
    submissions: Submissions
    schedules: Schedules
    triggers: Triggers
    runs: RunEngine
    erasure: ErasesRuns
    authenticator: Authenticates
    admission: Admission
    clock: Clock
    log: Log
    blobs: Blobs
    store: Store | None = None
    instruments: Instruments = field(default_factory=Instruments)
    metrics: Metrics | None = None  # None: there is no /metrics
    observer: CallObserver | None = None
    policy: PolicyInForce | None = None
    signing_keys: Callable[[], Mapping[str, KnownKey]] = dict
    program_submitted: Callable[[str], None] = lambda _: None  # told the tenant whose program was submitted here
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    handover: Handover = field(default_factory=Handover)
    read_scheduler: ReadScheduler = field(default_factory=ReadScheduler)
    replays: ReplayCounts = field(default_factory=ReplayCounts)
    log_verifications: LogVerifications = field(default_factory=LogVerifications)
    processes: Processes = field(default_factory=Processes)

    @property
    def queries(self) -> StreamQueries:
        return PostgresQueries(self.sessions)

    @property
    def feed(self) -> Feed:
        return PostgresFeed(self.sessions)

    def for_reading(self) -> Services:
        """The same services for routes that only read: what they ask of the store, they ask in turn."""
        return replace(self, sessions=ReadingSessions(self.sessions, self.read_scheduler))

    def admitted(self, request: Scoped) -> Admitted:
        """`async with services.admitted(request) as principal:`; Unauthenticated, RateLimited or TooManyInFlight."""
        return Admitted(self, request.scope)

    @asynccontextmanager
    async def subscribed(self, request: Scoped) -> AsyncIterator[Principal]:
        """As `admitted`, for a request that follows events: it has a place of its own for as long as it lasts."""
        principal = await self.authenticator.authenticate(header_of(request.scope, b"authorization"))
        reader.set((principal.tenant, principal.principal_id))
        with self.admission.subscription(principal):
            yield principal

    def polling(self, request: Scoped) -> Polling:
        """As `subscribed`, for a worker that waits for runs."""
        return Polling(self, request.scope)

    async def passing(self, request: Scoped) -> Principal:
        """As `admitted`, for what is short and must get through while its principal has all its places taken."""
        own: Principal | None = request.scope.get(IN_PROCESS)
        if own is not None:
            return own
        principal = await self.authenticator.authenticate(header_of(request.scope, b"authorization"))
        self.admission.pass_by(principal)
        return principal


class Admitted:
    """A principal's request, counted while it is being answered. What this process asks of itself is no principal's
    load: its own bounds hold it back."""

    __slots__ = ("_load", "_scope", "_services")

    def __init__(self, services: Services, scope: Scope) -> None:
        self._services = services
        self._scope = scope

    async def __aenter__(self) -> Principal:
        own: Principal | None = self._scope.get(IN_PROCESS)
        if own is not None:
            self._load = None
            reader.set((own.tenant, own.principal_id))
            return own
        principal = await self._services.authenticator.authenticate(header_of(self._scope, b"authorization"))
        self._load = self._services.admission.enter(principal)
        reader.set((principal.tenant, principal.principal_id))
        return principal

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._load is not None:
            self._services.admission.leave(self._load)


class Polling:
    """A worker that waits for runs, counted among those who stay. A class: the loop keeps a book of generators."""

    __slots__ = ("_load", "_scope", "_services")

    def __init__(self, services: Services, scope: Scope) -> None:
        self._services = services
        self._scope = scope

    async def __aenter__(self) -> Principal:
        own: Principal | None = self._scope.get(IN_PROCESS)
        if own is not None:
            self._load = None
            self._services.admission.stay()
            return own
        principal = await self._services.authenticator.authenticate(header_of(self._scope, b"authorization"))
        self._load = self._services.admission.enter_poll(principal)
        return principal

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._load is None:
            self._services.admission.stay_no_longer()
        else:
            self._services.admission.leave_poll(self._load)


def header_of(scope: Scope, name: bytes) -> str | None:
    """The header's value, or None. Sent twice it is InputMalformed: readers would disagree on which one counts."""
    found: bytes | None = None
    for key, value in scope["headers"]:
        if key == name:
            if found is not None:
                raise InputMalformed("a header is repeated", found=name.decode("ascii"))
            found = value
    return None if found is None else found.decode("latin-1")
