"""Values of a run: how what a program returns becomes what the journal records, and the way back.

| tier | the journal has | the program gets, live and in a replay |
|---|---|---|
| `auto` | `inline` up to 32,768 bytes of canonical JSON, `artifact` beyond; bytes are artifacts | the value |
| `inline` | the JSON | the value |
| `artifact` | the SHA-256 of bytes that the gateway stores | the value |
| `event` | the JSON, for followers | None |
| `transient` | nothing; needs `resume="recompute"` | the value, computed again in each attempt |

Serializers are JSON, bytes, text and pydantic; never pickle: what is recorded can be read in ten years, by others, and
runs no code. A program sees live what it would see in a replay: `decode(encode(value))`, a copy.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import hmac
import json
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any, Final, Generic, Literal, NamedTuple, TypeVar, Union, get_args, get_origin
from uuid import UUID

from pydantic import BaseModel, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError
from pydantic_core import PydanticSerializationError, to_jsonable_python

from tga_sdk.canonical import LEVELS_MAX, NotCanonical, canonical, canonical_plain, is_plain
from tga_sdk.errors import TierInvalid, ValueInvalid, ValueNotSerializable
from tga_sdk.journal import Operation

T = TypeVar("T")
Tier = Literal["auto", "inline", "artifact", "event", "transient"]
Resume = Literal["snapshot", "recompute"]

TIERS: Final = frozenset(get_args(Tier))
INLINE_BYTES_MAX: Final = 32_768
INLINE_LEVELS_MAX: Final = 56
"""So deep may a value be that stands inside the gateway's documents; a deeper one is an artifact."""

