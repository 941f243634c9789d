"""What a function is annotated to return: how its results are read back where no type is given."""

from __future__ import annotations

import functools
import types
import typing
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, get_args, get_origin

_ANNOTATIONS: Final[dict[Any, Any]] = {}


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
