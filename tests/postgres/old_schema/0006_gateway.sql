-- What the gateway's edge needs of the ledger: whose a stream is, expiry, secrets, announcements, erasure, and the system stream.

-- Set once, by a stream's birth, from its first artifact; like all of heads a projection, for lists and for expiry.
ALTER TABLE tga.heads
    ADD COLUMN tenant       text COLLATE "C",
    ADD COLUMN principal_id text COLLATE "C",
    ADD COLUMN server_id    text COLLATE "C",
    ADD COLUMN tool_name    text COLLATE "C",
    ADD COLUMN expires_at   timestamptz;

UPDATE tga.heads h
   SET tenant = b.body #>> '{principal,tenant}', principal_id = b.body #>> '{principal,principal_id}',
       server_id = b.body ->> 'server_id', tool_name = b.body ->> 'tool_name', expires_at = (b.body ->> 'expires_at')::timestamptz
  FROM (SELECT stream, convert_from(artifact, 'UTF8')::jsonb AS body FROM tga.artifacts WHERE sequence_number = 1) AS b
 WHERE b.stream = h.stream;

CREATE INDEX heads_tenant ON tga.heads (tenant, stream);
CREATE INDEX heads_in_state ON tga.heads (tenant, state, stream) WHERE state <> 'COMPLETED';
CREATE INDEX heads_waiting ON tga.heads (tenant, waiting, stream) WHERE waiting IS NOT NULL;
CREATE INDEX heads_expiry ON tga.heads (expires_at) WHERE waiting = 'supervisor';
-- The order of commits, for whoever follows the ledger.
CREATE INDEX entries_by_commit ON tga.entries (xid, stream, sequence_number);

ALTER TABLE tga.stream_kinds ADD COLUMN tenant_path text[];  -- where a birth says whose the stream is
UPDATE tga.stream_kinds SET tenant_path = '{principal,tenant}' WHERE kind = 'trace';
ALTER TABLE tga.artifact_rules ADD COLUMN decides boolean NOT NULL DEFAULT false;  -- it ends a wait, in time or as its expiry
UPDATE tga.artifact_rules SET decides = true WHERE kind = 'trace' AND artifact_type = 'supervisor_decision';

-- What the gateway itself does and relies on, a stream for each tenant; it never ends.
INSERT INTO tga.stream_kinds (kind, id_field, entry_schema_id, birth_state, tenant_path)
VALUES ('system', 'system_id', 'tga/v1/system_log_entry', 'OPEN', '{system_id}');
INSERT INTO tga.artifact_rules (kind, artifact_type, schema_id) VALUES
    ('system', 'tool_pin',    'tga/v1/tool_pin'),
    ('system', 'signing_key', 'tga/v1/signing_key'),
    ('system', 'policy_set',  'tga/v1/policy_set'),
    ('system', 'erasure',     'tga/v1/erasure');
INSERT INTO tga.transitions (kind, from_state, artifact_type, to_state, is_birth)
SELECT kind, 'OPEN', artifact_type, 'OPEN', is_birth
  FROM tga.artifact_rules, unnest(ARRAY[true, false]) AS is_birth WHERE kind = 'system';

-- Secret arguments, outside the ledger and only sealed. The values go when the trace is finished.
CREATE TABLE tga.sealed (
    stream        text COLLATE "C" PRIMARY KEY,
    sealed_salt   bytea NOT NULL CHECK (octet_length(sealed_salt) <= 65536),
    sealed_values bytea CHECK (octet_length(sealed_values) <= 1048576)
);

-- Whose payloads were erased, and where the system stream says so.
CREATE TABLE tga.erasures (
    stream          text COLLATE "C" PRIMARY KEY,
    system_stream   text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL
);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.erasures
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.erasures ENABLE ALWAYS TRIGGER append_only;

-- I1: artifacts are never changed; they are removed only after their erasure stands on the record, in one transaction.
CREATE FUNCTION tga.guard_erasure() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM tga.erasures e WHERE e.stream = OLD.stream) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'tga.artifacts is append-only: DELETE refused'
        USING ERRCODE = 'insufficient_privilege', HINT = 'Payloads of finished streams are erased with tga.erase.';
END
$$;
DROP TRIGGER append_only ON tga.artifacts;
CREATE TRIGGER append_only BEFORE UPDATE OR TRUNCATE ON tga.artifacts
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.artifacts ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER erasure_guard BEFORE DELETE ON tga.artifacts FOR EACH ROW EXECUTE FUNCTION tga.guard_erasure();
ALTER TABLE tga.artifacts ENABLE ALWAYS TRIGGER erasure_guard;

