"""What every hashed document is made of: fields of exact types, canonical bytes, a digest; and the entries of a stream.

A document becomes bytes once (`canonical_bytes`), and those bytes are what is hashed and stored.
"""

from __future__ import annotations

from operator import methodcaller
from typing import Annotated, Any, ClassVar, Final, Literal, Self, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from app.core.canonical import JsonValue, canonical_bytes, canonical_members, embedded, parse_object, read_canonical
from app.core.chain import Link, StreamKind
from app.core.digest import Digest, digest_of_bytes
from app.core.errors import SchemaViolation
from app.core.limits import (
    ARTIFACT_BYTES_MAX,
    IDEMPOTENCY_KEY_CHARS_MAX,
    NAME_CHARS_MAX,
    SAFE_INTEGER_MAX,
    TEXT_CHARS_MAX,
)

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_CLOCK = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]\.[0-9]{3}"
TIME_PATTERN: Final = rf"{_DATE}T{_CLOCK}Z"
UUID7_PATTERN: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"

Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Uuid7 = Annotated[str, StringConstraints(pattern=rf"^{UUID7_PATTERN}$")]
Time = Annotated[str, StringConstraints(pattern=rf"^{TIME_PATTERN}$")]
Name = Annotated[str, StringConstraints(min_length=1, max_length=NAME_CHARS_MAX, pattern=r"^[!-~]+$")]
IdempotencyKey = Annotated[
    str, StringConstraints(min_length=1, max_length=IDEMPOTENCY_KEY_CHARS_MAX, pattern=r"^[!-~]([ -~]*[!-~])?$")
]
Text = Annotated[str, StringConstraints(max_length=TEXT_CHARS_MAX)]
Count = Annotated[int, Field(ge=0, le=SAFE_INTEGER_MAX)]
SequenceNumber = Annotated[int, Field(ge=1, le=SAFE_INTEGER_MAX)]


# What a pydantic model consists of; set directly, as the models are frozen.
_SET_DICT, _SET_FIELDS_SET, _SET_EXTRA, _SET_PRIVATE = (
    BaseModel.__dict__[name].__set__
    for name in ("__dict__", "__pydantic_fields_set__", "__pydantic_extra__", "__pydantic_private__")
)


class Part(BaseModel):
    """An object inside a document: exact fields, exact types, never changed."""

    __slots__ = ("_kept",)  # no field: what is computed from the fields is neither compared nor copied
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    _depth: ClassVar[int] = 2
    _foreign: ClassVar[tuple[str, ...]]
    _shape: ClassVar[tuple[dict[str, Any], set[str]]]  # defaults, names of all fields

    @classmethod
    def made(cls, **fields: Any) -> Self:
        """From fields that someone else chose: SchemaViolation, where the constructor raises what pydantic raises."""
        return cls.made_of(fields)

    @classmethod
    def made_of(cls, fields: dict[str, Any]) -> Self:
        """As `made`."""
        try:
            made: Self = cls.__pydantic_validator__.validate_python(fields)
        except ValidationError as error:
            raise _schema_violation(cls, error) from None
        _KEEP(made, None)
        return made

    @classmethod
    def of_known(cls, fields: dict[str, Any]) -> Self:
        """From its fields, each validated where it came from or made by the gateway itself; those with a default may be
        left out. Takes `fields` over. (`model_construct`, but many times faster.)"""
        defaults, fields_set = cls._shape  # one look: a model's class answers slowly
        if len(fields) + len(defaults) == len(fields_set):
            fields.update(defaults)
        else:
            fields = {**defaults, **fields}
        made = object.__new__(cls)
        _SET_DICT(made, fields)
        _SET_FIELDS_SET(made, fields_set)  # shared, and never changed
        _SET_EXTRA(made, None)
        _SET_PRIVATE(made, None)
        _KEEP(made, None)
        return made

    def to_json(self) -> dict[str, JsonValue]:
        """As the record states it."""
        return self.model_dump()

    def _members(self) -> dict[str, Any]:
        """What `to_json` gives, for `canonical_members`: parts are left as they are, foreign JSON is embedded."""
        if not self._foreign:
            return self.__dict__
        return {**self.__dict__, **{name: embedded(getattr(self, name), depth=self._depth) for name in self._foreign}}

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        fields = cls.model_fields
        cls._foreign = tuple(name for name, field in fields.items() if _may_hold_anything(field.annotation))
        defaults = {name: field.default for name, field in fields.items() if not field.is_required()}
        cls._shape = defaults, set(fields)


