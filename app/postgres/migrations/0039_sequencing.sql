-- The sequencer for less processor time: hashes of leaves span by span, places without a look for each whether it has
-- one, and a guard that looks along the tree. docs/adr/0060-what-a-call-over-http-costs.md has the figures.

-- Hashes of the leaves from `firsts` to before `pasts`, the first of which is range 1: a row for what a range asks of a
-- span, beginning with that leaf. A leaf without an entry leaves a gap, one whose bytes are unknown a null: whoever
-- asks compares.
--
-- An entry's bytes are those of the view `entries`, which says the same of each entry by itself. Here head and form are
-- found once for a span, and its entries by one range of the primary key, whatever the statistics say.
CREATE FUNCTION tga.leaf_hashes(firsts bigint[], pasts bigint[])
RETURNS TABLE (range_no bigint, first_index bigint, hashes bytea[])
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET enable_bitmapscan = off SET enable_memoize = off SET join_collapse_limit = 1
SET plan_cache_mode = force_generic_plan
AS $$
BEGIN
    RETURN QUERY
    WITH kinds AS MATERIALIZED (
        SELECT k.kind, k.entry_form FROM stream_kinds k
    )
    SELECT u.range_no, greatest(u.first_index, s.first_index),
           ARRAY(SELECT sha256('\x00'::bytea
                               || CASE WHEN l.verbatim <> '' THEN l.verbatim
                                       ELSE convert_to(format(n.entry_form, encode(l.artifact_digest, 'hex'),
                                                              l.artifact_type, l.executor_id, l.from_state,
                                                              encode(l.prev_entry_digest, 'hex'), l.recorded_at,
                                                              l.sequence_number, l.to_state, n.identity), 'UTF8') END)
                   FROM links l
                  WHERE l.stream_no = s.stream_no
                    AND l.sequence_number >= s.sequence_number + greatest(u.first_index - s.first_index, 0)
                    AND l.sequence_number < s.sequence_number + least(u.past_index - s.first_index, s.leaves)
                  ORDER BY l.sequence_number)
      FROM unnest(firsts, pasts) WITH ORDINALITY AS u(first_index, past_index, range_no)
     CROSS JOIN LATERAL (
           SELECT v.* FROM leaf_spans v
            WHERE v.first_index < u.past_index
              AND v.first_index >= coalesce((SELECT max(m.first_index) FROM leaf_spans m
                                              WHERE m.first_index <= u.first_index), 0)
            ORDER BY v.first_index) AS s
      LEFT JOIN LATERAL (
           SELECT h.stream, split_part(h.stream, ':', 1) AS kind FROM heads h
            WHERE h.stream_no = s.stream_no OFFSET 0) AS h ON true
      LEFT JOIN LATERAL (
           SELECT k.entry_form, substr(h.stream, length(k.kind) + 2) AS identity FROM kinds k
            WHERE k.kind = h.kind OFFSET 0) AS n ON true;
END
$$;

-- As in 0015, for all rows that a statement adds at once: what stands from the first of them to the last is read along
-- the index, and each begins where the one before it ends.
CREATE OR REPLACE FUNCTION tga.guard_leaves() RETURNS trigger LANGUAGE plpgsql
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_bitmapscan = off SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    lowest bigint;
    highest bigint;
BEGIN
    SELECT min(a.first_index), max(a.first_index) INTO lowest, highest FROM added a;
    IF EXISTS (SELECT FROM (SELECT s.first_index, s.stream_no, s.sequence_number, s.leaves,
                                   lag(s.first_index + s.leaves) OVER (ORDER BY s.first_index) AS past
                              FROM leaf_spans s WHERE s.first_index BETWEEN lowest AND highest) AS a
                WHERE a.first_index <> coalesce(a.past, (SELECT s.first_index + s.leaves FROM leaf_spans s
                                                          WHERE s.first_index < lowest
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

-- As in 0015. That a plan has leaves already is found by the unique key of `leaf_spans`: then, and while it walks
-- through everything, it looks for each.
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
    is_careful boolean;
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

    is_careful := place.is_walking;
    LOOP
        BEGIN
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
                 WHERE NOT is_careful
                    OR (SELECT v.first_index FROM leaf_spans v
                         WHERE v.stream_no = l.stream_no AND v.sequence_number = l.sequence_number) IS NULL
            ), added AS (
                INSERT INTO leaf_spans (first_index, stream_no, sequence_number, leaves, stream)
                SELECT tree_size + f.leaves_before, f.stream_no, f.sequence_number, f.places,
                       CASE WHEN f.sequence_number = 1 THEN (SELECT h.stream FROM heads h
                                                              WHERE h.stream_no = f.stream_no) END
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
            EXIT;
        EXCEPTION WHEN unique_violation THEN
            IF is_careful THEN
                RAISE;
            END IF;
            is_careful := true;
        END;
    END LOOP;

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

REVOKE ALL ON FUNCTION tga.leaf_hashes FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.leaf_hashes TO tga_gateway;
