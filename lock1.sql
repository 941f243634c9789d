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
BEGIN IF pg_advisory_xact_lock(stream_lock_key(p_stream[1])) IS NULL THEN END IF; RETURN; END
$$;
REVOKE ALL ON FUNCTION tga.append FROM PUBLIC; GRANT EXECUTE ON FUNCTION tga.append TO tga_gateway;