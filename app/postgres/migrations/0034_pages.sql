-- What keeps pages as cheap beside many as beside few. docs/adr/0062-pages-beside-many.md has the figures.

-- Of the runs that wait, which wait for a person: a page of one sort looked at thousands of the other. Where this
-- changes, the state nearly always does, too (not of a run that waits for something else beside a person who answers),
-- so hardly a write to `runs` moves more index entries than before.
ALTER TABLE tga.runs ADD COLUMN waits_for_person boolean NOT NULL DEFAULT false;
UPDATE tga.runs r SET waits_for_person = true
  FROM tga.heads h WHERE h.stream_no = r.stream_no AND h.waiting = 'person';
DROP INDEX tga.runs_in_state;
CREATE INDEX runs_in_state ON tga.runs (tenant, state, waits_for_person, created_at, stream_no);

-- As in 0031, with `waits_for_person`.
CREATE OR REPLACE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO runs AS r (stream_no, tenant, procedure, program, state, waits_for_person, attempt, worker, due_at,
                           failures, parent, deadline_at, created_at, forked_from)
    SELECT h.stream_no, h.tenant, s.procedure, s.program, h.state, coalesce(h.waiting = 'person', false), s.attempt,
           s.worker, coalesce(statement_timestamp() + s.due_in_ms * interval '1 millisecond', s.due_at), s.failures,
           s.parent, s.deadline_at, s.created_at, s.forked_from
      FROM unnest(numbers, schedules) AS u(stream_no, schedule)
      JOIN heads h ON h.stream_no = u.stream_no
     CROSS JOIN LATERAL jsonb_to_record(u.schedule) AS s(
           procedure text, program text, attempt integer, worker text, due_at timestamptz, due_in_ms bigint,
           failures integer, parent text, deadline_at timestamptz, created_at timestamptz, forked_from text)
     ORDER BY h.stream_no
        ON CONFLICT (stream_no) DO UPDATE
       SET procedure = excluded.procedure, program = excluded.program, state = excluded.state,
           waits_for_person = excluded.waits_for_person, attempt = excluded.attempt, worker = excluded.worker,
           due_at = excluded.due_at, failures = excluded.failures, parent = excluded.parent,
           deadline_at = excluded.deadline_at, created_at = excluded.created_at, forked_from = excluded.forked_from,
           held_until = NULL;

    DELETE FROM run_requests q
     USING unnest(numbers, schedules) AS u(stream_no, schedule)
     WHERE q.stream_no = u.stream_no
       AND NOT EXISTS (SELECT FROM jsonb_array_elements(u.schedule -> 'asks') AS a
                        WHERE a ->> 0 = q.path AND (a ->> 1)::bigint = q.sequence_number);
    IF EXISTS (SELECT FROM unnest(schedules) AS s(schedule) WHERE s.schedule -> 'asks' <> '[]') THEN
        INSERT INTO run_requests AS q (stream_no, path, sequence_number, tenant, expires_at, asked_at, level)
        SELECT h.stream_no, a ->> 0, (a ->> 1)::bigint, h.tenant, (a ->> 2)::timestamptz,
               (a ->> 3)::timestamptz, (a ->> 4)::integer
          FROM unnest(numbers, schedules) AS u(stream_no, schedule)
          JOIN heads h ON h.stream_no = u.stream_no
         CROSS JOIN LATERAL jsonb_array_elements(u.schedule -> 'asks') AS a
            ON CONFLICT (stream_no, path) DO UPDATE SET level = excluded.level WHERE q.level <> excluded.level;
    END IF;
END
$$;

-- Counts by four hours, for windows of days: 42 spans of a week instead of 336. Nothing is folded while they are
-- made of what is there.
SELECT pg_advisory_xact_lock(tga.tree_lock_key('calls'));
ALTER TABLE tga.call_counts DROP CONSTRAINT call_counts_span_s_check;
ALTER TABLE tga.call_counts ADD CONSTRAINT call_counts_span_s_check CHECK (span_s IN (60, 1800, 14400, 86400));
INSERT INTO tga.call_counts (tenant, span_s, began, subject, name, measure, detail, calls)
SELECT k.tenant, 14400, tga.span_of(k.began, 14400), k.subject, k.name, k.measure, k.detail, sum(k.calls)
  FROM tga.call_counts k WHERE k.span_s = 1800
 GROUP BY 1, 2, 3, 4, 5, 6, 7 ORDER BY 2, 3, 1, 4, 5, 6, 7;

