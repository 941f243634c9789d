-- Two questions about links by stream are answered by their primary key, in its order, whatever the statistics say.
-- Where there are none yet (a new database, one just restored) PostgreSQL took `links_by_commit` for as good and read
-- all of it for every leaf; and where the sequencer walks through everything it sorted the rest of the ledger for every
-- batch: time in proportion to the square of what was to be added. `place + 0 = 1` says what `place = 1` says, but not
-- to the partial index. But for this and `enable_bitmapscan` both functions are those of 0006.

CREATE OR REPLACE FUNCTION tga.guard_leaves() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    IF EXISTS (SELECT FROM added a
                WHERE a.first_index <> coalesce((SELECT s.first_index + s.leaves FROM leaf_spans s
                                                  WHERE s.first_index < a.first_index
                                                  ORDER BY s.first_index DESC LIMIT 1), 0)
                   OR (SELECT l.places FROM links l
                        WHERE l.stream_no = a.stream_no AND l.sequence_number = a.sequence_number AND l.place + 0 = 1)
                      IS DISTINCT FROM a.leaves) THEN
        RAISE EXCEPTION 'leaves are the entries of whole plans, in places without gaps'
            USING ERRCODE = 'check_violation';
    END IF;
    RETURN NULL;
END
$$;

CREATE OR REPLACE FUNCTION tga.integrate(rows_max integer)
RETURNS TABLE (tree_size bigint, leaves_added bigint, has_more boolean, horizon text)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
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
          WHERE place.is_walking AND l.place + 0 = 1
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
