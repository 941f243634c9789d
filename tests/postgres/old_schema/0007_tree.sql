-- The Merkle tree over all entries of all streams: which entry is which leaf, the hashes of whole subtrees, signed heads.
-- Appending knows nothing of it: a sequencer follows the commits.

CREATE TABLE tga.leaves (
    leaf_index      bigint PRIMARY KEY CHECK (leaf_index >= 0),  -- without gaps
    stream          text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL,
    UNIQUE (stream, sequence_number)  -- no entry twice, whatever a sequencer believes
);

-- Complete subtrees of 256 leaves and more; what is smaller is hashed again from the entries when it is needed.
CREATE TABLE tga.tree_nodes (
    level      smallint NOT NULL CHECK (level BETWEEN 8 AND 62),
    node_index bigint NOT NULL CHECK (node_index >= 0),
    hash       bytea NOT NULL CHECK (octet_length(hash) = 32),
    PRIMARY KEY (level, node_index)
);

CREATE TABLE tga.tree_heads (
    size       bigint PRIMARY KEY CHECK (size >= 1),
    root       bytea NOT NULL CHECK (octet_length(root) = 32),
    note       text NOT NULL CHECK (octet_length(note) <= 65536),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);

-- How far the sequencer has looked, in the order (xid, stream, sequence number). Transaction numbers mean something in
-- the cluster that gave them: `system_identifier` says which. `is_walking`: it looks through everything once more, after
-- which it goes on from `resume_xid`.
CREATE TABLE tga.tree_cursor (
    is_only           boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    system_identifier text NOT NULL,
    xid               xid8 NOT NULL,
    stream            text COLLATE "C" NOT NULL,
    sequence_number   bigint NOT NULL,
    is_walking        boolean NOT NULL,
    resume_xid        xid8 NOT NULL
);

DO $$
DECLARE
    tree_table text;
