"""What someone does who has the database in their hands: a superuser who has switched the triggers off.

The ledger stores entries as fields and artifacts by plan (docs/adr/0029). An attacker can change any row of any table;
so that a drill can say what it does to *an entry*, *an artifact*, *a claim* or *a leaf*, the views that show these are
made writable for the length of the attack: each statement becomes the change of the rows behind it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final, TypeAlias

import asyncpg

Admin: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

_TRIGGERS: Final = """
SELECT c.relname, t.tgname FROM pg_trigger t JOIN pg_class c ON c.oid = t.tgrelid
 WHERE c.relnamespace = 'tga'::regnamespace AND c.relkind = 'r' AND NOT t.tgisinternal
"""
_WRITABLE: Final = """
CREATE SCHEMA attack;

CREATE FUNCTION attack.number_of(asked text) RETURNS bigint LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM tga.heads h WHERE h.stream = asked) THEN
        INSERT INTO tga.heads (stream_no, stream, sequence_number, entry_digest, state, is_open)
        VALUES (nextval('tga.stream_numbers'), asked, 0, decode(repeat('00', 32), 'hex'),
                coalesce((SELECT birth_state FROM tga.stream_kinds WHERE kind = split_part(asked, ':', 1)), ''), false);
    END IF;
    RETURN (SELECT h.stream_no FROM tga.heads h WHERE h.stream = asked);
END $$;

CREATE FUNCTION attack.entries() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        INSERT INTO tga.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                               artifact_digest, recorded_at, artifact_type, from_state, to_state, verbatim, xid)
        VALUES (attack.number_of(NEW.stream), NEW.sequence_number, 1, 1, gen_random_uuid(), NEW.entry_digest, '', '',
                '',
                '', '', '', NEW.entry, coalesce(NEW.xid, pg_current_xact_id()));
        RETURN NEW;
    ELSIF TG_OP = 'UPDATE' THEN
        UPDATE tga.links l
           SET verbatim = CASE WHEN NEW.entry IS DISTINCT FROM OLD.entry THEN NEW.entry ELSE l.verbatim END,
               entry_digest = NEW.entry_digest, sequence_number = NEW.sequence_number, xid = NEW.xid
         WHERE l.stream_no = OLD.stream_no AND l.sequence_number = OLD.sequence_number;
        RETURN NEW;
    END IF;
    DELETE FROM tga.links l WHERE l.stream_no = OLD.stream_no AND l.sequence_number = OLD.sequence_number;
    RETURN OLD;
END $$;
CREATE TRIGGER written INSTEAD OF INSERT OR UPDATE OR DELETE ON tga.entries
    FOR EACH ROW EXECUTE FUNCTION attack.entries();

CREATE FUNCTION attack.artifacts() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number bigint := CASE TG_OP WHEN 'INSERT' THEN attack.number_of(NEW.stream) ELSE OLD.stream_no END;
    place bigint := CASE TG_OP WHEN 'INSERT' THEN NEW.sequence_number ELSE OLD.sequence_number END;
    artifact bytea := CASE TG_OP WHEN 'DELETE' THEN NULL ELSE NEW.artifact END;
BEGIN
    UPDATE tga.payloads p SET artifacts[place - p.sequence_number + 1] = artifact
     WHERE p.stream_no = number AND place >= p.sequence_number
       AND place < p.sequence_number + cardinality(p.artifacts);
    IF NOT FOUND AND artifact IS NOT NULL THEN
        INSERT INTO tga.payloads VALUES (number, place, ARRAY[artifact]);
    END IF;
    DELETE FROM tga.payloads p WHERE p.stream_no = number AND array_remove(p.artifacts, NULL) = '{}';
    IF TG_OP = 'DELETE' THEN
        RETURN OLD;
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER written INSTEAD OF INSERT OR UPDATE OR DELETE ON tga.artifacts
    FOR EACH ROW EXECUTE FUNCTION attack.artifacts();

