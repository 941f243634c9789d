"""The documents of a trace. They agree with schemas/tga/v1; a property test holds them together.

A document becomes bytes once (`canonical_bytes`), and those bytes are what is hashed and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, NewType, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from app.core.canonical import JsonValue, canonical_bytes, parse_object
from app.core.chain import Link
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import ChecksumMismatch, SchemaViolation
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    ATTEMPTS_LISTED_MAX,
    ENTRY_BYTES_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    NAME_CHARS_MAX,
    SAFE_INTEGER_MAX,
    TEXT_CHARS_MAX,
)
from app.domain.tga.transitions import ArtifactType, State

TraceId = NewType("TraceId", str)

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{3}"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Uuid7 = Annotated[
    str, StringConstraints(pattern=r"^[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}$")
]
Time = Annotated[str, StringConstraints(pattern=rf"^{_DATE}T{_CLOCK}Z$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[!-~]+$")]
IdempotencyKey = Annotated[
    str, StringConstraints(min_length=1, max_length=IDEMPOTENCY_KEY_CHARS_MAX, pattern=r"^[!-~]([ -~]*[!-~])?$")
]
Text = Annotated[str, StringConstraints(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, Field(ge=0, le=SAFE_INTEGER_MAX)]
SequenceNumber = Annotated[int, Field(ge=1, le=SAFE_INTEGER_MAX)]
ToolClass = Literal["read", "write"]

_D = TypeVar("_D", bound="Document")


class Part(BaseModel):
    """An object inside a document: exact fields, exact types, never changed."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """From fields that someone else chose: SchemaViolation, where the constructor raises what pydantic raises."""
        try:
            return cls(**fields)
        except ValidationError as error:
            raise _schema_violation(cls, error) from None

    def to_json(self) -> dict[str, JsonValue]:
        return self.model_dump()


class Document(Part):
    """A document that is hashed: it says which schema it follows, so that none can be taken for another."""

    schema_version: Literal["1.0"] = "1.0"

    @cached_property
    def _canonical(self) -> tuple[bytes, Digest]:
        written = canonical_bytes(self.to_json())
        return written, digest_of_bytes(written)

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A changed copy; it does not inherit what was computed from the original."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("_canonical", None)
        copied.__dict__.pop("payload_digest", None)
        return copied

    @classmethod
    def _of_validated(cls, fields: dict[str, Any]) -> Self:
        """The document with all these fields, each already validated where it came from. (`model_construct`, but
        five times faster: it fills no defaults and looks for no aliases.)"""
        made = cls.__new__(cls)
        object.__setattr__(made, "__dict__", fields)
        object.__setattr__(made, "__pydantic_fields_set__", set(fields))
        object.__setattr__(made, "__pydantic_extra__", None)
        object.__setattr__(made, "__pydantic_private__", None)
        return made

    @classmethod
    def from_json(cls, value: JsonValue) -> Self:
        """The document, or SchemaViolation naming the first field that is wrong."""
        # The fields have defaults for those who write documents; readers must find them stated.
        if isinstance(value, dict):
            for field in ("schema_id", "schema_version"):
                if field not in value:
                    raise SchemaViolation(f"{cls.__name__} at /{field}", expected="the field", found="nothing")
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise _schema_violation(cls, error) from None

    @classmethod
    def from_bytes(cls, raw: bytes) -> Self:
        """The document whose canonical bytes these are; other spellings of it are refused."""
        value = parse_object(raw, bytes_max=ARTIFACT_BYTES_MAX)
        if canonical_bytes(value) != raw:
            raise SchemaViolation(f"{cls.__name__} is not in canonical form", expected="RFC 8785 bytes")
        return cls.from_json(value)

    def to_bytes(self) -> bytes:
        return self._canonical[0]

    def digest(self) -> Digest:
        return self._canonical[1]


class ArtifactDocument(Document):
    """A document that an entry commits to."""

    artifact_type: ClassVar[ArtifactType]
    trace_id: Uuid7


def payload_digest(server_id: str, tool_name: str, arguments: dict[str, JsonValue]) -> Digest:
    """What makes two calls the same call: the fingerprint that a claim keeps."""
    return digest_of_bytes(canonical_bytes({"server_id": server_id, "tool_name": tool_name, "arguments": arguments}))


def _require_key_for_writes(tool_class: str, idempotency_key: str | None) -> None:
    if tool_class == "write" and idempotency_key is None:  # I2
        raise ValueError("a write-class call needs an idempotency_key")


class Principal(Part):
    principal_id: Name
    tenant: Name


class _Asking(ArtifactDocument):
    """What says which tool is to be called with what."""

    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]

    @cached_property
    def payload_digest(self) -> Digest:
        """What makes two calls the same call: the fingerprint that a claim keeps."""
        return payload_digest(self.server_id, self.tool_name, self.arguments)


class ActionRequest(_Asking):
    artifact_type: ClassVar[ArtifactType] = "action_request"
    schema_id: Literal["tga/v1/action_request"] = "tga/v1/action_request"
    requested_at: Time
    expires_at: Time | None
    principal: Principal
    server_id: Name
    tool_name: Name
    tool_class: ToolClass
    tool_definition_digest: Sha256 | None
    arguments: dict[str, Any]
    idempotency_key: IdempotencyKey | None
    intent: Text | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_key_for_writes(self.tool_class, self.idempotency_key)
        return self


class DecidedBy(Part):
    type: Literal["policy", "person", "expiry", "withdrawal"]
    id: Name


class Signature(Part):
    algorithm: Literal["Ed25519"]
    key_id: Name
    value: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]


class SupervisorDecision(ArtifactDocument):
    artifact_type: ClassVar[ArtifactType] = "supervisor_decision"
    schema_id: Literal["tga/v1/supervisor_decision"] = "tga/v1/supervisor_decision"
    action_request_digest: Sha256
    decision: Literal["APPROVE", "DENY"]
    decided_by: DecidedBy
    decided_at: Time
    policy_digest: Sha256 | None
    policy_ids: Annotated[list[Name], Field(max_length=64)]
    rationale: Text | None
    signature: Signature | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.decision != "DENY" and self.decided_by.type in ("expiry", "withdrawal"):
            raise ValueError("time and the caller can only deny")
        return self


class ToolCall(_Asking):
    artifact_type: ClassVar[ArtifactType] = "tool_call"
    schema_id: Literal["tga/v1/tool_call"] = "tga/v1/tool_call"
    tool_call_id: Uuid7
    supervisor_decision_digest: Sha256
    server_id: Name
    tool_name: Name
    tool_class: ToolClass
    tool_definition_digest: Sha256 | None
    arguments: dict[str, Any]
    idempotency_key: IdempotencyKey | None
    on_unknown_outcome: Literal["redispatch", "reconcile", "hold"]
    reconcile_tool: Name | None
    prepared_at: Time

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_key_for_writes(self.tool_class, self.idempotency_key)
        if (self.on_unknown_outcome == "reconcile") != (self.reconcile_tool is not None):
            raise ValueError("reconcile_tool is named by `reconcile`, always and only")
        return self


class JsonOutput(Part):
    encoding: Literal["json"]
    value: Any


class Base64Output(Part):
    encoding: Literal["base64"]
    media_type: Name
    data: Annotated[str, StringConstraints(max_length=349_528)]


class DigestOutput(Part):
    """Too large to keep: what it was can be recognised, not read."""

    encoding: Literal["digest"]
    sha256: Sha256
    size_bytes: Count
    truncated: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.truncated:  # not Literal[True], which 1 would pass for
            raise ValueError("an output of which only the digest is kept is truncated")
        return self


class EffectError(Part):
    code: Name
    message: Text


class Attempt(Part):
    attempt: Annotated[int, Field(ge=1, le=1000)]
    started_at: Time
    ended_at: Time | None
    result: Literal["answered", "retryable_answer", "timed_out", "disconnected", "refused", "interrupted"]


class Resolution(Part):
    """An operator's word on a call whose outcome nobody knows."""

    action: Literal["redispatch", "succeeded", "failed"]
    resolved_by: Name
    rationale: Text
    resolved_at: Time


