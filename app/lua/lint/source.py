"""A file of Lua as text and syntax tree. Nothing of it runs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import tree_sitter_lua
from tree_sitter import Language, Node, Parser

from app.core.limits import LUA_SOURCE_BYTES_MAX
from tga_sdk.lint.source import ALL, LintError

_IGNORE: Final = re.compile(r"--+\s*tga:\s*ignore(?:\[([^\]]*)\])?", re.IGNORECASE)
_SHOWN_CHARS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Source:
    """`ignored`: by line, the codes that a comment there silences, or ALL."""

    name: str
    root: Node
    ignored: Mapping[int, frozenset[str]]


@cache
def _language() -> Language:
    return Language(tree_sitter_lua.language())


def read_source(path: Path) -> Source:
    """The file at this path; LintError when it is not Lua, or cannot be read."""
    try:
        with path.open("rb") as file:
            data = file.read(LUA_SOURCE_BYTES_MAX + 1)
    except (OSError, ValueError) as error:
        said = getattr(error, "strerror", None) or str(error)
        raise LintError(f"{path}: expected a file of Lua that can be read, found: {said}") from None
    return parsed(data, str(path))


def parsed(data: bytes, name: str) -> Source:
    """The text as syntax tree; LintError says the line at which it is not Lua."""
    if len(data) > LUA_SOURCE_BYTES_MAX:
        raise LintError(f"{name}: expected at most {LUA_SOURCE_BYTES_MAX:,} bytes of Lua, found more")
    try:
        data.decode()
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise LintError(f"{name}:{line}: expected text in UTF-8, found byte {data[error.start]:#04x}") from None
    tree = Parser(_language()).parse(data)
    root = tree.root_node
    if root.has_error:
        line, found = _first_error(root)
        raise LintError(f"{name}:{line}: expected Lua 5.4, found: {found}")
    return Source(name, root, dict(_ignored(root)))


def text_of(node: Node) -> str:
    return (node.text or b"").decode()


def line_of(node: Node) -> int:
    return node.start_point.row + 1


def within(node: Node) -> Iterator[Node]:
    """The node and all below it, in the order of the text; a stack, as programs nest deeper than Python recurses."""
    waiting = [node]
    while waiting:
        found = waiting.pop()
        yield found
        waiting.extend(reversed(found.children))


def _first_error(root: Node) -> tuple[int, str]:
    for node in within(root):
        if node.is_missing:
            return line_of(node), f"a missing {node.type}"
        if node.type == "ERROR":
            first = next((one for one in within(node) if not one.children and one.type != "comment"), node)
            shown = " ".join(text_of(first).split())[:_SHOWN_CHARS_MAX] or "nothing"
            return line_of(first), f"something that does not belong there, from `{shown}` on"
    return line_of(root), "something that does not belong there"


def _ignored(root: Node) -> Iterator[tuple[int, frozenset[str]]]:
    for node in within(root):
        match = _IGNORE.search(text_of(node)) if node.type == "comment" else None
        if match:
            codes = match[1]
            named = ALL if codes is None else frozenset(code.strip().upper() for code in codes.split(","))
            yield line_of(node), named