-- The append function of 0002, which knew nothing of all that.
DROP FUNCTION tga.append;
ALTER TYPE tga.checked_entry
    ADD ATTRIBUTE tenant text, ADD ATTRIBUTE principal_id text, ADD ATTRIBUTE server_id text,
    ADD ATTRIBUTE tool_name text, ADD ATTRIBUTE expires_at timestamptz;

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
               coalesce(lag(doc ->> 'to_state') OVER own, h.state, k.birth_state) AS state, h.expires_at,
               k.tenant_path, CASE WHEN coalesce(h.sequence_number, 0) = 0 THEN first_value(d.body) OVER own END AS birth,
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
               -- A waiting request's time is judged here, by this clock, under the stream's lock: late is late, swept or not.
               WHEN r.decides AND l.expires_at IS NOT NULL
                    AND (clock_timestamp() >= l.expires_at) <> (coalesce(body #>> '{decided_by,type}', '') = 'expiry') THEN
                   ARRAY[CASE WHEN clock_timestamp() >= l.expires_at THEN 'APPROVAL_EXPIRED' ELSE 'APPROVAL_NOT_EXPIRED' END,
                         CASE WHEN clock_timestamp() >= l.expires_at THEN 'the request has expired' ELSE 'the request has not expired yet' END,
                         to_char(l.expires_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"'),
                         to_char(clock_timestamp() AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')]
           END)) AS verdict(judgement)
    ), broken AS (
        SELECT DISTINCT ON (plan) plan, next_sequence, judgement FROM judged WHERE judgement IS NOT NULL
         ORDER BY plan, next_sequence
    )
    SELECT (SELECT array_agg(ROW(plan, stream, next_sequence, entry, entry_digest, to_state, artifact, artifact_digest,
                                 settles_claim, birth #>> tenant_path, birth #>> '{principal,principal_id}', birth ->> 'server_id',
                                 birth ->> 'tool_name', (birth ->> 'expires_at')::timestamptz)::checked_entry ORDER BY plan, next_sequence) FROM judged),
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

    INSERT INTO heads AS h (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting,
                            tenant, principal_id, server_id, tool_name, expires_at, is_open)
    SELECT DISTINCT ON (c.plan) c.stream, c.sequence_number, c.entry_digest, c.to_state, c.artifact_digest,
           p_owner_after[c.plan], p_waiting_after[c.plan],
           c.tenant, c.principal_id, c.server_id, c.tool_name, c.expires_at,
           EXISTS (SELECT FROM transitions t WHERE t.kind = split_part(c.stream, ':', 1) AND t.from_state = c.to_state AND NOT t.is_birth)
      FROM unnest(checked) AS c WHERE c.plan <> ALL (refused) ORDER BY c.plan, c.sequence_number DESC
        ON CONFLICT (stream) DO UPDATE
       SET sequence_number = excluded.sequence_number, entry_digest = excluded.entry_digest, state = excluded.state,
           artifact_digest = excluded.artifact_digest, owner = excluded.owner, waiting = excluded.waiting,
           is_open = excluded.is_open, updated_at = clock_timestamp(),
           -- Set by the birth, which may find the head of a stream that was owned before it had entries.
           tenant = coalesce(h.tenant, excluded.tenant), principal_id = coalesce(h.principal_id, excluded.principal_id),
           server_id = coalesce(h.server_id, excluded.server_id), tool_name = coalesce(h.tool_name, excluded.tool_name),
           expires_at = coalesce(h.expires_at, excluded.expires_at);

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

    RETURN QUERY SELECT * FROM unnest(results);
END
$$;

-- Erase the payloads of a finished stream: the erasure is appended to a system stream, and the payloads go, or neither.
-- Entries, digests, claims and effects' digests stay.
CREATE FUNCTION tga.erase(
    lock_timeout_ms integer, stream_erased text, system_stream text, executor uuid, erasure_entry bytea, erasure bytea
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    head heads%ROWTYPE;
    appended plan_result;
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(k)
       FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(ARRAY[stream_erased, system_stream]) AS s ORDER BY k) AS keys;
    SELECT * INTO head FROM heads h WHERE h.stream = stream_erased AND h.sequence_number > 0;
    IF NOT FOUND THEN
        RETURN QUERY SELECT 1, 'TRACE_NOT_FOUND', NULL::bigint, 'the stream has no entries', NULL, NULL, NULL, NULL::bytea;
        RETURN;
    END IF;
    IF head.is_open THEN
        RETURN QUERY SELECT 1, 'TRACE_UNFINISHED', NULL::bigint, 'the stream is not finished', NULL, head.state, NULL, NULL::bytea;
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM erasures e WHERE e.stream = stream_erased) THEN
        RETURN QUERY SELECT 1, 'TRACE_ERASED', NULL::bigint, 'the payloads were erased before', NULL, NULL, NULL, NULL::bytea;
        RETURN;
    END IF;
    IF convert_from(erasure, 'UTF8')::jsonb ->> 'erased_stream' IS DISTINCT FROM stream_erased
       OR convert_from(erasure, 'UTF8')::jsonb ->> 'schema_id' IS DISTINCT FROM 'tga/v1/erasure' THEN
        RETURN QUERY SELECT 1, 'SCHEMA_VIOLATION', NULL::bigint, 'the erasure names another stream', stream_erased, NULL, NULL, NULL::bytea;
        RETURN;
    END IF;
    SELECT * INTO appended FROM append(
        lock_timeout_ms, ARRAY[system_stream], ARRAY[executor], ARRAY[NULL::uuid], ARRAY[NULL::text],
        ARRAY[1], ARRAY[erasure_entry], ARRAY[erasure], '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}', '{}');
    IF appended.code IS NULL THEN
        INSERT INTO erasures (stream, system_stream, sequence_number)
        SELECT stream_erased, system_stream, h.sequence_number FROM heads h WHERE h.stream = system_stream;
        DELETE FROM artifacts a WHERE a.stream = stream_erased;
        DELETE FROM sealed s WHERE s.stream = stream_erased;
        DELETE FROM outbox o WHERE o.stream = stream_erased;
    END IF;
    RETURN NEXT appended;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
GRANT SELECT ON tga.sealed, tga.erasures TO tga_gateway;
GRANT EXECUTE ON FUNCTION tga.append, tga.erase TO tga_gateway;