_OCTETS: Final = "application/octet-stream"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain;charset=utf-8"
_SCALARS: Final = frozenset({str, int, float, bool, type(None)})
_WAYS_OUT: Final = (
    "Either return what can be recorded (JSON, bytes, or a type that is declared: a return annotation or type=), "
    "or have it computed again in each attempt: tier='transient', resume='recompute'"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Artifact(Generic[T]):
    """Store this value as a blob, whatever its size; the program gets the value itself, without this wrapper.

    The journal has the SHA-256 of the bytes, which are stored before the entry and verified when they are read.
    `value`: bytes, text, JSON, or a declared type. `media_type`: what to tell those who download it.
    """

    value: T
    media_type: str | None = None


@dataclasses.dataclass(frozen=True, slots=True, repr=False)
class Secret(Generic[T]):
    """A result that nobody but workers of the run may read: the gateway seals it, the journal has a commitment.

    The program gets it back as a `Secret`; `.value` is what it holds. It is never shown by repr(), str() or format().
    Not protected: what the program itself does with `.value` (tool arguments that are not secret, logs, state).
    """

    value: T

    def __repr__(self) -> str:
        return "Secret(...)"


class Blob(NamedTuple):
    """Bytes to be uploaded before the put that refers to them."""

    sha256: str
    data: bytes
    media_type: str
    serializer: str


class Encoded(NamedTuple):
    """`value` is the protocol's Value; `blob`, if there is one, is to be uploaded before the put."""

    value: dict[str, Any]
    blob: Blob | None


def verify_tier(tier: str, resume: str, *, where: str) -> None:
    """TierInvalid unless a value can be kept so. Whoever skips an operation in a replay needs its value."""
    if tier not in TIERS:
        raise TierInvalid(f"{where}: tier={tier!r} is unknown; expected one of {', '.join(sorted(TIERS))}")
    if resume not in ("snapshot", "recompute"):
        raise TierInvalid(f"{where}: resume={resume!r} is unknown; expected snapshot or recompute")
    if tier == "transient" and resume == "snapshot":
        raise TierInvalid(
            f"{where}: what is transient is not recorded, so a replay cannot skip it. Use resume='recompute' with it, "
            "or a tier that is recorded: auto, inline, artifact"
        )


def encode(
    value: Any, *, tier: str = "auto", type_: Any = None, where: str, inline_max: int = INLINE_BYTES_MAX
) -> Encoded:
    """What the journal records of a value, and the bytes to upload before, if any. The value is copied.

    `type_`: the declared type, if any; `decode` needs the same one. ValueNotSerializable when there is no form of it
    that a replay could read; ValueInvalid when it is not of the declared type; TierInvalid when the tier cannot
    hold it.
    """
    if tier == "transient":
        return Encoded({"tier": "transient"}, None)
    if tier not in TIERS:
        verify_tier(tier, "snapshot", where=where)
    codec = _codec_of(type_)
    if type(value) is Secret:
        return _sealed(value, tier, codec, where)
    media_type = None
    if type(value) is Artifact:
        if tier not in ("auto", "artifact"):
            raise TierInvalid(f"{where} is an Artifact, and tier={tier!r} is asked for: leave out one of the two")
        tier, media_type, value = "artifact", value.media_type, value.value
    if isinstance(value, bytes | bytearray | memoryview):
        if tier not in ("auto", "artifact"):
            raise TierInvalid(f"{where} is bytes, which tier={tier!r} cannot hold: use tier='auto' or 'artifact'")
        return _artifact(bytes(value), media_type or _OCTETS, "bytes", where)
    if codec.adapter is None and is_plain(value):  # most values: looked at once
        plain, written = value, _canonical(value, where, canonical_plain)
    else:
        plain = codec.dump(value, where)
        written = _canonical(plain, where)
    is_small = len(written) <= inline_max and _is_shallow(plain, written)
    if tier == "artifact" or (tier == "auto" and not is_small):
        if type(plain) is str and codec.is_json:
            return _artifact(plain.encode(), media_type or _TEXT, "text", where)
        return _artifact(written, media_type or _JSON, "json" if codec.is_json else "pydantic", where)
    if not is_small:
        raise TierInvalid(
            f"{where} has {len(written)} bytes of JSON, and tier={tier!r} holds {inline_max} bytes and "
            f"{INLINE_LEVELS_MAX} levels at most: use tier='auto' or 'artifact'"
        )
    # Read back rather than kept: the program may change its value before this is sent, and 5.0 is recorded as 5.
    return Encoded({"tier": tier if tier == "event" else "inline", "value": json.loads(written)}, None)


def decode(value: Mapping[str, Any] | None, type_: Any = None, blob: bytes | None = None, where: str = "") -> Any:
    """What the program gets of a recorded value: a copy of its own. ValueInvalid when it is not of the declared type.

    Of an artifact `blob` is what was downloaded (see `blob_of`); other bytes than recorded are refused. Of a secret the
    value must have been joined. What is an event, transient, or not there is None.
    """
    if value is None:
        return None
    tier = value["tier"]
    if tier == "inline":
        return _codec_of(type_).load(value["value"], where)
    if tier in ("event", "transient"):
        return None
    if tier == "secret":
        if "value" not in value:
            raise ValueInvalid(f"{where} is sealed, and only workers of its run may read it", where=where)
        return Secret(_codec_of(type_).load(value["value"], where))
    if tier == "artifact":
        return _from_blob(value["ref"], _codec_of(type_), blob, where)
    raise ValueInvalid(f"{where} stands elsewhere (tier {tier}), and was not joined to the record", where=where)


def blob_of(value: Mapping[str, Any] | None) -> str | None:
    """The SHA-256 of the blob that `decode` needs for this value, or None."""
    return value["ref"]["sha256"] if value is not None and value["tier"] == "artifact" else None


def to_json(value: Any, *, where: str, for_digest: bool = False) -> Any:
    """JSON data of what is given to an operation, copied. Models, dataclasses, dates, ids, decimals, enums and paths
    become what pydantic writes of them.

    Refused: sets, because their order is another one in each process; bytes and secrets, because what is given is
    recorded. With `for_digest` the result is hashed and never recorded: secrets count with their value, bytes with
    their SHA-256.
    """
    if is_plain(value):
        return copied(value)
    return _given(value, where, for_digest, LEVELS_MAX)


def input_digest(salt: bytes, given: Any, around: Operation | None) -> str:
    """What makes an input the same: HMAC-SHA256 over the canonical JSON of it and of the operation around, in hex.

    Keyed with the run's salt, so that nobody guesses a short input from its digest.
    """
    try:
        said = canonical([given, None if around is None else list(around)])
    except NotCanonical as error:
        raise ValueNotSerializable(f"what is given to the operation has no canonical JSON: {error}") from None
    return hmac.digest(salt, said, hashlib.sha256).hex()


def result_type(fn: Callable[..., Any]) -> Any:
    """What a callable is annotated to return (of an awaitable: what that gives), or None when nothing is known.

    An annotation that cannot be resolved (a class of an enclosing function, say) counts as none.
    """
    while isinstance(fn, functools.partial):
        fn = fn.func
    found = _annotation_of(fn)
    if get_origin(found) in (Awaitable, Coroutine):
        found = get_args(found)[-1]
    return None if found is Any else found


def copied(value: Any) -> Any:
    """A copy of plain JSON data."""
    kind = type(value)
    if kind is dict:
        return {key: member if type(member) in _SCALARS else copied(member) for key, member in value.items()}
    if kind is list:
        return [item if type(item) in _SCALARS else copied(item) for item in value]
    return value


def invalid(error: ValidationError, where: object) -> ValueInvalid:
    """What pydantic found, by the first place that is wrong; the others are counted. Never shows the value itself."""
    problems = error.errors(include_url=False, include_context=False, include_input=True)
    first = problems[0]
    place = str(where) + "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in first["loc"])
    more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    found = "" if first["type"] == "missing" else f"; found {type(first['input']).__name__}"
    return ValueInvalid(f"{place}: {first['msg']}{found}{more}", where=place)


class Codec:
    """A declared type: to JSON and back. Made once for each type (`codec_of`)."""

    __slots__ = ("_scalar", "adapter", "is_json", "type")

    def __init__(self, type_: Any) -> None:
        self.type = type_
        self.is_json = _is_json_type(type_)
        self._scalar = type_ if type_ in _SCALARS else None
        self.adapter: TypeAdapter[Any] | None = None
        if type_ is not None and type_ is not Any and type_ is not object:
            try:
                self.adapter = TypeAdapter(type_)
            except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError):
                self.is_json = True  # a class that pydantic does not know: only JSON can be recorded of it

    def dump(self, value: Any, where: object) -> Any:
        """JSON data of the value, from which `load` reads it back: what it cannot read is refused here. It may be
        the value itself."""
        value = detached(value)
        if self.adapter is None:
            return value if is_plain(value) else _untyped(value, where, LEVELS_MAX)
        if self.is_json:
            return self.load(value if is_plain(value) else _untyped(value, where, LEVELS_MAX), where)
        try:
            try:
                plain = self.adapter.dump_python(value, mode="json", by_alias=True, warnings="error")
            except PydanticSerializationError:
                # Not of the declared type, but perhaps what can be read as such: a dict for a model.
                right = self.adapter.validate_python(value)
                plain = self.adapter.dump_python(right, mode="json", by_alias=True, warnings="error")
            self.load(plain, where)
            return plain
        except ValidationError as error:
            raise invalid(error, where) from None
        except (PydanticSerializationError, ValueError, TypeError) as error:
            raise ValueNotSerializable(
                f"{where} is {_named(value)}, and cannot be written as {_shown(self.type)}: {error}. {_WAYS_OUT}"
            ) from None

    def load(self, plain: Any, where: object) -> Any:
        """The value of JSON data, a copy."""
        if self._scalar is not None and type(plain) is self._scalar:
            return plain
        if self.adapter is None:
            return copied(plain)
        try:
            if self.is_json:
                return self.adapter.validate_python(copied(plain))
            return self.adapter.validate_json(json.dumps(plain, ensure_ascii=False))
        except ValidationError as error:
            raise invalid(error, where) from None


