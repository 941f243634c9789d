-- Runs are erased as traces are: when they have ended, and no open run refers to them.

-- From which run a fork goes on: while a fork is open its source is not erased.
ALTER TABLE tga.runs ADD COLUMN forked_from text COLLATE "C";
CREATE INDEX runs_forks ON tga.runs (forked_from) WHERE forked_from IS NOT NULL;

-- As before, with `forked_from`.
CREATE OR REPLACE FUNCTION tga.write_run_rows(numbers bigint[], schedules jsonb[]) RETURNS void
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
BEGIN
    INSERT INTO runs AS r (stream_no, tenant, procedure, program, state, attempt, worker, due_at, failures, parent,
                           deadline_at, created_at, forked_from)
    SELECT h.stream_no, h.tenant, s.procedure, s.program, h.state, s.attempt, s.worker, s.due_at, s.failures, s.parent,
           s.deadline_at, s.created_at, s.forked_from
      FROM unnest(numbers, schedules) AS u(stream_no, schedule)
      JOIN heads h ON h.stream_no = u.stream_no
     CROSS JOIN LATERAL jsonb_to_record(u.schedule) AS s(
           procedure text, program text, attempt integer, worker text, due_at timestamptz, failures integer,
           parent text, deadline_at timestamptz, created_at timestamptz, forked_from text)
     ORDER BY h.stream_no
        ON CONFLICT (stream_no) DO UPDATE
       SET procedure = excluded.procedure, program = excluded.program, state = excluded.state,
           attempt = excluded.attempt, worker = excluded.worker, due_at = excluded.due_at, failures = excluded.failures,
           parent = excluded.parent, deadline_at = excluded.deadline_at, created_at = excluded.created_at,
           forked_from = excluded.forked_from, held_until = NULL;

    DELETE FROM run_requests q
     USING unnest(numbers, schedules) AS u(stream_no, schedule)
     WHERE q.stream_no = u.stream_no
       AND NOT EXISTS (SELECT FROM jsonb_array_elements(u.schedule -> 'asks') AS a
                        WHERE a ->> 0 = q.path AND (a ->> 1)::bigint = q.sequence_number);
    IF EXISTS (SELECT FROM unnest(schedules) AS s(schedule) WHERE s.schedule -> 'asks' <> '[]') THEN
        INSERT INTO run_requests (stream_no, path, sequence_number, tenant, expires_at)
        SELECT h.stream_no, a ->> 0, (a ->> 1)::bigint, h.tenant, (a ->> 2)::timestamptz
          FROM unnest(numbers, schedules) AS u(stream_no, schedule)
          JOIN heads h ON h.stream_no = u.stream_no
         CROSS JOIN LATERAL jsonb_array_elements(u.schedule -> 'asks') AS a
            ON CONFLICT (stream_no, path) DO NOTHING;
    END IF;
END
$$;

-- Execution checkpoints of runs hold their state: they go with the payloads, and at no other time.
CREATE FUNCTION tga.guard_checkpoints() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM tga.erasures e WHERE e.stream = OLD.stream) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'tga.execution_checkpoints is append-only: DELETE refused'
        USING ERRCODE = 'insufficient_privilege', HINT = 'The ledger is never changed; append to it.';
END
$$;
DROP TRIGGER append_only ON tga.execution_checkpoints;
CREATE TRIGGER append_only BEFORE UPDATE OR TRUNCATE ON tga.execution_checkpoints
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.execution_checkpoints ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER erasure_guard BEFORE DELETE ON tga.execution_checkpoints
    FOR EACH ROW EXECUTE FUNCTION tga.guard_checkpoints();
ALTER TABLE tga.execution_checkpoints ENABLE ALWAYS TRIGGER erasure_guard;

