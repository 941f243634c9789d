-- The only ways to write: append a batch of plans, take a stream, give it back.

-- Advisory locks live in one space of 64-bit numbers; the prefix keeps streams and executors apart. Functions and not
-- operators: sessions call these under their own search_path, where someone's operator || could make them lie.
CREATE FUNCTION tga.stream_lock_key(stream text) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT pg_catalog.hashtextextended(pg_catalog.textcat('stream:', stream), 0) $$;

CREATE FUNCTION tga.executor_lock_key(executor_id uuid) RETURNS bigint LANGUAGE sql IMMUTABLE PARALLEL SAFE AS
    $$ SELECT pg_catalog.hashtextextended(pg_catalog.textcat('executor:', executor_id::pg_catalog.text), 0) $$;

CREATE TYPE tga.checked_entry AS (
    plan integer, stream text, sequence_number bigint, entry bytea, entry_digest bytea, to_state text,
    artifact bytea, artifact_digest bytea, settles_claim boolean
);

-- What became of one plan. `code` is null when it was appended.
CREATE TYPE tga.plan_result AS (
    plan integer, code text, sequence_number bigint, what text, expected text, found text,
    claimed_by text, claimed_payload bytea
);

-- Never blocks for ever, never loses what it acknowledged, never sees a state older than the locks it holds.
CREATE FUNCTION tga.prepare_transaction(lock_timeout_ms integer) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
    IF pg_catalog.current_setting('transaction_isolation') <> 'read committed' THEN
        RAISE EXCEPTION 'tga functions need READ COMMITTED: a snapshot older than the lock would be stale'
            USING ERRCODE = 'invalid_transaction_state';
    END IF;
    -- In the body, and local to the transaction: a setting attached to the function is undone before the commit.
    PERFORM pg_catalog.set_config('synchronous_commit', 'on', true)
        WHERE pg_catalog.current_setting('synchronous_commit') IN ('off', 'local', 'remote_write');
    PERFORM pg_catalog.set_config('lock_timeout', greatest(lock_timeout_ms, 1)::text, true);  -- 0 would be for ever
END
$$;

