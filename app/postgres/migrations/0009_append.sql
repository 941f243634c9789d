-- The append function of 0006 says the same and costs less. Documents were carried from step to step, what had been
-- found was packed into rows and unpacked five times, and large batches compared each with each. Now each document is
-- read once and goes no further, what follows is kept in one array for each column, and what is only needed when
-- something is wrong is only done then. tests/postgres/test_append_0009.py puts both to the same batches.

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

-- Append each plan whole or not at all; the loser of one does not fail the others (I7).
--
-- Arrays of one letter belong together: plans (p), entries with their artifacts (e), claims (c), execution
-- checkpoints (k), dispatch attempts (d), sealed secrets (s), secrets to forget (f), webhooks to tell (o). `*_plan` is a plan's place in p_stream, from 1. Entries of a plan stand in
-- their order. Checks speak in the order owner, then for each entry schema, sequence, chain and digest, transition, expiry.
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
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    -- Of the entries (x), of the heads that they make (h), of the checkpoints (y): one array for each column.
    x_plan integer[]; x_place integer[]; x_sequence bigint[]; x_digest bytea[]; x_artifact bytea[]; x_settles boolean[];
    h_plan integer[]; h_is_new boolean[]; h_is_birth boolean[]; h_sequence bigint[]; h_digest bytea[]; h_artifact bytea[]; h_state text[];
    h_tenant text[]; h_principal text[]; h_server text[]; h_tool text[]; h_expires timestamptz[];
    y_sequence bigint[]; y_digest bytea[]; y_is_new boolean[];
    wrong plan_result[];     -- what was found now
    refusals plan_result[];  -- and before, one for each plan at most
    refused integer[] := '{}';
    rows_claimed bigint;
    appended plan_result;