-- As in 0023, with four hours; rows of one span are put beside each other.
CREATE OR REPLACE FUNCTION tga.fold_calls(rows_max integer) RETURNS TABLE (looked_at bigint, next_leaf bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    place bigint;
    numbers bigint[];
BEGIN
    PERFORM prepare_transaction(5000);
    looked_at := 0;
    IF NOT pg_try_advisory_xact_lock(tree_lock_key('calls')) THEN
        RETURN NEXT;
        RETURN;
    END IF;
    SELECT f.next_leaf INTO place FROM call_fold f;
    SELECT count(*), max(s.first_index + s.leaves), array_agg(DISTINCT s.stream_no)
      INTO looked_at, next_leaf, numbers
      FROM (SELECT s.* FROM leaf_spans s WHERE s.first_index >= place ORDER BY s.first_index LIMIT rows_max) AS s;
    IF looked_at = 0 THEN
        next_leaf := place;
        RETURN NEXT;
        RETURN;
    END IF;

    INSERT INTO digest_leaves (prefix, leaf_index)
    SELECT digest_prefix(d.digest), s.first_index + l.place - 1
      FROM (SELECT s.* FROM leaf_spans s WHERE s.first_index >= place AND s.first_index < fold_calls.next_leaf
             ORDER BY s.first_index) AS s
      JOIN links l ON l.stream_no = s.stream_no AND l.sequence_number >= s.sequence_number
                  AND l.sequence_number < s.sequence_number + s.leaves
     CROSS JOIN LATERAL (VALUES (l.entry_digest), (l.artifact_digest)) AS d(digest);

    WITH fresh AS MATERIALIZED (
        SELECT f.* FROM heads h CROSS JOIN LATERAL facts_of(h.stream_no) AS f
         WHERE h.stream_no = ANY (numbers) AND h.stream >= 'trace:' AND h.stream < 'trace;'
    ), changed AS MATERIALIZED (  -- what stood before is taken back, what stands now is added: in one snapshot
        SELECT 1 AS sign, f.* FROM fresh f
         UNION ALL
        SELECT -1, c.* FROM fresh f JOIN call_facts c ON c.stream_no = f.stream_no
    ), kept AS (
        INSERT INTO call_facts SELECT f.* FROM fresh f
            ON CONFLICT (stream_no) DO UPDATE
           SET sequence_number = excluded.sequence_number, state = excluded.state, asked_at = excluded.asked_at,
               decided_by = excluded.decided_by, decider = excluded.decider, policy_ids = excluded.policy_ids,
               error_code = excluded.error_code, attempts = excluded.attempts, decided_ms = excluded.decided_ms,
               dispatch_ms = excluded.dispatch_ms, total_ms = excluded.total_ms
    ), measured AS (
        SELECT c.tenant, span_of(c.asked_at, 60) AS minute, c.subject, c.name, m.measure, m.detail,
               sum(c.sign * m.calls) AS calls
          FROM changed c
         CROSS JOIN LATERAL (
            SELECT 'asked', '', 1
                 UNION ALL SELECT lower(c.state), '', 1 WHERE c.state IN ('COMPLETED', 'FAILED', 'DENIED')
                 UNION ALL SELECT 'decided_by', c.decided_by, 1 WHERE c.decided_by IS NOT NULL
                 UNION ALL SELECT 'rule', r, 1 FROM unnest(c.policy_ids) AS r
                 UNION ALL SELECT 'error', left(c.error_code, 128), 1 WHERE c.error_code IS NOT NULL
                 UNION ALL SELECT 'sent', '', c.attempts WHERE c.attempts > 0
                 UNION ALL SELECT 'latency', latency_step(c.dispatch_ms), 1 WHERE c.dispatch_ms IS NOT NULL
               ) AS m(measure, detail, calls)
         WHERE c.tenant IS NOT NULL AND c.subject IS NOT NULL AND c.name IS NOT NULL AND c.asked_at IS NOT NULL
         GROUP BY 1, 2, 3, 4, 5, 6
    )
    INSERT INTO call_counts AS k (tenant, span_s, began, subject, name, measure, detail, calls)
    SELECT m.tenant, s.span_s, span_of(m.minute, s.span_s) AS began, m.subject, m.name, m.measure, m.detail,
           sum(m.calls)
      FROM measured m CROSS JOIN (VALUES (60), (1800), (14400), (86400)) AS s(span_s)
     WHERE s.span_s > 60 OR m.minute > statement_timestamp() - interval '2 days'
     GROUP BY 1, 2, 3, 4, 5, 6, 7 HAVING sum(m.calls) <> 0
     ORDER BY 2, 3, 1, 4, 5, 6, 7  -- what is read together is stored together
        ON CONFLICT (tenant, span_s, began, subject, name, measure, detail)
        DO UPDATE SET calls = k.calls + excluded.calls;

    UPDATE call_fold f SET next_leaf = fold_calls.next_leaf;
    RETURN NEXT;
END
$$;

-- As in 0023, with four hours. In the order of the fold, so that neither waits for the other.
CREATE OR REPLACE FUNCTION tga.count_replays(r_tenant text[], r_subject text[], r_name text[], r_calls bigint[])
RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    INSERT INTO call_counts AS k (tenant, span_s, began, subject, name, measure, detail, calls)
    SELECT r.tenant, s.span_s, span_of(statement_timestamp(), s.span_s), r.subject, r.name, 'replayed', '', sum(r.calls)
      FROM unnest(r_tenant, r_subject, r_name, r_calls) AS r(tenant, subject, name, calls)
     CROSS JOIN (VALUES (60), (1800), (14400), (86400)) AS s(span_s)
     WHERE r.calls > 0 GROUP BY 1, 2, 3, 4, 5
     ORDER BY 2, 3, 1, 4, 5
        ON CONFLICT (tenant, span_s, began, subject, name, measure, detail)
        DO UPDATE SET calls = k.calls + excluded.calls
$$;

-- What became of calls in a window: a row for each span of time without names, and one for each tool without a time.
-- `measures`, `details` and `calls` belong together, as in `call_counts`; of a span of time only what tallies need.
-- Rows are read by pages: a plan for any window would follow the index from row to row.
CREATE FUNCTION tga.counts_between(of_tenant text, of_span_s integer, since timestamptz, until timestamptz,
    of_subject text, of_name text)
RETURNS TABLE (began timestamptz, subject text, name text, measures text[], details text[], calls bigint[])
LANGUAGE plpgsql STABLE
SET search_path = pg_catalog, tga, pg_temp
SET plan_cache_mode = force_generic_plan SET enable_indexscan = off SET enable_seqscan = off SET jit = off
AS $$
BEGIN
    RETURN QUERY
    SELECT g.began, g.subject, g.name, array_agg(g.measure), array_agg(g.detail), array_agg(g.calls)
      FROM (SELECT k.began, k.subject, k.name, k.measure, k.detail, sum(k.calls)::bigint AS calls
              FROM call_counts k
             WHERE k.tenant = of_tenant AND k.span_s = of_span_s AND k.began >= since AND k.began < until
               AND (of_subject IS NULL OR k.subject = of_subject) AND (of_name IS NULL OR k.name = of_name)
             GROUP BY GROUPING SETS ((k.began, k.measure, k.detail), (k.subject, k.name, k.measure, k.detail))) AS g
     WHERE g.began IS NULL OR g.measure NOT IN ('decided_by', 'rule', 'error')
     GROUP BY g.began, g.subject, g.name;
END
$$;
REVOKE ALL ON FUNCTION tga.counts_between FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.counts_between TO tga_gateway;
