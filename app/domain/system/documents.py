"""The documents of a system stream, and its table: one state, which it never leaves. A tenant has one such stream."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args

from pydantic import Field, StringConstraints, model_validator

from app.core.canonical import JsonValue
from app.core.chain import ArtifactRule, StreamKind, Transition
from app.core.digest import GENESIS, Digest, digest_of_bytes
from app.core.errors import RecoveryFailed
from app.core.limits import (
    CLAIM_SALT_BYTES,
    ERASURE_DIGESTS_MAX,
    LUA_FILE_BYTES_MAX,
    LUA_FILE_NAME_CHARS_MAX,
    LUA_FILES_MAX,
    LUA_SOURCE_BYTES_MAX,
    PROCEDURE_NAME_CHARS_MAX,
    PROCEDURE_TRIGGERS_MAX,
    RUN_TAGS_MAX,
    SAFE_INTEGER_MAX,
)
from app.domain.identity import Principal
from app.domain.ledger.checks import Epoch as LoggedEpoch
from app.domain.ledger.checks import with_payload
from app.domain.ledger.documents import (
    LogEntry,
    Name,
    Part,
    SequenceNumber,
    Sha256,
    StreamArtifact,
    Text,
    Time,
    require_no_stated_null,
)
from app.domain.ledger.plans import Claim

SystemArtifactType = Literal[
    "tool_pin",
    "signing_key",
    "policy_set",
    "erasure",
    "log_epoch",
    "procedure_registration",
    "schedule",
    "schedule_removal",
]

PublicKey = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{43}=$")]
Origin = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[!-*,-~]+$")]
Note = Annotated[str, StringConstraints(max_length=8192)]
Leaves = Annotated[int, Field(ge=0, le=SAFE_INTEGER_MAX)]
Epoch = Annotated[int, Field(ge=2, le=999_999_999)]
StreamName = Annotated[str, StringConstraints(min_length=3, max_length=255, pattern=r"^[a-z_]+:[!-~]+$")]
Milliseconds = Annotated[int, Field(ge=1, le=31_536_000_000)]
# No colon: the id of a run that an event starts is `{procedure}:{event id}`.
ProcedureName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=PROCEDURE_NAME_CHARS_MAX, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$"),
]
Language = Annotated[str, StringConstraints(min_length=1, max_length=32, pattern=r"^[a-z0-9][a-z0-9+#._-]*$")]
_TYPES: Final[tuple[SystemArtifactType, ...]] = get_args(SystemArtifactType)

SYSTEM: Final = StreamKind(
    name="system",
    id_field="system_id",
    entry_schema_id="tga/v1/system_log_entry",
    birth_state="OPEN",
    artifacts=tuple(ArtifactRule(kind, f"tga/v1/{kind}") for kind in _TYPES),
    transitions=tuple(
        Transition("OPEN", kind, "", "OPEN", is_birth=is_birth) for kind in _TYPES for is_birth in (True, False)
    ),
)


class SystemDocument(StreamArtifact):
    """What an entry of a system stream commits to. `system_id` is the tenant's name."""

    artifact_type: ClassVar[SystemArtifactType]
    system_id: Name
    recorded_at: Time
    recorded_by: Name  # a principal, or `gateway` when it did so by itself


class ToolPin(SystemDocument):
    """`pinned`: seen for the first time. `quarantined`: seen with another definition, and refused since. `accepted`: an
    operator has looked at that definition, and it is the pinned one from here on."""

    artifact_type: ClassVar[SystemArtifactType] = "tool_pin"
    schema_id: Literal["tga/v1/tool_pin"] = "tga/v1/tool_pin"
    server_id: Name
    tool_name: Name
    change: Literal["pinned", "quarantined", "accepted"]
    definition_digest: Sha256
    definition: dict[str, Any]


class SigningKey(SystemDocument):
    """A key whose signatures count from here on: the gateway's, or a supervisor's own. `retired`: it signs no more."""

    artifact_type: ClassVar[SystemArtifactType] = "signing_key"
    schema_id: Literal["tga/v1/signing_key"] = "tga/v1/signing_key"
    change: Literal["announced", "retired"]
    key_id: Name
    algorithm: Literal["Ed25519"]
    public_key: PublicKey
    principal_id: Name | None  # None: the gateway's own


class PolicySet(SystemDocument):
    """The policy that decides from here on, as it was read. Decisions name its digest."""

    artifact_type: ClassVar[SystemArtifactType] = "policy_set"
    schema_id: Literal["tga/v1/policy_set"] = "tga/v1/policy_set"
    policy_digest: Sha256
    text: Annotated[str, StringConstraints(max_length=262_144)]


