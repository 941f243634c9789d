"""What every hashed document is made of: fields of exact types, canonical bytes, a digest; and the entries of a stream.

A document becomes bytes once (`canonical_bytes`), and those bytes are what is hashed and stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from app.core.canonical import JsonValue, canonical_bytes, parse_object
from app.core.chain import Link
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import SchemaViolation
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    ENTRY_BYTES_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    NAME_CHARS_MAX,
    SAFE_INTEGER_MAX,
    TEXT_CHARS_MAX,
)

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


class LogEntry(Document):
    """One link of a stream's chain. Its digest is over all of it but the digest itself."""

    sequence_number: SequenceNumber
    prev_entry_digest: Sha256
    from_state: str
    to_state: str
    artifact_type: str
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
    def from_body_bytes(cls, raw: bytes) -> Self:
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


def _schema_violation(model: type[BaseModel], error: ValidationError) -> SchemaViolation:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = "/" + "/".join(str(step) for step in first["loc"])
    return SchemaViolation(f"{model.__name__} at {path}: {first['msg']}")
