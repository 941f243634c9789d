-- What lists, statistics and searches read of calls: facts of each trace, counts by time and tool, digests. All of it
-- is folded from the ledger behind the sequencer, in the order of the tree, and can be made anew (`tga db rebuild`),
-- but for repeats that were answered from the record: these write nothing to the ledger. No call waits for any of this,
-- and nothing is decided by it. docs/adr/0040-what-lists-and-statistics-read.md has the figures.

CREATE TABLE tga.call_facts (
    stream_no       bigint PRIMARY KEY,
    sequence_number bigint NOT NULL,      -- of the last entry that was folded
    tenant          text COLLATE "C",
    subject         text COLLATE "C",     -- as in `heads`: of a trace the tool server
    name            text COLLATE "C",     -- and the tool
    idempotency_key text COLLATE "C",
    state           text NOT NULL,
    asked_at        timestamptz,          -- null when the first entry's time cannot be read
    decided_by      text COLLATE "C",     -- policy, person, expiry or withdrawal
    decider         text COLLATE "C",
    policy_ids      text[],               -- the rules that decided, as the decision names them
    error_code      text COLLATE "C",
    attempts        integer NOT NULL,     -- how often it was sent
    decided_ms      bigint,               -- from the request to the decision
    dispatch_ms     bigint,               -- from the first send to the last answer
    total_ms        bigint                -- from the request to the last entry; null while it is open
);
CREATE INDEX call_facts_by_key ON tga.call_facts (tenant, idempotency_key) WHERE idempotency_key IS NOT NULL;

-- A row for each measure of a tool in a span of time that is not 0, by when calls were asked for.
--
--   measure     detail            counts
--   asked                         calls
--   completed, failed, denied     calls that have ended so
--   decided_by  the type          decisions
--   rule        the policy's id   decisions that it determined
--   error       the code          failed calls
--   sent                          dispatches, repeated ones too
--   latency     the step, 000     calls by time of dispatch: step s is 2^(s/4) ms up to 2^((s+1)/4) ms
--   replayed                      repeats that were answered from the record, by when they were
CREATE TABLE tga.call_counts (
    tenant  text COLLATE "C" NOT NULL,
    span_s  integer NOT NULL CHECK (span_s IN (60, 1800, 86400)),
    began   timestamptz NOT NULL,
    subject text COLLATE "C" NOT NULL,
    name    text COLLATE "C" NOT NULL,
    measure text COLLATE "C" NOT NULL,
    detail  text COLLATE "C" NOT NULL,
    calls   bigint NOT NULL,
    PRIMARY KEY (tenant, span_s, began, subject, name, measure, detail)
) WITH (fillfactor = 80);

-- The first eight bytes of every entry's and artifact's digest, with the leaf.
CREATE TABLE tga.digest_leaves (
    prefix     bigint NOT NULL,
    leaf_index bigint NOT NULL
);
CREATE INDEX digest_leaves_by_prefix ON tga.digest_leaves (prefix);

-- How far the tree was folded.
CREATE TABLE tga.call_fold (
    is_only   boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    next_leaf bigint NOT NULL
);
INSERT INTO tga.call_fold (next_leaf) VALUES (0);

CREATE FUNCTION tga.digest_prefix(digest bytea) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT ('x' || pg_catalog.encode(pg_catalog.substr(digest, 1, 8), 'hex'))::bit(64)::bigint $$;

-- A trace's facts as its entries are now. A document that cannot be read is left out: whoever verifies finds it, and
-- the fold goes on.
CREATE FUNCTION tga.facts_of(number bigint) RETURNS SETOF tga.call_facts
LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    fact call_facts%ROWTYPE;
    head heads%ROWTYPE;
    x record;
    said jsonb;
    last_at timestamptz;