def codec_of(type_: Any) -> Codec:
    """The codec of a type, `Artifact[T]` and `Secret[T]` counting as T."""
    return _codec_of(type_)


def detached(value: Any) -> Any:
    """A part of the run's state as a value of its own; everything else as it is."""
    take = getattr(type(value), "_tga_value", None)
    return value if take is None else take(value)


def _codec_of(type_: Any) -> Codec:
    if type_ is None:
        return _UNTYPED
    try:
        return _cached_codec(type_)
    except TypeError:  # a type that cannot be hashed, like Annotated[int, {...}]
        return Codec(_unwrapped_type(type_))


@functools.lru_cache(maxsize=1024)
def _cached_codec(type_: Any) -> Codec:
    return Codec(_unwrapped_type(type_))


def _unwrapped_type(type_: Any) -> Any:
    if type_ in (Artifact, Secret):
        return None
    while get_origin(type_) in (Artifact, Secret):
        (type_,) = get_args(type_)
    return type_


def _is_json_type(type_: Any) -> bool:
    """Whether all values of the type are JSON data as they are, Any inside it counting as JSON."""
    if type_ is None or type_ is Any or type_ is object or type_ in (dict, list) or type_ in _SCALARS:
        return True
    origin, inner = get_origin(type_), get_args(type_)
    if origin is Literal:
        return all(type(one) in _SCALARS for one in inner)
    if origin is dict:
        return inner[0] is str and _is_json_type(inner[1])
    return origin in (list, Union, types.UnionType) and all(_is_json_type(one) for one in inner)


