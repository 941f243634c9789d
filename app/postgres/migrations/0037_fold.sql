-- The fold of calls for half the processor time: facts of all traces of a batch in one statement, and counts of calls
-- that are alike by their number. docs/adr/0040-what-lists-and-statistics-read.md has the figures.

-- As `facts_of`, of all these traces at once. Raises a data exception when a document of any of them cannot be read.
CREATE FUNCTION tga.facts_of_all(numbers bigint[]) RETURNS SETOF tga.call_facts
LANGUAGE sql STABLE
SET search_path = pg_catalog, tga, pg_temp
AS $$
    SELECT h.stream_no, last.sequence_number, h.tenant, h.subject, h.name, h.idempotency_key, last.to_state, t.asked_at,
           d.said #>> '{decided_by,type}', d.said #>> '{decided_by,id}',
           CASE WHEN e.decision IS NOT NULL THEN ARRAY(SELECT jsonb_array_elements_text(d.said -> 'policy_ids')) END,
           f.said #>> '{error,code}',
           CASE WHEN last.to_state = 'EXECUTING'
                THEN 1 + (SELECT count(*) FROM dispatch_attempts a WHERE a.stream = h.stream)
                ELSE coalesce(jsonb_array_length(f.said -> 'attempts'), 0) END,
           milliseconds(t.asked_at, e.decided_at::timestamptz),
           milliseconds((f.said #>> '{attempts,0,started_at}')::timestamptz,
                        (f.said #>> '{attempts,-1,ended_at}')::timestamptz),
           CASE WHEN last.to_state IN ('COMPLETED', 'FAILED', 'DENIED')
                THEN milliseconds(t.asked_at, last.recorded_at::timestamptz) END
      FROM heads h
     CROSS JOIN LATERAL (
           SELECT max(l.sequence_number) AS last,
                  max(l.recorded_at) FILTER (WHERE l.sequence_number = 1) AS asked_at,
                  max(l.recorded_at) FILTER (WHERE l.artifact_type = 'supervisor_decision') AS decided_at,
                  max(l.sequence_number) FILTER (WHERE l.artifact_type = 'supervisor_decision') AS decision,
                  max(l.place) FILTER (WHERE l.artifact_type = 'supervisor_decision') AS decision_place,
                  max(l.sequence_number) FILTER (WHERE l.artifact_type = 'tool_effect') AS effect,
                  max(l.place) FILTER (WHERE l.artifact_type = 'tool_effect') AS effect_place
             FROM links l WHERE l.stream_no = h.stream_no OFFSET 0) AS e
      JOIN links last ON last.stream_no = h.stream_no AND last.sequence_number = e.last
     CROSS JOIN LATERAL (SELECT e.asked_at::timestamptz AS asked_at OFFSET 0) AS t
      LEFT JOIN LATERAL (
           SELECT convert_from(p.artifacts[e.decision_place], 'UTF8')::jsonb AS said FROM payloads p
            WHERE p.stream_no = h.stream_no AND p.sequence_number = e.decision - e.decision_place + 1
           OFFSET 0) AS d ON true
      LEFT JOIN LATERAL (
           SELECT convert_from(p.artifacts[e.effect_place], 'UTF8')::jsonb AS said FROM payloads p
            WHERE p.stream_no = h.stream_no AND p.sequence_number = e.effect - e.effect_place + 1
           OFFSET 0) AS f ON true
     WHERE h.stream_no = ANY (numbers) AND h.stream >= 'trace:' AND h.stream < 'trace;'
$$;
REVOKE ALL ON FUNCTION tga.facts_of_all FROM PUBLIC;

-- As in 0034, with `facts_of_all`; calls that count alike are counted together before their measures are told apart.
CREATE OR REPLACE FUNCTION tga.fold_calls(rows_max integer) RETURNS TABLE (looked_at bigint, next_leaf bigint)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    place bigint;
    numbers bigint[];
    facts call_facts[];
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

    BEGIN
        facts := ARRAY(SELECT f FROM facts_of_all(numbers) AS f);
    EXCEPTION WHEN data_exception THEN  -- trace by trace, so that only what cannot be read is left out
        facts := ARRAY(SELECT f FROM heads h CROSS JOIN LATERAL facts_of(h.stream_no) AS f
                        WHERE h.stream_no = ANY (numbers) AND h.stream >= 'trace:' AND h.stream < 'trace;');
    END;
    WITH fresh AS MATERIALIZED (
        SELECT f.* FROM unnest(facts) AS f
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
    ), alike AS (
        SELECT c.tenant, span_of(c.asked_at, 60) AS minute, c.subject, c.name, c.state, c.decided_by, c.policy_ids,
               c.error_code, c.attempts,
               CASE WHEN c.dispatch_ms IS NOT NULL THEN latency_step(c.dispatch_ms) END AS step, sum(c.sign) AS calls
          FROM changed c
         WHERE c.tenant IS NOT NULL AND c.subject IS NOT NULL AND c.name IS NOT NULL AND c.asked_at IS NOT NULL
         GROUP BY 1, 2, 3, 4, 5, 6, 7, 8, 9, 10 HAVING sum(c.sign) <> 0
    ), measured AS (
        SELECT a.tenant, a.minute, a.subject, a.name, m.measure, m.detail, sum(a.calls * m.each) AS calls
          FROM alike a
         CROSS JOIN LATERAL (
            SELECT 'asked', '', 1
                 UNION ALL SELECT lower(a.state), '', 1 WHERE a.state IN ('COMPLETED', 'FAILED', 'DENIED')
                 UNION ALL SELECT 'decided_by', a.decided_by, 1 WHERE a.decided_by IS NOT NULL
                 UNION ALL SELECT 'rule', r, 1 FROM unnest(a.policy_ids) AS r
                 UNION ALL SELECT 'error', left(a.error_code, 128), 1 WHERE a.error_code IS NOT NULL
                 UNION ALL SELECT 'sent', '', a.attempts WHERE a.attempts > 0
                 UNION ALL SELECT 'latency', a.step, 1 WHERE a.step IS NOT NULL
               ) AS m(measure, detail, each)
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
