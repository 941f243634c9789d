"""The text of the language: its parts, in their order, as the one chunk that a child loads."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Final

PARTS: Final = ("values", "state", "language", "operations")


@cache
def language_text() -> str:
    """Each part is a function of `host` and of `lang`, which they share; the last one's result is the main function."""
    here = Path(__file__).resolve().parent
    bodies = [f"(function(...)\n{(here / f'{name}.lua').read_text()}\nend)(host, lang)" for name in PARTS]
    return "\n".join(
        ["local host = ...", "local lang = {}", *(f"{body};" for body in bodies[:-1]), f"return {bodies[-1]}"]
    )