class ToolEffect(ArtifactDocument):
    artifact_type: ClassVar[ArtifactType] = "tool_effect"
    schema_id: Literal["tga/v1/tool_effect"] = "tga/v1/tool_effect"
    tool_call_id: Uuid7
    tool_call_digest: Sha256
    outcome: Literal["SUCCESS", "FAILURE"]
    basis: Literal["answer", "reconciliation", "resolution", "unknown", "not_sent"]
    output: Annotated[JsonOutput | Base64Output | DigestOutput, Field(discriminator="encoding")] | None
    error: EffectError | None
    attempts: Annotated[list[Attempt], Field(max_length=ATTEMPTS_LISTED_MAX)]
    resolution: Resolution | None
    recorded_at: Time

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.basis == "resolution") != (self.resolution is not None and self.resolution.action != "redispatch"):
            raise ValueError("an operator's verdict is the basis `resolution`, always and only")
        verdict = {"succeeded": "SUCCESS", "failed": "FAILURE"}.get(self.resolution.action if self.resolution else "")
        if verdict not in (None, self.outcome):
            raise ValueError("the outcome is the operator's verdict")
        if (self.outcome == "FAILURE") != (self.error is not None):
            raise ValueError("a failure says why in `error`; a success has none")
        if self.outcome != "FAILURE" and self.basis in ("unknown", "not_sent"):
            raise ValueError("what is not known to have succeeded is a failure")
        return self


