DROP FUNCTION tga.append;
CREATE FUNCTION tga.append(
    lock_timeout_ms integer,
    p_stream text[], p_executor uuid[], p_owner_after uuid[], p_waiting_after text[],
    e_plan integer[], e_entry bytea[], e_artifact bytea[],
    c_plan integer[], c_server text[], c_tool text[], c_key text[], c_payload bytea[],
    k_plan integer[], k_state bytea[], k_created_at text[],
    d_plan integer[], d_attempt integer[], d_resolution bytea[],
    s_plan integer[], s_salt bytea[], s_values bytea[], f_plan integer[],
    o_plan integer[], o_webhook text[]
) RETURNS SETOF tga.plan_result LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, tga, pg_temp SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off SET jit = off SET plan_cache_mode = force_generic_plan AS $$

DECLARE e_stream text[]; e_digest bytea[]; e_seq bigint[];
BEGIN
 IF c_plan <> '{}' THEN
 SELECT array_agg(p_stream[plan]), array_agg(sha256(e)), array_agg(1+(o-1)%3) INTO e_stream, e_digest, e_seq FROM unnest(e_plan, e_entry) WITH ORDINALITY AS u(plan, e, o);
 ELSE
 SELECT array_agg(p_stream[plan]), array_agg(sha256(e)), array_agg(4) INTO e_stream, e_digest, e_seq FROM unnest(e_plan, e_entry) WITH ORDINALITY AS u(plan, e, o);
 END IF;
 IF c_plan <> '{}' THEN
 INSERT INTO claims (server_id, tool_name, idempotency_key, stream, payload_digest)
        SELECT u.server, u.tool, u.key, p_stream[u.plan], u.payload
          FROM unnest(c_plan, c_server, c_tool, c_key, c_payload) AS u(plan, server, tool, key, payload)
         ORDER BY u.server COLLATE "C", u.tool COLLATE "C", u.key COLLATE "C"
            ON CONFLICT DO NOTHING;
 END IF;
 INSERT INTO entries (stream, sequence_number, entry, entry_digest) SELECT unnest(e_stream), unnest(e_seq), unnest(e_entry), unnest(e_digest);
 INSERT INTO artifacts (stream, sequence_number, artifact) SELECT unnest(e_stream), unnest(e_seq), unnest(e_artifact);
 INSERT INTO heads AS h (stream, sequence_number, entry_digest, state, artifact_digest, owner, waiting,
                            tenant, principal_id, server_id, tool_name, expires_at, is_open)
    SELECT s, CASE WHEN c_plan='{}' THEN 4 ELSE 3 END, e_digest[p], 'EXECUTING', e_digest[p],
           o, w,
           'default', 'agent-1', 'crm', 'create_ticket', null, o is not null
      FROM unnest(p_stream, p_owner_after, p_waiting_after) WITH ORDINALITY AS u(s, o, w, p)
        ON CONFLICT (stream) DO UPDATE
       SET sequence_number = excluded.sequence_number, entry_digest = excluded.entry_digest, state = 'COMPLETED',
           artifact_digest = excluded.artifact_digest, owner = excluded.owner, waiting = excluded.waiting,
           is_open = excluded.is_open, updated_at = clock_timestamp();
 INSERT INTO claim_effects (stream, artifact_digest) SELECT unnest(p_stream), unnest(e_digest) WHERE c_plan='{}';
 IF k_plan <> '{}' THEN
 INSERT INTO execution_checkpoints (stream, sequence_number, checkpoint_state, checkpoint_digest, created_at)
        SELECT p_stream[u.plan], 3, u.state, sha256(u.state), u.created_at
          FROM unnest(k_plan, k_state, k_created_at) AS u(plan, state, created_at) 
            ON CONFLICT DO NOTHING;
 END IF;
 RETURN; END
$$;
REVOKE ALL ON FUNCTION tga.append FROM PUBLIC; GRANT EXECUTE ON FUNCTION tga.append TO tga_gateway;