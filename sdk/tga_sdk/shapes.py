"""What a declared type says about each place of a run's state: which parts it has, and how a new value is checked."""

from __future__ import annotations

import collections
import collections.abc
import contextlib
import dataclasses
import functools
import json
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, Final, Union, get_args, get_origin

from pydantic import BaseModel, RootModel, ValidationError
from pydantic.fields import FieldInfo

from tga_sdk.canonical import SAFE_INTEGER_MAX, NotCanonical, canonical
from tga_sdk.codecs import Codec, codec_of, invalid
from tga_sdk.errors import ProcedureInvalid, ValueInvalid, ValueNotSerializable

_LISTS: Final = (list, collections.abc.MutableSequence, collections.abc.Sequence)
_DICTS: Final = (dict, collections.abc.MutableMapping, collections.abc.Mapping)
_UNTRACKED: Final = (
    collections.deque,
    collections.defaultdict,
    collections.OrderedDict,
    collections.Counter,
    bytearray,
)
_FOR_LISTS: Final = ("list", "any")
_FOR_OBJECTS: Final = ("dict", "record", "any")


class Shape:
    """One place of the state, by its type. `kind` says what stands there:

    `any`: JSON of no declared type. `list`, `dict`: tracked, with `item` for what they hold. `record`: a model or a
    dataclass, tracked field by field. `union`: one of several, told by looking. `leaf`: a value that is read and set as
    a whole. `is_checked`: a change anywhere inside must be followed by a look at this whole place, because validators
    or bounds of its own may mind; that costs what the place's size costs.
    """

    __slots__ = ("bare", "codec", "exact", "fields", "is_checked", "item", "key", "kind", "options", "proxy")

    def __init__(self, type_: Any) -> None:
        self.bare, has_metadata = _bare(type_)
        self.codec: Codec = codec_of(type_)
        self.kind = "leaf"
        self.is_checked = has_metadata
        self.exact: type | None = type_ if type_ in (str, int, float, bool) else None
        self.item: Shape = self  # of list and dict
        self.key: Codec | None = None  # of a dict whose keys are not text
        self.fields: Fields = NO_FIELDS  # of a record
        self.options: tuple[Shape, ...] = ()  # of a union
        self.proxy: Any = None  # of a record: the class of its proxies, once there is one
        self._look(self.bare)

    def _look(self, bare: Any) -> None:
        origin, inner = get_origin(bare) or bare, get_args(bare)
        if bare is None or bare is Any or bare is object:
            self.kind = "any"
        elif origin in _UNTRACKED:
            raise ProcedureInvalid(
                f"the state has a {origin.__name__}, whose changes cannot be followed: declare a list or a dict"
            )
        elif origin in _LISTS:
            self.kind = "list"
            self.item = shape_of(inner[0] if inner else None)
        elif origin in _DICTS:
            self.kind = "dict"
            self.item = shape_of(inner[1] if inner else None)
            self.key = codec_of(inner[0]) if inner and inner[0] not in (str, Any) else None
        elif origin in (Union, types.UnionType):
            options = tuple(shape_of(one) for one in inner if one is not type(None))
            if any(option.kind != "leaf" for option in options):
                self.kind = "union"
                self.options = options
                self.is_checked = self.is_checked or len(options) > 1
        elif _is_record(origin):
            self.kind = "record"
            self.fields = Fields(bare)

    def take(self, value: Any, where: object) -> Any:
        """JSON data of a new value for this place, a copy of its own; ValueInvalid when it does not fit."""
        if type(value) is not self.exact:
            try:
                value = self.codec.dump(value, where)
            except ValueNotSerializable as error:
                raise ValueInvalid(error.message, where=str(where)) from None
        return normal(value, where)

    def verify(self, plain: Any, where: object) -> None:
        """ValueInvalid unless the JSON fits as a whole. What is required and not there yet is not complained of."""
        if self.codec.adapter is None:
            return
        try:
            self.codec.adapter.validate_json(json.dumps(plain, ensure_ascii=False))
        except ValidationError as error:
            if any(problem["type"] != "missing" for problem in error.errors(include_url=False)):
                raise invalid(error, where) from None

    def told(self, plain: Any, where: object) -> Shape:
        """The shape without its union: which of the options stands there."""
        if self.kind != "union":
            return self
        kinds = _FOR_LISTS if type(plain) is list else _FOR_OBJECTS
        fitting = [one for one in self.options if one.kind in kinds]
        if len(fitting) > 1:
            found = type(self.codec.load(plain, where))
            records = [one for one in fitting if one.kind == "record" and one.bare is found]
            fitting = records or [one for one in fitting if one.kind != "record"]
        return fitting[0] if fitting else ANY


@dataclasses.dataclass(slots=True)
class Field:
    """A field of a record. `key`: its name in the document, which is its alias. `by_record`: validators or serializers
    of the record have a say in it, so that it is checked through the record; `is_written_by_record`: serializers do."""

    name: str
    key: str
    shape: Shape
    is_required: bool
    is_frozen: bool
    by_record: bool
    is_written_by_record: bool
    default: Callable[[], Any]