CREATE FUNCTION attack.claims() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    number bigint;
BEGIN
    IF TG_OP = 'INSERT' THEN
        number := attack.number_of(NEW.stream);
        UPDATE tga.heads SET subject = NEW.server_id, name = NEW.tool_name, idempotency_key = NEW.idempotency_key,
                             payload_digest = NEW.payload_digest
         WHERE stream_no = number;
        RETURN NEW;
    END IF;
    UPDATE tga.heads SET idempotency_key = NULL, payload_digest = NULL WHERE stream = OLD.stream;
    RETURN OLD;
END $$;
CREATE TRIGGER written INSTEAD OF INSERT OR DELETE ON tga.claims FOR EACH ROW EXECUTE FUNCTION attack.claims();

CREATE FUNCTION attack.claim_effects() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        UPDATE tga.heads SET effect_digest = NEW.artifact_digest WHERE stream = NEW.stream;
        RETURN NEW;
    END IF;
    UPDATE tga.heads SET effect_digest = NULL WHERE stream = OLD.stream;
    RETURN OLD;
END $$;
CREATE TRIGGER written INSTEAD OF INSERT OR DELETE ON tga.claim_effects
    FOR EACH ROW EXECUTE FUNCTION attack.claim_effects();

CREATE FUNCTION attack.leaves() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- The leaf and those of its plan after it: a span is cut at its end.
    DELETE FROM tga.leaf_spans s WHERE s.first_index = OLD.leaf_index;
    UPDATE tga.leaf_spans s SET leaves = OLD.leaf_index - s.first_index
     WHERE s.first_index < OLD.leaf_index AND s.first_index + s.leaves > OLD.leaf_index;
    RETURN OLD;
END $$;
CREATE TRIGGER written INSTEAD OF DELETE ON tga.leaves FOR EACH ROW EXECUTE FUNCTION attack.leaves();
"""


async def disarm(admin: Admin) -> None:
    """Every trigger of the ledger off, and the views writable."""
    for row in await admin.fetch(_TRIGGERS):
        await admin.execute(f"ALTER TABLE tga.{row['relname']} DISABLE TRIGGER {row['tgname']}")
    await admin.execute(f"DROP SCHEMA IF EXISTS attack CASCADE; {_WRITABLE}")


async def rearm(admin: Admin) -> None:
    """As it was: all of the ledger's triggers fire in every mode of a session."""
    await admin.execute("DROP SCHEMA attack CASCADE")
    for row in await admin.fetch(_TRIGGERS):
        await admin.execute(f"ALTER TABLE tga.{row['relname']} ENABLE ALWAYS TRIGGER {row['tgname']}")


@asynccontextmanager
async def attacking(admin: Admin) -> AsyncIterator[Admin]:
    """With every trigger of the ledger off, and as they were afterwards."""
    await disarm(admin)
    try:
        yield admin
    finally:
        await rearm(admin)


async def insert_bulk(admin: Admin, first: int, last: int) -> None:
    """Streams of one entry each, made by the database itself: whoever counts, sorts or hashes sees no difference."""
    await admin.execute(
        f"""
        WITH made AS (
            INSERT INTO tga.heads (stream_no, stream, sequence_number, entry_digest, state, is_open)
            SELECT nextval('tga.stream_numbers'), 'bulk:' || lpad(n::text, 8, '0'), 1, sha256(''), 'OPEN', false
              FROM generate_series({first}, {last}) AS n
            RETURNING stream_no
        )
        INSERT INTO tga.links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                               artifact_digest, recorded_at, artifact_type, from_state, to_state, verbatim)
        SELECT stream_no, 1, 1, 1, gen_random_uuid(), sha256(''), '', '', '', '', '', '',
               convert_to(repeat('x', 700), 'UTF8')
          FROM made
        """
    )


async def renumber(admin: Admin, stream: str, number: int) -> None:
    """Give a stream that was appended anew the number of the one that it replaces, which the tree knows."""
    for table in ("links", "payloads", "in_work", "at_rest", "heads"):
        await admin.execute(f"DELETE FROM tga.{table} WHERE stream_no = $1", number)  # what was left of the old one
        await admin.execute(
            f"UPDATE tga.{table} SET stream_no = $2"
            " WHERE stream_no = (SELECT h.stream_no FROM tga.heads h WHERE h.stream = $1)",
            stream,
            number,
        )