BEGIN
    FOREACH tree_table IN ARRAY ARRAY['leaves', 'tree_nodes', 'tree_heads'] LOOP
        EXECUTE format('CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.%I
                        FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change()', tree_table);
        EXECUTE format('ALTER TABLE tga.%I ENABLE ALWAYS TRIGGER append_only', tree_table);
    END LOOP;
END
$$;
CREATE TRIGGER append_only BEFORE DELETE OR TRUNCATE ON tga.tree_cursor
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.tree_cursor ENABLE ALWAYS TRIGGER append_only;

-- The sequencer's session holds `sequencer` for as long as it lives; each change of the tree holds `tree`.
CREATE FUNCTION tga.tree_lock_key(what text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT pg_catalog.hashtextextended(pg_catalog.textcat('tree:', what), 0) $$;

-- Which cluster this is. Where a provider hides it, a counter that went back is all that tells of a new one.
CREATE FUNCTION tga.cluster_identifier() RETURNS text LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT system_identifier::text FROM pg_control_system());
EXCEPTION WHEN insufficient_privilege THEN
    RETURN 'hidden';
END
$$;

INSERT INTO tga.tree_cursor (system_identifier, xid, stream, sequence_number, is_walking, resume_xid)
VALUES (tga.cluster_identifier(), '0', '', 0, false, '0');

-- Give the next entries their places: at most `rows_max` are looked at, those without a leaf become leaves. Nothing is
-- written when there is nothing to look at. Returns the tree's size, how many leaves are new, whether there may be more,
-- and the oldest transaction that still runs: what has a number from there on has to wait.
--
-- An entry is final when its transaction's number is below the snapshot's xmin: all below it have ended, so nothing can
-- still appear before or between what is taken. In another cluster than before (after dump and restore) old rows have
-- numbers from a former life and new ones start low: then everything that can be seen is looked at once, whatever its
-- number. What could not be seen when that began has a number from `resume_xid` on, and is found from there.
CREATE FUNCTION tga.integrate(rows_max integer)
RETURNS TABLE (tree_size bigint, leaves_added bigint, has_more boolean, horizon text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    place tree_cursor%ROWTYPE;
    here text := cluster_identifier();
    looked_at bigint;
    last_xid xid8;
    last_stream text;
    last_number bigint;
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    SELECT * INTO place FROM tree_cursor;
    IF place.system_identifier <> here OR place.xid >= pg_snapshot_xmax(pg_current_snapshot()) AND NOT place.is_walking THEN
        UPDATE tree_cursor c
           SET system_identifier = here, xid = '0', stream = '', sequence_number = 0, is_walking = true,
               resume_xid = pg_snapshot_xmin(pg_current_snapshot())
        RETURNING * INTO place;
    END IF;
    tree_size := coalesce((SELECT max(l.leaf_index) + 1 FROM leaves l), 0);

    -- One statement, one snapshot: of its xmin, and of what it sees.
    WITH looked AS MATERIALIZED (
        (SELECT e.xid, e.stream, e.sequence_number FROM entries e
          WHERE NOT place.is_walking
            AND (e.xid, e.stream, e.sequence_number) > (place.xid, place.stream, place.sequence_number)
            AND e.xid < pg_snapshot_xmin(pg_current_snapshot())
          ORDER BY e.xid, e.stream, e.sequence_number LIMIT rows_max)
        UNION ALL
        -- Stream by stream: numbers of two lives say nothing about which entry of a stream came first.
        (SELECT '0'::xid8, e.stream, e.sequence_number FROM entries e
          WHERE place.is_walking AND (e.stream, e.sequence_number) > (place.stream, place.sequence_number)
          ORDER BY e.stream, e.sequence_number LIMIT rows_max)
    ), fresh AS (
        SELECT l.stream, l.sequence_number, row_number() OVER (ORDER BY l.xid, l.stream, l.sequence_number) AS number
          FROM looked l
         WHERE NOT EXISTS (SELECT FROM leaves v WHERE v.stream = l.stream AND v.sequence_number = l.sequence_number)
    ), added AS (
        INSERT INTO leaves (leaf_index, stream, sequence_number)
        SELECT tree_size + f.number - 1, f.stream, f.sequence_number FROM fresh f
        RETURNING 1
    ), final AS (
        SELECT l.xid, l.stream, l.sequence_number FROM looked l
         ORDER BY l.xid DESC, l.stream DESC, l.sequence_number DESC LIMIT 1
    )
    SELECT (SELECT count(*) FROM looked), (SELECT count(*) FROM added), pg_snapshot_xmin(pg_current_snapshot())::text,
           f.xid, f.stream, f.sequence_number
      INTO looked_at, leaves_added, horizon, last_xid, last_stream, last_number
      FROM (SELECT) AS one LEFT JOIN final f ON true;

    tree_size := tree_size + leaves_added;
    has_more := looked_at = rows_max;
    IF looked_at = rows_max OR looked_at > 0 AND NOT place.is_walking THEN
        UPDATE tree_cursor c SET xid = last_xid, stream = last_stream, sequence_number = last_number;
    ELSIF place.is_walking THEN
        UPDATE tree_cursor c SET xid = place.resume_xid, stream = '', sequence_number = 0, is_walking = false;
        has_more := true;
    END IF;
    RETURN NEXT;
END
$$;

-- Hashes of subtrees that the leaves complete.
CREATE FUNCTION tga.add_tree_nodes(levels smallint[], indices bigint[], hashes bytea[]) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    INSERT INTO tree_nodes (level, node_index, hash) SELECT * FROM unnest(levels, indices, hashes);
END
$$;

-- A signed head. The same one again is nothing new; one size with two roots is refused.
CREATE FUNCTION tga.add_tree_head(head_size bigint, head_root bytea, head_note text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    IF head_size > coalesce((SELECT max(l.leaf_index) + 1 FROM leaves l), 0) THEN
        RAISE EXCEPTION 'a head over % leaves that are not there', head_size USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tree_heads (size, root, note) VALUES (head_size, head_root, head_note) ON CONFLICT (size) DO NOTHING;
    IF NOT FOUND AND head_root <> (SELECT h.root FROM tree_heads h WHERE h.size = head_size) THEN
        RAISE EXCEPTION 'two roots for % leaves', head_size USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

GRANT SELECT ON tga.leaves, tga.tree_nodes, tga.tree_heads, tga.tree_cursor TO tga_gateway;
REVOKE ALL ON FUNCTION tga.tree_lock_key, tga.cluster_identifier, tga.integrate, tga.add_tree_nodes, tga.add_tree_head FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.tree_lock_key, tga.integrate, tga.add_tree_nodes, tga.add_tree_head TO tga_gateway;