ARTIFACT_MODELS: dict[str, type[ArtifactDocument]] = {
    model.artifact_type: model for model in (ActionRequest, SupervisorDecision, ToolCall, ToolEffect)
}


class ExecutionLogEntry(Document):
    """One link of a trace's chain. Its digest is over all of it but the digest itself."""

    schema_id: Literal["tga/v1/execution_log_entry"] = "tga/v1/execution_log_entry"
    trace_id: Uuid7
    sequence_number: SequenceNumber
    prev_entry_digest: Sha256
    from_state: State
    to_state: State
    artifact_type: ArtifactType
    artifact_digest: Sha256
    executor_id: Uuid7
    recorded_at: Time
    entry_digest: Sha256

    @cached_property
    def _canonical(self) -> tuple[bytes, Digest]:
        body = self.to_json()
        del body["entry_digest"]
        written = canonical_bytes(body)
        return written, digest_of_bytes(written)

    @classmethod
    def of_body(cls, body: dict[str, JsonValue]) -> Self:
        """The entry that says this, with the digest of the bytes that say it: written and hashed once."""
        written = canonical_bytes(body, bytes_max=ENTRY_BYTES_MAX)
        digest = digest_of_bytes(written)
        return cls._of_validated({**body, "entry_digest": digest, "_canonical": (written, digest)})

    def body_bytes(self) -> bytes:
        """The bytes that are hashed and stored: the document without its own digest."""
        return self._canonical[0]

    def to_bytes(self) -> bytes:
        """The whole document, as `from_bytes` reads it; what is hashed and stored is `body_bytes`."""
        return canonical_bytes(self.to_json())

    @classmethod
    def from_body_bytes(cls, raw: bytes) -> ExecutionLogEntry:
        """The entry whose stored bytes these are; its digest is what they hash to."""
        body = parse_object(raw)
        if canonical_bytes(body) != raw:
            raise SchemaViolation("the entry is not in canonical form", expected="RFC 8785 bytes")
        if "entry_digest" in body:
            raise SchemaViolation("the stored entry holds its own digest", expected="the bytes without it")
        return cls.from_json({**body, "entry_digest": digest_of_bytes(raw)})

    def link(self) -> Link:
        return Link(
            sequence_number=self.sequence_number,
            prev_entry_digest=self.prev_entry_digest,
            entry_digest=self.entry_digest,
            computed_digest=self.digest(),
            from_state=self.from_state,
            to_state=self.to_state,
            artifact_type=self.artifact_type,
            artifact_digest=self.artifact_digest,
        )


