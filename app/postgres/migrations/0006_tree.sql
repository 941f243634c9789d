-- The Merkle tree over all entries of all streams: which entry is which leaf, the hashes of whole subtrees, signed
-- heads. Appending knows nothing of it: a sequencer follows the commits.

-- One row for the entries of a plan, which are leaves side by side.
CREATE TABLE tga.leaf_spans (
    first_index     bigint PRIMARY KEY CHECK (first_index >= 0),
    stream_no       bigint NOT NULL,
    sequence_number bigint NOT NULL,                     -- of the first of them
    leaves          smallint NOT NULL CHECK (leaves >= 1),
    -- Of a stream's first: so that one whose head is gone has a name all the same.
    stream          text COLLATE "C",
    UNIQUE (stream_no, sequence_number)
);

-- Which entry is which leaf.
CREATE VIEW tga.leaves AS
SELECT s.first_index + i - 1 AS leaf_index,
       coalesce(h.stream, (SELECT f.stream FROM tga.leaf_spans f
                            WHERE f.stream_no = s.stream_no AND f.sequence_number = 1)) AS stream,
       s.sequence_number + i - 1 AS sequence_number, s.stream_no
  FROM tga.leaf_spans s
 CROSS JOIN LATERAL generate_series(1, s.leaves::integer) AS i
  LEFT JOIN tga.heads h ON h.stream_no = s.stream_no;

-- Whatever a sequencer believes: no entry is a leaf twice, no index is left out or given twice.
CREATE FUNCTION tga.guard_leaves() RETURNS trigger LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM added a
                WHERE a.first_index <> coalesce((SELECT s.first_index + s.leaves FROM leaf_spans s
                                                  WHERE s.first_index < a.first_index
                                                  ORDER BY s.first_index DESC LIMIT 1), 0)
                   OR (SELECT l.places FROM links l
                        WHERE l.stream_no = a.stream_no AND l.sequence_number = a.sequence_number AND l.place = 1)
                      IS DISTINCT FROM a.leaves) THEN
        RAISE EXCEPTION 'leaves are the entries of whole plans, in places without gaps'
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER leaf_guard AFTER INSERT ON tga.leaf_spans REFERENCING NEW TABLE AS added
    FOR EACH STATEMENT EXECUTE FUNCTION tga.guard_leaves();
ALTER TABLE tga.leaf_spans ENABLE ALWAYS TRIGGER leaf_guard;

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

