"""The documents of a trace. They agree with schemas/tga/v1; a property test holds them together."""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Any, ClassVar, Final, Literal, NewType, Protocol, Self

from pydantic import ConfigDict, Field, StringConstraints, TypeAdapter, model_validator

from app.core.canonical import Embedded, JsonValue, canonical_bytes, canonical_members
from app.core.digest import Digest, digest_of_bytes
from app.core.limits import ATTEMPTS_LISTED_MAX, ATTEMPTS_MAX
from app.domain.addresses import RunOfCall
from app.domain.identity import Principal
from app.domain.ledger.documents import (
    Count,
    IdempotencyKey,
    LogEntry,
    Name,
    Part,
    SequenceNumber,
    Sha256,
    Signature,
    StreamArtifact,
    Text,
    Time,
    Uuid7,
    require_no_stated_null,
)
from app.domain.tga.transitions import TRACE, ArtifactType, State
from app.domain.tools import ToolClass

TraceId = NewType("TraceId", str)

Traceparent = Annotated[str, StringConstraints(pattern=r"^00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}$")]


class CallState(Protocol):
    """What of a trace's folded state its next artifact is compared with (I3)."""

    @property
    def payload_digest(self) -> str: ...

    @property
    def tool_class(self) -> ToolClass: ...

    @property
    def idempotency_key(self) -> str | None: ...

    @property
    def tool_call_id(self) -> str | None: ...


class ArtifactDocument(StreamArtifact):
    """A document that an entry of a trace commits to."""

    artifact_type: ClassVar[ArtifactType]
    trace_id: Uuid7

    @abstractmethod
    def in_state(self) -> dict[str, Any]:
        """What the folded state keeps of it."""

    def continues(self, state: CallState) -> bool:
        """I3: whether it is about the very call that the state is about."""
        return True


def payload_digest(server_id: str, tool_name: str, arguments: dict[str, JsonValue]) -> Digest:
    """What makes two calls the same call: the fingerprint that a claim keeps."""
    return digest_of_bytes(canonical_bytes({"server_id": server_id, "tool_name": tool_name, "arguments": arguments}))


def payload_digest_of(
    server_id: str, tool_name: str, arguments: dict[str, JsonValue], *, written: bytes
) -> tuple[Digest, Embedded]:
    """As `payload_digest`, of arguments whose RFC 8785 bytes are these; and these, to be embedded in a document."""
    known = Embedded(written)
    payload = canonical_members({"server_id": server_id, "tool_name": tool_name, "arguments": known})
    if payload is None:
        return payload_digest(server_id, tool_name, arguments), known
    return digest_of_bytes(payload), known


def require_key_for_writes(tool_class: str, idempotency_key: str | None) -> None:
    if tool_class == "write" and idempotency_key is None:  # I2
        raise ValueError("a write-class call needs an idempotency_key")


class _Asking(ArtifactDocument):
    """A document that names a tool and its arguments: what was asked for, and what is sent."""

    __slots__ = ("_kept_payload",)
    server_id: Name
    tool_name: Name
    arguments: dict[str, Any]

    @property
    def payload_digest(self) -> Digest:
        """What makes two calls the same call: the fingerprint that a claim keeps."""
        return self._asked()[1]

    def written_arguments(self) -> bytes:
        """The arguments' RFC 8785 bytes."""
        return self._asked()[2]

    def _asked(self) -> tuple[Embedded, Digest, bytes]:
        """The arguments as they are embedded, the payload's digest, and the arguments' bytes, made once."""
        try:
            kept: tuple[Embedded, Digest, bytes] = _KEPT_PAYLOAD(self)
        except AttributeError:
            kept = self._keep_arguments(canonical_bytes(self.arguments, depth=1))
        return kept

    def _keep_arguments(self, raw: bytes) -> tuple[Embedded, Digest, bytes]:
        """These are the bytes of the arguments: they are not made again."""
        digest, arguments = payload_digest_of(self.server_id, self.tool_name, self.arguments, written=raw)
        kept = arguments, digest, raw
        _KEEP_PAYLOAD(self, kept)
        return kept

    def _members(self) -> dict[str, Any]:
        return {**self.__dict__, "arguments": self._asked()[0]}


_KEPT_PAYLOAD, _KEEP_PAYLOAD = _Asking.__dict__["_kept_payload"].__get__, _Asking.__dict__["_kept_payload"].__set__


# The fields that a caller chose. The gateway makes the others itself, or has validated them as parts of their own.
_SAID: Final = TypeAdapter(
    tuple[Uuid7, Name, Name, dict[str, Any], IdempotencyKey | None, Text | None, Traceparent | None],
    config=ConfigDict(strict=True),
).validator


