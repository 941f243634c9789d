-- What people did about calls, runs, tools and the record: a row an act, folded from the ledger behind the sequencer,
-- in the order of the tree. It can be made anew (`tga db rebuild`), no call waits for it, and nothing is decided by it.
-- What they ask for (calls, starts, schedules, programs) is not here: that has lists of its own.
-- docs/adr/0063-what-people-did.md says which acts are a person's.
CREATE TABLE tga.acts (
    stream_no       bigint NOT NULL,
    sequence_number bigint NOT NULL,
    tenant          text COLLATE "C" NOT NULL,
    leaf_index      bigint NOT NULL,
    act             text COLLATE "C" NOT NULL,
    actor           text COLLATE "C" NOT NULL,
    about           text,  -- what of the stream: a question's path, a signal, a tool, a key, an erased stream
    reason          text,
    PRIMARY KEY (stream_no, sequence_number)
);
CREATE INDEX acts_listed ON tga.acts (tenant, leaf_index);

-- How far the tree was looked through. It starts at the first leaf: what was done before this migration is found, too.
CREATE TABLE tga.act_fold (
    is_only   boolean PRIMARY KEY DEFAULT true CHECK (is_only),
    next_leaf bigint NOT NULL
);
INSERT INTO tga.act_fold (next_leaf) VALUES (0);

