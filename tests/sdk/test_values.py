"""Values of runs: what is recorded in which tier, what the program gets back, and what is refused with the ways out."""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import uuid
from collections.abc import Awaitable, Coroutine
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import PurePosixPath
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from pydantic import BaseModel, ConfigDict, PositiveInt, TypeAdapter
from pydantic import Field as FieldOf

from app.core.canonical import canonical_bytes
from app.domain.runs.engine.messages import PutValue
from app.domain.runs.values import Value
from tests.core.test_canonical import plain_documents, thorough
from tests.runs import worker
from tga_sdk.annotations import result_type
from tga_sdk.draws import Draws
from tga_sdk.errors import TierInvalid, ValueInvalid, ValueNotSerializable
from tga_sdk.given import input_digest, to_json
from tga_sdk.journal import Operation
from tga_sdk.values import INLINE_BYTES_MAX, blob_of, decode, encode, verify_tier
from tga_sdk.wrappers import Artifact, Secret

SENT: TypeAdapter[Any] = TypeAdapter(PutValue)
SALT = bytes.fromhex("00112233445566778899aabbccddeeff")


class Colour(enum.Enum):
    RED = "red"


class Line(BaseModel):
    name: str
    amount: PositiveInt = 1


class Order(BaseModel):
    model_config = ConfigDict(strict=True)
    lines: list[Line]
    at: datetime | None = None
    colour: Colour = Colour.RED
    said: str = FieldOf("", alias="Said")


@dataclasses.dataclass
class Point:
    x: int
    y: Decimal


class Pair(NamedTuple):
    one: int
    two: str


ORDER = Order(lines=[Line(name="a"), Line(name="b", amount=3)], at=datetime(2026, 1, 1, tzinfo=UTC), Said="hä")


def back(value: Any, type_: Any = None, **options: Any) -> Any:
    """What the program gets, and a check that the gateway would accept what is sent."""
    made = encode(value, type_=type_, where="the result", **options)
    SENT.validate_python(made.value, strict=True)
    sent = json.loads(json.dumps(made.value))
    if made.blob is not None:
        assert blob_of(sent) == made.blob.sha256 == hashlib.sha256(made.blob.data).hexdigest()
        assert sent["ref"]["size_bytes"] == len(made.blob.data)
    return decode(sent, type_, None if made.blob is None else made.blob.data, where="the result")


@pytest.mark.parametrize("tier", ["auto", "inline", "artifact"])
@pytest.mark.parametrize(
    ("value", "type_"),
    [
        (None, None),
        ({"a": [1, 2.5, "ä", True, None]}, None),
        ({"a": [1]}, dict[str, Any]),
        ("text", str),
        (5, int),
        (5.0, float),
        (ORDER, Order),
        ([ORDER], list[Order]),
        (ORDER, Order | None),
        (None, Order | None),
        (Point(1, Decimal("2.50")), Point),
        (Pair(1, "b"), Pair),
        ((1, "b"), tuple[int, str]),
        ({3, 1}, set[int]),
        (datetime(2026, 1, 1, tzinfo=UTC), datetime),
        (uuid.UUID(int=5), uuid.UUID),
        (Colour.RED, Colour),
        (Decimal("1.10"), Decimal),
        ({"a": ORDER}, dict[str, Order]),
        ({1: 2}, dict[int, int]),
    ],
)
def test_a_value_comes_back_as_it_was(value: Any, type_: Any, tier: str) -> None:
    got = back(value, type_, tier=tier)
    assert got == value
    assert type(got) is type(value)


@thorough
@given(plain_documents)
def test_any_json_comes_back_as_it_was_and_is_a_copy(value: Any) -> None:
    got = back(value)
    assert got == value
    if isinstance(value, dict | list):
        assert got is not value


def test_what_is_recorded_is_what_was_returned_and_not_what_it_became() -> None:
    value = {"a": [1]}
    made = encode(value, where="x")
    value["a"].append(2)
    first = decode(made.value)
    first["a"].append(3)
    assert decode(made.value) == {"a": [1]}


