"""Whatever a promise rests on is dropped and changed once, and the guards name it.

What there is to change comes from the catalog, not from a list: a new table, function or rule is dropped here without
a word about it. How an object of a kind is changed is said below for each fact that the inventory has; a fact that
nobody changes fails the test. Each change is made by a superuser in a transaction that is rolled back, with the guards
asked inside it. TGA_SOAK=1 changes every fact of every object instead of each fact once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Iterator
from typing import Any, TypeAlias

import asyncpg
import pytest

from app.core.errors import MigrationRefused, StoreUnfit
from app.postgres.comparison import Problem, expected_schema
from app.postgres.database import Database
from app.postgres.guards import find_problems, schema_problems, verify_guards
from app.postgres.inventory import Facts, inventory_query, load_inventory
from app.postgres.migrate import load_status, migrate
from tests import sampling
from tests.conftest import Admin, Server

IS_SOAK = os.environ.get("TGA_SOAK") == "1"
Statements: TypeAlias = list[str]


def on_table(facts: Facts) -> str:
    return f"ALTER TABLE tga.{facts['of']}"


def drop(kind: str, name: str, facts: Facts) -> str:
    """How an attacker would remove it."""
    last = name.rpartition(".")[2]
    match kind:
        case "table":
            return f"DROP TABLE tga.{name} CASCADE"
        case "view":
            return f"DROP VIEW tga.{name} CASCADE"
        case "sequence":
            return f"ALTER SEQUENCE tga.{name} RENAME TO moved"
        case "column" if "position" in facts:  # of a type, or of a view
            return f"ALTER TABLE tga.{facts['of']} RENAME COLUMN {last} TO moved"
        case "column":
            return f"{on_table(facts)} DROP COLUMN {last} CASCADE"
        case "constraint":
            return f"{on_table(facts)} DROP CONSTRAINT {last} CASCADE"
        case "index":
            return f"ALTER INDEX tga.{name} RENAME TO moved"  # also where a constraint has it
        case "function":
            return f"DROP FUNCTION tga.{name} CASCADE"
        case "trigger":
            return f"DROP TRIGGER {last} ON tga.{facts['of']}"
        case "type":
            return f"DROP TYPE tga.{name} CASCADE"
        case "role":
            return f"ALTER ROLE {name} RENAME TO moved"
        case "row":
            return (
                f"SET LOCAL session_replication_role = replica; DELETE FROM tga.{facts['of']} t WHERE {is_row(facts)}"
            )
    raise NotImplementedError(kind)


def is_row(facts: Facts) -> str:
    row = json.dumps({name: value for name, value in facts.items() if name != "of"})
    return f"jsonb_strip_nulls(to_jsonb(t)) = '{row}'"


def changes(kind: str, name: str, facts: Facts) -> Iterator[tuple[str, str]]:
    """(fact, statement): ways to change each fact of an object. Some ways do not go for some objects."""
    last, table = name.rpartition(".")[2], facts.get("of")
    if kind in ("table", "sequence", "view", "function", "type", "schema"):
        on = f"{kind.upper()} {name if kind == 'schema' else f'tga.{name}'}"
        yield "owner", f"ALTER {on} OWNER TO postgres"
        privilege = {"function": "EXECUTE", "type": "USAGE", "schema": "CREATE", "sequence": "UPDATE"}.get(
            kind, "INSERT"
        )
        of_table = on.replace("VIEW ", "TABLE ")
        for to in ("PUBLIC", "tga_gateway"):
            if f"{privilege} TO {to}" not in facts["grants"]:
                yield "grants", f"GRANT {privilege} ON {of_table} TO {to}"
            if any(grant.endswith(f" TO {to}") for grant in facts["grants"]):
                yield "grants", f"REVOKE ALL ON {of_table} FROM {to}"
    match kind:
        case "table":
            yield (
                "relation",
                (
                    f"CREATE TABLE tga.moved (LIKE tga.{name}); DROP TABLE tga.{name} CASCADE;"
                    f"DO $$ BEGIN EXECUTE format('CREATE TABLE tga.{name} (LIKE tga.moved) PARTITION BY LIST (%I)',"
                    "(SELECT attname FROM pg_attribute WHERE attrelid = 'tga.moved'::regclass AND attnum = 1)); END $$;"
                    "DROP TABLE tga.moved"
                ),
            )
            yield "persistence", f"ALTER TABLE tga.{name} SET UNLOGGED"
            yield "row security", f"ALTER TABLE tga.{name} ENABLE ROW LEVEL SECURITY"
            yield "row security", f"ALTER TABLE tga.{name} FORCE ROW LEVEL SECURITY"
            yield "options", f"ALTER TABLE tga.{name} SET (fillfactor = 33)"
            yield "children", f"CREATE TABLE public.child () INHERITS (tga.{name})"
            yield "parents", f"CREATE TABLE public.parent (); ALTER TABLE tga.{name} INHERIT public.parent"
        case "sequence":
            yield "persistence", f"ALTER SEQUENCE tga.{name} SET UNLOGGED"
            # Where a column has it, it follows the table.
            yield "owner", f"UPDATE pg_class SET relowner = 10 WHERE oid = 'tga.{name}'::regclass"
            yield "persistence", f"UPDATE pg_class SET relpersistence = 'u' WHERE oid = 'tga.{name}'::regclass"
        case "view":
            for fact in ("query", "reads"):
                yield fact, f"ALTER VIEW tga.{name} RENAME TO moved; CREATE VIEW tga.{name} AS SELECT * FROM tga.moved"
            yield "options", f"ALTER VIEW tga.{name} SET (security_barrier = true)"
        case "column":
            for to in {"text", "bigint", "jsonb", "character varying(7)"} - {facts["type"]}:
                yield "type", f"{on_table(facts)} ALTER COLUMN {last} TYPE {to} USING NULL"
            yield "not null", f"{on_table(facts)} ALTER COLUMN {last} {'DROP' if facts['not null'] else 'SET'} NOT NULL"
            if "default" in facts:
                yield "default", f"{on_table(facts)} ALTER COLUMN {last} DROP DEFAULT"
            for value in {"'x'", "0", "false", "now()"} - {facts.get("default")}:
                yield "default", f"{on_table(facts)} ALTER COLUMN {last} SET DEFAULT {value}"
            yield "identity", f"{on_table(facts)} ALTER COLUMN {last} DROP IDENTITY"
            yield (
                "generated",
                (
                    f"{on_table(facts)} DROP COLUMN {last} CASCADE;"
                    f"{on_table(facts)} ADD COLUMN {last} {facts['type']} GENERATED ALWAYS AS (NULL) STORED"
                ),
            )
            yield "collation", f'{on_table(facts)} ALTER COLUMN {last} TYPE text COLLATE "POSIX"'
            yield "grants", f"GRANT UPDATE ({last}) ON tga.{table} TO tga_gateway"
            yield "position", f"ALTER TYPE tga.{table} DROP ATTRIBUTE {last}, ADD ATTRIBUTE {last} {facts['type']}"
        case "constraint":
            again = f"{on_table(facts)} DROP CONSTRAINT {last} CASCADE; {on_table(facts)} ADD CONSTRAINT {last}"
            columns = ", ".join(facts.get("columns", ()))
            of_catalog = (
                f"UPDATE pg_constraint SET {{}} WHERE conname = '{last}' AND conrelid = 'tga.{table}'::regclass"
            )
            yield "type", f"{again} CHECK (true)"
            if facts["type"] != "UNIQUE" or len(facts["columns"]) > 1:
                yield "columns", f"{again} UNIQUE ({facts.get('columns', ['none'])[0]})"
            yield "expression", f"{again} CHECK (true)"
            yield "expression", f"{again} CHECK ({facts.get('expression')} OR true)"
            yield "valid", f"{again} CHECK ({facts.get('expression')}) NOT VALID"
            yield "no inherit", f"{again} CHECK ({facts.get('expression')}) NO INHERIT"
            yield "references", f"{again} FOREIGN KEY ({columns}) REFERENCES tga.moved"
            if "references" in facts:
                yield "references", of_catalog.format("confkey = '{2}'")
            yield "actions", f"{again} FOREIGN KEY ({columns}) REFERENCES {facts.get('references')} ON DELETE CASCADE"
            yield "deferrable", f"{on_table(facts)} ALTER CONSTRAINT {last} DEFERRABLE"
            yield "deferred", f"{on_table(facts)} ALTER CONSTRAINT {last} DEFERRABLE INITIALLY DEFERRED"
            yield "enforced", f"{on_table(facts)} ALTER CONSTRAINT {last} NOT ENFORCED"
            yield "inherited", of_catalog.format("conislocal = false")
            if "triggers" in facts:
                yield "triggers", f"{on_table(facts)} DISABLE TRIGGER ALL"
        case "index":
            of_catalog = f"UPDATE pg_index SET {{}} WHERE indexrelid = 'tga.{name}'::regclass"
            for fact, column in (
                ("unique", "indisunique"),
                ("primary", "indisprimary"),
                ("exclusion", "indisexclusion"),
            ):
                yield fact, of_catalog.format(f"{column} = NOT {column}")
            yield "immediate", of_catalog.format("indimmediate = false")
            yield "nulls not distinct", of_catalog.format("indnullsnotdistinct = true")
            for column in ("indisvalid", "indisready", "indislive"):
                yield "valid", of_catalog.format(f"{column} = false")
            again = f"DROP INDEX tga.{name}; CREATE INDEX {name} ON tga.{table}"
            first = str(facts["columns"][0]).split()[0]
            yield "method", f"{again} USING hash ({first})"
            yield "columns", f"{again} ({first} DESC NULLS FIRST)"
            yield "predicate", f"{again} ({first}) WHERE false"
            yield "included", f"{again} ({first}) INCLUDE ({first})"
            yield "expressions", f"{again} (({first} IS NULL))"
            yield "of", f"DROP INDEX tga.{name}; CREATE INDEX {name} ON tga.tenants (created_at)"
        case "function":
            of_catalog = f"UPDATE pg_proc SET {{}} WHERE oid = 'tga.{name}'::regprocedure"
            yield "body", of_catalog.format("prosrc = prosrc || ' '")
            if " " in facts["arguments"]:  # they have names
                yield "arguments", of_catalog.format("proargnames[1] = 'another'")
            yield "result", of_catalog.format("prorettype = 'json'::regtype, proretset = false")
            yield "kind", of_catalog.format("prokind = 'w'")
            yield "language", of_catalog.format("prolang = (SELECT oid FROM pg_language WHERE lanname = 'internal')")
            yield "support", of_catalog.format("prosupport = 'generate_series_int4_support'::regproc")
            yield (
                "parsed",
                (
                    "CREATE OR REPLACE FUNCTION tga.outbox_done(ids bigint[]) RETURNS void LANGUAGE sql"
                    " SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp BEGIN ATOMIC SELECT 1; END"
                ),
            )
            how = "INVOKER" if facts["security"] == "definer" else "DEFINER"
            yield "security", f"ALTER FUNCTION tga.{name} SECURITY {how}"
            if "settings" in facts:
                yield "settings", f"ALTER FUNCTION tga.{name} RESET ALL"
            yield "settings", f"ALTER FUNCTION tga.{name} SET search_path = public, pg_catalog, tga"
            yield "volatility", f"ALTER FUNCTION tga.{name} {'VOLATILE' if facts['volatility'] != 'v' else 'STABLE'}"
            yield "parallel", f"ALTER FUNCTION tga.{name} PARALLEL RESTRICTED"
            yield "strict", f"ALTER FUNCTION tga.{name} STRICT"
            yield "leakproof", f"ALTER FUNCTION tga.{name} LEAKPROOF"
        case "trigger":
            of_catalog = f"UPDATE pg_trigger SET {{}} WHERE tgname = '{last}' AND tgrelid = 'tga.{table}'::regclass"
            for how in ("DISABLE", "ENABLE", "ENABLE REPLICA"):
                yield "enabled", f"{on_table(facts)} {how} TRIGGER {last}"
            yield "function", of_catalog.format("tgfoid = 'suppress_redundant_updates_trigger'::regproc")
            yield "fires", of_catalog.format("tgtype = (tgtype::integer # 1)::smallint")
            yield "fires", of_catalog.format("tgtype = (tgtype::integer # 32)::smallint")
            yield "columns", of_catalog.format("tgattr = '1'::int2vector")
            yield (
                "when",
                (
                    f"DROP TRIGGER {last} ON tga.{table}; CREATE TRIGGER {last} {facts['fires'].split(' FOR ')[0]} ON"
                    f" tga.{table} FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION {facts['function']}"
                ),
            )
            yield (
                "when",
                (
                    f"DROP TRIGGER {last} ON tga.{table}; CREATE TRIGGER {last} BEFORE UPDATE ON"
                    f" tga.{table} FOR EACH STATEMENT WHEN (false) EXECUTE FUNCTION {facts['function']}"
                ),
            )
            yield "arguments", of_catalog.format(r"tgnargs = 1, tgargs = '\x6100'")
            yield "deferrable", of_catalog.format("tgdeferrable = true")
            yield "deferred", of_catalog.format("tginitdeferred = true")
            yield "transition tables", of_catalog.format("tgnewtable = 'fresh'")
        case "type":
            yield "not null", f"UPDATE pg_type SET typnotnull = true WHERE oid = 'tga.{name}'::regtype"
            yield "type", f"UPDATE pg_type SET typtype = 'm' WHERE oid = 'tga.{name}'::regtype"
        case "role":
            for fact, option in (
                ("superuser", "SUPERUSER"),
                ("creates roles", "CREATEROLE"),
                ("creates databases", "CREATEDB"),
                ("replication", "REPLICATION"),
                ("bypasses row security", "BYPASSRLS"),
                ("can log in", "LOGIN"),
            ):
                if fact in facts:
                    yield fact, f"ALTER ROLE {name} {option}"
            yield "member of", f"GRANT pg_write_all_data TO {name}"
        case "row":
            for column, value in facts.items():
                if column != "of":
                    to = f"NOT {column}" if isinstance(value, bool) else f"{column} || 'x'"
                    to = f"{column} || '{{x}}'::text[]" if isinstance(value, list) else to
                    yield (
                        "a column",
                        (
                            f"SET LOCAL session_replication_role = replica;"
                            f"UPDATE tga.{table} t SET {column} = {to} WHERE {is_row(facts)}"
                        ),
                    )


# Facts that only objects of other kinds than those in today's schema have.
NOT_HERE = {
    *(("type", fact) for fact in ("labels", "base", "default", "checks")),
    *((kind, fact) for kind in ("table", "sequence") for fact in ("query", "reads")),
    *(("sequence", fact) for fact in ("row security", "options", "parents", "children", "relation")),
    *(("view", fact) for fact in ("row security", "persistence", "parents", "children", "relation")),
    # Another table's name is another object.
    *((kind, "of") for kind in ("column", "constraint", "trigger")),
}


# What the inventory must know, whatever else it does: a fact that was left out would be changed by no test.
NEEDED = {
    *(("schema", fact) for fact in ("owner", "grants")),
    *(("table", fact) for fact in ("owner", "grants", "persistence", "row security", "children", "parents")),
    *(("column", fact) for fact in ("type", "not null", "default", "collation", "generated", "grants")),
    *(
        ("constraint", fact)
        for fact in ("type", "columns", "expression", "references", "valid", "enforced", "triggers")
    ),
    *(("index", fact) for fact in ("of", "unique", "valid", "columns", "predicate")),
    *(("function", fact) for fact in ("body", "security", "settings", "owner", "grants", "language", "result")),
    *(("trigger", fact) for fact in ("enabled", "function", "fires", "when", "columns")),
    *(("role", fact) for fact in ("superuser", "can log in", "member of")),
}


async def problems_after(admin: Admin, statement: str) -> list[Problem] | None:
    """What the guards find with this done, and then undone; None if it cannot be done."""
    transaction = admin.transaction()
    await transaction.start()
    try:
        try:
            await admin.execute(statement)
        except asyncpg.PostgresError:
            return None
        return await schema_problems(admin)
    finally:
        await transaction.rollback()


def named(problems: list[Problem], kind: str, name: str, facts: Facts) -> list[Problem]:
    """Those that name the object, in the words of a finding."""
    last = name.partition("(")[0].rpartition(".")[2]
    whole = {
        "row": f"row {name.partition(' ')[2]} of tga.{facts.get('of')}",
        "role": f"role {name}",
        "schema": f"schema {name}",
    }.get(kind, f"{kind} {last} of tga.{facts['of']}" if "of" in facts else f"{kind} tga.{last}")
    return [problem for problem in problems if problem.what.startswith(whole)]


async def test_what_stands_in_a_migrated_database_is_what_was_generated(admin: Admin) -> None:
    """On every PostgreSQL: the file was made on one of them. `make generate` makes it anew."""
    known = expected_schema()
    found = await load_inventory(admin, known.rule_tables)
    assert {key: facts for key, facts in found.items() if facts != known.objects.get(key)} == {}
    assert known.objects.keys() == found.keys()
    assert {"transitions", "artifact_rules", "stream_kinds"} <= known.rule_tables.keys()
    assert await schema_problems(admin) == []


async def test_every_object_that_is_dropped_is_named(server: Server, admin: Admin) -> None:
    known = expected_schema()
    inventory = await load_inventory(admin, known.rule_tables)
    # All of them on one server, some on the others; `make test` takes some everywhere.
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    count = sampling.share(len(inventory), 60) if server.name == "embedded" else 60
    unnoticed, is_loud = [], 0
    for key in random.Random(seed).sample(sorted(inventory), count):
        kind, _, name = key.partition(" ")
        facts = inventory[key]
        if kind == "schema":
            continue  # without it there is no ledger: a new database looks the same
        problems = await problems_after(admin, drop(kind, name, facts))
        assert problems is not None, f"{key} cannot be dropped: say how"
        about = named(problems, kind, name, facts)
        if not about or not all(p.remedy and p.expected and p.found for p in about):
            unnoticed.append(key)
        is_loud += any(problem.refuses for problem in about)
    assert unnoticed == []
    assert is_loud > 0.8 * count
    assert await schema_problems(admin) == [], "everything was undone"


async def test_every_fact_that_is_changed_is_named(admin: Admin) -> None:
    known = expected_schema()
    await admin.execute("SET search_path = pg_catalog")
    rows = await admin.fetch(inventory_query())
    facts_of_kind = {(row["kind"], fact) for row in rows for fact in json.loads(row["facts"])} | {("row", "a column")}
    assert NEEDED - facts_of_kind == set()
    await admin.execute("RESET search_path")
    unnoticed, noticed = [], set()
    for key, facts in (await load_inventory(admin, known.rule_tables)).items():
        kind, _, name = key.partition(" ")
        for fact, statement in changes(kind, name, facts):
            if (kind, fact) in noticed and not IS_SOAK:
                continue
            problems = await problems_after(admin, statement)
            about = named(problems or [], kind, name, facts)
            if any(fact == "a column" or problem.what.endswith(f": {fact}") for problem in about):
                noticed.add((kind, fact))
            elif problems == []:
                unnoticed.append(statement)
    assert unnoticed == []
    version = int(await admin.fetchval("SELECT current_setting('server_version_num')"))
    unknown_here = set(NOT_HERE)
    unknown_here |= {("constraint", "enforced")} if version < 180_000 else set()
    unknown_here |= {("index", "nulls not distinct")} if version < 150_000 else set()
    assert facts_of_kind - noticed - unknown_here == set(), "facts that nobody changed"
    assert await schema_problems(admin) == []


SUPERFLUOUS = {
    "trigger t of tga.links": (
        "CREATE TRIGGER t BEFORE INSERT ON tga.links FOR EACH ROW EXECUTE FUNCTION suppress_redundant_updates_trigger()"
    ),
    "rule r of tga.links": "CREATE RULE r AS ON INSERT TO tga.links DO INSTEAD NOTHING",
    "policy p of tga.links": "CREATE POLICY p ON tga.links USING (false)",
    "constraint c of tga.heads": "ALTER TABLE tga.heads ADD CONSTRAINT c CHECK (false) NOT VALID",
    "column extra of tga.heads": "ALTER TABLE tga.heads ADD COLUMN extra text",
    "index u of tga.heads": "CREATE UNIQUE INDEX u ON tga.heads (owner)",
    "index e of tga.heads": "CREATE INDEX e ON tga.heads ((stream || 'x'))",
    "function tga.append": "CREATE FUNCTION tga.append(integer) RETURNS void LANGUAGE sql AS ''",
    "type tga.mood": "CREATE TYPE tga.mood AS ENUM ('good')",
    "other operator": (
        "CREATE FUNCTION pg_temp.never(text, text) RETURNS boolean LANGUAGE sql AS 'SELECT false';"
        "CREATE OPERATOR tga.= (LEFTARG = text, RIGHTARG = text, FUNCTION = pg_temp.never)"
    ),
    "row (trace, PENDING, tool_effect, SUCCESS, False) of tga.transitions": (
        "INSERT INTO tga.transitions VALUES ('trace', 'PENDING', 'tool_effect', 'SUCCESS', 'COMPLETED', false)"
    ),
    "setting session_replication_role of tga_gateway": "ALTER ROLE tga_gateway SET session_replication_role = replica",
    "table tga.links was changed: children": "CREATE TABLE public.child () INHERITS (tga.links)",
    "table tga.links was changed: grants": "GRANT DELETE ON tga.links TO tga_gateway",
    "function tga.erase was changed: grants": "GRANT EXECUTE ON FUNCTION tga.erase TO pg_monitor",
    "schema tga was changed: grants": "GRANT CREATE ON SCHEMA tga TO tga_gateway",
    "role tga_gateway was changed: member of": "GRANT tga_owner TO tga_gateway",
}
HARMLESS = {
    "index plain of tga.heads": "CREATE INDEX plain ON tga.heads (owner)",
    "index heads_tenant of tga.heads is missing": "DROP INDEX tga.heads_tenant",
    "table tga.heads was changed: options": "ALTER TABLE tga.heads SET (autovacuum_vacuum_scale_factor = 0.01)",
    "table tga.links was changed: grants": "GRANT SELECT ON tga.links TO pg_monitor",
    "schema tga was changed: grants": "GRANT USAGE ON SCHEMA tga TO pg_monitor",
    "table tga.notes": "CREATE TABLE tga.notes (id integer PRIMARY KEY CHECK (id > 0))",
    "view tga.report": "CREATE VIEW tga.report AS SELECT count(*) FROM tga.links",
    "other statistics object": "CREATE STATISTICS tga.s ON stream, state FROM tga.heads",
    "setting search_path": "ALTER ROLE tga_gateway SET search_path = public",
    "pg_monitor may act as tga_owner": "GRANT tga_owner TO pg_monitor",
    "row (counter) of tga.stream_kinds": (
        "INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state)"
        " VALUES ('counter', 'counter_id', 'test/v1/counter_entry', 'COUNTING')"
    ),
}


@pytest.mark.parametrize("what", SUPERFLUOUS)
async def test_what_does_not_belong_there_is_named_and_refuses_a_start(admin: Admin, what: str) -> None:
    problems = await problems_after(admin, SUPERFLUOUS[what])
    assert problems is not None
    about = [problem for problem in problems if problem.what.startswith(what)]
    assert about, problems
    assert any(problem.refuses for problem in about)
    assert all(problem.remedy and problem.found for problem in about)


@pytest.mark.parametrize("what", HARMLESS)
async def test_what_breaks_no_promise_is_named_and_refuses_nothing(admin: Admin, what: str) -> None:
    problems = await problems_after(admin, HARMLESS[what])
    assert problems is not None
    assert any(problem.what.startswith(what) for problem in problems), problems
    assert not any(problem.refuses for problem in problems)


async def test_two_rules_under_one_key_are_both_seen(admin: Admin) -> None:
    twice = "ALTER TABLE tga.transitions DROP CONSTRAINT transitions_pkey;"
    twice += "INSERT INTO tga.transitions TABLE tga.transitions"
    problems = await problems_after(admin, twice) or []
    assert sum("again" in problem.what and problem.refuses for problem in problems) == await admin.fetchval(
        "SELECT count(*) FROM tga.transitions"
    )


async def test_a_start_is_refused_with_the_first_and_the_number_of_the_others(database: Database, admin: Admin) -> None:
    await verify_guards(database.admin_url)
    await admin.execute("ALTER TABLE tga.links DROP CONSTRAINT links_pkey")
    with pytest.raises(StoreUnfit, match=r"constraint links_pkey of tga.links is missing .1 more") as caught:
        await verify_guards(database.admin_url)
    assert caught.value.code == "STORE_UNFIT"
    assert "PRIMARY KEY (stream_no, sequence_number)" in str(caught.value)


async def test_a_start_is_refused_without_the_index_that_keeps_a_claim_one_streams(
    database: Database, admin: Admin
) -> None:
    await admin.execute("DROP INDEX tga.heads_claim")
    with pytest.raises(StoreUnfit, match=r"index heads_claim of tga.heads is missing"):
        await verify_guards(database.admin_url)


async def test_a_start_tells_of_what_breaks_no_promise(
    database: Database, admin: Admin, caplog: pytest.LogCaptureFixture
) -> None:
    await admin.execute("DROP INDEX tga.heads_tenant")
    await verify_guards(database.admin_url)
    assert "index heads_tenant of tga.heads is missing" in caplog.text


async def test_a_ledger_without_its_list_of_migrations_is_not_begun_anew(database: Database, admin: Admin) -> None:
    await admin.execute("DROP TABLE tga.migrations CASCADE")
    for ask in (load_status, migrate):
        with pytest.raises(MigrationRefused, match=r"table tga\.migrations is missing"):
            await ask(database.admin_url)
    assert [p.what for p in await find_problems(database.admin_url)] == ["table tga.migrations is missing"]
    assert await admin.fetchval("SELECT to_regclass('tga.migrations')") is None


async def test_a_member_of_the_gateways_role_who_inherits_nothing_can_ask(server: Server, database: Database) -> None:
    """As operators of a named server log in: not as a superuser."""
    await server.execute_as_root("CREATE ROLE tga_test_reader LOGIN NOINHERIT; GRANT tga_gateway TO tga_test_reader")
    name = database.admin_url.split("/")[-1].split("?")[0]
    try:
        session = await asyncpg.connect(server.url("tga_test_reader", name))
        known = expected_schema()
        assert await load_inventory(session, known.rule_tables) == known.objects
        await session.close()
    finally:
        await server.execute_as_root("DROP ROLE tga_test_reader")


async def test_an_unsafe_server_is_refused(server: Server, database: Database) -> None:
    await server.execute_as_root("ALTER SYSTEM SET full_page_writes = off")
    await server.execute_as_root("SELECT pg_reload_conf()")
    try:
        problems: list[Any] = []
        while not problems:
            problems = await find_problems(database.admin_url)
            await asyncio.sleep(0.05)
        assert [problem.what for problem in problems] == ["the server runs with an unsafe full_page_writes"]
    finally:
        await server.execute_as_root("ALTER SYSTEM RESET full_page_writes")
        await server.execute_as_root("SELECT pg_reload_conf()")
