"""What the runtime asks of the world: tools, a supervisor, a way to send a call, time, and stored traces."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from app.core.digest import Digest
from app.domain.clock import Clock
from app.domain.identity import Principal
from app.domain.ledger.documents import Signature
from app.domain.ledger.owned_stream import StreamOwner
from app.domain.ledger.plans import Ledger, Plan, Sealed
from app.domain.policy.question import Verdict
from app.domain.tga.documents import (
    ActionRequest,
    Base64Output,
    DigestOutput,
    JsonOutput,
    Resolution,
    SupervisorDecision,
    ToolCall,
    TraceId,
)
from app.domain.tga.execution_state import ExecutionState
from app.domain.tga.replay import LogRecord
from app.domain.tools import Tool

if TYPE_CHECKING:
    from app.domain.tga.execution import Answer, TraceExecution

Waiting = Literal["supervisor", "operator"]
Output = JsonOutput | Base64Output | DigestOutput


class Tools(Protocol):
    """The registry. Raises ToolNotFound, and ArgumentsInvalid naming the failing path."""

    def resolve(self, server_id: str, tool_name: str) -> Tool: ...

    def verify_arguments(self, tool: Tool, arguments: dict[str, Any]) -> None: ...


# Codes of failures that the configuration decides: the same call fails again until the operator changes it.
FAILED_FOR_GOOD: Final = frozenset({"HTTP_NOT_ALLOWED"})


@dataclass(frozen=True, slots=True)
class Answered:
    """The server answered, and the answer is definite."""

    outcome: Literal["SUCCESS", "FAILURE"]
    output: Output | None
    error_code: str | None = None
    error_message: str | None = None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The call may have been executed, or may still be: only the same ids may be sent again. `is_at_work`: the server
    says that it has this call in hand. `is_cancelled`: the caller took it back, so it is not sent again."""

    result: Literal["retryable_answer", "timed_out", "disconnected"]
    detail: str
    retry_after_ms: int | None = None
    is_at_work: bool = False
    is_cancelled: bool = False


@dataclass(frozen=True, slots=True)
class NotSent:
    """Certain: nothing of this attempt reached the server. `is_hopeless`: trying again cannot change that."""

    detail: str
    is_hopeless: bool = False


@dataclass(frozen=True, slots=True)
class Withheld:
    """Certain: nothing of this attempt reached the server, because `may_send` said no. It was no attempt."""


Attempted = Answered | Unknown | NotSent
Dispatched = Attempted | Withheld
# The connector asks this once, when the next thing is the first byte to the server. False: send nothing.
MaySend = Callable[[], Awaitable[bool]]


class Connector(Protocol):
    """Carries a tool call to its server, once per call of `dispatch`, whatever happens; it never raises TgaError for
    what the server did, and it never sends twice."""

    async def dispatch(
        self,
        call: ToolCall,
        *,
        timeout_ms: int,
        traceparent: str | None = None,
        arguments: dict[str, Any] | None = None,
        may_send: MaySend | None = None,
    ) -> Dispatched:
        """`traceparent` is the caller's trace context, passed on. `arguments` are sent in place of the recorded ones:
        the same, with secret values put back. `may_send` has the last word: Withheld if it refuses, and only then."""
        ...


class Connectors(Protocol):
    def place(self, server_id: str) -> AbstractAsyncContextManager[Connector]:
        """Wait for a slot of the server and hold it; the connector that is given sends at once. In between the executor
        verifies its ownership, because the wait may be long."""
        ...


class Supervisor(Protocol):
    """The policy. It sees arguments as they are recorded: secret ones only as commitments."""

    async def judge(self, request: ActionRequest, tool: Tool) -> Verdict: ...

    async def judge_approval(self, request: ActionRequest, tool: Tool, approver: Principal) -> Verdict:
        """Whether this principal may approve this request: `deny` only where the policy forbids it."""
        ...


class Pinning(Protocol):
    """Whether a tool still is what it was when it was pinned. Raises ToolQuarantined."""

    async def verify(self, tool: Tool, *, refresh_first: bool = False) -> None:
        """Reads memory, and the store only before it refuses; with `refresh_first` the store at once, so that a change
        made through another gateway counts."""
        ...