@pytest.mark.parametrize("size", [INLINE_BYTES_MAX - 2, INLINE_BYTES_MAX - 1])
def test_auto_goes_to_artifact_beyond_the_bytes_that_the_journal_takes(size: int) -> None:
    values: list[Any] = ["x" * size, {"k": "ä" * ((size - 6) // 2) + "x" * (size % 2)}]
    for value in values:
        written = len(canonical_bytes(value))
        made = encode(value, where="x")
        assert made.value["tier"] == ("inline" if written <= INLINE_BYTES_MAX else "artifact")
        assert back(value) == value


def test_what_is_nested_deeper_than_the_journal_takes_is_an_artifact() -> None:
    deep: Any = 1
    for _ in range(60):
        deep = [deep]
    assert encode(deep, where="x").value["tier"] == "artifact"
    assert back(deep) == deep
    with pytest.raises(TierInvalid, match="56 levels"):
        encode(deep, tier="inline", where="x")


@pytest.mark.parametrize(
    ("value", "serializer", "media_type"),
    [
        (b"\x00\xff", "bytes", "application/octet-stream"),
        (bytearray(b"ab"), "bytes", "application/octet-stream"),
        (Artifact(b"a,b", "text/csv"), "bytes", "text/csv"),
        (Artifact("ä", "text/markdown; charset=utf-8"), "text", "text/markdown;charset=utf-8"),
        (Artifact("ä"), "text", "text/plain;charset=utf-8"),
        (Artifact({"a": 1}), "json", "application/json"),
    ],
)
def test_bytes_and_artifacts_are_blobs_whatever_their_size(value: Any, serializer: str, media_type: str) -> None:
    made = encode(value, where="x")
    assert made.value["ref"]["serializer"] == serializer
    assert made.value["ref"]["media_type"] == media_type
    assert back(value) == getattr(value, "value", value)


def test_an_artifact_of_a_declared_type() -> None:
    made = encode(Artifact(ORDER), type_=Artifact[Order], where="x")
    assert made.value["ref"]["serializer"] == "pydantic"
    assert back(Artifact(ORDER), Artifact[Order]) == ORDER


@pytest.mark.parametrize("wrong", [b"", b"ac", b"abc"])
def test_a_blob_with_other_bytes_is_refused(wrong: bytes) -> None:
    made = encode(b"ab", where="x")
    with pytest.raises(ValueInvalid, match="not the one that the journal names"):
        decode(made.value, None, wrong, where="x")
    with pytest.raises(ValueInvalid, match="bytes were not given"):
        decode(made.value, where="x")


def test_a_secret_is_sealed_and_never_shown() -> None:
    made = encode(Secret({"pin": "4711"}), where="x")
    assert made.value == {"tier": "secret", "value": {"pin": "4711"}}
    got = back(Secret({"pin": "4711"}))
    assert isinstance(got, Secret)
    assert got.value == {"pin": "4711"}
    assert "4711" not in f"{got} {got!r} {[got]} {got!s:>20}"
    assert back(Secret(ORDER), Secret[Order]).value == ORDER
    with pytest.raises(ValueInvalid, match="only workers"):
        decode({"tier": "secret", "ref": {}, "commitment": "ab"}, where="x")


@pytest.mark.parametrize("tier", ["artifact", "event"])
def test_a_secret_has_a_tier_of_its_own(tier: str) -> None:
    with pytest.raises(TierInvalid):
        encode(Secret("a"), tier=tier, where="x")


def test_an_event_is_recorded_and_is_no_value() -> None:
    assert encode({"a": 1}, tier="event", where="x").value == {"tier": "event", "value": {"a": 1}}
    assert back({"a": 1}, tier="event") is None


def test_what_is_transient_is_not_even_looked_at() -> None:
    assert encode(object(), tier="transient", where="x").value == {"tier": "transient"}


@pytest.mark.parametrize(
    ("value", "tier"),
    [(b"a", "inline"), (b"a", "event"), ("x" * 40_000, "inline"), ("x" * 40_000, "event"), (Artifact(1), "inline")],
)
def test_a_tier_that_cannot_hold_the_value_is_refused(value: Any, tier: str) -> None:
    with pytest.raises(TierInvalid, match="tier="):
        encode(value, tier=tier, where="x")


def test_tiers_and_ways_of_resuming() -> None:
    for tier in ("auto", "inline", "artifact", "event", "transient"):
        verify_tier(tier, "recompute", where="step a")
        if tier != "transient":
            verify_tier(tier, "snapshot", where="step a")
    with pytest.raises(TierInvalid, match=r"step a: .*resume='recompute'") as refused:
        verify_tier("transient", "snapshot", where="step a")
    assert refused.value.code == "RUN_TIER_INVALID"
    for tier, resume in (("pickle", "snapshot"), ("auto", "never")):
        with pytest.raises(TierInvalid, match="expected"):
            verify_tier(tier, resume, where="step a")


class Connection:
    pass


@pytest.mark.parametrize(
    ("value", "where", "found"),
    [
        (Connection(), "the result", "tests.sdk.test_values.Connection"),
        ({"a": [1, Connection()]}, r"the result.a\[1\]", "Connection"),
        (ORDER, "the result", "Order"),
        ({"order": ORDER}, "the result.order", "Order"),
        (Point(1, Decimal(1)), "the result", "Point"),
        (Pair(1, "a"), "the result", "Pair"),
        ({1, 2}, "the result", "set"),
        (datetime(2026, 1, 1, tzinfo=UTC), "the result", "datetime.datetime"),
        (Colour.RED, "the result", "Colour"),
        (lambda: 1, "the result", "function"),
    ],
)
def test_what_nobody_could_read_back_is_refused_with_two_ways_out(value: Any, where: str, found: str) -> None:
    with pytest.raises(ValueNotSerializable, match=f"^{where} is of type .*{found}") as refused:
        encode(value, where="the result")
    assert refused.value.code == "RUN_VALUE_NOT_SERIALIZABLE"
    assert "type=" in refused.value.message
    assert "tier='transient', resume='recompute'" in refused.value.message


@pytest.mark.parametrize(
    "value",
    [
        float("nan"),
        2**53,
        "\ud800",
        {"a\x00": 1},
        {1: 2},
        {"a": b"b"},
        {"a": Secret(1)},
        {"a": Artifact(1)},
        Secret(b"a"),
        Artifact(Connection()),
    ],
)
def test_what_json_cannot_hold_is_refused(value: Any) -> None:
    with pytest.raises(ValueNotSerializable, match="the result"):
        encode(value, where="the result")


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(ValueNotSerializable):
        encode(value, where="x")
    with pytest.raises(ValueNotSerializable):
        to_json(value, where="x")


def test_a_class_that_pydantic_does_not_know_is_no_declared_type() -> None:
    with pytest.raises(ValueNotSerializable, match="Connection"):
        encode(Connection(), type_=Connection, where="x")


@pytest.mark.parametrize(
    ("value", "type_", "where"),
    [
        ({"lines": [{"name": "a"}, {"name": 5}]}, Order, "output.lines[1].name"),
        ({}, Order, "output.lines"),
        ("five", int, "output"),
        ([1, "x"], list[int], "output[1]"),
        ({"a": {"b": "x"}}, dict[str, dict[str, int]], "output.a.b"),
        ([Line.model_construct(name="a", amount=-1)], list[Line], "output[0].amount"),
        (None, int, "output"),
    ],
)
def test_a_value_of_another_type_than_declared_is_named_before_it_is_recorded(
    value: Any, type_: Any, where: str
) -> None:
    with pytest.raises(ValueInvalid) as refused:
        encode(value, type_=type_, where="output")
    assert refused.value.where == where
    assert where in refused.value.message


def test_what_fits_the_declared_type_becomes_it() -> None:
    assert back({"name": "a", "amount": "7"}, Line) == Line(name="a", amount=7)
    assert back("7", int) == 7


def test_a_refusal_never_shows_the_value() -> None:
    for value, type_ in (("4711-secret", int), ({"name": 4711}, Line), ({"pin": Connection()}, None)):
        with pytest.raises((ValueInvalid, ValueNotSerializable)) as refused:
            encode(value, type_=type_, where="x")
        assert "4711" not in str(refused.value)


# Inputs


def test_inputs_become_what_pydantic_writes() -> None:
    given_ = {
        "order": ORDER,
        "point": Point(1, Decimal("2.50")),
        "at": datetime(2026, 1, 1, tzinfo=UTC),
        "day": date(2026, 1, 2),
        "within": timedelta(hours=1),
        "id": uuid.UUID(int=5),
        "colour": Colour.RED,
        "path": PurePosixPath("/a"),
        "pair": (1, Pair(2, "b")),
        "report": Artifact({"a": 1}),
    }
    assert to_json(given_, where="input") == {
        "order": json.loads(ORDER.model_dump_json(by_alias=True)),
        "point": {"x": 1, "y": "2.50"},
        "at": "2026-01-01T00:00:00Z",
        "day": "2026-01-02",
        "within": "PT1H",
        "id": str(uuid.UUID(int=5)),
        "colour": "red",
        "path": "/a",
        "pair": [1, [2, "b"]],
        "report": {"a": 1},
    }


class Tagged(BaseModel):
    tags: set[str]


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"a": {1, 2}}, "input.a is of type set, whose order"),
        ([frozenset()], r"input\[0\] is of type frozenset, whose order"),
        (Tagged(tags={"a", "b"}), "input.tags is of type set, whose order"),
        ({"a": b"x"}, "input.a is bytes"),
        ([Secret(1)], r"input\[0\] is a Secret"),
        (Connection(), "input is of type .*Connection"),
        ({1: 2}, "input has the key 1"),
    ],
)
def test_inputs_that_are_refused(value: Any, where: str) -> None:
    with pytest.raises(ValueNotSerializable, match=where):
        to_json(value, where="input")


