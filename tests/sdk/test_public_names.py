"""Every public name of the SDK says what it is for: modules, classes, functions, methods and properties."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

import tga_sdk

MODULES = [
    "tga_sdk",
    "tga_sdk.adapters.pydantic_ai",
    "tga_sdk.agents",
    "tga_sdk.client",
    "tga_sdk.models",
    "tga_sdk.telemetry",
    "tga_sdk.testing",
    "tga_sdk.testing.models",
]


def public_names(module: ModuleType) -> list[str]:
    if module is tga_sdk:
        return sorted(name for names in tga_sdk._EXPORTS.values() for name in names)
    said = getattr(module, "__all__", None)
    if said is not None:
        return list(said)
    return [name for name, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]


def without_docstring(value: Any, name: str) -> Iterator[str]:
    if not callable(value):
        return
    if not value.__doc__ or value.__doc__.startswith(f"{getattr(value, '__name__', '')}("):  # as dataclasses write it
        yield name
    for member, found in vars(value).items() if inspect.isclass(value) else ():
        function = found.fget if isinstance(found, property) else getattr(found, "__func__", found)
        if not member.startswith("_") and inspect.isfunction(function) and not function.__doc__:
            yield f"{name}.{member}"


@pytest.mark.parametrize("name", MODULES)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    names = [one for one in public_names(module) if not one.startswith("_")]
    assert names
    assert module.__doc__
    bare = [found for one in names for found in without_docstring(getattr(module, one), f"{name}.{one}")]
    assert not bare


def test_what_has_none_is_found() -> None:
    class Bare:
        def method(self) -> None: ...

        @property
        def value(self) -> int:
            return 1

    assert list(without_docstring(Bare, "Bare")) == ["Bare", "Bare.method", "Bare.value"]
