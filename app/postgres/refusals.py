"""Why PostgreSQL cannot be used: each cause by its own name, with the command that mends it."""

from __future__ import annotations

import asyncio
import re
import socket
from typing import Final
from urllib.parse import parse_qs, unquote, urlsplit

import asyncpg

from app.core.errors import StoreUnavailable

_GRANTS: Final = 'See "Roles and grants" in docs/operations.md.'
_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
# The first that fits; asyncpg's classes go from the particular to the general. {user}, {database} and {where} are the
# URL's. What the server itself said always stands beside it.
_CAUSES: Final[tuple[tuple[type[BaseException], str, str], ...]] = (
    (
        asyncpg.InvalidPasswordError,
        "the server refuses the password of {user}",
        "Put the right one into TGA_DATABASE_URL, or set it as an administrator: ALTER ROLE {user} PASSWORD '…'.",
    ),
    (
        asyncpg.InvalidAuthorizationSpecificationError,
        "the server does not let {user} in",
        "If there is no such role, as an administrator: CREATE ROLE {user} LOGIN PASSWORD '…'; GRANT tga_gateway TO "
        f"{{user}}. If there is, pg_hba.conf must admit it from here. {_GRANTS}",
    ),
    (
        asyncpg.InvalidCatalogNameError,
        "the server has no database {database}",
        "Correct its name in TGA_DATABASE_URL, or as an administrator: CREATE DATABASE {database}; then run "
        "`tga db migrate`.",
    ),
    (
        asyncpg.InsufficientPrivilegeError,
        "{user} may not use the ledger in {database}",
        f"As an administrator: GRANT tga_gateway TO {{user}}; ALTER ROLE {{user}} INHERIT. {_GRANTS}",
    ),
    (
        asyncpg.InvalidParameterValueError,
        "the server lacks the gateway's role, or refuses a setting of its sessions",
        f"Run `tga db migrate` once as an administrator: it makes the roles. {_GRANTS}",
    ),
    (
        asyncpg.CannotConnectNowError,
        "the server at {where} is starting, recovering or stopping",
        "Wait until it takes connections; its own log says what it does.",
    ),
    (
        asyncpg.TooManyConnectionsError,
        "all connections of the server at {where} are taken",
        "Raise max_connections there (a gateway takes up to 16), or end sessions that nobody needs.",
    ),
    (
        socket.gaierror,
        "the host in TGA_DATABASE_URL has no address: {where}",
        "Correct the host's name in TGA_DATABASE_URL, or the name service of this machine.",
    ),
    (
        ConnectionRefusedError,
        "no server listens at {where}",
        "Start PostgreSQL there, or correct host and port in TGA_DATABASE_URL.",
    ),
    (
        FileNotFoundError,
        "there is no socket of a server at {where}",
        "Start PostgreSQL there, or correct host and port in TGA_DATABASE_URL.",
    ),
    (
        asyncio.TimeoutError,
        "no answer in time from {where}",
        "Look for a firewall between here and there, and whether the server is overloaded.",
    ),
)


def unavailable(error: BaseException, url: str | None = None) -> StoreUnavailable:
    """What this error means for who wanted to use the server that the URL names."""
    found = f"{type(error).__name__}: {error}"
    if isinstance(error, (ValueError, asyncpg.ClientConfigurationError)) and url is not None:
        return StoreUnavailable(
            "TGA_DATABASE_URL is no address of a PostgreSQL database",
            expected="postgresql://user:password@host:port/database",
            found=type(error).__name__,  # its words may quote the password
            remedy="Correct TGA_DATABASE_URL, or unset it to use the embedded server.",
        )
    names = _names_in(url)
    for kind, what, remedy in _CAUSES:
        if isinstance(error, kind):
            return StoreUnavailable(what.format(**names), found=found, remedy=remedy.format(**names))
    return StoreUnavailable("PostgreSQL did not answer as it should", found=found)


def _names_in(url: str | None) -> dict[str, str]:
    try:
        parts = urlsplit(url or "")
        user, database = unquote(parts.username or ""), unquote(parts.path.lstrip("/"))
    except ValueError:
        user = database = ""
    return {
        "user": _quoted(user) or "the login",
        "database": _quoted(database) or "the database",
        "where": shown_url(url or ""),
    }


def _quoted(name: str) -> str:
    """As SQL wants it, so that a remedy can be used as it is printed."""
    return name if not name or _PLAIN.fullmatch(name) else '"' + name.replace('"', '""') + '"'


def shown_url(url: str) -> str:
    """Where a URL leads to, and as whom: nothing of it that could be secret."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or next(iter(parse_qs(parts.query).get("host", [])), "") or "the default socket"
        port = f":{parts.port}" if parts.port else ""
    except ValueError:
        return "TGA_DATABASE_URL"
    user = f"{unquote(parts.username)}@" if parts.username else ""
    return f"{user}{host}{port}{unquote(parts.path)}"