-- Append each plan whole or not at all; the loser of one does not fail the others (I7).
--
-- Arrays of one letter belong together: plans (p), entries with their artifacts (e), claims (c), execution
-- checkpoints (k), dispatch attempts (d). `*_plan` is a plan's place in p_stream, from 1. Entries of a plan stand in
-- their order. Checks speak in the order owner, then for each entry schema, sequence, chain and digest, transition.
CREATE FUNCTION tga.append(
    lock_timeout_ms integer,
    p_stream text[], p_executor uuid[], p_owner_after uuid[], p_waiting_after text[],
    e_plan integer[], e_entry bytea[], e_artifact bytea[],
    c_plan integer[], c_server text[], c_tool text[], c_key text[], c_payload bytea[],
    k_plan integer[], k_state bytea[], k_created_at text[],
    d_plan integer[], d_attempt integer[], d_resolution bytea[]
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
-- Plans are made while the tables are empty and must still be right when they are huge; and made once: planning again
-- for each call costs more than the call.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    checked checked_entry[];
    results plan_result[];
    wrong plan_result[];
    refused integer[];
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);

    -- A plan has one claim, one checkpoint, one attempt at most. Nobody honest sends otherwise.
    IF cardinality(c_plan) <> (SELECT count(DISTINCT u) FROM unnest(c_plan) AS u)
       OR cardinality(k_plan) <> (SELECT count(DISTINCT u) FROM unnest(k_plan) AS u)
       OR cardinality(d_plan) <> (SELECT count(DISTINCT u) FROM unnest(d_plan) AS u) THEN
        RAISE EXCEPTION 'a plan stands twice among claims, checkpoints or attempts' USING ERRCODE = 'invalid_parameter_value';
    END IF;

    -- I6: sorted, so that two batches cannot wait for each other.
    PERFORM pg_advisory_xact_lock(k)
       FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(p_stream) AS s ORDER BY k) AS keys;

    -- A later statement than the locks: it sees all that was committed before they were obtained.
    WITH plans AS (
        SELECT p.plan::integer, p.stream, p.executor, k.kind, k.id_field, k.entry_schema_id, h.owner,
               h.stream IS NOT NULL AND h.sequence_number > 0 AS is_born, coalesce(h.is_open, false) AS is_open,
               coalesce(h.sequence_number, 0) AS head_sequence,
               coalesce(encode(h.entry_digest, 'hex'), repeat('0', 64)) AS head_digest,
               coalesce(h.state, k.birth_state) AS head_state,
               encode(h.artifact_digest, 'hex') AS head_artifact,
               row_number() OVER (PARTITION BY p.stream ORDER BY p.plan) > 1 AS is_repeated
          FROM unnest(p_stream, p_executor) WITH ORDINALITY AS p(stream, executor, plan)
          LEFT JOIN stream_kinds k ON k.kind = split_part(p.stream, ':', 1)
          LEFT JOIN heads h ON h.stream = p.stream
    ), owned AS (
        SELECT plan, CASE
                   WHEN kind IS NULL THEN
                       ARRAY['SCHEMA_VIOLATION', 'no such kind of stream', NULL, split_part(stream, ':', 1)]
                   WHEN executor IS NULL THEN
                       ARRAY['STATE_CONCURRENT_EXECUTION', 'the append names no executor', NULL, NULL]
                   WHEN is_repeated THEN
                       ARRAY['STATE_CONCURRENT_EXECUTION', 'the stream stands twice in one batch', NULL, NULL]
                   WHEN NOT is_born AND plan <> ALL (e_plan) THEN
                       ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
                   -- I6: the fence; a zombie's late effect ends here. Whoever is about to send must be the owner: a
                   -- finished stream has none.
                   WHEN owner <> executor OR (owner IS NULL AND plan = ANY (d_plan)) THEN
                       ARRAY['STATE_CONCURRENT_EXECUTION', 'another executor owns the stream', executor::text, owner::text]
                   WHEN plan = ANY (d_plan) AND NOT is_open THEN
                       ARRAY['STATE_INVALID_TRANSITION', 'the stream is finished: nothing is sent for it', NULL, NULL]
               END AS judgement
          FROM plans
    ), documents AS MATERIALIZED (  -- parsed and hashed once
        SELECT e.plan, e.place, e.entry, sha256(e.entry) AS entry_digest, convert_from(e.entry, 'UTF8')::jsonb AS doc,
               e.artifact, sha256(e.artifact) AS artifact_digest, convert_from(e.artifact, 'UTF8')::jsonb AS body
          FROM unnest(e_plan, e_entry, e_artifact) WITH ORDINALITY AS e(plan, entry, artifact, place)
    ), links AS MATERIALIZED (
        -- Each entry looks its head up again: an index lookup, where joining `plans` would compare each with each.
        SELECT d.*, p.stream, k.kind, k.entry_schema_id,
               substr(p.stream, length(k.kind) + 2) AS id, doc ->> k.id_field AS entry_id, body ->> k.id_field AS artifact_id,
               doc ->> 'sequence_number' AS sequence, doc ->> 'artifact_type' AS artifact_type,
               doc ->> 'from_state' AS from_state, doc ->> 'to_state' AS to_state,
               coalesce(h.sequence_number, 0) + row_number() OVER own AS next_sequence,
               coalesce(encode(lag(d.entry_digest) OVER own, 'hex'), encode(h.entry_digest, 'hex'), repeat('0', 64)) AS prev_digest,
               coalesce(lag(doc ->> 'to_state') OVER own, h.state, k.birth_state) AS state,
               encode(coalesce(lag(d.artifact_digest) OVER own, h.artifact_digest), 'hex') AS prev_artifact
          FROM documents d
         CROSS JOIN LATERAL (SELECT p_stream[d.plan] AS stream) AS p
          LEFT JOIN stream_kinds k ON k.kind = split_part(p.stream, ':', 1)
          LEFT JOIN heads h ON h.stream = p.stream
         WHERE p.stream IS NOT NULL
        WINDOW own AS (PARTITION BY d.plan ORDER BY d.place)
    ), judged AS (
        SELECT l.*, r.settles_claim, verdict.*
          FROM links l
          LEFT JOIN artifact_rules r ON r.kind = l.kind AND r.artifact_type = l.artifact_type
          LEFT JOIN transitions t ON t.kind = l.kind AND t.from_state = l.from_state AND t.artifact_type = l.artifact_type
               AND t.verdict = coalesce(body ->> r.verdict_field, '') AND t.is_birth = (l.next_sequence = 1)
         CROSS JOIN LATERAL (SELECT (CASE
               WHEN octet_length(l.entry) > 65535 THEN
                   ARRAY['INPUT_TOO_LARGE', 'the entry is too large', '65535 bytes at most', octet_length(l.entry)::text]
               WHEN doc ->> 'schema_id' IS DISTINCT FROM l.entry_schema_id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the entry has another schema', l.entry_schema_id, doc ->> 'schema_id']
               WHEN jsonb_typeof(doc -> 'sequence_number') IS DISTINCT FROM 'number' THEN
                   ARRAY['SCHEMA_VIOLATION', 'the sequence number is no number', 'number', jsonb_typeof(doc -> 'sequence_number')]
               WHEN l.entry_id IS DISTINCT FROM l.id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the entry names another stream', l.id, l.entry_id]
               WHEN r.schema_id IS NOT NULL AND body ->> 'schema_id' IS DISTINCT FROM r.schema_id THEN
                   ARRAY['SCHEMA_VIOLATION', 'the artifact has another schema', r.schema_id, body ->> 'schema_id']
               WHEN l.sequence IS DISTINCT FROM l.next_sequence::text THEN
                   ARRAY['STATE_SEQUENCE_GAP', 'the entry is not the next of its stream', l.next_sequence::text, l.sequence]
               WHEN doc ->> 'prev_entry_digest' IS DISTINCT FROM l.prev_digest THEN  -- I5
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the entry does not link to the one before it', l.prev_digest, doc ->> 'prev_entry_digest']
               WHEN doc ->> 'artifact_digest' IS DISTINCT FROM encode(l.artifact_digest, 'hex') THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact is not the one that the entry commits to', doc ->> 'artifact_digest', encode(l.artifact_digest, 'hex')]
               WHEN l.artifact_id IS DISTINCT FROM l.id THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact names another stream', l.id, l.artifact_id]
               WHEN r.binds_field IS NOT NULL AND body ->> r.binds_field IS DISTINCT FROM l.prev_artifact THEN
                   ARRAY['STATE_CHECKSUM_MISMATCH', 'the artifact does not bind to the one before it', l.prev_artifact, body ->> r.binds_field]
               WHEN l.from_state IS DISTINCT FROM l.state OR t.to_state IS NULL OR l.to_state IS DISTINCT FROM t.to_state THEN
                   ARRAY['STATE_INVALID_TRANSITION', 'the state does not admit this artifact',
                         l.state || coalesce(' to ' || t.to_state, ''), concat(l.from_state, ' to ', l.to_state, ' by ', l.artifact_type)]
           END)) AS verdict(judgement)
    ), broken AS (
        SELECT DISTINCT ON (plan) plan, next_sequence, judgement FROM judged WHERE judgement IS NOT NULL
         ORDER BY plan, next_sequence
    )
    SELECT (SELECT array_agg(ROW(plan, stream, next_sequence, entry, entry_digest, to_state, artifact, artifact_digest,
                                 settles_claim)::checked_entry ORDER BY plan, next_sequence) FROM judged),
           (SELECT array_agg(CASE WHEN o.judgement IS NOT NULL
                                  THEN ROW(plan, o.judgement[1], NULL, o.judgement[2], o.judgement[3], o.judgement[4], NULL, NULL)::plan_result
                                  ELSE ROW(plan, b.judgement[1], b.next_sequence, b.judgement[2], b.judgement[3], b.judgement[4], NULL, NULL)::plan_result
                             END ORDER BY plan) FROM owned o LEFT JOIN broken b USING (plan))
      INTO checked, results;

    IF k_plan <> '{}' THEN  -- I4: a checkpoint stands only on the entry it says
        wrong := ARRAY(
            SELECT ROW(u.plan, 'STATE_CHECKSUM_MISMATCH', s.sequence_number, 'the checkpoint does not stand on its entry',
                       encode(e.entry_digest, 'hex'), coalesce(s.state ->> 'entry_digest', 'nothing'), NULL, NULL)::plan_result
              FROM unnest(k_plan, k_state) AS u(plan, state_bytes)
             CROSS JOIN LATERAL (SELECT convert_from(u.state_bytes, 'UTF8')::jsonb AS state OFFSET 0) AS j
             CROSS JOIN LATERAL (SELECT j.state, (j.state ->> 'sequence_number')::bigint AS sequence_number OFFSET 0) AS s
              LEFT JOIN unnest(checked) AS c ON c.plan = u.plan AND c.sequence_number = s.sequence_number
              LEFT JOIN entries o ON o.stream = p_stream[u.plan] AND o.sequence_number = s.sequence_number AND c.plan IS NULL
             CROSS JOIN LATERAL (SELECT coalesce(c.entry_digest, o.entry_digest) AS entry_digest) AS e
              LEFT JOIN execution_checkpoints x ON x.stream = p_stream[u.plan] AND x.sequence_number = s.sequence_number
             WHERE s.state ->> 'entry_digest' IS DISTINCT FROM encode(e.entry_digest, 'hex')
                OR (x.stream IS NOT NULL AND x.checkpoint_digest <> sha256(u.state_bytes)));
        IF wrong <> '{}' THEN
            SELECT array_agg(coalesce(CASE WHEN r.code IS NULL THEN (SELECT w FROM unnest(wrong) AS w WHERE w.plan = r.plan LIMIT 1) END, r)
                             ORDER BY r.plan)
              INTO results
              FROM unnest(results) AS r;
        END IF;
    END IF;

    IF d_plan <> '{}' THEN
        SELECT array_agg(CASE WHEN r.code IS NULL AND d.attempt <> d.expected
                              THEN ROW(r.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'the attempt is not the next one',
                                       d.expected::text, d.attempt::text, NULL, NULL)::plan_result
                              ELSE r END ORDER BY r.plan)
          INTO results
          FROM unnest(results) AS r
          LEFT JOIN LATERAL (
              SELECT u.attempt, (SELECT coalesce(max(a.attempt), 1) + 1 FROM dispatch_attempts a WHERE a.stream = p_stream[u.plan]) AS expected
                FROM unnest(d_plan, d_attempt) AS u(plan, attempt) WHERE u.plan = r.plan LIMIT 1) AS d ON true;
    END IF;

    refused := ARRAY(SELECT r.plan FROM unnest(results) AS r WHERE r.code IS NOT NULL);

    IF c_plan <> '{}' THEN  -- I2
        -- Sorted, because a transaction that meets another's uncommitted key waits for it.
        INSERT INTO claims (server_id, tool_name, idempotency_key, stream, payload_digest)
        SELECT u.server, u.tool, u.key, p_stream[u.plan], u.payload
          FROM unnest(c_plan, c_server, c_tool, c_key, c_payload) AS u(plan, server, tool, key, payload)
         WHERE u.plan <> ALL (refused)
           AND u.plan = ANY (ARRAY(SELECT c.plan FROM unnest(checked) AS c WHERE c.sequence_number = 1))
         ORDER BY u.server COLLATE "C", u.tool COLLATE "C", u.key COLLATE "C"
            ON CONFLICT DO NOTHING;
        -- A later statement: in the same one the loser would not see the winner's row.
        SELECT array_agg(CASE WHEN r.code IS NULL AND c.plan IS NOT NULL
                              THEN ROW(r.plan, CASE WHEN c.stream IS NULL THEN 'STATE_RECOVERY_FAILED' ELSE 'IDEMPOTENCY_KEY_CLAIMED' END, NULL,
                                       CASE WHEN c.stream IS NULL THEN 'a claim is made with the first entry of its stream, once'
                                            ELSE 'another claim stands in the way' END, NULL, c.stream, c.stream, c.payload_digest)::plan_result
                              ELSE r END ORDER BY r.plan)
          INTO results
          FROM unnest(results) AS r
          LEFT JOIN LATERAL (
              SELECT u.plan, w.stream, w.payload_digest
                FROM unnest(c_plan, c_server, c_tool, c_key) AS u(plan, server, tool, key)
                LEFT JOIN claims w ON w.server_id = u.server AND w.tool_name = u.tool AND w.idempotency_key = u.key
               WHERE u.plan = r.plan AND w.stream IS DISTINCT FROM p_stream[u.plan] LIMIT 1) AS c ON true;
        refused := ARRAY(SELECT r.plan FROM unnest(results) AS r WHERE r.code IS NOT NULL);
    END IF;

    INSERT INTO entries (stream, sequence_number, entry, entry_digest)
    SELECT c.stream, c.sequence_number, c.entry, c.entry_digest FROM unnest(checked) AS c WHERE c.plan <> ALL (refused);

    INSERT INTO artifacts (stream, sequence_number, artifact)
    SELECT c.stream, c.sequence_number, c.artifact FROM unnest(checked) AS c WHERE c.plan <> ALL (refused);

    INSERT INTO heads AS h (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting, is_open)
    SELECT DISTINCT ON (c.plan) c.stream, c.sequence_number, c.entry_digest, c.to_state, c.artifact_digest,
           p_owner_after[c.plan], p_waiting_after[c.plan],
           EXISTS (SELECT FROM transitions t WHERE t.kind = split_part(c.stream, ':', 1) AND t.from_state = c.to_state AND NOT t.is_birth)
      FROM unnest(checked) AS c WHERE c.plan <> ALL (refused) ORDER BY c.plan, c.sequence_number DESC
        ON CONFLICT (stream) DO UPDATE
       SET sequence_number = excluded.sequence_number, entry_digest = excluded.entry_digest, state = excluded.state,
           artifact_digest = excluded.artifact_digest, owner = excluded.owner, waiting = excluded.waiting,
           is_open = excluded.is_open, updated_at = clock_timestamp();

    IF EXISTS (SELECT FROM generate_subscripts(p_stream, 1) AS p WHERE p <> ALL (e_plan) AND p <> ALL (k_plan)) THEN
        -- Plans of nothing but an attempt, or of nothing, still say who owns the stream, and for whom it waits.
        UPDATE heads h SET owner = p_owner_after[p], waiting = p_waiting_after[p], updated_at = clock_timestamp()
          FROM generate_subscripts(p_stream, 1) AS p
         WHERE h.stream = p_stream[p] AND p <> ALL (e_plan) AND p <> ALL (k_plan) AND p <> ALL (refused)
           AND (h.owner IS DISTINCT FROM p_owner_after[p] OR h.waiting IS DISTINCT FROM p_waiting_after[p]);
    END IF;

    INSERT INTO claim_effects (stream, artifact_digest)  -- I2: in the transaction that appends the effect
    SELECT c.stream, c.artifact_digest FROM unnest(checked) AS c JOIN claims USING (stream)
     WHERE c.settles_claim AND c.plan <> ALL (refused);

    IF k_plan <> '{}' THEN
        INSERT INTO execution_checkpoints (stream, sequence_number, checkpoint_state, checkpoint_digest, created_at)
        SELECT p_stream[u.plan], (convert_from(u.state, 'UTF8')::jsonb ->> 'sequence_number')::bigint, u.state, sha256(u.state), u.created_at
          FROM unnest(k_plan, k_state, k_created_at) AS u(plan, state, created_at) WHERE u.plan <> ALL (refused)
            ON CONFLICT DO NOTHING;
    END IF;

    IF d_plan <> '{}' THEN
        INSERT INTO dispatch_attempts (stream, attempt, executor_id, started_at, resolution)
        SELECT p_stream[u.plan], u.attempt, p_executor[u.plan], clock_timestamp(), u.resolution
          FROM unnest(d_plan, d_attempt, d_resolution) AS u(plan, attempt, resolution) WHERE u.plan <> ALL (refused);
    END IF;

    RETURN QUERY SELECT * FROM unnest(results);