class Fields:
    """The fields of a record by name, made when they are first asked for: a record may hold records of its own type."""

    def __init__(self, record: Any) -> None:
        self.record = record

    @functools.cached_property
    def by_name(self) -> dict[str, Field]:
        if self.record is None:
            return {}
        if issubclass(get_origin(self.record) or self.record, BaseModel):
            return _fields_of_model(self.record)
        return _fields_of_dataclass(self.record)

    @functools.cached_property
    def by_key(self) -> dict[str, Field]:
        return {field.key: field for field in self.by_name.values()}

    @functools.cached_property
    def is_checked(self) -> bool:
        """Whether the record has validators that look at all of it."""
        decorators = getattr(self.record, "__pydantic_decorators__", None)
        return bool(decorators is not None and (decorators.model_validators or decorators.root_validators))


NO_FIELDS: Final = Fields(None)


def shape_of(type_: Any) -> Shape:
    """The shape of a type, made once for each. ProcedureInvalid when changes of it could not be followed."""
    try:
        return _cached(type_)
    except TypeError:  # a type that cannot be hashed
        return Shape(type_)


@functools.lru_cache(maxsize=1024)
def _cached(type_: Any) -> Shape:
    return Shape(type_)


def defaults_of(shape: Shape) -> dict[str, Any]:
    """The JSON of a record's fields that have defaults. One that does not fit its own type is left out: pydantic does
    not check them either, and each reader gets it as it is."""
    made = {}
    for field in shape.fields.by_name.values():
        if not field.is_required and not field.is_written_by_record:
            with contextlib.suppress(ValueInvalid):
                made[field.key] = field.shape.take(field.default(), f"state.{field.name}")
    return made


def normal(plain: Any, where: object) -> Any:
    """JSON data as the gateway will give it back: a copy, its keys in their canonical order, 5.0 as 5."""
    kind = type(plain)
    if kind is bool or plain is None:
        return plain
    if kind is int and -SAFE_INTEGER_MAX <= plain <= SAFE_INTEGER_MAX:
        return plain
    if kind is str and plain.isascii() and "\x00" not in plain:
        return plain
    try:
        return json.loads(canonical(plain))
    except NotCanonical as error:
        raise ValueInvalid(f"{where} has no canonical JSON: {error}", where=str(where)) from None


def _bare(type_: Any) -> tuple[Any, bool]:
    """A type without aliases and annotations, and whether these said anything about its values."""
    has_metadata = False
    while True:
        if get_origin(type_) is Annotated:
            has_metadata = True
            type_ = get_args(type_)[0]
        elif hasattr(type_, "__supertype__"):  # NewType
            type_ = type_.__supertype__
        elif type(type_).__name__ == "TypeAliasType":
            type_ = type_.__value__
        else:
            return type_, has_metadata


def _is_record(origin: Any) -> bool:
    if not isinstance(origin, type):
        return False
    return (issubclass(origin, BaseModel) and not issubclass(origin, RootModel)) or dataclasses.is_dataclass(origin)


def _fields_of_model(model: type[BaseModel]) -> dict[str, Field]:
    decorators = model.__pydantic_decorators__
    validated = {name for one in decorators.field_validators.values() for name in one.info.fields}
    written = {name for one in decorators.field_serializers.values() for name in one.info.fields}
    fields = {}
    for name, info in model.model_fields.items():
        declared: Any = info.annotation
        if info.metadata:
            declared = Annotated[(declared, *info.metadata)]
        if info.discriminator is not None:
            declared = Annotated[declared, FieldInfo(discriminator=info.discriminator)]
        fields[name] = Field(
            name=name,
            key=info.serialization_alias or info.alias or name,
            shape=shape_of(declared),
            is_required=info.is_required(),
            is_frozen=bool(info.frozen or model.model_config.get("frozen")),
            by_record=not {name, "*"}.isdisjoint(validated | written),
            is_written_by_record=not {name, "*"}.isdisjoint(written),
            default=functools.partial(info.get_default, call_default_factory=True),
        )
    return fields


def _fields_of_dataclass(record: Any) -> dict[str, Field]:
    origin = get_origin(record) or record
    hints = typing.get_type_hints(origin, include_extras=True)
    fields = {}
    for field in dataclasses.fields(origin):
        default: Callable[[], Any] = functools.partial(_same, field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory
        fields[field.name] = Field(
            name=field.name,
            key=field.name,
            shape=shape_of(hints[field.name]),
            is_required=field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
            is_frozen=origin.__dataclass_params__.frozen,
            by_record=False,
            is_written_by_record=False,
            default=default,
        )
    return fields


def _same(value: Any) -> Any:
    return value


ANY: Final = shape_of(None)
