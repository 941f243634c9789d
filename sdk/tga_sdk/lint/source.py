"""A file of Python as text and syntax tree. It is never imported, and nothing of it runs."""

from __future__ import annotations

import ast
import io
import re
import tokenize
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from tga_sdk.errors import TgaError

SOURCE_BYTES_MAX: Final = 4 * 1024 * 1024
_IGNORE: Final = re.compile(r"#\s*tga:\s*ignore(?:\[([^\]]*)\])?", re.IGNORECASE)
ALL: Final = frozenset({"*"})


class LintError(TgaError):
    """A file that cannot be read as Python, so nothing can be said of it."""

    code = "LINT_SOURCE_INVALID"


@dataclass(frozen=True, slots=True)
class Source:
    """`ignored`: by line, the codes that a comment there silences, or ALL."""

    name: str
    tree: ast.Module
    ignored: Mapping[int, frozenset[str]]


def read_source(path: Path) -> Source:
    """The file at this path; LintError when it is not Python, or cannot be read."""
    if path.suffix == ".lua":
        raise LintError(f"{path}: expected a file of Python, found Lua, which the gateway's `tga lint` reads")
    try:
        with path.open("rb") as file:
            data = file.read(SOURCE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise LintError(f"{path}: expected a file of Python that can be read, found: {said}") from None
    return parsed(data, str(path))


def parsed(data: bytes, name: str) -> Source:
    """The text as syntax tree; LintError says the line at which it is not Python."""
    if len(data) > SOURCE_BYTES_MAX:
        raise LintError(f"{name}: expected at most {SOURCE_BYTES_MAX:,} bytes of Python, found more")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes and the like are no matter of this
            tree = ast.parse(data, filename=name)
        return Source(name, tree, _ignored(data))
    except SyntaxError as error:
        _refuse(name, error.lineno, error.msg)
    except UnicodeDecodeError as error:
        _refuse(name, None, f"its text is not {error.encoding}: byte {error.start} is {error.object[error.start]:#04x}")
    except (ValueError, LookupError) as error:
        _refuse(name, None, str(error))
    except (RecursionError, MemoryError):
        _refuse(name, None, "it is nested too deeply")


def _refuse(name: str, line: int | None, found: str) -> NoReturn:
    where = name if line is None else f"{name}:{line}"
    raise LintError(f"{where}: expected Python of version 3.11 or later, found: {found}") from None


def _ignored(data: bytes) -> dict[int, frozenset[str]]:
    """What comments silence. Only comments count, not strings that look like them."""
    found: dict[int, frozenset[str]] = {}
    if b"tga" not in data.lower():
        return found
    try:
        for token in tokenize.tokenize(io.BytesIO(data).readline):
            match = _IGNORE.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                codes = match[1]
                named = ALL if codes is None else frozenset(code.strip().upper() for code in codes.split(","))
                found[token.start[0]] = found.get(token.start[0], frozenset()) | named
    except tokenize.TokenError:
        pass  # the parser has accepted it; what the tokenizer read before stands
    return found
