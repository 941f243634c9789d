"""What the engine asks of the world: stored runs, salts, procedures, blobs, the policy, tools, time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from app.core.errors import RunCallbackRefused
from app.core.instruments import Instruments
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.documents import Signature
from app.domain.ledger.plans import Ledger, Sealed
from app.domain.runs.checkpoints import SinceCheckpoint
from app.domain.runs.documents import RunDocument, RunSignal, RunStart
from app.domain.runs.judging import StartSupervisor
from app.domain.runs.procedures import ProgramLookup
from app.domain.runs.replay import Run, RunRecord
from app.domain.runs.values import SecretValue, Value
from app.domain.system.decision_signer import Signed
from app.domain.tga.execution import Answer
from app.domain.tga.runtime import CheckedCall


@dataclass(slots=True)
class LoadedRun:
    """A run, read and verified. `run` is changed by the task that adds to it; what was read is then gone."""

    run: Run
    start: RunStart
    owner: str | None
    worker: str | None = None  # which process holds it, while it is RUNNING
    state_bytes: int | None = None  # of the program's state, at most; None: not looked at yet
    since: SinceCheckpoint = field(default_factory=SinceCheckpoint)

    @property
    def run_id(self) -> str:
        return self.run.run_id

    @property
    def tenant(self) -> str:
        return self.start.principal.tenant


class HeadOfRun(NamedTuple):
    owner: str | None
    sequence_number: int
    state: str
    attempt: int


class HeldRun(NamedTuple):
    """A run that is ready, kept from others for a moment."""

    run_id: str
    procedure: str
    program: str


class Ready(NamedTuple):
    runs: Sequence[HeldRun]
    next_ms: int | None  # until another one is ready; None: none will be by itself


class DueRun(NamedTuple):
    """A run that something is due for. `lost_attempt`: the one whose worker was not heard of for too long; None: no
    worker is lost. `held_until`: until when no other gateway looks at it; a row that still says so was not changed
    since. `now`: by the store's clock, which says what is due; a gateway's own may be behind it or ahead."""

    run_id: str
    lost_attempt: int | None
    held_until: str
    now: str


class Due(NamedTuple):
    runs: Sequence[DueRun]
    next_ms: int | None  # until something else is due; None: nothing is


class StoredRuns(Protocol):
    """Runs in the store. Every read verifies what it reads."""

    async def load(self, run_id: str) -> LoadedRun:
        """From the newest execution checkpoint on; RunNotFound."""
        ...

    async def load_at(self, run_id: str, sequence_number: int) -> Run:
        """The run as it stood after this entry."""
        ...

    async def load_records(self, run_id: str, *, after: int, limit: int) -> list[RunRecord]:
        """In the order of the journal; no more than a page of bytes."""
        ...

    async def find_signal(self, run_id: str, *, later: int) -> RunSignal | None:
        """The signal after which so many others came; None: the journal has fewer. One artifact is read."""
        ...

    async def find_heads(self, run_ids: Sequence[str], *, tenant: str) -> dict[str, HeadOfRun]: ...

    async def list_children(self, run_id: str) -> list[str]:
        """Those that have not ended."""
        ...

    async def count_open_below(self, run_id: str, *, at_most: int) -> int:
        """Its children that are open (not COMPLETED, not CANCELLED), theirs, and so on; beyond `at_most` none is looked
        at."""
        ...

    async def hold_ready(self, tenant: str, programs: Sequence[tuple[str, str]], limit: int) -> Ready:
        """Runs of these (procedure, program) that are ready, in turn over them; no other gateway is given them for some
        seconds. And when the next one is: its pause is over then, or the time for which another gateway has held it."""
        ...

    async def unhold_ready(self, run_ids: Sequence[str]) -> None:
        """No worker of this gateway waits for these any more: give them back."""
        ...

    async def hold_due(self, *, limit: int, worker_silent_ms: int | None) -> Due:
        """Runs that something is due for, likewise. `worker_silent_ms` None: workers are not judged this time."""
        ...

    async def move_due(self, run_id: str, *, held_until: str, due_at: str | None) -> None:
        """Nothing was due after all; look again then. A row that was changed since it was held stays as it is."""
        ...

    async def beat(
        self, worker: str, principal: Principal, name: str, programs: Sequence[tuple[str, str]]
    ) -> list[str]:
        """The worker lives, and can run these (empty: as it said before); the runs that the store says it holds."""
        ...

    async def has_worker(self, tenant: str, procedure: str, program: str, *, within_ms: int) -> bool:
        """Whether a living worker has asked for this program."""
        ...

    async def announce(self, run_ids: Sequence[str]) -> None:
        """Tell the other gateways that these have changed; the last line says who tells it. Nothing rests on it: they
        look by themselves, only later."""
        ...


class RunSalt(NamedTuple):
    """`digests`: what input digests are keyed with. `draws`: what random numbers and ids are drawn from. Of a fork both
    are its source's: its program is replayed from the source's journal, and must come to the same inputs."""

    digests: bytes
    draws: bytes


class Salts(Protocol):
    """Sealed beside the ledger, from a run's birth to its erasure."""

    def new(self) -> RunSalt: ...

    def seal(self, run_id: str, salt: RunSalt) -> Sealed: ...

    async def load(self, run_id: str) -> RunSalt: ...