def _sealed(value: Secret[Any], tier: str, codec: Codec, where: str) -> Encoded:
    if tier not in ("auto", "inline"):
        raise TierInvalid(f"{where} is a Secret, which is sealed whatever its size: leave out tier={tier!r}")
    if isinstance(value.value, bytes | bytearray | memoryview):
        raise ValueNotSerializable(
            f"{where} is a Secret of bytes; a secret is JSON or a declared type: use base64 text"
        )
    written = _canonical(codec.dump(value.value, where), where)
    return Encoded({"tier": "secret", "value": json.loads(written)}, None)


def _artifact(data: bytes, media_type: str, serializer: str, where: str) -> Encoded:
    media_type = media_type.replace("; ", ";")
    if not media_type.isascii() or not media_type.isprintable() or not 0 < len(media_type) <= 128 or " " in media_type:
        raise ValueInvalid(f"{where}: media_type={media_type!r} is not one, like text/csv", where=where)
    sha256 = hashlib.sha256(data).hexdigest()
    reference = {"sha256": sha256, "size_bytes": len(data), "media_type": media_type, "serializer": serializer}
    return Encoded({"tier": "artifact", "ref": reference}, Blob(sha256, data, media_type, serializer))


def _from_blob(reference: Mapping[str, Any], codec: Codec, blob: bytes | None, where: str) -> Any:
    if blob is None:
        raise ValueInvalid(f"{where} is an artifact, and its bytes were not given to decode()", where=where)
    if len(blob) != reference["size_bytes"] or hashlib.sha256(blob).hexdigest() != reference["sha256"]:
        raise ValueInvalid(
            f"{where}: the blob is not the one that the journal names; expected {reference['size_bytes']} bytes with "
            f"SHA-256 {reference['sha256']}, found {len(blob)} bytes with another one",
            where=where,
        )
    match reference["serializer"]:
        case "bytes":
            if codec.adapter is None:
                return blob
            try:
                return codec.adapter.validate_python(blob)
            except ValidationError as error:
                raise invalid(error, where) from None
        case "text":
            return codec.load(blob.decode(), where)
        case "json" | "pydantic":
            return codec.load(json.loads(blob), where)
        case unknown:
            raise ValueInvalid(f"{where} was written by the serializer {unknown!r}, which is unknown here", where=where)


def _canonical(plain: Any, where: str, write: Callable[[Any], bytes] = canonical) -> bytes:
    try:
        return write(plain)
    except NotCanonical as error:
        raise ValueNotSerializable(f"{where} has no canonical JSON: {error}. {_WAYS_OUT}") from None


def _is_shallow(plain: Any, written: bytes) -> bool:
    if written.count(b"[") + written.count(b"{") <= INLINE_LEVELS_MAX:  # most have few
        return True
    return _levels(plain) <= INLINE_LEVELS_MAX


def _levels(plain: Any) -> int:
    if type(plain) is dict:
        return 1 + max(map(_levels, plain.values()), default=0)
    if type(plain) is list:
        return 1 + max(map(_levels, plain), default=0)
    return 0


def _untyped(value: Any, where: object, levels: int) -> Any:
    """JSON data of what has no declared type; tuples become lists, and nothing else changes silently."""
    value = detached(value)
    if isinstance(value, Enum) and isinstance(value, str | int | float):
        return value.value
    if value is None or isinstance(value, bool | str | int | float):
        return value
    _verify_levels(levels, where)
    if isinstance(value, dict):
        return {_key(key, where): _untyped(member, f"{where}.{key}", levels - 1) for key, member in value.items()}
    if isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields")):
        return [_untyped(item, f"{where}[{index}]", levels - 1) for index, item in enumerate(value)]
    raise _not_serializable(value, where)


def _not_serializable(value: Any, where: object) -> ValueNotSerializable:
    if isinstance(value, Artifact | Secret):
        return ValueNotSerializable(
            f"{where} is {_named(value)} inside of another value: return it alone, from an operation of its own"
        )
    if isinstance(value, bytes | bytearray | memoryview):
        return ValueNotSerializable(
            f"{where} is bytes inside of another value: return them alone, from an operation of their own, or as "
            "base64 text"
        )
    if isinstance(value, set | frozenset):
        return ValueNotSerializable(f"{where} is {_named(value)}, which JSON does not know. {_WAYS_OUT}")
    return ValueNotSerializable(f"{where} is {_named(value)}, and nothing says how to read it back. {_WAYS_OUT}")


