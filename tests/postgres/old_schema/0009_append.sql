-- The append function of 0006 says the same and costs less. Documents were carried from step to step, what had been
-- found was packed into rows and unpacked five times, and large batches compared each with each. Now each document is
-- read once, what was found is kept in one array for each column, and a broken rule is only named while looking: its
-- words, with what was expected and found, are looked for when there is one. Entries must stand in the order of their
-- plans, as the gateway always sent them. tests/postgres/test_append_0009.py puts both to the same batches.

-- As in 0002. Assignments and not PERFORM: an expression is evaluated at once, a query is started and ended.
CREATE OR REPLACE FUNCTION tga.prepare_transaction(lock_timeout_ms integer) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    set_to text;
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'tga functions need READ COMMITTED: a snapshot older than the lock would be stale'
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    -- In the body, and local to the transaction: a setting attached to the function is undone before the commit.
    IF pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        set_to := pg_catalog.set_config('synchronous_commit', 'on', true);
    END IF;
    set_to := pg_catalog.set_config('lock_timeout', greatest(lock_timeout_ms, 1)::text, true);  -- 0 would be for ever
END
$$;

DROP FUNCTION tga.append;
DROP TYPE tga.checked_entry;

-- A refusal of a plan, in words.
CREATE FUNCTION tga.refusal(plan integer, code text, sequence_number bigint, what text, expected text, found text) RETURNS tga.plan_result
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, tga, pg_temp
AS 'SELECT ROW(plan, code, sequence_number, what, expected, found, NULL, NULL)::plan_result';