def test_what_is_only_hashed_may_be_bytes_and_secrets() -> None:
    assert to_json([b"ab", Secret("pin")], where="input", for_digest=True) == [
        {"sha256": hashlib.sha256(b"ab").hexdigest(), "size_bytes": 2},
        "pin",
    ]


def test_an_input_is_copied() -> None:
    given_ = {"a": [1]}
    made = to_json(given_, where="input")
    given_["a"].append(2)
    assert made == {"a": [1]}


def test_the_digest_of_the_worker_protocol() -> None:
    assert input_digest(SALT, {"b": 1, "a": "ä"}, None) == (
        "3ed1884dc4dba5334fb8b6567e251a81e7ddafe642e79b75b29bc99cd2b47f9c"
    )


@thorough
@given(plain_documents)
def test_the_digest_of_another_worker(value: Any) -> None:
    for around in (None, Operation("step", "ä", "ab" * 32)):
        assert input_digest(SALT, value, around) == worker.input_digest(SALT, value, around)


def test_an_input_without_canonical_form_is_refused() -> None:
    with pytest.raises(ValueNotSerializable, match="canonical"):
        input_digest(SALT, float("nan"), None)


# Types of results


async def of_coroutine() -> Order:
    return ORDER


def of_awaitable() -> Awaitable[Order]: ...  # type: ignore[empty-body]