-- Whether whoever asked for the call or started the run had a role that people have. Agents may withdraw, cancel, retry
-- and signal what is their own; what is not their own only people may.
CREATE FUNCTION tga.is_a_persons(number bigint) RETURNS boolean LANGUAGE sql STABLE
SET search_path = pg_catalog, tga, pg_temp
AS $$
    SELECT coalesce((convert_from(p.artifacts[1], 'UTF8')::jsonb #> '{principal,roles}')
                    ?| ARRAY['supervisor', 'operator', 'auditor', 'admin'], false)
      FROM payloads p WHERE p.stream_no = number AND p.sequence_number = 1
$$;

-- What a person did with this entry, if a person did something with it: the act, by whom, about what and why.
CREATE FUNCTION tga.act_in(number bigint, owner text, of_type text, body bytea)
RETURNS TABLE (act text, actor text, about text, reason text)
LANGUAGE plpgsql STABLE ROWS 1
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    said jsonb;
    is_own_too boolean := false;  -- an agent may do this to what is its own
BEGIN
    said := convert_from(body, 'UTF8')::jsonb;
    actor := said ->> 'recorded_by';
    reason := said ->> 'rationale';
    CASE of_type
    WHEN 'supervisor_decision' THEN
        actor := said #>> '{decided_by,id}';
        CASE said #>> '{decided_by,type}'
        WHEN 'person' THEN
            act := CASE said ->> 'decision' WHEN 'APPROVE' THEN 'approved' WHEN 'DENY' THEN 'denied' END;
        WHEN 'withdrawal' THEN
            act := 'withdrew';
            is_own_too := true;
        ELSE
            NULL;
        END CASE;
    WHEN 'tool_effect' THEN
        actor := said #>> '{resolution,resolved_by}';
        reason := said #>> '{resolution,rationale}';
        act := CASE said #>> '{resolution,action}' WHEN 'redispatch' THEN 'redispatched'
               WHEN 'succeeded' THEN 'resolved_as_succeeded' WHEN 'failed' THEN 'resolved_as_failed' END;
    WHEN 'run_answer' THEN
        IF said #>> '{answered_by,type}' IN ('person', 'operator') THEN
            act := 'answered';
            actor := said #>> '{answered_by,id}';
            about := said ->> 'path';
        END IF;
    WHEN 'run_signal' THEN
        act := 'signalled';
        actor := said ->> 'sent_by';
        about := said ->> 'name';
        is_own_too := true;
    WHEN 'run_end' THEN
        IF said #>> '{ended_by,type}' = 'person' AND said ->> 'outcome' = 'CANCELLED' THEN
            act := 'cancelled';
            actor := said #>> '{ended_by,id}';
            reason := said #>> '{error,message}';
            is_own_too := true;
        END IF;
    WHEN 'run_resumption' THEN
        act := 'resumed';
        actor := said ->> 'resumed_by';
        about := said #>> '{accepts,version}';
        is_own_too := true;
    WHEN 'run_start' THEN
        IF said #>> '{trigger,type}' = 'fork' THEN
            act := 'forked';
            actor := said #>> '{principal,principal_id}';
            about := said #>> '{forked_from,run_id}';
            is_own_too := true;
        END IF;
    WHEN 'tool_pin' THEN
        act := CASE said ->> 'change' WHEN 'accepted' THEN 'accepted_tool' END;
        about := concat(said ->> 'server_id', ' ', said ->> 'tool_name');
    WHEN 'erasure' THEN
        act := 'erased';
        about := said ->> 'erased_stream';
    WHEN 'signing_key' THEN
        act := CASE said ->> 'change' WHEN 'announced' THEN 'announced_key' WHEN 'retired' THEN 'retired_key' END;
        about := said ->> 'key_id';
    WHEN 'log_epoch' THEN
        act := 'began_epoch';
        about := said ->> 'epoch';
    END CASE;
    -- `gateway` and `retention` are what the gateway did by itself.
    IF act IS NOT NULL AND actor IS NOT NULL AND actor NOT IN ('gateway', 'retention')
       AND (NOT is_own_too OR actor IS DISTINCT FROM owner OR is_a_persons(number)) THEN
        RETURN NEXT;
    END IF;
EXCEPTION WHEN data_exception OR case_not_found THEN
    RETURN;  -- a document that cannot be read is left out: whoever verifies finds it
END
$$;

-- Look through the next plans of the tree, at most `rows_max`. In one transaction with the place that was reached.
-- Returns how many were looked at, none when another gateway does. Of a call's decision and effect, and of a run's
-- start, answers and end, the stored bytes say whether they are worth reading: RFC 8785 has one spelling.
CREATE FUNCTION tga.fold_acts(rows_max integer) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off
SET plan_cache_mode = force_generic_plan
AS $$
DECLARE
    place bigint;
    reached bigint;
    looked_at bigint;
BEGIN
    PERFORM prepare_transaction(5000);
    IF NOT pg_try_advisory_xact_lock(tree_lock_key('acts')) THEN
        RETURN 0;
    END IF;
    SELECT f.next_leaf INTO place FROM act_fold f;
    SELECT count(*), max(s.first_index + s.leaves) INTO looked_at, reached
      FROM (SELECT s.* FROM leaf_spans s WHERE s.first_index >= place ORDER BY s.first_index LIMIT rows_max) AS s;
    IF looked_at = 0 THEN
        RETURN 0;
    END IF;
    INSERT INTO acts (stream_no, sequence_number, tenant, leaf_index, act, actor, about, reason)
    SELECT e.stream_no, e.sequence_number, h.tenant, e.leaf_index, a.act, a.actor, a.about, a.reason
      FROM (SELECT l.stream_no, l.sequence_number, l.artifact_type, p.artifacts[l.place] AS body,
                   s.first_index + l.place - 1 AS leaf_index
              FROM (SELECT s.* FROM leaf_spans s WHERE s.first_index >= place AND s.first_index < reached
                     ORDER BY s.first_index) AS s
              JOIN links l ON l.stream_no = s.stream_no AND l.sequence_number >= s.sequence_number
                          AND l.sequence_number < s.sequence_number + s.leaves
              JOIN payloads p ON p.stream_no = s.stream_no AND p.sequence_number = s.sequence_number
             WHERE l.artifact_type IN ('supervisor_decision', 'tool_effect', 'run_answer', 'run_signal', 'run_end',
                                       'run_resumption', 'run_start', 'tool_pin', 'erasure', 'signing_key',
                                       'log_epoch')) AS e
      JOIN heads h ON h.stream_no = e.stream_no
     CROSS JOIN LATERAL act_in(e.stream_no, h.principal_id, e.artifact_type, e.body) AS a
     WHERE h.tenant IS NOT NULL
       AND CASE e.artifact_type
           WHEN 'supervisor_decision' THEN position('"type":"person"' IN e.body) > 0
                                           OR position('"type":"withdrawal"' IN e.body) > 0
           WHEN 'tool_effect' THEN position('"resolution":{' IN e.body) > 0
           WHEN 'run_answer' THEN position('"type":"person"' IN e.body) > 0
                                  OR position('"type":"operator"' IN e.body) > 0
           WHEN 'run_end' THEN position('"type":"person"' IN e.body) > 0
           WHEN 'run_start' THEN position('"type":"fork"' IN e.body) > 0
           ELSE true END
        ON CONFLICT DO NOTHING;
    UPDATE act_fold f SET next_leaf = reached;
    RETURN looked_at;
END
$$;

-- As in 0023, with acts. In the order of `erase_facts`, so that neither waits for the other.
CREATE OR REPLACE FUNCTION tga.forget_calls() RETURNS void
LANGUAGE plpgsql
SET search_path = pg_catalog, tga, pg_temp
AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(tree_lock_key('calls'));
    PERFORM pg_advisory_xact_lock(tree_lock_key('acts'));
    TRUNCATE call_facts, digest_leaves, acts;
    DELETE FROM call_counts WHERE measure <> 'replayed';
    UPDATE call_fold SET next_leaf = 0;
    UPDATE act_fold SET next_leaf = 0;
END
$$;

-- As in 0027, with acts: with the payloads goes who decided, answered and resolved, and what they said.
CREATE OR REPLACE FUNCTION tga.erase_facts() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, tga, pg_temp AS $$
BEGIN
    PERFORM pg_advisory_xact_lock(tree_lock_key('calls'));
    PERFORM pg_advisory_xact_lock(tree_lock_key('acts'));
    UPDATE call_facts c
       SET decided_by = NULL, decider = NULL, error_code = NULL, attempts = 0, dispatch_ms = NULL,
           policy_ids = CASE WHEN c.policy_ids IS NOT NULL THEN ARRAY[]::text[] END
      FROM heads h WHERE h.stream = NEW.stream AND c.stream_no = h.stream_no;
    DELETE FROM acts a USING heads h WHERE h.stream = NEW.stream AND a.stream_no = h.stream_no;
    RETURN NULL;
END
$$;

GRANT SELECT ON tga.acts, tga.act_fold TO tga_gateway;
REVOKE ALL ON FUNCTION tga.is_a_persons, tga.act_in, tga.fold_acts FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.fold_acts TO tga_gateway;