-- How far the sequencer has looked, in the order (xid, stream's number, sequence number). Transaction numbers mean
-- something in the cluster that gave them: `system_identifier` says which. `is_walking`: it looks through everything
-- once more, after which it goes on from `resume_xid`.
CREATE TABLE tga.tree_cursor (
    is_only           boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    system_identifier text NOT NULL,
    xid               xid8 NOT NULL,
    stream_no         bigint NOT NULL,
    sequence_number   bigint NOT NULL,
    is_walking        boolean NOT NULL,
    resume_xid        xid8 NOT NULL
);

DO $$
DECLARE
    tree_table text;
BEGIN
    FOREACH tree_table IN ARRAY ARRAY['leaf_spans', 'tree_nodes', 'tree_heads'] LOOP
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
CREATE FUNCTION tga.cluster_identifier() RETURNS text LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, pg_temp AS $$
BEGIN
    RETURN (SELECT system_identifier::text FROM pg_control_system());
EXCEPTION WHEN insufficient_privilege THEN
    RETURN 'hidden';
END
$$;

INSERT INTO tga.tree_cursor (system_identifier, xid, stream_no, sequence_number, is_walking, resume_xid)
VALUES (tga.cluster_identifier(), '0', 0, 0, false, '0');

-- Give the next entries their places: at most `rows_max` plans are looked at, those without leaves get them. Nothing is
-- written when there is nothing to look at. Returns the tree's size, how many leaves are new, whether there may be
-- more, and the oldest transaction that still runs: what has a number from there on has to wait.
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
    last_no bigint;
    last_number bigint;
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    SELECT * INTO place FROM tree_cursor;
    IF place.system_identifier <> here
       OR place.xid >= pg_snapshot_xmax(pg_current_snapshot()) AND NOT place.is_walking THEN
        UPDATE tree_cursor c
           SET system_identifier = here, xid = '0', stream_no = 0, sequence_number = 0, is_walking = true,
               resume_xid = pg_snapshot_xmin(pg_current_snapshot())
        RETURNING * INTO place;
    END IF;
    tree_size := coalesce((SELECT s.first_index + s.leaves FROM leaf_spans s ORDER BY s.first_index DESC LIMIT 1), 0);

    -- One statement, one snapshot: of its xmin, and of what it sees.
    WITH looked AS MATERIALIZED (
        (SELECT l.xid, l.stream_no, l.sequence_number, l.places FROM links l
          WHERE NOT place.is_walking AND l.place = 1
            AND (l.xid, l.stream_no, l.sequence_number) > (place.xid, place.stream_no, place.sequence_number)
            AND l.xid < pg_snapshot_xmin(pg_current_snapshot())
          ORDER BY l.xid, l.stream_no, l.sequence_number LIMIT rows_max)
        UNION ALL
        -- Stream by stream: numbers of two lives say nothing about which entry of a stream came first.
        (SELECT '0'::xid8, l.stream_no, l.sequence_number, l.places FROM links l
          WHERE place.is_walking AND l.place = 1
            AND (l.stream_no, l.sequence_number) > (place.stream_no, place.sequence_number)
          ORDER BY l.stream_no, l.sequence_number LIMIT rows_max)
    ), fresh AS (
        SELECT l.stream_no, l.sequence_number, l.places,
               sum(l.places) OVER (ORDER BY l.xid, l.stream_no, l.sequence_number) - l.places AS leaves_before
          FROM looked l
         WHERE NOT EXISTS (SELECT FROM leaf_spans v
                            WHERE v.stream_no = l.stream_no AND v.sequence_number = l.sequence_number)
    ), added AS (
        INSERT INTO leaf_spans (first_index, stream_no, sequence_number, leaves, stream)
        SELECT tree_size + f.leaves_before, f.stream_no, f.sequence_number, f.places,
               CASE WHEN f.sequence_number = 1 THEN (SELECT h.stream FROM heads h WHERE h.stream_no = f.stream_no) END
          FROM fresh f
        RETURNING leaves
    ), final AS (
        SELECT l.xid, l.stream_no, l.sequence_number FROM looked l
         ORDER BY l.xid DESC, l.stream_no DESC, l.sequence_number DESC LIMIT 1
    )
    SELECT (SELECT count(*) FROM looked), (SELECT coalesce(sum(a.leaves), 0) FROM added a),
           pg_snapshot_xmin(pg_current_snapshot())::text, f.xid, f.stream_no, f.sequence_number
      INTO looked_at, leaves_added, horizon, last_xid, last_no, last_number
      FROM (SELECT) AS one LEFT JOIN final f ON true;

    tree_size := tree_size + leaves_added;
    has_more := looked_at = rows_max;
    IF looked_at = rows_max OR looked_at > 0 AND NOT place.is_walking THEN
        UPDATE tree_cursor c SET xid = last_xid, stream_no = last_no, sequence_number = last_number;
    ELSIF place.is_walking THEN
        UPDATE tree_cursor c SET xid = place.resume_xid, stream_no = 0, sequence_number = 0, is_walking = false;
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
    IF head_size > coalesce((SELECT s.first_index + s.leaves FROM leaf_spans s
                              ORDER BY s.first_index DESC LIMIT 1), 0) THEN
        RAISE EXCEPTION 'a head over % leaves that are not there', head_size USING ERRCODE = 'invalid_parameter_value';
    END IF;
    INSERT INTO tree_heads (size, root, note) VALUES (head_size, head_root, head_note) ON CONFLICT (size) DO NOTHING;
    IF NOT FOUND AND head_root <> (SELECT h.root FROM tree_heads h WHERE h.size = head_size) THEN
        RAISE EXCEPTION 'two roots for % leaves', head_size USING ERRCODE = 'invalid_parameter_value';
    END IF;
END
$$;

-- With synchronous replication a commit is seen when a standby has it; unless the server crashed, or the wait was
-- broken off, while it waited: then it is seen at once. So what a sequencer finds at its beginning may be on this
-- server alone, and a head over it would be signed that a promoted standby cannot continue.
--
-- A commit that changes nothing, and waits like every other: when it returns, the standby has all that was seen before.
CREATE FUNCTION tga.begin_leader_term() RETURNS void
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(5000);
    PERFORM pg_advisory_xact_lock(tree_lock_key('tree'));
    -- A row is written, though the same one: without that there would be nothing to commit, and nothing to wait for.
    UPDATE tree_cursor SET is_only = true;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'the sequencer''s cursor is missing' USING ERRCODE = 'no_data_found';
    END IF;
END
$$;

-- An entry that stands before the tree's cursor and has no leaf was put there behind the sequencer's back: `integrate`
-- looks only at what comes after the cursor. Who looks for such entries (`tga verify --all`, and the sequencer, bit by
-- bit) compares them with this: the cursor, and the first transaction number that was not given yet.
--
-- No row while the numbers cannot be compared: after dump and restore those of two clusters stand side by side until
-- the sequencer has walked through all of them. Where a provider hides which cluster it is, a number from ahead may be
-- an honest one from a former life: `is_cluster_known` is false.
CREATE VIEW tga.tree_place AS
SELECT c.xid, c.stream_no, c.sequence_number, n.next_xid, n.here <> 'hidden' AS is_cluster_known
  FROM tga.tree_cursor c
 CROSS JOIN (SELECT pg_snapshot_xmax(pg_current_snapshot()) AS next_xid, tga.cluster_identifier() AS here) AS n
 WHERE c.system_identifier = n.here AND NOT c.is_walking AND c.xid < n.next_xid;

GRANT SELECT ON tga.leaf_spans, tga.leaves, tga.tree_nodes, tga.tree_heads, tga.tree_cursor, tga.tree_place
    TO tga_gateway;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tga.tree_lock_key, tga.cluster_identifier, tga.integrate, tga.add_tree_nodes, tga.add_tree_head,
    tga.begin_leader_term
    TO tga_gateway;