-- Append each plan whole or not at all; the loser of one does not fail the others (I7).
--
-- Arrays of one letter belong together: plans (p), entries with their artifacts (e), claims (c), execution
-- checkpoints (k), dispatch attempts (d), sealed secrets (s), secrets to forget (f), webhooks to tell (o). `*_plan` is a plan's place in p_stream, from 1.
-- Entries stand in the order of the plans, and of a plan in their own. Checks speak in the order owner, then for each entry
-- schema, sequence, chain and digest, transition, expiry.
CREATE FUNCTION tga.append(
    lock_timeout_ms integer,
    p_stream text[], p_executor uuid[], p_owner_after uuid[], p_waiting_after text[],
    e_plan integer[], e_entry bytea[], e_artifact bytea[],
    c_plan integer[], c_server text[], c_tool text[], c_key text[], c_payload bytea[],
    k_plan integer[], k_state bytea[], k_created_at text[],
    d_plan integer[], d_attempt integer[], d_resolution bytea[],
    s_plan integer[], s_salt bytea[], s_values bytea[], f_plan integer[],
    o_plan integer[], o_webhook text[]
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
-- Plans are made while the tables are empty and must still be right when they are huge; and made once: planning again
-- for each call costs more than the call. A table that grows is only ever the inner side of a join: left joins and
-- subqueries leave no choice, and where there is one `= ANY (p_stream)` bounds what can be looked at.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_memoize = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    -- Of the plans (g), by their place: their kind's rules, where their entries begin, and the head that they found.
    g_kind text[]; g_id_field text[]; g_schema_id text[]; g_tenant_path text[]; g_first integer[]; g_is_new boolean[];
    g_sequence bigint[]; g_digest bytea[]; g_artifact bytea[]; g_state text[]; g_expires timestamptz[];
    -- Of the entries (x), by their place; `ends` are the places of the last entries of the plans.
    x_digest bytea[]; x_artifact bytea[]; x_entry jsonb[]; x_body jsonb[]; x_settles boolean[]; ends integer[];
    -- Of the checkpoints (y).
    y_sequence bigint[]; y_digest bytea[]; y_is_new boolean[];
    is_dishonest boolean;    -- what nobody honest sends
    broken text[];           -- the rule that a plan or an entry breaks
    broken_by integer[];     -- and its place
    wrong plan_result[];     -- what was found now
    refusals plan_result[];  -- and before, one for each plan at most
    refused integer[] := '{}';
    rows_claimed bigint;
    appended plan_result;
BEGIN
    -- As conditions, here and with the lock: an expression is evaluated at once, PERFORM would start a query.
    IF prepare_transaction(lock_timeout_ms) IS NULL THEN END IF;

    -- Each array has one dimension and begins at 1, and those of one letter are equally long: what is judged by its place is
    -- stored by its place.
    IF (coalesce(array_dims(p_stream), '[1:0]') = '[1:' || cardinality(p_stream) || ']'
            AND (array_dims(p_executor), array_dims(p_owner_after), array_dims(p_waiting_after)) IS NOT DISTINCT FROM (array_dims(p_stream), array_dims(p_stream), array_dims(p_stream))
        AND coalesce(array_dims(e_plan), '[1:0]') = '[1:' || cardinality(e_plan) || ']'
            AND (array_dims(e_entry), array_dims(e_artifact)) IS NOT DISTINCT FROM (array_dims(e_plan), array_dims(e_plan))
        AND coalesce(array_dims(c_plan), '[1:0]') = '[1:' || cardinality(c_plan) || ']'
            AND (array_dims(c_server), array_dims(c_tool), array_dims(c_key), array_dims(c_payload)) IS NOT DISTINCT FROM (array_dims(c_plan), array_dims(c_plan), array_dims(c_plan), array_dims(c_plan))
        AND coalesce(array_dims(k_plan), '[1:0]') = '[1:' || cardinality(k_plan) || ']'
            AND (array_dims(k_state), array_dims(k_created_at)) IS NOT DISTINCT FROM (array_dims(k_plan), array_dims(k_plan))
        AND coalesce(array_dims(d_plan), '[1:0]') = '[1:' || cardinality(d_plan) || ']'
            AND (array_dims(d_attempt), array_dims(d_resolution)) IS NOT DISTINCT FROM (array_dims(d_plan), array_dims(d_plan))
        AND coalesce(array_dims(s_plan), '[1:0]') = '[1:' || cardinality(s_plan) || ']'
            AND (array_dims(s_salt), array_dims(s_values)) IS NOT DISTINCT FROM (array_dims(s_plan), array_dims(s_plan))
        AND coalesce(array_dims(f_plan), '[1:0]') = '[1:' || cardinality(f_plan) || ']'
        AND coalesce(array_dims(o_plan), '[1:0]') = '[1:' || cardinality(o_plan) || ']' AND array_dims(o_webhook) IS NOT DISTINCT FROM array_dims(o_plan)) IS NOT TRUE THEN
        RAISE EXCEPTION 'arrays that belong together differ in shape' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- Everything belongs to a plan that is there, a plan has one claim, one checkpoint, one attempt at most, and entries
    -- stand in the order of the plans: this and what is checked for it below. Nobody honest sends otherwise.
    IF (1 <= ALL (e_plan || c_plan || k_plan || d_plan || s_plan || f_plan || o_plan)
        AND cardinality(p_stream) >= ALL (e_plan || c_plan || k_plan || d_plan || s_plan || f_plan || o_plan)) IS NOT TRUE THEN
        RAISE EXCEPTION 'something belongs to no plan' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- I6: sorted, so that two batches cannot wait for each other.
    IF cardinality(p_stream) = 1 THEN
        IF pg_advisory_xact_lock(stream_lock_key(p_stream[1])) IS NULL THEN END IF;
    ELSE
        PERFORM pg_advisory_xact_lock(k)
           FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(p_stream) AS s ORDER BY k) AS keys;
    END IF;

    -- A later statement than the locks: it sees all that was committed before they were obtained. Here and below a rule
    -- that is broken is only named; the words are found when there is one.
    SELECT array_agg(p.kind), array_agg(p.id_field), array_agg(p.entry_schema_id), array_agg(p.tenant_path::text), array_agg(p.first),
           array_agg(p.is_new), array_agg(p.head_sequence), array_agg(p.entry_digest), array_agg(p.artifact_digest), array_agg(p.state),
           array_agg(p.expires_at), array_agg(p.plan) FILTER (WHERE p.rule IS NOT NULL), array_agg(p.rule) FILTER (WHERE p.rule IS NOT NULL), bool_or(p.is_twice)
      INTO g_kind, g_id_field, g_schema_id, g_tenant_path, g_first, g_is_new, g_sequence, g_digest, g_artifact, g_state, g_expires, broken_by, broken, is_dishonest
      FROM (SELECT i AS plan, k.kind, k.id_field, k.entry_schema_id, k.tenant_path, n.first, h.stream IS NULL AS is_new,
                   coalesce(h.sequence_number, 0) AS head_sequence, h.entry_digest, h.artifact_digest, coalesce(h.state, k.birth_state) AS state, h.expires_at,
                   cardinality(array_positions(c_plan, i)) > 1 OR cardinality(array_positions(k_plan, i)) > 1 OR cardinality(array_positions(d_plan, i)) > 1 AS is_twice,
                   CASE WHEN k.kind IS NULL THEN 'kind'
                        WHEN p_executor[i] IS NULL THEN 'executor'
                        WHEN array_position(p_stream, p_stream[i]) < i THEN 'once'
                        WHEN n.first IS NULL AND coalesce(h.sequence_number, 0) = 0 THEN 'something'
                        -- I6: the fence; a zombie's late effect ends here. Whoever is about to send must be the owner: a
                        -- finished stream has none.
                        WHEN h.owner <> p_executor[i] OR (h.owner IS NULL AND i = ANY (d_plan)) THEN 'owner'
                        WHEN i = ANY (d_plan) AND h.is_open IS NOT TRUE THEN 'open' END AS rule
              FROM generate_subscripts(p_stream, 1) AS i
              LEFT JOIN stream_kinds k ON k.kind = split_part(p_stream[i], ':', 1)
              LEFT JOIN heads h ON h.stream = p_stream[i]
             CROSS JOIN LATERAL (SELECT array_position(e_plan, i) AS first OFFSET 0) AS n OFFSET 0) AS p;
    IF is_dishonest THEN
        RAISE EXCEPTION 'a plan stands twice among claims, checkpoints or attempts' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF broken IS NOT NULL THEN
        refused := broken_by;
        SELECT array_agg(CASE b.rule
               WHEN 'kind' THEN refusal(b.plan, 'SCHEMA_VIOLATION', NULL, 'no such kind of stream', NULL, split_part(p_stream[b.plan], ':', 1))
               WHEN 'executor' THEN refusal(b.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'the append names no executor', NULL, NULL)
               WHEN 'once' THEN refusal(b.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'the stream stands twice in one batch', NULL, NULL)
               WHEN 'something' THEN refusal(b.plan, 'TRACE_NOT_FOUND', NULL, 'the stream has no entries', NULL, NULL)
               WHEN 'owner' THEN refusal(b.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'another executor owns the stream', p_executor[b.plan]::text,
                                         (SELECT h.owner::text FROM heads h WHERE h.stream = p_stream[b.plan]))
               WHEN 'open' THEN refusal(b.plan, 'STATE_INVALID_TRANSITION', NULL, 'the stream is finished: nothing is sent for it', NULL, NULL) END)
          INTO refusals
          FROM unnest(broken_by, broken) AS b(plan, rule);
    END IF;

    IF e_plan <> '{}' THEN
        SELECT array_agg(sha256(u.entry)), array_agg(sha256(u.artifact)),
               array_agg(convert_from(u.entry, 'UTF8')::jsonb), array_agg(convert_from(u.artifact, 'UTF8')::jsonb)
          INTO x_digest, x_artifact, x_entry, x_body
          FROM unnest(e_entry, e_artifact) AS u(entry, artifact);

        SELECT array_agg(e.place) FILTER (WHERE e.is_last), array_agg(e.settles_claim),
               array_agg(e.place) FILTER (WHERE e.rule IS NOT NULL), array_agg(e.rule) FILTER (WHERE e.rule IS NOT NULL), bool_or(e.is_misplaced)
          INTO ends, x_settles, broken_by, broken, is_dishonest
          FROM (SELECT e.place, e.is_last, e.is_misplaced, r.settles_claim, CASE
                       WHEN e.plan = ANY (refused) THEN NULL
                       WHEN octet_length(e_entry[e.place]) > 65535 THEN 'size'
                       WHEN e.entry ->> 'schema_id' IS DISTINCT FROM g_schema_id[e.plan] THEN 'schema'
                       WHEN jsonb_typeof(e.entry -> 'sequence_number') IS DISTINCT FROM 'number' THEN 'number'
                       WHEN e.entry ->> g_id_field[e.plan] IS DISTINCT FROM e.id THEN 'id'
                       WHEN r.schema_id IS NOT NULL AND e.body ->> 'schema_id' IS DISTINCT FROM r.schema_id THEN 'artifact schema'
                       WHEN e.entry ->> 'sequence_number' IS DISTINCT FROM (g_sequence[e.plan] + e.number)::text THEN 'sequence'
                       WHEN e.entry ->> 'prev_entry_digest' IS DISTINCT FROM coalesce(
                            encode(CASE WHEN e.number > 1 THEN x_digest[e.place - 1] ELSE g_digest[e.plan] END, 'hex'), repeat('0', 64)) THEN 'link'  -- I5
                       WHEN e.entry ->> 'artifact_digest' IS DISTINCT FROM encode(x_artifact[e.place], 'hex') THEN 'artifact'
                       WHEN e.body ->> g_id_field[e.plan] IS DISTINCT FROM e.id THEN 'artifact id'
                       WHEN r.binds_field IS NOT NULL AND e.body ->> r.binds_field IS DISTINCT FROM
                            encode(CASE WHEN e.number > 1 THEN x_artifact[e.place - 1] ELSE g_artifact[e.plan] END, 'hex') THEN 'binding'
                       WHEN e.from_state IS DISTINCT FROM CASE WHEN e.number > 1 THEN x_entry[e.place - 1] ->> 'to_state' ELSE g_state[e.plan] END
                            OR t.to_state IS NULL OR e.entry ->> 'to_state' IS DISTINCT FROM t.to_state THEN 'transition'
                       -- A waiting request's time is judged here, by this clock, under the stream's lock: late is late, swept or not.
                       WHEN g_expires[e.plan] IS NOT NULL AND r.decides
                            AND (clock_timestamp() >= g_expires[e.plan]) <> (coalesce(e.body #>> '{decided_by,type}', '') = 'expiry') THEN 'time' END AS rule
                  FROM (SELECT i AS place, e_plan[i] AS plan, i - g_first[e_plan[i]] + 1 AS number, e_plan[i + 1] IS DISTINCT FROM e_plan[i] AS is_last, e_plan[i] < e_plan[i - 1] AS is_misplaced,
                               x_entry[i] AS entry, x_body[i] AS body, x_entry[i] ->> 'artifact_type' AS artifact_type, x_entry[i] ->> 'from_state' AS from_state,
                               g_kind[e_plan[i]] AS kind, substr(p_stream[e_plan[i]], length(g_kind[e_plan[i]]) + 2) AS id
                          FROM generate_subscripts(e_plan, 1) AS i OFFSET 0) AS e
                  LEFT JOIN artifact_rules r ON r.kind = e.kind AND r.artifact_type = e.artifact_type
                  LEFT JOIN transitions t ON t.kind = e.kind AND t.from_state = e.from_state AND t.artifact_type = e.artifact_type
                       AND t.verdict = coalesce(e.body ->> r.verdict_field, '') AND t.is_birth = (g_sequence[e.plan] + e.number = 1) OFFSET 0) AS e;
        IF is_dishonest THEN
            RAISE EXCEPTION 'the entries do not stand in the order of their plans' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        IF broken IS NOT NULL THEN
            SELECT array_agg(CASE b.rule
                   WHEN 'size' THEN refusal(b.plan, 'INPUT_TOO_LARGE', b.next, 'the entry is too large', '65535 bytes at most', octet_length(e_entry[b.place])::text)
                   WHEN 'schema' THEN refusal(b.plan, 'SCHEMA_VIOLATION', b.next, 'the entry has another schema', g_schema_id[b.plan], b.entry ->> 'schema_id')
                   WHEN 'number' THEN refusal(b.plan, 'SCHEMA_VIOLATION', b.next, 'the sequence number is no number', 'number', jsonb_typeof(b.entry -> 'sequence_number'))
                   WHEN 'id' THEN refusal(b.plan, 'SCHEMA_VIOLATION', b.next, 'the entry names another stream', b.id, b.entry ->> g_id_field[b.plan])
                   WHEN 'artifact schema' THEN refusal(b.plan, 'SCHEMA_VIOLATION', b.next, 'the artifact has another schema', r.schema_id, b.body ->> 'schema_id')
                   WHEN 'sequence' THEN refusal(b.plan, 'STATE_SEQUENCE_GAP', b.next, 'the entry is not the next of its stream', b.next::text, b.entry ->> 'sequence_number')
                   WHEN 'link' THEN refusal(b.plan, 'STATE_CHECKSUM_MISMATCH', b.next, 'the entry does not link to the one before it',
                                            coalesce(encode(b.prev_digest, 'hex'), repeat('0', 64)), b.entry ->> 'prev_entry_digest')
                   WHEN 'artifact' THEN refusal(b.plan, 'STATE_CHECKSUM_MISMATCH', b.next, 'the artifact is not the one that the entry commits to',
                                                b.entry ->> 'artifact_digest', encode(x_artifact[b.place], 'hex'))
                   WHEN 'artifact id' THEN refusal(b.plan, 'STATE_CHECKSUM_MISMATCH', b.next, 'the artifact names another stream', b.id, b.body ->> g_id_field[b.plan])
                   WHEN 'binding' THEN refusal(b.plan, 'STATE_CHECKSUM_MISMATCH', b.next, 'the artifact does not bind to the one before it',
                                               encode(b.prev_artifact, 'hex'), b.body ->> r.binds_field)
                   WHEN 'transition' THEN refusal(b.plan, 'STATE_INVALID_TRANSITION', b.next, 'the state does not admit this artifact', b.state || coalesce(' to ' || t.to_state, ''),
                                                  concat(b.entry ->> 'from_state', ' to ', b.entry ->> 'to_state', ' by ', b.entry ->> 'artifact_type'))
                   WHEN 'time' THEN refusal(b.plan, CASE WHEN b.body #>> '{decided_by,type}' = 'expiry' THEN 'APPROVAL_NOT_EXPIRED' ELSE 'APPROVAL_EXPIRED' END, b.next,
                                            CASE WHEN b.body #>> '{decided_by,type}' = 'expiry' THEN 'the request has not expired yet' ELSE 'the request has expired' END,
                                            to_char(g_expires[b.plan] AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
                                            to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')) END)
              INTO wrong
              -- Of several entries of a plan only the first is wrong for sure.
              FROM (SELECT DISTINCT ON (e_plan[u.place]) u.place, u.rule, e_plan[u.place] AS plan, x_entry[u.place] AS entry, x_body[u.place] AS body,
                           g_sequence[e_plan[u.place]] + u.place - g_first[e_plan[u.place]] + 1 AS next,
                           substr(p_stream[e_plan[u.place]], length(g_kind[e_plan[u.place]]) + 2) AS id,
                           CASE WHEN u.place > g_first[e_plan[u.place]] THEN x_digest[u.place - 1] ELSE g_digest[e_plan[u.place]] END AS prev_digest,
                           CASE WHEN u.place > g_first[e_plan[u.place]] THEN x_artifact[u.place - 1] ELSE g_artifact[e_plan[u.place]] END AS prev_artifact,
                           CASE WHEN u.place > g_first[e_plan[u.place]] THEN x_entry[u.place - 1] ->> 'to_state' ELSE g_state[e_plan[u.place]] END AS state
                      FROM unnest(broken_by, broken) AS u(place, rule) ORDER BY e_plan[u.place], u.place) AS b
              LEFT JOIN artifact_rules r ON r.kind = g_kind[b.plan] AND r.artifact_type = b.entry ->> 'artifact_type'
              LEFT JOIN transitions t ON t.kind = g_kind[b.plan] AND t.from_state = b.entry ->> 'from_state' AND t.artifact_type = b.entry ->> 'artifact_type'
                   AND t.verdict = coalesce(b.body ->> r.verdict_field, '') AND t.is_birth = (b.next = 1);
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
        END IF;
    END IF;

    IF k_plan <> '{}' THEN  -- I4: a checkpoint stands only on the entry it says
        SELECT array_agg(s.sequence_number), array_agg(s.digest), array_agg(x.stream IS NULL),
               array_agg(refusal(u.plan, 'STATE_CHECKSUM_MISMATCH', s.sequence_number, 'the checkpoint does not stand on its entry',
                                 encode(e.entry_digest, 'hex'), coalesce(s.entry_digest, 'nothing')))
                   FILTER (WHERE u.plan <> ALL (refused) AND (s.entry_digest IS DISTINCT FROM encode(e.entry_digest, 'hex')
                                                              OR (x.stream IS NOT NULL AND x.checkpoint_digest <> s.digest)))
          INTO y_sequence, y_digest, y_is_new, wrong
          FROM (SELECT k_plan[i] AS plan, k_state[i] AS state_bytes FROM generate_subscripts(k_plan, 1) AS i OFFSET 0) AS u
         CROSS JOIN LATERAL (
               SELECT (j.state ->> 'sequence_number')::bigint AS sequence_number, j.state ->> 'entry_digest' AS entry_digest, sha256(u.state_bytes) AS digest
                 FROM (SELECT convert_from(u.state_bytes, 'UTF8')::jsonb AS state OFFSET 0) AS j OFFSET 0) AS s
         CROSS JOIN LATERAL (  -- where it is among the new entries, if it is
               SELECT CASE WHEN s.sequence_number > g_sequence[u.plan] AND s.sequence_number <= g_sequence[u.plan] + cardinality(e_plan)
                           THEN g_first[u.plan] + (s.sequence_number - g_sequence[u.plan])::integer - 1 END AS place OFFSET 0) AS n
         CROSS JOIN LATERAL (
               SELECT CASE WHEN e_plan[n.place] = u.plan THEN x_digest[n.place]
                           ELSE (SELECT o.entry_digest FROM entries o
                                  WHERE o.stream = p_stream[u.plan] AND o.sequence_number = s.sequence_number) END AS entry_digest OFFSET 0) AS e
          LEFT JOIN execution_checkpoints x ON x.stream = p_stream[u.plan] AND x.sequence_number = s.sequence_number;
        IF wrong IS NOT NULL THEN
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
        END IF;
    END IF;

    IF d_plan <> '{}' THEN
        SELECT array_agg(ROW(u.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'the attempt is not the next one',
                             n.expected::text, u.attempt::text, NULL, NULL)::plan_result)
          INTO wrong
          FROM unnest(d_plan, d_attempt) AS u(plan, attempt)
         CROSS JOIN LATERAL (SELECT (SELECT coalesce(max(a.attempt), 1) + 1 FROM dispatch_attempts a
                                      WHERE a.stream = p_stream[u.plan]) AS expected OFFSET 0) AS n
         WHERE u.attempt <> n.expected AND u.plan <> ALL (refused);
        IF wrong IS NOT NULL THEN
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
        END IF;
    END IF;

    IF c_plan <> '{}' THEN  -- I2
        -- Sorted, because a transaction that meets another's uncommitted key waits for it.
        INSERT INTO claims (server_id, tool_name, idempotency_key, stream, payload_digest)
        SELECT c_server[i], c_tool[i], c_key[i], p_stream[c_plan[i]], c_payload[i]
          FROM generate_subscripts(c_plan, 1) AS i
         WHERE c_plan[i] <> ALL (refused) AND g_sequence[c_plan[i]] = 0 AND g_first[c_plan[i]] IS NOT NULL
         ORDER BY c_server[i] COLLATE "C", c_tool[i] COLLATE "C", c_key[i] COLLATE "C"
            ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS rows_claimed = ROW_COUNT;
        IF rows_claimed < cardinality(c_plan) THEN
            -- A later statement: in the same one the loser would not see the winner's row.
            SELECT array_agg(ROW(u.plan, CASE WHEN w.stream IS NULL THEN 'STATE_RECOVERY_FAILED' ELSE 'IDEMPOTENCY_KEY_CLAIMED' END, NULL,
                                 CASE WHEN w.stream IS NULL THEN 'a claim is made with the first entry of its stream, once'
                                      ELSE 'another claim stands in the way' END, NULL, w.stream, w.stream, w.payload_digest)::plan_result)
              INTO wrong
              FROM unnest(c_plan, c_server, c_tool, c_key) AS u(plan, server, tool, key)
              LEFT JOIN claims w ON w.server_id = u.server AND w.tool_name = u.tool AND w.idempotency_key = u.key
             WHERE u.plan <> ALL (refused) AND w.stream IS DISTINCT FROM p_stream[u.plan];
            IF wrong IS NOT NULL THEN
                refusals := refusals || wrong;
                refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
            END IF;
        END IF;
    END IF;

    IF e_plan <> '{}' THEN
        INSERT INTO entries (stream, sequence_number, entry, entry_digest)
        SELECT p_stream[e_plan[i]], g_sequence[e_plan[i]] + i - g_first[e_plan[i]] + 1, e_entry[i], x_digest[i]
          FROM generate_subscripts(e_plan, 1) AS i WHERE e_plan[i] <> ALL (refused);

        INSERT INTO artifacts (stream, sequence_number, artifact)
        SELECT p_stream[e_plan[i]], g_sequence[e_plan[i]] + i - g_first[e_plan[i]] + 1, e_artifact[i]
          FROM generate_subscripts(e_plan, 1) AS i WHERE e_plan[i] <> ALL (refused);

        -- Nobody else can make or move these heads: the streams are locked. Whose a stream is, its birth says; it may find
        -- the head of a stream that was owned before it had entries.
        IF true = ANY (g_is_new) THEN
            INSERT INTO heads (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting,
                               tenant, principal_id, server_id, tool_name, expires_at, is_open)
            SELECT p_stream[p], last - g_first[p] + 1, x_digest[last], x_entry[last] ->> 'to_state', x_artifact[last], p_owner_after[p], p_waiting_after[p],
                   birth #>> g_tenant_path[p]::text[], birth #>> '{principal,principal_id}', birth ->> 'server_id', birth ->> 'tool_name',
                   (birth ->> 'expires_at')::timestamptz,
                   EXISTS (SELECT FROM transitions t WHERE t.kind = g_kind[p] AND t.from_state = x_entry[last] ->> 'to_state' AND NOT t.is_birth)
              FROM (SELECT e_plan[last] AS p, last, x_body[g_first[e_plan[last]]] AS birth FROM unnest(ends) AS last OFFSET 0) AS e
             WHERE g_is_new[p] AND p <> ALL (refused);
        END IF;

        IF false = ANY (g_is_new) THEN
            UPDATE heads h
               SET sequence_number = g_sequence[p] + last - g_first[p] + 1, entry_digest = x_digest[last], state = x_entry[last] ->> 'to_state',
                   artifact_digest = x_artifact[last], owner = p_owner_after[p], waiting = p_waiting_after[p], updated_at = clock_timestamp(),
                   is_open = EXISTS (SELECT FROM transitions t WHERE t.kind = g_kind[p] AND t.from_state = x_entry[last] ->> 'to_state' AND NOT t.is_birth),
                   tenant = coalesce(h.tenant, birth #>> g_tenant_path[p]::text[]), principal_id = coalesce(h.principal_id, birth #>> '{principal,principal_id}'),
                   server_id = coalesce(h.server_id, birth ->> 'server_id'), tool_name = coalesce(h.tool_name, birth ->> 'tool_name'),
                   expires_at = coalesce(h.expires_at, (birth ->> 'expires_at')::timestamptz)
              FROM (SELECT e_plan[last] AS p, last, CASE WHEN g_sequence[e_plan[last]] = 0 THEN x_body[g_first[e_plan[last]]] END AS birth
                      FROM unnest(ends) AS last OFFSET 0) AS e
             WHERE h.stream = p_stream[p] AND h.stream = ANY (p_stream) AND NOT g_is_new[p] AND p <> ALL (refused);
        END IF;

        IF true = ANY (x_settles) THEN
            INSERT INTO claim_effects (stream, artifact_digest)  -- I2: in the transaction that appends the effect
            SELECT p_stream[e_plan[i]], x_artifact[i] FROM generate_subscripts(e_plan, 1) AS i
             WHERE x_settles[i] AND e_plan[i] <> ALL (refused) AND (SELECT true FROM claims c WHERE c.stream = p_stream[e_plan[i]]);
        END IF;
    END IF;

    IF cardinality(ends) IS DISTINCT FROM cardinality(p_stream) THEN
        -- Plans of nothing but an attempt, or of nothing, still say who owns the stream, and for whom it waits.
        UPDATE heads h SET owner = p_owner_after[p], waiting = p_waiting_after[p], updated_at = clock_timestamp()
          FROM generate_subscripts(p_stream, 1) AS p
         WHERE h.stream = p_stream[p] AND h.stream = ANY (p_stream) AND p <> ALL (e_plan) AND p <> ALL (k_plan) AND p <> ALL (refused)
           AND (h.owner IS DISTINCT FROM p_owner_after[p] OR h.waiting IS DISTINCT FROM p_waiting_after[p]);
    END IF;

    IF k_plan <> '{}' THEN
        INSERT INTO execution_checkpoints (stream, sequence_number, checkpoint_state, checkpoint_digest, created_at)
        SELECT p_stream[k_plan[i]], y_sequence[i], k_state[i], y_digest[i], k_created_at[i]
          FROM generate_subscripts(k_plan, 1) AS i WHERE y_is_new[i] AND k_plan[i] <> ALL (refused);
    END IF;

    IF d_plan <> '{}' THEN
        INSERT INTO dispatch_attempts (stream, attempt, executor_id, started_at, resolution)
        SELECT p_stream[u.plan], u.attempt, p_executor[u.plan], clock_timestamp(), u.resolution
          FROM unnest(d_plan, d_attempt, d_resolution) AS u(plan, attempt, resolution) WHERE u.plan <> ALL (refused);
    END IF;

    IF s_plan <> '{}' THEN
        INSERT INTO sealed (stream, sealed_salt, sealed_values)
        SELECT p_stream[u.plan], u.salt, u.secrets FROM unnest(s_plan, s_salt, s_values) AS u(plan, salt, secrets) WHERE u.plan <> ALL (refused);
    END IF;

    IF f_plan <> '{}' THEN  -- the salt stays: a repeat of the call is recognised by it
        UPDATE sealed SET sealed_values = NULL
         WHERE stream = ANY (ARRAY(SELECT p_stream[f] FROM unnest(f_plan) AS f WHERE f <> ALL (refused)));
    END IF;

    IF o_plan <> '{}' THEN
        INSERT INTO outbox (webhook, stream)
        SELECT u.webhook, p_stream[u.plan] FROM unnest(o_plan, o_webhook) AS u(plan, webhook) WHERE u.plan <> ALL (refused);
    END IF;

    IF refused <> '{}' THEN
        RETURN QUERY SELECT p, r.code, r.sequence_number, r.what, r.expected, r.found, r.claimed_by, r.claimed_payload
                       FROM generate_subscripts(p_stream, 1) AS p LEFT JOIN unnest(refusals) AS r ON r.plan = p ORDER BY p;
        RETURN;
    END IF;
    FOR plan IN 1 .. cardinality(p_stream) LOOP
        appended.plan := plan;
        RETURN NEXT appended;
    END LOOP;
END
$$;

REVOKE ALL ON FUNCTION tga.append, tga.refusal FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.append TO tga_gateway;
