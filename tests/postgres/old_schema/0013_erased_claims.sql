-- The claim of an erased stream stays, but the request that made it is gone: nothing showed any more that it was deleted,
-- renamed or changed. So the erasure says what the claim is (docs/adr/0022-what-an-erasure-says-of-a-claim.md): a digest
-- of its key, and a commitment to its payload digest, whose salt stays here and is not exported.
ALTER TABLE tga.erasures ADD COLUMN claim_salt bytea CHECK (octet_length(claim_salt) = 32);

DROP FUNCTION tga.erase;

-- Erase the payloads of a finished stream: the erasure is appended to a system stream, and the payloads go, or neither.
-- Entries, digests, claims and effects' digests stay, and the erasure says what the claim is.
CREATE FUNCTION tga.erase(
    lock_timeout_ms integer, stream_erased text, system_stream text, executor uuid, erasure_entry bytea, erasure bytea,
    claim_salt bytea
) RETURNS SETOF tga.plan_result
LANGUAGE plpgsql SECURITY DEFINER
SET search_path = pg_catalog, tga, pg_temp
AS $$
DECLARE
    head heads%ROWTYPE;
    claim claims%ROWTYPE;
    appended plan_result;
    said jsonb;
    refusal text[];  -- code, what, expected, found
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(k)
       FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(ARRAY[stream_erased, system_stream]) AS s
              ORDER BY k) AS keys;
    SELECT * INTO head FROM heads h WHERE h.stream = stream_erased AND h.sequence_number > 0;
    SELECT * INTO claim FROM claims c WHERE c.stream = stream_erased;
    said := convert_from(erasure, 'UTF8')::jsonb;
    refusal := CASE
        WHEN head.stream IS NULL THEN
            ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
        WHEN head.is_open THEN
            ARRAY['TRACE_UNFINISHED', 'the stream is not finished', NULL, head.state]
        WHEN EXISTS (SELECT FROM erasures e WHERE e.stream = stream_erased) THEN
            ARRAY['TRACE_ERASED', 'the payloads were erased before', NULL, NULL]
        WHEN said ->> 'erased_stream' IS DISTINCT FROM stream_erased
             OR said ->> 'schema_id' IS DISTINCT FROM 'tga/v1/erasure' THEN
            ARRAY['SCHEMA_VIOLATION', 'the erasure names another stream', stream_erased, NULL]
        -- RFC 8785 of the key: names in order, strings as to_json writes them. Null is distinct from nothing but itself.
        WHEN said #>> '{claim,key_digest}' IS DISTINCT FROM encode(sha256(convert_to(
                 '{"idempotency_key":' || to_json(claim.idempotency_key) || ',"server_id":' || to_json(claim.server_id)
                 || ',"tool_name":' || to_json(claim.tool_name) || '}', 'UTF8')), 'hex')
             OR said #>> '{claim,payload_commitment}'
                IS DISTINCT FROM encode(sha256(claim_salt || claim.payload_digest), 'hex') THEN
            ARRAY['STATE_RECOVERY_FAILED', 'the erasure does not say what the stream''s claim is',
                  claim.idempotency_key, said ->> 'claim']
    END;
    IF refusal IS NOT NULL THEN
        RETURN QUERY SELECT 1, refusal[1], NULL::bigint, refusal[2], refusal[3], refusal[4], NULL, NULL::bytea;
        RETURN;
    END IF;
    SELECT * INTO appended FROM append(
        lock_timeout_ms, ARRAY[system_stream], ARRAY[executor], ARRAY[NULL::uuid], ARRAY[NULL::text],
        ARRAY[1], ARRAY[erasure_entry], ARRAY[erasure], '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}',
        '{}', '{}', '{}', '{}', '{}', '{}');
    IF appended.code IS NULL THEN
        INSERT INTO erasures (stream, system_stream, sequence_number, claim_salt)
        SELECT stream_erased, system_stream, h.sequence_number, erase.claim_salt
          FROM heads h WHERE h.stream = system_stream;
        DELETE FROM artifacts a WHERE a.stream = stream_erased;
        DELETE FROM sealed s WHERE s.stream = stream_erased;
        DELETE FROM outbox o WHERE o.stream = stream_erased;
    END IF;
    RETURN NEXT appended;
END
$$;

REVOKE ALL ON FUNCTION tga.erase FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.erase TO tga_gateway;
