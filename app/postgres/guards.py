"""Is this PostgreSQL fit to keep the promises? Asked at every start, and by `tga db status`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import asyncpg

from app.core.errors import StoreUnfit
from app.postgres.sessions import GATEWAY_ROLE, LOST, connect, unavailable

SERVER_VERSION_MIN: Final = 140_000
OWNER_ROLE: Final = "tga_owner"
LEDGER_TABLES: Final = (
    "entries",
    "artifacts",
    "execution_checkpoints",
    "claims",
    "claim_effects",
    "dispatch_attempts",
    "erasures",
    "leaves",
    "tree_nodes",
    "tree_heads",
    "migrations",
)
# Table to trigger: what must stand, and fire in every mode of a session.
_NEVER_EMPTIED = (*LEDGER_TABLES, "heads", "tenants", "api_keys", "tree_cursor")
TRIGGERS: Final = {(table, "append_only") for table in _NEVER_EMPTIED} | {
    ("heads", "head_guard"),
    ("artifacts", "erasure_guard"),  # its append_only leaves DELETE to this one
    ("api_keys", "key_guard"),
    ("api_keys", "announced"),  # without it a revoked key would count until it is looked up again
}

_SAFE_SETTINGS = {"fsync": "on", "full_page_writes": "on"}
_TRIGGERS = """
SELECT c.relname AS table_name, t.tgname AS trigger_name, t.tgenabled::text AS enabled
  FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = 'tga'::regnamespace AND NOT t.tgisinternal
"""
_OWNERS = """
SELECT 'table ' || relname AS what, pg_get_userbyid(relowner) AS owner FROM pg_class
 WHERE relnamespace = 'tga'::regnamespace AND relkind IN ('r', 'p', 'v')
UNION ALL
SELECT 'function ' || proname, pg_get_userbyid(proowner) FROM pg_proc WHERE pronamespace = 'tga'::regnamespace
UNION ALL
SELECT 'schema tga', pg_get_userbyid(nspowner) FROM pg_namespace WHERE nspname = 'tga'
"""
_WRITABLE = """
SELECT c.relname AS table_name, p.privilege
  FROM pg_class c CROSS JOIN unnest(ARRAY['INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'TRIGGER']) AS p(privilege)
 WHERE c.relnamespace = 'tga'::regnamespace AND c.relkind IN ('r', 'p') AND has_table_privilege($1, c.oid, p.privilege)
"""
_OPEN_FUNCTIONS = """
SELECT p.proname FROM pg_proc p, aclexplode(coalesce(p.proacl, acldefault('f', p.proowner))) a
 WHERE p.pronamespace = 'tga'::regnamespace AND a.grantee = 0 AND a.privilege_type = 'EXECUTE'
"""


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing that is not as it must be, and what to do about it."""

    what: str
    expected: str
    found: str
    remedy: str


async def find_problems(url: str) -> list[Problem]:
    """Everything about the server and the schema that would let a promise be broken; empty when it is fit."""
    session = await connect(url)
    try:
        problems = await _server_problems(session)
        if await session.fetchval("SELECT to_regclass('tga.entries')") is not None:
            problems += await _schema_problems(session)
        return problems
    except (*LOST, asyncpg.PostgresError) as error:
        raise unavailable(error) from error
    finally:
        await session.close()


async def verify_guards(url: str) -> None:
    """Raise StoreUnfit naming the first problem and how many there are."""
    problems = await find_problems(url)
    if problems:
        first = problems[0]
        more = f" ({len(problems) - 1} more: `tga db status`)" if len(problems) > 1 else ""
        raise StoreUnfit(first.what + more, expected=first.expected, found=first.found, remedy=first.remedy)


async def _server_problems(session: asyncpg.Connection[asyncpg.Record]) -> list[Problem]:
    problems = []
    version = int(await session.fetchval("SELECT current_setting('server_version_num')"))
    if version < SERVER_VERSION_MIN:
        problems.append(Problem("the server is too old", "PostgreSQL 14 or newer", str(version), "Upgrade PostgreSQL."))
    for name, safe in _SAFE_SETTINGS.items():
        found = await session.fetchval("SELECT current_setting($1)", name)
        if found != safe:
            remedy = f"Set {name} = {safe} in postgresql.conf: without it a crash loses what was acknowledged."
            problems.append(Problem(f"the server runs with an unsafe {name}", safe, found, remedy))
    encoding = await session.fetchval("SELECT current_setting('server_encoding')")
    if encoding != "UTF8":
        problems.append(Problem("the database is not UTF-8", "UTF8", encoding, "Create it with ENCODING 'UTF8'."))
    return problems


async def _schema_problems(session: asyncpg.Connection[asyncpg.Record]) -> list[Problem]:
    problems = []
    enabled = {(r["table_name"], r["trigger_name"]): r["enabled"] for r in await session.fetch(_TRIGGERS)}
    for table, trigger in sorted(TRIGGERS):
        found = enabled.get((table, trigger), "missing")
        if found != "A":  # I1: a restore can demote ALWAYS to ordinary, and then a replica session gets past it
            remedy = f"ALTER TABLE tga.{table} ENABLE ALWAYS TRIGGER {trigger}; then `tga verify --all`."
            problems.append(Problem(f"trigger {trigger} of tga.{table} does not always fire", "A", found, remedy))
    for row in await session.fetch(_OWNERS):
        if row["owner"] != OWNER_ROLE:
            remedy = f"ALTER {row['what']} OWNER TO {OWNER_ROLE}"
            problems.append(Problem(f"{row['what']} belongs to another role", OWNER_ROLE, row["owner"], remedy))
    if await session.fetchval("SELECT rolcanlogin OR rolsuper FROM pg_roles WHERE rolname = $1", OWNER_ROLE):
        remedy = f"ALTER ROLE {OWNER_ROLE} NOLOGIN NOSUPERUSER: whoever is the owner can disable the triggers."
        problems.append(Problem(f"{OWNER_ROLE} can log in", "NOLOGIN", "LOGIN", remedy))
    for row in await session.fetch(_WRITABLE, GATEWAY_ROLE):
        remedy = f"REVOKE {row['privilege']} ON tga.{row['table_name']} FROM {GATEWAY_ROLE}, PUBLIC"
        what = f"{GATEWAY_ROLE} may {row['privilege']} on tga.{row['table_name']}"
        problems.append(Problem(what, "SELECT only", str(row["privilege"]), remedy))
    for row in await session.fetch(_OPEN_FUNCTIONS):
        remedy = f"REVOKE EXECUTE ON FUNCTION tga.{row['proname']} FROM PUBLIC"
        problems.append(Problem(f"tga.{row['proname']} is open to everyone", "no grant to PUBLIC", "EXECUTE", remedy))
    return problems