END
$$;

-- Become the owner of a stream, unless a living executor owns it (I6). A dead owner's stream is taken at once.
CREATE FUNCTION tga.acquire(lock_timeout_ms integer, stream_taken text, executor uuid)
RETURNS TABLE (taken boolean, owned_by uuid, taken_from uuid)
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    head heads%ROWTYPE;
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(stream_lock_key(stream_taken));
    -- A later statement than the lock: in the same one it could read the state from before it.
    SELECT * INTO head FROM heads h WHERE h.stream = stream_taken;
    IF NOT FOUND THEN
        INSERT INTO heads (stream, sequence_number, entry_digest, state, owner, is_open)
        SELECT stream_taken, 0, decode(repeat('0', 64), 'hex'), k.birth_state, executor, false
          FROM stream_kinds k WHERE k.kind = split_part(stream_taken, ':', 1);
        RETURN QUERY SELECT FOUND, CASE WHEN FOUND THEN executor END, NULL::uuid;
        RETURN;
    END IF;
    -- Shared, and for this transaction only: two that look at one dead owner do not take each other for it.
    IF head.owner <> executor AND NOT pg_try_advisory_xact_lock_shared(executor_lock_key(head.owner)) THEN
        RETURN QUERY SELECT false, head.owner, NULL::uuid;
        RETURN;
    END IF;
    IF head.owner IS DISTINCT FROM executor THEN
        UPDATE heads h SET owner = executor, updated_at = clock_timestamp() WHERE h.stream = stream_taken;
    END IF;
    RETURN QUERY SELECT true, executor, nullif(head.owner, executor);