-- As before; what an open run refers to is not erased, and execution checkpoints go with the payloads.
CREATE OR REPLACE FUNCTION tga.erase(
    lock_timeout_ms integer, stream_erased text, system_stream text, executor uuid, erasure_entry bytea, erasure bytea,
    claim_salt bytea
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    head heads%ROWTYPE;
    rule artifact_rules%ROWTYPE;
    appended plan_result;
    said jsonb;
    refusal text[];  -- code, what, expected, found
    user_stream text;  -- an open run that refers to it
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(k)
       FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(ARRAY[stream_erased, system_stream]) AS s
              ORDER BY k) AS keys;
    SELECT * INTO head FROM heads h WHERE h.stream = stream_erased AND h.sequence_number > 0;
    said := convert_from(erasure, 'UTF8')::jsonb;
    SELECT * INTO rule FROM artifact_rules r
     WHERE r.kind = split_part(system_stream, ':', 1) AND r.schema_id = said ->> 'schema_id';
    -- What an open run refers to stays: the run that a child answers, the runs that go on from this one, and the run
    -- that made a call, whose id its key holds (`run:ID/ADDRESS`, with `/rN` for a later try).
    SELECT u.stream INTO user_stream
      FROM (SELECT r.parent AS stream FROM runs r WHERE r.stream_no = head.stream_no
             UNION ALL
            SELECT f.stream FROM runs r JOIN heads f ON f.stream_no = r.stream_no WHERE r.forked_from = stream_erased
             UNION ALL
            SELECT regexp_replace(head.idempotency_key, '/[0-9.:]+(/r[0-9]+)?$', '')
             WHERE head.idempotency_key LIKE 'run:%') AS u
      JOIN heads h ON h.stream = u.stream
     WHERE h.is_open LIMIT 1;
    refusal := CASE
        WHEN head.stream IS NULL THEN
            ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
        WHEN head.is_open THEN
            ARRAY['TRACE_UNFINISHED', 'the stream is not finished', NULL, head.state]
        WHEN user_stream IS NOT NULL THEN
            ARRAY['STREAM_IN_USE', 'an open run refers to the stream', 'a run that has ended', user_stream]
        WHEN EXISTS (SELECT FROM erasures e WHERE e.stream = stream_erased) THEN
            ARRAY['TRACE_ERASED', 'the payloads were erased before', NULL, NULL]
        WHEN said #>> rule.erases_path IS DISTINCT FROM stream_erased THEN
            ARRAY['SCHEMA_VIOLATION', 'the erasure names another stream', stream_erased, NULL]
        -- RFC 8785 of the key: names in order, strings as to_json writes them. Null is distinct from nothing but
        -- itself.
        WHEN said #> rule.erased_claim_path ->> 'key_digest' IS DISTINCT FROM encode(sha256(convert_to(
                 '{"idempotency_key":' || to_json(head.idempotency_key) || ',"server_id":' || to_json(head.subject)
                 || ',"tool_name":' || to_json(head.name) || '}', 'UTF8')), 'hex')
             OR said #> rule.erased_claim_path ->> 'payload_commitment'
                IS DISTINCT FROM encode(sha256(claim_salt || head.payload_digest), 'hex') THEN
            ARRAY['STATE_RECOVERY_FAILED', 'the erasure does not say what the stream''s claim is',
                  head.idempotency_key, said #>> rule.erased_claim_path]
    END;
    IF refusal IS NOT NULL THEN
        RETURN QUERY SELECT 1, refusal[1], NULL::bigint, refusal[2], refusal[3], refusal[4], NULL, NULL::bytea;
        RETURN;
    END IF;
    SELECT * INTO appended FROM append(
        lock_timeout_ms, ARRAY[system_stream], ARRAY[executor], ARRAY[NULL::uuid], ARRAY[NULL::text],
        ARRAY[1], ARRAY[erasure_entry], ARRAY[erasure], '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}', '{}', '{}');
    IF appended.code IS NULL THEN
        INSERT INTO erasures (stream, system_stream, sequence_number, claim_salt)
        SELECT stream_erased, system_stream, h.sequence_number, erase.claim_salt
          FROM heads h WHERE h.stream = system_stream;
        DELETE FROM payloads p WHERE p.stream_no = head.stream_no;
        -- A run's hold its state; a trace's say only which digests it has, and stay.
        DELETE FROM execution_checkpoints c
         WHERE c.stream = stream_erased AND split_part(stream_erased, ':', 1) = 'run';
        DELETE FROM sealed s WHERE s.stream = stream_erased;
        DELETE FROM outbox o WHERE o.stream = stream_erased;
    END IF;
    RETURN NEXT appended;
END
$$;

REVOKE ALL ON FUNCTION tga.guard_checkpoints, tga.write_run_rows FROM PUBLIC;
