"""What is given to an operation: its JSON data, and the digest by which a replay recognizes it."""

from __future__ import annotations

import dataclasses
import hashlib
import hmac
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from pathlib import PurePath
from typing import Any
from uuid import UUID

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError, to_jsonable_python

from tga_sdk.canonical import LEVELS_MAX, NotCanonical, canonical, is_plain
from tga_sdk.errors import ValueNotSerializable
from tga_sdk.journal import Operation
from tga_sdk.plain import copied, detached, key_text, type_text, verify_levels
from tga_sdk.wrappers import Artifact, Secret


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


def _given(value: Any, where: str, for_digest: bool, levels: int) -> Any:
    value = detached(value)
    if isinstance(value, Enum):
        value = value.value
    if value is None or isinstance(value, bool | str | int | float):
        return value
    verify_levels(levels, where)
    if isinstance(value, dict):
        return {
            key_text(key, where): _given(member, f"{where}.{key}", for_digest, levels - 1)
            for key, member in value.items()
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
        f"{where} is {type_text(value)}, which has no JSON form: give the data that the operation needs (JSON, models, "
        "dataclasses, dates, ids), and let its body make the rest of it"
    )


def _fields_of(value: Any, where: str) -> dict[str, Any]:
    if isinstance(value, BaseModel):
        try:
            _refuse_sets(value.model_dump(by_alias=True, warnings=False), where)
            dumped: dict[str, Any] = value.model_dump(mode="json", by_alias=True, warnings=False)
        except (PydanticSerializationError, ValueError, TypeError) as error:
            raise ValueNotSerializable(
                f"{where} is {type_text(value)}, and cannot be written as JSON: {error}"
            ) from None
        return dumped
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _refuse_sets(value: Any, where: str) -> None:
    if isinstance(value, set | frozenset):
        raise ValueNotSerializable(
            f"{where} is {type_text(value)}, whose order is another one in each process: give sorted(...) of it"
        )
    if isinstance(value, dict):
        for key, member in value.items():
            _refuse_sets(member, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _refuse_sets(item, f"{where}[{index}]")