END
$$;

-- Give a stream back; a fenced executor has nothing to give back. A stream without entries leaves no trace.
CREATE FUNCTION tga.release(lock_timeout_ms integer, stream_released text, executor uuid) RETURNS boolean
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(stream_lock_key(stream_released));
    DELETE FROM heads h WHERE h.stream = stream_released AND h.owner = executor AND h.sequence_number = 0;
    IF FOUND THEN
        RETURN true;
    END IF;
    UPDATE heads h SET owner = NULL, updated_at = clock_timestamp() WHERE h.stream = stream_released AND h.owner = executor;
    RETURN FOUND;
END
$$;

-- Streams of a kind that nobody drives though they should be driven, oldest first: recovery's work. Those that
-- `asking` owns are among them: it knows which of them it drives, and which it has lost sight of.
CREATE FUNCTION tga.recoverable(of_kind text, asking uuid, after text, at_most integer) RETURNS SETOF text
LANGUAGE sql VOLATILE SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off
AS $$
    -- One statement, one snapshot: a stream that is taken meanwhile is either seen with its new owner or not at all.
    -- Few executors own many streams, so each executor is asked for once, and not each stream.
    WITH living AS MATERIALIZED (
        SELECT o.owner
          FROM (SELECT DISTINCT h.owner FROM heads h WHERE h.is_open AND h.waiting IS NULL AND h.owner IS NOT NULL) AS o
         WHERE o.owner IS DISTINCT FROM asking AND NOT pg_try_advisory_xact_lock_shared(executor_lock_key(o.owner))
    )
    SELECT h.stream FROM heads h
     WHERE h.is_open AND h.waiting IS NULL AND (h.owner IS NULL OR h.owner NOT IN (SELECT l.owner FROM living l))
       AND h.stream > coalesce(after, of_kind || ':') AND h.stream < of_kind || ';'
     ORDER BY h.stream LIMIT at_most
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
GRANT EXECUTE ON FUNCTION
    tga.append, tga.acquire, tga.release, tga.recoverable, tga.stream_lock_key, tga.executor_lock_key TO tga_gateway;
