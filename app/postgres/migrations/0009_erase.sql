-- Erasing payloads of finished streams, on the record.

-- Whose payloads were erased, and where the system stream says so.
CREATE TABLE tga.erasures (
    stream          text COLLATE "C" PRIMARY KEY,
    system_stream   text COLLATE "C" NOT NULL,
    sequence_number bigint NOT NULL,
    -- The erasure says what the claim is (docs/adr/0022-what-an-erasure-says-of-a-claim.md): a digest of its key, and a
    -- commitment to its payload digest, whose salt stays here and is not exported.
    claim_salt      bytea CHECK (octet_length(claim_salt) = 32)
);
CREATE TRIGGER append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON tga.erasures
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.erasures ENABLE ALWAYS TRIGGER append_only;

-- I1: payloads are never changed; they are removed only after their erasure stands on the record, in one transaction.
CREATE FUNCTION tga.guard_erasure() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF EXISTS (SELECT FROM tga.erasures e JOIN tga.heads h ON h.stream = e.stream
                WHERE h.stream_no = OLD.stream_no) THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'tga.payloads is append-only: DELETE refused'
        USING ERRCODE = 'insufficient_privilege', HINT = 'Payloads of finished streams are erased with tga.erase.';
END
$$;
DROP TRIGGER append_only ON tga.payloads;
CREATE TRIGGER append_only BEFORE UPDATE OR TRUNCATE ON tga.payloads
    FOR EACH STATEMENT EXECUTE FUNCTION tga.refuse_change();
ALTER TABLE tga.payloads ENABLE ALWAYS TRIGGER append_only;
CREATE TRIGGER erasure_guard BEFORE DELETE ON tga.payloads FOR EACH ROW EXECUTE FUNCTION tga.guard_erasure();
ALTER TABLE tga.payloads ENABLE ALWAYS TRIGGER erasure_guard;

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
    rule artifact_rules%ROWTYPE;
    appended plan_result;
    said jsonb;
    refusal text[];  -- code, what, expected, found
BEGIN
    PERFORM prepare_transaction(lock_timeout_ms);
    PERFORM pg_advisory_xact_lock(k)
       FROM (SELECT DISTINCT stream_lock_key(s) AS k FROM unnest(ARRAY[stream_erased, system_stream]) AS s
              ORDER BY k) AS keys;
    SELECT * INTO head FROM heads h WHERE h.stream = stream_erased AND h.sequence_number > 0;
    said := convert_from(erasure, 'UTF8')::jsonb;
    SELECT * INTO rule FROM artifact_rules r
     WHERE r.kind = split_part(system_stream, ':', 1) AND r.schema_id = said ->> 'schema_id';
    refusal := CASE
        WHEN head.stream IS NULL THEN
            ARRAY['TRACE_NOT_FOUND', 'the stream has no entries', NULL, NULL]
        WHEN head.is_open THEN
            ARRAY['TRACE_UNFINISHED', 'the stream is not finished', NULL, head.state]
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
        DELETE FROM sealed s WHERE s.stream = stream_erased;
        DELETE FROM outbox o WHERE o.stream = stream_erased;
    END IF;
    RETURN NEXT appended;
END
$$;

REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tga FROM PUBLIC;
GRANT SELECT ON tga.erasures TO tga_gateway;
GRANT EXECUTE ON FUNCTION tga.erase TO tga_gateway;
