"""What the schema is made of: every object that a promise can rest on, and the rows that are rules.

`inventory.sql` reads the catalogs. Tables of rules (which artifact may follow in which state) are read row by row: who
changes a row there changes what the append function admits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

import asyncpg

from app.postgres.expressions import settled_expression, settled_query
from app.postgres.sessions import GATEWAY_ROLE

Facts: TypeAlias = dict[str, Any]
# By "<kind> <name>", as in `constraint claims.claims_pkey`.
Inventory: TypeAlias = dict[str, Facts]
# Tables whose rows are rules, with the columns of their keys.
RuleTables: TypeAlias = Mapping[str, Sequence[str]]


def inventory_query() -> str:
    return resources.files("app.postgres").joinpath("inventory.sql").read_text("utf-8")


async def load_inventory(session: asyncpg.Connection[asyncpg.Record], rule_tables: RuleTables) -> Inventory:
    """Everything that stands in schema tga now, as this session's transaction sees it. Changes nothing."""
    async with session.transaction():
        # Expressions name what is on the search path without its schema: here that is pg_catalog alone.
        await session.execute("SET LOCAL search_path = pg_catalog")
        rows = await session.fetch(inventory_query())
        found = {f"{row['kind']} {row['name']}": _known(json.loads(row["facts"])) for row in rows}
        for table, key in rule_tables.items():
            if f"table {table}" in found:
                found |= await _load_rule_rows(session, table, key)
        return found


async def _load_rule_rows(
    session: asyncpg.Connection[asyncpg.Record], table: str, key: Sequence[str]
) -> dict[str, Facts]:
    found: dict[str, Facts] = {}
    try:
        rows = await _read(session, table, role=GATEWAY_ROLE)
    except asyncpg.PostgresError:
        try:
            rows = await _read(session, table, role=None)
        except asyncpg.PostgresError as error:
            return {f"rows {table}": {"of": table, "error": str(error)}}
    for row in rows:
        facts: Facts = json.loads(row["row"])
        name = f"row {table} ({', '.join(str(facts.get(column)) for column in key)})"
        while name in found:  # without its primary key a table can hold a rule twice
            name += " again"
        found[name] = {"of": table, **{column: value for column, value in facts.items() if value is not None}}
    return found


async def _read(session: asyncpg.Connection[asyncpg.Record], table: str, *, role: str | None) -> list[asyncpg.Record]:
    async with session.transaction():
        if role is not None:  # who looks may be its member without inheriting its rights
            await session.execute(f'SET LOCAL ROLE "{role}"')
        rows = await session.fetch(f'SELECT to_jsonb(t) AS row FROM tga."{table}" AS t ORDER BY 1')  # noqa: S608
        if role is not None:
            await session.execute("RESET ROLE")
        return rows


def _known(facts: Facts) -> Facts:
    """Null says nothing: that a table has no options, a column no default."""
    return {name: _SETTLED.get(name, _as_it_is)(value) for name, value in facts.items() if value is not None}


def _as_it_is(value: Any) -> Any:
    return value


_SETTLED: Mapping[str, Callable[[Any], Any]] = {
    "expression": settled_expression,
    "predicate": settled_expression,
    "using": settled_expression,
    "check": settled_expression,
    "query": settled_query,
}