def of_coroutine_object() -> Coroutine[Any, Any, list[Order]]: ...  # type: ignore[empty-body]


def of_nothing() -> None: ...


def of_anything() -> Any: ...


def not_said():  # type: ignore[no-untyped-def]
    ...


class CallableObject:
    def __call__(self) -> Order:
        return ORDER

    def method(self) -> list[Order]:
        return [ORDER]


def test_result_types() -> None:
    @functools.wraps(of_coroutine)
    async def wrapped(*args: Any) -> Any: ...

    def of_local() -> Local: ...  # type: ignore[empty-body]

    class Local(BaseModel):
        pass

    assert result_type(of_coroutine) is Order
    assert result_type(of_awaitable) is Order
    assert result_type(of_coroutine_object) == list[Order]
    assert result_type(of_nothing) is type(None)
    assert result_type(of_anything) is None
    assert result_type(not_said) is None
    assert result_type(lambda: 1) is None
    assert result_type(functools.partial(functools.partial(of_coroutine))) is Order
    assert result_type(CallableObject()) is Order
    assert result_type(CallableObject().method) == list[Order]
    assert result_type(Order) is Order
    assert result_type(wrapped) is Order
    assert result_type(of_local) is None  # nobody can look it up: `type=` says it
    assert result_type(len) is None


# Draws


def test_the_same_place_draws_the_same_and_another_one_something_else() -> None:
    def drawn(salt: bytes, scope: str) -> list[Any]:
        draws = Draws(salt, scope)
        return [draws.random(1), draws.uuid(1), draws.random(1), draws.random(2), draws.uuid(2), draws.random(11)]

    assert drawn(SALT, "3.1") == drawn(SALT, "3.1")
    everything = [*drawn(SALT, ""), *drawn(SALT, "3"), *drawn(SALT, "3:1"), *drawn(SALT[::-1], "")]
    assert len(set(everything)) == len(everything)
    assert all(0 <= one < 1 for one in everything if isinstance(one, float))
    assert all(one.version == 4 for one in everything if isinstance(one, uuid.UUID))


def test_draws_are_spread() -> None:
    draws = Draws(SALT, "")
    drawn = [draws.random(1) for _ in range(2_000)]
    assert len(set(drawn)) == 2_000
    for tenth in range(10):
        assert 140 < sum(tenth <= one * 10 < tenth + 1 for one in drawn) < 260


def test_a_recorded_value_that_was_not_joined_is_refused() -> None:
    TypeAdapter(Value)  # the tiers that a journal may have
    with pytest.raises(ValueInvalid, match="not joined"):
        decode({"tier": "effect", "trace_id": "x", "tool_effect_digest": "y"}, where="x")
    assert decode(None) is None