_KEPT, _KEEP = Part.__dict__["_kept"].__get__, Part.__dict__["_kept"].__set__


def require_no_stated_null(part: Part, field: str) -> None:
    # One document, one spelling: a field that may be left out is never null.
    if getattr(part, field) is None and field in part.model_fields_set:
        raise ValueError(f"{field} is left out when it is not known, never null")


def _may_hold_anything(annotation: Any) -> bool:
    """Whether values of this type are JSON that someone else wrote, or numbers that have no one spelling."""
    if annotation in (Any, object, float) or dict in (annotation, get_origin(annotation)):
        return True
    return any(_may_hold_anything(inner) for inner in get_args(annotation))


class Signature(Part):
    """An Ed25519 signature in a document: by which key, and over what that document says it is."""

    algorithm: Literal["Ed25519"]
    key_id: Name
    value: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/]{86}==$")]


_unfolded: Final = methodcaller("_members")


class Document(Part):
    """A document that is hashed: it says which schema it follows, so that none can be taken for another."""

    _depth: ClassVar[int] = 1
    schema_version: Literal["1.0"] = "1.0"

    def to_bytes(self) -> bytes:
        return self.written()[0]

    def digest(self) -> Digest:
        return self.written()[1]

    def written(self) -> tuple[bytes, Digest]:
        """Its bytes and their digest, made once."""
        kept: tuple[bytes, Digest] | None
        try:
            kept = _KEPT(self)
        except AttributeError:
            kept = None
        if kept is None:
            written = self.write()
            kept = written, digest_of_bytes(written)
            _KEEP(self, kept)
        return kept

    def write(self) -> bytes:
        """Its bytes, not kept: for who needs them once, and no digest."""
        return canonical_members(self._members(), unfold=_unfolded) or canonical_bytes(self._hashed())

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
        value: JsonValue = read_canonical(raw, bytes_max=ARTIFACT_BYTES_MAX)
        if value is None:
            value = parse_object(raw, bytes_max=ARTIFACT_BYTES_MAX)
            if canonical_bytes(value) != raw:
                raise SchemaViolation(f"{cls.__name__} is not in canonical form", expected="RFC 8785 bytes")
        return cls.from_json(value)

    def keep_written(self, raw: bytes, digest: Digest) -> None:
        """It was read from these bytes, which hash to this digest: they are not made again."""
        _KEEP(self, (raw, digest))

    def _hashed(self) -> dict[str, JsonValue]:
        """What its digest is over."""
        return self.to_json()


class StreamArtifact(Document):
    """A document that an entry commits to. One of its fields is the id of its stream (`StreamKind.id_field`)."""

    artifact_type: ClassVar[Any]


class LogEntry(Document):
    """One link of a stream's chain. Its digest is over all of it but the digest itself."""

    kind: ClassVar[StreamKind]
    sequence_number: SequenceNumber
    prev_entry_digest: Sha256
    from_state: str
    to_state: str
    artifact_type: str
    artifact_digest: Sha256
    executor_id: Uuid7
    recorded_at: Time
    entry_digest: Sha256

    def _hashed(self) -> dict[str, JsonValue]:
        body = self.to_json()
        del body["entry_digest"]
        return body

    def _members(self) -> dict[str, Any]:
        return self._hashed()

    def body_bytes(self) -> bytes:
        """The bytes that are hashed and stored: the document without its own digest."""
        return self.written()[0]

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

    @property
    def identity(self) -> str:
        """The id of its stream among those of its kind."""
        identity: str = self.__dict__[self.kind.id_field]
        return identity

    @property
    def stream(self) -> str:
        return self.kind.stream(self.identity)

    def link(self) -> Link:
        return Link(
            self.sequence_number,
            self.prev_entry_digest,
            self.entry_digest,
            self.digest(),
            self.from_state,
            self.to_state,
            self.artifact_type,
            self.artifact_digest,
        )


def _schema_violation(model: type[BaseModel], error: ValidationError) -> SchemaViolation:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    path = "/" + "/".join(str(step) for step in first["loc"])
    return SchemaViolation(f"{model.__name__} at {path}: {first['msg']}")