@dataclass(frozen=True, slots=True)
class Salt:
    """The salt of a trace's commitments, and the places of the arguments at which they stand."""

    salt: bytes
    pointers: Sequence[str]


class Vault(Protocol):
    """Secret arguments outside the ledger, sealed. Raises SecretMissing when what was sealed cannot be opened."""

    def new_salt(self, pointers: Sequence[str]) -> Salt: ...

    def seal(self, trace_id: TraceId, salt: Salt, values: dict[str, Any]) -> Sealed: ...

    def open_salt(self, trace_id: TraceId, sealed: bytes) -> Salt: ...

    async def load_secrets(self, trace_id: TraceId) -> tuple[Salt, dict[str, Any]]: ...


class DecisionSigner(Protocol):
    """Signatures under decisions: the gateway's own, and those of supervisors who sign themselves."""

    def sign(self, message: bytes) -> Signature: ...

    async def verify(self, decision: SupervisorDecision, *, tenant: str) -> None:
        """Raise SignatureInvalid unless the registered key of the person who decided has signed it."""
        ...


@dataclass(frozen=True, slots=True)
class StoredTrace:
    """A trace, loaded and verified: its state, its records, its attempts after the first, and what its claim says."""

    state: ExecutionState
    records: Sequence[LogRecord]
    attempt_times: Sequence[str]
    resolution: Resolution | None
    claim_effect: Digest | None
    owner: str | None
    waiting: Waiting | None
    has_secrets: bool = False


@dataclass(frozen=True, slots=True)
class RecordedCall:
    """What the store has under an idempotency key, read in one statement and not judged yet.

    `fingerprint` is over all that `read` looks at: what was read and verified once need not be verified again while the
    store says the same.
    """

    trace_id: TraceId
    payload_digest: Digest  # as the claim states it
    sealed_salt: bytes | None  # None: the call has no secrets
    fingerprint: bytes
    size_bytes: int
    read: Callable[[], StoredTrace]  # verifies everything; raises what Traces.load_trace raises


class Traces(StreamOwner, Protocol):
    """Reading traces, and owning them as this process's executor. Every read verifies what it reads."""

    async def load_trace(self, trace_id: TraceId) -> StoredTrace: ...

    async def is_known(self, trace_id: TraceId) -> bool: ...

    async def find_call(self, server_id: str, tool_name: str, idempotency_key: str) -> RecordedCall | None:
        """One statement; it is `RecordedCall.read` that verifies. None: no trace has this key."""
        ...

    async def list_expired(self, *, limit: int) -> list[TraceId]:
        """Traces that wait for a supervisor and whose time is over, by the store's clock."""
        ...


class Companion(Protocol):
    """What is stored together with a call that belongs to something else: with its first entries, and with its last.

    Of a call that is made inside a run that is the intent, and the answer, in the run's journal.
    """

    async def commit(self, plan: Plan, trace: Answer, *, is_birth: bool) -> None:
        """Store the plan, which leaves the trace so. Raises what Ledger.commit raises of it, and at birth also what
        speaks against the companion's own part: then nothing is stored."""
        ...


class Observer(Protocol):
    """Is told how executions went, after the fact; whatever it does with that, nothing rests on it. It never raises."""

    def rested(self, execution: TraceExecution, answer: Answer) -> None:
        """The trace has ended, or waits for a person; `execution.marks` says when each of its phases was over."""
        ...

    def fenced(self, execution: TraceExecution) -> None:
        """Another executor has taken the trace over."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """Everything that the runtime asks of the world."""

    ledger: Ledger
    traces: Traces
    tools: Tools
    connectors: Connectors
    supervisor: Supervisor
    pins: Pinning
    vault: Vault
    decision_signer: DecisionSigner
    clock: Clock
    approval_webhooks: Sequence[str] = ()
    companion_of: Callable[[ActionRequest], Companion | None] = lambda _: None  # of a trace read from the record
    observer: Observer | None = None  # None: no time is taken