class ErasedClaim(Part):
    """What the claim of an erased stream is: a change that frees its key, renames it or alters what it stood for is
    found.

    `key_digest` is of the key alone, so that a second call with that key shows in an export too. The payload digest is
    of arguments that may be guessed: only a commitment to it stands here, and its salt stays in the database.
    """

    key_digest: Sha256
    payload_commitment: Sha256

    @classmethod
    def of(cls, claim: Claim, *, salt: bytes) -> Self:
        return cls(key_digest=claim.key_digest(), payload_commitment=_commitment(salt, claim.payload_digest))

    def verify(self, claim: Claim | None, *, salt: bytes | None) -> None:
        """Raise unless this claim is the one; `salt` as it is stored."""
        if claim is None:
            raise RecoveryFailed("the claim of the erased trace's key is missing", expected=f"key {self.key_digest}")
        if claim.key_digest() != self.key_digest:
            raise RecoveryFailed(
                "the erased trace had the claim of another key", expected=self.key_digest, found=claim.key_digest()
            )
        if salt is None or _commitment(salt, claim.payload_digest) != self.payload_commitment:
            raise RecoveryFailed(
                "the payload digest of the erased trace's claim was changed, or its salt",
                expected=f"what opens the commitment {self.payload_commitment}",
            )


def _commitment(salt: bytes, payload_digest: Digest) -> Digest:
    # Both parts have a length of their own, so nothing can be moved from one to the other.
    if len(salt) != CLAIM_SALT_BYTES:
        raise RecoveryFailed("the salt of the erased trace's claim is not whole", found=f"{len(salt)} bytes")
    return digest_of_bytes(salt + bytes.fromhex(payload_digest))


class Erasure(SystemDocument):
    """The payloads of a finished stream were removed. `artifact_digests` are those that its entries still commit to; of
    more than ERASURE_DIGESTS_MAX entries none is listed, and `payloads_digest`, which alone counts where it stands, is
    what they fold to (`with_payload`).
    `claim` is what its claim was, if it had one."""

    artifact_type: ClassVar[SystemArtifactType] = "erasure"
    schema_id: Literal["tga/v1/erasure"] = "tga/v1/erasure"
    erased_stream: StreamName
    last_sequence_number: SequenceNumber
    last_entry_digest: Sha256
    artifact_digests: Annotated[list[Sha256], Field(max_length=ERASURE_DIGESTS_MAX)]
    claim: ErasedClaim | None
    rationale: Text
    payloads_digest: Sha256 | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, "payloads_digest")
        return self

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        return {n: v for n, v in members.items() if n != "payloads_digest"} if self.payloads_digest is None else members

    def to_json(self) -> dict[str, JsonValue]:
        body = super().to_json()
        if self.payloads_digest is None:
            del body["payloads_digest"]
        return body

    def folded_payloads(self) -> Digest:
        """The digests that the stream's entries commit to, folded into one."""
        if self.payloads_digest is not None:
            return Digest(self.payloads_digest)
        payloads = GENESIS
        for digest in self.artifact_digests:
            payloads = with_payload(payloads, digest)
        return payloads


class FormerLog(Part):
    """The last head that was signed before the log began anew, and the note verbatim."""

    origin: Origin
    size: Leaves
    root: Sha256
    note: Note


class LogEpoch(SystemDocument):
    """The log began anew under `origin`, because entries that were signed are lost. Its first `kept_size` leaves are
    those of the former log; `leaves_lost` of the former log are not in it. `rationale`: what the operator says."""

    artifact_type: ClassVar[SystemArtifactType] = "log_epoch"
    schema_id: Literal["tga/v1/log_epoch"] = "tga/v1/log_epoch"
    epoch: Epoch
    origin: Origin
    former: FormerLog
    kept_size: Leaves
    leaves_lost: Leaves
    rationale: Text

    def told(self) -> LoggedEpoch:
        former = self.former
        return LoggedEpoch(
            self.epoch, self.origin, former.origin, former.size, former.root, self.kept_size, self.to_json()
        )


class RetryPolicy(Part):
    """`retries` after the first try, with pauses that double from `first_ms` to `max_ms`. 0 is never."""

    retries: Annotated[int, Field(ge=0, le=1_000)]
    first_ms: Milliseconds
    max_ms: Milliseconds


class ProcedurePolicy(Part):
    """What holds for a run whose starter says nothing else. `timeout_ms`: of the whole run. `checkpoint_timeout_ms`:
    without a word from its worker. `park_after`: attempts in a row without a checkpoint."""

    timeout_ms: Milliseconds | None
    checkpoint_timeout_ms: Milliseconds | None
    retry: RetryPolicy
    park_after: Annotated[int, Field(ge=1, le=1_000)]
    retention: Literal["keep", "delete_on_success"]


