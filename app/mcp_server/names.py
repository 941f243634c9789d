"""Names of tools as MCP clients know them: `server__tool`, within what common clients take.

| path            | name of tool T of server S                                             |
|-----------------|------------------------------------------------------------------------|
| `/mcp`          | `S__T`                                                                 |
| `/mcp/S`        | `T`: what the server itself calls it                                   |

A name that does not fit `^[a-zA-Z0-9_-]{1,64}$`, or that could be read as another tool's (the server has `__` in its
name or ends in `_`, or the tool begins with `_`), gets a short form: what fits of it, `_`, and 10 hex digits of a
SHA-256 over the exact pair. So does one that ends like a short form. Two tools never share a name: the first kind can
be split in one way only, the second differs in its digits, and neither looks like the other; should two digits agree
all the same, the later one in the order of the exact names is left out.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Final

from app.core.limits import MCP_NAME_CHARS_MAX

SEPARATOR: Final = "__"
OWN_SERVER: Final = "tga"  # what the gateway offers itself: no server of a configuration is shown under this name
_FITS: Final = re.compile(rf"[a-zA-Z0-9_-]{{1,{MCP_NAME_CHARS_MAX}}}")
_SHORT: Final = re.compile(r".*_[0-9a-f]{10}", re.DOTALL)
_DIGITS: Final = 10


def name_of(server: str | None, tool: str) -> str:
    """The name of the tool; without a server, as it is known where there is only one."""
    if server is None:
        return tool if _FITS.fullmatch(tool) and not _SHORT.fullmatch(tool) else _short(tool, "", tool)
    plain = f"{server}{SEPARATOR}{tool}"
    is_ambiguous = SEPARATOR in server or server.endswith("_") or tool.startswith("_") or server == OWN_SERVER
    if is_ambiguous or not _FITS.fullmatch(plain) or _SHORT.fullmatch(plain):
        return _short(plain, server, tool)
    return plain


def by_name(tools: Iterable[tuple[str | None, str]]) -> Mapping[str, tuple[str | None, str]]:
    """Every tool under its name. The order of `tools` does not matter."""
    named: dict[str, tuple[str | None, str]] = {}
    for server, tool in sorted(set(tools), key=lambda pair: (pair[0] or "", pair[1])):
        named.setdefault(name_of(server, tool), (server, tool))
    return named


def _short(plain: str, server: str, tool: str) -> str:
    digits = hashlib.sha256(f"{server}\n{tool}".encode()).hexdigest()[:_DIGITS]
    fitting = re.sub(r"[^a-zA-Z0-9_-]", "_", plain)[: MCP_NAME_CHARS_MAX - _DIGITS - 1]
    return f"{fitting}_{digits}"
