"""Defaults that are made anew each time, as an id or a time: each reading of a value with them gives another one."""

from __future__ import annotations

import functools
from typing import Any, Final

from pydantic import TypeAdapter
from pydantic.errors import PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError

_EMPTY: Final = frozenset({list, dict, set, frozenset, tuple, str, int, float, bool})


def makes_defaults(type_: Any) -> bool:
    """Whether a field of this type, or of one inside it, has a default that a function makes: not just an empty one."""
    if type_ is None or type_ is Any:
        return False
    try:
        return _makes_defaults(type_)
    except TypeError:  # a type that cannot be hashed
        return False


@functools.lru_cache(maxsize=1024)
def _makes_defaults(type_: Any) -> bool:
    try:
        schema: Any = TypeAdapter(type_).core_schema
    except (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError):
        return False
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            made_by = part.get("default_factory")
            if made_by is not None and not (isinstance(made_by, type) and made_by in _EMPTY):
                return True
            waiting.extend(value for key, value in part.items() if key != "metadata")
        elif isinstance(part, list | tuple):
            waiting.extend(part)
    return False
