-- The append function as in 0013, which it replaces, with two more refusals: a plan without entries that is there for
-- its owner to be compared, where nobody owns the run any more; and a fork whose source is erased. And an erasure that
-- sees every fork which rests on the run, also one that is being made.

-- The run in a fork's ancestry whose payloads are gone, null where there is none. It waits for an erasure that is under
-- way, and none of these runs is erased before the caller's transaction has ended.
CREATE FUNCTION tga.erased_source(source text) RETURNS text
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off
AS $$
DECLARE
    head_no bigint;
BEGIN
    WHILE source IS NOT NULL LOOP
        SELECT h.stream_no INTO head_no FROM heads h WHERE h.stream = source FOR KEY SHARE;
        -- A later statement than the lock: it sees the erasure that was waited for.
        IF EXISTS (SELECT FROM erasures e WHERE e.stream = source) THEN
            RETURN source;
        END IF;
        SELECT r.forked_from INTO source FROM runs r WHERE r.stream_no = head_no;
    END LOOP;
    RETURN NULL;
END
$$;

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
-- `p_needs` is empty, or names for each plan another, without which it is refused; that one makes no claim.
-- In the body: `x` is the row that is judged, `now_` what holds after the entries of its plan so far, `new_` what will
-- be written.
--
-- Sections: 1 arguments, 2 locks, 3 plans and entries, 4 checkpoints, 5 attempts, sources, 6 blobs, 7 needs, 8 claims,
-- 9 writes, 10 answer. Checks speak in the order owner; then for each entry schema, sequence, chain and digest,
-- transition, what the artifact binds to, expiry; then checkpoint, attempt, source, blob, need, claim.
CREATE OR REPLACE FUNCTION tga.append(
    lock_timeout_ms integer,
    p_stream text[], p_executor uuid[], p_owner_after uuid[], p_waiting_after text[],
    e_plan integer[], e_entry bytea[], e_artifact bytea[],
    c_plan integer[], c_server text[], c_tool text[], c_key text[], c_payload bytea[],
    k_plan integer[], k_state bytea[], k_created_at text[],
    d_plan integer[], d_attempt integer[], d_resolution bytea[],
    s_plan integer[], s_salt bytea[], s_values bytea[], f_plan integer[],
    o_plan integer[], o_webhook text[],
    p_needs integer[] DEFAULT '{}',
    r_plan integer[] DEFAULT '{}', r_row jsonb[] DEFAULT '{}',
    b_plan integer[] DEFAULT '{}', b_sequence bigint[] DEFAULT '{}', b_sha256 bytea[] DEFAULT '{}',
    b_size bigint[] DEFAULT '{}'
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
-- Plans of queries are made while the tables are empty and must still be right when they are huge; and made once:
-- planning again for each call costs more than the call. A table that grows is only ever the inner side of a join.
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    plans integer := cardinality(p_stream);
    has_repeats boolean := false;  -- a stream stands twice in the batch
    x record; plan integer;        -- the plan that is judged: its stream's head as it was found
    kind text; k record; id text;  -- the kind of its stream and its rules, and the stream's id
    place integer := 1; places integer;  -- of the entry that is judged; how many the plan has
    claim integer;                 -- place of the plan's claim
    entry text; body jsonb; rule jsonb; artifact_digest bytea; prev_digest bytea; recorded_at text; artifact_type text;
    to_state text; settles_claim boolean; is_formed boolean;
    now_number bigint; now_digest bytea; now_artifact bytea; now_state text; now_effect bytea; is_open boolean;
    birth jsonb;                   -- the artifact that begins the stream, if the plan does
    artifacts bytea[];             -- of the plan
    number_of bigint[];            -- by plan: its stream's number
    new_links new_link[]; new_payloads new_payload[]; new_heads new_head[];
    births integer := 0;           -- how many streams begin
    -- Plans: of streams that someone owned before they began; whose streams are put to work, no longer, rest, no
    -- longer.
    unborn integer[] := '{}'; new_work integer[] := '{}'; ended_work integer[] := '{}';
    new_rests integer[] := '{}'; ended_rests integer[] := '{}';
    reason text[]; reason_number bigint;  -- what speaks against the plan: code, words, expected, found; at which entry
    refusals plan_result[];        -- one for each plan at most
    refused integer[] := '{}';     -- their plans
    wrong plan_result[];           -- what a section has found
    rows_written bigint;
    y_sequence bigint[]; y_digest bytea[]; y_is_new boolean[];  -- of the checkpoints
    y_tenant text[];               -- of the blobs
    appended plan_result;
BEGIN
    -- 1. Arguments --------------------------------------------------------------------------------------------------
    -- As conditions, here and with the locks: an expression is evaluated at once, PERFORM would start a query.
    IF prepare_transaction(lock_timeout_ms) IS NULL THEN END IF;

    -- What is judged by its place is stored by its place. The gateway always sends such arrays.
    IF (array_dims(p_stream) = '[1:' || plans || ']' AND array_dims(p_executor) = array_dims(p_stream)
        AND array_dims(p_owner_after) = array_dims(p_stream) AND array_dims(p_waiting_after) = array_dims(p_stream)
        AND (cardinality(p_needs) = 0 OR array_dims(p_needs) = array_dims(p_stream))) IS NOT TRUE THEN
        RAISE EXCEPTION 'arrays that belong together differ in shape' USING ERRCODE = 'invalid_parameter_value';
    END IF;
    IF (array_dims(e_plan) = '[1:' || cardinality(e_plan) || ']' AND array_dims(e_entry) = array_dims(e_plan)
        AND array_dims(e_artifact) = array_dims(e_plan)
        AND 1 <= ALL (e_plan) AND plans >= ALL (e_plan)) IS NOT TRUE THEN
        PERFORM verify_lists(plans, e_plan, ARRAY[array_dims(e_entry), array_dims(e_artifact)], false);
    END IF;
    IF (cardinality(c_plan) = 0) IS NOT TRUE THEN
        PERFORM verify_lists(plans, c_plan, ARRAY[array_dims(c_server), array_dims(c_tool), array_dims(c_key),
                                                  array_dims(c_payload)], true);
    END IF;
    IF (cardinality(c_server) + cardinality(c_tool) + cardinality(c_key) + cardinality(c_payload)
        = 4 * cardinality(c_plan)
        AND cardinality(k_plan) + cardinality(k_state) + cardinality(k_created_at)
        + cardinality(d_plan) + cardinality(d_attempt) + cardinality(d_resolution)
        + cardinality(s_plan) + cardinality(s_salt) + cardinality(s_values)
        + cardinality(f_plan) + cardinality(o_plan) + cardinality(o_webhook)
        + cardinality(r_plan) + cardinality(r_row)
        + cardinality(b_plan) + cardinality(b_sequence) + cardinality(b_sha256) + cardinality(b_size)
        = 0) IS NOT TRUE THEN  -- which is rare
        PERFORM verify_lists(plans, c_plan, ARRAY[array_dims(c_server), array_dims(c_tool), array_dims(c_key),
                                                  array_dims(c_payload)], true);
        PERFORM verify_lists(plans, k_plan, ARRAY[array_dims(k_state), array_dims(k_created_at)], true),
                verify_lists(plans, d_plan, ARRAY[array_dims(d_attempt), array_dims(d_resolution)], true),
                verify_lists(plans, s_plan, ARRAY[array_dims(s_salt), array_dims(s_values)], false),
                verify_lists(plans, f_plan, '{}', false),
                verify_lists(plans, o_plan, ARRAY[array_dims(o_webhook)], false),
                verify_lists(plans, r_plan, ARRAY[array_dims(r_row)], true),
                verify_lists(plans, b_plan, ARRAY[array_dims(b_sequence), array_dims(b_sha256), array_dims(b_size)],
                             false);
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
    -- A later statement than the locks: it sees all that was committed before they were obtained.
    FOR x IN
        SELECT p.plan, h.stream_no, h.sequence_number, h.entry_digest, h.artifact_digest, h.state, h.is_open, h.owner,
               h.waiting, h.expires_at, h.idempotency_key
          FROM generate_subscripts(p_stream, 1) AS p(plan)
          LEFT JOIN heads h ON h.stream = p_stream[p.plan]
    LOOP
        plan := x.plan;
        IF split_part(p_stream[plan], ':', 1) IS DISTINCT FROM kind THEN  -- most batches are of one kind
            SELECT s.*, m.machine, m.open_states INTO k
              FROM stream_kinds s LEFT JOIN machines m ON m.kind = s.kind
             WHERE s.kind = split_part(p_stream[plan], ':', 1);
            kind := k.kind;
        END IF;
        id := substr(p_stream[plan], length(kind) + 2);
        number_of[plan] := x.stream_no;
        now_number := coalesce(x.sequence_number, 0);
        places := cardinality(array_positions(e_plan, plan));
        claim := array_position(c_plan, plan);
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
        IF reason IS NULL THEN
            birth := NULL;
            now_digest := coalesce(x.entry_digest, decode(repeat('00', 32), 'hex'));
            now_artifact := x.artifact_digest;
            now_state := coalesce(x.state, k.birth_state);
            now_effect := NULL;
            artifacts := '{}';
            IF now_number = 0 THEN
                number_of[plan] := nextval('stream_numbers');
            END IF;
        END IF;

        WHILE e_plan[place] = plan LOOP
            IF reason IS NOT NULL THEN
                place := place + 1;
                CONTINUE;
            END IF;
            now_number := now_number + 1;
            entry := convert_from(e_entry[place], 'UTF8');
            body := convert_from(e_artifact[place], 'UTF8')::jsonb;
            artifact_digest := sha256(e_artifact[place]);
            recorded_at := substr(entry, strpos(entry, '"recorded_at":"') + 15, 24);
            rule := k.machine -> (body ->> 'schema_id');
            artifact_type := rule ->> 'artifact_type';
            to_state := rule #>> ARRAY[CASE WHEN now_number = 1 THEN 'births' ELSE 'leads' END, now_state,
                                       coalesce(body ->> (rule ->> 'verdict_field'), '')];
            -- An entry that is what the form makes of what it has to say is right in all that it says: schema, stream,
            -- number, link, digest, states; and is stored as what it says. (Not with an id or a time that could say
            -- more than itself.) What its artifact binds to is seen here, too. All else is judged rule by rule.
            is_formed := entry = format(k.entry_form, encode(artifact_digest, 'hex'), artifact_type, p_executor[plan],
                                        now_state, encode(now_digest, 'hex'), recorded_at, now_number, to_state, id)
                         AND to_state IS NOT NULL AND recorded_at || id !~ '[^0-9A-Za-z._:@+/-]';
            IF is_formed AND body ->> k.id_field = id
               AND (rule -> 'binds_field' IS NULL OR body ->> (rule ->> 'binds_field') = encode(now_artifact, 'hex'))
               AND (x.expires_at IS NULL OR rule -> 'expired_path' IS NULL)
               AND (claim IS NULL OR now_number > 1
                    OR c_server[claim] = coalesce(body #>> k.subject_path, c_server[claim])
                       AND c_tool[claim] = coalesce(body #>> k.name_path, c_tool[claim]))
            THEN
                settles_claim := rule -> 'settles_claim' IS NOT NULL;
            ELSE
                SELECT * INTO artifact_type, to_state, recorded_at, settles_claim, reason
                  FROM judge_entry(kind, id, e_entry[place], e_artifact[place], now_number,
                                   now_digest, now_artifact, now_state, x.expires_at,
                                   c_server[claim], c_tool[claim]);
                IF reason IS NOT NULL THEN
                    reason_number := now_number;
                    CONTINUE;
                END IF;
            END IF;
            IF now_number = 1 THEN
                birth := body;
            END IF;
            prev_digest := now_digest;
            now_digest := sha256(e_entry[place]);
            new_links := new_links || ROW(plan, number_of[plan], now_number, cardinality(artifacts) + 1, places,
                p_executor[plan], now_digest, prev_digest, artifact_digest, recorded_at, artifact_type, now_state,
                to_state, CASE WHEN is_formed THEN '' ELSE e_entry[place] END)::new_link;
            artifacts := artifacts || e_artifact[place];
            now_artifact := artifact_digest;
            now_state := to_state;
            IF settles_claim AND (x.idempotency_key IS NOT NULL OR claim IS NOT NULL) THEN
                now_effect := artifact_digest;
            END IF;
            place := place + 1;
        END LOOP;

        IF reason IS NOT NULL THEN
            refusals := refusals || refusal(plan, reason[1], reason_number, reason[2], reason[3], reason[4]);
            refused := refused || plan;
            reason_number := NULL;
            CONTINUE;
        END IF;
        IF places > 0 THEN
            new_payloads := new_payloads || ROW(plan, number_of[plan], now_number - places + 1, artifacts)::new_payload;
            is_open := now_state = ANY (k.open_states);
        -- Nothing is moved by a plan of nothing but a checkpoint, nor by one that leaves owner and waiting as they are.
        ELSIF plan = ANY (k_plan)
              OR k.lease_ms IS NULL AND x.owner IS NOT DISTINCT FROM p_owner_after[plan]
                 AND x.waiting IS NOT DISTINCT FROM p_waiting_after[plan] THEN
            CONTINUE;
        ELSE
            is_open := x.is_open;
        END IF;

        -- Where the stream will stand, and who will look for it there: recovery, expiry, lists.
        new_heads := new_heads || ROW(plan, number_of[plan], birth IS NOT NULL, birth IS NULL AND places > 0,
            birth #>> k.tenant_path, birth #>> k.principal_path,
            coalesce(birth #>> k.subject_path, c_server[claim]), coalesce(birth #>> k.name_path, c_tool[claim]),
            birth #>> k.expiry_path, c_key[claim], c_payload[claim],
            now_effect, now_number, now_digest, now_artifact, now_state, is_open, p_waiting_after[plan],
            p_owner_after[plan], CASE WHEN p_owner_after[plan] IS NOT NULL
                                      THEN clock_timestamp() + k.lease_ms * interval '1 millisecond' END)::new_head;
        IF birth IS NOT NULL THEN
            IF claim IS NOT NULL AND (c_key[claim] IS NOT NULL AND octet_length(c_payload[claim]) = 32) IS NOT TRUE THEN
                RAISE EXCEPTION 'a claim has a key and a digest' USING ERRCODE = 'not_null_violation';
            END IF;
            births := births + 1;
            IF x.stream_no IS NOT NULL THEN
                unborn := unborn || plan;
            END IF;
        END IF;
        IF p_waiting_after[plan] IS NULL AND is_open THEN
            IF birth IS NOT NULL OR x.waiting IS NOT NULL OR NOT x.is_open THEN
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

    -- 4. Checkpoints ------------------------------------------------------------------------------------------------
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
          LEFT JOIN execution_checkpoints v ON v.stream = p_stream[u.plan] AND v.sequence_number = s.sequence_number;
        IF wrong IS NOT NULL THEN
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
        END IF;
    END IF;

    -- 5. Attempts ---------------------------------------------------------------------------------------------------
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
        FOR i IN 1 .. cardinality(r_plan) LOOP  -- before blobs: an erasure locks its run first, then its blobs
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

    -- 6. Blobs ------------------------------------------------------------------------------------------------------
    IF b_plan <> '{}' THEN
        -- Whose they are is said by the stream: by its head, or by the birth in this plan.
        y_tenant := ARRAY(SELECT coalesce((SELECT n.tenant FROM unnest(new_heads) AS n WHERE n.plan = b AND n.is_birth),
                                          (SELECT h.tenant FROM heads h WHERE h.stream_no = number_of[b]))
                            FROM unnest(b_plan) WITH ORDINALITY AS u(b, place) ORDER BY u.place);
        wrong := ARRAY(SELECT w FROM unnest(judge_blobs(b_plan, y_tenant, b_sha256, b_size)) AS w
                        WHERE w.plan <> ALL (refused));
        IF wrong <> '{}' THEN
            refusals := refusals || wrong;
            refused := ARRAY(SELECT r.plan FROM unnest(refusals) AS r);
        END IF;
    END IF;

    -- 7. Needs ------------------------------------------------------------------------------------------------------
    IF p_needs <> '{}' THEN
        IF EXISTS (SELECT FROM generate_subscripts(p_needs, 1) AS i
                    WHERE NOT p_needs[i] BETWEEN 1 AND plans OR p_needs[i] >= i OR p_needs[i] = ANY (c_plan)) THEN
            RAISE EXCEPTION 'a plan needs an earlier one that makes no claim' USING ERRCODE = 'invalid_parameter_value';
        END IF;
        FOR i IN 1 .. plans LOOP
            IF p_needs[i] = ANY (refused) AND i <> ALL (refused) THEN
                refused := refused || i;
                refusals := refusals || (SELECT refusal(i, r.code, r.sequence_number, r.what, r.expected, r.found)
                                           FROM unnest(refusals) AS r WHERE r.plan = p_needs[i]);
            END IF;
        END LOOP;
    END IF;

    -- 8. Claims, with the rows of the streams that begin -------------------------------------------------------------
    IF unborn <> '{}' THEN
        unborn := ARRAY(SELECT u FROM unnest(unborn) AS u WHERE u <> ALL (refused));
        DELETE FROM heads h WHERE h.stream = ANY (ARRAY(SELECT p_stream[u] FROM unnest(unborn) AS u));
    END IF;
    IF births > 0 THEN  -- I2
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
    IF c_plan <> '{}' AND NOT (births = plans AND rows_written = plans) THEN
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
    IF new_links IS NOT NULL OR new_work <> '{}' THEN
        WITH linked AS (
            INSERT INTO links (stream_no, sequence_number, place, places, executor_id, entry_digest, prev_entry_digest,
                               artifact_digest, recorded_at, artifact_type, from_state, to_state, verbatim)
            SELECT n.stream_no, n.sequence_number, n.place, n.places, n.executor_id, n.entry_digest,
                   n.prev_entry_digest, n.artifact_digest, n.recorded_at, n.artifact_type, n.from_state, n.to_state,
                   n.verbatim
              FROM unnest(new_links) AS n WHERE n.plan <> ALL (refused)
        ), moved AS (
            UPDATE heads h
               SET sequence_number = n.sequence_number, entry_digest = n.entry_digest, state = n.state,
                   artifact_digest = n.artifact_digest, is_open = n.is_open,
                   effect_digest = coalesce(n.effect_digest, h.effect_digest),
                   owner = n.owner, waiting = n.waiting, lease_until = n.lease_until, updated_at = clock_timestamp()
              FROM unnest(new_heads) AS n
             WHERE h.stream_no = n.stream_no AND n.moves AND n.plan <> ALL (refused)
        ), put_to_work AS (
            INSERT INTO in_work (kind, stream_no)
            SELECT split_part(p_stream[w], ':', 1), number_of[w] FROM unnest(new_work) AS w WHERE w <> ALL (refused)
        )
        INSERT INTO payloads (stream_no, sequence_number, artifacts)
        SELECT n.stream_no, n.sequence_number, n.artifacts
          FROM unnest(new_payloads) AS n WHERE n.plan <> ALL (refused);
    END IF;
    -- Plans of nothing but an owner or a wait.
    IF cardinality(new_heads) > cardinality(new_payloads) OR new_payloads IS NULL THEN
        UPDATE heads h
           SET owner = n.owner, waiting = n.waiting, lease_until = n.lease_until, updated_at = clock_timestamp()
          FROM unnest(new_heads) AS n
         WHERE h.stream_no = n.stream_no AND NOT n.moves AND NOT n.is_birth AND n.plan <> ALL (refused);
    END IF;
    IF ended_work <> '{}' THEN
        DELETE FROM in_work i USING unnest(ended_work) AS w
         WHERE i.kind = split_part(p_stream[w], ':', 1) AND i.stream_no = number_of[w] AND w <> ALL (refused);
    END IF;
    IF ended_rests <> '{}' THEN
        DELETE FROM at_rest
         WHERE stream_no = ANY (ARRAY(SELECT number_of[w] FROM unnest(ended_rests) AS w WHERE w <> ALL (refused)));
    END IF;
    IF new_rests <> '{}' THEN
        INSERT INTO at_rest AS a (stream_no, stream, tenant, state, waiting, expires_at)
        SELECT h.stream_no, h.stream, h.tenant, h.state, h.waiting, h.expires_at
          FROM heads h
         WHERE h.stream_no = ANY (ARRAY(SELECT number_of[w] FROM unnest(new_rests) AS w WHERE w <> ALL (refused)))
            ON CONFLICT (stream_no) DO UPDATE SET state = excluded.state, waiting = excluded.waiting;
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

-- As in 0020; it waits for forks that are being made, and keeps what an open fork of a fork rests on.
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
    -- Appends go on beside it, but for forks of this run: see `erased_source`.
    SELECT * INTO head FROM heads h WHERE h.stream = stream_erased AND h.sequence_number > 0 FOR UPDATE;
    said := convert_from(erasure, 'UTF8')::jsonb;
    SELECT * INTO rule FROM artifact_rules r
     WHERE r.kind = split_part(system_stream, ':', 1) AND r.schema_id = said ->> 'schema_id';
    -- What an open run refers to stays: the run that a child answers, the runs that go on from this one or from those,
    -- and the run that made a call, whose id its key holds (`run:ID/ADDRESS`, with `/rN` for a later try).
    WITH RECURSIVE forks AS (
        SELECT stream_erased COLLATE "C" AS stream
         UNION
        SELECT f.stream FROM forks o JOIN runs r ON r.forked_from = o.stream JOIN heads f ON f.stream_no = r.stream_no)
    SELECT u.stream INTO user_stream
      FROM (SELECT r.parent AS stream FROM runs r WHERE r.stream_no = head.stream_no
             UNION ALL
            SELECT f.stream FROM forks f
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

REVOKE ALL ON FUNCTION tga.erased_source FROM PUBLIC;