_MAY_BE_LEFT_OUT: Final = ("traceparent", "run")


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
    traceparent: Traceparent | None = None
    run: RunOfCall | None = None  # the run that makes the call; None: a direct one

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_key_for_writes(self.tool_class, self.idempotency_key)
        for field in _MAY_BE_LEFT_OUT:
            require_no_stated_null(self, field)
        return self

    @classmethod
    def asked(cls, fields: dict[str, Any], *, written_arguments: bytes | None = None) -> Self:
        """From its fields, with a traceparent and a run only if there is one. Validates only what the caller chose; if
        that is wrong, raises what `made_of` raises. `written_arguments`: RFC 8785 bytes, if they are made already."""
        said = (
            fields["trace_id"],
            fields["server_id"],
            fields["tool_name"],
            fields["arguments"],
            fields["idempotency_key"],
            fields["intent"],
            fields.get("traceparent"),
        )
        try:
            checked = _SAID.validate_python(said)
            require_key_for_writes(fields["tool_class"], fields["idempotency_key"])
        except ValueError:
            return cls.made_of(fields)
        is_run_known = "run" not in fields or type(fields["run"]) is RunOfCall
        if type(fields["principal"]) is not Principal or not is_run_known:
            return cls.made_of(fields)
        # Use what the validator returned: plain strings, and arguments that the caller cannot change any more.
        fields["trace_id"], fields["server_id"], fields["tool_name"], fields["arguments"] = checked[:4]
        fields["idempotency_key"], fields["intent"] = checked[4:6]
        if checked[6] is not None:
            fields["traceparent"] = checked[6]
        request = cls.of_known(fields)
        if written_arguments is not None:
            request._keep_arguments(written_arguments)
        return request

    def in_state(self) -> dict[str, Any]:
        return {
            "server_id": self.server_id,
            "tool_name": self.tool_name,
            "tool_class": self.tool_class,
            "idempotency_key": self.idempotency_key,
            "payload_digest": self.payload_digest,
            "action_request_digest": self.digest(),
            "supervisor_decision_digest": None,
            "tool_call_digest": None,
            "tool_call_id": None,
            "tool_effect_digest": None,
        }

    def to_json(self) -> dict[str, JsonValue]:
        """Without the optional fields that are not set: older stores were written before they existed."""
        body = self.model_dump()
        for field in _MAY_BE_LEFT_OUT:
            if body[field] is None:
                del body[field]
        if self.principal.roles is None:
            del body["principal"]["roles"]
        return body

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        for field in _MAY_BE_LEFT_OUT:
            if members[field] is None:
                del members[field]
        return members


class DecidedBy(Part):
    type: Literal["policy", "person", "expiry", "withdrawal"]
    id: Name


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

    def in_state(self) -> dict[str, Any]:
        return {"supervisor_decision_digest": self.digest()}

    @property
    def signer_id(self) -> str:
        """The principal who decided."""
        return self.decided_by.id

    def signed_bytes(self) -> bytes:
        """What its signature is over: all that the person who decides has seen, without what the gateway adds."""
        body = self.to_json()
        for added in ("policy_digest", "policy_ids", "signature"):
            del body[added]
        return canonical_bytes(body)


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
        require_key_for_writes(self.tool_class, self.idempotency_key)
        if (self.on_unknown_outcome == "reconcile") != (self.reconcile_tool is not None):
            raise ValueError("reconcile_tool is named by `reconcile`, always and only")
        return self

    @classmethod
    def carrying_out(cls, request: ActionRequest, **decided: Any) -> Self:
        """The call that the request asks for, to the letter (I3); what the gateway adds is `decided`."""
        for field in ("trace_id", "server_id", "tool_name", "tool_class", "arguments", "idempotency_key"):
            decided[field] = request.__dict__[field]
        call = cls.of_known(decided)
        _KEEP_PAYLOAD(call, request._asked())
        return call

    def carries_out(self, asked: ActionRequest | CallState) -> bool:
        """I3: whether it is the call that was asked for."""
        return (
            self.payload_digest == asked.payload_digest
            and self.tool_class == asked.tool_class
            and self.idempotency_key == asked.idempotency_key
        )

    def in_state(self) -> dict[str, Any]:
        return {"tool_call_digest": self.digest(), "tool_call_id": self.tool_call_id}

    def continues(self, state: CallState) -> bool:
        return self.carries_out(state)

    @property
    def key_at_server(self) -> str | None:
        """The key as its tool server is told it. Two tenants may share a server and choose the same key: outside the
        default tenant it has the tenant in front, or one tenant's call would be answered with the other's."""
        tenant, slash, _ = self.server_id.rpartition("/")
        return self.idempotency_key and f"{tenant}{slash}{self.idempotency_key}"


class JsonOutput(Part):
    encoding: Literal["json"]
    value: Any


class Base64Output(Part):
    encoding: Literal["base64"]
    media_type: Name
    data: Annotated[str, StringConstraints(max_length=349_528)]


class DigestOutput(Part):
    """An output that was too large to keep: its digest recognises it, nothing reads it back."""

    encoding: Literal["digest"]
    sha256: Sha256
    size_bytes: Count
    truncated: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.truncated:  # Literal[True] would also admit 1
            raise ValueError("an output of which only the digest is kept is truncated")
        return self


class EffectError(Part):
    code: Name
    message: Text


class Attempt(Part):
    attempt: Annotated[int, Field(ge=1, le=ATTEMPTS_MAX)]
    started_at: Time
    ended_at: Time | None
    result: Literal["answered", "retryable_answer", "timed_out", "disconnected", "refused", "interrupted"]


class Resolution(Part):
    """An operator's decision on a call whose outcome is unknown."""

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

    def in_state(self) -> dict[str, Any]:
        return {"tool_effect_digest": self.digest()}

    def continues(self, state: CallState) -> bool:
        return state.tool_call_id in (None, self.tool_call_id)


ARTIFACT_MODELS: dict[str, type[ArtifactDocument]] = {
    model.artifact_type: model for model in (ActionRequest, SupervisorDecision, ToolCall, ToolEffect)
}


class ExecutionLogEntry(LogEntry):
    """One link of a trace's chain. Its digest is over all of it but the digest itself."""

    kind: ClassVar = TRACE
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