# Which digests a state has behind it: decision, call (and its id), effect. Nothing more, nothing less.
_BEHIND: dict[str, tuple[bool, bool, bool]] = {
    "PENDING": (False, False, False),
    "AUTHORIZED": (True, False, False),
    "DENIED": (True, False, False),
    "EXECUTING": (True, True, False),
    "COMPLETED": (True, True, True),
    "FAILED": (True, True, True),
}


class ExecutionState(Document):
    """A trace's log, folded: all that recovery needs to go on."""

    schema_id: Literal["tga/v1/execution_state"] = "tga/v1/execution_state"
    trace_id: Uuid7
    state: State
    sequence_number: SequenceNumber
    entry_digest: Sha256
    updated_at: Time
    server_id: Name
    tool_name: Name
    tool_class: ToolClass
    idempotency_key: IdempotencyKey | None
    payload_digest: Sha256
    action_request_digest: Sha256
    supervisor_decision_digest: Sha256 | None
    tool_call_digest: Sha256 | None
    tool_call_id: Uuid7 | None
    tool_effect_digest: Sha256 | None

    @model_validator(mode="after")
    def _check(self) -> Self:
        _require_key_for_writes(self.tool_class, self.idempotency_key)
        self._verify_digests()
        return self

    def _verify_digests(self) -> None:
        decided, called, ended = _BEHIND[self.state]
        if (
            (self.supervisor_decision_digest is not None) != decided
            or (self.tool_call_digest is not None) != called
            or (self.tool_call_id is not None) != called
            or (self.tool_effect_digest is not None) != ended
        ):
            raise ValueError(f"the digests do not fit the state {self.state}")

    def moved(self, fields: dict[str, Any]) -> Self:
        """The state with these fields, each of them already validated as a field of an entry or artifact."""
        kept = {**self.__dict__, **fields}
        kept.pop("_canonical", None)
        next_state = self._of_validated(kept)
        next_state._verify_digests()
        return next_state


class ExecutionCheckpoint(Document):
    """A snapshot of a trace's state; `checkpoint_digest` is over `checkpoint_state` alone (I4)."""

    schema_id: Literal["tga/v1/execution_checkpoint"] = "tga/v1/execution_checkpoint"
    trace_id: Uuid7
    created_at: Time
    checkpoint_state: ExecutionState
    checkpoint_digest: Sha256

    @field_validator("checkpoint_state", mode="before")
    @classmethod
    def _read_state(cls, value: Any) -> Any:
        # As any document that is read, the state within must say which schema it follows.
        return ExecutionState.from_json(value) if isinstance(value, dict) else value

    @classmethod
    def of(cls, state: ExecutionState, *, created_at: str) -> ExecutionCheckpoint:
        return cls(
            trace_id=state.trace_id,
            created_at=created_at,
            checkpoint_state=state,
            checkpoint_digest=state.digest(),
        )

    def verify(self) -> None:
        """Raise ChecksumMismatch unless the digest is that of the state, and the state is this trace's (I4)."""
        found = self.checkpoint_state.digest()
        if found != self.checkpoint_digest:  # I4
            raise ChecksumMismatch(
                "the checkpoint's state does not hash to its digest",
                expected=self.checkpoint_digest,
                found=found,
            )
        if self.checkpoint_state.trace_id != self.trace_id:
            raise ChecksumMismatch(
                "the checkpoint holds another trace's state",
                expected=self.trace_id,
                found=self.checkpoint_state.trace_id,
            )


def _schema_violation(model: type[BaseModel], error: ValidationError) -> SchemaViolation:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = "/" + "/".join(str(step) for step in first["loc"])
    return SchemaViolation(f"{model.__name__} at {path}: {first['msg']}")