BEGIN
    SELECT * INTO head FROM heads h WHERE h.stream_no = number;
    fact.stream_no := number;
    fact.tenant := head.tenant;
    fact.subject := head.subject;
    fact.name := head.name;
    fact.idempotency_key := head.idempotency_key;
    fact.attempts := 0;
    SELECT l.sequence_number, l.to_state INTO fact.sequence_number, fact.state
      FROM links l WHERE l.stream_no = number ORDER BY l.sequence_number DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    BEGIN
        FOR x IN
            SELECT l.sequence_number, l.artifact_type, l.recorded_at, p.artifacts[l.place] AS body
              FROM links l
              LEFT JOIN payloads p ON p.stream_no = l.stream_no AND p.sequence_number = l.sequence_number - l.place + 1
             WHERE l.stream_no = number ORDER BY l.sequence_number
        LOOP
            last_at := x.recorded_at::timestamptz;
            IF x.sequence_number = 1 THEN
                fact.asked_at := last_at;
            ELSIF x.artifact_type = 'supervisor_decision' THEN
                said := convert_from(x.body, 'UTF8')::jsonb;
                fact.decided_by := said #>> '{decided_by,type}';
                fact.decider := said #>> '{decided_by,id}';
                fact.policy_ids := ARRAY(SELECT jsonb_array_elements_text(said -> 'policy_ids'));
                fact.decided_ms := tga.milliseconds(fact.asked_at, last_at);
            ELSIF x.artifact_type = 'tool_effect' THEN
                said := convert_from(x.body, 'UTF8')::jsonb;
                fact.error_code := said #>> '{error,code}';
                fact.attempts := coalesce(jsonb_array_length(said -> 'attempts'), 0);
                fact.dispatch_ms := tga.milliseconds((said #>> '{attempts,0,started_at}')::timestamptz,
                                                     (said #>> '{attempts,-1,ended_at}')::timestamptz);
            END IF;
        END LOOP;
    EXCEPTION WHEN data_exception THEN
        NULL;
    END;
    IF fact.state = 'EXECUTING' THEN
        fact.attempts := 1 + (SELECT count(*) FROM dispatch_attempts d WHERE d.stream = head.stream);
    ELSIF fact.state IN ('COMPLETED', 'FAILED', 'DENIED') THEN
        fact.total_ms := tga.milliseconds(fact.asked_at, last_at);
    END IF;
    RETURN NEXT fact;
END
$$;

CREATE FUNCTION tga.milliseconds(began timestamptz, ended timestamptz) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT greatest(0, round(extract(epoch FROM ended - began) * 1000))::bigint $$;

-- As text that sorts: a latency of so many milliseconds, to a fifth.
CREATE FUNCTION tga.latency_step(milliseconds bigint) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT to_char(floor(4 * ln(greatest(milliseconds, 1)::float8) / ln(2::float8) + 1e-9), 'FM000') $$;

CREATE FUNCTION tga.span_of(moment timestamptz, span_s integer) RETURNS timestamptz
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT to_timestamp(floor(extract(epoch FROM moment) / span_s) * span_s) $$;

-- Fold the next plans of the tree, at most `rows_max`. In one transaction with the place that was reached: each entry
-- counts once. Returns how many were looked at, none when another gateway folds; and the leaf to go on from.
CREATE FUNCTION tga.fold_calls(rows_max integer) RETURNS TABLE (looked_at bigint, next_leaf bigint)
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
      FROM measured m CROSS JOIN (VALUES (60), (1800), (86400)) AS s(span_s)
     WHERE s.span_s > 60 OR m.minute > statement_timestamp() - interval '2 days'
     GROUP BY 1, 2, 3, 4, 5, 6, 7 HAVING sum(m.calls) <> 0
        ON CONFLICT (tenant, span_s, began, subject, name, measure, detail)
        DO UPDATE SET calls = k.calls + excluded.calls;

    UPDATE call_fold f SET next_leaf = fold_calls.next_leaf;
    RETURN NEXT;
END
$$;

-- Minutes are kept for two days, half hours and days for ever. Returns how many rows went.
CREATE FUNCTION tga.drop_old_counts(rows_max integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    gone bigint := 0;
    went bigint;
    t text;
BEGIN
    PERFORM prepare_transaction(5000);
    FOR t IN SELECT n.tenant FROM tenants n LOOP
        DELETE FROM call_counts k
         WHERE (k.tenant, k.span_s, k.began, k.subject, k.name, k.measure, k.detail) IN (
               SELECT o.tenant, o.span_s, o.began, o.subject, o.name, o.measure, o.detail FROM call_counts o
                WHERE o.tenant = t AND o.span_s = 60 AND o.began < statement_timestamp() - interval '49 hours'
                ORDER BY o.began LIMIT rows_max);
        GET DIAGNOSTICS went = ROW_COUNT;
        gone := gone + went;
    END LOOP;
    RETURN gone;
END
$$;

-- Repeats that were answered from the record, as a gateway has counted them since it last said so.
CREATE FUNCTION tga.count_replays(r_tenant text[], r_subject text[], r_name text[], r_calls bigint[]) RETURNS void
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
    INSERT INTO call_counts AS k (tenant, span_s, began, subject, name, measure, detail, calls)
    SELECT r.tenant, s.span_s, span_of(statement_timestamp(), s.span_s), r.subject, r.name, 'replayed', '', sum(r.calls)
      FROM unnest(r_tenant, r_subject, r_name, r_calls) AS r(tenant, subject, name, calls)
     CROSS JOIN (VALUES (60), (1800), (86400)) AS s(span_s)
     WHERE r.calls > 0 GROUP BY 1, 2, 3, 4, 5
     ORDER BY 1, 2, 3, 4, 5
        ON CONFLICT (tenant, span_s, began, subject, name, measure, detail)
        DO UPDATE SET calls = k.calls + excluded.calls
$$;

-- Forget all that was folded, so that it is folded again from the first leaf. Only for the schema's owner.
CREATE FUNCTION tga.forget_calls() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(tree_lock_key('calls'));
    TRUNCATE call_facts, digest_leaves;
    DELETE FROM call_counts WHERE measure <> 'replayed';
    UPDATE call_fold SET next_leaf = 0;
END
$$;

GRANT SELECT ON tga.call_facts, tga.call_counts, tga.digest_leaves, tga.call_fold TO tga_gateway;
REVOKE ALL ON FUNCTION tga.digest_prefix, tga.facts_of, tga.milliseconds, tga.latency_step, tga.span_of,
    tga.fold_calls, tga.drop_old_counts, tga.count_replays, tga.forget_calls FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.digest_prefix, tga.facts_of, tga.milliseconds, tga.latency_step, tga.span_of,
    tga.fold_calls, tga.drop_old_counts, tga.count_replays TO tga_gateway;