class EventTrigger(Part):
    """Events of this name start the procedure."""

    event: Name


FileName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=LUA_FILE_NAME_CHARS_MAX, pattern=r"^[A-Za-z0-9_][A-Za-z0-9_./-]*$"),
]
FileBytes = Annotated[int, Field(ge=0, le=LUA_FILE_BYTES_MAX)]


class SourceFile(Part):
    """A file that was submitted with a program: a blob of the tenant's."""

    name: FileName
    sha256: Sha256
    size_bytes: FileBytes


class ProgramSource(Part):
    """The text of a submitted program, and its files, sorted by name: blobs of the tenant's, kept for good."""

    sha256: Sha256
    size_bytes: Annotated[int, Field(ge=1, le=LUA_SOURCE_BYTES_MAX)]
    files: Annotated[list[SourceFile], Field(max_length=LUA_FILES_MAX)]


class ProcedureRegistration(SystemDocument):
    """A program that runs can be started of: this version of the procedure, told from others by its digest.
    `program_source`: of one that was submitted; without it the program is where its workers are."""

    artifact_type: ClassVar[SystemArtifactType] = "procedure_registration"
    schema_id: Literal["tga/v1/procedure_registration"] = "tga/v1/procedure_registration"
    name: ProcedureName
    version: Name
    program_digest: Sha256
    language: Language
    description: Text | None
    input_schema: dict[str, Any] | None
    output_schema: dict[str, Any] | None
    state_schema: dict[str, Any] | None
    policy: ProcedurePolicy
    triggers: Annotated[list[EventTrigger], Field(max_length=PROCEDURE_TRIGGERS_MAX)]
    tags: Annotated[list[Name], Field(max_length=RUN_TAGS_MAX)]
    program_source: ProgramSource | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        require_no_stated_null(self, "program_source")
        return self

    def _members(self) -> dict[str, Any]:
        members = super()._members()
        return {n: v for n, v in members.items() if n != "program_source"} if self.program_source is None else members

    def to_json(self) -> dict[str, JsonValue]:
        body = super().to_json()
        if self.program_source is None:
            del body["program_source"]
        return body


class CronSpec(Part):
    """At these local times of the zone: five fields, as Debian's cron reads them."""

    type: Literal["cron"]
    expression: Annotated[str, StringConstraints(min_length=1, max_length=256, pattern=r"^[ -~]+$")]
    time_zone: Annotated[str, StringConstraints(min_length=1, max_length=64, pattern=r"^[A-Za-z][A-Za-z0-9_+/-]*$")]


class IntervalSpec(Part):
    """Every so often, counted from when the schedule was made."""

    type: Literal["interval"]
    every_ms: Annotated[int, Field(ge=1_000, le=31_536_000_000)]


Spec = Annotated[CronSpec | IntervalSpec, Field(discriminator="type")]


class Schedule(SystemDocument):
    """Runs of the procedure are started at these times, as the principal that made the schedule. `version` null: of the
    newest program at that time. `missed`: what becomes of times at which no gateway ran."""

    artifact_type: ClassVar[SystemArtifactType] = "schedule"
    schema_id: Literal["tga/v1/schedule"] = "tga/v1/schedule"
    name: ProcedureName
    procedure: ProcedureName
    version: Name | None
    input: Any
    spec: Spec
    missed: Literal["skip", "one", "all"]
    principal: Principal

    def to_json(self) -> dict[str, JsonValue]:
        body = super().to_json()
        body["principal"] = self.principal._members()
        return body


class ScheduleRemoval(SystemDocument):
    """The schedule of this name starts nothing any more."""

    artifact_type: ClassVar[SystemArtifactType] = "schedule_removal"
    schema_id: Literal["tga/v1/schedule_removal"] = "tga/v1/schedule_removal"
    name: ProcedureName


SYSTEM_MODELS: Final[dict[str, type[SystemDocument]]] = {
    model.artifact_type: model
    for model in (
        ToolPin,
        SigningKey,
        PolicySet,
        Erasure,
        LogEpoch,
        ProcedureRegistration,
        Schedule,
        ScheduleRemoval,
    )
}


class SystemLogEntry(LogEntry):
    """One link of a system stream's chain."""

    kind: ClassVar = SYSTEM
    schema_id: Literal["tga/v1/system_log_entry"] = "tga/v1/system_log_entry"
    system_id: Name
    from_state: Literal["OPEN"]
    to_state: Literal["OPEN"]
    artifact_type: SystemArtifactType
