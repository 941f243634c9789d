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

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

from pydantic import ValidationError

from tga_sdk.canonical import NotCanonical, canonical, canonical_plain, is_plain
from tga_sdk.codecs import WAYS_OUT, Codec, codec_of, invalid
from tga_sdk.errors import TierInvalid, ValueInvalid, ValueNotSerializable
from tga_sdk.wrappers import Artifact as Artifact
from tga_sdk.wrappers import Secret as Secret

Tier = Literal["auto", "inline", "artifact", "event", "transient"]
Resume = Literal["snapshot", "recompute"]

TIERS: Final = frozenset(get_args(Tier))
INLINE_BYTES_MAX: Final = 32_768
INLINE_LEVELS_MAX: Final = 56
"""So deep may a value be that stands inside the gateway's documents; a deeper one is an artifact."""

_OCTETS: Final = "application/octet-stream"
_JSON: Final = "application/json"
_TEXT: Final = "text/plain;charset=utf-8"


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
    """TierInvalid unless a value can be kept so: a replay that skips an operation needs its value."""
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
    codec = codec_of(type_)
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
        return codec_of(type_).load(value["value"], where)
    if tier in ("event", "transient"):
        return None
    if tier == "secret":
        if "value" not in value:
            raise ValueInvalid(f"{where} is sealed, and only workers of its run may read it", where=where)
        return Secret(codec_of(type_).load(value["value"], where))
    if tier == "artifact":
        return _from_blob(value["ref"], codec_of(type_), blob, where)
    raise ValueInvalid(f"{where} stands elsewhere (tier {tier}), and was not joined to the record", where=where)


def blob_of(value: Mapping[str, Any] | None) -> str | None:
    """The SHA-256 of the blob that `decode` needs for this value, or None."""
    return value["ref"]["sha256"] if value is not None and value["tier"] == "artifact" else None


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
        raise ValueNotSerializable(f"{where} has no canonical JSON: {error}. {WAYS_OUT}") from None


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
