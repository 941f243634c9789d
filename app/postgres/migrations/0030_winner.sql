-- What stands under a claim, for the caller whose append has lost it: the append's statement brings it along, so that
-- the first repeat of a call at a gateway that does not know its key is one round trip. The same columns as the
-- gateway's own query of a call (app/postgres/traces.py), which reads them in one snapshot, too.
CREATE TYPE tga.recorded_call AS (
    stream text, payload_digest bytea, sealed_salt bytea,
    sequence_number bigint, entry_digest bytea, owner text, waiting text, effect bytea,
    entries bytea[], digests bytea[], artifacts bytea[], times text[], resolution bytea,
    checkpoint_state bytea, checkpoint_digest bytea, checkpoint_sequence bigint,
    has_secrets boolean, is_erased boolean
);

-- Null when its artifacts are larger together than `bytes_max`: many of them may come with one batch. VOLATILE, for a
-- snapshot of its own: that of the statement is older than the append, which may have waited for the winner's commit.
CREATE FUNCTION tga.recorded_call(of_stream text, bytes_max bigint) RETURNS tga.recorded_call
LANGUAGE plpgsql VOLATILE SET search_path = pg_catalog, tga, pg_temp
SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    found_call tga.recorded_call;
BEGIN
    SELECT h.stream, h.payload_digest, s.sealed_salt,
           h.sequence_number, h.entry_digest, h.owner::text, h.waiting, h.effect_digest,
           e.entries, e.digests, e.artifacts, a.times, a.resolution,
           k.checkpoint_state, k.checkpoint_digest, k.sequence_number,
           s.stream IS NOT NULL, r.stream IS NOT NULL
      INTO found_call
      FROM heads h
      LEFT JOIN sealed s ON s.stream = h.stream
      LEFT JOIN erasures r ON r.stream = h.stream
     CROSS JOIN LATERAL (
           SELECT array_agg(e.entry ORDER BY e.sequence_number) AS entries,
                  array_agg(e.entry_digest ORDER BY e.sequence_number) AS digests,
                  array_agg(e.artifact ORDER BY e.sequence_number) AS artifacts
             FROM records e
            WHERE e.stream_no = h.stream_no) AS e
      LEFT JOIN LATERAL (
           SELECT k.* FROM execution_checkpoints k WHERE k.stream = h.stream
            ORDER BY k.sequence_number DESC LIMIT 1) AS k ON true
     CROSS JOIN LATERAL (
           SELECT array_agg(to_char(d.started_at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.MS"Z"')
                            ORDER BY d.attempt) AS times,
                  (array_agg(d.resolution ORDER BY d.attempt DESC)
                   FILTER (WHERE d.resolution IS NOT NULL))[1] AS resolution
             FROM dispatch_attempts d WHERE d.stream = h.stream) AS a
     WHERE h.stream = of_stream;
    IF (SELECT sum(octet_length(u.artifact)) FROM unnest(found_call.artifacts) AS u(artifact)) > bytes_max THEN
        RETURN NULL;
    END IF;
    RETURN found_call;
END
$$;

REVOKE ALL ON FUNCTION tga.recorded_call FROM PUBLIC;
GRANT EXECUTE ON FUNCTION tga.recorded_call TO tga_gateway;