BEGIN
    -- As conditions, here and with the lock: an expression is evaluated at once, PERFORM would start a query.
    IF prepare_transaction(lock_timeout_ms) IS NULL THEN END IF;

    -- Everything belongs to a plan that is there, and a plan has one claim, one checkpoint, one attempt at most. Nobody
    -- honest sends otherwise.
    IF (1 <= ALL (e_plan || c_plan || k_plan || d_plan || s_plan || f_plan || o_plan)
        AND cardinality(p_stream) >= ALL (e_plan || c_plan || k_plan || d_plan || s_plan || f_plan || o_plan)) IS NOT TRUE THEN
        RAISE EXCEPTION 'something belongs to no plan' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF cardinality(c_plan) > 1 OR cardinality(k_plan) > 1 OR cardinality(d_plan) > 1 THEN
        IF cardinality(c_plan) <> (SELECT count(DISTINCT u) FROM unnest(c_plan) AS u)
           OR cardinality(k_plan) <> (SELECT count(DISTINCT u) FROM unnest(k_plan) AS u)
           OR cardinality(d_plan) <> (SELECT count(DISTINCT u) FROM unnest(d_plan) AS u) THEN
            RAISE EXCEPTION 'a plan stands twice among claims, checkpoints or attempts' USING ERRCODE = 'invalid_parameter_value';
        END IF;
    END IF;

    -- I6: sorted, so that two batches cannot wait for each other.
    IF cardinality(p_stream) = 1 THEN
        IF pg_advisory_xact_lock(stream_lock_key(p_stream[1])) IS NULL THEN END IF;
    ELSE
        PERFORM pg_advisory_xact_lock(k)
           FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(p_stream) AS s ORDER BY k) AS keys;
    END IF;

    -- A later statement than the locks: it sees all that was committed before they were obtained.
    WITH links AS (  -- each entry beside its plan, its head and its rules; a plan without entries has one row, too
        SELECT p.plan, p.stream, p.executor, k.kind, k.entry_schema_id, k.birth_state,
               array_position(p_stream, p.stream) < p.plan AS is_repeated, substr(p.stream, length(k.kind) + 2) AS id,
               h.stream IS NULL AS is_new, h.owner, h.is_open, h.entry_digest AS head_digest, h.artifact_digest AS head_artifact,
               h.state AS head_state, h.expires_at, coalesce(h.sequence_number, 0) AS head_sequence,
               e.place, e.number, coalesce(h.sequence_number, 0) + e.number AS next_sequence, cardinality(n.places) AS entries,
               d.entry_bytes, d.entry_digest, d.artifact_digest, encode(d.artifact_digest, 'hex') AS artifact_hex,
               d.doc ->> 'schema_id' AS schema_id, jsonb_typeof(d.doc -> 'sequence_number') AS sequence_type, d.doc ->> k.id_field AS entry_id,
               d.doc ->> 'sequence_number' AS sequence, d.doc ->> 'prev_entry_digest' AS said_prev, d.doc ->> 'artifact_digest' AS said_artifact,
               d.artifact_type, d.from_state, d.doc ->> 'to_state' AS to_state,
               d.body ->> 'schema_id' AS artifact_schema_id, d.body ->> k.id_field AS artifact_id, d.body ->> r.binds_field AS binds,
               r.schema_id AS rule_schema_id, r.binds_field, r.settles_claim, t.to_state AS next_state,
               CASE WHEN r.decides THEN coalesce(d.body #>> '{decided_by,type}', '') = 'expiry' END AS is_expiry,
               CASE WHEN e.number = 1 AND coalesce(h.sequence_number, 0) = 0 THEN d.body END AS birth, k.tenant_path
          FROM (SELECT i AS plan, p_stream[i] AS stream, p_executor[i] AS executor FROM generate_subscripts(p_stream, 1) AS i OFFSET 0) AS p
          LEFT JOIN stream_kinds k ON k.kind = split_part(p.stream, ':', 1)
          LEFT JOIN heads h ON h.stream = p.stream
         CROSS JOIN LATERAL (SELECT array_positions(e_plan, p.plan) AS places OFFSET 0) AS n
          LEFT JOIN LATERAL unnest(n.places) WITH ORDINALITY AS e(place, number) ON true
          LEFT JOIN LATERAL (  -- read and hashed once
               SELECT b.*, b.doc ->> 'artifact_type' AS artifact_type, b.doc ->> 'from_state' AS from_state
                 FROM (SELECT octet_length(e_entry[e.place]) AS entry_bytes,
                              sha256(e_entry[e.place]) AS entry_digest, convert_from(e_entry[e.place], 'UTF8')::jsonb AS doc,
                              sha256(e_artifact[e.place]) AS artifact_digest, convert_from(e_artifact[e.place], 'UTF8')::jsonb AS body OFFSET 0) AS b
               OFFSET 0) AS d ON true
          LEFT JOIN artifact_rules r ON r.kind = k.kind AND r.artifact_type = d.artifact_type
          LEFT JOIN transitions t ON t.kind = k.kind AND t.from_state = d.from_state AND t.artifact_type = d.artifact_type
               AND t.verdict = coalesce(d.body ->> r.verdict_field, '') AND t.is_birth = (coalesce(h.sequence_number, 0) + e.number = 1)
    ), chained AS (
        SELECT l.*, coalesce(encode(coalesce(lag(l.entry_digest) OVER own, l.head_digest), 'hex'), repeat('0', 64)) AS prev_digest,
               coalesce(lag(l.artifact_hex) OVER own, encode(l.head_artifact, 'hex')) AS prev_artifact,
               coalesce(lag(l.to_state) OVER own, l.head_state, l.birth_state) AS state
          FROM links l
        WINDOW own AS (PARTITION BY l.plan ORDER BY l.number)
    ), judged AS (
        SELECT l.*, CASE
               WHEN kind IS NULL THEN
                   ARRAY['SCHEMA_VIOLATION', 'no such kind of stream', NULL, split_part(stream, ':', 1)]
               WHEN executor IS NULL THEN
                   ARRAY['STATE_CONCURRENT_EXECUTION', 'the append names no executor', NULL, NULL]
               WHEN is_repeated THEN
                   ARRAY['STATE_CONCURRENT_EXECUTION', 'the stream stands twice in one batch', NULL, NULL]
               WHEN head_sequence = 0 AND entries = 0 THEN
                   ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
               -- I6: the fence; a zombie's late effect ends here. Whoever is about to send must be the owner: a
               -- finished stream has none.
               WHEN owner <> executor OR (owner IS NULL AND plan = ANY (d_plan)) THEN
                   ARRAY['STATE_CONCURRENT_EXECUTION', 'another executor owns the stream', executor::text, owner::text]
               WHEN plan = ANY (d_plan) AND is_open IS NOT TRUE THEN
                   ARRAY['STATE_INVALID_TRANSITION', 'the stream is finished: nothing is sent for it', NULL, NULL]
               WHEN place IS NULL THEN NULL
               -- What follows is of one entry, and says which: a fifth element.
               WHEN entry_bytes > 65535 THEN
                   ARRAY['INPUT_TOO_LARGE', 'the entry is too large', '65535 bytes at most', entry_bytes::text, 'entry']
               WHEN schema_id IS DISTINCT FROM entry_schema_id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the entry has another schema', entry_schema_id, schema_id, 'entry']
               WHEN sequence_type IS DISTINCT FROM 'number' THEN
                   ARRAY['SCHEMA_VIOLATION', 'the sequence number is no number', 'number', sequence_type, 'entry']
               WHEN entry_id IS DISTINCT FROM id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the entry names another stream', id, entry_id, 'entry']
               WHEN rule_schema_id IS NOT NULL AND artifact_schema_id IS DISTINCT FROM rule_schema_id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the artifact has another schema', rule_schema_id, artifact_schema_id, 'entry']
               WHEN sequence IS DISTINCT FROM next_sequence::text THEN
                   ARRAY['STATE_SEQUENCE_GAP', 'the entry is not the next of its stream', next_sequence::text, sequence, 'entry']
               WHEN said_prev IS DISTINCT FROM prev_digest THEN  -- I5
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the entry does not link to the one before it', prev_digest, said_prev, 'entry']
               WHEN said_artifact IS DISTINCT FROM artifact_hex THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact is not the one that the entry commits to', said_artifact, artifact_hex, 'entry']
               WHEN artifact_id IS DISTINCT FROM id THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact names another stream', id, artifact_id, 'entry']
               WHEN binds_field IS NOT NULL AND binds IS DISTINCT FROM prev_artifact THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact does not bind to the one before it', prev_artifact, binds, 'entry']
               WHEN from_state IS DISTINCT FROM state OR next_state IS NULL OR to_state IS DISTINCT FROM next_state THEN
                   ARRAY['STATE_INVALID_TRANSITION', 'the state does not admit this artifact',
                         state || coalesce(' to ' || next_state, ''), concat(from_state, ' to ', to_state, ' by ', artifact_type), 'entry']
               -- A waiting request's time is judged here, by this clock, under the stream's lock: late is late, swept or not.
               WHEN expires_at IS NOT NULL AND (clock_timestamp() >= expires_at) <> is_expiry THEN
                   ARRAY[CASE WHEN clock_timestamp() >= expires_at THEN 'APPROVAL_EXPIRED' ELSE 'APPROVAL_NOT_EXPIRED' END,
                         CASE WHEN clock_timestamp() >= expires_at THEN 'the request has expired' ELSE 'the request has not expired yet' END,
                         to_char(expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
                         to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'), 'entry']
               END AS judgement
          FROM chained l
    )
    SELECT array_agg(plan) FILTER (WHERE place IS NOT NULL), array_agg(place) FILTER (WHERE place IS NOT NULL),
           array_agg(next_sequence) FILTER (WHERE place IS NOT NULL), array_agg(entry_digest) FILTER (WHERE place IS NOT NULL),
           array_agg(artifact_digest) FILTER (WHERE place IS NOT NULL), array_agg(settles_claim) FILTER (WHERE place IS NOT NULL),
           -- Of the last entry of a plan, and of its first.
           array_agg(plan) FILTER (WHERE number = entries), array_agg(is_new) FILTER (WHERE number = entries),
           array_agg(next_sequence) FILTER (WHERE number = entries), array_agg(entry_digest) FILTER (WHERE number = entries),
           array_agg(artifact_digest) FILTER (WHERE number = entries), array_agg(to_state) FILTER (WHERE number = entries),
           array_agg(next_sequence = 1) FILTER (WHERE number = 1), array_agg(birth #>> tenant_path) FILTER (WHERE number = 1),
           array_agg(birth #>> '{principal,principal_id}') FILTER (WHERE number = 1), array_agg(birth ->> 'server_id') FILTER (WHERE number = 1),
           array_agg(birth ->> 'tool_name') FILTER (WHERE number = 1), array_agg((birth ->> 'expires_at')::timestamptz) FILTER (WHERE number = 1),
           array_agg(ROW(plan, judgement[1], CASE WHEN judgement[5] IS NOT NULL THEN next_sequence END,
                         judgement[2], judgement[3], judgement[4], NULL, NULL)::plan_result) FILTER (WHERE judgement IS NOT NULL)
      INTO x_plan, x_place, x_sequence, x_digest, x_artifact, x_settles,
           h_plan, h_is_new, h_sequence, h_digest, h_artifact, h_state, h_is_birth, h_tenant, h_principal, h_server, h_tool, h_expires,
           wrong
      FROM judged;
    IF wrong IS NOT NULL THEN
        -- What speaks first for each plan. Of several entries only the first is wrong for sure.
        SELECT array_agg(w ORDER BY w.plan), array_agg(w.plan) INTO refusals, refused
          FROM (SELECT DISTINCT ON (w.plan) w.* FROM unnest(wrong) AS w ORDER BY w.plan, w.sequence_number) AS w;
    END IF;

    IF k_plan <> '{}' THEN  -- I4: a checkpoint stands only on the entry it says
        SELECT array_agg(s.sequence_number), array_agg(s.digest), array_agg(x.stream IS NULL),
               array_agg(ROW(u.plan, 'STATE_CHECKSUM_MISMATCH', s.sequence_number, 'the checkpoint does not stand on its entry',
                             encode(e.entry_digest, 'hex'), coalesce(s.entry_digest, 'nothing'), NULL, NULL)::plan_result)
                   FILTER (WHERE u.plan <> ALL (refused) AND (s.entry_digest IS DISTINCT FROM encode(e.entry_digest, 'hex')
                                                              OR (x.stream IS NOT NULL AND x.checkpoint_digest <> s.digest)))
          INTO y_sequence, y_digest, y_is_new, wrong
          FROM (SELECT k_plan[i] AS plan, k_state[i] AS state_bytes FROM generate_subscripts(k_plan, 1) AS i OFFSET 0) AS u
         CROSS JOIN LATERAL (
               SELECT (j.state ->> 'sequence_number')::bigint AS sequence_number, j.state ->> 'entry_digest' AS entry_digest,
                      sha256(u.state_bytes) AS digest, array_position(x_plan, u.plan) AS first
                 FROM (SELECT convert_from(u.state_bytes, 'UTF8')::jsonb AS state OFFSET 0) AS j OFFSET 0) AS s
         CROSS JOIN LATERAL (  -- where it is among the new entries, if it is
               SELECT CASE WHEN s.sequence_number >= x_sequence[s.first] AND s.sequence_number < x_sequence[s.first] + cardinality(x_plan)
                           THEN s.first + (s.sequence_number - x_sequence[s.first])::integer END AS place OFFSET 0) AS n
         CROSS JOIN LATERAL (
               SELECT CASE WHEN x_plan[n.place] = u.plan THEN x_digest[n.place]
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
         WHERE c_plan[i] <> ALL (refused) AND h_is_birth[array_position(h_plan, c_plan[i])]
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

    INSERT INTO entries (stream, sequence_number, entry, entry_digest)
    SELECT p_stream[x_plan[i]], x_sequence[i], e_entry[x_place[i]], x_digest[i]
      FROM generate_subscripts(x_plan, 1) AS i WHERE x_plan[i] <> ALL (refused);

    INSERT INTO artifacts (stream, sequence_number, artifact)
    SELECT p_stream[x_plan[i]], x_sequence[i], e_artifact[x_place[i]]
      FROM generate_subscripts(x_plan, 1) AS i WHERE x_plan[i] <> ALL (refused);

    -- Nobody else can make or move these heads: the streams are locked.
    INSERT INTO heads AS h (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting,
                            tenant, principal_id, server_id, tool_name, expires_at, is_open)
    SELECT p_stream[h_plan[i]], h_sequence[i], h_digest[i], h_state[i], h_artifact[i], p_owner_after[h_plan[i]], p_waiting_after[h_plan[i]],
           h_tenant[i], h_principal[i], h_server[i], h_tool[i], h_expires[i],
           EXISTS (SELECT FROM transitions t WHERE t.kind = split_part(p_stream[h_plan[i]], ':', 1) AND t.from_state = h_state[i] AND NOT t.is_birth)
      FROM generate_subscripts(h_plan, 1) AS i WHERE h_is_new[i] AND h_plan[i] <> ALL (refused);

    IF false = ANY (h_is_new) THEN
        UPDATE heads h
           SET sequence_number = h_sequence[i], entry_digest = h_digest[i], state = h_state[i], artifact_digest = h_artifact[i],
               owner = p_owner_after[h_plan[i]], waiting = p_waiting_after[h_plan[i]], updated_at = clock_timestamp(),
               is_open = EXISTS (SELECT FROM transitions t WHERE t.kind = split_part(h.stream, ':', 1) AND t.from_state = h_state[i] AND NOT t.is_birth),
               -- Set by the birth, which may find the head of a stream that was owned before it had entries.
               tenant = coalesce(h.tenant, h_tenant[i]), principal_id = coalesce(h.principal_id, h_principal[i]),
               server_id = coalesce(h.server_id, h_server[i]), tool_name = coalesce(h.tool_name, h_tool[i]),
               expires_at = coalesce(h.expires_at, h_expires[i])
          FROM generate_subscripts(h_plan, 1) AS i
         WHERE h.stream = p_stream[h_plan[i]] AND h.stream = ANY (p_stream) AND NOT h_is_new[i] AND h_plan[i] <> ALL (refused);
    END IF;

    IF cardinality(h_plan) IS DISTINCT FROM cardinality(p_stream) THEN
        -- Plans of nothing but an attempt, or of nothing, still say who owns the stream, and for whom it waits.
        UPDATE heads h SET owner = p_owner_after[p], waiting = p_waiting_after[p], updated_at = clock_timestamp()
          FROM generate_subscripts(p_stream, 1) AS p
         WHERE h.stream = p_stream[p] AND h.stream = ANY (p_stream) AND p <> ALL (e_plan) AND p <> ALL (k_plan) AND p <> ALL (refused)
           AND (h.owner IS DISTINCT FROM p_owner_after[p] OR h.waiting IS DISTINCT FROM p_waiting_after[p]);
    END IF;

    INSERT INTO claim_effects (stream, artifact_digest)  -- I2: in the transaction that appends the effect
    SELECT p_stream[x_plan[i]], x_artifact[i] FROM generate_subscripts(x_plan, 1) AS i
     WHERE x_settles[i] AND x_plan[i] <> ALL (refused) AND (SELECT true FROM claims c WHERE c.stream = p_stream[x_plan[i]]);

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

REVOKE ALL ON FUNCTION tga.append FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.append TO tga_gateway;