class Schemas(Protocol):
    """JSON Schemas that programs have written: checked in bounded time, whatever is in them."""

    def verify(self, schema: dict[str, Any]) -> None:
        """SchemaViolation unless it is a schema that values can be held against."""
        ...

    def misfit(self, schema: dict[str, Any], value: Any) -> str | None:
        """What does not fit, and where; None when all does."""
        ...


class AnswerSigner(Protocol):
    """Signatures under people's answers: the gateway's own, and those of people who sign themselves."""

    def sign(self, message: bytes) -> Signature: ...

    async def verify(self, decision: Signed, *, tenant: str) -> None:
        """Raise SignatureInvalid unless the registered key of the person who answers has signed it."""
        ...


class ToolCalls(Protocol):
    """Tool calls as every other caller makes them: admitted, judged, dispatched once."""

    async def call(self, call: CheckedCall, *, wait_ms: int) -> Answer: ...


class ValueStore(Protocol):
    """Where values that are too large for the journal go."""

    async def store(self, tenant: str, raw: bytes, *, media_type: str, serializer: str) -> Value: ...


class Secrets(Protocol):
    """Values that only workers of their run may read."""

    async def seal(self, tenant: str, run_id: str, path: str, value: Any) -> SecretValue:
        """Store it sealed; what the journal says of it."""
        ...

    async def open(self, tenant: str, run_id: str, path: str, secret: SecretValue) -> Any:
        """The value; SecretMissing, or what the blob store says."""
        ...


class RunObserver(Protocol):
    """Is told of what was stored of a run here, after the fact; nothing rests on it. It never raises."""

    def changed(self, loaded: LoadedRun, state_before: str | None, added: Sequence[RunDocument]) -> None: ...

    def started(self, run_id: str, procedure: str, traceparent: str) -> None:
        """A caller with this trace context has started the run."""
        ...

    def is_sampled_run(self, run_id: str, procedure: str) -> bool:
        """Whether workers are to record spans of this run."""
        ...


def refuse_callback(url: str) -> None:
    """Where no operator allows any."""
    raise RunCallbackRefused("a question names a callback, and this gateway calls none")


@dataclass(frozen=True, slots=True)
class RunPorts:
    """Everything that the engine asks of the world. `executor_id`: in whose name it appends to runs without an owner.
    `new_lease`: a secret, between a worker and the gateways. `incarnation`: of the database; a restore makes another.

    `lease_ms`: how long a worker may be silent before its runs are taken from it. `stopping`: set when the gateway
    takes nothing new; nobody is kept waiting then. `verify_callback` raises RunCallbackRefused for a URL that
    a question may not name.
    """

    ledger: Ledger
    runs: StoredRuns
    salts: Salts
    procedures: ProgramLookup
    supervisor: StartSupervisor
    tools: ToolCalls
    values: ValueStore
    secrets: Secrets
    signer: AnswerSigner
    schemas: Schemas
    clock: Clock
    executor_id: Callable[[], str]
    new_lease: Callable[[], str]
    incarnation: Callable[[], str]
    lease_ms: int
    ask_webhooks: Sequence[str] = ()
    verify_callback: Callable[[str], None] = refuse_callback
    instruments: Instruments = field(default_factory=Instruments)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
