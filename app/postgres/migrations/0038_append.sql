-- The append function as in 0032, which it replaces, with less work where births and effects stand in one batch;
-- figures are in docs/adr/0029-a-lean-ledger.md. What it checks, refuses, says and writes is the same.

-- Append each plan whole or not at all; the loser of one does not fail the others (I7).
--
-- Legend. Arrays of one letter belong together, and are equally long:
--
--   p_  plans                                   d_  dispatch attempts
--   e_  entries with their artifacts            s_  sealed secrets
--   c_  claims                                  f_  secrets to forget
--   k_  execution checkpoints                   o_  webhooks to tell
--   r_  schedule rows, of runs                  b_  blobs that an entry refers to
--
-- `*_plan` is a plan's place in p_stream, from 1. Entries stand in the order of the plans, and of a plan in their own.
-- `p_needs` names for each plan another, without which it is refused; that one makes no claim. Two that need each other
-- stand or fall together. It and the lists from c_ on are null, or empty, when the batch has none of them.
-- In the body: `x` is the row that is judged, `now_` what holds after the entries of its plan so far, `new_` what will
-- be written.
--
-- Sections: 1 arguments, 2 locks, 3 plans and entries (the usual ones are also written there), 4 checkpoints,
-- 5 attempts, sources, 6 blobs, 7 needs, 8 claims, 9 writes, 10 answer. Checks speak in the order owner; then for each
-- entry schema, sequence, chain and digest, transition, what the artifact binds to, expiry; then checkpoint, attempt,
-- source, blob, need, claim.
CREATE OR REPLACE FUNCTION tga.append(
    lock_timeout_ms integer,
    p_stream text[], p_executor uuid[], p_owner_after uuid[], p_waiting_after text[],
    e_plan integer[], e_entry bytea[], e_artifact bytea[],
    c_plan integer[], c_server text[], c_tool text[], c_key text[], c_payload bytea[],
    k_plan integer[], k_state bytea[], k_created_at text[],
    d_plan integer[], d_attempt integer[], d_resolution bytea[],
    s_plan integer[], s_salt bytea[], s_values bytea[], f_plan integer[],
    o_plan integer[], o_webhook text[],
    p_needs integer[] DEFAULT NULL,
    r_plan integer[] DEFAULT NULL, r_row jsonb[] DEFAULT NULL,
    b_plan integer[] DEFAULT NULL, b_sequence bigint[] DEFAULT NULL, b_sha256 bytea[] DEFAULT NULL,
    b_size bigint[] DEFAULT NULL
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
-- Plans of queries are made while the tables are empty and must still be right when they are huge; and made once:
-- planning again for each call costs more than the call. A table that grows is only ever the inner side of a join.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET enable_memoize = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    plans integer := cardinality(p_stream);
    has_lists boolean := false;    -- there is more in the batch than entries and claims
    has_repeats boolean := false;  -- a stream stands twice in it
    with_more integer[];           -- plans, null for none: those that bring more than entries
    done integer[] := '{}';        -- plans that were judged and written all at once
    x record; plan integer;        -- the plan that is judged: its stream's head as it was found
    kind text; k record; id text;  -- the kind of its stream and its rules, and the stream's id
    kind_before text; k_before record; k_between record;  -- and of the plan before that was of another kind
    number bigint;                 -- of its stream
    place integer := 1; places integer;  -- of the entry that is judged; how many the plan has
    claim integer;                 -- place of the plan's claim
    body jsonb; rule jsonb; artifact_digest bytea; entry_digest bytea; recorded_at text; artifact_type text;
    to_state text; is_formed boolean;
    now_number bigint; now_digest bytea; now_artifact bytea; now_state text; now_effect bytea; is_open boolean;
    is_birth boolean; birth jsonb; -- the plan begins its stream, with this artifact
    artifacts bytea[];             -- of the plan
    number_of bigint[];            -- by plan: its stream's number, where a later section asks for it
    new_links new_link[]; new_payloads new_payload[]; new_heads new_head[];
    births integer := 0;           -- how many streams begin
    claims integer := 0;           -- and how many of them with a claim
    has_bare boolean := false;     -- a plan changes owner or waiting, and has no entries
    -- Plans, null for none: of streams that someone owned before they began; whose streams are put to work, no longer,
    -- rest, no longer.
    unborn integer[]; new_work integer[]; ended_work integer[]; new_rests integer[]; ended_rests integer[];
    reason text[]; reason_number bigint;  -- what speaks against the plan: code, words, expected, found; at which entry
    refusals plan_result[];        -- one for each plan at most
    refused integer[] := '{}';     -- their plans
    wrong plan_result[];           -- what a section has found
    is_refused_more boolean;       -- a plan fell with the one that it needs
    rows_written bigint;
    y_sequence bigint[]; y_digest bytea[]; y_is_new boolean[];  -- of the checkpoints
    y_tenant text[];               -- of the blobs
    appended plan_result;
BEGIN
    -- 1. Arguments --------------------------------------------------------------------------------------------------
    -- The usual case first, here and below, in one condition: an expression is evaluated at once, PERFORM would start a
    -- query, and each expression that a transaction meets is made ready for it once more.
    IF (current_setting('transaction_isolation') = 'read committed' AND current_setting('synchronous_commit') = 'on'
        AND set_config('lock_timeout', greatest(lock_timeout_ms, 1)::text, true) IS NOT NULL) IS NOT TRUE THEN
        PERFORM prepare_transaction(lock_timeout_ms);
    END IF;

    -- What is judged by its place is stored by its place. The gateway always sends such arrays.
    IF (array_dims(p_stream) = '[1:' || plans || ']' AND array_dims(p_executor) = array_dims(p_stream)
        AND array_dims(p_owner_after) = array_dims(p_stream) AND array_dims(p_waiting_after) = array_dims(p_stream)
       ) IS NOT TRUE THEN
        RAISE EXCEPTION 'arrays that belong together differ in shape' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (array_dims(e_plan) = '[1:' || cardinality(e_plan) || ']' AND array_dims(e_entry) = array_dims(e_plan)
        AND array_dims(e_artifact) = array_dims(e_plan)
        AND 1 <= ALL (e_plan) AND plans >= ALL (e_plan)) IS NOT TRUE THEN
        IF e_plan IS NULL THEN
            RAISE EXCEPTION 'arrays that belong together differ in shape' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        PERFORM verify_lists(plans, e_plan, ARRAY[array_dims(e_entry), array_dims(e_artifact)], false);
    END IF;
    IF num_nonnulls(c_plan, c_server, c_tool, c_key, c_payload, k_plan, k_state, k_created_at,
                    d_plan, d_attempt, d_resolution, s_plan, s_salt, s_values, f_plan, o_plan, o_webhook,
                    p_needs, r_plan, r_row, b_plan, b_sequence, b_sha256, b_size) > 0 THEN
        IF (num_nonnulls(c_plan, c_server, c_tool, c_key, c_payload) = 0
            OR (array_dims(c_plan) = '[1:' || cardinality(c_plan) || ']' AND array_dims(c_server) = array_dims(c_plan)
                AND array_dims(c_tool) = array_dims(c_plan) AND array_dims(c_key) = array_dims(c_plan)
                AND array_dims(c_payload) = array_dims(c_plan)
                AND 1 <= ALL (c_plan) AND plans >= ALL (c_plan)) IS TRUE
               AND length(array_to_tsvector(c_plan::text[])) = cardinality(c_plan)  -- where each stands once
           ) IS NOT TRUE THEN
            PERFORM verify_lists(plans, c_plan, ARRAY[array_dims(c_server), array_dims(c_tool), array_dims(c_key),
                                                      array_dims(c_payload)], true);
        END IF;
        has_lists := num_nonnulls(k_plan, k_state, k_created_at, d_plan, d_attempt, d_resolution,
                                  s_plan, s_salt, s_values, f_plan, o_plan, o_webhook,
                                  p_needs, r_plan, r_row, b_plan, b_sequence, b_sha256, b_size) > 0;
        IF has_lists THEN
            PERFORM verify_lists(plans, k_plan, ARRAY[array_dims(k_state), array_dims(k_created_at)], true),
                    verify_lists(plans, d_plan, ARRAY[array_dims(d_attempt), array_dims(d_resolution)], true),
                    verify_lists(plans, s_plan, ARRAY[array_dims(s_salt), array_dims(s_values)], false),
                    verify_lists(plans, f_plan, '{}', false),
                    verify_lists(plans, o_plan, ARRAY[array_dims(o_webhook)], false),
                    verify_lists(plans, r_plan, ARRAY[array_dims(r_row)], true),
                    verify_lists(plans, b_plan, ARRAY[array_dims(b_sequence), array_dims(b_sha256),
                                                      array_dims(b_size)], false);
            IF p_needs <> '{}' AND array_dims(p_needs) <> array_dims(p_stream) THEN
                RAISE EXCEPTION 'arrays that belong together differ in shape' USING ERRCODE = 'invalid_parameter_value';
            END IF;
        END IF;
        with_more := c_plan || k_plan || d_plan || s_plan || f_plan || o_plan || r_plan || b_plan;
    END IF;

    -- 2. Locks ------------------------------------------------------------------------------------------------------
    -- I6: sorted, so that two batches cannot wait for each other.
    IF plans = 1 THEN
        IF pg_advisory_xact_lock(stream_lock_key(p_stream[1])) IS NULL THEN END IF;
    ELSE
        PERFORM pg_advisory_xact_lock(keys.key)
           FROM (SELECT DISTINCT stream_lock_key(s) AS key FROM unnest(p_stream) AS s ORDER BY key) AS keys;
        GET DIAGNOSTICS rows_written = ROW_COUNT;
        has_repeats := rows_written < plans;
    END IF;

    -- 3. Plans and entries ------------------------------------------------------------------------------------------
    -- Later statements than the locks: they see all that was committed before these were obtained.
    --
    -- First, in one statement, what most batches are made of: plans of one entry that moves an open stream, which waits
    -- for nobody before and after; the entry is what the form makes (see below), and its artifact binds to the one
    -- before it. What is not so in every respect is left to the loop: it judges all else, and words what it refuses.
    -- Where there are births the loop is needed anyway, and takes the others along for less than a statement more.
    IF NOT has_repeats AND p_needs IS NULL AND c_plan IS NULL AND cardinality(e_plan) < 3 * plans
       AND (with_more IS NULL OR cardinality(with_more) < plans) THEN
        WITH judged AS MATERIALIZED (
            SELECT c.plan, c.place, c.stream_no, c.sequence_number + 1 AS sequence_number, j.entry_digest,
                   c.entry_digest AS prev_entry_digest, j.artifact_digest, j.recorded_at, t.artifact_type,
                   c.state AS from_state, t.to_state, t.to_state = ANY (c.open_states) AS is_open,
                   CASE WHEN c.has_claim AND r.rule ? 'settles_claim' THEN j.artifact_digest END AS effect_digest,
                   CASE WHEN p_owner_after[c.plan] IS NOT NULL
                        THEN clock_timestamp() + c.lease_ms * interval '1 millisecond' END AS lease_until
              FROM (SELECT e_plan[g.place] AS plan, g.place, substr(h.stream, length(m.kind) + 2) AS id, h.stream_no,
                           h.sequence_number, h.entry_digest, h.artifact_digest, h.state, h.expires_at,
                           h.idempotency_key IS NOT NULL AS has_claim,
                           m.machine, m.open_states, m.id_field, m.entry_form, m.usual_end, m.lease_ms
                      FROM (SELECT s.kind, s.id_field, s.entry_form, s.usual_end, s.lease_ms, m.machine, m.open_states
                              FROM stream_kinds s JOIN machines m ON m.kind = s.kind
                             WHERE s.kind = split_part(p_stream[1], ':', 1) OFFSET 0) AS m
                     CROSS JOIN generate_subscripts(e_plan, 1) AS g(place)
                      JOIN heads h ON h.stream = p_stream[e_plan[g.place]]
                     WHERE coalesce(e_plan[g.place - 1], 0) < e_plan[g.place]
                       AND coalesce(e_plan[g.place + 1], plans + 1) > e_plan[g.place]
                       AND (with_more IS NULL OR e_plan[g.place] <> ALL (with_more))
                       AND starts_with(h.stream, m.kind || ':')
                       AND h.is_open AND h.waiting IS NULL AND p_waiting_after[e_plan[g.place]] IS NULL
                       AND coalesce(h.owner, p_executor[e_plan[g.place]]) = p_executor[e_plan[g.place]]
                    OFFSET 0) AS c
             CROSS JOIN LATERAL (
                   SELECT convert_from(e_artifact[c.place], 'UTF8')::jsonb AS body,
                          sha256(e_artifact[c.place]) AS artifact_digest, sha256(e_entry[c.place]) AS entry_digest,
                          encode(substr(e_entry[c.place],
                                        position('"recorded_at":"'::bytea IN e_entry[c.place]) + 15, 24),
                                 'escape') AS recorded_at OFFSET 0) AS j
             CROSS JOIN LATERAL (SELECT c.machine -> (j.body ->> 'schema_id') AS rule OFFSET 0) AS r
             CROSS JOIN LATERAL (
                   SELECT r.rule ->> 'artifact_type' AS artifact_type,
                          r.rule #>> ARRAY['leads', c.state, coalesce(j.body ->> (r.rule ->> 'verdict_field'), '')]
                          AS to_state OFFSET 0) AS t
             WHERE convert_from(e_entry[c.place], 'UTF8')
                   = format(c.entry_form, encode(j.artifact_digest, 'hex'), t.artifact_type, p_executor[c.plan],
                            c.state, encode(c.entry_digest, 'hex'), j.recorded_at, c.sequence_number + 1, t.to_state,
                            c.id)
               AND t.to_state IS NOT NULL AND j.recorded_at || c.id !~ '[^0-9A-Za-z._:@+/-]'
               AND j.body ->> c.id_field = c.id
               AND (r.rule -> 'binds_field' IS NULL
                    OR j.body ->> (r.rule ->> 'binds_field') = encode(c.artifact_digest, 'hex'))
               AND (c.expires_at IS NULL OR r.rule -> 'expired_path' IS NULL)
               AND (t.to_state = ANY (c.open_states) OR t.to_state = c.usual_end)
        ), linked AS (
            INSERT INTO links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                               artifact_digest, recorded_at, artifact_type, from_state, to_state)
            SELECT n.stream_no, n.sequence_number, 1, 1, p_executor[n.plan], n.entry_digest, n.prev_entry_digest,
                   n.artifact_digest, n.recorded_at, n.artifact_type, n.from_state, n.to_state
              FROM judged n
        ), moved AS (
            UPDATE heads h
               SET sequence_number = n.sequence_number, entry_digest = n.entry_digest, state = n.to_state,
                   artifact_digest = n.artifact_digest, is_open = n.is_open,
                   effect_digest = coalesce(n.effect_digest, h.effect_digest), owner = p_owner_after[n.plan],
                   lease_until = n.lease_until, updated_at = clock_timestamp()
              FROM judged n
             WHERE h.stream_no = n.stream_no
        ), kept AS (
            INSERT INTO payloads (stream_no, sequence_number, artifacts)
            SELECT n.stream_no, n.sequence_number, ARRAY[e_artifact[n.place]] FROM judged n
        )
        SELECT coalesce(array_agg(n.plan), '{}') INTO done FROM judged n;
        IF cardinality(done) = plans AND cardinality(e_plan) = plans THEN
            FOR i IN 1 .. plans LOOP
                appended.plan := i;
                RETURN NEXT appended;
            END LOOP;
            RETURN;
        END IF;
    END IF;

    -- Then the others, one by one.
    FOR x IN
        SELECT p.plan, h.stream_no, h.sequence_number, h.entry_digest, h.artifact_digest, h.state, h.is_open, h.owner,
               h.waiting, h.expires_at, h.idempotency_key
          FROM generate_subscripts(p_stream, 1) AS p(plan)
          LEFT JOIN heads h ON h.stream = p_stream[p.plan] AND p.plan <> ALL (done)
    LOOP
        plan := x.plan;
        IF plan = ANY (done) THEN
            WHILE e_plan[place] = plan LOOP
                place := place + 1;
            END LOOP;
            CONTINUE;
        END IF;
        IF split_part(p_stream[plan], ':', 1) IS DISTINCT FROM kind THEN  -- most batches are of one kind, or of two
            IF split_part(p_stream[plan], ':', 1) = kind_before THEN
                k_between := k;
                k := k_before;
                k_before := k_between;
                kind_before := kind;
            ELSE
                k_before := k;
                kind_before := kind;
                SELECT s.*, m.machine, m.open_states INTO k
                  FROM stream_kinds s LEFT JOIN machines m ON m.kind = s.kind
                 WHERE s.kind = split_part(p_stream[plan], ':', 1);
            END IF;
            kind := k.kind;
        END IF;
        id := substr(p_stream[plan], length(kind) + 2);
        now_number := coalesce(x.sequence_number, 0);
        places := width_bucket(plan, e_plan) - place + 1;  -- e_plan is in order, or the batch fails in the end
        claim := array_position(c_plan, plan);
        IF (places > 0 AND kind IS NOT NULL AND NOT has_repeats AND d_plan IS NULL
            AND coalesce(x.owner, p_executor[plan]) = p_executor[plan]) IS NOT TRUE THEN
            reason := CASE
                WHEN kind IS NULL THEN
                    ARRAY['SCHEMA_VIOLATION', 'no such kind of stream', NULL, split_part(p_stream[plan], ':', 1)]
                WHEN p_executor[plan] IS NULL THEN
                    ARRAY['STATE_CONCURRENT_EXECUTION', 'the append names no executor', NULL, NULL]
                WHEN has_repeats AND array_position(p_stream, p_stream[plan]) < plan THEN
                    ARRAY['STATE_CONCURRENT_EXECUTION', 'the stream stands twice in one batch', NULL, NULL]
                WHEN places = 0 AND now_number = 0 THEN
                    ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
                -- I6: the fence; a zombie's late effect ends here. An executor that is about to send must be the
                -- owner: a finished stream has none. So must whoever adds nothing to a stream whose owners change by
                -- entries: it is there to be compared.
                WHEN x.owner <> p_executor[plan]
                     OR (x.owner IS NULL AND (plan = ANY (d_plan) OR places = 0 AND k.owner_life = 'entries')) THEN
                    ARRAY['STATE_CONCURRENT_EXECUTION', 'another executor owns the stream',
                          p_executor[plan]::text, x.owner::text]
                WHEN plan = ANY (d_plan) AND x.is_open IS NOT TRUE THEN
                    ARRAY['STATE_INVALID_TRANSITION', 'the stream is finished: nothing is sent for it', NULL, NULL]
            END;
        END IF;
        is_birth := now_number = 0;
        IF is_birth THEN
            number := CASE WHEN reason IS NULL THEN nextval('stream_numbers') ELSE x.stream_no END;
            now_digest := decode(repeat('00', 32), 'hex');
            now_artifact := NULL;
            now_state := k.birth_state;
        ELSE
            number := x.stream_no;
            now_digest := x.entry_digest;
            now_artifact := x.artifact_digest;
            now_state := x.state;
        END IF;
        now_effect := NULL;
        artifacts := '{}';

        WHILE reason IS NULL AND e_plan[place] = plan LOOP
            now_number := now_number + 1;
            body := convert_from(e_artifact[place], 'UTF8')::jsonb;
            artifact_digest := sha256(e_artifact[place]);
            -- As bytes: where these are not the characters of a time, the entry is not what the form makes.
            recorded_at := encode(substr(e_entry[place], position('"recorded_at":"'::bytea IN e_entry[place]) + 15, 24),
                                  'escape');
            rule := k.machine -> (body ->> 'schema_id');
            artifact_type := rule ->> 'artifact_type';
            to_state := rule #>> ARRAY[CASE WHEN now_number = 1 THEN 'births' ELSE 'leads' END, now_state,
                                       coalesce(body ->> (rule ->> 'verdict_field'), '')];
            -- An entry that is what the form makes of what it has to say is right in all that it says: schema, stream,
            -- number, link, digest, states; and is stored as what it says. (Not with an id or a time that could say
            -- more than itself.) What its artifact binds to is seen here, too. All else is judged rule by rule.
            is_formed := convert_from(e_entry[place], 'UTF8')
                         = format(k.entry_form, encode(artifact_digest, 'hex'), artifact_type, p_executor[plan],
                                  now_state, encode(now_digest, 'hex'), recorded_at, now_number, to_state, id)
                         AND to_state IS NOT NULL AND recorded_at || id !~ '[^0-9A-Za-z._:@+/-]';
            IF (is_formed AND body ->> k.id_field = id
                AND (rule -> 'binds_field' IS NULL OR body ->> (rule ->> 'binds_field') = encode(now_artifact, 'hex'))
                AND (x.expires_at IS NULL OR rule -> 'expired_path' IS NULL)
                AND (claim IS NULL OR now_number > 1
                     OR c_server[claim] = coalesce(body #>> k.subject_path, c_server[claim])
                        AND c_tool[claim] = coalesce(body #>> k.name_path, c_tool[claim]))) IS NOT TRUE THEN
                SELECT j.artifact_type, j.to_state, j.recorded_at, j.refused
                  INTO artifact_type, to_state, recorded_at, reason
                  FROM judge_entry(kind, id, e_entry[place], e_artifact[place], now_number,
                                   now_digest, now_artifact, now_state, x.expires_at,
                                   c_server[claim], c_tool[claim]) AS j;
                IF reason IS NOT NULL THEN
                    reason_number := now_number;
                    EXIT;
                END IF;
            END IF;
            IF now_number = 1 THEN
                birth := body;
            END IF;
            entry_digest := sha256(e_entry[place]);
            new_links := new_links || ROW(plan, number, now_number, cardinality(artifacts) + 1, places,
                p_executor[plan], entry_digest, now_digest, artifact_digest, recorded_at, artifact_type, now_state,
                to_state, CASE WHEN is_formed THEN '' ELSE e_entry[place] END)::new_link;
            artifacts := artifacts || e_artifact[place];
            now_digest := entry_digest;
            now_artifact := artifact_digest;
            now_state := to_state;
            IF (claim IS NOT NULL OR x.idempotency_key IS NOT NULL) AND rule ? 'settles_claim' THEN
                now_effect := artifact_digest;
            END IF;
            place := place + 1;
        END LOOP;

        IF reason IS NOT NULL THEN
            WHILE e_plan[place] = plan LOOP
                place := place + 1;
            END LOOP;
            refusals := refusals || refusal(plan, reason[1], reason_number, reason[2], reason[3], reason[4]);
            refused := refused || plan;
            number_of[plan] := number;
            reason := NULL;
            reason_number := NULL;
            CONTINUE;
        END IF;
        number_of[plan] := number;
        IF places > 0 THEN
            new_payloads := new_payloads || ROW(plan, number, now_number - places + 1, artifacts)::new_payload;
            is_open := now_state = ANY (k.open_states);
        -- Nothing is moved by a plan of nothing but a checkpoint, nor by one that leaves owner and waiting as they are.
        ELSIF plan = ANY (k_plan)
              OR k.lease_ms IS NULL AND x.owner IS NOT DISTINCT FROM p_owner_after[plan]
                 AND x.waiting IS NOT DISTINCT FROM p_waiting_after[plan] THEN
            CONTINUE;
        ELSE
            is_open := x.is_open;
            has_bare := true;
        END IF;

        -- Where the stream will stand.
        IF is_birth THEN
            new_heads := new_heads || ROW(plan, number, true, false,
                birth #>> k.tenant_path, birth #>> k.principal_path,
                coalesce(birth #>> k.subject_path, c_server[claim]), coalesce(birth #>> k.name_path, c_tool[claim]),
                birth #>> k.expiry_path, c_key[claim], c_payload[claim],
                now_effect, now_number, now_digest, now_artifact, now_state, is_open, p_waiting_after[plan],
                p_owner_after[plan], CASE WHEN p_owner_after[plan] IS NOT NULL
                                          THEN clock_timestamp() + k.lease_ms * interval '1 millisecond' END)::new_head;
            IF claim IS NOT NULL THEN
                IF (c_key[claim] IS NOT NULL AND octet_length(c_payload[claim]) = 32) IS NOT TRUE THEN
                    RAISE EXCEPTION 'a claim has a key and a digest' USING ERRCODE = 'not_null_violation';
                END IF;
                claims := claims + 1;
            END IF;
            births := births + 1;
            IF x.stream_no IS NOT NULL THEN
                unborn := unborn || plan;
            END IF;
        ELSE
            new_heads := new_heads || ROW(plan, number, false, places > 0, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
                now_effect, now_number, now_digest, now_artifact, now_state, is_open, p_waiting_after[plan],
                p_owner_after[plan], CASE WHEN p_owner_after[plan] IS NOT NULL
                                          THEN clock_timestamp() + k.lease_ms * interval '1 millisecond' END)::new_head;
            -- Who looks for a stream that goes on as it was, or ends as usual, finds it where it was.
            IF x.is_open AND x.waiting IS NULL AND p_waiting_after[plan] IS NULL
               AND (is_open OR now_state = k.usual_end) THEN
                CONTINUE;
            END IF;
        END IF;

        -- And who will look for it there: recovery, expiry, lists.
        IF p_waiting_after[plan] IS NULL AND is_open THEN
            IF is_birth OR x.waiting IS NOT NULL OR NOT x.is_open THEN
                new_work := new_work || plan;
            END IF;
        ELSIF p_waiting_after[plan] IS NOT NULL OR now_state IS DISTINCT FROM k.usual_end THEN
            new_rests := new_rests || plan;
            IF is_open AND x.is_open AND x.waiting IS NULL THEN
                ended_work := ended_work || plan;
            END IF;
        END IF;
        IF x.waiting IS NOT NULL AND p_waiting_after[plan] IS NULL THEN
            ended_rests := ended_rests || plan;
        END IF;
    END LOOP;
    IF place <= cardinality(e_plan) THEN
        RAISE EXCEPTION 'the entries do not stand in the order of their plans'
            USING ERRCODE = 'invalid_parameter_value';
    END IF;

    IF has_lists THEN
        -- 4. Checkpoints ----------------------------------------------------------------------------------------------
        IF k_plan <> '{}' THEN  -- I4: a checkpoint stands only on the entry it says
            SELECT array_agg(s.sequence_number), array_agg(s.digest), array_agg(v.stream IS NULL),
                   array_agg(refusal(u.plan, 'STATE_CHECKSUM_MISMATCH', s.sequence_number,
                                     'the checkpoint does not stand on its entry',
                                     encode(e.entry_digest, 'hex'), coalesce(s.entry_digest, 'nothing')))
                       FILTER (WHERE u.plan <> ALL (refused)
                                 AND (s.entry_digest IS DISTINCT FROM encode(e.entry_digest, 'hex')
                                      OR v.checkpoint_digest <> s.digest))
              INTO y_sequence, y_digest, y_is_new, wrong
              FROM (SELECT k_plan[i] AS plan, k_state[i] AS state_bytes
                      FROM generate_subscripts(k_plan, 1) AS i OFFSET 0) AS u
             CROSS JOIN LATERAL (
                   SELECT (j.state ->> 'sequence_number')::bigint AS sequence_number,
                          j.state ->> 'entry_digest' AS entry_digest, sha256(u.state_bytes) AS digest
                     FROM (SELECT convert_from(u.state_bytes, 'UTF8')::jsonb AS state OFFSET 0) AS j OFFSET 0) AS s
             CROSS JOIN LATERAL (  -- among the new entries, or among the old ones
                   SELECT coalesce((SELECT n.entry_digest FROM unnest(new_links) AS n
                                     WHERE n.plan = u.plan AND n.sequence_number = s.sequence_number),
                                   (SELECT l.entry_digest FROM links l
                                     WHERE l.stream_no = number_of[u.plan] AND l.sequence_number = s.sequence_number))
                          AS entry_digest OFFSET 0) AS e
              LEFT JOIN execution_checkpoints v
                ON v.stream = p_stream[u.plan] AND v.sequence_number = s.sequence_number;
            IF wrong IS NOT NULL THEN
                refusals := refusals || wrong;
                refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
            END IF;
        END IF;

        -- 5. Attempts -------------------------------------------------------------------------------------------------
        IF d_plan <> '{}' THEN
            SELECT array_agg(refusal(u.plan, 'STATE_CONCURRENT_EXECUTION', NULL, 'the attempt is not the next one',
                                     n.expected::text, u.attempt::text))
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

        IF births > 0 THEN
            -- Before blobs: an erasure locks its run first, then its blobs.
            FOR i IN 1 .. coalesce(cardinality(r_plan), 0) LOOP
                id := r_row[i] ->> 'forked_from';
                IF id IS NOT NULL AND r_plan[i] <> ALL (refused)
                   AND EXISTS (SELECT FROM unnest(new_heads) AS n WHERE n.plan = r_plan[i] AND n.is_birth) THEN
                    id := erased_source(id);
                    IF id IS NOT NULL THEN
                        refusals := refusals || refusal(r_plan[i], 'RUN_ERASED', NULL,
                                                        'the run that it goes on from was erased', NULL, id);
                        refused := refused || r_plan[i];
                    END IF;
                END IF;
            END LOOP;
        END IF;

        -- 6. Blobs ----------------------------------------------------------------------------------------------------
        IF b_plan <> '{}' THEN
            -- Whose they are is said by the stream: by its head, or by the birth in this plan.
            y_tenant := ARRAY(SELECT coalesce((SELECT n.tenant FROM unnest(new_heads) AS n
                                                WHERE n.plan = b AND n.is_birth),
                                              (SELECT h.tenant FROM heads h WHERE h.stream_no = number_of[b]))
                                FROM unnest(b_plan) WITH ORDINALITY AS u(b, place) ORDER BY u.place);
            wrong := ARRAY(SELECT w FROM unnest(judge_blobs(b_plan, y_tenant, b_sha256, b_size)) AS w
                            WHERE w.plan <> ALL (refused));
            IF wrong <> '{}' THEN
                refusals := refusals || wrong;
                refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
            END IF;
        END IF;

        -- 7. Needs ----------------------------------------------------------------------------------------------------
        IF p_needs <> '{}' THEN
            IF EXISTS (SELECT FROM generate_subscripts(p_needs, 1) AS i
                        WHERE NOT p_needs[i] BETWEEN 1 AND plans OR p_needs[i] = i OR p_needs[i] = ANY (c_plan)) THEN
                RAISE EXCEPTION 'a plan needs another one that makes no claim'
                    USING ERRCODE = 'invalid_parameter_value';
            END IF;
            LOOP  -- until there is none whose needed plan is refused; most need an earlier one, and once is enough
                is_refused_more := false;
                FOR i IN 1 .. plans LOOP
                    IF p_needs[i] = ANY (refused) AND i <> ALL (refused) THEN
                        is_refused_more := true;
                        refused := refused || i;
                        refusals := refusals
                            || (SELECT refusal(i, r.code, r.sequence_number, r.what, r.expected, r.found)
                                  FROM unnest(refusals) AS r WHERE r.plan = p_needs[i]);
                    END IF;
                END LOOP;
                EXIT WHEN NOT is_refused_more;
            END LOOP;
        END IF;
    END IF;

    -- 8. Claims, with the rows of the streams that begin -------------------------------------------------------------
    IF births > 0 THEN  -- I2
        IF unborn IS NOT NULL THEN
            unborn := ARRAY(SELECT u FROM unnest(unborn) AS u WHERE u <> ALL (refused));
            DELETE FROM heads h WHERE h.stream = ANY (ARRAY(SELECT p_stream[u] FROM unnest(unborn) AS u));
        END IF;
        -- Sorted, because a transaction that meets another's uncommitted key waits for it.
        INSERT INTO heads (stream_no, stream, tenant, principal_id, subject, name, expires_at, idempotency_key,
                           payload_digest, effect_digest, sequence_number, entry_digest, artifact_digest, state,
                           is_open, waiting, owner, lease_until)
        SELECT n.stream_no, p_stream[n.plan], n.tenant, n.principal_id, n.subject, n.name, n.expiry::timestamptz,
               n.idempotency_key, n.payload_digest, n.effect_digest, n.sequence_number, n.entry_digest,
               n.artifact_digest, n.state, n.is_open, n.waiting, n.owner, n.lease_until
          FROM unnest(new_heads) AS n
         WHERE n.is_birth AND n.plan <> ALL (refused)
         ORDER BY n.subject COLLATE "C", n.name COLLATE "C", n.idempotency_key COLLATE "C"
            ON CONFLICT DO NOTHING;
        GET DIAGNOSTICS rows_written = ROW_COUNT;
    END IF;
    -- Unless every claim was made by a birth, and every birth has its row.
    IF c_plan <> '{}' AND NOT (claims = cardinality(c_plan) AND rows_written = births) THEN
        -- A later statement: in the same one the loser would not see the winner's row.
        SELECT array_agg(ROW(u.plan, CASE WHEN w.stream IS NULL THEN 'STATE_RECOVERY_FAILED'
                                          ELSE 'IDEMPOTENCY_KEY_CLAIMED' END, NULL,
                             CASE WHEN w.stream IS NULL THEN 'a claim is made with the first entry of its stream, once'
                                  ELSE 'another claim stands in the way' END,
                             NULL, w.stream, w.stream, w.payload_digest)::plan_result)
          INTO wrong
          FROM unnest(c_plan, c_server, c_tool, c_key) AS u(plan, server, tool, key)
          LEFT JOIN heads w ON w.subject = u.server AND w.name = u.tool AND w.idempotency_key = u.key
         WHERE u.plan <> ALL (refused) AND w.stream IS DISTINCT FROM p_stream[u.plan];
        IF wrong IS NOT NULL THEN
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
            -- The executor that owned the stream before it began, and lost the claim, owns it still.
            PERFORM own_unborn(p_stream[u], p_executor[u]) FROM unnest(unborn) AS u WHERE u = ANY (refused);
        END IF;
    END IF;

    -- 9. Writes -----------------------------------------------------------------------------------------------------
    -- No other transaction can move these heads: the streams are locked. One statement is started once.
    IF new_links IS NOT NULL OR new_work IS NOT NULL THEN
        WITH linked AS (
            INSERT INTO links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                               artifact_digest, recorded_at, artifact_type, from_state, to_state, verbatim)
            SELECT n.stream_no, n.sequence_number, n.place, n.places, n.executor_id, n.entry_digest,
                   n.prev_entry_digest, n.artifact_digest, n.recorded_at, n.artifact_type, n.from_state, n.to_state,
                   n.verbatim
              FROM unnest(new_links) AS n WHERE n.plan <> ALL (refused)
        ), put_to_work AS (
            INSERT INTO in_work (kind, stream_no)
            SELECT split_part(p_stream[w], ':', 1), number_of[w] FROM unnest(new_work) AS w WHERE w <> ALL (refused)
        )
        INSERT INTO payloads (stream_no, sequence_number, artifacts)
        SELECT n.stream_no, n.sequence_number, n.artifacts
          FROM unnest(new_payloads) AS n WHERE n.plan <> ALL (refused);
        IF births < cardinality(new_heads) THEN
            UPDATE heads h
               SET sequence_number = n.sequence_number, entry_digest = n.entry_digest, state = n.state,
                   artifact_digest = n.artifact_digest, is_open = n.is_open,
                   effect_digest = coalesce(n.effect_digest, h.effect_digest),
                   owner = n.owner, waiting = n.waiting, lease_until = n.lease_until, updated_at = clock_timestamp()
              FROM unnest(new_heads) AS n
             WHERE h.stream_no = n.stream_no AND n.moves AND n.plan <> ALL (refused);
        END IF;
    END IF;
    IF has_bare THEN
        UPDATE heads h
           SET owner = n.owner, waiting = n.waiting, lease_until = n.lease_until, updated_at = clock_timestamp()
          FROM unnest(new_heads) AS n
         WHERE h.stream_no = n.stream_no AND NOT n.moves AND NOT n.is_birth AND n.plan <> ALL (refused);
    END IF;
    IF num_nonnulls(ended_work, ended_rests, new_rests) > 0 THEN
        IF ended_work IS NOT NULL THEN
            DELETE FROM in_work i USING unnest(ended_work) AS w
             WHERE i.kind = split_part(p_stream[w], ':', 1) AND i.stream_no = number_of[w] AND w <> ALL (refused);
        END IF;
        IF ended_rests IS NOT NULL THEN
            DELETE FROM at_rest
             WHERE stream_no = ANY (ARRAY(SELECT number_of[w] FROM unnest(ended_rests) AS w WHERE w <> ALL (refused)));
        END IF;
        IF new_rests IS NOT NULL THEN
            INSERT INTO at_rest AS a (stream_no, stream, tenant, state, waiting, expires_at)
            SELECT h.stream_no, h.stream, h.tenant, h.state, h.waiting, h.expires_at
              FROM heads h
             WHERE h.stream_no = ANY (ARRAY(SELECT number_of[w] FROM unnest(new_rests) AS w WHERE w <> ALL (refused)))
                ON CONFLICT (stream_no) DO UPDATE SET state = excluded.state, waiting = excluded.waiting;
        END IF;
    END IF;

    IF has_lists THEN
        IF k_plan <> '{}' THEN
            INSERT INTO execution_checkpoints (stream, sequence_number, checkpoint_state, checkpoint_digest, created_at)
            SELECT p_stream[k_plan[i]], y_sequence[i], k_state[i], y_digest[i], k_created_at[i]
              FROM generate_subscripts(k_plan, 1) AS i WHERE y_is_new[i] AND k_plan[i] <> ALL (refused);
        END IF;
        IF d_plan <> '{}' THEN
            INSERT INTO dispatch_attempts (stream, attempt, executor_id, started_at, resolution)
            SELECT p_stream[u.plan], u.attempt, p_executor[u.plan], clock_timestamp(), u.resolution
              FROM unnest(d_plan, d_attempt, d_resolution) AS u(plan, attempt, resolution)
             WHERE u.plan <> ALL (refused);
        END IF;
        IF s_plan <> '{}' THEN
            INSERT INTO sealed (stream, sealed_salt, sealed_values)
            SELECT p_stream[u.plan], u.salt, u.secrets
              FROM unnest(s_plan, s_salt, s_values) AS u(plan, salt, secrets) WHERE u.plan <> ALL (refused);
        END IF;
        IF f_plan <> '{}' THEN  -- the salt stays: a repeat of the call is recognised by it
            UPDATE sealed SET sealed_values = NULL
             WHERE stream = ANY (ARRAY(SELECT p_stream[f] FROM unnest(f_plan) AS f WHERE f <> ALL (refused)));
        END IF;
        IF o_plan <> '{}' THEN
            INSERT INTO outbox (webhook, stream, waiting)
            SELECT u.webhook, p_stream[u.plan], p_waiting_after[u.plan]
              FROM unnest(o_plan, o_webhook) AS u(plan, webhook) WHERE u.plan <> ALL (refused);
        END IF;
        IF b_plan <> '{}' THEN
            PERFORM refer_to_blobs(array_agg(number_of[u.plan]), array_agg(u.number), array_agg(u.tenant),
                                   array_agg(u.sha256))
               FROM unnest(b_plan, b_sequence, y_tenant, b_sha256) AS u(plan, number, tenant, sha256)
              WHERE u.plan <> ALL (refused);
        END IF;
        IF r_plan <> '{}' THEN
            PERFORM write_run_rows(array_agg(number_of[u.plan]), array_agg(u.schedule))
               FROM unnest(r_plan, r_row) AS u(plan, schedule) WHERE u.plan <> ALL (refused);
        END IF;
    END IF;

    -- 10. Answer ----------------------------------------------------------------------------------------------------
    IF refused <> '{}' THEN
        RETURN QUERY SELECT p, r.code, r.sequence_number, r.what, r.expected, r.found, r.claimed_by, r.claimed_payload
                       FROM generate_subscripts(p_stream, 1) AS p LEFT JOIN unnest(refusals) AS r ON r.plan = p
                      ORDER BY p;
        RETURN;
    END IF;
    FOR i IN 1 .. plans LOOP
        appended.plan := i;
        RETURN NEXT appended;
    END LOOP;
END
$$;