def _given(value: Any, where: str, for_digest: bool, levels: int) -> Any:
    value = detached(value)
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | str | int | float):
        return value
    _verify_levels(levels, where)
    if isinstance(value, dict):
        return {
            _key(key, where): _given(member, f"{where}.{key}", for_digest, levels - 1) for key, member in value.items()
        }
    if isinstance(value, list | tuple):
        return [_given(item, f"{where}[{index}]", for_digest, levels - 1) for index, item in enumerate(value)]
    if isinstance(value, BaseModel) or (
        dataclasses.is_dataclass(value) and not isinstance(value, type | Artifact | Secret)
    ):
        return _given(_fields_of(value, where), where, for_digest, levels)
    if isinstance(value, datetime | date | time | timedelta | UUID | Decimal):
        return to_jsonable_python(value)
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, Artifact):
        return _given(value.value, where, for_digest, levels)
    if isinstance(value, bytes | bytearray | memoryview):
        if for_digest:
            return {"sha256": hashlib.sha256(value).hexdigest(), "size_bytes": len(bytes(value))}
        raise ValueNotSerializable(f"{where} is bytes, and what is given here is recorded as JSON: give base64 text")
    if isinstance(value, Secret):
        if for_digest:
            return _given(value.value, where, for_digest, levels)
        raise ValueNotSerializable(f"{where} is a Secret, and what is given here is recorded: give .value if it may be")
    _refuse_sets(value, where)
    raise ValueNotSerializable(
        f"{where} is {_named(value)}, which has no JSON form: give the data that the operation needs (JSON, models, "
        "dataclasses, dates, ids), and let its body make the rest of it"
    )


def _fields_of(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        try:
            _refuse_sets(value.model_dump(by_alias=True, warnings=False), where)
            dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True, warnings=False)
        except (PydanticSerializationError, ValueError, TypeError) as error:
            raise ValueNotSerializable(f"{where} is {_named(value)}, and cannot be written as JSON: {error}") from None
        return dumped
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _refuse_sets(value: Any, where: str) -> None:
    if isinstance(value, set | frozenset):
        raise ValueNotSerializable(
            f"{where} is {_named(value)}, whose order is another one in each process: give sorted(...) of it"
        )
    if isinstance(value, dict):
        for key, member in value.items():
            _refuse_sets(member, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_sets(item, f"{where}[{index}]")


def _verify_levels(levels: int, where: object) -> None:
    if not levels:
        raise ValueNotSerializable(f"{where} is nested deeper than {LEVELS_MAX} levels, or contains itself")


def _key(key: Any, where: object) -> str:
    if isinstance(key, Enum) and isinstance(key.value, str):
        return key.value
    if isinstance(key, str):
        return str.__str__(key)
    raise ValueNotSerializable(
        f"{where} has the key {key!r} ({type(key).__name__}), and keys of JSON are text: use str(...) of it"
    )


def _annotation_of(fn: Any) -> Any:
    own = getattr(fn, "__annotations__", None)
    if own is None or isinstance(fn, type):
        if isinstance(fn, type):
            return fn
        fn = getattr(type(fn), "__call__", None)  # an object that can be called  # noqa: B004
        own = getattr(fn, "__annotations__", None) or {}
    if "return" not in own:
        return None
    found = own["return"]
    if found is None:
        return type(None)
    if isinstance(found, str) or get_args(found):
        try:
            return _resolved(fn, found)
        except Exception:  # whatever evaluating an annotation raises
            return None if isinstance(found, str) else found
    return found


def _resolved(fn: Any, found: Any) -> Any:
    """An annotation with its names looked up where the function was written. Kept by module and text, not by function:
    programs make new functions all the time, and each may hold on to much."""
    module = getattr(fn, "__module__", None)
    key = (module, found) if module is not None and isinstance(found, str) else None
    if key in _ANNOTATIONS:
        return _ANNOTATIONS[key]
    while hasattr(fn, "__wrapped__"):
        fn = fn.__wrapped__
    holder = types.SimpleNamespace(__annotations__={"return": found})
    resolved = typing.get_type_hints(holder, globalns=getattr(fn, "__globals__", {}), include_extras=True)["return"]
    if key is not None and len(_ANNOTATIONS) < 4096:
        _ANNOTATIONS[key] = resolved
    return resolved


_ANNOTATIONS: Final[dict[Any, Any]] = {}


def _named(value: Any) -> str:
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    said = f"of type {name}"
    return f"{said} (was `await` forgotten before it?)" if isinstance(value, Awaitable) else said


def _shown(type_: Any) -> str:
    return getattr(type_, "__qualname__", None) or str(type_)


_UNTYPED: Final = Codec(None)
